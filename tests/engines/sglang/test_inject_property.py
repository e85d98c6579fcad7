"""Whatever happens in whatever order: every slot has one owner, and the tree holds true KV.

SGLang's own work, ingests in steps and whole ones, evictions and flushes, on the real classes of every kind,
with a real daemon.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from inject_stage import STEP_BYTES, Stage, serving
from sglang_cases import KINDS, kind_id, tree_slots

from snapd.engines.sglang_inject import Injection
from snapd.errors import Reason
from tests.integration.daemon_process import DaemonProcess

pytestmark = [pytest.mark.usefixtures("sglang"), pytest.mark.timeout(600)]
SIZE_TOKENS = 192
NUM_SESSIONS = 2
# Ends of turns, most of them in the middle of a page.
LENGTHS = st.integers(1, 100) | st.sampled_from((16, 32, 48, 64))
# Two ways in which each session may go on; they share what came before.
FORK_TOKENS = 40


def session_tokens(session: int, way: int, num_tokens: int) -> tuple[int, ...]:
    common = tuple(1_000 * session + index for index in range(min(FORK_TOKENS, num_tokens)))
    return common + tuple(10_000 * (way + 1) + index for index in range(len(common), num_tokens))


@pytest.fixture(scope="module")
def daemon(sglang: None) -> Iterator[DaemonProcess]:
    with serving() as daemon:
        yield daemon


class Machine(RuleBasedStateMachine):
    """P of one kind. ``kind`` and ``daemon`` are set by the test."""

    kind: Any
    daemon: DaemonProcess
    seen: Counter[str]
    sessions = st.integers(0, NUM_SESSIONS - 1)
    ways = st.integers(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(self.daemon, self.kind, size=SIZE_TOKENS)
        self.p = self.stage.p
        self.names = itertools.count()
        self.ready: dict[str, Any] = {}
        self.open: dict[str, Injection] = {}
        self.known = {session_tokens(s, w, 100) for s in range(NUM_SESSIONS) for w in range(2)}

    # --- P's own

    @rule(session=sessions, way=ways, length=LENGTHS)
    def compute(self, session: int, way: int, length: int) -> None:
        tokens = session_tokens(session, way, length)
        missing = self.p.whole(length) - len(tree_slots(self.p.tree, tokens))
        if missing > self.p.available:
            self.p.evict(missing - self.p.available)
            missing = self.p.whole(length) - len(tree_slots(self.p.tree, tokens))
        if 0 < missing <= self.p.available:
            self.p.compute(tokens)

    @rule(left=st.integers(0, 60))
    def crowd(self, left: int) -> None:
        """Requests of P's take all but a few slots."""
        num_tokens = self.p.whole(self.p.available - left)
        if num_tokens > 0:
            self.p.hold(f"own {next(self.names)}", num_tokens)

    @rule(index=st.integers(0, 9))
    def release(self, index: int) -> None:
        if self.p.held:
            self.p.release(sorted(self.p.held)[index % len(self.p.held)])

    @rule(num_tokens=st.integers(1, SIZE_TOKENS))
    def evict(self, num_tokens: int) -> None:
        self.p.evict(num_tokens)

    @rule(unless=st.integers(0, 3))
    def flush(self, unless: int) -> None:
        if unless:
            return
        self.p.flush()
        # Before the next batch every ingest under way takes a step.
        for name in list(self.open):
            self.step(name)

    # --- ingests

    @rule(
        session=sessions,
        way=ways,
        length=LENGTHS,
        sent=st.sampled_from(("all", "what P lacks", "any suffix")),
        how=st.sampled_from(("overtaken", "at once", "in steps", "overtaken", "later")),
        number=st.integers(0, 100),
    )
    def turn(self, session: int, way: int, length: int, sent: str, how: str, number: int) -> None:
        """D pushes, and P ingests it in one of four ways."""
        tokens = session_tokens(session, way, length)
        resident = len(tree_slots(self.p.tree, tokens))
        start = {"all": 0, "what P lacks": resident, "any suffix": number}[sent]
        start = self.p.whole(min(start, length - 1))
        name = f"s{session}"
        self.ready[name] = pushed = (name, tokens, start, self.stage.ready(name, tokens, start))
        if how == "at once":
            self.ingest(pushed)
        elif how == "in steps":
            self.start(pushed)
        elif how == "overtaken":
            self.overtake(pushed, number)

    @rule(name=sessions.map(lambda session: f"s{session}"))
    def retry(self, name: str) -> None:
        """What D pushed last may still be READY."""
        if name in self.ready and name not in self.open:
            self.ingest(self.ready[name])

    def ingest(self, pushed: Any) -> None:
        name, tokens, start, handle = pushed
        if name in self.open:
            return
        resident = len(tree_slots(self.p.tree, tokens))
        result = self.stage.ingest(name, tokens, handle)
        self.ended(name, result.reason)
        if resident < start:
            assert result.reason is Reason.PREFIX_NOT_RESIDENT
        if result.ok:
            assert self.p.resident(tokens) == self.p.whole(len(tokens))

    def start(self, pushed: Any) -> None:
        name, tokens, _, handle = pushed
        if name not in self.open:
            job = self.p.injector.start(self.stage.request(name, tokens, handle))
            self.open[name] = job
            if job.done:
                self.step(name)

    def overtake(self, pushed: Any, length: int) -> None:
        """P computes a part of what is being ingested, and is done first."""
        name, tokens, *_ = pushed
        self.start(pushed)
        own = tokens[:length]
        missing = self.p.whole(len(own)) - len(tree_slots(self.p.tree, own))
        if 0 < missing <= self.p.available:
            self.p.compute(own)
            self.seen["overtaken"] += name in self.open
        while name in self.open:
            self.step(name)

    def step(self, name: str, max_bytes: int = STEP_BYTES) -> None:
        job = self.open[name]
        job.step(max_bytes)
        while not job.done and job._job.is_waiting:
            # The daemon's answer comes when it comes; what happens next must not depend on that.
            job.wait()
        if job.done:
            self.ended(name, self.open.pop(name).result.reason)

    def ended(self, name: str, reason: Reason) -> None:
        self.seen[reason] += 1
        if reason not in (Reason.ALLOC_FAILED_ON_FINALIZE, Reason.PREFIX_NOT_RESIDENT):
            self.ready.pop(name, None)

    @rule(index=st.integers(0, 9), max_bytes=st.sampled_from((1, STEP_BYTES)))
    def go_on(self, index: int, max_bytes: int) -> None:
        if self.open:
            self.step(sorted(self.open)[index % len(self.open)], max_bytes)

    @rule(index=st.integers(0, 9))
    def give_up(self, index: int) -> None:
        if self.open:
            name = sorted(self.open)[index % len(self.open)]
            assert self.open[name].cancel()
            del self.open[name]

    # --- what always holds

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        self.p.check(under_way=self.lent())

    def lent(self) -> list[torch.Tensor]:
        return [whole_pages(slots, self.p.page) for slots, _ in self.p.injector._owner._lent.values()]

    @invariant()
    def nothing_is_pinned_but_by_ingests(self) -> None:
        if not self.open:
            assert (self.p.pinned(), self.p.injector.lent_tokens) == (0, 0)

    @invariant()
    def the_tree_holds_true_kv(self) -> None:
        for tokens in self.known:
            self.p.resident(tokens)

    def teardown(self) -> None:
        try:
            for job in self.open.values():
                while not job.step(STEP_BYTES):
                    job.wait()
            self.open.clear()
            self.every_slot_has_one_owner()
            self.nothing_is_pinned_but_by_ingests()
            self.the_tree_holds_true_kv()
            self.p.held.clear()
            self.p.evict()
        finally:
            self.stage.close()


def whole_pages(slots: torch.Tensor, page: int) -> torch.Tensor:
    starts = slots[::page] // page * page
    return (starts[:, None] + torch.arange(page)).flatten()


@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_every_slot_has_one_owner_and_the_tree_holds_true_kv(kind: Any, daemon: DaemonProcess) -> None:
    seen: Counter[str] = Counter()
    machine = type("Machine", (Machine,), {"kind": kind, "daemon": daemon, "seen": seen})
    run_state_machine_as_test(
        # Other things happen to every kind, and the same ones every time.
        seed(KINDS.index(kind))(machine),
        settings=settings(
            max_examples=16,
            stateful_step_count=40,
            deadline=None,
            database=None,
            # An example is short enough to be read, and to make it shorter takes minutes.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    # It has been where the interesting things happen.
    for what in (Reason.OK, "overtaken"):
        assert seen[what] >= 1, f"{what}: {seen}"

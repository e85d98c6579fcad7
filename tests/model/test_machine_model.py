"""The whole machine against a naive model that keeps plain dicts and scans all of them every time.

What the model says about a message is compared with what the machine answers, and what it holds with what
the machine holds, after every step. The driver adds its own checks: ``validate()`` and the proof by the
log alone after every event, and at the end that nothing is left.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from core_driver import UNIT, Driver, layout_of
from naive_machine import BOUNDS, LAYOUTS, OPEN, PAGE_TOKENS, TIMES_MS, UNITS, Model

from snapd.core import events as e
from snapd.core.events import State
from snapd.core.eviction import POLICIES
from snapd.errors import Reason
from snapd.units import NS_PER_MS

# More for a long run by hand, fewer for a quick look.
EXAMPLES = int(os.environ.get("SNAPD_MODEL_EXAMPLES", "200"))


def short(result: Any) -> tuple[Any, ...]:
    """Return an answer as the model gives it."""
    match result:
        case None:
            return ("waits",)
        case e.Accepted():
            return ("accepted", str(result.state) if result.state else None, result.pending)
        case e.Refused():
            return ("refused", str(result.reason))
        case e.Granted():
            return ("granted", result.token_start, result.num_tokens, result.resident_hint_tokens)
        case e.Leased():
            return ("leased", result.lease_id, result.deadline_ns)
        case e.Decided():
            return ("decided", result.commit, str(result.reason), str(result.state))
        case e.Found():
            return ("found", result.slab_handle, result.matched_tokens, result.resident_hint_tokens)
    raise AssertionError(result)


names = st.sampled_from(["a", "b", "c"])
fingerprints = st.sampled_from([*[key for key in LAYOUTS for _ in range(2)][:6], list(LAYOUTS)[3]])
chains = st.sampled_from([(), ("1",), ("1", "2"), ("1", "2", "3"), ("1", "x"), ("y",)])
pick = st.integers(0, 30)
mostly = st.sampled_from([True] * 7 + [False])
seldom = st.sampled_from([False] * 7 + [True])
no_reasons = st.sampled_from([
    Reason.ALLOC_FAILED_ON_FINALIZE, Reason.ALLOC_FAILED_ON_FINALIZE, Reason.PREFIX_NOT_RESIDENT,
    Reason.CHECKSUM_MISMATCH, Reason.TOKEN_MISMATCH, Reason.INGEST_FAILED, Reason.CLIENT_ABORT,
])  # fmt: skip


class WholeMachine(RuleBasedStateMachine):
    """Posts the same messages to both, and compares everything.

    The model knows one order of victims. With another policy it takes the order from the machine, and knows
    what the victims are and which of them must go; the orders have models of their own.
    """

    policy = "lru"

    @initialize(ranks=st.integers(1, 3))
    def begin(self, ranks: int) -> None:
        fast = {"transfer_min_mb_per_s": 1 << 30}
        others = {**TIMES_MS, **BOUNDS, **fast, "eviction_policy": self.policy}
        self.drive = Driver(ranks, units=UNITS, layouts=tuple(LAYOUTS.values()), **others)
        self.model = Model(ranks)
        self.handles: list[int] = []
        self.lease_ids: list[tuple[int, int, int]] = []
        self.causes: list[int] = []

    # --- helpers of the comparison

    def handle(self, choice: int, state: str = "") -> int:
        """Prefer recent attempts in a state, made if there is none; sometimes any, or an unknown one."""
        if choice % 5 and state and not self.in_state(state):
            self.make(choice, state)
        wanted = self.in_state(state)
        if wanted and choice % 5:
            return wanted[-1 - choice % len(wanted)]
        return self.handles[-1 - choice % len(self.handles)] if self.handles and choice < 28 else 7

    def victims(self) -> list[int]:
        return list(self.drive.machine.books.victims.victims())

    def in_state(self, state: str) -> list[int]:
        return [handle for handle in self.handles if self.model.tries[handle].state == state]

    def make(self, choice: int, state: str) -> None:
        """Try to bring an attempt into a state: each rule by itself would need luck."""
        layout = list(LAYOUTS)[choice % 3]
        keys = (("1", "2"), ("1", "x"), ())[choice % 3]
        before = len(self.handles)
        self.prepare("abc"[choice % 2], layout, 0, 8, keys, choice % 7 == 0, choice % 3, 0, False, False)
        if len(self.handles) == before or state == "RESERVED":
            return
        handle = self.handles[-1]
        if state == "ABORTED":
            self.abort_one(handle, drained=False)
            return
        if choice % 3:
            self.start_one(handle)
        ranks = self.model.tries[handle].ranks
        for rank in ranks if state != "TRANSFERRING" else ranks[1:]:
            self.commit_one(handle, rank, 0, 0, 0, (choice + rank) % 4 > 0)
        for rank in ranks if state == "INGESTED" else ():
            self.lease_one(handle, rank, True)
        for rank in ranks if state == "INGESTED" else ():
            self.vote_one(handle, rank, self.lease_ids[-1 - rank][2], True, Reason.OK, False)

    def rank(self, choice: int) -> int:
        return choice % (len(self.drive.ranks) + 1) if choice > 25 else choice % len(self.drive.ranks)

    def settle_time(self) -> int:
        """Let the model's clock be where the driver's will be at the next post."""
        self.model.now_ns = self.drive.now_ns + 1
        return self.drive.cause_id + 1

    def agree_on(self, expected: tuple[Any, ...], result: Any) -> None:
        assert short(result) == expected
        for handle, one in self.model.tries.items():
            if one.state == "READY" and handle not in self.model.ready_order:
                self.model.ready_order.append(handle)

    # --- rules

    @rule(
        name=names, layout=fingerprints, pages=st.integers(0, 3), count=st.integers(1, 12), keys=chains,
        hint=st.booleans(), writer=st.integers(0, 2), subset=pick, odd=seldom, reuse=seldom,
    )  # fmt: skip
    def prepare(
        self, name: str, layout: str, pages: int, count: int, keys: tuple[str, ...], hint: bool, writer: int,
        subset: int, odd: bool, reuse: bool,
    ) -> None:  # fmt: skip
        ranks: tuple[int, ...] = () if subset < 22 else (self.rank(subset),)
        start = pages * PAGE_TOKENS + odd
        keys = keys[: (start + count) // PAGE_TOKENS]
        handle = self.drive.handle + 1
        if reuse and self.handles:
            handle = self.handles[subset % len(self.handles)]
            if self.model.remembered(handle) is None and not any(h == handle for h, _ in self.model.kept):
                return  # A handle that nothing is known of any more is the shell's to avoid.
        self.settle_time()
        if self.policy != "lru":
            self.model.used = self.victims()
        expected = self.model.prepare(
            handle, (layout, name), start, count, ranks, keys=keys, hint=hint, writer=writer
        )
        result = self.drive.prepare(
            name, count, slab_handle=handle, layout_fingerprint=layout, token_start=start, page_keys=keys,
            ranks=ranks, use_resident_hint=hint, writer_id=writer, conn_id=1,
        )  # fmt: skip
        self.drive.handle = max(self.drive.handle, handle)
        if isinstance(result, e.Granted):
            self.handles.append(handle)
        self.agree_on(expected, result)

    @rule(choice=pick)
    def whole_life(self, choice: int) -> None:
        self.make(choice, "INGESTED" if choice % 2 else "READY")

    @rule(choice=pick)
    def start(self, choice: int) -> None:
        self.start_one(self.handle(choice, "RESERVED"))

    def start_one(self, handle: int) -> None:
        self.settle_time()
        self.agree_on(self.model.start(handle), self.drive.start(handle))

    @rule(
        choice=pick, which=pick, drained=st.booleans(),
        off=st.sampled_from([(0, 0, 0)] * 12 + [(1, 0, 0), (0, 1, 0), (0, 0, 1)]),
    )  # fmt: skip
    def commit(self, choice: int, which: int, drained: bool, off: tuple[int, int, int]) -> None:
        handle = self.handle(choice, "TRANSFERRING" if choice % 2 else "RESERVED")
        self.commit_one(handle, self.rank(which), *off, drained)

    def commit_one(
        self, handle: int, rank: int, bytes_off: int, tokens_off: int, sums: int, drained: bool
    ) -> None:
        one = self.model.tries.get(handle)
        layout = LAYOUTS[one.name[0]] if one else layout_of()
        num_tokens = one.tokens[1] if one else 1
        self.settle_time()
        expected = self.model.commit(handle, rank, bytes_off, tokens_off, sums, drained)
        result = self.drive.post(
            e.RankCommitted, slab_handle=handle, rank=rank, num_tokens=num_tokens + tokens_off,
            num_bytes=num_tokens * layout.token_bytes + bytes_off,
            checksums=((1, 2),) * (layout.num_planes + sums), drained=drained, conn_id=2,
        )  # fmt: skip
        self.agree_on(expected, result)

    @rule(
        choice=pick, which=st.none() | pick, drained=st.booleans(),
        reason=st.sampled_from([Reason.TRANSFER_FAILED, Reason.SESSION_NOT_RESIDENT, Reason.EVICTED]),
    )  # fmt: skip
    def fail(self, choice: int, which: int | None, drained: bool, reason: Reason) -> None:
        handle = self.handle(choice, "TRANSFERRING" if choice % 2 else "ABORTED")
        rank = None if which is None else self.rank(which)
        self.settle_time()
        expected = self.model.fail(handle, rank, str(reason), drained)
        self.agree_on(expected, self.drive.fail(handle, rank=rank, drained=drained, reason=reason))

    @rule(choice=pick, drained=st.booleans())
    def abort(self, choice: int, drained: bool) -> None:
        self.abort_one(self.handle(choice, ["READY", "ABORTED", "TRANSFERRING"][choice % 3]), drained)

    def abort_one(self, handle: int, drained: bool) -> None:
        self.settle_time()
        self.agree_on(self.model.abort(handle, drained), self.drive.abort(handle, drained=drained))

    @rule(choice=pick, which=st.none() | pick)
    def drained(self, choice: int, which: int | None) -> None:
        kept = sorted({handle for handle, _ in self.model.kept})
        unsafe = [handle for handle, one in self.model.tries.items() if one.unsafe and one.state in OPEN]
        about = unsafe if unsafe and choice % 3 == 0 else kept
        handle = about[choice % len(about)] if about and choice % 4 else self.handle(choice)
        rank = None if which is None else self.rank(which)
        self.settle_time()
        self.agree_on(self.model.drained(handle, rank), self.drive.drained(handle, rank=rank))

    @rule(choice=pick, which=pick, right=mostly)
    def lease(self, choice: int, which: int, right: bool) -> None:
        self.lease_one(self.handle(choice, "READY"), self.rank(which), right)

    def lease_one(self, handle: int, rank: int, right: bool) -> None:
        one = self.model.tries.get(handle)
        name = one.name[0] if one and right else "wrong"
        self.settle_time()
        result = self.drive.lease(handle, rank, layout_fingerprint=name, conn_id=10 + rank)
        lease_id = result.lease_id if isinstance(result, e.Leased) else 0
        self.agree_on(self.model.lease(handle, rank, right, lease_id), result)
        if lease_id and (handle, rank, lease_id) not in self.lease_ids:
            assert lease_id not in [x for _, _, x in self.lease_ids], "never used again"
            self.lease_ids.append((handle, rank, lease_id))

    def reading(self) -> list[tuple[int, int, int]]:
        """Return handle, rank and lease id of everybody who has not voted."""
        return [
            (handle, rank, reader.lease_id)
            for handle, one in self.model.tries.items()
            for rank, reader in one.readers.items()
            if not reader.causes
        ]

    @rule(
        choice=pick,
        which=pick,
        exact=mostly,
        ok=st.sampled_from([True, True, False]),
        reason=no_reasons,
        keep=st.booleans(),
    )
    def vote(self, choice: int, which: int, exact: bool, ok: bool, reason: Reason, keep: bool) -> None:
        if not self.reading() or choice % 9 == 0:
            handle = self.handle(choice, "READY")
            for rank in self.drive.ranks:
                self.lease_one(handle, rank, True)
        if not self.lease_ids:
            return
        handle, rank, lease_id = self.lease_ids[-1 - choice % min(len(self.lease_ids), 8)]
        if not exact:
            rank = self.rank(which)
            lease_id = self.lease_ids[which % len(self.lease_ids)][2] if which % 3 else 0
        self.vote_one(handle, rank, lease_id, ok, reason, keep)

    def vote_one(self, handle: int, rank: int, lease_id: int, ok: bool, reason: Reason, keep: bool) -> None:
        cause_id = self.settle_time()
        expected = self.model.vote(handle, rank, lease_id, ok, str(reason), keep, cause_id)
        self.agree_on(expected, self.drive.vote(handle, rank, lease_id, ok, reason=reason, keep=keep))

    @rule(flip=pick)
    def everybody_votes(self, flip: int) -> None:
        """Every open lease, one after the other; one of them may say no and keep the snapshot."""
        if not self.reading():
            handle = self.handle(flip, "READY")
            for rank in self.drive.ranks:
                self.lease_one(handle, rank, True)
        for index, (handle, rank, lease_id) in enumerate(self.reading()):
            ok = index != flip
            self.vote_one(handle, rank, lease_id, ok, Reason.ALLOC_FAILED_ON_FINALIZE, True)

    @rule(name=names | st.just(""), layout=fingerprints, keys=chains, resident=st.sampled_from([0, 0, 4, 8]))
    def look_up(self, name: str, layout: str, keys: tuple[str, ...], resident: int) -> None:
        self.settle_time()
        expected = self.model.look_up((layout, name), keys, resident)
        result = self.drive.look_up(name, layout_fingerprint=layout, page_keys=keys, resident_tokens=resident)
        self.agree_on(expected, result)

    @rule(writer=st.integers(1, 2), drained=st.booleans())
    def writer_gone(self, writer: int, drained: bool) -> None:
        self.settle_time()
        self.model.writer_gone(writer, drained)
        self.drive.tell(e.WriterGone, writer_id=writer, drained=drained)

    @rule(duration_ms=st.sampled_from([1, 100, 500, 699, 700, 1_000, 2_000, 4_999, 9_000, 20_000]))
    def advance(self, duration_ms: int) -> None:
        self.model.advance_to(self.drive.now_ns + duration_ms * NS_PER_MS)
        self.drive.advance(duration_ms)

    @precondition(lambda self: self.drive.timers)
    @rule(choice=pick)
    def a_timer_fires_early(self, choice: int) -> None:
        keys = list(self.drive.timers)
        self.drive.fire(keys[choice % len(keys)])

    @rule(draining=seldom)
    def drain(self, draining: bool) -> None:
        self.model.draining = draining
        self.drive.post(e.DrainAsked, draining=draining)

    @rule(really=st.integers(0, 29))
    def stop(self, really: int) -> None:
        if really == 0:
            self.settle_time()
            self.model.stop()
            self.drive.post(e.StopAsked)
            self.drain(False)

    # --- comparison

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "model"):
            return
        machine, model = self.drive.machine, self.model
        for handle, one in model.tries.items():
            session = machine.books.find(handle)
            assert (session is None) is (model.remembered(handle) is None)
            if session is None:
                continue
            assert (session.state, session.reason) == (one.state, one.reason), handle
            assert (session.token_start, session.num_tokens) == one.tokens
            if one.state in OPEN:
                assert {r for r, shard in session.shards.items() if shard.is_committed} == one.done
                assert {r for r, shard in session.shards.items() if shard.is_drained} == one.done - one.unsafe
                assert (session.abort_wanted or "") == one.wanted
                leases = {r: shard.lease for r, shard in session.shards.items() if shard.lease}
                assert {r: (x.lease_id, x.deadline_ns, x.has_voted) for r, x in leases.items()} == {
                    r: (x.lease_id, x.until_ns, bool(x.causes)) for r, x in one.readers.items()
                }
        statistics = machine.statistics()
        for view in statistics.arenas:
            assert view.free_bytes == model.free(view.rank) * UNIT
            assert view.live_bytes == model.live(view.rank) * UNIT
            assert view.quarantined_bytes == model.quarantined(view.rank) * UNIT
            evictable = [model.tries[h] for h in model.used if view.rank in model.tries[h].ranks]
            assert view.evictable_bytes == sum(map(model.units_of, evictable)) * UNIT
        assert (
            self.victims() == model.used if self.policy == "lru" else set(self.victims()) == set(model.used)
        )
        kept = {
            (handle, rank): (item.until_ns, item.why)
            for handle, by_rank in machine.books.buffer.quarantine.items()
            for rank, item in by_rank.items()
        }
        assert kept == {key: (x.until_ns, x.why) for key, x in model.kept.items()}
        assert machine.books.directory._hints == model.hints
        assert statistics.outcomes_by_reason == model.outcomes
        for cause_id, answer in model.late.items():
            assert short(self.drive.answer(cause_id)) == answer

    def teardown(self) -> None:
        if hasattr(self, "drive"):
            self.drive.close()


TestWholeMachine = WholeMachine.TestCase
TestWholeMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "lru"])
def test_other_orders_of_victims_change_nothing_else(policy: str) -> None:
    kind = type(f"Whole_{policy}", (WholeMachine,), {"policy": policy})
    few = settings(max_examples=max(EXAMPLES // 8, 4), stateful_step_count=40, deadline=None)
    run_state_machine_as_test(kind, settings=few)


def test_the_states_of_the_model_are_those_of_the_machine() -> None:
    assert set(OPEN) | {"INGESTED", "ABORTED"} == {str(state) for state in State}

"""The whole machine against a naive model that keeps plain dicts and scans all of them every time.

The model is written from the design, not from the code: what it says about a message is compared with
what the machine answers, and what it holds with what the machine holds, after every step. Planes take one
unit of the arena each, so what fits is a sum. The driver adds its own checks: ``validate()`` and the proof
by the log alone after every event, and at the end that nothing is left.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from core_driver import UNIT, Driver, layout_of

from snapd.core import events as e
from snapd.core.events import State
from snapd.errors import Reason
from snapd.layout import Layout, fingerprint
from snapd.units import NS_PER_MS

UNITS = 8
PAGE_TOKENS = 4
# Two that are small, of two namespaces, one that fills an arena by half, one that never fits.
LAYOUTS: dict[str, Layout] = {
    fingerprint(layout): layout
    for layout in (layout_of(2), layout_of(1, model="other"), layout_of(4), layout_of(UNITS + 1))
}
TIMES_MS = {
    "reserve_timeout_ms": 1_000,
    "transfer_timeout_ms": 2_000,
    "ready_ttl_ms": 10_000,
    "lease_ms": 700,
    "quarantine_ms": 5_000,
}
BOUNDS = {"sessions_max": 5, "ended_history_max": 6, "session_history_max": 2, "layouts_max": 9}
# More for a long run by hand, fewer for a quick look.
EXAMPLES = int(os.environ.get("SNAPD_MODEL_EXAMPLES", "300"))
OPEN = ("RESERVED", "TRANSFERRING", "READY")


@dataclass
class Reader:
    """One rank's lease."""

    lease_id: int
    round: int
    until_ns: int
    causes: list[int] = field(default_factory=list)


@dataclass
class Try:
    """One attempt, as the design tells it."""

    name: tuple[str, str]
    tokens: tuple[int, int]
    ranks: tuple[int, ...]
    keys: tuple[str, ...]
    writer: int
    state: str = "RESERVED"
    reason: str = "ok"
    until_ns: int = 0
    done: set[int] = field(default_factory=set)
    readers: dict[int, Reader] = field(default_factory=dict)
    round: int = 1
    wanted: str = ""
    said: dict[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)


@dataclass
class Kept:
    """One rank's bytes in quarantine."""

    units: int
    until_ns: int
    why: str
    writer: int
    lease_id: int = 0


class Model:
    """What the design says, in dicts."""

    def __init__(self, ranks: int) -> None:
        self.ranks = tuple(range(ranks))
        self.tries: dict[int, Try] = {}
        self.order: list[int] = []  # Ended attempts, oldest first.
        self.kept: dict[tuple[int, int], Kept] = {}
        self.used: list[int] = []  # READY and unleased, least recently used first.
        self.hints: dict[tuple[str, str], int] = {}
        self.newest_ready: dict[tuple[str, str], int] = {}
        self.outcomes: dict[str, int] = {}
        self.late: dict[int, tuple[Any, ...]] = {}  # Answers to votes that had to wait.
        self.draining = False
        self.now_ns = 0

    # --- sums

    def units_of(self, one: Try) -> int:
        return LAYOUTS[one.name[0]].num_planes

    def live(self, rank: int) -> int:
        return sum(self.units_of(x) for x in self.tries.values() if x.state in OPEN and rank in x.ranks)

    def quarantined(self, rank: int) -> int:
        return sum(kept.units for (_, of), kept in self.kept.items() if of == rank)

    def free(self, rank: int) -> int:
        return UNITS - self.live(rank) - self.quarantined(rank)

    # --- ends

    def end(
        self, handle: int, state: str, reason: str, drained: set[int] | None = None, corrupt: int | None = None
    ) -> None:
        one = self.tries[handle]
        reading = {rank: x for rank, x in one.readers.items() if not x.causes}
        for rank in list(one.readers):
            self.end_read(one, rank, reason, state)
        if one.state == "READY" and self.newest_ready.get(one.name) == handle:
            del self.newest_ready[one.name]
        one.state, one.reason = state, reason
        for rank in one.ranks:
            time_ns = self.now_ns + TIMES_MS["quarantine_ms"] * NS_PER_MS
            units = self.units_of(one)
            if rank == corrupt:
                self.kept[handle, rank] = Kept(units, time_ns, "corrupt", one.writer)
            elif rank in reading:
                x = reading[rank]
                self.kept[handle, rank] = Kept(units, x.until_ns, "leased", one.writer, x.lease_id)
            elif rank not in one.done and rank not in (drained or set()):
                self.kept[handle, rank] = Kept(units, time_ns, "undrained", one.writer)
        self.outcomes[reason] = self.outcomes.get(reason, 0) + 1
        self.used = [x for x in self.used if x != handle]
        self.order.append(handle)

    def remembered(self, handle: int) -> Try | None:
        one = self.tries.get(handle)
        if one is None or one.state in OPEN or handle in self.order[-BOUNDS["ended_history_max"] :]:
            return one
        return None

    def end_read(self, one: Try, rank: int, reason: str, state: str) -> None:
        reader = one.readers.pop(rank)
        answer = ("decided", reason == "ok", reason, state)
        for cause_id in reader.causes:
            self.late[cause_id] = answer
        if reader.causes:
            one.said["vote", rank, reader.lease_id, True] = answer

    def nobody_reads(self, handle: int) -> None:
        """A lease has ended: do what waits for it, or make the snapshot evictable."""
        one = self.tries[handle]
        if one.readers:
            return
        if one.wanted:
            self.end(handle, "ABORTED", one.wanted)
        else:
            self.use(handle)

    def use(self, handle: int) -> None:
        self.used = [x for x in self.used if x != handle] + [handle]

    def end_round(self, one: Try, reason: str) -> None:
        """Everybody who has voted hears that it is off; who reads still has not heard."""
        one.round += 1
        state = self.after(one)
        for rank in [rank for rank, x in one.readers.items() if x.causes]:
            self.end_read(one, rank, reason, state)

    def after(self, one: Try) -> str:
        still = any(not x.causes for x in one.readers.values())
        return "ABORTED" if one.wanted and not still else one.state

    def end_or_wait(self, handle: int, reason: str, drained: set[int] | None = None) -> bool:
        one = self.tries[handle]
        if one.readers:
            one.wanted = one.wanted or reason
            return True
        self.end(handle, "ABORTED", reason, drained)
        return False

    # --- what waits, what is repeated, what has ended

    def not_open(self, handle: int, key: tuple[Any, ...]) -> tuple[Any, ...]:
        one = self.remembered(handle)
        if one is None:
            return ("refused", "stale-handle")
        return one.said.get(key, ("refused", "stale-handle"))

    def hear(self, handle: int, ranks: list[int], why: tuple[str, ...]) -> bool:
        gone = [key for key in self.kept if key[0] == handle and key[1] in ranks and self.kept[key].why in why]
        for key in gone:
            del self.kept[key]
        return bool(gone)

    # --- messages

    def prepare(
        self, handle: int, name: tuple[str, str], start: int, count: int, ranks: tuple[int, ...], *,
        keys: tuple[str, ...], hint: bool, writer: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        answer = self._admit(handle, name, start, count, ranks, hint)
        if answer[0] == "refused":
            self.outcomes[answer[1]] = self.outcomes.get(answer[1], 0) + 1
            return answer
        for other, one in list(self.tries.items()):
            if one.name == name and one.state in ("RESERVED", "TRANSFERRING"):
                self.end(other, "ABORTED", "superseded")
        until_ns = self.now_ns + TIMES_MS["reserve_timeout_ms"] * NS_PER_MS
        ranks = ranks or self.ranks
        self.tries[handle] = Try(name, answer[1:3], ranks, keys, writer, until_ns=until_ns)
        return answer

    def _admit(
        self, handle: int, name: tuple[str, str], start: int, count: int, ranks: tuple[int, ...], hint: bool
    ) -> tuple[Any, ...]:
        if not set(ranks) <= set(self.ranks) or start % PAGE_TOKENS or count < 1 or handle in self.tries:
            return ("refused", "invalid-request")
        if self.draining:
            return ("refused", "draining")
        held = [h for h, x in self.tries.items() if x.state in OPEN] + list({h for h, _ in self.kept})
        if len(held) >= BOUNDS["sessions_max"]:
            return ("refused", "limit-reached")
        known = self.hints.get(name, 0)
        pages_end = known // PAGE_TOKENS * PAGE_TOKENS
        end = start + count
        if hint and start < pages_end < end:
            start = pages_end
        need = LAYOUTS[name[0]].num_planes
        if need > UNITS:
            return ("refused", "too-large")
        lacking = {rank for rank in ranks or self.ranks if self.free(rank) < need}
        room = {rank: self.free(rank) for rank in self.ranks}
        victims = []
        for victim in self.used:
            one = self.tries[victim]
            if not lacking & set(one.ranks):
                continue
            victims.append(victim)
            for rank in one.ranks:
                room[rank] += self.units_of(one)
            lacking = {rank for rank in lacking if room[rank] < need}
        if lacking:
            return ("refused", "snapshot-buf-full")
        for victim in victims:
            self.end(victim, "ABORTED", "evicted")
        return ("granted", start, end - start, known)

    def start(self, handle: int) -> tuple[Any, ...]:
        one = self.remembered(handle)
        if one is None or one.state not in OPEN:
            return self.not_open(handle, ("start",))
        if one.state != "RESERVED":
            return one.said.get(("start",), ("accepted", one.state, False))
        self._transfer(one)
        one.said["start",] = ("accepted", "TRANSFERRING", False)
        return one.said["start",]

    def _transfer(self, one: Try) -> None:
        one.state = "TRANSFERRING"
        one.until_ns = self.now_ns + TIMES_MS["transfer_timeout_ms"] * NS_PER_MS

    def commit(self, handle: int, rank: int, bytes_off: int, tokens_off: int, sums: int) -> tuple[Any, ...]:
        key = ("commit", rank, bytes_off, tokens_off, sums)
        one = self.remembered(handle)
        if one is None or one.state not in OPEN:
            return self.not_open(handle, key)
        if one.state == "READY":
            return one.said.get(key, ("refused", "wrong-state"))
        if rank not in one.ranks:
            return ("refused", "wrong-rank")
        if rank in one.done:
            return one.said.get(key, ("refused", "wrong-state"))
        if sums:
            return ("refused", "invalid-request")
        if bytes_off or tokens_off:
            self.end(handle, "ABORTED", "partial-transfer")
            one.said[key] = ("refused", "partial-transfer")
            return one.said[key]
        if one.state == "RESERVED":
            self._transfer(one)
        one.done.add(rank)
        if one.done == set(one.ranks):
            one.state = "READY"
            one.until_ns = self.now_ns + TIMES_MS["ready_ttl_ms"] * NS_PER_MS
            older = self.newest_ready.get(one.name)
            self.newest_ready[one.name] = handle
            self.use(handle)
            if older is not None:
                self.end_or_wait(older, "superseded")
        one.said[key] = ("accepted", one.state, False)
        return one.said[key]

    def fail(self, handle: int, rank: int | None, reason: str, drained: bool) -> tuple[Any, ...]:
        key = ("fail", rank, reason)
        one = self.remembered(handle)
        if one is None or one.state not in OPEN:
            ranks = list(self.ranks) if rank is None else [rank]
            heard = drained and self.hear(handle, ranks, ("undrained", "corrupt"))
            if one is not None and heard and key not in one.said:
                return ("accepted", one.state, False)
            return self.not_open(handle, key)
        if one.state == "READY":
            return ("refused", "wrong-state")
        if reason not in ("transfer-failed", "session-not-resident"):
            return ("refused", "invalid-request")
        if rank is not None and rank not in one.ranks:
            return ("refused", "wrong-rank")
        clean = set() if not drained else set(one.ranks) if rank is None else {rank}
        self.end(handle, "ABORTED", reason, clean)
        one.said[key] = ("accepted", "ABORTED", False)
        return one.said[key]

    def abort(self, handle: int, drained: bool) -> tuple[Any, ...]:
        one = self.remembered(handle)
        if one is None or one.state not in OPEN:
            heard = drained and self.hear(handle, list(self.ranks), ("undrained", "corrupt"))
            if one is not None and heard and ("abort",) not in one.said:
                return ("accepted", one.state, False)
            return self.not_open(handle, ("abort",))
        waits = self.end_or_wait(handle, "client-abort", set(one.ranks) if drained else set())
        one.said["abort",] = ("accepted", one.state, waits)
        return one.said["abort",]

    def drained(self, handle: int, rank: int | None) -> tuple[Any, ...]:
        one = self.remembered(handle)
        if one is not None and one.state in ("RESERVED", "TRANSFERRING"):
            return ("refused", "wrong-state")
        ranks = list(self.ranks) if rank is None else [rank]
        heard = self.hear(handle, ranks, ("undrained", "corrupt"))
        if one is None:
            return ("accepted", "ABORTED", False) if heard else ("refused", "stale-handle")
        return ("accepted", one.state, False)

    def lease(self, handle: int, rank: int, right_layout: bool, lease_id: int) -> tuple[Any, ...]:
        """*lease_id* is what the machine would call a new lease."""
        one = self.remembered(handle)
        if one is None or one.state not in OPEN:
            return ("refused", "stale-handle")
        if one.state != "READY":
            return ("refused", "wrong-state")
        if rank not in one.ranks:
            return ("refused", "wrong-rank")
        if not right_layout:
            return ("refused", "layout-mismatch")
        if one.wanted:
            return ("refused", one.wanted)
        reader = one.readers.get(rank)
        if reader is not None and reader.causes:
            return ("refused", "wrong-state")
        if reader is None or reader.round != one.round:
            until_ns = self.now_ns + TIMES_MS["lease_ms"] * NS_PER_MS
            reader = one.readers[rank] = Reader(lease_id, one.round, until_ns)
            self.used = [x for x in self.used if x != handle]
        return ("leased", reader.lease_id, reader.until_ns)

    def vote(
        self, handle: int, rank: int, lease_id: int, ok: bool, reason: str, keep: bool, cause_id: int
    ) -> tuple[Any, ...]:
        key: tuple[Any, ...] = ("vote", rank, lease_id, True)
        if not ok:
            key = ("vote", rank, lease_id, False, reason, keep)
        one = self.remembered(handle)
        if one is None or one.state not in OPEN:
            item = self.kept.get((handle, rank))
            heard = item is not None and item.lease_id == lease_id and self.hear(handle, [rank], ("leased",))
            if one is not None and heard and key not in one.said:
                return ("decided", False, one.reason, one.state)
            return self.not_open(handle, key)
        if one.state != "READY":
            return ("refused", "wrong-state")
        if rank not in one.ranks or lease_id in [x.lease_id for r, x in one.readers.items() if r != rank]:
            return ("refused", "wrong-rank")
        noes = (
            "alloc-failed-on-finalize", "checksum-mismatch", "token-mismatch", "prefix-not-resident",
            "ingest-failed",
        )  # fmt: skip
        if not ok and reason not in noes:
            return ("refused", "invalid-request")
        reader = one.readers.get(rank)
        if reader is None or reader.lease_id != lease_id:
            return one.said.get(key, ("refused", "lease-expired"))
        if reader.causes:
            if not ok:
                return ("refused", "wrong-state")
            reader.causes.append(cause_id)
            return ("waits",)
        if not ok and reason == "prefix-not-resident":
            self.hints.pop(one.name, None)
        if ok and reader.round == one.round:
            return self._yes(handle, one, reader, cause_id)
        del one.readers[rank]
        if not ok and (not keep or reason == "checksum-mismatch"):
            one.said[key] = ("decided", False, reason, "ABORTED")
            self.end(handle, "ABORTED", reason, corrupt=rank if reason == "checksum-mismatch" else None)
            return one.said[key]
        said = "round-aborted"
        if reader.round == one.round:
            said = reason
            self.end_round(one, reason)
        one.said[key] = ("decided", False, said, self.after(one))
        self.nobody_reads(handle)
        return one.said[key]

    def _yes(self, handle: int, one: Try, reader: Reader, cause_id: int) -> tuple[Any, ...]:
        reader.causes.append(cause_id)
        voted = [x for x in one.readers.values() if x.causes and x.round == one.round]
        if len(voted) < len(one.ranks):
            return ("waits",)
        self.hints.pop(one.name, None)
        self.hints[one.name] = sum(one.tokens)
        while len(self.hints) > BOUNDS["session_history_max"]:
            del self.hints[next(iter(self.hints))]
        self.end(handle, "INGESTED", "ok")
        return self.late[cause_id]

    def look_up(self, name: tuple[str, str], keys: tuple[str, ...], resident: int) -> tuple[Any, ...]:
        hint = self.hints.get(name, 0)
        found, matched = 0, 0
        if name[1]:
            handle = self.newest_ready.get(name)
            if handle is not None and not self.tries[handle].wanted:
                found, matched = handle, sum(self.tries[handle].tokens)
        else:
            best = (0, -1)
            entered = [h for h in self.ready_order if self.tries[h].state == "READY"]
            for age, handle in enumerate(entered):
                one = self.tries[handle]
                shared = 0
                for index, key in enumerate(keys):
                    if one.name[0] == name[0] and key in one.keys:
                        shared = index + 1
                if one.wanted or one.tokens[0] > resident or shared * PAGE_TOKENS <= resident or not shared:
                    continue
                if (shared, age) > best:
                    best, found, matched = (shared, age), handle, shared * PAGE_TOKENS
        if not found:
            return ("found", 0, 0, hint)
        if not self.tries[found].readers:
            self.use(found)
        return ("found", found, matched, hint)

    ready_order: list[int]

    def writer_gone(self, writer: int) -> None:
        for handle, one in list(self.tries.items()):
            if one.writer == writer and one.state in ("RESERVED", "TRANSFERRING"):
                self.end(handle, "ABORTED", "writer-gone", set(one.ranks))
        for key in [key for key, x in self.kept.items() if x.writer == writer and x.why != "leased"]:
            del self.kept[key]

    def stop(self) -> None:
        self.draining = True
        for handle, one in list(self.tries.items()):
            if one.state in OPEN:
                self.end(handle, "ABORTED", "daemon-stopped")

    # --- time

    def next_deadline(self) -> tuple[int, str, tuple[int, int]] | None:
        due: list[tuple[int, str, tuple[int, int]]] = []
        for handle, one in self.tries.items():
            if one.state in OPEN and one.until_ns:
                due.append((one.until_ns, "state", (handle, 0)))
            due += [(x.until_ns, "lease", (handle, rank)) for rank, x in one.readers.items()]
        due += [(x.until_ns, "kept", key) for key, x in self.kept.items()]
        return min(due, default=None)

    def advance_to(self, target_ns: int) -> None:
        while (due := self.next_deadline()) is not None and due[0] <= target_ns:
            self.now_ns = due[0]
            handle, rank = due[2]
            if due[1] == "kept":
                del self.kept[handle, rank]
            elif due[1] == "state":
                one = self.tries[handle]
                one.until_ns = 0
                why = {"RESERVED": "reserve-timeout", "TRANSFERRING": "transfer-timeout", "READY": "ready-expired"}
                self.end_or_wait(handle, why[one.state])
            else:
                one = self.tries[handle]
                reader = one.readers[rank]
                state = self.after(one)
                self.end_read(one, rank, "lease-expired", state)
                if reader.round == one.round:
                    self.end_round(one, "round-aborted")
                self.nobody_reads(handle)
        self.now_ns = target_ns


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
    """Posts the same messages to both, and compares everything."""

    @initialize(ranks=st.integers(1, 3))
    def begin(self, ranks: int) -> None:
        fast = {"transfer_min_mb_per_s": 1 << 30}
        self.drive = Driver(ranks, units=UNITS, layouts=tuple(LAYOUTS.values()), **TIMES_MS, **BOUNDS, **fast)
        self.model = Model(ranks)
        self.model.ready_order = []
        self.handles: list[int] = []
        self.lease_ids: list[tuple[int, int, int]] = []
        self.causes: list[int] = []

    # --- helpers of the comparison

    def handle(self, choice: int, state: str = "") -> int:
        """Prefer recent attempts in a state, made if there is none; sometimes any, sometimes an unknown one."""
        if choice % 5 and state and not self.in_state(state):
            self.make(choice, state)
        wanted = self.in_state(state)
        if wanted and choice % 5:
            return wanted[-1 - choice % len(wanted)]
        return self.handles[-1 - choice % len(self.handles)] if self.handles and choice < 28 else 7

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
            self.commit_one(handle, rank, 0, 0, 0)
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

    @rule(choice=pick, which=pick, off=st.sampled_from([(0, 0, 0)] * 12 + [(1, 0, 0), (0, 1, 0), (0, 0, 1)]))
    def commit(self, choice: int, which: int, off: tuple[int, int, int]) -> None:
        handle = self.handle(choice, "TRANSFERRING" if choice % 2 else "RESERVED")
        self.commit_one(handle, self.rank(which), *off)

    def commit_one(self, handle: int, rank: int, bytes_off: int, tokens_off: int, sums: int) -> None:
        one = self.model.tries.get(handle)
        layout = LAYOUTS[one.name[0]] if one else layout_of()
        num_tokens = one.tokens[1] if one else 1
        self.settle_time()
        expected = self.model.commit(handle, rank, bytes_off, tokens_off, sums)
        result = self.drive.post(
            e.RankCommitted, slab_handle=handle, rank=rank, num_tokens=num_tokens + tokens_off,
            num_bytes=num_tokens * layout.token_bytes + bytes_off,
            checksums=((1, 2),) * (layout.num_planes + sums), conn_id=2,
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
        handle = kept[choice % len(kept)] if kept and choice % 4 else self.handle(choice)
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

    @rule(choice=pick, which=pick, exact=mostly, ok=st.sampled_from([True, True, False]), reason=no_reasons, keep=st.booleans())
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
        result = self.drive.look_up(
            name, layout_fingerprint=layout, page_keys=keys, resident_tokens=resident
        )
        self.agree_on(expected, result)

    @rule(writer=st.integers(1, 2))
    def writer_gone(self, writer: int) -> None:
        self.settle_time()
        self.model.writer_gone(writer)
        self.drive.tell(e.WriterGone, writer_id=writer)

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
        assert list(machine.books.lru.oldest_first()) == model.used
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


def test_the_states_of_the_model_are_those_of_the_machine() -> None:
    assert set(OPEN) | {"INGESTED", "ABORTED"} == {str(state) for state in State}

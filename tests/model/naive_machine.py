"""What the design says about attempts, in plain dicts that are scanned whole every time.

Written from the design, not from the code. Planes take one unit of the arena each, so what fits is a sum.
"""

from dataclasses import dataclass, field
from typing import Any

from core_driver import layout_of

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
    unsafe: set[int] = field(default_factory=set)  # Committed, and something may land all the same.
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
    state: str = "ABORTED"
    proven: bool = False


class Model:
    """What the design says, in dicts."""

    def __init__(self, ranks: int) -> None:
        self.ranks = tuple(range(ranks))
        self.tries: dict[int, Try] = {}
        self.order: list[int] = []  # Ended attempts, oldest first.
        self.kept: dict[tuple[int, int], Kept] = {}
        self.used: list[int] = []  # READY, unleased and nothing can land, least recently used first.
        self.hints: dict[tuple[str, str], int] = {}
        self.ready_order: list[int] = []
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
        self,
        handle: int,
        state: str,
        reason: str,
        drained: set[int] | None = None,
        corrupt: int | None = None,
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
            x = reading.get(rank)
            lease_id = x.lease_id if x else 0
            safe = (one.done - one.unsafe) | (drained or set())
            if rank == corrupt:
                self.kept[handle, rank] = Kept(units, time_ns, "corrupt", one.writer)
            elif rank not in safe:
                until_ns = max(time_ns, x.until_ns if x else 0)
                self.kept[handle, rank] = Kept(units, until_ns, "undrained", one.writer, lease_id, state)
            elif x:
                self.kept[handle, rank] = Kept(units, x.until_ns, "leased", one.writer, lease_id)
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
        if not self.tries[handle].unsafe:
            self.used = [x for x in self.used if x != handle] + [handle]

    def make_safe(self, handle: int, ranks: set[int]) -> None:
        """Nothing can land in these any more: evictable from here on, when that was all that was missing."""
        one = self.tries[handle]
        changed = one.unsafe & ranks
        one.unsafe -= ranks
        if changed and not one.unsafe and one.state == "READY" and not one.readers:
            self.use(handle)

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
            self.make_safe(handle, drained or set())
            return True
        self.end(handle, "ABORTED", reason, drained)
        return False

    # --- what waits, what is repeated, what has ended

    def not_open(self, handle: int, key: tuple[Any, ...]) -> tuple[Any, ...]:
        one = self.remembered(handle)
        if one is None:
            return ("refused", "stale-handle")
        return one.said.get(key, ("refused", "stale-handle"))

    def hear(self, handle: int, ranks: list[int]) -> bool:
        """Drain proof: what is read as well is kept until that is over."""
        about = [
            key
            for key, kept in self.kept.items()
            if key[0] == handle and key[1] in ranks and kept.why == "undrained"
        ]
        for key in about:
            self.kept[key].proven = True
            if not self.kept[key].lease_id:
                del self.kept[key]
        return bool(about)

    def stop_reading(self, handle: int, rank: int, lease_id: int) -> bool:
        """A vote: what may be written as well is kept until that is over."""
        kept = self.kept.get((handle, rank))
        if kept is None or not lease_id or kept.lease_id != lease_id:
            return False
        kept.lease_id = 0
        if kept.why == "leased" or kept.proven:
            del self.kept[handle, rank]
        return True

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
            return ("accepted", one.state, False)
        self._transfer(one)
        return ("accepted", "TRANSFERRING", False)

    def _transfer(self, one: Try) -> None:
        one.state = "TRANSFERRING"
        one.until_ns = self.now_ns + TIMES_MS["transfer_timeout_ms"] * NS_PER_MS

    def commit(
        self, handle: int, rank: int, bytes_off: int, tokens_off: int, sums: int, safe: bool
    ) -> tuple[Any, ...]:
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
        if not safe:
            one.unsafe.add(rank)
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
            heard = drained and self.hear(handle, ranks)
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
            heard = drained and self.hear(handle, list(self.ranks))
            if one is not None and heard and ("abort",) not in one.said:
                return ("accepted", one.state, False)
            return self.not_open(handle, ("abort",))
        waits = self.end_or_wait(handle, "client-abort", set(one.ranks) if drained else set())
        one.said["abort",] = ("accepted", one.state, waits)
        return one.said["abort",]

    def drained(self, handle: int, rank: int | None) -> tuple[Any, ...]:
        one = self.remembered(handle)
        ranks = list(self.ranks) if rank is None else [rank]
        if one is not None and one.state in OPEN:
            if one.state == "RESERVED":
                return ("refused", "wrong-state")
            if rank is not None and rank not in one.ranks:
                return ("refused", "wrong-rank")
            if not one.done & set(ranks):
                return ("refused", "wrong-state")
            self.make_safe(handle, set(ranks))
            return ("accepted", one.state, False)
        states = [kept.state for (of, _), kept in self.kept.items() if of == handle]
        heard = self.hear(handle, ranks)
        if one is None:
            return ("accepted", states[0], False) if heard else ("refused", "stale-handle")
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
            heard = self.stop_reading(handle, rank, lease_id)
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

    def writer_gone(self, writer: int, drained: bool) -> None:
        for handle, one in list(self.tries.items()):
            if one.writer != writer:
                continue
            if one.state in ("RESERVED", "TRANSFERRING"):
                self.end(handle, "ABORTED", "writer-gone", set(one.ranks) if drained else set())
            elif drained and one.state == "READY":
                self.make_safe(handle, set(one.ranks))
        for handle in {of for (of, _), kept in self.kept.items() if drained and kept.writer == writer}:
            self.hear(handle, list(self.ranks))

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
                why = {
                    "RESERVED": "reserve-timeout",
                    "TRANSFERRING": "transfer-timeout",
                    "READY": "ready-expired",
                }
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

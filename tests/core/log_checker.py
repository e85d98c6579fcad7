"""Rebuilds every arena and every attempt from the records alone, and holds them against the rules.

Nothing of the core is used but its records and extents: what may follow what is written down here a
second time, from the design.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from snapd.core import records as r
from snapd.core.machine import Machine
from snapd.core.slab import Extent
from snapd.errors import Reason

NS_PER_MS = 1_000_000

# From design section 3: (from, to) and the reasons that lead there.
MAY_FOLLOW: dict[tuple[str, str], set[str]] = {
    ("", "RESERVED"): {"ok"},
    ("RESERVED", "TRANSFERRING"): {"ok"},
    ("TRANSFERRING", "READY"): {"ok"},
    ("READY", "INGESTED"): {"ok"},
    ("RESERVED", "ABORTED"): {
        "partial-transfer", "transfer-failed", "session-not-resident", "client-abort", "reserve-timeout",
        "superseded", "writer-gone", "daemon-stopped",
    },
    ("TRANSFERRING", "ABORTED"): {
        "partial-transfer", "transfer-failed", "session-not-resident", "client-abort", "transfer-timeout",
        "superseded", "writer-gone", "daemon-stopped",
    },
    ("READY", "ABORTED"): {
        "alloc-failed-on-finalize", "checksum-mismatch", "token-mismatch", "prefix-not-resident",
        "ingest-failed", "evicted", "ready-expired", "client-abort", "superseded", "daemon-stopped",
    },
}  # fmt: skip
REFUSALS = {
    "snapshot-buf-full", "too-large", "layout-mismatch", "limit-reached", "draining", "invalid-request",
}  # fmt: skip
# What may let go of what was quarantined for which reason, before its time.
PROOFS = {"undrained": {"drained", "writer-gone"}, "corrupt": set(), "leased": set()}


@dataclass
class _Attempt:
    session_id: str
    num_tokens: int
    token_start: int
    bytes: int
    state: str
    reason: str
    since_ns: int
    created_ns: int
    spent_ms: dict[str, float] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    has_outcome: bool = False


@dataclass
class _Held:
    handle: int
    extent: Extent
    why: str = ""  # Empty: live.
    until_ns: int = 0


@dataclass
class _Lease:
    handle: int
    rank: int
    granted_ns: int
    until_ns: int


class LogChecker:
    """Takes records one by one and raises ``AssertionError`` at the first that cannot be true."""

    def __init__(self, capacity_bytes: dict[int, int], alignment_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.alignment_bytes = alignment_bytes
        self.attempts: dict[int, _Attempt] = {}
        self.arenas: dict[int, list[_Held]] = {rank: [] for rank in capacity_bytes}
        self.open_leases: dict[int, _Lease] = {}
        self.last_lease_id = 0
        self.outcomes: Counter[str] = Counter()
        self.refused_before: r.SyncRefused | None = None
        self.at_ns = 0
        self.num_records = 0

    def feed(self, record: r.Record) -> None:
        """Take the next record."""
        line = msgspec.json.encode(record)
        assert msgspec.json.decode(line, type=r.Record) == record, "a record survives the log"
        assert record.at_ns >= self.at_ns, "time does not run backwards"
        self.at_ns = record.at_ns
        self.num_records += 1
        if self.refused_before is not None:
            assert isinstance(record, r.SyncOutcome), "a refusal's outcome follows it at once"
        match record:
            case r.SyncRefused():
                assert record.reason in REFUSALS
                self.refused_before = record
            case r.SessionTransition():
                self._transition(record)
            case r.SlabAllocated():
                self._allocate(record)
            case r.SlabQuarantined():
                self._quarantine(record)
            case r.SlabReleased():
                self._release(record)
            case r.LeaseGranted():
                self._grant(record)
            case r.LeaseEnded():
                self._end_lease(record)
            case r.SyncOutcome():
                self._outcome(record)
            case _:
                raise AssertionError(f"the core does not write {record}")

    def _transition(self, record: r.SessionTransition) -> None:
        step = (str(record.from_state), str(record.to_state))
        assert step in MAY_FOLLOW, f"{step} is no transition"
        assert record.reason in MAY_FOLLOW[step], f"{record.reason} does not lead from {step[0]} to {step[1]}"
        if not record.from_state:
            assert record.slab_handle not in self.attempts, "a handle is never used again"
            assert record.duration_ms == 0
            self.attempts[record.slab_handle] = _Attempt(
                record.session_id, record.num_tokens, record.token_start, record.bytes,
                str(record.to_state), record.reason, record.at_ns, record.at_ns,
            )  # fmt: skip
            return
        attempt = self.attempts[record.slab_handle]
        assert attempt.state == record.from_state, "a transition starts where the last one ended"
        same = (record.session_id, record.num_tokens, record.token_start, record.bytes)
        assert same == (attempt.session_id, attempt.num_tokens, attempt.token_start, attempt.bytes)
        assert record.duration_ms == (record.at_ns - attempt.since_ns) / NS_PER_MS
        if record.to_state in ("INGESTED", "ABORTED"):
            assert not any(lease.handle == record.slab_handle for lease in self.open_leases.values())
        if record.reason in (Reason.SUPERSEDED, Reason.EVICTED):
            assert record.newer_handle, "the log says who took over"
        attempt.spent_ms[attempt.state] = record.duration_ms
        attempt.state, attempt.reason, attempt.since_ns = (
            str(record.to_state),
            record.reason,
            record.at_ns,
        )

    def _allocate(self, record: r.SlabAllocated) -> None:
        attempt = self.attempts[record.slab_handle]
        assert attempt.state == "RESERVED" and attempt.since_ns == record.at_ns
        assert record.rank not in attempt.ranks, "one shard a rank"
        attempt.ranks.append(record.rank)
        assert sum(x.size_bytes for x in record.extents) >= record.bytes > 0
        for extent in record.extents:
            assert 0 <= extent.offset_bytes < extent.end_bytes <= self.capacity_bytes[record.rank]
            assert extent.offset_bytes % self.alignment_bytes == extent.size_bytes % self.alignment_bytes == 0
            for held in self.arenas[record.rank]:
                overlaps = (
                    extent.offset_bytes < held.extent.end_bytes
                    and held.extent.offset_bytes < extent.end_bytes
                )
                assert not overlaps, f"{extent} was handed out while attempt {held.handle} had {held}"
            self.arenas[record.rank].append(_Held(record.slab_handle, extent))

    def _take_held(self, rank: int, handle: int, extents: tuple[Extent, ...], is_live: bool) -> list[_Held]:
        found = [held for held in self.arenas[rank] if held.handle == handle]
        assert sorted(held.extent for held in found) == sorted(extents), "all of a shard moves at once"
        assert all((held.why == "") is is_live for held in found)
        return found

    def _quarantine(self, record: r.SlabQuarantined) -> None:
        state = self.attempts[record.slab_handle].state
        assert state == "ABORTED" or (state, record.why) == ("INGESTED", "undrained")
        for held in self._take_held(record.rank, record.slab_handle, record.extents, is_live=True):
            held.why, held.until_ns = record.why, record.until_ns
        if record.why == "leased":
            assert self.attempts[record.slab_handle].spent_ms.get("READY") is not None
        else:
            assert record.until_ns > record.at_ns

    def _release(self, record: r.SlabReleased) -> None:
        attempt = self.attempts[record.slab_handle]
        assert attempt.state in ("INGESTED", "ABORTED"), "an open attempt keeps its bytes"
        is_live = record.was == "live"
        if is_live and record.why != "final":
            # With READY the proof came with the abort, for a commit that was none.
            assert record.why in PROOFS["undrained"] if "READY" not in attempt.spent_ms else {"drained"}
            assert attempt.state == "ABORTED"
        else:
            assert (record.why == "final") is is_live
        assert is_live or attempt.has_outcome
        for held in self._take_held(record.rank, record.slab_handle, record.extents, is_live=is_live):
            if record.why == "time":
                assert held.why != "leased" and record.at_ns >= held.until_ns, "kept for its whole time"
            elif record.why == "lease-ended":
                assert held.why == "leased"
            elif not is_live:
                assert record.why in PROOFS[held.why]
            self.arenas[record.rank].remove(held)

    def _grant(self, record: r.LeaseGranted) -> None:
        attempt = self.attempts[record.slab_handle]
        assert attempt.state == "READY", "only READY bytes are read"
        assert record.rank in attempt.ranks
        assert record.lease_id > self.last_lease_id, "a lease id is never used again"
        assert not any(
            (lease.handle, lease.rank) == (record.slab_handle, record.rank)
            for lease in self.open_leases.values()
        ), "one lease a rank"
        self.last_lease_id = record.lease_id
        self.open_leases[record.lease_id] = _Lease(
            record.slab_handle, record.rank, record.at_ns, record.until_ns
        )

    def _end_lease(self, record: r.LeaseEnded) -> None:
        lease = self.open_leases.pop(record.lease_id)
        assert (lease.handle, lease.rank) == (record.slab_handle, record.rank)
        assert self.attempts[record.slab_handle].state == "READY"
        assert record.ok == (record.reason == Reason.OK)
        assert record.duration_ms == (record.at_ns - lease.granted_ns) / NS_PER_MS
        if record.reason == Reason.LEASE_EXPIRED:
            assert record.at_ns >= lease.until_ns

    def _outcome(self, record: r.SyncOutcome) -> None:
        self.outcomes[record.reason] += 1
        refused, self.refused_before = self.refused_before, None
        if refused is not None:
            assert not record.slab_handle and not record.ok and record.reason == refused.reason
            assert (record.session_id, record.num_tokens, record.token_start, record.bytes) == (
                refused.session_id, refused.num_tokens, refused.token_start, refused.bytes,
            )  # fmt: skip
            return
        attempt = self.attempts[record.slab_handle]
        assert not attempt.has_outcome, "one outcome an attempt"
        attempt.has_outcome = True
        assert attempt.state in ("INGESTED", "ABORTED")
        assert record.ok is (attempt.state == "INGESTED") is (record.reason == Reason.OK)
        assert (record.session_id, record.reason) == (attempt.session_id, attempt.reason)
        assert (record.num_tokens, record.token_start) == (attempt.num_tokens, attempt.token_start)
        assert (record.bytes, sorted(record.ranks)) == (attempt.bytes, sorted(attempt.ranks))
        assert record.duration_ms == (record.at_ns - attempt.created_ns) / NS_PER_MS
        spent_ms = {
            "RESERVED": record.reserved_ms, "TRANSFERRING": record.transferring_ms, "READY": record.ready_ms,
        }  # fmt: skip
        assert {state: ms for state, ms in spent_ms.items() if ms} == {
            state: ms for state, ms in attempt.spent_ms.items() if ms
        }
        for held in [held for arena in self.arenas.values() for held in arena]:
            assert held.handle != record.slab_handle or held.why, "an ended attempt owns nothing"

    def compare(self, machine: Machine) -> None:
        """Hold the rebuilt maps and counts against the machine's own."""
        statistics = machine.statistics()
        for view in statistics.arenas:
            arena = self.arenas[view.rank]
            live_bytes = sum(held.extent.size_bytes for held in arena if not held.why)
            quarantined_bytes = sum(held.extent.size_bytes for held in arena if held.why)
            assert view.live_bytes == live_bytes
            assert view.quarantined_bytes == quarantined_bytes
            assert view.free_bytes + live_bytes + quarantined_bytes == view.capacity_bytes
            assert sorted(held.extent for held in arena) == list(
                machine.books.buffer.arenas[view.rank].live()
            )
        held_shards = {
            (held.handle, rank) for rank, arena in self.arenas.items() for held in arena if held.why
        }
        assert statistics.quarantined_shards == len(held_shards)
        assert statistics.outcomes_by_reason == dict(self.outcomes)
        assert statistics.attempts == len(self.attempts)
        states = Counter(attempt.state for attempt in self.attempts.values())
        assert statistics.attempts_ok == states["INGESTED"] == self.outcomes["ok"]
        for state, count in statistics.sessions_by_state.items():
            assert states[state] == count
        assert statistics.open_sessions == sum(statistics.sessions_by_state.values())
        for handle, attempt in self.attempts.items():
            assert attempt.has_outcome is (attempt.state in ("INGESTED", "ABORTED"))
            assert attempt.has_outcome is (handle not in machine.books.open)
        leases = {
            shard.lease.lease_id: (handle, rank)
            for handle, session in machine.books.open.items()
            for rank, shard in session.shards.items()
            if shard.lease
        }
        assert leases == {lease_id: (x.handle, x.rank) for lease_id, x in self.open_leases.items()}

    def end(self) -> None:
        """Nothing is left: every attempt has ended, every lease too, and every byte is free."""
        assert all(attempt.has_outcome for attempt in self.attempts.values())
        assert not self.open_leases
        assert not any(self.arenas.values())

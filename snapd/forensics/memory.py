"""What a proof keeps in mind: open attempts and leases, handles that were used, deadlines that come.

Source: design, sections 2 and 3.
"""

import heapq
from collections import deque
from typing import Final

from snapd.forensics import rules
from snapd.forensics.shards import Shard
from snapd.forensics.violations import Where

RECENT_MAX: Final = 4_096
ENDED_PER_GENERATION_MAX: Final = 500_000
_STALE_MAX: Final = 1_024
# A daemon that runs has this part of the grace.
RUNNING_SHARE: Final = 10


class Lease:
    """A rank's right to read."""

    __slots__ = (
        "attempt",
        "granted",
        "granted_ns",
        "handle",
        "is_over",
        "lease_id",
        "rank",
        "round",
        "until_ns",
    )

    def __init__(self, attempt: "Attempt", rank: int, lease_id: int, round_no: int, where: Where) -> None:
        self.attempt = attempt
        self.handle = attempt.handle
        self.rank = rank
        self.lease_id = lease_id
        self.round = round_no
        self.granted_ns = 0
        self.until_ns = 0
        self.granted = where
        self.is_over = False


class Attempt:
    """An attempt that has no outcome yet.

    Attributes:
        num_tokens: -1: not known, nor are *token_start* and *bytes*.
        created_ns, since_ns: when it and its state began; -1: not known.
        spent_ms: time spent in each state that was left.
        is_whole: every line of it was seen.
        allocated_bytes: payload of its slabs.
        begun, entered: its first line, and that of its state.
        ok_ranks, ok_round, ok: ranks that were told to commit, in which round, and the line.
    """

    __slots__ = (
        "allocated_bytes", "begun", "bytes", "created_ns", "entered", "handle", "has_outcome", "is_reported",
        "is_whole", "leases", "num_tokens", "ok", "ok_ranks", "ok_round", "reason", "round", "session_id",
        "shards", "since_ns", "spent_ms", "state", "token_start",
    )  # fmt: skip

    def __init__(self, handle: int, session_id: str, state: str, where: Where, *, is_whole: bool) -> None:
        self.handle = handle
        self.session_id = session_id
        self.state = state
        self.reason: str = rules.OK
        self.num_tokens = -1
        self.token_start = 0
        self.bytes = 0
        self.created_ns = -1
        self.since_ns = -1
        self.spent_ms: dict[str, float] = {}
        self.is_whole = is_whole
        self.is_reported = False
        self.has_outcome = False
        self.allocated_bytes = 0
        self.shards: dict[int, Shard] = {}
        self.leases: dict[int, Lease] = {}
        self.round = 0
        self.begun = where
        self.entered = where
        self.ok_ranks: tuple[int, ...] = ()
        self.ok_round = 0
        self.ok: Where | None = None

    @property
    def was_started(self) -> bool:
        """It has been TRANSFERRING, as far as is known."""
        return rules.TRANSFERRING in self.spent_ms or rules.READY in self.spent_ms

    def slabs_say(self) -> str:
        """Return the sentence for slabs that do not hold what the attempt is to hold."""
        return f"its slabs hold {self.allocated_bytes} bytes in all, and not its {self.bytes}"

    def is_settled(self) -> bool:
        """Nothing more of it must come at the time of its last line."""
        if self.state in rules.FINAL:
            return self.has_outcome
        return not self.ok_ranks and self.allocated_bytes == self.bytes


class EndedHandles:
    """Handles of attempts that have ended: some with the line, many without, the oldest forgotten."""

    def __init__(self) -> None:
        self.forgotten = 0
        self._recent: dict[int, Where] = {}
        self._young: set[int] = set()
        self._old: set[int] = set()

    def __contains__(self, handle: int) -> bool:
        return handle in self._young or handle in self._old

    def add(self, handle: int, where: Where) -> None:
        """Take the handle of an attempt that ended at *where*."""
        self._recent[handle] = where
        if len(self._recent) > RECENT_MAX:
            del self._recent[next(iter(self._recent))]
        self._young.add(handle)
        if len(self._young) >= ENDED_PER_GENERATION_MAX:
            self.forgotten += len(self._old)
            self._old, self._young = self._young, set()

    def where(self, handle: int) -> Where | None:
        """Return the line of its outcome, if that is not forgotten."""
        return self._recent.get(handle)


_NEVER_NS: Final = 1 << 63


class Overdue:
    """Leases and quarantines by deadline; tells those that go on long after it.

    A daemon that stood still takes up other things first, and its timers fire late. So the grace counts from
    the first line at or after the deadline, not from the deadline. Where lines show that the daemon runs, a
    tenth of the grace is enough: a pause between two of them counts half of that at most, as it may have
    stood still again.

    Args:
        grace_ns: how long a daemon may leave a deadline alone.

    Attributes:
        next_ns: nothing need be done before that time.
    """

    def __init__(self, grace_ns: int) -> None:
        self.next_ns = _NEVER_NS
        self._grace_ns = grace_ns
        self._running_grace_ns = grace_ns // RUNNING_SHARE
        self._at_ns = 0
        self._running_ns = 0  # goes on while something waits in _seen, pauses cut short
        self._number = 0
        self._heap: list[tuple[int, int, Lease | Shard]] = []
        self._seen: deque[tuple[int, int, Lease | Shard]] = deque()
        self._compact_at = _STALE_MAX

    def add(self, item: Lease | Shard) -> None:
        """Watch an item until it is over."""
        self._number += 1
        heap = self._heap
        heapq.heappush(heap, (item.until_ns, self._number, item))
        self.next_ns = min(self.next_ns, item.until_ns)
        if len(heap) > self._compact_at:
            # What is over stays until its deadline, and that may be far away.
            heap[:] = [entry for entry in heap if not entry[2].is_over]
            heapq.heapify(heap)
            self._compact_at = 2 * len(heap) + _STALE_MAX

    def pass_to(self, at_ns: int) -> list[Lease | Shard]:
        """Let time pass, and return what is overdue. Each item is returned once."""
        late: list[Lease | Shard] = []
        heap, seen = self._heap, self._seen
        if seen:
            self._running_ns += min(at_ns - self._at_ns, self._running_grace_ns // 2)
        self._at_ns = at_ns
        while heap and heap[0][0] <= at_ns:
            item = heapq.heappop(heap)[2]
            if not item.is_over:
                seen.append((at_ns, self._running_ns, item))
        while seen:
            since_ns, running_ns, item = seen[0]
            is_late = (
                since_ns + self._grace_ns < at_ns or running_ns + self._running_grace_ns < self._running_ns
            )
            if not (is_late or item.is_over):
                break
            seen.popleft()
            if not item.is_over:
                late.append(item)
        self.next_ns = heap[0][0] if heap else _NEVER_NS
        if seen:
            self.next_ns = at_ns  # Every line says for how long it has run.
        return late

    def clear(self) -> None:
        """Forget everything."""
        self._heap.clear()
        self._seen.clear()
        self.next_ns = _NEVER_NS

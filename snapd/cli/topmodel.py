"""What ``snapd top`` shows, as numbers: no terminal, no socket, no clock of its own.

``History`` takes what the daemon says, and gives a ``Frame``. Everything kept here is bounded.
"""

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from snapd.cli.topframe import AttemptRow, Daemon, Event, Frame, GroupRow, Outcome, PeerRow, RankRow, Rates
from snapd.core.overview import ArenaMap, AttemptGroup, AttemptLine, Order, PeerLine
from snapd.core.session import ArenaView
from snapd.errors import Reason
from snapd.exchange import WatchPush
from snapd.units import MS_PER_S, NS_PER_MS, NS_PER_S
from snapd.wire import StatsRep, WatchLost, WatchRefused, WatchTransition

RATE_WINDOW_S: Final = 10.0
SAMPLES_MAX: Final = 128
EVENTS_MAX: Final = 256
# The latest attempts that the typical time in a state is taken from.
_TIMES_MAX: Final = 101
NO_DAEMON: Final = "no daemon"


class _Sample(NamedTuple):
    """Counters at one time; rates are the difference of two."""

    at_ns: int
    attempts: int
    ok: int
    refused: int
    evicted: int
    committed_bytes: int
    ingested_bytes: int
    outcomes: dict[str, int]
    peers: dict[str, tuple[int, int]]


class History:
    """What the daemon said, as far back as it takes to show rates and the latest events.

    Args:
        order: which attempts come first.
        events_max: events kept.
    """

    def __init__(self, order: Order = "deadline", events_max: int = EVENTS_MAX) -> None:
        self.order: Order = order
        self.watch_problem = ""
        self._stats: StatsRep | None = None
        self._stats_s = 0.0
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_MAX)
        self._events: deque[Event] = deque(maxlen=events_max)
        self._times: dict[str, deque[float]] = {}
        self._epoch = ""
        self._problem = ""
        self._detail = ""
        self._problem_s: float | None = None

    # --- what the daemon says ------------------------------------------------------------------

    def add_stats(self, stats: StatsRep, at_s: float) -> None:
        """Take an answer that came at *at_s*, in unix seconds."""
        if stats.epoch != self._epoch:
            if self._epoch:
                detail = f"another daemon: pid {stats.pid}, epoch {stats.epoch}"
                self._events.append(Event(at=at_s, event="daemon.seen", detail=detail))
            self._epoch = stats.epoch
            self._samples.clear()
            self._times.clear()
        self._stats, self._stats_s = stats, at_s
        self._problem, self._detail, self._problem_s = "", "", None
        self._samples.append(_sample_of(stats))
        # The oldest is the one that rates are counted from.
        while len(self._samples) > 2 and _age_s(self._samples[1], stats.now_ns) >= RATE_WINDOW_S:
            self._samples.popleft()

    def add_problem(self, problem: str, detail: str, at_s: float) -> None:
        """Note that the daemon cannot be asked; what it said before is not shown any more."""
        if self._problem_s is None:
            self._problem_s = at_s
        self._problem, self._detail = problem, detail
        self._stats = None
        self._samples.clear()

    def add_push(self, push: WatchPush, at_s: float) -> None:
        """Take a transition, a refusal, or a count of those that were lost, which came at *at_s*."""
        stats = self._stats
        if stats is not None and not isinstance(push, WatchLost):
            # The daemon's clock says when it happened; the daemon may be on another host.
            at_s = min(at_s, self._stats_s + (push.at_ns - stats.now_ns) / NS_PER_S)
        match push:
            case WatchTransition():
                if push.from_state:
                    times = self._times.setdefault(push.from_state, deque(maxlen=_TIMES_MAX))
                    times.append(push.duration_ms)
                event = Event(
                    at=at_s,
                    event="session.transition",
                    session_id=push.session_id,
                    slab_handle=push.slab_handle,
                    from_state=push.from_state,
                    to_state=push.to_state,
                    reason=push.reason,
                    num_tokens=push.num_tokens,
                    bytes=push.bytes,
                    duration_ms=push.duration_ms,
                )
            case WatchRefused():
                event = Event(
                    at=at_s,
                    event="sync.refused",
                    session_id=push.session_id,
                    reason=push.reason,
                    num_tokens=push.num_tokens,
                    detail=push.detail,
                )
            case WatchLost():
                event = Event(at=at_s, event="watch.lost", count=push.count)
        self._events.append(event)

    def take_events(self) -> tuple[Event, ...]:
        """Return the events, oldest first, and forget them."""
        events = tuple(self._events)
        self._events.clear()
        return events

    # --- what is shown -------------------------------------------------------------------------

    def frame(self, at_s: float, events: Iterable[Event] | None = None) -> Frame:
        """Return what is to be shown at *at_s*, in unix seconds.

        Args:
            at_s: not before what was taken last.
            events: in place of those that are kept.
        """
        shown = tuple(reversed(self._events)) if events is None else tuple(events)
        stats = self._stats
        if stats is None or stats.overview is None:
            return Frame(
                at=at_s,
                connected=False,
                problem=self._problem,
                detail=self._detail,
                waiting_since=self._problem_s,
                order=self.order,
                events=shown,
            )
        now_ns = stats.now_ns + max(0, round((at_s - self._stats_s) * NS_PER_S))
        overview = stats.overview
        base, over_s, is_since_start = self._base(stats)
        return Frame(
            at=at_s,
            connected=True,
            watch_problem=self.watch_problem,
            daemon=_daemon_of(stats),
            rates=_rates(base, self._samples[-1], over_s, is_since_start),
            outcomes=_outcomes(base, self._samples[-1], over_s),
            ranks=_ranks(stats.core.arenas, overview.maps),
            groups=tuple(self._group(group, now_ns) for group in overview.groups),
            order=self.order,
            attempts=tuple(sort_attempts((_attempt(line, now_ns) for line in overview.attempts), self.order)),
            peers=tuple(_peer(line, base, over_s, now_ns) for line in overview.peers),
            surveyed_ago_ms=_ms(stats.now_ns - overview.surveyed_ns),
            events=shown,
        )

    def _base(self, stats: StatsRep) -> tuple[_Sample, float, bool]:
        """Return what rates are counted from, over how many seconds, and whether that is the start."""
        first = self._samples[0]
        over_s = _age_s(first, stats.now_ns)
        if len(self._samples) > 1 and over_s > 0:
            return first, over_s, False
        over_s = max(stats.uptime_ms, 1) / MS_PER_S
        return _Sample(0, 0, 0, 0, 0, 0, 0, {}, {}), over_s, True

    def _group(self, group: AttemptGroup, now_ns: int) -> GroupRow:
        times = self._times.get(group.state)
        return GroupRow(
            state=group.state,
            is_leased=group.is_leased,
            count=group.count,
            bytes=group.bytes,
            oldest_ms=_ms(now_ns - group.oldest_since_ns) if group.count else 0.0,
            left_ms=_ms(group.next_deadline_ns - now_ns) if group.count else None,
            typical_ms=statistics.median(times) if times else None,
        )


_ORDERS: Final = {
    "deadline": lambda row: (row.left_ms, -row.age_ms),
    "age": lambda row: (-row.age_ms, row.slab_handle),
    "bytes": lambda row: (-row.bytes, -row.age_ms),
}
ORDERS: Final[tuple[Order, ...]] = ("deadline", "age", "bytes")


def sort_attempts(rows: Iterable[AttemptRow], order: Order) -> list[AttemptRow]:
    """Return attempts in the order in which they are shown."""
    return sorted(rows, key=_ORDERS[order])


def _ms(duration_ns: int) -> float:
    return duration_ns / NS_PER_MS


def _age_s(sample: _Sample, now_ns: int) -> float:
    return (now_ns - sample.at_ns) / NS_PER_S


def _sample_of(stats: StatsRep) -> _Sample:
    core = stats.core
    # Every outcome is the end of an attempt or a refusal.
    refused = sum(core.outcomes_by_reason.values()) - (core.attempts - core.open_sessions)
    peers = stats.overview.peers if stats.overview else ()
    return _Sample(
        at_ns=stats.now_ns,
        attempts=core.attempts,
        ok=core.attempts_ok,
        refused=refused,
        evicted=core.outcomes_by_reason.get(Reason.EVICTED.value, 0),
        committed_bytes=core.bytes_committed,
        ingested_bytes=core.bytes_ingested,
        outcomes=core.outcomes_by_reason,
        peers={line.peer: (line.ok, line.bytes_ok) for line in peers},
    )


def _rates(base: _Sample, last: _Sample, over_s: float, is_since_start: bool) -> Rates:
    return Rates(
        over_s=over_s,
        is_since_start=is_since_start,
        attempts=(last.attempts - base.attempts) / over_s,
        ok=(last.ok - base.ok) / over_s,
        refused=(last.refused - base.refused) / over_s,
        evicted=(last.evicted - base.evicted) / over_s,
        committed_bytes=(last.committed_bytes - base.committed_bytes) / over_s,
        ingested_bytes=(last.ingested_bytes - base.ingested_bytes) / over_s,
    )


def _outcomes(base: _Sample, last: _Sample, over_s: float) -> tuple[Outcome, ...]:
    """Return outcomes: ok first, then the most frequent."""
    total = sum(last.outcomes.values())
    ordered = sorted(last.outcomes.items(), key=lambda item: (item[0] != Reason.OK, -item[1], item[0]))
    return tuple(
        Outcome(
            reason=reason,
            count=count,
            share=count / total,
            per_s=(count - base.outcomes.get(reason, 0)) / over_s,
        )
        for reason, count in ordered
        if count
    )


def _ranks(arenas: Iterable[ArenaView], maps: Iterable[ArenaMap]) -> tuple[RankRow, ...]:
    map_by_rank = {arena_map.rank: arena_map for arena_map in maps}
    return tuple(
        RankRow(
            books=books,
            map=arena_map,
            writing_bytes=sum(arena_map.writing_bytes),
            ready_bytes=sum(arena_map.ready_bytes),
            leased_bytes=sum(arena_map.leased_bytes),
        )
        for books in arenas
        if (arena_map := map_by_rank.get(books.rank)) is not None
    )


def _attempt(line: AttemptLine, now_ns: int) -> AttemptRow:
    return AttemptRow(
        slab_handle=line.slab_handle,
        session_id=line.session_id,
        state=line.state,
        is_leased=line.is_leased,
        abort_wanted=line.abort_wanted,
        peer=line.peer,
        num_tokens=line.num_tokens,
        bytes=line.bytes,
        age_ms=_ms(now_ns - line.created_ns),
        in_state_ms=_ms(now_ns - line.state_since_ns),
        left_ms=_ms(line.deadline_ns - now_ns),
        num_committed=line.num_committed,
        num_ranks=line.num_ranks,
    )


def _peer(line: PeerLine, base: _Sample, over_s: float, now_ns: int) -> PeerRow:
    ok, bytes_ok = base.peers.get(line.peer, (0, 0))
    return PeerRow(
        peer=line.peer,
        open_attempts=line.open_attempts,
        open_bytes=line.open_bytes,
        ended=line.ended,
        ok=line.ok,
        refused=line.refused,
        bytes_ok=line.bytes_ok,
        # Who was counted among the others meanwhile begins anew.
        ok_per_s=max(0, line.ok - ok) / over_s,
        bytes_per_s=max(0, line.bytes_ok - bytes_ok) / over_s,
        last_problem=line.last_problem,
        last_ago_ms=_ms(now_ns - line.last_ns) if line.last_ns else None,
    )


def _daemon_of(stats: StatsRep) -> Daemon:
    return Daemon(
        version=stats.version,
        epoch=stats.epoch,
        pid=stats.pid,
        uptime_ms=stats.uptime_ms,
        transport=stats.transport,
        connections=stats.connections,
        watchers=stats.watchers,
        requests_waiting=stats.requests_waiting,
        open_sessions=stats.core.open_sessions,
        quarantined_shards=stats.core.quarantined_shards,
        is_draining=stats.core.is_draining,
        log_lines=stats.log.lines_written,
        log_dropped=stats.log.dropped,
        log_write_errors=stats.log.write_errors,
    )

"""Which metrics there are: one table, from which the scrape and the page in the docs are made.

Names and units follow Prometheus: base units (seconds, bytes), ``_total`` for what only grows, no unit
twice. Labels are closed sets: reasons, states, ranks, kinds of requests.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from snapd import wire as w
from snapd.config import Config
from snapd.core.fsm import STATE_TIMER_REASON, TRANSFER_FAILED_REASONS, VOTE_NO_REASONS
from snapd.core.session import ArenaView
from snapd.errors import Reason
from snapd.metrics.looplag import LoopLag
from snapd.metrics.tally import Histogram, Outcome, Tally

# Outcomes that are told from the first scrape on, so that a rate sees the first of them.
ABORT_REASONS: Final = (
    *STATE_TIMER_REASON.values(), *sorted(TRANSFER_FAILED_REASONS), *sorted(VOTE_NO_REASONS),
    Reason.PARTIAL_TRANSFER, Reason.WRITER_GONE, Reason.CLIENT_ABORT, Reason.EVICTED, Reason.SUPERSEDED,
    Reason.DAEMON_STOPPED,
)  # fmt: skip
REFUSAL_REASONS: Final = (
    Reason.SNAPSHOT_BUF_FULL, Reason.TOO_LARGE, Reason.LAYOUT_MISMATCH, Reason.LIMIT_REACHED, Reason.DRAINING,
    Reason.INVALID_REQUEST,
)  # fmt: skip
# What says that bytes did not come, or not as they were sent.
TRANSPORT_REASONS: Final = (
    Reason.TRANSFER_FAILED, Reason.TRANSFER_TIMEOUT, Reason.PARTIAL_TRANSFER, Reason.CHECKSUM_MISMATCH,
    Reason.WRITER_GONE,
)  # fmt: skip
_EXPECTED_OUTCOMES: Final[tuple[tuple[Outcome, Reason], ...]] = (
    ("ok", Reason.OK),
    *(("aborted", reason) for reason in ABORT_REASONS),
    *(("refused", reason) for reason in REFUSAL_REASONS),
)

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Value: TypeAlias = float | Histogram
Sample: TypeAlias = tuple[tuple[str, ...], Value]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a scrape tells: everything as it is at one moment.

    Attributes:
        stats: what `snapd status` is told.
        leased: attempts that a rank reads.
        request_times: seconds from a request to its reply.
        refused: error replies by reason.
        warnings: how often each kind of warning came up, shown or not.
    """

    stats: w.StatsRep
    leased: int
    tally: Tally
    request_times: Mapping[type[w.Request], Histogram]
    refused: Mapping[Reason, int]
    lag: LoopLag
    warnings: Mapping[str, int]
    config: Config


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as it is scraped; of a histogram without ``_bucket``, ``_sum`` and ``_count``.
        help: what it counts, for the scrape and the docs.
        samples: label values, in the order of *labels*, and value of each series.
        labels: names of the labels.
        look_at: what to make of it, for the docs.
    """

    name: str
    kind: Kind
    help: str
    samples: Callable[[Seen], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    look_at: str = ""


def _one(value: Callable[[Seen], Value]) -> Callable[[Seen], Iterable[Sample]]:
    """Return samples of a metric without labels."""
    return lambda seen: [((), value(seen))]


def _arenas(value: Callable[[ArenaView], float]) -> Callable[[Seen], Iterable[Sample]]:
    return lambda seen: [((str(arena.rank),), value(arena)) for arena in seen.stats.core.arenas]


def _by_label(values: Callable[[Seen], Mapping[Any, Value]]) -> Callable[[Seen], Iterable[Sample]]:
    """Return samples of a metric with one label, from its values by label."""
    return lambda seen: [((str(label),), value) for label, value in sorted(values(seen).items())]


def _build(seen: Seen) -> Iterator[Sample]:
    yield (seen.stats.version, seen.stats.transport, seen.config.eviction_policy), 1


def _outcomes(seen: Seen) -> Iterator[Sample]:
    counts = dict.fromkeys(_EXPECTED_OUTCOMES, 0) | dict(seen.tally.outcomes)
    yield from sorted(counts.items())


def _transport_errors(seen: Seen) -> Iterator[Sample]:
    for reason in TRANSPORT_REASONS:
        yield (reason,), seen.tally.outcomes["aborted", reason]
    if seen.stats.mooncake is not None:
        yield ("notification-refused",), seen.stats.mooncake.notifications_refused


def _notifications(seen: Seen) -> Iterator[Sample]:
    mooncake = seen.stats.mooncake
    if mooncake is not None:
        yield ("taken",), mooncake.notifications_taken
        yield ("refused",), mooncake.notifications_refused
        yield ("ignored",), mooncake.notifications_ignored


def _registered_pieces(seen: Seen) -> Iterator[Sample]:
    if seen.stats.mooncake is not None:
        yield (), seen.stats.mooncake.registered_pieces


def _kv_events(value: Callable[[w.KVEventStatistics], float]) -> Callable[[Seen], Iterable[Sample]]:
    """Return samples of what is published for routers; none while nothing is."""
    return lambda seen: [((), value(seen.stats.kv_events))] if seen.stats.kv_events else []


def _kv_events_unpublished(seen: Seen) -> Iterator[Sample]:
    if seen.stats.kv_events is not None:
        yield from (((why,), count) for why, count in sorted(seen.stats.kv_events.unpublished.items()))


def _quarantined(seen: Seen) -> Iterator[Sample]:
    for why in ("corrupt", "leased", "undrained"):
        yield (why,), seen.tally.quarantined[why]


def _state_times(seen: Seen) -> Iterator[Sample]:
    yield from ((states, times) for states, times in seen.tally.state_times.items() if times.count)


def _request_times(seen: Seen) -> Iterator[Sample]:
    for kind, times in seen.request_times.items():
        # Kinds that nobody has used would only make every scrape longer.
        if times.count:
            yield (kind.__name__,), times


def fragmentation(arena: ArenaView) -> float:
    """Return the share of the free bytes that is not in the largest hole; 0 when nothing is free."""
    return 1 - arena.largest_hole_bytes / arena.free_bytes if arena.free_bytes else 0.0


METRICS: Final = (
    # --- the daemon
    Metric(
        "snapd_build_info", "gauge", "Version and choices of the daemon; always 1.", _build,
        ("version", "transport", "eviction_policy"), "Which daemons run which version.",
    ),
    Metric(
        "snapd_draining", "gauge", "1 while the daemon takes no new attempts, else 0.",
        _one(lambda seen: float(seen.stats.core.is_draining)), (), "1 for long: `snapd drain --off`.",
    ),
    # --- attempts
    Metric(
        "snapd_attempts_begun_total", "counter", "Attempts that got a slab.",
        _one(lambda seen: seen.stats.core.attempts), (), "Its rate is how often D pushes.",
    ),
    Metric(
        "snapd_outcomes_total", "counter", "Attempts that ended and prepares that were refused.",
        _outcomes, ("outcome", "reason"), "The share with outcome ok; the other reasons say what to do.",
    ),
    Metric(
        "snapd_attempts_open", "gauge", "Attempts that have not ended, by state.",
        _by_label(lambda seen: seen.stats.core.sessions_by_state), ("state",),
        "Many READY: P ingests too slowly. Many TRANSFERRING: the transport is slow.",
    ),
    Metric(
        "snapd_attempts_open_limit", "gauge",
        "The most attempts that may be open or in quarantine (sessions_max).",
        _one(lambda seen: seen.config.sessions_max), (), "At it prepares are refused with limit-reached.",
    ),
    Metric(
        "snapd_attempts_leased", "gauge", "Attempts that a rank reads at present.",
        _one(lambda seen: seen.leased), (), "They cannot be evicted.",
    ),
    Metric(
        "snapd_attempt_state_duration_seconds", "histogram",
        "Time that attempts spent in a state, observed when they leave it for another.",
        _state_times, ("state", "to_state"),
        "TRANSFERRING to READY is the transfer time; READY to INGESTED how long snapshots wait for P.",
    ),
    Metric(
        "snapd_evictions_total", "counter", "READY snapshots that made room for others.",
        _one(lambda seen: seen.tally.outcomes["aborted", Reason.EVICTED]), (),
        "Often: the arena is too small, or P ingests too late.",
    ),
    # --- bytes
    Metric(
        "snapd_committed_bytes_total", "counter", "Payload bytes that D committed.",
        _one(lambda seen: seen.stats.core.bytes_committed), (), "Its rate is the load of the data plane.",
    ),
    Metric(
        "snapd_ingested_bytes_total", "counter", "Payload bytes that P took into its tree.",
        _one(lambda seen: seen.stats.core.bytes_ingested), (),
        "Far below what was committed: work for nothing.",
    ),
    Metric(
        "snapd_evicted_bytes_total", "counter", "Payload bytes of evicted snapshots.",
        _one(lambda seen: seen.tally.evicted_bytes), (), "What was pushed for nothing.",
    ),
    Metric(
        "snapd_ingested_tokens_total", "counter", "Tokens whose KV P took into its tree.",
        _one(lambda seen: seen.tally.ingested_tokens), (), "Prefill that P was spared.",
    ),
    # --- arenas
    Metric(
        "snapd_arena_capacity_bytes", "gauge", "Bytes of the arena: free, live and quarantined.",
        _arenas(lambda arena: arena.capacity_bytes), ("rank",), "What the other figures are shares of.",
    ),
    Metric(
        "snapd_arena_free_bytes", "gauge", "Bytes in holes.",
        _arenas(lambda arena: arena.free_bytes), ("rank",), "Capacity less this is what is used.",
    ),
    Metric(
        "snapd_arena_live_bytes", "gauge", "Bytes that attempts own.",
        _arenas(lambda arena: arena.live_bytes), ("rank",), "With the evictable ones.",
    ),
    Metric(
        "snapd_arena_evictable_bytes", "gauge", "Live bytes that may make room for others.",
        _arenas(lambda arena: arena.evictable_bytes), ("rank",),
        "Free and evictable together are what a prepare can have.",
    ),
    Metric(
        "snapd_arena_quarantined_bytes", "gauge", "Bytes that nobody owns and that may not be reused yet.",
        _arenas(lambda arena: arena.quarantined_bytes), ("rank",),
        "High: D does not prove drain; look at why transfers fail.",
    ),
    Metric(
        "snapd_arena_largest_hole_bytes", "gauge", "Bytes of the largest hole.",
        _arenas(lambda arena: arena.largest_hole_bytes), ("rank",),
        "Snapshots above it are cut into one extent a plane. No hole crosses a registered piece.",
    ),
    Metric(
        "snapd_arena_holes", "gauge", "Number of holes.",
        _arenas(lambda arena: arena.num_holes), ("rank",), "Grows with fragmentation.",
    ),
    Metric(
        "snapd_arena_fragmentation_ratio", "gauge",
        "Share of the free bytes that is not in the largest hole.",
        _arenas(fragmentation), ("rank",), "Near 1: pushes are made of many small pieces, and slower.",
    ),
    # --- quarantine and leases
    Metric(
        "snapd_quarantined_shards", "gauge", "Shards whose bytes are in quarantine.",
        _one(lambda seen: seen.stats.core.quarantined_shards), (), "As the quarantined bytes.",
    ),
    Metric(
        "snapd_quarantines_total", "counter", "Slabs that went into quarantine.",
        _quarantined, ("why",),
        "undrained: a write may still land; leased: somebody may still read; corrupt: bytes did not match.",
    ),
    Metric(
        "snapd_quarantine_duration_seconds", "histogram", "Time that slabs were in quarantine.",
        _by_label(lambda seen: seen.tally.quarantine_times), ("why",),
        "why is what released them; time: no proof ever came.",
    ),
    Metric(
        "snapd_lease_duration_seconds", "histogram", "Time that ranks held a lease, by how it ended.",
        _by_label(lambda seen: seen.tally.lease_times), ("reason",),
        "ok is how long P copies; lease-expired: P was too slow, or is gone.",
    ),
    # --- requests and connections
    Metric(
        "snapd_request_duration_seconds", "histogram",
        "Time from a request that was decoded to its reply that was queued.",
        _request_times, ("kind",), "VoteReq waits for the votes of other ranks; the others do not wait.",
    ),
    Metric(
        "snapd_requests_refused_total", "counter", "Requests that were answered with an error.",
        _by_label(lambda seen: seen.refused), ("reason",),
        "Refused prepares are among the outcomes, not here. stale-handle: somebody is late.",
    ),
    Metric(
        "snapd_requests_waiting", "gauge", "Votes that wait for other ranks.",
        _one(lambda seen: seen.stats.requests_waiting), (), "Stays above 0: a rank does not vote.",
    ),
    Metric(
        "snapd_messages_absorbed_total", "counter",
        "Messages that came again or too late, and changed nothing.",
        _one(lambda seen: seen.stats.core.messages_absorbed), (), "Repeats after lost replies are harmless.",
    ),
    Metric(
        "snapd_connections", "gauge", "Connections to the control socket.",
        _one(lambda seen: seen.stats.connections), (), "0: neither P nor D is there.",
    ),
    Metric(
        "snapd_connections_limit", "gauge", "The most connections at one time (connections_max).",
        _one(lambda seen: seen.config.connections_max), (), "At it new ones are refused.",
    ),
    Metric(
        "snapd_watchers", "gauge", "Connections that watch transitions.",
        _one(lambda seen: seen.stats.watchers), (), "`snapd watch`.",
    ),
    Metric(
        "snapd_warnings_total", "counter", "Warnings about peers, shown on stderr or left out there.",
        _by_label(lambda seen: {kind.replace(" ", "-"): count for kind, count in seen.warnings.items()}),
        ("kind",), "bad-frame, peer-refused, client-does-not-read and such: stderr says whose fault.",
    ),
    # --- transport
    Metric(
        "snapd_transport_errors_total", "counter",
        "Attempts whose bytes did not come, or not as they were sent.",
        _transport_errors, ("kind",), "Look at D's log, at the network, and at late writes.",
    ),
    Metric(
        "snapd_mooncake_notifications_total", "counter",
        "Notifications beside transfers; with Mooncake only.",
        _notifications, ("result",), "ignored: garbage, or of another epoch.",
    ),
    Metric(
        "snapd_mooncake_registered_pieces", "gauge",
        "Pieces of arenas that are registered; with Mooncake only.",
        _registered_pieces, (), "Does not change while the daemon lives.",
    ),
    # --- the event log
    Metric(
        "snapd_log_lines_written_total", "counter", "Lines of the event log on file.",
        _one(lambda seen: seen.stats.log.lines_written), (),
        "Stands still while attempts end: the disk hangs.",
    ),
    Metric(
        "snapd_log_written_bytes_total", "counter", "Bytes of these lines.",
        _one(lambda seen: seen.stats.log.bytes_written), (), "How fast the disk fills.",
    ),
    Metric(
        "snapd_log_records_dropped_total", "counter", "Records that got no line.",
        _one(lambda seen: seen.stats.log.dropped), (), "Above 0: the log has gaps, each with its count.",
    ),
    Metric(
        "snapd_log_write_errors_total", "counter", "System calls of the log that failed, retries included.",
        _one(lambda seen: seen.stats.log.write_errors), (), "`snapd status` has the last error.",
    ),
    Metric(
        "snapd_log_queued_lines", "gauge", "Lines that wait for the disk.",
        _one(lambda seen: seen.stats.log.queued_lines), (), "Grows: the disk is too slow.",
    ),
    Metric(
        "snapd_log_queued_bytes", "gauge", "Bytes that wait for the disk.",
        _one(lambda seen: seen.stats.log.queued_bytes), (), "Bounded by log_queue_bytes_max.",
    ),
    Metric(
        "snapd_log_rotations_total", "counter", "Files begun because the one before was full.",
        _one(lambda seen: seen.stats.log.rotations), (), "Often: raise log_rotate_bytes.",
    ),
    # --- KV events, where they are published
    Metric(
        "snapd_kv_events_batches_total", "counter", "Batches of KV events that were sent.",
        _kv_events(lambda stats: stats.batches), (), "The next sequence number; subscribers count along.",
    ),
    Metric(
        "snapd_kv_events_stored_pages_total", "counter", "Pages that routers were told to be there.",
        _kv_events(lambda stats: stats.stored_pages), (), "0 while some become READY: D sends no page keys.",
    ),
    Metric(
        "snapd_kv_events_removed_pages_total", "counter", "Pages that routers were told to be gone.",
        _kv_events(lambda stats: stats.removed_pages), (), "Follows the pages stored.",
    ),
    Metric(
        "snapd_kv_events_pages", "gauge", "Distinct pages that routers are told to be there.",
        _kv_events(lambda stats: stats.pages), (), "Bounded by kv_events_pages_max.",
    ),
    Metric(
        "snapd_kv_events_unpublished_total", "counter", "READY snapshots that routers were not told of.",
        _kv_events_unpublished, ("why",),
        "no-hashes: D sends neither page keys nor block hashes; pages-max, queue-full: raise that bound.",
    ),
    Metric(
        "snapd_kv_events_facts_dropped_total", "counter",
        "Attempts of which token ids or block hashes were not kept.",
        _kv_events(lambda stats: stats.facts_dropped), (), "Raise kv_events_queue_bytes_max.",
    ),
    Metric(
        "snapd_kv_events_queued_bytes", "gauge", "What waits to be published, about.",
        _kv_events(lambda stats: stats.queued_bytes), (), "Bounded by kv_events_queue_bytes_max.",
    ),
    Metric(
        "snapd_kv_events_replays_total", "counter", "Replays that were asked for and answered.",
        _kv_events(lambda stats: stats.replays), (), "Often: subscribers do not keep up.",
    ),
    # --- the event loop and what is remembered
    Metric(
        "snapd_event_loop_lag_seconds", "histogram",
        "How late a timer of the event loop was, 20 times a second.",
        _one(lambda seen: seen.lag.times), (), "While the loop is late nobody is served.",
    ),
    Metric(
        "snapd_event_loop_lag_max_seconds", "gauge", "The greatest lag of the last one to two minutes.",
        _one(lambda seen: seen.lag.max_s), (), "Catches the one long pause.",
    ),
    Metric(
        "snapd_timers", "gauge", "Deadlines that are armed.",
        _one(lambda seen: seen.stats.timers), (), "About one an open attempt, lease and quarantine.",
    ),
    Metric(
        "snapd_layouts", "gauge", "Layouts that are declared.",
        _one(lambda seen: seen.stats.core.layouts), (),
        "0: P has not declared any, every prepare is refused.",
    ),
    Metric(
        "snapd_page_keys_held", "gauge", "Page keys that open attempts hold.",
        _one(lambda seen: seen.stats.core.page_keys_held), (), "Bounded by page_keys_total_max.",
    ),
    Metric(
        "snapd_sessions_remembered", "gauge", "Sessions whose last ingested range is remembered.",
        _one(lambda seen: seen.stats.core.session_history), (), "Bounded by session_history_max.",
    ),
    Metric(
        "snapd_ended_attempts_remembered", "gauge", "Ended attempts that are remembered for repeats.",
        _one(lambda seen: seen.stats.core.ended_history), (), "Bounded by ended_history_max.",
    ),
)  # fmt: skip
assert len({metric.name for metric in METRICS}) == len(METRICS), "no two metrics have one name"
assert all(metric.name.endswith("_total") == (metric.kind == "counter") for metric in METRICS)


def table() -> str:
    """Return the metrics as a Markdown table, for the docs."""
    rows = ["| metric | kind | labels | what it is | what to look at |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} | {metric.look_at} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())

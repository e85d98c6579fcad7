# ruff: noqa: S608 - what stands in a query comes from here, or is quoted
"""What pressure looked like: how full the arenas were, what was evicted, and what was in quarantine.

Source: design, section 6.
"""

from itertools import pairwise

import msgspec

from snapd.errors import Reason
from snapd.forensics.arenamap import ArenaSeries
from snapd.forensics.facts import Selection
from snapd.forensics.tables import LogTables


class ArenaPressure(msgspec.Struct, frozen=True, kw_only=True):
    """How full one rank's arena was, over all epochs that are looked at.

    Attributes:
        rank: whose.
        capacity_bytes: the largest size it had; None: the log does not say.
        held_bytes_max: most bytes live and in quarantine.
        held_share_max: the same, of the capacity.
        held_share_mean: over the time, about; None: no size, or no time.
        quarantined_bytes_max: most bytes in quarantine.
        largest_hole_bytes_min: the least that the largest hole had.
        is_complete: the log has everything; if not, the bytes are a lower bound.
    """

    rank: int
    capacity_bytes: int | None
    held_bytes_max: int
    held_share_max: float | None
    held_share_mean: float | None
    quarantined_bytes_max: int
    largest_hole_bytes_min: int | None
    is_complete: bool


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """What pressure looked like.

    Attributes:
        arenas: by rank.
        series: each arena over the time, for drawing.
        evictions, evicted_bytes: READY snapshots that made room for others.
        refused_full: prepares for which there was no room.
        quarantined_shards, quarantined_bytes: that went into quarantine at some time, padding not counted.
        quarantine_by_why: shards by why they went there.
        released_by_why: shards by what let them out of quarantine.
        quarantine_p50_ms, quarantine_max_ms: how long they were there; None: none came out.
        leases, leases_expired: rights to read that were given, and those that ran out.
    """

    arenas: list[ArenaPressure]
    series: list[ArenaSeries]
    evictions: int
    evicted_bytes: int
    refused_full: int
    quarantined_shards: int
    quarantined_bytes: int
    quarantine_by_why: dict[str, int]
    released_by_why: dict[str, int]
    quarantine_p50_ms: float | None
    quarantine_max_ms: float | None
    leases: int
    leases_expired: int


def pressure(tables: LogTables) -> Pressure | None:
    """Return what pressure looked like in what is selected; None: the log has no slabs."""
    where = _records_where(tables.selection)
    series = tables.arenas()
    if not series:
        return None
    evictions, evicted_bytes, refused_full = tables.rows(
        f"SELECT count(*) FILTER (reason = '{Reason.EVICTED}'), "
        f"total(bytes, reason = '{Reason.EVICTED}'), "
        f"count(*) FILTER (reason = '{Reason.SNAPSHOT_BUF_FULL}') FROM attempts"
    )[0]
    shards, shard_bytes = tables.rows(
        f"SELECT count(*), total(bytes, TRUE) FROM records WHERE event = 'slab.quarantined' AND {where}"
    )[0]
    came_out = f"event = 'slab.released' AND was = 'quarantined' AND {where}"
    p50_ms, max_ms = tables.rows(
        f"SELECT quantile_cont(duration_ms, 0.5), max(duration_ms) FROM records WHERE {came_out}"
    )[0]
    leases, leases_expired = tables.rows(
        "SELECT count(*) FILTER (event = 'lease.granted'), "
        f"count(*) FILTER (event = 'lease.ended' AND reason = '{Reason.LEASE_EXPIRED}') "
        f"FROM records WHERE {where}"
    )[0]
    return Pressure(
        arenas=[
            _arena_pressure(rank, [arena for arena in series if arena.rank == rank])
            for rank in sorted({arena.rank for arena in series})
        ],
        series=series,
        evictions=evictions,
        evicted_bytes=evicted_bytes,
        refused_full=refused_full,
        quarantined_shards=shards,
        quarantined_bytes=shard_bytes,
        quarantine_by_why=_by_why(tables, f"event = 'slab.quarantined' AND {where}"),
        released_by_why=_by_why(tables, came_out),
        quarantine_p50_ms=p50_ms,
        quarantine_max_ms=max_ms,
        leases=leases,
        leases_expired=leases_expired,
    )


def _by_why(tables: LogTables, where: str) -> dict[str, int]:
    return dict(tables.rows(f"SELECT why, count(*) FROM records WHERE {where} GROUP BY 1 ORDER BY 2 DESC, 1"))


def _records_where(selection: Selection) -> str:
    tests = ["TRUE"]
    if selection.since_ts is not None:
        tests.append(f"ts >= {selection.since_ts!r}")
    if selection.until_ts is not None:
        tests.append(f"ts < {selection.until_ts!r}")
    if selection.epoch:
        quoted = selection.epoch.replace("'", "''")
        tests.append(f"epoch = '{quoted}'")
    return " AND ".join(tests)


def _arena_pressure(rank: int, series: list[ArenaSeries]) -> ArenaPressure:
    points = [(arena, point) for arena in series for point in arena.points]
    shares = [point.held_bytes_max / arena.capacity_bytes for arena, point in points if arena.capacity_bytes]
    holes = [point.largest_hole_bytes_min for _, point in points if point.largest_hole_bytes_min is not None]
    return ArenaPressure(
        rank=rank,
        capacity_bytes=max((arena.capacity_bytes for arena in series if arena.capacity_bytes), default=None),
        held_bytes_max=max((point.held_bytes_max for _, point in points), default=0),
        held_share_max=max(shares, default=None),
        held_share_mean=_mean_share(series),
        quarantined_bytes_max=max((point.quarantined_bytes_max for _, point in points), default=0),
        largest_hole_bytes_min=min(holes, default=None),
        is_complete=all(arena.is_complete for arena in series),
    )


def _mean_share(series: list[ArenaSeries]) -> float | None:
    """Return the held share over the time from the first point of each epoch to its last."""
    weighted, seconds = 0.0, 0.0
    for arena in series:
        if not arena.capacity_bytes:
            continue
        for before, after in pairwise(arena.points):
            # What was held at a slice's end is held until something happens again.
            wait_s = after.ts - before.ts
            held = before.live_bytes + before.quarantined_bytes
            weighted += held / arena.capacity_bytes * wait_s
            seconds += wait_s
    return weighted / seconds if seconds else None

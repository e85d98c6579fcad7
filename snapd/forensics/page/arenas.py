"""What each arena held, for drawing: a raster of fixed size, and the rectangles where they are few.

Source: design, sections 4 and 6.
"""

from typing import TYPE_CHECKING, Any, Final

from snapd.forensics.arenamap import ArenaSeries
from snapd.forensics.page.attempts import binary_s
from snapd.forensics.page.data import Arena, BoxColumns
from snapd.forensics.page.raster import Coverage
from snapd.forensics.report import Report
from snapd.forensics.tables import LogTables
from snapd.units import ceil_div

if TYPE_CHECKING:
    from snapd.forensics.page.data import F64

BOXES_MAX: Final = 60_000
LIVE: Final = 0
QUARANTINED: Final = 1
_ROWS: Final = 160
# All rasters together stay small: with many ranks each is coarser in time.
_COLUMNS_OF_ALL: Final = 4_800
_COLUMNS_MIN: Final = 240
_COLUMNS_MAX: Final = 2_400
_BOXES_AT_ONCE: Final = 500_000


def arenas(
    tables: LogTables, report: Report, begin: float, end: float, num_rows: int, boxes_max: int = BOXES_MAX
) -> tuple[list[Arena], int]:
    """Return the arenas by rank, and how many rectangles were too many to be kept.

    Needs the table ``page_rows``.

    Args:
        tables: the log.
        report: its figures; what it says of each arena over the time is taken over.
        begin: the page's first moment, unix seconds.
        end: its last.
        num_rows: rows of the page: what points there is none of them.
        boxes_max: rectangles of all arenas that may be kept.
    """
    if report.pressure is None:
        return [], 0
    connection = tables.connection
    connection.execute(_slabs(tables, begin, end))
    try:
        total = tables.value("SELECT count(*) FROM page_boxes")
        columns = _COLUMNS_OF_ALL // max(len(report.pressure.arenas), 1)
        columns = min(max(columns, _COLUMNS_MIN), _COLUMNS_MAX)
        found = []
        for pressure in report.pressure.arenas:
            series = [arena for arena in report.pressure.series if arena.rank == pressure.rank]
            size_bytes = pressure.capacity_bytes or tables.value(
                "SELECT coalesce(max(offset_bytes + size_bytes), 1) FROM page_boxes WHERE rank = ?",
                pressure.rank,
            )
            live, quarantined, boxes = _drawn(
                tables, pressure.rank, size_bytes, begin, end, num_rows,
                columns=columns, keep=total <= boxes_max,
            )  # fmt: skip
            at_s, shares = _samples(tables, series, size_bytes, begin)
            found.append(
                Arena(
                    rank=pressure.rank,
                    device=next((arena.device for arena in reversed(series) if arena.device), ""),
                    size_bytes=size_bytes,
                    live=live,
                    quarantined=quarantined,
                    at_s=at_s,
                    live_share=shares[0].astype("float32"),
                    quarantined_share=shares[1].astype("float32"),
                    hole_share=shares[2].astype("float32"),
                    boxes=boxes,
                )
            )
        return found, 0 if total <= boxes_max else total
    finally:
        connection.execute("DROP TABLE page_boxes")


def _slabs(tables: LogTables, begin: float, end: float) -> str:
    """Return the statement that makes ``page_boxes``: who held which bytes, and when.

    Only what was held at some moment of the page's time. A slab ends with its release; one without an end
    lasts as long as its epoch, one without a begin has been there since that began.
    """
    where = "TRUE"
    if tables.selection.epoch:
        quoted = tables.selection.epoch.replace("'", "''")
        where = f"epoch = '{quoted}'"
    return f"""
        CREATE OR REPLACE TEMP TABLE page_boxes AS
        WITH slabs AS (
            SELECT epoch, rank, slab_handle,
                   min(ts) FILTER (event = 'slab.allocated') AS allocated,
                   min(ts) FILTER (event = 'slab.quarantined') AS quarantined,
                   max(ts) FILTER (event = 'slab.released') AS released,
                   any_value(was) FILTER (event = 'slab.released') AS was,
                   any_value(extents) AS extents
            FROM records
            WHERE event IN ('slab.allocated', 'slab.quarantined', 'slab.released') AND {where}
            GROUP BY epoch, rank, slab_handle
        ), times AS (
            SELECT slabs.*, page_row,
                   coalesce(allocated, epochs.begin_ts) AS t0, coalesce(released, epochs.end_ts) AS t1,
                   -- Without a begin its quarantine began before the log does.
                   coalesce(quarantined, CASE WHEN was = 'quarantined' THEN epochs.begin_ts END) AS tq,
                   unnest(from_json(extents, '[["BIGINT"]]')) AS pair
            FROM slabs JOIN epochs USING (epoch) LEFT JOIN page_rows USING (epoch, slab_handle)
        )
        SELECT rank, slab_handle, page_row, t0, coalesce(tq, t1) AS t1, {LIVE} AS kind,
               pair[1] AS offset_bytes, pair[2] AS size_bytes
        FROM times WHERE (coalesce(tq, t1) > t0 OR tq IS NULL)
                         AND t0 <= {end!r} AND coalesce(tq, t1) >= {begin!r}
        UNION ALL
        SELECT rank, slab_handle, page_row, tq, t1, {QUARANTINED}, pair[1], pair[2]
        FROM times WHERE tq <= {end!r} AND t1 >= {begin!r}
    """


def _drawn(
    tables: LogTables,
    rank: int,
    size_bytes: int,
    begin: float,
    end: float,
    num_rows: int,
    *,
    columns: int,
    keep: bool,
) -> tuple[Any, Any, BoxColumns | None]:
    """Return one arena's rasters of live and of quarantined bytes, and its rectangles if they are kept."""
    import numpy as np

    span = max(end - begin, 1e-6)
    cover = [Coverage(_ROWS, columns), Coverage(_ROWS, columns)]
    count = tables.value("SELECT count(*) FROM page_boxes WHERE rank = ?", rank)
    # What is kept is bounded already; of the others only so many at once are in memory.
    parts = 1 if keep else max(ceil_div(count, _BOXES_AT_ONCE), 1)
    boxes: BoxColumns | None = None
    for part in range(parts):
        found = tables.connection.execute(
            f"""
            SELECT t0 - {begin!r} AS t0, t1 - {begin!r} AS t1, offset_bytes::DOUBLE / {size_bytes} AS low,
                   (offset_bytes + size_bytes)::DOUBLE / {size_bytes} AS high, kind,
                   coalesce(page_row, {num_rows}) AS page_row
            FROM page_boxes WHERE rank = ? AND slab_handle % {parts} = {part} ORDER BY t0, offset_bytes
            """,
            [rank],
        ).fetchnumpy()
        t0, t1, low, high = (np.asarray(found[name], np.float64) for name in ("t0", "t1", "low", "high"))
        kind = np.asarray(found["kind"])
        for which, coverage in enumerate(cover):
            own = kind == which
            coverage.add(t0[own] / span, t1[own] / span, low[own], high[own])
        if keep:
            boxes = BoxColumns(
                t0=binary_s(t0), t1=binary_s(t1),
                low=low.astype(np.float32), high=high.astype(np.float32),
                kind=kind.astype(np.uint8), row=np.asarray(found["page_row"]).astype(np.uint32),
            )  # fmt: skip
    return cover[LIVE].shades(), cover[QUARANTINED].shades(), boxes


def _samples(
    tables: LogTables, series: list[ArenaSeries], size_bytes: int, begin: float
) -> "tuple[F64, F64]":
    """Return times, and shares that were live, in quarantine, and in the largest hole, shape [3, samples].

    The share of the largest hole is not a number where the log does not tell.
    """
    import numpy as np

    epochs = {epoch.epoch: epoch for epoch in tables.epochs}
    former = ""
    at: list[float] = []
    shares: list[tuple[float, float, float]] = []
    for arena in series:
        if arena.points and at:
            # While no daemon runs there is no arena; a new epoch begins with an empty one.
            whole = float("nan") if arena.capacity_bytes is None else arena.capacity_bytes / size_bytes
            at.append(max(at[-1], epochs[former].end_ts - begin))
            shares.append((0.0, 0.0, float("nan")))
            at.append(max(at[-1], epochs[arena.epoch].begin_ts - begin))
            shares.append((0.0, 0.0, whole))
        former = arena.epoch
        for point in arena.points:
            hole = point.largest_hole_bytes
            at.append(point.ts - begin)
            shares.append(
                (
                    point.live_bytes / size_bytes,
                    point.quarantined_bytes / size_bytes,
                    float("nan") if hole is None else hole / size_bytes,
                )
            )
    return np.array(at, np.float64), np.array(shares, np.float64).reshape(-1, 3).T

"""The rows of the page: every attempt, or all failures and an even part of the rest; and their events.

``chosen`` makes the temporary table ``page_rows``: the attempts that are shown, with their place on the page.

Source: design, section 6.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from snapd.errors import Reason
from snapd.forensics.page.data import (
    NO_EPOCH,
    OLDER,
    READY,
    REFUSED,
    RESERVED,
    TRANSFERRING,
    AttemptColumns,
    EventColumns,
)
from snapd.forensics.page.palette import OPEN
from snapd.forensics.tables import LogTables

if TYPE_CHECKING:
    from snapd.forensics.page.data import F32, F64

# Failures take at most this share of the rows, so that there is something to compare them with.
OTHERS_SHARE_MAX: Final = 0.9
_SESSION_CHARS_MAX: Final = 1_024
_EVENTS_PER_ATTEMPT_MAX: Final = 60_000
_NAMES_MAX: Final = 250
_STEPS_A_SECOND: Final = 1 << 20
_U32_MAX: Final = (1 << 32) - 1
_U16_MAX: Final = (1 << 16) - 1
_STATE_CODES: Final = {"RESERVED": RESERVED, "TRANSFERRING": TRANSFERRING, "READY": READY}
# A page knows one reason for ok. Older logs may say anything, also words that mean something else here.
REASON: Final = (
    f"CASE WHEN ok THEN '{Reason.OK}' WHEN reason IN ('{Reason.OK}', '{OPEN}') THEN 'not ok: ' || reason "
    "ELSE reason END"
)
_EVENTS: Final = "('slab.allocated', 'slab.quarantined', 'slab.released', 'lease.granted', 'lease.ended')"


class Sample(NamedTuple):
    """How many attempts there are, and how many of them are on the page: those that ended OK, and others."""

    ok: int
    ok_shown: int
    others: int
    others_shown: int

    @property
    def is_whole(self) -> bool:
        """Every attempt is on the page."""
        return self.ok == self.ok_shown and self.others == self.others_shown


def choose(tables: LogTables, attempts_max: int) -> Sample:
    """Return how many attempts are shown: all failures, as long as they leave some room for the rest."""
    ok, others = tables.rows("SELECT count(*) FILTER (ok), count(*) FILTER (NOT ok) FROM attempts")[0]
    others += tables.value("SELECT count(*) FROM open_attempts")
    if ok + others <= attempts_max:
        return Sample(ok, ok, others, others)
    others_shown = min(others, max(attempts_max - ok, int(attempts_max * OTHERS_SHARE_MAX)))
    return Sample(ok, min(ok, attempts_max - others_shown), others, others_shown)


@contextmanager
def chosen(tables: LogTables, sample: Sample, begin: float) -> Iterator[None]:
    """Have ``page_rows``. Where not all attempts are shown, those shown are spread evenly over the log.

    Args:
        tables: the log.
        sample: how many.
        begin: unix seconds; an attempt without any time is put as many seconds later as it is lines down.
    """
    when = f"coalesce(started_ts, ended_ts, {begin!r} + in_log)"
    tables.connection.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE page_rows AS
        WITH everything AS (
            SELECT epoch, epoch_no, slab_handle, session_id, ok, {REASON} AS reason, num_tokens,
                   token_start, bytes, started_ts, ended_ts, duration_ms, reserved_ms, transferring_ms,
                   ready_ms, last_state, is_refusal, is_older, FALSE AS is_open, file, line_no
            FROM attempts
            UNION ALL
            SELECT epoch, epoch_no, slab_handle, session_id, FALSE, '{OPEN}', num_tokens, NULL, bytes,
                   started_ts, since_ts, NULL, NULL, NULL, NULL, state, FALSE, FALSE, TRUE, NULL, NULL
            FROM open_attempts
        ), numbered AS (
            SELECT *,
                   row_number() OVER (PARTITION BY ok ORDER BY ended_ts, file, line_no, slab_handle) - 1
                       AS nth,
                   row_number() OVER (ORDER BY file, line_no, slab_handle) - 1 AS in_log
            FROM everything
        )
        SELECT *, {when} AS begin_ts,
               row_number() OVER (ORDER BY {when}, file, line_no, slab_handle) - 1 AS page_row
        FROM numbered
        WHERE CASE WHEN ok THEN {_spread(sample.ok, sample.ok_shown)}
                   ELSE {_spread(sample.others, sample.others_shown)} END
        """
    )
    try:
        yield
    finally:
        tables.connection.execute("DROP TABLE page_rows")


def _spread(total: int, shown: int) -> str:
    """Return a test that is true for *shown* of the *total* rows, at even distances."""
    if shown >= total:
        return "TRUE"
    return f"(nth * {shown}) // {total} <> ((nth + 1) * {shown}) // {total}"


def attempt_columns(
    tables: LogTables, begin: float, end: float, reasons: Mapping[str, int], other_reason: int
) -> tuple[AttemptColumns, list[str]]:
    """Return the rows of ``page_rows`` and the session ids that they point to.

    Args:
        tables: the log.
        begin: the page's first moment, unix seconds.
        end: its last.
        reasons: their numbers.
        other_reason: the number of those that have none.
    """
    import numpy as np

    found = tables.connection.execute(
        f"""
        WITH shards AS (
            SELECT epoch, slab_handle, count(DISTINCT rank) AS ranks FROM records
            WHERE event = 'slab.allocated' GROUP BY 1, 2
        )
        SELECT begin_ts - {begin!r} AS start_s,
               coalesce(session_id, '')[:{_SESSION_CHARS_MAX}] AS session, reason,
               coalesce(slab_handle, 0)::DOUBLE AS handle,
               coalesce(bytes, 0)::DOUBLE AS bytes,
               greatest(0, least(coalesce(num_tokens, 0), {_U32_MAX})) AS tokens,
               greatest(0, least(coalesce(token_start, 0), {_U32_MAX})) AS token_start,
               CASE WHEN epoch_no < 0 THEN {NO_EPOCH} ELSE least(epoch_no, {NO_EPOCH}) END AS epoch,
               least(coalesce(ranks, 0), {_U16_MAX}) AS ranks,
               coalesce(last_state, '') AS last_state, is_refusal, is_older, is_open,
               -- For an open attempt the log has no sums: what came before its state is put under RESERVED.
               CASE WHEN is_open THEN (ended_ts - begin_ts) * 1000
                    ELSE coalesce(reserved_ms, 0) END AS reserved_ms,
               -- An older log knows one time only: that of D's write into P's pool.
               CASE WHEN is_older THEN coalesce(duration_ms, 0) ELSE coalesce(transferring_ms, 0) END
                   AS transferring_ms,
               coalesce(ready_ms, 0) AS ready_ms,
               CASE WHEN is_open THEN ({end!r} - ended_ts) * 1000 ELSE 0 END AS until_now_ms
        FROM page_rows LEFT JOIN shards USING (epoch, slab_handle) ORDER BY page_row
        """
    ).fetchnumpy()
    numbers: dict[str, int] = {}
    session = [numbers.setdefault(name, len(numbers)) for name in found["session"]]
    state = np.array([_STATE_CODES.get(name, RESERVED) for name in found["last_state"]], np.uint8)
    is_refusal, is_older = (np.asarray(found[name], bool) for name in ("is_refusal", "is_older"))
    start_s: F64 = np.asarray(found["start_s"], np.float64)
    now = np.asarray(found["until_now_ms"], np.float64)
    rows = AttemptColumns(
        start_s=binary_s(start_s),
        reserved_ms=_ms(found["reserved_ms"] + np.where(state == RESERVED, now, 0)),
        transferring_ms=_ms(found["transferring_ms"] + np.where(state == TRANSFERRING, now, 0)),
        ready_ms=_ms(found["ready_ms"] + np.where(state == READY, now, 0)),
        session=np.array(session, np.uint32),
        handle=np.asarray(found["handle"], np.float64),
        bytes=np.asarray(found["bytes"], np.float64),
        tokens=np.asarray(found["tokens"]).astype(np.uint32),
        token_start=np.asarray(found["token_start"]).astype(np.uint32),
        reason=np.array([reasons.get(name, other_reason) for name in found["reason"]], np.uint8),
        epoch=np.asarray(found["epoch"]).astype(np.uint16),
        ranks=np.asarray(found["ranks"]).astype(np.uint16),
        last_state=np.where(is_refusal, REFUSED, np.where(is_older, OLDER, state)).astype(np.uint8),
        event_count=np.zeros(len(session), np.uint16),
    )  # fmt: skip
    return rows, list(numbers)


def binary_s(seconds: "F64") -> "F64":
    """Round to about a microsecond, so that the last bits are zero and are packed into less."""
    import numpy as np

    rounded: F64 = np.rint(seconds * _STEPS_A_SECOND) / _STEPS_A_SECOND
    return rounded


def _ms(values: Any) -> "F32":
    import numpy as np

    return np.round(np.maximum(np.asarray(values, np.float64), 0.0), 4).astype(np.float32)


class Events(NamedTuple):
    """The events of the rows.

    Attributes:
        columns: see there.
        count: for each row, how many of them are its; shape [attempts].
        kinds, whys: names that the columns point to.
        left_out: rows whose events were too many.
    """

    columns: EventColumns
    count: Any
    kinds: list[str]
    whys: list[str]
    left_out: int


def event_columns(tables: LogTables, num_rows: int, events_max: int) -> Events:
    """Return slabs and leases of the rows of ``page_rows``: of the failures first, while there is room."""
    import numpy as np

    joined = (
        "page_rows JOIN records ON page_rows.epoch = records.epoch "
        "AND page_rows.slab_handle = records.slab_handle "
        f"WHERE records.event IN {_EVENTS}"
    )
    counted = (
        f"SELECT page_row, any_value(page_rows.ok) AS ok, count(*) AS lines FROM {joined} GROUP BY page_row"
    )
    kept = (
        "SELECT page_row FROM (SELECT page_row, lines, sum(lines) OVER (ORDER BY ok, page_row) AS so_far "
        f"FROM ({counted})) WHERE so_far <= {events_max} AND lines <= {_EVENTS_PER_ATTEMPT_MAX}"
    )
    found = tables.connection.execute(
        f"""
        WITH kept AS ({kept}), lines AS (
            SELECT page_row, records.event, rank, records.epoch_no, records.seq, at_ns, ts, begin_ts,
                   coalesce(nullif(why, ''), records.reason, '') AS why,
                   from_json(nullif(extents, '[]'), '[["BIGINT"]]') AS pairs,
                   min(CASE WHEN records.event = 'slab.allocated' THEN at_ns END)
                       OVER (PARTITION BY page_row) AS begin_ns
            FROM {joined} AND page_row IN (SELECT page_row FROM kept)
        )
        SELECT page_row, event, least(greatest(coalesce(rank, 0), 0), {_U16_MAX}) AS rank, why,
               -- The monotonic clock where the attempt's begin is in the log: it is never set.
               greatest(coalesce((at_ns - begin_ns) / 1e6, (ts - begin_ts) * 1000), 0) AS at_ms,
               coalesce(list_sum([pair[2] for pair in pairs]), 0)::DOUBLE AS bytes,
               coalesce(pairs[1][1], 0)::DOUBLE AS first_offset,
               least(coalesce(len(pairs), 0), {_U16_MAX}) AS extents
        FROM lines ORDER BY page_row, epoch_no, seq
        """
    ).fetchnumpy()
    kinds: dict[str, int] = {}
    whys: dict[str, int] = {}
    kind = [kinds.setdefault(name, len(kinds)) for name in found["event"]]
    why = [_numbered(whys, name) for name in found["why"]]
    with_events = tables.value(f"SELECT count(*) FROM ({counted})")
    count = np.bincount(np.asarray(found["page_row"]).astype(np.int64), minlength=num_rows)
    columns = EventColumns(
        kind=np.array(kind, np.uint8),
        rank=np.asarray(found["rank"]).astype(np.uint16),
        at_ms=_ms(found["at_ms"]),
        why=np.array(why, np.uint8),
        bytes=np.asarray(found["bytes"], np.float64),
        offset=np.asarray(found["first_offset"], np.float64),
        extents=np.asarray(found["extents"]).astype(np.uint16),
    )
    return Events(
        columns, count.astype(np.uint16), list(kinds), list(whys), with_events - int((count > 0).sum())
    )


def _numbered(numbers: dict[str, int], name: str) -> int:
    """Number a name; there are few, but a log can say anything."""
    if name not in numbers and len(numbers) >= _NAMES_MAX:
        name = "(more)"
    return numbers.setdefault(name, len(numbers))

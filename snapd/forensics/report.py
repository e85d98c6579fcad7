# ruff: noqa: S608 - what stands in a query comes from here, or is quoted
"""The figures of a log: what came of the attempts, how fast, how long, and under what pressure.

``Report`` is what ``snapd forensics --json`` prints. Fields are only added to it, never renamed.

Source: design, section 6.
"""

from typing import Any, Final, Literal, TypeAlias

import msgspec

from snapd.core.events import State
from snapd.errors import REASON_HELP, Reason
from snapd.forensics.decoding import OLD_EVENT
from snapd.forensics.facts import EpochFacts, FileFacts, Selection, UnreadableLine
from snapd.forensics.lines import LogInput
from snapd.forensics.pressure import Pressure, pressure
from snapd.forensics.tables import LogTables

SCHEMA: Final = "snapd-forensics-1"
TOP_DEFAULT: Final = 10
UNREADABLE_SHOWN_MAX: Final = 20
GB_PER_S_HELP: Final = (
    "payload bytes of attempts that became READY, divided by the time that they spent TRANSFERRING; "
    "1 GB is 10^9 bytes. Attempts whose D committed without saying that it had started do not count."
)
By: TypeAlias = Literal["session", "d", "hour"]
_TIMED_STATES: Final = (State.RESERVED, State.TRANSFERRING, State.READY)
_ATTEMPT_FIELDS: Final = (
    "epoch, slab_handle, session_id, peer, ok, reason, num_tokens, token_start, bytes, started_ts, ended_ts, "
    "duration_ms, reserved_ms, transferring_ms, ready_ms, last_state, is_refusal, path, line_no"
)


class ReasonCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often something ended so.

    Attributes:
        reason: as in the log.
        count: outcomes.
        share: of all outcomes, 0 to 1.
        help: what it means and what to do; empty for a reason that this version does not know.
    """

    reason: str
    count: int
    share: float
    help: str


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts of one session, of one D or of one hour.

    Attributes:
        key: session id, D, or the hour as ``2026-01-31T17:00Z``; None: the log does not say.
        attempts, ok: outcomes, refusals too, and those that are ok.
        ok_share: 0 to 1.
        refused: prepares that were refused.
        ok_bytes: payload that P has.
        gb_per_s: see ``Speed``; None: not known.
        worst_reason: the most frequent reason but ``ok``; None: there is none.
        worst_count: how often.
        first_ts, last_ts: of the outcomes.
    """

    key: str | None
    attempts: int
    ok: int
    ok_share: float
    refused: int
    ok_bytes: int
    gb_per_s: float | None
    worst_reason: str | None
    worst_count: int
    first_ts: float | None
    last_ts: float | None


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of one sort, the first ones of them.

    Attributes:
        total: how many there are.
        shown: most attempts first; hours in order of time.
    """

    total: int
    shown: list[Group]


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and how fast they came.

    Attributes:
        asked_bytes: payload of all outcomes, refusals too.
        ready_bytes: payload that D has brought over.
        ok_bytes: payload that P has.
        gb_per_s: over all transfers; see ``definition``. None: no transfer has a time.
        gb_per_s_p50, gb_per_s_p10, gb_per_s_max: of single attempts.
        transfers: attempts that count.
        definition: what is divided by what.
    """

    asked_bytes: int
    ready_bytes: int
    ok_bytes: int
    gb_per_s: float | None
    gb_per_s_p10: float | None
    gb_per_s_p50: float | None
    gb_per_s_max: float | None
    transfers: int
    definition: str = GB_PER_S_HELP


class StateTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long attempts stayed in one state, in milliseconds."""

    state: str
    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


class AttemptFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt; see the table ``attempts``. *path* and *line_no* are where its outcome is."""

    epoch: str | None
    slab_handle: int | None
    session_id: str | None
    peer: str | None
    ok: bool
    reason: str
    num_tokens: int | None
    token_start: int | None
    bytes: int | None
    started_ts: float | None
    ended_ts: float | None
    duration_ms: float | None
    reserved_ms: float | None
    transferring_ms: float | None
    ready_ms: float | None
    last_state: str | None
    is_refusal: bool
    path: str
    line_no: int


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How reading went.

    Attributes:
        files: in the log's order.
        repeated: files that were named more than once.
        lines: all that are not empty.
        unreadable: those that say nothing.
        unreadable_lines: the first of them.
        duplicates: lines that were there more than once, and are counted once.
        older_lines: lines of an older log.
        unknown_kinds: events that this version does not know, with their number.
        unknown_fields: lines with fields that this version does not know; they are kept.
        missing_lines: numbers that are not in the log, between others that are.
        dropped: records that the daemon says it could not write.
    """

    files: list[FileFacts]
    repeated: list[str]
    lines: int
    unreadable: int
    unreadable_lines: list[UnreadableLine]
    duplicates: int
    older_lines: int
    unknown_kinds: dict[str, int]
    unknown_fields: int
    missing_lines: int
    dropped: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that ``snapd forensics`` prints of one log.

    Attributes:
        schema: names this form.
        selection: which attempts are looked at.
        begin_ts, end_ts: the time that is looked at; None: the log has no times.
        reading: files and lines.
        epochs: lives of the daemon, oldest first.
        attempts: outcomes, of attempts and of refusals.
        ok, ok_share: those that P has.
        refused: prepares that were refused.
        unfinished: attempts without an outcome: open at the log's end, or their end is missing.
        reasons: outcomes by reason, the most frequent first.
        by_session, by_d, by_hour: outcomes, grouped.
        speed: bytes and GB/s.
        states: time in each state; empty for older logs.
        slowest: attempts that took longest, the longest first.
        pressure: arenas; None: the log has no slabs.
        older_reasons, older_ok: of ``reasons`` and of ``ok``, what lines of the design before snapd say; what
            is left is snapd's own.
    """

    schema: str = SCHEMA
    selection: Selection
    begin_ts: float | None
    end_ts: float | None
    reading: Reading
    epochs: list[EpochFacts]
    attempts: int
    ok: int
    ok_share: float
    refused: int
    unfinished: int
    reasons: list[ReasonCount]
    by_session: Groups
    by_d: Groups
    by_hour: Groups
    speed: Speed
    states: list[StateTimes]
    slowest: list[AttemptFacts]
    pressure: Pressure | None
    older_reasons: dict[str, int] = {}
    older_ok: int = 0


def build_report(tables: LogTables, log: LogInput, *, top: int = TOP_DEFAULT) -> Report:
    """Return the figures of what *tables* have selected.

    Args:
        tables: the log.
        log: where it came from.
        top: how many sessions, Ds and slowest attempts; 0: all. Hours are always all.
    """
    attempts, ok, refused = tables.rows(
        "SELECT count(*), count(*) FILTER (ok), count(*) FILTER (is_refusal) FROM attempts"
    )[0]
    span = tables.span_ts()
    return Report(
        selection=tables.selection,
        begin_ts=span[0] if span else None,
        end_ts=span[1] if span else None,
        reading=_reading(tables, log),
        epochs=tables.epochs,
        attempts=attempts,
        ok=ok,
        ok_share=ok / attempts if attempts else 0.0,
        refused=refused,
        unfinished=tables.value("SELECT count(*) FROM open_attempts"),
        reasons=reasons(tables),
        by_session=groups(tables, "session", top),
        by_d=groups(tables, "d", top),
        by_hour=groups(tables, "hour", 0),
        speed=_speed(tables),
        states=_states(tables),
        slowest=slowest(tables, top),
        pressure=pressure(tables),
        older_reasons=dict(
            tables.rows("SELECT reason, count(*) FROM attempts WHERE is_older GROUP BY 1 ORDER BY 2 DESC, 1")
        ),
        older_ok=tables.value("SELECT count(*) FROM attempts WHERE is_older AND ok"),
    )


def _reading(tables: LogTables, log: LogInput) -> Reading:
    known = ", ".join(f"'{event}'" for event in (*_known_events(), OLD_EVENT))
    return Reading(
        files=tables.files,
        repeated=log.repeated,
        lines=tables.lines,
        unreadable=sum(file.unreadable for file in tables.files),
        unreadable_lines=tables.unreadable[:UNREADABLE_SHOWN_MAX],
        duplicates=tables.duplicates,
        older_lines=tables.value(f"SELECT count(*) FROM records WHERE event = '{OLD_EVENT}'"),
        unknown_kinds=dict(
            tables.rows(
                f"SELECT event, count(*) FROM records WHERE event NOT IN ({known}) "
                "GROUP BY 1 ORDER BY 2 DESC, 1"
            )
        ),
        unknown_fields=tables.value("SELECT count(*) FROM records WHERE extra IS NOT NULL"),
        missing_lines=sum(epoch.missing_lines for epoch in tables.epochs),
        dropped=sum(epoch.dropped for epoch in tables.epochs),
    )


def _known_events() -> list[str]:
    from snapd.eventlog import LINE_TYPES

    return list(LINE_TYPES)


def reasons(tables: LogTables) -> list[ReasonCount]:
    """Return the outcomes by reason, the most frequent first."""
    found = tables.rows("SELECT reason, count(*) FROM attempts GROUP BY 1 ORDER BY 2 DESC, 1")
    total = sum(count for _, count in found)
    return [
        ReasonCount(reason=reason, count=count, share=count / total, help=reason_help(reason))
        for reason, count in found
    ]


def reason_help(reason: str) -> str:
    """Return what a reason means; empty for one that this version does not know."""
    return REASON_HELP[Reason(reason)] if reason in Reason._value2member_map_ else ""


_GROUP_KEYS: Final[dict[By, str]] = {
    "session": "session_id",
    "d": "peer",
    "hour": "strftime(to_timestamp(floor(ended_ts / 3600) * 3600) AT TIME ZONE 'UTC', '%Y-%m-%dT%H:00Z')",
}


def groups(tables: LogTables, by: By, top: int) -> Groups:
    """Return the outcomes by session, by D or by hour.

    Args:
        tables: the log.
        by: how to group.
        top: how many groups; 0: all.
    """
    key = _GROUP_KEYS[by]
    total = tables.value(f"SELECT count(DISTINCT coalesce({key}, chr(0))) FROM attempts")
    found = tables.rows(
        f"""
        WITH keyed AS (SELECT {key} AS key, * FROM attempts),
        chosen AS (
            SELECT key, count(*) AS attempts, count(*) FILTER (ok) AS ok,
                   count(*) FILTER (is_refusal) AS refused,
                   total(bytes, ok) AS ok_bytes,
                   sum(bytes) FILTER ({_COUNTS_FOR_SPEED}) / 1e6
                       / sum(transferring_ms) FILTER ({_COUNTS_FOR_SPEED}) AS gb_per_s,
                   min(ended_ts) AS first_ts, max(ended_ts) AS last_ts
            FROM keyed GROUP BY key
            ORDER BY {"key" if by == "hour" else "attempts DESC, key"} NULLS LAST LIMIT {top or 1 << 60}
        ),
        worst AS (
            SELECT key, reason, count(*) AS count FROM keyed WHERE NOT ok GROUP BY key, reason
            QUALIFY row_number() OVER (PARTITION BY key ORDER BY count(*) DESC, reason) = 1
        )
        SELECT chosen.key, attempts, ok, ok / attempts, refused, ok_bytes, gb_per_s, worst.reason,
               coalesce(worst.count, 0), first_ts, last_ts
        FROM chosen LEFT JOIN worst ON chosen.key IS NOT DISTINCT FROM worst.key
        ORDER BY {"chosen.key" if by == "hour" else "attempts DESC, chosen.key"} NULLS LAST
        """
    )
    return Groups(total=total, shown=[Group(**_fields(Group, row)) for row in found])


_COUNTS_FOR_SPEED: Final = "became_ready AND transferring_ms > 0"


def _speed(tables: LogTables) -> Speed:
    row = tables.rows(
        f"""
        SELECT total(bytes, TRUE),
               total(bytes, became_ready),
               total(bytes, ok),
               sum(bytes) FILTER ({_COUNTS_FOR_SPEED}) / 1e6
                   / sum(transferring_ms) FILTER ({_COUNTS_FOR_SPEED}),
               quantile_cont(bytes / 1e6 / transferring_ms, 0.1) FILTER ({_COUNTS_FOR_SPEED}),
               quantile_cont(bytes / 1e6 / transferring_ms, 0.5) FILTER ({_COUNTS_FOR_SPEED}),
               max(bytes / 1e6 / transferring_ms) FILTER ({_COUNTS_FOR_SPEED}),
               count(*) FILTER ({_COUNTS_FOR_SPEED})
        FROM attempts
        """
    )[0]
    return Speed(**_fields(Speed, row))


def _states(tables: LogTables) -> list[StateTimes]:
    """Time in states, of the attempts that were in them: 0 ms is a state that was not entered."""
    found: list[StateTimes] = []
    for state in _TIMED_STATES:
        column = f"{state.value.lower()}_ms"
        # Every attempt was RESERVED, however short.
        entered = "NOT is_refusal AND NOT is_older" + (
            "" if state is State.RESERVED else f" AND {column} > 0"
        )
        row = tables.rows(
            f"SELECT count({column}), quantile_cont({column}, [0.5, 0.9, 0.99]), max({column}) "
            f"FROM attempts WHERE {entered}"
        )[0]
        if row[0]:
            p50, p90, p99 = row[1]
            found.append(
                StateTimes(state=state.value, count=row[0], p50_ms=p50, p90_ms=p90, p99_ms=p99, max_ms=row[2])
            )
    return found


def slowest(tables: LogTables, top: int) -> list[AttemptFacts]:
    """Return the attempts that took longest from prepare to end, the longest first; 0: all."""
    found = tables.rows(
        f"SELECT {_ATTEMPT_FIELDS} FROM attempts JOIN files USING (file) "
        "WHERE NOT is_refusal AND duration_ms > 0 "
        f"ORDER BY duration_ms DESC, epoch_no, seq LIMIT {top or 1 << 60}"
    )
    return [AttemptFacts(**_fields(AttemptFacts, row)) for row in found]


def _fields(struct: type[msgspec.Struct], row: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(struct.__struct_fields__, row, strict=False))

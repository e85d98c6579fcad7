# ruff: noqa: S608 - what stands in a query comes from here, or is quoted
"""The story of one session: each attempt, step by step, with the lines that say so.

Source: design, sections 3 and 6.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from snapd.errors import SnapdError
from snapd.forensics.decoding import OLD_EVENT
from snapd.forensics.report import reason_help
from snapd.forensics.tables import LogTables
from snapd.units import MS_PER_S, NS_PER_S, format_bytes, format_ms

_CLOSE_MAX: Final = 3
# Beginnings of attempts that are remembered: of a session, few are open at a time.
_BEGUN_MAX: Final = 10_000
_COLUMNS: Final = (
    "epoch_no", "epoch", "ts", "at_ns", "event", "slab_handle", "session_id", "peer", "rank", "from_state",
    "to_state", "ok", "reason", "num_tokens", "token_start", "bytes", "duration_ms", "reserved_ms",
    "transferring_ms", "ready_ms", "newer_handle", "former_epoch", "until_ns", "was", "why", "lease_id",
    "round", "detail", "retry_after_ms", "extents", "extra", "path", "line_no",
)  # fmt: skip


class NoSuchSession(SnapdError):
    """The log has no session of this name; the message names some that are like it."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the story.

    Attributes:
        ts: unix time; None: an older log without times.
        epoch: the life of the daemon that wrote it.
        slab_handle: the attempt; None: a refusal, or an older log.
        event: kind of the line.
        state: the attempt's state after it, if it changed.
        text: what happened, for a person.
        is_end: it ends an attempt, or is a refusal.
        ok: for an end: whether P has the snapshot.
        reason: for an end.
        since_start_ms: since the attempt's first line; None: a refusal, or that line is missing.
        path, line_no: where it is in the log.
        extra: fields that this version does not know.
    """

    ts: float | None
    epoch: str | None
    slab_handle: int | None
    event: str
    state: str
    text: str
    is_end: bool
    ok: bool | None
    reason: str | None
    since_start_ms: float | None
    path: str
    line_no: int
    extra: msgspec.Raw | None


class SessionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a session's attempts.

    Attributes:
        session_id: whose.
        attempts, ok, refused: outcomes, those that P has, and refused prepares.
        unfinished: attempts without an outcome.
        first_ts, last_ts: of the outcomes.
        ok_bytes: payload that P has.
        reasons: outcomes by reason.
    """

    session_id: str
    attempts: int
    ok: int
    refused: int
    unfinished: int
    first_ts: float | None
    last_ts: float | None
    ok_bytes: int
    reasons: dict[str, int]


def summarize(tables: LogTables, session_id: str) -> SessionSummary:
    """Return what came of a session's attempts.

    Raises:
        NoSuchSession: the log does not have it.
    """
    attempts, ok, refused, first_ts, last_ts, ok_bytes = tables.rows(
        "SELECT count(*), count(*) FILTER (ok), count(*) FILTER (is_refusal), min(ended_ts), max(ended_ts), "
        "total(bytes, ok) FROM attempts WHERE session_id = ?",
        session_id,
    )[0]
    unfinished = tables.value("SELECT count(*) FROM open_attempts WHERE session_id = ?", session_id)
    if not attempts and not unfinished:
        raise NoSuchSession(_not_found(tables, session_id))
    return SessionSummary(
        session_id=session_id,
        attempts=attempts,
        ok=ok,
        refused=refused,
        unfinished=unfinished,
        first_ts=first_ts,
        last_ts=last_ts,
        ok_bytes=ok_bytes,
        reasons=dict(
            tables.rows(
                "SELECT reason, count(*) FROM attempts WHERE session_id = ? GROUP BY 1 ORDER BY 2 DESC, 1",
                session_id,
            )
        ),
    )


def _not_found(tables: LogTables, session_id: str) -> str:
    close = tables.rows(
        "SELECT session_id FROM attempts WHERE session_id IS NOT NULL GROUP BY 1 "
        "ORDER BY contains(session_id, ?) DESC, jaro_winkler_similarity(session_id, ?) DESC, 1 "
        f"LIMIT {_CLOSE_MAX}",
        session_id,
        session_id,
    )
    hint = f"; there are {', '.join(repr(name) for (name,) in close)}" if close else ""
    return f"this log has no attempt of the session {session_id!r} in what is looked at{hint}"


def steps(tables: LogTables, session_id: str) -> Iterator[Step]:
    """Yield the story, attempts mixed as they were in time. Make no other query until the end."""
    teller = _Teller()
    rows = tables.stream(
        f"SELECT {', '.join(_COLUMNS)} FROM records JOIN files USING (file) "
        "WHERE session_id = ? ORDER BY epoch_no, seq, file, line_no",
        session_id,
    )
    for row in rows:
        step = teller.tell(dict(zip(_COLUMNS, row, strict=True)))
        if step is not None and _is_selected(tables, step):
            yield step


def _is_selected(tables: LogTables, step: Step) -> bool:
    chosen = tables.selection
    if chosen.epoch and step.epoch != chosen.epoch:
        return False
    if chosen.since_ts is None and chosen.until_ts is None:
        return True
    if step.ts is None:
        return False
    return (chosen.since_ts or 0) <= step.ts < (float("inf") if chosen.until_ts is None else chosen.until_ts)


class _Teller:
    """Makes sentences; remembers when each attempt began."""

    def __init__(self) -> None:
        self._begun_ns: dict[tuple[str, int], int] = {}
        self._refusal: dict[str, Any] | None = None

    def tell(self, row: dict[str, Any]) -> Step | None:
        event, handle = row["event"], row["slab_handle"] or None
        state, text, is_end = "", "", False
        match event:
            case "session.transition":
                state = row["to_state"]
                text = self._transition(row)
            case "slab.allocated":
                text = f"rank {row['rank']}: {_extents(row)} live"
            case "slab.quarantined":
                why = _WHY.get(row["why"], row["why"])
                text = f"rank {row['rank']}: {_extents(row)} into quarantine for {_until(row)} at most: {why}"
            case "slab.released":
                text = self._released(row)
            case "lease.granted":
                name = f"lease {row['lease_id']}, round {row['round']}"
                text = f"rank {row['rank']} may read for {_until(row)} ({name})"
            case "lease.ended":
                how = "done, ok" if row["ok"] else f"over: {row['reason']}"
                text = f"rank {row['rank']} is {how}, after {format_ms(row['duration_ms'])}"
            case "sync.refused":
                # Its outcome is the next line, and says less.
                self._refusal = row
                return None
            case "sync.outcome":
                is_end = True
                text = self._outcome(row)
            case str() if event == OLD_EVENT:
                is_end = True
                text = _old(row)
            case _:
                text = "an event that this version does not know"
        return Step(
            ts=row["ts"],
            epoch=row["epoch"],
            slab_handle=handle,
            event=event,
            state=state,
            text=text,
            is_end=is_end,
            ok=row["ok"] if is_end else None,
            reason=row["reason"] if is_end else None,
            since_start_ms=self._since_start_ms(row),
            path=row["path"],
            line_no=row["line_no"],
            extra=msgspec.Raw(row["extra"]) if row["extra"] else None,
        )

    def _since_start_ms(self, row: dict[str, Any]) -> float | None:
        key = (row["epoch"], row["slab_handle"])
        if row["event"] == "session.transition" and row["from_state"] == "":
            self._begun_ns[key] = row["at_ns"]
            if len(self._begun_ns) > _BEGUN_MAX:
                del self._begun_ns[next(iter(self._begun_ns))]
        begun_ns = self._begun_ns.get(key)
        return None if begun_ns is None else (row["at_ns"] - begun_ns) * MS_PER_S / NS_PER_S

    def _transition(self, row: dict[str, Any]) -> str:
        begin, end = row["token_start"], row["token_start"] + row["num_tokens"]
        spent = format_ms(row["duration_ms"])
        if row["from_state"] == "":
            who = f" by {row['peer']}" if row["peer"] else ""
            what = f"tokens {begin:,} to {end:,}" if begin else f"{end:,} tokens"
            return f"prepared{who}: {what}, {format_bytes(row['bytes'])}"
        former = f" (of epoch {row['former_epoch']})" if row["former_epoch"] else ""
        if row["to_state"] == "TRANSFERRING":
            return f"D writes, after {spent}{former}"
        if row["to_state"] == "READY":
            return f"all ranks committed, after {spent}{_speed(row['bytes'], row['duration_ms'])}"
        if row["to_state"] == "INGESTED":
            return f"P has it, after {spent} {row['from_state']}"
        newer = f", for attempt {row['newer_handle']}" if row["newer_handle"] else ""
        return f"{row['reason']}{newer}, after {spent} {row['from_state']}{former}"

    @staticmethod
    def _released(row: dict[str, Any]) -> str:
        was = "out of quarantine" if row["was"] == "quarantined" else "free"
        return (
            f"rank {row['rank']}: {_extents(row)} {was} ({row['why']}), after {format_ms(row['duration_ms'])}"
        )

    def _outcome(self, row: dict[str, Any]) -> str:
        if not row["slab_handle"]:
            refused, self._refusal = self._refusal, None
            detail = f": {refused['detail']}" if refused and refused["detail"] else ""
            again = (
                f"; try again after {refused['retry_after_ms']} ms"
                if refused and refused["retry_after_ms"]
                else ""
            )
            return f"refused {row['num_tokens']:,} tokens, {format_bytes(row['bytes'])}{detail}{again}"
        parts = [
            f"{format_ms(row[name])} {state}"
            for name, state in (
                ("reserved_ms", "RESERVED"),
                ("transferring_ms", "TRANSFERRING"),
                ("ready_ms", "READY"),
            )
            if row[name]
        ]
        helped = reason_help(row["reason"])
        return f"{format_ms(row['duration_ms'])} in all ({', '.join(parts) or 'no time'}). {helped}".rstrip()


_WHY: Final = {
    "undrained": "a write may still land",
    "leased": "a reader may still read",
    "corrupt": "its bytes did not match",
}  # fmt: skip


def _until(row: dict[str, Any]) -> str:
    return format_ms((row["until_ns"] - row["at_ns"]) * MS_PER_S / NS_PER_S)


def _speed(size_bytes: int, duration_ms: float) -> str:
    return f": {size_bytes / duration_ms / 1e6:.3g} GB/s" if duration_ms > 0 else ""


def _extents(row: dict[str, Any]) -> str:
    extents = msgspec.json.decode(row["extents"], type=tuple[tuple[int, int], ...])
    pieces = "" if len(extents) == 1 else f" in {len(extents)} pieces"
    where = f" at {extents[0][0]:,}" if extents else ""
    return f"{format_bytes(sum(size for _, size in extents))}{pieces}{where}"


def _old(row: dict[str, Any]) -> str:
    parts = [] if row["peer"] is None else [f"D {row['peer']}"]
    if row["num_tokens"] is not None:
        parts.append(f"{row['num_tokens']:,} tokens")
    if row["bytes"] is not None:
        parts.append(format_bytes(row["bytes"]))
    if row["duration_ms"] is not None:
        parts.append(format_ms(row["duration_ms"]))
    helped = reason_help(row["reason"])
    return ". ".join(part for part in (", ".join(parts), helped) if part)

"""Older logs: one JSON object a line, one line a sync attempt, under names that nobody has fixed.

Certain is only that there is an outcome as ``ok`` or ``status``, a reason, and a session id under some
name. Everything else is looked for under the names that such programs use, and kept when not known.
A field of an object inside the line counts too: ``{"session": {"id": 7}}`` has a ``session_id``.

Source: design, sections 1 and 6.
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from snapd.units import MS_PER_S

_SESSION_NAMES: Final = (
    "session_id", "session", "sessionid", "session_key", "session_name", "sid", "conversation_id",
    "conversation", "conv_id", "chat_id", "agent_id", "request_id", "rid", "id",
)  # fmt: skip
_FLAG_NAMES: Final = ("ok", "success", "is_ok", "succeeded", "sync_ok")
_STATUS_NAMES: Final = ("status", "outcome", "result", "status_code", "sync_status")
# The other way round: true is not OK.
_FAILED_NAMES: Final = ("failed", "is_failed", "has_failed", "sync_failed")
_REASON_NAMES: Final = (
    "reason", "reason_code", "fail_reason", "failure_reason", "why", "cause", "error", "error_code",
)  # fmt: skip
# After every other name with ``reason`` in it: these may be any text.
_MESSAGE_NAMES: Final = ("detail", "error_message", "message", "msg")
_TIME_NAMES: Final = ("ts", "timestamp", "time", "at", "t", "unix_time", "created_at", "datetime", "date")
_BYTES_NAMES: Final = ("bytes", "num_bytes", "nbytes", "size_bytes", "bytes_total", "total_bytes")
_TOKENS_NAMES: Final = ("num_tokens", "tokens", "ntokens", "n_tokens", "token_count", "num_slots")
_DURATION_MS_NAMES: Final = ("duration_ms", "latency_ms", "elapsed_ms", "took_ms", "ms")
_DURATION_S_NAMES: Final = ("duration_s", "latency_s", "elapsed_s", "duration", "elapsed", "latency")
PEER_NAMES: Final = (
    "peer", "d", "d_id", "d_worker", "d_name", "decode", "decode_id", "decode_worker", "decoder",
    "decoder_id", "decode_rank", "decode_addr", "decode_host", "src", "source", "worker", "worker_id",
    "client",
)  # fmt: skip
# What is in such an object is as if it stood in the line itself.
_WRAPPER_NAMES: Final = frozenset(
    {"result", "outcome", "response", "reply", "data", "payload", "fields", "attempt", "sync", "record",
     "extra"}
)  # fmt: skip
_OK_WORDS: Final = frozenset(
    {"ok", "okay", "success", "successful", "succeeded", "done", "complete", "completed", "ingested", "true",
     "pass", "passed", "synced", "yes", "y", "finished", "transferred", "committed"}
)  # fmt: skip
_NO_REASON: Final = frozenset({"", "none", "null"})
# Of an object that is a reason: these say it, others may explain it.
_REASON_KEYS: Final = ("reason", "code", "name", "type")
# A number that is too large to be seconds is in milli-, micro- or nanoseconds.
_SECONDS_MAX: Final = 1e11
_TIME_MAX: Final = 1e20
_NOT_A_WORD: Final = re.compile(r"[^a-z0-9]+")
_DIGITS: Final = re.compile(r"[+-]?\d{1,18}(?:\.\d{1,18})?")
_Path: TypeAlias = tuple[str, ...]


class OldAttempt(msgspec.Struct, kw_only=True, gc=False):
    """What one line of an older log says; what it does not say is None."""

    ok: bool
    reason: str
    session_id: str | None
    ts: float | None
    bytes: int | None
    num_tokens: int | None
    duration_ms: float | None
    peer: str | None
    extra: dict[str, Any]


class _Outcome(NamedTuple):
    """Whether an attempt is OK, and what its status says beyond that; empty: nothing."""

    ok: bool
    status: str


class _Fields:
    """A line's fields by their normal names, those of objects inside it too; remembers which were taken."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self._by_name: dict[str, tuple[_Path, Any]] = {}
        self._taken: set[_Path] = set()
        for name, value in fields.items():
            if value is not None:
                self._by_name.setdefault(_normal(name), ((name,), value))
        for name, value in fields.items():
            if isinstance(value, dict):
                self._add_inner(name, value)

    def _add_inner(self, name: str, inside: Mapping[str, Any]) -> None:
        outer = _normal(name)
        for inner, value in inside.items():
            if value is None:
                continue
            normal = _normal(inner)
            self._by_name.setdefault(f"{outer}_{normal}", ((name, inner), value))
            if outer in _WRAPPER_NAMES:
                self._by_name.setdefault(normal, ((name, inner), value))

    def take(self, names: Iterable[str], kinds: tuple[type, ...]) -> Any:
        """Return the first of *names* that is there, of one of *kinds* and not taken yet; None: none is."""
        for wanted in names:
            found = self._by_name.get(wanted)
            if found is not None and type(found[1]) in kinds and found[0] not in self._taken:
                self._taken.add(found[0])
                return found[1]
        return None

    def names_with(self, *parts: str) -> list[str]:
        """Return the names that have one of *parts* in them."""
        return [name for name in self._by_name if any(part in name for part in parts)]

    def names_ending(self, *ends: str) -> list[str]:
        """Return the names that end so."""
        return [name for name in self._by_name if name.endswith(ends)]

    def left(self) -> dict[str, Any]:
        """Return what was not taken."""
        left: dict[str, Any] = {}
        for name, value in self._fields.items():
            if (name,) in self._taken:
                continue
            if isinstance(value, dict) and value:
                inside = {inner: kept for inner, kept in value.items() if (name, inner) not in self._taken}
                if not inside:
                    continue
                value = inside
            left[name] = value
        return left


def read_old(fields: Mapping[str, Any]) -> OldAttempt | None:
    """Return what a line of an older log says; None: it has no outcome, so it is no attempt."""
    line = _Fields(fields)
    outcome = _outcome(line)
    if outcome is None:
        return None
    reason = _reason(line, outcome)
    session = line.take(_SESSION_NAMES, (str, int))
    if session is None:
        session = line.take(line.names_with("session", "conv"), (str, int))
    duration_ms = _finite(line.take(_DURATION_MS_NAMES, (int, float)), 1)
    if duration_ms is None:
        duration_ms = _finite(line.take(_DURATION_S_NAMES, (int, float)), MS_PER_S)
    ts = _unix_s(line.take(_TIME_NAMES, (int, float, str)))
    peer = line.take(PEER_NAMES, (str, int))
    return OldAttempt(
        ok=outcome.ok,
        reason=reason,
        session_id=None if session is None else str(session),
        ts=ts,
        bytes=_count(line.take(_BYTES_NAMES, (int,))),
        num_tokens=_count(line.take(_TOKENS_NAMES, (int,))),
        duration_ms=duration_ms,
        peer=None if peer is None else str(peer),
        extra=line.left(),
    )


def is_attempt(fields: Mapping[str, Any]) -> bool:
    """Whether a line of whatever kind has an outcome under a usual name, and a reason or a session too."""
    line = _Fields(fields)
    has_outcome = (
        line.take((*_FLAG_NAMES, *_FAILED_NAMES), (bool, int, float, str)) is not None
        or line.take(_STATUS_NAMES, (str, bool, int, float)) is not None
    )
    return has_outcome and (
        line.take((*_REASON_NAMES, *line.names_with("reason")), (str, int, float, list, dict)) is not None
        or line.take((*_SESSION_NAMES, *line.names_with("session")), (str, int)) is not None
    )


# --- outcome and reason ------------------------------------------------------------------------


def _outcome(line: _Fields) -> _Outcome | None:
    flag = line.take(_FLAG_NAMES, (bool, int, float, str))
    status = line.take(_STATUS_NAMES, (str, bool, int, float))
    if flag is None and status is None:
        failed = line.take(_FAILED_NAMES, (bool, int, float, str))
        if failed is not None:
            return _Outcome(not _is_yes(failed), "")
        flag = line.take(line.names_ending("_ok"), (bool, int, float, str))
    if flag is None and status is None:
        status = line.take(line.names_ending("status"), (str, bool, int, float))
    if flag is None and status is None:
        return None
    # A status that is no plain yes or no says why.
    text = "" if status is None or isinstance(status, bool) else str(status)
    return _Outcome(_is_yes(flag) if flag is not None else _is_ok(status), text)


def _is_yes(flag: bool | float | str) -> bool:
    flag = _number(flag)
    return _normal(flag) in _OK_WORDS if isinstance(flag, str) else bool(flag)


def _is_ok(status: bool | float | str) -> bool:
    status = _number(status)
    if isinstance(status, str):
        return _normal(status) in _OK_WORDS
    if isinstance(status, bool):
        return status
    # As an exit status or as HTTP counts.
    return status == 0 or 200 <= status < 300


def _number(value: bool | float | str) -> bool | float | str:
    """Return a number that was written as text as one."""
    return float(value) if isinstance(value, str) and _DIGITS.fullmatch(value.strip()) else value


def _reason(line: _Fields, outcome: _Outcome) -> str:
    # What is OK needs no reason: an error of 0 is none.
    kinds: tuple[type, ...] = (str,) if outcome.ok else (str, int, float, list, dict)
    for name in _reason_names(line, outcome):
        reason = _reason_text(line.take((name,), kinds))
        if reason:
            return reason
    return "ok" if outcome.ok else outcome.status or "unknown"


def _reason_names(line: _Fields, outcome: _Outcome) -> Iterator[str]:
    yield from _REASON_NAMES
    yield from line.names_with("reason")
    if not outcome.ok:
        yield from _MESSAGE_NAMES


def _reason_text(value: Any) -> str:
    """Return what a reason says: text, a number, or the first such thing in a list or an object."""
    if isinstance(value, dict):
        value = [value.get(key) for key in _REASON_KEYS] + list(value.values())
    if isinstance(value, list):
        texts = [item for item in value if isinstance(item, str) and item]
        numbers = [item for item in value if type(item) in (int, float)]
        value = next(iter(texts + numbers), None)
    if value is None:
        return ""
    text = str(value).strip()
    return "" if text.lower() in _NO_REASON else text


# --- values ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4_096)
def _normal(name: str) -> str:
    """``sessionId``, ``session-id`` and ``Session ID`` are the same name."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return _NOT_A_WORD.sub("_", snake.lower()).strip("_")


def _count(value: int | None) -> int | None:
    return value if value is not None and 0 <= value < 1 << 63 else None


def _finite(value: float | None, factor: float) -> float | None:
    """Return *value* times *factor*, if a column can hold that."""
    try:
        product = math.nan if value is None else float(value) * factor
    except OverflowError:
        return None
    return product if math.isfinite(product) else None


def _unix_s(value: float | str | None) -> float | None:
    """Return a time as unix seconds; a time without a zone is UTC."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    except ValueError:
        try:
            moment = datetime.fromisoformat(str(value).strip())
        except ValueError:
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not 0 < seconds < _TIME_MAX:
        return None
    while seconds >= _SECONDS_MAX:
        seconds /= MS_PER_S
    return seconds

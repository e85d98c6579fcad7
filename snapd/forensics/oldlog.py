"""Older logs: one JSON object a line, one line a sync attempt, under names that nobody has fixed.

Certain is only that there is an outcome as ``ok`` or ``status``, a reason, and a session id under some
name. Everything else is looked for under the names that such programs use, and kept when not known.

Source: design, sections 1 and 6.
"""

import functools
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from snapd.units import MS_PER_S

_SESSION_NAMES: Final = (
    "session_id", "session", "sessionid", "session_key", "session_name", "sid", "conversation_id",
    "conversation", "conv_id", "chat_id", "agent_id", "request_id", "rid", "id",
)  # fmt: skip
_FLAG_NAMES: Final = ("ok", "success", "is_ok", "succeeded")
_STATUS_NAMES: Final = ("status", "outcome", "result")
_REASON_NAMES: Final = ("reason", "fail_reason", "failure_reason", "error", "error_code", "cause", "detail")
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
_OK_WORDS: Final = frozenset(
    {"ok", "okay", "success", "successful", "succeeded", "done", "complete", "completed", "ingested", "true",
     "pass", "passed", "synced", "yes"}
)  # fmt: skip
_NO_REASON: Final = frozenset({"", "none", "null"})
# A number that is too large to be seconds is in milli-, micro- or nanoseconds.
_SECONDS_MAX: Final = 1e11
_TIME_MAX: Final = 1e20
_NOT_A_WORD: Final = re.compile(r"[^a-z0-9]+")


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


def read_old(fields: Mapping[str, Any]) -> OldAttempt | None:
    """Return what a line of an older log says; None: it has no outcome, so it is no attempt."""
    left = dict(fields)
    by_name = {_normal(name): name for name in reversed(left)}
    taken: set[str] = set()

    def take(names: tuple[str, ...], kinds: tuple[type, ...]) -> Any:
        for wanted in names:
            name = by_name.get(wanted)
            if name is not None and name not in taken and type(left[name]) in kinds:
                taken.add(name)
                return left[name]
        return None

    flag = take(_FLAG_NAMES, (bool, int, str))
    status = take(_STATUS_NAMES, (str, bool, int))
    if flag is None and status is None:
        return None
    ok = _is_ok(status) if flag is None else (bool(flag) if isinstance(flag, int) else _is_ok(flag))
    reason = take(_REASON_NAMES, (str,))
    session = take(_SESSION_NAMES, (str, int))
    if session is None:
        session = take(tuple(name for name in by_name if "session" in name or "conv" in name), (str, int))
    if reason is None or reason.strip().lower() in _NO_REASON:
        # A status that is no plain yes or no says why.
        reason = "ok" if ok else (status if isinstance(status, str) and status else "unknown")
    seconds = take(_DURATION_MS_NAMES, (int, float))
    if seconds is not None:
        duration_ms: float | None = float(seconds)
    else:
        seconds = take(_DURATION_S_NAMES, (int, float))
        duration_ms = None if seconds is None else float(seconds) * MS_PER_S
    ts = _unix_s(take(_TIME_NAMES, (int, float, str)))
    peer = take(PEER_NAMES, (str, int))
    return OldAttempt(
        ok=ok,
        reason=reason.strip(),
        session_id=None if session is None else str(session),
        ts=ts,
        bytes=_count(take(_BYTES_NAMES, (int,))),
        num_tokens=_count(take(_TOKENS_NAMES, (int,))),
        duration_ms=duration_ms,
        peer=None if peer is None else str(peer),
        extra={name: value for name, value in left.items() if name not in taken},
    )


@functools.lru_cache(maxsize=4_096)
def _normal(name: str) -> str:
    """``sessionId``, ``session-id`` and ``Session ID`` are the same name."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return _NOT_A_WORD.sub("_", snake.lower()).strip("_")


def _is_ok(outcome: bool | str | int) -> bool:
    if isinstance(outcome, bool):
        return outcome
    if isinstance(outcome, str):
        return _normal(outcome) in _OK_WORDS
    # As an exit status or as HTTP counts.
    return outcome == 0 or 200 <= outcome < 300


def _count(value: int | None) -> int | None:
    return value if value is not None and 0 <= value < 1 << 63 else None


def _unix_s(value: float | str | None) -> float | None:
    """Return a time as unix seconds; a time without a zone is UTC."""
    if value is None:
        return None
    try:
        seconds = float(value)
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

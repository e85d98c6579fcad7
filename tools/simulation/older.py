"""Lines that the design before snapd left in the log: D wrote into P's kv_pool, a line said how it went.

snapd is installed over it and goes on in the same file. The lines have the names that such programs use, one
kind a run.
"""

from typing import Any, Final

import msgspec

from snapd.errors import Reason
from tools.simulation.dice import Dice

# Seen on one recorded agentic run, in about these proportions; a good one is rare.
_OUTCOMES: Final = {str(Reason.ALLOC_FAILED): 88, str(Reason.SESSION_NOT_RESIDENT): 11, str(Reason.OK): 1}
_BEFORE_S: Final = 86_400.0


def older_lines(dice: Dice, count: int, end_ts: float) -> list[tuple[str, bytes]]:
    """Return lines, oldest first, each with its reason.

    Args:
        dice: chance.
        count: of lines.
        end_ts: unix time before which all are.
    """
    form = dice.below(4)
    lines: list[tuple[str, bytes]] = []
    ts = end_ts - _BEFORE_S
    for _ in range(count):
        ts += dice.below(1_000_000) / 1_000
        reason = dice.weighted(_OUTCOMES)
        line = _line(form, ts, reason, f"s{dice.below(6)}", dice)
        lines.append((reason, msgspec.json.encode(line) + b"\n"))
    return lines


def _line(form: int, ts: float, reason: str, session_id: str, dice: Dice) -> dict[str, Any]:
    is_ok = reason == Reason.OK
    tokens, took_ms = dice.between(1, 50_000), dice.below(90_000) / 1_000
    if form == 0:
        return {"ts": ts, "session_id": session_id, "ok": is_ok, "reason": reason, "num_tokens": tokens}
    if form == 1:
        status = "ok" if is_ok else "failed"
        return {
            "timestamp": ts, "event": "d_to_p_sync", "session": {"id": session_id}, "status": status,
            "reason": reason, "elapsed_ms": took_ms,
        }  # fmt: skip
    if form == 2:
        return {"time": ts, "sid": session_id, "status": reason, "n_tokens": tokens, "d": "d0"}
    return {"ts": ts, "sync": {"success": is_ok, "error": reason}, "rid": session_id, "latency_ms": took_ms}

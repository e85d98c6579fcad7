"""What a connector counts between two looks at it, in a form that can be added up and sent on.

Every count is under a name from ``COUNTERS``, and for outcomes under a reason as well, so that what is kept
is bounded.
"""

import threading
from collections.abc import Mapping
from typing import Final

# Name: what it counts, for people. Of these, the first four are by reason.
COUNTERS: Final = {
    "pushes": "Requests whose KV was to be sent, by how that ended",
    "loads": "Snapshots that were to be loaded, by how that ended",
    "lookups": "Requests that a snapshot was looked for, by what came of it",
    "problems": "Times that the daemon could not be asked, or was asked for what it cannot do",
    "pushed_tokens": "Tokens whose KV was sent",
    "pushed_bytes": "Bytes of KV sent",
    "push_seconds": "Time from the order to the end of pushes that succeeded",
    "loaded_tokens": "Tokens whose KV was loaded and not computed",
    "loaded_bytes": "Bytes of KV read and verified",
    "load_seconds": "Time from the order to the end of loads that succeeded",
}
BY_REASON: Final = ("pushes", "loads", "lookups", "problems")
OK: Final = "ok"

# By counter, and by reason where it has any; else under "".
Counts = dict[str, dict[str, float]]


def add_counts(into: Counts, other: Mapping[str, Mapping[str, float]]) -> None:
    """Add *other* to *into*."""
    for name, by_reason in other.items():
        own = into.setdefault(name, {})
        for reason, count in by_reason.items():
            own[reason] = own.get(reason, 0) + count


def total(counts: Mapping[str, Mapping[str, float]], name: str, reason: str | None = None) -> float:
    """Return a count, or the sum over its reasons."""
    by_reason = counts.get(name, {})
    return sum(by_reason.values()) if reason is None else by_reason.get(reason, 0)


def summary(counts: Mapping[str, Mapping[str, float]]) -> dict[str, int | float]:
    """Return what an operator wants to see of an interval, in a line."""
    pushed_bytes, loaded_bytes = total(counts, "pushed_bytes"), total(counts, "loaded_bytes")
    push_s, load_s = total(counts, "push_seconds"), total(counts, "load_seconds")
    pushes, loads = total(counts, "pushes"), total(counts, "loads")
    return {
        "Pushes": int(pushes),
        "Pushes failed": int(pushes - total(counts, "pushes", OK)),
        "Pushed tokens": int(total(counts, "pushed_tokens")),
        "Pushed MB": round(pushed_bytes / 1e6, 3),
        "Avg push (ms)": round(1e3 * push_s / max(1, total(counts, "pushes", OK)), 3),
        "Loads": int(loads),
        "Loads failed": int(loads - total(counts, "loads", OK)),
        "Loaded tokens": int(total(counts, "loaded_tokens")),
        "Loaded MB": round(loaded_bytes / 1e6, 3),
        "Avg load (ms)": round(1e3 * load_s / max(1, total(counts, "loads", OK)), 3),
        "Lookups": int(total(counts, "lookups")),
    }


class Tally:
    """Counts since they were taken last. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counts = {}

    def count(self, name: str, reason: str = "", amount: float = 1) -> None:
        """Add to a counter."""
        assert name in COUNTERS and bool(reason) == (name in BY_REASON), (name, reason)
        with self._lock:
            add_counts(self._counts, {name: {reason: amount}})

    def take(self) -> Counts:
        """Return the counts, and begin anew."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts

"""Two logs side by side, and a plain verdict.

Source: design, section 6.
"""

from math import erfc, sqrt
from typing import Final, Literal, TypeAlias

import msgspec

from snapd.forensics.report import Report, reason_help

Verdict: TypeAlias = Literal["better", "worse", "same", "unknown"]
# A difference that chance alone would make less often than this is one.
CHANCE_MAX: Final = 0.01
# A reason whose share changed by less is not named in the verdict.
NAMED_SHARE_MIN: Final = 0.01
_NAMED_MAX: Final = 3
_PERCENT: Final = 100


class ReasonDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How often something ended so, in each log.

    Attributes:
        reason: as in the logs.
        count, other_count: outcomes in this log and in the other.
        share, other_share: of all outcomes of that log, 0 to 1.
        share_change: this minus the other.
        is_by_chance: chance alone would make as large a difference more often than once in 100 times; None:
            a log has no attempts, so nobody can say.
        help: what the reason means.
    """

    reason: str
    count: int
    other_count: int
    share: float
    other_share: float
    share_change: float
    is_by_chance: bool | None
    help: str


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of both logs; None: that log does not say.

    Attributes:
        name: what it is, with its unit.
        value, other_value: of this log and of the other.
        ratio: this by the other; None: one of them is missing, or the other is 0.
        is_more_better: True, False, or None if neither is better.
    """

    name: str
    value: float | None
    other_value: float | None
    ratio: float | None
    is_more_better: bool | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """This log against another.

    Attributes:
        verdict: of the share of attempts that are OK: this log is better or worse than the other, or the
            difference is no larger than chance makes; unknown: one has no attempts.
        text: the verdict for a person.
        chance: how often chance alone would make as large a difference in the OK share; None: unknown.
        attempts, other_attempts: outcomes.
        ok, other_ok: those that P has.
        reasons: the largest change of the share first.
        figures: times, speed and pressure.
    """

    verdict: Verdict
    text: str
    chance: float | None
    attempts: int
    other_attempts: int
    ok: int
    other_ok: int
    reasons: list[ReasonDifference]
    figures: list[Figure]


def compare(report: Report, other: Report) -> Comparison:
    """Compare a log with another, which is taken for the former state of things."""
    reasons = _reasons(report, other)
    chance = chance_of(report.ok, report.attempts, other.ok, other.attempts)
    if chance is None:
        verdict: Verdict = "unknown"
    elif chance > CHANCE_MAX:
        verdict = "same"
    else:
        verdict = "better" if report.ok_share > other.ok_share else "worse"
    return Comparison(
        verdict=verdict,
        text=_text(verdict, report, other, reasons),
        chance=chance,
        attempts=report.attempts,
        other_attempts=other.attempts,
        ok=report.ok,
        other_ok=other.ok,
        reasons=reasons,
        figures=_figures(report, other),
    )


def chance_of(count: int, total: int, other_count: int, other_total: int) -> float | None:
    """Return how often chance alone makes two shares differ as much: the two-sided z-test of proportions.

    None: there is nothing to compare.
    """
    if not total or not other_total:
        return None
    pooled = (count + other_count) / (total + other_total)
    spread = sqrt(pooled * (1 - pooled) * (1 / total + 1 / other_total))
    if spread == 0:
        return 1.0
    return erfc(abs(count / total - other_count / other_total) / spread / sqrt(2))


def _reasons(report: Report, other: Report) -> list[ReasonDifference]:
    here = {reason.reason: reason for reason in report.reasons}
    there = {reason.reason: reason for reason in other.reasons}
    found: list[ReasonDifference] = []
    for reason in here.keys() | there.keys():
        count = here[reason].count if reason in here else 0
        other_count = there[reason].count if reason in there else 0
        share = here[reason].share if reason in here else 0.0
        other_share = there[reason].share if reason in there else 0.0
        chance = chance_of(count, report.attempts, other_count, other.attempts)
        found.append(
            ReasonDifference(
                reason=reason,
                count=count,
                other_count=other_count,
                share=share,
                other_share=other_share,
                share_change=share - other_share,
                is_by_chance=None if chance is None else chance > CHANCE_MAX,
                help=reason_help(reason),
            )
        )
    return sorted(found, key=lambda reason: (-abs(reason.share_change), reason.reason))


def _figures(report: Report, other: Report) -> list[Figure]:
    figures = [
        _figure("transfer GB/s", report.speed.gb_per_s, other.speed.gb_per_s, True),
        _figure("payload GB that P has", _ok_gb(report), _ok_gb(other), True),
    ]
    here = {times.state: times for times in report.states}
    there = {times.state: times for times in other.states}
    for state in ("RESERVED", "TRANSFERRING", "READY"):
        for name in ("p50_ms", "p99_ms"):
            value = getattr(here[state], name) if state in here else None
            other_value = getattr(there[state], name) if state in there else None
            figures.append(_figure(f"{state} {name[:3]} ms", value, other_value, False))
    ours, theirs = report.pressure, other.pressure
    figures += [
        _figure(
            "evictions an attempt",
            ours.evictions / report.attempts if ours and report.attempts else None,
            theirs.evictions / other.attempts if theirs and other.attempts else None,
            False,
        ),
        _figure("fullest arena, share held", _fullest(report), _fullest(other), None),
    ]
    return [figure for figure in figures if figure.value is not None or figure.other_value is not None]


def _ok_gb(report: Report) -> float | None:
    """Return the payload that P has; None: the log says no bytes at all, as an older one may."""
    return report.speed.ok_bytes / 1e9 if report.speed.asked_bytes else None


def _fullest(report: Report) -> float | None:
    arenas = report.pressure.arenas if report.pressure else []
    return max((arena.held_share_max for arena in arenas if arena.held_share_max is not None), default=None)


def _figure(name: str, value: float | None, other_value: float | None, is_more_better: bool | None) -> Figure:
    ratio = value / other_value if value is not None and other_value else None
    return Figure(name=name, value=value, other_value=other_value, ratio=ratio, is_more_better=is_more_better)


def _text(verdict: Verdict, report: Report, other: Report, reasons: list[ReasonDifference]) -> str:
    if verdict == "unknown":
        empty = "this log" if not report.attempts else "the other log"
        return f"No verdict: {empty} has no attempts in what is looked at."
    shares = (
        f"{percent(report.ok_share)} of {report.attempts:,} attempts are OK here, "
        f"{percent(other.ok_share)} of {other.attempts:,} there"
    )
    if verdict == "same":
        head = f"No difference that chance would not make: {shares}."
    else:
        head = f"{verdict.capitalize()}: {shares}."
    changed = [
        reason for reason in reasons
        if reason.reason != "ok" and not reason.is_by_chance and abs(reason.share_change) >= NAMED_SHARE_MIN
    ]  # fmt: skip
    if not changed:
        return head
    named = "; ".join(
        f"{reason.reason} {percent(reason.other_share)} to {percent(reason.share)}"
        for reason in changed[:_NAMED_MAX]
    )
    return f"{head} What changed most: {named}."


def percent(share: float) -> str:
    """Return a share for a person, with one decimal."""
    return f"{share * _PERCENT:.1f}%"

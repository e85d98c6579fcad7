"""From the log's tables to what the page shows.

Source: design, section 6.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from snapd.errors import Reason
from snapd.forensics.page.arenas import BOXES_MAX, arenas
from snapd.forensics.page.attempts import REASON, attempt_columns, choose, chosen, event_columns
from snapd.forensics.page.data import Epoch, PageData
from snapd.forensics.page.palette import OPEN
from snapd.forensics.page.summary import counters, notices
from snapd.forensics.report import Report
from snapd.forensics.tables import LogTables
from snapd.forensics.violations import ProofReport

if TYPE_CHECKING:
    from snapd.forensics.page.data import U32

# A page of so many stays below 10 MB and answers in less than 100 ms.
ATTEMPTS_MAX: Final = 100_000
EVENTS_MAX: Final = 400_000
REASONS_MAX: Final = 60
SLICES: Final = 600
OTHER_REASONS: Final = "other reasons"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a page holds at most."""

    attempts: int = ATTEMPTS_MAX
    events: int = EVENTS_MAX
    boxes: int = BOXES_MAX


def page_data(
    tables: LogTables, report: Report, proof: ProofReport | None = None, limits: Limits | None = None
) -> PageData:
    """Return what the page shows of what *tables* have selected.

    Args:
        tables: the log.
        report: its figures.
        proof: what was proved of it; None: nothing was tried.
        limits: what is kept; None: as much as a browser handles well.
    """
    limits = limits or Limits()
    begin, end = _span(tables)
    reason_counts = _reasons(tables)
    reasons = {name: index for index, name in enumerate(reason_counts)}
    other = reasons.get(OTHER_REASONS, 0)
    sample = choose(tables, limits.attempts)
    with chosen(tables, sample, begin):
        rows, sessions = attempt_columns(tables, begin, end, reasons, other)
        events = event_columns(tables, len(rows.start_s), limits.events)
        found_arenas, boxes_left_out = arenas(tables, report, begin, end, len(rows.start_s), limits.boxes)
    return PageData(
        title=_title(report),
        about=_about(tables),
        begin_unix_s=begin,
        end_s=end - begin,
        lines=report.reading.lines,
        epochs=[Epoch(epoch.epoch, epoch.begin_ts - begin) for epoch in tables.epochs],
        sessions=sessions,
        reasons=list(reasons),
        reason_counts=list(reason_counts.values()),
        attempts=report.attempts + report.unfinished,
        attempts_ok=report.ok,
        attempts_open=report.unfinished,
        weight_ok=sample.ok / sample.ok_shown if sample.ok_shown else 1.0,
        weight_other=sample.others / sample.others_shown if sample.others_shown else 1.0,
        counters=counters(report),
        notices=notices(
            report, proof, sample, has_times=report.begin_ts is not None,
            events_left_out=events.left_out, boxes_left_out=boxes_left_out,
        ),
        rows=msgspec.structs.replace(rows, event_count=events.count),
        events=events.columns,
        event_kinds=events.kinds,
        event_whys=events.whys,
        bins=_bins(tables, begin, end, reasons, other),
        arenas=found_arenas,
    )  # fmt: skip


def _span(tables: LogTables) -> tuple[float, float]:
    """Return the first and the last time; without any, the attempts are a second apart from 0 on."""
    span = tables.span_ts()
    if span is not None:
        return span
    return 0.0, float(max(tables.value("SELECT count(*) FROM attempts") - 1, 1))


def _title(report: Report) -> str:
    names = [Path(file.path).name or file.path for file in report.reading.files]
    if not names:
        return "log"
    return names[-1] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _about(tables: LogTables) -> list[str]:
    found: list[str] = []
    for what, names in (
        ("snapd ", [epoch.version for epoch in tables.epochs]),
        ("over ", [epoch.transport for epoch in tables.epochs]),
    ):
        known = list(dict.fromkeys(name for name in names if name))
        if known:
            found.append(what + ", ".join(known[-3:]))
    selection = tables.selection
    if selection.since_ts is not None or selection.until_ts is not None or selection.epoch:
        found.append("a part of the log, as was asked for")
    return found


def _reasons(tables: LogTables) -> dict[str, int]:
    """Count the outcomes by reason: ok, the most frequent ones, the rest of them as one, and what is open."""
    found = dict(tables.rows(f"SELECT {REASON}, count(*) FROM attempts GROUP BY 1 ORDER BY 2 DESC, 1"))
    counts = {Reason.OK.value: found.pop(Reason.OK.value, 0)}
    names = list(found)
    counts |= {name: found[name] for name in names[:REASONS_MAX]}
    if len(names) > REASONS_MAX:
        counts[OTHER_REASONS] = counts.get(OTHER_REASONS, 0) + sum(
            found[name] for name in names[REASONS_MAX:]
        )
    unfinished = tables.value("SELECT count(*) FROM open_attempts")
    if unfinished:
        counts[OPEN] = unfinished
    return counts


def _bins(tables: LogTables, begin: float, end: float, reasons: dict[str, int], other: int) -> "U32":
    """Count the outcomes by reason and slice of the time; without a time they are a second a line apart."""
    import numpy as np

    bins: U32 = np.zeros((len(reasons), SLICES), np.uint32)
    width = max(end - begin, 1e-6) / SLICES
    for reason, index, count in tables.rows(
        f"""
        WITH timed AS (
            SELECT {REASON} AS reason,
                   coalesce(ended_ts - ?, row_number() OVER (ORDER BY file, line_no) - 1) AS at_s
            FROM attempts
        )
        SELECT reason, greatest(0, least(?, floor(at_s / ?)))::BIGINT, count(*) FROM timed GROUP BY 1, 2
        """,
        begin, SLICES - 1, width,
    ):  # fmt: skip
        bins[reasons.get(reason, other), index] += count
    return bins

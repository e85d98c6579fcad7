"""The page's figures beside the OK rate, and what a reader must know before trusting them."""

from typing import Final

from snapd.core.events import State
from snapd.errors import Reason
from snapd.forensics.page.attempts import Sample
from snapd.forensics.page.data import Counter, Notice
from snapd.forensics.report import Report
from snapd.forensics.violations import ProofReport

_VIOLATIONS_SHOWN: Final = 50


def counters(report: Report) -> list[Counter]:
    """Return the figures, those that are nothing left out where nothing is the rule."""
    transferring = next((state for state in report.states if state.state == State.TRANSFERRING), None)
    pressure = report.pressure
    found = [
        Counter("Refused", report.refused),
        Counter("Ended, not OK", report.attempts - report.ok - report.refused),
        Counter("Brought home", report.speed.ok_bytes, "bytes"),
    ]
    if report.speed.gb_per_s_p50 is not None:
        found.append(Counter("Transfer, p50", report.speed.gb_per_s_p50, "gbs"))
    if transferring is not None:
        found += [
            Counter("Transferring, p50", transferring.p50_ms, "ms"),
            Counter("Transferring, p99", transferring.p99_ms, "ms"),
        ]
    if pressure is not None:
        held = max((arena.held_share_max or 0.0 for arena in pressure.arenas), default=0.0)
        found += [
            Counter("Arena held, peak", held, "share"),
            Counter("Quarantine, peak", max(a.quarantined_bytes_max for a in pressure.arenas), "bytes"),
            Counter("Leases expired", pressure.leases_expired),
        ]
    found.append(Counter("Restarts", max(len(report.epochs) - 1, 0)))
    found.append(Counter("Open at the end", report.unfinished))
    return found


def notices(
    report: Report,
    proof: ProofReport | None,
    sample: Sample,
    *,
    has_times: bool,
    events_left_out: int,
    boxes_left_out: int,
) -> list[Notice]:
    """Return what is wrong with the log, what it breaks, and what is not on the page; the worst first."""
    return [
        *_broken(report, proof),
        *_reading(report),
        *_left_out(sample, has_times, events_left_out, boxes_left_out),
    ]


def _broken(report: Report, proof: ProofReport | None) -> list[Notice]:
    found: list[Notice] = []
    if proof is not None and proof.counts:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in proof.counts.items())
        details = [
            f"{violation.kind}: {violation.message}"
            + (f" ({violation.lines[-1]})" if violation.lines else "")
            for violation in proof.violations[:_VIOLATIONS_SHOWN]
        ]
        found.append(Notice(f"The log breaks rules that must always hold: {kinds}.", "bad", details))
    for reason in (Reason.CHECKSUM_MISMATCH, Reason.INTERNAL_ERROR):
        count = sum(item.count for item in report.reasons if item.reason == reason)
        if count:
            attempts = f"{count:,} attempts" if count > 1 else "One attempt"
            found.append(
                Notice(
                    f"{attempts} ended with {reason}: bytes or books were wrong. Look at them first.", "bad"
                )
            )
    return found


def _reading(report: Report) -> list[Notice]:
    reading = report.reading
    found: list[Notice] = []
    if reading.dropped:
        found.append(
            Notice(f"The daemon could not write {reading.dropped:,} records: they are missing here.", "bad")
        )
    if reading.missing_lines:
        found.append(
            Notice(f"{reading.missing_lines:,} lines are missing between others: give all files of the log.")
        )
    if reading.unreadable:
        found.append(Notice(f"{reading.unreadable:,} lines could not be read and were skipped."))
    if reading.duplicates:
        found.append(Notice(f"{reading.duplicates:,} lines were there more than once and count once."))
    found += [Notice(f"{file.path}: {file.damage}.", "bad") for file in reading.files if file.damage]
    if report.pressure is not None and not all(arena.is_complete for arena in report.pressure.arenas):
        found.append(
            Notice("Of some arenas the log lacks the beginning or lines: what they held is a lower bound.")
        )
    return found


def _left_out(sample: Sample, has_times: bool, events_left_out: int, boxes_left_out: int) -> list[Notice]:
    found: list[Notice] = []
    if not sample.is_whole:
        has_all_others = sample.others_shown == sample.others
        others = f"{sample.others_shown:,} of {sample.others:,}"
        text = (
            f"Of {sample.ok + sample.others:,} attempts this page holds "
            f"{f'all {sample.others:,}' if has_all_others else others} that did not end OK, and "
            f"{sample.ok_shown:,} of {sample.ok:,} that did, spread evenly over the log. "
            "The figures at the top, the reasons and the overview count every attempt. "
            "Narrow the time with --since and --until to see each one."
        )
        found.append(Notice(text, "note" if has_all_others else "bad"))
    if events_left_out:
        text = (
            f"Slabs and leases of {events_left_out:,} attempts are not on this page; "
            "attempts that failed have theirs first."
        )
        found.append(Notice(text, "info"))
    if boxes_left_out:
        text = (
            f"The arenas' maps are pictures of fixed size: {boxes_left_out:,} pieces are too many to be "
            "drawn one by one. Narrow the time with --since and --until for an exact map."
        )
        found.append(Notice(text, "info"))
    if not has_times:
        found.append(Notice("The log has no times: its lines are drawn in their order, one a second."))
    return found

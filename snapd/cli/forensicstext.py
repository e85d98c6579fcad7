"""How ``snapd forensics`` shows a report, a story, a comparison and a proof to a person."""

from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Final

from snapd.cli.common import Table, can_show, cell, plural, printable, say, say_note, state_cell
from snapd.units import MS_PER_S, format_bytes, format_ms

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapd.forensics.arenamap import ArenaSeries
    from snapd.forensics.compare import Comparison, Figure
    from snapd.forensics.pressure import Pressure
    from snapd.forensics.report import Group, Groups, Reading, Report
    from snapd.forensics.story import SessionSummary, Step

_BAR_CELLS: Final = 30
_LINE_CELLS: Final = 72
_PARTS: Final = "▏▎▍▌▋▊▉█"
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_ASCII_LEVELS: Final = " .:-=+*#@"
_UNREADABLE_MAX: Final = 3
_EPOCHS_MAX: Final = 10
_OLDER_REASONS_MAX: Final = 8
_DASH: Final = "-"
# A session id may have thousands of characters: it must not widen every row of a table.
_TEXT_CHARS_MAX: Final = 60
_VERDICT_STYLES: Final = {
    "better": "bold green",
    "worse": "bold red",
    "same": "bold",
    "unknown": "bold yellow",
}


# --- pieces ------------------------------------------------------------------------------------


def shown_ts(ts: float | None) -> str:
    """Return a time in UTC, to the millisecond."""
    if ts is None:
        return _DASH
    return datetime.fromtimestamp(ts, UTC).isoformat(sep=" ", timespec="milliseconds")[:-6]


def shown_share(share: float | None) -> str:
    """Return a share in percent."""
    return _DASH if share is None else f"{share:.1%}"


def _ms(duration_ms: float | None) -> str:
    return _DASH if duration_ms is None else format_ms(duration_ms)


def _bytes(size_bytes: int | None) -> str:
    return _DASH if size_bytes is None else format_bytes(size_bytes)


def _gb_per_s(value: float | None) -> str:
    return _DASH if value is None else f"{value:.3g} GB/s"


def short(text: str | None) -> str:
    """Return what stands in a table of a text that may be of any length; ``--json`` has all of it."""
    if text is None:
        return _DASH
    text = printable(text)
    if len(text) <= _TEXT_CHARS_MAX:
        return text
    dots = "…" if can_show("…") else "..."
    # Ids that begin alike mostly end otherwise.
    kept = _TEXT_CHARS_MAX - len(dots)
    return text[: kept // 2] + dots + text[kept // 2 - kept :]


def _span(seconds: float) -> str:
    """Return how long a log goes on, which may be for months."""
    for unit, name in ((86_400, "days"), (3_600, "h")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return format_ms(seconds * MS_PER_S)


def _heading(text: str) -> None:
    say()
    say(text, "bold")


def _ok_style(share: float) -> str:
    return "green" if share >= 0.9 else "yellow" if share >= 0.5 else "red"


def _bar(share: float) -> str:
    if not can_show(_PARTS):
        return "#" * round(share * _BAR_CELLS)
    whole, part = divmod(round(share * _BAR_CELLS * len(_PARTS)), len(_PARTS))
    return _PARTS[-1] * whole + (_PARTS[part - 1] if part else "")


# --- the report --------------------------------------------------------------------------------


def show_report(report: "Report", parts: "frozenset[str]") -> None:
    """Show a report.

    Args:
        report: what was found.
        parts: which groupings: ``session``, ``d``, ``hour``.
    """
    _show_reading(report.reading)
    _show_head(report)
    if report.attempts:
        _show_reasons(report)
        _show_speed(report)
        _show_states(report)
        _show_slowest(report)
        if "hour" in parts:
            _show_groups("hour", "HOUR (UTC)", report.by_hour)
        if "session" in parts:
            _show_groups("session", "SESSION", report.by_session)
        if "d" in parts:
            _show_groups("D", "D", report.by_d)
    if report.pressure is not None:
        _show_pressure(report.pressure)


def _show_reading(reading: "Reading") -> None:
    files = reading.files
    names = files[0].path if files else "nothing"
    if len(files) > 1:
        names = f"{files[0].path} to {files[-1].path}"
    packed = sum(bool(file.compression) for file in files)
    unpacked = f", {packed} of them compressed" if packed else ""
    say(f"{names}: {plural(len(files), 'file')}{unpacked}, {plural(reading.lines, 'line')}")
    for note in reading_notes(reading):
        say_note(note)
    for line in reading.unreadable_lines[:_UNREADABLE_MAX]:
        say(f"  {line.path}:{line.line_no}: {line.why}: {line.text[:60]}")


def reading_notes(reading: "Reading") -> "list[str]":
    """Return what is to be known of a log before its figures are believed; empty: nothing."""
    notes: list[str] = []
    if reading.repeated:
        notes.append(f"Named more than once, and read once: {', '.join(reading.repeated)}.")
    for file in reading.files:
        if file.damage:
            notes.append(f"{file.path}: {file.damage}. What was read before that is counted.")
        elif file.is_cut_off and file.unreadable:
            notes.append(
                f"{file.path} ends in the middle of a line: it was being written, or its writer died."
            )
    if reading.unreadable:
        notes.append(f"{plural(reading.unreadable, 'line')} could not be read, and count nowhere.")
    if reading.duplicates:
        notes.append(f"{plural(reading.duplicates, 'line')} came more than once, and are counted once.")
    if reading.unknown_kinds:
        kinds = ", ".join(f"{event} ({count:,})" for event, count in reading.unknown_kinds.items())
        notes.append(f"Events that this version does not know, kept: {kinds}.")
    if reading.unknown_fields:
        notes.append(
            f"{plural(reading.unknown_fields, 'line')} with fields that this version does not know, kept."
        )
    if reading.missing_lines:
        notes.append(
            f"{plural(reading.missing_lines, 'line')} are missing between others: a file is not here."
        )
    if reading.dropped:
        notes.append(f"The daemon could not write {plural(reading.dropped, 'record')}, and says so.")
    return notes


def _show_head(report: "Report") -> None:
    if report.begin_ts is not None and report.end_ts is not None:
        long = _span(report.end_ts - report.begin_ts)
        say(f"{shown_ts(report.begin_ts)} to {shown_ts(report.end_ts)} UTC, {long}")
    if report.selection.epoch:
        say(f"only epoch {report.selection.epoch}")
    _show_epochs(report)
    say()
    if not report.attempts:
        say("No attempt has ended in what is looked at.", "bold yellow")
        return
    older = " (older log)" if report.reading.older_lines else ""
    say(
        f"{plural(report.attempts, 'attempt')}{older}: {report.ok:,} OK, {shown_share(report.ok_share)}",
        f"bold {_ok_style(report.ok_share)}",
    )
    if report.older_reasons and report.epochs:
        _show_own(report)
    if report.refused:
        say(f"{report.refused:,} of them refused before they began")
    if report.unfinished:
        say(f"{plural(report.unfinished, 'more attempt')} without an outcome: open at the end, or cut off")


def _show_own(report: "Report") -> None:
    """Say what of a log that two designs have written to is snapd's, and what the other one's."""
    older = sum(report.older_reasons.values())
    own, own_ok = report.attempts - older, report.ok - report.older_ok
    say(f"of snapd {own:,}: {own_ok:,} OK, {shown_share(own_ok / own if own else 0.0)}")
    shown = list(report.older_reasons.items())[:_OLDER_REASONS_MAX]
    more = ", ..." if len(report.older_reasons) > len(shown) else ""
    reasons = ", ".join(f"{printable(reason)} {count:,}" for reason, count in shown)
    say_note(f"of the design before {older:,}: {reasons}{more}")


def _show_epochs(report: "Report") -> None:
    if not report.epochs:
        return
    shown = report.epochs[-_EPOCHS_MAX:]
    more = len(report.epochs) - len(shown)
    say(plural(len(report.epochs), "epoch") + (f", the last {len(shown)}:" if more else ":"))
    table = Table("EPOCH", "FROM", "TO", ">LINES", "BEGINNING", "END", indent=2)
    for index, epoch in enumerate(shown, more):
        is_last = index == len(report.epochs) - 1
        no_end = "still running, or cut off" if is_last else "died, or its end is missing"
        table.add(
            short(epoch.epoch),
            shown_ts(epoch.begin_ts),
            shown_ts(epoch.end_ts),
            f"{epoch.lines:,}",
            cell("here") if epoch.has_begin else cell("not in the log", "yellow"),
            cell(epoch.stop_reason) if epoch.stop_reason else cell(no_end, "dim" if is_last else "yellow"),
        )
    table.show()


def _show_reasons(report: "Report") -> None:
    _heading("Outcomes")
    table = Table("REASON", ">COUNT", ">SHARE", "", indent=2)
    for reason in report.reasons:
        style = "green" if reason.reason == "ok" else ""
        table.add(
            cell(short(reason.reason), style), f"{reason.count:,}", shown_share(reason.share),
            cell(_bar(reason.share), style),
        )  # fmt: skip
    if report.ok == 0:
        table.add(cell("ok", "red"), "0", shown_share(0.0), "")
    table.show()
    worst = next((reason for reason in report.reasons if reason.reason != "ok" and reason.help), None)
    if worst is not None:
        say_note(f"{worst.reason}: {worst.help}", indent=2)


def _show_speed(report: "Report") -> None:
    speed = report.speed
    if not speed.asked_bytes:
        return
    _heading("Bytes")
    say(
        f"  asked for {_bytes(speed.asked_bytes)}, brought over {_bytes(speed.ready_bytes)}, "
        f"P has {_bytes(speed.ok_bytes)}"
    )
    if speed.gb_per_s is not None:
        say(
            f"  {_gb_per_s(speed.gb_per_s)} over {plural(speed.transfers, 'transfer')}; single ones: p10 "
            f"{_gb_per_s(speed.gb_per_s_p10)}, p50 {_gb_per_s(speed.gb_per_s_p50)}, max "
            f"{_gb_per_s(speed.gb_per_s_max)}"
        )
        say_note(f"GB/s: {speed.definition}", indent=2)


def _show_states(report: "Report") -> None:
    if not report.states:
        return
    _heading("Time in each state")
    table = Table("STATE", ">ATTEMPTS", ">P50", ">P90", ">P99", ">MAX", indent=2)
    for times in report.states:
        table.add(
            state_cell(times.state), f"{times.count:,}",
            *(format_ms(value) for value in (times.p50_ms, times.p90_ms, times.p99_ms, times.max_ms)),
        )  # fmt: skip
    table.show()


def _show_slowest(report: "Report") -> None:
    if not report.slowest:
        return
    _heading("Slowest attempts")
    table = Table(
        ">IN ALL", ">RESERVED", ">TRANSFERRING", ">READY", ">BYTES", "REASON", "ENDED (UTC)", "SESSION",
        "LINE", indent=2,
    )  # fmt: skip
    for attempt in report.slowest:
        table.add(
            _ms(attempt.duration_ms), _ms(attempt.reserved_ms), _ms(attempt.transferring_ms),
            _ms(attempt.ready_ms), _bytes(attempt.bytes), short(attempt.reason), shown_ts(attempt.ended_ts),
            short(attempt.session_id or None),
            f"{attempt.path}:{attempt.line_no}",
        )  # fmt: skip
    table.show()


def _show_groups(noun: str, heading: str, groups: "Groups") -> None:
    if groups.total == 1 and groups.shown and groups.shown[0].key is None:
        what = "who D was" if noun == "D" else "when" if noun == "hour" else "which session it was"
        _heading(f"By {noun}")
        say(f"  The log does not say {what}.")
        return
    many = (
        f", the first {len(groups.shown):,} of {groups.total:,}" if len(groups.shown) < groups.total else ""
    )
    _heading(f"By {noun}{many}")
    table = Table(
        heading,
        ">ATTEMPTS",
        ">OK",
        ">OK RATE",
        ">REFUSED",
        ">BYTES OK",
        ">GB/S",
        "MOST FREQUENT FAILURE",
        indent=2,
    )
    for group in groups.shown:
        table.add(*_group_cells(group))
    table.show()


def _group_cells(group: "Group") -> "Iterable[object]":
    worst = f"{short(group.worst_reason)} ({group.worst_count:,})" if group.worst_reason else _DASH
    speed = _DASH if group.gb_per_s is None else f"{group.gb_per_s:.3g}"
    key = short(group.key) if group.key is not None else "(not said)"
    return (
        key, f"{group.attempts:,}", f"{group.ok:,}",
        cell(shown_share(group.ok_share), _ok_style(group.ok_share)), f"{group.refused:,}",
        _bytes(group.ok_bytes), speed, worst,
    )  # fmt: skip


# --- pressure ----------------------------------------------------------------------------------


def _show_pressure(pressure: "Pressure") -> None:
    _heading("Pressure")
    table = Table(
        ">RANK",
        ">SIZE",
        ">HELD, MAX",
        ">SHARE",
        ">MEAN",
        ">QUARANTINED, MAX",
        ">LARGEST HOLE, MIN",
        "",
        indent=2,
    )
    for arena in pressure.arenas:
        table.add(
            str(arena.rank), _bytes(arena.capacity_bytes), _bytes(arena.held_bytes_max),
            shown_share(arena.held_share_max), shown_share(arena.held_share_mean),
            _bytes(arena.quarantined_bytes_max), _bytes(arena.largest_hole_bytes_min),
            "" if arena.is_complete else cell("lower bounds: lines are missing", "yellow"),
        )  # fmt: skip
    table.show()
    _show_lines(pressure.series)
    say(
        f"  {plural(pressure.evictions, 'eviction')}, {_bytes(pressure.evicted_bytes)}; "
        f"{plural(pressure.refused_full, 'prepare')} refused for want of room; "
        f"{plural(pressure.leases, 'lease')}, {pressure.leases_expired:,} of them ran out"
    )
    if pressure.quarantined_shards:
        whys = ", ".join(f"{why} {count:,}" for why, count in pressure.quarantine_by_why.items())
        outs = ", ".join(f"{why} {count:,}" for why, count in pressure.released_by_why.items())
        say(
            f"  {plural(pressure.quarantined_shards, 'shard')} in quarantine, "
            f"{_bytes(pressure.quarantined_bytes)}: {whys}; out by {outs or 'nothing yet'}; "
            f"p50 {_ms(pressure.quarantine_p50_ms)}, max {_ms(pressure.quarantine_max_ms)}"
        )


def _show_lines(series: "list[ArenaSeries]") -> None:
    """Draw what each rank's arena held at most, over the time."""
    points = [point for arena in series for point in arena.points]
    if len(points) < 2:
        return
    begin_ts, end_ts = min(point.ts for point in points), max(point.ts for point in points)
    levels = _EIGHTHS if can_show(_EIGHTHS) else _ASCII_LEVELS
    for rank, arenas in groupby(sorted(series, key=lambda arena: arena.rank), key=lambda arena: arena.rank):
        shares = _shares(list(arenas), begin_ts, end_ts)
        if shares is not None:
            line = "".join(levels[min(round(share * (len(levels) - 1)), len(levels) - 1)] for share in shares)
            say(f"  rank {rank}  |{line}|")
    say(f"  {'':6}  held, of its size, from {shown_ts(begin_ts)} to {shown_ts(end_ts)}", "dim")


def _shares(arenas: "list[ArenaSeries]", begin_ts: float, end_ts: float) -> "list[float] | None":
    """Return the largest share held in each of ``_LINE_CELLS`` pieces of the time."""
    cells: list[float | None] = [None] * _LINE_CELLS
    after = [0.0] * _LINE_CELLS
    known = False
    for arena in arenas:
        if not arena.capacity_bytes:
            continue
        known = True
        for point in arena.points:
            index = int((point.ts - begin_ts) / max(end_ts - begin_ts, 1e-9) * (_LINE_CELLS - 1))
            cells[index] = max(cells[index] or 0.0, point.held_bytes_max / arena.capacity_bytes)
            after[index] = (point.live_bytes + point.quarantined_bytes) / arena.capacity_bytes
    if not known:
        return None
    filled: list[float] = []
    held = 0.0
    for share, left in zip(cells, after, strict=True):
        filled.append(held if share is None else share)
        held = held if share is None else left
    return filled


# --- a story -----------------------------------------------------------------------------------


def show_story(summary: "SessionSummary", steps: "Iterable[Step]") -> None:
    """Show the story of one session, a line at a time."""
    say(f"session {summary.session_id}", "bold")
    ends = ", ".join(f"{reason} {count:,}" for reason, count in summary.reasons.items())
    say(
        f"{plural(summary.attempts, 'attempt')}, {summary.ok:,} OK, P got {_bytes(summary.ok_bytes)}: "
        f"{ends or 'none'}"
    )
    if summary.unfinished:
        say(f"{plural(summary.unfinished, 'attempt')} without an outcome: open at the end, or cut off")
    epoch: str | None = ""
    handle: int | None = -1
    for step in steps:
        if step.epoch != epoch:
            epoch = step.epoch
            _heading(f"epoch {epoch}" if epoch else "older log")
            handle = -1
        if step.slab_handle != handle and step.slab_handle is not None:
            handle = step.slab_handle
            say(f"  attempt {handle}", "bold")
        _show_step(step)


def _show_step(step: "Step") -> None:
    since = "" if step.since_start_ms is None else f"+{format_ms(step.since_start_ms)}"
    style = "bold green" if step.ok else "bold red" if step.is_end else ""
    mark = step.state or (step.reason or "" if step.is_end else "")
    style = style or {"READY": "green", "RESERVED": "cyan", "TRANSFERRING": "blue", "ABORTED": "red"}.get(
        mark, ""
    )
    extra = f"  {bytes(step.extra).decode()}" if step.extra is not None else ""
    where = f"  [{step.path}:{step.line_no}]"
    say(f"    {shown_ts(step.ts)}  {since:>9}  {mark:<13} {step.event:<19} {step.text}{extra}{where}", style)


# --- a comparison ------------------------------------------------------------------------------


def show_comparison(comparison: "Comparison", name: str, other_name: str) -> None:
    """Show two logs side by side, and the verdict."""
    say(f"here: {name}, {plural(comparison.attempts, 'attempt')}")
    say(f"there: {other_name}, {plural(comparison.other_attempts, 'attempt')}")
    say()
    table = Table("REASON", ">THERE", ">SHARE", ">HERE", ">SHARE", ">CHANGE", "")
    for reason in comparison.reasons:
        good = (reason.share_change > 0) == (reason.reason == "ok")
        is_known = reason.is_by_chance is False and reason.share_change
        style = "" if not is_known else "green" if good else "red"
        table.add(
            cell(short(reason.reason), style), f"{reason.other_count:,}", shown_share(reason.other_share),
            f"{reason.count:,}", shown_share(reason.share),
            cell(f"{reason.share_change * 100:+.1f} points", style),
            "as chance makes" if reason.is_by_chance and reason.share_change else "",
        )  # fmt: skip
    table.show()
    if comparison.figures:
        say()
        table = Table("FIGURE", ">THERE", ">HERE", ">HERE / THERE")
        for figure in comparison.figures:
            table.add(*_figure_cells(figure))
        table.show()
    say()
    say(comparison.text, _VERDICT_STYLES[comparison.verdict])


def _figure_cells(figure: "Figure") -> "Iterable[object]":
    def shown(value: float | None) -> str:
        return _DASH if value is None else f"{value:,.3f}" if abs(value) < 1_000 else f"{value:,.0f}"

    ratio = _DASH if figure.ratio is None else f"{figure.ratio:.2f}x"
    return (figure.name, shown(figure.other_value), shown(figure.value), ratio)

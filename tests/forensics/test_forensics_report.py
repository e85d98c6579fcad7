"""The figures of a report, against a plain reading of the same log."""

import math
from pathlib import Path
from typing import Any

import pytest
from forensics_logs import TS, Writer, read_plainly, report_of

from snapd.forensics.facts import Selection
from snapd.forensics.lines import LogInput
from snapd.forensics.proving import NothingToProve, prove_log
from snapd.forensics.report import SCHEMA, Report, build_report, groups
from snapd.forensics.tables import LogTables


def nearest(values: list[float], share: float) -> float:
    """Return the percentile between the two values beside it."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def test_the_made_log_has_everything_in_it_and_is_proved(
    made_log: Path, made_tables: tuple[LogTables, LogInput]
) -> None:
    """What the other tests rely on: rotation, epochs, evictions, quarantine, refusals, and no fault."""
    report = build_report(*made_tables)
    assert len(report.reading.files) > 3
    assert [(epoch.has_begin, epoch.stop_reason) for epoch in report.epochs] == [
        (True, "SIGTERM"), (True, None), (True, "SIGTERM"),
    ]  # fmt: skip
    assert {"ok", "evicted", "snapshot-buf-full", "superseded", "daemon-restarted", "transfer-failed"} <= {
        reason.reason for reason in report.reasons
    }
    assert report.reading.unreadable == report.reading.missing_lines == report.reading.duplicates == 0
    with LogInput([str(made_log)]) as log:
        proved = prove_log(log)
    assert proved.report.is_good, proved.report.violations[:3]
    assert proved.report.is_whole
    assert proved.report.lines == report.reading.lines
    assert proved.copies == 0


def test_every_figure_is_that_of_a_plain_reading(
    made_log: Path, made_tables: tuple[LogTables, LogInput]
) -> None:
    """Counts, shares, sessions, bytes, percentiles and the slowest, from all the files."""
    plain = read_plainly(sorted(made_log.iterdir()))
    report = build_report(*made_tables, top=0)
    assert report.reading.lines == plain.lines == sum(epoch.lines for epoch in report.epochs)
    assert {reason.reason: reason.count for reason in report.reasons} == plain.reasons
    assert math.isclose(sum(reason.share for reason in report.reasons), 1.0)
    assert (report.attempts, report.ok, report.refused) == (
        plain.reasons.total(), plain.reasons["ok"], plain.refused,
    )  # fmt: skip
    assert {group.key: group.attempts for group in report.by_session.shown} == plain.sessions
    assert sum(group.ok_bytes for group in report.by_session.shown) == plain.ok_bytes == report.speed.ok_bytes
    ready = next(times for times in report.states if times.state == "READY")
    assert ready.count == len(plain.ready_ms)
    assert ready.max_ms == max(plain.ready_ms)
    for share, found in ((0.5, ready.p50_ms), (0.9, ready.p90_ms), (0.99, ready.p99_ms)):
        assert found == pytest.approx(nearest(plain.ready_ms, share))
    assert report.slowest[0].duration_ms == max(plain.durations)
    assert [attempt.duration_ms for attempt in report.slowest] == sorted(
        (value for value in plain.durations if value), reverse=True
    )
    assert report.pressure is not None
    assert (report.pressure.evictions, report.pressure.quarantined_shards) == (
        plain.evictions,
        plain.quarantined,
    )
    assert report.pressure.refused_full == plain.reasons["snapshot-buf-full"]
    assert report.schema == SCHEMA


def test_the_arenas_are_full_at_times_and_never_overfull(made_tables: tuple[LogTables, LogInput]) -> None:
    """Two ranks and three epochs: no slice has more bytes than there are."""
    pressure = build_report(*made_tables).pressure
    assert pressure is not None
    assert [arena.rank for arena in pressure.arenas] == [0, 1]
    assert len(pressure.series) == 6
    for series in pressure.series:
        assert series.misfits == 0
        assert series.is_complete
        for point in series.points:
            assert series.capacity_bytes is not None
            assert 0 <= point.held_bytes_max <= series.capacity_bytes == 3 << 30
            assert point.free_bytes == series.capacity_bytes - point.live_bytes - point.quarantined_bytes
            assert point.largest_hole_bytes is not None
            assert point.largest_hole_bytes <= point.free_bytes
    assert all((arena.held_share_max or 0) > 0.9 for arena in pressure.arenas)
    assert all(0 < (arena.held_share_mean or 0) < (arena.held_share_max or 0) for arena in pressure.arenas)


def test_a_log_whose_oldest_files_are_gone_is_read_without_error(made_log: Path) -> None:
    """Unknown beginnings are shown: sizes of arenas are not known, bytes are a lower bound."""
    files = sorted(made_log.iterdir())[:-1]
    report = report_of(*files)
    first = report.epochs[0]
    assert not first.has_begin
    assert report.reading.missing_lines == 0
    assert report.pressure is not None
    begun = [series for series in report.pressure.series if series.epoch == first.epoch]
    assert all(series.capacity_bytes is None and not series.is_complete for series in begun)
    assert sum(series.misfits for series in report.pressure.series) == 0


def test_gb_per_s_is_payload_by_the_time_of_transferring(tmp_path: Path) -> None:
    """1 MB in 4 ms, and 1 MB in 1 ms: 2 MB in 5 ms; what never became READY does not count."""
    writer = Writer()
    writer.start()
    writer.life(1)
    writer.life(2, "evicted")
    writer.lines[-1] = writer.lines[-1].replace(b'"transferring_ms":4.0', b'"transferring_ms":1.0')
    writer.move(3, "", "RESERVED", duration_ms=0.0)
    writer.outcome(3, "transfer-failed", transferring_ms=1_000.0, ready_ms=0.0)
    writer.life(4)
    writer.lines[-1] = writer.lines[-1].replace(b'"transferring_ms":4.0', b'"transferring_ms":0.0')
    path = tmp_path / "log"
    path.write_bytes(writer.text())
    speed = report_of(path).speed
    assert speed.transfers == 2
    assert speed.gb_per_s == pytest.approx(2e6 / 5e-3 / 1e9)
    assert speed.gb_per_s_max == pytest.approx(1.0)
    assert (speed.asked_bytes, speed.ready_bytes, speed.ok_bytes) == (4_000_000, 3_000_000, 2_000_000)


def test_hours_are_utc_and_in_order(tmp_path: Path) -> None:
    lines = b""
    for index, hours in enumerate((5, 1, 30)):
        writer = Writer(epoch=f"e{index}", ts=TS + hours * 3_600 - 0.0005)
        writer.refuse("s")
        lines += writer.text()
    path = tmp_path / "log"
    path.write_bytes(lines)
    assert [group.key for group in report_of(path).by_hour.shown] == [
        "2026-01-01T01:00Z", "2026-01-01T05:00Z", "2026-01-02T06:00Z",
    ]  # fmt: skip


def test_top_limits_groups_and_says_how_many_there_are(made_tables: tuple[LogTables, LogInput]) -> None:
    tables, _ = made_tables
    some, every = groups(tables, "session", 3), groups(tables, "session", 0)
    assert some.total == every.total == len(every.shown) > 3
    assert some.shown == every.shown[:3]
    assert [group.attempts for group in every.shown] == sorted(
        (group.attempts for group in every.shown), reverse=True
    )


def test_a_group_names_its_most_frequent_failure(tmp_path: Path) -> None:
    writer = Writer()
    writer.start()
    writer.life(1, session_id="a")
    for reason in ("limit-reached", "snapshot-buf-full", "snapshot-buf-full"):
        writer.refuse("s1", reason)
    path = tmp_path / "log"
    path.write_bytes(writer.text())
    (group,) = report_of(path).by_session.shown
    assert (group.key, group.attempts, group.ok, group.refused) == ("s1", 4, 1, 3)
    assert (group.worst_reason, group.worst_count) == ("snapshot-buf-full", 2)


def test_figures_are_those_of_the_selection(made_tables: tuple[LogTables, LogInput]) -> None:
    """The figures of all epochs together, or of two halves of the time, are the whole log's."""

    def selected(**what: Any) -> Report:
        made_tables[0].select(Selection(**what))
        return build_report(*made_tables)

    whole = selected()
    parts = [selected(epoch=epoch.epoch) for epoch in whole.epochs]
    assert sum(part.attempts for part in parts) == whole.attempts
    assert whole.pressure is not None
    shards = [part.pressure.quarantined_shards for part in parts if part.pressure]
    assert sum(shards) == whole.pressure.quarantined_shards
    assert all({series.epoch for series in part.pressure.series} == {epoch.epoch}
               for part, epoch in zip(parts, whole.epochs, strict=True) if part.pressure)  # fmt: skip
    assert whole.begin_ts is not None
    assert whole.end_ts is not None
    middle = (whole.begin_ts + whole.end_ts) / 2
    early, late = selected(until_ts=middle), selected(since_ts=middle)
    assert early.attempts + late.attempts == whole.attempts
    assert (early.begin_ts, late.end_ts) == (whole.begin_ts, whole.end_ts)
    assert early.end_ts == late.begin_ts == middle


def test_copies_of_a_file_are_no_violation_but_a_line_that_comes_twice_is(
    made_log: Path, tmp_path: Path
) -> None:
    """Copying files is not the daemon's doing; a doubled line in a file is."""
    newest = made_log / "d-to-p-sync.jsonl"
    lines = newest.read_bytes().splitlines(keepends=True)
    copy = tmp_path / "copy"
    copy.write_bytes(b"".join(lines[: len(lines) // 2]))
    with LogInput([str(made_log), str(copy)]) as log:
        proved = prove_log(log)
    assert proved.report.is_good
    assert proved.copies == len(lines) // 2
    twice = tmp_path / "twice"
    twice.write_bytes(b"".join([*lines[:5], lines[4], *lines[5:]]))
    older = [str(path) for path in made_log.iterdir() if path != newest]
    with LogInput([*older, str(twice)]) as log:
        proved = prove_log(log)
    assert dict(proved.report.counts) == {"sequence-gap": 1}
    assert proved.report.violations[0].lines[-1].line_no == 6


def test_an_older_log_proves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"ok":false,"reason":"alloc-failed","session_id":"s"}\n')
    with LogInput([str(path)]) as log, pytest.raises(NothingToProve, match="no line of this log"):
        prove_log(log)

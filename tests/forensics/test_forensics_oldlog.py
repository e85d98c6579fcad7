"""Logs of the design before snapd, of which little is certain."""

import gzip
import random
from pathlib import Path
from typing import Any

import pytest
from forensics_logs import Writer, loaded, report_of, write_old

from snapd.forensics.oldlog import read_old


def the_recorded_run(**names: str) -> list[dict[str, Any]]:
    """148 alloc-failed and 19 session-not-resident, in some order, under the given names."""
    reasons = ["alloc-failed"] * 148 + ["session-not-resident"] * 19
    random.Random(1).shuffle(reasons)
    session, outcome = names.get("session", "session_id"), names.get("outcome", "ok")
    failed: Any = False if outcome == "ok" else "failed"
    return [
        {session: f"agent-{index % 31}", outcome: failed, "reason": reason, "kv_pool_free": index}
        for index, reason in enumerate(reasons)
    ]


@pytest.mark.parametrize("session", ["session_id", "session", "sid", "sessionId", "rid", "my_session_name"])
@pytest.mark.parametrize("outcome", ["ok", "status"])
def test_the_recorded_run_gives_its_known_figures(tmp_path: Path, session: str, outcome: str) -> None:
    """167 attempts, 88.6% alloc-failed, 11.4% session-not-resident, 0 OK, whatever the names are."""
    path = write_old(tmp_path / "sync.log", the_recorded_run(session=session, outcome=outcome))
    report = report_of(path)
    assert (report.attempts, report.ok, report.ok_share) == (167, 0, 0.0)
    assert [(r.reason, r.count, f"{r.share:.1%}") for r in report.reasons] == [
        ("alloc-failed", 148, "88.6%"),
        ("session-not-resident", 19, "11.4%"),
    ]
    assert report.by_session.total == 31
    assert report.reading.older_lines == report.reading.unknown_fields == 167
    assert (report.reading.unreadable, report.states, report.pressure, report.begin_ts) == (0, [], None, None)


def test_an_older_log_may_be_packed(tmp_path: Path) -> None:
    path = write_old(tmp_path / "sync.log", the_recorded_run())
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert report_of(path).attempts == 167


def test_fields_that_are_not_known_are_kept(tmp_path: Path) -> None:
    """Whatever else a line says can be asked for."""
    path = write_old(tmp_path / "log", the_recorded_run())
    with loaded(path) as (tables, _):
        kept = tables.rows("SELECT json_extract(extra, '$.kv_pool_free')::INT FROM records ORDER BY line_no")
    assert [value for (value,) in kept] == list(range(167))


def test_lines_without_an_outcome_are_counted_and_shown(tmp_path: Path) -> None:
    """Torn lines, and objects that are no attempt, are no attempts."""
    path = write_old(tmp_path / "log", the_recorded_run()[:5])
    with path.open("ab") as file:
        file.write(b'{"session_id":"x"}\n[1]\n\x00\x00\n{"session_id":"y","ok":fal')
    reading = report_of(path).reading
    assert (reading.lines, reading.unreadable, reading.older_lines) == (9, 4, 5)
    assert [line.line_no for line in reading.unreadable_lines] == [6, 7, 8, 9]
    assert reading.unreadable_lines[3].text == '{"session_id":"y","ok":fal'
    assert reading.files[0].is_cut_off


def test_older_lines_and_lines_of_snapd_may_be_in_one_log(tmp_path: Path) -> None:
    """A log that was written on by snapd counts both."""
    writer = Writer()
    writer.start()
    writer.life(1)
    path = write_old(tmp_path / "log", the_recorded_run())
    with path.open("ab") as file:
        file.write(writer.text())
    report = report_of(path)
    assert (report.attempts, report.ok, report.reading.older_lines) == (168, 1, 167)


@pytest.mark.parametrize(
    ("line", "ok", "reason"),
    [
        ({"ok": True}, True, "ok"),
        ({"ok": False}, False, "unknown"),
        ({"ok": 1, "reason": None}, True, "ok"),
        ({"ok": 0, "reason": "alloc-failed"}, False, "alloc-failed"),
        ({"status": "OK"}, True, "ok"),
        ({"status": "success", "reason": ""}, True, "ok"),
        ({"status": "alloc-failed"}, False, "alloc-failed"),
        ({"status": "error", "reason": "session-not-resident"}, False, "session-not-resident"),
        ({"ok": False, "status": "alloc-failed"}, False, "alloc-failed"),
        ({"status": 0}, True, "ok"),
        ({"status": 503, "reason": "alloc-failed"}, False, "alloc-failed"),
        ({"Status": "failed", "Fail-Reason": "no slots"}, False, "no slots"),
        ({"ok": "false", "reason": "none"}, False, "unknown"),
    ],
)
def test_an_outcome_is_ok_or_status(line: dict[str, Any], ok: bool, reason: str) -> None:
    """A status that is no plain no is the reason when there is no other."""
    found = read_old(line)
    assert found is not None
    assert (found.ok, found.reason) == (ok, reason)


@pytest.mark.parametrize("line", [{}, {"reason": "alloc-failed"}, {"ok": None}, {"status": {"code": 1}}])
def test_what_has_no_outcome_is_no_attempt(line: dict[str, Any]) -> None:
    assert read_old(line) is None


@pytest.mark.parametrize(
    ("name", "value", "ts"),
    [
        ("ts", 1_767_225_600.5, 1_767_225_600.5),
        ("timestamp", 1_767_225_600_500, 1_767_225_600.5),
        ("time", 1_767_225_600_500_000_000, 1_767_225_600.5),
        ("time", "2026-01-01T00:00:00.5Z", 1_767_225_600.5),
        ("at", "2026-01-01 01:00:00.5+01:00", 1_767_225_600.5),
        ("ts", "2026-01-01T00:00:00.5", 1_767_225_600.5),
        ("ts", "yesterday", None),
        ("ts", -5, None),
        ("ts", True, None),
    ],
)
def test_times_are_seconds_or_smaller_or_iso(name: str, value: Any, ts: float | None) -> None:
    """A time without a zone is UTC; what is no time is none."""
    found = read_old({"ok": True, name: value})
    assert found is not None
    assert found.ts == ts


def test_known_fields_are_found_under_the_names_in_use() -> None:
    found = read_old({
        "ok": True, "bytes": 17, "num_tokens": 4, "latency_ms": 2.5, "decode_worker": "d0", "session": 7,
        "z": [1],
    })  # fmt: skip
    assert found is not None
    assert (found.bytes, found.num_tokens, found.duration_ms, found.peer) == (17, 4, 2.5, "d0")
    assert (found.session_id, found.extra) == ("7", {"z": [1]})


def test_a_number_that_no_column_holds_is_left_out() -> None:
    found = read_old({"ok": True, "bytes": 1 << 80, "tokens": -1, "elapsed": 2})
    assert found is not None
    assert (found.bytes, found.num_tokens, found.duration_ms) == (None, None, 2_000.0)


def test_an_older_log_with_times_and_peers_is_grouped_by_them(tmp_path: Path) -> None:
    lines = [
        {"ok": index % 4 == 0, "reason": "ok" if index % 4 == 0 else "alloc-failed", "session": "s",
         "ts": 1_767_225_600 + index * 900, "peer": f"d{index % 2}", "bytes": 10, "duration_ms": index}
        for index in range(8)
    ]  # fmt: skip
    report = report_of(write_old(tmp_path / "log", lines))
    assert [(g.key, g.attempts, g.ok) for g in report.by_d.shown] == [("d0", 4, 2), ("d1", 4, 0)]
    assert [(g.key, g.attempts) for g in report.by_hour.shown] == [
        ("2026-01-01T00:00Z", 4), ("2026-01-01T01:00Z", 4),
    ]  # fmt: skip
    assert [attempt.duration_ms for attempt in report.slowest] == [7, 6, 5, 4, 3, 2, 1]
    assert (report.speed.ok_bytes, report.speed.gb_per_s) == (20, None)

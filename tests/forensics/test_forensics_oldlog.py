"""Logs of the design before snapd, of which little is certain."""

import gzip
import random
from pathlib import Path
from typing import Any

import pytest
from forensics_logs import Writer, loaded, report_of, write_old

from snapd.cli.main import run
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


def test_older_lines_and_lines_of_snapd_may_be_in_one_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log that was written on by snapd counts both."""
    writer = Writer()
    writer.start()
    writer.life(1)
    path = write_old(tmp_path / "log", the_recorded_run())
    with path.open("ab") as file:
        file.write(writer.text())
    report = report_of(path)
    assert (report.attempts, report.ok, report.reading.older_lines) == (168, 1, 167)
    assert report.older_reasons == {"alloc-failed": 148, "session-not-resident": 19}
    run(["forensics", str(path)])
    text = capsys.readouterr().out
    assert "168 attempts (older log): 1 OK, 0.6%\nof snapd 1: 1 OK, 100.0%\n" in text
    assert "of the design before 167: alloc-failed 148, session-not-resident 19\n" in text


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
        ({"ok": 0.0, "reason": "alloc-failed"}, False, "alloc-failed"),
        ({"ok": 1.0}, True, "ok"),
        ({"ok": "1"}, True, "ok"),
        ({"ok": "0", "reason": "alloc-failed"}, False, "alloc-failed"),
        ({"ok": "y"}, True, "ok"),
        ({"status": "0"}, True, "ok"),
        ({"status": "200"}, True, "ok"),
        ({"status": 200.0}, True, "ok"),
        ({"status": "1", "reason": "alloc-failed"}, False, "alloc-failed"),
        ({"status": 503}, False, "503"),
        ({"status": "finished"}, True, "ok"),
        ({"status": "transferred"}, True, "ok"),
        ({"status": "committed"}, True, "ok"),
        ({"status_code": 507, "reason": "alloc-failed"}, False, "alloc-failed"),
        ({"status_code": 200}, True, "ok"),
        ({"sync_ok": False, "reason": "alloc-failed"}, False, "alloc-failed"),
        ({"kv_push_ok": True}, True, "ok"),
        ({"kv_push_status": "alloc-failed"}, False, "alloc-failed"),
        ({"failed": True, "reason": "alloc-failed"}, False, "alloc-failed"),
        ({"failed": False}, True, "ok"),
        ({"failed": "true"}, False, "unknown"),
        ({"result": {"ok": False, "reason": "alloc-failed"}}, False, "alloc-failed"),
        ({"result": {"ok": True}}, True, "ok"),
        ({"ok": None, "result": {"ok": True}}, True, "ok"),
        ({"d_to_p": {"status": "alloc-failed"}}, False, "alloc-failed"),
        ({"status": {"code": 200}}, True, "ok"),
    ],
)
def test_an_outcome_is_ok_or_status(line: dict[str, Any], ok: bool, reason: str) -> None:
    """A status that is no plain no is the reason when there is no other."""
    found = read_old(line)
    assert found is not None
    assert (found.ok, found.reason) == (ok, reason)


@pytest.mark.parametrize(
    "fields",
    [
        {"why": "alloc-failed"},
        {"reason_code": "alloc-failed"},
        {"message": "alloc-failed"},
        {"reason": "", "why": "alloc-failed"},
        {"why": "alloc-failed", "message": "no slots at all"},
        {"sync_reason": "alloc-failed", "message": "no slots at all"},
        {"my_Reason_text": "alloc-failed"},
        {"reason": ["alloc-failed", "x"]},
        {"reason": [17, "alloc-failed"]},
        {"reason": {"code": "alloc-failed", "message": "no slots"}},
        {"reason": {"message": "no slots", "code": "alloc-failed"}},
        {"reason": {"text": "alloc-failed"}},
        {"error": {"code": "alloc-failed"}},
    ],
)
def test_a_reason_is_found_under_other_names_and_inside_lists_and_objects(fields: dict[str, Any]) -> None:
    found = read_old({"ok": False, **fields})
    assert found is not None
    assert found.reason == "alloc-failed"


@pytest.mark.parametrize("reason", [17, {"code": 17}, [17]])
def test_a_reason_that_is_a_number_is_that_number(reason: object) -> None:
    found = read_old({"ok": False, "reason": reason})
    assert found is not None
    assert found.reason == "17"


def test_what_is_ok_has_no_message_for_a_reason() -> None:
    """An error of 0 and a friendly message do not make a kind of outcome of their own."""
    found = read_old({"ok": True, "error_code": 0, "message": "took 3 ms"})
    assert found is not None
    assert found.reason == "ok"


def test_fields_of_an_object_inside_a_line_count_and_the_others_are_kept() -> None:
    """What is null says nothing, so another one may."""
    found = read_old({
        "bytes": None, "session": {"id": 7, "user": "u"}, "d": {"id": "d0"}, "data": {"bytes": None},
        "result": {"ok": False, "bytes": 5}, "x": {},
    })  # fmt: skip
    assert found is not None
    assert (found.session_id, found.peer, found.bytes, found.ok) == ("7", "d0", 5, False)
    assert found.extra == {"bytes": None, "session": {"user": "u"}, "data": {"bytes": None}, "x": {}}


def test_what_python_writes_for_no_number_costs_no_line(tmp_path: Path) -> None:
    """NaN and Infinity are no JSON, but json.dumps writes them."""
    path = tmp_path / "log"
    path.write_text(
        '{"ok": false, "reason": "alloc-failed", "gb_per_s": NaN, "duration_ms": Infinity}\n'
        '{"ok": false, "reason": "alloc-failed", "x": [-Infinity, 1e999], "ts": NaN}\n'
        '{"ok": NaN, "reason": "alloc-failed"}\n{"ok": false, "reason": NaN, garbage\n'
    )
    report = report_of(path)
    assert (report.attempts, report.reading.unreadable, report.begin_ts) == (2, 2, None)
    with loaded(path) as (tables, _):
        kept = tables.rows("SELECT duration_ms, extra FROM records ORDER BY line_no")
    assert kept == [(None, '{"gb_per_s":null,"duration_ms":null}'), (None, '{"x":[null,null],"ts":null}')]


def test_half_a_character_makes_a_line_unreadable(tmp_path: Path) -> None:
    """No database keeps it; nothing else happens."""
    path = tmp_path / "log"
    path.write_text('{"ok": false, "x": NaN, "reason": "\\ud800"}\n{"ok": true}\n')
    report = report_of(path)
    assert (report.attempts, report.reading.unreadable) == (1, 1)


def test_a_line_with_all_names_of_the_header_may_be_an_older_one(tmp_path: Path) -> None:
    """Other programs number their lines too; what a later snapd writes of an attempt names its handle."""
    header = {"ts": 1_767_225_600.5, "at_ns": 1, "seq": 1, "epoch": "3", "event": "sync"}
    lines: list[dict[str, Any]] = [
        {**header, "ok": False, "reason": "alloc-failed"},
        {**header, "seq": 2, "epoch": 3, "status": "failed", "session": "s"},
        {**header, "seq": 3, "failed": True, "why": "alloc-failed"},
        {**header, "seq": 4, "ok": True, "reason": "x", "slab_handle": 5},
        {**header, "seq": 5, "ok": True, "device": "cuda:0"},
        {**header, "seq": 6, "reason": "alloc-failed"},
    ]
    report = report_of(write_old(tmp_path / "log", lines))
    assert (report.attempts, report.ok, report.reading.older_lines) == (3, 0, 3)
    assert report.reading.unknown_kinds == {"sync": 3}


def test_a_broken_record_of_snapd_is_no_older_line(tmp_path: Path) -> None:
    """An outcome that has lost its handle is damage, not another log's attempt."""
    header = {"ts": 1_767_225_600.5, "at_ns": 1, "seq": 1, "epoch": "3", "event": "sync.outcome"}
    report = report_of(write_old(tmp_path / "log", [{**header, "ok": False, "reason": "alloc-failed"}]))
    assert (report.attempts, report.reading.unreadable) == (0, 1)


@pytest.mark.parametrize("line", [{}, {"reason": "alloc-failed"}, {"ok": None}, {"status": {"x": []}}])
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
    for name, value in (("elapsed", 1e308), ("elapsed", 10**400), ("ms", 10**400), ("ts", 10**400)):
        found = read_old({"ok": True, name: value})
        assert found is not None
        assert (found.duration_ms, found.ts) == (None, None)


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

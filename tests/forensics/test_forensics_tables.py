"""What becomes of lines in the tables, whatever is wrong with them."""

import gc
import json
from pathlib import Path
from typing import Any

import duckdb
import pytest
from forensics_logs import TS, Writer, compact, loaded, report_of

from snapd.core import records as r
from snapd.errors import ExtraMissing
from snapd.eventlog import LINE_TYPES
from snapd.forensics import lines as lines_module
from snapd.forensics import loading
from snapd.forensics import tables as tables_module
from snapd.forensics.decoding import KINDS
from snapd.forensics.facts import Selection
from snapd.forensics.lines import LogInput, LogUnreadable
from snapd.forensics.proving import prove_log
from snapd.forensics.tables import LogTables


def a_log(path: Path, writer: Writer) -> Path:
    path.write_bytes(writer.text())
    return path


def test_every_kind_of_record_has_its_columns() -> None:
    """A field that is added to a record is a column without more ado."""
    assert {event.decode() for event in KINDS} == set(LINE_TYPES)
    for event, kind in KINDS.items():
        fields = set(LINE_TYPES[event.decode()].__struct_fields__)
        assert fields <= set(kind.columns)


def test_a_record_is_a_row_with_all_its_fields(tmp_path: Path) -> None:
    writer = Writer()
    writer.start()
    writer.life(1)
    with loaded(a_log(tmp_path / "log", writer)) as (tables, _):
        row = tables.rows(
            "SELECT file, line_no, epoch, seq, event, session_id, slab_handle, rank, bytes, extents, was, "
            "why FROM records WHERE event = 'slab.released'"
        )
        assert row == [
            (0, 7, "e1", 7, "slab.released", "s1", 1, 0, 1_000_000, "[[256,256]]", "live", "final")
        ]
        assert tables.value("SELECT count(*) FROM records") == len(writer.lines)


def test_unknown_fields_and_events_are_kept(tmp_path: Path) -> None:
    """A newer version's fields, events and words are no fault."""
    writer = Writer()
    writer.start()
    writer.add(r.EventsDropped(at_ns=0, count=1, why="x"), colour={"deep": [1]})
    writer.life(1)
    outcome = json.loads(writer.lines.pop())
    writer.lines.append(compact(outcome | {"reason": "brand-new", "ok": False}))
    header = {"ts": TS, "at_ns": 1, "seq": writer.seq + 1, "epoch": "e1"}
    writer.lines.append(compact(header | {"event": "moon.landed", "session_id": 5, "crew": 3}))
    path = a_log(tmp_path / "log", writer)
    with loaded(path) as (tables, _):
        assert tables.rows("SELECT extra FROM records WHERE event = 'events.dropped'") == [
            ('{"colour":{"deep":[1]}}',)
        ]
        extra = tables.value("SELECT extra FROM records WHERE event = 'moon.landed'")
        assert json.loads(extra) == {"crew": 3, "session_id": 5}
    report = report_of(path)
    assert report.reading.unknown_kinds == {"moon.landed": 1}
    assert report.reading.unknown_fields == 2
    assert [(reason.reason, reason.help) for reason in report.reasons] == [("brand-new", "")]
    assert (report.reading.dropped, report.reading.unreadable) == (1, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("extents", "x"),
        ("extents", [[1]]),
        ("bytes", "many"),
        ("bytes", 1 << 70),
        ("at_ns", 1 << 70),
        ("rank", None),
    ],
)
def test_a_known_field_that_holds_something_else_makes_a_line_unreadable(
    tmp_path: Path, field: str, value: object
) -> None:
    """It is counted and shown, and the lines around it are read."""
    writer = Writer()
    writer.start()
    writer.life(1)
    writer.lines[2] = compact(json.loads(writer.lines[2]) | {field: value})
    report = report_of(a_log(tmp_path / "log", writer))
    assert (report.reading.unreadable, report.attempts) == (1, 1)
    assert report.reading.unreadable_lines[0].line_no == 3
    assert "slab.allocated" in report.reading.unreadable_lines[0].text


def test_a_line_that_lacks_a_field_is_unreadable(tmp_path: Path) -> None:
    writer = Writer()
    writer.start()
    writer.life(1)
    line = json.loads(writer.lines[-1])
    del line["duration_ms"]
    writer.lines[-1] = compact(line)
    report = report_of(a_log(tmp_path / "log", writer))
    assert (report.reading.unreadable, report.attempts, report.unfinished) == (1, 0, 1)


def test_garbage_of_every_sort_is_counted_and_harms_nothing(tmp_path: Path) -> None:
    """Bytes that are no text, nested too deep, too long, or half a line."""
    writer = Writer()
    writer.start()
    writer.life(1)
    garbage = [
        b"\xff\xfe\x00", b"\x00" * 50, b"[" * 100_000, b'{"a":' * 5_000, b"1", b'"x"', b"{}", b'{"ts":1',
        b"null",
        b'{"event":"sync.outcome"}', b"x" * (3 << 20), writer.lines[-1][:-9],
        b'{"ts":1.5,"at_ns":1,"seq":1,"epoch":"e1","event":"sync.outcome","session_id":"\xff"}',
        b'{"ts":1.5,"at_ns":1,"seq":1,"epoch":"e1","event":["x"]}',
    ]  # fmt: skip
    path = tmp_path / "log"
    path.write_bytes(b"\n".join([*writer.lines[:4], *garbage, *writer.lines[4:]]))
    report = report_of(path)
    assert report.reading.unreadable == len(garbage)
    assert (report.attempts, report.ok, report.reading.missing_lines) == (1, 1, 0)
    assert all(len(line.text) <= 200 for line in report.reading.unreadable_lines)


def test_lines_that_come_twice_are_counted_once(tmp_path: Path) -> None:
    """A copy of a file, or one that goes on where a copy ends, changes no figure."""
    writer = Writer()
    writer.start()
    for handle in range(1, 5):
        writer.life(handle)
    (tmp_path / "a").write_bytes(b"".join(line + b"\n" for line in writer.lines[:20]))
    (tmp_path / "b").write_bytes(b"".join(line + b"\n" for line in writer.lines[8:]))
    report = report_of(tmp_path / "b", tmp_path / "a")
    assert report.reading.duplicates == 12
    assert (report.attempts, report.reading.missing_lines) == (4, 0)
    assert sum(epoch.lines for epoch in report.epochs) == len(writer.lines)


def test_a_whole_copy_of_a_log_of_several_epochs_changes_nothing(tmp_path: Path) -> None:
    """The copy begins with a line that is the first of its epoch."""
    first, second = Writer(epoch="a"), Writer(epoch="b", ts=TS + 60)
    for writer in (first, second):
        writer.start()
        writer.life(1)
    for name in ("log", "copy"):
        (tmp_path / name).write_bytes(first.text() + second.text())
    report = report_of(tmp_path / "log", tmp_path / "copy")
    assert report.reading.duplicates == len(first.lines + second.lines)
    assert (report.attempts, [epoch.epoch for epoch in report.epochs]) == (2, ["a", "b"])


def test_a_gap_is_counted(tmp_path: Path) -> None:
    """Numbers that are not in the log, between others that are, are missing lines."""
    writer = Writer()
    writer.start()
    writer.life(1)
    writer.life(2)
    del writer.lines[3:6]
    report = report_of(a_log(tmp_path / "log", writer))
    assert report.reading.missing_lines == 3
    assert report.attempts == 2


def test_a_missing_beginning_is_shown_and_is_no_gap(tmp_path: Path) -> None:
    """Rotation has deleted the oldest files: attempts that began there are counted by their outcome."""
    writer = Writer()
    writer.start()
    writer.life(1)
    writer.life(2)
    del writer.lines[:5]
    path = a_log(tmp_path / "log", writer)
    report = report_of(path)
    assert report.reading.missing_lines == 0
    assert [(epoch.has_begin, epoch.first_seq) for epoch in report.epochs] == [(False, 6)]
    with loaded(path) as (tables, _):
        assert tables.rows("SELECT slab_handle, is_begin_missing, became_ready FROM attempts ORDER BY 1") == [
            (1, True, True), (2, False, True),
        ]  # fmt: skip


def test_epochs_follow_the_one_that_they_name_whatever_the_clock_says(tmp_path: Path) -> None:
    writers = [Writer(epoch="c", ts=TS), Writer(epoch="a", ts=TS - 5_000), Writer(epoch="b", ts=TS - 10_000)]
    for writer, former in zip(writers, ("", "c", "a"), strict=True):
        writer.start(former_epoch=former)
        writer.life(1)
    for index, writer in enumerate(writers):
        a_log(tmp_path / f"{index}.jsonl", writer)
    with loaded(tmp_path) as (tables, _):
        assert [epoch.epoch for epoch in tables.epochs] == ["c", "a", "b"]
        assert tables.rows("SELECT epoch FROM attempts ORDER BY epoch_no") == [("c",), ("a",), ("b",)]


def test_epochs_that_name_each_other_are_all_there(tmp_path: Path) -> None:
    writers = [Writer(epoch="a"), Writer(epoch="b", ts=TS + 1)]
    writers[0].start(former_epoch="b")
    writers[1].start(former_epoch="a")
    path = tmp_path / "log"
    path.write_bytes(writers[0].text() + writers[1].text())
    assert [epoch.epoch for epoch in report_of(path).epochs] == ["a", "b"]


def test_an_attempt_that_the_next_epoch_closes_belongs_to_its_own(tmp_path: Path) -> None:
    """``former_epoch`` in the outcome says whose it is; equal handles of two epochs are two attempts."""
    first, second = Writer(epoch="a"), Writer(epoch="b", ts=TS + 60)
    first.start()
    first.move(1, "", "RESERVED", duration_ms=0.0)
    second.start(former_epoch="a")
    second.move(1, "RESERVED", "ABORTED", "daemon-restarted", former_epoch="a")
    second.outcome(1, "daemon-restarted", former_epoch="a")
    second.life(1)
    path = tmp_path / "log"
    path.write_bytes(first.text() + second.text())
    with loaded(path) as (tables, _):
        assert tables.rows("SELECT epoch, epoch_no, reason, last_state FROM attempts ORDER BY epoch_no") == [
            ("a", 0, "daemon-restarted", "RESERVED"), ("b", 1, "ok", "READY"),
        ]  # fmt: skip
        assert tables.value("SELECT count(*) FROM open_attempts") == 0


def test_an_attempt_that_ends_twice_is_counted_once(tmp_path: Path) -> None:
    """The first outcome counts; the proof is what complains."""
    writer = Writer()
    writer.start()
    writer.life(1)
    writer.outcome(1, "evicted")
    report = report_of(a_log(tmp_path / "log", writer))
    assert [(reason.reason, reason.count) for reason in report.reasons] == [("ok", 1)]


def test_open_attempts_are_no_outcomes(tmp_path: Path) -> None:
    writer = Writer()
    writer.start()
    writer.move(1, "", "RESERVED", duration_ms=0.0)
    writer.move(1, "RESERVED", "TRANSFERRING")
    path = a_log(tmp_path / "log", writer)
    report = report_of(path)
    assert (report.attempts, report.unfinished, report.ok_share) == (0, 1, 0.0)
    with loaded(path) as (tables, _):
        assert tables.rows("SELECT slab_handle, state FROM open_attempts") == [(1, "TRANSFERRING")]


def test_who_d_was_is_read_from_the_first_transition(tmp_path: Path) -> None:
    """``peer`` is known to this version as a field or not: it is found."""
    writer = Writer()
    writer.start()
    writer.life(1, peer="d0:17")
    writer.life(2, peer="d1:18")
    writer.life(3)
    report = report_of(a_log(tmp_path / "log", writer))
    assert [(group.key, group.attempts) for group in report.by_d.shown] == [
        ("d0:17", 1),
        ("d1:18", 1),
        (None, 1),
    ]


def test_a_selection_narrows_attempts_and_can_be_taken_back(tmp_path: Path) -> None:
    """``since`` is inside, ``until`` is not."""
    writer = Writer()
    writer.start()
    for handle in range(1, 4):
        writer.life(handle)
    ends = [json.loads(line)["ts"] for line in writer.lines if b"sync.outcome" in line]
    with loaded(a_log(tmp_path / "log", writer)) as (tables, _):
        tables.select(Selection(since_ts=ends[1], until_ts=ends[2]))
        assert tables.rows("SELECT slab_handle FROM attempts") == [(2,)]
        assert tables.span_ts() == (ends[1], ends[2])
        tables.select(Selection(epoch="other'"))
        assert tables.rows("SELECT slab_handle FROM attempts") == []
        tables.select(Selection())
        assert tables.value("SELECT count(*) FROM attempts") == 3


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither after reading nor after a failure."""
    writer = Writer()
    writer.start()
    path = a_log(tmp_path / "log", writer)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with loaded(path):
        assert len(list(scratch.iterdir())) == 1
    assert not list(scratch.iterdir())
    with LogInput([str(path)]) as log:
        path.unlink()
        with pytest.raises(Exception, match="No such file"):
            LogTables(log)
    assert not list(scratch.iterdir())


def test_without_the_packages_it_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer()
    writer.start()
    path = a_log(tmp_path / "log", writer)
    real = tables_module.importlib.import_module

    def without(name: str) -> object:
        if name == "duckdb":
            raise ModuleNotFoundError("No module named 'duckdb'", name="duckdb")
        return real(name)

    monkeypatch.setattr(tables_module.importlib, "import_module", without)
    with (
        LogInput([str(path)]) as log,
        pytest.raises(ExtraMissing, match=r"pip install 'kv-snapd\[forensics\]'"),
    ):
        LogTables(log)


def test_a_long_log_is_committed_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not committed takes memory that the database does not count."""
    monkeypatch.setattr(lines_module, "_CHUNK_BYTES", 2_000)
    monkeypatch.setattr(loading, "BATCH_LINES", 10)
    monkeypatch.setattr(loading, "COMMIT_LINES", 30)
    writer = Writer()
    writer.start()
    for handle in range(1, 31):
        writer.life(handle)

    class Counting:
        commits = 0

        def __init__(self, database: Any) -> None:
            self._database = database

        def __getattr__(self, name: str) -> Any:
            Counting.commits += name == "commit"
            return getattr(self._database, name)

    with LogInput([str(a_log(tmp_path / "log", writer))]) as log, duckdb.connect() as database:
        loading.load(Counting(database), log)
        assert database.execute("SELECT count(*) FROM records").fetchone() == (len(writer.lines),)
    assert Counting.commits >= len(writer.lines) // 60


def test_garbage_is_collected_again_after_reading(tmp_path: Path) -> None:
    """Reading and proving do without, and give it back."""
    writer = Writer()
    writer.start()
    path = a_log(tmp_path / "log", writer)
    assert gc.isenabled()
    with loaded(path) as (tables, log):
        assert gc.isenabled()
        prove_log(log)
        assert gc.isenabled()
        tables.arenas()
        assert gc.isenabled()


def test_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables need room: TMPDIR says where."""

    def full(*_: object) -> None:
        raise duckdb.IOException("No space left on device")

    (tmp_path / "log").touch()
    monkeypatch.setattr(tables_module, "load", full)
    with LogInput([str(tmp_path / "log")]) as log, pytest.raises(LogUnreadable, match="Set TMPDIR to a disk"):
        LogTables(log)


def test_an_empty_log_is_a_log(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    report = report_of(tmp_path / "log")
    assert (report.attempts, report.epochs, report.reading.lines, report.pressure) == (0, [], 0, None)

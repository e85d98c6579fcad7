"""The event log: what its lines say, and that nobody waits for it."""

import errno
import threading
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from eventlog_cases import EPOCH, ONE_OF_EACH, Gate, check_story, read, record, settings, wait_until
from hypothesis import given
from hypothesis import strategies as st

from snapd.core import records as rec
from snapd.eventlog import (
    LINE_TYPES,
    EventLog,
    Line,
    TornLine,
    UnknownLine,
    _Template,
    decode_line,
    log_line_schema,
)
from snapd.logfile import FileCalls

# --- Lines ------------------------------------------------------------------------------------


def test_every_kind_of_record_has_an_example_here() -> None:
    assert {type(record) for record in ONE_OF_EACH} == set(LINE_TYPES.values())


def test_a_line_starts_with_the_header_and_reads_back_as_its_record(tmp_path: Path) -> None:
    log = EventLog(settings(tmp_path / "log"), 'e"1%s', wall_clock=lambda: 1764460000.123456)
    for one in ONE_OF_EACH:
        log.write(one)
    assert log.close(10) == 0
    raws = (tmp_path / "log").read_bytes().splitlines()
    for seq, (raw, one) in enumerate(zip(raws, ONE_OF_EACH, strict=True), 1):
        keys = list(msgspec.json.decode(raw))
        own = list(msgspec.to_builtins(one))
        assert keys == ["ts", "at_ns", "seq", "epoch", *(k for k in own if k != "at_ns")]
        line = decode_line(raw)
        assert isinstance(line, Line)
        assert line.record == one
        header = line.header
        assert (header.ts, header.at_ns, header.seq, header.epoch) == (
            1764460000.123456, one.at_ns, seq, 'e"1%s',
        )  # fmt: skip


@given(session_id=st.text(), at_ns=st.integers(0, 2**63), cause_id=st.integers(0, 2**63))
def test_any_text_and_number_reads_back(session_id: str, at_ns: int, cause_id: int) -> None:
    log = EventLog.__new__(EventLog)
    one = msgspec.structs.replace(record(at_ns, session_id), cause_id=cause_id)
    log._wall_clock, log._seq = (lambda: 1.0), 0
    log._templates = {type(one): _Template("slab.allocated", EPOCH)}
    (raw,) = log._lines([one], [msgspec.json.encode(one)])
    assert raw.count(b"\n") == 1
    line = decode_line(raw)
    assert isinstance(line, Line)
    assert line.record == one


def test_unknown_fields_kinds_and_garbage_are_told_apart() -> None:
    head = b'{"ts":1.5,"at_ns":1,"seq":1,"epoch":"e","event":'
    known = decode_line(head + b'"events.dropped","count":2,"why":"w","later":[1]}\n')
    assert isinstance(known, Line)
    assert known.record == rec.EventsDropped(at_ns=1, count=2, why="w")
    unknown = decode_line(head + b'"slab.moved","rank":0}')
    assert isinstance(unknown, UnknownLine)
    assert unknown.header.event == "slab.moved"
    torn = [
        b"", head.replace(b'"e"', b'"\xff"') + b'"slab.moved"}',
        b"\n", b"\x00" * 50, b"\xff\xfe", b"[]", head, head + b'"events.dropped","count":2}',
        head + b'"events.dropped","count":"2","why":"w"}', b'{"event":"events.dropped","count":2,"why":"w"}',
    ]  # fmt: skip
    assert [type(decode_line(raw)) for raw in torn] == [TornLine] * len(torn)


def test_lines_of_several_threads_are_numbered_in_file_order(tmp_path: Path) -> None:
    log = EventLog(settings(tmp_path / "log"), EPOCH)

    def work(session: int) -> None:
        for at_ns in range(2000):
            log.write(record(at_ns, str(session)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.close(10) == 0
    lines = read(tmp_path / "log")
    assert [line.header.seq for line in lines] == list(range(1, 8001))


def test_what_is_no_record_is_refused_and_takes_no_number(tmp_path: Path) -> None:
    log = EventLog(settings(tmp_path / "log"), EPOCH)
    with pytest.raises(TypeError, match="dict is no record"):
        log.write({"event": "x"})  # type: ignore[arg-type]
    log.write(record(1))
    assert log.close(10) == 0
    check_story(read(tmp_path / "log"), 1, 1, log)


def test_a_record_that_cannot_be_encoded_is_counted_as_dropped(tmp_path: Path) -> None:
    log = EventLog(settings(tmp_path / "log"), EPOCH)
    for one in (record(1), record(2, "\ud800"), record(3), record(4, "\ud800")):
        log.write(one)
    assert log.close(10) == 0
    lines = read(tmp_path / "log")
    check_story(lines, 1, 4, log)
    assert [type(line.record).__name__ for line in lines] == [
        "SlabAllocated", "EventsDropped", "SlabAllocated", "EventsDropped",
    ]  # fmt: skip
    assert lines[1].record == rec.EventsDropped(at_ns=2, count=1, why="not-encodable")


# --- A slow disk ------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [{"queue_lines_max": 100}, {"queue_bytes_max": 20_000}])
def test_a_disk_that_blocks_never_blocks_a_write_and_drops_are_counted_exactly(
    tmp_path: Path, bounds: dict[str, int]
) -> None:
    gate = Gate()
    log = EventLog(settings(tmp_path / "log", **bounds), EPOCH, calls=FileCalls(write=gate.write))
    log.write(record(0, "\ud800"))
    for at_ns in range(1, 5000):
        log.write(record(at_ns))  # would hang here
    seen = log.statistics()
    assert seen.lines_written < 100
    assert seen.queued_lines <= bounds.get("queue_lines_max", 5000)
    assert seen.queued_bytes <= bounds.get("queue_bytes_max", 20_000)
    assert seen.records_dropped > 4000
    gate.open()
    for at_ns in range(5000, 6000):
        log.write(record(at_ns))
    assert log.close(20) == 0
    lines = gate.finish()
    check_story(lines, 0, 6000, log)
    why = [line.record.why for line in lines if isinstance(line.record, rec.EventsDropped)]
    assert why[0] == "not-encodable"
    assert set(why[1:]) == {"queue-full"}


def test_drops_are_reported_when_there_is_room_without_waiting_for_another_record(tmp_path: Path) -> None:
    gate = Gate()
    log = EventLog(settings(tmp_path / "log", queue_lines_max=50), EPOCH, calls=FileCalls(write=gate.write))
    for at_ns in range(500):
        log.write(record(at_ns))
    gate.open()
    wait_until(lambda: b"events.dropped" in gate.content)
    assert log.close(20) == 0
    check_story(gate.finish(), 0, 500, log)


def test_a_smaller_record_does_not_pass_the_report_of_a_larger_one(tmp_path: Path) -> None:
    gate = Gate()
    bounds = settings(tmp_path / "log", queue_bytes_max=8000, queue_lines_max=2)
    log = EventLog(bounds, EPOCH, calls=FileCalls(write=gate.write))
    log.write(record(0))
    log.write(record(1, "x" * 9000))
    log.write(record(2))  # has room, but not together with the report
    gate.open()
    assert log.close(20) == 0
    lines = gate.finish()
    check_story(lines, 0, 3, log)
    assert lines[1].record == rec.EventsDropped(at_ns=2, count=2, why="queue-full")


def test_a_report_of_many_causes_is_no_longer_than_what_is_kept_free_for_it(tmp_path: Path) -> None:
    gate = Gate()
    log = EventLog(settings(tmp_path / "log", queue_lines_max=1), EPOCH, calls=FileCalls(write=gate.write))
    log.write(record(0))
    for at_ns, number in enumerate(errno.errorcode, 1):
        log._writer.failure = OSError(number, "trouble")
        log.write(record(at_ns))
    gate.open()
    assert log.close(20) == 0
    lines = gate.finish()
    check_story(lines, 0, 1 + len(errno.errorcode), log)
    assert isinstance(lines[1].record, rec.EventsDropped)
    assert len(lines[1].record.why) == 256


def test_what_was_dropped_last_is_reported_at_the_close(tmp_path: Path) -> None:
    log = EventLog(settings(tmp_path / "log"), EPOCH)
    log.write(record(0))
    wait_until(lambda: log.statistics().lines_written == 1)
    log.write(record(1, "\ud800"))
    assert log.close(10) == 0
    check_story(read(tmp_path / "log"), 0, 2, log)


def test_close_gives_up_at_its_timeout_and_says_how_much_is_left(tmp_path: Path) -> None:
    gate = Gate()
    log = EventLog(settings(tmp_path / "log"), EPOCH, calls=FileCalls(write=gate.write))
    for at_ns in range(200):
        log.write(record(at_ns))
    assert log.close(0.05) == 200
    log.write(record(200))
    seen = log.statistics()
    assert (seen.records_offered, seen.records_dropped, seen.queued_lines) == (201, 1, 200)
    gate.open()
    log._writer._thread.join(10)
    assert not log._writer._thread.is_alive()


def test_a_write_after_close_is_counted_and_close_may_be_called_twice(tmp_path: Path) -> None:
    log = EventLog(settings(tmp_path / "log"), EPOCH)
    log.write(record(0))
    assert log.close(10) == 0
    log.write(record(1))
    assert log.close(10) == 0
    assert len(read(tmp_path / "log")) == 1
    assert log.statistics().records_dropped == 1


# --- Schema -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = log_line_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_real_lines_fit_the_schema(tmp_path: Path, validator: jsonschema.Draft202012Validator) -> None:
    log = EventLog(settings(tmp_path / "log"), EPOCH)
    for one in ONE_OF_EACH:
        log.write(one)
    assert log.close(10) == 0
    for raw in (tmp_path / "log").read_bytes().splitlines():
        validator.validate(msgspec.json.decode(raw))


@pytest.mark.parametrize(
    "change",
    [
        {"seq": None}, {"ts": None}, {"at_ns": None}, {"epoch": None}, {"event": None}, {"session_id": None},
        {"seq": 0}, {"epoch": ""}, {"ts": "now"}, {"event": "slab.moved"}, {"event": "sync.outcome"},
        {"extents": [[1]]}, {"extents": [[0, "1"]]}, {"rank": "0"},
    ],
)  # fmt: skip
def test_broken_lines_do_not_fit_the_schema(
    change: dict[str, Any], validator: jsonschema.Draft202012Validator
) -> None:
    fields = msgspec.json.decode(msgspec.json.encode(record(1)))
    good = {"ts": 1.5, "at_ns": 1, "seq": 1, "epoch": "e", **fields}
    assert validator.is_valid(good)
    broken = {name: value for name, value in (good | change).items() if value is not None}
    assert not validator.is_valid(broken)

"""Records that are logged many at once become the same lines as one by one, and are dropped alike."""

import errno
import os
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from eventlog_cases import EPOCH, ONE_OF_EACH, Gate, check_story, read, record, rotated, settings, wait_until

from snapd.core import records as rec
from snapd.eventlog import EventLog
from snapd.logfile import FileCalls
from snapd.logwriter import BATCH_BYTES_MAX


def test_many_at_once_are_the_same_lines_as_one_by_one(tmp_path: Path) -> None:
    """Kinds and times change from line to line."""
    records = [
        msgspec.structs.replace(one, at_ns=at_ns) for at_ns in (0, 9, 10, 10, 1 << 62) for one in ONE_OF_EACH
    ]
    for name, parts in (("alone", [[one] for one in records]), ("at-once", [records[:7], records[7:], []])):
        log = EventLog(settings(tmp_path / name), EPOCH, wall_clock=lambda: 1764460000.000001)
        for part in parts:
            log.write_all(part)
        assert log.close(10) == 0
    assert (tmp_path / "at-once").read_bytes() == (tmp_path / "alone").read_bytes()
    assert len(read(tmp_path / "alone")) == len(records)


def test_lines_that_are_queued_together_have_one_time(tmp_path: Path) -> None:
    times = iter([1.5, 2.5])
    log = EventLog(settings(tmp_path / "log"), EPOCH, wall_clock=lambda: next(times))
    log.write_all([record(1), record(2)])
    log.write_all([record(3)])
    assert log.close(10) == 0
    assert [line.header.ts for line in read(tmp_path / "log")] == [1.5, 1.5, 2.5]


def test_one_that_cannot_be_encoded_costs_the_others_nothing(tmp_path: Path) -> None:
    log = EventLog(settings(tmp_path / "log"), EPOCH)
    log.write_all([record(1), record(2, "\ud800"), record(3)])
    assert log.close(10) == 0
    lines = read(tmp_path / "log")
    check_story(lines, 1, 3, log)
    assert [type(line.record) for line in lines] == [rec.SlabAllocated, rec.EventsDropped, rec.SlabAllocated]


def test_with_one_that_is_no_record_nothing_is_queued(tmp_path: Path) -> None:
    log = EventLog(settings(tmp_path / "log"), EPOCH)
    with pytest.raises(TypeError, match="dict is no record"):
        log.write_all([record(1), {"event": "x"}])  # type: ignore[list-item]
    log.write(record(1))
    assert log.close(10) == 0
    check_story(read(tmp_path / "log"), 1, 1, log)


@pytest.mark.parametrize("bounds", [{"queue_lines_max": 10}, {"queue_bytes_max": 3_000}])
def test_of_many_those_that_find_room_are_queued_and_the_rest_are_counted(
    tmp_path: Path, bounds: dict[str, int]
) -> None:
    gate = Gate()
    log = EventLog(settings(tmp_path / "log", **bounds), EPOCH, calls=FileCalls(write=gate.write))
    # The thread may take some at once, and then waits for the disk.
    for first in range(0, 400, 40):
        log.write_all([record(at_ns) for at_ns in range(first, first + 40)])
    seen = log.statistics()
    assert seen.queued_lines <= bounds.get("queue_lines_max", 400)
    assert seen.queued_bytes <= bounds.get("queue_bytes_max", 400_000)
    assert 0 < seen.records_dropped < 400
    gate.open()
    assert log.close(20) == 0
    check_story(gate.finish(), 0, 400, log)


def test_nothing_passes_the_report_of_what_was_dropped(tmp_path: Path) -> None:
    """Also when all of the next lines would find room at once."""
    log = EventLog(settings(tmp_path / "log"), EPOCH)
    log.write(record(1, "\ud800"))
    log.write_all([record(2), record(3)])
    assert log.close(10) == 0
    lines = read(tmp_path / "log")
    assert [line.header.at_ns for line in lines] == [1, 2, 3]
    check_story(lines, 1, 3, log)


def test_after_the_close_all_are_counted(tmp_path: Path) -> None:
    log = EventLog(settings(tmp_path / "log"), EPOCH)
    assert log.close(10) == 0
    log.write_all([record(1), record(2)])
    seen = log.statistics()
    assert (seen.records_offered, seen.records_dropped, seen.queued_lines) == (2, 2, 0)


@pytest.mark.parametrize("rotate_bytes", [100, 1_000, 2_500])
def test_a_new_file_begins_between_lines_that_were_queued_together(tmp_path: Path, rotate_bytes: int) -> None:
    """No file is larger than it may be, but for one line that is."""
    path = tmp_path / "log"
    log = EventLog(settings(path, rotate_bytes=rotate_bytes, rotate_keep=100), EPOCH)
    log.write_all([record(at_ns, "s" * (at_ns % 7)) for at_ns in range(3)])
    # The others find a file that has room for some of them.
    wait_until(lambda: log.statistics().lines_written == 3)
    log.write_all([record(at_ns, "s" * (at_ns % 7)) for at_ns in range(3, 60)])
    assert log.close(20) == 0
    files = rotated(path)
    lines = read(*files)
    check_story(lines, 0, 60, log)
    contents = [file.read_bytes() for file in files]
    for content, following in pairwise(contents):
        first = following[: following.index(b"\n") + 1]
        assert len(content) <= rotate_bytes or content.count(b"\n") == 1
        assert len(content) + len(first) > rotate_bytes, "there was room for one more"


@pytest.mark.parametrize("taken_bytes", [0, 1, 200, 1_000])
def test_a_write_that_breaks_off_among_them_leaves_the_rest_waiting(tmp_path: Path, taken_bytes: int) -> None:
    """What is on file is not written again, and what is not on file waits."""
    breaks = [taken_bytes, taken_bytes, 0]

    def write(fd: int, data: bytes) -> int:
        if breaks:
            count = breaks.pop()
            if count and len(data) > count:
                breaks.append(0)
                return os.write(fd, data[:count])
            raise OSError(errno.ENOSPC, "no space left on device")
        return os.write(fd, data)

    log = EventLog(settings(tmp_path / "log"), EPOCH, calls=FileCalls(write=write))
    log.write_all([record(at_ns) for at_ns in range(20)])
    log.write_all([record(at_ns) for at_ns in range(20, 30)])
    assert log.close(20) == 0
    assert not breaks
    check_story(read(tmp_path / "log"), 0, 30, log)


def test_of_more_than_one_write_takes_nothing_is_lost(tmp_path: Path) -> None:
    writes: list[int] = []

    def write(fd: int, data: bytes) -> int:
        writes.append(len(data))
        return os.write(fd, data)

    log = EventLog(settings(tmp_path / "log"), EPOCH, calls=FileCalls(write=write))
    log.write_all([record(at_ns, "s" * 100) for at_ns in range(4_000)])
    assert log.close(20) == 0
    assert len(writes) > 1
    assert max(writes) <= BATCH_BYTES_MAX
    check_story(read(tmp_path / "log"), 0, 4_000, log)

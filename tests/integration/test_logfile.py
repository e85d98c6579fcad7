"""The event log on real files: full disks, moved files, second daemons."""

import errno
import fcntl
import logging
import math
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from eventlog_cases import (
    EPOCH,
    check_story,
    read,
    record,
    rotated,
    settings,
    wait_until,
)

from snapd import logfile, logwriter
from snapd.core import records as rec
from snapd.errors import StartupError
from snapd.eventlog import (
    EventLog,
    Line,
    LogSettings,
    TornLine,
    decode_line,
)
from snapd.logfile import Appended, FileCalls, LogFile


def mount_tmpfs(path: Path, options: str) -> bool:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    path = tmp_path / "disk"
    if not mount_tmpfs(path, "size=64k"):
        pytest.skip("cannot mount a tmpfs here; the RLIMIT_FSIZE test covers a disk that is full")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


# --- A disk that fails ------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


def test_a_full_disk_costs_no_line_that_had_room_and_recovers_by_itself(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "log"
    log = EventLog(settings(path, queue_lines_max=100), EPOCH)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        file.write(b"x" * 40_000)
    at_ns = iter(range(100_000))

    def offer_until(condition: Callable[[], object]) -> None:
        wait_until(lambda: [log.write(record(next(at_ns))) for _ in range(20)] and condition())

    offer_until(lambda: log.statistics().write_errors >= 2)
    offer_until(lambda: log.statistics().records_dropped > 100)
    seen = log.statistics()
    assert seen.failing
    assert "No space left" in seen.last_error
    assert seen.queued_lines <= 100
    assert path.stat().st_size > 0
    read(path)  # no half line is left on file
    filler.unlink()
    offer_until(lambda: not log.statistics().failing)
    assert log.close(10) == 0
    lines = read(path)
    check_story(lines, 0, next(at_ns), log)
    why = [line.record.why for line in lines if isinstance(line.record, rec.EventsDropped)]
    assert "write-failing:ENOSPC" in ",".join(why)
    assert [text.split(str(path))[0] for text in warnings_of(caplog)] == [
        "cannot write the event log ", "the event log ",
    ]  # fmt: skip


LIMITED = """
import resource, sys
sys.path.insert(0, {tests!r})
from eventlog_cases import *
path = Path(sys.argv[1])
log = EventLog(settings(path), EPOCH)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (10_001, hard))
for at_ns in range(500):
    log.write(record(at_ns))
wait_until(lambda: log.statistics().write_errors >= 2)
assert log.statistics().last_error.startswith("[Errno 27]"), log.statistics()
read(path)
assert 9_000 < path.stat().st_size < 10_001
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert log.close(20) == 0
check_story(read(path), 0, 500, log)
"""


def test_a_file_at_its_size_limit_keeps_whole_lines_and_recovers(tmp_path: Path) -> None:
    assert resource.RLIMIT_FSIZE
    script = LIMITED.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "log")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cannot write the event log" in done.stderr


class FaultyDisk:
    """Writes half of what it is given and fails, so many times; cutting it off fails too."""

    def __init__(self, faults: int, half: Callable[[bytes], int]) -> None:
        self.faults = faults
        self.half = half
        self.times_s: list[float] = []

    def write(self, fd: int, data: bytes) -> int:
        self.times_s.append(time.monotonic())
        if not self.faults:
            return os.write(fd, data[:1000])  # a short write is no fault
        self.faults -= 1
        os.write(fd, data[: self.half(data)])
        raise OSError(errno.EIO, "bad disk")

    def ftruncate(self, _fd: int, _size_bytes: int) -> None:
        raise OSError(errno.EIO, "bad disk")


def test_a_fragment_that_cannot_be_cut_off_spoils_no_other_line(tmp_path: Path) -> None:
    disk, path = FaultyDisk(1, lambda data: 0), tmp_path / "log"

    def write(fd: int, data: bytes) -> int:
        if disk.faults:
            disk.faults = 0
            os.write(fd, data[:150])
            # The kernel said 150 and then failed, as a full disk does.
            broken.append(True)
            return 150
        if broken:
            broken.clear()
            raise OSError(errno.ENOSPC, "full")
        return os.write(fd, data)

    broken: list[bool] = []
    log = EventLog(settings(path), EPOCH, calls=FileCalls(write, disk.ftruncate))
    log.write(record(0))
    log.write(record(1))
    assert log.close(10) == 0
    lines = [decode_line(raw) for raw in path.read_bytes().splitlines()]
    assert [type(line) for line in lines] == [TornLine, Line, Line]
    assert [line.header.seq for line in lines if isinstance(line, Line)] == [1, 2]


@pytest.mark.parametrize("before", [0, 1], ids=["alone", "after-another"])
def test_a_line_that_lacks_only_its_newline_and_cannot_be_cut_off_does_not_come_twice(
    tmp_path: Path, before: int
) -> None:
    """A disk that is full takes all of a line but its last byte, and then does not cut it off."""
    path, faults = tmp_path / "log", [True]

    def write(fd: int, data: bytes) -> int:
        if not faults:
            return os.write(fd, data)
        if faults.pop():
            faults.append(False)
            return os.write(fd, data[:-1])
        raise OSError(errno.ENOSPC, "full")

    file = LogFile(settings(path), FileCalls(write, FaultyDisk(0, len).ftruncate))
    file.open()
    lines = [b'{"a":%d}\n' % number for number in range(3)]
    first = b"".join(lines[: 1 + before])
    appended = file.append(first)
    assert appended.error is not None and appended.whole_bytes == len(first), "all of it is on file"
    rest = b"".join(lines[1 + before :])
    assert file.append(rest) == Appended(len(rest), None)
    file.close()
    assert path.read_bytes() == b"".join(lines)


def test_short_writes_are_completed(tmp_path: Path) -> None:
    disk, path = FaultyDisk(0, len), tmp_path / "log"
    log = EventLog(settings(path), EPOCH, calls=FileCalls(disk.write))
    for at_ns in range(100):
        log.write(record(at_ns))
    assert log.close(10) == 0
    check_story(read(path), 0, 100, log)
    assert len(disk.times_s) > 10


def test_a_disk_that_takes_nothing_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    log = EventLog(settings(tmp_path / "log"), EPOCH, calls=FileCalls(write=lambda fd, data: 0))
    log.write(record(0))
    wait_until(lambda: log.statistics().failing)
    assert log.close(0.01) == 1
    log._writer._thread.join(10)
    assert not log._writer._thread.is_alive()


def test_a_failing_disk_is_tried_again_with_growing_pauses_up_to_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logwriter, "BACK_OFF_S_MIN", 0.02)
    disk, path = FaultyDisk(12, lambda data: 0), tmp_path / "log"
    log = EventLog(settings(path, back_off_ms_max=80), EPOCH, calls=FileCalls(disk.write))
    log.write(record(0))
    wait_until(lambda: log.statistics().lines_written == 1)  # unbounded, it would take minutes
    pauses_s = [later - sooner for sooner, later in zip(disk.times_s, disk.times_s[1:], strict=False)]
    assert len(pauses_s) == 12
    assert all(pause_s >= 0.019 for pause_s in pauses_s)
    assert all(pause_s >= 0.079 for pause_s in pauses_s[3:])
    disk.faults = 1  # another outage starts from the shortest pause
    log.write(record(1))
    wait_until(lambda: log.statistics().lines_written == 2)
    assert log._writer._back_off_s == 0.02
    assert log.close(10) == 0
    check_story(read(path), 0, 2, log)


def test_an_unexpected_error_in_the_writer_loses_no_line(tmp_path: Path) -> None:
    faults = [ZeroDivisionError("a bug")]

    def write(fd: int, data: bytes) -> int:
        if faults:
            raise faults.pop()
        return os.write(fd, data)

    log = EventLog(settings(tmp_path / "log"), EPOCH, calls=FileCalls(write))
    log.write(record(0))
    wait_until(lambda: log.statistics().lines_written == 1)
    assert "a bug" in log.statistics().last_error
    assert log.close(10) == 0
    check_story(read(tmp_path / "log"), 0, 1, log)


def test_an_outage_that_comes_and_goes_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    turns = iter(range(1000))

    def write(fd: int, data: bytes) -> int:
        if next(turns) % 2 == 0:
            raise OSError(errno.ENOSPC, "full")
        return os.write(fd, data)

    log = EventLog(settings(tmp_path / "log"), EPOCH, calls=FileCalls(write))
    for at_ns in range(3):
        log.write(record(at_ns))
        wait_until(lambda want=at_ns + 1: log.statistics().lines_written == want)
    assert log.close(10) == 0
    assert log.statistics().write_errors == 3
    assert len(warnings_of(caplog)) == 2


def test_whoever_reads_the_warnings_slowly_makes_no_write_wait(tmp_path: Path) -> None:
    faults = [OSError(errno.ENOSPC, "full")]
    reached, released = threading.Event(), threading.Event()

    class SlowHandler(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            if "again" in entry.getMessage():
                reached.set()
                released.wait(20)

    def write(fd: int, data: bytes) -> int:
        if faults:
            raise faults.pop()
        return os.write(fd, data)

    handler = SlowHandler()
    logging.getLogger("snapd.logwriter").addHandler(handler)
    try:
        log = EventLog(settings(tmp_path / "log"), EPOCH, calls=FileCalls(write))
        log.write(record(0))
        assert reached.wait(20)
        caller = threading.Thread(target=log.write, args=(record(1),), daemon=True)
        caller.start()
        caller.join(5)
        assert not caller.is_alive()
    finally:
        released.set()
        logging.getLogger("snapd.logwriter").removeHandler(handler)
    assert log.close(10) == 0
    check_story(read(tmp_path / "log"), 0, 2, log)


# --- Files that move and vanish ---------------------------------------------------------------


def test_a_directory_that_vanished_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "log"
    log = EventLog(settings(path), EPOCH)
    log.write(record(0))
    wait_until(lambda: log.statistics().lines_written == 1)
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").write_text("in the way")
    log.write(record(1))
    wait_until(lambda: log.statistics().failing)
    (tmp_path / "a").unlink()
    wait_until(lambda: log.statistics().lines_written == 2)
    assert log.close(10) == 0
    assert [line.header.seq for line in read(path)] == [2]


def test_a_deleted_file_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = EventLog(settings(path), EPOCH)
    log.write(record(0))
    wait_until(lambda: log.statistics().lines_written == 1)
    path.unlink()
    log.write(record(1))
    assert log.close(10) == 0
    assert [line.header.seq for line in read(path)] == [2]
    assert log.statistics().write_errors == 0


def test_a_rename_and_reopen_lose_no_line(tmp_path: Path) -> None:
    path, moved = tmp_path / "log", tmp_path / "log.1"
    log = EventLog(settings(path), EPOCH)
    log.write(record(0))
    wait_until(lambda: log.statistics().lines_written == 1)
    path.rename(moved)
    log.write(record(1))  # between the rename and the signal
    wait_until(lambda: log.statistics().lines_written == 2)
    assert not path.exists()
    log.reopen()
    wait_until(lambda: log.statistics().reopens == 1)
    log.write(record(2))
    assert log.close(10) == 0
    assert [line.header.seq for line in read(moved)] == [1, 2]
    assert [line.header.seq for line in read(path)] == [3]


def test_reopen_of_the_same_file_changes_nothing(tmp_path: Path) -> None:
    log = EventLog(settings(tmp_path / "log"), EPOCH)
    log.reopen()
    log.write(record(0))
    wait_until(lambda: log.statistics().lines_written == 1)
    assert log._writer._reopen_at_s == math.inf  # it is done, and not done again and again
    assert (log.statistics().reopens, log.statistics().write_errors) == (0, 0)
    assert log.close(10) == 0
    check_story(read(tmp_path / "log"), 0, 1, log)


def test_a_reopen_that_fails_goes_on_in_the_old_file_and_is_tried_again(tmp_path: Path) -> None:
    path, moved = tmp_path / "log", tmp_path / "old"
    log = EventLog(settings(path, back_off_ms_max=50), EPOCH)
    log.write(record(0))
    wait_until(lambda: log.statistics().lines_written == 1)
    path.rename(moved)
    path.mkdir()
    log.reopen()
    wait_until(lambda: log.statistics().write_errors >= 2)
    log.write(record(1))
    wait_until(lambda: log.statistics().lines_written == 2)
    path.rmdir()
    wait_until(lambda: log.statistics().reopens == 1)
    log.write(record(2))
    assert log.close(10) == 0
    assert [line.header.seq for line in read(moved)] == [1, 2]
    assert [line.header.seq for line in read(path)] == [3]


def test_rotation_under_load_loses_and_tears_no_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = EventLog(settings(path, rotate_bytes=10_000, rotate_keep=1000, queue_lines_max=10_000), EPOCH)
    for at_ns in range(5000):
        log.write(record(at_ns))
        if at_ns % 500 == 0:
            log.reopen()
    assert log.close(20) == 0
    files = rotated(path)
    assert len(files) > 50
    assert log.statistics().rotations == len(files) - 1
    assert all(file.stat().st_size <= 10_000 for file in files)
    check_story(read(*files), 0, 5000, log)


def test_the_oldest_file_goes_and_the_others_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = EventLog(settings(path, rotate_bytes=1, rotate_keep=3), EPOCH)
    for at_ns in range(6):
        log.write(record(at_ns))
    assert log.close(10) == 0
    assert [[line.header.seq for line in read(file)] for file in rotated(path)] == [[3], [4], [5], [6]]


def test_a_gap_in_the_numbers_is_filled_before_the_oldest_goes(tmp_path: Path) -> None:
    (tmp_path / "log.2").write_bytes(b"oldest")
    log = EventLog(settings(tmp_path / "log", rotate_bytes=1, rotate_keep=2), EPOCH)
    log.write(record(0))
    log.write(record(1))
    assert log.close(10) == 0
    assert (tmp_path / "log.2").read_bytes() == b"oldest"
    assert len(read(tmp_path / "log.1")) == 1


def test_without_a_size_there_is_no_rotation(tmp_path: Path) -> None:
    log = EventLog(settings(tmp_path / "log", rotate_bytes=0), EPOCH)
    for at_ns in range(3000):
        log.write(record(at_ns))
    assert log.close(10) == 0
    assert rotated(tmp_path / "log") == [tmp_path / "log"]


def test_a_rotation_that_fails_goes_on_in_the_old_file_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    (tmp_path / "log.1").mkdir()
    log = EventLog(settings(path, rotate_bytes=4000, rotate_keep=1), EPOCH)
    for at_ns in range(100):
        log.write(record(at_ns))
    wait_until(lambda: log.statistics().lines_written == 100)
    seen = log.statistics()
    assert (seen.rotations, seen.failing) == (0, False)
    assert 2 <= seen.write_errors < 60  # not at every line
    assert len(warnings_of(caplog)) == 1
    (tmp_path / "log.1").rmdir()
    for at_ns in range(100, 110):
        log.write(record(at_ns))
    assert log.close(10) == 0
    check_story(read(*rotated(path)), 0, 110, log)
    assert log.statistics().rotations >= 1


def test_rotation_leaves_a_file_alone_that_somebody_else_put_at_the_path(tmp_path: Path) -> None:
    path, moved = tmp_path / "log", tmp_path / "moved"
    log = EventLog(settings(path, rotate_bytes=1), EPOCH)
    log.write(record(0))
    wait_until(lambda: log.statistics().lines_written == 1)
    path.rename(moved)
    path.touch()
    log.write(record(1))
    assert log.close(10) == 0
    assert not (tmp_path / "log.1").exists()
    assert [line.header.seq for line in read(moved, path)] == [1, 2]


# --- Opening ----------------------------------------------------------------------------------


def test_a_torn_last_line_does_not_swallow_the_first_new_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"ts":1.0,"at_ns":1,"se')
    log = EventLog(settings(path), EPOCH)
    log.write(record(0))
    wait_until(lambda: log.statistics().lines_written == 1)
    log.write(record(1))
    assert log.close(10) == 0
    lines = path.read_bytes().splitlines()
    assert lines[0] == b'{"ts":1.0,"at_ns":1,"se'
    assert [type(decode_line(raw)) for raw in lines[1:]] == [Line, Line]


def test_a_whole_last_line_gets_no_empty_one_after_it(tmp_path: Path) -> None:
    for epoch in ("e1", "e2"):
        log = EventLog(settings(tmp_path / "log"), epoch)
        log.write(record(0))
        assert log.close(10) == 0
    assert [line.header.epoch for line in read(tmp_path / "log")] == ["e1", "e2"]


def test_files_are_private_and_so_are_all_new_directories(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        log = EventLog(settings(tmp_path / "a" / "b" / "log", rotate_bytes=1), EPOCH)
        log.write(record(0))
        log.write(record(1))
        assert log.close(10) == 0
    finally:
        os.umask(umask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")}
    assert modes == {"b": 0o700, "log": 0o600, "log.1": 0o600}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_a_second_daemon_is_refused_until_the_first_one_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = EventLog(settings(path, rotate_bytes=1), "e1")
    with pytest.raises(
        StartupError, match=f"{re.escape(str(path))} is being written by another.*Stop that one"
    ):
        EventLog(settings(path), "e2")
    first.write(record(0))
    first.write(record(1))
    wait_until(lambda: first.statistics().rotations == 1)
    with pytest.raises(StartupError):  # the lock moved to the new file
        EventLog(settings(path), "e2")
    assert first.close(10) == 0
    assert EventLog(settings(path), "e2").close(10) == 0


def test_a_second_daemon_is_refused_between_a_rename_and_the_signal(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = EventLog(settings(path), "e1")
    path.rename(tmp_path / "log.1")
    with pytest.raises(StartupError, match="another daemon"):
        EventLog(settings(path), "e2")
    first.reopen()
    first.write(record(0))
    assert first.close(10) == 0
    assert [line.header.epoch for line in read(path)] == ["e1"]


def test_a_file_that_is_renamed_while_it_is_opened_is_not_the_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, moved = tmp_path / "log", tmp_path / "moved"
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        real(fd, operation)
        if not moved.exists():
            path.rename(moved)

    monkeypatch.setattr(logfile.fcntl, "flock", flock)
    file = LogFile(settings(path))
    file.open()
    file.append(b"line\n")
    file.close()
    assert path.read_bytes() == b"line\n"
    assert moved.read_bytes() == b""


def test_a_cut_takes_off_the_fragment_only_when_somebody_else_cut_the_file_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old line\n" * 100)

    def write(fd: int, data: bytes) -> int:
        if path.stat().st_size:
            os.truncate(path, 0)  # as logrotate's copytruncate does
            return os.write(fd, data[:8])
        raise OSError(errno.ENOSPC, "full")

    def write_again(fd: int, data: bytes) -> int:
        if path.stat().st_size == 8:
            raise OSError(errno.ENOSPC, "full")
        return write(fd, data)

    file = LogFile(settings(path), FileCalls(write_again))
    file.open()
    file.refresh()
    appended = file.append(b"one\ntwo too\n")
    file.close()
    assert appended.whole_bytes == 4
    assert path.read_bytes() == b"one\n"


def test_a_file_that_somebody_cut_short_is_counted_anew_before_it_is_rotated(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = EventLog(settings(path, rotate_bytes=1000), EPOCH)
    for at_ns in range(4):
        log.write(record(at_ns))
        wait_until(lambda want=at_ns + 1: log.statistics().lines_written == want)
        os.truncate(path, 0)
    log.write(record(4, "x" * 600))
    assert log.close(10) == 0
    assert log.statistics().rotations == 0
    assert [line.header.seq for line in read(path)] == [5]


def test_what_cannot_be_opened_stops_the_start_and_says_what_to_do(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    files_before = set(Path("/proc/self/fd").iterdir())
    for name in ("fifo", "directory", "file/log"):
        with pytest.raises(StartupError, match=f"cannot open the event log .*{name}: .*set another path"):
            EventLog(settings(tmp_path / name), EPOCH)
    assert set(Path("/proc/self/fd").iterdir()) == files_before


def test_a_read_only_directory_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    mounted = mount_tmpfs(path, "ro")
    try:
        if not mounted:
            path.chmod(0o500)
            if os.access(path, os.W_OK):
                pytest.skip("no directory is read-only for this user")
        with pytest.raises(StartupError, match=r"disk/log: (Read-only file system|Permission denied)\. Give"):
            EventLog(settings(path / "log"), EPOCH)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize(
    "change", [{"rotate_bytes": -1}, {"rotate_keep": 0}, {"queue_bytes_max": 0}, {"queue_lines_max": 0}]
)
def test_settings_out_of_range_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="rotate_keep"):
        LogSettings(path="x", **change)  # type: ignore[arg-type]

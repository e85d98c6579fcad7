"""The disk of a running daemon's log fails while sessions are served: full, read-only, gone."""

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess
from fault_cases import serve
from kv_cases import PATIENCE_S, paired
from raw_client import wait_for

from snapd.core import records as rec
from snapd.eventlog import Line, decode_line
from snapd.forensics.proof import Proof, Where

DISK_BYTES = 128 * 1024
QUEUE_LINES_MAX = 40
SERVED_MEANWHILE = 10


class LoggingDaemon(DaemonProcess):
    """Its log has a directory of its own."""

    def _start(self) -> Any:
        self.log_path = self.directory / "log" / "d-to-p-sync.jsonl"
        return super()._start()


Fault = Callable[[LoggingDaemon], AbstractContextManager[None]]


@contextlib.contextmanager
def full_disk(daemon: LoggingDaemon) -> Iterator[None]:
    filler = daemon.log_path.with_name("filler")
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    yield
    filler.unlink()


@contextlib.contextmanager
def size_limit(daemon: LoggingDaemon) -> Iterator[None]:
    pid = daemon.process.pid
    old = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (daemon.log_path.stat().st_size + 100, old[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, old)


def _make_immutable(flag: str, *paths: Path) -> bool:
    command = ["chattr", flag, *map(str, paths)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def read_only(daemon: LoggingDaemon) -> Iterator[None]:
    """Nothing can be written there or made anew, by root either."""
    paths = (daemon.log_path, daemon.log_path.parent)
    if not _make_immutable("+i", *paths):
        pytest.skip("this file system or user cannot make files immutable")
    try:
        yield
    finally:
        _make_immutable("-i", *reversed(paths))


@contextlib.contextmanager
def gone(daemon: LoggingDaemon) -> Iterator[None]:
    """The directory is deleted, and cannot be made anew."""
    directory = daemon.log_path.parent
    shutil.rmtree(directory)
    directory.touch()
    yield
    directory.unlink()


FAULTS: dict[str, tuple[Fault, int]] = {
    "full": (full_disk, errno.ENOSPC),
    "at its size limit": (size_limit, errno.EFBIG),
    "read-only": (read_only, errno.EPERM),
    "gone": (gone, errno.EEXIST),
}


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="snapd-") as name:
        yield Path(name)


@pytest.fixture
def small_disk(directory: Path) -> Iterator[None]:
    """The log's directory is a file system of its own."""
    path = directory / "log"
    path.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here; the size limit is tried all the same")
    yield
    subprocess.run(["umount", "-l", str(path)], check=True)


def check_log(path: Path, dropped: int) -> None:
    """What was dropped is told in the log, and what is there breaks no rule."""
    proof = Proof()
    told = 0
    for number, raw in enumerate(path.read_bytes().splitlines(), start=1):
        line = decode_line(raw)
        assert isinstance(line, Line), raw
        proof.feed(line, Where(path.name, number))
        if isinstance(line.record, rec.EventsDropped):
            told += line.record.count
    report = proof.finish()
    assert report.is_good, report.violations
    assert told == report.events_dropped == dropped > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_sessions_are_served_while_the_log_cannot_be_written(
    name: str, directory: Path, request: pytest.FixtureRequest
) -> None:
    """What is dropped is counted, and told once the log can be written again."""
    if name == "full":
        request.getfixturevalue("small_disk")
    fault, error_number = FAULTS[name]
    daemon = LoggingDaemon(directory, {"log_queue_lines_max": QUEUE_LINES_MAX})
    try:
        with paired(daemon) as pair:
            log = lambda: pair.d.stats().log  # noqa: E731
            serve(pair)
            with fault(daemon):
                wait_for(lambda: serve(pair) and log().dropped > 0, "lines are dropped", PATIENCE_S)
                for _ in range(SERVED_MEANWHILE):
                    serve(pair)
                said = log()
                assert f"[Errno {error_number}]" in said.last_error, said
                assert said.queued_lines <= QUEUE_LINES_MAX
            wait_for(
                lambda: serve(pair) and log().lines_written > said.lines_written,
                "it is written again",
                PATIENCE_S,
            )
            serve(pair)
            assert pair.is_all_free()
            dropped = log().dropped
    finally:
        daemon.stop()
    assert daemon.stderr.count("cannot write the event log") == 1, "one outage is one warning"
    assert "is being written again" in daemon.stderr and "Traceback" not in daemon.stderr
    check_log(daemon.log_path, dropped)

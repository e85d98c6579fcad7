"""Records, waiting, reading and slow disks for the tests of the event log."""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapd.core import records as rec
from snapd.core.slab import Extent
from snapd.errors import Reason
from snapd.eventlog import (
    EventLog,
    Line,
    LogSettings,
    decode_line,
)

EPOCH = "e1"
SESSION: dict[str, Any] = {"session_id": "s", "slab_handle": 7}
SIZES: dict[str, Any] = {"num_tokens": 10, "token_start": 2, "bytes": 4096}
EXTENTS = (Extent(0, 4096), Extent(8192, 256))
ONE_OF_EACH: tuple[rec.Record, ...] = (
    rec.DaemonStarted(
        at_ns=1, version="1", protocol=1, pid=2, transport="shm",
        arenas=(rec.ArenaInfo(rank=0, device="cpu", size_bytes=1, alignment_bytes=256),), former_epoch="e0",
    ),
    rec.DaemonStopped(at_ns=2, reason="signal", attempts=3, attempts_ok=2),
    rec.SyncRefused(at_ns=3, session_id="s", reason=Reason.SNAPSHOT_BUF_FULL, **SIZES),
    rec.SessionTransition(
        at_ns=4, from_state="", to_state="RESERVED", reason=Reason.OK, duration_ms=0.0, **SESSION, **SIZES
    ),
    rec.SlabAllocated(at_ns=5, rank=0, bytes=4096, extents=EXTENTS, **SESSION),
    rec.SlabQuarantined(
        at_ns=6, rank=0, bytes=4096, extents=EXTENTS, until_ns=9, why="undrained", **SESSION
    ),
    rec.SlabReleased(
        at_ns=7, rank=0, bytes=4096, extents=EXTENTS, was="live", why="final", duration_ms=0.5, **SESSION
    ),
    rec.LeaseGranted(at_ns=8, rank=0, lease_id=1, round=1, until_ns=10, **SESSION),
    rec.LeaseEnded(at_ns=9, rank=0, lease_id=1, ok=True, reason=Reason.OK, duration_ms=1.5, **SESSION),
    rec.SyncOutcome(
        at_ns=10, ok=True, reason=Reason.OK, duration_ms=1e-7, reserved_ms=0.0, transferring_ms=0.0,
        ready_ms=1e-7, cause_id=5, **SESSION, **SIZES,
    ),
    rec.EventsDropped(at_ns=11, count=3, why="queue-full"),
)  # fmt: skip


def record(at_ns: int, session_id: str = "session") -> rec.SlabAllocated:
    """A record that is told apart by its time, and is as long as usual ones."""
    return rec.SlabAllocated(
        at_ns=at_ns, session_id=session_id, slab_handle=at_ns, rank=0, bytes=1, extents=EXTENTS
    )


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    poll = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        poll.wait(0.002)


def settings(path: Path, **changes: Any) -> LogSettings:
    return LogSettings(**({"path": str(path), "rotate_bytes": 0} | changes))


def read(*paths: Path) -> list[Line]:
    """Every line of the files, all of them whole."""
    lines = []
    for path in paths:
        content = path.read_bytes()
        assert content.endswith(b"\n")
        lines += [decode_line(raw) for raw in content.splitlines()]
    assert all(isinstance(line, Line) for line in lines), [x for x in lines if not isinstance(x, Line)]
    return lines  # type: ignore[return-value]


def rotated(path: Path) -> list[Path]:
    """All files of a log, oldest first."""
    others = sorted(path.parent.glob(path.name + ".*"), key=lambda p: -int(p.suffix[1:]))
    return [*others, path]


def check_story(lines: list[Line], first_at_ns: int, offered: int, log: EventLog) -> None:
    """``seq`` has no gap, and every record is a line or was counted where it is missing."""
    assert [line.header.seq for line in lines] == list(range(1, len(lines) + 1))
    at_ns = first_at_ns
    for line in lines:
        if isinstance(line.record, rec.EventsDropped):
            at_ns += line.record.count
        else:
            assert line.header.at_ns == at_ns
            at_ns += 1
    assert at_ns == first_at_ns + offered
    seen = log.statistics()
    drops = [line.record.count for line in lines if isinstance(line.record, rec.EventsDropped)]
    assert (seen.records_offered, seen.records_dropped, seen.drop_reports) == (
        offered,
        sum(drops),
        len(drops),
    )
    assert seen.lines_written == len(lines) == offered - sum(drops) + len(drops)
    assert (seen.queued_lines, seen.queued_bytes, seen.seq) == (0, 0, len(lines))


class Gate:
    """A disk that takes nothing until it is opened: writes go to a full pipe that nobody reads."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, 4096)
        self.content = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def write(self, _fd: int, data: bytes) -> int:
        return os.write(self._in, data)

    def open(self) -> None:
        self._reader.start()

    def finish(self) -> list[Line]:
        os.close(self._in)
        self._reader.join()
        os.close(self._out)
        lines = [decode_line(raw) for raw in bytes(self.content).splitlines()]
        assert all(isinstance(line, Line) for line in lines)
        return lines  # type: ignore[return-value]

    def _read(self) -> None:
        while data := os.read(self._out, 65536):
            self.content += data

"""The event log on a disk that is slow or full at times: the daemon's own writer, without its thread.

The files are real, in a directory of the run; what fails are the two system calls that the writer lets tests
replace. A daemon that is killed loses what waits, and may leave the line by halves that it was writing.
"""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast
from unittest import mock

from snapd import eventlog
from snapd.core.records import Record, SessionTransition, SyncOutcome
from snapd.eventlog import EventLog
from snapd.logfile import FileCalls, LogSettings, rotated_path
from snapd.logwriter import LINGER_S, LogWriter
from snapd.units import NS_PER_MS, NS_PER_S
from tools.simulation.clock import Node, Planned
from tools.simulation.dice import Dice

LOG_NAME: Final = "log"
# So many that none is ever deleted: the whole story is proved at the end.
KEEP: Final = 100


class Disk:
    """Where the log is, for all lives of the daemon.

    Attributes:
        path: of the log.
        is_full: writes fail with ENOSPC, in the middle of a line perhaps.
        latency_ns: what a write takes.
        failures: writes that failed.
    """

    def __init__(self, directory: Path, dice: Dice) -> None:
        self.path = str(directory / LOG_NAME)
        self.is_full = False
        self.latency_ns = 0
        self.failures = 0
        self._dice = dice
        self.calls = FileCalls(self._write, self._truncate)

    def files(self) -> list[Path]:
        """Return the files of the log, oldest first."""
        paths = [Path(rotated_path(self.path, 0))]
        index = 1
        while (path := Path(rotated_path(self.path, index))).exists():
            paths.append(path)
            index += 1
        return paths[::-1]

    def begin_older(self, lines: Sequence[bytes], *, is_cut_off: bool) -> None:
        """Leave a log as the design before snapd has written it, whose last line may be cut off."""
        data = b"".join(lines)
        Path(self.path).write_bytes(data[:-2] if is_cut_off else data)

    def tear(self, line: bytes) -> None:
        """Leave a part of a line, as a daemon that is killed while it writes."""
        with Path(self.path).open("ab") as file:
            file.write(line[: self._dice.below(len(line))])

    def _write(self, fd: int, data: bytes) -> int:
        if not self.is_full:
            return os.write(fd, data)
        self.failures += 1
        if len(data) > 1 and self._dice.chance(30):
            return os.write(fd, data[: self._dice.between(1, len(data) - 1)])
        raise OSError(errno.ENOSPC, "no space left on device")

    def _truncate(self, fd: int, size_bytes: int) -> None:
        if self.is_full and self._dice.chance(20):
            raise OSError(errno.EIO, "input/output error")
        os.ftruncate(fd, size_bytes)


class _NeverWaits:
    """In place of the condition on which the writer's thread waits: the clock waits instead."""

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        return True

    def notify(self, count: int = 1) -> None:
        del count


class SimLogWriter(LogWriter):
    """The writer, one turn of its thread at a time.

    Args:
        settings, on_room, calls: as ``LogWriter``.
        node: the daemon.
        disk: what it writes to.
    """

    def __init__(
        self, settings: LogSettings, on_room: Callable[[], None], calls: FileCalls, *, node: Node, disk: Disk
    ) -> None:
        self._node = node
        self._disk = disk
        self._turn: Planned | None = None
        self.warnings = 0
        super().__init__(settings, on_room, calls)
        self._thread.join()
        self._wake = cast("Any", _NeverWaits())

    def put_all(self, lines: list[bytes]) -> None:
        """Queue lines, and plan the thread's turn."""
        super().put_all(lines)
        self._plan()

    def close(self, timeout_s: float) -> int:
        """Write what waits, as long as the disk takes it; return the lines that did not get out."""
        del timeout_s
        self._closing = True
        while self._queued_lines and self.failure is None:
            self._take_turn()
        self.abandon()
        return self._queued_lines

    def abandon(self) -> bytes:
        """End as the process does, and return what waited next."""
        if self._turn is not None:
            self._turn.cancel()
        self._file.close()
        waiting = b"".join([*self._taken, *self._queue])
        return waiting[: waiting.find(b"\n") + 1]

    def _run(self) -> None:
        """Do nothing: there is a thread, and it ends at once."""

    def _plan(self) -> None:
        if self._turn is None:
            wait_ns = int((self._back_off_s if self.failure else LINGER_S) * NS_PER_S)
            self._turn = self._node.after(wait_ns + self._disk.latency_ns, self._turn_comes)

    def _turn_comes(self) -> None:
        self._turn = None
        self._take_turn()
        if self._queued_lines:
            self._plan()

    def _take_turn(self) -> None:
        self._wait_for_work()
        try:
            self._work()
        except OSError as error:
            self._failed(error)

    def _warn(self, kind: str, text: str) -> None:
        del kind, text
        self.warnings += 1


class SimEventLog(EventLog):
    """The event log, with that writer.

    Attributes:
        open: handles of attempts that have no outcome among what it was given.
    """

    def __init__(
        self, settings: LogSettings, epoch: str, wall_clock: Callable[[], float], node: Node, disk: Disk
    ) -> None:
        self.open: set[int] = set()

        def writer(settings: LogSettings, on_room: Callable[[], None], calls: FileCalls) -> SimLogWriter:
            return SimLogWriter(settings, on_room, calls, node=node, disk=disk)

        # The log makes its writer itself.
        with mock.patch.object(eventlog, "LogWriter", writer):
            super().__init__(settings, epoch, wall_clock, calls=disk.calls)

    def write_all(self, records: Sequence[Record]) -> None:
        """Queue records, and note which attempts they leave open."""
        super().write_all(records)
        for record in records:
            kind = type(record)
            if kind is SessionTransition and not record.former_epoch:  # type: ignore[union-attr]
                self.open.add(record.slab_handle)  # type: ignore[union-attr]
            elif kind is SyncOutcome and not record.former_epoch:  # type: ignore[union-attr]
                self.open.discard(record.slab_handle)  # type: ignore[union-attr]

    @property
    def writer(self) -> SimLogWriter:
        """The writer."""
        return cast("SimLogWriter", self._writer)


def slow_ns(for_ms: int) -> int:
    """Return what a write takes on a disk that is slow in this measure."""
    return for_ms * NS_PER_MS // 10

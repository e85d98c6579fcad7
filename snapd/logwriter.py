"""The thread that writes the event log: a bounded queue of lines, so that nobody waits for a disk.

Lines reach the kernel, not the platter: nothing is synced, so a killed process loses what was queued
(a few milliseconds; twenty while much is written), and a lost machine what the kernel had not written.

Source: design, section 6.
"""

import errno
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from snapd.errors import StartupError
from snapd.logfile import SYSTEM_CALLS, FileCalls, LogFile, LogSettings
from snapd.units import KIB, MS_PER_S

BATCH_BYTES_MAX: Final = 256 * KIB
# The thread waits this long for company after a first line: fewer wake-ups cost the event loop less.
LINGER_S: Final = 0.002
# While much is written it waits longer: each wake-up takes the interpreter from the event loop some times.
BUSY_LINGER_S: Final = 0.02
BUSY_LINES: Final = 32
BACK_OFF_S_MIN: Final = 0.05
WARN_EVERY_S: Final = 30.0
_logger: Final = logging.getLogger(__name__)

# A StartupError in the thread: another daemon took the file between a rename and our open.
_Trouble: TypeAlias = OSError | StartupError


class WriterStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the writer; see ``LogStatistics``."""

    lines_written: int
    bytes_written: int
    queued_lines: int
    queued_bytes: int
    write_errors: int
    last_error: str
    failing: bool
    rotations: int
    reopens: int


def error_name(error: Exception | None) -> str:
    """Return a short, bounded name for what went wrong: ``ENOSPC``, ``StartupError``, or empty."""
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, str(error.errno))
    return type(error).__name__ if error else ""


class LogWriter:
    """A bounded queue of lines and the daemon thread that writes them.

    Whoever appends holds ``lock``, asks ``has_room`` and calls ``put_all``. Lines count as queued until they
    are on file, so what waits is bounded whatever the disk does. A failing write keeps its lines and is
    tried again, 50 ms to ``back_off_ms_max`` apart, until it works or the writer is closed.

    Args:
        settings: path, rotation and bounds.
        on_room: called by the thread, lock held, whenever lines have left the queue.
        calls: write and ftruncate.

    Raises:
        StartupError: see ``LogFile.open``.
    """

    def __init__(
        self, settings: LogSettings, on_room: Callable[[], None], calls: FileCalls = SYSTEM_CALLS
    ) -> None:
        self.lock = threading.RLock()
        self.failure: _Trouble | None = None
        self._path = settings.path
        self._bytes_max = settings.queue_bytes_max
        self._lines_max = settings.queue_lines_max
        self._on_room = on_room
        self._wake = threading.Condition(self.lock)
        # Whole lines, as many in one piece as were queued together.
        self._queue: list[bytes] = []
        self._taken: deque[bytes] = deque()  # the thread's own
        self._queued_lines = 0
        self._queued_bytes = 0
        self._idle = False
        self._was_busy = False  # much was taken last time
        self._hurry_bytes = 0  # above 0: the thread lingers; wake it when so much waits
        self._closing = False
        self._abandoned = False
        self._reopen_at_s = math.inf  # when to open the file again; infinite: not asked for
        self._back_off_s = BACK_OFF_S_MIN
        self._back_off_s_max = settings.back_off_ms_max / MS_PER_S
        self._warned_s: dict[str, float] = {}
        self._lines_written = 0
        self._bytes_written = 0
        self._write_errors = 0
        self._last_error = ""
        self._rotations = 0
        self._reopens = 0
        self._file = LogFile(settings, calls)
        self._file.open()
        self._thread = threading.Thread(target=self._run, name="snapd-eventlog", daemon=True)
        self._thread.start()

    def has_room(self, line_bytes: int, lines: int = 1) -> bool:
        """Whether so many more lines of so many bytes together may wait. Lock held."""
        return (
            self._queued_lines + lines <= self._lines_max
            and self._queued_bytes + line_bytes <= self._bytes_max
        )

    def put_all(self, lines: list[bytes]) -> None:
        """Queue lines. Lock held."""
        if not lines:
            return
        piece = b"".join(lines)
        self._queue.append(piece)
        self._queued_lines += len(lines)
        self._queued_bytes += len(piece)
        if self._idle or 0 < self._hurry_bytes <= self._queued_bytes:
            self._idle = False
            self._hurry_bytes = 0
            self._wake.notify()

    def reopen(self) -> None:
        """Have the thread open ``path`` again; while that fails it goes on in the old file."""
        with self.lock:
            self._reopen_at_s = -math.inf
            self._wake.notify()

    def close(self, timeout_s: float) -> int:
        """Write what waits, for at most *timeout_s*, then stop; return the lines that did not get out."""
        with self.lock:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        with self.lock:
            self._abandoned = True
            self._wake.notify()
            return self._queued_lines

    def statistics(self) -> WriterStatistics:
        """Return a snapshot of the counters."""
        with self.lock:
            return WriterStatistics(
                lines_written=self._lines_written,
                bytes_written=self._bytes_written,
                queued_lines=self._queued_lines,
                queued_bytes=self._queued_bytes,
                write_errors=self._write_errors,
                last_error=self._last_error,
                failing=self.failure is not None,
                rotations=self._rotations,
                reopens=self._reopens,
            )

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._work()
            except (OSError, StartupError) as error:
                self._failed(error)
            except Exception as error:
                # A bug, not a disk; the thread lives on, and the lines are kept as for a disk.
                if self.failure is None:
                    _logger.exception("the event log's writer failed unexpectedly")
                self._failed(OSError(f"{type(error).__name__}: {error}"))
        self._file.close()

    def _wait_for_work(self) -> bool:
        """Take what is queued, waiting for it if need be; False when the thread is to end."""
        with self.lock:
            while not (self._queue or self._taken or self._closing or self._reopen_at_s <= time.monotonic()):
                self._idle = True
                self._wake.wait(self._until_reopen_s())
            self._idle = False
            if self.failure is not None:
                self._wake.wait(BACK_OFF_S_MIN if self._closing else self._back_off_s)
            elif self._queue and not (self._taken or self._closing):
                self._hurry_bytes = self._queued_bytes + BATCH_BYTES_MAX
                self._wake.wait(BUSY_LINGER_S if self._was_busy else LINGER_S)
                self._hurry_bytes = 0
            self._was_busy = self._queued_lines >= BUSY_LINES
            self._taken.extend(self._queue)
            self._queue.clear()
            return bool(self._taken or not self._closing) and not self._abandoned

    def _until_reopen_s(self) -> float | None:
        return None if self._reopen_at_s == math.inf else max(self._reopen_at_s - time.monotonic(), 0.0)

    def _work(self) -> None:
        if self._reopen_at_s <= time.monotonic():
            self._reopen()
        if self._taken:
            self._write_batch()

    def _write_batch(self) -> None:
        self._file.refresh()
        if self._file.size_bytes and self._file.room_bytes < self._taken[0].index(b"\n") + 1:
            self._rotate()
        data = self._next_batch()
        whole_bytes, error = self._file.append(data)
        done = data.count(b"\n", 0, whole_bytes)
        self._forget(whole_bytes)
        with self.lock:
            self._queued_lines -= done
            self._queued_bytes -= whole_bytes
            self._lines_written += done
            self._bytes_written += whole_bytes
            recovered = error is None and self.failure is not None
            if recovered:
                self.failure = None
            self._on_room()
        if error is not None:
            raise error
        if recovered:
            # Not under the lock: nobody but this thread may wait for whoever reads our stderr.
            self._warn("recover", f"the event log {self._path} is being written again")

    def _next_batch(self) -> bytes:
        """Return the lines for one write: as many as fit in a batch and in the file, at least one."""
        limit_bytes = min(BATCH_BYTES_MAX, self._file.room_bytes)
        pieces: list[bytes] = []
        size_bytes = 0
        for piece in self._taken:
            pieces.append(piece)
            size_bytes += len(piece)
            if size_bytes > limit_bytes:
                break
        data = b"".join(pieces)
        if size_bytes <= limit_bytes:
            return data
        whole_bytes = data.rfind(b"\n", 0, max(limit_bytes, 0)) + 1
        return data[: whole_bytes or data.index(b"\n") + 1]

    def _forget(self, num_bytes: int) -> None:
        """Leave out whole lines of so many bytes, which are on file."""
        while num_bytes:
            piece = self._taken.popleft()
            if len(piece) > num_bytes:
                self._taken.appendleft(piece[num_bytes:])
                return
            num_bytes -= len(piece)

    def _rotate(self) -> None:
        try:
            self._file.rotate()
        except (OSError, StartupError) as error:
            self._count_error(error)
            self._warn("rotate", f"cannot rotate the event log {self._path}, the old file goes on: {error}")
        else:
            with self.lock:
                self._rotations += 1

    def _reopen(self) -> None:
        # Before the file is looked at: a request that comes meanwhile is one more.
        self._reopen_at_s = math.inf
        try:
            opened = self._file.reopen()
        except (OSError, StartupError) as error:
            self._reopen_at_s = time.monotonic() + self._back_off_s_max
            self._count_error(error)
            self._warn("reopen", f"cannot reopen the event log {self._path}, the old file goes on: {error}")
        else:
            with self.lock:
                self._reopens += opened

    def _failed(self, error: _Trouble) -> None:
        self._count_error(error)
        if self.failure is None:
            self._back_off_s = BACK_OFF_S_MIN
            self._warn("write", f"cannot write the event log {self._path}, trying on: {error}")
        else:
            self._back_off_s = min(self._back_off_s * 2, self._back_off_s_max)
        with self.lock:
            self.failure = error

    def _count_error(self, error: _Trouble) -> None:
        with self.lock:
            self._write_errors += 1
            self._last_error = str(error)

    def _warn(self, kind: str, text: str) -> None:
        """Warn at most once in ``WARN_EVERY_S`` a kind: an outage that comes and goes must not flood."""
        now_s = time.monotonic()
        if now_s - self._warned_s.get(kind, -WARN_EVERY_S) >= WARN_EVERY_S:
            self._warned_s[kind] = now_s
            _logger.warning("%s", text)

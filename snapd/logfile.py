"""The event log's file: append whole lines, rotate, open again, and never share it.

Source: design, section 6.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from snapd.errors import StartupError
from snapd.units import MIB

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
_OPEN_TRIES_MAX: Final = 10
_UNLIMITED_BYTES: Final = 1 << 62


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the log goes and what it may take.

    Attributes:
        path: the file that is being written; rotated ones are ``path.1`` (newest) to ``path.<keep>``.
        rotate_bytes: start a new file before this one would grow beyond it; 0: never.
        rotate_keep: rotated files to keep, at least 1.
        queue_bytes_max: bytes of lines that may wait for the disk.
        queue_lines_max: lines that may wait for the disk.
        back_off_ms_max: the longest pause after a write that failed.
    """

    path: str
    rotate_bytes: int = 256 * MIB
    rotate_keep: int = 8
    queue_bytes_max: int = 16 * MIB
    queue_lines_max: int = 65_536
    back_off_ms_max: int = 2_000

    def __post_init__(self) -> None:
        if self.rotate_bytes < 0 or min(self.rotate_keep, self.queue_bytes_max, self.queue_lines_max) < 1:
            raise ValueError("a log needs rotate_bytes >= 0, rotate_keep >= 1 and a queue of at least 1")


class FileCalls(NamedTuple):
    """The two system calls that a disk makes fail in ways that are hard to bring about."""

    write: Callable[[int, bytes], int] = os.write
    ftruncate: Callable[[int, int], None] = os.ftruncate


SYSTEM_CALLS: Final = FileCalls()


class Appended(NamedTuple):
    """What became of an append: bytes of whole lines that are on file, and what stopped it."""

    whole_bytes: int
    error: OSError | None


def rotated_path(path: str, index: int) -> str:
    """Return the name of the *index*-th newest file; 0 is the one that is being written."""
    return f"{path}.{index}" if index else path


class LogFile:
    """The file being written. Used by one thread at a time; holds an exclusive flock while open."""

    def __init__(self, settings: LogSettings, calls: FileCalls = SYSTEM_CALLS) -> None:
        self._path = settings.path
        self._rotate_bytes = settings.rotate_bytes
        self._keep = settings.rotate_keep
        self._calls = calls
        self._fd = -1
        self._size_bytes = 0
        self._rotate_at_bytes = settings.rotate_bytes or _UNLIMITED_BYTES
        self._needs_newline = False

    def open(self) -> None:
        """Open or create the file, and its directories, and lock it.

        Raises:
            StartupError: it cannot be had, or another daemon writes it; the message says what to do.
        """
        try:
            self._use(self._open_locked())
            # Another daemon in the middle of a rotation, or between a rename and its SIGHUP, holds path.1.
            self._refuse_if_locked(rotated_path(self._path, 1))
        except OSError as error:
            self.close()
            raise StartupError(
                f"cannot open the event log {self._path}: {error.strerror or error}. Give the daemon's user "
                "write access to it and its directory, or set another path"
            ) from error
        except StartupError:
            self.close()
            raise

    @property
    def room_bytes(self) -> int:
        """Bytes that fit before the next rotation is due, as of the last ``refresh``."""
        return self._rotate_at_bytes - self._size_bytes

    @property
    def size_bytes(self) -> int:
        """The file's size as of the last ``refresh``."""
        return self._size_bytes

    def refresh(self) -> None:
        """Look at the file again: others may have cut it short or deleted it.

        A renamed file is still written to, until ``reopen``: that is what logrotate wants. A deleted one
        is made anew, with its directory.

        Raises:
            OSError, StartupError: it was deleted, and cannot be made anew now.
        """
        status = os.fstat(self._fd)
        if status.st_nlink == 0:
            self._use(self._open_locked())
        else:
            self._size_bytes = status.st_size

    def append(self, lines: bytes) -> Appended:
        """Append whole lines; after an error none is on file by halves.

        A line that went in by halves is cut off again. If that fails too, the next append starts with a
        newline: the fragment stays, as a line that readers skip, and the whole line is written after it.
        A fragment that lacks only its newline counts as on file.
        """
        prefix = b"\n" if self._needs_newline else b""
        data = prefix + lines
        written = 0
        error: OSError | None = None
        try:
            while written < len(data):
                count = self._calls.write(self._fd, data[written:] if written else data)
                if count <= 0:
                    raise OSError(errno.EIO, "the disk took no bytes")
                written += count
        except OSError as caught:
            error = caught
        whole = written if error is None else data.rfind(b"\n", 0, written) + 1
        if whole:
            self._needs_newline = False
        self._size_bytes += whole
        if whole < written and not self._cut(written - whole):
            self._needs_newline = True
            if data[written : written + 1] == b"\n":
                # It lacks its newline only, which the next append brings: it must not come twice.
                whole = written + 1
        return Appended(max(whole - len(prefix), 0), error)

    def rotate(self) -> None:
        """Move ``path`` to ``path.1`` and so on up to the first gap, the oldest away, and start a new file.

        After a failure writing goes on in the old file, and the next try is an eighth of a file later.

        Raises:
            OSError, StartupError: a file could not be renamed or made.
        """
        self._rotate_at_bytes = self._size_bytes + max(self._rotate_bytes // 8, 1)
        if self._is_current():
            # Up to the first gap: what lies behind it need not move, and the oldest need not go.
            last = next((i for i in range(1, self._keep) if not Path(self._name(i)).exists()), self._keep)
            for index in range(last, 0, -1):
                os.replace(self._name(index - 1), self._name(index))  # noqa: PTH105
        self._use(self._open_locked())

    def reopen(self) -> bool:
        """Open what ``path`` names now, and leave the old file; False if that is the same file.

        Raises:
            OSError, StartupError: it cannot be opened; the old file stays in use.
        """
        if self._is_current():
            return False
        self._use(self._open_locked())
        return True

    def close(self) -> None:
        """Close the file and give up the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _name(self, index: int) -> str:
        return rotated_path(self._path, index)

    def _cut(self, torn_bytes: int) -> bool:
        """Take the last bytes off again. Ask for the size: somebody may have cut the file since."""
        try:
            self._calls.ftruncate(self._fd, max(os.fstat(self._fd).st_size - torn_bytes, 0))
        except OSError:
            return False
        return True

    def _use(self, fd: int) -> None:
        """Write to *fd* from now on; the old lock is given up only now that the new one is held."""
        self.close()
        self._fd = fd
        self._size_bytes = os.fstat(fd).st_size
        self._rotate_at_bytes = self._rotate_bytes or _UNLIMITED_BYTES
        # A torn last line must not swallow our first one.
        self._needs_newline = self._size_bytes > 0 and os.pread(fd, 1, self._size_bytes - 1) != b"\n"

    def _is_current(self) -> bool:
        return self._fd >= 0 and self._names(self._fd)

    def _names(self, fd: int) -> bool:
        """Whether ``path`` names the open file *fd*."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(fd))  # noqa: PTH116
        except FileNotFoundError:
            return False

    def _open_locked(self) -> int:
        for _ in range(_OPEN_TRIES_MAX):
            _make_directories(Path(self._path).parent)
            fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                self._lock(fd, fcntl.LOCK_EX)
                if self._names(fd):
                    kept, fd = fd, -1
                    return kept
            finally:
                if fd >= 0:
                    os.close(fd)
        raise OSError(errno.EAGAIN, "it is being renamed all the time")

    def _lock(self, fd: int, kind: int) -> None:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StartupError(
                f"the event log {self._path} is being written by another daemon. Stop that one, or give this "
                "one another path"
            ) from error

    def _refuse_if_locked(self, path: str) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        try:
            self._lock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)


def _make_directories(path: Path) -> None:
    """Make *path* and what lacks above it; pathlib would give the mode to the last one only."""
    if path.is_dir():
        return
    _make_directories(path.parent)
    path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)

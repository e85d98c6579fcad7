"""The files of a log and their lines: which come first, unpacked, never all in memory.

What a person names are files in any order, a directory, or ``-`` for standard input. Rotated files are
put in order by what is in them, not by their names.

Source: design, section 6.
"""

import contextlib
import gzip
import heapq
import importlib
import os
import re
import select
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Final, Self, TypeAlias

import msgspec

from snapd.errors import ExtraMissing, SnapdError
from snapd.eventlog import Header
from snapd.forensics.scratch import ScratchDirectory
from snapd.units import KIB, MIB

LOG_STEM: Final = "d-to-p-sync.jsonl"
STDIN: Final = "-"
# Longer ones are garbage: a slab of 2048 extents makes a line of less than 100 KiB.
LINE_BYTES_MAX: Final = 1 * MIB
_CHUNK_BYTES: Final = 1 * MIB
_ENDS_BYTES: Final = 256 * KIB
_LOOK_MS: Final = 100
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_GZIP_MAGIC: Final = b"\x1f\x8b"
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
# d-to-p-sync.jsonl, .1, .2.gz, and what logrotate makes of it: -20260131.zst
_LOG_NAME: Final = re.compile(r".+\.jsonl(?:[.-]\d+)*(?:\.(?:gz|zst|zstd))?")
_header_decoder: Final = msgspec.json.Decoder(Header)

# Bytes read of the files as they are on disk, and their size: called about once a MiB.
Progress: TypeAlias = Callable[[int, int], None]


class LogUnreadable(SnapdError):
    """What was named as a log cannot be read; the message says what and why."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the log.

    Attributes:
        path: as it is shown; ``-`` is standard input.
        real_path: what is opened.
        size_bytes: on disk.
        compression: ``""``, ``gzip`` or ``zstd``, told by its first bytes.
        first: header of the first line that has one; None: older log, or no line of one.
        last: header of the last line; None also when the file is compressed.
    """

    path: str
    real_path: str
    size_bytes: int
    compression: str
    first: Header | None = None
    last: Header | None = None


class Block(msgspec.Struct, frozen=True, gc=False):
    """Lines that follow each other in one file.

    Attributes:
        source_index: which file, in the log's order.
        first_line_no: number of ``lines[0]`` in its file, from 1.
        lines: without their newlines; empty ones too. One over ``LINE_BYTES_MAX`` is cut there.
        is_cut_off: the last of them had no newline: the file ends in the middle of it.
        damage: the file could not be read beyond these lines, and why.
    """

    source_index: int
    first_line_no: int
    lines: list[bytes]
    is_cut_off: bool = False
    damage: str = ""


class LogInput:
    """The files of a log, in order. Close it: standard input and pipes are kept in temporary files.

    Args:
        names: files, directories, or ``-``. A file that is named twice is read once.

    Attributes:
        sources: oldest first.
        repeated: names of files that were named more than once.

    Raises:
        LogUnreadable: one of them is not there, cannot be read, or holds no log.
        ExtraMissing: a file is zstd, and the package for it is not installed.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.repeated: list[str] = []
        self._copies: dict[str, str] = {}  # of what can be read only once, by name
        self._scratch: ScratchDirectory | None = None  # where they are
        try:
            self.sources = in_order([self._source(shown, real) for shown, real in self._files(names)])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the copies of standard input and of pipes."""
        if self._scratch is not None:
            self._scratch.delete()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files on disk."""
        return sum(source.size_bytes for source in self.sources)

    def blocks(self, progress: Progress | None = None) -> Iterator[Block]:
        """Yield all lines of all files, about a MiB at a time.

        Args:
            progress: called now and then with the bytes read so far and those to read.

        Raises:
            LogUnreadable: a file has become unreadable.
        """
        total_bytes, before_bytes = self.size_bytes, 0
        for index, source in enumerate(self.sources):
            try:
                with Path(source.real_path).open("rb") as file:
                    for block in _blocks(index, source.compression, file):
                        yield block
                        if progress is not None:
                            progress(min(before_bytes + file.tell(), total_bytes), total_bytes)
            except OSError as error:
                raise LogUnreadable(f"{source.path}: {error.strerror or error}") from error
            before_bytes += source.size_bytes

    def numbered(self, progress: Progress | None = None) -> Iterator[tuple[str, int, bytes]]:
        """Yield ``(path, line_no, raw)`` for every line that is not empty; slower than ``blocks``."""
        for block in self.blocks(progress):
            path = self.sources[block.source_index].path
            for number, raw in enumerate(block.lines, block.first_line_no):
                if raw:
                    yield path, number, raw

    # --- which files ---------------------------------------------------------------------------

    def _files(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        seen: set[tuple[int, int]] = set()
        for name in names:
            for shown, real in self._named(name):
                try:
                    status = os.stat(real)  # noqa: PTH116
                except OSError as error:
                    raise LogUnreadable(f"{shown}: {error.strerror or error}") from error
                identity = (status.st_dev, status.st_ino)
                if identity in seen:
                    self.repeated.append(shown)
                    continue
                seen.add(identity)
                yield shown, real

    def _named(self, name: str) -> Iterator[tuple[str, str]]:
        path = Path(name)
        if name == STDIN or path.is_fifo():
            if name not in self._copies:
                self._copies[name] = self._copy_of(name)
            yield name, self._copies[name]
            return
        if not name or not path.is_dir():
            yield name, name
            return
        try:
            found = sorted(entry.name for entry in path.iterdir() if _LOG_NAME.fullmatch(entry.name))
        except OSError as error:
            raise LogUnreadable(f"{name}: {error.strerror or error}") from error
        own = [entry for entry in found if entry.startswith(LOG_STEM)]
        if not (own or found):
            raise LogUnreadable(f"{name}: this directory holds no log: no {LOG_STEM} and no other .jsonl")
        for entry in own or found:
            yield str(path / entry), str(path / entry)

    def _copy_of(self, name: str) -> str:
        if self._scratch is None:
            self._scratch = ScratchDirectory()
        copy = self._scratch.path / f"{len(self._copies)}.jsonl"
        _copy(name, copy)
        return str(copy)

    @staticmethod
    def _source(shown: str, real: str) -> Source:
        try:
            with Path(real).open("rb") as file:
                magic = file.read(len(_ZSTD_MAGIC))
                file.seek(0)
                compression = _compression(magic)
                head = b""
                for chunk in _chunks(compression, file):
                    head += chunk if isinstance(chunk, bytes) else b""
                    if len(head) >= _ENDS_BYTES:
                        break
                size_bytes = os.fstat(file.fileno()).st_size
                tail = b""
                if not compression:
                    file.seek(max(size_bytes - _ENDS_BYTES, 0))
                    tail = file.read(_ENDS_BYTES)
        except OSError as error:
            raise LogUnreadable(f"{shown}: {error.strerror or error}") from error
        return Source(
            path=shown,
            real_path=real,
            size_bytes=size_bytes,
            compression=compression,
            first=_first_header(head.split(b"\n")),
            last=_first_header(reversed(tail.split(b"\n"))),
        )


# --- the order of files ------------------------------------------------------------------------


def in_order(sources: Sequence[Source]) -> tuple[Source, ...]:
    """Return the files, oldest first.

    Inside an epoch the numbers of the lines decide. Between epochs, and where a file has no such numbers,
    it is the wall clock; files without any header come first, in the order in which they were named.
    """
    after: dict[int, set[int]] = {index: set() for index in range(len(sources))}
    waits_for = dict.fromkeys(after, 0)
    by_epoch: dict[str, list[tuple[int, int]]] = {}
    for index, source in enumerate(sources):
        if source.first is not None:
            by_epoch.setdefault(source.first.epoch, []).append((source.first.seq, index))
        if source.last is not None and (source.first is None or source.last.epoch != source.first.epoch):
            by_epoch.setdefault(source.last.epoch, []).append((source.last.seq, index))
    for numbered in by_epoch.values():
        numbered.sort()
        for (_, former), (_, later) in pairwise(numbered):
            if later not in after[former]:
                after[former].add(later)
                waits_for[later] += 1
    clock = [source.first.ts if source.first is not None else float("-inf") for source in sources]
    ready = [(clock[index], index) for index, count in waits_for.items() if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for later in after[index]:
            waits_for[later] -= 1
            if waits_for[later] == 0:
                heapq.heappush(ready, (clock[later], later))
    # What waits in a circle is a mixture of copies: the clock is as good as anything.
    order += sorted(set(after).difference(order), key=lambda index: (clock[index], index))
    return tuple(sources[index] for index in order)


def _first_header(lines: Iterable[bytes]) -> Header | None:
    for raw in lines:
        if raw:
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                return _header_decoder.decode(raw)
    return None


# --- reading -----------------------------------------------------------------------------------


def _compression(magic: bytes) -> str:
    if magic.startswith(_GZIP_MAGIC):
        return "gzip"
    return "zstd" if magic.startswith(_ZSTD_MAGIC) else ""


def _chunks(compression: str, file: IO[bytes]) -> Iterator[bytes | str]:
    """Yield a file's bytes, unpacked, a chunk at a time; what is damaged ends with the reason, a string."""
    read: Callable[[int], bytes] = file.read
    troubles: tuple[type[Exception], ...] = ()
    if compression == "gzip":
        # Not ``read``: it would lose what it has when the file is cut short.
        read, troubles = gzip.GzipFile(fileobj=file).read1, (EOFError, zlib.error, gzip.BadGzipFile)
    elif compression == "zstd":
        zstandard = _zstandard()
        unpacker = zstandard.ZstdDecompressor()
        read = unpacker.stream_reader(file, read_across_frames=True, closefd=False).read
        troubles = (zstandard.ZstdError,)
    is_first = True
    while True:
        try:
            chunk = read(_CHUNK_BYTES)
        except troubles as error:
            yield f"the {compression} file is damaged or cut short: {error}"
            return
        if not chunk:
            return
        # Some editors and shells put this before the first line.
        yield chunk.removeprefix(_BYTE_ORDER_MARK) if is_first else chunk
        is_first = False


def _zstandard() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise ExtraMissing(
            "this log is compressed with zstd, and reading it needs a package that is not installed: "
            "pip install 'kv-snapd[forensics]'"
        ) from None


def _blocks(index: int, compression: str, file: IO[bytes]) -> Iterator[Block]:
    number, rest, skipping, damage = 1, b"", False, ""
    for chunk in _chunks(compression, file):
        if isinstance(chunk, str):
            damage = chunk
            continue
        lines = chunk.split(b"\n")
        if skipping:
            # The rest of a line that is too long: its beginning stands for all of it.
            lines[0] = rest
            skipping = len(lines) == 1
        else:
            lines[0] = rest + lines[0]
        rest = lines.pop()
        if len(rest) > LINE_BYTES_MAX:
            rest, skipping = rest[:LINE_BYTES_MAX], True
        if lines:
            yield Block(index, number, lines)
            number += len(lines)
    if rest or damage:
        yield Block(index, number, [rest] if rest else [], is_cut_off=bool(rest), damage=damage)


def _copy(name: str, copy: Path) -> None:
    """Copy standard input or a pipe to a file: what is read twice, or told by its end, needs one.

    Raises:
        LogUnreadable: it cannot be read, or there is no room.
    """
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(copy.open("xb"))
            if name != STDIN:
                # One that would wait for whoever writes could not be waited for below.
                descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
                stack.callback(os.close, descriptor)
            elif sys.stdin is not None:
                descriptor = sys.stdin.fileno()
            else:
                return
            for chunk in _arriving(descriptor):
                file.write(chunk)
    except OSError as error:
        raise LogUnreadable(f"{name}: {error.strerror or error}") from error


def _arriving(descriptor: int) -> Iterator[bytes]:
    """Yield what comes, and let the handlers of signals run meanwhile.

    One that came just before a read that waits, or to another thread, would be handled after it.
    """
    os.read(descriptor, 0)  # What cannot be read at all would be waited for without end.
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    while True:
        if not ready.poll(_LOOK_MS):
            continue
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:  # Somebody else has read it.
            continue
        if not chunk:
            return
        yield chunk

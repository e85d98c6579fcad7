"""Which shared libraries an ELF file needs and the dynamic loader would not find.

The loader names the first one that is missing and stops; this names all of them. Nothing is loaded, so
that asking about a CUDA build starts no driver, and no ``ldd`` or ``readelf`` has to be installed.

Source: System V ABI, chapters 4 and 5; ld.so(8); glibc, sysdeps/generic/dl-cache.h.
"""

import contextlib
import ctypes
import mmap
import os
import struct
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

_ELF_MAGIC: Final = b"\x7fELF"
_ELF_CLASS_64: Final = 2
_ELF_LITTLE: Final = 1
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 15, 29
_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER: Final = struct.Struct("<IIQQQQQQ")
_DYNAMIC_ENTRY: Final = struct.Struct("<qQ")

CACHE_PATH: Final = Path("/etc/ld.so.cache")
_CACHE_MAGIC: Final = b"glibc-ld.so.cache1.1"
_CACHE_HEADER: Final = struct.Struct("=20sII20x")
_CACHE_ENTRY: Final = struct.Struct("=iIIIQ")
_DEFAULT_DIRECTORIES: Final = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
# The loader itself is always there.
_LOADER_PREFIX: Final = "ld-linux"


class NotElf(Exception):
    """The file is no 64-bit little-endian ELF file of this machine's kind, or is cut off."""


class ElfFacts(NamedTuple):
    """What an ELF file tells the loader about others.

    Attributes:
        machine: the processor it is for, ``e_machine``.
        needed: the sonames of ``DT_NEEDED``, in order.
        rpath: directories of ``DT_RPATH``, with ``$ORIGIN`` replaced; empty if there is a ``DT_RUNPATH``.
        runpath: directories of ``DT_RUNPATH``, likewise.
        has_runpath: it has a ``DT_RUNPATH``, and so ignores the rpath of whoever loads it.
    """

    machine: int
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]
    has_runpath: bool


class Missing(NamedTuple):
    """A library that the loader would not find.

    Attributes:
        soname: its name.
        needed_by: the file name of the first library that needs it.
    """

    soname: str
    needed_by: str


def read_elf(path: Path) -> ElfFacts:
    """Return what an ELF file needs.

    Raises:
        NotElf: it is no such file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
                return _parse(raw, str(path.resolve().parent))
        except (ValueError, OverflowError, struct.error) as error:
            raise NotElf(f"{path}: {error}") from None


def _parse(raw: mmap.mmap, origin: str) -> ElfFacts:
    identity = raw[:16]
    if identity[:6] != _ELF_MAGIC + bytes((_ELF_CLASS_64, _ELF_LITTLE)):
        raise ValueError("not a 64-bit little-endian ELF file")
    header = _HEADER.unpack_from(raw)
    machine, programs_offset, program_bytes, num_programs = header[2], header[5], header[9], header[10]
    programs = [
        _PROGRAM_HEADER.unpack_from(raw, programs_offset + index * program_bytes)
        for index in range(num_programs)
    ]
    loads = [program for program in programs if program[0] == _PT_LOAD]
    entries: list[tuple[int, int]] = []
    for kind, _, offset, _, _, file_bytes, _, _ in programs:
        if kind == _PT_DYNAMIC:
            count = file_bytes // _DYNAMIC_ENTRY.size
            entries += (
                _DYNAMIC_ENTRY.unpack_from(raw, offset + i * _DYNAMIC_ENTRY.size) for i in range(count)
            )
    values: dict[int, list[int]] = {}
    for tag, value in entries:
        if tag == _DT_NULL:
            break
        values.setdefault(tag, []).append(value)
    strings_offset = _file_offset(loads, values[_DT_STRTAB][0]) if _DT_STRTAB in values else 0

    def texts(tag: int) -> list[str]:
        found = []
        for value in values.get(tag, ()):
            start = strings_offset + value
            end = raw.find(b"\0", start)
            if end < 0:
                raise ValueError("the string table is cut off")
            found.append(os.fsdecode(raw[start:end]))
        return found

    def directories(tag: int) -> tuple[str, ...]:
        parts = (part for text in texts(tag) for part in text.split(":") if part)
        return tuple(part.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for part in parts)

    has_runpath = _DT_RUNPATH in values
    rpath = () if has_runpath else directories(_DT_RPATH)
    return ElfFacts(machine, tuple(texts(_DT_NEEDED)), rpath, directories(_DT_RUNPATH), has_runpath)


def _file_offset(loads: Iterable[tuple[int, ...]], address: int) -> int:
    for _, _, offset, start, _, file_bytes, _, _ in loads:
        if start <= address < start + file_bytes:
            return offset + address - start
    raise ValueError("a table lies outside the file")


def read_cache(path: Path = CACHE_PATH) -> dict[str, list[str]]:
    """Return what ``ldconfig`` knows: for each soname the paths, best first; empty if it cannot be read."""
    try:
        raw = path.read_bytes()
    except OSError:
        return {}
    # Older systems put the cache of libc5 before it.
    start = raw.find(_CACHE_MAGIC)
    found: dict[str, list[str]] = {}
    with contextlib.suppress(struct.error, ValueError):
        if start < 0:
            return {}
        _, num_entries, _ = _CACHE_HEADER.unpack_from(raw, start)
        for index in range(num_entries):
            position = start + _CACHE_HEADER.size + index * _CACHE_ENTRY.size
            _, key, value, _, _ = _CACHE_ENTRY.unpack_from(raw, position)
            name, target = (
                os.fsdecode(raw[start + at : raw.index(b"\0", start + at)]) for at in (key, value)
            )
            found.setdefault(name, []).append(target)
    return found


class Finder:
    """Looks for libraries where the dynamic loader of this process would.

    Args:
        env: the environment; ``LD_LIBRARY_PATH`` counts.
        cache: what ``ldconfig`` knows, by soname.
        directories: searched last.
        use_loaded: a library that this process has loaded already is found, as by the loader.
        executable: whose rpath counts for everything that it loads.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        cache: Mapping[str, Sequence[str]] | None = None,
        directories: Sequence[str] | None = None,
        use_loaded: bool = True,
        executable: str = "/proc/self/exe",
    ) -> None:
        path = (os.environ if env is None else env).get("LD_LIBRARY_PATH", "")
        self._library_path = tuple(part or "." for part in path.replace(";", ":").split(":")) if path else ()
        self._cache = read_cache() if cache is None else cache
        self._directories = _default_directories() if directories is None else tuple(directories)
        self._use_loaded = use_loaded
        self._executable = executable
        self._read: dict[str, ElfFacts | None] = {}

    def missing(self, path: Path) -> list[Missing]:
        """Return the libraries that *path* or what it needs, directly or not, would not find.

        Raises:
            NotElf: *path* is no ELF file of this machine.
            OSError: it cannot be read.
        """
        facts = read_elf(path)
        executable = self._facts(self._executable)
        top_rpath = executable.rpath if executable else ()
        missing: list[Missing] = []
        seen: set[str] = set()
        # A file, its facts, and the rpath of those that load it.
        queue = deque([(path.name, facts, top_rpath)])
        while queue:
            name, facts, outer_rpath = queue.popleft()
            # An object's own rpath comes first; a runpath makes it ignore every rpath.
            rpath = (*facts.rpath, *outer_rpath)
            places = (
                *(() if facts.has_runpath else rpath),
                *self._library_path,
                *facts.runpath,
            )
            for soname in facts.needed:
                if soname in seen or soname.startswith(_LOADER_PREFIX):
                    continue
                seen.add(soname)
                if self._use_loaded and is_loaded(soname):
                    continue
                found = self._find(soname, places, facts.machine)
                if found is None:
                    missing.append(Missing(soname, name))
                else:
                    queue.append((soname, found, rpath))
        return missing

    def _find(self, soname: str, places: Iterable[str], machine: int) -> ElfFacts | None:
        if "/" in soname:
            candidates = [soname]
        else:
            candidates = [f"{place}/{soname}" for place in places]
            candidates += self._cache.get(soname, ())
            candidates += [f"{place}/{soname}" for place in self._directories]
        for candidate in candidates:
            facts = self._facts(candidate)
            # The loader passes over files for another processor.
            if facts is not None and facts.machine == machine:
                return facts
        return None

    def _facts(self, path: str) -> ElfFacts | None:
        if path not in self._read:
            self._read[path] = None
            with contextlib.suppress(OSError, NotElf):
                self._read[path] = read_elf(Path(path))
        return self._read[path]


def is_loaded(soname: str) -> bool:
    """Return whether this process has a library with this soname loaded; loads nothing."""
    try:
        ctypes.CDLL(soname, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def find_in_packages(soname: str) -> Path | None:
    """Return a library that a package of NVIDIA on PyPI brought; the loader does not look there itself."""
    for entry in sys.path:
        for found in sorted(Path(entry or ".").glob(f"nvidia/*/lib/{soname}")):
            return found
    return None


def _default_directories() -> tuple[str, ...]:
    multiarch = sysconfig.get_config_var("MULTIARCH")
    own = (f"/lib/{multiarch}", f"/usr/lib/{multiarch}") if multiarch else ()
    return (*own, *_DEFAULT_DIRECTORIES)

"""Host arenas: one memfd each, sealed, shared with local processes by file descriptor.

Source: design, section 4.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from snapd.errors import StartupError
from snapd.units import KIB, align_up, format_bytes

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
Hugepages = Literal["auto", "on", "off"]

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class HostArena:
    """Memory of one rank, as a memfd that nobody can resize.

    Attributes:
        rank: whose arena.
        size_bytes: of the memory; with hugepages rounded up to whole ones.
        is_huge: it lies in hugepages.

    Args:
        rank: whose arena.
        size_bytes: wanted.
        hugepages: ``auto`` takes them if enough are free, ``on`` needs them.
        prefault: take all memory now, so that no later write can fail for lack of it.

    Raises:
        StartupError: the memory cannot be had; says how much was wanted and what to change.
    """

    device: Final = "cpu"

    def __init__(
        self, rank: int, size_bytes: int, *, hugepages: Hugepages = "auto", prefault: bool = True
    ) -> None:
        self.rank = rank
        free_bytes, page_bytes = free_hugepages_bytes(_MEMINFO)
        wanted_bytes = align_up(size_bytes, page_bytes) if page_bytes else size_bytes
        self.is_huge = hugepages != "off" and wanted_bytes <= free_bytes
        if hugepages == "on" and not self.is_huge:
            raise StartupError(
                f"arena {rank}: hugepages = on, and {format_bytes(free_bytes)} of hugepages are free for "
                f"{format_bytes(size_bytes)}: raise vm.nr_hugepages, or set hugepages = auto"
            )
        self.size_bytes = wanted_bytes if self.is_huge else align_up(size_bytes, mmap.PAGESIZE)
        self.fd = -1
        self._address: int | None = None
        try:
            self._take(prefault)
        except OSError as error:
            self.close()
            if not (self.is_huge and hugepages == "auto"):
                raise self._not_to_be_had(error) from None
            # They were free and cannot be had all the same: a cgroup's limit, or another was faster.
            self.is_huge = False
            self.size_bytes = align_up(size_bytes, mmap.PAGESIZE)
            try:
                self._take(prefault)
            except OSError as second_error:
                self.close()
                raise self._not_to_be_had(second_error) from None

    def _take(self, prefault: bool) -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if self.is_huge else 0)
        available_bytes = None if self.is_huge else available_memory_bytes()
        if prefault and available_bytes is not None and self.size_bytes > available_bytes:
            # The kernel would not say no: it would kill a process, this one perhaps.
            raise StartupError(
                f"arena {self.rank}: {format_bytes(self.size_bytes)} of memory are wanted, and "
                f"{format_bytes(available_bytes)} can be had: lower size, or free memory (limits of the "
                "container or the unit count too)"
            )
        self.fd = os.memfd_create(f"kv-snapd-arena-{self.rank}", flags)
        # A memfd begins open to everybody: whoever may only read could open it anew, in /proc, to write.
        os.fchmod(self.fd, 0o600)
        os.ftruncate(self.fd, self.size_bytes)
        if prefault:
            # Without it a write to a page that cannot be had would kill the writer with SIGBUS.
            os.posix_fallocate(self.fd, 0, self.size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    def _not_to_be_had(self, error: OSError) -> StartupError:
        return StartupError(
            f"arena {self.rank}: {format_bytes(self.size_bytes)} of memory cannot be had ({error.strerror}): "
            "lower size, or free memory (limits of the container or the unit count too)"
        )

    def open_fd(self, *, writable: bool) -> int:
        """Return a new file descriptor for a client; without *writable* it can only be mapped for reading.

        Root and the daemon's own user could open it anew to write; nobody else can. The caller closes it.
        """
        if writable:
            return os.dup(self.fd)
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def map(self) -> int:
        """Map the arena into this process for reading and writing, once, and return where it starts.

        It stays there until ``close``: whoever has the address must be done by then. A forked child does
        not have it.

        Raises:
            StartupError: it cannot be mapped.
        """
        if self._address is None:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            address = _libc.mmap(None, self.size_bytes, protection, mmap.MAP_SHARED, self.fd, 0)
            if address == _MAP_FAILED:
                raise self._not_mapped("mapped")
            self._address = int(address)
            if _libc.madvise(address, self.size_bytes, mmap.MADV_DONTFORK) != 0:
                raise self._not_mapped("kept from children")
        return self._address

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: there is no GPU whose memory this would be."""
        return contextlib.nullcontext()

    def _not_mapped(self, what: str) -> StartupError:
        return StartupError(
            f"arena {self.rank}: {format_bytes(self.size_bytes)} cannot be {what} "
            f"({os.strerror(ctypes.get_errno())}): lower size, or raise the limit of this process's address "
            "space (ulimit -v) and vm.max_map_count"
        )

    def close(self) -> None:
        """Unmap it, and give the memory back once no client maps it any more."""
        if self._address is not None:
            _libc.munmap(self._address, self.size_bytes)
            self._address = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def available_memory_bytes() -> int | None:
    """Return what the kernel says can be had, within the limits of this process's cgroups; None: unknown."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        facts = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        found.append(int(facts["MemAvailable"].split()[0]) * KIB)
    with contextlib.suppress(OSError):
        for line in _CGROUP.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                found += _cgroup_rooms_bytes(_CGROUP_ROOT, group, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                found += _cgroup_rooms_bytes(
                    _CGROUP_ROOT / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes"
                )
    return min(found, default=None)


def _cgroup_rooms_bytes(root: Path, group: str, limit_name: str, usage_name: str) -> list[int]:
    """Return what is left of the limit of a cgroup and of each one around it.

    Inside a container the path may be the host's, which is not there: the root is then the container's own.
    """
    directory = root / group.lstrip("/")
    directories = [directory, *directory.parents] if directory.is_dir() else [root]
    rooms_bytes: list[int] = []
    for place in directories:
        if place == root.parent:
            break
        # "max" is no number: no limit.
        with contextlib.suppress(OSError, ValueError):
            limit_bytes = int((place / limit_name).read_text())
            rooms_bytes.append(limit_bytes - int((place / usage_name).read_text()))
    return rooms_bytes


def free_hugepages_bytes(meminfo: Path) -> tuple[int, int]:
    """Return the bytes in free hugepages that are not reserved, and the size of one; zeros if unknown."""
    fields: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            with contextlib.suppress(ValueError, IndexError):
                fields[name] = int(value.split()[0])
    page_bytes = fields.get("Hugepagesize", 0) * KIB
    free = fields.get("HugePages_Free", 0) - fields.get("HugePages_Rsvd", 0)
    return max(0, free) * page_bytes, page_bytes

"""Host arenas: one memfd each, sealed, shared with local processes by file descriptor.

Source: design, section 4.
"""

import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from snapd.errors import StartupError
from snapd.units import align_up, format_bytes

_MEMINFO: Final = Path("/proc/meminfo")
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
Hugepages = Literal["auto", "on", "off"]


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
        free_bytes, page_bytes = _free_hugepages_bytes()
        wanted_bytes = align_up(size_bytes, page_bytes) if page_bytes else size_bytes
        self.is_huge = hugepages != "off" and wanted_bytes <= free_bytes
        if hugepages == "on" and not self.is_huge:
            raise StartupError(
                f"arena {rank}: hugepages = on, and {format_bytes(free_bytes)} of hugepages are free for "
                f"{format_bytes(size_bytes)}: raise vm.nr_hugepages, or set hugepages = auto"
            )
        self.size_bytes = wanted_bytes if self.is_huge else align_up(size_bytes, mmap.PAGESIZE)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if self.is_huge else 0)
        self.fd = -1
        try:
            self.fd = os.memfd_create(f"kv-snapd-arena-{rank}", flags)
            os.ftruncate(self.fd, self.size_bytes)
            if prefault:
                # Without it a write to a page that cannot be had would kill the writer with SIGBUS.
                os.posix_fallocate(self.fd, 0, self.size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            self.close()
            raise StartupError(
                f"arena {rank}: {format_bytes(self.size_bytes)} of memory cannot be had ({error.strerror}): "
                "lower size, or free memory (limits of the container or the unit count too)"
            ) from None

    def open_fd(self, *, writable: bool) -> int:
        """Return a new file descriptor for a client; without *writable* it can only be mapped for reading.

        The caller closes it.
        """
        if writable:
            return os.dup(self.fd)
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give the memory back once no client maps it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _free_hugepages_bytes() -> tuple[int, int]:
    """Return the bytes in free hugepages that are not reserved, and the size of one; zeros if unknown."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return 0, 0
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    page_bytes = int(fields.get("Hugepagesize", ["0"])[0]) * 1024
    free = int(fields.get("HugePages_Free", ["0"])[0]) - int(fields.get("HugePages_Rsvd", ["0"])[0])
    return max(0, free) * page_bytes, page_bytes

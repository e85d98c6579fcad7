"""Host arenas: their size, their seals, and what a client may do with the file descriptor."""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from snapd import arena as arena_module
from snapd.arena import HostArena, available_memory_bytes
from snapd.errors import StartupError
from snapd.units import MIB

SIZE_BYTES = 2 * MIB


@pytest.fixture
def arena() -> Iterator[HostArena]:
    with HostArena(3, SIZE_BYTES, hugepages="off", prefault=False) as opened:
        yield opened


def meminfo(path: Path, free: int, reserved: int = 0, page_kib: int = 2048) -> Path:
    path.write_text(
        f"MemFree: 10 kB\nHugePages_Total: 9\nHugePages_Free: {free}\nHugePages_Rsvd: {reserved}\n"
        f"Hugepagesize: {page_kib} kB\n"
    )
    return path


def test_what_one_maps_writable_the_other_reads(arena: HostArena) -> None:
    writable, read_only = arena.open_fd(writable=True), arena.open_fd(writable=False)
    with (
        mmap.mmap(writable, SIZE_BYTES) as writer,
        mmap.mmap(read_only, SIZE_BYTES, prot=mmap.PROT_READ) as reader,
    ):
        writer[SIZE_BYTES - 4 :] = b"last"
        assert reader[SIZE_BYTES - 4 :] == b"last"
    os.close(writable)
    os.close(read_only)


def test_a_read_only_descriptor_cannot_be_mapped_for_writing(arena: HostArena) -> None:
    fd = arena.open_fd(writable=False)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SIZE_BYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_cannot_open_a_read_only_descriptor_anew_to_write(arena: HostArena) -> None:
    fd = arena.open_fd(writable=False)
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65_534)
            os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        except PermissionError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(fd)


def test_descriptors_are_not_inherited_and_outlive_the_arena() -> None:
    with HostArena(0, SIZE_BYTES, hugepages="off") as arena:
        fds = [arena.open_fd(writable=True), arena.open_fd(writable=False)]
        assert not any(os.get_inheritable(fd) for fd in (*fds, arena.fd))
    assert arena.fd == -1
    for fd in fds:
        assert os.fstat(fd).st_size == SIZE_BYTES
        os.close(fd)
    arena.close()


def test_it_is_mapped_into_this_process_once_and_shared_with_clients(arena: HostArena) -> None:
    address = arena.map()
    assert arena.map() == address
    ctypes.memmove(address + SIZE_BYTES - 4, b"last", 4)
    fd = arena.open_fd(writable=True)
    with mmap.mmap(fd, SIZE_BYTES) as client:
        assert client[SIZE_BYTES - 4 :] == b"last"
        client[:5] = b"first"
    os.close(fd)
    assert ctypes.string_at(address, 5) == b"first"


def mapping_of(address: int) -> dict[str, str] | None:
    """What the kernel says of the mapping that starts at *address*; None: there is none."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in line.split()[0] and not name.isalpha():
            found = {"": line} if line.startswith(f"{address:x}-") else found and {**found, "end": ""}
        if found is not None and "end" not in found:
            found[name] = value
    return found


def test_a_forked_child_does_not_have_the_mapping_and_close_unmaps_it() -> None:
    with HostArena(3, SIZE_BYTES, hugepages="off", prefault=False) as arena:
        address = arena.map()
        mapping = mapping_of(address)
        assert mapping is not None and "kv-snapd-arena-3" in mapping[""]
        assert " rw-s " in mapping[""]
        assert "dc" in mapping["VmFlags"].split()
    assert mapping_of(address) is None


def test_nothing_is_mapped_unless_asked_for(arena: HostArena) -> None:
    assert "kv-snapd-arena-3" not in Path("/proc/self/maps").read_text()
    arena.map()
    assert "kv-snapd-arena-3" in Path("/proc/self/maps").read_text()


def test_memory_that_cannot_be_mapped_is_a_clear_error(arena: HostArena) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MIB, hard))
    try:
        with pytest.raises(StartupError, match=r"arena 3: 2 MiB cannot be mapped .*ulimit -v"):
            arena.map()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("size_bytes", [0, SIZE_BYTES - 4096, SIZE_BYTES + 4096])
def test_nobody_can_resize_it_or_lift_the_seals(arena: HostArena, size_bytes: int) -> None:
    """Otherwise a client could shrink it and kill whoever touches the pages that are gone."""
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, size_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(arena.fd).st_size == SIZE_BYTES


def test_the_size_is_rounded_up_to_whole_pages() -> None:
    with HostArena(0, SIZE_BYTES + 1, hugepages="off", prefault=False) as arena:
        assert arena.size_bytes == SIZE_BYTES + mmap.PAGESIZE == os.fstat(arena.fd).st_size


@pytest.mark.parametrize(("prefault", "is_there"), [(True, True), (False, False)])
def test_prefault_takes_the_memory_at_start(prefault: bool, is_there: bool) -> None:
    with HostArena(0, SIZE_BYTES, hugepages="off", prefault=prefault) as arena:
        assert (os.fstat(arena.fd).st_blocks * 512 >= SIZE_BYTES) is is_there


def test_memory_that_cannot_be_had_is_a_clear_error_and_leaves_no_descriptor() -> None:
    fds_before = len(list(Path("/proc/self/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE_BYTES // 2, hard))
    try:
        with pytest.raises(StartupError, match=r"arena 3: 2 MiB of memory cannot be had .*lower size"):
            HostArena(3, SIZE_BYTES, hugepages="off")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(list(Path("/proc/self/fd").iterdir())) == fds_before


@pytest.mark.parametrize("reserved", [9, 10])
def test_hugepages_on_needs_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reserved: int) -> None:
    monkeypatch.setattr(arena_module, "_MEMINFO", meminfo(tmp_path / "meminfo", 9, reserved))
    with pytest.raises(StartupError, match=r"hugepages = on, and 0 B of hugepages are free for 2 MiB"):
        HostArena(0, SIZE_BYTES, hugepages="on")


@pytest.mark.parametrize(
    ("free", "reserved", "wanted_bytes", "is_huge"),
    [(2, 0, 4 * MIB, True), (2, 0, 3 * MIB, True), (2, 0, 5 * MIB, False), (3, 2, 3 * MIB, False)],
)
def test_hugepages_are_taken_if_enough_are_free_and_not_reserved(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    free: int,
    reserved: int,
    wanted_bytes: int,
    is_huge: bool,
) -> None:
    monkeypatch.setattr(arena_module, "_MEMINFO", meminfo(tmp_path / "meminfo", free, reserved))
    asked: list[int] = []
    real = os.memfd_create

    def memfd_create(name: str, flags: int) -> int:
        asked.append(flags)
        return real(name, flags & ~os.MFD_HUGETLB)

    monkeypatch.setattr(arena_module.os, "memfd_create", memfd_create)
    with HostArena(0, wanted_bytes, hugepages="auto", prefault=False) as arena:
        assert arena.is_huge is is_huge
        assert bool(asked[0] & os.MFD_HUGETLB) is is_huge
        assert arena.size_bytes == (4 * MIB if is_huge else wanted_bytes)
    with HostArena(0, wanted_bytes, hugepages="off", prefault=False) as arena:
        assert not arena.is_huge and not asked[1] & os.MFD_HUGETLB


@pytest.mark.parametrize("text", [None, "", "nothing that is known\n", "Hugepagesize: 2048 kB\n"])
def test_a_machine_that_says_nothing_of_hugepages_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "meminfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(arena_module, "_MEMINFO", path)
    with HostArena(0, SIZE_BYTES, prefault=False) as arena:
        assert not arena.is_huge


# --- what can be had


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that says what the test wants: 64 MiB, and cgroups in a directory."""
    (tmp_path / "meminfo").write_text(f"MemFree: 1 kB\nMemAvailable: {64 * 1024} kB\n")
    (tmp_path / "self").write_text("0::/a/b\n")
    (tmp_path / "cgroup" / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(arena_module, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(arena_module, "_CGROUP", tmp_path / "self")
    monkeypatch.setattr(arena_module, "_CGROUP_ROOT", tmp_path / "cgroup")
    return tmp_path


def limit(directory: Path, limit_bytes: int | str, usage_bytes: int, version: int = 2) -> None:
    names = ("memory.max", "memory.current") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes",
    )  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit_bytes, usage_bytes), strict=True):
        (directory / name).write_text(f"{value}\n")


def test_without_a_limit_the_machine_s_memory_can_be_had(machine: Path) -> None:
    assert available_memory_bytes() == 64 * MIB
    limit(machine / "cgroup" / "a", "max", 5)
    assert available_memory_bytes() == 64 * MIB


def test_the_narrowest_cgroup_counts_also_one_further_out(machine: Path) -> None:
    limit(machine / "cgroup" / "a" / "b", 40 * MIB, 10 * MIB)
    assert available_memory_bytes() == 30 * MIB
    limit(machine / "cgroup" / "a", 20 * MIB, 15 * MIB)
    assert available_memory_bytes() == 5 * MIB


def test_inside_a_container_the_root_is_its_own(machine: Path) -> None:
    (machine / "self").write_text("0::/not/here\n")
    limit(machine / "cgroup", 9 * MIB, MIB)
    assert available_memory_bytes() == 8 * MIB


def test_cgroups_of_the_first_version_count_too(machine: Path) -> None:
    (machine / "self").write_text("7:cpu:/x\n4:hugetlb,memory:/a\n0::/\n")
    limit(machine / "cgroup" / "memory" / "a", 3 * MIB, MIB, version=1)
    assert available_memory_bytes() == 2 * MIB


def test_a_machine_that_says_nothing_is_asked_by_doing(machine: Path) -> None:
    for name in ("meminfo", "self"):
        (machine / name).unlink()
    assert available_memory_bytes() is None
    HostArena(0, SIZE_BYTES, hugepages="off").close()


def test_more_than_can_be_had_is_refused_before_the_kernel_kills_for_it(machine: Path) -> None:
    limit(machine / "cgroup" / "a" / "b", 2 * MIB, MIB)
    with pytest.raises(StartupError, match=r"arena 0: 2 MiB of memory are wanted, and 1 MiB can be had"):
        HostArena(0, SIZE_BYTES, hugepages="off")
    HostArena(0, SIZE_BYTES, hugepages="off", prefault=False).close()


@pytest.mark.parametrize("hugepages", ["auto", "on"])
def test_hugepages_that_cannot_be_had_after_all_are_done_without_unless_they_must_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hugepages: Literal["auto", "on"]
) -> None:
    """A cgroup's limit says no although the machine has some free."""
    create = os.memfd_create

    def create_small(name: str, flags: int) -> int:
        if flags & os.MFD_HUGETLB:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return create(name, flags)

    monkeypatch.setattr(arena_module, "_MEMINFO", meminfo(tmp_path / "meminfo", free=4))
    monkeypatch.setattr(os, "memfd_create", create_small)
    if hugepages == "on":
        with pytest.raises(StartupError, match="Cannot allocate memory"):
            HostArena(0, 4096, hugepages=hugepages)
        return
    with HostArena(0, 4096, hugepages=hugepages) as arena:
        assert (arena.is_huge, arena.size_bytes) == (False, mmap.PAGESIZE)

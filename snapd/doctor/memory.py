"""Whether the configured arenas can be had: memory, hugepages, and what may be locked."""

import contextlib
import resource
from typing import Final

from snapd.arena import available_memory_bytes, free_hugepages_bytes
from snapd.config import Config
from snapd.doctor.finding import Finding, Places, protocol_concern
from snapd.doctor.messages import HOST_DEVICE
from snapd.units import align_up, format_bytes

GROUP: Final = "memory"
_CAP_IPC_LOCK: Final = 14


def check_memory(
    config: Config, places: Places, *, is_daemon_running: bool, wants_rdma: bool, has_rdma: bool
) -> list[Finding]:
    """Return the findings about memory.

    Args:
        config: with the arenas.
        places: where the kernel tells.
        is_daemon_running: a daemon has the arenas already.
        wants_rdma: RDMA is configured.
        has_rdma: there is an RDMA device.
    """
    free_bytes, page_bytes = free_hugepages_bytes(places.proc / "meminfo")
    is_huge = config.hugepages != "off" and page_bytes > 0 and huge_bytes(config, page_bytes) <= free_bytes
    findings = [
        check_arenas(config),
        check_hugepages(config, free_bytes, page_bytes, is_daemon_running=is_daemon_running),
    ]
    # What lies in hugepages takes nothing of the other memory.
    if not is_huge:
        findings.append(
            check_available(config, available_memory_bytes(), is_daemon_running=is_daemon_running)
        )
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    findings.append(
        check_locked(
            config, soft_bytes, may_exceed=has_ipc_lock(places), wants_rdma=wants_rdma, has_rdma=has_rdma
        )
    )
    return findings


def arenas_bytes(config: Config) -> int:
    """Return the bytes of all host arenas."""
    return sum(arena.size_bytes for arena in config.arenas if arena.device == HOST_DEVICE)


def huge_bytes(config: Config, page_bytes: int) -> int:
    """Return what all host arenas take in hugepages."""
    return sum(
        align_up(arena.size_bytes, page_bytes) for arena in config.arenas if arena.device == HOST_DEVICE
    )


def has_ipc_lock(places: Places) -> bool:
    """Return whether this process may lock more than its limit."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (places.proc / "self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def check_arenas(config: Config) -> Finding:
    """Tell the arenas, wherever they are."""
    count = len(config.arenas)
    total = format_bytes(sum(arena.size_bytes for arena in config.arenas))
    devices = ", ".join(dict.fromkeys(arena.device for arena in config.arenas))
    return Finding(
        group=GROUP,
        name="arenas",
        status="ok",
        detail=f"{count} of {total} together on {devices}" if count > 1 else f"one of {total} on {devices}",
    )


def check_available(config: Config, available_bytes: int | None, *, is_daemon_running: bool) -> Finding:
    """Check that the arenas fit in the memory that can be had, limits of cgroups included."""
    wanted_bytes = arenas_bytes(config)
    if available_bytes is None:
        return Finding(
            group=GROUP, name="available", status="info", detail="the kernel does not tell how much"
        )
    detail = f"{format_bytes(available_bytes)} can be had, the arenas want {format_bytes(wanted_bytes)}"
    if wanted_bytes <= available_bytes:
        return Finding(group=GROUP, name="available", status="ok", detail=detail)
    if is_daemon_running:
        return Finding(
            group=GROUP, name="available", status="info", detail=f"{detail}; the running daemon has its own"
        )
    return Finding(
        group=GROUP,
        name="available",
        # Without prefault it starts, and the kernel may kill it later.
        status="fail" if config.prefault else "warn",
        detail=detail,
        fix="lower size, or free memory (limits of the container or the unit count too)",
    )


def check_hugepages(config: Config, free_bytes: int, page_bytes: int, *, is_daemon_running: bool) -> Finding:
    """Check that the hugepages which are asked for are free."""
    wanted_bytes = huge_bytes(config, page_bytes) if page_bytes else arenas_bytes(config)
    if page_bytes:
        detail = (
            f"{format_bytes(free_bytes)} free in pages of {format_bytes(page_bytes)}, hugepages = "
            f"{config.hugepages}"
        )
        pages = wanted_bytes // page_bytes
        fix = f"sysctl vm.nr_hugepages={pages} (or more: others may use some)"
    else:
        detail = f"this kernel has none, hugepages = {config.hugepages}"
        fix = 'set hugepages = "auto"'
    if config.hugepages == "on" and wanted_bytes > free_bytes and not is_daemon_running:
        return Finding(group=GROUP, name="hugepages", status="fail", detail=detail, fix=fix)
    is_used = config.hugepages != "off" and 0 < wanted_bytes <= free_bytes
    return Finding(group=GROUP, name="hugepages", status="ok" if is_used else "info", detail=detail)


def check_locked(
    config: Config, limit_bytes: int, *, may_exceed: bool, wants_rdma: bool, has_rdma: bool
) -> Finding:
    """Check that RDMA may lock the arenas: registering pins every page."""
    wanted_bytes = arenas_bytes(config)
    if limit_bytes == resource.RLIM_INFINITY:
        return Finding(group=GROUP, name="locked limit", status="ok", detail="unlimited")
    detail = f"RLIMIT_MEMLOCK {format_bytes(limit_bytes)}"
    if may_exceed:
        return Finding(
            group=GROUP,
            name="locked limit",
            status="ok",
            detail=f"{detail}, and CAP_IPC_LOCK, which lifts it",
        )
    if wanted_bytes <= limit_bytes:
        return Finding(
            group=GROUP,
            name="locked limit",
            status="ok",
            detail=f"{detail}, the arenas want {format_bytes(wanted_bytes)}",
        )
    if not (wants_rdma or has_rdma):
        return Finding(
            group=GROUP, name="locked limit", status="info", detail=f"{detail}; only RDMA would need more"
        )
    return Finding(
        group=GROUP,
        name="locked limit",
        status="fail" if wants_rdma else "warn",
        detail=f"{detail}, and RDMA locks the arenas of {format_bytes(wanted_bytes)}",
        fix="LimitMEMLOCK=infinity in the unit, 'ulimit -l unlimited', or a container's --ulimit memlock=-1",
        concerns=protocol_concern("rdma"),
    )

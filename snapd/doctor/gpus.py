"""The GPUs as a process of this user sees them: driver, memory, and which reach each other's.

The driver runs in a child only: it can hang, and its contexts take memory.

Source: design, section 4.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from snapd.config import Config
from snapd.cuda import BLOCK_BYTES
from snapd.doctor.buffers import index_of, neighbour_of
from snapd.doctor.finding import Finding, Obstacle, Status
from snapd.doctor.hardware import GROUP
from snapd.doctor.messages import HOST_DEVICE, Seen, SeenGpu
from snapd.doctor.selftest import SelfTestFailed, see_gpus
from snapd.units import MIB, align_down, format_bytes

# An arena and a source on one GPU, and room for everybody else.
_MEMORY_SHARE: Final = 4
# What a process takes of a GPU before it allocates anything, with some room.
_CONTEXT_BYTES: Final = 768 * MIB
_PEERS_SHOWN_MAX: Final = 4
_GET_GPU: Final = (
    'load the NVIDIA driver (nvidia-smi says whether it works), start the container with the GPU, or set '
    'device = "cpu"'
)  # fmt: skip
_FREE_IT: Final = "free memory of the GPU (nvidia-smi names the processes)"


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the GPUs.

    Attributes:
        seen: by index; empty if ``why_not`` is not.
        why_not: why this user's processes can use none.
    """

    seen: tuple[SeenGpu, ...] = ()
    why_not: str = ""

    def names(self) -> str:
        """Return them for a person."""
        return ", ".join(f"cuda:{gpu.index} {gpu.name}" for gpu in self.seen)

    def find(self, device: str) -> SeenGpu | None:
        """Return the GPU of a device; None: there is no such."""
        index = index_of(device)
        return self.seen[index] if index < len(self.seen) else None

    def reaches(self, device: str, other: str) -> bool:
        """Return whether GPU *device* reaches the memory of *other*; its own always."""
        gpu = self.find(device)
        return device == other or (gpu is not None and index_of(other) in gpu.peers)


def gpu_devices(config: Config) -> list[str]:
    """Return the GPUs of the configured arenas, in order, once each."""
    found = {arena.device for arena in config.arenas if arena.device != HOST_DEVICE}
    return sorted(found, key=index_of)


def look(
    config: Config,
    listed: Sequence[str],
    *,
    timeout_s: float,
    see: Callable[[Sequence[int], float], Seen] = see_gpus,
) -> Gpus:
    """Ask the driver, if there may be one.

    Args:
        config: with the arenas.
        listed: GPUs that nvidia-smi or the kernel tells of; without any, and without arenas on one, nobody
            is asked.
        timeout_s: for the answer.
        see: asks a child.
    """
    wanted = gpu_devices(config)
    if not wanted and not listed:
        return Gpus(why_not="no GPU")
    try:
        seen = see([index_of(device) for device in wanted] or [0], timeout_s)
    except SelfTestFailed as error:
        return Gpus(why_not=str(error))
    if not seen.gpus:
        return Gpus(why_not=seen.why_not or "the NVIDIA driver shows no GPU; see CUDA_VISIBLE_DEVICES")
    return Gpus(seen=seen.gpus)


# --- findings ----------------------------------------------------------------------------------


def check_gpus(
    config: Config, gpus: Gpus, listed: Sequence[str], *, is_daemon_running: bool
) -> list[Finding]:
    """Check what the configured arenas want of GPUs, and tell what can be had."""
    wanted = gpu_devices(config)
    if not gpus.seen:
        if not wanted and not listed:
            return []
        # Without arenas on them it is in nobody's way.
        status: Status = "fail" if wanted else "warn"
        return [
            Finding(group=GROUP, name="CUDA driver", status=status, detail=gpus.why_not, fix=_GET_GPU),
        ]
    detail = f"this process sees {gpus.names()}"
    findings = [Finding(group=GROUP, name="CUDA driver", status="ok", detail=detail)]
    if len(gpus.seen) > 1:
        findings.append(check_peers(gpus))
    findings += (
        check_arenas_on(device, config, gpus, is_daemon_running=is_daemon_running) for device in wanted
    )
    return findings


def check_arenas_on(device: str, config: Config, gpus: Gpus, *, is_daemon_running: bool) -> Finding:
    """Check that a GPU is there, can be used, and has room for its arenas."""
    obstacle = _obstacle_of(device, gpus)
    arenas = [arena for arena in config.arenas if arena.device == device]
    ranks = ", ".join(str(arena.rank) for arena in arenas)
    name = f"arenas on {device}"
    if obstacle is not None:
        return Finding(
            group=GROUP, name=name, status="fail", detail=f"rank {ranks}: {obstacle.why}", fix=obstacle.fix
        )
    gpu = gpus.find(device)
    wanted_bytes = sum(arena.size_bytes for arena in arenas)
    if gpu is None or gpu.free_bytes is None or gpu.total_bytes is None:
        detail = f"rank {ranks} wants {format_bytes(wanted_bytes)}; nobody knows what is free"
        return Finding(group=GROUP, name=name, status="info", detail=detail)
    detail = (
        f"rank {ranks} wants {format_bytes(wanted_bytes)}, and {format_bytes(gpu.free_bytes)} of "
        f"{format_bytes(gpu.total_bytes)} of {gpu.name} are free"
    )
    if wanted_bytes <= gpu.free_bytes:
        return Finding(group=GROUP, name=name, status="ok", detail=detail)
    if is_daemon_running:
        return Finding(
            group=GROUP, name=name, status="info", detail=f"{detail}; the running daemon has its own"
        )
    return Finding(group=GROUP, name=name, status="fail", detail=detail, fix=f"lower size, or {_FREE_IT}")


def check_peers(gpus: Gpus) -> Finding:
    """Tell which GPUs do not reach each other's memory."""
    apart = [
        f"cuda:{gpu.index} and cuda:{other.index}"
        for gpu in gpus.seen
        for other in gpus.seen[gpu.index + 1 :]
        if other.index not in gpu.peers or gpu.index not in other.peers
    ]
    if not apart:
        detail = f"each of the {len(gpus.seen)} GPUs reaches the memory of every other"
        return Finding(group=GROUP, name="peer access", status="ok", detail=detail)
    more = f" and {len(apart) - _PEERS_SHOWN_MAX} more pairs" if len(apart) > _PEERS_SHOWN_MAX else ""
    return Finding(
        group=GROUP,
        name="peer access",
        status="warn",
        detail=f"none between {'; '.join(apart[:_PEERS_SHOWN_MAX])}{more}",
        fix="there shm goes through host memory and nvlink_intra does not work; nvidia-smi topo -p2p w tells "
        "why; put P and D on GPUs that reach each other, or use tcp or rdma",
    )


# --- what is tried -----------------------------------------------------------------------------


def pairs_for(config: Config, gpus: Gpus, *, is_wanted: bool) -> list[tuple[str, str]]:
    """Return where arenas and sources of self-tests lie: each arena's own GPU, and its neighbour if any.

    Args:
        config: with the arenas.
        gpus: what is there.
        is_wanted: the transport is configured; any other is tried on one GPU only.
    """
    devices = gpu_devices(config) or (["cuda:0"] if gpus.seen else [])
    pairs: list[tuple[str, str]] = []
    for device in devices if is_wanted else devices[:1]:
        pairs.append((device, device))
        if gpus.find(device) is not None and len(gpus.seen) > 1:
            pairs.append((device, f"cuda:{neighbour_of(index_of(device), len(gpus.seen))}"))
    return pairs


def obstacle_on(device: str, source_device: str, gpus: Gpus) -> Obstacle | None:
    """Return what stands against moving anything from *source_device* to *device*."""
    for each in dict.fromkeys((device, source_device)):
        obstacle = _obstacle_of(each, gpus)
        if obstacle is not None:
            return obstacle
        room_bytes = _room_bytes(each, gpus)
        gpu = gpus.find(each)
        if room_bytes is not None and room_bytes < BLOCK_BYTES and gpu is not None:
            free_bytes, total_bytes = gpu.free_bytes or 0, gpu.total_bytes or 0
            return Obstacle(
                f"too little memory of {each} for a self-test: {format_bytes(free_bytes)} of "
                f"{format_bytes(total_bytes)} are free",
                _FREE_IT,
            )
    return None


def self_test_bytes(wanted_bytes: int, device: str, source_device: str, gpus: Gpus) -> int:
    """Return how much to move: what is wanted, or less if memory of one of the GPUs is short."""
    rooms_bytes = [_room_bytes(each, gpus) for each in (device, source_device)]
    return min([wanted_bytes, *(room_bytes for room_bytes in rooms_bytes if room_bytes is not None)])


def _room_bytes(device: str, gpus: Gpus) -> int | None:
    gpu = gpus.find(device)
    if gpu is None or gpu.free_bytes is None:
        return None
    return align_down(max(0, gpu.free_bytes - _CONTEXT_BYTES) // _MEMORY_SHARE, BLOCK_BYTES)


def _obstacle_of(device: str, gpus: Gpus) -> Obstacle | None:
    if gpus.why_not:
        return Obstacle(gpus.why_not, _GET_GPU)
    gpu = gpus.find(device)
    if gpu is None:
        return Obstacle(
            f"{device} is not among the GPUs of this process, which are {gpus.names()}",
            "set device to one of them, or look at CUDA_VISIBLE_DEVICES",
        )
    if gpu.why_not:
        return Obstacle(f"{device} ({gpu.name}) cannot be used: {gpu.why_not}", "see nvidia-smi and dmesg")
    return None

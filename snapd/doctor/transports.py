"""Which transports and protocols work here: what stands against one, else its self-test."""

from collections.abc import Sequence
from typing import Final, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from snapd.config import Config
from snapd.doctor.finding import MOONCAKE, SHM, Finding, Obstacle, Status, memory_concern, protocol_concern
from snapd.doctor.gpus import Gpus, obstacle_on, pairs_for
from snapd.doctor.hardware import RdmaPort
from snapd.doctor.messages import HOST_DEVICE
from snapd.doctor.mooncake import Installed
from snapd.doctor.selftest import Result, SelfTestFailed, move_bytes
from snapd.mooncakeconfig import MooncakeConfig, Protocol
from snapd.units import MIB, align_down, format_bytes

GROUP: Final = "transports"
SELF_TEST_BYTES_DEFAULT: Final = 256 * MIB
# An arena, a source and two interpreters, with room for everybody else.
_MEMORY_SHARE: Final = 4
_CUDA: Final = "CUDA"
_INTRA_NVLINK: Final = "INTRA_NVLINK"
_NVLINK: Final = "nvlink_intra"
_USE_TCP: Final = 'set mooncake.protocol = "tcp"'
_USE_CUDA_BUILD: Final = "install kv-snapd[mooncake] or kv-snapd[mooncake-cuda13] in its place"
_SEE_MOONCAKE: Final = "see mooncake above"
_LOOK_AT: Final = {
    SHM: "look at the limits of the container: memory, seccomp profile",
    "tcp": "look at mooncake.host, the firewall and mooncake.settings (MC_...)",
    "rdma": "look at mooncake.devices, locked memory and mooncake.settings (MC_GID_INDEX, MC_...)",
    _NVLINK: "look at the driver and mooncake.settings (MC_...)",
}
_LOOK_AT_ON_GPU: Final = {
    SHM: "look at the driver (nvidia-smi, dmesg) and at what is free on the GPU; P and D must share one IPC "
    "and one PID namespace",
    "tcp": _LOOK_AT["tcp"],
    "rdma": "look at the kernel module nvidia_peermem, mooncake.devices and mooncake.settings (MC_...)",
    _NVLINK: "look at the driver (nvidia-smi, dmesg), at what is free on the GPU and at mooncake.settings "
    "(MC_...)",
}


class TransferResult(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a transport or protocol works here.

    Attributes:
        ok: nothing stands against it, and its self-test, if there was one, moved every byte.
        tested: there was a self-test.
        why: why not; empty if it is ok.
        bytes: moved.
        gb_per_s: how fast, in units of 10**9 bytes a second; None: it came to no end.
        verified: every byte was compared and is right.
        latency_us: of a write of 4 KiB; not there if the self-test came to no end.
    """

    ok: bool
    tested: bool
    why: str = ""
    bytes: int = 0
    gb_per_s: float | None = None
    verified: bool = False
    latency_us: float | UnsetType = UNSET


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """What a self-test takes: a transport, and the memory on both ends.

    Attributes:
        transport: which.
        mooncake: how to use Mooncake, for that transport.
        device: of the arena: ``cpu`` or ``cuda:N``.
        source_device: of what is written into it.
    """

    transport: Literal["shm", "mooncake"]
    mooncake: MooncakeConfig = MooncakeConfig()
    device: str = HOST_DEVICE
    source_device: str = HOST_DEVICE

    @property
    def kind(self) -> str:
        """``shm``, or the protocol of Mooncake."""
        return SHM if self.transport == SHM else self.mooncake.protocol

    @property
    def is_on_gpu(self) -> bool:
        """Whether the arena is on a GPU."""
        return self.device != HOST_DEVICE

    @property
    def name(self) -> str:
        """For a person: ``shm``, ``mooncake tcp cuda:0``, ``shm cuda:0 from cuda:1``."""
        name = SHM if self.transport == SHM else f"{MOONCAKE} {self.mooncake.protocol}"
        if self.is_on_gpu:
            name += f" {self.device}"
        return name if self.source_device == self.device else f"{name} from {self.source_device}"

    @property
    def concern(self) -> str:
        """What a finding about it concerns."""
        of = SHM if self.transport == SHM else protocol_concern(self.mooncake.protocol)
        return memory_concern(of, self.device)


def protocol_configs(config: MooncakeConfig) -> dict[Protocol, MooncakeConfig]:
    """Return how each protocol would be used: as configured, or with the devices and settings of it."""
    protocols: tuple[Protocol, ...] = get_args(Protocol)
    return {
        protocol: config
        if protocol == config.protocol
        else MooncakeConfig(protocol=protocol, devices=config.devices, settings=config.settings)
        for protocol in protocols
    }


def routes_of(config: Config, gpus: Gpus) -> list[Route]:
    """Return what there is to try: every transport in host memory, then in that of GPUs.

    A protocol that is for GPUs only is there also where there is none, so that something can be said of it.
    """
    routes = []
    hows: list[tuple[Literal["shm", "mooncake"], MooncakeConfig]] = [(SHM, config.mooncake)]
    hows += [(MOONCAKE, how) for how in protocol_configs(config.mooncake).values()]
    for transport, how in hows:
        is_for_gpus = transport == MOONCAKE and how.protocol == _NVLINK
        is_wanted = transport == config.transport and how is config.mooncake
        pairs = pairs_for(config, gpus, is_wanted=is_wanted)
        if is_for_gpus and not pairs:
            pairs = [("cuda:0", "cuda:0")]
        if not is_for_gpus:
            pairs.insert(0, (HOST_DEVICE, HOST_DEVICE))
        routes += [
            Route(transport=transport, mooncake=how, device=device, source_device=source)
            for device, source in pairs
        ]
    return routes


def obstacle_to(route: Route, installed: Installed, ports: Sequence[RdmaPort], gpus: Gpus) -> Obstacle | None:
    """Return what stands against a route on this machine."""
    if route.transport == MOONCAKE:
        if installed.why_not:
            return Obstacle(installed.why_not, installed.install or _SEE_MOONCAKE)
        if route.kind == "rdma":
            if not ports:
                return Obstacle("no RDMA device", f"load the driver of one, or {_USE_TCP}")
            if not any(port.is_active for port in ports):
                return Obstacle(
                    "no port of an RDMA device is active", f"check cable and switch, or {_USE_TCP}"
                )
    if not route.is_on_gpu:
        return None
    return obstacle_on(route.device, route.source_device, gpus) or _obstacle_on_gpu(route, installed, gpus)


def _obstacle_on_gpu(route: Route, installed: Installed, gpus: Gpus) -> Obstacle | None:
    if route.kind == _NVLINK:
        if _INTRA_NVLINK not in installed.supports:
            return Obstacle("this build of Mooncake has no NVLink", _USE_CUDA_BUILD)
        if not gpus.reaches(route.source_device, route.device):
            return Obstacle(
                f"{route.source_device} cannot reach the memory of {route.device} (peer access)",
                "nvidia-smi topo -p2p w tells why; put P and D on GPUs that reach each other, or use tcp or "
                "rdma",
            )
    elif route.transport == MOONCAKE and _CUDA not in installed.supports:
        return Obstacle(
            "this build of Mooncake was made without CUDA and moves no GPU memory",
            f'{_USE_CUDA_BUILD}, or set device = "cpu"',
        )
    return None


def goes_through_host(route: Route, gpus: Gpus) -> bool:
    """Return whether the driver copies by way of host memory, as one GPU does not reach the other's."""
    return route.transport == SHM and route.is_on_gpu and not gpus.reaches(route.source_device, route.device)


def self_test_bytes(wanted_bytes: int, available_bytes: int | None) -> int:
    """Return how much to move: what is wanted, or less if memory is short."""
    if available_bytes is None:
        return wanted_bytes
    return min(wanted_bytes, max(MIB, align_down(available_bytes // _MEMORY_SHARE, MIB)))


def look_at(
    route: Route,
    *,
    obstacle: Obstacle | None,
    is_wanted: bool,
    size_bytes: int,
    timeout_s: float,
    goes_through_host: bool = False,
) -> tuple[TransferResult, Finding]:
    """Return whether a transport works, and the same for a person.

    Args:
        route: the transport, and where the memory is.
        obstacle: what stands against it already; no self-test then.
        is_wanted: it is configured.
        size_bytes: to move; 0: no self-test.
        timeout_s: for the self-test.
        goes_through_host: see the function of this name.
    """

    def finding(status: Status, detail: str, fix: str = "") -> Finding:
        return Finding(
            group=GROUP, name=route.name, status=status, detail=detail, fix=fix, concerns=route.concern
        )

    if obstacle is not None:
        result = TransferResult(ok=False, tested=False, why=obstacle.why)
        detail = f"not possible: {obstacle.why}"
        if not is_wanted:
            return result, finding("info", detail)
        # The arena works: from its own GPU there may be no obstacle, and nobody says where D is.
        status: Status = "fail" if route.source_device == route.device else "warn"
        return result, finding(status, detail, obstacle.fix)
    if not size_bytes:
        return TransferResult(ok=True, tested=False), finding("info", "nothing stands against it; not tested")
    look_at = (_LOOK_AT_ON_GPU if route.is_on_gpu else _LOOK_AT)[route.kind]
    try:
        moved = move_bytes(
            route.transport,
            size_bytes,
            mooncake=route.mooncake,
            timeout_s=timeout_s,
            device=route.device,
            source_device=route.source_device,
        )
    except SelfTestFailed as error:
        return TransferResult(ok=False, tested=True, why=str(error)), finding("fail", str(error), look_at)
    detail = _told(route, moved)
    result = TransferResult(
        ok=not moved.difference,
        tested=True,
        why=moved.difference,
        bytes=moved.size_bytes,
        gb_per_s=moved.gb_per_s,
        verified=not moved.difference,
        latency_us=moved.latency_us,
    )
    if moved.difference:
        return result, finding("fail", f"{detail}: {moved.difference}", f"do not use it; {look_at}")
    if goes_through_host:
        return result, finding(
            "warn",
            f"{detail}, every byte is right, and all went through host memory: no peer access",
            "nvidia-smi topo -p2p w tells why; put P and D on GPUs that reach each other",
        )
    return result, finding("ok", f"{detail}, every byte is right")


def _told(route: Route, moved: Result) -> str:
    where = f" on {route.device}" if route.is_on_gpu else ""
    whence = f" on {route.source_device}" if route.source_device != route.device else ""
    return (
        f"{format_bytes(moved.size_bytes)} from one process{whence} to another{where}, "
        f"{moved.gb_per_s:.1f} GB/s, 4 KiB in {moved.latency_us:,.1f} us"
    )

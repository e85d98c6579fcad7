"""Which transports and protocols work here: what stands against one, else its self-test."""

from collections.abc import Sequence
from typing import Final, Literal, get_args

import msgspec

from snapd.config import Config
from snapd.doctor.finding import MOONCAKE, SHM, Finding, Status, protocol_concern
from snapd.doctor.hardware import RdmaPort
from snapd.doctor.mooncake import Installed
from snapd.doctor.selftest import SelfTestFailed, move_bytes
from snapd.mooncakeconfig import MooncakeConfig, Protocol
from snapd.units import MIB, align_down, format_bytes

GROUP: Final = "transports"
SELF_TEST_BYTES_DEFAULT: Final = 256 * MIB
# An arena, a source and two interpreters, with room for everybody else.
_MEMORY_SHARE: Final = 4
_INTRA_NVLINK: Final = "INTRA_NVLINK"
_USE_TCP: Final = 'set mooncake.protocol = "tcp"'
_SEE_MOONCAKE: Final = "see mooncake above"
_LOOK_AT: Final = {
    SHM: "look at the limits of the container: memory, seccomp profile",
    "tcp": "look at mooncake.host, the firewall and mooncake.settings (MC_...)",
    "rdma": "look at mooncake.devices, locked memory and mooncake.settings (MC_GID_INDEX, MC_...)",
    "nvlink_intra": "look at the driver and mooncake.settings (MC_...)",
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
    """

    ok: bool
    tested: bool
    why: str = ""
    bytes: int = 0
    gb_per_s: float | None = None
    verified: bool = False


def protocol_configs(config: MooncakeConfig) -> dict[Protocol, MooncakeConfig]:
    """Return how each protocol would be used: as configured, or with the devices and settings of it."""
    protocols: tuple[Protocol, ...] = get_args(Protocol)
    return {
        protocol: config
        if protocol == config.protocol
        else MooncakeConfig(protocol=protocol, devices=config.devices, settings=config.settings)
        for protocol in protocols
    }


class Obstacle(msgspec.Struct, frozen=True):
    """What stands against a transport, as far as can be seen without trying.

    Attributes:
        why: for a person.
        fix: what to do about it.
    """

    why: str
    fix: str


def obstacle_to(
    protocol: Protocol, config: Config, installed: Installed, ports: Sequence[RdmaPort], gpus: Sequence[str]
) -> Obstacle | None:
    """Return what stands against a protocol of Mooncake on this machine."""
    if installed.why_not:
        return Obstacle(installed.why_not, installed.install or _SEE_MOONCAKE)
    if protocol == "rdma":
        if not ports:
            return Obstacle("no RDMA device", f"load the driver of one, or {_USE_TCP}")
        if not any(port.is_active for port in ports):
            return Obstacle("no port of an RDMA device is active", f"check cable and switch, or {_USE_TCP}")
    if protocol == "nvlink_intra":
        if not gpus:
            return Obstacle("no GPU", _USE_TCP)
        if _INTRA_NVLINK not in installed.supports:
            return Obstacle(
                "this build of Mooncake has no NVLink",
                "install kv-snapd[mooncake] or kv-snapd[mooncake-cuda13] in its place",
            )
        return Obstacle("this version cannot test arenas in GPU memory", f"for host memory {_USE_TCP}")
    return None


def self_test_bytes(wanted_bytes: int, available_bytes: int | None) -> int:
    """Return how much to move: what is wanted, or less if memory is short."""
    if available_bytes is None:
        return wanted_bytes
    return min(wanted_bytes, max(MIB, align_down(available_bytes // _MEMORY_SHARE, MIB)))


def look_at(
    transport: Literal["shm", "mooncake"],
    *,
    obstacle: Obstacle | None,
    mooncake: MooncakeConfig,
    is_wanted: bool,
    size_bytes: int,
    timeout_s: float,
) -> tuple[TransferResult, Finding]:
    """Return whether a transport works, and the same for a person.

    Args:
        transport: which.
        obstacle: what stands against it already; no self-test then.
        mooncake: how to use Mooncake, for that transport.
        is_wanted: it is configured.
        size_bytes: to move; 0: no self-test.
        timeout_s: for the self-test.
    """
    name = transport if transport == SHM else f"{MOONCAKE} {mooncake.protocol}"
    concerns = SHM if transport == SHM else protocol_concern(mooncake.protocol)

    def finding(status: Status, detail: str, fix: str = "") -> Finding:
        return Finding(group=GROUP, name=name, status=status, detail=detail, fix=fix, concerns=concerns)

    if obstacle is not None:
        result = TransferResult(ok=False, tested=False, why=obstacle.why)
        detail = f"not possible: {obstacle.why}"
        return result, finding("fail", detail, obstacle.fix) if is_wanted else finding("info", detail)
    if not size_bytes:
        return TransferResult(ok=True, tested=False), finding("info", "nothing stands against it; not tested")
    look_at = _LOOK_AT[SHM if transport == SHM else mooncake.protocol]
    try:
        moved = move_bytes(transport, size_bytes, mooncake=mooncake, timeout_s=timeout_s)
    except SelfTestFailed as error:
        return TransferResult(ok=False, tested=True, why=str(error)), finding("fail", str(error), look_at)
    detail = f"{format_bytes(moved.size_bytes)} from one process to another, {moved.gb_per_s:.1f} GB/s"
    result = TransferResult(
        ok=not moved.difference,
        tested=True,
        why=moved.difference,
        bytes=moved.size_bytes,
        gb_per_s=moved.gb_per_s,
        verified=not moved.difference,
    )
    if moved.difference:
        return result, finding("fail", f"{detail}: {moved.difference}", f"do not use it; {look_at}")
    return result, finding("ok", f"{detail}, every byte is right")

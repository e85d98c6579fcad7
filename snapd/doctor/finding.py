"""What a check says, and where checks look."""

from pathlib import Path
from typing import Final, Literal

import msgspec

from snapd.config import Config

Status = Literal["ok", "warn", "fail", "info"]

# What a finding is about: everything, a transport, or one protocol of Mooncake.
EVERYTHING: Final = ""
SHM: Final = "shm"
MOONCAKE: Final = "mooncake"


def memory_concern(transport_concern: str, device: str) -> str:
    """Return what a finding about a transport or protocol and arenas of one device concerns."""
    return f"{transport_concern} on {device}"


def protocol_concern(protocol: str) -> str:
    """Return what a finding about one protocol of Mooncake concerns."""
    return f"{MOONCAKE}.{protocol}"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fact.

    Attributes:
        group: under which heading it is shown.
        name: what was looked at.
        status: ``fail`` keeps something from working, ``warn`` may, ``info`` only tells.
        detail: what was found.
        fix: what to do about it; empty if there is nothing to do.
        concerns: what a ``fail`` keeps from working: everything (empty), ``shm``, ``mooncake``, a protocol
            such as ``mooncake.rdma``, or one of these for arenas of one device: ``shm on cuda:0``.
    """

    group: str
    name: str
    status: Status
    detail: str
    fix: str = ""
    concerns: str = EVERYTHING


class Obstacle(msgspec.Struct, frozen=True):
    """What stands against a transport, as far as can be seen without trying.

    Attributes:
        why: for a person.
        fix: what to do about it.
    """

    why: str
    fix: str


class Places(msgspec.Struct, frozen=True):
    """Where the kernel tells about itself; other directories in tests."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")


def configured_concerns(config: Config) -> frozenset[str]:
    """Return what must work for the daemon and its peers to work as configured."""
    concern = SHM if config.transport == SHM else protocol_concern(config.mooncake.protocol)
    on_devices = {memory_concern(concern, arena.device) for arena in config.arenas}
    return frozenset({EVERYTHING, config.transport, concern, *on_devices})

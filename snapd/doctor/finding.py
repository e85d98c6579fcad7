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
        concerns: what a ``fail`` keeps from working: everything (empty), ``shm``, ``mooncake``, or a
            protocol such as ``mooncake.rdma``.
    """

    group: str
    name: str
    status: Status
    detail: str
    fix: str = ""
    concerns: str = EVERYTHING


class Places(msgspec.Struct, frozen=True):
    """Where the kernel tells about itself; other directories in tests."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")


def configured_concerns(config: Config) -> frozenset[str]:
    """Return what must work for the daemon and its peers to work as configured."""
    if config.transport == SHM:
        return frozenset({EVERYTHING, SHM})
    return frozenset({EVERYTHING, MOONCAKE, protocol_concern(config.mooncake.protocol)})

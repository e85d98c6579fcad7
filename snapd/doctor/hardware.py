"""RDMA devices and GPUs, as the kernel and the driver tell."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import msgspec

from snapd.doctor.finding import Finding, Places, protocol_concern
from snapd.mooncakeconfig import MooncakeConfig

GROUP: Final = "hardware"
_RDMA: Final = protocol_concern("rdma")
_NVIDIA_SMI_S: Final = 10.0
_NVIDIA_SMI: Final = (
    "--query-gpu=index,name,memory.total,driver_version",
    "--format=csv,noheader",
)


class RdmaPort(msgspec.Struct, frozen=True):
    """A port of an RDMA device.

    Attributes:
        device: such as ``mlx5_0``.
        port: its number.
        state: such as ``ACTIVE``.
        rate: such as ``400 Gb/sec (4X NDR)``.
        link_layer: ``InfiniBand`` or ``Ethernet``.
    """

    device: str
    port: str
    state: str
    rate: str
    link_layer: str

    @property
    def is_active(self) -> bool:
        """Whether it can move bytes now."""
        return self.state == "ACTIVE"


def rdma_ports(places: Places) -> list[RdmaPort]:
    """Return every port of every RDMA device."""
    return [
        RdmaPort(
            device=port.parent.parent.name,
            port=port.name,
            # "4: ACTIVE"
            state=_read(port / "state").rpartition(":")[2].strip() or "unknown",
            rate=_read(port / "rate") or "unknown rate",
            link_layer=_read(port / "link_layer") or "unknown link layer",
        )
        for port in sorted((places.sys / "class/infiniband").glob("*/ports/*"))
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def check_rdma(ports: list[RdmaPort], config: MooncakeConfig, places: Places) -> list[Finding]:
    """Tell every RDMA port, and check that the configured devices are among them and may be used."""
    findings = [
        Finding(
            group=GROUP,
            name=f"{port.device} port {port.port}",
            status="ok" if port.is_active else "warn",
            detail=f"{port.state}, {port.rate}, {port.link_layer}",
            fix=""
            if port.is_active
            else "check cable, switch and subnet manager, or name others in mooncake.devices",
        )
        for port in ports
    ]
    if not ports:
        findings.append(Finding(group=GROUP, name="RDMA devices", status="info", detail="none"))
    devices = {port.device for port in ports}
    wanted = [name for part in config.devices.split(",") if (name := part.strip())]
    if config.protocol == "rdma" and (absent := [name for name in wanted if name not in devices]):
        findings.append(
            Finding(
                group=GROUP,
                name="mooncake.devices",
                status="fail",
                detail=f"{', '.join(absent)}: no such RDMA device here",
                fix=f"name some of {', '.join(sorted(devices))}, or none" if devices else "use tcp",
                concerns=_RDMA,
            )
        )
    closed = [
        path.name
        for path in sorted((places.dev / "infiniband").glob("uverbs*"))
        if not os.access(path, os.R_OK | os.W_OK)
    ]
    if closed:
        findings.append(
            Finding(
                group=GROUP,
                name="/dev/infiniband",
                status="fail",
                detail=f"this user may not open {', '.join(closed)}",
                fix="give this user read and write access, or pass the devices to the container",
                concerns=_RDMA,
            )
        )
    return findings


def gpus(places: Places, nvidia_smi: str | None = None) -> list[str]:
    """Return a line for each NVIDIA GPU: by nvidia-smi, else as the driver's /proc tells, else its device."""
    command = nvidia_smi or shutil.which("nvidia-smi")
    if command is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(  # noqa: S603 - found in PATH, and no argument comes from outside
                [command, *_NVIDIA_SMI],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_NVIDIA_SMI_S,
                check=True,
            )
            return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    found = []
    for path in sorted((places.proc / "driver/nvidia/gpus").glob("*/information")):
        facts = dict(line.split(":", 1) for line in _read(path).splitlines() if ":" in line)
        found.append(f"{facts.get('Model', 'unknown model').strip()}, {path.parent.name}")
    return found or [f"unknown model, {path.name}" for path in sorted(places.dev.glob("nvidia[0-9]*"))]


def check_gpus(found: list[str]) -> list[Finding]:
    """Tell every GPU."""
    if not found:
        return [Finding(group=GROUP, name="GPUs", status="info", detail="none")]
    return [Finding(group=GROUP, name="GPU", status="ok", detail=line) for line in found]

"""Python, snapd, and what the kernel can do."""

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import socket
import sys
from typing import Final

from snapd import __version__
from snapd.compiling import described, is_compiled
from snapd.doctor.finding import SHM, Finding
from snapd.peers import SO_PEERPIDFD

GROUP: Final = "software"
_LIBRARIES: Final = ("msgspec", "uvloop", "structlog", "click")


def check_software() -> list[Finding]:
    """Return the findings about programs and kernel."""
    return [check_snapd(), check_python(), check_memfd(), check_pidfd(), check_peer_pidfd()]


def check_snapd() -> Finding:
    """Tell the version of snapd and of what it stands on."""
    found = []
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    version = described(__version__, is_compiled())
    return Finding(group=GROUP, name="snapd", status="ok", detail=f"{version} with {', '.join(found)}")


def check_python() -> Finding:
    """Tell which Python runs this."""
    version = f"{platform.python_implementation()} {platform.python_version()}"
    return Finding(group=GROUP, name="python", status="ok", detail=f"{version} at {sys.executable}")


def check_memfd() -> Finding:
    """Check that memory can be shared by file descriptor and sealed: host arenas need it."""
    release = platform.release()
    try:
        fd = os.memfd_create("kv-snapd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        finally:
            os.close(fd)
    except OSError as error:
        return Finding(
            group=GROUP,
            name="memfd",
            status="fail",
            detail=f"Linux {release}: no sealed memfd ({error.strerror}); arenas are made of them",
            fix="allow memfd_create and fcntl(F_ADD_SEALS) in the container's seccomp profile",
        )
    return Finding(group=GROUP, name="memfd", status="ok", detail=f"Linux {release} makes and seals them")


def check_pidfd() -> Finding:
    """Check that the exit of a process can be seen: it is drain proof of a local writer."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            group=GROUP,
            name="pidfd",
            status="warn",
            detail=f"none ({error.strerror}): what a dead writer held rests in quarantine for its full time",
            fix="Linux 5.3 or newer, with pidfd_open allowed in the container's seccomp profile",
            concerns=SHM,
        )
    return Finding(
        group=GROUP, name="pidfd", status="ok", detail="the exit of a local writer is seen at once"
    )


def check_peer_pidfd() -> Finding:
    """Check that the process behind a connection can be named without its number."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            return Finding(
                group=GROUP,
                name="SO_PEERPIDFD",
                status="info",
                detail="not before Linux 6.5: writers in another pid namespace are not watched",
            )
    return Finding(
        group=GROUP, name="SO_PEERPIDFD", status="ok", detail="writers are named without their pid"
    )

"""Whether the daemon could make its socket and its log where they are configured. Makes nothing."""

import os
import socket
import stat
from pathlib import Path
from typing import Final

from snapd.config import Config
from snapd.doctor.finding import Finding
from snapd.units import format_bytes

GROUP: Final = "paths"
_CONNECT_S: Final = 2.0


def is_daemon_running(config: Config) -> bool:
    """Return whether somebody listens on the configured socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_S)
        try:
            sock.connect(config.socket_path)
        except (OSError, ValueError):
            return False
    return True


def check_paths(config: Config, *, is_daemon_running: bool) -> list[Finding]:
    """Return the findings about the configured paths."""
    return [
        check_socket(config, is_daemon_running=is_daemon_running),
        check_log(config),
        check_log_room(config),
    ]


def _nearest_directory(path: Path) -> Path:
    """Return the nearest directory above *path* that is there."""
    directory = path.parent
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory


def _refusal(path: Path) -> str:
    """Return why nothing can be made at *path*; empty: it can."""
    directory = _nearest_directory(path)
    if not directory.is_dir():
        return f"{directory} is no directory"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"this user (uid {os.geteuid()}) may not write in {directory}"
    return ""


def check_socket(config: Config, *, is_daemon_running: bool) -> Finding:
    """Check that the socket can be made."""
    path = Path(config.socket_path)
    if is_daemon_running:
        return Finding(group=GROUP, name="socket", status="info", detail=f"{path}: a daemon listens there")
    try:
        refusal = _refusal(path)
        if not refusal and path.parent.is_dir() and path.parent.stat().st_uid not in (0, os.geteuid()):
            refusal = f"{path.parent} belongs to another user"
        if not refusal and os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
            refusal = "something that is no socket is in the way"
    except OSError as error:
        refusal = error.strerror or str(error)
    return _finding("socket", path, refusal)


def check_log(config: Config) -> Finding:
    """Check that the event log can be written."""
    path = Path(config.log_path)
    try:
        refusal = _refusal(path)
        if not refusal and path.exists():
            if not path.is_file():
                refusal = "something that is no file is in the way"
            elif not os.access(path, os.W_OK):
                refusal = "this user may not write to it"
    except OSError as error:
        refusal = error.strerror or str(error)
    return _finding("log", path, refusal)


def _finding(name: str, path: Path, refusal: str) -> Finding:
    if not refusal:
        return Finding(group=GROUP, name=name, status="ok", detail=str(path))
    return Finding(
        group=GROUP,
        name=name,
        status="fail",
        detail=f"{path}: {refusal}",
        fix=f"set {name}_path to a path in a directory of this user",
    )


def check_log_room(config: Config) -> Finding:
    """Compare the free space with what the log and its rotated files may take."""
    wanted_bytes = config.log_rotate_bytes * (config.log_rotate_keep + 1)
    try:
        found = os.statvfs(_nearest_directory(Path(config.log_path)))
    except OSError as error:
        return Finding(
            group=GROUP, name="log space", status="info", detail=f"unknown: {error.strerror or error}"
        )
    free_bytes = found.f_bavail * found.f_frsize
    detail = f"{format_bytes(free_bytes)} free"
    if not wanted_bytes:
        return Finding(
            group=GROUP, name="log space", status="info", detail=f"{detail}, and the log is never rotated"
        )
    detail += f", the log may take {format_bytes(wanted_bytes)}"
    if wanted_bytes <= free_bytes:
        return Finding(group=GROUP, name="log space", status="ok", detail=detail)
    return Finding(
        group=GROUP,
        name="log space",
        status="warn",
        detail=detail,
        fix="lower log_rotate_bytes or log_rotate_keep; a full disk costs log lines, not service",
    )

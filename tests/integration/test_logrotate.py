"""Debian's logrotate moves the event log by the file in deploy/, and no line is lost."""

import gzip
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import DaemonProcess

from snapd.client import Client
from snapd.layout import Layout

PROGRAM = shutil.which("logrotate", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
LAYOUT = Layout(k_stride_bytes=(256,), v_stride_bytes=(256,))
RULES = Path(__file__).parents[2] / "deploy" / "kv-snapd.logrotate"
ROTATIONS = 3
WAIT_S = 30.0

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="logrotate is not installed (Debian: logrotate)")


def rules_for(daemon: DaemonProcess) -> str:
    """Return the rules with this daemon's log, its user, and its process in place of the unit's."""
    text = RULES.read_text()
    text, logs = re.subn(r"^/var/log/\S+", str(daemon.log_path), text, flags=re.MULTILINE)
    # Only root can become another user.
    text, users = re.subn(r"^ +su .*\n", "    su root root\n" if os.geteuid() == 0 else "", text, flags=re.M)
    signalled = f"kill -HUP {daemon.process.pid}"
    text, commands = re.subn(r"systemctl kill .* kv-snapd\.service", signalled, text)
    assert (logs, users, commands) == (1, 1, 1)
    return text


def lines_of(path: Path) -> list[dict[str, object]]:
    raw = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines()]


def test_logrotate_moves_the_log_and_no_line_is_lost(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    daemon = start_daemon(log_rotate_bytes=0)
    rules, state = tmp_path / "rules", tmp_path / "state"
    rules.write_text(rules_for(daemon))
    # logrotate takes no rules that others can write to.
    rules.chmod(0o644)
    with Client(str(daemon.socket_path)) as client:
        fingerprint = client.declare_layout(0, LAYOUT)
        for number in range(ROTATIONS):
            for attempt in range(20):
                grant = client.prepare_receive(f"{number}-{attempt}", 4, fingerprint)
                client.transfer_failed(grant.slab_handle, drained=True)
            deadline_s = time.monotonic() + WAIT_S
            while client.stats().log.queued_lines:
                assert time.monotonic() < deadline_s
            assert PROGRAM is not None
            done = subprocess.run(
                [PROGRAM, "--force", "--state", str(state), str(rules)],
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=False,
            )
            assert (done.returncode, done.stderr) == (0, "")
            deadline_s = time.monotonic() + WAIT_S
            while not daemon.log_path.exists():
                assert time.monotonic() < deadline_s, "the daemon makes the new file"
    daemon.stop()
    name = daemon.log_path.name
    names = sorted(path.name for path in daemon.directory.glob(f"{name}*"))
    # The newest old one is left as it is: a daemon that starts after a crash reads it.
    assert names == [name, f"{name}.1", f"{name}.2.gz", f"{name}.3.gz"]
    files = [daemon.directory / f"{name}{end}" for end in (".3.gz", ".2.gz", ".1", "")]
    lines = [line for path in files for line in lines_of(path)]
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    assert sum(line["event"] == "sync.outcome" for line in lines) == 20 * ROTATIONS
    assert (lines[0]["event"], lines[-1]["event"]) == ("daemon.started", "daemon.stopped")
    assert (daemon.log_path.stat().st_mode & 0o777) == 0o600

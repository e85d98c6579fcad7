"""Every command of snapd that the README shows does what it should, one after the other.

README.zh.md has the same ones; `serve` runs in ``test_readme``, and `demo` is a target of the Makefile.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from daemon_process import DaemonProcess, clean_environment
from test_cli import CLI, Workers, call

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from shown import PROJECT, inline_commands, of_snapd, shell_commands

README = (PROJECT / "README.md").read_text()
TRACE = PROJECT / "snapd" / "demo" / "agent_trace.jsonl"
ELSEWHERE = ("serve", "demo")
# What ends attempts and the daemon comes last, and what looks at its log after that.
ORDER = ("abort", "drain", "forensics", "replay")
# A test has no terminal and nobody who answers; doctor may find fault with the machine.
MORE = {"top": ["--once"], "abort": ["--yes"], "doctor": ["--no-self-test"]}
STATUSES = {"doctor": (0, 1)}
WAIT_S = 60.0


def shown() -> list[list[str]]:
    """Return the commands, without mere names of some that need arguments."""
    found = [of_snapd(words) for words in (*shell_commands(README), *inline_commands(README))]
    wanted = [
        words
        for words in found
        if words and words[0] not in ELSEWHERE and words not in (["forensics"], ["replay"])
    ]
    return sorted(wanted, key=lambda words: ORDER.index(words[0]) if words[0] in ORDER else -1)


def watched(words: list[str], workers: Workers, environment: dict[str, str]) -> None:
    """Watch until something happens."""
    command = [*CLI, *words, "--count", "1"]
    watching = subprocess.Popen(
        command, env=clean_environment() | environment, stdout=subprocess.PIPE, text=True
    )
    try:
        while watching.poll() is None:
            workers.fail("seen")
        assert watching.stdout is not None
        assert "seen" in watching.stdout.read()
    finally:
        watching.kill()
        watching.communicate()
    assert watching.returncode == 0


def test_every_command_of_the_readme_runs(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    daemon = start_daemon()
    workers = Workers(daemon.socket_path)
    workers.ingest("chat-17")
    workers.commit("chat-17")
    environment = {"SNAPD_SOCKET_PATH": str(daemon.socket_path)}
    places = {
        "ID": "chat-17", "/var/log/kv-snapd/": f"{daemon.directory}/", "trace.jsonl": str(TRACE),
        "page.html": str(tmp_path / "page.html"), "curve.png": str(tmp_path / "curve.png"),
    }  # fmt: skip
    commands = shown()
    assert len(commands) > 15
    for words in commands:
        if words[0] == "watch":
            watched(words, workers, environment)
            continue
        if words == ["drain", "--wait"]:
            workers.client.close()
        arguments = [places.get(word, word) for word in words] + MORE.get(words[0], [])
        status, out, err = call(*arguments, **environment)
        assert status in STATUSES.get(words[0], (0,)), (arguments, err)
        assert out or "--html" in words, arguments
    assert daemon.process.wait(WAIT_S) == 0, "drain --wait has stopped it"
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "curve.png").stat().st_size > 10_000

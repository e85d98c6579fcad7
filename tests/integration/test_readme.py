"""The README's programs run as they stand, against the daemon that its command starts."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapd.client import Client

README = (Path(__file__).parents[2] / "README.md").read_text()
TIMEOUT_S = 60


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def _program(name: str, directory: Path) -> str:
    text = next(block for block in _blocks("python") if block.startswith(f"# {name}\n"))
    return text.replace("/tmp/snapd", str(directory))


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[str]:
    line = next(line for line in "\n".join(_blocks("sh")).splitlines() if line.startswith("snapd serve"))
    arguments = shlex.split(line.replace("/tmp/snapd", str(tmp_path)))[1:]
    daemon = subprocess.Popen([sys.executable, "-m", "snapd.cli.main", *arguments])
    socket = tmp_path / "snapd.sock"
    try:
        with Client(str(socket)) as client:
            client.connect(wait_s=TIMEOUT_S)
        yield str(socket)
    finally:
        daemon.terminate()
        assert daemon.wait(TIMEOUT_S) == 0


def test_the_minimal_p_and_d_bring_a_snapshot_over(socket_path: str, tmp_path: Path) -> None:
    p = subprocess.Popen(
        [sys.executable, "-c", _program("p.py", tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        # D may push once P has declared its layout.
        with Client(socket_path) as client:
            while client.stats().core.layouts == 0:
                assert p.poll() is None, "P ended early"
        d = subprocess.run(
            [sys.executable, "-c", _program("d.py", tmp_path)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert d.returncode == 0, d.stderr
        assert "ok=True" in d.stdout
        said, _ = p.communicate(timeout=TIMEOUT_S)
    finally:
        p.kill()
        p.wait()
    assert p.returncode == 0
    assert "SnapshotFinalizeIngestReqOutput(ok=True" in said
    assert "in the tree: 300 tokens" in said
    with Client(socket_path) as client:
        assert client.stats().core.attempts_ok == 1


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    named = re.findall(r"^make (\w+)", "\n".join(_blocks("sh")), flags=re.MULTILINE)
    assert named == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in named)

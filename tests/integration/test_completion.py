"""``snapd completion``: the scripts, and what they make of a command line."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import clean_environment
from test_cli import RUN_S, bad, good

from snapd.cli.completion import VARIABLE
from snapd.cli.main import COMMANDS

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def snapd_in_path(tmp_path: Path) -> str:
    """A PATH in which ``snapd`` is this source."""
    program = tmp_path / "snapd"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m snapd.cli.main "$@"\n')
    program.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


@pytest.fixture
def complete(snapd_in_path: str) -> Callable[..., list[str]]:
    """What bash offers for the last of some words, by the script and nothing else."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")

    def ask(*words: str) -> list[str]:
        # compopt works only inside a completion that readline has begun.
        script = (
            'compopt() { :; }; source <(snapd completion bash); COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
            '_snapd_completion snapd; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            [bash, "-c", script, "bash", *words],
            env=clean_environment() | {"PATH": snapd_in_path},
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=True,
        )
        assert done.stderr == ""
        return done.stdout.split()

    return ask


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_asks_the_snapd_in_path_and_needs_no_shell_to_be_printed(shell: str) -> None:
    script = good("completion", shell, PATH="/nonexistent")
    assert f"{VARIABLE}={shell}_complete" in script and "%(" not in script
    assert script.endswith("\n") and not script.endswith("\n\n")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_valid_for_its_shell(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell}")
    script = tmp_path / "script"
    script.write_text(good("completion", shell))
    subprocess.run([program, "-n", str(script)], check=True, timeout=RUN_S)


def test_commands_are_completed(complete: Callable[..., list[str]]) -> None:
    assert complete("snapd", "") == list(COMMANDS)
    assert complete("snapd", "dr") == ["drain"]


def test_options_and_their_values_are_completed(complete: Callable[..., list[str]]) -> None:
    assert complete("snapd", "drain", "--w") == ["--wait"]
    assert complete("snapd", "completion", "") == list(SHELLS)
    assert complete("snapd", "serve", "--log-format", "c") == ["console"]


def test_another_shell_is_refused() -> None:
    assert "'bash', 'zsh', 'fish'" in bad(2, "completion", "csh")
    bad(2, "completion")

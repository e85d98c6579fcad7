"""Everything that needs a GPU, in one go: tests, doctor, Mooncake between two processes, benchmarks.

Run it where torch, Triton, pytest and a CUDA build of Mooncake are installed; it needs no network and takes
a few minutes. A step skips what it cannot run, and says why. Exit status 1: a step failed.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import click
import torch

_ROOT: Final = Path(__file__).parents[1]
_TAIL_LINES: Final = 40
_SNAPD: Final = ("-m", "snapd.cli.main")
# Without the project's settings, which are for plugins that a GPU machine need not have.
_PYTEST: Final = (
    "-m", "pytest", "-q", "-ra", "--durations=10", "-W", "ignore::pytest.PytestUnknownMarkWarning",
    "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".",
)  # fmt: skip
# Whoever looks at a GPU's free memory is alone; the others are run at once, a file a process.
_ALONE: Final = (*_PYTEST, "-m", "alone", "tests/gpu")
_TOGETHER: Final = (*_PYTEST, "-m", "not alone")
_ALL_SKIPPED: Final = 5
# What is run, by name: arguments for Python. What prints JSON has it on its last line.
STEPS: Final[dict[str, tuple[str, ...]]] = {
    "tests": (),
    "doctor": (*_SNAPD, "doctor", "--device", "cuda:0", "--json"),
    "mooncake": (
        "tools/check_mooncake.py",
        "--protocol",
        "nvlink_intra",
        "--bytes",
        "1GiB",
        "--rounds",
        "3",
        "--json",
    ),
    # What NVLink was seen to carry between two GPUs.
    "copies and pushes": ("tools/bench_gpu.py", "--link", "395", "--json"),
}
# What may run beside tests, and is waiting for processes to start most of the time.
_BESIDE: Final = ("doctor", "mooncake")
# What is shown of a benchmark's object.
FIGURES: Final = (
    "ingest_over_memcpy", "gather_over_memcpy", "push_over_raw", "move_over_raw", "forward_slowdown",
    "daemon_gpu_bytes",
)  # fmt: skip


def run_steps(names: Sequence[str], timeout_s: float) -> dict[str, dict[str, Any]]:
    """Run steps in processes of their own, what may be beside others first and at once.

    Returns:
        For each its ``ok``, ``seconds``, ``summary`` in one line, ``output`` (its last lines) if it failed,
        and ``result`` if it printed an object.
    """
    files = sorted(path.relative_to(_ROOT) for path in (_ROOT / "tests" / "gpu").glob("test_*.py"))
    is_testing = "tests" in names
    if is_testing:
        click.echo("tests ...", err=True)
    with ThreadPoolExecutor(len(files) + len(_BESIDE)) as pool:
        beside = {name: pool.submit(_run_step, name, timeout_s) for name in names if name in _BESIDE}
        together = [
            pool.submit(_run_tests, (*_TOGETHER, str(path)), timeout_s) for path in files if is_testing
        ]
    steps: dict[str, dict[str, Any]] = {}
    for name in names:
        if name == "tests":
            runs = [run.result() for run in together]
            # Those that are alone wait for what is beside the others, which is not their time.
            taken_s = max(run["seconds"] for run in runs)
            runs.append(_run_tests(_ALONE, max(timeout_s - taken_s, 1.0)))
            steps[name] = _tests_step(runs)
            steps[name]["seconds"] = round(taken_s + runs[-1]["seconds"], 1)
        else:
            steps[name] = beside[name].result() if name in beside else _run_step(name, timeout_s)
        steps[name]["summary"] = _summary(steps[name])
    return steps


def _run_step(name: str, timeout_s: float) -> dict[str, Any]:
    click.echo(f"{name} ...", err=True)
    step = _run(STEPS[name], timeout_s)
    if not step["ok"]:
        click.echo(step["output"], err=True)
    return step


def _run_tests(arguments: Sequence[str], timeout_s: float) -> dict[str, Any]:
    run = _run(arguments, timeout_s)
    # A file may have none that are run together.
    run["ok"] = run["code"] in (0, _ALL_SKIPPED)
    if not run["ok"]:
        click.echo(run["output"], err=True)
    return run


def _tests_step(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for run in runs:
        lines = run["stdout"].splitlines()
        found = re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1] if lines else "")
        counts.update({what: int(count) for count, what in found})
    step: dict[str, Any] = {"result": dict(counts)}
    # Nothing was tested where every test is skipped.
    step["ok"] = all(run["ok"] for run in runs) and bool(counts["passed"])
    step["output"] = "\n".join(run["output"] for run in runs if not run["ok"])
    return step


def _run(arguments: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run Python in a process of its own."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
        "MC_LOG_LEVEL": "ERROR",
    }
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        code, stdout, stderr = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        code, stdout, stderr = (
            -1,
            _text(error.stdout),
            f"{_text(error.stderr)}\nended after {timeout_s:.0f} s",
        )
    step: dict[str, Any] = {"ok": code == 0, "code": code, "stdout": stdout}
    step["seconds"] = round(time.monotonic() - began_s, 1)
    lines = [line for line in stdout.splitlines() if line.strip()]
    with contextlib.suppress(ValueError, IndexError):
        step["result"] = json.loads(lines[-1])
    step["output"] = "\n".join([*stdout.splitlines(), *stderr.splitlines()][-_TAIL_LINES:])
    return step


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def _summary(step: dict[str, Any]) -> str:
    result = step.get("result")
    if not isinstance(result, dict):
        return ""
    figures = {name: result[name] for name in FIGURES if name in result} or {
        name: value for name, value in result.items() if isinstance(value, int | float | str)
    }
    return ", ".join(f"{name} {value}" for name, value in figures.items())


@click.command()
@click.option("--only", type=click.Choice(list(STEPS)), multiple=True, help="Run these steps only.")
@click.option("--timeout", "timeout_s", default=240.0, show_default=True, help="Seconds a step may take.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end.")
def main(only: tuple[str, ...], timeout_s: float, as_json: bool) -> None:
    """Run all that needs a GPU: tests/gpu, doctor, Mooncake over NVLink, and the benchmarks."""
    if not torch.cuda.is_available():
        raise click.ClickException("there is no GPU that torch can use")
    steps = run_steps([name for name in STEPS if name in (only or STEPS)], timeout_s)
    for step in steps.values():
        for inner in ("code", "stdout", *(["output"] if step["ok"] else [])):
            step.pop(inner, None)
    failed = [name for name, step in steps.items() if not step["ok"]]
    if as_json:
        click.echo(json.dumps({"ok": not failed, "steps": steps}))
    else:
        for name, step in steps.items():
            verdict = "ok" if step["ok"] else "FAILED"
            click.echo(f"{name:18} {verdict:6} {step['seconds']:6.1f} s  {step['summary']}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

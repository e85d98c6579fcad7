"""Coverage-guided fuzzing of what reads others' bytes (atheris), and the small corpus to start from.

python tools/fuzz.py --seconds 60              # every target for a minute
python tools/fuzz.py requests --runs 100000
python tools/fuzz.py requests FILE             # once more, the input that was found
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import click

CORPUS: Final = Path(__file__).parent / "fuzz_corpus"
NAMES: Final = ("requests", "answers", "log-lines", "log-files", "configuration")
INPUT_BYTES_MAX: Final = 4_096
EXIT_FOUND: Final = 1


@click.command(help=__doc__)
@click.argument("target", type=click.Choice(NAMES), required=False)
@click.argument("found", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
@click.option("--seconds", type=click.IntRange(1), help="How long, for each target.")
@click.option("--runs", type=click.IntRange(1), help="How many inputs, for each target.")
@click.option("--seed", type=click.IntRange(1), default=1, show_default=True, help="Of the fuzzer.")
@click.option("--inside", is_flag=True, hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    target: str | None,
    found: Path | None,
    seconds: int | None,
    runs: int | None,
    seed: int,
    inside: bool,
    as_json: bool,
) -> None:
    """Run the fuzzer, one target after the other, each in a process of its own: it ends with the process."""
    if found is not None and target is not None:
        from tools.fuzz_targets import TARGETS

        TARGETS[target](found.read_bytes())
        click.echo(f"{found}: nothing is wrong any more")
        return
    if inside and target is not None:
        _fuzz(target, seconds, runs, seed)
    if seconds is None and runs is None:
        seconds = 60
    results: dict[str, Any] = {}
    for name in [target] if target else NAMES:
        results[name] = _in_a_process(name, seconds, runs, seed)
        if not as_json:
            click.echo(f"{name:14} {results[name]['runs']:>9,} inputs  {results[name]['found'] or 'ok'}")
    if as_json:
        click.echo(json.dumps(results))
    if any(result["found"] for result in results.values()):
        sys.exit(EXIT_FOUND)


def _in_a_process(name: str, seconds: int | None, runs: int | None, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.fuzz", name, "--inside", "--seed", str(seed)]
    command += ["--seconds", str(seconds)] if seconds else []
    command += ["--runs", str(runs)] if runs else []
    with tempfile.TemporaryFile("w+") as output:
        status = subprocess.run(
            command, stderr=output, stdout=output, cwd=Path(__file__).parents[1]
        ).returncode
        output.seek(0)
        lines = output.read().splitlines()
    done = [line.split()[1] for line in lines if line.startswith("Done ")]
    if status == 0 and done:
        return {"runs": int(done[-1]), "found": ""}
    # The exception, the input, and where it was written to.
    said = [
        line for line in lines if line.startswith(("Test unit written", " === Uncaught")) or "Error" in line
    ]
    sys.stderr.write("\n".join(lines[-60:]) + "\n")
    return {"runs": 0, "found": said[-1] if said else f"the fuzzer ended with status {status}"}


def _fuzz(name: str, seconds: int | None, runs: int | None, seed: int) -> None:
    """Never returns."""
    try:
        import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise click.ClickException("atheris is not installed: pip install atheris") from None
    with atheris.instrument_imports(include=["snapd"]):
        from tools.fuzz_targets import TARGETS
    with tempfile.TemporaryDirectory(prefix="snapd-fuzz-") as grown:
        # What it learns stays out of the tree; a good input is taken into the corpus by hand.
        arguments = [f"-seed={seed}", f"-max_len={INPUT_BYTES_MAX}", f"-artifact_prefix={Path.cwd()}/fuzz-"]
        arguments += [f"-max_total_time={seconds}"] if seconds else []
        arguments += [f"-runs={runs}"] if runs else []
        atheris.Setup([sys.argv[0], *arguments, grown, str(CORPUS / name)], TARGETS[name])
        atheris.Fuzz()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()

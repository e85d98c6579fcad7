"""``snapd demo``: a daemon, D processes and P ranks on this machine."""

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from snapd.units import MIB, format_bytes, parse_size_bytes

if TYPE_CHECKING:
    from snapd.demo.stage import Transport

EXIT_FAULT: Final = 1
DECODERS_MAX: Final = 32
TOTAL_BYTES_MIN: Final = MIB
# For tests: change a byte behind everybody's back; do not verify, so that only the comparison is left.
FAULT_VARIABLE: Final = "SNAPD_DEMO_FAULT"
_FLIPPED_PUSH: Final = 4


class _Size(click.ParamType[int]):
    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            size_bytes = parse_size_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if size_bytes < TOTAL_BYTES_MIN:
            self.fail(f"{value} is too little: {format_bytes(TOTAL_BYTES_MIN)} at least", param, ctx)
        return size_bytes


@click.command(
    epilog="""\b
Examples:
  snapd demo
  snapd demo --chaos --seed 7
  snapd demo --transport mooncake
  snapd demo --total 8GiB --decoders 4
  snapd demo --trace requests.jsonl --json | jq .ok_rate

\b
Exit status: 0 everything holds; 1 a byte differs, an attempt has no outcome, something leaked, or the
demo could not run; 2 wrong usage; 130 interrupted."""
)
@click.option(
    "--trace",
    "trace_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Requests to play: JSON lines with timestamp, input_length, output_length, hash_ids.",
)
@click.option("--total", type=_Size(), default="2GiB", show_default=True, help="KV bytes to move at least.")
@click.option(
    "--decoders",
    type=click.IntRange(2, DECODERS_MAX),
    default=2,
    show_default=True,
    help="D processes.",
)
@click.option(
    "--transport",
    type=click.Choice(["shm", "mooncake"]),
    default="shm",
    show_default=True,
    help="How bytes travel from D: shared memory, or Mooncake over TCP on loopback (an extra package).",
)
@click.option("--chaos", is_flag=True, help="Kill D processes in the middle of pushes, and more.")
@click.option(
    "--finalize-retries",
    type=click.IntRange(0, 100_000),
    default=200,
    show_default=True,
    help="How often a rank that gets no slots tries again; 0: it gives the snapshot up.",
)
@click.option(
    "--speed", type=click.FloatRange(0.001, 1e6), help="Trace seconds in a second; else one that fits."
)
@click.option(
    "--seed", type=click.IntRange(0, 1 << 31), default=1, show_default=True, help="Of all randomness."
)
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path), help="Where the log goes; else a new directory."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout.")
def demo(
    trace_path: Path | None,
    total: int,
    decoders: int,
    transport: "Transport",
    chaos: bool,
    finalize_retries: int,
    speed: float | None,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> int:
    """Play a trace of agent sessions against a daemon, and prove that every byte arrived.

    D processes make random KV and push it; P ranks, busy with work of their own, bring it home. Every session
    that P ingested is compared with D byte for byte. Nothing but the printed directory is left behind.
    """
    import snapd.kv  # noqa: F401 - says what is missing, before anything is started
    from snapd.demo.chaos import STRUCK_PUSHES
    from snapd.demo.logfacts import LogFacts
    from snapd.demo.orchestrator import run_demo
    from snapd.demo.plan import check_memory, make_plan
    from snapd.demo.report import Progress, console_for, show_plan, show_result
    from snapd.demo.stage import Options
    from snapd.demo.trace import default_trace_path, read_trace

    trace_path = trace_path or default_trace_path()
    # Over TCP the end of a D proves nothing, so what it was writing stays in quarantine for its time.
    quarantined = STRUCK_PUSHES if chaos and transport == "mooncake" else 0
    plan = make_plan(
        read_trace(trace_path),
        total_bytes=total,
        decoders=decoders,
        speed=speed,
        quarantined_snapshots=quarantined,
    )
    check_memory(plan, decoders)
    faults = set(os.environ.get(FAULT_VARIABLE, "").split(","))
    options = Options(
        trace_path=trace_path,
        out_dir=_out_dir(out),
        total_bytes=total,
        decoders=decoders,
        transport=transport,
        finalize_retries=finalize_retries,
        chaos=chaos,
        seed=seed,
        speed=speed,
        verify="no-verify" not in faults,
        flip_push=_FLIPPED_PUSH if "flip" in faults else 0,
    )
    console = console_for(sys.stderr if as_json else sys.stdout)
    show_plan(console, options, plan)
    progress = Progress(console)
    try:
        result = run_demo(options, plan, progress.begin, progress.tick)
    finally:
        progress.end()
    show_result(console, result, LogFacts(Path(result.log)))
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(result).decode())
    return 0 if result.is_good else EXIT_FAULT


def _out_dir(out: Path | None) -> Path:
    """Return the directory for log and messages, made if need be.

    Raises:
        UsageError: it cannot be used, or holds a log already.
    """
    from snapd.config import LOG_NAME

    if out is None:
        return Path(tempfile.mkdtemp(prefix="snapd-demo-"))
    out = out.absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        if (out / LOG_NAME).exists():
            raise click.UsageError(f"--out {out} holds a {LOG_NAME} already: choose another directory")
        probe = out / "snapd.toml"
        probe.touch()
    except OSError as error:
        raise click.UsageError(f"--out {out} cannot be used: {error.strerror}") from None
    return out

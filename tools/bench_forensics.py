"""Time ``snapd forensics`` on a log of a million lines; wanted: below 20 s and 1 GiB.

The floor is what no reader can do without: every line read and decoded by msgspec, in the same run. The
command runs in a process of its own, so that its memory is its own.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import click
import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))
from snapd.units import KIB, MIB
from tools.make_log import make_log

SECONDS_MAX: Final = 20.0
RSS_BYTES_MAX: Final = 1 << 30
_MEASURED: Final = """
import resource, sys
from snapd.cli.main import run
status = run(["forensics", *sys.argv[1:]])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_maxrss, used.ru_utime + used.ru_stime, file=sys.stderr)
sys.exit(status)
"""


def floor_s(paths: list[Path]) -> tuple[int, float]:
    """Return how many lines there are, and how long it takes to read and decode them and nothing more."""
    decode = msgspec.json.Decoder().decode
    lines = 0
    started_s = time.process_time()
    for path in paths:
        with path.open("rb") as file:
            for raw in file:
                decode(raw)
                lines += 1
    return lines, time.process_time() - started_s


def measure(arguments: list[str]) -> dict[str, Any]:
    """Run the command, and return what it took."""
    started_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *arguments], capture_output=True, text=True, check=False
    )
    wall_s = time.perf_counter() - started_s
    if done.returncode:
        raise click.ClickException(f"the command failed:\n{done.stderr}")
    rss, cpu_s = done.stderr.split()[-2:]
    return {"seconds": wall_s, "cpu_s": float(cpu_s), "peak_rss_bytes": int(rss) * KIB}


def report(directory: Path) -> dict[str, Any]:
    """Measure the report and the proof of a log, and the floor."""
    lines, decode_s = floor_s(sorted(directory.iterdir()))
    figures: dict[str, Any] = {
        "lines": lines,
        "bytes": sum(path.stat().st_size for path in directory.iterdir()),
        "floor": "msgspec decode of every line",
        "floor_cpu_s": decode_s,
        "floor_lines_per_s": lines / decode_s,
        "load_average": os.getloadavg()[0],
    }
    for name, more in (("report", []), ("prove", ["--prove"])):
        figures[name] = measure([str(directory), *more])
        figures[name]["lines_per_s"] = lines / figures[name]["seconds"]
        figures[name]["cpu_by_floor"] = figures[name]["cpu_s"] / decode_s
    figures["within_wanted"] = (
        figures["report"]["seconds"] < SECONDS_MAX and figures["report"]["peak_rss_bytes"] < RSS_BYTES_MAX
    )
    return figures


@click.command()
@click.option("--lines", default=1_000_000, show_default=True, help="Lines of the log.")
@click.option("--seed", default=1, show_default=True, help="Of the log.")
@click.option("--log", "log_path", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="A directory with a log, instead of making one.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(lines: int, seed: int, log_path: Path | None, as_json: bool) -> None:
    """Make a log, and time the report and the proof of it."""
    with tempfile.TemporaryDirectory(prefix="snapd-bench-") as scratch:
        directory = log_path or Path(scratch) / "log"
        if log_path is None:
            make_log(directory / "d-to-p-sync.jsonl", lines, seed=seed, rotate_bytes=64 * MIB)
        figures = report(directory)
    if as_json:
        click.echo(json.dumps(figures))
        return
    click.echo(f"{figures['lines']:,} lines, {figures['bytes'] / MIB:,.0f} MiB")
    click.echo(f"floor: {figures['floor']}, {figures['floor_cpu_s']:.2f} s of CPU")
    for name in ("report", "prove"):
        found = figures[name]
        click.echo(
            f"{name:7} {found['seconds']:6.2f} s, {found['cpu_s']:6.2f} s of CPU "
            f"({found['cpu_by_floor']:.1f}x the floor), {found['peak_rss_bytes'] / MIB:,.0f} MiB, "
            f"{found['lines_per_s']:,.0f} lines/s"
        )
    wanted = f"below {SECONDS_MAX:.0f} s and {RSS_BYTES_MAX / MIB:,.0f} MiB"
    click.echo(f"wanted of the report: {wanted}: {'yes' if figures['within_wanted'] else 'NO'}")


if __name__ == "__main__":
    main()

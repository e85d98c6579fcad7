"""An hour of control traffic in minutes: millions of lives beside 100,000 live sessions; is it flat?

    python tools/soak.py                                  # 3 million lives, about ten minutes
    python tools/soak.py --lives 100000 --live 10000 --json
    python tools/soak.py --plot docs/soak.png

It prints memory, file descriptors and latency of the first and the last quarter after warming up, and their
ratios. Status 1: memory or descriptors grew.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import click
import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from snapd import wire as w
from snapd.layout import snapshot_bytes
from snapd.units import MIB, NS_PER_S, format_bytes
from tools import control_load as load

WINDOWS: Final = 60
PINGS: Final = 200
GROWTH_MAX: Final = 1.02
EXIT_GREW: Final = 1
# An hour of a busy host: so many lives a second of it are what is played.
HOUR_S: Final = 3_600


class Window(msgspec.Struct):
    """What was seen in one part of the run.

    Attributes:
        cpu_us_a_life: CPU time of the daemon and of its log's thread; other programs change it little.
        p50_us, p99_us: of a lookup, by the clock, while lives go on.
    """

    lives: int
    at_s: float
    rss_bytes: int
    fds: int
    cpu_us_a_life: float
    p50_us: float
    p99_us: float


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process, the arena's left out: it is not touched here."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    anonymous = next(line for line in lines if line.startswith("RssAnon"))
    return int(anonymous.split()[1]) * 1024


def watch_latency(ask: load.Wire, prints: str, samples: int) -> list[float]:
    """Return the times of lookups, in microseconds."""
    times_us = []
    for number in range(samples):
        started_ns = time.perf_counter_ns()
        ask.one(w.LookupReq(id=1, layout_fingerprint=prints, session_id=f"none-{number}"), w.LookupRep)
        times_us.append((time.perf_counter_ns() - started_ns) / 1_000)
    return times_us


def soak(directory: Path, lives: int, live: int, show: Any) -> dict[str, Any]:
    """Run it and return all that was seen."""
    size_bytes = 2 * (live + 4_096) * snapshot_bytes(load.LAYOUT, 16)
    settings = {
        "size": str(-(-size_bytes // MIB) * MIB), "sessions_max": str(2 * live + 10_000),
        # Full within the first tenth, as they are in a daemon that has run for a while.
        "session_history_max": str(min(100_000, lives // 20)),
        "ended_history_max": str(min(10_000, lives // 20)),
        "ready_ttl_ms": str(24 * HOUR_S * 1_000), "log_rotate_bytes": str(64 * MIB), "log_rotate_keep": "2",
    }  # fmt: skip
    with (
        load.Daemon(directory, settings=settings) as daemon,
        load.pinned_apart(daemon.pid),
        contextlib.closing(load.Lives(daemon.socket_path)) as lives_load,
    ):
        lives_load.run(2_000)
        empty_bytes = rss_bytes(daemon.pid)
        lives_load.fill(live)
        filled_bytes = rss_bytes(daemon.pid)
        ask = load.Wire(daemon.socket_path)
        ask.ask(w.HelloReq(id=1, client="soak"))
        windows: list[Window] = []
        done, started_ns = 0, time.monotonic_ns()
        for _ in range(WINDOWS):
            cost = load.time_lives(daemon, lives_load, -(-lives // WINDOWS))
            done += cost.lives
            times_us = sorted(watch_latency(ask, lives_load.prints, PINGS))
            windows.append(
                Window(
                    lives=done,
                    at_s=(time.monotonic_ns() - started_ns) / NS_PER_S,
                    rss_bytes=rss_bytes(daemon.pid),
                    fds=len(os.listdir(f"/proc/{daemon.pid}/fd")),  # noqa: PTH208
                    cpu_us_a_life=cost.daemon_cpu_s / cost.lives * 1e6,
                    p50_us=statistics.median(times_us),
                    p99_us=times_us[int(0.99 * len(times_us))],
                )
            )
            show(windows[-1])
        stats = ask.one(w.StatsReq(id=1), w.StatsRep)
        ask.close()
    first, last = _quarters(windows)
    return {
        "lives": done,
        "seconds": round(windows[-1].at_s, 1),
        "live_sessions": live,
        "empty_bytes": empty_bytes,
        "filled_bytes": filled_bytes,
        "bytes_a_live_session": round((filled_bytes - empty_bytes) / live) if live else 0,
        "log_dropped": stats.log.dropped,
        "log_rotations": stats.log.rotations,
        "memory_last_over_first": _ratio(first, last, "rss_bytes"),
        "fds_last_over_first": _ratio(first, last, "fds"),
        "cpu_a_life_last_over_first": _ratio(first, last, "cpu_us_a_life"),
        "p50_last_over_first": _ratio(first, last, "p50_us"),
        "p99_last_over_first": _ratio(first, last, "p99_us"),
        "windows": [msgspec.to_builtins(window) for window in windows],
    }


def _quarters(windows: list[Window]) -> tuple[list[Window], list[Window]]:
    """Return the first and the last quarter after the first tenth, in which everything warms up."""
    warm = windows[len(windows) // 10 :]
    count = len(warm) // 4
    return warm[:count], warm[-count:]


def _ratio(first: list[Window], last: list[Window], name: str) -> float:
    before, after = (float(statistics.median(getattr(one, name) for one in part)) for part in (first, last))
    return round(after / before, 3)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw memory and latency against lives."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    lives = [window["lives"] / 1e6 for window in result["windows"]]
    figure, panels = plt.subplots(3, 1, sharex=True, figsize=(8, 7), layout="constrained")
    panels[0].plot(lives, [window["rss_bytes"] / MIB for window in result["windows"]])
    panels[0].set_ylabel("memory, MiB")
    panels[1].plot(lives, [window["cpu_us_a_life"] for window in result["windows"]])
    panels[1].set_ylabel("CPU a life, us")
    panels[2].plot(lives, [window["p50_us"] for window in result["windows"]], label="p50")
    panels[2].plot(lives, [window["p99_us"] for window in result["windows"]], label="p99")
    panels[2].set_yscale("log")
    panels[2].set_ylabel("lookup, us")
    panels[2].set_xlabel(f"million lives, beside {result['live_sessions']:,} live sessions")
    panels[2].legend()
    for panel in panels[:2]:
        panel.set_ylim(bottom=0)
    figure.suptitle(f"{result['lives']:,} lives in {result['seconds']:.0f} s")
    figure.savefig(path, dpi=110)


@click.command(help=__doc__)
@click.option("--lives", type=click.IntRange(1_000), default=3_000_000, show_default=True)
@click.option(
    "--live", type=click.IntRange(0), default=100_000, show_default=True, help="READY all the time."
)
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Write a PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(lives: int, live: int, plot_path: Path | None, as_json: bool) -> None:
    """Run it in a new directory."""

    def show(window: Window) -> None:
        if not sys.stderr.isatty():
            return
        text = (
            f"{window.lives:,} lives, {format_bytes(window.rss_bytes)}, {window.cpu_us_a_life:.0f} us a life"
        )
        click.echo(f"\r{text:60}", nl=False, err=True)

    with tempfile.TemporaryDirectory(prefix="snapd-soak-") as directory:
        result = soak(Path(directory), lives, live, show)
    if plot_path is not None:
        plot(result, plot_path)
    if as_json:
        click.echo(json.dumps(result))
    else:
        for name, value in result.items():
            if name != "windows":
                click.echo(f"{name:28} {value:,}")
    if max(result["memory_last_over_first"], result["fds_last_over_first"]) > GROWTH_MAX:
        click.echo("memory or file descriptors grew", err=True)
        sys.exit(EXIT_GREW)


if __name__ == "__main__":
    main()

"""What people see of a replay: tables in a terminal, and a curve in a file."""

from pathlib import Path
from typing import Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from snapd.errors import ConfigError, ExtraMissing, Reason
from snapd.replay.model import Model
from snapd.replay.result import Result, RunResult, SweepPoint, SweepResult, TraceFacts, shown_gib
from snapd.units import format_bytes, format_ms

_COLUMNS: Final = 110


def console_for(stream: TextIO) -> Console:
    """Return a console that writes to *stream*, 110 columns wide unless it is a terminal."""
    return Console(file=stream, width=None if stream.isatty() else _COLUMNS, highlight=False)


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def _millions(tokens: int) -> str:
    return f"{tokens / 1e6:.3f} M" if tokens >= 100_000 else f"{tokens:,}"


def show_head(console: Console, trace: TraceFacts, model: Model) -> None:
    """Say what was replayed, on which machines."""
    _say(
        console,
        f"{trace.name}: {trace.requests:,} requests in {format_ms(trace.duration_s * 1e3)}, "
        f"{_millions(trace.input_tokens)} prompt and {_millions(trace.output_tokens)} answer tokens",
        "bold",
    )
    _say(
        console,
        f"{trace.sessions:,} sessions; {trace.next_turns:,} next turns, {trace.branches:,} of them branches "
        f"and {trace.too_early:,} too early; they could reuse {_millions(trace.reusable_tokens)} tokens, "
        f"{_millions(trace.answer_tokens)} of them answers",
    )
    for line in trace.bad_lines:
        _say(console, f"left out: {line}", "yellow")
    _say(
        console,
        f"P: {model.prefill_tflops:,.0f} TFLOP/s, a kv_pool of {model.kv_pool_tokens:,} tokens of "
        f"{model.token_bytes:,} bytes, steps of {model.chunk_tokens:,}; D: {model.tpot_ms:g} ms a token, "
        f"{model.decode_pool_tokens:,} tokens; link {model.link_gb_per_s:g} GB/s",
    )
    cost = "from P's pool" if model.buffer_in == "device" else "in host memory"
    _say(
        console,
        f"buffer {cost}; D sends {model.send}, P ingests {model.ingest}, policy {model.policy}; direct "
        f"sends {model.direct_send}, takes slots that are {model.direct_alloc}; seed {model.seed}",
    )
    console.print()


def show_result(console: Console, result: Result) -> None:
    """Write a replay's tables."""
    show_head(console, result.trace, result.model)
    runs = {"none": result.none, "direct": result.direct, "snapshot": result.snapshot}
    table = _table("", *(f">{name}" for name in runs))
    for label, cells in _rows(list(runs.values())):
        table.add_row(label, *cells)
    console.print(table)
    for name, run in runs.items():
        if run.reasons:
            _say(console, f"{name}: " + ", ".join(f"{count:,} {why}" for why, count in run.reasons.items()))
    console.print()
    _say(console, _by_syncs(result))
    _say(console, _by_policy(result.snapshot, result.model.buffer_bytes))
    size = format_bytes(result.model.buffer_bytes)
    _say(
        console,
        f"The best that any eviction policy and ingest time could do with {size}: "
        f"{_millions(result.optimal_reused_tokens)} tokens reused; snapshot reaches {result.of_optimal:.1%}, "
        f"and {result.of_optimal_from_sync:.1%} of what P would not have had anyway.",
    )
    _say(
        console,
        f"If P's pool knew the future as well: {_millions(result.omniscient_reused_tokens)}; snapshot "
        f"reaches {result.of_omniscient:.1%}.",
    )


def _by_syncs(result: Result) -> str:
    """Return what snapd brought against none, and what it cost P, in figures of the runs."""
    none, run = result.none, result.snapshot
    more = run.reused_tokens - none.reused_tokens
    said = f"snapshot reuses {_millions(abs(more))} tokens {'more' if more >= 0 else 'less'} than none: "
    said += f"syncs bring {_millions(run.reused_from_sync_tokens)}"
    costs = []
    if run.kv_pool_tokens < none.kv_pool_tokens:
        taken = none.kv_pool_tokens - run.kv_pool_tokens
        costs.append(f"the buffer takes {_millions(taken)} of P's {_millions(none.kv_pool_tokens)} slots")
    evicted = run.evicted_tokens - none.evicted_tokens
    if evicted > 0:
        costs.append(f"P evicts {_millions(evicted)} tokens more to make room")
    return f"{said}{', but ' if more < 0 else '; '}{' and '.join(costs)}." if costs else f"{said}."


def _by_policy(run: RunResult, size_bytes: int) -> str:
    """Return whether the policy had anything to decide."""
    evicted = run.reasons.get(Reason.EVICTED, 0)
    if evicted:
        return f"The policy evicted {evicted:,} snapshots from the buffer."
    peak = f"{format_bytes(run.buffer_peak_bytes)} of {format_bytes(size_bytes)}"
    return f"Nothing was evicted from the buffer (at most {peak} in use): any policy gives this run."


def _by_size(result: SweepResult) -> str:
    """Return which sizes differ, and in what they cannot."""
    groups: list[list[SweepPoint]] = []
    for point in result.points:
        if groups and _told(groups[-1][0]) == _told(point):
            groups[-1].append(point)
        else:
            groups.append([point])
    same = [
        f"{format_bytes(group[0].buffer_bytes)} to {format_bytes(group[-1].buffer_bytes)}"
        for group in groups
        if len(group) > 1
    ]
    said = ""
    if len(result.points) > 1:
        said = f"These sizes give the same: {', '.join(same)}." if same else "Each size gives another result."
    peak_bytes = max(point.snapshot.buffer_peak_bytes for point in result.points)
    if peak_bytes < result.points[0].buffer_bytes:
        said += f" At most {format_bytes(peak_bytes)} of the buffer are in use"
        pools = {point.snapshot.kv_pool_tokens for point in result.points}
        said += ": what differs is P's pool, which it is taken from." if len(pools) > 1 else "."
    return said.strip()


def _told(point: SweepPoint) -> tuple[int, ...]:
    run = point.snapshot
    return run.attempts, run.ok, run.fitting, run.reused_tokens, run.reused_from_sync_tokens


def _rows(runs: list[RunResult]) -> list[tuple[str, list[str]]]:
    def row(label: str, cells: list[str]) -> tuple[str, list[str]]:
        return label, cells

    return [
        row("attempts", [f"{run.attempts:,}" for run in runs]),
        row("ok", [f"{run.ok:,}" for run in runs]),
        row("ok rate", [f"{run.ok_rate:.1%}" if run.attempts else "-" for run in runs]),
        row("  of those that fit", [f"{run.ok_rate_fitting:.1%}" if run.fitting else "-" for run in runs]),
        row("tokens reused at next turns", [_millions(run.reused_tokens) for run in runs]),
        row("  thanks to a sync", [_millions(run.reused_from_sync_tokens) for run in runs]),
        row("tokens computed again", [_millions(run.recomputed_tokens) for run in runs]),
        row("sent from D to P", [format_bytes(run.sent_bytes) for run in runs]),
        row("prefill time saved", [format_ms(run.ttft_saved_ms) for run in runs]),
        row("TTFT of next turns, p50", [format_ms(run.ttft_next_ms.p50_ms) for run in runs]),
        row("  p99", [format_ms(run.ttft_next_ms.p99_ms) for run in runs]),
        row("others wait longer, mean", [format_ms(run.added_wait_ms.mean_ms) for run in runs]),
        row("  p99", [format_ms(run.added_wait_ms.p99_ms) for run in runs]),
        row("P copies", [format_ms(run.copy_ms) for run in runs]),
        row("P's memory takes writes", [format_ms(run.memory_ms) for run in runs]),
        row("P is busy", [f"{run.p_busy_share:.1%}" for run in runs]),
    ]


def show_sweep(console: Console, result: SweepResult) -> None:
    """Write a sweep's table."""
    show_head(console, result.trace, result.model)
    table = _table(
        ">buffer",
        ">ok rate",
        ">of fitting",
        ">reused",
        ">by syncs",
        ">optimum",
        ">reached",
        ">peak",
        ">p99 wait",
    )
    for point in result.points:
        run = point.snapshot
        table.add_row(
            format_bytes(point.buffer_bytes),
            f"{run.ok_rate:.1%}",
            f"{run.ok_rate_fitting:.1%}",
            _millions(run.reused_tokens),
            _millions(run.reused_from_sync_tokens),
            _millions(point.optimal_reused_tokens),
            f"{point.of_optimal:.1%}",
            format_bytes(run.buffer_peak_bytes),
            format_ms(run.added_wait_ms.p99_ms),
        )
    console.print(table)
    _say(
        console,
        f"without any sync {_millions(result.none.reused_tokens)} tokens are reused, with direct writes "
        f"{_millions(result.direct.reused_tokens)} (ok rate {result.direct.ok_rate:.1%})",
    )
    if said := _by_size(result):
        _say(console, said)


def require_matplotlib() -> None:
    """Say early that there is nothing to draw with.

    Raises:
        ExtraMissing: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ExtraMissing("--plot needs matplotlib: pip install 'kv-snapd[forensics]'") from None


def plot_sweep(result: SweepResult, path: Path) -> None:
    """Draw ok rate and reused tokens by size of the buffer.

    Raises:
        ExtraMissing: matplotlib is not installed.
        ConfigError: the file cannot be written, or its name says no format that can be drawn.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    sizes_gib = [shown_gib(point.buffer_bytes) for point in result.points]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    rate, reuse = figure.subplots(1, 2)
    rate.plot(sizes_gib, [point.snapshot.ok_rate for point in result.points], "o-", label="snapshot")
    rate.axhline(result.direct.ok_rate, color="tab:red", linestyle="--", label="direct")
    rate.set_ylim(0, 1.05)
    rate.set_ylabel("ok rate")
    reused = [point.snapshot.reused_tokens / 1e6 for point in result.points]
    optimum = [point.optimal_reused_tokens / 1e6 for point in result.points]
    reuse.plot(sizes_gib, reused, "o-", label="snapshot")
    reuse.plot(sizes_gib, optimum, "s:", color="tab:green", label="optimum")
    reuse.axhline(result.none.reused_tokens / 1e6, color="tab:gray", linestyle="--", label="without a sync")
    reuse.set_ylim(bottom=0)
    reuse.set_ylabel("million tokens reused at next turns")
    for axes in (rate, reuse):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes_gib, [f"{size:g}" for size in sizes_gib])
        axes.set_xlabel("buffer, GiB")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    model = result.model
    figure.suptitle(f"{Path(result.trace.name).name}: {model.send}, {model.ingest}, {model.policy}")
    try:
        figure.savefig(path, dpi=120, metadata={"Software": None} if path.suffix == ".png" else None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None

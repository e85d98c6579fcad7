"""``snapd replay``: a trace through models of P and D, with direct writes and with snapd."""

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from snapd.cli.common import TIMEOUT_S_DEFAULT, DaemonChoice, json_option, print_json
from snapd.core.eviction import POLICIES
from snapd.errors import ConfigError

if TYPE_CHECKING:
    from rich.status import Status

    from snapd.replay.model import Model
    from snapd.replay.trace import Trace

_PROCESSES_MAX: Final = 64
_SENDS: Final = ["suffix", "hint", "session"]


@click.command(
    epilog="""\b
Examples:
  snapd replay conversation_trace.jsonl
  snapd replay conversation_trace.jsonl --json | jq .snapshot.ok_rate
  snapd replay conversation_trace.jsonl --ingest on-demand --policy gdsf
  snapd replay conversation_trace.jsonl --sweep 2GiB..64GiB --buffer-in host --plot curve.png
  snapd replay conversation_trace.jsonl --log replay.jsonl
  zcat trace.jsonl.gz | snapd replay - --limit 2000 --set tpot_ms=20
  snapd replay conversation_trace.jsonl --live --limit 300 --speed-up 5

\b
The model and its figures are in docs/replay.md; --json prints them too.
Nothing but the handles' seed is random: the same trace and options give the same result.
Exit status: 0 done, 1 the trace or the log cannot be used, 2 wrong usage or model,
130 interrupted."""
)
@click.argument("trace", metavar="TRACE")
@click.option("--buffer", metavar="SIZE", help="The buffer; 8GiB by default.")
@click.option("--buffer-in", type=click.Choice(["device", "host"]), help="Taken from P's kv_pool, or not.")
@click.option("--policy", type=click.Choice([*POLICIES, "clairvoyant"]), help="What the buffer evicts first.")
@click.option(
    "--ingest", type=click.Choice(["eager", "on-demand", "hybrid"]), help="When P takes a snapshot."
)
@click.option("--send", type=click.Choice(_SENDS), help="What D sends to the buffer after a turn.")
@click.option(
    "--direct-send", type=click.Choice(["session", "suffix"]), help="What D writes in the direct run."
)
@click.option("--direct-alloc", type=click.Choice(["free", "evict"]), help="Which slots it may take there.")
@click.option("--kv-pool", "kv_pool_tokens", metavar="TOKENS", type=click.IntRange(1), help="P's kv_pool.")
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="Any other figure of the model; repeatable.",
)
@click.option("--seed", type=click.IntRange(0, 1 << 31), help="Of the handles; nothing else is random.")
@click.option("--limit", metavar="N", type=click.IntRange(1), default=None, help="The first N requests only.")
@click.option(
    "--speed-up", type=click.FloatRange(0.001, 1e6), default=1.0, help="Requests come so much faster."
)
@click.option("--skip-bad-lines", is_flag=True, help="Leave wrong lines out and say which.")
@click.option("--sweep", "sweep_sizes", metavar="SIZES", help="2GiB..64GiB (doubling), or 2GiB,8GiB,24GiB.")
@click.option("--plot", "plot_path", metavar="FILE", type=click.Path(path_type=Path), help="Draw the sweep.")
@click.option(
    "--processes",
    type=click.IntRange(1, _PROCESSES_MAX),
    default=None,
    help="For a sweep; all cores by default.",
)
@click.option(
    "--log", "log_path", metavar="FILE", type=click.Path(path_type=Path), help="Write the event log here."
)
@click.option("--live", is_flag=True, help="Play it against a running daemon, with real bytes and real time.")
@click.option("--socket", metavar="PATH", help="With --live: the daemon's socket; else as configured.")
@json_option
def replay(
    trace: str,
    settings: tuple[str, ...],
    limit: int | None,
    speed_up: float,
    skip_bad_lines: bool,
    sweep_sizes: str | None,
    plot_path: Path | None,
    processes: int | None,
    log_path: Path | None,
    live: bool,
    socket: str | None,
    as_json: bool,
    **figures: Any,
) -> int:
    """Run a request trace through models of P and D, and say what snapd would have brought.

    TRACE holds JSON lines with timestamp (ms), input_length, output_length, and hash_ids or session_id; "-"
    is stdin. It runs three times on the same arrivals: without a sync, with writes straight into P's kv_pool
    ("direct"), and with the daemon's own core ("snapshot"). Reused tokens are held against what somebody who
    knows the future could have reused.

    With --live there is no model: the trace is played against a daemon, and --set is of the live replay, such
    as max_tokens or pool_bytes.
    """
    from snapd.replay.replay import parse_sweep
    from snapd.replay.replay import replay as run_replay
    from snapd.replay.replay import sweep as run_sweep
    from snapd.replay.report import console_for, plot_sweep, require_matplotlib, show_result, show_sweep
    from snapd.replay.trace import read_trace

    if live:
        given = [
            name for name, value in figures.items() if value is not None and name not in ("ingest", "seed")
        ]
        if given or sweep_sizes or plot_path or log_path:
            raise click.UsageError(
                "--live takes --socket, --ingest, --seed, --set and options of the trace only"
            )
        requests = read_trace(trace, limit=limit or 0, speed_up=speed_up, skip_bad_lines=skip_bad_lines)
        return _live(requests, socket, figures, settings, as_json)
    if socket is not None:
        raise click.UsageError("--socket is of a live replay: give --live too")
    if plot_path is not None and sweep_sizes is None:
        raise click.UsageError("--plot draws a sweep: give --sweep too")
    if log_path is not None and sweep_sizes is not None:
        raise click.UsageError("--log is of one run: leave --sweep out")
    model = _model(figures, settings)
    sizes = parse_sweep(sweep_sizes) if sweep_sizes is not None else ()
    if plot_path is not None:
        require_matplotlib()
    requests = read_trace(trace, limit=limit or 0, speed_up=speed_up, skip_bad_lines=skip_bad_lines)
    with _progress() as progress:
        if sizes:
            cores = len(os.sched_getaffinity(0))
            _tell(progress, f"replaying with {len(sizes)} sizes of the buffer")
            swept = run_sweep(
                requests,
                model,
                sizes,
                processes=processes or cores,
                done=lambda done: _tell(progress, f"done up to {done / 2**30:g} GiB"),
            )
            if plot_path is not None:
                plot_sweep(swept, plot_path)
        else:
            with _log(log_path, model) as log:
                result = run_replay(
                    requests, model, log, begun=lambda what: _tell(progress, f"replaying: {what}")
                )
    with _writing():
        if as_json:
            print_json(swept if sizes else result)
        elif sizes:
            show_sweep(console_for(sys.stdout), swept)
        else:
            show_result(console_for(sys.stdout), result)
    return 0


class _Unwritable(click.ClickException):
    """What was found cannot be written to stdout."""

    exit_code = 2


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Let a full disk behind stdout end with status 2 and a sentence."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _Unwritable(f"standard output cannot be written: {error.strerror or error}") from None


def _live(
    trace: "Trace", socket: str | None, figures: dict[str, Any], settings: tuple[str, ...], as_json: bool
) -> int:
    import msgspec

    from snapd.cli.replaylive import replay_live
    from snapd.replay.chains import chain_turns
    from snapd.replay.liveplan import LiveOptions
    from snapd.replay.model import in_words, parse_settings

    changes = {name: value for name, value in figures.items() if value is not None}
    path = DaemonChoice(socket, None, TIMEOUT_S_DEFAULT).socket_path()
    values = {"socket_path": path, **changes, **parse_settings(settings, changes, LiveOptions)}
    try:
        options = msgspec.convert(values, LiveOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the live replay cannot be so: {in_words(error)}") from None
    with _writing():
        return replay_live(chain_turns(trace.requests), options, as_json=as_json)


def _model(figures: dict[str, Any], settings: tuple[str, ...]) -> "Model":
    """Return the model with what the command line says of it.

    Raises:
        ConfigError: a figure is unknown or out of range.
    """
    from snapd.replay.model import Model, buffer_bytes_of, parse_settings, replace_checked

    changes = {name: value for name, value in figures.items() if value is not None and name != "buffer"}
    if figures["buffer"] is not None:
        try:
            changes["buffer_bytes"] = buffer_bytes_of(figures["buffer"])
        except ConfigError as error:
            raise ConfigError(f"--buffer {figures['buffer']}: {error}") from None
    return replace_checked(Model(), **changes, **parse_settings(settings, changes))


def _log(path: Path | None, model: "Model") -> AbstractContextManager[Any]:
    if path is None:
        return nullcontext(None)
    from snapd.replay.logsink import ReplayLog

    return ReplayLog(path, model)


def _progress() -> "AbstractContextManager[Status | None]":
    """Return a line on stderr that says what is under way; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        return nullcontext(None)
    from rich.console import Console

    return Console(stderr=True).status("reading the trace")


def _tell(progress: "Status | None", text: str) -> None:
    if progress is not None:
        progress.update(text)

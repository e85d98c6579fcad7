"""A whole replay, and sweeps over sizes of the buffer."""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Final, NamedTuple

from snapd import __version__
from snapd.errors import ConfigError, SnapdError
from snapd.executor import RecordSink
from snapd.replay.chains import Turn, chain_turns
from snapd.replay.model import Model, buffer_bytes_of, replace_checked
from snapd.replay.result import (
    Bounds,
    Result,
    RunResult,
    SweepPoint,
    SweepResult,
    TraceFacts,
    bounds,
    run_result,
    share,
    trace_facts,
)
from snapd.replay.run import run_trace
from snapd.replay.trace import Trace

SWEEP_POINTS_MAX: Final = 64


class SweepBroken(SnapdError):
    """A process of a sweep is gone."""


def replay(
    trace: Trace,
    model: Model,
    log: RecordSink | None = None,
    begun: Callable[[str], None] = lambda what: None,
) -> Result:
    """Run a trace without a sync, with direct writes, and with snapd.

    Args:
        trace: the requests.
        model: the machines.
        log: takes the records of the snapshot run.
        begun: is told what is being run.

    Raises:
        ConfigError: the buffer leaves P no slots.
    """
    turns = chain_turns(trace.requests)
    begun("none")
    none = run_trace("none", model, turns)
    begun("direct")
    direct = run_trace("direct", model, turns)
    begun("snapshot")
    snapshot = run_trace("snapshot", model, turns, log)
    begun("bounds")
    found = run_result(snapshot, none, model, turns)
    limits = bounds(snapshot, model, turns)
    return Result(
        version=__version__,
        trace=trace_facts(trace.name, trace.bad_lines, turns, snapshot),
        model=model,
        token_bytes=model.token_bytes,
        none=run_result(none, none, model, turns),
        direct=run_result(direct, none, model, turns),
        snapshot=found,
        optimal_reused_tokens=limits.optimal_reused_tokens,
        of_optimal=share(found.reused_tokens, limits.optimal_reused_tokens),
        of_optimal_from_sync=limits.of_optimal_from_sync(found),
        omniscient_reused_tokens=limits.omniscient_reused_tokens,
        of_omniscient=share(found.reused_tokens, limits.omniscient_reused_tokens),
    )


def parse_sweep(text: str) -> tuple[int, ...]:
    """Return the sizes that ``2GiB..64GiB`` (doubling) or ``2GiB,8GiB,24GiB`` names, smallest first.

    Raises:
        ConfigError: it names none, or too many.
    """
    try:
        if ".." in text:
            low, high = (buffer_bytes_of(part) for part in text.split("..", 1))
            sizes: list[int] = []
            while low <= high:
                sizes.append(low)
                low *= 2
            # The end is asked for, so it is there.
            if sizes and sizes[-1] != high:
                sizes.append(high)
        else:
            sizes = sorted({buffer_bytes_of(part) for part in text.split(",")})
    except ConfigError as error:
        raise ConfigError(f"--sweep {text}: {error}") from None
    if not sizes or len(sizes) > SWEEP_POINTS_MAX:
        raise ConfigError(f"--sweep {text}: write 2GiB..64GiB or 2GiB,8GiB, at most {SWEEP_POINTS_MAX} sizes")
    return tuple(sizes)


class _Point(NamedTuple):
    found: RunResult
    limits: Bounds
    facts: TraceFacts


def sweep(
    trace: Trace,
    model: Model,
    sizes_bytes: Sequence[int],
    *,
    processes: int = 1,
    done: Callable[[int], None] = lambda size_bytes: None,
) -> SweepResult:
    """Run the snapshot mode once for each size of the buffer.

    Args:
        trace: the requests.
        model: the machines.
        sizes_bytes: of the buffer, smallest first.
        processes: run so many at a time.
        done: is told each size that is done.

    Raises:
        ConfigError: a buffer leaves P no slots.
        SweepBroken: one of the processes was killed.
    """
    models = [replace_checked(model, buffer_bytes=size_bytes) for size_bytes in sizes_bytes]
    for each in models:
        _ = each.snapshot_pool_tokens  # Says at once if one cannot be.
    turns = chain_turns(trace.requests)
    none = run_trace("none", model, turns)
    direct = run_trace("direct", model, turns)
    points: list[_Point] = []
    if processes > 1 and len(models) > 1:
        with _begun(trace, models, processes) as found:
            for size_bytes, point in zip(sizes_bytes, found, strict=True):
                points.append(point)
                done(size_bytes)
    else:
        for size_bytes, each in zip(sizes_bytes, models, strict=True):
            points.append(_sweep_point(trace, each))
            done(size_bytes)
    return SweepResult(
        version=__version__,
        trace=points[0].facts,
        model=model,
        token_bytes=model.token_bytes,
        none=run_result(none, none, model, turns),
        direct=run_result(direct, none, model, turns),
        points=tuple(_shown(size, point) for size, point in zip(sizes_bytes, points, strict=True)),
    )


@contextlib.contextmanager
def _begun(trace: Trace, models: Sequence[Model], processes: int) -> Iterator[Iterator[_Point]]:
    """Begin the runs in processes of their own, and end those when the block ends in whatever way.

    Raises:
        SweepBroken: one of them was killed.
    """
    before = set(multiprocessing.active_children())
    # A fresh interpreter each: nothing of this process's threads and locks comes along.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(models)), mp_context=context)
    try:
        # Ctrl-C goes to all of them at once. They are ended from here, so they never see it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            found = pool.map(_sweep_point, [trace] * len(models), models)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield found
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise SweepBroken(
                "a process of the sweep was killed, perhaps for want of memory: try fewer with --processes"
            ) from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _sweep_point(trace: Trace, model: Model) -> _Point:
    turns: list[Turn] = chain_turns(trace.requests)
    none = run_trace("none", model, turns)
    snapshot = run_trace("snapshot", model, turns)
    return _Point(
        run_result(snapshot, none, model, turns),
        bounds(snapshot, model, turns),
        trace_facts(trace.name, trace.bad_lines, turns, snapshot),
    )


def _shown(size_bytes: int, point: _Point) -> SweepPoint:
    found, limits = point.found, point.limits
    return SweepPoint(
        buffer_bytes=size_bytes,
        snapshot=found,
        optimal_reused_tokens=limits.optimal_reused_tokens,
        of_optimal=share(found.reused_tokens, limits.optimal_reused_tokens),
        of_optimal_from_sync=limits.of_optimal_from_sync(found),
        omniscient_reused_tokens=limits.omniscient_reused_tokens,
        of_omniscient=share(found.reused_tokens, limits.omniscient_reused_tokens),
    )

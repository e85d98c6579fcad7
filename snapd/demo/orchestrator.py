"""Starts every process, plays the trace, and ends every process, whatever happens in between."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

from snapd.config import LOG_NAME, SOCKET_PATH_BYTES_MAX
from snapd.demo import messages as m
from snapd.demo.chaos import Chaos
from snapd.demo.logfacts import LogFacts
from snapd.demo.memory import create_pool_memory
from snapd.demo.plan import RANKS, Plan
from snapd.demo.result import Result, cross_check, make_result
from snapd.demo.session import SessionRun
from snapd.demo.stage import Options, Seat, Stage, Transport
from snapd.demo.workers import Daemon, DemoError, Worker
from snapd.mooncakeconfig import LOOPBACK
from snapd.units import MS_PER_S
from snapd.wire import StatsRep

LEASE_MS: Final = 3_000
# On loopback a write that was under way lands, if at all, within milliseconds.
QUARANTINE_MS: Final = 1_500
RESERVE_TIMEOUT_MS: Final = 5_000
TRANSFER_TIMEOUT_MS: Final = 10_000
READY_TTL_MS: Final = 120_000
# A vote or a proof that is on its way when the last session ends.
QUIET_EXTRA_S: Final = 3.0
_SOCKET_PREFIX: Final = "snapd-demo-socket-"
_SOCKET_NAME: Final = "snapd.sock"
_SOCKET_NAME_BYTES: Final = len(_SOCKET_NAME) + 1

OnStage = Callable[[Stage], None]
OnTick = Callable[[], None]
TICK_S: Final = 0.25


def run_demo(options: Options, plan: Plan, on_stage: OnStage, on_tick: OnTick) -> Result:
    """Play *plan*, and return what came of it.

    Args:
        options: what the user chose; its directory exists and holds no log.
        plan: what to play.
        on_stage: called once, when everything has started, with what there is to look at.
        on_tick: called several times a second afterwards.

    Raises:
        DemoError: a process failed. All are ended.
        KeyboardInterrupt: interrupted, or asked to end by SIGTERM. All processes are ended.
    """
    try:
        return asyncio.run(_run(options, plan, on_stage, on_tick))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _run(options: Options, plan: Plan, on_stage: OnStage, on_tick: OnTick) -> Result:
    started_s = time.monotonic()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    log_path = options.out_dir / LOG_NAME
    async with contextlib.AsyncExitStack() as stack:
        socket_path = stack.enter_context(_socket_path())
        config_path = options.out_dir / "snapd.toml"
        config_path.write_text(_config(plan, socket_path, log_path, options.transport))
        daemon = await Daemon.start(config_path, socket_path, options.out_dir / "daemon.txt")
        stack.push_async_callback(daemon.stop)
        seats, ranks = _workers(options, plan, socket_path, stack)
        workers = [*ranks, *(seat.worker for seat in seats)]
        stack.push_async_callback(_stop_all, workers)
        async with _first_error(), asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.start())
        for seat in seats:
            seat.is_up.set()
        stage = Stage(options, plan, daemon.client, seats, ranks)
        chaos = Chaos(plan, options.seed, is_on=options.chaos)
        on_stage(stage)
        async with _ticking(on_tick):
            await _play(stage, chaos)
            play_s = stage.elapsed_s
            trees = [await rank.call(m.Report(), m.TreeReport) for rank in ranks]
            # A D that has exited cannot write: what it left unproven is proven now.
            faults = await _stop_all(workers)
            stats = await _quiet(daemon)
            faults += await daemon.stop()
    for messages_path in options.out_dir.glob("*.txt"):
        if not messages_path.stat().st_size:
            messages_path.unlink()
    facts = LogFacts(log_path)
    faults += cross_check(facts, stage.tally, stats, trees, seats)
    return make_result(
        plan,
        facts,
        stage.tally,
        trees,
        faults,
        chaos.incidents,
        play_s=play_s,
        wall_s=time.monotonic() - started_s,
        seed=options.seed,
        log=str(log_path),
    )


async def _play(stage: Stage, chaos: Chaos) -> None:
    """Run every session to its end, and start D processes anew that were killed."""
    runs = {plan.index: SessionRun(stage, chaos, plan, LEASE_MS) for plan in stage.plan.sessions}
    async with _first_error(), asyncio.TaskGroup() as group:

        def on_moved(seat: Seat, moved: m.PushMoved) -> None:
            if seat.is_up.is_set() and runs[moved.session].on_moved(seat, moved):
                seat.is_up.clear()
                seat.deaths += 1
                stage.tally.kills += 1
                seat.worker.kill()
                group.create_task(stage.respawn(seat))

        for seat in stage.seats:
            seat.worker.on_moved = lambda _, moved, seat=seat: on_moved(seat, moved)
        for run in runs.values():
            group.create_task(run.run())


async def _quiet(daemon: Daemon) -> StatsRep:
    """Return the daemon's statistics once nothing is open or in quarantine, or the time for that is over."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + (LEASE_MS + QUARANTINE_MS) / MS_PER_S + QUIET_EXTRA_S
    while True:
        stats = daemon.client.stats()
        is_quiet = stats.core.open_sessions == 0 and stats.core.quarantined_shards == 0
        if (is_quiet and stats.log.queued_lines == 0) or loop.time() >= deadline_s:
            return stats
        await asyncio.sleep(0.02)


async def _stop_all(workers: list[Worker]) -> list[str]:
    """End all workers, and return what was wrong with their ends."""
    ends = await asyncio.gather(*(worker.stop() for worker in workers))
    return [fault for end in ends for fault in end]


# --- what is set up ----------------------------------------------------------------------------


def _workers(
    options: Options, plan: Plan, socket_path: str, stack: contextlib.AsyncExitStack
) -> tuple[list[Seat], list[Worker]]:
    """Return the D seats and the P ranks, not started, with the memory of their pools."""

    def memory(name: str, num_slots: int) -> int:
        fd = create_pool_memory(name, num_slots)
        stack.callback(os.close, fd)
        return fd

    decoder_fds = [
        tuple(memory(f"D {index} rank {rank}", plan.decoder_slots) for rank in range(RANKS))
        for index in range(options.decoders)
    ]
    seats: list[Seat] = []
    for index, fds in enumerate(decoder_fds):
        setup = m.Setup(
            role=m.ROLE_DECODER,
            index=index,
            channel_fd=-1,
            socket_path=socket_path,
            seed=options.seed,
            decoder_fds=fds,
            decoder_slots=plan.decoder_slots,
            flip_push=options.flip_push,
            piece_bytes=plan.piece_bytes,
        )
        worker = Worker(f"D {index}", setup, options.out_dir / f"decoder-{index}.txt")
        seats.append(Seat(index, worker, plan.decoder_slots))
    ranks: list[Worker] = []
    for rank in range(RANKS):
        setup = m.Setup(
            role=m.ROLE_PREFILL,
            index=rank,
            channel_fd=-1,
            socket_path=socket_path,
            seed=options.seed,
            decoder_fds=tuple(fds[rank] for fds in decoder_fds),
            decoder_slots=plan.decoder_slots,
            prefill_fd=memory(f"P rank {rank}", plan.prefill_slots),
            prefill_slots=plan.prefill_slots,
            verify=options.verify,
        )
        ranks.append(Worker(f"P {rank}", setup, options.out_dir / f"prefill-{rank}.txt"))
    return seats, ranks


def _config(plan: Plan, socket_path: str, log_path: Path, transport: Transport) -> str:
    """Return the daemon's configuration: the demo must end soon, so its times are short."""
    lines = [
        f"socket_path = {_toml(socket_path)}",
        f"transport = {_toml(transport)}",
        f"log_path = {_toml(str(log_path))}",
        "log_rotate_bytes = 0",
        f"lease_ms = {LEASE_MS}",
        f"quarantine_ms = {QUARANTINE_MS}",
        f"reserve_timeout_ms = {RESERVE_TIMEOUT_MS}",
        f"transfer_timeout_ms = {TRANSFER_TIMEOUT_MS}",
        f"ready_ttl_ms = {READY_TTL_MS}",
    ]
    if transport == "mooncake":
        lines += ["", "[mooncake]", f"host = {_toml(LOOPBACK)}", 'protocol = "tcp"']
    for rank in range(RANKS):
        lines += ["", "[[arena]]", f"rank = {rank}", f"size_bytes = {plan.arena_bytes}"]
    return "\n".join(lines) + "\n"


def _toml(text: str) -> str:
    """Return *text* as a TOML string."""
    escaped = "".join(f"\\u{ord(char):04x}" if ord(char) < 32 or char in '"\\\x7f' else char for char in text)
    return f'"{escaped}"'


@contextlib.contextmanager
def _socket_path() -> Iterator[str]:
    """Make a directory for the socket, short enough for its path, and remove it afterwards."""
    directory = tempfile.mkdtemp(prefix=_SOCKET_PREFIX)
    if len(os.fsencode(directory)) > SOCKET_PATH_BYTES_MAX - _SOCKET_NAME_BYTES:
        Path(directory).rmdir()
        directory = tempfile.mkdtemp(prefix=_SOCKET_PREFIX, dir="/tmp")
    try:
        yield f"{directory}/{_SOCKET_NAME}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.asynccontextmanager
async def _ticking(on_tick: OnTick) -> AsyncIterator[None]:
    async def tick() -> None:
        while True:
            on_tick()
            await asyncio.sleep(TICK_S)

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        on_tick()


@contextlib.asynccontextmanager
async def _first_error() -> AsyncIterator[None]:
    """Raise the first error of a group of tasks as itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors = group.exceptions
        raise next((error for error in errors if isinstance(error, DemoError)), errors[0]) from None

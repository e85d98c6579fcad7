"""One life of the daemon: opens everything in order, serves, drains, closes.

Source: design, sections 4, 6 and 10.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import signal
import socket
import stat
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
import uvloop

from snapd import __version__
from snapd import wire as w
from snapd.arena import HostArena
from snapd.config import Config
from snapd.core import events as e
from snapd.core import records as r
from snapd.core.machine import Machine
from snapd.core.session import Settings
from snapd.core.slab import SlabAllocator
from snapd.cudaarena import CudaArena
from snapd.errors import Reason, StartupError
from snapd.eventlog import EventLog, LogSettings, TurnRecords
from snapd.executor import Executor, spare_the_old
from snapd.logrecovery import closing_records, read_open_attempts
from snapd.malloc import keep_threshold
from snapd.notifications import Notifications
from snapd.sdnotify import Heartbeat, Notifier
from snapd.server import Server
from snapd.service import AnyArena, Service
from snapd.tcplistener import TcpListener
from snapd.timers import SystemClock
from snapd.transport.base import ArenaOfferer
from snapd.transport.shm import ShmOfferer
from snapd.units import MS_PER_S, format_bytes

if TYPE_CHECKING:
    from snapd.kvevents.serving import Stream
    from snapd.metrics.serving import Metrics

_log: Final = structlog.get_logger("snapd.daemon")
EXIT_OK: Final = 0
EXIT_INTERNAL_ERROR: Final = 70
# What a shell reports for a process that SIGTERM has ended.
EXIT_SECOND_SIGNAL: Final = 128 + signal.SIGTERM
_DRAIN_POLL_S: Final = 0.02
_CLOSING_CHUNK: Final = 1_000
# Among Mooncake's variables and metadata servers, what is nobody's business who asks for statistics.
_IS_SHOWN: Final = re.compile("(?!.*(PASSWORD|SECRET|TOKEN|CREDENTIAL))[A-Z0-9_]+")
_PASSWORD_IN_URL: Final = re.compile("//[^/@]*@")


def run(config: Config, origin: Mapping[str, str] | None = None) -> int:
    """Serve until a signal ends it, and return the exit status.

    Args:
        config: the configuration.
        origin: where each setting came from, for whoever asks the daemon.

    Raises:
        StartupError: it cannot run as configured; nothing is left behind.
    """
    keep_threshold()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, origin or {}))


def settings_of(config: Config) -> Settings:
    """Return the core's part of the configuration."""
    return Settings(
        **{
            name: getattr(config if hasattr(config, name) else config.limits, name)
            for name in Settings.__struct_fields__
        }
    )


def _machine(config: Config, arenas: dict[int, tuple[AnyArena, int]]) -> Machine:
    return Machine(
        settings_of(config),
        {
            rank: SlabAllocator(
                arena.size_bytes,
                alignment_bytes=config.alignment_bytes,
                piece_bytes=config.register_piece_bytes,
            )
            for rank, (arena, _) in arenas.items()
        },
        alignment_bytes=config.alignment_bytes,
    )


class _Stop:
    """Why and how the daemon ends."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.reason = ""
        self.status = EXIT_OK
        # What keeps the core from going on after a bug; set once there is one.
        self.halt: Callable[[], None] = lambda: None

    def on_signal(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            # The operator does not want to wait: the next start closes what is open.
            os._exit(EXIT_SECOND_SIGNAL)
        self.reason = number.name
        self.asked.set()

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A bug. Stop: snapshots can be computed again, wrong books cannot be trusted again."""
        del loop
        error = context.get("exception")
        _log.critical("internal error", message=context.get("message"))
        if isinstance(error, BaseException):
            traceback.print_exception(error, file=sys.stderr)
        self.halt()
        # With this reason open attempts stay open in the log, and the next start closes them.
        self.reason = Reason.INTERNAL_ERROR
        self.status = EXIT_INTERNAL_ERROR
        self.asked.set()


async def _serve(config: Config, origin: Mapping[str, str]) -> int:
    loop = asyncio.get_running_loop()
    stop = _Stop()
    loop.set_exception_handler(stop.on_loop_error)
    # First of all: taking the memory may last seconds, and a signal then must not kill.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.on_signal, number)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    epoch = secrets.token_hex(8)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_instance_lock(config))
        metrics = _open_metrics(config, stack)
        kv_events = _open_kv_events(config, stack)
        log = stack.enter_context(_event_log(config, epoch))
        notifier = stack.enter_context(contextlib.closing(Notifier(os.environ)))
        notifier.status(f"taking {format_bytes(sum(arena.size_bytes for arena in config.arenas))} of memory")
        # The arenas go after the offerer: what is registered must be mapped.
        memory = stack.enter_context(contextlib.ExitStack())
        # First, because taking the memory may last, and what is wrong with Mooncake shows at once.
        offerer = _open_offerer(config)
        stack.callback(offerer.close)
        arenas: dict[int, tuple[AnyArena, int]] = {}
        for arena in _open_arenas(config, memory):
            arenas[arena.rank] = (arena, offerer.register(arena))
        machine = _machine(config, arenas)
        server = Server(
            config,
            loop,
            on_writer_gone=lambda writer_id: executor.post(
                lambda at_ns: e.WriterGone(
                    at_ns=at_ns, writer_id=writer_id, drained=offerer.is_exit_drain_proof
                )
            ),
            is_writer_needed=machine.books.handles_of_writer.__contains__,
        )
        on_record = metrics.counted(server) if metrics else server.show_record
        if kv_events:
            on_record = kv_events.observing(machine.books.open, on_record)
        server.records = records = TurnRecords(log)
        executor = Executor(machine, records, SystemClock(), loop.call_later, server.tell_end, on_record)
        stack.callback(executor.close)
        stop.halt = executor.halt
        usages = [server.usage, *([kv_events.usage] if kv_events else [])]
        service_type = metrics.service_type if metrics else Service
        server.service = service_type(
            config,
            epoch,
            executor,
            arenas,
            offerer.address(),
            lambda: _log_statistics(config, log, records),
            lambda: (len(server.connections), len(server.watchers)),
            _mooncake_in_use(config, epoch, executor, server, offerer, stack, usages),
        )
        server.service.kv_events = kv_events
        server.service.origin = {name: _utf8(where) for name, where in origin.items()}
        server.service.usages += usages
        await _write_started(config, log, executor, arenas)
        if kv_events:
            await stack.enter_async_context(kv_events.publishing())
        if metrics:
            await stack.enter_async_context(metrics.serving(server.service, server, executor))
        spare_the_old()
        tcp = await stack.enter_async_context(_listening_to_others(config, server, loop))
        if tcp is not None:
            server.service.usages.append(tcp.usage)
        await stack.enter_async_context(_listening(config, server, loop))
        loop.add_signal_handler(signal.SIGHUP, _reload, log, notifier, tcp)
        total_bytes = sum(arena.size_bytes for arena, _ in arenas.values())
        _log.info(
            "ready",
            socket=config.socket_path,
            **({"tcp": tcp.address} if tcp else {}),
            log=config.log_path,
            epoch=epoch,
            arenas=len(arenas),
            size=format_bytes(total_bytes),
        )
        notifier.ready()
        stack.enter_context(contextlib.closing(Heartbeat(notifier, loop, lambda: _status(executor))))
        await stop.asked.wait()
        notifier.stopping(config.drain_timeout_ms + config.limits.stop_grace_ms)
        if stop.status == EXIT_OK:
            try:
                await _drain(config, executor)
            except Exception as error:
                stop.on_loop_error(loop, {"message": "the drain", "exception": error})
        # While things are closed the loop goes on, and a quarantine may be over: after the last line.
        executor.halt()
        _write_stopped(log, executor, stop)
        server.close()
    return stop.status


def _reload(log: EventLog, notifier: Notifier, tcp: TcpListener | None) -> None:
    """Go on in the file that ``log_path`` names now, and with the certificates that there are now."""
    notifier.reloading()
    log.reopen()
    if tcp is not None:
        tcp.reload()
    notifier.ready()


def _status(executor: Executor) -> str:
    """Return how the daemon fares, in one line for the service manager."""
    books = executor.machine.books
    arenas = [books.buffer.view(rank, 0) for rank in books.buffer.ranks]
    free, capacity = sum(arena.free_bytes for arena in arenas), sum(arena.capacity_bytes for arena in arenas)
    return (
        f"{'draining' if books.is_draining else 'serving'}: {len(books.open):,} attempts open, "
        f"{format_bytes(free)} of {format_bytes(capacity)} free"
    )


async def _drain(config: Config, executor: Executor) -> None:
    """Take no new attempts, let readers finish, then end what is open."""
    loop = asyncio.get_running_loop()
    executor.post(lambda at_ns: e.DrainAsked(at_ns=at_ns))
    deadline_s = loop.time() + config.drain_timeout_ms / MS_PER_S
    # After a bug nobody's vote is counted any more.
    while executor.machine.num_leased and not executor.is_halted:
        if loop.time() >= deadline_s:
            break
        await asyncio.sleep(_DRAIN_POLL_S)
    executor.post(lambda at_ns: e.StopAsked(at_ns=at_ns))


async def _write_started(
    config: Config, log: EventLog, executor: Executor, arenas: dict[int, tuple[AnyArena, int]]
) -> None:
    """Write the first line of the epoch, then close what the former one left open."""
    try:
        former = read_open_attempts(config.log_path, config.log_rotate_keep)
    except OSError as error:
        raise StartupError(f"log_path {config.log_path} cannot be read: {error.strerror}") from None
    now_ns = executor.now_ns()
    log.write(
        r.DaemonStarted(
            at_ns=now_ns,
            version=__version__,
            protocol=w.PROTOCOL_VERSION,
            pid=os.getpid(),
            transport=config.transport,
            arenas=tuple(
                r.ArenaInfo(rank, arena.device, arena.size_bytes, config.alignment_bytes)
                for rank, (arena, _) in arenas.items()
            ),
            former_epoch=former.epoch if former else "",
            closed_attempts=len(former.attempts) if former else 0,
            eviction_policy=config.eviction_policy,
            quarantine_ms=config.quarantine_ms,
        )
    )
    for number, record in enumerate(closing_records(former, now_ns) if former else ()):
        # There may be more of them than the queue takes; nobody is served yet, so it can be waited for.
        if number % _CLOSING_CHUNK == 0:
            await _until_queue_is_short(config, log)
        log.write(record)


async def _until_queue_is_short(config: Config, log: EventLog) -> None:
    """Wait until most of the log's queue is free; not for long on a disk that does not take anything."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + config.limits.log_close_ms / MS_PER_S
    while loop.time() < deadline_s:
        statistics = log.statistics()
        lines_left = config.log_queue_lines_max - statistics.queued_lines
        bytes_left = config.log_queue_bytes_max - statistics.queued_bytes
        lines_wanted = min(2 * _CLOSING_CHUNK, config.log_queue_lines_max // 2)
        if lines_left > lines_wanted and bytes_left > config.log_queue_bytes_max // 2:
            return
        await asyncio.sleep(_DRAIN_POLL_S)


def _write_stopped(log: EventLog, executor: Executor, stop: _Stop) -> None:
    # Plain counters: after a bug nothing can be summed up any more.
    books = executor.machine.books
    log.write(
        r.DaemonStopped(
            at_ns=executor.now_ns(),
            reason=stop.reason,
            attempts=books.attempts,
            attempts_ok=books.outcomes[Reason.OK],
        )
    )


# --- what is opened in order, and closed in the other order ------------------------------------


@contextlib.contextmanager
def _instance_lock(config: Config) -> Iterator[None]:
    """Hold the socket's lock file: one daemon a socket. The lock goes with the process.

    Raises:
        StartupError: another daemon holds it, or the directory is not ours.
    """
    socket_path = Path(config.socket_path)
    directory = socket_path.parent
    lock_path = directory / f"{socket_path.name}.lock"
    try:
        # Users who may connect must get to the socket; nobody else may list what is there.
        directory.mkdir(mode=0o711 if config.is_open_to_other_users else 0o700, parents=True, exist_ok=True)
        # Its owner could put another socket in our place.
        if directory.stat().st_uid not in (0, os.geteuid()):
            raise StartupError(
                f"socket_path {socket_path}: {directory} belongs to another user; choose another directory"
            )
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StartupError(
            f"socket_path {socket_path}: {directory} cannot be used ({error.strerror}); "
            "choose a directory that this user may write"
        ) from None
    try:
        if os.fstat(fd).st_uid not in (0, os.geteuid()):
            raise StartupError(f"{lock_path} belongs to another user; choose another socket_path")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StartupError(
                f"another snapd (pid {pid}) serves {socket_path}; stop it or choose another socket_path"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _event_log(config: Config, epoch: str) -> Iterator[EventLog]:
    log = EventLog(
        LogSettings(
            path=config.log_path,
            rotate_bytes=config.log_rotate_bytes,
            rotate_keep=config.log_rotate_keep,
            queue_bytes_max=config.log_queue_bytes_max,
            queue_lines_max=config.log_queue_lines_max,
            back_off_ms_max=config.limits.log_back_off_ms_max,
        ),
        epoch,
    )
    try:
        yield log
    finally:
        lines_left = log.close(config.limits.log_close_ms / MS_PER_S)
        if lines_left:
            _log.error("log lines were lost at the end", lines=lines_left, path=config.log_path)


def _open_metrics(config: Config, stack: contextlib.AsyncExitStack) -> "Metrics | None":
    """Listen for scrapes, if they are wanted; only then is what they need imported.

    Raises:
        StartupError: the address cannot be had, or a package is missing.
    """
    if not config.metrics_address:
        return None
    from snapd.metrics.serving import opened

    return stack.enter_context(opened(config))


def _open_kv_events(config: Config, stack: contextlib.AsyncExitStack) -> "Stream | None":
    """Bind where KV events are published, if they are wanted; only then is what they need imported.

    Raises:
        ConfigError: a package is missing.
        StartupError: an address cannot be had.
    """
    if not config.kv_events_address:
        return None
    from snapd.kvevents.serving import opened

    return stack.enter_context(opened(config))


def _open_offerer(config: Config) -> ArenaOfferer:
    """Return the transport's side of the daemon.

    Raises:
        StartupError: it is not there, or cannot run as configured.
    """
    if config.transport == "shm":
        return ShmOfferer()
    from snapd.transport.mooncake_offerer import MooncakeOfferer

    return MooncakeOfferer(config.mooncake, config.register_piece_bytes)


def _mooncake_in_use(
    config: Config,
    epoch: str,
    executor: Executor,
    server: Server,
    offerer: ArenaOfferer,
    stack: contextlib.AsyncExitStack,
    usages: list[Callable[[], dict[str, int]]],
) -> Callable[[], w.MooncakeStatistics] | None:
    """Take notifications from now on, and return what tells how Mooncake fares; None: it is not used."""
    if config.transport != "mooncake":
        return None
    from snapd.transport.mooncake_offerer import MooncakeOfferer

    assert isinstance(offerer, MooncakeOfferer)
    loop = asyncio.get_running_loop()
    notifications = Notifications(
        config.mooncake, config.limits, epoch, executor, server, loop, offerer.take_notifications
    )
    stack.callback(notifications.close)
    usages.append(notifications.usage)

    def statistics() -> w.MooncakeStatistics:
        return w.MooncakeStatistics(
            package=offerer.package,
            segment_name=offerer.address(),
            protocol=config.mooncake.protocol,
            devices=config.mooncake.devices,
            metadata_server=_PASSWORD_IN_URL.sub("//...@", config.mooncake.metadata_server),
            is_loopback_only=offerer.is_loopback_only,
            registered_pieces=offerer.registered_pieces,
            notify=config.mooncake.notify,
            notifications_taken=notifications.counts.taken,
            notifications_refused=notifications.counts.refused,
            notifications_ignored=notifications.counts.ignored,
            settings={
                name: _utf8(value) for name, value in offerer.settings.items() if _IS_SHOWN.fullmatch(name)
            },
        )

    return statistics


def _utf8(text: str) -> str:
    """Return *text*; a variable of the environment may hold bytes that are no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _open_arenas(config: Config, stack: contextlib.ExitStack) -> Iterator[AnyArena]:
    for wanted in config.arenas:
        arena: AnyArena
        if wanted.device == "cpu":
            arena = HostArena(
                wanted.rank, wanted.size_bytes, hugepages=config.hugepages, prefault=config.prefault
            )
        else:
            arena = CudaArena(wanted.rank, wanted.device, wanted.size_bytes)
        stack.callback(arena.close)
        yield arena


@contextlib.asynccontextmanager
async def _listening_to_others(
    config: Config, server: Server, loop: asyncio.AbstractEventLoop
) -> AsyncIterator[TcpListener | None]:
    if not config.tcp_address:
        yield None
        return
    listener = TcpListener(config, server, loop)
    try:
        yield listener
    finally:
        await listener.close()


@contextlib.asynccontextmanager
async def _listening(config: Config, server: Server, loop: asyncio.AbstractEventLoop) -> AsyncIterator[None]:
    sock, inode = _bind(Path(config.socket_path), is_open_to_others=config.is_open_to_other_users)
    listener = await loop.create_unix_server(
        server.new_connection, sock=sock, backlog=config.limits.accept_backlog
    )
    try:
        yield
    finally:
        listener.close()
        _unlink_socket(Path(config.socket_path), inode)


def _bind(path: Path, *, is_open_to_others: bool) -> tuple[socket.socket, int]:
    """Bind the socket and return it with its inode; a stale socket file goes first.

    Only the holder of the instance lock comes here, so a socket file that is there is stale.

    Raises:
        StartupError: something that is no socket is in the way, or it cannot be bound.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise StartupError(f"socket_path {path} is there and is no socket; remove it or choose another")
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The mode must be right from the first moment: nobody may connect in between.
    umask = os.umask(0o177)
    try:
        sock.bind(str(path))
        if is_open_to_others:
            # Other users can only connect when the mode lets them; the peer's uid decides then.
            path.chmod(0o666)
    except OSError as error:
        sock.close()
        raise StartupError(f"socket_path {path} cannot be bound: {error.strerror}") from None
    finally:
        os.umask(umask)
    return sock, path.stat().st_ino


def _unlink_socket(path: Path, inode: int) -> None:
    """Remove the socket file, unless somebody has put another one there."""
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_ino == inode:
            path.unlink()


def _log_statistics(config: Config, log: EventLog, records: TurnRecords) -> w.LogStatistics:
    records.flush()
    statistics = log.statistics()
    return w.LogStatistics(
        path=config.log_path,
        lines_written=statistics.lines_written,
        bytes_written=statistics.bytes_written,
        queued_lines=statistics.queued_lines,
        queued_bytes=statistics.queued_bytes,
        dropped=statistics.records_dropped,
        write_errors=statistics.write_errors,
        last_error=statistics.last_error,
        rotations=statistics.rotations,
    )

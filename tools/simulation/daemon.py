"""One life of the daemon: its own server, service, executor and core, begun and ended by the clock.

What ``snapd.daemon`` opens with the operating system's help is put together here: arenas are plain memory,
the loop is the run's, sockets are pipes of the network, and a process that exits is seen a little later.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self, cast

import msgspec

from snapd import __version__
from snapd import wire as w
from snapd.access import Access, AccessRule
from snapd.config import ArenaConfig, Config
from snapd.core import events as e
from snapd.core import records as r
from snapd.core.overview import Overview
from snapd.daemon import settings_of
from snapd.errors import Reason
from snapd.eventlog import EventLog, LogSettings, TurnRecords
from snapd.executor import Executor
from snapd.logrecovery import closing_records, read_open_attempts
from snapd.mooncakeconfig import MooncakeConfig
from snapd.notifications import Notifications
from snapd.peers import Peer
from snapd.server import Connection, RateLimitedWarnings, Server
from snapd.service import AnyArena, Caller, Service
from snapd.units import NS_PER_MS, NS_PER_S
from tools.simulation.bugs import Bugs
from tools.simulation.checks import CheckedMachine, EpochChecks, empty_arenas
from tools.simulation.clock import Loop, Node
from tools.simulation.dice import Dice
from tools.simulation.disk import KEEP, SimEventLog
from tools.simulation.failure import Broken, Bug
from tools.simulation.memory import SimArena
from tools.simulation.network import PeerSocket, Reader, Wire

if TYPE_CHECKING:
    from tools.simulation.world import World

START_TS: Final = 1_767_225_600.0  # 2026-01-01T00:00:00Z
DAEMON_UID: Final = 1_000
# Who may push, snapshots of one tenant only.
PUSHER_UID: Final = 2_000
_DRAIN_POLL_NS: Final = 20 * NS_PER_MS
_NOTICE_POLL_NS: Final = 20 * NS_PER_MS
_EXIT_SEEN_NS: Final = 2 * NS_PER_MS
_LAST_TURN_NS: Final = NS_PER_MS


class _SimConnection(Connection):
    """A connection whose peer is asked for without a file descriptor, and with seams for bugs."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the client in, or say why not."""
        self._bugs.pass_by("connection")
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._bugs.pass_by("connection")
        super().connection_lost(exc)

    def send(self, message: w.AnyReply) -> None:
        """Answer a request."""
        self._bugs.pass_by("answer")
        super().send(message)
        self._bugs.pass_by("answered")

    @property
    def _bugs(self) -> Bugs:
        return cast("_SimServer", self._server).bugs

    def _socket(self) -> socket.socket:
        assert self._transport is not None
        return cast("socket.socket", self._transport.get_extra_info("socket"))


class _CountedWarnings(RateLimitedWarnings):
    """Warnings that are counted only."""

    def warn(self, kind: str, **facts: object) -> None:
        """Count it."""
        del facts
        self.counts[kind] += 1


class _Processes:
    """In place of the watch over pidfds: the run says which process has exited."""

    def __init__(self, is_alive: Callable[[int], bool]) -> None:
        self.writer_by_pid: dict[int, int] = {}
        self._last_id = 0
        self._is_alive = is_alive

    def writer_id(self, sock: PeerSocket, peer: Peer) -> int:
        """Return the id of a process that lives, else 0."""
        del sock
        if not self._is_alive(peer.pid):
            return 0
        if peer.pid not in self.writer_by_pid:
            self._last_id += 1
            self.writer_by_pid[peer.pid] = self._last_id
        return self.writer_by_pid[peer.pid]

    def close(self) -> None:
        """Watch nobody any more."""


class _Notices:
    """What the data plane brings beside bytes, and the loop of who looks at it: when there is something."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._texts: list[str] = []
        self._turn: Callable[[], None] | None = None
        self._is_planned = False

    def call_later(self, delay_s: float, turn: Callable[[], None]) -> Self:
        """Call when there is something to see; at once when there is no delay."""
        self._turn = turn
        if self._texts or not delay_s:
            self._plan(0)
        return self

    def cancel(self) -> None:
        """Look no more."""
        self._turn = None

    def take(self) -> list[str]:
        """Return the texts that have come."""
        texts, self._texts = self._texts, []
        return texts

    def arrive(self, text: str) -> None:
        """A text has come; it is looked at within the time of a poll."""
        self._texts.append(text)
        self._plan(_NOTICE_POLL_NS)

    def _plan(self, delay_ns: int) -> None:
        if not self._is_planned:
            self._is_planned = True
            self._node.after(delay_ns, self._look)

    def _look(self) -> None:
        self._is_planned = False
        if self._turn is not None:
            self._turn()


class _SimRecords(TurnRecords):
    """What holds the records of a turn back, with seams for bugs."""

    def __init__(self, log: EventLog, bugs: Bugs) -> None:
        super().__init__(log)
        self._bugs = bugs

    def write(self, record: r.Record) -> None:
        """Take a record."""
        self._bugs.pass_by("record")
        super().write(record)

    def flush(self) -> None:
        """Give the log what waits."""
        self._bugs.pass_by("lines")
        super().flush()


class _SimServer(Server):
    """The server, with those connections, and with seams for bugs."""

    bugs: Bugs

    def tell_end(self, told: e.EndTold) -> None:
        """Tell a connection how an attempt ended."""
        self.bugs.pass_by("end")
        super().tell_end(told)

    def show_record(self, record: r.Record) -> None:
        """Show a record to whoever watches."""
        self.bugs.pass_by("logged")
        super().show_record(record)

    def new_connection(self) -> Connection:
        """Return the protocol of a connection that is being accepted."""
        return _SimConnection(self, self.next_conn_id())


class _SimExecutor(Executor):
    """The executor, with handles that every life of the daemon counts from 1.

    Handles have 53 random bits, so that one of another epoch names nothing. Here it nearly always names
    something, and only the epoch tells.
    """

    _last_handle = 0
    bugs: Bugs

    def _fire(self, event: e.Event) -> None:
        self.bugs.pass_by("timer")
        super()._fire(event)

    def new_handle(self) -> int:
        """Return the next number."""
        self._last_handle += 1
        return self._last_handle


class _SimService(Service):
    """The service, without what differs from process to process, and with a seam for bugs."""

    bugs: Bugs

    def take(self, caller: Caller, request: w.AnyRequest) -> None:
        """Answer a request."""
        self.bugs.pass_by("request")
        super().take(caller, request)

    def statistics(self, request_id: int = 0, overview: Overview | None = None) -> w.StatsRep:
        """Return how everything fares."""
        return msgspec.structs.replace(super().statistics(request_id, overview), pid=1)


class Daemon:
    """One life.

    Args:
        world: whose daemon.
        number: how many there were before.

    Attributes:
        node: its process.
        epoch: its id.
        memory: the arenas.
        is_listening: connections are taken.
        is_over: it was stopped or killed.
        wires: connections, in order.
        bugs: what is wrong with it on purpose.
        is_broken: a bug has come up, and it ends.
    """

    def __init__(self, world: "World", number: int) -> None:
        self._world = world
        self._dice = Dice(world.plan.seed, 7, number)
        setup = world.plan.setup
        boot_ns = (1 + self._dice.below(1_000)) * NS_PER_S
        self.node = Node(world.timeline, boot_ns)
        self.epoch = f"{self._dice.bits():016x}"
        self.is_listening = False
        self.is_over = False
        self.is_broken = False
        self.bugs = Bugs()
        self.node.on_error = self._on_error
        self.wires: list[Wire] = []
        self._loop = Loop(self.node, self._dice)
        self.loop = self._loop.as_asyncio()
        self.config = Config(
            socket_path="sim", log_path=world.disk.path, log_rotate_keep=KEEP,
            arenas=tuple(ArenaConfig(rank, "cpu", setup.arena_bytes) for rank in range(setup.ranks)),
            register_piece_bytes=setup.piece_bytes, transport="shm", **setup.settings,
            access=(AccessRule(uid=PUSHER_UID, roles=("pusher",), tenants=("t2",)),),
        )  # fmt: skip
        self.memory = [SimArena(rank, setup.arena_bytes) for rank in range(setup.ranks)]
        self.log = SimEventLog(
            LogSettings(
                path=self.config.log_path,
                rotate_bytes=self.config.log_rotate_bytes,
                rotate_keep=KEEP,
                queue_bytes_max=self.config.log_queue_bytes_max,
                queue_lines_max=self.config.log_queue_lines_max,
            ),
            self.epoch,
            world.wall_s,
            self.node,
            world.disk,
        )
        self._open()
        self._start()

    def _open(self) -> None:
        setup, config = self._world.plan.setup, self.config
        self.machine = machine = CheckedMachine(
            settings_of(config),
            empty_arenas(dict.fromkeys(range(setup.ranks), setup.arena_bytes), setup.piece_bytes),
        )
        self.server = server = _SimServer(
            config, self.loop, self._writer_gone, machine.books.handles_of_writer.__contains__
        )
        server.access = Access(config.access, {0, DAEMON_UID})
        server.warnings = _CountedWarnings(self.loop.time, config.limits.warning_interval_ms)
        self._processes = _Processes(self._world.is_local_process)
        server.processes = cast("Any", self._processes)
        machine.bugs = server.bugs = self.bugs
        server.records = records = _SimRecords(self.log, self.bugs)
        self.executor = _SimExecutor(
            machine, records, self.node, self.loop.call_later, server.tell_end, server.show_record
        )
        self.executor.bugs = self.bugs
        self.notices = _Notices(self.node)
        # Over a network a commit may come with the bytes; else a notification is a hint.
        Notifications(
            MooncakeConfig(notify="commit" if setup.is_network else "hint"),
            config.limits,
            self.epoch,
            self.executor,
            server,
            cast("asyncio.AbstractEventLoop", self.notices),
            self.notices.take,
        )
        arenas = {arena.rank: (cast("AnyArena", arena), 0) for arena in self.memory}
        server.service = service = _SimService(
            config, self.epoch, self.executor, arenas, "", self._log_statistics,
            lambda: (len(server.connections), len(server.watchers)),
        )  # fmt: skip
        service.bugs = self.bugs

    def _start(self) -> None:
        """Write the first line, then close what the former life left open, as ``snapd.daemon`` does."""
        former = read_open_attempts(self.config.log_path, KEEP)
        now_ns = self.executor.now_ns()
        setup = self._world.plan.setup
        started = r.DaemonStarted(
            at_ns=now_ns,
            version=__version__,
            protocol=w.PROTOCOL_VERSION,
            pid=1,
            transport=self.config.transport,
            arenas=tuple(
                r.ArenaInfo(arena.rank, arena.device, arena.size_bytes, self.config.alignment_bytes)
                for arena in self.memory
            ),
            former_epoch=former.epoch if former else "",
            closed_attempts=len(former.attempts) if former else 0,
            eviction_policy=self.config.eviction_policy,
            quarantine_ms=self.config.quarantine_ms,
        )
        self.checks = checks = EpochChecks(self.epoch, started, setup.grace_ms)
        checks.machine, checks.executor = self.machine, self.executor
        checks.plan_look = self._plan_look
        self.machine.checks = checks
        self.log.write(started)
        self._world.check_recovery(former)
        for record in closing_records(former, now_ns) if former else ():
            self.log.write(record)
            checks.reasons[record.reason] += isinstance(record, r.SyncOutcome)  # type: ignore[union-attr]
        self.is_listening = True

    def _plan_look(self) -> None:
        self._world.timeline.after(0, self._look)

    def _look(self) -> None:
        if not (self.is_over or self.is_broken):
            self.checks.look_at_timers()

    # --- connections ---------------------------------------------------------------------------

    def connect(self, client: Node, reader: Reader, pid: int, uid: int, latency_ns: int) -> Wire:
        """Accept a connection; the daemon hears of it a little later."""
        wire = Wire(
            self._world.timeline, client, self.node, self.loop, reader, PeerSocket(pid, uid),
            Dice(self._dice.bits()), latency_ns,
        )  # fmt: skip
        self.wires.append(wire)
        # Accepting comes first, whatever the jitter: bytes of a connection wait until it was made.
        try:
            wire.transport.begin(self.server.new_connection())
        except Exception as error:
            if not self._on_error(error):
                raise
        return wire

    def process_exited(self, pid: int) -> None:
        """A local process is gone: its pidfd says so."""
        writer_id = self._processes.writer_by_pid.pop(pid, 0)
        if writer_id:
            self.node.after(self._dice.below(_EXIT_SEEN_NS), lambda: self._writer_gone(writer_id))

    def _writer_gone(self, writer_id: int) -> None:
        is_proof = not self._world.plan.setup.is_network
        self.executor.post(lambda at_ns: e.WriterGone(at_ns=at_ns, writer_id=writer_id, drained=is_proof))

    # --- faults and the end --------------------------------------------------------------------

    def jump(self, by_ms: int) -> None:
        """Let its monotonic clock jump ahead."""
        self.checks.clock_jumps += 1
        self._loop.jump(by_ms)

    def _on_error(self, error: Exception) -> bool:
        """Do as ``snapd.daemon`` does when the loop tells of an error; only what was planted is one here."""
        if self.is_broken and not isinstance(error, Broken):
            return True  # What follows from the first one.
        if not isinstance(error, Bug):
            return False
        self._world.note(f"daemon {self.epoch}: {error!r}")
        self.is_broken = True
        self.executor.halt()
        # Whatever else the loop has to do in this turn comes first.
        self.node.after(self._dice.below(_LAST_TURN_NS), self._end_broken)
        return True

    def _end_broken(self) -> None:
        """End with status 70: what is open stays open in the log, and the next life closes it."""
        self._write_stopped(Reason.INTERNAL_ERROR)
        self.checks.reasons[Reason.INTERNAL_ERROR] += 1
        self.server.close()
        self.log.close(1.0)
        self._end()

    def kill(self) -> None:
        """End it at once: what was not written is lost, and so is everything in memory."""
        self._end()
        line = self.log.writer.abandon()
        if line and self._dice.chance(50) and not self._world.disk.is_full:
            self._world.disk.tear(line)

    def stop(self) -> None:
        """End it in order (SIGTERM): drain, wait for readers, end what is open, write everything."""
        if self.is_broken:
            return
        self.executor.post(lambda at_ns: e.DrainAsked(at_ns=at_ns))
        deadline_ns = self.node.now_ns() + self.config.drain_timeout_ms * NS_PER_MS

        def look() -> None:
            if self.is_broken:
                return
            if self.machine.num_leased and self.node.now_ns() < deadline_ns:
                self.node.after(_DRAIN_POLL_NS, look)
            else:
                self._finish()

        look()

    def _finish(self) -> None:
        self.executor.post(lambda at_ns: e.StopAsked(at_ns=at_ns))
        if self.machine.books.open:
            raise Broken("stop", "the daemon has stopped, and attempts are open")
        self._write_stopped("SIGTERM")
        self.server.close()
        self.executor.close()
        self.log.close(1.0)
        self._end()

    def _write_stopped(self, reason: str) -> None:
        books = self.machine.books
        self.log.write(
            r.DaemonStopped(
                at_ns=self.executor.now_ns(),
                reason=reason,
                attempts=books.attempts,
                attempts_ok=books.outcomes[Reason.OK],
            )
        )

    def _end(self) -> None:
        self.is_listening = False
        self.is_over = True
        self.node.kill()
        for wire in self.wires:
            wire.daemon_died()
        self._world.daemon_ended(self)

    def _log_statistics(self) -> w.LogStatistics:
        assert self.server.records is not None
        self.server.records.flush()
        statistics = self.log.statistics()
        return w.LogStatistics(
            path="log",
            lines_written=statistics.lines_written,
            bytes_written=statistics.bytes_written,
            queued_lines=statistics.queued_lines,
            queued_bytes=statistics.queued_bytes,
            dropped=statistics.records_dropped,
            write_errors=statistics.write_errors,
            last_error=statistics.last_error,
            rotations=statistics.rotations,
        )

"""Faults, operators and strangers: what happens to a run beside its turns.

Each kind of ``plan.FAULTS`` is a method. What lasts is undone by itself, so that every run comes to rest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from snapd import calls
from snapd import wire as w
from snapd.core.events import State
from snapd.errors import ProtocolError, Reason, SnapdError
from snapd.layout import Layout
from snapd.units import NS_PER_MS
from tools.simulation.client import Ask, SimLink, Steps, Task
from tools.simulation.clock import Action, Node
from tools.simulation.daemon import DAEMON_UID, PUSHER_UID
from tools.simulation.decoder import Decoder
from tools.simulation.dice import Dice
from tools.simulation.disk import slow_ns
from tools.simulation.failure import Broken
from tools.simulation.network import Wire
from tools.simulation.plan import Fault
from tools.simulation.prefill import Prefill

if TYPE_CHECKING:
    from tools.simulation.world import World

_STRANGER_UID: Final = 4_711
_LAG_NS: Final = 250 * NS_PER_MS
_REPLAYED_MAX: Final = 8
_CROWD: Final = 30
_FLOOD: Final = 40


class RawClient:
    """Somebody who writes bytes to the socket, and reads the answers.

    Attributes:
        answers: whatever came back.
        is_closed: the daemon has hung up.
    """

    def __init__(self, world: "World", uid: int = DAEMON_UID) -> None:
        self.answers: list[w.AnyReply | w.AnyPush | None] = []
        self.is_closed = False
        self._world = world
        self._splitter = w.FrameSplitter(1 << 20)
        daemon = world.daemon
        node = Node(world.timeline)
        self._wire: Wire | None = None
        if daemon is not None and daemon.is_listening:
            self._wire = daemon.connect(node, self, world.new_pid(), uid, 100_000)

    def send(self, data: bytes) -> None:
        """Write what there is room for."""
        if self._wire is not None and data:
            try:
                self._wire.sock.send(memoryview(data))
            except OSError:
                self.is_closed = True

    def wake(self) -> None:
        """Read what has come."""
        assert self._wire is not None
        while not self.is_closed:
            try:
                data = self._wire.sock.recv(65_536)
            except OSError:
                return
            if not data:
                self.is_closed = True
                self._wire.sock.close()
                return
            for payload in self._splitter.feed(data):
                try:
                    answer = w.decode_answer(payload)
                except ProtocolError as error:
                    raise Broken("answer", f"the daemon sent what is no message: {error}") from None
                self.answers.append(answer)
                self._world.note_raw(answer)

    def close(self) -> None:
        """Hang up."""
        if self._wire is not None:
            self._wire.sock.close()


class Faults:
    """Lets faults happen in a world."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._watchers: list[SimLink] = []

    def strike(self, fault: Fault) -> None:
        """Let one happen now."""
        getattr(self, "_" + fault.kind.replace("-", "_"))(fault, Dice(fault.seed))

    def _later(self, fault: Fault, undo: Action) -> None:
        self._world.timeline.after(fault.for_ms * NS_PER_MS, undo)

    # --- the daemon and its clocks -------------------------------------------------------------

    def _crash(self, fault: Fault, dice: Dice) -> None:
        del dice
        daemon = self._world.daemon
        if daemon is not None:
            self._world.down_ms = fault.for_ms
            daemon.kill()

    def _bug(self, fault: Fault, dice: Dice) -> None:
        """Somewhere in the daemon an exception is raised that nobody foresees."""
        daemon = self._world.daemon
        if daemon is not None:
            self._world.down_ms = fault.for_ms
            daemon.bugs.arm(dice)

    def _restart(self, fault: Fault, dice: Dice) -> None:
        del dice
        daemon = self._world.daemon
        if daemon is not None and not self._world.is_stopping:
            self._world.down_ms = fault.for_ms
            self._world.is_stopping = True
            daemon.node.after(0, daemon.stop)

    def _stall(self, fault: Fault, dice: Dice) -> None:
        del dice
        if self._world.daemon is not None:
            self._world.daemon.node.stop_for(fault.for_ms * NS_PER_MS)

    def _jump(self, fault: Fault, dice: Dice) -> None:
        del dice
        if self._world.daemon is not None:
            self._world.daemon.jump(fault.for_ms)

    def _wall(self, fault: Fault, dice: Dice) -> None:
        self._world.wall_offset_s += (fault.for_ms / 10) * (1 if dice.chance(50) else -1)

    # --- connections and processes -------------------------------------------------------------

    def _decoder(self, fault: Fault) -> Decoder:
        return self._world.decoders[fault.target % len(self._world.decoders)]

    def _rank(self, fault: Fault) -> Prefill:
        return self._world.engine.ranks[fault.target % len(self._world.engine.ranks)]

    def _d_link(self, fault: Fault) -> SimLink:
        return self._decoder(fault).link

    def _p_link(self, fault: Fault) -> SimLink:
        return self._rank(fault).link

    def _cut_d(self, fault: Fault, dice: Dice) -> None:
        self._cut(self._d_link(fault), fault, dice)

    def _cut_p(self, fault: Fault, dice: Dice) -> None:
        self._cut(self._p_link(fault), fault, dice)

    def _cut(self, link: SimLink, fault: Fault, dice: Dice) -> None:
        """Cut it now, and some times more: what was under way is met with."""
        link.cut()
        for _ in range(dice.below(6)):
            self._world.timeline.after(dice.below(fault.for_ms * NS_PER_MS), link.cut)

    def _cut_all(self, fault: Fault, dice: Dice) -> None:
        del fault, dice
        if self._world.daemon is not None:
            for wire in self._world.daemon.wires:
                wire.cut()

    def _lag_d(self, fault: Fault, dice: Dice) -> None:
        self._lag(self._d_link(fault), fault, dice)

    def _lag_p(self, fault: Fault, dice: Dice) -> None:
        self._lag(self._p_link(fault), fault, dice)

    def _lag(self, link: SimLink, fault: Fault, dice: Dice) -> None:
        usual_ns = self._world.plan.setup.latency_us * 1_000

        def lag(latency_ns: int) -> None:
            link.latency_ns = latency_ns
            if link.wire is not None:
                link.wire.lag(latency_ns)

        lag(dice.below(_LAG_NS))
        self._later(fault, lambda: lag(usual_ns))

    def _stop_d(self, fault: Fault, dice: Dice) -> None:
        del dice
        self._decoder(fault).node.stop_for(fault.for_ms * NS_PER_MS)

    def _stop_p(self, fault: Fault, dice: Dice) -> None:
        del dice
        self._world.engine.ranks[fault.target % len(self._world.engine.ranks)].node.stop_for(
            fault.for_ms * NS_PER_MS
        )

    def _kill_d(self, fault: Fault, dice: Dice) -> None:
        del dice
        self._world.kill_decoder(self._decoder(fault), fault.for_ms)

    def _kill_p(self, fault: Fault, dice: Dice) -> None:
        del dice
        self._world.kill_prefill(
            self._world.engine.ranks[fault.target % len(self._world.engine.ranks)], fault.for_ms
        )

    # --- the disk and the bytes ----------------------------------------------------------------

    def _disk_full(self, fault: Fault, dice: Dice) -> None:
        del dice
        disk = self._world.disk
        disk.is_full = True
        self._later(fault, lambda: setattr(disk, "is_full", False))

    def _disk_slow(self, fault: Fault, dice: Dice) -> None:
        del dice
        disk = self._world.disk
        disk.latency_ns = slow_ns(fault.for_ms)
        self._later(fault, lambda: setattr(disk, "latency_ns", 0))

    def _flip(self, fault: Fault, dice: Dice) -> None:
        """A byte of what is READY changes, and nobody did it."""
        del fault
        daemon = self._world.daemon
        if daemon is None:
            return
        ready = [s for s in daemon.machine.books.open.values() if s.state is State.READY]
        if not ready:
            return
        session = dice.pick(ready)
        shard = session.shards[dice.pick(sorted(session.shards))]
        # The first byte of an extent is payload, whatever the padding.
        offset = dice.pick(shard.extents).offset_bytes
        daemon.memory[shard.rank].buffer[offset] ^= 1 << dice.below(8)
        self._world.flips += 1

    def _forget(self, fault: Fault, dice: Dice) -> None:
        """P evicts what it held of a session, or of all."""
        del fault
        self._world.engine.forget(dice)

    # --- operators -----------------------------------------------------------------------------

    def _operator(self, steps: Steps, name: str = "op") -> SimLink:
        node = Node(self._world.timeline)
        link = SimLink(self._world, node, name, self._world.new_pid(), DAEMON_UID, 100_000)
        # A watcher stays; everybody else hangs up.
        Task(self._world, node, link, steps, None if name == "watch" else link.close)
        return link

    def _abort(self, fault: Fault, dice: Dice) -> None:
        del fault

        def steps() -> Steps:
            try:
                listed: w.ListRep = yield Ask(calls.list_sessions(limit=10))
                if listed.sessions:
                    yield Ask(calls.abort(dice.pick(listed.sessions).slab_handle))
            except SnapdError:
                return

        self._operator(steps())

    def _drain(self, fault: Fault, dice: Dice) -> None:
        del dice

        def steps() -> Steps:
            try:
                yield Ask(calls.drain(True))
                yield min(fault.for_ms, 300) * NS_PER_MS
                yield Ask(calls.drain(False))
            except SnapdError:
                return

        self._operator(steps())

    def undrain(self) -> None:
        """Take new attempts again."""

        def steps() -> Steps:
            try:
                yield Ask(calls.drain(False))
            except SnapdError:
                return

        self._operator(steps())

    def _look(self, fault: Fault, dice: Dice) -> None:
        del fault

        def steps() -> Steps:
            try:
                stats: w.StatsRep = yield Ask(calls.stats(overview=dice.pick((None, "deadline", "bytes"))))
                for arena in stats.core.arenas:
                    if arena.free_bytes + arena.live_bytes + arena.quarantined_bytes != arena.capacity_bytes:
                        raise Broken("stats", f"arena {arena.rank} does not add up")
                states = tuple(State)[dice.below(3) :]
                listed: w.ListRep = yield Ask(
                    calls.list_sessions(states=states, offset=dice.below(3), limit=4)
                )
                if any(view.state not in states for view in listed.sessions):
                    raise Broken("list", "an attempt is listed in a state that was not asked for")
                for view in listed.sessions:
                    got: w.GetRep = yield Ask(calls.get(view.slab_handle))
                    if got.session.slab_handle != view.slab_handle:
                        raise Broken("get", f"{view.slab_handle} was asked for")
            except SnapdError:
                return

        self._operator(steps())

    def _watch(self, fault: Fault, dice: Dice) -> None:
        """Watch, and read nothing for a while."""
        del dice

        def steps() -> Steps:
            try:
                yield Ask(calls.watch())
            except SnapdError:
                return
            link.is_reading = False
            yield fault.for_ms * NS_PER_MS
            link.is_reading = True
            link.wake()

        link = self._operator(steps(), "watch")

    # --- strangers -----------------------------------------------------------------------------

    def _hello(self, raw: RawClient) -> None:
        raw.send(w.encode_frame(w.HelloReq(id=1, client="raw")))

    def _replay(self, fault: Fault, dice: Dice) -> None:
        """Messages come twice, and late: over another connection, in another order."""
        del fault
        world = self._world
        tape = [request for request in world.tape if not isinstance(request, w.BeginIngestReq | w.GetReq)]
        if world.daemon is None or not tape:
            return
        epoch = world.daemon.epoch
        raw = RawClient(world)
        self._hello(raw)
        wanted: list[int] = []
        for number in range(_REPLAYED_MAX):
            request = dice.pick(tape)
            raw.send(w.encode_frame(msgspec.structs.replace(request, id=number + 2)))
            if request.epoch not in ("", epoch):
                wanted.append(number + 2)

        def look() -> None:
            stale = {
                answer.id
                for answer in raw.answers
                if isinstance(answer, w.ErrorRep)
                and answer.reason in (Reason.STALE_HANDLE, Reason.INTERNAL_ERROR)
            }
            answered = {answer.id for answer in raw.answers if isinstance(answer, w.Reply)}
            if wrong := [number for number in wanted if number in answered and number not in stale]:
                raise Broken("stale-epoch", f"requests {wrong} of another epoch were not refused")
            raw.close()

        world.timeline.after(3_000 * NS_PER_MS, look)

    def _garbage(self, fault: Fault, dice: Dice) -> None:
        del fault
        raw = RawClient(self._world)
        if dice.chance(50):
            self._hello(raw)
        kind = dice.below(3)
        if kind == 0:
            raw.send(bytes(dice.below(256) for _ in range(dice.between(4, 40))))
        elif kind == 1:
            raw.send((1 << 24).to_bytes(4, "little") + b"x")
        else:
            raw.send(b"\x03\0\0\0\xc1\xc1\xc1")
        self._world.timeline.after(1_000 * NS_PER_MS, raw.close)

    def _half_frame(self, fault: Fault, dice: Dice) -> None:
        raw = RawClient(self._world)
        frame = w.encode_frame(w.HelloReq(id=1, client="half"))
        raw.send(frame[: dice.between(1, len(frame) - 1)])
        self._later(fault, raw.close)

    def _unknown(self, fault: Fault, dice: Dice) -> None:
        del fault
        raw = RawClient(self._world)
        self._hello(raw)
        body = w.encode_frame(w.PingReq(id=7))
        if dice.chance(50):
            raw.send(body.replace(b"PingReq", b"PongReq"))
        else:
            raw.send(w.encode_frame(w.AbortReq(id=7, slab_handle=1)).replace(b"slab_handle", b"slap_handle"))
        self._world.timeline.after(1_000 * NS_PER_MS, raw.close)

    def _stranger(self, fault: Fault, dice: Dice) -> None:
        """Another user connects: refused, with a reason."""
        del fault, dice
        raw = RawClient(self._world, _STRANGER_UID)
        self._hello(raw)

        def look() -> None:
            if any(not isinstance(answer, w.ErrorRep) for answer in raw.answers):
                raise Broken("stranger", "another user was served")

        self._world.timeline.after(1_000 * NS_PER_MS, look)

    def _limited(self, fault: Fault, dice: Dice) -> None:
        """Somebody who may push for one tenant only asks for what is others'."""
        del fault
        world = self._world
        raw = RawClient(world, PUSHER_UID)
        self._hello(raw)
        handle = world.tape[-1].slab_handle if world.tape else 1
        requests: list[w.Request] = [
            w.ListReq(id=2),
            w.DrainReq(id=3),
            w.AbortReq(id=4, slab_handle=handle, drained=True),
            w.TransferFailedReq(id=5, slab_handle=handle, drained=True),
            w.BeginIngestReq(id=6, slab_handle=handle, rank=0, layout_fingerprint=world.layouts[0][1]),
            w.SnapshotPrepareReceiveReqInput(
                id=7, session_id="s0", num_tokens=4, layout_fingerprint=world.layouts[0][1]
            ),
        ]
        for request in requests:
            if dice.chance(70):
                raw.send(w.encode_frame(request))

        def look() -> None:
            replies = [answer for answer in raw.answers if isinstance(answer, w.Reply) and answer.id > 1]
            if any(
                not (isinstance(reply, w.ErrorRep) or getattr(reply, "ok", None) is False)
                for reply in replies
            ):
                raise Broken("rights", f"a pusher of another tenant was answered {replies}")
            raw.close()

        world.timeline.after(1_000 * NS_PER_MS, look)

    def _crowd(self, fault: Fault, dice: Dice) -> None:
        """More connections than there may be; those that have one are served on."""
        del dice
        crowd = [RawClient(self._world) for _ in range(_CROWD)]
        for raw in crowd:
            self._hello(raw)
        self._world.timeline.after(min(fault.for_ms, 300) * NS_PER_MS, lambda: _close_all(crowd))

    def _flood(self, fault: Fault, dice: Dice) -> None:
        """Many requests at once, and nobody reads the answers for a while."""
        del dice
        raw = RawClient(self._world)
        self._hello(raw)
        for number in range(_FLOOD):
            raw.send(w.encode_frame(w.ListReq(id=number + 2, states=tuple(State), limit=50)))
        self._later(fault, raw.close)

    def _notices(self, fault: Fault, dice: Dice) -> None:
        """Somebody who reaches the data plane sends notifications of his own."""
        del fault
        world = self._world
        handle = world.tape[-1].slab_handle if world.tape else 1
        epoch = world.daemon.epoch if world.daemon is not None and dice.chance(50) else "0" * 16
        forged = w.TransferNotification(slab_handle=handle, epoch=epoch, rank=dice.below(9))
        for text in ("no notification", "{}", w.encode_notification(forged)):
            world.notify(text, dice)

    def _unmapped(self, fault: Fault, dice: Dice) -> None:
        """A buffer is asked for that is not there, or for which there is no descriptor; a bad layout."""
        raw = RawClient(self._world)
        self._hello(raw)
        raw.send(w.encode_frame(w.MapBufferReq(id=2, rank=dice.below(9))))
        raw.send(w.encode_frame(w.DeclareLayoutReq(id=3, rank=0, layout=Layout(()))))
        raw.send(w.encode_frame(w.HelloReq(id=4, protocol=99)))
        self._later(fault, raw.close)


def _close_all(clients: Sequence[RawClient]) -> None:
    for raw in clients:
        raw.close()

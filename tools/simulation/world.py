"""One run: a plan, played from its first event to its rest, watched all the way, and proved by its log.

The end is the same for all: faults are over, everything comes to rest, one more session of each namespace is
brought over from end to end, the daemon is stopped in order, and the whole log on file is proved.
"""

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from snapd import wire as w
from snapd.calls import Call, Grant
from snapd.errors import InternalError, ProtocolError, Reason, RequestError, SnapdError
from snapd.layout import Layout, fingerprint
from snapd.logrecovery import FormerEpoch
from snapd.units import NS_PER_MS, NS_PER_S
from tools.simulation.clock import Timeline
from tools.simulation.daemon import START_TS, Daemon
from tools.simulation.decoder import Decoder
from tools.simulation.dice import Dice
from tools.simulation.disk import Disk
from tools.simulation.ending import digest_files, prove_files
from tools.simulation.engine import Engine
from tools.simulation.failure import Broken
from tools.simulation.faults import Faults
from tools.simulation.memory import TOKENS_MAX, Content, Piece, SimArena, places_of
from tools.simulation.older import older_lines
from tools.simulation.plan import LAYOUTS, Fault, Plan, Turn
from tools.simulation.prefill import Prefill

_TAPE_MAX: Final = 48
_HEAL_SESSION: Final = 1_000
_NAMED_LAYOUTS: Final = tuple((layout, fingerprint(layout)) for layout in LAYOUTS)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run.

    Attributes:
        seed: of its plan.
        events: of the timeline.
        core_events: that the core took.
        sessions: attempts that began, over all lives of the daemon.
        inserted: snapshots that every rank has in its tree.
        reasons: why attempts, refusals, leases and requests ended.
        older: why attempts of the design before snapd did, by lines that stood in the log already.
        violation: what was wrong; empty: nothing.
        digest: of the log, to the byte.
        lines: of the log.
        facts: what else was met with.
    """

    seed: int
    events: int
    core_events: int
    sessions: int
    inserted: int
    reasons: dict[str, int]
    older: dict[str, int]
    violation: str
    digest: str
    lines: int
    facts: dict[str, int]


class Story:
    """A session as it truly is.

    Attributes:
        session_id: its name.
        history: of its tokens; a new one when it began anew.
        num_tokens: so far.
        ingested: history and tokens of what was last seen in the tree.
    """

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.history = 0
        self.num_tokens = 0
        self.ingested = (0, 0)


class World:
    """Everything of one run.

    Args:
        plan: what happens.
        directory: for the log; empty.
        trace: is told of everything that happens; None: nobody.
    """

    def __init__(self, plan: Plan, directory: Path, trace: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.timeline = Timeline(Dice(plan.seed, 2))
        self.disk = Disk(directory, Dice(plan.seed, 3))
        self.layouts: Sequence[tuple[Layout, str]] = _NAMED_LAYOUTS
        self.content = Content()
        self.tape: deque[w.HandleRequest] = deque(maxlen=_TAPE_MAX)
        self.wall_offset_s = 0.0
        self.down_ms = 50
        self.is_stopping = False
        self.corrupt_seen = 0
        self.flips = 0
        self.internal_told = 0
        self._told_ns = -1
        self.reasons: Counter[str] = Counter()
        self._trace = trace
        self._pids = 100
        self._exited: set[int] = set()
        self._stories: dict[tuple[int, int], Story] = {}
        self._histories = 0
        self._memory: dict[str, list[SimArena]] = {}
        self._is_final = False
        self._left_open: set[int] | None = None
        self._former_epoch = ""
        self._older = self._upgrade()
        self.daemons: list[Daemon] = []
        self.daemon: Daemon | None = None
        self._start_daemon()
        self.decoders = [Decoder(self, index) for index in range(plan.setup.decoders)]
        self.engine = Engine(self)
        self._faults = Faults(self)

    # --- the run -------------------------------------------------------------------------------

    def run(self) -> Result:
        """Play the plan to its end; whatever is found to be wrong is in the result."""
        violation = ""
        report = None
        try:
            self._play()
            report = prove_files(self.disk.files(), self.plan.setup.grace_ms, self._attempts())
            if report.older != self._older or Reason.ALLOC_FAILED in report.outcomes:
                raise Broken("older", f"of older lines {report.older} are told, and {self._older} were")
        except Broken as error:
            violation = str(error)
        except Exception as error:  # A bug of whatever kind: the daemon would stop, and so does the run.
            violation = f"exception: {type(error).__name__}: {error}{_place_of(error)}"
        finally:
            for daemon in self.daemons:
                with contextlib.suppress(OSError):
                    daemon.log.writer.abandon()
        if violation:
            self.note(f"VIOLATION {violation}")
        rest = (self.timeline.events, self.timeline.now_ns, sorted(self.reasons.items()))
        digest, lines = digest_files(self.disk.files(), rest)
        return Result(
            seed=self.plan.seed,
            events=self.timeline.events,
            core_events=sum(daemon.checks.num_events for daemon in self.daemons),
            sessions=self._attempts(),
            inserted=self.engine.inserted,
            reasons=dict(sorted(self._all_reasons().items())),
            older=report.older if report else {},
            violation=violation,
            digest=digest,
            lines=lines,
            facts={
                "epochs": len(self.daemons),
                "late-landings": sum(daemon.checks.late_landings for daemon in self.daemons),
                "flips": self.flips,
                "bugs": sum(daemon.bugs.raised for daemon in self.daemons),
                "bugs-told": self.internal_told,
                "corrupt-seen": self.corrupt_seen,
                "disk-failures": self.disk.failures,
                "lines-dropped": report.events_dropped if report else 0,
                "torn-lines": report.torn_lines if report else 0,
                "unproved": int(not report.is_whole) if report else 0,
            },
        )

    def _upgrade(self) -> dict[str, int]:
        """Begin in a log that the design before snapd has left; return the reasons that its lines tell."""
        count = self.plan.setup.older_lines
        if not count:
            return {}
        dice = Dice(self.plan.seed, 13)
        lines = older_lines(dice, count, START_TS)
        is_cut_off = dice.chance(30)
        self.disk.begin_older([line for _, line in lines], is_cut_off=is_cut_off)
        return dict(sorted(Counter(reason for reason, _ in lines[: count - is_cut_off]).items()))

    def _play(self) -> None:
        for turn in self.plan.turns:
            self._plan_turn(turn)
        for fault in self.plan.faults:
            self._plan_fault(fault)
        self.timeline.run()
        daemon = self._at_rest()
        self._heal(daemon)
        self._is_final = True
        daemon.stop()
        self.timeline.run()
        if not daemon.is_over:
            raise Broken("stop", "the daemon does not stop")

    def _plan_turn(self, turn: Turn) -> None:
        decoder = self.decoders[turn.decoder % len(self.decoders)]

        def start() -> None:
            if self._trace:
                self.note(f"turn {turn}")
            decoder.start(turn)

        self.timeline.at(turn.at_ms * NS_PER_MS, start)

    def _plan_fault(self, fault: Fault) -> None:
        def strike() -> None:
            self.note(f"fault {fault}")
            self._faults.strike(fault)

        self.timeline.at(fault.at_ms * NS_PER_MS, strike)

    def _at_rest(self) -> Daemon:
        daemon = self.daemon
        if daemon is None:
            raise Broken("no-rest", "the daemon is not there")
        if daemon.bugs.raised:
            raise Broken("went-on", "a bug has come up, and the daemon serves on")
        daemon.bugs.disarm()
        daemon.checks.at_rest()
        links = [*(decoder.link for decoder in self.decoders), *(rank.link for rank in self.engine.ranks)]
        if any(link.exchange.in_flight for link in links):
            raise Broken("leak", "a call has no end")
        for ingest in self.engine.unfinished():
            message = f"an ingest of attempt {ingest.handle} has no end on ranks {sorted(ingest.left)}"
            raise Broken("leak", message)
        return daemon

    def _heal(self, daemon: Daemon) -> None:
        """After all faults a session goes through from end to end, in every namespace."""
        # Who was stopped last goes on first.
        nodes = [daemon.node, *(one.node for one in self.decoders), *(one.node for one in self.engine.ranks)]
        self.timeline.at(max(node.stopped_until_ns for node in nodes) + NS_PER_MS, lambda: None)
        self.timeline.run()
        if daemon.machine.books.is_draining:
            # Whoever drained did not come to undrain.
            self._faults.undrain()
            self.timeline.run()
        for layout in range(self.plan.setup.layouts):
            inserted = self.engine.inserted
            at_ms = self.timeline.now_ns // NS_PER_MS + 10
            self._plan_turn(Turn(at_ms=at_ms, seed=layout, layout=layout, session=_HEAL_SESSION, grow=8))
            self.timeline.run()
            if self.engine.inserted != inserted + 1:
                raise Broken(
                    "not-served", f"after all faults a session of layout {layout} does not go through"
                )
        self._at_rest()

    # --- the daemon's lives --------------------------------------------------------------------

    def _start_daemon(self) -> None:
        if self.daemon is not None:
            return
        self.is_stopping = False
        self.daemon = daemon = Daemon(self, len(self.daemons))
        self.daemons.append(daemon)
        self._memory[daemon.epoch] = daemon.memory
        self.note(f"daemon {daemon.epoch} serves")
        if len(self.daemons) > 1:
            for prefill in self.engine.ranks:
                delay_ns = Dice(self.plan.seed, 9, len(self.daemons), prefill.rank).below(400 * NS_PER_MS)
                prefill.node.after(delay_ns, prefill.notice)

    def daemon_ended(self, daemon: Daemon) -> None:
        """A life is over; the next one begins after a while."""
        self.note(f"daemon {daemon.epoch} is gone")
        self.daemon = None
        assert daemon.server.service is not None
        self.reasons.update({str(reason): count for reason, count in daemon.server.service.refused.items()})
        statistics = daemon.log.statistics()
        is_told = not (statistics.queued_lines or statistics.records_dropped)
        # After a bug the log may lack what the core has done.
        left_open = daemon.log.open if daemon.is_broken else daemon.checks.open
        self._left_open = set(left_open) if is_told else None
        self._former_epoch = daemon.epoch
        if not self._is_final:
            self.timeline.after(self.down_ms * NS_PER_MS, self._start_daemon)

    def check_recovery(self, former: FormerEpoch | None) -> None:
        """What the log says was left open is what was, unless lines were lost.

        Raises:
            Broken: it is not.
        """
        if self._left_open is None:
            return
        attempts = former.attempts if former else ()
        told = {attempt.slab_handle for attempt in attempts if attempt.epoch == self._former_epoch}
        if told != self._left_open:
            raise Broken(
                "recovery", f"the log says that {sorted(told)} were open, and {sorted(self._left_open)} were"
            )

    def wall_s(self) -> float:
        """Return the wall clock, which may be set."""
        return START_TS + self.timeline.now_ns / NS_PER_S + self.wall_offset_s

    # --- processes -----------------------------------------------------------------------------

    def new_pid(self) -> int:
        """Return the pid of a process that has just begun."""
        self._pids += 1
        return self._pids

    def is_local_process(self, pid: int) -> bool:
        """Return whether a process lives."""
        return pid not in self._exited

    def process_exited(self, pid: int) -> None:
        """A process is gone."""
        self._exited.add(pid)
        if self.daemon is not None:
            self.daemon.process_exited(pid)

    def kill_decoder(self, decoder: Decoder, for_ms: int) -> None:
        """A D dies, and comes back."""
        if decoder.node.is_alive:
            self.note("a D dies")
            decoder.kill()
            self.timeline.after(for_ms * NS_PER_MS, decoder.revive)

    def kill_prefill(self, prefill: Prefill, for_ms: int) -> None:
        """A P rank dies, and comes back."""
        if prefill.node.is_alive:
            self.note(f"rank {prefill.rank} dies")
            prefill.kill()
            self.timeline.after(for_ms * NS_PER_MS, prefill.revive)

    # --- sessions ------------------------------------------------------------------------------

    def session_id(self, layout: int, session: int) -> str:
        """Return a session's name; two namespaces have sessions of the same names."""
        del layout
        return f"s{session}"

    def story_of(self, turn: Turn) -> Story:
        """Return a turn's session, which has grown by it."""
        story = self.story(turn.layout, turn.session)
        if turn.is_fresh or not story.history or story.num_tokens + turn.grow > TOKENS_MAX:
            self._histories += 1
            story.history, story.num_tokens = self._histories, 0
        story.num_tokens += turn.grow
        return story

    def story(self, layout: int, session: int) -> Story:
        """Return a session as it is now."""
        key = (layout, session)
        if key not in self._stories:
            self._stories[key] = Story(self.session_id(layout, session))
        return self._stories[key]

    # --- bytes ---------------------------------------------------------------------------------

    def memory_of(self, epoch: str) -> list[SimArena]:
        """Return the arenas of a life, as whoever mapped them has them."""
        return self._memory[epoch]

    def land(self, epoch: str, piece: Piece) -> None:
        """A write lands in the memory it was meant for, whoever has that by now."""
        if self.daemon is not None and self.daemon.epoch == epoch:
            self.daemon.checks.check_landing(piece.handle, piece.rank)
        buffer = self._memory[epoch][piece.rank].buffer
        for offset, data in piece.writes:
            buffer[offset : offset + len(data)] = data

    def notify(self, text: str, dice: Dice) -> None:
        """A notification goes with the bytes: it may be lost, late, or come twice, even to another life."""
        copies = dice.weighted({0: 15, 1: 60, 2: 25})
        for _ in range(copies):
            late_ns = dice.below(2_000 * NS_PER_MS) if dice.chance(20) else dice.below(NS_PER_MS)
            self.timeline.after(late_ns, lambda: self._notice(text))

    def _notice(self, text: str) -> None:
        if self.daemon is not None:
            self.daemon.notices.arrive(text)

    def flip(self, grant: Grant, dice: Dice) -> None:
        """A bit of an attempt's bytes changes, and nobody did it."""
        rank_grant = dice.pick(grant.ranks)
        place = dice.pick(places_of(rank_grant, grant.num_tokens))
        buffer = self._memory[grant.epoch][rank_grant.rank].buffer
        buffer[place.offset_bytes + dice.below(place.size_bytes)] ^= 1 << dice.below(8)
        self.flips += 1

    def check_reading(self, epoch: str, handle: int, rank: int) -> None:
        """A rank reads."""
        if self.daemon is not None and self.daemon.epoch == epoch:
            self.daemon.checks.check_reading(handle, rank)

    def check_grant(self, grant: Grant, layout: Layout, end_tokens: int) -> None:
        """A grant is for the tokens asked for, and its planes lie inside its extents.

        Raises:
            Broken: it is not, or they do not.
        """
        who = f"attempt {grant.slab_handle}"
        if grant.token_start + grant.num_tokens != end_tokens or grant.num_tokens < 1:
            raise Broken("grant", f"{who}: {grant.num_tokens} tokens from {grant.token_start}")
        for rank_grant in grant.ranks:
            places = places_of(rank_grant, grant.num_tokens)
            if len(places) != layout.num_planes:
                raise Broken("grant", f"{who}: {len(places)} planes")
            for place in places:
                end = place.offset_bytes + place.size_bytes
                if not any(
                    x.offset_bytes <= place.offset_bytes and end <= x.end_bytes for x in rank_grant.extents
                ):
                    raise Broken("grant", f"attempt {grant.slab_handle}: a plane lies outside its extents")
                if end > self.plan.setup.arena_bytes:
                    raise Broken("grant", f"{who}: a plane lies outside the arena")

    # --- what is seen --------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Tell the trace."""
        if self._trace is not None:
            self._trace(f"{self.timeline.now_ns / NS_PER_MS:12.3f} ms  {text}")

    def note_ask(self, name: str, call: Call[Any]) -> None:
        """Somebody asks."""
        if self._trace is not None:
            self.note(f"{name} asks {call.request}")

    def note_error(self, error: SnapdError) -> None:
        """A client's call has failed.

        Raises:
            Broken: no fault of the run excuses it.
        """
        if self._trace is not None:
            self.note(f"answer {type(error).__name__}: {str(error)[:120]}")
        if isinstance(error, ProtocolError):
            raise Broken("answer", f"a client was told {error!r}")
        if isinstance(error, InternalError):
            self._note_internal(str(error))
        if isinstance(error, RequestError) and error.reason is Reason.ALLOC_FAILED:
            raise Broken("answer", "a reason of the design that was replaced")

    def note_raw(self, answer: w.AnyReply | w.AnyPush | None) -> None:
        """A stranger was answered; what the service refused is counted there."""
        if isinstance(answer, w.ErrorRep) and answer.reason is Reason.INTERNAL_ERROR:
            self._note_internal(answer.detail)
        if isinstance(answer, w.ErrorRep) and (answer.id == 0 or answer.reason is Reason.UNKNOWN_TYPE):
            self.reasons[str(answer.reason)] += 1

    def _note_internal(self, detail: str) -> None:
        """Somebody was told ``internal-error``: for every bug that came up one may be, and nobody else.

        One answer may end several calls, at one time: when it was hello that was answered so.

        Raises:
            Broken: there is no bug that it could be.
        """
        if self._told_ns == self.timeline.now_ns:
            return
        self._told_ns = self.timeline.now_ns
        self.internal_told += 1
        if self.internal_told > sum(daemon.bugs.raised for daemon in self.daemons):
            raise Broken(
                "answer", f"a client was told {Reason.INTERNAL_ERROR}, and no bug was planted: {detail}"
            )

    def _attempts(self) -> int:
        return sum(daemon.machine.books.attempts for daemon in self.daemons)

    def _all_reasons(self) -> Counter[str]:
        reasons = self.reasons.copy()
        for daemon in self.daemons:
            reasons.update({str(reason): count for reason, count in daemon.checks.reasons.items()})
        return +reasons


def _place_of(error: BaseException) -> str:
    """Return where an exception came from, for the one line that reports it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"

"""A trace against a running daemon, with real bytes: D pushes them, P ingests them and compares every one.

The trace's sessions are played in one process and one thread: kv_pools of D and P in its memory, a
``Pusher`` and an ``Ingester`` a rank, all of the daemon's ranks. A turn that arrives has D make the KV of
its tokens and push what P lacks; P ingests it at once, or when the session's next turn arrives. The bytes
depend on session, token, rank and plane alone, so P's can be computed again when they are compared.
Prefill is not played: what P's tree holds has come out of snapshots.

A token takes far fewer bytes here than with a real model, so that a long trace fits: see
``LiveOptions.layers``. The pressure on the buffer is that of the arena's tokens, not of its bytes.

Needs torch, which is imported when a replay begins.
"""

import contextlib
import heapq
import secrets
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from snapd.errors import ConfigError, Reason, RequestError, SnapdError
from snapd.replay.chains import Turn
from snapd.replay.liveplan import CLIENT_NAME, LiveOptions, LiveProgress, LiveResult, Plan, Session, make_plan
from snapd.units import MIB, MS_PER_S

if TYPE_CHECKING:
    from snapd.client import Client
    from snapd.kv.ingest import IngestJob
    from snapd.replay.livekv import Worker
    from snapd.wire import HelloRep

__all__ = ["LiveOptions", "LiveProgress", "LiveResult", "run_live"]

# A turn runs until it yields: True, it has more to do; False, it waits for somebody.
Run: TypeAlias = Generator[bool, None, None]

STEP_BYTES: Final = 4 * MIB
_WAIT_S: Final = 0.0005


@dataclass(slots=True)
class Tally:
    """What was counted so far; the names are those of ``LiveResult``."""

    reasons: Counter[Reason]
    turns: int = 0
    unused: int = 0
    resent: int = 0
    reused_tokens: int = 0
    prompt_tokens: int = 0
    pushed_bytes: int = 0
    bytes: int = 0
    compared_bytes: int = 0
    corrupt: int = 0
    gather_ms: float = 0.0
    scatter_ms: float = 0.0
    late_s: float = 0.0
    late_s_max: float = 0.0


class _Replay:
    """Plays a plan: a loop that gives every turn under way a step in its turn, and nothing waits alone."""

    def __init__(
        self,
        client: "Client",
        worker: "Worker",
        plan: Plan,
        options: LiveOptions,
        progress: Callable[[LiveProgress], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self.tally = Tally(Counter())
        self._client = client
        self._worker = worker
        self._plan = plan
        self._progress = progress
        self._clock = clock
        self._is_eager = options.ingest == "eager"
        self._lanes = list(range(options.turns_at_once))
        self._running: list[tuple[Session, int, Run]] = []
        # In order of time, so a heap.
        self._due = [(session.steps[0].due_s, session.index) for session in plan.sessions]
        self._started_s = clock()

    def play(self) -> None:
        """Play all turns."""
        while self._due or self._running:
            self._begin_turns()
            is_moving = False
            for running in list(self._running):
                session, lane, run = running
                try:
                    is_moving |= next(run)
                except StopIteration:
                    self._running.remove(running)
                    self._end_turn(session, lane)
                    is_moving = True
            if not is_moving:
                time.sleep(self._idle_s())

    def _idle_s(self) -> float:
        if self._running:
            return _WAIT_S
        due_s = self._due[0][0] if self._due else 0.0
        return max(due_s - (self._clock() - self._started_s), 0.0)

    def _begin_turns(self) -> None:
        now_s = self._clock() - self._started_s
        while self._lanes and self._due and self._due[0][0] <= now_s:
            due_s, index = heapq.heappop(self._due)
            session = self._plan.sessions[index]
            self.tally.late_s += now_s - due_s
            self.tally.late_s_max = max(self.tally.late_s_max, now_s - due_s)
            lane = self._lanes.pop()
            self._running.append((session, lane, self._turn(session, lane)))

    def _end_turn(self, session: Session, lane: int) -> None:
        self._lanes.append(lane)
        self.tally.turns += 1
        session.done += 1
        if session.done < len(session.steps):
            heapq.heappush(self._due, (session.steps[session.done].due_s, session.index))
        if self._progress is not None:
            tally = self.tally
            late_ms = tally.late_s_max * MS_PER_S
            ok = tally.reasons[Reason.OK]
            self._progress(LiveProgress(tally.turns, self._plan.num_turns, ok, tally.bytes, late_ms))

    # --- one turn

    def _turn(self, session: Session, lane: int) -> Run:
        step = session.steps[session.done]
        if session.handle:
            yield from self._bring_home(session, lane)
        self.tally.prompt_tokens += step.prompt_tokens
        resident_tokens = self._worker.resident_tokens(session.session_id)
        self.tally.reused_tokens += min(resident_tokens, step.prompt_tokens)
        yield from self._push(session, step.end_tokens, lane)
        if session.handle and self._is_eager:
            yield from self._bring_home(session, lane)

    def _bring_home(self, session: Session, lane: int) -> Run:
        """Have P ingest; if it has evicted what the snapshot builds on, have D push all of it, once."""
        reason = yield from self._ingest(session)
        if reason is not Reason.PREFIX_NOT_RESIDENT:
            return
        self.tally.resent += 1
        # The daemon knows by now that P has nothing.
        yield from self._push(session, session.end_tokens, lane)
        if session.handle:
            yield from self._ingest(session)

    def _push(self, session: Session, end_tokens: int, lane: int) -> Run:
        """Have D make and push what P is not known to hold."""
        worker, tally = self._worker, self.tally
        token_ids = session.token_ids(end_tokens)
        try:
            grant = worker.pusher.prepare(session.session_id, token_ids)
        except RequestError as error:
            tally.reasons[error.reason] += 1
            return
        session.handle, session.token_start, session.end_tokens = (
            grant.slab_handle, grant.token_start, end_tokens,
        )  # fmt: skip
        slots = worker.lane_slots(lane, grant.num_tokens)
        for _ in worker.make(session.index, lane, grant.token_start, grant.num_tokens):
            yield True
        job = worker.pusher.start_granted(grant, slots)
        while not job.step(STEP_BYTES):
            yield True
        result = job.result
        tally.gather_ms += result.gather_ms
        if result.ok:
            tally.pushed_bytes += result.bytes
        else:
            session.handle = 0
            tally.reasons[result.reason] += 1
            self._abort(grant.slab_handle)

    def _ingest(self, session: Session) -> Generator[bool, None, Reason]:
        """Have P bring the session's snapshot home on every rank, and compare it; return how it ended."""
        handle, tally = session.handle, self.tally
        with self._worker.room_for(session):
            jobs: list[IngestJob] = []
            try:
                for ingester in self._worker.ingesters:
                    token_ids = session.token_ids(session.end_tokens)
                    jobs.append(ingester.start(session.session_id, token_ids, handle))
                # A list: every rank goes on, also when one is not done.
                while not all([job.step(STEP_BYTES) for job in jobs]):  # noqa: C419
                    yield not all(job.done or job.is_waiting for job in jobs)
            finally:
                for job in jobs:
                    if not job.done:
                        job.cancel()
            session.handle = 0
            is_ok = all(job.result.ok for job in jobs)
            reason = Reason.OK if is_ok else self._why_not(handle, [job.result.reason for job in jobs])
            tally.reasons[reason] += 1
            if not is_ok:
                return reason
            tally.scatter_ms += sum(job.times.scatter_ms for job in jobs)
            num_bytes = session.num_tokens * self._worker.token_bytes * len(jobs)
            tally.bytes += num_bytes
            is_same = True
            for is_same_part in self._worker.compare(session, session.token_start, session.end_tokens):
                is_same &= is_same_part
                yield True
            tally.compared_bytes += num_bytes
            tally.corrupt += not is_same
        return Reason.OK

    def _why_not(self, handle: int, reasons: Sequence[Reason]) -> Reason:
        """Return why an attempt was not ingested; one that is still open is ended."""
        with contextlib.suppress(RequestError):
            view = self._client.get(handle).session
            if view.reason is not Reason.OK:
                return view.reason
            self._abort(handle)
        return next(reason for reason in reasons if reason is not Reason.OK)

    def _abort(self, handle: int) -> None:
        """End an attempt at which nobody works any more."""
        with contextlib.suppress(RequestError):
            self._client.abort(handle, drained=True)

    # --- the end

    def finish(self) -> None:
        """End what no turn is left for, and count it: READY ones as unused, others by their reason."""
        for session in self._plan.sessions:
            if session.handle:
                try:
                    view = self._client.get(session.handle).session
                    reason = view.reason
                except RequestError as error:
                    reason = error.reason
                if reason is Reason.OK:
                    self.tally.unused += 1
                    self._abort(session.handle)
                else:
                    self.tally.reasons[reason] += 1
                session.handle = 0

    def give_up(self) -> None:
        """End all that is open: the replay was interrupted, or failed."""
        for _, _, run in self._running:
            # An ingest gives its lease back. A push writes no more, which the abort below says.
            with contextlib.suppress(SnapdError):
                run.close()
        for session in self._plan.sessions:
            if session.handle:
                with contextlib.suppress(SnapdError):
                    self._client.abort(session.handle, drained=True)

    def result(self, plan: Plan, arena_tokens: int, play_s: float) -> LiveResult:
        """Return the figures."""
        tally = self.tally
        attempts, ok = tally.reasons.total(), tally.reasons[Reason.OK]
        return LiveResult(
            sessions=len(plan.sessions),
            turns=tally.turns,
            attempts=attempts,
            ok=ok,
            ok_rate=ok / attempts if attempts else 0.0,
            reasons={str(reason): count for reason, count in sorted(tally.reasons.items()) if count},
            unused=tally.unused,
            resent=tally.resent,
            reused_tokens=tally.reused_tokens,
            prompt_tokens=tally.prompt_tokens,
            pushed_bytes=tally.pushed_bytes,
            bytes=tally.bytes,
            compared_bytes=tally.compared_bytes,
            corrupt=tally.corrupt,
            push_gb_per_s=_gb_per_s(tally.pushed_bytes, tally.gather_ms),
            ingest_gb_per_s=_gb_per_s(tally.bytes, tally.scatter_ms),
            play_s=play_s,
            late_ms_max=tally.late_s_max * MS_PER_S,
            late_ms_mean=tally.late_s / max(tally.turns, 1) * MS_PER_S,
            token_scale=plan.token_scale,
            token_bytes=self._worker.token_bytes,
            arena_tokens=arena_tokens,
        )


def _gb_per_s(num_bytes: int, duration_ms: float) -> float:
    return num_bytes / duration_ms / 1e6 if duration_ms else 0.0


def run_live(
    turns: Sequence[Turn],
    options: LiveOptions,
    progress: Callable[[LiveProgress], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> LiveResult:
    """Replay a trace against the daemon at ``options.socket_path``, and return when all of it was played.

    Whatever ends it, what it left open at the daemon is aborted: a ``KeyboardInterrupt`` goes on after that.

    Args:
        turns: linked by ``chains.chain_turns``, at times that are divided by the speed-up already.
        options: where, and how large.
        progress: called after each turn.
        clock: seconds, monotonic.

    Raises:
        ExtraMissing: torch is not installed.
        ConfigError: an option is out of range, the daemon's arenas are not in host memory, or one has no room
            for the longest session.
        ConnectionProblem: there is no daemon, or it went away.
        NotEnoughMemory: the kv_pools would not fit.
    """
    options.check()
    import snapd.kv  # noqa: F401 - says what is missing, before anything is begun
    from snapd.client import Client
    from snapd.demo.plan import PAGE_SIZE_TOKENS
    from snapd.kv.threads import torch_threads
    from snapd.replay.livekv import Worker

    plan = make_plan(turns, options.max_tokens, PAGE_SIZE_TOKENS, secrets.token_hex(4))
    with contextlib.ExitStack() as stack:
        # More than one spin while they wait for each other, and the daemon wants a core as well.
        stack.enter_context(torch_threads(1))
        client = stack.enter_context(
            Client(options.socket_path, timeout_s=options.timeout_s, name=CLIENT_NAME)
        )
        hello = client.connect()
        check_daemon(hello)
        worker = stack.enter_context(contextlib.closing(Worker(client, options, plan)))
        arena_tokens = min(arena.size_bytes for arena in hello.arenas) // worker.token_bytes
        replay = _Replay(client, worker, plan, options, progress, clock)
        started_s = clock()
        try:
            replay.play()
            play_s = clock() - started_s
            replay.finish()
        except BaseException:
            replay.give_up()
            raise
        return replay.result(plan, arena_tokens, play_s)


def check_daemon(hello: "HelloRep") -> None:
    """Check that bytes of this process can go where the daemon has its arenas.

    Raises:
        ConfigError: they cannot; the message says which daemon to start for it.
    """
    elsewhere = [arena for arena in hello.arenas if arena.device != "cpu"]
    if elsewhere:
        raise ConfigError(
            f"arena {elsewhere[0].rank} of the daemon is on {elsewhere[0].device}, and a live replay moves "
            'bytes of host memory: start a daemon of its own for it, with device = "cpu"'
        )
    if hello.transport != "shm":
        raise ConfigError(
            f"the daemon's transport is {hello.transport}, and a live replay goes over shared memory: start "
            'a daemon of its own for it, with transport = "shm"'
        )

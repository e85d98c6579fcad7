"""P: first come, first served, in chunks; slots are held until D has the KV."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from snapd.replay.chains import Turn
from snapd.replay.clock import SimClock
from snapd.replay.link import Link
from snapd.replay.model import Model
from snapd.replay.sync import Sync
from snapd.replay.tree import Match, PrefixTree
from snapd.units import NS_PER_MS


@dataclass(slots=True)
class Prefilled:
    """What P did for a turn.

    Attributes:
        began_ns: when its first step began; -1: never.
        done_ns: when its first token was there; -1: never.
        cached_tokens: of the prompt that were resident.
        unsynced_tokens: of these, those that would have been without syncs.
    """

    began_ns: int = -1
    done_ns: int = -1
    cached_tokens: int = 0
    unsynced_tokens: int = 0


@dataclass(slots=True)
class _Running:
    turn: Turn
    match: Match
    slots: int
    next_token: int


class Prefill:
    """One P worker.

    Args:
        model: how fast it is.
        clock: of the run.
        tree: its slots.
        sync: asked before every step and every prefill.
        to_decode: the link to D.
        reserve: asks D for room; calls back when there is some.
        arrived: called when D has a turn's KV.
        results: by turn; filled in.

    Attributes:
        busy_ns: time in steps and copies.
        steps: that computed something.
        rejected: turns whose prompt is larger than the kv_pool.
    """

    def __init__(
        self,
        model: Model,
        clock: SimClock,
        tree: PrefixTree,
        sync: Sync,
        to_decode: Link,
        reserve: Callable[[Turn, Callable[[], None]], None],
        arrived: Callable[[Turn], None],
        results: list[Prefilled],
    ) -> None:
        self._model = model
        self._clock = clock
        self.tree = tree
        self._sync = sync
        self._to_decode = to_decode
        self._reserve = reserve
        self._arrived = arrived
        self._results = results
        self._queue: deque[Turn] = deque()
        # Of these only the last may be in the middle of its prompt.
        self._running: list[_Running] = []
        self._is_busy = False
        self.busy_ns = 0
        self.rejected = 0
        self.steps = 0

    def submit(self, turn: Turn) -> None:
        """A request has arrived."""
        if turn.input_tokens > self.tree.pool_tokens:
            self.rejected += 1
            return
        self._queue.append(turn)
        self.wake()

    def wake(self) -> None:
        """Something may be done now that could not before."""
        if not self._is_busy:
            self._step()

    # --- steps

    def _step(self) -> None:
        """Copy what is to be ingested, or compute a chunk, or rest."""
        copy_ns = self._sync.ingest_before_step()
        if copy_ns:
            self._busy_for(copy_ns, self._copies_done)
            return
        compute_ns = 0
        budget = self._model.chunk_tokens
        done: list[_Running] = []
        now_ns = self._clock.now_ns()
        while budget > 0:
            if not self._running:
                if not self._queue:
                    break
                turn = self._queue[0]
                if self._sync.has_for(turn):
                    if compute_ns:
                        break  # The copy comes between two steps.
                    copy_ns = self._sync.ingest_before_prefill(turn)
                    if copy_ns:
                        self._busy_for(copy_ns, self._copies_done)
                        return
                if not self._admit(turn, now_ns):
                    break
                self._queue.popleft()
            running = self._running[0]
            first = running.next_token
            end = min(running.turn.input_tokens, first + budget)
            compute_ns += self._model.prefill_ns(first, end)
            budget -= end - first
            running.next_token = end
            if end == running.turn.input_tokens:
                done.append(self._running.pop())
        if compute_ns:
            self.steps += 1
            compute_ns += round(self._model.step_overhead_ms * NS_PER_MS)
            self._busy_for(compute_ns, lambda: self._computed(done))

    def _busy_for(self, duration_ns: int, then: Callable[[], None]) -> None:
        self._is_busy = True
        self.busy_ns += duration_ns
        self._clock.at(self._clock.now_ns() + duration_ns, then)

    def _copies_done(self) -> None:
        self._sync.copies_done()
        self._is_busy = False
        self._step()

    def _admit(self, turn: Turn, now_ns: int) -> bool:
        """Take slots for a prompt; False: there are none, and all behind it wait too."""
        match = self.tree.match_prompt(turn)
        slots = turn.input_tokens - match.tokens
        if not self.tree.allocate(slots):
            self.tree.release(turn, match)
            return False
        result = self._results[turn.index]
        result.began_ns = now_ns
        result.cached_tokens = match.tokens
        result.unsynced_tokens = match.unsynced_tokens
        self._running.append(_Running(turn, match, slots, match.tokens))
        return True

    def _computed(self, done: list[_Running]) -> None:
        self._is_busy = False
        for running in done:
            turn = running.turn
            self._results[turn.index].done_ns = self._clock.now_ns()
            self.tree.insert_prompt(turn, running.match, running.slots)
            self._send(turn, self.tree.match_turn(turn))
        self._step()

    def _send(self, turn: Turn, held: Match) -> None:
        """Send a prompt's KV to D, as soon as that has room; until it is there, it cannot be evicted."""

        def sent() -> None:
            self.tree.release(turn, held)
            self._arrived(turn)
            self.wake()

        self._reserve(turn, lambda: self._to_decode.send(self._model.link_ns(turn.input_tokens), sent))

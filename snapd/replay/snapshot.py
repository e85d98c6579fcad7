"""The snapshot run: the real core, by the daemon's executor and timers, under simulated time."""

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from snapd.core import events as e
from snapd.core.eviction import Rank, RankedOrder, Snapshot
from snapd.core.machine import Machine
from snapd.core.records import Record
from snapd.core.session import Settings
from snapd.core.slab import SlabAllocator
from snapd.errors import InvariantBroken, Reason
from snapd.executor import HANDLE_BITS, Executor, RecordSink
from snapd.layout import fingerprint
from snapd.replay.chains import Turn
from snapd.replay.clock import Action, SimClock
from snapd.replay.decode import Decode
from snapd.replay.link import Link
from snapd.replay.model import Model
from snapd.replay.sync import Sync
from snapd.replay.tree import Match, PrefixTree
from snapd.units import ms_to_ns

RANK: Final = 0
_D_CONN: Final = 1
_P_CONN: Final = 2


class NoLog:
    """Takes records and drops them."""

    def write(self, record: Record) -> None:
        """Drop it."""


@dataclass(slots=True)
class _Attempt:
    """What is being brought over; *num_tokens* from *token_start* on, once granted."""

    handle: int
    turn: Turn
    token_start: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class _Copy:
    """What P is copying: into so many *slots*, after what is *resident*."""

    attempt: _Attempt
    lease_id: int
    resident: Match
    slots: int


class ClairvoyantOrder(RankedOrder):
    """Evicts what is needed last, or never: Belady's rule. No daemon can know that; it is a yardstick.

    Paper: Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal
    5(2), 1966.
    """

    def __init__(self, turn_of: Callable[[int], Turn], turns: Sequence[Turn]) -> None:
        super().__init__()
        self._turn_of = turn_of
        self._turns = turns

    def rank_of(self, handle: int, snapshot: Snapshot) -> Rank:
        """Return when the next turn comes, negated."""
        del snapshot
        turn = self._turn_of(handle)
        next_ns = min((self._turns[child].at_ns for child in turn.children), default=None)
        return (float("-inf") if next_ns is None else -float(next_ns),)


class SnapshotSync(Sync):
    """D pushes into the buffer when a turn ends; P ingests when it can.

    Args:
        model: of the run.
        clock: of the run.
        tree: P's slots.
        to_prefill: the link from D.
        turns: of the trace; only the clairvoyant policy looks ahead in them.
        log: takes the records.
    """

    def __init__(
        self,
        model: Model,
        clock: SimClock,
        tree: PrefixTree,
        to_prefill: Link,
        turns: Sequence[Turn],
        log: RecordSink,
    ) -> None:
        super().__init__()
        self._model = model
        self._clock = clock
        self._tree = tree
        self._to_prefill = to_prefill
        self._random = random.Random(model.seed)  # noqa: S311 - handles of a simulation
        self._attempts: dict[int, _Attempt] = {}
        # By turn, in the order in which they became READY.
        self._ready: OrderedDict[int, _Attempt] = OrderedDict()
        self._copying: list[_Copy] = []
        # What P held of a prompt before a snapshot was ingested for it, by turn.
        self.own_tokens: dict[int, int] = {}
        self.resent = 0
        self.buffer_peak_bytes = 0
        self._wake_prefill: Action = lambda: None
        is_clairvoyant = model.policy == "clairvoyant"
        self._arena = SlabAllocator(model.buffer_bytes)
        settings = Settings(
            ready_ttl_ms=model.ready_ttl_ms,
            eviction_policy="lru" if model.policy == "clairvoyant" else model.policy,
        )
        self.machine = Machine(
            settings,
            {RANK: self._arena},
            victims=ClairvoyantOrder(self._turn_of, turns) if is_clairvoyant else None,
        )
        self._executor = Executor(
            self.machine, log, clock, clock.call_later, self._ended, lambda record: None
        )
        self._layout = model.layout()
        self._fingerprint = fingerprint(self._layout)
        self._checksums: e.PlaneChecksums = ((0, 0),) * self._layout.num_planes
        self._ask(
            lambda at, cause: e.LayoutDeclared(at_ns=at, cause_id=cause, rank=RANK, layout=self._layout)
        )

    def connect(self, decode: Decode, wake_prefill: Action) -> None:
        """Say who D is, and how P is woken; neither can be made before the sync is."""
        self._decode = decode
        self._wake_prefill = wake_prefill

    def _turn_of(self, handle: int) -> Turn:
        return self._attempts[handle].turn

    def _ask(self, event: Callable[[int, int], e.Event]) -> e.Result:
        """Ask the core; everything that is asked here is answered at once, as there is one rank."""
        results: list[e.Result] = []
        self._executor.ask(event, results.append)
        return results[0]

    # --- D -------------------------------------------------------------------------------------

    def turn_ended(self, turn: Turn) -> None:
        """Send what P lacks, as far as D can know it."""
        if turn.kv_tokens <= turn.input_tokens:
            self.counts.nothing_to_send += 1
            return
        # P has just prefilled the prompt.
        token_start = turn.input_tokens if self._model.send == "suffix" else 0
        self._prepare(turn, token_start, self._model.prepare_retries)

    def _prepare(self, turn: Turn, token_start: int, retries: int) -> None:
        handle = 0
        while not handle or handle in self._attempts or self.machine.books.find(handle) is not None:
            handle = self._random.getrandbits(HANDLE_BITS)
        attempt = _Attempt(handle, turn)
        self._attempts[handle] = attempt
        counts = self.counts
        counts.attempts += 1
        granted = self._ask(
            lambda at, cause: e.PrepareAsked(
                at_ns=at,
                cause_id=cause,
                slab_handle=handle,
                session_id=turn.session_id,
                layout_fingerprint=self._fingerprint,
                num_tokens=turn.kv_tokens - token_start,
                token_start=token_start,
                use_resident_hint=self._model.send == "hint",
                conn_id=_D_CONN,
            )
        )
        if isinstance(granted, e.Refused):
            del self._attempts[handle]
            counts.reasons[granted.reason] += 1
            counts.fitting += granted.reason is not Reason.TOO_LARGE
            if granted.reason is Reason.SNAPSHOT_BUF_FULL and retries:
                self._clock.at(
                    self._clock.now_ns() + ms_to_ns(granted.retry_after_ms),
                    lambda: self._prepare_again(turn, token_start, retries - 1),
                )
            return
        assert isinstance(granted, e.Granted)
        counts.fitting += 1
        attempt.token_start = granted.token_start
        attempt.num_tokens = granted.num_tokens
        self._transfer(attempt)

    def _prepare_again(self, turn: Turn, token_start: int, retries: int) -> None:
        if self._decode.has(turn):
            self._prepare(turn, token_start, retries)

    def _transfer(self, attempt: _Attempt) -> None:
        self._decode.pin(attempt.turn)
        self.buffer_peak_bytes = max(self.buffer_peak_bytes, self._arena.live_bytes)
        self._ask(
            lambda at, cause: e.TransferStarted(
                at_ns=at, cause_id=cause, slab_handle=attempt.handle, conn_id=_D_CONN
            )
        )
        self.counts.sent_tokens += attempt.num_tokens
        self.counts.written_ns += self._model.hbm_ns(attempt.num_tokens)
        self._to_prefill.send(self._model.link_ns(attempt.num_tokens), lambda: self._written(attempt))

    def _written(self, attempt: _Attempt) -> None:
        self._decode.unpin(attempt.turn)
        if attempt.handle not in self._attempts:
            # It has ended meanwhile, and its bytes wait for this.
            self._ask(lambda at, cause: e.WriterDrained(at_ns=at, cause_id=cause, slab_handle=attempt.handle))
            return
        # In the table before the core says READY: what supersedes or evicts it then finds it there.
        self._ready[attempt.turn.index] = attempt
        self._ask(
            lambda at, cause: e.RankCommitted(
                at_ns=at,
                cause_id=cause,
                slab_handle=attempt.handle,
                rank=RANK,
                num_bytes=attempt.num_tokens * self._layout.token_bytes,
                num_tokens=attempt.num_tokens,
                checksums=self._checksums,
                conn_id=_D_CONN,
            )
        )
        self._wake_prefill()

    def _ended(self, told: e.EndTold) -> None:
        """The core says that an attempt has ended; both ends are told, so P's word is left out."""
        attempt = self._attempts.pop(told.slab_handle, None)
        if attempt is not None:
            if self._ready.get(attempt.turn.index) is attempt:
                del self._ready[attempt.turn.index]
            self.counts.reasons[told.reason] += 1

    # --- P -------------------------------------------------------------------------------------

    def ingest_before_step(self) -> int:
        """Begin the copies that P makes of its own accord."""
        if self._model.ingest == "on-demand":
            return 0
        copy_ns = 0
        for attempt in list(self._ready.values()):
            if self._ready.get(attempt.turn.index) is not attempt:
                continue  # What was sent again for one before it has evicted it.
            if self._model.ingest == "hybrid" and not self._is_time(attempt):
                break
            bounced = self.counts.bounced
            copy_ns += self._begin_copy(attempt)
            if self.counts.bounced > bounced:
                break  # P has no slots for the oldest; the others wait their turn.
        return copy_ns

    def _is_time(self, attempt: _Attempt) -> bool:
        """Whether P has free slots, or the buffer is to be emptied."""
        is_full = self._arena.live_bytes > self._model.hybrid_fill * self._arena.capacity_bytes
        return is_full or self._tree.free_tokens >= attempt.num_tokens

    def has_for(self, turn: Turn) -> bool:
        """Return whether what the turn goes on from lies in the buffer."""
        return turn.parent in self._ready

    def ingest_before_prefill(self, turn: Turn) -> int:
        """Begin the copy of what the turn goes on from."""
        attempt = self._ready[turn.parent]
        match = self._tree.match_prompt(turn)
        self._tree.release(turn, match)
        self.own_tokens.setdefault(turn.index, match.tokens)
        return self._begin_copy(attempt)

    def _begin_copy(self, attempt: _Attempt) -> int:
        """Lease a snapshot and take slots for what P lacks of it; return how long the copy takes, in ns."""
        turn = attempt.turn
        leased = self._ask(
            lambda at, cause: e.LeaseAsked(
                at_ns=at,
                cause_id=cause,
                slab_handle=attempt.handle,
                rank=RANK,
                layout_fingerprint=self._fingerprint,
                session_id=turn.session_id,
                conn_id=_P_CONN,
            )
        )
        if not isinstance(leased, e.Leased):
            raise InvariantBroken(f"a READY snapshot of {turn.session_id} was not leased: {leased}")
        resident = self._tree.match_turn(turn)
        if resident.tokens < attempt.token_start:
            self._tree.release(turn, resident)
            self._vote(attempt, leased.lease_id, Reason.PREFIX_NOT_RESIDENT)
            if self._model.resend and self._decode.has(turn):
                self.resent += 1
                self._prepare(turn, 0, self._model.prepare_retries)
            return 0
        slots = max(0, turn.kv_tokens - resident.tokens)
        if not self._tree.allocate(slots):
            self._tree.release(turn, resident)
            self.counts.bounced += 1
            self._vote(attempt, leased.lease_id, Reason.ALLOC_FAILED_ON_FINALIZE, keep=True)
            return 0
        self._copying.append(_Copy(attempt, leased.lease_id, resident, slots))
        copy_ns = max(1, self._model.copy_ns(slots))
        self.counts.copied_ns += copy_ns
        return copy_ns

    def copies_done(self) -> None:
        """Vote for what was copied, and insert it once the core says so."""
        copies, self._copying = self._copying, []
        for copy in copies:
            decided = self._vote(copy.attempt, copy.lease_id, Reason.OK)
            turn = copy.attempt.turn
            if isinstance(decided, e.Decided) and decided.commit:
                self._tree.insert_synced(turn, copy.resident, copy.slots, turn.kv_tokens)
            else:
                self._tree.give_back(copy.slots)
                self._tree.release(turn, copy.resident)

    def _vote(self, attempt: _Attempt, lease_id: int, reason: Reason, *, keep: bool = False) -> e.Result:
        return self._ask(
            lambda at, cause: e.VoteCast(
                at_ns=at,
                cause_id=cause,
                slab_handle=attempt.handle,
                rank=RANK,
                lease_id=lease_id,
                ok=reason is Reason.OK,
                reason=reason,
                keep=keep,
            )
        )

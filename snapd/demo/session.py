"""One session of the play, from its first request to its last comparison."""

import asyncio
import random
from typing import Final

from snapd.demo import messages as m
from snapd.demo.chaos import Chaos, TurnKey, abort_attempt
from snapd.demo.plan import SessionPlan, Turn
from snapd.demo.stage import FINALIZE_WAIT_MS, Seat, Stage
from snapd.demo.workers import DemoError, Worker, WorkerGone
from snapd.errors import Reason
from snapd.units import MS_PER_S
from snapd.wire import SnapshotFinalizeIngestReqInput

PUSH_TRIES: Final = 6
# A rank's rounds that another rank ended, for one snapshot.
ROUNDS_MAX: Final = 400
# After its last turn a session's cache is brought home too; a router does not know that it was the last.
LINGER_S: Final = 0.3
STALL_EXTRA_MS: Final = 300
_PREFILL_MS: Final = (120, 360)
_PREFILL_SHARES: Final = (0.4, 1.6)
# What a rank that could have gone on hears when another one ended the round.
_AGAIN_AFTER: Final = frozenset({
    Reason.ALLOC_FAILED_ON_FINALIZE, Reason.ROUND_ABORTED, Reason.LEASE_EXPIRED,
})  # fmt: skip
_PUSH_AGAIN: Final = frozenset({
    Reason.PREFIX_NOT_RESIDENT, Reason.CHECKSUM_MISMATCH, Reason.EVICTED, Reason.READY_EXPIRED,
})  # fmt: skip


class SessionRun:
    """Plays one session.

    Every turn: P finalizes what the turn before left in the daemon's buffer, on all ranks; D makes
    the KV of the new tokens and pushes it.
    """

    def __init__(self, stage: Stage, chaos: Chaos, plan: SessionPlan, lease_ms: int) -> None:
        self._stage = stage
        self._chaos = chaos
        self._plan = plan
        self._lease_ms = lease_ms
        self._token_ids = plan.token_ids(stage.options.seed)
        self._rng = random.Random(f"prefill/{stage.options.seed}/{plan.index}")  # noqa: S311 - not for secrets
        self._seat: Seat | None = None
        self._slots: list[int] = []
        self._segments: list[m.Segment] = []
        # How many segments are in D's pool, and which life of D put them there.
        self._made = 0
        self._made_in = 0
        self._ready_handle = 0
        self._ready_tokens = 0
        self._turn: TurnKey = (plan.index, 0)

    @property
    def index(self) -> int:
        """The session's number."""
        return self._plan.index

    async def run(self) -> None:
        """Play all turns.

        Raises:
            DemoError: a worker failed.
        """
        stage = self._stage
        for number, turn in enumerate(self._plan.turns):
            await stage.until(turn.arrives_s)
            stage.tally.turns += 1
            self._prefill(number, turn)
            await self._bring_home()
            if self._seat is None:
                self._seat, self._slots = await stage.take_slots(self._plan.end_tokens)
            self._turn = (self._plan.index, number)
            start = self._segments[-1].stop if self._segments else 0
            self._segments.append(m.Segment(number, start, turn.end_tokens))
            await self._push()
            stage.tally.turns_done += 1
        await asyncio.sleep(LINGER_S)
        await self._bring_home()
        if self._seat is not None:
            await stage.give_slots(self._seat, self._slots)
        for rank in stage.ranks:
            rank.tell(m.SessionOver(session_id=self._plan.session_id))
        stage.tally.sessions_done += 1

    def _prefill(self, number: int, turn: Turn) -> None:
        """Give both ranks the prompt's prefill to do. They are not equally fast, so they fail apart."""
        flooded = self._chaos.floods.get((self._plan.index, number))
        for rank_index, rank in enumerate(self._stage.ranks):
            is_flood = flooded == rank_index
            num_tokens = int(turn.prefill_tokens * self._rng.uniform(*_PREFILL_SHARES))
            rank.tell(
                m.Prefill(
                    num_tokens=self._stage.plan.prefill_slots if is_flood else num_tokens,
                    duration_ms=self._rng.randint(*_PREFILL_MS),
                    idle_victims=int(is_flood),
                )
            )

    # --- D -------------------------------------------------------------------------------------

    async def _push(self) -> None:
        """Have D make what it lacks, and push until the snapshot is READY or it was tried often enough."""
        stage, seat = self._stage, self._seat
        assert seat is not None
        packed = m.pack_slots(self._slots)
        end_tokens = self._segments[-1].stop
        for tried in range(PUSH_TRIES):
            stage.tally.pushes_again += tried > 0
            await seat.is_up.wait()
            command = m.PushTurn(
                session=self._plan.index,
                session_id=self._plan.session_id,
                token_ids=self._token_ids[:end_tokens],
                slots=m.pack_slots(self._slots[:end_tokens]),
                pace_ms=self._chaos.pace_ms(self._turn),
            )
            try:
                await self._make(seat, packed)
                ended = await seat.worker.call(command, m.PushEnded)
            except WorkerGone:
                if seat.is_up.is_set():
                    raise  # Nobody killed it.
                continue
            if ended.slab_handle:
                stage.tally.handles.add(ended.slab_handle)
            elif ended.reason is Reason.TRANSFER_FAILED:
                # The daemon did not refuse: this D cannot reach it, or cannot write to it.
                raise DemoError(f"{seat.worker.name} cannot push: {ended.detail}")
            stage.tally.retried_pieces += ended.retried_pieces
            if ended.ok:
                stage.tally.undrained_commits += not ended.drained
                stage.tally.pushed_bytes += ended.num_bytes
                self._ready_handle, self._ready_tokens = ended.slab_handle, end_tokens
                return
        stage.tally.given_up += 1

    async def _make(self, seat: Seat, packed: bytes) -> None:
        if self._made_in != seat.deaths:
            # What a D that was killed had is lost; drawn again it is the same, as computed KV would be.
            self._made, self._made_in = 0, seat.deaths
        missing = tuple(self._segments[self._made :])
        if missing:
            command = m.Decode(session=self._plan.index, segments=missing, slots=packed)
            deaths = seat.deaths
            await seat.worker.call(command, m.Decoded)
            self._made, self._made_in = len(self._segments), deaths

    def on_moved(self, seat: Seat, moved: m.PushMoved) -> bool:
        """Strike a push that is under way, if it is its turn; return whether D was killed."""
        stage, worker = self._stage, seat.worker
        if self._chaos.takes_kill(self._turn, moved):
            self._note("killed", worker, moved.slab_handle, moved)
            stage.tally.handles.add(moved.slab_handle)
            return True
        if self._chaos.takes_abort(self._turn, moved):
            self._note("aborted", worker, moved.slab_handle, moved)
            stage.client.abort(moved.slab_handle)
        return False

    def _note(self, what: str, worker: Worker, handle: int, moved: m.PushMoved | None = None) -> None:
        self._chaos.note(what, self._plan.session_id, worker, handle, self._stage.elapsed_s, moved)

    # --- P -------------------------------------------------------------------------------------

    async def _bring_home(self) -> None:
        """Have all ranks finalize what is READY, and D push again what cannot be brought home."""
        tally = self._stage.tally
        for _ in range(PUSH_TRIES):
            handle, self._ready_handle = self._ready_handle, 0
            if not handle:
                return
            answers = await asyncio.gather(
                *(
                    self._finalize(rank_index, rank, handle)
                    for rank_index, rank in enumerate(self._stage.ranks)
                )
            )
            oks = [answer.output.ok for answer in answers]
            if any(oks):
                self._note_ingest(handle, answers)
                if not all(oks):
                    tally.faults.append(f"attempt {handle}: some ranks inserted and some did not")
                return
            if not _PUSH_AGAIN & {answer.output.reason for answer in answers}:
                break
            tally.pushes_again += 1
            await self._push()
        # D holds the tokens still: the next turn's push brings them along.
        tally.given_up += 1

    def _note_ingest(self, handle: int, answers: list[m.Finalized]) -> None:
        tally = self._stage.tally
        tally.ingested[handle] = sum(answer.num_bytes for answer in answers)
        tally.compared_bytes += sum(answer.compared_bytes for answer in answers)
        tally.corrupt += any(answer.differing_planes for answer in answers)

    async def _finalize(self, rank_index: int, rank: Worker, handle: int) -> m.Finalized:
        """Have one rank finalize, and again as long as there is hope; return its last answer."""
        assert self._seat is not None
        tally, retries = self._stage.tally, self._stage.options.finalize_retries
        tokens = self._ready_tokens
        request = SnapshotFinalizeIngestReqInput(
            session_id=self._plan.session_id, token_ids=self._token_ids[:tokens], slab_handle=handle
        )
        is_stalled = rank_index == 1 and self._chaos.takes_stall(self._turn)
        if is_stalled:
            self._note("stalled", rank, handle)
        stall_ms = self._lease_ms + STALL_EXTRA_MS if is_stalled else 0
        tries = rounds = 0
        while True:
            command = m.Finalize(
                request=request,
                decoder=self._seat.index,
                slots=m.pack_slots(self._slots[:tokens]),
                is_last_try=tries >= retries,
                stall_ms=stall_ms,
            )
            stall_ms = 0
            answer = await rank.call(command, m.Finalized)
            if answer.had_no_slots:
                tally.alloc_failed.add(handle)
                if tries >= retries:
                    return answer
                tries += 1
            elif answer.output.reason in _AGAIN_AFTER:
                rounds += 1
                if rounds > ROUNDS_MAX:
                    await abort_attempt(self._stage.client, handle)
                    return answer
            else:
                return answer
            await asyncio.sleep(FINALIZE_WAIT_MS / MS_PER_S)

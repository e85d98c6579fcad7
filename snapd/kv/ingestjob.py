"""One ingest of P's, in steps: lease, copy, compare, vote, insert. Made by ``Ingester.start``.

Source: design, sections 3 and 8.
"""

import contextlib
import enum
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, cast

import msgspec
import structlog
import torch

from snapd import calls
from snapd.client import Pending
from snapd.errors import ConfigError, ConnectionProblem, InvalidRequest, Reason, RequestError, SnapdError
from snapd.kv.checksum import checksums_equal
from snapd.kv.copy import ScatterJob
from snapd.kv.devicejob import CopyInterrupted, DeviceJob, DeviceMemoryFull
from snapd.kv.devicescatter import DeviceScatter
from snapd.kv.hostscatter import HostScatter
from snapd.kv.integrity import AttemptContext, mismatch_facts
from snapd.kv.keyedscatter import KeyedScatter
from snapd.kv.planes import extents_of
from snapd.layout import token_digest
from snapd.mapping import AnyMappedArena
from snapd.units import MS_PER_S, align_down
from snapd.wire import ArenaOffer, BeginIngestRep, SnapshotFinalizeIngestReqOutput, VoteRep

if TYPE_CHECKING:
    from snapd.kv.ingest import Ingester

AnyScatter = HostScatter | DeviceScatter | KeyedScatter
STEP_BYTES: Final = 64 * 1024 * 1024
_VOTES_MAX: Final = 2
_ANSWER_S: Final = 1.0
# How long one ``wait`` looks for the end of a copy on a GPU, and how often.
DEVICE_WAIT_S: Final = 0.1
_DEVICE_POLL_S: Final = 0.000_05
assert _DEVICE_POLL_S < DEVICE_WAIT_S
_log: Final = structlog.get_logger("snapd.kv")


class KVOwner(Protocol):
    """P's own bookkeeping, which an engine adapter provides: kv_pool slots and the radix tree."""

    def lock_prefix(self, session_id: str, token_ids: Sequence[int]) -> int:
        """Return how many tokens of *token_ids*, from the first on, are in the tree, and pin them."""
        ...

    def unlock_prefix(self, session_id: str) -> None:
        """Undo ``lock_prefix``."""
        ...

    def allocate(self, num_tokens: int) -> torch.Tensor | None:
        """Return slots for *num_tokens* more tokens, int64, whole pages first; None: there is no room."""
        ...

    def free(self, slots: torch.Tensor) -> None:
        """Take slots back that were not inserted."""
        ...

    def insert(
        self, session_id: str, token_ids: Sequence[int], resident_tokens: int, slots: torch.Tensor
    ) -> None:
        """Put tokens ``[resident_tokens, len(token_ids))``, whose KV is in *slots*, into the tree."""
        ...


class IngestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where an ingest's time went.

    Attributes:
        scatter_ms: moving and summing bytes; on a GPU from the first launch until the end was seen.
        vote_ms: from the vote to the decision: other ranks are waited for.
        total_ms: from the lease to the end.
        bytes: bytes read.
    """

    scatter_ms: float = 0.0
    vote_ms: float = 0.0
    total_ms: float = 0.0
    bytes: int = 0


def check_places(pool_device: torch.device, rank: int, arenas: Sequence[ArenaOffer]) -> None:
    """Check that *rank*'s arena is where a pool on *pool_device* can be filled from.

    Raises:
        ConfigError: it is not; the message says what to set. A rank without an arena is for others to refuse.
    """
    for arena in arenas:
        if arena.rank != rank or (arena.device == "cpu") == (pool_device.type == "cpu"):
            continue
        raise ConfigError(
            f"the kv_pool of rank {rank} is on {pool_device}, and its arena on {arena.device}: set "
            f'device = "{pool_device}" for arena {rank} in the daemon\'s configuration (as it counts GPUs)'
        )


class _Phase(enum.Enum):
    SCATTER = enum.auto()
    # Given up, and the GPU still works for it.
    ENDING = enum.auto()
    VOTE = enum.auto()
    DONE = enum.auto()


class IngestJob:
    """An ingest under way. Made by ``Ingester.start``; ``step`` until it says that it is done."""

    def __init__(
        self,
        ingester: "Ingester",
        session_id: str,
        token_ids: Sequence[int],
        slab_handle: int,
        after: Sequence[torch.cuda.Event] | None,
        wanted_tokens: int | None = None,
        layout_fingerprint: str = "",
    ) -> None:
        self._in = ingester
        self._wanted_tokens = wanted_tokens
        self._session_id = session_id
        self._handle = slab_handle
        self._started_s = time.monotonic()
        self._after = after
        self._scatter_s = 0.0
        self._launched_s = 0.0
        self._voted_s = 0.0
        self._bytes = 0
        self._phase = _Phase.DONE
        self._result: SnapshotFinalizeIngestReqOutput | None = None
        self._slots: torch.Tensor | None = None
        self._is_locked = False
        self._scatter: AnyScatter | None = None
        self._layout_fingerprint = layout_fingerprint or ingester.layout_fingerprint
        self._arena: AnyMappedArena | None = None
        self._no: tuple[Reason, bool] = (Reason.INGEST_FAILED, True)
        self._finished: torch.cuda.Event | None = None
        self._vote: Pending[VoteRep] | None = None
        self._token_ids: Sequence[int] = ()
        self._resident_tokens = 0
        self._used_tokens = 0
        self._votes_cast = 0
        self._has_agreed = False
        self.decision: VoteRep | None = None
        # A lease belongs to the epoch in which it is given.
        self._epoch = ingester.client.epoch
        # From before it is asked for, so that it is never over here later than at the daemon.
        asked_s = time.monotonic()
        try:
            self._lease = ingester.client.begin_ingest(
                slab_handle,
                ingester.rank,
                self._layout_fingerprint,
                session_id=session_id,
            )
            self._epoch = ingester.client.epoch
            self._lease_end_s = asked_s + self._lease.lease_ms / MS_PER_S
        except SnapdError as error:
            self._finish(_reason_of(error))
            return
        try:
            self._begin(self._lease, token_ids)
        except SnapdError as error:
            if isinstance(error, ConfigError):
                # The daemon came back with another configuration.
                _log.error("this daemon's snapshots cannot be ingested", error=str(error))
            self._vote_no(_reason_of(error), keep=True)
        except Exception:
            self._abandon()
            raise

    @property
    def done(self) -> bool:
        """The ingest has ended, one way or the other."""
        return self._result is not None

    @property
    def result(self) -> SnapshotFinalizeIngestReqOutput:
        """How it ended.

        Raises:
            InvalidRequest: it has not.
        """
        if self._result is None:
            raise InvalidRequest("the ingest is not done: step it until it is")
        return self._result

    @property
    def is_waiting(self) -> bool:
        """This rank has voted, and the others have not: there are no bytes to move."""
        return self._phase is _Phase.VOTE

    @property
    def is_on_device(self) -> bool:
        """The GPU works for it: ``step`` will look how far it is."""
        return self._scatter is not None and not self._scatter.is_idle

    @property
    def finished(self) -> torch.cuda.Event:
        """The event after the last byte and sum, so that a stream that reads the slots can wait for it.

        An inserted snapshot needs no waiting: its bytes were there before the vote.

        Raises:
            InvalidRequest: the copy is not launched, there was none, or the pool is not on a GPU.
        """
        event = self._finished if self._scatter is None else self._scatter.finished
        if event is None:
            raise InvalidRequest("no copy is launched on a GPU: step the ingest until it is")
        return event

    @property
    def times(self) -> IngestTimes:
        """Where the time went, so far."""
        now_s = time.monotonic()
        return IngestTimes(
            scatter_ms=self._scatter_s * MS_PER_S,
            vote_ms=(now_s - self._voted_s) * MS_PER_S if self._voted_s else 0.0,
            total_ms=(now_s - self._started_s) * MS_PER_S,
            bytes=self._bytes,
        )

    def step(self, max_bytes: int) -> bool:
        """Move up to *max_bytes*, or look for the decision, without waiting; return whether it ended.

        On a GPU bytes are launched, and then looked for. A copy on one GPU is launched at once.
        """
        if self._phase is _Phase.SCATTER:
            self._guard(lambda: self._step_scatter(max_bytes))
        elif self._phase is _Phase.ENDING:
            self._guard(lambda: self._vote_no(self._no[0], keep=self._no[1]))
        elif self._phase is _Phase.VOTE:
            self._guard(self._poll_vote)
        return self.done

    def wait(self) -> None:
        """Wait for the other ranks' votes, or at most ``DEVICE_WAIT_S`` for the GPU.

        For the GPU it steps on meanwhile. Does nothing while there are bytes to move.
        """
        if self._phase is _Phase.VOTE:
            self._guard(self._await_vote)
            return
        until_s = time.monotonic() + DEVICE_WAIT_S
        while self.is_on_device and time.monotonic() < until_s:
            time.sleep(_DEVICE_POLL_S)
            self.step(STEP_BYTES)

    def cancel(self) -> bool:
        """Give the ingest up, for instance because its request was aborted; the snapshot stays READY.

        It is not done before a copy that was launched on a GPU has ended, as slots and lease are given back
        only then: step on, or leave it to ``Ingester.reap``.

        Returns:
            False when the vote is cast: the other ranks may insert, so step on until the decision.
        """
        if self._phase is _Phase.VOTE:
            return False
        if not self.done:
            self._vote_no(Reason.INGEST_FAILED, keep=True)
        return True

    def _guard(self, act: Callable[[], None]) -> None:
        """Do a step; whatever goes wrong in it, nothing stays lent, pinned or leased."""
        try:
            try:
                act()
            except SnapdError as error:
                if self.done:
                    raise  # The owner's own, while everything was given back.
                self._fail(error)
        except Exception:
            self._abandon()
            raise

    # --- steps ---------------------------------------------------------------------------------

    def _begin(self, lease: BeginIngestRep, token_ids: Sequence[int]) -> None:
        end_tokens = lease.token_start + lease.num_tokens
        # Where less is wanted, tokens that end before the snapshot does were matched by page keys.
        is_matched = self._wanted_tokens is not None and len(token_ids) < end_tokens
        wanted_tokens = end_tokens if self._wanted_tokens is None else min(self._wanted_tokens, end_tokens)
        if len(token_ids) < wanted_tokens or not (
            is_matched or token_digest(token_ids[:end_tokens]) == lease.token_digest
        ):
            self._vote_no(Reason.TOKEN_MISMATCH, keep=False)
            return
        self._token_ids = token_ids[:wanted_tokens]
        owner = self._in.owner
        resident_tokens = owner.lock_prefix(self._session_id, self._token_ids)
        self._is_locked = True
        self._resident_tokens = align_down(resident_tokens, self._in.layout.page_size_tokens)
        if self._resident_tokens < lease.token_start:
            # The suffix would land at the wrong positions.
            self._vote_no(Reason.PREFIX_NOT_RESIDENT, keep=self._in.keep_on_missing_prefix)
            return
        missing_tokens = wanted_tokens - self._resident_tokens
        if missing_tokens > 0:
            self._slots = owner.allocate(missing_tokens)
            if self._slots is None:
                self._vote_no(Reason.ALLOC_FAILED_ON_FINALIZE, keep=self._in.keep_on_alloc_failure)
                return
        check_places(self._in.pool.device, self._in.rank, self._in.client.hello.arenas)
        # Its own: after a restart of the daemon another takes its place among the ingester's.
        self._arena = self._in.slabs.arena(lease.grant.rank, self._epoch)
        planes = self._in.slabs.planes(lease.grant, lease.num_tokens, self._epoch)
        self._bytes = sum(size_bytes for _, size_bytes in extents_of(planes))
        self._used_tokens = max(0, wanted_tokens - lease.token_start)
        skip_tokens = min(lease.num_tokens, self._resident_tokens - lease.token_start)
        stop_tokens = max(skip_tokens, self._used_tokens)
        self._scatter = self._new_scatter(planes, skip_tokens, stop_tokens, lease.num_tokens)
        self._phase = _Phase.SCATTER

    def _new_scatter(
        self, planes: Sequence[torch.Tensor], skip_tokens: int, stop_tokens: int, num_tokens: int
    ) -> AnyScatter:
        return self._make_scatter(planes, skip_tokens, stop_tokens, num_tokens)

    def _make_scatter(
        self,
        planes: Sequence[torch.Tensor],
        skip_tokens: int,
        stop_tokens: int,
        num_tokens: int,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> AnyScatter:
        """Return what moves the tokens that are wanted and sums all; *groups*: see ``HostScatter``."""
        pool, copies, verify = self._in.pool, self._in.copies, self._in.verify
        if self._in.integrity is not None:
            return KeyedScatter(
                pool,
                planes,
                self._slots,
                skip_tokens,
                num_tokens,
                stop_tokens=stop_tokens,
                macs=self._in.integrity.accepted_macs(self._context(), len(planes)),
                groups=groups,
            )
        if not copies.is_async:
            return HostScatter(
                cast("Callable[..., ScatterJob]", copies.scatter),
                pool,
                planes,
                self._slots,
                skip_tokens,
                num_tokens,
                stop_tokens=stop_tokens,
                verify=verify,
                groups=groups,
            )
        return DeviceScatter(
            cast("Callable[..., DeviceJob]", copies.scatter),
            pool,
            planes,
            self._slots,
            skip_tokens,
            num_tokens,
            stop_tokens=stop_tokens,
            verify=verify,
            stream_of=self._in.stream_of,
            after=self._after,
            private=self._in.private,
            groups=groups,
            summing=copies.summing,
        )

    def _context(self) -> AttemptContext:
        """Return what D's MACs must be bound to: what this rank asked for, and the lease says of it."""
        return AttemptContext(
            epoch=self._epoch,
            slab_handle=self._handle,
            rank=self._in.rank,
            layout_fingerprint=self._layout_fingerprint,
            token_start=self._lease.token_start,
            num_tokens=self._lease.num_tokens,
            token_digest=self._lease.token_digest,
        )

    def _differing_planes(self) -> list[int]:
        """Return the planes of which P read other bytes than D committed."""
        if isinstance(self._scatter, KeyedScatter):
            return self._scatter.differing(self._lease.checksums)
        if not self._in.verify:
            return []
        assert self._scatter is not None
        return checksums_equal(self._lease.checksums, self._scatter.checksums())

    def _step_scatter(self, max_bytes: int) -> None:
        assert self._scatter is not None
        started_s = time.monotonic()
        if self._in.copies.is_async:
            if not self._scatter.is_launched:
                self._check_readable(started_s)
            started_s = self._launched_s = self._launched_s or started_s
            is_done = self._scatter.step(max_bytes)
            self._scatter_s = time.monotonic() - started_s
        else:
            is_done = self._scatter.step(max_bytes)
            self._scatter_s += time.monotonic() - started_s
        self._compare(is_done)

    def _compare(self, is_done: bool) -> None:
        """Vote, when all of it was moved and summed."""
        if not is_done:
            return
        differing = self._differing_planes()
        if differing:
            self._refuse_bytes(len(differing))
        else:
            self._go_to_vote()

    def _refuse_bytes(self, differing: int) -> None:
        """Vote no: *differing* planes are not those that D committed."""
        if time.monotonic() >= self._lease_end_s:
            # Others may write there by now: nothing is known of the snapshot.
            self._vote_no(Reason.LEASE_EXPIRED, keep=True)
            return
        _log.warning(
            "a snapshot's bytes are not those that D committed; nothing of it is used",
            session_id=self._session_id,
            slab_handle=self._handle,
            rank=self._in.rank,
            **mismatch_facts(self._in.integrity, differing, self._in.layout.num_planes),
        )
        self._vote_no(Reason.CHECKSUM_MISMATCH, keep=False)

    def _go_to_vote(self) -> None:
        self._voted_s = time.monotonic()
        self._phase = _Phase.VOTE
        self._cast_vote()

    def _check_readable(self, now_s: float) -> None:
        """Check that the memory is still the daemon's and the lease this rank's: a launch cannot be stopped.

        Raises:
            ConnectionLost: the daemon is gone, and its memory on a GPU with it; or the ingester is closed.
            RequestError: the lease is over.
        """
        assert self._arena is not None
        self._arena.check_alive()
        if now_s >= self._lease_end_s:
            raise RequestError("nothing was copied within the lease's time", reason=Reason.LEASE_EXPIRED)

    def _cast_vote(self) -> None:
        self._votes_cast += 1
        self._vote = self._in.client.submit(
            calls.vote(
                self._handle,
                self._in.rank,
                self._lease.lease_id,
                ok=True,
                epoch=self._epoch,
                # The lease's deadline bounds the daemon's answer; the rest is for the way back.
                timeout_s=self._lease.lease_ms / MS_PER_S + _ANSWER_S,
            )
        )

    def _poll_vote(self) -> None:
        assert self._vote is not None
        reply = self._vote.poll()
        if reply is not None:
            self._decide(reply)

    def _await_vote(self) -> None:
        assert self._vote is not None
        self._decide(self._vote.wait())

    def _decide(self, reply: VoteRep) -> None:
        self.decision = reply
        self._settle(reply.reason, commit=reply.commit)

    def _settle(self, reason: Reason, *, commit: bool) -> None:
        """Insert or do not, as the ranks agree: the daemon may have died between two of its answers."""
        if not self._agree(commit):
            self._finish(Reason.ROUND_ABORTED if reason is Reason.OK else reason)
            return
        if self._slots is not None:
            slots, self._slots = self._slots, None
            self._in.owner.insert(self._session_id, self._token_ids, self._resident_tokens, slots)
        self._finish(Reason.OK)

    def _vote_no(self, reason: Reason, *, keep: bool) -> None:
        """Say no and end. A copy that runs still reads the slab and writes the slots: then later."""
        if self.is_on_device:
            if self._phase is not _Phase.ENDING:
                self._phase = _Phase.ENDING
                self._no = (reason, keep)
                self._leave_to_reap()
            return
        # The lease's deadline says no as well.
        with contextlib.suppress(SnapdError):
            self.decision = self._in.client.vote(
                self._handle,
                self._in.rank,
                self._lease.lease_id,
                ok=False,
                reason=reason if reason in _VOTES else Reason.INGEST_FAILED,
                keep=keep,
                epoch=self._epoch,
            )
        self._finish(reason)

    def _leave_to_reap(self) -> None:
        """It was given up while a GPU works for it: somebody has to step it until it is done."""
        self._in.give_back_later(self)

    def _fail(self, error: SnapdError) -> None:
        """Nothing was decided as far as this rank knows: ask again, or do not insert."""
        if isinstance(error, DeviceMemoryFull):
            _log.warning("an ingest failed, and the snapshot is kept", error=str(error))
        if self._phase is _Phase.SCATTER:
            self._vote_no(_reason_of(error), keep=isinstance(error, _BLAMELESS))
        elif isinstance(error, ConnectionProblem) and self._votes_cast < _VOTES_MAX:
            # The daemon remembers its answer.
            try:
                self._cast_vote()
            except SnapdError as second_error:
                self._settle(_reason_of(second_error), commit=False)
        elif self._phase is _Phase.VOTE:
            self._settle(_reason_of(error), commit=False)

    def _agree(self, commit: bool) -> bool:
        """Ask the other ranks' common answer, once; without them it is this rank's own."""
        if self._in.agree is None or self._has_agreed:
            return commit
        self._has_agreed = True
        return self._in.agree(self._handle, commit)

    def _abandon(self) -> None:
        """The engine's own code raised: nothing stays lent, pinned or leased because of it.

        Slots that were being inserted are not given back: the tree may have them.
        """
        if self.done:
            return
        if self._phase is _Phase.VOTE:
            self._finish(Reason.INGEST_FAILED)
        else:
            self._vote_no(Reason.INGEST_FAILED, keep=True)

    def _finish(self, reason: Reason) -> None:
        owner = self._in.owner
        slots, self._slots = self._slots, None
        is_locked, self._is_locked = self._is_locked, False
        self._phase = _Phase.DONE
        self._finished = None if self._scatter is None else self._scatter.finished
        self._scatter = None
        self._arena = None
        is_ok = reason is Reason.OK
        self._result = SnapshotFinalizeIngestReqOutput(
            ok=is_ok, reason=reason, num_tokens=self._used_tokens if is_ok else 0
        )
        # All of it is done, once, whatever the owner raises on the way.
        with contextlib.ExitStack() as stack:
            # The other ranks wait for this one's part of the agreement, whatever came of it here.
            stack.callback(self._agree, commit=False)
            if is_locked:
                stack.callback(owner.unlock_prefix, self._session_id)
            if slots is not None:
                owner.free(slots)


_VOTES: Final = frozenset({
    Reason.ALLOC_FAILED_ON_FINALIZE, Reason.CHECKSUM_MISMATCH, Reason.TOKEN_MISMATCH,
    Reason.PREFIX_NOT_RESIDENT, Reason.INGEST_FAILED,
})  # fmt: skip

# Nothing is wrong with the snapshot when it was one of these.
_BLAMELESS: Final = (ConnectionProblem, DeviceMemoryFull, CopyInterrupted)


def _reason_of(error: SnapdError) -> Reason:
    if isinstance(error, RequestError):
        return error.reason
    # Whether the daemon has decided is not known: the answer, as far as this rank goes, is no.
    return Reason.LEASE_EXPIRED if isinstance(error, ConnectionProblem) else Reason.INGEST_FAILED

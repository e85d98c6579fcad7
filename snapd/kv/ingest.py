"""P's side: brings a READY snapshot into this rank's kv_pool, and into its tree only after "commit".

Lease, allocate, copy and sum in one pass, compare, vote, insert. What did not match, or was not
decided, never reaches the tree: its slots go back.

Source: design, sections 3 and 8.
"""

import contextlib
import enum
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import msgspec
import torch

from snapd import calls
from snapd.client import Client, Pending
from snapd.errors import ConnectionProblem, InvalidRequest, Reason, RequestError, SnapdError
from snapd.kv.checksum import CHUNK_BYTES, ChecksumAccumulator, PlaneChecksum, checksums_equal, plane_checksum
from snapd.kv.copy import ScatterJob
from snapd.kv.pool import KVPool
from snapd.kv.slabs import Slabs
from snapd.layout import Namespace, fingerprint, token_digest
from snapd.units import MS_PER_S, align_down
from snapd.wire import (
    BeginIngestRep,
    LookupRep,
    SnapshotFinalizeIngestReqInput,
    SnapshotFinalizeIngestReqOutput,
    VoteRep,
)

STEP_BYTES: Final = 64 * 1024 * 1024
_VOTES_MAX: Final = 2
_MOD: Final = 1 << 64
_WORD_BYTES: Final = 8
_ANSWER_S: Final = 1.0


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
        scatter_ms: moving and summing bytes.
        vote_ms: from the vote to the decision: other ranks are waited for.
        total_ms: from the lease to the end.
        bytes: bytes read.
    """

    scatter_ms: float = 0.0
    vote_ms: float = 0.0
    total_ms: float = 0.0
    bytes: int = 0


class Ingester:
    """Ingests snapshots into one rank's kv_pool.

    The layout is declared when this is made, and again by the client after a restart of the daemon.

    Args:
        client: the control connection.
        rank: this P rank.
        pool: its kv_pool.
        owner: its slots and tree.
        namespace: model, LoRA, salt, weight version, tenant.
        keep_on_alloc_failure: leave the snapshot READY when there are no slots, to try again later.
        keep_on_missing_prefix: leave a suffix READY when the tree lacks what it builds on. Without it the
            attempt ends at once, and other ranks that wait for this one's vote are told.
        agree: for an engine whose ranks must not differ even when the daemon dies between two of its
            answers. Called once an ingest, on every rank, with the slab_handle and whether this rank heard
            "commit"; returns what rank 0 heard, passed on in the engine's own process group. A rank that did
            not vote ok ignores the answer, which can only be "abort".
        verify: compare checksums. Off is for the tests that show what verification is for.
    """

    def __init__(
        self,
        client: Client,
        rank: int,
        pool: KVPool,
        owner: KVOwner,
        namespace: Namespace = Namespace(),  # noqa: B008 - frozen
        *,
        keep_on_alloc_failure: bool = True,
        keep_on_missing_prefix: bool = True,
        agree: Callable[[int, bool], bool] | None = None,
        verify: bool = True,
    ) -> None:
        self.client = client
        self.rank = rank
        self.pool = pool
        self.owner = owner
        self.layout = pool.layout(namespace)
        self.layout_fingerprint = fingerprint(self.layout)
        self.keep_on_alloc_failure = keep_on_alloc_failure
        self.keep_on_missing_prefix = keep_on_missing_prefix
        self.agree = agree
        self.verify = verify
        self.slabs = Slabs(client, writable=False)
        client.declare_layout(rank, self.layout)

    def lookup(self, session_id: str) -> LookupRep:
        """Return what is READY for a session; ``slab_handle`` 0: nothing."""
        return self.client.lookup(self.layout_fingerprint, session_id=session_id)

    def finalize_ingest(self, request: SnapshotFinalizeIngestReqInput) -> SnapshotFinalizeIngestReqOutput:
        """Ingest a snapshot and return when it is in the tree, or is not going to be.

        With several ranks this waits for the others' votes, for at most the lease's time.
        """
        job = self.start(request.session_id, request.token_ids, request.slab_handle)
        while not job.step(STEP_BYTES):
            job.wait()
        return job.result

    def start(self, session_id: str, token_ids: Sequence[int], slab_handle: int) -> "IngestJob":
        """Begin an ingest that is done in steps, for a scheduler loop that must not wait."""
        return IngestJob(self, session_id, token_ids, slab_handle)

    def close(self) -> None:
        """Unmap the arena; the client stays open."""
        self.slabs.close()


class _Phase(enum.Enum):
    SCATTER = enum.auto()
    VOTE = enum.auto()
    DONE = enum.auto()


class IngestJob:
    """An ingest under way. Made by ``Ingester.start``; ``step`` until it says that it is done."""

    def __init__(
        self, ingester: Ingester, session_id: str, token_ids: Sequence[int], slab_handle: int
    ) -> None:
        self._in = ingester
        self._session_id = session_id
        self._handle = slab_handle
        self._started_s = time.monotonic()
        self._scatter_s = 0.0
        self._voted_s = 0.0
        self._bytes = 0
        self._phase = _Phase.DONE
        self._result: SnapshotFinalizeIngestReqOutput | None = None
        self._slots: torch.Tensor | None = None
        self._is_locked = False
        self._scatter: _VerifiedScatter | None = None
        self._vote: Pending[VoteRep] | None = None
        self._token_ids: Sequence[int] = ()
        self._resident_tokens = 0
        self._votes_cast = 0
        self._has_agreed = False
        self.decision: VoteRep | None = None
        # A lease belongs to the epoch in which it is given.
        self._epoch = ingester.client.epoch
        try:
            self._lease = ingester.client.begin_ingest(
                slab_handle, ingester.rank, ingester.layout_fingerprint, session_id=session_id
            )
            self._epoch = ingester.client.epoch
        except SnapdError as error:
            self._finish(_reason_of(error))
            return
        try:
            self._begin(self._lease, token_ids)
        except SnapdError as error:
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
        """Move up to *max_bytes*, or look for the decision, without waiting; return whether it ended."""
        if self._phase is _Phase.SCATTER:
            self._guard(lambda: self._step_scatter(max_bytes))
        elif self._phase is _Phase.VOTE:
            self._guard(self._poll_vote)
        return self.done

    def wait(self) -> None:
        """Wait for the other ranks' votes; does nothing while there are bytes to move."""
        if self._phase is _Phase.VOTE:
            self._guard(self._await_vote)

    def cancel(self) -> bool:
        """Give the ingest up, for instance because its request was aborted; the snapshot stays READY.

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
                self._fail(error)
        except Exception:
            self._abandon()
            raise

    # --- steps ---------------------------------------------------------------------------------

    def _begin(self, lease: BeginIngestRep, token_ids: Sequence[int]) -> None:
        end_tokens = lease.token_start + lease.num_tokens
        self._token_ids = token_ids[:end_tokens]
        if len(token_ids) < end_tokens or token_digest(self._token_ids) != lease.token_digest:
            self._vote_no(Reason.TOKEN_MISMATCH, keep=False)
            return
        owner = self._in.owner
        resident_tokens = owner.lock_prefix(self._session_id, self._token_ids)
        self._is_locked = True
        self._resident_tokens = align_down(resident_tokens, self._in.layout.page_size_tokens)
        if self._resident_tokens < lease.token_start:
            # The suffix would land at the wrong positions.
            self._vote_no(Reason.PREFIX_NOT_RESIDENT, keep=self._in.keep_on_missing_prefix)
            return
        missing_tokens = end_tokens - self._resident_tokens
        if missing_tokens > 0:
            self._slots = owner.allocate(missing_tokens)
            if self._slots is None:
                self._vote_no(Reason.ALLOC_FAILED_ON_FINALIZE, keep=self._in.keep_on_alloc_failure)
                return
        planes = self._in.slabs.planes(lease.grant, lease.num_tokens, self._epoch)
        self._bytes = sum(plane.numel() for plane in planes)
        skip_tokens = min(lease.num_tokens, self._resident_tokens - lease.token_start)
        self._scatter = _VerifiedScatter(
            self._in.pool, planes, self._slots, skip_tokens, lease.num_tokens, verify=self._in.verify
        )
        self._phase = _Phase.SCATTER

    def _step_scatter(self, max_bytes: int) -> None:
        assert self._scatter is not None
        started_s = time.monotonic()
        is_done = self._scatter.step(max_bytes)
        self._scatter_s += time.monotonic() - started_s
        if not is_done:
            return
        if self._in.verify and checksums_equal(self._lease.checksums, self._scatter.checksums()):
            self._vote_no(Reason.CHECKSUM_MISMATCH, keep=False)
            return
        self._voted_s = time.monotonic()
        self._phase = _Phase.VOTE
        self._cast_vote()

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

    def _fail(self, error: SnapdError) -> None:
        """Nothing was decided as far as this rank knows: ask again, or do not insert."""
        if self._phase is _Phase.SCATTER:
            self._vote_no(_reason_of(error), keep=False)
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
        if self._phase is _Phase.VOTE:
            self._finish(Reason.INGEST_FAILED)
        else:
            self._vote_no(Reason.INGEST_FAILED, keep=True)

    def _finish(self, reason: Reason) -> None:
        owner = self._in.owner
        if self._slots is not None:
            owner.free(self._slots)
            self._slots = None
        if self._is_locked:
            owner.unlock_prefix(self._session_id)
            self._is_locked = False
        self._phase = _Phase.DONE
        self._scatter = None
        is_ok = reason is Reason.OK
        self._result = SnapshotFinalizeIngestReqOutput(
            ok=is_ok, reason=reason, num_tokens=self._lease.num_tokens if is_ok else 0
        )
        # The other ranks wait for this one's part of the agreement, whatever came of it here.
        self._agree(commit=False)


_VOTES: Final = frozenset({
    Reason.ALLOC_FAILED_ON_FINALIZE, Reason.CHECKSUM_MISMATCH, Reason.TOKEN_MISMATCH,
    Reason.PREFIX_NOT_RESIDENT, Reason.INGEST_FAILED,
})  # fmt: skip


def _reason_of(error: SnapdError) -> Reason:
    if isinstance(error, RequestError):
        return error.reason
    # Whether the daemon has decided is not known: the answer, as far as this rank goes, is no.
    return Reason.LEASE_EXPIRED if isinstance(error, ConnectionProblem) else Reason.INGEST_FAILED


class _VerifiedScatter:
    """Scatters the tokens of a shard that are missing, and sums all of them.

    Tokens before *skip_tokens* are in the pool already: they are summed where they lie and not moved.
    """

    def __init__(
        self,
        pool: KVPool,
        planes: Sequence[torch.Tensor],
        slots: torch.Tensor | None,
        skip_tokens: int,
        num_tokens: int,
        *,
        verify: bool,
    ) -> None:
        self._verify = verify
        strides_bytes = [plane.numel() // num_tokens for plane in planes]
        skips_bytes = [width * skip_tokens for width in strides_bytes]
        self._whole: tuple[PlaneChecksum, ...] | None = None
        if any(skip_bytes % _WORD_BYTES for skip_bytes in skips_bytes):
            # The cut is inside a word: sum and scatter a private copy, so that what is summed is used.
            planes = [plane.clone() for plane in planes]
            self._whole = tuple(plane_checksum(plane) for plane in planes) if verify else ()
        self._head_sums = [ChecksumAccumulator() for _ in planes]
        heads = [plane[:skip] for plane, skip in zip(planes, skips_bytes, strict=True)]
        self._todo = _chunks(self._head_sums, heads if verify and self._whole is None else ())
        self._next_head = next(self._todo, None)
        self._skips_bytes = skips_bytes
        tails = [plane[skip:] for plane, skip in zip(planes, skips_bytes, strict=True)]
        self._job = None if slots is None else ScatterJob(pool, slots, tails, checksum=verify)

    def step(self, max_bytes: int) -> bool:
        """Sum or move some bytes, at least one piece; return whether all were."""
        done_bytes = 0
        while self._next_head is not None:
            if done_bytes >= max_bytes:
                return False
            sums, chunk = self._next_head
            sums.add(chunk)
            done_bytes += chunk.numel()
            self._next_head = next(self._todo, None)
        return self._job is None or self._job.step(max_bytes - done_bytes)

    def checksums(self) -> tuple[PlaneChecksum, ...]:
        """Return the checksum of every plane, shape [num_planes]."""
        if self._whole is not None:
            return self._whole
        tails = self._job.checksums if self._job is not None else ((0, 0),) * len(self._head_sums)
        sums: list[PlaneChecksum] = []
        for head, tail, skip_bytes in zip(self._head_sums, tails, self._skips_bytes, strict=True):
            head0, head1 = head.value
            # The tail's positions start at 1; this moves them behind the head's.
            moved1 = tail[1] + skip_bytes // _WORD_BYTES * tail[0]
            sums.append(((head0 + tail[0]) % _MOD, (head1 + moved1) % _MOD))
        return tuple(sums)


def _chunks(
    sums: Sequence[ChecksumAccumulator], planes: Sequence[torch.Tensor]
) -> Iterator[tuple[ChecksumAccumulator, torch.Tensor]]:
    for accumulator, plane in zip(sums, planes, strict=False):
        if plane.numel():
            for chunk in torch.split(plane, CHUNK_BYTES):
                yield accumulator, chunk

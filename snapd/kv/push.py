"""D's side: brings a session's snapshot into the daemon's buffer.

The bytes go from the kv_pool's slots straight into the mapped arena and are summed on the way.
Everything can be done in bounded steps, so that a scheduler loop need not wait for a whole push.

Source: design, section 8.
"""

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import torch

from snapd.calls import Grant
from snapd.client import Client
from snapd.core.slab import Extent
from snapd.errors import (
    ConnectionProblem,
    InvalidRequest,
    LayoutMismatch,
    Reason,
    RequestError,
    SnapdError,
    TransportError,
)
from snapd.kv.checksum import PlaneChecksum, plane_checksum
from snapd.kv.copy import GatherJob
from snapd.kv.pool import KVPool
from snapd.kv.slabs import Slabs
from snapd.layout import Namespace, fingerprint, page_keys, snapshot_bytes, token_digest
from snapd.transport.base import TicketState, Write
from snapd.transport.shm import ShmWriter
from snapd.units import MS_PER_S
from snapd.wire import SessionEnded

STEP_BYTES: Final = 64 * 1024 * 1024
ENDED_MAX: Final = 1_024


class PushResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a push ended on D's side.

    Attributes:
        ok: committed on every rank: the snapshot is READY.
        reason: why not.
        detail: the same, for a person.
        retry_after_ms: when the daemon said to try again; 0: it did not.
        slab_handle: the attempt, 0 if there was none.
        num_tokens, token_start: what was sent.
        bytes: payload bytes written, over all ranks.
        gather_ms: time spent moving and summing bytes.
        total_ms: from the request to the last commit.
    """

    ok: bool
    reason: Reason
    detail: str = ""
    retry_after_ms: int = 0
    slab_handle: int = 0
    num_tokens: int = 0
    token_start: int = 0
    bytes: int = 0
    gather_ms: float = 0.0
    total_ms: float = 0.0


class Pusher:
    """Pushes snapshots out of the kv_pools of this process, one a rank.

    Args:
        client: the control connection.
        pools: by P rank; all of one layout.
        namespace: model, LoRA, salt, weight version, tenant: as P has it.
        send_page_keys: let P find the snapshot by prefix too.

    Raises:
        LayoutMismatch: the pools differ.
    """

    def __init__(
        self,
        client: Client,
        pools: Mapping[int, KVPool],
        namespace: Namespace = Namespace(),  # noqa: B008 - frozen
        *,
        send_page_keys: bool = True,
    ) -> None:
        layouts = {pool.layout(namespace) for pool in pools.values()}
        if len(layouts) != 1:
            raise LayoutMismatch(
                f"the pools of {len(pools)} ranks have {len(layouts)} layouts; one is wanted"
            )
        self.layout = layouts.pop()
        self.layout_fingerprint = fingerprint(self.layout)
        self.client = client
        self.pools = dict(sorted(pools.items()))
        self._send_page_keys = send_page_keys
        self._slabs = Slabs(client, writable=True)
        self._writing: dict[int, SessionEnded | None] = {}
        # How attempts ended that no job writes any more; the newest are kept.
        self.ended: deque[SessionEnded] = deque(maxlen=ENDED_MAX)

    def prepare(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        token_start: int = 0,
        use_resident_hint: bool = True,
    ) -> Grant:
        """Ask for a slab for tokens ``[token_start, len(token_ids))``.

        With *use_resident_hint* the grant may start later: at what P is believed to hold already.
        The grant is for this process alone: its exit is taken as proof that nobody writes any more.

        Raises:
            RequestError: refused; ``BufferFull`` says when to try again.
            ConnectionProblem: the daemon cannot be asked.
        """
        return self.client.prepare_receive(
            session_id,
            len(token_ids) - token_start,
            self.layout_fingerprint,
            token_start=token_start,
            token_digest=token_digest(token_ids),
            page_keys=self._page_keys(token_ids) if self._send_page_keys else (),
            ranks=tuple(self.pools),
            use_resident_hint=use_resident_hint,
            is_only_writer=True,
        )

    def _page_keys(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the keys of the first pages, as many as the daemon takes."""
        page_size_tokens = self.layout.page_size_tokens
        page_keys_max = self.client.connect().page_keys_max
        return page_keys(token_ids[: page_keys_max * page_size_tokens], page_size_tokens)

    def push(
        self,
        session_id: str,
        token_ids: Sequence[int],
        slots: torch.Tensor,
        *,
        token_start: int = 0,
        use_resident_hint: bool = True,
    ) -> PushResult:
        """Bring a snapshot over, and return when it is READY or will not be.

        Args:
            session_id: the conversation.
            token_ids: all its tokens from the first on; the last has its KV in the pool too.
            slots: where each token's KV is, int64, shape [len(token_ids)], the same on every rank.
            token_start: first token to send; a multiple of the page size.
            use_resident_hint: send only what P is believed to lack.

        Raises:
            InvalidRequest: *slots* do not fit; nothing was asked of the daemon.
        """
        job = self.start(
            session_id, token_ids, slots, token_start=token_start, use_resident_hint=use_resident_hint
        )
        while not job.step(STEP_BYTES):
            pass
        return job.result

    def start(
        self,
        session_id: str,
        token_ids: Sequence[int],
        slots: torch.Tensor,
        *,
        token_start: int = 0,
        use_resident_hint: bool = True,
    ) -> "PushJob":
        """Begin a push that is done in steps; arguments and errors as for ``push``."""
        for pool in self.pools.values():
            pool.check_slots(slots, len(token_ids))
        return PushJob(self, self._slabs, session_id, token_ids, slots, token_start, use_resident_hint)

    def push_planes(
        self,
        session_id: str,
        token_ids: Sequence[int],
        planes: Mapping[int, Sequence[torch.Tensor]],
        checksums: Mapping[int, Sequence[PlaneChecksum]] | None = None,
        *,
        token_start: int = 0,
    ) -> PushResult:
        """Bring over planes that were gathered before, in as few writes as there can be.

        Args:
            session_id: the conversation.
            token_ids: all its tokens from the first on.
            planes: by rank; uint8 on the CPU, shape [(len(token_ids) - token_start) * stride_bytes] each.
            checksums: of the planes, by rank; computed here when missing.
            token_start: the first token of the planes.
        """
        started_s = time.monotonic()
        try:
            grant = self.prepare(session_id, token_ids, token_start=token_start, use_resident_hint=False)
        except (RequestError, ConnectionProblem) as error:
            return refused(error)
        self.begin(grant.slab_handle)
        try:
            self.client.transfer_started(grant.slab_handle, epoch=grant.epoch)
            for rank_grant in grant.ranks:
                source = planes[rank_grant.rank]
                target = self._slabs.planes(rank_grant, grant.num_tokens, grant.epoch)
                if [plane.numel() for plane in source] != [plane.numel() for plane in target]:
                    raise InvalidRequest(f"rank {rank_grant.rank}: the planes are not those of the layout")
                sums = (
                    checksums[rank_grant.rank] if checksums else [plane_checksum(plane) for plane in source]
                )
                self._write(rank_grant.rank, grant, source, target)
                self.commit(grant, rank_grant.rank, sums)
        except SnapdError as error:
            return self.give_up(grant, error)
        except Exception as error:
            # The caller's own fault, such as a rank without planes: no bytes are held because of it.
            self.give_up(grant, TransportError(f"the push failed: {error}"))
            raise
        finally:
            self.end(grant.slab_handle)
        return PushResult(
            ok=True,
            reason=Reason.OK,
            slab_handle=grant.slab_handle,
            num_tokens=grant.num_tokens,
            token_start=grant.token_start,
            bytes=snapshot_bytes(self.layout, grant.num_tokens) * len(grant.ranks),
            total_ms=(time.monotonic() - started_s) * MS_PER_S,
        )

    def _write(
        self, rank: int, grant: Grant, source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]
    ) -> None:
        arena = self._slabs.arena(rank, grant.epoch)
        writer = ShmWriter(arena)
        ticket = writer.submit(_few_writes(source, target, arena.address, grant.for_rank(rank).extents))
        if writer.poll(ticket) is not TicketState.DONE:
            raise TransportError(f"rank {rank}: the write failed")

    def commit(self, grant: Grant, rank: int, checksums: Sequence[PlaneChecksum]) -> None:
        """Say that every write of one rank's shard is final."""
        self.client.commit(
            grant.slab_handle,
            rank,
            snapshot_bytes(self.layout, grant.num_tokens),
            grant.num_tokens,
            tuple(checksums),
            epoch=grant.epoch,
        )

    def give_up(self, grant: Grant, error: SnapdError) -> PushResult:
        """End an attempt that went wrong here, with drain proof: no copy is under way between calls."""
        # What is refused because the attempt has ended is refused as stale; why it ended was told before.
        ended = self.take_end(grant.slab_handle)
        if ended is not None:
            error = _ended_early(ended)
        reason = error.reason if isinstance(error, RequestError) else Reason.TRANSFER_FAILED
        # An attempt that has ended already takes this as drain proof. If it cannot be said, the deadline
        # ends the attempt and the quarantine covers it.
        with contextlib.suppress(RequestError, ConnectionProblem):
            self.client.transfer_failed(grant.slab_handle, drained=True, epoch=grant.epoch)
        return PushResult(
            ok=False,
            reason=reason,
            detail=str(error),
            slab_handle=grant.slab_handle,
            num_tokens=grant.num_tokens,
            token_start=grant.token_start,
        )

    def begin(self, slab_handle: int) -> None:
        """Take note that a job writes an attempt."""
        self._writing[slab_handle] = None

    def end(self, slab_handle: int) -> None:
        """Take note that it does not any more."""
        self._writing.pop(slab_handle, None)

    def take_end(self, slab_handle: int) -> SessionEnded | None:
        """Return how a job's attempt ended, once the daemon has said so. One socket serves all jobs."""
        for ended in self.client.take_ended():
            if ended.slab_handle in self._writing:
                self._writing[ended.slab_handle] = ended
            else:
                self.ended.append(ended)
        return self._writing.get(slab_handle)

    def close(self) -> None:
        """Unmap the arenas; the client stays open."""
        self._slabs.close()


class PushJob:
    """A push under way. Made by ``Pusher.start``; ``step`` until it says that it is done."""

    def __init__(
        self,
        pusher: Pusher,
        slabs: Slabs,
        session_id: str,
        token_ids: Sequence[int],
        slots: torch.Tensor,
        token_start: int,
        use_resident_hint: bool,
    ) -> None:
        self._pusher = pusher
        self._slabs = slabs
        self._started_s = time.monotonic()
        self._gather_s = 0.0
        self._result: PushResult | None = None
        self._gather: GatherJob | None = None
        self._rank_index = 0
        try:
            self.grant: Grant | None = pusher.prepare(
                session_id, token_ids, token_start=token_start, use_resident_hint=use_resident_hint
            )
        except (RequestError, ConnectionProblem) as error:
            self.grant = None
            self._result = refused(error)
            return
        pusher.begin(self.grant.slab_handle)
        self._reconnects = pusher.client.reconnects
        self._slots = slots[self.grant.token_start :]
        try:
            pusher.client.transfer_started(self.grant.slab_handle, epoch=self.grant.epoch)
        except SnapdError as error:
            self._give_up(self.grant, error)

    @property
    def done(self) -> bool:
        """The push has ended, one way or the other."""
        return self._result is not None

    @property
    def result(self) -> PushResult:
        """How it ended.

        Raises:
            InvalidRequest: it has not.
        """
        if self._result is None:
            raise InvalidRequest("the push is not done: step it until it is")
        return self._result

    @property
    def bytes_done(self) -> int:
        """Payload bytes written so far, over all ranks."""
        if self.grant is None:
            return 0
        shard_bytes = snapshot_bytes(self._pusher.layout, self.grant.num_tokens)
        return self._rank_index * shard_bytes + (self._gather.bytes_done if self._gather else 0)

    def step(self, max_bytes: int) -> bool:
        """Move up to *max_bytes* (at least one piece); return whether the push has ended."""
        if self._result is not None or self.grant is None:
            return True
        try:
            self._check_still_wanted(self.grant)
            self._advance(self.grant, max_bytes)
        except SnapdError as error:
            self._give_up(self.grant, error)
        except Exception as error:
            # The engine's own fault, or a copy that failed: no bytes are left behind because of it.
            self._give_up(self.grant, TransportError(f"the copy failed: {error}"))
            raise
        return self.done

    def cancel(self, reason: Reason = Reason.TRANSFER_FAILED) -> PushResult:
        """End the push from D's side, for instance because the session's KV is being evicted."""
        if self._result is None and self.grant is not None:
            client = self._pusher.client
            with contextlib.suppress(RequestError, ConnectionProblem):
                client.transfer_failed(
                    self.grant.slab_handle, reason=reason, drained=True, epoch=self.grant.epoch
                )
            self._finish(self.grant, PushResult(ok=False, reason=reason, slab_handle=self.grant.slab_handle))
        return self.result

    def _give_up(self, grant: Grant, error: SnapdError) -> None:
        self._finish(grant, self._pusher.give_up(grant, error))

    def _finish(self, grant: Grant, result: PushResult) -> None:
        self._result = result
        self._gather = None
        self._pusher.end(grant.slab_handle)

    def _check_still_wanted(self, grant: Grant) -> None:
        ended = self._pusher.take_end(grant.slab_handle)
        if ended is not None:
            raise _ended_early(ended)
        client = self._pusher.client
        if not client.is_connected or client.reconnects != self._reconnects:
            # The end may have been told to the connection that is gone: ask before another byte is written.
            client.transfer_started(grant.slab_handle, epoch=grant.epoch)
            self._reconnects = client.reconnects

    def _advance(self, grant: Grant, max_bytes: int) -> None:
        pusher = self._pusher
        rank_grant = grant.ranks[self._rank_index]
        started_s = time.monotonic()
        if self._gather is None:
            planes = self._slabs.planes(rank_grant, grant.num_tokens, grant.epoch)
            self._gather = GatherJob(pusher.pools[rank_grant.rank], self._slots, planes)
        is_gathered = self._gather.step(max_bytes)
        self._gather_s += time.monotonic() - started_s
        if not is_gathered:
            return
        pusher.commit(grant, rank_grant.rank, self._gather.checksums)
        self._gather = None
        self._rank_index += 1
        if self._rank_index == len(grant.ranks):
            result = PushResult(
                ok=True,
                reason=Reason.OK,
                slab_handle=grant.slab_handle,
                num_tokens=grant.num_tokens,
                token_start=grant.token_start,
                bytes=snapshot_bytes(pusher.layout, grant.num_tokens) * len(grant.ranks),
                gather_ms=self._gather_s * MS_PER_S,
                total_ms=(time.monotonic() - self._started_s) * MS_PER_S,
            )
            self._finish(grant, result)


def _few_writes(
    source: Sequence[torch.Tensor],
    target: Sequence[torch.Tensor],
    arena_address: int,
    extents: Sequence[Extent],
) -> list[Write]:
    """Return writes of all planes, one for as many neighbours as lie alike on both sides.

    The number of writes is what costs, so the padding between two planes is written too where it is both the
    slab's own and of the source's own storage.
    """
    writes: list[Write] = []
    for index, (plane, to_plane) in enumerate(zip(source, target, strict=True)):
        offset = to_plane.data_ptr() - arena_address
        if writes:
            last, before = writes[-1], source[index - 1]
            gap_bytes = offset - last.target_ptr - last.size_bytes
            is_alike = plane.data_ptr() == last.source_address + last.size_bytes + gap_bytes
            is_one_storage = plane.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
            is_one_extent = any(
                extent.offset_bytes <= last.target_ptr and offset < extent.end_bytes for extent in extents
            )
            if gap_bytes >= 0 and is_alike and is_one_storage and is_one_extent:
                size_bytes = last.size_bytes + gap_bytes + plane.numel()
                writes[-1] = Write(last.source_address, last.target_ptr, size_bytes)
                continue
        writes.append(Write(plane.data_ptr(), offset, plane.numel()))
    return writes


def _ended_early(ended: SessionEnded) -> RequestError:
    return RequestError("the attempt was ended while it was being written", reason=ended.reason)


def refused(error: RequestError | ConnectionProblem) -> PushResult:
    """Return the result of a push that got no grant."""
    if isinstance(error, RequestError):
        return PushResult(
            ok=False, reason=error.reason, detail=str(error), retry_after_ms=error.retry_after_ms
        )
    return PushResult(ok=False, reason=Reason.TRANSFER_FAILED, detail=str(error))

"""D's side: brings a session's snapshot into the daemon's buffer.

Over shared memory the bytes go from the kv_pool's slots straight into the mapped arena; between GPUs of one
host they always do. Over Mooncake they go through a staging ring, and are gathered while the pieces before
them fly; so do those for an arena on a GPU that D's does not reach. They are summed on the way.
Everything can be done in bounded steps, so that a scheduler loop need not wait for a whole push.

Source: design, section 8.
"""

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import torch

from snapd.calls import Grant
from snapd.client import Client
from snapd.errors import (
    ConfigError,
    ConnectionProblem,
    ExtraMissing,
    InvalidRequest,
    LayoutMismatch,
    Reason,
    RequestError,
    TransportError,
)
from snapd.kv.checksum import PlaneChecksum, PlaneSums
from snapd.kv.control import Attempts, ClientControl, NotifyControl, PrepareRequest, PushControl
from snapd.kv.devicemapped import DeviceMappedJob
from snapd.kv.devicepush import GpuSide, check_planes
from snapd.kv.devicestaged import DeviceGather
from snapd.kv.flights import Flights
from snapd.kv.integrity import KeyedIntegrity, check_on_host, context_of
from snapd.kv.keeper import KEEPER, Remains
from snapd.kv.mappedjob import MappedJob, MappedPlanesJob
from snapd.kv.pool import CheckedSlots, KVPool, check_slots_of
from snapd.kv.pushjob import PushJob, PushResult, PushSettings, RefusedJob, refused
from snapd.kv.slabs import Slabs, device_names
from snapd.kv.staged import StagedCopyJob, StagedGatherJob, StagedSource, check_piece_bytes
from snapd.kv.stagedjob import RingFor, SourceFor, StagedJob
from snapd.kv.staging import Ring, StagingRing
from snapd.kv.writers import WriterFor, Writers, mooncake_writers
from snapd.kvevents.hashes import BlockHasher, pack_block_hashes, pack_token_ids
from snapd.layout import Namespace, fingerprint, page_keys, token_digest
from snapd.mapping import MapFailed
from snapd.mooncakeconfig import MooncakeConfig
from snapd.units import MIB
from snapd.wire import HelloRep, RankGrant, SessionEnded

__all__ = ["NotifyControl", "PushJob", "PushResult", "PushSettings", "Pusher"]

STEP_BYTES: Final = 64 * MIB
# What a push that cannot begin ends with.
REFUSALS: Final = (RequestError, ConnectionProblem, TransportError, ConfigError, ExtraMissing)


class Pusher:
    """Pushes snapshots out of the kv_pools of this process, one a rank. For one thread.

    The daemon says over which transport. With shared memory nothing else is needed. With Mooncake, one
    writer a rank is made when it is first needed.

    Pools on a GPU need arenas on a GPU of the same host, over shared memory or Mooncake's ``nvlink_intra``;
    bytes go straight into those that the pool's GPU reaches. Gathers run on a stream of their own.

    Args:
        client: the control connection; or another way to speak to the daemon, such as ``NotifyControl``.
        pools: by P rank; all of one layout.
        namespace: model, LoRA, salt, weight version, tenant: as P has it.
        settings: pieces, staging memory, retries.
        mooncake: D's part of it; protocol and metadata server are always the daemon's.
        send_page_keys: let P find the snapshot by prefix too.
        send_token_ids: give the daemon the token ids for its KV events, where it publishes any.
        block_hashes: names the pages in KV events as this process's engine does, from the session id, the
            token ids and the page size in tokens: one number a whole page. None: the daemon names them.
        integrity: the key that P has too: MACs are committed in place of the usual checksums. For pools on
            the host.
        writer_for: makes the writers, in place of those of the daemon's transport.
        clock: seconds, monotonic.

    Raises:
        ConfigError: there is an integrity key, and a pool is on a GPU.
        LayoutMismatch: the pools differ.
        InvalidRequest: the ring has no room for a piece (on a GPU for two), or only some pools are on a GPU.
    """

    def __init__(
        self,
        client: Client | PushControl,
        pools: Mapping[int, KVPool],
        namespace: Namespace = Namespace(),  # noqa: B008 - frozen
        *,
        settings: PushSettings = PushSettings(),  # noqa: B008 - frozen
        mooncake: MooncakeConfig = MooncakeConfig(),  # noqa: B008 - frozen
        send_page_keys: bool = True,
        send_token_ids: bool = False,
        block_hashes: BlockHasher | None = None,
        integrity: KeyedIntegrity | None = None,
        writer_for: WriterFor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        layouts = {pool.layout(namespace) for pool in pools.values()}
        if len(layouts) != 1:
            raise LayoutMismatch(
                f"the pools of {len(pools)} ranks have {len(layouts)} layouts; one is wanted"
            )
        if integrity is not None:
            check_on_host(*(pool.device for pool in pools.values()))
        self.integrity = integrity
        self.layout = layouts.pop()
        self.layout_fingerprint = fingerprint(self.layout)
        self.control: PushControl = ClientControl(client) if isinstance(client, Client) else client
        self.pools = dict(sorted(pools.items()))
        self.settings = settings
        self._send_page_keys = send_page_keys
        self._send_token_ids = send_token_ids
        self._block_hashes = block_hashes
        control = self.control
        self._slabs = (
            Slabs(control.client, writable=True, devices=device_names(self.pools))
            if isinstance(control, ClientControl)
            else None
        )
        self._attempts = Attempts(self.control)
        self._clock = clock
        self._is_always_staged = writer_for is not None
        self._ring = ring = StagingRing(settings.ring_bytes, settings.piece_bytes)
        self._gpus = gpus = GpuSide(
            self.pools, settings.ring_bytes, settings.gpu_piece_bytes, map_arenas=settings.map_arenas
        )
        in_flight_bytes_max = (
            settings.gpu_in_flight_bytes_max if self._gpus.is_used else settings.in_flight_bytes_max
        )
        self._flights = Flights(self.control, in_flight_bytes_max, clock)
        if writer_for is None:
            writer_for = self._gpus.writers(
                mooncake_writers(mooncake, in_flight_bytes_max, self._gpus.devices), self._slabs
            )
        self._writers = Writers(writer_for, self._gpus.devices)
        self._remains = Remains(self._flights, self._writers, lambda: (ring, *gpus.rings))
        self._is_looked_after = False

    @property
    def ended(self) -> deque[SessionEnded]:
        """How attempts ended that no job writes any more; the newest are kept."""
        return self._attempts.ended

    @property
    def staging_bytes(self) -> int:
        """Staging memory that it holds."""
        return self._ring.allocated_bytes + self._gpus.staging_bytes

    @property
    def in_flight_bytes(self) -> int:
        """How much is being written."""
        return self._flights.in_flight_bytes

    @property
    def lingering(self) -> int:
        """Ranks of ended attempts whose writes are not over."""
        return self._flights.lingering

    def poll(self) -> None:
        """See which writes of ended attempts are over, and give drain proof. Every step does it as well."""
        self._flights.poll()

    def connect(self) -> HelloRep:
        """Ask the daemon what it is, and have what pushes to it need; returns what it said.

        On a GPU this allocates the staging memory, which waits for whatever the GPU is doing. The first push
        does so otherwise: call it when the engine starts.

        Raises:
            ConfigError: bytes cannot go from the pools to the arenas; says what to set.
            TransportError, ExtraMissing: the transport cannot be used, or there is too little memory.
            ConnectionProblem, RequestError: the daemon cannot be asked, or refused.
        """
        return self._hello()

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
        The grant is for this process alone: where its exit is proof that nobody writes any more, it is
        taken as such.

        Raises:
            RequestError: refused; ``BufferFull`` says when to try again.
            ConnectionProblem: the daemon cannot be asked.
        """
        for_events, names = self._for_events(session_id, token_ids, token_start)
        return self.control.prepare(
            PrepareRequest(
                session_id=session_id,
                num_tokens=len(token_ids) - token_start,
                layout_fingerprint=self.layout_fingerprint,
                token_start=token_start,
                token_digest=token_digest(token_ids),
                page_keys=self._page_keys(token_ids) if self._send_page_keys else (),
                ranks=tuple(self.pools),
                use_resident_hint=use_resident_hint,
                is_only_writer=True,
                token_ids=for_events,
                block_hashes=names,
            )
        )

    def _for_events(self, session_id: str, token_ids: Sequence[int], token_start: int) -> tuple[bytes, bytes]:
        """Return what the daemon wants for its KV events, packed: token ids, and names of the pages.

        Token ids that no event can hold are left out: they are no reason to refuse a push.
        """
        if not self._send_token_ids and self._block_hashes is None:
            return b"", b""
        hello = self.control.hello()
        if hello.kv_events is None:
            return b"", b""
        told, names = b"", b""
        if self._send_token_ids:
            with contextlib.suppress(InvalidRequest):
                told = pack_token_ids(token_ids[token_start : token_start + hello.kv_events.token_ids_max])
        if self._block_hashes is not None:
            with contextlib.suppress(InvalidRequest):
                hashes = self._block_hashes(session_id, token_ids, self.layout.page_size_tokens)
                names = pack_block_hashes(hashes[: hello.page_keys_max])
        return told, names

    def _page_keys(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the keys of the first pages, as many as the daemon takes."""
        page_size_tokens = self.layout.page_size_tokens
        page_keys_max = self.control.hello().page_keys_max
        return page_keys(token_ids[: page_keys_max * page_size_tokens], page_size_tokens)

    def push(
        self,
        session_id: str,
        token_ids: Sequence[int],
        slots: torch.Tensor,
        *,
        token_start: int = 0,
        use_resident_hint: bool = True,
        renew: bool = True,
        after: Sequence[torch.cuda.Event] | None = None,
    ) -> PushResult:
        """Bring a snapshot over, and return when it is READY or will not be.

        Args:
            session_id: the conversation.
            token_ids: all its tokens from the first on; the last has its KV in the pool too.
            slots: where each token's KV is, int64 on the CPU, shape [len(token_ids)], the same on every rank.
            token_start: first token to send; a multiple of the page size.
            use_resident_hint: send only what P is believed to lack.
            renew: prepare once more when the daemon was restarted meanwhile.
            after: for pools on a GPU: recorded events that the gather waits for, such as that of the forward
                pass that wrote the pages. None: all that the current stream was given until now.

        Raises:
            InvalidRequest: *slots* do not fit, or there are events and the pools are on the host; nothing
                was asked of the daemon.
        """
        events = self._gpus.events(after)

        def attempt() -> PushJob:
            return self.start(
                session_id, token_ids, slots,
                token_start=token_start, use_resident_hint=use_resident_hint, after=events,
            )  # fmt: skip

        job = _finished(attempt())
        if renew and self._is_restarted(job):
            job = _finished(attempt())
            return msgspec.structs.replace(job.result, attempts=2)
        return job.result

    def _is_restarted(self, job: PushJob) -> bool:
        return (
            job.result.reason is Reason.STALE_HANDLE
            and job.grant is not None
            and job.grant.epoch != self.control.epoch
        )

    def start(
        self,
        session_id: str,
        token_ids: Sequence[int],
        slots: torch.Tensor,
        *,
        token_start: int = 0,
        use_resident_hint: bool = True,
        after: Sequence[torch.cuda.Event] | None = None,
    ) -> PushJob:
        """Begin a push that is done in steps; arguments and errors as for ``push``.

        Step it until it says that it is done, or cancel it: it holds staging memory. No step waits for a
        GPU; this call does when it allocates staging memory there, the first time. On a GPU a push that was
        cancelled may read the slots a moment longer; what it reads then is not used.
        """
        checked = self._check_slots(slots, len(token_ids))
        events = self._gpus.events(after)
        started_s = time.monotonic()

        def prepare() -> Grant:
            return self.prepare(
                session_id, token_ids, token_start=token_start, use_resident_hint=use_resident_hint
            )

        try:
            hello, grant = self._ask(prepare)
        except REFUSALS as error:
            return RefusedJob(error)
        return self._job(hello, grant, checked.from_token(grant.token_start), started_s, events)

    def start_granted(
        self, grant: Grant, slots: torch.Tensor, *, after: Sequence[torch.cuda.Event] | None = None
    ) -> PushJob:
        """Begin a push for which somebody else prepared, and handed the grant over.

        Args:
            grant: for this pusher's layout.
            slots: where the KV of the granted tokens is, int64, shape [grant.num_tokens], on every rank.
            after: see ``push``.

        Raises:
            InvalidRequest: *slots* do not fit, or there are events and the pools are on the host.
        """
        checked = self._check_slots(slots, grant.num_tokens)
        events = self._gpus.events(after)
        started_s = time.monotonic()
        try:
            hello = self._hello()
        except REFUSALS as error:
            return RefusedJob(error)
        return self._job(hello, grant, checked, started_s, events)

    def _check_slots(self, slots: torch.Tensor, num_tokens: int) -> CheckedSlots:
        """Return checked slots: for a GPU a copy, as a wrong one that came later would be a wild access."""
        if self._gpus.is_used:
            slots = slots.clone()
        return check_slots_of(self.pools.values(), slots, num_tokens)

    def _ask(self, prepare: Callable[[], Grant], *, of_planes: bool = False) -> tuple[HelloRep, Grant]:
        hello = self._hello(of_planes=of_planes)
        grant = prepare()
        if hello.epoch != grant.epoch:
            # It was restarted between the two, and may have other arenas now.
            try:
                hello = self._hello(of_planes=of_planes)
            except BaseException:
                self.control.failed(grant, Reason.TRANSFER_FAILED, drained=True)
                raise
        return hello, grant

    def _hello(self, *, of_planes: bool = False) -> HelloRep:
        """Return what the daemon said of itself; no slab is asked for that could not be written now.

        Args:
            of_planes: what is sent is on the host, wherever the pools are.

        Raises:
            ConfigError: bytes cannot go from where they are to where the arenas are.
            PeerResting: the transport failed a moment ago.
            InvalidRequest: the pieces are too short for this layout.
            TransportError, ExtraMissing: it cannot be used.
            ConnectionProblem: the daemon cannot be asked.
        """
        self.poll()
        hello = self.control.hello()
        is_mapped = not self._is_staged(hello)
        if is_mapped and self._slabs is None:
            raise TransportError(f"transport {hello.transport}: a control connection is needed")
        if not of_planes:
            self._check_places(hello, is_staged=not is_mapped)
        elif not self._is_always_staged:
            check_planes(self.pools, hello)
        is_of_gpu = self._gpus.is_used and not of_planes
        if is_of_gpu and self._gpus.is_near:
            return hello
        if not is_mapped:
            piece_bytes = self.settings.gpu_piece_bytes if is_of_gpu else self.settings.piece_bytes
            check_piece_bytes(self.layout.plane_stride_bytes, piece_bytes)
        if is_of_gpu:
            self._look_after()
            self._gpus.register(self._writers, hello)
        elif not is_mapped:
            self._writers.check_peers(hello, self.pools)
        return hello

    def _check_places(self, hello: HelloRep, *, is_staged: bool) -> None:
        try:
            self._gpus.check(
                hello, self._slabs, is_staged=is_staged, is_protocol_known=not self._is_always_staged
            )
        except MapFailed as error:
            raise TransportError(str(error)) from None

    def _is_staged(self, hello: HelloRep) -> bool:
        return self._is_always_staged or hello.transport == "mooncake"

    def _job(
        self,
        hello: HelloRep,
        grant: Grant,
        slots: CheckedSlots,
        started_s: float,
        after: Sequence[torch.cuda.Event],
    ) -> PushJob:
        if self._gpus.is_used:
            return self._gpu_job(hello, grant, slots, started_s, after)
        if self._is_staged(hello):

            def gather(rank_grant: RankGrant, offsets: list[int]) -> StagedSource:
                pool, sums = self.pools[rank_grant.rank], self._sums_for(grant, rank_grant.rank)
                piece_bytes = self.settings.piece_bytes
                return StagedGatherJob(pool, slots.slots, offsets, rank_grant.extents, piece_bytes, sums)

            return self._staged_job(hello, grant, gather, started_s)
        assert isinstance(self.control, ClientControl) and self._slabs is not None
        return MappedJob(
            grant, self.layout, self.control, self._attempts, started_s,
            slabs=self._slabs, pools=self.pools, slots=slots.slots,
            sums_for=lambda rank: self._sums_for(grant, rank),
        )  # fmt: skip

    def _sums_for(self, grant: Grant, rank: int) -> Sequence[PlaneSums] | None:
        """Return what makes the MACs of a rank's planes; None: the usual checksum is made."""
        if self.integrity is None:
            return None
        context = context_of(grant, rank, self.layout_fingerprint)
        return self.integrity.macs(context, self.layout.num_planes)

    def _gpu_job(
        self,
        hello: HelloRep,
        grant: Grant,
        slots: CheckedSlots,
        started_s: float,
        after: Sequence[torch.cuda.Event],
    ) -> PushJob:
        self._look_after()
        if not self._gpus.is_near:

            def gather(rank_grant: RankGrant, offsets: list[int]) -> DeviceGather:
                return self._gpus.gather(rank_grant, slots.slots, offsets, rank_grant.extents, after)

            return self._staged_job(hello, grant, gather, started_s, self._gpus.ring_for)
        assert isinstance(self.control, ClientControl) and self._slabs is not None
        return DeviceMappedJob(
            grant, self.layout, self.control, self._attempts, started_s,
            slabs=self._slabs, pools=self.pools, jobs=self._gpus.jobs, slots=slots, after=after,
            stream_for=self._stream_for, flights=self._flights,
        )  # fmt: skip

    def _stream_for(self, device: torch.device) -> torch.cuda.Stream | None:
        return self._gpus.stream_for(device)

    def _look_after(self) -> None:
        """Have somebody look after what is left when neither this pusher nor a job of it is there any more.

        Jobs keep the pusher, with what they get of it.
        """
        if not self._is_looked_after:
            self._is_looked_after = True
            KEEPER.ensure()
            weakref.finalize(self, self._remains.abandon).atexit = False

    def _staged_job(
        self,
        hello: HelloRep,
        grant: Grant,
        source_for: SourceFor,
        started_s: float,
        ring_for: RingFor | None = None,
    ) -> StagedJob:
        self._look_after()
        return StagedJob(
            grant, self.layout, self.control, self._attempts, started_s,
            hello=hello, source_for=source_for, ring_for=ring_for or self._host_ring, flights=self._flights,
            writers=self._writers, retries_max=self.settings.retries_max,
            gather_threads=self.settings.gather_threads, clock=self._clock,
        )  # fmt: skip

    def _host_ring(self, rank: int) -> Ring:
        del rank
        return self._ring

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
            checksums: of the planes, by rank; computed here when missing. The usual ones: a MAC is of the
                attempt, which does not exist before.
            token_start: the first token of the planes.

        Raises:
            InvalidRequest: there are checksums, and an integrity key; nothing was asked of the daemon.
        """
        if checksums is not None and self.integrity is not None:
            raise InvalidRequest("with an integrity key planes are summed here: leave the checksums out")
        started_s = time.monotonic()
        try:
            hello, grant = self._ask(
                lambda: self.prepare(session_id, token_ids, token_start=token_start, use_resident_hint=False),
                of_planes=True,
            )
        except REFUSALS as error:
            return refused(error)
        if self._is_staged(hello):

            def copy(rank_grant: RankGrant, offsets: list[int]) -> StagedSource:
                return StagedCopyJob(
                    planes[rank_grant.rank],
                    offsets,
                    rank_grant.extents,
                    self.settings.piece_bytes,
                    checksums[rank_grant.rank] if checksums else None,
                    self._sums_for(grant, rank_grant.rank),
                )

            return _finished(self._staged_job(hello, grant, copy, started_s)).result
        assert isinstance(self.control, ClientControl) and self._slabs is not None
        job = MappedPlanesJob(
            grant, self.layout, self.control, self._attempts, started_s,
            slabs=self._slabs, planes=planes, checksums=checksums,
            sums_for=lambda rank: self._sums_for(grant, rank),
        )  # fmt: skip
        return _finished(job).result

    def close(self) -> None:
        """Unmap the arenas and close the writers; the client stays open. End the jobs first.

        GPUs are waited for, some seconds at most. Writes that are under way may still land; their memory
        stays where it is until they are final, and is given back then.
        """
        self._flights.close()
        self._writers.close()
        if not self._remains.settle():
            KEEPER.ensure()
            KEEPER.keep(self._remains.settle)
        self._ring.trim()
        for ring in self._gpus.rings:
            ring.trim()
        if self._slabs is not None:
            self._slabs.close()


def _finished(job: PushJob) -> PushJob:
    """Step a job to its end; whatever interrupts that ends it."""
    try:
        while not job.step(STEP_BYTES):
            job.wait()
    except BaseException:
        job.cancel()
        raise
    return job

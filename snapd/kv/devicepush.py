"""What a ``Pusher`` with pools on GPUs has besides: copies, streams, staging rings, and what goes where.

Source: design, section 8.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import structlog
import torch

from snapd.core.slab import Extent
from snapd.cudamapping import MappedCudaArena
from snapd.errors import ConfigError, InvalidRequest, RequestError, StaleHandle, TransportError
from snapd.kv.devicecopy import CopyJobs, choose_copy
from snapd.kv.devicejob import Streams
from snapd.kv.devicestaged import DeviceGather, make_gather
from snapd.kv.devicestaging import DeviceRing, check_ring
from snapd.kv.devicewarm import warm_up
from snapd.kv.peerwriter import PeerWriter
from snapd.kv.pool import KVPool
from snapd.kv.slabs import Slabs
from snapd.kv.writers import WriterFor, Writers, arena_offer, check_gpu_protocol
from snapd.mapping import MapFailed
from snapd.transport.base import ArenaWriter
from snapd.wire import HelloRep, RankGrant

_log: Final = structlog.get_logger("snapd.kv")
_HOST: Final = "cpu"
# Mooncake's for GPUs of one host.
_LOCAL_PROTOCOL: Final = "nvlink_intra"


class GpuSide:
    """The GPUs of one pusher.

    Args:
        pools: by rank.
        ring_bytes: staging memory a GPU, at most.
        piece_bytes: the longest piece.
        map_arenas: see ``PushSettings``.

    Attributes:
        is_used: the pools are on GPUs.
        is_near: every rank's arena is mapped, and used by its pool's GPU; as of the last ``check``.

    Raises:
        InvalidRequest: some pools are on GPUs and some are not, or the ring has no room for two pieces.
    """

    def __init__(
        self, pools: Mapping[int, KVPool], ring_bytes: int, piece_bytes: int, *, map_arenas: bool = True
    ) -> None:
        self._pools = dict(pools)
        # The first of them compiles and tries a small copy; here, and not in a step.
        self._jobs = {rank: choose_copy(pool.device) for rank, pool in self._pools.items()}
        self.is_used = any(jobs.is_async for jobs in self._jobs.values())
        self.is_near = False
        self._ring_bytes = ring_bytes
        self._piece_bytes = piece_bytes
        self._map_arenas = map_arenas
        self._unmapped_epoch = ""
        self._rings: dict[torch.device, DeviceRing] = {}
        self._streams = Streams()
        if not self.is_used:
            return
        if not all(jobs.is_async for jobs in self._jobs.values()):
            where = ", ".join(sorted({str(pool.device) for pool in self._pools.values()}))
            raise InvalidRequest(f"the pools are on {where}: make one Pusher for each kind of memory")
        check_ring(ring_bytes, piece_bytes)
        for rank, pool in self._pools.items():
            self._jobs[rank] = warm_up(pool, self._jobs[rank])

    @property
    def jobs(self) -> dict[int, CopyJobs]:
        """The copies of each rank's device."""
        return self._jobs

    @property
    def devices(self) -> dict[int, torch.device]:
        """Where each rank's pool is."""
        return {rank: pool.device for rank, pool in self._pools.items()}

    @property
    def staging_bytes(self) -> int:
        """Staging memory that is held, on all GPUs."""
        return sum(ring.allocated_bytes for ring in self._rings.values())

    def stream_for(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream that gathers of a GPU run on; None: a device without streams."""
        return self._streams.on(device)

    def ring_for(self, rank: int) -> DeviceRing:
        """Return the ring of a rank's GPU."""
        device = self._pools[rank].device
        if device not in self._rings:
            self._rings[device] = DeviceRing(device, self._ring_bytes, self._piece_bytes)
        return self._rings[device]

    def events(self, after: Sequence[torch.cuda.Event] | None) -> tuple[torch.cuda.Event, ...]:
        """Return what a push waits for: *after*, or all that the current streams were given until now.

        Raises:
            InvalidRequest: there are events, and the pools are on the host.
        """
        if not self.is_used:
            if after:
                raise InvalidRequest("the pools are on the host, where there is no event to wait for")
            return ()
        if after is not None:
            return tuple(after)
        devices = {pool.device for pool in self._pools.values() if pool.device.type == "cuda"}
        return tuple(torch.cuda.current_stream(device).record_event() for device in devices)

    # --- what goes where -----------------------------------------------------------------------

    def check(
        self, hello: HelloRep, slabs: Slabs | None, *, is_staged: bool, is_protocol_known: bool
    ) -> None:
        """See where the arenas are, and have staging memory if it is needed.

        Args:
            hello: what the daemon said of itself.
            slabs: the mapped arenas; None: there is no connection to map over.
            is_staged: the transport does not need mapped arenas.
            is_protocol_known: whether its protocol is the daemon's; else somebody else made the writers.

        Raises:
            ConfigError: bytes cannot go from these pools to these arenas; says what to set.
            TransportError: there is too little memory, or an arena cannot be mapped.
            ConnectionProblem, RequestError: the daemon cannot be asked, or refused.
        """
        offers = {arena.rank: arena for arena in hello.arenas}
        # A rank that is not offered is for the daemon to refuse.
        ranks = [rank for rank in self._pools if rank in offers]
        protocol = hello.mooncake.protocol if is_protocol_known and hello.mooncake else ""
        for rank in ranks:
            _check_place(rank, self._pools[rank].device, offers[rank].device, protocol)
        if not self.is_used:
            return
        self.is_near = False
        if not is_staged:
            assert slabs is not None
            self.is_near = self._are_near(slabs, ranks, hello.epoch)
        elif protocol == _LOCAL_PROTOCOL and slabs is not None and self._map_arenas:
            # Mooncake writes where they cannot be mapped: over TCP, or without the right to.
            try:
                self.is_near = self._are_near(slabs, ranks, hello.epoch)
            except StaleHandle:
                raise
            except (MapFailed, RequestError) as error:
                self._tell_unmapped(hello.epoch, error)
        if not self.is_near and is_staged and protocol:
            check_gpu_protocol(protocol)
        if not self.is_near:
            for rank in ranks:
                self.ring_for(rank).allocate()

    def _tell_unmapped(self, epoch: str, error: Exception) -> None:
        """Say, once for each life of the daemon, that bytes take the slower way."""
        if self._unmapped_epoch != epoch:
            self._unmapped_epoch = epoch
            _log.warning("an arena cannot be mapped, so Mooncake writes to it, slower", error=str(error))

    def _are_near(self, slabs: Slabs, ranks: Iterable[int], epoch: str) -> bool:
        """Map the arenas of *ranks*; return whether the GPU of each pool uses its own."""
        arenas = {rank: slabs.arena(rank, epoch) for rank in ranks}
        return all(
            isinstance(arena, MappedCudaArena) and torch.device(arena.device) == self._pools[rank].device
            for rank, arena in arenas.items()
        )

    def register(self, writers: Writers, hello: HelloRep) -> None:
        """Have every writer know its rank's staging memory, and its way there, before the first push.

        Raises:
            PeerResting: the transport failed a moment ago.
            SnapdError: a writer cannot be made, or the memory cannot be registered.
        """
        writers.check_peers(hello, self._pools)
        for rank in self._pools:
            if any(arena.rank == rank for arena in hello.arenas):
                # One stands for all: a transport is told of all of the ring.
                writers.writer(hello, rank).make_known(self.ring_for(rank).allocate()[0])

    def writers(self, other: WriterFor, slabs: Slabs | None) -> WriterFor:
        """Return what makes writers: for arenas that are mapped from another GPU, or else *other*."""

        def make(hello: HelloRep, rank: int, epoch: str) -> ArenaWriter:
            if hello.transport != "shm" or slabs is None:
                return other(hello, rank, epoch)
            arena = slabs.arena(rank, epoch)
            if not isinstance(arena, MappedCudaArena):
                raise TransportError(f"arena {rank} is not on a GPU")
            return PeerWriter(arena, arena_offer(hello, rank).base_ptr, self._pools[rank].device)

        return make

    def gather(
        self,
        grant: RankGrant,
        slots: torch.Tensor,
        offsets_bytes: Sequence[int],
        extents: Sequence[Extent],
        after: Sequence[torch.cuda.Event],
    ) -> DeviceGather:
        """Return the gather of a rank's shard, in pieces; errors as of ``DeviceGather``."""
        pool = self._pools[grant.rank]
        return make_gather(
            self._jobs[grant.rank], pool, slots, offsets_bytes, extents, self._piece_bytes,
            stream=self.stream_for(pool.device), after=after,
        )  # fmt: skip

    @property
    def rings(self) -> list[DeviceRing]:
        """The staging memory."""
        return list(self._rings.values())


def check_planes(ranks: Iterable[int], hello: HelloRep) -> None:
    """Check that planes of the host, of *ranks*, can go to the daemon's arenas.

    Raises:
        ConfigError: they cannot; says what to set.
    """
    offers = {arena.rank: arena for arena in hello.arenas}
    protocol = hello.mooncake.protocol if hello.mooncake else ""
    for rank in (rank for rank in ranks if rank in offers):
        if offers[rank].device != _HOST or protocol == "nvlink_intra":
            raise ConfigError(
                f"push_planes sends memory of the host, and arena {rank} is on {offers[rank].device}"
                f"{f', protocol {protocol}' if protocol else ''}: use push with a pool on a GPU, or set "
                f'device = "{_HOST}" for the arena, and protocol = "tcp" or "rdma" over Mooncake'
            )


def _check_place(rank: int, pool_device: torch.device, arena_device: str, protocol: str) -> None:
    """Check that bytes can go from a pool to an arena.

    Raises:
        ConfigError: they cannot; says what to set.
    """
    what = f"the kv_pool of rank {rank} is on {pool_device}, and its arena on {arena_device}"
    if pool_device.type == _HOST and arena_device != _HOST:
        raise ConfigError(
            f'{what}: set device = "{_HOST}" for arena {rank} in the daemon\'s configuration, or give Pusher '
            "a pool on a GPU"
        )
    if pool_device.type != _HOST and arena_device == _HOST:
        raise ConfigError(
            f'{what}: set device = "cuda:N" for arena {rank} in the daemon\'s configuration, and transport = '
            '"shm", or "mooncake" with protocol = "nvlink_intra", for a D on the same host'
        )
    if pool_device.type == _HOST and protocol == "nvlink_intra":
        raise ConfigError(f'{what}: protocol = "nvlink_intra" is for GPUs; set "tcp" or "rdma"')

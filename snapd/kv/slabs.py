"""Slabs as tensors: a client's mapped arenas, and the planes of a grant in them.

A grant is checked against the arena before a byte is touched: a manifest that points outside its
own extents is refused on this side too.

Source: design, sections 4 and 8.
"""

import ctypes
from collections.abc import Mapping, Sequence

import torch

from snapd.client import Client
from snapd.cudamapping import MappedCudaArena
from snapd.errors import InvalidRequest, InvariantBroken, StaleHandle
from snapd.kv.planes import SlabPlanes
from snapd.kv.pool import KVPool
from snapd.mapping import AnyMappedArena, MappedArena
from snapd.wire import RankGrant


def plane_places(grant: RankGrant, num_tokens: int, arena_bytes: int) -> list[tuple[int, int]]:
    """Return where each plane of a shard lies in its arena: offset and size in bytes, shape [num_planes].

    Raises:
        InvalidRequest: a plane lies outside the grant's extents, or those outside the arena.
    """
    extents = grant.extents
    if any(extent.offset_bytes < 0 or extent.end_bytes > arena_bytes for extent in extents):
        raise InvalidRequest(f"the grant leaves arena {grant.rank} of {arena_bytes} bytes")
    offsets = (*grant.k_layer_offsets, *grant.v_layer_offsets)
    stride_bytes = (*grant.stride_k_bytes, *grant.stride_v_bytes)
    if len(grant.k_layer_offsets) != len(grant.stride_k_bytes) or len(offsets) != len(stride_bytes):
        raise InvalidRequest(
            f"the grant has {len(grant.k_layer_offsets)} + {len(grant.v_layer_offsets)} planes and "
            f"{len(grant.stride_k_bytes)} + {len(grant.stride_v_bytes)} widths"
        )
    places = [(offset, width * num_tokens) for offset, width in zip(offsets, stride_bytes, strict=True)]
    bounds = [(extent.offset_bytes, extent.end_bytes) for extent in extents]
    for offset, size_bytes in places:
        end = offset + size_bytes
        if size_bytes <= 0 or not any(first <= offset and end <= last for first, last in bounds):
            raise InvalidRequest(f"a plane of {size_bytes} bytes at {offset} leaves the grant's extents")
    return places


def device_names(pools: Mapping[int, KVPool]) -> dict[int, str]:
    """Return the GPU of each rank's pool, for ``Slabs``; a rank whose pool is on the host is left out."""
    return {rank: str(pool.device) for rank, pool in pools.items() if pool.device.type == "cuda"}


class Slabs:
    """Maps arenas when they are first needed, and again after the daemon was restarted.

    Args:
        client: asks for the buffers.
        writable: map for writing (D) or for reading only (P).
        devices: the GPU that uses each rank's arena, ``cuda:N``, if it lies on one and that GPU reaches it; a
            rank that is missing has its arena's own.
    """

    def __init__(self, client: Client, *, writable: bool, devices: Mapping[int, str] | None = None) -> None:
        self._client = client
        self._devices = dict(devices or {})
        self._writable = writable
        self._arenas: dict[int, AnyMappedArena] = {}

    def arena(self, rank: int, epoch: str) -> AnyMappedArena:
        """Return the arena of *rank* as it was in *epoch*.

        One whose daemon is gone is let go of, and asked for anew. Letting go never waits for a GPU.
        Whoever keeps planes for longer keeps the arena as well, and calls its ``check_alive`` before every
        use: another epoch's may have taken its place here.

        Raises:
            StaleHandle: the daemon is in another epoch by now; nothing granted before may be touched.
            RequestError: there is no such arena.
            ConnectionProblem: the daemon cannot be asked.
        """
        known = self._arenas.get(rank)
        if known is not None and known.is_abandoned:
            # Nobody may touch it, whatever comes in its place.
            del self._arenas[rank]
            known.close()
            known = None
        if known is not None and known.epoch == epoch:
            return known
        if known is not None and known.epoch == self._client.epoch:
            raise _stale(known.epoch, epoch)
        arena = self._client.map_buffer(rank, writable=self._writable, device=self._devices.get(rank))
        if known is not None:
            known.close()
        # Also when it is not the one that was granted: it is the one that will be.
        self._arenas[rank] = arena
        if arena.epoch != epoch:
            raise _stale(arena.epoch, epoch)
        return arena

    def planes(self, grant: RankGrant, num_tokens: int, epoch: str) -> Sequence[torch.Tensor]:
        """Return the planes of a shard, K of all layers and then V of all layers.

        Each is uint8 of shape [num_tokens * stride_bytes], on the device that uses the arena, and shares its
        memory, which stays mapped as long as there is a plane of it. On a GPU it is the daemon's: see
        ``arena``.

        Raises:
            InvalidRequest: a plane lies outside the grant's extents, or those outside the arena.
            StaleHandle: the daemon is in another epoch by now.
        """
        arena = self.arena(grant.rank, epoch)
        places = plane_places(grant, num_tokens, arena.size_bytes)
        start_bytes = min(offset_bytes for offset_bytes, _ in places)
        end_bytes = max(offset_bytes + size_bytes for offset_bytes, size_bytes in places)
        whole = arena_bytes(arena, start_bytes, end_bytes - start_bytes)
        planes = SlabPlanes(
            whole, [(offset_bytes - start_bytes, size_bytes) for offset_bytes, size_bytes in places]
        )
        # Copies of the host look at them again and again.
        return planes if whole.is_cuda else list(planes)

    def check_alive(self) -> None:
        """Check that the memory of every arena that is mapped now is still its daemon's.

        It says nothing of planes that are older than an arena's mapping.

        Raises:
            ConnectionLost: one lies on a GPU, and its daemon is gone.
        """
        for arena in self._arenas.values():
            arena.check_alive()

    def close(self) -> None:
        """Let go of everything; what has planes still is unmapped after the last of them."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()


def _stale(epoch: str, granted_epoch: str) -> StaleHandle:
    return StaleHandle(f"the daemon was restarted: its epoch is {epoch}, the grant's {granted_epoch}")


def arena_bytes(arena: AnyMappedArena, offset_bytes: int, size_bytes: int) -> torch.Tensor:
    """Return *size_bytes* of an arena, uint8 of shape [size_bytes]; the tensor keeps it mapped."""
    if isinstance(arena, MappedArena):
        return _host_tensor(arena, offset_bytes, size_bytes)
    return _gpu_tensor(arena, offset_bytes, size_bytes)


def _gpu_tensor(arena: MappedCudaArena, offset_bytes: int, size_bytes: int) -> torch.Tensor:
    # The tensor keeps the view, and the view the mapping.
    tensor = torch.as_tensor(arena.view(offset_bytes, size_bytes), device=arena.device)
    if tensor.data_ptr() != arena.address + offset_bytes:
        raise InvariantBroken(f"torch copied a plane of arena {arena.rank} instead of sharing it")
    return tensor


def _host_tensor(arena: MappedArena, offset_bytes: int, size_bytes: int) -> torch.Tensor:
    # By address, as a buffer of a mapping that is read-only makes torch warn at every use.
    memory = (ctypes.c_uint8 * size_bytes).from_address(arena.address + offset_bytes)
    # The mapping goes with its last view; without one, a plane would outlive it.
    memory.view = arena.buffer  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)

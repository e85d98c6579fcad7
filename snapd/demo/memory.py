"""The kv_pools of the demo: shared memory that the orchestrator owns and workers map.

A pool's memory holds its planes one after another: K of all layers, then V of all layers, each
``num_slots * STRIDE_BYTES`` bytes.
"""

import mmap
import os
import warnings
from typing import TYPE_CHECKING, Final

from snapd.demo.plan import (
    HEAD_DIM,
    KV_HEADS,
    NUM_LAYERS,
    NUM_PLANES,
    PAGE_SIZE_TOKENS,
    STRIDE_BYTES,
    TOKEN_BYTES,
    NotEnoughMemory,
)
from snapd.layout import Namespace
from snapd.units import format_bytes

if TYPE_CHECKING:
    import torch

    from snapd.kv.pool import KVPool

NAMESPACE: Final = Namespace(model="demo")
WORD_BYTES: Final = 8
ROW_WORDS: Final = STRIDE_BYTES // WORD_BYTES


def create_pool_memory(name: str, num_slots: int) -> int:
    """Return a file descriptor of memory for a pool, with all of its pages there.

    Raises:
        NotEnoughMemory: they cannot be had.
    """
    size_bytes = num_slots * TOKEN_BYTES
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        os.close(fd)
        raise NotEnoughMemory(
            f"{format_bytes(size_bytes)} for {name} cannot be had ({error.strerror}): lower --total or "
            "--decoders"
        ) from None
    return fd


class PoolMemory:
    """A pool's memory, mapped into this process.

    Args:
        fd: from ``create_pool_memory``; may be closed afterwards.
        num_slots: of the pool.
        writable: map it for writing too.

    Attributes:
        planes: as words, int64, shape [NUM_PLANES, num_slots, ROW_WORDS].
    """

    def __init__(self, fd: int, num_slots: int, *, writable: bool) -> None:
        import torch

        size_bytes = num_slots * TOKEN_BYTES
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        with warnings.catch_warnings():
            # torch would rather have memory that it may write; it is only read.
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.frombuffer(mmap.mmap(fd, size_bytes, access=access), dtype=torch.int64)
        self.planes: torch.Tensor = flat.view(NUM_PLANES, num_slots, ROW_WORDS)

    def pool(self) -> "KVPool":
        """Return it as an engine's kv_pool: K and V buffers of shape [num_slots, KV_HEADS, HEAD_DIM]."""
        import torch

        from snapd.kv.pool import KVPool

        buffers = [plane.view(torch.bfloat16).view(-1, KV_HEADS, HEAD_DIM) for plane in self.planes]
        return KVPool.mha(buffers[:NUM_LAYERS], buffers[NUM_LAYERS:], PAGE_SIZE_TOKENS)


def slots_tensor(packed: bytes) -> "torch.Tensor":
    """Return slot numbers from ``messages.pack_slots`` as a tensor, int64."""
    import torch

    return torch.frombuffer(bytearray(packed), dtype=torch.int64)

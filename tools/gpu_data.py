"""What the GPU benchmarks copy, and how they take the time of a device."""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from snapd.kv.pool import KVPool

LAYERS = 48
HEADS = 4
HEAD_DIM = 128
STRIDE_BYTES = HEADS * HEAD_DIM * 2
# Long enough that the host has queued all work of a case before the device comes to it.
LEAD_CYCLES = 60_000_000


@dataclasses.dataclass(frozen=True)
class Data:
    """Planes in one slab, as the daemon's are, and a pool with buffers of their own.

    Attributes:
        planes: uint8, shape [num_tokens * stride_bytes] each.
        pool: with a quarter more slots than tokens.
        buffers: the pool's, shape [slots, stride_bytes // 2], bfloat16 or uint8.
        slab: what the planes are parts of.
        moved_bytes: of all planes.
    """

    planes: tuple[torch.Tensor, ...]
    pool: KVPool
    buffers: tuple[torch.Tensor, ...]
    slab: torch.Tensor
    moved_bytes: int

    def slots(self, *, is_random: bool) -> torch.Tensor:
        """Return int64 slots on the CPU, shape [num_tokens]: from 0 on, or any."""
        num_tokens = self.planes[0].numel() // self.pool.planes[0].stride_bytes
        return torch.randperm(self.pool.num_slots)[:num_tokens] if is_random else torch.arange(num_tokens)


def make_data(widths_bytes: Sequence[int], num_tokens: int, device: torch.device) -> Data:
    """Return random planes and a random pool; K first and then V when the planes are even in number."""
    num_slots = num_tokens + num_tokens // 4
    starts = [0]
    for width in widths_bytes:
        starts.append(-(-(starts[-1] + width * num_tokens) // 256) * 256)
    slab = _random(starts[-1], device)
    planes = tuple(
        slab[start : start + width * num_tokens] for start, width in zip(starts, widths_bytes, strict=False)
    )
    buffers = tuple(_random(num_slots * width, device).view(num_slots, width) for width in widths_bytes)
    if all(width % 2 == 0 for width in widths_bytes):
        buffers = tuple(buffer.view(torch.bfloat16) for buffer in buffers)
    half = len(buffers) // 2
    pool = KVPool.mla(buffers) if len(buffers) % 2 else KVPool.mha(buffers[:half], buffers[half:])
    return Data(planes, pool, buffers, slab, num_tokens * sum(widths_bytes))


def _random(size_bytes: int, device: torch.device) -> torch.Tensor:
    words = torch.randint(-(1 << 62), 1 << 62, (-(-size_bytes // 8),), dtype=torch.int64, device=device)
    return words.view(torch.uint8)[:size_bytes]


def device_ms(run: Callable[[], object], lead_cycles: int = LEAD_CYCLES) -> float:
    """Return what *run* takes on the current stream of the device, in ms, without the host's part."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(lead_cycles)  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))

"""Runs everything that copies on a GPU will need, once, while nobody waits.

A kernel is compiled when it is first launched, Triton's, and loaded then, Triton's and torch's; loading waits
for whatever the GPU is doing. In the first push or ingest that would keep a scheduler from its loop for as
long as a forward pass takes.

Source: design, section 8.
"""

import time
from typing import Final, cast

import torch

from snapd.kv.devicecopy import CopyJobs
from snapd.kv.devicejob import DeviceJob, finish
from snapd.kv.devicescatter import DeviceScatter
from snapd.kv.pool import KVPool

_NUM_SLOTS: Final = 8
_POLL_S: Final = 0.000_1


def warm_up(pool: KVPool, jobs: CopyJobs) -> None:
    """Have a GPU know what copies of *pool* need, and wait for it. Elsewhere there is nothing to load.

    Args:
        pool: only looked at.
        jobs: those of its device.
    """
    if pool.device.type != "cuda":
        return
    if jobs.name == "triton":
        from snapd.kv import gpucopy

        # For the pool itself: what is compiled depends on how its buffers are aligned.
        gpucopy.warm_up(pool)
    run_small(pool, jobs)


def run_small(pool: KVPool, jobs: CopyJobs) -> None:
    """Run every kind of copy once in a small pool with rows as wide as *pool*'s, and wait."""
    widths_bytes = sorted({place.stride_bytes for place in pool.planes})
    rows = [torch.zeros((_NUM_SLOTS, width), dtype=torch.uint8, device=pool.device) for width in widths_bytes]
    small = KVPool.mla(rows)
    slots = torch.arange(1, _NUM_SLOTS)
    planes = [
        torch.zeros(slots.numel() * buffer.shape[1], dtype=torch.uint8, device=pool.device) for buffer in rows
    ]
    finish(cast("DeviceJob", jobs.gather(small, slots, planes)))
    stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None  # type: ignore[no-untyped-call]
    # A part that is held already is summed by torch's operations; so is all of it when a word is cut.
    for skip_tokens, of_host in ((0, True), (1, True), (1, False)):
        missing = slots[skip_tokens:] if of_host else slots[skip_tokens:].to(pool.device)
        scatter = DeviceScatter(
            jobs.scatter,  # type: ignore[arg-type]
            small,
            planes,
            missing,
            skip_tokens,
            slots.numel(),
            verify=True,
            stream_of=lambda _: stream,
            after=None,
        )
        while not scatter.step(1 << 30):
            time.sleep(_POLL_S)
        scatter.checksums()

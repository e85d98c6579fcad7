"""Runs everything that copies on a GPU will need, once, while nobody waits.

A kernel is compiled when it is first launched, Triton's, and loaded then, Triton's and torch's; loading waits
for whatever the GPU is doing. In the first push or ingest that would keep a scheduler from its loop for as
long as a forward pass takes.

Source: design, section 8.
"""

import time
from typing import Final, cast

import torch

from snapd.kv import gpucopy
from snapd.kv.devicecopy import CopyJobs, instead_of_triton
from snapd.kv.devicejob import DeviceJob, finish, memory_errors
from snapd.kv.devicescatter import DeviceScatter, PrivateMemory
from snapd.kv.pool import KVPool
from snapd.kv.torchcopy import ROW_BYTES, Summing

_NUM_SLOTS: Final = 16
# Longer than what is summed at once.
_SUMMED_BYTES: Final = 3 * ROW_BYTES
# Torch has other kernels for what is aligned otherwise.
_SHIFTS: Final = (0, 1, 2, 4, 8)
_POLL_S: Final = 0.000_1


def warm_up(pool: KVPool, jobs: CopyJobs) -> CopyJobs:
    """Have a GPU know what copies of *pool* need, and wait for it. Elsewhere there is nothing to load.

    Args:
        pool: only looked at.
        jobs: those of its device.

    Returns:
        The jobs to use: torch's if Triton fails, which a warning says, else *jobs*.

    Raises:
        DeviceMemoryFull: the GPU has no memory for it.
        RuntimeError: CUDA does not work there.
    """
    if pool.device.type != "cuda":
        return jobs
    if jobs.name == "triton":
        try:
            with memory_errors(pool.device):
                # For the pool itself: what is compiled depends on how its buffers are aligned.
                gpucopy.warm_up(pool)
                run_small(pool, jobs)
            return jobs
        except Exception as error:
            jobs = instead_of_triton(pool.device, error)
    with memory_errors(pool.device):
        run_small(pool, jobs)
    return jobs


def run_small(pool: KVPool, jobs: CopyJobs) -> None:
    """Run every kind of copy once in a small pool with as many planes and as wide rows, and wait."""
    widths_bytes = [place.stride_bytes for place in pool.planes]
    rows = [torch.zeros((_NUM_SLOTS, width), dtype=torch.uint8, device=pool.device) for width in widths_bytes]
    small = KVPool.mla(rows)
    slots = torch.arange(1, _NUM_SLOTS)
    planes = [
        torch.zeros(slots.numel() * width, dtype=torch.uint8, device=pool.device) for width in widths_bytes
    ]
    finish(cast("DeviceJob", jobs.gather(small, slots, planes)))
    stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None  # type: ignore[no-untyped-call]
    # What torch keeps of a stream's memory serves that stream only.
    private = PrivateMemory(pool.device, stream, least_bytes=0)
    # A part that is held already is summed and not moved; so is all of it when a word is cut.
    for skip_tokens, of_host in ((0, True), (1, True), (1, False), (8, True)):
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
            private=private,
            summing=jobs.summing,
        )
        while not scatter.step(1 << 30):
            time.sleep(_POLL_S)
        scatter.checksums()
    _sum_small(pool.device, jobs.summing)


def _sum_small(device: torch.device, summing: Summing) -> None:
    """Sum one part and several, of whole rows and of others, and clear memory, wherever it starts."""
    for shift in _SHIFTS:
        store = torch.zeros((2, _SUMMED_BYTES + max(_SHIFTS) + 1), dtype=torch.uint8, device=device)
        for parts in (store[:1], store):
            for length_bytes in (_SUMMED_BYTES, _SUMMED_BYTES - 1):
                sums = [
                    summing.sum_parts([part[shift:][:length_bytes] for part in parts], at) for at in (0, 1)
                ]
                sums[0] + sums[1]
        # What lies between two planes is cleared before it is sent.
        store[0, shift:].zero_()
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Which copies a device gets: the CPU's, Triton's, or torch's own operations where Triton does not run.

Source: design, section 8.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Final, Protocol

import structlog
import torch

from snapd.kv import copy, gpucopy, torchcopy
from snapd.kv.checksum import PlaneChecksum
from snapd.kv.devicejob import DeviceMemoryFull, memory_errors
from snapd.kv.torchcopy import Summing

_log: Final = structlog.get_logger("snapd.kv")


class SlotCopy(Protocol):
    """What every gather and scatter job is, on whatever device."""

    @property
    def bytes_total(self) -> int:
        """Bytes of all planes."""
        ...

    @property
    def bytes_done(self) -> int:
        """Bytes moved so far."""
        ...

    @property
    def done(self) -> bool:
        """Whether every byte was moved."""
        ...

    @property
    def checksums(self) -> tuple[PlaneChecksum, ...]:
        """The checksum of each plane; raises InvalidRequest before the job is done."""
        ...

    def step(self, max_bytes: int) -> bool:
        """Go on, without waiting for a device; return whether the job is done."""
        ...


@dataclasses.dataclass(frozen=True)
class CopyJobs:
    """The jobs of a device.

    Attributes:
        name: ``cpu``, ``triton`` or ``torch``.
        gather: makes a job of (pool, slots, planes).
        scatter: makes a job of (pool, slots, planes).
        is_async: jobs run on a stream, take ``stream``, ``after`` and ``piece_bytes``, and have ``finished``;
            they are ``DeviceJob``.
        summing: how what is not moved is summed, where jobs are asynchronous.
    """

    name: str
    gather: Callable[..., SlotCopy]
    scatter: Callable[..., SlotCopy]
    is_async: bool
    summing: Summing = torchcopy.SUMMING


_CPU: Final = CopyJobs("cpu", copy.GatherJob, copy.ScatterJob, is_async=False)
_TRITON: Final = CopyJobs(
    "triton", gpucopy.GpuGatherJob, gpucopy.GpuScatterJob, is_async=True, summing=gpucopy.SUMMING
)
TORCH: Final = CopyJobs("torch", torchcopy.TorchGatherJob, torchcopy.TorchScatterJob, is_async=True)


def choose_copy(device: torch.device | str) -> CopyJobs:
    """Return the jobs that pools on *device* get.

    The first question about a GPU compiles and runs a small copy there, which takes a second or two: ask when
    the pool is made. When Triton cannot be used there, a warning says so, once, and torch's own operations
    are used.

    Raises:
        DeviceMemoryFull: the GPU has no memory for it now; the next question tries again.
        RuntimeError: CUDA does not work there, for torch neither.
    """
    device = torch.device(device)
    return _CPU if device.type == "cpu" else _choose_for_gpu(device)


@functools.cache
def _choose_for_gpu(device: torch.device) -> CopyJobs:
    try:
        with memory_errors(device):
            gpucopy.probe(device)
    except Exception as error:
        return instead_of_triton(device, error)
    return _TRITON


def instead_of_triton(device: torch.device, error: Exception) -> CopyJobs:
    """Return what *device* gets when Triton fails there with *error*, and warn of it.

    Raises:
        Exception: *error* itself, if it is none of Triton's: memory is full for a moment, or CUDA is broken.
    """
    if isinstance(error, DeviceMemoryFull) or _is_of_cuda(error):
        raise error
    # No Triton, no compiler for its launchers, a GPU that it does not know: each has its own error.
    _log.warning("copies on this GPU are slower: Triton cannot be used", device=str(device), error=str(error))
    return TORCH


def _is_of_cuda(error: Exception) -> bool:
    """Return whether torch says that CUDA failed; old versions have no class for it."""
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or (
        isinstance(error, RuntimeError) and "CUDA error" in str(error)
    )

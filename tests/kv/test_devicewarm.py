"""What is run once before anybody waits, on the CPU: tests/gpu has what it is for."""

import dataclasses
from typing import Any

import pytest
import torch

from snapd.kv import devicescatter, devicewarm, torchcopy
from snapd.kv.devicecopy import CopyJobs
from snapd.kv.pool import KVPool
from snapd.kv.torchcopy import Summing, TorchGatherJob, TorchScatterJob


class Counting:
    """Torch's jobs, counted, with the shapes of the planes that they were given."""

    def __init__(self) -> None:
        self.gathered: list[tuple[int, ...]] = []
        self.scattered: list[tuple[int, ...]] = []
        self.jobs = CopyJobs("torch", self.gather, self.scatter, is_async=True)

    def gather(self, pool: KVPool, *arguments: Any, **others: Any) -> TorchGatherJob:
        self.gathered.append(tuple(place.stride_bytes for place in pool.planes))
        return TorchGatherJob(pool, *arguments, **others)

    def scatter(self, pool: KVPool, *arguments: Any, **others: Any) -> TorchScatterJob:
        self.scattered.append(tuple(place.stride_bytes for place in pool.planes))
        return TorchScatterJob(pool, *arguments, **others)


def test_every_kind_of_copy_runs_once_and_the_pool_stays_as_it_is() -> None:
    """Of all planes at once, as a pool's own copies are."""
    rows = [torch.full((16, width), 7, dtype=torch.uint8) for width in (64, 132, 64)]
    counting = Counting()
    devicewarm.run_small(KVPool.mla(rows), counting.jobs)
    assert counting.gathered == [(64, 132, 64)]
    assert counting.scattered == [(64, 132, 64)] * 4, "all of it, and behind a part that is held"
    assert all(bool((buffer == 7).all()) for buffer in rows)


def test_sums_of_one_part_and_of_several_are_run_with_and_without_a_ragged_end() -> None:
    """Torch takes other kernels for each, and for more words than one row of a sum has."""
    seen: set[tuple[bool, bool, bool, int]] = set()

    def watched(parts: Any, first_word: int) -> torch.Tensor:
        size_bytes = parts[0].numel()
        seen.add((len(parts) > 1, size_bytes > 2 * 2048, size_bytes % 2048 == 0, parts[0].data_ptr() % 16))
        return torchcopy.sum_parts(parts, first_word)

    jobs = dataclasses.replace(Counting().jobs, summing=Summing(watched, is_copying=True))
    devicewarm.run_small(KVPool.mla([torch.zeros((16, 64), dtype=torch.uint8)] * 2), jobs)
    for is_many in (False, True):
        for is_whole in (False, True):
            assert {at for *kind, at in seen if kind == [is_many, True, is_whole]} >= {0, 1, 2, 4, 8}


def test_no_more_memory_is_taken_than_a_small_pool_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch keeps of a stream's memory is lost to all others."""
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 1 << 50)
    devicewarm.run_small(KVPool.mla([torch.zeros((16, 7), dtype=torch.uint8)]), Counting().jobs)


def test_memory_that_is_cleared_starts_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    at: set[int] = set()
    zero = torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "zero_", lambda part: (at.add(part.data_ptr() % 16), zero(part))[1])
    devicewarm.run_small(KVPool.mla([torch.zeros((16, 64), dtype=torch.uint8)] * 2), Counting().jobs)
    assert at >= {0, 1, 2, 4, 8}


def test_where_there_is_no_gpu_nothing_runs() -> None:
    counting = Counting()
    devicewarm.warm_up(KVPool.mla([torch.zeros((16, 64), dtype=torch.uint8)]), counting.jobs)
    assert (counting.gathered, counting.scattered) == ([], [])

"""What is run once before anybody waits, on the CPU: tests/gpu has what it is for."""

from typing import Any

import torch

from snapd.kv import devicewarm
from snapd.kv.devicecopy import CopyJobs
from snapd.kv.pool import KVPool
from snapd.kv.torchcopy import TorchGatherJob, TorchScatterJob


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
    rows = [torch.full((16, width), 7, dtype=torch.uint8) for width in (64, 132, 64)]
    counting = Counting()
    devicewarm.run_small(KVPool.mla(rows), counting.jobs)
    assert counting.gathered == [(64, 132)]
    assert counting.scattered == [(64, 132)] * 3, "all of it, and behind a part that is held"
    assert all(bool((buffer == 7).all()) for buffer in rows)


def test_where_there_is_no_gpu_nothing_runs() -> None:
    counting = Counting()
    devicewarm.warm_up(KVPool.mla([torch.zeros((16, 64), dtype=torch.uint8)]), counting.jobs)
    assert (counting.gathered, counting.scattered) == ([], [])

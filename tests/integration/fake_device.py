"""A GPU as an ingest sees it, in host memory: what is launched ends later, and can be held back."""

from collections.abc import Sequence
from typing import Any

import torch

from snapd.kv.devicecopy import CopyJobs
from snapd.kv.pool import KVPool
from snapd.kv.torchcopy import TorchGatherJob, TorchScatterJob


class FakeDevice:
    """Runs what was launched when it is let, in order.

    Attributes:
        looks: so many times a job says that it is not done; None: until ``release``.
        launched: jobs that were launched.
        error: what the launch of a job raises, by its number.
        reads_at_launch: planes are read then and not at the end, for those in memory that is used again: on a
            GPU a stream keeps the order.
    """

    def __init__(self, looks: int | None = 3) -> None:
        self.looks = looks
        self.jobs: list[FakeScatter] = []
        self.launched: list[FakeScatter] = []
        self.error: dict[int, BaseException] = {}
        self.reads_at_launch = False
        self.copies = CopyJobs("fake", TorchGatherJob, self._scatter, is_async=True)

    def _scatter(
        self, pool: KVPool, slots: torch.Tensor, planes: Sequence[torch.Tensor], **options: Any
    ) -> "FakeScatter":
        self.jobs.append(FakeScatter(self, len(self.jobs), pool, slots, planes, options))
        return self.jobs[-1]

    def release(self) -> None:
        """Let it run."""
        self.looks = 0
        for job in self.launched:
            job.looks = 0


class FakeStream:
    """A stream whose events come to pass when they are let; torch without CUDA makes no use of it.

    Attributes:
        events: recorded ones, in order.
    """

    def __init__(self) -> None:
        self.events: list[FakeEvent] = []

    def record_event(self) -> "FakeEvent":
        self.events.append(FakeEvent())
        return self.events[-1]


class FakeEvent:
    """Has passed when it is set."""

    def __init__(self) -> None:
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed


class FakeScatter:
    """Copies nothing before it is done."""

    def __init__(
        self,
        device: FakeDevice,
        number: int,
        pool: KVPool,
        slots: torch.Tensor,
        planes: Sequence[torch.Tensor],
        options: dict[str, Any],
    ) -> None:
        self._device = device
        self._number = number
        self._planes = planes
        self._read = [plane.clone() for plane in planes] if device.reads_at_launch else planes
        self._job = TorchScatterJob(pool, slots, self._read, **(options | {"stream": None}))
        self.after = options["after"]
        self.looks: int | None = None
        self.is_launched = False
        self.bytes_total = self._job.bytes_total

    @property
    def done(self) -> bool:
        if not self.is_launched or self.looks is None:
            return False
        if self.looks > 0:
            self.looks -= 1
            return False
        return self._job.step(self.bytes_total)

    @property
    def checksums(self) -> tuple[tuple[int, int], ...]:
        return self._job.checksums

    def bring_slots(self) -> bool:
        return True

    def step(self, max_bytes: int) -> bool:
        if not self.is_launched:
            if self._number in self._device.error:
                raise self._device.error[self._number]
            if self._device.reads_at_launch:
                for read, plane in zip(self._read, self._planes, strict=True):
                    read.copy_(plane)
            self.is_launched = True
            self.looks = self._device.looks
            self._device.launched.append(self)
        return self.done

"""A link between two GPUs, emulated, for machines with one: it takes time, and carries nothing.

A write is over when a link of the given speed would have carried its bytes and those of the writes before it,
as Mooncake's is between two GPUs. So it is seen what all that is around the writes adds to them.
"""

import functools
import itertools
import threading
from typing import Final

import msgspec
import torch

from snapd.kv.writers import WriterFor, arena_offer, current
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import ArenaWriter, Write
from snapd.transport.mooncake_engine import MooncakeEngine, WriteState
from snapd.transport.mooncake_engines import MooncakeEngines
from snapd.transport.mooncake_writer import MooncakeWriter
from snapd.units import MS_PER_S
from snapd.wire import HelloRep

_CALIBRATION_CYCLES: Final = 20_000_000


class Link:
    """Carries one write after the other.

    Args:
        device: whose time is taken.
        bytes_per_s: its speed.
    """

    def __init__(self, device: torch.device, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._cycles_per_s = 0.0
        for _ in range(3):  # The first ones have the clocks go up.
            self._cycles_per_s = self._calibrate()

    def _calibrate(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            start.record(self._stream)
            torch.cuda._sleep(_CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
            end.record(self._stream)
        end.synchronize()
        return _CALIBRATION_CYCLES / (float(start.elapsed_time(end)) / MS_PER_S)

    def carry(self, size_bytes: int) -> torch.cuda.Event:
        """Have so many bytes carried after those before them; return the event of their end."""
        cycles = int(self._cycles_per_s * size_bytes / self.bytes_per_s)
        with self._lock, torch.cuda.stream(self._stream):
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            over: torch.cuda.Event = self._stream.record_event()
        return over


class LinkEngine(MooncakeEngine):
    """A TransferEngine whose writes take as long as over *link*, and are none."""

    def __init__(self, config: MooncakeConfig, link: Link) -> None:
        super().__init__(config)
        self._link = link
        self._numbers = itertools.count(1)
        self._under_way: dict[int, torch.cuda.Event] = {}

    def submit(self, segment_name: str, write: Write) -> int:
        """Give the write to the link; return its id."""
        batch_id = next(self._numbers)
        self._under_way[batch_id] = self._link.carry(write.size_bytes)
        return batch_id

    def check(self, batch_id: int) -> WriteState:
        """Return whether the link has carried it."""
        if not self._under_way[batch_id].query():  # type: ignore[no-untyped-call]
            return WriteState.RUNNING
        del self._under_way[batch_id]
        return WriteState.DONE


def link_writers(config: MooncakeConfig, link: Link, device: torch.device, bytes_max: int) -> WriterFor:
    """Return what makes writers behind *link*, as ``mooncake_writers`` does without one."""

    def make(hello: HelloRep, rank: int, epoch: str) -> ArenaWriter:
        address = hello.mooncake
        assert address is not None
        own = msgspec.structs.replace(
            config, protocol=address.protocol, metadata_server=address.metadata_server
        )
        engines = MooncakeEngines(
            own, make=lambda config: LinkEngine(config, link), current=functools.partial(current, device)
        )
        arena = arena_offer(hello, rank)
        return MooncakeWriter(
            engines, address.segment_name, epoch, arena.base_ptr, arena.size_bytes,
            in_flight_bytes_max=bytes_max,
        )  # fmt: skip

    return make

"""Pushes over shared memory between a pool and an arena of one GPU: gathers straight into the mapped arena.

All ranks' gathers are launched at once. A rank is committed when its gather is over and its sums are on the
host. What was launched cannot be stopped: when the attempt ends first, drain proof is given after it.

Source: design, sections 3 and 8.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch

from snapd.calls import Grant
from snapd.errors import InvalidRequest
from snapd.kv.control import Attempts, ClientControl
from snapd.kv.devicecopy import CopyJobs, SlotCopy
from snapd.kv.flights import Flights, GatherFlight
from snapd.kv.mappedjob import commit_now
from snapd.kv.pool import KVPool
from snapd.kv.pushjob import GrantedJob
from snapd.kv.slabs import Slabs
from snapd.layout import Layout
from snapd.wire import RankGrant

# How long to wait at most before looking again, and how often a wait looks at the GPU.
WAIT_S: Final = 0.000_5
_POLL_S: Final = 0.000_02

StreamFor = Callable[[torch.device], "torch.cuda.Stream | None"]


class _AsyncCopy(SlotCopy, Protocol):
    """A ``SlotCopy`` that goes on by itself."""

    def wait(self) -> None:
        """Block until what was launched has ended."""
        ...


class _Shard:
    """One rank's part of a push.

    Attributes:
        grant: where it goes.
        gather: the copy; None: not begun, or over.
        is_committed: the daemon has it.
    """

    def __init__(self, grant: RankGrant) -> None:
        self.grant = grant
        self.gather: _AsyncCopy | None = None
        self.is_committed = False


class _Gathering:
    """A gather under way that nobody wants any more; keeps what it needs."""

    def __init__(self, gather: _AsyncCopy) -> None:
        self._gather = gather

    @property
    def is_over(self) -> bool:
        return self._gather.done

    def wait(self) -> None:
        while not self._gather.done:
            self._gather.wait()


class DeviceMappedJob(GrantedJob):
    """Gathers straight into arenas that are mapped from the pools' GPUs. A step never waits for a GPU.

    Args:
        grant, layout, control, attempts, started_s: see ``GrantedJob``.
        slabs: the mapped arenas.
        pools: by rank; each on its arena's GPU.
        jobs: the copies of each rank's device.
        slots: of the tokens that are sent, shape [num_tokens].
        after: events that the gathers wait for.
        stream_for: what work of a device runs on.
        flights: looks after what is under way when the attempt ends.
    """

    _control: ClientControl

    def __init__(
        self,
        grant: Grant,
        layout: Layout,
        control: ClientControl,
        attempts: Attempts,
        started_s: float,
        *,
        slabs: Slabs,
        pools: dict[int, KVPool],
        jobs: dict[int, CopyJobs],
        slots: torch.Tensor,
        after: Sequence[torch.cuda.Event],
        stream_for: StreamFor,
        flights: Flights,
    ) -> None:
        self._slabs = slabs
        self._pools = pools
        self._jobs = jobs
        self._slots = slots
        self._after = tuple(after)
        self._stream_for = stream_for
        self._flights = flights
        self._shards = [_Shard(rank_grant) for rank_grant in grant.ranks]
        self._launched_s = 0.0
        super().__init__(grant, layout, control, attempts, started_s)

    @property
    def bytes_done(self) -> int:
        """Payload bytes written so far, over all ranks."""
        return sum(
            self._shard_bytes if shard.is_committed else shard.gather.bytes_done if shard.gather else 0
            for shard in self._shards
        )

    def wait(self) -> None:
        """Wait a little for a gather to be over."""
        until_s = time.perf_counter() + WAIT_S
        while not self.done and not any(shard.gather and shard.gather.done for shard in self._shards):
            if time.perf_counter() >= until_s:
                return
            time.sleep(_POLL_S)

    def _advance(self, max_bytes: int) -> None:
        del max_bytes  # What is launched is launched at once; another step looks at it.
        self._flights.poll()
        # The memory is the daemon's: nothing is written to it, and nothing is said of it, once it is gone.
        self._slabs.check_alive()
        if not self._launched_s:
            self._launched_s = time.monotonic()
            for shard in self._shards:
                self._begin(shard)
            return
        for shard in self._shards:
            if shard.gather is not None and shard.gather.step(self._shard_bytes):
                self._gather_s = time.monotonic() - self._launched_s
                sums = shard.gather.checksums
                commit_now(self._control, self.grant, shard.grant.rank, self._shard_bytes, sums)
                shard.gather = None
                shard.is_committed = True
        if all(shard.is_committed for shard in self._shards):
            self._succeed(drained=True)

    def _begin(self, shard: _Shard) -> None:
        rank = shard.grant.rank
        pool = self._pools[rank]
        planes = self._slabs.planes(shard.grant, self.grant.num_tokens, self.grant.epoch)
        if planes[0].device != pool.device:
            raise InvalidRequest(
                f"rank {rank}: the arena is on {planes[0].device}, the pool on {pool.device}"
            )
        stream = self._stream_for(pool.device)
        options: dict[str, Any] = {} if stream is None else {"stream": stream, "after": self._after}
        gather: Any = self._jobs[rank].gather(pool, self._slots, planes, **options)
        try:
            gather.step(self._shard_bytes)
        except BaseException:
            gather.wait()  # A part of it may be under way.
            raise
        shard.gather = gather

    def _stop(self) -> dict[int, bool]:
        return {shard.grant.rank: self._stop_shard(shard) for shard in self._shards}

    def _stop_shard(self, shard: _Shard) -> bool:
        gather, shard.gather = shard.gather, None
        flights = [] if gather is None else [GatherFlight(_Gathering(gather))]
        return self._flights.stop(self.grant, shard.grant.rank, flights, is_drained=True)

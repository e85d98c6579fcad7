"""Pushes over shared memory into an arena that the pool's GPU uses: gathers straight into it.

The arena is on that GPU, or on one that it reaches.

All ranks' gathers are launched at once. A rank is committed when its gather is over and its sums are on the
host; the daemon's answers are polled. What was launched cannot be stopped: when the attempt ends first, drain
proof is given after it.

Source: design, sections 3 and 8.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from snapd.calls import Grant
from snapd.errors import InvalidRequest
from snapd.kv.control import Attempts, Commitment, PushControl, RankCommit
from snapd.kv.devicecopy import CopyJobs, SlotCopy
from snapd.kv.devicejob import has_passed
from snapd.kv.flights import Flights, GatherFlight, has_ended
from snapd.kv.pool import CheckedSlots, KVPool
from snapd.kv.pushjob import GrantedJob
from snapd.kv.slabs import Slabs
from snapd.layout import Layout
from snapd.mapping import AnyMappedArena
from snapd.wire import RankGrant

# How long to wait at most before looking again, and how often a wait looks at the GPU.
WAIT_S: Final = 0.000_5
_POLL_S: Final = 0.000_02

StreamFor = Callable[[torch.device], "torch.cuda.Stream | None"]


class _Gathering:
    """A gather into an arena, from before its launch on; keeps what it needs.

    Args:
        gather: the copy.
        stream: what it runs on; None: the device has none.
    """

    def __init__(self, gather: SlotCopy, stream: torch.cuda.Stream | None) -> None:
        self.gather = gather
        self._stream = stream
        self._mark: torch.cuda.Event | None = None
        self._is_launched = False
        self._has_failed = False

    def launch(self, max_bytes: int) -> None:
        """Launch it; whatever interrupts that, ``is_over`` tells when what was launched is over."""
        try:
            self.gather.step(max_bytes)
        except BaseException:
            self._has_failed = True
            raise
        finally:
            if self._stream is not None:
                self._mark = self._stream.record_event()
            self._is_launched = True

    @property
    def is_over(self) -> bool:
        """Whether nothing of it can still be written, however it went. Never waits."""
        if self._stream is None:
            return self.gather.done or self._has_failed
        # Without a mark nobody knows.
        return self._is_launched and self._mark is not None and has_passed(self._mark)


class _Shard:
    """One rank's part of a push.

    Attributes:
        grant: where it goes.
        arena: where that is; None: not begun.
        gathering: the copy; None: not begun, or over.
        commit: the commit under way.
        is_committed: the daemon has it.
    """

    def __init__(self, grant: RankGrant) -> None:
        self.grant = grant
        self.arena: AnyMappedArena | None = None
        self.gathering: _Gathering | None = None
        self.commit: Commitment | None = None
        self.is_committed = False


class DeviceMappedJob(GrantedJob):
    """Gathers straight into arenas that the pools' GPUs use. A step never waits for a GPU.

    Args:
        grant, layout, control, attempts, started_s: see ``GrantedJob``.
        slabs: the mapped arenas.
        pools: by rank; each on the GPU that uses its arena.
        jobs: the copies of each rank's device.
        slots: of the tokens that are sent.
        after: events that the gathers wait for.
        stream_for: what work of a device runs on.
        flights: looks after what is under way when the attempt ends.
    """

    def __init__(
        self,
        grant: Grant,
        layout: Layout,
        control: PushControl,
        attempts: Attempts,
        started_s: float,
        *,
        slabs: Slabs,
        pools: dict[int, KVPool],
        jobs: dict[int, CopyJobs],
        slots: CheckedSlots,
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
        return sum(self._bytes_done_of(shard) for shard in self._shards)

    def _bytes_done_of(self, shard: _Shard) -> int:
        if shard.commit is not None:
            return self._shard_bytes
        return shard.gathering.gather.bytes_done if shard.gathering is not None else 0

    def wait(self) -> None:
        """Wait a little for a gather to be over, or for an answer."""
        commits = [shard.commit for shard in self._shards if shard.commit and not shard.is_committed]
        gatherings = [shard.gathering for shard in self._shards if shard.gathering is not None]
        if self.done or not gatherings:
            if commits and not self.done:
                commits[0].wait(WAIT_S)
            return
        until_s = time.perf_counter() + WAIT_S
        while not any(has_ended(gathering) for gathering in gatherings) and time.perf_counter() < until_s:
            time.sleep(_POLL_S)

    # --- a step --------------------------------------------------------------------------------

    def _check_still_wanted(self) -> None:
        # Once every commit is sent their answers decide: P may have ingested it before they are looked at.
        if any(shard.commit is None for shard in self._shards):
            super()._check_still_wanted()

    def _advance(self, max_bytes: int) -> None:
        del max_bytes  # What is launched is launched at once; another step looks at it.
        self._flights.poll()
        # The memory is the daemon's: nothing is written to it, and nothing is said of it, once it is gone.
        for shard in self._shards:
            if shard.arena is not None and not shard.is_committed:
                shard.arena.check_alive()
        for shard in self._shards:
            if shard.arena is None:
                self._begin(shard)
            else:
                self._go_on(shard)
        if all(shard.is_committed for shard in self._shards):
            self._succeed(drained=True)

    def _begin(self, shard: _Shard) -> None:
        self._launched_s = self._launched_s or time.monotonic()
        rank = shard.grant.rank
        pool = self._pools[rank]
        planes = self._slabs.planes(shard.grant, self.grant.num_tokens, self.grant.epoch)
        if planes[0].device != pool.device:
            raise InvalidRequest(
                f"rank {rank}: the arena is on {planes[0].device}, the pool on {pool.device}"
            )
        arena = self._slabs.arena(rank, self.grant.epoch)
        arena.check_alive()
        stream = self._stream_for(pool.device)
        options: dict[str, Any] = {} if stream is None else {"stream": stream, "after": self._after}
        gather: Any = self._jobs[rank].gather(pool, self._slots, planes, **options)
        shard.gathering = _Gathering(gather, stream)
        shard.arena = arena
        shard.gathering.launch(self._shard_bytes)

    def _go_on(self, shard: _Shard) -> None:
        if shard.gathering is not None and shard.gathering.gather.step(self._shard_bytes):
            self._gather_s = time.monotonic() - self._launched_s
            facts = RankCommit(
                rank=shard.grant.rank,
                num_bytes=self._shard_bytes,
                num_tokens=self.grant.num_tokens,
                checksums=shard.gathering.gather.checksums,
                drained=True,
            )
            shard.commit = self._control.commit(self.grant, facts, _no_notice)
            shard.gathering = None
        if shard.commit is not None and not shard.is_committed and shard.commit.poll():
            shard.is_committed = True

    # --- the end -------------------------------------------------------------------------------

    def _stop(self) -> dict[int, bool]:
        return {shard.grant.rank: self._stop_shard(shard) for shard in self._shards}

    def _stop_shard(self, shard: _Shard) -> bool:
        if shard.commit is not None and not shard.is_committed:
            shard.commit.forget()
        flights = [] if shard.gathering is None else [GatherFlight(shard.gathering)]
        is_drained = self._flights.stop(self.grant, shard.grant.rank, flights, is_drained=True)
        # Only now: what is forgotten here is proven by nobody.
        shard.gathering = None
        return is_drained


def _no_notice(text: str) -> Commitment:
    raise InvalidRequest("memory that is mapped carries no notifications: a control connection is needed")

"""A P rank: finalizes ingests next to its own prefill work, and compares what it got with what D has."""

import heapq
import time
from dataclasses import dataclass

from snapd.client import Client
from snapd.demo import messages as m
from snapd.demo.cache import PagedCache
from snapd.demo.memory import NAMESPACE, PoolMemory, slots_tensor
from snapd.demo.plan import PREFILL_SHARE_MAX, TOKEN_BYTES
from snapd.kv.ingest import Ingester, IngestJob
from snapd.units import MIB, MS_PER_S

_STEP_BYTES = 8 * MIB
# While only other ranks' votes are waited for.
_VOTE_POLL_S = 0.001


@dataclass(slots=True)
class _Ingest:
    """An ingest under way; nothing of it is done before *not_before_s*."""

    command: m.Finalize
    job: IngestJob
    had_no_slots: bool
    not_before_s: float


class PrefillRank:
    """A scheduler loop: commands, prefill that ends, and ingests a step at a time; nothing waits."""

    def __init__(self, setup: m.Setup, channel: m.WorkerChannel) -> None:
        self._channel = channel
        self._rank = setup.index
        self._memory = PoolMemory(setup.prefill_fd, setup.prefill_slots, writable=True)
        self._decoders = [PoolMemory(fd, setup.decoder_slots, writable=False) for fd in setup.decoder_fds]
        self._client = Client(setup.socket_path, name=f"demo P {setup.index}")
        prefill_slots_max = int(setup.prefill_slots * PREFILL_SHARE_MAX)
        self._cache = PagedCache(setup.prefill_slots, prefill_slots_max)
        self._ingester = Ingester(
            self._client,
            setup.index,
            self._memory.pool(),
            self._cache,
            NAMESPACE,
            keep_on_missing_prefix=False,
            verify=setup.verify,
        )
        self._ingests: list[_Ingest] = []
        self._prefills: list[tuple[float, list[int]]] = []
        self._inserted: list[m.Inserted] = []

    def run(self) -> None:
        """Do what is asked until told to stop.

        Raises:
            EOFError: the orchestrator has ended.
        """
        self._channel.send(m.Started())
        while True:
            command = self._channel.receive(self._idle_s())
            self._end_prefills(time.monotonic())
            match command:
                case m.Finalize():
                    self._begin(command)
                case m.Prefill():
                    self._prefill(command)
                case m.SessionOver():
                    self._cache.mark_over(command.session_id)
                case m.Report():
                    self._channel.send(self._report(command))
                case m.Stop():
                    self._ingester.close()
                    self._client.close()
                    return
            self._step()

    def _idle_s(self) -> float | None:
        """Return how long to wait for a command; None: for ever."""
        now_s = time.monotonic()
        waits_s = [max(0.0, self._prefills[0][0] - now_s)] if self._prefills else []
        for ingest in self._ingests:
            if ingest.not_before_s > now_s:
                waits_s.append(ingest.not_before_s - now_s)
            else:
                waits_s.append(_VOTE_POLL_S if ingest.job.is_waiting else 0.0)
        return min(waits_s, default=None)

    # --- prefill -------------------------------------------------------------------------------

    def _prefill(self, command: m.Prefill) -> None:
        pages = self._cache.take_for_prefill(command.num_tokens, idle_victims=command.idle_victims)
        heapq.heappush(self._prefills, (time.monotonic() + command.duration_ms / MS_PER_S, pages))

    def _end_prefills(self, now_s: float) -> None:
        while self._prefills and self._prefills[0][0] <= now_s:
            self._cache.end_prefill(heapq.heappop(self._prefills)[1])

    # --- ingest --------------------------------------------------------------------------------

    def _begin(self, command: m.Finalize) -> None:
        request = command.request
        self._ingester.keep_on_alloc_failure = not command.is_last_try
        failures = self._cache.alloc_failures
        job = self._ingester.start(request.session_id, request.token_ids, request.slab_handle)
        had_no_slots = self._cache.alloc_failures > failures
        not_before_s = time.monotonic() + command.stall_ms / MS_PER_S
        self._ingests.append(_Ingest(command, job, had_no_slots, not_before_s))

    def _step(self) -> None:
        now_s = time.monotonic()
        for ingest in list(self._ingests):
            if ingest.not_before_s <= now_s and ingest.job.step(_STEP_BYTES):
                self._ingests.remove(ingest)
                self._channel.send(self._finished(ingest))

    def _finished(self, ingest: _Ingest) -> m.Finalized:
        command, output = ingest.command, ingest.job.result
        if not output.ok:
            return m.Finalized(id=command.id, output=output, had_no_slots=ingest.had_no_slots)
        request = command.request
        self._inserted.append(m.Inserted(request.session_id, len(request.token_ids), request.slab_handle))
        # At once: nothing may be evicted, and D keeps its slots, until this is done.
        compared_bytes, differing_planes = self._compare(command)
        return m.Finalized(
            id=command.id,
            output=output,
            num_bytes=ingest.job.times.bytes,
            compared_bytes=compared_bytes,
            differing_planes=differing_planes,
        )

    def _compare(self, command: m.Finalize) -> tuple[int, int]:
        """Compare the session in P's slots with D's, every byte from token 0 on.

        By plain indexing: nothing of what brought the bytes here is used.
        """
        here = self._cache.slots_of(command.request.session_id)
        there = slots_tensor(command.slots)
        decoder = self._decoders[command.decoder]
        differing_planes = 0
        for own, theirs in zip(self._memory.planes, decoder.planes, strict=True):
            differing_planes += not own[here].equal(theirs[there])
        return len(there) * TOKEN_BYTES, differing_planes

    # --- the end -------------------------------------------------------------------------------

    def _report(self, command: m.Report) -> m.TreeReport:
        while self._prefills:
            self._cache.end_prefill(heapq.heappop(self._prefills)[1])
        cache = self._cache
        resident, free_slots, cached_slots = cache.resident(), cache.free_slots, cache.cached_slots
        cache.drop_all()
        return m.TreeReport(
            id=command.id,
            inserted=tuple(self._inserted),
            resident=resident,
            evicted=cache.evicted,
            alloc_failures=cache.alloc_failures,
            total_slots=cache.total_slots,
            free_slots=free_slots,
            cached_slots=cached_slots,
            free_slots_after=cache.free_slots,
        )

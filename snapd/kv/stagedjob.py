"""A push that goes through staging buffers: gather one piece while those before it fly.

For every rank: pieces are filled, written, and written again if that failed; when all are done, the rank is
committed. On the CPU a piece is gathered ahead, not more: what waits in memory only leaves the cache. On a
GPU gathers are launched into every buffer that is free; a piece is written when its gather is over. Or a
writer takes feeds: then its threads do all of that, piece by piece, and here the feed's end is waited for.

Source: design, sections 7 and 8.
"""

import time
from collections.abc import Callable
from typing import Final, TypeAlias

from snapd.calls import Grant
from snapd.errors import InvalidRequest, PeerResting, StaleHandle, TransportError
from snapd.kv.control import Attempts, PushControl, RankCommit
from snapd.kv.devicestaged import DeviceGather
from snapd.kv.devicestaging import DeviceRing
from snapd.kv.flights import FeedFlight, Flight, Flights, Piece, has_ended
from snapd.kv.pushjob import GrantedJob, PushResult
from snapd.kv.slabs import plane_places
from snapd.kv.staged import StagedPiece, StagedSource
from snapd.kv.stagedshard import Shard
from snapd.kv.staging import Ring, StagingBuffer
from snapd.kv.threads import torch_threads
from snapd.kv.writers import Writers, arena_offer
from snapd.layout import Layout
from snapd.transport.base import Progress, TicketState, Write
from snapd.units import MS_PER_S
from snapd.wire import HelloRep, RankGrant

# How long to wait at most for a write, and for a peer that rests, before looking again.
WAIT_S: Final = 0.000_5
REST_WAIT_S_MAX: Final = 0.05
# A feed wakes who waits for it; who looks meanwhile takes Python's lock from its threads.
FEED_WAIT_S: Final = 0.005
# A GPU fills a piece in less time than that, so waits look again and again; after so many in a row in which
# nothing happened they sleep: a forward pass, or a peer, takes its time.
BUSY_WAITS_MAX: Final = 4
# A sleep, and no yielding: the thread that begins Mooncake's writes would get Python's lock late.
POLL_S: Final = 0.000_02

# Makes what is sent of a rank: the grant of its shard, and where its planes start in the arena.
SourceFor: TypeAlias = Callable[[RankGrant, list[int]], StagedSource | DeviceGather]
# Says where a rank's buffers come from.
RingFor: TypeAlias = Callable[[int], Ring]


class _NotifiedCommit:
    """A commit that goes with the transfer. One that failed is made anew: it is idempotent."""

    def __init__(self, job: "StagedJob", shard: "Shard", text: str) -> None:
        self._job = job
        self._shard = shard
        self._text = text

    def poll(self) -> bool:
        """Return whether it was sent.

        Raises:
            TransportError: it cannot be sent, or failed too often.
        """
        shard = self._shard
        if shard.notice is None:
            shard.notice = self._job.notify(shard, self._text)
        elif shard.notice.progress is not None:
            notice, shard.notice = shard.notice, None
            if notice.progress is not None and notice.progress.state is TicketState.DONE:
                return True
            shard.commit = None
            self._job.note_failure(shard, notice)
        return False

    def wait(self, timeout_s: float) -> None:
        """Wait a little for it."""
        time.sleep(timeout_s)

    def forget(self) -> None:
        """Do nothing: its write is stopped with the shard's others."""


class StagedJob(GrantedJob):
    """Gathers through staging buffers, and writes them. A step never waits for the peer.

    What the transport asks for is not cut into steps: the first one begins all of it.

    Args:
        grant, layout, control, attempts, started_s: see ``GrantedJob``.
        hello: what the daemon said of itself.
        source_for: makes what is sent of a rank.
        ring_for: where a rank's buffers come from.
        flights: the writes of this pusher.
        writers: the writers of this pusher.
        retries_max: how often a piece, or a feed, is written again, and how often in a row, with no write
            done between, a peer that rests is waited for.
        gather_threads: torch's threads while a piece is gathered.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        grant: Grant,
        layout: Layout,
        control: PushControl,
        attempts: Attempts,
        started_s: float,
        *,
        hello: HelloRep,
        source_for: SourceFor,
        ring_for: RingFor,
        flights: Flights,
        writers: Writers,
        retries_max: int,
        gather_threads: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._hello = hello
        self._source_for = source_for
        self._flights = flights
        self._writers = writers
        self._retries_max = retries_max
        self._gather_threads = gather_threads
        self._clock = clock
        self._shards = [Shard(rank_grant, ring_for(rank_grant.rank)) for rank_grant in grant.ranks]
        self._rests = 0  # Since the last write that was done.
        self._rest_until_s = 0.0
        self._has_moved = False
        self._busy_waits = 0
        self._bytes_done = 0
        self._began_s = clock()
        super().__init__(grant, layout, control, attempts, started_s)
        self._lifetime_ms = control.lifetime_ms(self._shard_bytes * len(grant.ranks))

    @property
    def bytes_done(self) -> int:
        """Payload bytes gathered so far, over all ranks."""
        under_way = sum(shard.source.bytes_done for shard in self._shards if shard.source is not None)
        return self._bytes_done + under_way

    def wait(self) -> None:
        """Wait a little, unless the last step moved something."""
        if self.done or self._has_moved:
            return
        feeding = next((shard.feeding for shard in self._shards if shard.feeding is not None), None)
        if feeding is not None:
            feeding.feed.wait(FEED_WAIT_S)
            return
        commits = [shard.commit for shard in self._shards if shard.commit and not shard.is_committed]
        is_flying = any(shard.flying for shard in self._shards)
        rest_s = self._rest_until_s - self._clock()
        is_gpu_at_work = any(shard.is_on_gpu and not shard.is_written for shard in self._shards)
        if is_gpu_at_work and rest_s <= 0 and self._busy_waits < BUSY_WAITS_MAX:
            self._wait_for_gpu()
        elif commits and not is_flying:
            commits[0].wait(WAIT_S)
        elif rest_s > 0 and not is_flying:
            time.sleep(min(rest_s, REST_WAIT_S_MAX))
        else:
            time.sleep(WAIT_S)

    def _wait_for_gpu(self) -> None:
        """Wait for a gather or a write to end, ``WAIT_S`` at most; other threads may run."""
        self._busy_waits += 1
        until_s = time.perf_counter() + WAIT_S
        while time.perf_counter() < until_s:
            self._flights.poll()
            for shard in self._shards:
                if any(flight.progress is not None for flight in shard.flying):
                    return
                if shard.filling and has_ended(shard.filling[0][1]):
                    return
            time.sleep(POLL_S)

    # --- a step --------------------------------------------------------------------------------

    def _check_still_wanted(self) -> None:
        # Once every commit is sent their answers decide: P may have ingested it before they are looked at.
        if any(shard.commit is None for shard in self._shards):
            super()._check_still_wanted()

    def _advance(self, max_bytes: int) -> None:
        self._has_moved = False
        if self._hello.epoch != self.grant.epoch:
            raise StaleHandle(
                f"the daemon was restarted: its epoch is {self._hello.epoch}, the grant's {self.grant.epoch}"
            )
        self._flights.poll()
        for shard in self._shards:
            self._settle(shard)
        self._check_lifetime()
        # What waits first, as the peer has nothing to do meanwhile.
        self._write_ready()
        launched_bytes = self._launch_some(max_bytes)
        self._collect()
        self._write_ready()
        self._gather_some(max_bytes, launched_bytes)
        for shard in self._shards:
            self._commit(shard)
        if self._has_moved:
            self._busy_waits = 0
        if all(shard.is_committed for shard in self._shards):
            self._succeed(drained=all(shard.is_drained for shard in self._shards))

    def _check_lifetime(self) -> None:
        if self._lifetime_ms is None:
            return
        if (self._clock() - self._began_s) * MS_PER_S > self._lifetime_ms:
            raise TransportError(f"the push was not done within {self._lifetime_ms} ms")

    def _settle(self, shard: Shard) -> None:
        """Take note of writes that are over; one that failed is written again."""
        for flight in [flight for flight in shard.flying if flight.progress is not None]:
            shard.flying.remove(flight)
            self._has_moved = True
            assert flight.progress is not None
            is_done = flight.progress.state is TicketState.DONE
            if is_done:
                self._rests = 0
            if isinstance(flight, FeedFlight):
                self._settle_feed(shard, flight, is_done=is_done)
            elif not is_done:
                shard.ready.appendleft(flight.piece)
                self.note_failure(shard, flight)

    def _settle_feed(self, shard: Shard, flight: FeedFlight, *, is_done: bool) -> None:
        """Take note of a feed that is over; one whose writes failed begins anew.

        Raises:
            Exception: its gathers failed.
            TransportError: it failed too often.
        """
        self._gather_s += flight.feed.launch_s
        if is_done:
            kept = flight.feed.take_last()
            if kept is not None:
                shard.last_piece = Piece(shard.ring, *kept, is_kept=True)
            return
        assert flight.progress is not None
        shard.source = None
        shard.is_drained = shard.is_drained and flight.progress.is_drained
        if flight.feed.error is not None:
            raise flight.feed.error
        self._count_failure(shard, flight.progress, len(shard.feeds))

    def note_failure(self, shard: Shard, flight: Flight) -> None:
        """Count a write that failed.

        Raises:
            TransportError: it failed too often.
        """
        assert flight.progress is not None
        shard.is_drained = shard.is_drained and flight.progress.is_drained
        flight.piece.failures += 1
        self._count_failure(shard, flight.progress, flight.piece.failures)

    def _count_failure(self, shard: Shard, progress: Progress, failures: int) -> None:
        if failures > self._retries_max:
            raise TransportError(
                f"rank {shard.grant.rank}: a write failed {failures} times: {progress.detail}"
            )
        self._retried_pieces += 1

    def _write_ready(self) -> None:
        for shard in self._shards:
            while shard.ready and self._clock() >= self._rest_until_s:
                piece = shard.ready[0]
                if not self._flights.has_room(piece.write.size_bytes):
                    return
                assert shard.writer is not None
                try:
                    flight = self._flights.submit(shard.writer, piece)
                except PeerResting as resting:
                    self._rest(resting)
                    return
                shard.ready.popleft()
                shard.flying.append(flight)
                self._has_moved = True

    def notify(self, shard: Shard, text: str) -> Flight | None:
        """Begin to write a shard's last piece once more, with a text behind it; None: not yet.

        Raises:
            TransportError: it cannot be sent.
        """
        assert shard.writer is not None and shard.last_piece is not None
        if self._clock() < self._rest_until_s:
            return None
        try:
            flight = self._flights.notify(shard.writer, shard.last_piece, text)
        except PeerResting as resting:
            self._rest(resting)
            return None
        self._has_moved = True
        return flight

    def _rest(self, resting: PeerResting) -> None:
        self._rests += 1
        if self._rests > self._retries_max:
            raise resting
        self._rest_until_s = self._clock() + resting.retry_after_ms / MS_PER_S

    def _launch_some(self, max_bytes: int) -> int:
        """Launch gathers on GPUs, up to *max_bytes* but one at least; return how many bytes."""
        launched_bytes = 0
        for shard in (shard for shard in self._shards if shard.is_on_gpu):
            self._begin_source(shard)
            if shard.is_fed:
                self._feed(shard)
                continue
            source = shard.source
            assert isinstance(source, DeviceGather)
            started_s = time.monotonic()
            while source.has_more and (not launched_bytes or launched_bytes < max_bytes):
                buffer = shard.ring.take()
                if buffer is None:
                    break
                try:
                    gathering = source.begin(buffer)
                except BaseException:
                    shard.ring.give_back(buffer)
                    raise
                shard.filling.append((buffer, gathering))
                launched_bytes += gathering.payload_bytes
                self._has_moved = True
            self._gather_s += time.monotonic() - started_s
        return launched_bytes

    def _feed(self, shard: Shard) -> None:
        """Have the transport ask for a shard's pieces, if it does not."""
        if shard.feeding is not None:
            shard.feeding.feed.ask()
        if shard.flying or shard.is_gathered or self._clock() < self._rest_until_s:
            return
        assert shard.writer is not None
        assert isinstance(shard.source, DeviceGather) and isinstance(shard.ring, DeviceRing)
        try:
            flight = self._flights.submit_feed(
                shard.writer, shard.source, shard.ring, shard.grant.snapshot_buf_base_ptr,
                keeps_last=self._control.is_notifying,
            )  # fmt: skip
        except PeerResting as resting:
            self._rest(resting)
            return
        except BaseException as error:
            # Interrupted, a thread may have begun it all the same.
            shard.is_drained = shard.is_drained and isinstance(error, TransportError)
            raise
        shard.flying.append(flight)
        shard.feeds.append(flight.feed)
        self._has_moved = True

    def _collect(self) -> None:
        """Have pieces written whose gathers are over."""
        for shard in self._shards:
            while shard.filling and shard.filling[0][1].is_over:
                buffer, gathering = shard.filling.popleft()
                assert isinstance(shard.source, DeviceGather)
                staged = shard.source.collect(gathering)
                is_last = not shard.source.has_more and not shard.filling
                self._make_ready(shard, buffer, staged, is_last=is_last)
                self._has_moved = True

    def _gather_some(self, max_bytes: int, moved_bytes: int) -> None:
        for shard in self._shards:
            while not shard.is_on_gpu and not shard.is_gathered:
                # A piece that waits is ahead enough.
                if any(other.ready for other in self._shards) or not self._begin_piece(shard):
                    return
                started_s = time.monotonic()
                moved_bytes += self._fill(shard, max_bytes, moved_bytes)
                self._gather_s += time.monotonic() - started_s
                self._has_moved = True
                self._write_ready()
                if shard.buffer is not None or moved_bytes >= max_bytes:
                    return

    def _begin_source(self, shard: Shard) -> None:
        if shard.source is None:
            shard.source = self._make_source(shard.grant)
        if shard.writer is None:
            # Only once: one that was closed meanwhile must not be had anew.
            shard.writer = self._writers.writer(self._hello, shard.grant.rank)

    def _begin_piece(self, shard: Shard) -> bool:
        """Have a buffer that is being filled by this thread; return whether there is one."""
        self._begin_source(shard)
        assert not isinstance(shard.source, DeviceGather) and shard.source is not None
        if shard.buffer is None:
            shard.buffer = shard.ring.take()
            if shard.buffer is None:
                return False
            shard.source.begin(shard.buffer.memory)
        return True

    def _make_source(self, grant: RankGrant) -> StagedSource | DeviceGather:
        places = plane_places(grant, self.grant.num_tokens, arena_offer(self._hello, grant.rank).size_bytes)
        source = self._source_for(grant, [offset_bytes for offset_bytes, _ in places])
        if source.plane_sizes_bytes != tuple(size_bytes for _, size_bytes in places):
            raise InvalidRequest(f"rank {grant.rank}: the planes are not those of the layout")
        return source

    def _fill(self, shard: Shard, max_bytes: int, moved_bytes: int) -> int:
        """Gather into the buffer, up to *max_bytes* with those before; return how many bytes."""
        assert not isinstance(shard.source, DeviceGather)
        assert shard.source is not None and shard.buffer is not None
        before_bytes = shard.source.bytes_done
        with torch_threads(self._gather_threads):
            staged = shard.source.step(max_bytes, moved_bytes)
        if staged is not None:
            self._make_ready(shard, shard.buffer, staged, is_last=shard.source.done)
            shard.buffer = None
        return shard.source.bytes_done - before_bytes

    def _make_ready(self, shard: Shard, buffer: StagingBuffer, staged: StagedPiece, *, is_last: bool) -> None:
        """Have a filled buffer written."""
        target_ptr = shard.grant.snapshot_buf_base_ptr + staged.offset_bytes
        write = Write(buffer.address, target_ptr, staged.size_bytes)
        is_kept = self._control.is_notifying and is_last
        piece = Piece(shard.ring, buffer, write, is_kept=is_kept)
        if is_kept:
            shard.last_piece = piece
        shard.ready.append(piece)

    def _commit(self, shard: Shard) -> None:
        if shard.is_committed or not shard.is_written:
            return
        if shard.commit is None:
            assert shard.source is not None
            facts = RankCommit(
                rank=shard.grant.rank,
                num_bytes=self._shard_bytes,
                num_tokens=self.grant.num_tokens,
                checksums=shard.source.checksums,
                drained=shard.is_drained,
            )
            shard.commit = self._control.commit(
                self.grant, facts, lambda text: _NotifiedCommit(self, shard, text)
            )
            self._has_moved = True
        if shard.commit.poll():
            shard.is_committed = True
            self._has_moved = True
            self._release_last(shard)

    # --- the end -------------------------------------------------------------------------------

    def _release_last(self, shard: Shard) -> None:
        if shard.last_piece is not None:
            self._flights.release(shard.last_piece)
            shard.last_piece = None

    def _stop(self) -> dict[int, bool]:
        """Write no more; return, for each rank, whether no write can still land."""
        return {shard.grant.rank: self._stop_shard(shard) for shard in self._shards}

    def _stop_shard(self, shard: Shard) -> bool:
        if shard.commit is not None and not shard.is_committed:
            shard.commit.forget()
        if shard.buffer is not None:
            shard.ring.give_back(shard.buffer)
            shard.buffer = None
        while shard.filling:
            # The GPU still writes there.
            self._flights.release_after(shard.ring, *shard.filling.popleft())
        flights = shard.flying + ([shard.notice] if shard.notice is not None else [])
        flying_pieces = [flight.piece for flight in flights]
        for piece in shard.ready:
            self._flights.release(piece)
        if shard.last_piece is not None and shard.last_piece not in flying_pieces:
            self._flights.release(shard.last_piece)
        shard.ready.clear()
        is_drained = self._flights.stop(self.grant, shard.grant.rank, flights, is_drained=shard.is_drained)
        if shard.feeding is not None:
            # One that was over all the same has kept its last piece.
            shard.feeding.feed.stop()
        # Only now: what is forgotten here is proven by nobody.
        shard.flying, shard.notice, shard.last_piece = [], None, None
        return is_drained

    def _finish(self, result: PushResult) -> None:
        super()._finish(result)
        # The caller may keep the job for its result; tables and slots on a GPU are not for that.
        self._bytes_done = self.bytes_done
        for shard in self._shards:
            shard.source = None
            for feed in shard.feeds:
                feed.let_go()
            shard.feeds.clear()

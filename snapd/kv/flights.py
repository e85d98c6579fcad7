"""Writes under way: which buffers they read, whether they are over, and what is still owed when a job is.

A write that is under way cannot be called back. When its attempt ends it *lingers*: its buffer is not lent
again before the write is final, and when the last one of a rank is final and all of them were drained, the
daemon is given drain proof, if that is soon enough to be of use.

Source: design, sections 7 and 12.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeAlias

from snapd.calls import Grant
from snapd.kv.control import PushControl
from snapd.kv.devicestaged import DeviceGather
from snapd.kv.devicestaging import DeviceRing
from snapd.kv.ringfeed import RingFeed, Room
from snapd.kv.staging import Ring, StagingBuffer
from snapd.kv.writers import RankWriter
from snapd.transport.base import Progress, TicketState, Write

# Later the daemon's quarantine is over, with its default settings twice.
LINGER_S_MAX: Final = 120.0
# A notification goes with a write; there is nothing left to write, so as little as makes sense.
NOTICE_BYTES: Final = 64
# How long ``close`` waits for GPUs, and how often it looks.
CLOSE_WAIT_S: Final = 10.0
_CLOSE_POLL_S: Final = 0.001


class Piece:
    """A filled buffer.

    Attributes:
        ring: whose buffer it is.
        buffer: what holds it.
        write: where it goes.
        failures: how often writing it failed.
        is_kept: the job releases it, not the end of the write.
        is_released: the ring has its buffer again.
    """

    __slots__ = ("buffer", "failures", "is_kept", "is_released", "ring", "write")

    def __init__(self, ring: Ring, buffer: StagingBuffer, write: Write, *, is_kept: bool) -> None:
        self.ring = ring
        self.buffer = buffer
        self.write = write
        self.failures = 0
        self.is_kept = is_kept
        self.is_released = False


class _TicketFlight:
    """A ticket of a writer that is under way.

    Attributes:
        progress: how it ended; None: it has not.
    """

    __slots__ = ("_ticket", "_writer", "progress")

    def __init__(self, writer: RankWriter, ticket: int) -> None:
        self._writer = writer
        self._ticket = ticket
        self.progress: Progress | None = None

    def poll(self) -> None:
        """See how far it has come."""
        if self.progress is None:
            try:
                progress = self._writer.poll(self._ticket)
            except Exception as error:  # Whatever a driver says: nobody will ever know, so no proof.
                detail = str(error) or type(error).__name__
                progress = Progress(TicketState.FAILED, is_drained=False, detail=detail)
            self.progress = progress if progress.is_final else None

    def cancel(self) -> None:
        """Keep it from beginning, if it has not."""
        if self.progress is None:
            with contextlib.suppress(Exception):  # Then it is under way, and ends as it does.
                self._writer.cancel(self._ticket)

    @property
    def is_on_gpu(self) -> bool:
        """Whether a GPU of this process does it, and nobody else has to do anything."""
        return self._writer.is_local_copy


class Flight(_TicketFlight):
    """A write under way.

    Attributes:
        piece: what is written.
    """

    __slots__ = ("piece",)

    def __init__(self, writer: RankWriter, ticket: int, piece: Piece) -> None:
        super().__init__(writer, ticket)
        self.piece = piece

    @property
    def in_flight_bytes(self) -> int:
        """How much is being written."""
        return self.piece.write.size_bytes


class FeedFlight(_TicketFlight):
    """The writes of a feed under way. Buffers are the feed's.

    Attributes:
        piece: there is none.
        feed: what is written.
    """

    __slots__ = ("feed",)
    piece: Final = None

    def __init__(self, writer: RankWriter, ticket: int, feed: RingFeed) -> None:
        super().__init__(writer, ticket)
        self.feed = feed

    def poll(self) -> None:
        """See how far it has come."""
        super().poll()
        if self.progress is not None and self.progress.state is not TicketState.DONE:
            # A thread may still be gathering, or it was never asked for anything.
            self.feed.stop()

    @property
    def in_flight_bytes(self) -> int:
        """How much is being written."""
        return self.feed.in_flight_bytes


class Gathering(Protocol):
    """A copy on a GPU that was begun; nothing can stop it."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, however it went. Never waits.

        Raises:
            Exception: it cannot be known.
        """
        ...


def has_ended(gathering: Gathering) -> bool:
    """Return whether it is known that a gather is over."""
    try:
        return gathering.is_over
    except Exception:  # Whatever a driver says: it may still run.
        return False


class GatherFlight:
    """A gather under way that writes into the arena itself.

    Attributes:
        piece: there is none.
        progress: how it ended; None: it has not.
    """

    piece: Final = None
    is_on_gpu: Final = True

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self.progress: Progress | None = None

    def poll(self) -> None:
        """See whether it is over: then it writes no more, whatever came of it."""
        if self.progress is None and has_ended(self._gathering):
            self.progress = Progress(TicketState.DONE, is_drained=True)

    def cancel(self) -> None:
        """Do nothing: what was launched runs."""


AnyFlight: TypeAlias = Flight | FeedFlight | GatherFlight


@dataclasses.dataclass(frozen=True)
class _Filling:
    """A buffer that a gather still writes to, and nobody wants any more."""

    ring: Ring
    buffer: StagingBuffer
    gathering: Gathering


class _Lingering:
    """What is under way of a rank of an attempt that has ended."""

    def __init__(
        self, grant: Grant, rank: int, flights: list[AnyFlight], *, is_drained: bool, now_s: float
    ) -> None:
        self.grant = grant
        self.rank = rank
        self.flights = flights
        self.is_drained = is_drained
        self.since_s = now_s


class Flights:
    """The writes of one pusher that are under way, of all its jobs.

    For one thread; a keeper's may look at what is left, with ``settle``.

    Args:
        control: gets drain proof.
        in_flight_bytes_max: how much is under way at a time; one write at least.
        clock: seconds, monotonic.
    """

    def __init__(self, control: PushControl, in_flight_bytes_max: int, clock: Callable[[], float]) -> None:
        self._control = control
        self._in_flight_bytes_max = in_flight_bytes_max
        self._clock = clock
        self._flying: list[Flight | FeedFlight] = []
        self._feeds: list[RingFeed] = []
        self._room = Room(in_flight_bytes_max)
        self._lingering: list[_Lingering] = []
        self._filling: list[_Filling] = []
        self._is_closed = False
        self._lock = threading.RLock()

    @property
    def in_flight_bytes(self) -> int:
        """How much jobs have under way."""
        return sum(flight.in_flight_bytes for flight in self._flying)

    @property
    def lingering(self) -> int:
        """Ranks of ended attempts that have writes under way."""
        return len(self._lingering)

    def has_room(self, size_bytes: int) -> bool:
        """Return whether so much more may be under way."""
        in_flight_bytes = self.in_flight_bytes
        return not in_flight_bytes or in_flight_bytes + size_bytes <= self._in_flight_bytes_max

    def submit(self, writer: RankWriter, piece: Piece) -> Flight:
        """Begin to write a piece; errors as ``ArenaWriter.submit``."""
        with self._lock:
            flight = Flight(writer, writer.submit(piece.buffer, piece.write), piece)
            self._flying.append(flight)
            return flight

    def submit_feed(
        self, writer: RankWriter, source: DeviceGather, ring: DeviceRing, base_ptr: int, *, keeps_last: bool
    ) -> FeedFlight:
        """Begin to gather a shard into a ring, and to write it; errors as ``FeedWriter.submit_feed``.

        Feeds share how much may be under way. What else is waits for them, and they do not wait for it.

        Args:
            writer: one that takes feeds.
            source: what is sent.
            ring: on its GPU.
            base_ptr: where the arena starts.
            keeps_last: see ``RingFeed``.
        """
        # Asked once: of a pusher that was closed the keeper may take it away.
        buffers = ring.allocate()
        with self._lock:
            feed = RingFeed(source, ring, base_ptr, self._room, keeps_last=keeps_last)
            self._feeds.append(feed)
            try:
                flight = FeedFlight(writer, writer.submit_feed(buffers[0], feed), feed)
            except BaseException:
                feed.stop()
                feed.let_go()
                raise
            self._flying.append(flight)
            return flight

    def notify(self, writer: RankWriter, piece: Piece, text: str) -> Flight:
        """Write a piece's first bytes again, with a text behind them; errors as ``ArenaWriter.submit``."""
        write = Write(
            piece.write.source_address, piece.write.target_ptr, min(piece.write.size_bytes, NOTICE_BYTES)
        )
        with self._lock:
            ticket = writer.submit_notification(piece.buffer, write, text)
            flight = Flight(writer, ticket, piece)
            self._flying.append(flight)
            return flight

    def release(self, piece: Piece) -> None:
        """Give a piece's buffer back, once: nothing reads it any more."""
        with self._lock:
            if not piece.is_released:
                piece.is_released = True
                piece.ring.give_back(piece.buffer)

    def release_after(self, ring: Ring, buffer: StagingBuffer, gathering: Gathering) -> None:
        """Give a buffer back when the gather that fills it is over."""
        with self._lock:
            self._filling.append(_Filling(ring, buffer, gathering))
            self._poll_filling()

    def _poll_filling(self) -> None:
        for filling in [filling for filling in self._filling if has_ended(filling.gathering)]:
            self._filling.remove(filling)
            filling.ring.give_back(filling.buffer)

    def poll(self) -> None:
        """See which writes are over; what is owed for those that linger is said."""
        with self._lock:
            self._poll_filling()
            for flight in self._flying:
                flight.poll()
                is_done = flight.progress is not None and flight.progress.state is TicketState.DONE
                if flight.piece is not None and is_done and not flight.piece.is_kept:
                    self.release(flight.piece)
            self._flying = [flight for flight in self._flying if flight.progress is None]
            for lingering in list(self._lingering):
                self._poll_lingering(lingering)
            self._feeds = [feed for feed in self._feeds if not feed.settle()]

    def stop(self, grant: Grant, rank: int, flights: Iterable[AnyFlight], *, is_drained: bool) -> bool:
        """End the writes of a rank of an attempt that is over; what is under way lingers.

        Args:
            grant: the attempt.
            rank: whose shard.
            flights: its writes that are not done, as far as is known.
            is_drained: no other write of the rank can still land.

        Returns:
            Whether no write of the rank can still land.
        """
        flights = list(flights)
        with self._lock:
            for flight in flights:
                flight.cancel()
            # Only now: a poll begins what there is room for.
            for flight in flights:
                flight.poll()
            self._flying = [flight for flight in self._flying if flight not in flights]
            lingering = _Lingering(grant, rank, flights, is_drained=is_drained, now_s=self._clock())
            self._settle(lingering)
            if not lingering.flights:
                return lingering.is_drained
            # Each holds a buffer or a copy of a GPU at least, so there are never many.
            self._lingering.append(lingering)
            return False

    def close(self) -> None:
        """Keep what has not begun from beginning, and wait for GPUs, ``CLOSE_WAIT_S`` at most.

        What is under way then goes on; ``settle`` says when it is over. Drain proof is not given any more.
        """
        self.cancel()
        until_s = self._clock() + CLOSE_WAIT_S
        self.poll()
        while self._is_gpu_at_work and self._clock() < until_s:
            time.sleep(_CLOSE_POLL_S)
            self.poll()
        self._is_closed = True

    def cancel(self) -> None:
        """Keep what has not begun from beginning."""
        with self._lock:
            for flight in self._flying:
                flight.cancel()
            for feed in self._feeds:
                feed.let_go()

    @property
    def _is_gpu_at_work(self) -> bool:
        under_way: list[AnyFlight] = [*self._flying]
        for lingering in self._lingering:
            under_way += lingering.flights
        is_filling = bool(self._filling) or any(feed.is_gathering for feed in self._feeds)
        return is_filling or any(flight.is_on_gpu for flight in under_way)

    def settle(self) -> bool:
        """See what has ended after ``close``; return whether nothing is under way. Any thread may call."""
        with self._lock:
            self._is_closed = True
            self.poll()
            return not (self._flying or self._lingering or self._filling or self._feeds)

    def _settle(self, lingering: _Lingering) -> None:
        under_way: list[AnyFlight] = []
        for flight in lingering.flights:
            if flight.progress is None:
                under_way.append(flight)
                continue
            lingering.is_drained = lingering.is_drained and flight.progress.is_drained
            if flight.piece is not None:
                self.release(flight.piece)
        lingering.flights = under_way

    def _poll_lingering(self, lingering: _Lingering) -> None:
        for flight in lingering.flights:
            flight.poll()
        self._settle(lingering)
        if lingering.flights:
            return
        self._lingering.remove(lingering)
        is_soon = self._clock() - lingering.since_s <= LINGER_S_MAX
        is_same_daemon = self._control.epoch == lingering.grant.epoch
        # The control connection is for one thread, and who settles may be another.
        if lingering.is_drained and is_soon and is_same_daemon and not self._is_closed:
            self._control.drained(lingering.grant, lingering.rank)

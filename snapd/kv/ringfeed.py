"""A shard's pieces as a feed: a transport's threads gather them into a ring on a GPU, and write them.

Each thread takes a piece and a buffer, launches the gather, waits for it, and has the write. So the thread
that pushes has nothing to do but to ask, now and then, whether it is over.

Source: design, sections 7 and 8.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from snapd.errors import TransportError
from snapd.kv.devicestaged import DeviceGather, PieceGathering
from snapd.kv.devicestaging import DeviceRing
from snapd.kv.staging import StagingBuffer
from snapd.transport.base import Write
from snapd.transport.mooncake_calls import CALLS
from snapd.transport.pauses import pause_s

# The first gather may come after a whole forward pass.
_LONGEST_PAUSE_S: Final = 0.000_2
# Only whoever pushes hears that the attempt has ended; after a quarantine, longer than this by default, its
# bytes may be somebody else's. So nothing is written for a push that is not stepped.
UNASKED_S_MAX: Final = 10.0


class Room:
    """How much the feeds of a pusher write at a time, together. Any thread may ask.

    Args:
        size_bytes: at most; one piece at least.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._taken_bytes = 0
        self._changed = threading.Condition()

    def take(self, size_bytes: int, is_unwanted: Callable[[], bool]) -> bool:
        """Wait for room, and take it; return whether it was taken: else it *is_unwanted* by now."""
        with self._changed:
            while not is_unwanted():
                if not self._taken_bytes or self._taken_bytes + size_bytes <= self._size_bytes:
                    self._taken_bytes += size_bytes
                    return True
                self._changed.wait()
            return False

    def give_back(self, size_bytes: int) -> None:
        """Give back what was taken."""
        with self._changed:
            self._taken_bytes -= size_bytes
            self._changed.notify_all()

    def wake(self) -> None:
        """Have those that wait see whether they are to go on."""
        with self._changed:
            self._changed.notify_all()


class RingFeed:
    """A ``WriteFeed`` of the pieces of a gather. Any thread may call; only ``next`` waits.

    Attributes:
        error: what ``next`` raised first; None: nothing.
        in_flight_bytes: what was given to be written, and is not over.
        launch_s: time spent launching gathers.

    Args:
        source: what is sent; nobody else begins pieces of it.
        ring: where its buffers come from; allocated.
        base_ptr: where the arena starts.
        room: how much may be written at a time.
        keeps_last: the last piece stays in its buffer when it is written, for ``take_last``.
    """

    def __init__(
        self, source: DeviceGather, ring: DeviceRing, base_ptr: int, room: Room, *, keeps_last: bool
    ) -> None:
        self.error: Exception | None = None
        self.in_flight_bytes = 0
        self.launch_s = 0.0
        self._source = source
        self._ring = ring
        self._base_ptr = base_ptr
        self._room = room
        self._keeps_last = keeps_last
        self._pieces_left = source.num_pieces
        self._askers = 0
        self._held: dict[int, StagingBuffer] = {}
        self._left: list[StagingBuffer] = []
        self._last: StagingBuffer | None = None
        self._kept: tuple[StagingBuffer, Write] | None = None
        self._withheld: list[StagingBuffer] = []
        self._is_let_go = False
        self._asked_s = time.monotonic()
        self._is_flowing = False
        self._is_stopped = threading.Event()
        self._has_ended = threading.Event()
        # Gathers are launched, and their sums added up, one at a time.
        self._sourcing = threading.Lock()
        self._lock = threading.Lock()

    # --- a transport's threads -----------------------------------------------------------------

    def next(self) -> Write | None:
        """Gather the next piece, and return its write; None: there is none, or the feed was stopped.

        Raises:
            InvalidRequest, DeviceMemoryFull, Exception: as ``DeviceGather.begin``, or whatever a driver says.
            TransportError: the process is ending, or nobody calls ``ask``; that is no ``error``.
        """
        with self._lock:
            if self._pieces_left == 0 or self._is_stopped.is_set():
                return None
            self._pieces_left -= 1
            self._askers += 1
        try:
            write = self._gather()
        except Exception as error:
            self.error = self.error or error
            raise
        finally:
            with self._lock:
                self._askers -= 1
        if write is not None and time.monotonic() - self._asked_s > UNASKED_S_MAX:
            self.over(write, may_land=False)
            raise TransportError(f"the push was not stepped for {UNASKED_S_MAX:g} s")
        return write

    def _gather(self) -> Write | None:
        buffer = self._ring.take_soon(self._is_stopped.is_set)
        if buffer is None:
            return None
        with self._lock:
            self._held[buffer.address] = buffer
        try:
            write = self._fill(buffer)
        except BaseException:
            self._leave(buffer)
            raise
        if write is None:
            self._leave(buffer)
        return write

    # Who is in a driver's call when the interpreter ends would abort the process: so those calls are counted.
    def _fill(self, buffer: StagingBuffer) -> Write | None:
        """Gather a piece into a buffer; return its write when there is room for it; None: stopped."""
        with self._sourcing, CALLS.under_way():
            if self._is_stopped.is_set():
                return None
            began_s = time.perf_counter()
            gathering = self._source.begin(buffer)
            self.launch_s += time.perf_counter() - began_s
            if self._keeps_last and not self._source.has_more:
                self._last = buffer
        if not self._wait(gathering):
            return None
        with self._sourcing, CALLS.under_way():
            staged = self._source.collect(gathering)
        if not self._room.take(staged.size_bytes, self._is_stopped.is_set):
            return None
        with self._lock:
            self.in_flight_bytes += staged.size_bytes
            if self._is_let_go:
                self._room.give_back(staged.size_bytes)
        return Write(buffer.address, self._base_ptr + staged.offset_bytes, staged.size_bytes)

    def _wait(self, gathering: PieceGathering) -> bool:
        """Wait for a gather; return whether it is over: else the feed was stopped before."""
        began_s = time.perf_counter()
        while not self._is_over(gathering):
            if self._is_stopped.wait(pause_s(time.perf_counter() - began_s, _LONGEST_PAUSE_S)):
                return False
        self._is_flowing = True
        return True

    def _is_over(self, gathering: PieceGathering) -> bool:
        with CALLS.under_way():
            if self._is_flowing:
                # It is soon over: all that comes before the shard has passed.
                gathering.wait()
            return gathering.is_over

    def _leave(self, buffer: StagingBuffer) -> None:
        """Have a buffer given back when the GPU writes to it no more."""
        with self._lock:
            self._left.append(buffer)
        self._give_back_left()

    def over(self, write: Write, *, may_land: bool) -> None:
        """Give the buffer of a write back, or keep it: for ``take_last``, or because a failed write may land.

        With other bytes it would land beside what was written anew.
        """
        with self._lock:
            self.in_flight_bytes -= write.size_bytes
            if not self._is_let_go:
                self._room.give_back(write.size_bytes)
            buffer = self._held.pop(write.source_address)
            if may_land and not self._is_let_go and self._ring.withhold(buffer):
                self._withheld.append(buffer)
                return
            if buffer is self._last and not self._is_stopped.is_set():
                self._kept = (buffer, write)
                return
        self._ring.give_back(buffer)

    def ended(self) -> None:
        """Wake who waits for the end."""
        self._has_ended.set()

    # --- whoever pushes ------------------------------------------------------------------------

    def stop(self) -> None:
        """Give no more, and let go of what was kept; who waits in ``next`` comes back."""
        with self._lock:
            self._is_stopped.set()
            kept, self._kept = self._kept, None
        if kept is not None:
            self._ring.give_back(kept[0])
        self._ring.wake()
        self._room.wake()

    def let_go(self) -> None:
        """Take note that the attempt is over: what is under way lingers, and takes no room any more."""
        with self._lock:
            if self._is_let_go:
                return
            self._is_let_go = True
            self._room.give_back(self.in_flight_bytes)
            withheld, self._withheld = self._withheld, []
        for buffer in withheld:
            self._ring.give_back(buffer)

    def ask(self) -> None:
        """Say that the push still goes on."""
        self._asked_s = time.monotonic()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of its ticket."""
        self._has_ended.wait(timeout_s)

    def take_last(self) -> tuple[StagingBuffer, Write] | None:
        """Return, once, the buffer and the write of the last piece, if it was to be kept: give it back."""
        with self._lock:
            kept, self._kept = self._kept, None
        return kept

    @property
    def is_gathering(self) -> bool:
        """Whether the GPU may write to one of its buffers, or is just being told to."""
        if self._sourcing.locked():
            return True
        with self._lock:
            held = list(self._held.values())
        return any(buffer.is_being_filled for buffer in held)

    def settle(self) -> bool:
        """Give back what the GPU has let go of; return whether the feed holds no buffer and takes no more.

        What ``take_last`` returns is not counted.
        """
        self._give_back_left()
        with self._lock:
            is_at_end = self._pieces_left == 0 or self._is_stopped.is_set()
            return is_at_end and not self._askers and not self._held and not self._withheld

    def _give_back_left(self) -> None:
        with self._lock:
            over = [buffer for buffer in self._left if not buffer.is_being_filled]
            for buffer in over:
                self._left.remove(buffer)
                del self._held[buffer.address]
        for buffer in over:
            self._ring.give_back(buffer)

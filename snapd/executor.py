"""Runs the core's instructions and posts events back: the one place where the core meets time.

Source: design, sections 3 and 6.
"""

import gc
import os
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from snapd.compiling import mypyc_attr
from snapd.core import events as e
from snapd.core.machine import Machine
from snapd.core.records import Record, SyncOutcome
from snapd.core.survey import PeerCounts
from snapd.overviews import Overviews
from snapd.timers import Cancellable, Clock, Timers

# Handles stay exact where numbers are doubles (jq, JavaScript), and cannot be guessed.
HANDLE_BITS = 53
_HANDLE_MASK: Final = (1 << HANDLE_BITS) - 1
_HANDLE_BYTES: Final = 8
# Random bytes are asked of the kernel for so many handles at a time: each asking is a system call.
_HANDLES_DRAWN: Final = 256
# Objects that are made between two looks of the collector at the youngest.
_YOUNG_OBJECTS: Final = 10_000
# What was set aside may grow to this many times what a full collection left; counting it takes its time.
_GROWTH_MAX: Final = 2
_SPARED_MIN: Final = 200_000
_LOOKS: Final = 16


_RecordWritten: Final = e.RecordWritten
_Replied: Final = e.Replied
_TimerArmed: Final = e.TimerArmed
_TimerCancelled: Final = e.TimerCancelled
_EndTold: Final = e.EndTold


def _draw_handles() -> list[int]:
    """Return random numbers of ``HANDLE_BITS`` bits."""
    drawn = os.urandom(_HANDLES_DRAWN * _HANDLE_BYTES)
    return [
        int.from_bytes(drawn[start : start + _HANDLE_BYTES], "little") & _HANDLE_MASK
        for start in range(0, len(drawn), _HANDLE_BYTES)
    ]


def spare_the_old() -> None:
    """Keep the garbage collector from looking at what has lived for long; once a process, before serving.

    Attempts and what hangs on them live for minutes, are many, and go by their reference counts: nothing of
    the daemon is part of a cycle for long. A full collection finds nothing there, and the event loop would
    stand still for it: 60 ms and more with ten thousand attempts. Should there be cycles all the same, they
    do not pile up: when what was set aside has doubled, all of it is looked at once.
    """
    gc.collect()
    gc.set_threshold(_YOUNG_OBJECTS, 10, 10)
    if _survivors not in gc.callbacks:
        gc.callbacks.append(_survivors)
    _survivors.set_aside()


class _Survivors:
    """Sets aside what a look at the middle generation has left: cycles among it were just freed."""

    def __init__(self) -> None:
        self._left = 0
        self._looks = 0
        self._is_open = False

    def set_aside(self) -> None:
        """Set everything aside, after a full collection."""
        gc.freeze()
        self._left = max(_SPARED_MIN, gc.get_freeze_count())
        self._looks = 0
        self._is_open = False

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if phase != "stop" or not info["generation"]:
            return
        if info["generation"] > 1:
            self.set_aside()
        elif not self._is_open:
            gc.freeze()
            self._looks += 1
            if self._looks % _LOOKS == 0 and gc.get_freeze_count() > _GROWTH_MAX * self._left:
                # The collector comes to all of it by itself.
                self._is_open = True
                gc.unfreeze()


_survivors: Final = _Survivors()


class RecordSink(Protocol):
    """Where records go."""

    def write(self, record: Record) -> None:
        """Take a record; never blocks and never raises."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Executor:
    """Feeds one ``Machine``.

    Args:
        machine: the core.
        log: takes every record.
        clock: the time that events carry.
        call_later: the loop's.
        on_end: is told how attempts end.
        on_record: sees every record after the log.

    Attributes:
        overviews: looks at what is open, for whoever wants to see it.
    """

    def __init__(
        self,
        machine: Machine,
        log: RecordSink,
        clock: Clock,
        call_later: Callable[[float, Callable[[], None]], Cancellable],
        on_end: Callable[[e.EndTold], None],
        on_record: Callable[[Record], None],
    ) -> None:
        self.machine = machine
        self._write = log.write
        self._clock = clock
        self._on_end = on_end
        self._on_record = on_record
        self._timers: Timers[tuple[e.TimerKind, int, int], e.Event] = Timers(clock, call_later, self._fire)
        self._waiting: dict[int, Callable[[e.Result], None]] = {}
        self._drawn: list[int] = []
        self._last_cause_id = 0
        self._is_halted = False
        self._peers = PeerCounts()
        self.overviews = Overviews(machine.books, self._peers, clock, call_later)

    @property
    def num_waiting(self) -> int:
        """Requests that have no answer yet: votes that wait for other ranks."""
        return len(self._waiting)

    @property
    def num_timers(self) -> int:
        """Timers that are armed."""
        return len(self._timers)

    @property
    def is_halted(self) -> bool:
        """The core takes nothing more; see ``halt``."""
        return self._is_halted

    def now_ns(self) -> int:
        """Return the time that an event posted now would carry."""
        return self._clock.now_ns()

    def new_handle(self) -> int:
        """Return a handle for a new attempt: random, and not in use."""
        books = self.machine.books
        while True:
            if not self._drawn:
                self._drawn = _draw_handles()
            handle = self._drawn.pop()
            # What the history has forgotten may still name bytes in quarantine.
            if handle and books.find(handle) is None and handle not in books.buffer.quarantine:
                return handle

    def ask(self, event: Callable[[int, int], e.Event], on_result: Callable[[e.Result], None]) -> None:
        """Post the event made from (time, cause id); *on_result* is called once, now or later."""
        self.take(event(self._clock.now_ns(), self.new_cause_id()), on_result)

    def new_cause_id(self) -> int:
        """Return what names the next request; for an event that ``take`` is given."""
        self._last_cause_id += 1
        return self._last_cause_id

    def take(self, event: e.Event, on_result: Callable[[e.Result], None]) -> None:
        """Post an event with the time ``now_ns`` and a cause id of its own; see ``ask``."""
        if self._is_halted:
            return
        self._waiting[event.cause_id] = on_result
        self._run(self.machine.handle(event))

    def post(self, event: Callable[[int], e.Event]) -> None:
        """Post the event made from the time; nobody waits for an answer."""
        if self._is_halted:
            return
        self._run(self.machine.handle(event(self._clock.now_ns())))

    def halt(self) -> None:
        """Have the core take nothing more: a bug may have left its books, or the log, by halves.

        Whoever asks is not answered any more; timers are forgotten. The process ends, and the next one begins
        with the log. An orderly end comes to this too, when the log has all but its last line.
        """
        self.close()
        self._is_halted = True

    def close(self) -> None:
        """Forget all timers."""
        self._timers.close()
        self.overviews.close()

    def _fire(self, event: e.Event) -> None:
        self._run(self.machine.handle(msgspec.structs.replace(event, at_ns=self._clock.now_ns())))

    def _run(self, instructions: list[e.Instruction]) -> None:
        replies: list[e.Replied] = []
        # By class and not by pattern: this is done for every line of the log.
        for instruction in instructions:
            if type(instruction) is _RecordWritten:
                record = instruction.record
                self._write(record)
                self._on_record(record)
                if type(record) is SyncOutcome:
                    self._peers.note(record)
            elif type(instruction) is _Replied:
                replies.append(instruction)
            elif type(instruction) is _TimerArmed:
                self._timers.arm(instruction.key, instruction.event.deadline_ns, instruction.event)
            elif type(instruction) is _TimerCancelled:
                self._timers.cancel(instruction.key)
            elif type(instruction) is _EndTold:
                self._on_end(instruction)
        # Last, so that whoever reacts to an answer finds everything else done.
        for reply in replies:
            on_result = self._waiting.pop(reply.cause_id, None)
            if on_result is not None:
                on_result(reply.result)

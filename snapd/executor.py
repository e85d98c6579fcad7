"""Runs the core's instructions and posts events back: the one place where the core meets time.

Source: design, sections 3 and 6.
"""

import gc
import secrets
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from snapd.core import events as e
from snapd.core.machine import Machine
from snapd.core.records import Record
from snapd.timers import Cancellable, Clock, Timers

# Handles stay exact where numbers are doubles (jq, JavaScript), and cannot be guessed.
HANDLE_BITS = 53
# Objects that are made between two looks of the collector at the youngest.
_YOUNG_OBJECTS: Final = 10_000


def spare_the_old() -> None:
    """Keep the garbage collector from looking at what has lived for long; once a process, before serving.

    Attempts and what hangs on them live for minutes, are many, and go by their reference counts: nothing of
    the daemon is part of a cycle for long. A full collection finds nothing there, and the event loop would
    stand still for it: 60 ms and more with ten thousand attempts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, 10)
    if _freeze_survivors not in gc.callbacks:
        gc.callbacks.append(_freeze_survivors)


def _freeze_survivors(phase: str, info: dict[str, Any]) -> None:
    """Set aside what a look at the middle generation has left: cycles among it were just freed."""
    if phase == "stop" and info["generation"]:
        gc.freeze()


class RecordSink(Protocol):
    """Where records go."""

    def write(self, record: Record) -> None:
        """Take a record; never blocks and never raises."""
        ...


class Executor:
    """Feeds one ``Machine``.

    Args:
        machine: the core.
        log: takes every record.
        clock: the time that events carry.
        call_later: the loop's.
        on_end: is told how attempts end.
        on_record: sees every record after the log.
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
        self._log = log
        self._clock = clock
        self._on_end = on_end
        self._on_record = on_record
        self._timers: Timers[tuple[e.TimerKind, int, int], e.Event] = Timers(clock, call_later, self._fire)
        self._waiting: dict[int, Callable[[e.Result], None]] = {}
        self._last_cause_id = 0

    @property
    def num_waiting(self) -> int:
        """Requests that have no answer yet: votes that wait for other ranks."""
        return len(self._waiting)

    @property
    def num_timers(self) -> int:
        """Timers that are armed."""
        return len(self._timers)

    def now_ns(self) -> int:
        """Return the time that an event posted now would carry."""
        return self._clock.now_ns()

    def new_handle(self) -> int:
        """Return a handle for a new attempt: random, and not in use."""
        books = self.machine.books
        while True:
            handle = secrets.randbits(HANDLE_BITS)
            # What the history has forgotten may still name bytes in quarantine.
            if handle and books.find(handle) is None and handle not in books.buffer.quarantine:
                return handle

    def ask(self, event: Callable[[int, int], e.Event], on_result: Callable[[e.Result], None]) -> None:
        """Post the event made from (time, cause id); *on_result* is called once, now or later."""
        self._last_cause_id += 1
        cause_id = self._last_cause_id
        self._waiting[cause_id] = on_result
        self._run(self.machine.handle(event(self._clock.now_ns(), cause_id)))

    def post(self, event: Callable[[int], e.Event]) -> None:
        """Post the event made from the time; nobody waits for an answer."""
        self._run(self.machine.handle(event(self._clock.now_ns())))

    def close(self) -> None:
        """Forget all timers."""
        self._timers.close()

    def _fire(self, event: e.Event) -> None:
        self._run(self.machine.handle(msgspec.structs.replace(event, at_ns=self._clock.now_ns())))

    def _run(self, instructions: list[e.Instruction]) -> None:
        replies: list[e.Replied] = []
        for instruction in instructions:
            match instruction:
                case e.RecordWritten():
                    self._log.write(instruction.record)
                    self._on_record(instruction.record)
                case e.Replied():
                    replies.append(instruction)
                case e.TimerArmed():
                    self._timers.arm(instruction.key, instruction.event.deadline_ns, instruction.event)
                case e.TimerCancelled():
                    self._timers.cancel(instruction.key)
                case e.EndTold():
                    self._on_end(instruction)
        # Last, so that whoever reacts to an answer finds everything else done.
        for reply in replies:
            on_result = self._waiting.pop(reply.cause_id, None)
            if on_result is not None:
                on_result(reply.result)

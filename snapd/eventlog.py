"""The event log: records become numbered lines of d-to-p-sync.jsonl, and lines become records again.

A line is ``{"ts":..,"at_ns":..,"seq":..,"epoch":..,"event":..`` and then the record's fields. The record
is encoded once, and the header is put in front of the bytes. Inside an epoch ``seq`` counts from 1
without a gap: a record that must be dropped gets no number, and ``events.dropped`` says how many were.

Source: design, section 6.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from snapd.compiling import mypyc_attr
from snapd.core.records import EventsDropped, Record
from snapd.logfile import SYSTEM_CALLS, FileCalls, LogSettings
from snapd.loglines import (
    LINE_TYPES,
    AnyLine,
    Header,
    Line,
    LogStatistics,
    TornLine,
    UnknownLine,
    decode_line,
    log_line_schema,
)
from snapd.logwriter import LogWriter, error_name

__all__ = [
    "LINE_TYPES", "AnyLine", "EventLog", "Header", "Line", "LogSettings", "LogStatistics", "TornLine",
    "TurnRecords", "UnknownLine", "decode_line", "log_line_schema",
]  # fmt: skip

# ts, at_ns and seq at their longest, and the punctuation; the epoch and the event's name come on top.
_HEADER_BYTES_MAX: Final = 128
_WHY_CHARS_MAX: Final = 256
# Records that wait for the end of a turn; with more the turn's lines are made before its end.
_HELD_MAX: Final = 1_024
# An events.dropped line at its longest, but for the epoch.
_REPORT_BYTES_MAX: Final = _HEADER_BYTES_MAX + _WHY_CHARS_MAX + 128


class _Template:
    """How the line of one kind of record is made, and where its encoding goes on after ``at_ns``."""

    __slots__ = ("middle", "skip_bytes")

    def __init__(self, event: str, epoch: str) -> None:
        quoted_event, quoted_epoch = msgspec.json.encode(event), msgspec.json.encode(epoch)
        self.skip_bytes = len(b'{"event":%b,"at_ns":' % quoted_event)
        self.middle = b',"epoch":%b,"event":%b' % (quoted_epoch, quoted_event)


@mypyc_attr(allow_interpreted_subclasses=True)
class EventLog:
    """Writes records to the log. No call waits for the disk, and none raises because of it.

    When the queue is full, records are dropped and counted; as soon as there is room again, an
    ``events.dropped`` line gives the count, before any later record. Calls may come from any thread;
    ``reopen`` may be called from an event loop's signal handler.

    Args:
        settings: path, rotation and bounds.
        epoch: this life of the daemon, for every line.
        wall_clock: unix time in seconds, called once for lines that are queued together.
        calls: write and ftruncate; for tests of what disks do.

    Raises:
        StartupError: the file cannot be opened, or another daemon writes it.

    Source: design, section 6.
    """

    def __init__(
        self,
        settings: LogSettings,
        epoch: str,
        wall_clock: Callable[[], float] = time.time,
        *,
        calls: FileCalls = SYSTEM_CALLS,
    ) -> None:
        self._wall_clock = wall_clock
        encoder = msgspec.json.Encoder()
        self._encode = encoder.encode
        self._encode_lines = encoder.encode_lines
        self._templates = {cls: _Template(event, epoch) for event, cls in LINE_TYPES.items()}
        epoch_bytes = len(msgspec.json.encode(epoch))
        self._header_bytes_max = _HEADER_BYTES_MAX + epoch_bytes
        self._report_bytes_max = _REPORT_BYTES_MAX + epoch_bytes
        self._seq = 0
        self._offered = 0
        self._dropped = 0
        self._drop_reports = 0
        self._unreported = 0  # dropped since the last events.dropped
        self._unreported_why: set[str] = set()
        self._unreported_at_ns = 0
        self._closed = False
        self._writer = LogWriter(settings, self._report_drops, calls)

    def write(self, record: Record) -> None:
        """Queue *record* as the next line, or count it as dropped.

        Raises:
            TypeError: *record* is no record.
        """
        self.write_all((record,))

    def write_all(self, records: Sequence[Record]) -> None:
        """Queue *records* as the next lines, in order, or count those that have no room as dropped.

        Many at once take much less time than one by one. They have the same ``ts``.

        Raises:
            TypeError: one of them is no record; nothing was queued.
        """
        for record in records:
            if type(record) not in self._templates:
                raise TypeError(f"{type(record).__name__} is no record of the event log")
        writer = self._writer
        with writer.lock:
            self._offered += len(records)
            bodies = None if self._closed or self._unreported else self._bodies(records)
            if bodies is not None:
                writer.put_all(self._lines(records, bodies))
                return
            for record in records:
                self._write_alone(record)

    def _bodies(self, records: Sequence[Record]) -> list[bytes] | None:
        """Return the encoded records; None: they have to be looked at one by one. Lock held."""
        try:
            encoded = self._encode_lines(records)
        except (ValueError, TypeError, OverflowError):
            return None
        size_bytes = len(encoded) + len(records) * self._header_bytes_max
        # No string of a line holds the byte: JSON writes it as \\n.
        return encoded.split(b"\n") if self._writer.has_room(size_bytes, len(records)) else None

    def _write_alone(self, record: Record) -> None:
        """Queue one record or drop it, when something stands in the way of all together. Lock held."""
        if self._closed:
            self._drop(record, "closed")
            return
        try:
            body = self._encode(record)
        except (ValueError, TypeError, OverflowError):
            self._drop(record, "not-encodable")
            return
        writer = self._writer
        size_bytes = len(body) + self._header_bytes_max
        # What was dropped is told first, so that a gap in the story is found where it is.
        self._report_drops(size_bytes)
        if self._unreported or not writer.has_room(size_bytes):
            failure = error_name(writer.failure)
            self._drop(record, f"write-failing:{failure}" if failure else "queue-full")
            return
        writer.put_all(self._lines((record,), (body,)))

    def reopen(self) -> None:
        """Go on in the file that the path names now (SIGHUP, after a rename); returns at once."""
        self._writer.reopen()

    def close(self, timeout_s: float) -> int:
        """Write what waits, for at most *timeout_s*; return the lines that did not get out, 0 when all did.

        Records written later are counted as dropped.
        """
        with self._writer.lock:
            if not self._closed:
                self._report_drops()
            self._closed = True
        return self._writer.close(timeout_s)

    def statistics(self) -> LogStatistics:
        """Return a snapshot of the counters."""
        with self._writer.lock:
            return LogStatistics(
                seq=self._seq,
                records_offered=self._offered,
                records_dropped=self._dropped,
                drop_reports=self._drop_reports,
                **msgspec.structs.asdict(self._writer.statistics()),
            )

    def _lines(self, records: Sequence[Record], bodies: Sequence[bytes]) -> list[bytes]:
        """Return the lines of records and their encodings, with the next numbers."""
        templates = self._templates
        seq = self._seq
        start = b'{"ts":%.6f,"at_ns":' % self._wall_clock()
        head, at_ns, at_bytes = b"", -1, 0
        lines: list[bytes] = []
        for record, body in zip(records, bodies, strict=False):
            seq += 1
            # All that is recorded of one event has its time.
            if record.at_ns != at_ns or not head:
                at_ns = record.at_ns
                text = b"%d" % at_ns
                at_bytes = len(text)
                head = b'%b%b,"seq":' % (start, text)
            template = templates[type(record)]
            rest = body[template.skip_bytes + at_bytes :]
            lines.append(b"%b%d%b%b\n" % (head, seq, template.middle, rest))
        self._seq = seq
        return lines

    def _drop(self, record: Record, why: str) -> None:
        self._dropped += 1
        self._unreported += 1
        self._unreported_why.add(why)
        self._unreported_at_ns = record.at_ns

    def _report_drops(self, with_bytes: int = 0) -> None:
        """Queue the count of what was dropped, if it and *with_bytes* more have room. Lock held."""
        lines = 2 if with_bytes else 1
        if not self._unreported or not self._writer.has_room(self._report_bytes_max + with_bytes, lines):
            return
        why = ",".join(sorted(self._unreported_why))[:_WHY_CHARS_MAX]
        record = EventsDropped(at_ns=self._unreported_at_ns, count=self._unreported, why=why)
        self._drop_reports += 1
        self._unreported = 0
        self._unreported_why.clear()
        self._writer.put_all(self._lines((record,), (self._encode(record),)))


class RecordBatches(Protocol):
    """Where records go, many at once."""

    def write_all(self, records: Sequence[Record]) -> None:
        """Take records; never blocks and never raises."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class TurnRecords:
    """Holds the records of a turn of the event loop back until its replies are out.

    Between ``hold`` and ``let_go`` records wait, in order, and the lines of all of them are made at once.
    At other times a record goes to the log at once. A few may wait, whatever happens in the turn. For the
    event loop's thread only.

    Args:
        log: where they go.
    """

    def __init__(self, log: RecordBatches) -> None:
        self._log = log
        self._held: list[Record] = []
        self._holders = 0

    def write(self, record: Record) -> None:
        """Take a record."""
        self._held.append(record)
        if not self._holders or len(self._held) >= _HELD_MAX:
            self.flush()

    def hold(self) -> None:
        """Begin a turn; one may be inside another."""
        self._holders += 1

    def let_go(self) -> None:
        """End a turn."""
        self._holders -= 1
        if not self._holders and self._held:
            self.flush()

    def flush(self) -> None:
        """Give the log what waits, as for whoever wants to know how the log fares."""
        if self._held:
            held, self._held = self._held, []
            self._log.write_all(held)

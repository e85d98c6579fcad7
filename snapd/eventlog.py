"""The event log: records become numbered lines of d-to-p-sync.jsonl, and lines become records again.

A line is ``{"ts":..,"at_ns":..,"seq":..,"epoch":..,"event":..`` and then the record's fields. The record
is encoded once, and the header is put in front of the bytes. Inside an epoch ``seq`` counts from 1
without a gap: a record that must be dropped gets no number, and ``events.dropped`` says how many were.

Source: design, section 6.
"""

import time
import typing
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from snapd.core.records import EventsDropped, Record
from snapd.logfile import SYSTEM_CALLS, FileCalls, LogSettings
from snapd.logwriter import LogWriter, error_name

__all__ = [
    "LINE_TYPES", "EventLog", "Header", "Line", "LogSettings", "LogStatistics", "TornLine", "UnknownLine",
    "decode_line", "log_line_schema",
]  # fmt: skip

LINE_TYPES: Final[dict[str, type[Record]]] = {
    str(cls.__struct_config__.tag): cls for cls in typing.get_args(Record)
}
# ts, at_ns and seq at their longest, and the punctuation; the epoch and the event's name come on top.
_HEADER_BYTES_MAX: Final = 128
_WHY_CHARS_MAX: Final = 256
# An events.dropped line at its longest, but for the epoch.
_REPORT_BYTES_MAX: Final = _HEADER_BYTES_MAX + _WHY_CHARS_MAX + 128


class LogStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the log.

    ``records_offered + drop_reports == lines_written + queued_lines + records_dropped``, always.

    Attributes:
        seq: number of the last line that was queued; 0: none yet.
        records_offered: records given to ``write``.
        records_dropped: those of them that got no line.
        drop_reports: ``events.dropped`` lines that were queued.
        lines_written: lines on file.
        bytes_written: their bytes.
        queued_lines: lines that wait for the disk.
        queued_bytes: their bytes.
        write_errors: system calls that failed, retries included.
        last_error: what the last of them said; empty if there was none.
        failing: the last write failed; its lines wait.
        rotations: files begun because the one before was full.
        reopens: files begun because ``reopen`` found another one at the path.
    """

    seq: int
    records_offered: int
    records_dropped: int
    drop_reports: int
    lines_written: int
    bytes_written: int
    queued_lines: int
    queued_bytes: int
    write_errors: int
    last_error: str
    failing: bool
    rotations: int
    reopens: int


class _Template:
    """How the line of one kind of record is made, and where its encoding goes on after ``at_ns``."""

    __slots__ = ("line", "skip_bytes")

    def __init__(self, event: str, epoch: str) -> None:
        quoted_event, quoted_epoch = msgspec.json.encode(event), msgspec.json.encode(epoch)
        self.skip_bytes = len(b'{"event":%s,"at_ns":' % quoted_event)
        self.line = b'{"ts":%%.6f,"at_ns":%%d,"seq":%%d,"epoch":%s,"event":%s%%s\n' % (
            quoted_epoch.replace(b"%", b"%%"),
            quoted_event,
        )


class EventLog:
    """Writes records to the log. No call waits for the disk, and none raises because of it.

    When the queue is full, records are dropped and counted; as soon as there is room again, an
    ``events.dropped`` line gives the count, before any later record. Calls may come from any thread;
    ``reopen`` may be called from an event loop's signal handler.

    Args:
        settings: path, rotation and bounds.
        epoch: this life of the daemon, for every line.
        wall_clock: unix time in seconds, called once a line.
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
        self._encode = msgspec.json.Encoder().encode
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
        if type(record) not in self._templates:
            raise TypeError(f"{type(record).__name__} is no record of the event log")
        writer = self._writer
        with writer.lock:
            self._offered += 1
            if self._closed:
                self._drop(record, "closed")
                return
            try:
                body = self._encode(record)
            except (ValueError, TypeError, OverflowError):
                self._drop(record, "not-encodable")
                return
            size_bytes = len(body) + self._header_bytes_max
            # What was dropped is told first, so that a gap in the story is found where it is.
            self._report_drops(size_bytes)
            if self._unreported or not writer.has_room(size_bytes):
                failure = error_name(writer.failure)
                self._drop(record, f"write-failing:{failure}" if failure else "queue-full")
                return
            writer.put(self._line(record, body))

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

    def _line(self, record: Record, body: bytes) -> bytes:
        self._seq += 1
        template = self._templates[type(record)]
        at_ns = record.at_ns
        rest = body[template.skip_bytes + len(b"%d" % at_ns) :]
        return template.line % (self._wall_clock(), at_ns, self._seq, rest)

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
        self._writer.put(self._line(record, self._encode(record)))


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What every line starts with.

    Attributes:
        ts: unix time, seconds.
        at_ns: the daemon's monotonic clock; comparable inside an epoch only.
        seq: number of the line in its epoch, from 1, no gaps.
        epoch: the life of the daemon that wrote the line.
        event: kind of the record.
    """

    ts: float
    at_ns: int
    seq: Annotated[int, msgspec.Meta(ge=1)]
    epoch: Annotated[str, msgspec.Meta(min_length=1)]
    event: str


class Line(msgspec.Struct, frozen=True):
    """A line that was understood."""

    header: Header
    record: Record


class UnknownLine(msgspec.Struct, frozen=True):
    """A whole line of a kind that this version does not know."""

    header: Header
    raw: bytes


class TornLine(msgspec.Struct, frozen=True):
    """What is no line: cut off, damaged, or not written by snapd; *why* says how that was seen."""

    raw: bytes
    why: str


AnyLine: TypeAlias = Line | UnknownLine | TornLine

_header_decoder: Final = msgspec.json.Decoder(Header)
_record_decoders: Final[dict[str, msgspec.json.Decoder[Record]]] = {
    event: msgspec.json.Decoder(cls) for event, cls in LINE_TYPES.items()
}


def decode_line(raw: bytes) -> AnyLine:
    """Return what one line of the log says; fields that this version does not know are left out.

    Args:
        raw: the line, with or without its newline.
    """
    try:
        header = _header_decoder.decode(raw)
        decoder = _record_decoders.get(header.event)
        return UnknownLine(header, raw) if decoder is None else Line(header, decoder.decode(raw))
    except (msgspec.DecodeError, RecursionError) as error:
        # A thousand brackets in a row are damage too.
        return TornLine(raw, str(error))


def log_line_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of one line: the kinds of record, told apart by ``event``."""
    template = "#/$defs/{name}"
    _, header_components = msgspec.json.schema_components([Header], ref_template=template)
    header_properties = header_components["Header"]["properties"]
    _, components = msgspec.json.schema_components(list(LINE_TYPES.values()), ref_template=template)
    for cls in LINE_TYPES.values():
        schema = components[cls.__name__]
        own = {name: value for name, value in schema["properties"].items() if name not in header_properties}
        tag = {"event": {"const": cls.__struct_config__.tag}}
        schema["properties"] = header_properties | tag | own
        schema["required"] = [*header_properties, *(name for name in schema["required"] if name in own)]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of d-to-p-sync.jsonl",
        "oneOf": [{"$ref": template.format(name=cls.__name__)} for cls in LINE_TYPES.values()],
        "discriminator": {
            "propertyName": "event",
            "mapping": {event: template.format(name=cls.__name__) for event, cls in LINE_TYPES.items()},
        },
        "$defs": dict(sorted(components.items())),
    }

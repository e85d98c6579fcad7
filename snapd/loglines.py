"""Lines of the event log: what they say, read back, and how the log fares.

A line is ``{"ts":..,"at_ns":..,"seq":..,"epoch":..,"event":..`` and then the record's fields.

Source: design, section 6.
"""

import typing
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from snapd.core.records import Record

LINE_TYPES: Final[dict[str, type[Record]]] = {
    str(cls.__struct_config__.tag): cls for cls in typing.get_args(Record)
}


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

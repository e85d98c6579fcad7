"""Lines become rows: by kind of record, with what is not known of them kept.

What snapd writes is decoded into exact types made from ``snapd.core.records``, so that a new field there is
a new column here. A line that does not fit these is looked at more slowly: it may have fields or an event of
another version, be a line of an older log, or be no line at all.

Source: design, section 6.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, get_args, get_origin

import msgspec

from snapd.core.records import ArenaInfo
from snapd.core.slab import Extent
from snapd.eventlog import LINE_TYPES, Header
from snapd.forensics.lines import LINE_BYTES_MAX
from snapd.forensics.oldlog import PEER_NAMES, is_attempt, read_old

OLD_EVENT: Final = "older.attempt"
_INT64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_SEQ: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
# Until the year 9999: what is later is no time.
_UNIX_S: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_799)]
_HEADER_TYPES: Final[dict[str, Any]] = {"ts": _UNIX_S, "at_ns": _INT64, "seq": _SEQ}
_EVENT_MARK: Final = b'"event":"'
_WHY_CHARS_MAX: Final = 200

# How a column is kept: SQL type of each kind of field.
SQL_TYPES: Final = {int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN", str: "VARCHAR", msgspec.Raw: "VARCHAR"}


class Kind(NamedTuple):
    """One kind of line.

    Attributes:
        event: as in the log; empty for kinds that this version does not know.
        struct: what a line is decoded into; its fields are the row's columns.
        columns: name and Python type of each field.
        decode: bytes to struct; raises ``msgspec.DecodeError``.
        checks: columns that are kept as JSON; each decodes a list of what must be in them.
    """

    event: str
    struct: type[msgspec.Struct]
    columns: dict[str, type]
    decode: Callable[[bytes], Any]
    checks: dict[str, msgspec.json.Decoder[Any]]


class Unreadable(NamedTuple):
    """A line that says nothing."""

    why: str


class Row(NamedTuple):
    """A line that was read in the slow way.

    Attributes:
        kind: what it is.
        value: an instance of ``kind.struct``.
        peer: who asked, if a field that is not known says so.
        extra: the fields that are not known, as JSON; empty: none.
    """

    kind: Kind
    value: Any
    peer: str | None
    extra: str


Slow: TypeAlias = Row | Unreadable


def _column_type(annotation: Any) -> tuple[type, Any]:
    """Return how a field is kept, and what must be in it if it is kept as JSON."""
    if get_origin(annotation) is Annotated:
        return _column_type(get_args(annotation)[0])
    if isinstance(annotation, type):
        # An enum of this version may lack a word that another version writes: kept as text.
        for kind in (bool, int, float, str):
            if issubclass(annotation, kind):
                return kind, None
    if get_args(annotation) and all(isinstance(word, str) for word in get_args(annotation)):
        return str, None
    return msgspec.Raw, annotation


def _kind(event: str, record: type[msgspec.Struct]) -> Kind:
    columns: dict[str, type] = {}
    fields: list[Any] = []
    checks: dict[str, msgspec.json.Decoder[Any]] = {}
    for field in msgspec.structs.fields(Header):
        columns[field.name], _ = _column_type(field.type)
        fields.append((field.name, _HEADER_TYPES.get(field.name, field.type)))
    for field in msgspec.structs.fields(record):
        if field.name in columns:
            continue
        kept, shape = _column_type(field.type)
        columns[field.name] = kept
        if shape is not None:
            checks[field.name] = msgspec.json.Decoder(list[shape])  # type: ignore[valid-type]
        annotation = _INT64 if kept is int else kept
        if field.required:
            fields.append((field.name, annotation))
        else:
            default = msgspec.Raw(b"[]") if kept is msgspec.Raw else field.default
            fields.append((field.name, annotation, default))
    struct = msgspec.defstruct(
        f"{record.__name__}Line", fields, kw_only=True, forbid_unknown_fields=True, gc=False
    )
    return Kind(event, struct, columns, msgspec.json.Decoder(struct).decode, checks)


class UnknownKindLine(msgspec.Struct, kw_only=True, gc=False):
    """A line with snapd's header and an event that this version does not know."""

    ts: _UNIX_S
    at_ns: _INT64
    seq: _SEQ
    epoch: str
    event: str
    session_id: str | None = None
    slab_handle: _INT64 | None = None


class OldLine(msgspec.Struct, kw_only=True, gc=False):
    """A line of an older log."""

    ts: float | None
    event: str
    session_id: str | None
    ok: bool
    reason: str
    bytes: int | None
    num_tokens: int | None
    duration_ms: float | None


def _simple_kind(event: str, struct: type[msgspec.Struct], columns: dict[str, type]) -> Kind:
    return Kind(event, struct, columns, msgspec.json.Decoder(struct).decode, {})


KINDS: Final[dict[bytes, Kind]] = {event.encode(): _kind(event, cls) for event, cls in LINE_TYPES.items()}
UNKNOWN_KIND: Final = _simple_kind(
    "",
    UnknownKindLine,
    {
        "ts": float,
        "at_ns": int,
        "seq": int,
        "epoch": str,
        "event": str,
        "session_id": str,
        "slab_handle": int,
    },
)
OLD_KIND: Final = _simple_kind(
    OLD_EVENT,
    OldLine,
    {"ts": float, "event": str, "session_id": str, "ok": bool, "reason": str, "bytes": int, "num_tokens": int,
     "duration_ms": float},
)  # fmt: skip
_OURS: Final = frozenset({"at_ns", "seq", "epoch"})
_HEADER_NAMES: Final = frozenset(field.name for field in msgspec.structs.fields(Header))
assert {Extent, ArenaInfo}, "what the JSON columns are made of"


def all_columns() -> dict[str, type]:
    """Return every column of every kind of line."""
    columns: dict[str, type] = {}
    for kind in (*KINDS.values(), UNKNOWN_KIND, OLD_KIND):
        for name, kept in kind.columns.items():
            assert columns.setdefault(name, kept) is kept, f"{name} means two things"
    return columns


def event_of(raw: bytes) -> bytes:
    """Return the event that a line as snapd writes it names; anything else gives what no kind is called."""
    at = raw.find(_EVENT_MARK, 0, 512) + len(_EVENT_MARK)
    return raw[at : raw.find(b'"', at)]


def read_slowly(raw: bytes) -> Slow:
    """Return what a line says that is not exactly as this version writes it."""
    if len(raw) >= LINE_BYTES_MAX:
        return Unreadable(f"longer than {LINE_BYTES_MAX:,} bytes")
    try:
        fields = _object(raw)
        if not isinstance(fields, dict):
            return Unreadable("no JSON object")
        if fields.keys() >= _HEADER_NAMES and not _is_older(fields):
            return _with_header(fields)
        return _older(fields)
    except RecursionError:
        return Unreadable("too many brackets inside each other")
    except msgspec.DecodeError as error:
        return Unreadable(str(error)[:_WHY_CHARS_MAX])


def older_reason(raw: bytes) -> str:
    """Return how an attempt ended that a line of the design before snapd tells of; empty: it is no such line.

    A line that has what only snapd's header has is none, however damaged.
    """
    row = read_slowly(raw)
    if isinstance(row, Unreadable) or row.kind is not OLD_KIND or _OURS & _object(raw).keys():
        return ""
    return str(row.value.reason)


def _object(raw: bytes) -> Any:
    """Decode JSON, also as Python writes it: NaN and Infinity are no JSON, and become None.

    Raises:
        msgspec.DecodeError: it is neither.
        RecursionError: it has too many brackets inside each other.
    """
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        try:
            found = json.loads(raw.decode(), parse_constant=lambda _: None)
            # What cannot be written again, such as half a character, can be kept nowhere.
            msgspec.json.encode(found)
        except (ValueError, OverflowError):
            found = None
        if found is None:
            raise
        return found


def _is_older(fields: Mapping[str, Any]) -> bool:
    """Whether a line that has all names of snapd's header is an older log's all the same."""
    # Of what a later snapd writes of an attempt, each line names it.
    return (
        not (isinstance(fields["event"], str) and fields["event"].encode() in KINDS)
        and "slab_handle" not in fields
        and is_attempt(fields)
    )


def _older(fields: Mapping[str, Any]) -> Slow:
    old = read_old(fields)
    if old is None:
        return Unreadable("neither a record of snapd nor the outcome of an attempt: no ok, no status")
    line = OldLine(
        ts=old.ts,
        event=OLD_EVENT,
        session_id=old.session_id,
        ok=old.ok,
        reason=old.reason,
        bytes=old.bytes,
        num_tokens=old.num_tokens,
        duration_ms=old.duration_ms,
    )
    return Row(OLD_KIND, line, old.peer, _text(old.extra))


def _with_header(fields: dict[str, Any]) -> Slow:
    event = fields["event"]
    kind = KINDS.get(event.encode(), UNKNOWN_KIND) if isinstance(event, str) else UNKNOWN_KIND
    known = {name: value for name, value in fields.items() if name in kind.columns}
    extra = {name: value for name, value in fields.items() if name not in kind.columns}
    if kind is UNKNOWN_KIND:
        # Its fields may mean anything: what does not fit is kept as it is.
        for name, kept in (("session_id", str), ("slab_handle", int)):
            if name in known and type(known[name]) is not kept:
                extra[name] = known.pop(name)
    try:
        value = kind.decode(msgspec.json.encode(known))
    except msgspec.DecodeError as error:
        return Unreadable(f"{event}: {error}"[:_WHY_CHARS_MAX])
    why = bad_column(kind, value)
    if why:
        return Unreadable(f"{event}: {why}"[:_WHY_CHARS_MAX])
    peer = next((extra[name] for name in PEER_NAMES[:2] if isinstance(extra.get(name), str)), None)
    return Row(kind, value, peer, _text(extra))


def bad_column(kind: Kind, value: Any) -> str:
    """Return what is wrong in the columns that are kept as JSON; empty: nothing."""
    for name, decoder in kind.checks.items():
        try:
            decoder.decode(b"[" + bytes(getattr(value, name)) + b"]")
        except (msgspec.DecodeError, RecursionError) as error:
            return f"{name}: {error}"
    return ""


def _text(extra: dict[str, Any]) -> str:
    return msgspec.json.encode(extra).decode() if extra else ""

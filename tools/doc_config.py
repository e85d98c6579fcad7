"""The configuration reference, from the structs in snapd/config.py and those of its tables."""

import fnmatch
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from snapd.config import ArenaShorthand, Config, environment_name
from snapd.limits import Limits
from snapd.mooncakeconfig import MooncakeConfig
from snapd.units import format_bytes, format_ms
from tools.doc_structs import sentence, table

WRITTEN: Final = (
    "<!-- Written by tools/make_docs.py from snapd/config.py: change that, then run `make docs`. -->"
)

# Where settings stand on the page, in this order; `x_*` are all that begin so. What is in no part comes at
# the end, under "Others".
PARTS: Final[dict[str, tuple[str, ...]]] = {
    "Who connects": ("socket_path", "allowed_uids"),
    "Other hosts": (
        "tcp_address", "tcp_connections_max", "tls_*", "access",
    ),
    "Arenas": (
        "ranks", "size", "device", "arena", "alignment_bytes", "register_piece_bytes", "hugepages",
        "prefault",
    ),
    "Transport": ("transport",),
    "Deadlines": (
        "reserve_timeout_ms", "transfer_timeout_ms", "transfer_min_mb_per_s", "ready_ttl_ms", "lease_ms",
        "quarantine_ms", "drain_timeout_ms",
    ),
    "Making room": ("eviction_policy",),
    "Bounds on attempts": (
        "sessions_max", "ended_history_max", "session_history_max", "layouts_max", "page_keys_max",
        "page_keys_total_max", "session_id_bytes_max", "num_tokens_max",
    ),
    "Bounds on connections": (
        "connections_max", "watchers_max", "watch_queue_max", "frame_bytes_max", "frame_timeout_ms",
        "reply_buffer_bytes_max", "requests_in_flight_max",
    ),
    "Event log": (
        "log_path", "log_rotate_bytes", "log_rotate_keep", "log_queue_bytes_max", "log_queue_lines_max",
    ),
    "Metrics": ("metrics_address",),
    "Events for routers": ("kv_events_*",),
}  # fmt: skip
OTHERS: Final = "Others"
# Settings that are one table of others.
TABLES: Final[dict[str, type[msgspec.Struct]]] = {"mooncake": MooncakeConfig, "limits": Limits}

# Flags of their own, by key. Every other setting is `--set KEY=VALUE`.
FLAGS: Final[dict[str, str]] = {
    "socket_path": "--socket",
    "log_path": "--log",
    "ranks": "--ranks",
    "size": "--size",
    "device": "--device",
    "transport": "--transport",
    "mooncake.protocol": "--protocol",
}
_HOUR_MS: Final = 3_600_000
_ITEMS: Final = {
    msgspec.inspect.StructType: "tables",
    msgspec.inspect.IntType: "integers",
    msgspec.inspect.StrType: "text",
}


class Relation(NamedTuple):
    """Something that must hold between settings.

    Attributes:
        text: what must hold.
        broken: settings with which it does not.
    """

    text: str
    broken: dict[str, object]


RELATIONS: Final = (
    Relation("`lease_ms` is below `ready_ttl_ms`.", {"lease_ms": 1000, "ready_ttl_ms": 1000}),
    Relation(
        "`reply_buffer_bytes_max` is at least `frame_bytes_max`, so that one reply fits.",
        {"reply_buffer_bytes_max": "2MiB", "frame_bytes_max": "4MiB"},
    ),
    Relation(
        "`page_keys_max` page keys of 34 bytes, and a session id, fit a frame of `frame_bytes_max`.",
        {"page_keys_max": 1_000_000},
    ),
    Relation("`alignment_bytes` is a power of two.", {"alignment_bytes": 300}),
    Relation("`register_piece_bytes` is a multiple of `alignment_bytes`.", {"register_piece_bytes": 1000}),
    Relation(
        "`register_piece_bytes` cuts no arena into more than 4,096 pieces.",
        {"register_piece_bytes": "1MiB", "size": "8GiB"},
    ),
    Relation(
        "`mooncake.host` is an address at which a peer reaches this host, and not `0.0.0.0` or `::`.",
        {"transport": "mooncake", "mooncake.host": "0.0.0.0"},
    ),
    Relation(
        'With `mooncake.protocol = "nvlink_intra"` every arena is on a GPU.',
        {"transport": "mooncake", "mooncake.protocol": "nvlink_intra"},
    ),
    Relation(
        "`tcp_address` is loopback, or the three `tls_..._path` are given.", {"tcp_address": "10.0.0.5:9465"}
    ),
    Relation(
        "With `tcp_address` there is an `[[access]]` table that can let somebody in over it.",
        {"tcp_address": "127.0.0.1:9465"},
    ),
    Relation(
        "`kv_events_replay_address` is for a daemon with `kv_events_address`.",
        {"kv_events_replay_address": "tcp://127.0.0.1:5558"},
    ),
    Relation(
        "`limits.log_close_ms` is below `limits.stop_grace_ms`, so that the log is waited for.",
        {"limits.log_close_ms": 30_000},
    ),
    Relation(
        "`limits.notifications_chars_max` is at least `limits.notification_chars_max`.",
        {"limits.notifications_chars_max": 1_000},
    ),
    Relation("`socket_path` has at most 107 bytes.", {"socket_path": "/tmp/" + "x" * 107}),
)

_HEAD: Final = """\
# Configuration reference

{written}

Every setting of `snapd serve`.
A value comes from the first of these that names it: a flag, the environment, the TOML file, the default.

* The file is `/etc/kv-snapd/snapd.toml` when it is there; `SNAPD_CONFIG` or `--config` name another one.
* A setting without a flag of its own is given as `--set KEY=VALUE`.
  Where neither a variable nor a flag is named, only the file can set it.
* Sizes are bytes, or text such as `"8GiB"`, `"512 MiB"` or `"1500MB"`; times are whole milliseconds.
* Whatever is wrong ends the start with status 2 and one line that says what to write instead; an unknown \
key is answered with the nearest known one.

```sh
snapd config                                    # every setting, and where each came from
snapd config --check /etc/kv-snapd/snapd.toml   # whether a file is valid
```

As JSON Schema: [config](../schemas/config.schema.json).
"""


class _Described(NamedTuple):
    """A setting, ready to be written down.

    Attributes:
        table: the list of tables in which it stands; empty: none.
    """

    key: str
    field: msgspec.structs.FieldInfo
    table: str = ""

    @property
    def is_file_only(self) -> bool:
        """No text stands for it: it has neither a variable nor a flag."""
        return bool(self.table or tables_in(self.field.type)) or isinstance(
            _inner(self.field.type)[0], msgspec.inspect.DictType
        )


def settings() -> dict[str, _Described]:
    """Return every setting by its key, those of the tables left out."""
    found: dict[str, _Described] = {}
    for struct in (ArenaShorthand, Config):
        for field in msgspec.structs.fields(struct):
            if field.encode_name not in TABLES:
                found[field.encode_name] = _Described(field.encode_name, field)
    return found


def settings_of_table(name: str) -> dict[str, _Described]:
    """Return the settings of a table such as ``[mooncake]`` by key."""
    fields = msgspec.structs.fields(TABLES[name])
    return {(key := f"{name}.{field.encode_name}"): _Described(key, field) for field in fields}


def tables_in(kind: Any) -> type[msgspec.Struct] | None:
    """Return what each table of a list of tables is; None: the type is no such list."""
    info, _ = _inner(kind)
    item = getattr(info, "item_type", None)
    return item.cls if isinstance(item, msgspec.inspect.StructType) else None


def unit_of(key: str) -> str:
    """Return the unit of a setting's value; empty when it has none."""
    for ending, unit in (
        ("mb_per_s", "MB/s"),
        ("_ms", "ms"),
        ("_ms_max", "ms"),
        ("_tokens", "tokens"),
        ("tokens_max", "tokens"),
    ):
        if key.endswith(ending):
            return unit
    return "bytes" if "_bytes" in key or key == "size" else ""


def _with_unit(value: Any, unit: str) -> str:
    """Return a number as it is written, and once more for a person."""
    if unit == "bytes" and value >= 1024:
        return f"{value} ({format_bytes(value)})"
    if unit == "ms" and value % _HOUR_MS == 0:
        return f"{value} ({value // _HOUR_MS} h)"
    if unit == "ms" and value >= 1000:
        return f"{value} ({format_ms(value)})"
    return str(value)


def _inner(kind: Any) -> tuple[msgspec.inspect.Type, str]:
    """Return a type without its annotations, and what they say of it."""
    info = msgspec.inspect.type_info(kind)
    said = ""
    while isinstance(info, msgspec.inspect.Metadata):
        said = said or (info.extra_json_schema or {}).get("description", "")
        info = info.type
    return info, said


def _choices(values: Iterable[object]) -> str:
    # Their order in the type is not the same in every run.
    return ", ".join(f"`{value}`" for value in sorted(map(str, values)))


def type_and_range(kind: Any, unit: str) -> tuple[str, str]:
    """Return a setting's type in words, and what it may be."""
    info, _ = _inner(kind)
    match info:
        case msgspec.inspect.IntType(ge=low, le=high):
            return "integer", f"{_with_unit(low, unit)} to {_with_unit(high, unit)}"
        case msgspec.inspect.BoolType():
            return "true or false", ""
        case msgspec.inspect.LiteralType(values=values):
            return "text", _choices(values)
        case msgspec.inspect.StrType(min_length=low, max_length=high):
            bounds = ["not empty" if low else "", f"at most {high} characters" if high else ""]
            return "text", ", ".join(bound for bound in bounds if bound)
        case msgspec.inspect.VarTupleType(item_type=item, min_length=low, max_length=high):
            while isinstance(item, msgspec.inspect.Metadata):
                item = item.type
            count = f"{low or 0} to {high} of them" if high else ""
            if isinstance(item, msgspec.inspect.LiteralType):
                return "list of text", _choices(item.values)
            return f"list of {_ITEMS[type(item)]}", count
        case msgspec.inspect.DictType(max_length=high):
            return "table of text", f"at most {high} keys"
        case _:
            raise TypeError(f"no words for the type {info!r}")


def default_of(described: _Described, unit: str) -> str:
    """Return a setting's default as it is written in the file."""
    key, field = described.key, described.field
    if field.required:
        return "must be given"
    if key in ("socket_path", "log_path"):
        return "see above"
    if key == "arena":
        return "one, for rank 0"
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, int):
        return _with_unit(default, unit)
    if isinstance(default, (tuple, dict)):
        return f"`{msgspec.json.encode(default).decode()}`" if default else "empty"
    return f'`"{default}"`'


def _setting(described: _Described) -> str:
    key = described.key
    unit = unit_of(key)
    kind, allowed = type_and_range(described.field.type, unit)
    _, said = _inner(described.field.type)
    if not said and key == "mooncake.settings":
        said = "Mooncake's own settings, by the names of its environment variables"
    head, row = ["type", "unit", "default", "range"], [kind, unit, default_of(described, unit), allowed]
    if not described.is_file_only:
        head += ["environment", "flag"]
        row += [f"`{environment_name(key)}`", f"`{FLAGS.get(key) or f'--set {key}=...'}`"]
    name = f"{key} in {described.table}" if described.table else key
    return "\n\n".join((f"### {name}", sentence(said), table(head, [row])))


def _with_tables(described: _Described) -> Iterator[str]:
    """Yield a setting, and those of its tables when it is a list of them."""
    yield _setting(described)
    struct = tables_in(described.field.type)
    for field in msgspec.structs.fields(struct) if struct else ():
        yield _setting(_Described(field.encode_name, field, f"[[{described.key}]]"))


def parts() -> dict[str, list[str]]:
    """Return the keys of each part of the page."""
    known = settings()
    found = {
        title: [key for pattern in patterns for key in fnmatch.filter(known, pattern)]
        for title, patterns in PARTS.items()
    }
    placed = {key for keys in found.values() for key in keys}
    return found | {OTHERS: [key for key in known if key not in placed]}


def _sections() -> Iterator[str]:
    known = settings()
    for title, keys in parts().items():
        if keys:
            yield f"## {title}"
        for key in keys:
            yield from _with_tables(known[key])
        if title == "Transport":
            yield "## Mooncake\n\nThe table `[mooncake]`; not used with another transport."
            yield from map(_setting, settings_of_table("mooncake").values())
    yield (
        "## Seldom changed\n\nThe table `[limits]`. The defaults suit nearly everybody; [Bounds](bounds.md) "
        "has what comes at each."
    )
    yield from map(_setting, settings_of_table("limits").values())


def page() -> str:
    """Return the whole page."""
    relations = "\n".join(f"* {relation.text}" for relation in RELATIONS)
    together = f"## What must hold between settings\n\nEach is checked at the start.\n\n{relations}"
    sections = [_HEAD.format(written=WRITTEN), *_sections(), together]
    return "\n\n".join(section.rstrip("\n") for section in sections) + "\n"

"""Values of settings: what each key takes, what text stands for, and errors that say what to write.

Nothing here knows which settings there are: they are read off a struct's fields.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from snapd.errors import ConfigError
from snapd.units import MIB, format_bytes, parse_size_bytes

_T = TypeVar("_T")

_TRUTHS: Final = {"true": True, "yes": True, "on": True, "1": True,
                  "false": False, "no": False, "off": False, "0": False}  # fmt: skip
_WHOLE_NUMBER: Final = re.compile(r"-?[0-9][0-9_]*")


class Setting(NamedTuple):
    """What is known of one key.

    Attributes:
        attribute: its name in the struct.
        type: its type, with bounds.
        is_size: text such as ``8GiB`` stands for a number.
        wanted: what to write for it, as the end of an error message.
        table: for a table or a list of tables, the keys of one; else empty.
        is_list: it is a list of tables.
    """

    attribute: str
    type: Any
    is_size: bool
    wanted: str
    table: "Mapping[str, Setting]" = {}
    is_list: bool = False

    @property
    def is_table(self) -> bool:
        """It is one table, whose keys are settings of their own."""
        return bool(self.table) and not self.is_list


def settings_of(struct: type[msgspec.Struct], prefix: str = "") -> dict[str, Setting]:
    """Return the settings of a struct by key; *prefix* is the table in which they stand."""
    return {
        prefix + field.encode_name: setting_of(prefix + field.encode_name, prefix + field.name, field.type)
        for field in msgspec.structs.fields(struct)
    }


def setting_of(key: str, attribute: str, kind: Any) -> Setting:
    """Return the setting of a key by its type; ``wanted`` in ``Meta.extra`` says what to write for it."""
    info = msgspec.inspect.type_info(kind)
    extra: dict[str, Any] = {}
    if isinstance(info, msgspec.inspect.Metadata):
        extra = info.extra or {}
    inner = info.type if isinstance(info, msgspec.inspect.Metadata) else info
    is_list = isinstance(inner, msgspec.inspect.VarTupleType)
    item = inner.item_type if isinstance(inner, msgspec.inspect.VarTupleType) else inner
    table: dict[str, Setting] = {}
    if isinstance(item, msgspec.inspect.StructType):
        table = settings_of(item.cls, "" if is_list else f"{key}.")
    wanted = extra.get("wanted") or _wanted(info, key, "size" in extra)
    return Setting(attribute, kind, "size" in extra, wanted, table, is_list)


def _wanted(info: msgspec.inspect.Type, key: str, is_size: bool) -> str:
    """Return what to write for a value of a type, as the end of an error message."""
    match info:
        case msgspec.inspect.Metadata(type=inner, extra_json_schema=extra):
            if extra and "examples" in extra:
                return "write " + " or ".join(f'"{example}"' for example in extra["examples"])
            return _wanted(inner, key, is_size)
        case msgspec.inspect.IntType(ge=low, le=high) if low is not None and high is not None:
            if is_size:
                example = format_bytes(min(high, max(low, 64 * MIB))).replace(" ", "")
                return f'write a size from {format_bytes(low)} to {format_bytes(high)}, such as "{example}"'
            return f"write a whole number from {low} to {high}"
        case msgspec.inspect.BoolType():
            return "write true or false"
        case msgspec.inspect.LiteralType(values=values):
            return "write " + " or ".join(f'"{value}"' for value in values)
        case msgspec.inspect.StrType():
            return "write a path as text, not empty"
        case msgspec.inspect.VarTupleType(item_type=msgspec.inspect.StructType(), max_length=most):
            return f"write 1 to {most} [[{key}]] tables"
        case msgspec.inspect.VarTupleType(item_type=item):
            return f"write a list such as [1000, 1001]; for each item {_wanted(item, key, is_size)}"
        case msgspec.inspect.StructType(fields=fields):
            return f"write a [{key}] table, or its keys one by one, such as {key}.{fields[0].encode_name}"
        case _:
            raise TypeError(f"no setting may have the type {info!r}")


def known(source: str, name: str, names: Mapping[str, _T]) -> _T:
    """Return what *name* stands for.

    Raises:
        ConfigError: nothing; names the nearest known name.
    """
    if name in names:
        return names[name]
    raise ConfigError(f"{source}: {name!r} is no setting; {_nearest(name, names)}")


def _nearest(name: str, names: Iterable[str]) -> str:
    by_folded = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), by_folded, n=1, cutoff=0.5)
    if close:
        return f"did you mean {by_folded[close[0]]!r}?"
    return f"known are {', '.join(sorted(by_folded.values()))}"


def _shown(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def typed(source: str, name: str, value: object, setting: Setting, *, text: bool) -> Any:
    """Return *value* in the setting's type and range.

    Args:
        source: the file, ``environment`` or ``command line``.
        name: the key or variable, as the user wrote it.
        value: as TOML gives it, or as text.
        setting: the key's type and range.
        text: strings stand for other types too (environment, flags).

    Raises:
        ConfigError: the value does not fit.
    """
    if setting.is_list and setting.table and isinstance(value, (list, tuple)):
        value = [_table(source, f"{name}[{i}]", table, setting.table) for i, table in enumerate(value)]
    try:
        if isinstance(value, str):
            value = _from_text(value, setting, text)
        return msgspec.convert(value, setting.type)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{source}: {name} = {_shown(value)} is wrong ({error}): {setting.wanted}"
        ) from error


def _table(source: str, name: str, table: object, settings: Mapping[str, Setting]) -> object:
    """Return one table of a list with every key known and every value typed."""
    if not isinstance(table, dict):
        return table
    return {
        key: typed(source, f"{name}.{key}", value, known(f"{source}: {name}", key, settings), text=False)
        for key, value in table.items()
    }


def _from_text(value: str, setting: Setting, text: bool) -> object:
    """Return what a string stands for: a size anywhere; other types in variables and flags only."""
    if setting.is_size:
        return parse_size_bytes(value.replace("_", "")) if text else parse_size_bytes(value)
    if not text:
        return value
    info = msgspec.inspect.type_info(setting.type)
    kind = info.type if isinstance(info, msgspec.inspect.Metadata) else info
    if isinstance(kind, msgspec.inspect.BoolType):
        return _TRUTHS.get(value.strip().lower(), value)
    if isinstance(kind, msgspec.inspect.IntType):
        return int(value) if _WHOLE_NUMBER.fullmatch(value.strip()) else value
    if isinstance(kind, msgspec.inspect.VarTupleType):
        return [int(item) for item in value.strip().strip("[]").split(",") if item.strip()]
    return value

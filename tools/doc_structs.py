"""What structs say of themselves, as Markdown: their docstrings, fields, types and defaults."""

import enum
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from snapd.core.slab import Extent
from snapd.errors import Reason

_ATTRIBUTES: Final = re.compile(r"^Attributes:\n((?:    .*\n?|\n)+)", re.MULTILINE)
_ENTRY: Final = re.compile(r"^(\w+(?:, \w+)*): (.*)$")
_WORDS: Final[dict[Any, str]] = {
    int: "integer", float: "number", str: "text", bool: "true or false", bytes: "bytes", type(None): "null",
}  # fmt: skip


def markdown(text: str) -> str:
    """Return a docstring's text as Markdown on one line."""
    text = " ".join(text.split())
    return re.sub(r"``(.*?)``", r"`\1`", text)


def cell(text: str) -> str:
    """Return *text* so that it is one cell of a table."""
    return text.replace("|", "\\|")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(map(cell, row))} |" for row in rows]
    return "\n".join(lines)


def anchor(name: str) -> str:
    """Return the anchor of a heading that is a name."""
    return name.lower().replace(".", "")


def summary_of(struct: type) -> str:
    """Return what a struct's docstring says before its attributes, a paragraph a line."""
    text = inspect.cleandoc(struct.__doc__ or "")
    before = _ATTRIBUTES.split(text)[0]
    return "\n\n".join(markdown(part) for part in before.split("\n\n") if part.strip())


def attributes_of(struct: type) -> dict[str, str]:
    """Return what the docstrings of a struct and its bases say of each attribute."""
    found: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        match = _ATTRIBUTES.search(inspect.cleandoc(cls.__doc__ or "") + "\n") if cls.__doc__ else None
        names: list[str] = []
        for line in inspect.cleandoc(match.group(1)).splitlines() if match else ():
            if entry := _ENTRY.match(line):
                names = entry.group(1).split(", ")
                found |= dict.fromkeys(names, entry.group(2))
            else:
                found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return {name: markdown(text) for name, text in found.items()}


def type_words(kind: Any) -> str:
    """Return a type in words, with links to the structs and enums in it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return type_words(args[0])
    if kind in _WORDS:
        return _WORDS[kind]
    if kind is Extent:
        return "[offset_bytes, size_bytes]"
    if kind is Reason:
        return "[reason](reasons.md)"
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_words, args))
    if origin is dict:
        return f"map of text to {type_words(args[1])}"
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f"list of {type_words(args[0])}"
        return f"[{', '.join(map(type_words, args))}]"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "[state](state-machine.md)"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"[{kind.__name__}](#{anchor(kind.__name__)})"
    raise TypeError(f"no word for the type {kind!r}")


def structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs in a type, but for those that are written as a list."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if not kind.__struct_config__.array_like:
            yield kind
        return
    for part in typing.get_args(kind):
        yield from structs_in(part)


def default_words(field: msgspec.structs.FieldInfo) -> str:
    """Return a field's default, as JSON writes it; empty when the field is always there."""
    if field.required:
        return ""
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"`{msgspec.json.encode(default).decode()}`"


def field_rows(
    struct: type[msgspec.Struct], common: Mapping[str, str], leave_out: frozenset[str] = frozenset()
) -> list[tuple[str, str, str, str]]:
    """Return name, type, default and meaning of each field.

    Args:
        struct: whose.
        common: what fields mean of which the docstrings say nothing, by ``Struct.field`` or ``field``.
        leave_out: fields that are told elsewhere.
    """
    said = attributes_of(struct)
    rows = []
    for field in msgspec.structs.fields(struct):
        name = field.encode_name
        if name not in leave_out:
            meaning = common.get(f"{struct.__name__}.{name}") or said.get(field.name) or common.get(name, "")
            rows.append((f"`{name}`", type_words(field.type), default_words(field), sentence(meaning)))
    return rows


def sentence(text: str) -> str:
    """Return *text* with a great first letter, unless that is code, and a full stop."""
    if not text:
        return text
    text = text if text.startswith(("`", "*")) else text[0].upper() + text[1:]
    return text if text.endswith((".", "?")) else f"{text}."

"""The tables of docs/bounds.md, from snapd/bounds.py and snapd/fixedbounds.py; the rest is as it is."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from snapd.bounds import SETTINGS
from snapd.fixedbounds import CLIENTS, DAEMON, Bound
from snapd.units import format_bytes
from tools.doc_structs import table

PAGE: Final = Path(__file__).parent.parent / "docs" / "bounds.md"
_PART: Final = re.compile(r"(<!-- (\w+): written by .*? -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def amount(bound: Bound) -> str:
    """Return a bound's value as the page writes it: ``16 MiB``, ``4,096``, ``10 s``."""
    if bound.unit == "bytes":
        return format_bytes(bound.value)
    return f"{bound.value:,} {bound.unit}".rstrip()


def settings_table() -> str:
    """Return what comes at each setting."""
    rows = [(f"`{setting}`", at_bound) for setting, at_bound in SETTINGS.items()]
    return table(("setting", "what comes at it"), rows)


def fixed_table(bounds: Iterable[Bound]) -> str:
    """Return the bounds that are fixed."""
    rows = [(bound.what, amount(bound), f"`{bound.name}`", bound.at_bound) for bound in bounds]
    return table(("what", "bound", "where", "what comes at it"), rows)


PARTS: Final[dict[str, Callable[[], str]]] = {
    "settings": settings_table,
    "daemon": lambda: fixed_table(DAEMON),
    "clients": lambda: fixed_table(CLIENTS),
}


def page() -> str:
    """Return the page, with its tables as they should be."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[4]}", PAGE.read_text("utf-8"))

"""What ``snapd status`` says of bounds: how much of each is in use, and where each value comes from."""

from typing import TYPE_CHECKING, Final

from snapd.cli.common import Table, cell, printable, say, say_note
from snapd.units import format_bytes, format_ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from snapd.wire import BoundView, StatsRep

# From here on somebody should look before it is reached.
NEAR: Final = 0.9
MARK: Final = "!"
_LINE_COLUMNS: Final = 80


def is_near(bound: "BoundView") -> bool:
    """Return whether nearly all of a bound is in use, and it is not made to be full."""
    return bound.used is not None and not bound.is_rolling and bound.used >= NEAR * bound.value


def show_usage(bounds: "Iterable[BoundView]") -> None:
    """Say how much of each bound is in use, where that is counted; those that are near are marked."""
    counted = [bound for bound in bounds if bound.used is not None]
    if not counted:
        return  # An older daemon does not say.
    for line in _wrapped([usage_text(bound) for bound in counted]):
        say(line)
    for bound in filter(is_near, counted):
        used, of = _amount(bound, bound.used or 0), _amount(bound, bound.value)
        share = "" if not bound.value else f" ({(bound.used or 0) / bound.value:.0%})"
        say(f"{MARK} {bound.name}: {used} of {of} in use{share}", "bold yellow")
        say_note(f"at it: {bound.at_bound.replace('`', '')}", indent=2)


def _wrapped(parts: list[str]) -> "Iterator[str]":
    """Yield lines of what is in use, each part in one piece."""
    line = "in use:"
    for number, part in enumerate(parts):
        comma = "," if number + 1 < len(parts) else ""
        if len(line) + len(part) + 2 > _LINE_COLUMNS:
            yield line
            line = " "
        line += f" {part}{comma}"
    yield line


def usage_text(bound: "BoundView") -> str:
    """Return ``sessions_max 12/100,000``, with a mark when it is near."""
    mark = f"{MARK} " if is_near(bound) else ""
    return f"{mark}{bound.name} {_amount(bound, bound.used or 0)}/{_amount(bound, bound.value)}"


def _amount(bound: "BoundView", number: int) -> str:
    return format_bytes(number).replace(" ", "") if bound.unit == "bytes" else f"{number:,}"


def show_limits(stats: "StatsRep") -> None:
    """Show every bound with its value and where that comes from."""
    say()
    if not stats.bounds:
        table = Table("LIMIT", ">VALUE", "")
        for name, value in stats.limits.items():
            table.add(name, str(value), shown_limit(name, value))
        table.show()
        return
    fixed = [bound for bound in stats.bounds if bound.what]
    table = Table("LIMIT", ">VALUE", "", ">USED", "FROM")
    for bound in stats.bounds:
        if bound.what:
            continue
        style = "bold yellow" if is_near(bound) else ""
        used = "" if bound.used is None else str(bound.used)
        shown = shown_limit(bound.name, bound.value)
        table.add(bound.name, str(bound.value), shown, cell(used, style), printable(bound.origin))
    table.show()
    say()
    table = Table("FIXED IN THE DAEMON", ">VALUE", "")
    for bound in fixed:
        table.add(bound.what.replace("`", ""), str(bound.value), _with_unit(bound))
    table.show()


def _with_unit(bound: "BoundView") -> str:
    if bound.unit == "ms":
        return format_ms(bound.value)
    return format_bytes(bound.value) if bound.unit == "bytes" else bound.unit


def shown_limit(name: str, value: int) -> str:
    """Return a bound in units that a person reads, if its name has one."""
    if name.endswith(("_ms", "_ms_max")):
        return format_ms(value)
    return format_bytes(value) if "_bytes" in name and value >= 1024 else ""

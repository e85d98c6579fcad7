"""Text for ``snapd top`` that has a known width: numbers, times, cells of a map, and what others named.

Whatever a session or a worker calls itself, a line is as wide as it is counted here: what a terminal might
draw wider, narrower, on top of its neighbour or from right to left is written as an escape.
"""

import math
import os
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rich.cells import cell_len
from rich.text import Text

from snapd.cli.common import can_show, printable
from snapd.core.overview import ArenaMap
from snapd.units import MS_PER_S

_LEVELS: Final = "▁▂▃▄▅▆▇█"
# Letters and marks that stand by themselves; what joins with its neighbours is left out.
_PLAIN_CATEGORIES: Final = frozenset({"Lu", "Ll", "Lt", "Lo", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi",
                                      "Pf", "Po", "Sm", "Sc", "Sk", "So"})  # fmt: skip
_RIGHT_TO_LEFT: Final = frozenset({"R", "AL", "AN"})
# Hangul's parts and emoji: terminals do not agree on how wide they are.
_DISPUTED: Final = ((0x1100, 0x11FF), (0x2600, 0x27BF), (0x2B00, 0x2BFF), (0xA960, 0xA97F), (0xD7B0, 0xD7FF),
                    (0x1F000, 0x1FAFF))  # fmt: skip


class Kind(NamedTuple):
    """What may lie in an arena: its name, its letter in a map without colours, and its colour."""

    name: str
    letter: str
    style: str


KINDS: Final = (
    Kind("writing", "w", "blue"),
    Kind("ready", "r", "green"),
    Kind("leased", "l", "cyan"),
    Kind("quarantined", "q", "yellow"),
)


class Charset(NamedTuple):
    """What the terminal can show.

    Attributes:
        is_utf8: more than ASCII.
        has_colours: a map may tell kinds by colour.
    """

    is_utf8: bool
    has_colours: bool

    @property
    def free(self) -> str:
        """A cell of a map with nothing in it."""
        return "·" if self.is_utf8 else "."

    @property
    def rule(self) -> str:
        """What a line across the screen is made of."""
        return "─" if self.is_utf8 else "-"

    @property
    def arrow(self) -> str:
        """From one state to the next."""
        return "→" if self.is_utf8 else "->"

    @property
    def more(self) -> str:
        """Stands where text was cut off."""
        return "…" if self.is_utf8 else "~"

    @property
    def is_graded(self) -> bool:
        """A map's cells are blocks of some height, in the colour of what they hold; else letters."""
        return self.is_utf8 and self.has_colours


def charset_of(environ: Mapping[str, str], *, has_colours: bool) -> Charset:
    """Return what stdout can show, going by its encoding and the locale."""
    is_utf8 = is_utf8_locale(environ) and can_show(_LEVELS + "·─→…")
    return Charset(is_utf8, has_colours and not environ.get("NO_COLOR"))


def first_environment() -> Mapping[str, str]:
    """Return the environment as the process got it: Python gives the C locale's another LC_CTYPE."""
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return os.environ
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def is_utf8_locale(environ: Mapping[str, str]) -> bool:
    """Return whether the locale's characters are UTF-8."""
    locale = environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or ""
    return "utf-8" in locale.lower() or "utf8" in locale.lower()


def safe(text: str, charset: Charset) -> str:
    """Return *text* on one line, each character of it as wide as ``cell_len`` says."""
    if text.isascii():
        return printable(text)
    return "".join(char if _is_plain(char, charset) else _escape(char) for char in text)


def _is_plain(char: str, charset: Charset) -> bool:
    if char.isascii():
        return char.isprintable()
    code = ord(char)
    return (
        charset.is_utf8
        and unicodedata.category(char) in _PLAIN_CATEGORIES
        and unicodedata.bidirectional(char) not in _RIGHT_TO_LEFT
        and cell_len(char) == (2 if unicodedata.east_asian_width(char) in "WF" else 1)
        and not any(first <= code <= last for first, last in _DISPUTED)
    )


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def cut(text: str, width: int, charset: Charset) -> str:
    """Return *text*, or as much of it as takes *width* cells with a mark that there is more."""
    if cell_len(text) <= width:
        return text
    room = width - len(charset.more)
    while text and cell_len(text) > room:
        # A guess that is never too short, then one by one: ids may be long.
        text = text[: max(room, 0)] if len(text) > max(room, 0) else text[:-1]
    return (text + charset.more)[: max(width, 0)]


def fit(line: Text, width: int) -> Text:
    """Return *line* cut to *width* cells."""
    if line.cell_len > width:
        line = line.copy()
        line.truncate(width, overflow="crop")
    return line


def short_bytes(num_bytes: float) -> str:
    """Return bytes in five characters at most: ``0``, ``512B``, ``1.5K``, ``98.5M``, ``999G``; K is 1024."""
    if num_bytes < 0.5:
        return "0"
    if num_bytes < 999.5:
        return f"{num_bytes:.0f}B"
    return _scaled(num_bytes, 1024.0, "KMGTPE")


def short_count(count: int) -> str:
    """Return a count in six characters at most: ``9999``, ``12.3k``, ``4.5M``."""
    return str(count) if count < 10_000 else _scaled(float(count), 1000.0, "kMGTPE")


def short_rate(per_s: float) -> str:
    """Return how often in a second, in six characters at most: ``0``, ``0.25``, ``12.3``, ``1234``."""
    if per_s <= 0:
        return "0"
    if per_s < 0.005:
        return "<.01"
    if per_s < 99.95:
        return f"{per_s:.2f}" if per_s < 9.995 else f"{per_s:.1f}"
    return short_count(round(per_s))


def _scaled(value: float, step: float, units: str) -> str:
    for unit in units:
        value /= step
        if value < 999.5 or unit == units[-1]:
            break
    value = min(value, 9_999.0)
    return f"{value:.1f}{unit}" if value < 99.95 else f"{value:.0f}{unit}"


def short_ms(duration_ms: float) -> str:
    """Return a duration in six characters at most: ``42ms``, ``1.3s``, ``12m05s``, ``3h20m``, ``4d03h``."""
    if duration_ms < 0:
        text = f"-{short_ms(-duration_ms)}"
        # Of two units the first one will do: how late it is to the second helps nobody.
        return text if len(text) <= 6 else text[: next(i for i, c in enumerate(text) if c.isalpha()) + 1]
    if duration_ms < 999.5:
        return f"{duration_ms:.0f}ms" if duration_ms >= 9.95 or duration_ms == 0 else f"{duration_ms:.1f}ms"
    seconds = duration_ms / MS_PER_S
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    minutes, rest_s = divmod(math.floor(seconds), 60)
    if minutes < 100:
        return f"{minutes}m{rest_s:02d}s"
    hours, rest_min = divmod(minutes, 60)
    if hours < 100:
        return f"{hours}h{rest_min:02d}m"
    days, rest_h = divmod(hours, 24)
    return f"{days}d{rest_h:02d}h" if days < 100 else f"{min(days, 9_999)}d"


# --- the map of an arena -----------------------------------------------------------------------


def map_line(arena_map: ArenaMap, capacity_bytes: int, width: int, charset: Charset) -> Text:
    """Return an arena as *width* cells: what lies where, and how much of each cell it takes.

    A cell that has anything in it is not shown as free. It takes the colour or letter of what most of it
    holds; a small letter, or a low block, says that less than half of it is in use.
    """
    kinds = (
        arena_map.writing_bytes, arena_map.ready_bytes, arena_map.leased_bytes, arena_map.quarantined_bytes
    )  # fmt: skip
    resampled = [resample(cells, width) for cells in kinds]
    wide_bytes = capacity_bytes / width if width else 0.0
    line = Text()
    for column in range(width):
        held = [cells[column] for cells in resampled]
        most = max(held)
        if most <= 0:
            line.append(charset.free, "dim")
            continue
        kind = KINDS[held.index(most)]
        share = min(1.0, sum(held) / wide_bytes)
        if charset.is_graded:
            level = min(len(_LEVELS) - 1, int(share * len(_LEVELS)))
            line.append(_LEVELS[level], kind.style)
        else:
            line.append(kind.letter.upper() if share >= 0.5 else kind.letter, kind.style)
    return line


def resample(cells: Sequence[int], width: int) -> list[float]:
    """Return what *width* cells hold in place of those given; the sum stays the same."""
    wide = [0.0] * width
    if not width:
        return wide
    ratio = width / len(cells)
    for index, amount in enumerate(cells):
        if not amount:
            continue
        start, end = index * ratio, (index + 1) * ratio
        first, last = int(start), min(width - 1, math.ceil(end) - 1)
        for column in range(first, last + 1):
            overlap = min(end, column + 1) - max(start, column)
            wide[column] += amount * max(0.0, overlap) / ratio
    return wide

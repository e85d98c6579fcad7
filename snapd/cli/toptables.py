"""Tables for ``snapd top``: columns as wide as what they hold, and lines as wide as the screen at most."""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from rich.cells import cell_len
from rich.text import Text

from snapd.cli.toptext import Charset, cut, fit

# A text, or one in a style; in the last column also what draws itself into the room that is left.
Cell: TypeAlias = str | tuple[str, str] | Callable[[int], Text]

# From this width on there is more room between columns.
WIDE: Final = 110


class Column:
    """A column of a table; the last one of a table takes what is left of the line.

    Args:
        title: its heading; one that begins with ``>`` is set to the right.
        cells_max: what is wider is cut; 0: nothing is.
    """

    def __init__(self, title: str, cells_max: int = 0) -> None:
        self.is_right = title.startswith(">")
        self.title = title.removeprefix(">")
        self.cells_max = cells_max


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, height: int, charset: Charset
) -> list[Text]:
    """Return a heading and as many rows as there is room for.

    Args:
        columns: at least one.
        rows: shape [rows, len(columns)]; texts are safe already.
        width: of a line, in cells.
        height: lines.
        charset: for the mark of what was cut.
    """
    gap = gap_of(width)
    rows = rows[: max(0, height - 1)]
    widths = [
        max(len(column.title), *(_wanted(column, row[index]) for row in rows)) if rows else len(column.title)
        for index, column in enumerate(columns)
    ]
    heading: list[Cell] = [(column.title, "bold") for column in columns]
    lines = [_line(columns, widths, row, width, gap, charset) for row in [heading, *rows]]
    return lines[: max(0, height)]


def gap_of(width: int) -> int:
    """Return the blanks between two columns."""
    return 2 if width >= WIDE else 1


def _wanted(column: Column, item: Cell) -> int:
    if callable(item):
        return 0
    cells = cell_len(item if isinstance(item, str) else item[0])
    return min(cells, column.cells_max) if column.cells_max else cells


def _line(
    columns: Sequence[Column],
    widths: Sequence[int],
    row: Sequence[Cell],
    width: int,
    gap: int,
    charset: Charset,
) -> Text:
    line = Text()
    last = len(columns) - 1
    for index, (column, item) in enumerate(zip(columns, row, strict=True)):
        if index:
            line.append(" " * gap)
        room = max(0, width - line.cell_len) if index == last else widths[index]
        if callable(item):
            line.append_text(item(room))
            continue
        text, style = (item, "") if isinstance(item, str) else item
        text = cut(text, room, charset)
        # A blank that is not needed would only be cut off again.
        blanks = " " * (widths[index] - cell_len(text)) if index < last else ""
        line.append(blanks if column.is_right else "").append(text, style)
        line.append("" if column.is_right else blanks)
    return fit(line, width)


def rule(title: str, width: int, charset: Charset) -> Text:
    """Return a line across the screen with a title in it."""
    text = cut(f"{charset.rule}{charset.rule} {title} ", width, charset)
    return Text(text + charset.rule * (width - cell_len(text)), "dim")

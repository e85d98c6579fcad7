"""The states of an attempt as a drawing, from the table in snapd/core/fsm.py.

An image needs no script, so the site shows it in the place of the Mermaid diagram. Where the states stand is
written down here; which arrows there are, and what is written at them, comes out of the table.
"""

from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from snapd.core.events import FINAL_STATES, State
from snapd.core.fsm import TRANSITIONS

S = State

_WIDTH: Final = 980
_HEIGHT: Final = 430
_BOX_WIDTH: Final = 150
_BOX_HEIGHT: Final = 44
_LINE: Final = 15
# The middle of each state's box.
_MIDDLES: Final[dict[State, tuple[int, int]]] = {
    S.RESERVED: (135, 110),
    S.TRANSFERRING: (390, 110),
    S.READY: (645, 110),
    S.INGESTED: (885, 110),
    S.ABORTED: (390, 375),
}
_STYLE: Final = (
    "text { font: 12px sans-serif; fill: #1b1f24; } .state { font-weight: bold; font-size: 14px; } "
    ".box { fill: #eef3fa; stroke: #39679e; stroke-width: 1.5; } .ok { fill: #e6f4e8; stroke: #2e7d32; } "
    ".bad { fill: #fbeaea; stroke: #b23b3b; } .line { fill: none; stroke: #5a6572; stroke-width: 1.3; }"
)

_HEAD: Final = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M 0 0 L 8 4 L 0 8 z" fill="#5a6572"/></marker>'
)


class _Arrow(NamedTuple):
    """How an arrow runs.

    Attributes:
        path: SVG path data.
        label: where its first line of text begins.
        anchor: ``start``, ``middle`` or ``end``, as in SVG.
    """

    path: str
    label: tuple[int, int]
    anchor: str = "middle"


_ARROWS: Final[dict[tuple[State, State], _Arrow]] = {
    (S.RESERVED, S.TRANSFERRING): _Arrow("M 210 110 H 309", (262, 138)),
    (S.TRANSFERRING, S.READY): _Arrow("M 465 110 H 564", (517, 102)),
    (S.READY, S.INGESTED): _Arrow("M 720 110 H 804", (764, 102)),
    (S.RESERVED, S.READY): _Arrow("M 135 88 C 135 20, 645 20, 645 82", (390, 28)),
    (S.RESERVED, S.ABORTED): _Arrow("M 135 132 C 135 330, 200 375, 309 375", (128, 200), "end"),
    (S.TRANSFERRING, S.ABORTED): _Arrow("M 390 132 V 347", (398, 200), "start"),
    (S.READY, S.ABORTED): _Arrow("M 645 132 C 645 330, 580 375, 471 375", (655, 200), "start"),
}


def edges() -> dict[tuple[State, State], list[str]]:
    """Return the names of the events that lead from one state to another, self-loops left out."""
    found: dict[tuple[State, State], list[str]] = {}
    for state, row in TRANSITIONS.items():
        for event, cell in row.items():
            for successor in cell.successors:
                if successor is not state:
                    found.setdefault((state, successor), []).append(event.__name__)
    return found


def _text(x: int, y: int, words: str, anchor: str = "middle", style: str = "") -> str:
    of_style = f' class="{style}"' if style else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{of_style}>{escape(words)}</text>'


def _box(state: State) -> list[str]:
    x, y = _MIDDLES[state]
    look = {S.INGESTED: " ok", S.ABORTED: " bad"}.get(state, "")
    left, top = x - _BOX_WIDTH // 2, y - _BOX_HEIGHT // 2
    radius = _BOX_HEIGHT // 2 if state in FINAL_STATES else 6
    size = f'width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="{radius}"'
    return [
        f'<rect class="box{look}" x="{left}" y="{top}" {size}/>',
        _text(x, y + 5, state, style="state"),
    ]


def _arrow(path: str) -> str:
    return f'<path class="line" d="{path}" marker-end="url(#head)"/>'


def page() -> str:
    """Return the drawing, an SVG.

    Raises:
        KeyError: the table has an arrow of which nobody has said where it runs.
    """
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        "<!-- Written by tools/make_docs.py from snapd/core/fsm.py. -->",
        "<title>The states of an attempt</title>",
        f"<style>{_STYLE}</style>",
        f"<defs>{_HEAD}</defs>",
        # A ground of its own, so that it can be read on a dark page, too.
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#ffffff"/>',
        '<circle cx="20" cy="110" r="6" fill="#5a6572"/>',
        _arrow("M 26 110 H 54"),
        _text(8, 76, "PrepareAsked", "start"),
    ]
    for ends, events in edges().items():
        arrow = _ARROWS[ends]
        parts.append(_arrow(arrow.path))
        x, y = arrow.label
        parts += (_text(x, y + index * _LINE, event, arrow.anchor) for index, event in enumerate(events))
    for state in State:
        parts += _box(state)
    return "\n".join([*parts, "</svg>"]) + "\n"

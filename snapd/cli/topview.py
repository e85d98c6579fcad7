"""A ``Frame`` as a screen: which panes a view has, and how many lines each of them gets. Pure."""

from collections.abc import Callable
from typing import Final, TypeAlias

from rich.console import Console, ConsoleOptions, RenderResult
from rich.layout import Layout
from rich.segment import Segment
from rich.text import Text

from snapd.cli import toppanes as p
from snapd.cli.topframe import Frame
from snapd.cli.toppanes import Look
from snapd.cli.toptables import WIDE

# From this height on there is room for a table of states.
_TALL: Final = 30
_LOW: Final = 8

Make: TypeAlias = Callable[[int, int], list[Text]]


class Pane:
    """What stands in one region of the screen; rich cuts lines at its width and fills up what is missing."""

    def __init__(self, make: Make) -> None:
        self._make = make

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the lines."""
        width, height = options.max_width, options.height or options.max_height
        for line in self._make(width, height)[:height]:
            yield from line.render(console, end="")
            yield Segment.line()


def screen_of(frame: Frame, look: Look, width: int, height: int) -> Layout:
    """Return what is to be drawn on a screen of *width* x *height* cells."""
    screen = Layout()
    head = Layout(Pane(lambda w, _h: p.head_lines(frame, look, w)), size=min(2, height))
    foot = Layout(Pane(lambda w, _h: [p.foot_line(frame, look, w)]), size=1)
    body = _body(frame, look, width, max(0, height - 3))
    screen.split_column(*([head, body, foot] if height > 3 else [head]))
    return screen


def _body(frame: Frame, look: Look, width: int, height: int) -> Layout:
    body = Layout()
    if not frame.connected:
        away = Layout(Pane(lambda w, h: p.away_lines(frame, look, w, h)), size=min(height, 6))
        events = Layout(Pane(lambda w, h: p.event_lines(frame, look, w, h)))
        body.split_column(*([away, events] if height > 6 else [away]))
    elif look.view == "events":
        rates = Layout(Pane(lambda w, _h: [p.rates_line(frame, w), p.reasons_line(frame, look, w)]), size=2)
        events = Layout(Pane(lambda w, h: p.event_lines(frame, look, w, h)))
        body.split_column(*([rates, events] if height > 2 else [rates]))
    elif look.view == "ranks":
        body.split_column(*_rank_panes(frame, look, width, height))
    else:
        body.split_column(*_session_panes(frame, look, height))
    return body


def _session_panes(frame: Frame, look: Look, height: int) -> list[Layout]:
    num_ranks = min(len(frame.ranks), max(1, height // 5))
    # On a very low screen attempts matter more than anything else.
    top_size = 3 + num_ranks if height >= _LOW else min(height, 1)
    groups_size = 1 + len(frame.groups) if height >= _TALL else 1
    events_size = max(0, min(height // 4, 16)) if look.is_live and height >= 14 else 0
    panes = [Layout(Pane(lambda w, h: p.summary_lines(frame, look, w, h)), size=top_size)]
    left = height - top_size
    attempts = Layout(Pane(lambda w, h: p.attempt_lines(frame, look, w, h)))
    if left > groups_size + events_size:
        panes.append(Layout(Pane(lambda w, h: p.group_lines(frame, look, w, h)), size=groups_size))
        panes.append(attempts)
        if events_size:
            # What attempts do not need is for events.
            attempts.size = min(len(frame.attempts) + 2, left - groups_size - events_size)
            panes.append(Layout(Pane(lambda w, h: p.event_lines(frame, look, w, h))))
    elif left > 0:
        panes.append(attempts)
    return panes


def _rank_panes(frame: Frame, look: Look, width: int, height: int) -> list[Layout]:
    panes = [Layout(Pane(lambda w, _h: [p.rates_line(frame, w)]), size=1)]
    left = height - 1
    ranks_size = min(len(frame.ranks) + 3, max(4, left // 2), left)
    left -= ranks_size
    if ranks_size > 0:
        panes.append(Layout(Pane(lambda w, h: p.rank_lines(frame, look, w, h)), size=ranks_size))
    if left <= 0:
        return panes
    peers = Layout(Pane(lambda w, h: p.peer_lines(frame, look, w, h)))
    reasons = Layout(Pane(lambda w, h: p.reason_lines(frame, look, w, h)))
    if width >= WIDE:
        below = Layout()
        below.split_row(peers, Layout(" ", size=2), reasons)
        return [*panes, below]
    reasons_size = min(len(frame.outcomes) + 2, left // 2)
    if reasons_size < 3:
        return [*panes, peers]
    reasons.size = reasons_size
    return [*panes, peers, reasons]


def plain_lines(frame: Frame, look: Look, width: int, height: int) -> list[str]:
    """Return the screen as plain text, without the blanks at its end."""
    console = Console(
        width=width, height=height, color_system=None, force_terminal=False, legacy_windows=False
    )
    rows = console.render_lines(screen_of(frame, look, width, height), console.options.update(height=height))
    lines = ["".join(segment.text for segment in row).rstrip() for row in rows]
    while lines and not lines[-1]:
        lines.pop()
    return lines

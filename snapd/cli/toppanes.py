"""Parts of a ``Frame`` as lines of text.

Each is a function of the frame and of the width and height that it has; what it gives fits into them.
"""

import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from rich.text import Text

from snapd.cli.common import STATE_STYLES, plural
from snapd.cli.topframe import AttemptRow, Event, Frame, GroupRow, PeerRow, RankRow
from snapd.cli.toptables import WIDE, Cell, Column, rule, table
from snapd.cli.toptext import (
    KINDS,
    Charset,
    fit,
    map_line,
    safe,
    short_bytes,
    short_count,
    short_ms,
    short_rate,
)
from snapd.core.overview import Order
from snapd.errors import REASON_HELP, Reason
from snapd.units import MS_PER_S

ViewName: TypeAlias = Literal["sessions", "ranks", "events"]
VIEWS: Final[tuple[ViewName, ...]] = ("sessions", "ranks", "events")
_VIEW_TITLES: Final = {"sessions": "sessions", "ranks": "D and ranks", "events": "events"}
_ORDER_TITLES: Final[dict[Order, str]] = {
    "deadline": "nearest deadline", "age": "oldest", "bytes": "largest",
}  # fmt: skip
# A deadline this near is marked.
_NEAR_MS: Final = 2_000.0


@dataclass(frozen=True, slots=True)
class Look:
    """How a frame is to be shown.

    Attributes:
        view: which one.
        is_paused: it is not the latest.
        is_live: frames follow each other, with events and keys; else there is only one.
    """

    charset: Charset
    view: ViewName = "sessions"
    is_paused: bool = False
    is_live: bool = True


# --- the first and the last lines --------------------------------------------------------------


def head_lines(frame: Frame, look: Look, width: int) -> list[Text]:
    """Return which daemon it is, and how it fares or that it is away."""
    clock = time.strftime("%H:%M:%S", time.localtime(frame.at))
    daemon = frame.daemon
    left = Text("snapd top", "bold")
    if daemon is not None:
        version, epoch = safe(daemon.version, look.charset), safe(daemon.epoch, look.charset)
        left.append(f"  {version}  up {short_ms(daemon.uptime_ms)}  pid {daemon.pid}  ")
        left.append(f"{safe(daemon.transport, look.charset)}  epoch {epoch}")
    first = _spread(left, Text(clock), width)
    if daemon is None:
        if frame.waiting_since is None:
            return [first, Text("connecting")]
        return [first, Text(waiting_text(frame), "bold red")]
    parts = [
        (f"{short_count(daemon.open_sessions)} open", ""),
        (f"{short_count(daemon.quarantined_shards)} shards quarantined", ""),
        (plural(daemon.connections, "connection"), ""),
        (plural(daemon.watchers, "watcher"), ""),
    ]
    if daemon.is_draining:
        parts.insert(0, ("DRAINING", "bold yellow"))
    if daemon.log_dropped or daemon.log_write_errors:
        lost = f"LOG: {daemon.log_dropped} dropped, {daemon.log_write_errors} errors"
        parts.insert(0, (lost, "bold red"))
    return [first, _joined(parts)]


def waiting_text(frame: Frame) -> str:
    """Return since when the daemon is waited for, and why."""
    since_s = frame.waiting_since or frame.at
    since = time.strftime("%H:%M:%S", time.localtime(since_s))
    return f"{frame.problem}, waiting since {since} ({short_ms(max(0.0, frame.at - since_s) * MS_PER_S)})"


def foot_line(frame: Frame, look: Look, width: int) -> Text:
    """Return the view, whether it is paused, and the keys."""
    left = Text()
    for number, view in enumerate(VIEWS, start=1):
        left.append(f" {number} {_VIEW_TITLES[view]} ", "reverse" if look.view == view else "")
    if look.is_paused:
        left.append(" ")
        left.append(" PAUSED ", "reverse bold")
    if not look.is_live:
        return left
    keys = f"s sort: {_ORDER_TITLES[frame.order]}  p pause  q quit"
    short_keys = "s p q"
    room = width - left.cell_len - 1
    return _spread(left, Text(keys if len(keys) <= room else short_keys, "dim"), width)


def away_lines(frame: Frame, look: Look, width: int, height: int) -> list[Text]:
    """Return in full why there is nothing to show."""
    if frame.waiting_since is None:
        return []
    lines = textwrap.wrap(safe(frame.detail, look.charset), max(1, width))
    return [Text(), *map(Text, lines)][:height]


# --- sums --------------------------------------------------------------------------------------


def summary_lines(frame: Frame, look: Look, width: int, height: int) -> list[Text]:
    """Return rates, reasons, and as many arenas as there is room for."""
    lines = [rates_line(frame, width), reasons_line(frame, look, width)]
    rows = frame.ranks
    room = height - 3
    hidden = len(rows) - room
    names = max((len(str(row.books.rank)) for row in rows), default=1)
    for row in rows[:room]:
        used = f"{used_share(row):4.0%} used, hole {short_bytes(row.books.largest_hole_bytes):>5}"
        map_width = max(0, width - names - len(used) - 4)
        line = Text(f"{row.books.rank:>{names}} [", "")
        line.append_text(map_line(row.map, row.books.capacity_bytes, map_width, look.charset))
        line.append(f"] {used}")
        lines.append(line)
    legend = legend_line(rows, look)
    if hidden > 0:
        legend = Text(f"+{hidden} ranks (2)  ").append_text(legend)
    return [*lines, legend]


def used_share(row: RankRow) -> float:
    """Return which part of an arena is not free."""
    return 1 - row.books.free_bytes / row.books.capacity_bytes


def rates_line(frame: Frame, width: int) -> Text:
    """Return what happens in a second."""
    rates = frame.rates
    if rates is None:
        return Text()
    # What was asked once only is counted from the daemon's start, and says so by its uptime.
    over = Text(f"/s, {short_ms(rates.over_s * MS_PER_S)}", "dim")
    parts = [
        (f"attempts {short_rate(rates.attempts)}", ""),
        (f"ok {short_rate(rates.ok)}", "green" if rates.ok else ""),
        (f"refused {short_rate(rates.refused)}", "red" if rates.refused else ""),
        (f"evicted {short_rate(rates.evicted)}", "yellow" if rates.evicted else ""),
        (f"in {short_bytes(rates.committed_bytes)}", ""),
        (f"out {short_bytes(rates.ingested_bytes)}", ""),
    ]
    line = _joined(parts)
    if line.cell_len > width - over.cell_len - 1:
        line = _joined(parts, " ")
    return _spread(line, over, width) if line.cell_len < width - over.cell_len else line


def reasons_line(frame: Frame, look: Look, width: int) -> Text:
    """Return how attempts and refusals ended since the start, in a line."""
    if not frame.outcomes:
        return Text("no attempt has ended yet", "dim")
    parts = [("ended", "bold")]
    for outcome in frame.outcomes:
        style = "green" if outcome.reason == Reason.OK else "red"
        parts.append((f"{safe(outcome.reason, look.charset)} {short_count(outcome.count)}", style))
    line = _joined(parts)
    if line.cell_len <= width:
        return line
    line.truncate(max(0, width - 1), overflow="crop")
    return line.append(look.charset.more)


def legend_line(rows: Sequence[RankRow], look: Look) -> Text:
    """Return what the maps' letters or colours mean, with the bytes of all arenas."""
    sums = (
        sum(row.writing_bytes for row in rows),
        sum(row.ready_bytes for row in rows),
        sum(row.leased_bytes for row in rows),
        sum(row.books.quarantined_bytes for row in rows),
    )
    line = Text()
    for kind, num_bytes in zip(KINDS, sums, strict=True):
        mark = "█" if look.charset.is_graded else kind.letter.upper()
        line.append(mark, kind.style).append(f" {kind.name} {short_bytes(num_bytes)}  ")
    free = short_bytes(sum(row.books.free_bytes for row in rows))
    return line.append(look.charset.free, "dim").append(f" free {free}")


def group_lines(frame: Frame, look: Look, width: int, height: int) -> list[Text]:
    """Return attempts by state: a line each, or all in one."""
    if height > len(frame.groups):
        columns = [
            Column("STATE"),
            *map(Column, (">COUNT", ">BYTES", ">OLDEST", ">FIRST DEADLINE", ">TYPICAL TIME")),
        ]
        rows = [_group_cells(group) for group in frame.groups]
        return table(columns, rows, width, height, look.charset)
    parts: list[tuple[str, str]] = []
    for group in frame.groups:
        oldest = f" ({short_ms(group.oldest_ms)})" if group.count else ""
        parts.append((f"{_group_name(group)} {short_count(group.count)}{oldest}", _group_style(group)))
    return [_joined(parts)]


def _group_name(group: GroupRow) -> str:
    return "leased" if group.is_leased else group.state


def _group_style(group: GroupRow) -> str:
    if not group.count:
        return "dim"
    return "cyan" if group.is_leased else STATE_STYLES.get(group.state, "")


def _group_cells(group: GroupRow) -> list[Cell]:
    has_any = group.count > 0
    left_ms = group.left_ms
    return [
        (_group_name(group), _group_style(group)),
        short_count(group.count),
        short_bytes(group.bytes),
        short_ms(group.oldest_ms) if has_any else "",
        (short_ms(left_ms), _left_style(left_ms)) if left_ms is not None else "",
        "" if group.is_leased or group.typical_ms is None else short_ms(group.typical_ms),
    ]


# --- sessions, D, ranks, reasons, events -------------------------------------------------------


def attempt_lines(frame: Frame, look: Look, width: int, height: int) -> list[Text]:
    """Return a line for each open attempt, those first that come first in the order asked for."""
    daemon = frame.daemon
    total = daemon.open_sessions if daemon else 0
    is_wide = width >= WIDE
    room = max(0, height - 2)
    shown = min(room, len(frame.attempts))
    title = f"{_ORDER_TITLES[frame.order]} first, {shown} of {short_count(total)}"
    if frame.surveyed_ago_ms >= MS_PER_S:
        title += f", {short_ms(frame.surveyed_ago_ms)} ago"
    columns = [Column("STATE"), *map(Column, (">AGE", ">LEFT", ">BYTES"))]
    if is_wide:
        columns += [Column(">IN STATE"), Column(">TOKENS"), Column("RANKS"), Column(">HANDLE")]
    columns += [Column("D", cells_max=max(12, width // 6)), Column("SESSION")]
    rows = [_attempt_cells(row, look.charset, is_wide=is_wide) for row in frame.attempts[:room]]
    return [rule(title, width, look.charset), *table(columns, rows, width, height - 1, look.charset)]


def _attempt_cells(row: AttemptRow, charset: Charset, *, is_wide: bool) -> list[Cell]:
    state = "READY leased" if row.is_leased else row.state
    cells: list[Cell] = [
        (state, "cyan" if row.is_leased else STATE_STYLES.get(row.state, "")),
        short_ms(row.age_ms),
        (short_ms(row.left_ms), _left_style(row.left_ms)),
        short_bytes(row.bytes),
    ]
    if is_wide:
        cells += [
            short_ms(row.in_state_ms),
            short_count(row.num_tokens),
            f"{row.num_committed}/{row.num_ranks}",
            str(row.slab_handle),
        ]
    name = safe(row.session_id, charset)
    if row.abort_wanted:
        name = f"(then {safe(row.abort_wanted, charset)}) {name}"
    return [*cells, safe(row.peer, charset), name]


def _left_style(left_ms: float) -> str:
    if left_ms < 0:
        return "bold red"
    return "yellow" if left_ms < _NEAR_MS else ""


def rank_lines(frame: Frame, look: Look, width: int, height: int) -> list[Text]:
    """Return each arena's map and books."""
    room = max(0, height - 3)
    hidden = len(frame.ranks) - room
    more = f", {room} of {len(frame.ranks)}" if hidden > 0 else ""
    columns = [Column(">RANK"), *map(Column, (">USED", ">WRITE", ">READY", ">LEASED", ">QUAR", ">FREE"))]
    columns += [Column(">HOLE"), Column(">HOLES"), Column("MAP")]
    rows: list[list[Cell]] = []
    for row in frame.ranks[:room]:
        books = row.books
        rows.append(
            [
                str(books.rank),
                f"{used_share(row):.0%}",
                short_bytes(row.writing_bytes),
                short_bytes(row.ready_bytes),
                short_bytes(row.leased_bytes),
                short_bytes(books.quarantined_bytes),
                short_bytes(books.free_bytes),
                short_bytes(books.largest_hole_bytes),
                short_count(books.num_holes),
                _map_cell(row, look.charset),
            ]
        )
    lines = [rule(f"ranks{more}", width, look.charset)]
    return [*lines, *table(columns, rows, width, height - 2, look.charset), legend_line(frame.ranks, look)]


def _map_cell(row: RankRow, charset: Charset) -> Callable[[int], Text]:
    return lambda room: map_line(row.map, row.books.capacity_bytes, room, charset)


def peer_lines(frame: Frame, look: Look, width: int, height: int) -> list[Text]:
    """Return a line for each D worker."""
    room = max(0, height - 2)
    shown = f", {room} of {len(frame.peers)}" if len(frame.peers) > room else ""
    columns = [Column("D", cells_max=max(12, width // 5))]
    columns += map(
        Column, (">OPEN", ">BYTES", ">OK/S", ">OUT/S", ">ENDED", ">OK", ">REFUSED", "LAST PROBLEM")
    )
    rows = [_peer_cells(row, look.charset) for row in frame.peers[:room]]
    title = f"D, by what is open{shown}"
    return [rule(title, width, look.charset), *table(columns, rows, width, height - 1, look.charset)]


def _peer_cells(row: PeerRow, charset: Charset) -> list[Cell]:
    return [
        safe(row.peer, charset) if row.peer else ("all others", "dim"),
        short_count(row.open_attempts),
        short_bytes(row.open_bytes),
        short_rate(row.ok_per_s),
        short_bytes(row.bytes_per_s),
        short_count(row.ended),
        short_count(row.ok),
        (short_count(row.refused), "red" if row.refused else ""),
        (safe(row.last_problem, charset), "red"),
    ]


def reason_lines(frame: Frame, look: Look, width: int, height: int) -> list[Text]:
    """Return how attempts and refusals ended, and what that means."""
    room = max(0, height - 2)
    shown = f", {room} of {len(frame.outcomes)}" if len(frame.outcomes) > room else ""
    columns = [Column("REASON"), *map(Column, (">COUNT", ">SHARE", ">PER S", "MEANING"))]
    rows: list[list[Cell]] = []
    for outcome in frame.outcomes[:room]:
        style = "green" if outcome.reason == Reason.OK else "red"
        rows.append(
            [
                (safe(outcome.reason, look.charset), style),
                short_count(outcome.count),
                f"{outcome.share:.1%}",
                short_rate(outcome.per_s),
                (_meaning(outcome.reason), "dim"),
            ]
        )
    title = f"outcomes since the start{shown}"
    return [rule(title, width, look.charset), *table(columns, rows, width, height - 1, look.charset)]


def _meaning(reason: str) -> str:
    try:
        return REASON_HELP[Reason(reason)]
    except ValueError:
        return ""


def event_lines(frame: Frame, look: Look, width: int, height: int) -> list[Text]:
    """Return what happened last, the newest first."""
    title = "events, newest first"
    if frame.watch_problem:
        title += f": {safe(frame.watch_problem, look.charset)}"
    room = max(0, height - 1)
    lines = [_event_line(event, look.charset, width) for event in frame.events[:room]]
    return [rule(title, width, look.charset), *lines]


def _event_line(event: Event, charset: Charset, width: int) -> Text:
    whole_s, milliseconds = divmod(max(0, round(event.at * MS_PER_S)), MS_PER_S)
    clock = time.strftime("%H:%M:%S", time.localtime(whole_s))
    line = Text(f"{clock}.{milliseconds:03d} ", "dim")
    if event.event == "watch.lost":
        line.append(f"{event.count} not shown: more than can be read", "yellow")
    elif event.event == "daemon.seen":
        line.append(safe(event.detail, charset), "bold")
    elif event.event == "sync.refused":
        line.append(f"refused {safe(event.reason, charset)} ", "red")
        detail = f"  {safe(event.detail, charset)}" if event.detail else ""
        line.append(f"{safe(event.session_id, charset)}{detail}")
    else:
        step = f"{safe(event.from_state, charset) or 'new'} {charset.arrow} {safe(event.to_state, charset)}"
        style = STATE_STYLES.get(event.to_state, "")
        line.append(f"{step:<26}", style)
        line.append(f"{short_ms(event.duration_ms):>6} {short_bytes(event.bytes):>5} ")
        if event.reason != Reason.OK:
            line.append(f"{safe(event.reason, charset)} ", "red")
        line.append(safe(event.session_id, charset))
    if line.cell_len > width:
        line.truncate(max(0, width - 1), overflow="crop")
        line.append(charset.more)
    return line


# --- lines -------------------------------------------------------------------------------------


def _joined(parts: Iterable[tuple[str, str]], gap: str = "  ") -> Text:
    line = Text()
    for index, (text, style) in enumerate(parts):
        line.append(gap if index else "").append(text, style)
    return line


def _spread(left: Text, right: Text, width: int) -> Text:
    """Return *left* and, at the end of the line, *right*; *left* gives way."""
    room = width - right.cell_len - 1
    if room < 0:
        return fit(left, width)
    if left.cell_len > room:
        left = left.copy()
        left.truncate(room, overflow="crop")
    return left.append(" " * (width - right.cell_len - left.cell_len)).append_text(right)

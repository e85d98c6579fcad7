"""The main plots as PNG: outcomes and timeline, time in each state, the arenas.

They are drawn without pyplot, so nothing global is touched and no screen is needed.
"""

import heapq
import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from snapd.errors import Reason
from snapd.forensics.page.data import OLDER, REFUSED, PageData, strip_label
from snapd.forensics.page.palette import HOLE, LIVE, OPEN, QUARANTINED, colour
from snapd.units import GIB, MS_PER_S, format_bytes, format_ms

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DPI: Final = 150
WIDTH_IN: Final = 12.0
_DAY_S: Final = 86_400
_INK: Final = "#1b1e22"
_QUIET: Final = "#59616a"
_BAD: Final = "#c2294a"
_LINE: Final = "#e3e5e8"
_LEGEND_MAX: Final = 12
_ARENAS_MAX: Final = 8
_BARS: Final = 120
_TIMELINE_PIXELS: Final = (480, 1600)  # rows, columns
# matplotlib's own font has Latin, Greek and Cyrillic; it warns of what it lacks.
_GLYPHS_END: Final = 0x500
# A little beyond the least and the most, in decades: rounding must not leave them out.
_EDGE: Final = 0.03
_SHADES: Final = (0.32, 1.0, 0.62)  # reserved, transferring, ready: as on the page
_STYLE: Final[dict[Any, Any]] = {
    "font.family": "sans-serif", "font.size": 9, "axes.edgecolor": _LINE, "axes.labelcolor": _QUIET,
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlecolor": _INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#eff0f2", "xtick.color": _QUIET, "ytick.color": _QUIET, "legend.frameon": False,
    "figure.facecolor": "#ffffff", "savefig.facecolor": "#ffffff", "text.parse_math": False,
}  # fmt: skip


def draw_each(page: PageData) -> Iterator[tuple[str, bytes]]:
    """Yield a name and a PNG for each plot."""
    for name, height_in, draw in _plots(page):
        yield name, _png([(height_in, draw)], page)


def draw_all(page: PageData) -> bytes:
    """Return one PNG with all plots below each other."""
    return _png([(height_in, draw) for _, height_in, draw in _plots(page)], page)


def _plots(page: PageData) -> list[tuple[str, float, Callable[[Any, PageData], None]]]:
    arenas = min(max(len(page.arenas), 1), _ARENAS_MAX)
    return [
        ("outcomes", 4.2, _outcomes),
        ("timeline", 4.4, _timeline),
        ("states", 4.4, _states),
        ("arenas", 1.0 + 2.0 * arenas, _arenas),
    ]


def _png(plots: list[tuple[float, Callable[[Any, PageData], None]]], page: PageData) -> bytes:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        heights = [height_in for height_in, _ in plots]
        figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
        FigureCanvasAgg(figure)
        parts = figure.subfigures(len(plots), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, (_, draw) in zip(parts, plots, strict=True):
            draw(part, page)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()


# --- outcomes ----------------------------------------------------------------------------------


def _outcomes(part: Any, page: PageData) -> None:
    import numpy as np

    axes = part.subplots()
    group = max(page.bins.shape[1] // _BARS, 1)
    bars = page.bins.shape[1] // group
    sums = page.bins[:, : bars * group].reshape(len(page.reasons), bars, group).sum(axis=2)
    edges = _dates(page, np.linspace(0.0, page.end_s, bars + 1))
    width = edges[1] - edges[0]
    bottom = np.zeros(bars)
    for index in _stacked(page):
        label = f"{_plain(page.reasons[index])} ({page.reason_counts[index]:,})"
        axes.bar(
            edges[:-1], sums[index], width * 0.92, bottom,
            align="edge", color=colour(page.reasons[index]).light, label=label, linewidth=0,
        )  # fmt: skip
        bottom += sums[index]
    axes.set_title(f"{_plain(page.title)}: outcomes by reason, {ok_share(page)}")
    axes.set_ylabel(f"outcomes per {_duration(page.end_s / bars)}")
    _time_axis(axes, page)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:_LEGEND_MAX], labels[:_LEGEND_MAX], loc="center left", bbox_to_anchor=(1.0, 0.5))


def ok_share(page: PageData) -> str:
    """Return how many ended OK, in words."""
    decided = page.attempts - page.attempts_open
    if not decided:
        return "no attempt has ended"
    percent = 100 * page.attempts_ok / decided
    # Never round what is not everything up to everything.
    percent = min(percent, 99.9) if page.attempts_ok < decided else percent
    return f"{percent:.1f} % of {decided:,} attempts OK"


def _stacked(page: PageData) -> list[int]:
    """Return the reasons in the order in which they are stacked: ok first, then the most frequent."""
    indexes = [index for index, name in enumerate(page.reasons) if name != OPEN and page.reason_counts[index]]
    return sorted(indexes, key=lambda index: (page.reasons[index] != Reason.OK, -page.reason_counts[index]))


# --- timeline ----------------------------------------------------------------------------------


def _timeline(part: Any, page: PageData) -> None:
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    axes = part.subplots()
    rows = page.rows
    total_s = (rows.reserved_ms.astype(np.float64) + rows.transferring_ms + rows.ready_ms) / MS_PER_S
    has_bar = (rows.last_state != REFUSED) & ~((rows.last_state == OLDER) & (total_s == 0))
    lanes, count = _lanes(rows.start_s, rows.start_s + total_s, has_bar)
    image = _painted(page, lanes, max(count, 1), has_bar)
    begin, end = _dates(page, np.array([0.0, max(page.end_s, 1e-6)]))
    axes.imshow(image, extent=(begin, end, max(count, 1), 0), aspect="auto", interpolation="nearest")
    instant = ~has_bar
    if instant.any():
        colours = [colour(page.reasons[index]).light for index in rows.reason[instant]]
        at = _dates(page, rows.start_s[instant])
        below = max(count, 1) * 1.06
        axes.scatter(at, np.full(at.size, below), s=14, marker="|", c=colours, linewidths=0.8)
        axes.set_ylim(max(count, 1) * 1.1, 0)
        axes.annotate(
            strip_label(page), (0, below), xycoords=("axes fraction", "data"),
            xytext=(-4, 0), textcoords="offset points", ha="right", va="center", color=_QUIET, fontsize=8,
        )  # fmt: skip
    of = "" if page.weight_ok == page.weight_other == 1 else f", {rows.start_s.size:,} of {page.attempts:,}"
    axes.set_title(f"Attempts{of}: pale reserved, full transferring, middle ready; hue by outcome")
    axes.set_ylabel("attempts at once")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)
    _time_axis(axes, page)


def _lanes(start: "NDArray[Any]", end: "NDArray[Any]", has_bar: "NDArray[Any]") -> "tuple[NDArray[Any], int]":
    """Give each attempt the lowest lane that is free when it begins; -1: it needs none."""
    import numpy as np

    lanes = np.full(start.size, -1, np.int64)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    count = 0
    ends = end.tolist()
    for index, (begin, wanted) in enumerate(zip(start.tolist(), has_bar.tolist(), strict=True)):
        if not wanted:
            continue
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        lanes[index] = lane
        heapq.heappush(busy, (ends[index], lane))
    return lanes, count


def _painted(
    page: PageData, lanes: "NDArray[Any]", count: int, has_bar: "NDArray[Any]"
) -> "NDArray[np.uint8]":
    """Return the bars as a picture; failures are painted last, so that no ok hides one."""
    import numpy as np

    height, width = _TIMELINE_PIXELS
    image = np.full((height, width, 3), 255, np.uint8)
    rows = page.rows
    scale = width / max(page.end_s, 1e-6)
    edges = [rows.start_s]
    for spent in (rows.reserved_ms, rows.transferring_ms, rows.ready_ms):
        edges.append(edges[-1] + spent.astype(np.float64) / MS_PER_S)
    x = np.clip((np.stack(edges, axis=1) * scale).astype(np.int64), 0, width)
    y0 = (lanes * height) // count
    y1 = np.maximum(((lanes + 1) * height) // count - (1 if height >= 4 * count else 0), y0 + 1)
    inks = [[_ink(colour(name).light, shade) for shade in _SHADES] for name in page.reasons]
    ok = page.reasons.index(Reason.OK)
    order = np.concatenate(
        [np.flatnonzero(has_bar & (rows.reason == ok)), np.flatnonzero(has_bar & (rows.reason != ok))]
    )
    for index in order.tolist():
        shades = inks[rows.reason[index]]
        row = slice(y0[index], y1[index])
        left, started, arrived, ended = x[index].tolist()
        image[row, left : max(ended, left + 1)] = shades[1]
        image[row, left:started] = shades[0]
        image[row, arrived:ended] = shades[2]
    return image


def _ink(hex_colour: str, shade: float) -> tuple[int, ...]:
    channels = (int(hex_colour[at : at + 2], 16) for at in (1, 3, 5))
    return tuple(round(channel * shade + 255 * (1 - shade)) for channel in channels)


# --- states ------------------------------------------------------------------------------------


def _states(part: Any, page: PageData) -> None:
    """For each state a histogram, OK and not, and below it how many were over within a time."""
    import numpy as np
    from matplotlib.ticker import NullFormatter

    rows = page.rows
    is_ok = rows.reason == page.reasons.index(Reason.OK)
    grid = part.subplots(2, 3, sharex="col")
    part.suptitle("Time in each state", x=0.01, ha="left", fontweight="bold", fontsize=11, color=_INK)
    for column, (name, spent) in enumerate(
        (("RESERVED", rows.reserved_ms), ("TRANSFERRING", rows.transferring_ms), ("READY", rows.ready_ms))
    ):
        above, below = grid[0][column], grid[1][column]
        above.set_title(name, fontsize=9)
        below.set_xlabel("time in the state")
        entered = spent > 0
        if not entered.any():
            above.annotate(
                "no attempt was in it", (0.5, 0.5), xycoords="axes fraction", ha="center", color=_QUIET
            )
            continue
        low, high = np.log10(spent[entered].min()), np.log10(spent[entered].max())
        edges = np.logspace(low - _EDGE, high + _EDGE, 40)
        kinds = (
            ("OK", is_ok, page.weight_ok, colour(Reason.OK).light),
            ("not OK", ~is_ok, page.weight_other, _BAD),
        )
        bottom = np.zeros(len(edges) - 1)
        for label, chosen, weight, ink in kinds:
            values = np.sort(spent[entered & chosen])
            heights = np.histogram(values, edges)[0] * weight
            above.bar(
                edges[:-1], heights, np.diff(edges), bottom, align="edge", color=ink, label=label, linewidth=0
            )
            bottom += heights
            if values.size:
                below.plot(
                    values, np.arange(1, values.size + 1) / values.size, color=ink, label=label, linewidth=1.4
                )
        above.set_xscale("log")
        below.xaxis.set_major_formatter(lambda value, _: format_ms(value))
        below.xaxis.set_minor_formatter(NullFormatter())
        below.set_ylim(0, 1)
        if column == 0:
            above.set_ylabel("attempts")
            below.set_ylabel("share that took at most")
            above.legend(loc="upper right")


# --- arenas ------------------------------------------------------------------------------------


def _arenas(part: Any, page: PageData) -> None:
    shown = page.arenas[:_ARENAS_MAX]
    if not shown:
        axes = part.subplots()
        axes.set_title("Arenas")
        axes.annotate(
            "The log says nothing about arenas.",
            (0.5, 0.5),
            xycoords="axes fraction",
            ha="center",
            color=_QUIET,
        )
        axes.set_axis_off()
        return
    grid = part.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, arena in zip(grid, shown, strict=True):
        at = _dates(page, arena.at_s)
        unit = arena.size_bytes / GIB
        live, quarantined, hole = (
            share * unit for share in (arena.live_share, arena.quarantined_share, arena.hole_share)
        )
        axes.fill_between(at, 0, live, step="post", color=LIVE.light, label="live", linewidth=0)
        axes.fill_between(
            at,
            live,
            live + quarantined,
            step="post",
            color=QUARANTINED.light,
            label="quarantined",
            linewidth=0,
        )
        axes.plot(at, hole, drawstyle="steps-post", color=HOLE.light, linewidth=1.0, label="largest hole")
        axes.set_ylim(0, unit)
        axes.set_ylabel("GiB")
        device = f" on {_plain(arena.device)}" if arena.device else ""
        axes.set_title(f"Arena of rank {arena.rank}{device}, {format_bytes(arena.size_bytes)}")
        _time_axis(axes, page, label=axes is grid[-1])
    grid[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


# --- axes --------------------------------------------------------------------------------------


def _dates(page: PageData, at_s: "NDArray[Any]") -> "NDArray[Any]":
    """Return times as matplotlib counts them: days since 1970."""
    return (page.begin_unix_s + at_s) / _DAY_S


def _time_axis(axes: Any, page: PageData, *, label: bool = True) -> None:
    from datetime import UTC

    import numpy as np
    from matplotlib import dates

    untyped: Any = dates
    locator = untyped.AutoDateLocator(tz=UTC)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(untyped.ConciseDateFormatter(locator, tz=UTC))
    axes.set_xlim(*_dates(page, np.array([0.0, max(page.end_s, 1e-3)])))
    if label:
        axes.set_xlabel("time (UTC)")
    for epoch in page.epochs[1:]:
        axes.axvline(
            float(_dates(page, np.array([epoch.start_s]))[0]),
            color=_BAD,
            linewidth=0.9,
            linestyle=(0, (4, 3)),
        )


def _plain(text: str) -> str:
    """What cannot be drawn, or would break the line, is shown as an escape."""
    return "".join(
        char if char.isprintable() and ord(char) < _GLYPHS_END else char.encode("unicode_escape").decode()
        for char in text
    )


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3_600), ("min", 60), ("s", 1)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * MS_PER_S:.3g} ms"

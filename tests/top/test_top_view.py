"""What is drawn fits exactly, whatever the screen and whatever sessions are called."""

from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from top_cases import (
    HOSTILE,
    START_NS,
    START_S,
    answer,
    arena_map,
    arena_view,
    attempt_line,
    overview,
    refusal,
    statistics,
    transition,
)

from snapd.cli.topframe import Frame
from snapd.cli.topmodel import NO_DAEMON, History
from snapd.cli.toppanes import VIEWS, Look, ViewName
from snapd.cli.toptext import Charset
from snapd.cli.topview import plain_lines, screen_of
from snapd.core.events import State
from snapd.core.overview import PeerLine
from snapd.errors import Reason
from snapd.wire import LogStatistics, WatchLost

CHARSETS = [Charset(*flags) for flags in product([True, False], repeat=2)]
SIZES = [(80, 24), (200, 60), (132, 43), (40, 12), (20, 5), (3, 3), (1, 1), (80, 4), (500, 7)]


def frame_of(*, ranks: int = 2, names: tuple[str, ...] = (), num_attempts: int = 6, **core: object) -> Frame:
    """Return a frame with everything in it; *names* are those of sessions, workers and details."""
    lines = [attempt_line(number) for number in range(1, num_attempts + 1)]
    lines += [
        attempt_line(90, state=State.RESERVED, deadline_ns=START_NS + 500_000_000, num_committed=0),
        attempt_line(91, state=State.TRANSFERRING, deadline_ns=START_NS - 10**9, num_committed=1),
        attempt_line(92, is_leased=True, abort_wanted="client-abort", deadline_ns=START_NS + 600_000_000),
    ]
    for number, name in enumerate(names):
        lines.append(attempt_line(100 + number, session_id=name, peer=name, deadline_ns=START_NS + number))
    peers = overview().peers + tuple(
        PeerLine(peer=name, open_attempts=1, last_problem=name, last_ns=1) for name in names
    )
    seen = overview(
        maps=tuple(map(arena_map, range(ranks))),
        attempts=tuple(lines),
        peers=(*peers, PeerLine(peer="", ended=3)),
    )
    history = History()
    history.add_stats(
        answer(
            overview=seen,
            version=names[0] if names else "9.9.9",
            core=statistics(arenas=tuple(map(arena_view, range(ranks))), **core),
        ),
        START_S,
    )
    for name in names:
        history.add_push(transition(session_id=name), START_S)
        history.add_push(refusal(session_id=name, detail=name), START_S)
    history.add_push(transition(reason=Reason.EVICTED, to_state="ABORTED"), START_S)
    history.add_push(WatchLost(count=12), START_S)
    history.watch_problem = names[0] if names else ""
    return history.frame(START_S + 1)


def away_frame(detail: str = "nobody listens there: is the daemon running?") -> Frame:
    history = History()
    history.add_push(transition(), START_S)
    history.add_problem(NO_DAEMON, detail, START_S)
    return history.frame(START_S + 12)


def look_of(view: ViewName = "sessions", charset: Charset = CHARSETS[0], **changes: bool) -> Look:
    return Look(charset, view, **changes)


def rows_of(frame: Frame, look: Look, width: int, height: int) -> list[list]:
    """Return the screen as rich hands it to the terminal."""
    console = Console(width=width, height=height, force_terminal=True, color_system="truecolor")
    screen = screen_of(frame, look, width, height)
    return console.render_lines(screen, console.options.update(width=width, height=height))


def is_exact(frame: Frame, look: Look, width: int, height: int) -> bool:
    rows = rows_of(frame, look, width, height)
    texts = ["".join(segment.text for segment in row) for row in rows]
    assert all(text.isprintable() for text in texts), texts
    assert len(rows) == height
    widths = {sum(segment.cell_length for segment in row) for row in rows}
    assert widths == {width}
    if not look.charset.is_utf8:
        assert all(text.isascii() for text in texts), texts
    return True


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_screen_is_exactly_as_large_as_the_terminal(view: ViewName, size: tuple[int, int]) -> None:
    for number, charset in enumerate(CHARSETS):
        look = look_of(view, charset, is_paused=number in (1, 3), is_live=number != 2)
        for frame in (
            frame_of(),
            frame_of(ranks=16, num_attempts=100),
            away_frame(),
            Frame(at=1.0, connected=False),
        ):
            assert is_exact(frame, look, *size)


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (40, 12)])
@pytest.mark.parametrize("view", VIEWS)
def test_names_that_mean_harm_do_not_break_the_screen(view: ViewName, size: tuple[int, int]) -> None:
    for charset in CHARSETS:
        assert is_exact(frame_of(names=HOSTILE), look_of(view, charset), *size)
        assert is_exact(away_frame("\x1b[2J" + HOSTILE[3] + " " + "w" * 500), look_of(view, charset), *size)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 260), st.integers(1, 80), st.sampled_from(VIEWS), st.sampled_from(CHARSETS),
    st.lists(st.text(max_size=100), max_size=4),
)  # fmt: skip
def test_any_screen_and_any_names_fit(
    width: int, height: int, view: ViewName, charset: Charset, names: list[str]
) -> None:
    assert is_exact(frame_of(names=tuple(names)), look_of(view, charset), width, height)


def text_of(
    frame: Frame, view: ViewName = "sessions", width: int = 80, height: int = 24, **changes: bool
) -> str:
    lines = plain_lines(frame, look_of(view, **changes), width, height)
    assert len(lines) <= height and all(line == line.rstrip() for line in lines)
    return "\n".join(lines)


def test_80x24_shows_arenas_sessions_rates_reasons_and_events() -> None:
    text = text_of(frame_of())
    for wanted in (
        "9.9.9", "pid 4242", "6 open", "0 [██", "47% used", "hole", "writing 16.0M", "quarantined 8.0M",
        "attempts 0.96", "ok 0.80", "refused 0.05", "evicted 0.10", "in 9.0M", "/s, 1m40s",
        "ended  ok 80  evicted 10  snapshot-buf-full 5",
        "RESERVED 1 (2.0s)", "leased 4 (2.0s)", "RESERVED", "READY leased", "d-7", "chat-90",
        "TRANSFERRING → ABORTED", "12 not shown", "evicted chat-1", "1 sessions", "q quit",
    ):  # fmt: skip
        assert wanted in text, f"{wanted}\n{text}"


def test_the_nearest_deadline_is_on_the_first_line_and_is_overdue() -> None:
    lines = text_of(frame_of()).splitlines()
    (heading,) = (number for number, line in enumerate(lines) if line.startswith("STATE"))
    assert lines[heading + 1].split()[:3] == ["TRANSFERRING", "92.0s", "-2.0s"]
    assert "chat-90" in lines[heading + 2]


def test_an_attempt_that_waits_for_its_readers_says_how_it_will_end() -> None:
    assert "(then client-abort) chat-92" in text_of(frame_of(), width=120, height=40)


def test_a_wide_screen_shows_more_of_each_attempt() -> None:
    wide = text_of(frame_of(), width=200, height=60)
    for wanted in ("IN STATE", "TOKENS", "RANKS", "HANDLE", "1/2", "FIRST DEADLINE", "TYPICAL TIME", "12ms"):
        assert wanted in wide, wanted
        assert wanted not in text_of(frame_of()) or wanted == "12ms"


def test_the_second_view_shows_every_rank_worker_and_reason() -> None:
    text = text_of(frame_of(), "ranks")
    for wanted in (
        "RANK USED WRITE READY LEASED QUAR  FREE", "16.0M", "4.0M",
            "d-7           6  6.0M 0.80  8.0M    90 80       5 evicted", "all others", "LAST PROBLEM",
        "evicted", "snapshot-buf-full", "10.5%", "No room",
    ):  # fmt: skip
        assert wanted in text, f"{wanted}\n{text}"
    assert "2 of 3" not in text


def test_what_has_no_room_is_counted() -> None:
    many = frame_of(ranks=16)
    assert "+12 ranks (2)" in text_of(many)
    assert "ranks, 7 of 16" in text_of(many, "ranks")
    assert "first, 8 of 12.3k " in text_of(frame_of(num_attempts=30, open_sessions=12_345, attempts=12_435))


def test_the_third_view_is_all_events() -> None:
    frame = frame_of(names=tuple(f"name-{number}" for number in range(8)))
    text = text_of(frame, "events")
    assert "name-0" in text.splitlines()[4] and "name-7" in text
    assert "refused too-large name-7  name-7" in text


def test_a_daemon_that_is_away_is_said_to_be_and_events_stay() -> None:
    text = text_of(away_frame())
    assert "no daemon, waiting since " in text and "(12.0s)" in text
    assert "nobody listens there" in text and "chat-1" in text
    assert "connecting" in text_of(Frame(at=1.0, connected=False))


def test_what_needs_a_hand_comes_first() -> None:
    lost = LogStatistics(
        path="", lines_written=1, bytes_written=1, queued_lines=0, queued_bytes=0, dropped=3, write_errors=2,
        last_error="", rotations=0,
    )  # fmt: skip
    history = History()
    history.add_stats(answer(core=statistics(is_draining=True), log=lost), START_S)
    second = text_of(history.frame(START_S)).splitlines()[1]
    assert second.startswith("LOG: 3 dropped, 2 errors  DRAINING")


def test_a_pause_is_shown_with_the_keys() -> None:
    assert "PAUSED" in text_of(frame_of(), is_paused=True)
    assert "PAUSED" not in text_of(frame_of())


def test_a_long_name_moves_no_column() -> None:
    lines = text_of(frame_of(names=("a-worker-with-a-name-" * 9,)), width=132, height=40).splitlines()
    (heading,) = (line for line in lines if line.startswith("STATE") and "SESSION" in line)
    (row,) = (line for line in lines if "chat-90" in line and line.startswith("RESERVED"))
    assert row.index("chat-90") == heading.index("SESSION")
    (long,) = (line for line in lines if "a-worker" in line and line.startswith("READY"))
    assert long.index("a-worker", heading.index("SESSION")) == heading.index("SESSION")


def test_one_screen_for_a_script_has_neither_keys_nor_events() -> None:
    text = text_of(frame_of(), is_live=False)
    assert "q quit" not in text and "newest first" not in text


def test_an_old_picture_says_how_old_it_is() -> None:
    old = msgspec.structs.replace(frame_of(), surveyed_ago_ms=4_200.0)
    assert "4.2s ago" in text_of(old)
    assert " ago" not in text_of(msgspec.structs.replace(old, surveyed_ago_ms=999.0))


def test_a_name_is_no_markup() -> None:
    assert "[bold red]no markup[/]" in text_of(
        frame_of(names=("[bold red]no markup[/]",)), width=132, height=40
    )


def test_colours_come_from_states_only_if_there_are_any() -> None:
    styles = {str(segment.style) for row in rows_of(frame_of(), look_of(), 80, 24) for segment in row}
    assert {"green", "bold red", "yellow", "dim"} <= styles


def test_a_large_arena_and_large_counts_fit_80_columns() -> None:
    outcomes = {"ok": 8_000_000, "evicted": 1_000_000, "snapshot-buf-full": 5_000_000}
    frame = frame_of(
        outcomes_by_reason=outcomes, attempts=9_000_006, attempts_ok=8_000_000, bytes_committed=2**60
    )
    lines = text_of(frame).splitlines()
    assert lines[2].endswith("/s, 1m40s") and "out " in lines[2]
    assert "ok 8.0M" in lines[3]

"""``snapd top`` in a real terminal: tmux draws it, and says what is on the screen."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from rich.cells import cell_len
from terminal import CLI, Tmux, wait_for
from top_cases import HOSTILE, Workers

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux")

KEYS = "p pause  q quit"


@pytest.fixture
def tmux(daemon: DaemonProcess) -> Iterator[Tmux]:
    """A tmux whose socket lies in the daemon's directory, of which the path is short."""
    made = Tmux(daemon.directory, 80, 24)
    yield made
    made.close()


def start_top(tmux: Tmux, daemon: DaemonProcess, *arguments: str) -> None:
    """Run it in a shell that writes down how the terminal was before and after, and how it ended."""
    command = shlex.join([*CLI, "top", "--socket", str(daemon.socket_path), "--interval", "0.2", *arguments])
    directory = shlex.quote(str(daemon.directory))
    tmux.start(
        # Ctrl-C is for the program only.
        f"trap : INT; cd {shlex.quote(str(Path(__file__).parents[2]))}; echo before-it; "
        f"stty -g > {directory}/before; "
        f"{command}; echo $? > {directory}/status; stty -g > {directory}/after; echo the-end; cat"
    )


def ended_well(tmux: Tmux, daemon: DaemonProcess) -> bool:
    """Whether it has exited with 0, and left the terminal as it was."""
    screen = tmux.until("the-end")
    assert screen[:2] == ["before-it", "the-end"]
    directory = daemon.directory
    assert (directory / "status").read_text() == "0\n"
    assert (directory / "after").read_text() == (directory / "before").read_text()
    flags = {name: tmux.flag(name) for name in ("alternate_on", "cursor_flag", "wrap_flag")}
    return flags == {"alternate_on": "0", "cursor_flag": "1", "wrap_flag": "1"}


def are_rows(screen: list[str]) -> bool:
    """Whether every line between the two titles of the first view shows one attempt in its columns."""
    headings = [number for number, line in enumerate(screen) if line.startswith("STATE")]
    titles = [number for number, line in enumerate(screen) if "events, newest first" in line]
    if len(headings) != 1 or len(titles) != 1:
        return False
    rows = screen[headings[0] + 1 : titles[0]]
    # The worker's name is cut where its column ends.
    return len(rows) >= 8 and all(
        re.match(r"RESERVED +\S+ +\S+ 32\.0K \\x1b\[2Jd\\u20… \S", row) for row in rows
    )


def has_both_ends(screen: list[str], lines: int) -> bool:
    """Whether the first line is at the top and the keys are at the bottom."""
    return len(screen) == lines and screen[0].startswith("snapd top") and screen[-1].startswith(" 1 sessions")


def until_whole(tmux: Tmux, *wanted: str, columns: int = 80, lines: int = 24) -> list[str]:
    """Wait until all of *wanted* is on the screen, the first line at the top and the keys at the bottom.

    While it is drawn anew the screen shows a part of what was there. Nothing may be wider than the screen.
    """
    screen: list[str] = []

    def is_there() -> bool:
        screen[:] = tmux.screen()
        text = "\n".join(screen)
        return has_both_ends(screen, lines) and all(part in text for part in wanted)

    wait_for(is_there, lambda: f"never whole with all of {wanted}:\n" + "\n".join(screen))
    assert max(map(cell_len, screen)) <= columns
    return screen


def test_a_session_at_a_terminal(tmux: Tmux, daemon: DaemonProcess, workers: Workers) -> None:
    start_top(tmux, daemon)
    tmux.until("0 open", KEYS)
    workers.one_of_each()
    until_whole(
        tmux, "4 open", "RESERVED     ", "TRANSFERRING ", "READY        ", "READY leased ", "one-reserved",
        "too-large 1", "ok 1", "client-abort 1", "READY → INGESTED", "2 shards quarantined",
    )  # fmt: skip

    tmux.press("2")
    until_whole(tmux, "RANK USED", "d-7", "LAST PROBLEM", "MEANING")
    tmux.press("Tab")
    until_whole(tmux, "refused too-large one-refused", "new → RESERVED")
    tmux.press("Tab")
    tmux.until("nearest deadline first")
    tmux.press("s")
    tmux.until("oldest first")

    tmux.press("p")
    tmux.until("PAUSED")
    workers.reserved("while-paused")
    tmux.press("3")
    assert "while-paused" not in "\n".join(tmux.until("PAUSED", "events, newest first"))
    tmux.press("p")
    tmux.until("new → RESERVED", "while-paused")
    tmux.press("1")

    for columns, lines in ((120, 40), (30, 9), (80, 24)):
        tmux.resize(columns, lines)
        until_whole(tmux, columns=columns, lines=lines)

    daemon.kill()
    screen = until_whole(tmux, "no daemon, waiting since", "another program's socket")
    assert "one-reserved" not in "\n".join(screen[:8])
    daemon.restart()
    tmux.until("0 open", "another daemon: pid")
    again = Workers(str(daemon.socket_path))
    again.ready("after-it")
    tmux.until("1 open", "after-it")
    again.close()

    tmux.press("q")
    assert ended_well(tmux, daemon)


def test_names_that_mean_harm_leave_the_screen_whole(
    tmux: Tmux, daemon: DaemonProcess, workers: Workers
) -> None:
    start_top(tmux, daemon)
    tmux.until("0 open", KEYS)
    harmful = Workers(str(daemon.socket_path), peer="\x1b[2Jd\u202e漢")
    for name in HOSTILE:
        encoded = name.encode()[:500].decode(errors="ignore")
        harmful.reserved(encoded, 16)
    tmux.until(f"{len(HOSTILE)} open", "[bold red]no markup[/]")
    for key, wanted in (
        ("3", "new → RESERVED"),
        ("2", "\\x1b[2Jd\\u202e漢"),
        ("1", "nearest deadline first"),
    ):
        tmux.press(key)
        until_whole(tmux, wanted)
    # Each attempt is on a line of its own, from the line below the heading on, in this order. What is looked
    # at may be half drawn.
    wait_for(lambda: are_rows(tmux.screen()), lambda: "\n".join(tmux.screen()))
    harmful.close()
    tmux.press("C-c")
    assert ended_well(tmux, daemon)

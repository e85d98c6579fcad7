"""``snapd top``: a live view of the daemon."""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, get_args

import click

from snapd.cli.common import DaemonChoice, NoReader, daemon_options, echo, json_option
from snapd.core.overview import Order

if TYPE_CHECKING:
    from snapd.cli.topfeed import Feed
    from snapd.cli.topmodel import History
    from snapd.cli.toppanes import Look
    from snapd.cli.topscreen import Screen
    from snapd.cli.toptext import Charset

INTERVAL_S_DEFAULT: Final = 1.0
_VIEWS: Final = ("sessions", "ranks", "events")
# News of the watch may come at any rate; the screen is drawn this often at most.
_DRAW_EVERY_S: Final = 0.25
# And at least this often, for the clock.
_DRAW_AGAIN_S: Final = 1.0
# A signal that comes just before a wait is handled after it.
_WAIT_S: Final = 1.0
_PLAIN_SIZE: Final = (80, 24)


@click.command(
    epilog="""\b
Keys: q quit, p pause, tab or 1 2 3 the view, s what comes first.

\b
Examples:
  snapd top
  snapd top --interval 0.5 --view ranks
  snapd top --once
  snapd top --once --json | jq '.attempts[0]'
  snapd top --json | jq -c '[.at, .rates.ok]'"""
)
@daemon_options
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0.1, max=3600),
    default=INTERVAL_S_DEFAULT,
    show_default=True,
    help="Ask the daemon this often.",
)
@click.option("--view", type=click.Choice(_VIEWS), default=_VIEWS[0], help="The view to begin with.")
@click.option(
    "--sort",
    "order",
    type=click.Choice(get_args(Order)),
    default="deadline",
    help="Which attempts come first: the nearest deadline, the oldest, or the largest.",
)
@click.option("--once", "is_once", is_flag=True, help="Print one screen as plain text, and end.")
@json_option
def top(
    daemon: DaemonChoice, interval_s: float, view: str, order: Order, is_once: bool, as_json: bool
) -> int:
    """Show the arenas, open attempts, rates, reasons and events of a daemon as they change.

    When the daemon goes away it is waited for. --once prints one screen, with rates since the daemon's start
    and no events; --json prints a line every interval, or with --once one document.
    """
    if is_once:
        _print_once(daemon, view, order, as_json=as_json)
    elif as_json:
        _print_lines(daemon, interval_s, order)
    elif not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        raise click.UsageError("no terminal to draw on: use --once, or --json for a line every interval")
    else:
        return _run_live(daemon, interval_s, view, order)
    return 0


def _print_once(daemon: DaemonChoice, view: str, order: Order, *, as_json: bool) -> None:
    from snapd.cli.common import print_json
    from snapd.cli.topfeed import no_overview
    from snapd.cli.topmodel import History

    history = History(order)
    with daemon.connect() as client:
        stats = client.stats(overview=order)
    if stats.overview is None:
        raise no_overview(stats)
    now_s = time.time()
    history.add_stats(stats, now_s)
    frame = history.frame(now_s)
    if as_json:
        print_json(frame)
        return
    from snapd.cli.toptext import charset_of, first_environment
    from snapd.cli.topview import plain_lines

    charset = charset_of(first_environment(), has_colours=False)
    size = shutil.get_terminal_size(_PLAIN_SIZE)
    look = _look(view, charset, is_live=False)
    for line in plain_lines(frame, look, *size):
        echo(line)


def _print_lines(daemon: DaemonChoice, interval_s: float, order: Order) -> None:
    """Print a frame as a line of JSON for every answer, or failure to answer, until Ctrl-C."""
    import msgspec

    from snapd.cli.topmodel import History

    history = History(order)
    news = threading.Event()
    feed = _feed(daemon, interval_s, order, news.set)
    feed.start()
    try:
        while True:
            news.wait(_WAIT_S)
            news.clear()
            if _take(feed, history):
                now_s = time.time()
                # Oldest first, and each on one line only.
                frame = history.frame(now_s, history.take_events())
                echo(msgspec.json.encode(frame).decode())
    except KeyboardInterrupt:
        return
    finally:
        feed.close()


def _run_live(daemon: DaemonChoice, interval_s: float, view: str, order: Order) -> int:
    from snapd.cli.topmodel import History
    from snapd.cli.topscreen import Screen
    from snapd.cli.toptext import charset_of, first_environment

    charset = charset_of(first_environment(), has_colours=True)
    # No configuration, no screen.
    daemon = replace(daemon, socket=daemon.socket_path())
    screen = Screen(has_colours=charset.has_colours)
    look = _look(view, charset, is_live=True)
    history = History(order)
    feed = _feed(daemon, interval_s, order, screen.wake)
    try:
        with screen:
            feed.start()
            ended_by = Viewer(screen, feed, history, look).run()
    except OSError as error:
        # The terminal went away.
        raise NoReader from error
    finally:
        feed.close()
    if ended_by in (0, signal.SIGINT):
        return 0
    # As whoever sent it expects.
    signal.signal(ended_by, signal.SIG_DFL)
    os.kill(os.getpid(), ended_by)
    return 128 + ended_by


class Viewer:
    """Shows a history on a screen, and does what keys say, until it is told to end.

    Args:
        screen: taken already.
        feed: asks the daemon.
        history: what is shown.
        look: how, to begin with.
    """

    def __init__(self, screen: "Screen", feed: "Feed", history: "History", look: "Look") -> None:
        self._screen = screen
        self._feed = feed
        self._history = history
        self._look = look
        self._frame = history.frame(time.time())
        self._drawn_s = 0.0

    def run(self) -> int:
        """Return when it is to end: 0 because of a key, else the signal."""
        from snapd.cli.topscreen import ENDING

        self._draw()
        is_stale = False
        while True:
            since_s = time.monotonic() - self._drawn_s
            woken = self._screen.wait(max(0.0, (_DRAW_EVERY_S if is_stale else _DRAW_AGAIN_S) - since_s))
            ending = woken.signals & ENDING
            if ending or woken.is_hung_up:
                return min(ending) if ending else signal.SIGHUP
            if signal.SIGTSTP in woken.signals:
                self._screen.suspend()
            if "q" in woken.keys or "Q" in woken.keys:
                return 0
            for key in woken.keys:
                self._press(key)
            has_answer = _take(self._feed, self._history)
            is_urgent = bool(woken.keys or woken.signals or has_answer)
            is_stale = True
            if is_urgent or time.monotonic() - self._drawn_s >= _DRAW_EVERY_S:
                self._draw()
                is_stale = False

    def _press(self, key: str) -> None:
        from snapd.cli.topmodel import ORDERS, sort_attempts
        from snapd.cli.toppanes import VIEWS
        from snapd.cli.topscreen import BACK_TAB

        look = self._look
        at = VIEWS.index(look.view)
        if key in ("p", "P", " "):
            self._look = replace(look, is_paused=not look.is_paused)
        elif key in ("\t", BACK_TAB):
            step = 1 if key == "\t" else -1
            self._look = replace(look, view=VIEWS[(at + step) % len(VIEWS)])
        elif key in ("1", "2", "3"):
            self._look = replace(look, view=VIEWS[int(key) - 1])
        elif key in ("s", "S"):
            import msgspec

            order = ORDERS[(ORDERS.index(self._history.order) + 1) % len(ORDERS)]
            self._history.order = order
            # What is here is put in order at once; the daemon may have others that come before.
            rows = tuple(sort_attempts(self._frame.attempts, order))
            self._frame = msgspec.structs.replace(self._frame, order=order, attempts=rows)
            self._feed.ask_now(order)

    def _draw(self) -> None:
        from snapd.cli.topview import screen_of

        if not self._look.is_paused:
            self._frame = self._history.frame(time.time())
        width, height = self._screen.size()
        self._screen.draw(screen_of(self._frame, self._look, width, height), width, height)
        self._drawn_s = time.monotonic()


def _look(view: str, charset: "Charset", *, is_live: bool) -> "Look":
    from snapd.cli.toppanes import VIEWS, Look

    return Look(charset, VIEWS[_VIEWS.index(view)], is_live=is_live)


def _feed(daemon: DaemonChoice, interval_s: float, order: Order, on_news: Callable[[], None]) -> "Feed":
    from snapd.cli.topfeed import Feed

    return Feed(
        daemon.socket_path(),
        timeout_s=daemon.timeout_s,
        interval_s=interval_s,
        order=order,
        on_news=on_news,
    )


def _take(feed: "Feed", history: "History") -> bool:
    """Put what has come into the history, and return whether an answer was among it."""
    answers, pushes, history.watch_problem = feed.take()
    for at_s, push in pushes:
        history.add_push(push, at_s)
    for answer in answers:
        if answer.stats is not None:
            history.add_stats(answer.stats, answer.at_s)
        else:
            history.add_problem(answer.problem, answer.detail, answer.at_s)
    return bool(answers)

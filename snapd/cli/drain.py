"""``snapd drain``: take no new attempts; with ``--wait``, a warm shutdown."""

import contextlib
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import click

from snapd.cli.common import (
    TIMEOUT_S_DEFAULT,
    DaemonChoice,
    Table,
    config_option,
    json_option,
    list_attempts,
    plural,
    print_json,
    say,
    shown_ns,
    socket_option,
    state_cell,
)
from snapd.errors import ConnectionProblem, SnapdError
from snapd.units import MS_PER_S, format_ms

if TYPE_CHECKING:
    from snapd.client import Client
    from snapd.wire import StatsRep

WAIT_S_DEFAULT: Final = 60.0
_TIMEOUT_S_MAX: Final = 24 * 3600.0
_POLL_S: Final = 0.05
# At most so often a line, where no terminal shows them in place.
_LINE_EVERY_S: Final = 1.0
_LEFT_SHOWN_MAX: Final = 10
# Beyond drain_timeout_ms: the log has five seconds, then the memory goes back.
_EXIT_GRACE_S: Final = 30.0
_EXPIRED: Final = ("reserve-timeout", "transfer-timeout", "ready-expired")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|min|h|)")
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class NotDrained(SnapdError):
    """The time was over, or the daemon went away, before every attempt had ended."""


class CannotStop(SnapdError):
    """The daemon's process cannot be told to stop from here."""


def seconds(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Return a time such as ``60s``, ``500ms``, ``2min`` or ``1h`` in seconds; a bare number is seconds.

    Raises:
        click.BadParameter: *text* is no time, or is out of range.
    """
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no time: write one such as 60s, 500ms or 2min", ctx, param)
    # Digits without end are a number that no float holds: infinite, and so out of range.
    duration_s = float(match[1]) * _UNIT_S[match[2]]
    if not 0 < duration_s <= _TIMEOUT_S_MAX:
        raise click.BadParameter(f"{text!r} is out of range: above 0, and at most 24h", ctx, param)
    return duration_s


@click.command(
    epilog="""\b
Examples:
  snapd drain
  snapd drain --off
  snapd drain --wait
  snapd drain --wait --timeout 5min --json
  snapd drain --wait --keep-running

\b
Exit status with --wait: 0 every attempt has ended; 1 some had not when the time was over, or the
daemon went away or could not be stopped."""
)
@socket_option
@config_option
@click.option(
    "--timeout",
    "timeout_s",
    metavar="TIME",
    callback=seconds,
    help="With --wait: give up after so long, such as 90s or 5min (60s unless given). Without: wait this "
    "long for an answer (5s).",
)
@click.option("--off", "is_off", is_flag=True, help="Take new attempts again.")
@click.option(
    "--wait", "is_waiting", is_flag=True, help="Wait until no attempt is open; then stop the daemon."
)
@click.option("--keep-running", "is_kept", is_flag=True, help="With --wait: do not stop the daemon.")
@json_option
def drain(
    socket_path: str | None,
    config_path: Path | None,
    timeout_s: float | None,
    is_off: bool,
    is_waiting: bool,
    is_kept: bool,
    as_json: bool,
) -> None:
    """Have the daemon refuse new attempts with reason 'draining'; open ones go on to their end.

    Without --wait that is all: the daemon keeps running, and --off undoes it.

    With --wait it is a warm shutdown: transfers that are under way may finish, READY snapshots may be
    ingested, and when no attempt is open any more the daemon is stopped. When the time is over it is stopped
    all the same, and what is left ends with 'daemon-stopped'. Ctrl-C leaves the daemon running and draining.

    SIGTERM is quicker: it waits for ranks that are reading (drain_timeout_ms), and for nothing else.
    """
    if is_off and is_waiting:
        raise click.UsageError("--off and --wait exclude each other: remove one of them")
    if is_kept and not is_waiting:
        raise click.UsageError("--keep-running goes with --wait: without it the daemon keeps running anyway")
    answer_s = TIMEOUT_S_DEFAULT if is_waiting or timeout_s is None else timeout_s
    daemon = DaemonChoice(socket_path, config_path, answer_s)
    if is_waiting:
        _drain_and_wait(daemon, WAIT_S_DEFAULT if timeout_s is None else timeout_s, is_kept, as_json)
        return
    with daemon.connect() as client:
        client.drain(not is_off)
        core = client.stats().core
    if as_json:
        print_json({"draining": core.is_draining, "open_sessions": core.open_sessions})
        return
    left = plural(core.open_sessions, "attempt")
    if core.is_draining:
        say(f"draining: new attempts are refused; {left} still open ('snapd drain --off' undoes it)")
    else:
        say(f"not draining: new attempts are taken; {left} open")


# --- waiting -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """How a drain went.

    Attributes:
        epoch: the daemon's.
        pid: the daemon's process, as it says itself.
        waited_ms: from the drain to the last look.
        ingested: attempts that ended with P having the snapshot.
        expired: those that ended because a time was over.
        aborted: those that ended otherwise.
        refused: prepares that were refused meanwhile.
        left_by_state: open attempts at the last look.
        is_stopped: the daemon has exited.
    """

    epoch: str
    pid: int
    waited_ms: int = 0
    ingested: int = 0
    expired: int = 0
    aborted: int = 0
    refused: int = 0
    left_by_state: dict[str, int] = field(default_factory=dict)
    is_stopped: bool = False

    @property
    def left(self) -> int:
        """Attempts that were open at the last look."""
        return sum(self.left_by_state.values())

    @property
    def ended(self) -> int:
        """Attempts that have ended since the first look."""
        return self.ingested + self.expired + self.aborted

    def as_json(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        return {
            "drained": not self.left,
            "ingested": self.ingested,
            "expired": self.expired,
            "aborted": self.aborted,
            "left": self.left,
            "left_by_state": self.left_by_state,
            "refused": self.refused,
            "waited_ms": self.waited_ms,
            "stopped": self.is_stopped,
            "epoch": self.epoch,
            "pid": self.pid,
        }


def report_of(first: "StatsRep", last: "StatsRep") -> Report:
    """Return what became, between two looks, of the attempts that were open at the first or came since."""
    before, after = first.core, last.core
    counts = {
        reason: count - before.outcomes_by_reason.get(reason, 0)
        for reason, count in after.outcomes_by_reason.items()
    }
    # A refusal has an outcome too, and some reasons stand for both.
    ended = before.open_sessions + after.attempts - before.attempts - after.open_sessions
    ingested = after.attempts_ok - before.attempts_ok
    expired = sum(counts.get(reason, 0) for reason in _EXPIRED)
    return Report(
        epoch=last.epoch,
        pid=last.pid,
        waited_ms=last.uptime_ms - first.uptime_ms,
        ingested=ingested,
        expired=expired,
        aborted=ended - ingested - expired,
        refused=sum(counts.values()) - ended,
        left_by_state={state: count for state, count in after.sessions_by_state.items() if count},
    )


def _drain_and_wait(daemon: DaemonChoice, timeout_s: float, is_kept: bool, as_json: bool) -> None:
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(daemon.connect())
        # First of all: who cannot stop the daemon should hear so before anything is refused.
        process = None if is_kept else stack.enter_context(_process(client.socket_path))
        # Before the drain: what ends right after it counts too.
        first = client.stats()
        client.drain()
        try:
            with _progress(as_json) as show:
                report = _wait(client, first, timeout_s, show)
        except KeyboardInterrupt:
            note = "snapd: the daemon goes on draining; 'snapd drain --off' has it take new attempts again"
            click.echo(note, err=True)
            raise
        if report.left and not as_json:
            _show_left(client)
        if process is not None:
            drain_timeout_ms = first.limits.get("drain_timeout_ms", 0)
            report.is_stopped = _stop(process, drain_timeout_ms / MS_PER_S + _EXIT_GRACE_S)
    if as_json:
        print_json(report.as_json())
    else:
        _say_end(report)
    _raise_unless_done(report, timeout_s, is_kept)


def _wait(client: "Client", first: "StatsRep", timeout_s: float, show: "Show") -> Report:
    """Look until no attempt is open, or the time is over.

    Raises:
        NotDrained: the daemon went away, or takes new attempts again.
    """
    report = report_of(first, first)
    deadline_s = time.monotonic() + timeout_s
    while True:
        # Also when nothing was open before the drain: an attempt may have come in between.
        try:
            last = client.stats()
        except ConnectionProblem as error:
            raise NotDrained(
                f"the daemon went away with {plural(report.left, 'attempt')} open, {_states(report)}: {error}"
            ) from None
        if last.epoch != first.epoch:
            raise NotDrained("the daemon was restarted meanwhile, and takes new attempts; drain it again")
        if not last.core.is_draining:
            raise NotDrained("somebody has ended the drain meanwhile ('snapd drain --off'); drain it again")
        report = report_of(first, last)
        left_s = deadline_s - time.monotonic()
        show(report, max(0.0, left_s))
        if not report.left or left_s <= 0:
            return report
        time.sleep(min(_POLL_S, left_s))


def _raise_unless_done(report: Report, timeout_s: float, is_kept: bool) -> None:
    if not is_kept and not report.is_stopped:
        raise CannotStop(f"the daemon was told to stop and still runs: look at process {report.pid}")
    if report.left:
        fate = "the daemon still drains" if is_kept else "they ended as the daemon stopped"
        raise NotDrained(
            f"{plural(report.left, 'attempt')} still open after {format_ms(timeout_s * MS_PER_S)}, "
            f"{_states(report)}; {fate}"
        )


def _states(report: Report) -> str:
    return ", ".join(f"{count:,} {state}" for state, count in report.left_by_state.items()) or "none open"


# --- stopping ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _process(socket_path: str) -> Iterator[int]:
    """Yield a pidfd of the daemon, which may be sent signals.

    A signal through it reaches the process that answered on the socket, or nobody; and the kernel decides
    who may send one, as for SIGTERM from a service manager.

    Raises:
        CannotStop: it is in another pid namespace, or of another user.
    """
    from snapd.peers import open_pidfd, peer_of

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(socket_path)
        peer = peer_of(sock)
        pidfd = open_pidfd(sock, peer)
    if pidfd is None:
        raise CannotStop(
            "the daemon's process cannot be seen from here, perhaps because of a container: run this where "
            "the daemon runs, or use --keep-running and stop it yourself"
        )
    try:
        try:
            signal.pidfd_send_signal(pidfd, 0)
        except PermissionError:
            raise CannotStop(
                f"only user {peer.uid} and root may stop this daemon: be one of them, or use --keep-running"
            ) from None
        yield pidfd
    finally:
        os.close(pidfd)


def _stop(pidfd: int, grace_s: float) -> bool:
    """Send SIGTERM and wait for the exit; return whether it came."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(grace_s * MS_PER_S))


# --- showing it --------------------------------------------------------------------------------

# Takes how it stands, and the seconds that are left.
Show: TypeAlias = Callable[[Report, float], None]


@contextlib.contextmanager
def _progress(as_json: bool) -> Iterator[Show]:
    """Yield what shows progress: a bar on a terminal, a line now and then elsewhere, nothing for JSON."""
    if as_json:
        yield lambda _report, _left_s: None
    elif sys.stdout.isatty():
        with _bar() as show:
            yield show
    else:
        yield Lines(time.monotonic)


@contextlib.contextmanager
def _bar() -> Iterator[Show]:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("draining"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:,} of {task.total:,} ended; {task.description}"),
    )
    with Progress(*columns, transient=True) as progress:
        task_id = progress.add_task("", total=0)

        def show(report: Report, left_s: float) -> None:
            progress.update(
                task_id,
                total=report.ended + report.left,
                completed=report.ended,
                description=f"{_states(report)}; {format_ms(left_s * MS_PER_S)} left",
            )

        yield show


class Lines:
    """Progress as lines: one when the figures have changed, and at most one a second."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._last = ""
        self._next_s = float("-inf")

    def __call__(self, report: Report, left_s: float) -> None:
        """Write a line, or nothing."""
        what = f"{report.ended:,} of {report.ended + report.left:,} ended; {_states(report)}"
        now_s = self._now_s()
        if not report.left or what == self._last or now_s < self._next_s:
            return
        self._last, self._next_s = what, now_s + _LINE_EVERY_S
        say(f"draining: {what}; {format_ms(left_s * MS_PER_S)} left")


def _show_left(client: "Client") -> None:
    left = list_attempts(client, limit=_LEFT_SHOWN_MAX)
    table = Table("SLAB_HANDLE", "SESSION", "STATE", ">FOR")
    for view in left.sessions:
        age = shown_ns(left.now_ns - view.state_since_ns)
        table.add(str(view.slab_handle), view.session_id, state_cell(view.state), age)
    table.show()
    if left.total > len(left.sessions):
        say(f"and {left.total - len(left.sessions):,} more")


def _say_end(report: Report) -> None:
    refused = f"; {plural(report.refused, 'prepare')} refused meanwhile" if report.refused else ""
    say(
        f"{'not drained' if report.left else 'drained'} after {format_ms(report.waited_ms)}: "
        f"{report.ingested:,} ingested, {report.expired:,} expired, {report.aborted:,} aborted, "
        f"{report.left:,} left{refused}"
    )
    if report.is_stopped:
        say("the daemon has stopped")
    else:
        say("the daemon keeps running and refuses new attempts ('snapd drain --off' undoes it)")

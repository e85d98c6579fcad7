"""``snapd watch``: a line for each transition, as it happens."""

import contextlib
import time
from typing import Any, Final

import click

from snapd.cli.common import (
    STATE_STYLES,
    DaemonChoice,
    daemon_options,
    echo,
    fields_of,
    json_option,
    plural,
    printable,
    styled,
)
from snapd.errors import ConnectionLost, Reason
from snapd.units import NS_PER_S, format_bytes, format_ms
from snapd.wire import WatchLost, WatchRefused, WatchTransition

_EVENT_NAMES: Final = {
    WatchTransition: "session.transition",
    WatchRefused: "sync.refused",
    WatchLost: "watch.lost",
}


@click.command(
    epilog="""\b
Examples:
  snapd watch
  snapd watch --session chat-17
  snapd watch --count 10
  snapd watch --json | jq -r 'select(.to_state == "ABORTED") | .reason'"""
)
@daemon_options
@click.option("--session", "session_id", metavar="ID", default="", help="Only this session's.")
@click.option(
    "--count", metavar="N", type=click.IntRange(min=1), help="End after so many transitions and refusals."
)
@json_option
def watch(daemon: DaemonChoice, session_id: str, count: int | None, as_json: bool) -> None:
    """Print every transition and refusal from now on, until Ctrl-C or until the daemon stops.

    What was lost because this side read too slowly is counted, and the count is printed. With --json each
    line is an object with the fields of the event log; "event" says which kind.
    """
    seen = 0
    with contextlib.suppress(KeyboardInterrupt):
        with daemon.connect() as client:
            # A watch has a connection of its own.
            pushes = client.watch(session_id)
        with pushes, contextlib.suppress(ConnectionLost):
            for push in pushes:
                echo(json_line(push) if as_json else text_line(push, wall_ns(push)))
                seen += not isinstance(push, WatchLost)
                if seen == count:
                    break


def wall_ns(push: Any) -> int:
    """Return when a push happened, in unix nanoseconds; the daemon runs on this machine."""
    at_ns = getattr(push, "at_ns", 0) or time.monotonic_ns()
    return time.time_ns() - (time.monotonic_ns() - at_ns)


def json_line(push: WatchTransition | WatchRefused | WatchLost) -> str:
    """Return a push as one JSON object with every field."""
    import msgspec

    record = {"event": _EVENT_NAMES[type(push)], "ts": wall_ns(push) / NS_PER_S, **fields_of(push)}
    return msgspec.json.encode(record).decode()


def text_line(push: WatchTransition | WatchRefused | WatchLost, at_wall_ns: int) -> str:
    """Return a push as a line for a person; ``echo`` takes the colours out for a pipe."""
    seconds, rest_ns = divmod(at_wall_ns, NS_PER_S)
    clock = f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{rest_ns // 1_000_000:03d}"
    match push:
        case WatchLost():
            lost = plural(push.count, "line")
            return styled(f"{clock}  {lost} lost: this side read too slowly", "yellow")
        case WatchRefused():
            what = styled("refused", "red")
            why = styled(push.reason, "red")
            detail = f" ({printable(push.detail)})" if push.detail else ""
            return f"{clock}  {what}  {why}  {push.num_tokens:,} tokens  {printable(push.session_id)}{detail}"
        case WatchTransition():
            why = f"  {click.style(push.reason, fg='red')}" if push.reason is not Reason.OK else ""
            step = f"{_state(push.from_state)} -> {_state(push.to_state)}"
            return (
                f"{clock}  {push.slab_handle}  {step}{why}  after {format_ms(push.duration_ms)}  "
                f"{push.num_tokens:,} tokens  {format_bytes(push.bytes)}  {printable(push.session_id)}"
            )


def _state(state: str) -> str:
    return styled(state, STATE_STYLES.get(state, "")) if state else "new"

"""``snapd sessions``: a line for each attempt."""

from typing import TYPE_CHECKING, Final

import click

from snapd.cli.common import (
    DaemonChoice,
    Table,
    all_states,
    cell,
    daemon_options,
    json_option,
    list_attempts,
    plural,
    print_json,
    say,
    shown_ns,
    state_cell,
)
from snapd.core.events import FINAL_STATES, State
from snapd.core.session import SessionView
from snapd.units import format_bytes

if TYPE_CHECKING:
    from rich.text import Text

LIMIT_DEFAULT: Final = 50


@click.command(
    epilog="""\b
Examples:
  snapd sessions
  snapd sessions --state READY --limit 0
  snapd sessions --session chat-17 --all
  snapd sessions --all --json | jq '.sessions[] | select(.reason == "evicted")'"""
)
@daemon_options
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in State], case_sensitive=False),
    help="Only attempts in this state; may be repeated.",
)
@click.option("--session", "session_id", metavar="ID", default="", help="Only this session's.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=0),
    default=LIMIT_DEFAULT,
    show_default=True,
    help="At most so many; 0: all.",
)
@click.option("--all", "is_all", is_flag=True, help="Ended attempts too, as far as they are remembered.")
@json_option
def sessions(
    daemon: DaemonChoice,
    states: tuple[str, ...],
    session_id: str,
    limit: int,
    is_all: bool,
    as_json: bool,
) -> None:
    """List attempts: the open ones, oldest first; with --all also the ended ones.

    LEFT is the time until the state's deadline, or why the attempt has ended. The HANDLE
    goes into 'snapd show' and 'snapd abort'.
    """
    if is_all and states:
        raise click.UsageError("--all and --state exclude each other: remove one of them")
    wanted = all_states() if is_all else tuple(State(state) for state in states)
    with daemon.connect() as client:
        found = list_attempts(client, states=wanted, session_id=session_id, limit=limit)
    if as_json:
        print_json({"sessions": found.sessions, "total": found.total, "now_ns": found.now_ns})
        return
    if not found.sessions:
        say("No attempt matches." if states or session_id or is_all else "No attempt is open.")
        return
    # The session id comes last: it may be long, and nothing is cut off.
    table = Table(">HANDLE", "STATE", ">AGE", ">LEFT", ">BYTES", "SESSION")
    for view in found.sessions:
        is_ended = view.state in FINAL_STATES
        left = str(view.reason) if is_ended else shown_ns(view.deadline_ns - found.now_ns)
        table.add(
            str(view.slab_handle),
            _state(view),
            shown_ns(found.now_ns - view.created_ns),
            left,
            format_bytes(view.bytes),
            view.session_id,
        )
    table.show()
    if len(found.sessions) < found.total:
        say(f"{len(found.sessions):,} of {plural(found.total, 'attempt')}; --limit 0 shows all")


def _state(view: SessionView) -> "Text":
    if not view.is_leased:
        return state_cell(view.state)
    return state_cell(view.state) + cell(
        f", leased, then {view.abort_wanted}" if view.abort_wanted else ", leased"
    )

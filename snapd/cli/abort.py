"""``snapd abort``: end attempts."""

import sys

import click

from snapd.cli.common import (
    DaemonChoice,
    daemon_options,
    find_attempts,
    json_option,
    plural,
    print_json,
    printable,
    say,
)
from snapd.core.events import FINAL_STATES
from snapd.errors import StaleHandle
from snapd.units import format_bytes


@click.command(
    epilog="""\b
Examples:
  snapd abort 6403781920017213
  snapd abort chat-17 --yes
  snapd abort chat-17 --yes --json"""
)
@click.argument("name", metavar="ID")
@daemon_options
@click.option("--yes", "-y", "is_sure", is_flag=True, help="Do not ask.")
@json_option
def abort(daemon: DaemonChoice, name: str, is_sure: bool, as_json: bool) -> None:
    """End an attempt; its snapshot is given up and D has to push it again.

    ID is a slab_handle, or a session id: then all its open attempts end. While a rank reads a snapshot the
    abort is pending and takes effect when the reader has voted or its lease has ended. Bytes that may still
    be written rest in quarantine.
    """
    results = []
    with daemon.connect() as client:
        found = find_attempts(client, name).sessions
        targets = [view for view in found if view.state not in FINAL_STATES]
        if not targets:
            last = max(found, key=lambda view: view.created_ns)
            raise StaleHandle(
                f"{printable(name)} has no open attempt: the latest, {last.slab_handle}, is {last.state} "
                f"({last.reason})"
            )
        if not is_sure:
            _ask(
                [
                    f"{view.slab_handle} {view.state} {format_bytes(view.bytes)} {view.session_id}"
                    for view in targets
                ]
            )
        for view in targets:
            try:
                reply = client.abort(view.slab_handle)
                state, is_pending, is_gone = str(reply.state or ""), reply.pending, False
            except StaleHandle:
                # It ended between the list and now, which is what was wanted.
                state, is_pending, is_gone = "", False, True
            results.append(
                {
                    "slab_handle": view.slab_handle,
                    "session_id": view.session_id,
                    "state": state,
                    "pending": is_pending,
                    "ended_before": is_gone,
                }
            )
    if as_json:
        print_json({"aborted": results})
        return
    for result in results:
        if result["pending"]:
            said = "pending: a rank is reading it; it ends when that rank has voted or its lease has ended"
        elif result["ended_before"]:
            said = "had already ended"
        else:
            said = "aborted"
        say(f"{result['slab_handle']} of session {result['session_id']}: {said}")


def _ask(lines: list[str]) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("stdin is no terminal, so nobody can be asked: use --yes to abort")
    for line in lines:
        click.echo(printable(line), err=True)
    click.confirm(f"Abort {plural(len(lines), 'attempt')}?", abort=True, err=True)

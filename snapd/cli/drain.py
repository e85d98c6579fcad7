"""``snapd drain``: take no new attempts."""

import click

from snapd.cli.common import (
    DaemonChoice,
    daemon_options,
    json_option,
    plural,
    print_json,
    say,
)


@click.command(
    epilog="""\b
Examples:
  snapd drain
  snapd drain --off"""
)
@daemon_options
@click.option("--off", "is_off", is_flag=True, help="Take new attempts again.")
@json_option
def drain(daemon: DaemonChoice, is_off: bool, as_json: bool) -> None:
    """Have the daemon refuse new attempts with reason 'draining'; open ones go on to their end.

    The daemon keeps running. SIGTERM drains and stops it.
    """
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

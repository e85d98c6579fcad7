"""``snapd show``: everything about one attempt."""

from typing import Final

import click

from snapd.cli.common import (
    Attempts,
    DaemonChoice,
    Table,
    daemon_options,
    find_attempts,
    json_option,
    plural,
    print_json,
    say,
    say_note,
    shown_ns,
    state_cell,
)
from snapd.core.events import FINAL_STATES, State
from snapd.core.fsm import STATE_TIMER_REASON
from snapd.core.session import SessionView
from snapd.errors import REASON_HELP, Reason
from snapd.units import NS_PER_MS, format_bytes

_EXTENTS_SHOWN_MAX: Final = 8


@click.command(
    epilog="""\b
Examples:
  snapd show 6403781920017213
  snapd show chat-17
  snapd show chat-17 --all --json"""
)
@click.argument("name", metavar="ID")
@daemon_options
@click.option("--all", "is_all", is_flag=True, help="Every attempt of the session that is remembered.")
@json_option
def show(daemon: DaemonChoice, name: str, is_all: bool, as_json: bool) -> None:
    """Show one attempt: its states with the time spent, extents, leases, deadlines, and what to do.

    ID is a slab_handle, or a session id: then its open attempts are shown, or the newest if none is open.
    """
    with daemon.connect() as client:
        found = find_attempts(client, name)
    chosen = found.sessions if is_all else newest(found.sessions)
    if as_json:
        print_json({"sessions": chosen, "total": found.total, "now_ns": found.now_ns})
        return
    for index, view in enumerate(chosen):
        if index:
            say()
        _show_attempt(view, found)
    if len(chosen) < len(found.sessions):
        say()
        say(f"{plural(len(found.sessions) - len(chosen), 'older attempt')}; --all shows them")


def newest(views: list[SessionView]) -> list[SessionView]:
    """Return the open attempts, else the newest one."""
    open_views = [view for view in views if view.state not in FINAL_STATES]
    return open_views or [max(views, key=lambda view: view.created_ns)]


def _show_attempt(view: SessionView, found: Attempts) -> None:
    say(f"attempt {view.slab_handle} of session {view.session_id}", "bold")
    end = view.token_start + view.num_tokens
    say(f"  tokens  {view.token_start:,} to {end:,} ({view.num_tokens:,})")
    ranks = plural(len(view.shards), "rank")
    say(f"  bytes   {view.bytes:,} ({format_bytes(view.bytes)}) over {ranks}")
    say(f"  layout  {view.layout_fingerprint}")
    say()
    _show_timeline(view, found.now_ns)
    say()
    _show_what_next(view, found.now_ns)
    say()
    _show_shards(view, found.now_ns)


def timeline(view: SessionView, now_ns: int) -> list[tuple[str, int, int]]:
    """Return each state that the attempt was in: its name, when it began and how long it took, in ns.

    Times are counted from the attempt's creation; a final state takes 0.
    """
    steps: list[tuple[str, int, int]] = []
    begin_ns = 0
    for state, spent_ms in view.spent_ms.items():
        spent_ns = round(spent_ms * NS_PER_MS)
        steps.append((state, begin_ns, spent_ns))
        begin_ns += spent_ns
    present_ns = 0 if view.state in FINAL_STATES else now_ns - view.state_since_ns
    return [*steps, (view.state.value, view.state_since_ns - view.created_ns, present_ns)]


def _show_timeline(view: SessionView, now_ns: int) -> None:
    table = Table("STATE", ">AT", ">SPENT", "", indent=2)
    steps = timeline(view, now_ns)
    for index, (state, begin_ns, spent_ns) in enumerate(steps):
        is_last = index == len(steps) - 1
        if is_last and view.state in FINAL_STATES:
            spent, note = "", f"{shown_ns(now_ns - view.state_since_ns)} ago"
        else:
            spent, note = shown_ns(spent_ns), "so far" if is_last else ""
        table.add(state_cell(state), f"+{shown_ns(begin_ns)}", spent, note)
    table.show()


def _show_what_next(view: SessionView, now_ns: int) -> None:
    if view.state in FINAL_STATES:
        say(f"  ended: {view.reason}", "green" if view.reason is Reason.OK else "red")
        say_note(REASON_HELP[view.reason], indent=2)
        return
    left_ns = view.deadline_ns - now_ns
    timeout = STATE_TIMER_REASON[view.state]
    if left_ns >= 0:
        say(f"  deadline: {timeout} in {shown_ns(left_ns)}")
    else:
        why = "; it waits for the readers" if view.is_leased else ""
        say(f"  deadline: {timeout}, {shown_ns(-left_ns)} overdue{why}", "yellow")
    if view.abort_wanted:
        say(f"  ends as soon as no rank reads it: {view.abort_wanted}", "yellow")
        say_note(REASON_HELP[Reason(view.abort_wanted)], indent=2)
    elif view.state is State.READY and not view.is_leased:
        say("  waits for P to ingest it; may be evicted when room is needed")


def _show_shards(view: SessionView, now_ns: int) -> None:
    table = Table("RANK", "COMMITTED", "LEASE", ">BYTES HELD", "EXTENTS (offset+size)", indent=2)
    for shard in view.shards:
        lease = "-"
        if shard.lease_id:
            lease = f"{shown_ns(shard.lease_deadline_ns - now_ns)} left"
        shown = [
            f"{extent.offset_bytes}+{extent.size_bytes}" for extent in shard.extents[:_EXTENTS_SHOWN_MAX]
        ]
        if len(shard.extents) > _EXTENTS_SHOWN_MAX:
            shown.append(f"and {len(shard.extents) - _EXTENTS_SHOWN_MAX} more (--json)")
        table.add(
            shard.rank,
            "yes" if shard.is_committed else "no",
            lease,
            format_bytes(sum(extent.size_bytes for extent in shard.extents)),
            " ".join(shown) or "given up",
        )
    table.show()

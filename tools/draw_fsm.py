"""Write docs/state-machine.md from the table in snapd/core/fsm.py.

Run it without arguments to write the page, with ``--check`` to be told whether it is stale.
"""

from pathlib import Path
from typing import Final

import click

from snapd.core import events as e
from snapd.core.events import FINAL_STATES, State
from snapd.core.fsm import ABSORBED, REJECTED, STATE_TIMER_REASON, TRANSITIONS

PAGE: Final = Path(__file__).parents[1] / "docs" / "state-machine.md"

_HEAD: Final = """\
# The state machine of an attempt

<!-- Written by tools/draw_fsm.py from snapd/core/fsm.py: change the table there, then run the tool. -->

An attempt is one try to bring one snapshot of a session over.
It begins RESERVED when a prepare fits, and it ends once, INGESTED or ABORTED, with a reason.
A prepare that is refused makes no attempt, only a record and an outcome.
Only a commit of every rank makes bytes readable, and only a "yes" of every rank makes them INGESTED.

Every state that is not final has a deadline.
"""

_AFTER_DIAGRAM: Final = """\
Not drawn: events that leave the state as it is, such as a lease, a vote that waits for the other ranks, or \
a timer that fired early.
A commit straight from RESERVED goes through TRANSFERRING, and the log shows both steps.

## Every pair of state and event

A cell names the states that may follow; where the present one is among them, it may be kept.
"""

_TAIL: Final = """\
## What has no effect

*Absorbed* changes nothing.
An exact repeat of an earlier message gets its first answer again, except that a start is no leave to \
write once the attempt has ended; anything else that asks for an answer is \
told `stale-handle` when the attempt has ended, and `wrong-state` when it has not.
One thing is heard all the same: while bytes of an attempt that has ended lie in quarantine, drain \
proof (from the writer, or by its exit) releases what may still be written, a vote releases what its rank \
still read, and what may be written and is read needs both.
A drain proof for an attempt that has ended is always accepted.

*Rejected* changes nothing either, and whoever asked is told the reason in the cell.

A message whose handle names no attempt of this epoch is told `stale-handle`.

## What is not in the table

* READY is never evicted, expired, superseded or aborted under a lease.
  What came meanwhile is done when the last lease ends; until then no new lease is given.
  Only a stop does not wait: what is still read is then kept until the lease's deadline, or longer if it \
may still be written.
* A lease that is over by its deadline is revoked: the vote that comes later is refused, and its reader must \
not insert.
* One "no", or one vote missing at the deadline, ends the round for all ranks.
  A "no" with `keep` leaves the attempt READY for another round, but for `checksum-mismatch`.
* A new attempt for a session supersedes the one before: at once if that one is RESERVED or TRANSFERRING, \
and when the new one becomes READY if that one is READY.
* Bytes of an attempt that ends are freed at once where no write can land any more (every one is final and \
none had failed, or drain proof came) and nobody reads; otherwise they go to quarantine.
"""


def _edges() -> dict[tuple[State, State], list[str]]:
    """Return the names of the events that lead from one state to another, self-loops left out."""
    edges: dict[tuple[State, State], list[str]] = {}
    for state, row in TRANSITIONS.items():
        for event, cell in row.items():
            for successor in cell.successors:
                if successor is not state:
                    edges.setdefault((state, successor), []).append(event.__name__)
    return edges


def diagram() -> str:
    """Return the Mermaid state diagram of ``TRANSITIONS``."""
    lines = ["stateDiagram-v2", "    [*] --> RESERVED: PrepareAsked"]
    for (state, successor), names in _edges().items():
        lines.append(f"    {state} --> {successor}: {'<br/>'.join(names)}")
    lines += [f"    {state} --> [*]" for state in State if state in FINAL_STATES]
    return "\n".join(lines)


def _cell(state: State, event: type[e.SessionEvent]) -> str:
    cell = TRANSITIONS[state].get(event)
    if cell is not None:
        return ", ".join(cell.successors)
    if event in REJECTED[state]:
        return f"rejected: `{REJECTED[state][event]}`"
    assert event in ABSORBED[state], f"{event.__name__} is not decided in {state}"
    return "absorbed"


def table() -> str:
    """Return the table of all pairs, one row an event."""
    events = dict.fromkeys(event for row in TRANSITIONS.values() for event in row)
    events |= dict.fromkeys(sorted(ABSORBED[State.ABORTED], key=lambda event: event.__name__))
    rows = [
        "| event | " + " | ".join(State) + " | meaning |",
        "|---" * (len(State) + 2) + "|",
    ]
    for event in events:
        meaning = (event.__doc__ or "").split("\n")[0].split("; *")[0].rstrip(".")
        cells = " | ".join(_cell(state, event) for state in State)
        rows.append(f"| {event.__name__} | {cells} | {meaning} |")
    return "\n".join(rows)


def _deadlines() -> str:
    rows = ["| state | reason when it lasts too long |", "|---|---|"]
    rows += [f"| {state} | `{reason}` |" for state, reason in STATE_TIMER_REASON.items()]
    return "\n".join(rows)


def page() -> str:
    """Return the whole page."""
    drawn = f"```mermaid\n{diagram()}\n```"
    parts = (_HEAD, _deadlines() + "\n", drawn + "\n", _AFTER_DIAGRAM, table() + "\n", _TAIL)
    return "\n".join(parts)


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 when the page is stale.")
def main(check: bool) -> None:
    """Draw the state machine."""
    is_current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
    if check:
        if not is_current:
            click.echo(f"{PAGE.name} is stale: run tools/draw_fsm.py", err=True)
            raise SystemExit(1)
        return
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

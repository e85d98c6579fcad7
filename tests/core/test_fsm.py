"""The table itself: every pair is decided, once, and the page in the docs is drawn from it."""

import inspect
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from snapd.core import events as e
from snapd.core import fsm
from snapd.core.events import FINAL_STATES, State
from snapd.core.fsm import ABSORBED, REJECTED, TRANSITIONS
from snapd.core.lives import Lives
from snapd.errors import Reason

TOOL = Path(__file__).parents[2] / "tools" / "draw_fsm.py"


def all_events() -> set[type[e.SessionEvent]]:
    """Every event class that names an attempt and has no subclass: found by looking, not listed."""
    found = {item for _, item in inspect.getmembers(e, inspect.isclass) if issubclass(item, e.SessionEvent)}
    return found - {e.SessionEvent, e.TimerEvent}


def decided(state: State) -> list[type[e.SessionEvent]]:
    return [*TRANSITIONS[state], *ABSORBED[state], *REJECTED[state]]


@pytest.mark.parametrize("state", State)
def test_every_pair_is_decided_in_exactly_one_way(state: State) -> None:
    assert len(decided(state)) == len(set(decided(state))), "the three sets are disjoint"
    assert set(decided(state)) == all_events(), "the three sets cover everything"


def test_the_three_tables_cover_every_state() -> None:
    assert set(TRANSITIONS) == set(ABSORBED) == set(REJECTED) == set(State)
    assert len(all_events()) * len(State) == sum(len(decided(state)) for state in State) == 80


def test_every_action_is_a_method_that_takes_the_attempt_and_the_event() -> None:
    for row in TRANSITIONS.values():
        for cell in row.values():
            parameters = list(inspect.signature(getattr(Lives, cell.action)).parameters)
            assert parameters == ["self", "session", "event"]
            assert not cell.action.startswith("_")


def test_final_states_have_no_way_out_and_reject_nothing() -> None:
    assert {State.INGESTED, State.ABORTED} == FINAL_STATES
    for state in FINAL_STATES:
        assert not TRANSITIONS[state] and not REJECTED[state]


def test_no_successor_lies_before_its_state() -> None:
    """RESERVED, TRANSFERRING, READY, then an end: nothing goes back."""
    order = [State.RESERVED, State.TRANSFERRING, State.READY]
    for state, row in TRANSITIONS.items():
        for cell in row.values():
            assert cell.successors and len(set(cell.successors)) == len(cell.successors)
            for successor in cell.successors:
                assert successor in FINAL_STATES or order.index(successor) >= order.index(state)


def test_only_a_vote_leads_to_ingested_and_only_a_commit_to_ready() -> None:
    into = {
        successor: {
            (state, event)
            for state, row in TRANSITIONS.items()
            for event, cell in row.items()
            if successor in cell.successors and successor is not state
        }
        for successor in State
    }
    assert into[State.INGESTED] == {(State.READY, e.VoteCast)}
    assert into[State.READY] == {
        (State.RESERVED, e.RankCommitted),
        (State.TRANSFERRING, e.RankCommitted),
    }
    assert into[State.RESERVED] == set()
    assert into[State.TRANSFERRING] == {
        (State.RESERVED, e.TransferStarted),
        (State.RESERVED, e.RankCommitted),
    }


def test_every_open_state_can_be_aborted_expired_superseded_and_stopped() -> None:
    for state in set(State) - FINAL_STATES:
        for event in (e.AbortAsked, fsm.STATE_TIMER[state], e.SupersededBy, e.DaemonStopping):
            assert State.ABORTED in TRANSITIONS[state][event].successors


def test_each_state_has_a_clock_and_a_reason_of_its_own() -> None:
    assert set(fsm.STATE_TIMER) == set(fsm.STATE_TIMER_REASON) == set(State) - FINAL_STATES
    assert len(set(fsm.STATE_TIMER.values())) == len(set(fsm.STATE_TIMER_REASON.values())) == 3
    assert fsm.STATE_TIMER_REASON == {
        State.RESERVED: Reason.RESERVE_TIMEOUT,
        State.TRANSFERRING: Reason.TRANSFER_TIMEOUT,
        State.READY: Reason.READY_EXPIRED,
    }


def test_what_the_quarantine_hears_is_absorbed_by_an_aborted_attempt() -> None:
    assert fsm.HEARD_BY_QUARANTINE.issubset(ABSORBED[State.ABORTED])
    assert {
        e.WriterDrained,
        e.TransferFailed,
        e.AbortAsked,
        e.WriterExited,
        e.VoteCast,
    } == fsm.HEARD_BY_QUARANTINE


def test_the_reasons_of_the_design_and_no_others_end_a_round_or_a_transfer() -> None:
    assert {
        "alloc-failed-on-finalize",
        "checksum-mismatch",
        "token-mismatch",
        "prefix-not-resident",
        "ingest-failed",
    } == fsm.VOTE_NO_REASONS
    assert {"transfer-failed", "session-not-resident"} == fsm.TRANSFER_FAILED_REASONS
    assert {"checksum-mismatch"} == fsm.NEVER_KEPT


def test_the_page_in_the_docs_is_current() -> None:
    done = subprocess.run([sys.executable, TOOL, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_diagram_has_every_edge_of_the_table_and_no_other() -> None:
    tool = runpy.run_path(str(TOOL))
    drawn: dict[tuple[str, str], set[str]] = {}
    for line in tool["diagram"]().splitlines()[2:]:
        left, _, label = line.partition(": ")
        state, _, successor = left.strip().partition(" --> ")
        drawn[(state, successor)] = set(label.split("<br/>")) - {""}
    wanted: dict[tuple[str, str], set[str]] = {(state, "[*]"): set() for state in FINAL_STATES}
    for state, row in TRANSITIONS.items():
        for event, cell in row.items():
            for successor in set(cell.successors) - {state}:
                wanted.setdefault((state, successor), set()).add(event.__name__)
    assert drawn == wanted


def test_a_stale_page_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = runpy.run_path(str(TOOL))
    page = tmp_path / "state-machine.md"
    monkeypatch.setitem(tool["main"].callback.__globals__, "PAGE", page)
    with pytest.raises(SystemExit, match="1"):
        tool["main"].callback(check=True)
    tool["main"].callback(check=False)
    tool["main"].callback(check=True)
    page.write_text(page.read_text().replace("READY", "STEADY"))
    with pytest.raises(SystemExit, match="1"):
        tool["main"].callback(check=True)

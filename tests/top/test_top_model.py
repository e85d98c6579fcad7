"""From what a daemon says to what is shown: rates, order, times, and what happens when it goes away."""

import msgspec
import pytest
from top_cases import (
    START_NS,
    START_S,
    answer,
    attempt_line,
    overview,
    refusal,
    statistics,
    transition,
)

from snapd.cli.topframe import Frame
from snapd.cli.topmodel import NO_DAEMON, RATE_WINDOW_S, SAMPLES_MAX, History
from snapd.core.overview import PeerLine
from snapd.units import MIB, NS_PER_S
from snapd.wire import StatsRep, WatchLost


def history_of(*answers: StatsRep, order: str = "deadline") -> History:
    """Return a history of answers, each taken at its own time."""
    history = History(order)  # type: ignore[arg-type]
    for stats in answers:
        history.add_stats(stats, START_S + (stats.now_ns - START_NS) / NS_PER_S)
    return history


def grown(after_s: float, **changes: int) -> StatsRep:
    """Return an answer with other counters."""
    return answer(after_s, core=statistics(**changes))


# --- rates -------------------------------------------------------------------------------------


def test_one_answer_gives_rates_since_the_start() -> None:
    rates = history_of(answer()).frame(START_S).rates
    assert rates is not None and rates.is_since_start
    assert (rates.over_s, rates.attempts, rates.ok, rates.evicted) == (100.0, 0.96, 0.8, 0.1)
    assert (rates.committed_bytes, rates.ingested_bytes) == (9 * MIB, 8 * MIB)


def test_refusals_are_the_outcomes_that_are_no_ends_of_attempts() -> None:
    # 96 attempts, 6 open: 90 have ended, and there are 95 outcomes.
    rates = history_of(answer()).frame(START_S).rates
    assert rates is not None and rates.refused == 0.05


def test_two_answers_give_rates_of_the_time_between_them() -> None:
    outcomes = {"ok": 84, "evicted": 12, "snapshot-buf-full": 11}
    later = grown(
        2.0, attempts=102, attempts_ok=84, outcomes_by_reason=outcomes, bytes_committed=1_000 * MIB  # type: ignore[arg-type]
    )  # fmt: skip
    frame = history_of(answer(), later).frame(START_S + 2)
    rates = frame.rates
    assert rates is not None and not rates.is_since_start and rates.over_s == 2.0
    assert (rates.attempts, rates.ok, rates.evicted, rates.refused) == (3.0, 2.0, 1.0, 3.0)
    assert (rates.committed_bytes, rates.ingested_bytes) == (50 * MIB, 0)
    assert {o.reason: (o.count, o.per_s) for o in frame.outcomes} == {
        "ok": (84, 2.0), "evicted": (12, 1.0), "snapshot-buf-full": (11, 3.0),
    }  # fmt: skip


def test_rates_are_of_the_last_seconds_only() -> None:
    history = history_of(*(grown(float(second), attempts=96 + 5 * second) for second in range(60)))
    rates = history.frame(START_S + 60).rates
    assert rates is not None and RATE_WINDOW_S <= rates.over_s <= RATE_WINDOW_S + 1
    assert rates.attempts == 5.0


def test_however_often_it_is_asked_a_bounded_number_of_answers_is_kept() -> None:
    history = history_of(*(answer(number / 1_000) for number in range(2 * SAMPLES_MAX)))
    assert len(history._samples) == SAMPLES_MAX


def test_outcomes_begin_with_ok_and_go_on_with_the_most_frequent() -> None:
    outcomes = {"too-large": 5, "evicted": 50, "ok": 1, "client-abort": 5, "draining": 0}
    frame = history_of(answer(core=statistics(outcomes_by_reason=outcomes))).frame(START_S)
    assert [o.reason for o in frame.outcomes] == ["ok", "evicted", "client-abort", "too-large"]
    assert sum(o.share for o in frame.outcomes) == pytest.approx(1.0)


def test_a_worker_has_rates_of_its_own_and_begins_anew_when_it_was_not_listed() -> None:
    def peers(ok: int, *names: str) -> tuple[PeerLine, ...]:
        return tuple(PeerLine(peer=name, ok=ok, ended=ok, bytes_ok=ok * MIB, last_ns=1) for name in names)

    first = answer(overview=overview(peers=peers(10, "a", "gone")))
    later = answer(4.0, overview=overview(peers=peers(30, "a", "new")))
    rows = {row.peer: row for row in history_of(first, later).frame(START_S + 4).peers}
    assert (rows["a"].ok_per_s, rows["a"].bytes_per_s) == (5.0, 5 * MIB)
    assert rows["new"].ok_per_s == 7.5
    fewer = answer(8.0, overview=overview(peers=peers(2, "a")))
    assert history_of(first, fewer).frame(START_S + 8).peers[0].ok_per_s == 0


# --- attempts, ranks, groups -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "wanted"),
    [("deadline", [2, 3, 1, 4]), ("age", [4, 3, 2, 1]), ("bytes", [3, 4, 1, 2])],
)
def test_attempts_come_in_the_order_asked_for(order: str, wanted: list[int]) -> None:
    lines = (
        attempt_line(1, created_ns=START_NS - 1, deadline_ns=START_NS + 30, bytes=20),
        attempt_line(2, created_ns=START_NS - 2, deadline_ns=START_NS - 10, bytes=10),
        attempt_line(3, created_ns=START_NS - 3, deadline_ns=START_NS + 20, bytes=40),
        attempt_line(4, created_ns=START_NS - 4, deadline_ns=START_NS + 40, bytes=30),
    )
    frame = history_of(answer(overview=overview(attempts=lines)), order=order).frame(START_S)
    assert [row.slab_handle for row in frame.attempts] == wanted
    assert frame.order == order


def test_ages_and_deadlines_go_on_between_two_answers() -> None:
    history = history_of(answer(overview=overview(attempts=(attempt_line(2),))))
    first, later = history.frame(START_S).attempts[0], history.frame(START_S + 3).attempts[0]
    assert (first.age_ms, first.in_state_ms, first.left_ms) == (2_000, 1_000, 2_000)
    assert (later.age_ms, later.in_state_ms, later.left_ms) == (5_000, 4_000, -1_000)


def test_a_clock_that_was_set_back_makes_nothing_younger() -> None:
    history = history_of(answer(overview=overview(attempts=(attempt_line(2),))))
    assert history.frame(START_S - 1_000).attempts[0].age_ms == 2_000


def test_the_map_of_a_rank_goes_with_its_books() -> None:
    maps = tuple(reversed(overview().maps))
    frame = history_of(answer(overview=overview(maps=maps))).frame(START_S)
    assert [(row.books.rank, row.map.rank) for row in frame.ranks] == [(0, 0), (1, 1)]
    row = frame.ranks[0]
    assert (row.writing_bytes, row.ready_bytes, row.leased_bytes) == (8 * MIB, 16 * MIB, 2 * MIB)
    free = row.books.capacity_bytes - 26 * MIB - row.books.quarantined_bytes
    assert row.books.free_bytes == free


def test_the_typical_time_in_a_state_is_the_median_of_those_that_left_it() -> None:
    history = history_of(answer())
    for duration_ms in (5.0, 700.0, 9.0):
        history.add_push(transition(duration_ms=duration_ms), START_S)
    history.add_push(transition(from_state="", to_state="RESERVED", duration_ms=0.0), START_S)
    groups = {(g.state, g.is_leased): g for g in history.frame(START_S).groups}
    assert groups["TRANSFERRING", False].typical_ms == 9.0
    assert groups["READY", True].typical_ms is None


def test_a_state_that_nobody_is_in_has_no_times() -> None:
    empty = tuple(msgspec.structs.replace(group, count=0, oldest_since_ns=0) for group in overview().groups)
    groups = history_of(answer(overview=overview(groups=empty))).frame(START_S).groups
    assert all(group.oldest_ms == 0 and group.left_ms is None for group in groups)


# --- events ------------------------------------------------------------------------------------


def test_events_are_shown_newest_first_and_are_bounded() -> None:
    history = History(events_max=3)
    for number in range(5):
        history.add_push(transition(number), START_S + number)
    history.add_push(refusal(), START_S + 5)
    history.add_push(WatchLost(count=7), START_S + 6)
    events = history.frame(START_S + 7).events
    assert [event.event for event in events] == ["watch.lost", "sync.refused", "session.transition"]
    assert (events[0].count, events[1].reason, events[2].session_id) == (7, "too-large", "chat-4")
    assert history.take_events()[0].event == "session.transition"
    assert history.take_events() == ()


def test_the_daemons_clock_says_when_something_happened() -> None:
    history = history_of(answer())
    history.add_push(transition(at_ns=START_NS - 2 * NS_PER_S), START_S + 9)
    history.add_push(transition(at_ns=START_NS + 99 * NS_PER_S), START_S + 9)
    assert [event.at for event in history.frame(START_S).events] == [START_S + 9, START_S - 2]


# --- the daemon goes away ----------------------------------------------------------------------


def test_before_the_first_answer_nothing_is_wrong_and_nothing_is_known() -> None:
    assert History().frame(START_S) == Frame(at=START_S, connected=False)


def test_a_daemon_that_is_away_is_waited_for_since_the_first_failure() -> None:
    history = history_of(answer())
    history.add_push(transition(), START_S)
    history.add_problem(NO_DAEMON, "nobody listens", START_S + 1)
    history.add_problem(NO_DAEMON, "no such socket", START_S + 2)
    frame = history.frame(START_S + 3)
    assert (frame.connected, frame.problem, frame.detail) == (False, NO_DAEMON, "no such socket")
    assert frame.waiting_since == START_S + 1
    # What it said before is not shown as if it were so still; what has happened has.
    assert (frame.daemon, frame.attempts, frame.ranks, len(frame.events)) == (None, (), (), 1)
    history.add_stats(answer(9.0), START_S + 9)
    back = history.frame(START_S + 9)
    assert back.connected and back.waiting_since is None and back.problem == ""


def test_another_daemon_starts_rates_anew_and_is_an_event() -> None:
    other = answer(
        5.0, epoch="fedcba9876543210", pid=77, uptime_ms=1_000, core=statistics(attempts=7, open_sessions=2)
    )
    history = history_of(answer(), answer(1.0))
    history.add_push(transition(), START_S + 1)
    history.add_stats(other, START_S + 5)
    frame = history.frame(START_S + 5)
    assert frame.rates is not None and frame.rates.is_since_start and frame.rates.attempts == 7.0
    assert frame.events[0].event == "daemon.seen"
    assert "pid 77" in frame.events[0].detail and "fedcba9876543210" in frame.events[0].detail
    assert all(group.typical_ms is None for group in frame.groups)


def test_rates_do_not_reach_over_a_time_without_answers() -> None:
    history = history_of(answer())
    history.add_problem(NO_DAEMON, "", START_S + 1)
    history.add_stats(answer(2.0), START_S + 2)
    rates = history.frame(START_S + 2).rates
    assert rates is not None and rates.is_since_start


def test_a_frame_goes_through_json_and_back() -> None:
    history = history_of(answer(), answer(1.0))
    history.add_push(transition(), START_S)
    frame = history.frame(START_S + 1)
    assert msgspec.json.decode(msgspec.json.encode(frame), type=Frame) == frame

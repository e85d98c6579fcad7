"""A survey finds what a look at everything at once would find, in bounded steps and bounded numbers."""

from collections.abc import Callable
from typing import Any

import pytest
from core_driver import UNIT, Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.events import FINAL_STATES, State
from snapd.core.machine import Machine
from snapd.core.overview import ATTEMPTS_MAX, CELLS_MAX, CELLS_TOTAL_MAX, PEERS_MAX, Order, Overview
from snapd.core.session import Settings
from snapd.core.slab import Extent, SlabAllocator
from snapd.core.survey import PEERS_COUNTED_MAX, Painter, PeerCounts, Survey, next_deadline_ns
from snapd.errors import Reason
from snapd.layout import Layout, fingerprint

Make = Callable[..., Driver]
KINDS = ("writing_bytes", "ready_bytes", "leased_bytes", "quarantined_bytes")
ACTIONS = ("reserved", "transferring", "ready", "leased", "undrained", "abort", "advance")


def act(drive: Driver, action: str, number: int) -> None:
    """Do one thing to a driver; what is full or has nobody to be done to is left."""
    name = f"s{number}"
    has_room = drive.free_units() >= 4 and (len(drive.ranks) == 1 or drive.free_units(1) >= 4)
    handles = list(drive.machine.books.open)
    if action == "advance":
        drive.advance(number * 100)
    elif action == "abort" and handles:
        drive.abort(handles[number % len(handles)])
    elif has_room and action in ("reserved", "transferring", "ready"):
        getattr(drive, action)(name, 16, peer=f"d{number % 3}")
    elif has_room and action == "leased":
        drive.lease(drive.ready(name, 16, peer="reader"), number % len(drive.ranks))
    elif has_room and action == "undrained":
        drive.abort(drive.transferring(name, 16))


def survey_of(drive: Driver, budget: int = 10**9) -> Survey:
    survey = Survey(drive.machine.books)
    while not survey.is_done:
        survey.step(budget)
    return survey


def overview_of(drive: Driver, order: Any = "deadline", budget: int = 10**9) -> Overview:
    return survey_of(drive, budget).overview(order, PeerCounts(), drive.now_ns)


def naive_cells(drive: Driver, rank: int, cell_bytes: int) -> dict[str, list[int]]:
    """Return the map of an arena, made unit by unit."""
    arena = drive.machine.books.buffer.arenas[rank]
    cells = {kind: [0] * -(-arena.capacity_bytes // cell_bytes) for kind in KINDS}
    held: list[tuple[str, Extent]] = []
    for session in drive.machine.books.open.values():
        shard = session.shards.get(rank)
        if shard is not None:
            kind = "ready_bytes" if session.state is State.READY else "writing_bytes"
            held += [("leased_bytes" if shard.lease else kind, extent) for extent in shard.extents]
    for by_rank in drive.machine.books.buffer.quarantine.values():
        if rank in by_rank:
            held += [("quarantined_bytes", extent) for extent in by_rank[rank].extents]
    step = min(cell_bytes, UNIT)
    for kind, extent in held:
        for at in range(extent.offset_bytes, extent.end_bytes, step):
            cells[kind][at // cell_bytes] += step
    return cells


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 40)), max_size=40),
    st.sampled_from([1, 7, 10**9]),
)
def test_the_map_is_what_lies_there(actions: list[tuple[str, int]], budget: int) -> None:
    drive = Driver(2, units=64)
    for action, number in actions:
        act(drive, action, number)
    overview = overview_of(drive, budget=budget)
    for arena_map in overview.maps:
        cells = naive_cells(drive, arena_map.rank, arena_map.cell_bytes)
        assert {kind: list(getattr(arena_map, kind)) for kind in KINDS} == cells
        view = drive.machine.books.buffer.view(arena_map.rank, 0)
        sums = [sum(getattr(arena_map, kind)) for kind in KINDS]
        assert sum(sums[:3]) == view.live_bytes and sums[3] == view.quarantined_bytes
        assert sum(arena_map.num_shards) == sum(
            arena_map.rank in s.shards for s in drive.machine.books.open.values()
        ) + sum(arena_map.rank in kept for kept in drive.machine.books.buffer.quarantine.values())
    check_groups(drive, overview)
    drive.close()


def check_groups(drive: Driver, overview: Overview) -> None:
    """Groups and attempts are those that a look at all sessions gives."""
    open_sessions = [s for s in drive.machine.sessions() if s.state not in FINAL_STATES]
    for group in overview.groups:
        of_it = [s for s in open_sessions if (s.state, s.is_leased) == (group.state, group.is_leased)]
        assert group.count == len(of_it)
        assert group.bytes == sum(s.total_bytes for s in of_it)
        assert group.oldest_since_ns == min((s.state_since_ns for s in of_it), default=0)
        assert group.next_deadline_ns == min(map(next_deadline_ns, of_it), default=0)
    assert sum(group.count for group in overview.groups) == len(open_sessions)
    deadlines = [line.deadline_ns for line in overview.attempts]
    assert deadlines == sorted(map(next_deadline_ns, open_sessions))[:ATTEMPTS_MAX]
    open_by_peer = {line.peer: line.open_attempts for line in overview.peers}
    assert open_by_peer == {
        peer: sum(s.peer == peer for s in open_sessions) for peer in {s.peer for s in open_sessions}
    }


@given(
    st.lists(st.tuples(st.integers(1, 5_000), st.booleans()), min_size=1, max_size=40), st.integers(1, 300)
)
def test_extents_fill_the_cells_that_they_lie_in(pieces: list[tuple[int, bool]], cells_max: int) -> None:
    extents, at = [], 0
    for size_bytes, is_held in pieces:
        if is_held:
            extents.append(Extent(at, size_bytes))
        at += size_bytes
    painter = Painter(0, at, cells_max)
    assert painter.paint(1, extents) == len(extents)
    arena_map = painter.result()
    cells, cell_bytes = arena_map.ready_bytes, arena_map.cell_bytes
    assert len(cells) <= cells_max and (len(cells) - 1) * cell_bytes < at <= len(cells) * cell_bytes
    for index, held_bytes in enumerate(cells):
        start, end = index * cell_bytes, (index + 1) * cell_bytes
        overlaps = (min(end, x.end_bytes) - max(start, x.offset_bytes) for x in extents)
        assert held_bytes == sum(max(0, overlap) for overlap in overlaps)


def test_a_line_says_what_an_attempt_is(make: Make) -> None:
    drive = make(2)
    handle = drive.ready("chat-1", 16, peer="d-7")
    drive.lease(handle, 1)
    drive.abort(handle)
    (line,) = overview_of(drive).attempts
    session = drive.session(handle)
    lease = session.shards[1].lease
    assert lease is not None
    assert (line.slab_handle, line.session_id, line.peer) == (handle, "chat-1", "d-7")
    assert (line.state, line.is_leased, line.abort_wanted) == (State.READY, True, "client-abort")
    assert (line.num_committed, line.num_ranks, line.bytes) == (2, 2, session.total_bytes)
    assert line.deadline_ns == lease.deadline_ns < session.deadline_ns


def machine_of(attempts: int, peers: int = 1) -> Machine:
    """Return a machine with so many attempts; every third is RESERVED, the others READY."""
    layout = Layout((16,) * 2)
    machine = Machine(Settings(), {0: SlabAllocator(attempts * 8 * UNIT)})
    machine.handle(e.LayoutDeclared(at_ns=1, rank=0, layout=layout))
    for number in range(attempts):
        num_tokens = 1 + number % 64
        machine.handle(
            e.PrepareAsked(
                at_ns=number + 2, slab_handle=number + 1, session_id=f"s{number}", num_tokens=num_tokens,
                layout_fingerprint=fingerprint(layout), token_start=0, token_digest="", page_keys=(),
                ranks=(), use_resident_hint=False, peer=f"d{number % peers}",
            )
        )  # fmt: skip
        if number % 3:
            machine.handle(
                e.RankCommitted(
                    at_ns=number + 2, slab_handle=number + 1, rank=0, num_bytes=32 * num_tokens,
                    num_tokens=num_tokens, checksums=((1, 1), (2, 2)), drained=True, conn_id=0,
                )
            )  # fmt: skip
    assert len(machine.books.open) == attempts
    return machine


@pytest.mark.parametrize("order", ["deadline", "age", "bytes"])
def test_only_the_first_of_very_many_are_told_in_the_order_asked_for(order: Order) -> None:
    machine = machine_of(700)
    sessions = list(machine.books.open.values())
    survey = Survey(machine.books)
    while not survey.is_done:
        survey.step(64)
    attempts = survey.overview(order, PeerCounts(), 0).attempts
    assert len(attempts) == ATTEMPTS_MAX
    kept = (survey._soonest.handles(), survey._largest.handles(), survey._oldest)
    assert [len(handles) for handles in kept] == [2 * ATTEMPTS_MAX] * 3
    wanted = {
        "deadline": sorted(sessions, key=lambda s: s.deadline_ns),
        "age": sessions,
        "bytes": sorted(sessions, key=lambda s: (-s.total_bytes, s.created_ns)),
    }[order][:ATTEMPTS_MAX]
    if order == "bytes":
        assert [line.bytes for line in attempts] == [s.total_bytes for s in wanted]
    else:
        assert [line.slab_handle for line in attempts] == [s.handle for s in wanted]


def test_a_step_looks_at_no_more_than_it_may(make: Make) -> None:
    drive = make(1, units=64)
    for number in range(20):
        drive.reserved(f"s{number}")
    survey = Survey(drive.machine.books)
    steps = 0
    while not survey.is_done:
        survey.step(4)
        steps += 1
    # An attempt of one extent costs two.
    assert steps == 11


def test_what_ends_or_begins_between_two_steps_does_not_matter(make: Make) -> None:
    drive = make(1, units=64)
    handles = [drive.reserved(f"s{number}") for number in range(6)]
    survey = Survey(drive.machine.books)
    survey.step(4)
    for handle in handles[1:4]:
        drive.abort(handle, drained=True)
    drive.ready("new")
    while not survey.is_done:
        survey.step(4)
    overview = survey.overview("age", PeerCounts(), drive.now_ns)
    # The first two were seen before one of them ended; it is not among the lines.
    assert overview.groups[0].count == 4
    assert [line.slab_handle for line in overview.attempts] == [handles[0], handles[4], handles[5]]


def test_the_lines_show_attempts_as_they_are_now(make: Make) -> None:
    drive = make(1, units=64)
    handle = drive.reserved("s")
    survey = survey_of(drive)
    drive.start(handle)
    (line,) = survey.overview("deadline", PeerCounts(), drive.now_ns).attempts
    assert line.state is State.TRANSFERRING


def test_maps_of_many_ranks_have_fewer_cells() -> None:
    for ranks in (1, 16, 17, 1_024):
        drive = Driver(1)
        arenas = {rank: SlabAllocator(1 << 20) for rank in range(ranks)}
        drive.machine.books.buffer.arenas = arenas
        maps = Survey(drive.machine.books).overview("age", PeerCounts(), 0).maps
        cells = [len(arena_map.ready_bytes) for arena_map in maps]
        assert len(cells) == ranks and sum(cells) <= CELLS_TOTAL_MAX and max(cells) <= CELLS_MAX
        assert min(cells) >= min(CELLS_MAX, CELLS_TOTAL_MAX // ranks) // 2


# --- D workers ---------------------------------------------------------------------------------


def outcome(
    peer: str, reason: Reason = Reason.OK, at_ns: int = 1, handle: int = 1, num_bytes: int = 10
) -> r.SyncOutcome:
    return r.SyncOutcome(
        at_ns=at_ns, session_id="s", ok=reason is Reason.OK, reason=reason, num_tokens=1, token_start=0,
        bytes=num_bytes, duration_ms=0.0, reserved_ms=0.0, transferring_ms=0.0, ready_ms=0.0,
        slab_handle=handle, peer=peer,
    )  # fmt: skip


def test_a_workers_outcomes_are_counted() -> None:
    counts = PeerCounts()
    counts.note(outcome("a", at_ns=1))
    counts.note(outcome("a", Reason.EVICTED, at_ns=2))
    counts.note(outcome("a", Reason.SNAPSHOT_BUF_FULL, at_ns=3, handle=0))
    counts.note(outcome("b", at_ns=4))
    first, second = counts.lines({"a": (2, 20)}, (0, 0))
    assert (first.peer, first.open_attempts, first.open_bytes) == ("a", 2, 20)
    assert (first.ended, first.ok, first.refused, first.bytes_ok) == (2, 1, 1, 10)
    assert (first.last_problem, first.last_ns) == ("snapshot-buf-full", 3)
    assert (second.peer, second.ok, second.last_problem) == ("b", 1, "")


def test_any_number_of_workers_makes_a_bounded_number_of_lines_that_add_up() -> None:
    counts = PeerCounts()
    number = 3 * PEERS_COUNTED_MAX
    for at in range(number):
        counts.note(outcome(f"d{at}", Reason.EVICTED if at % 2 else Reason.OK, at_ns=at + 1))
    lines = counts.lines({"d0": (5, 50), "new": (1, 10)}, (7, 70))
    assert len(counts._lines) == PEERS_COUNTED_MAX
    assert len(lines) == PEERS_MAX + 1
    assert [line.peer for line in lines[:3]] == ["d0", "new", f"d{number - 1}"]
    assert lines[-1].peer == ""
    assert sum(line.ended for line in lines) == number
    assert (
        sum(line.ok for line in lines) == number // 2 and sum(line.bytes_ok for line in lines) == 5 * number
    )
    assert sum(line.open_attempts for line in lines) == 13 and lines[-1].open_bytes == 70


def test_the_latest_workers_are_kept_and_the_last_problem_of_the_others_too() -> None:
    counts = PeerCounts(peers_max=2)
    counts.note(outcome("a", Reason.EVICTED, at_ns=1))
    counts.note(outcome("b", at_ns=2))
    counts.note(outcome("a", at_ns=3))
    counts.note(outcome("c", at_ns=4))
    lines = {line.peer: line for line in counts.lines({}, (0, 0))}
    assert list(lines) == ["c", "a", ""]
    assert (lines[""].ended, lines["a"].last_problem, lines[""].last_ns) == (1, "evicted", 2)
    counts.note(outcome("d", at_ns=5))
    assert counts.lines({}, (0, 0))[-1].last_problem == "evicted"


def test_workers_beyond_those_counted_one_by_one_are_added_up() -> None:
    attempts = PEERS_COUNTED_MAX + 9
    survey = Survey(machine_of(attempts, peers=attempts).books)
    survey.step(10**9)
    lines = survey.overview("age", PeerCounts(), 0).peers
    assert len(lines) == PEERS_MAX + 1 and len(survey._peers) == PEERS_COUNTED_MAX
    assert sum(line.open_attempts for line in lines) == attempts

"""Pages of attempts and counters are kept, not computed: they must be what computing would give."""

from collections import Counter
from collections.abc import Callable
from itertools import combinations

import pytest
from core_driver import Driver, refused
from hypothesis import given
from hypothesis import strategies as st

from snapd.core.books import Books
from snapd.core.events import FINAL_STATES, State
from snapd.core.session import shard_plane_offsets_bytes
from snapd.core.slab import Extent
from snapd.errors import InvariantBroken, Reason
from snapd.layout import Layout, plane_offsets_bytes

Make = Callable[..., Driver]
SESSIONS = ("", "a", "b", "none")


def mixed(make: Make, **settings: int) -> Driver:
    drive = make(1, units=64, **settings)
    for number in range(3):
        drive.ready("a", 1)
        drive.reserved(f"r{number}", 1)
        drive.transferring(f"t{number}", 1)
        drive.ingested("b", 1)
        drive.abort(drive.reserved("b", 1), drained=True)
    drive.fail(drive.transferring("a", 1))
    return drive


@pytest.mark.parametrize("history", [100, 4, 1])
def test_a_page_is_the_slice_of_all_that_match(make: Make, history: int) -> None:
    machine = mixed(make, ended_history_max=history).machine
    wanted_states = [set(some) for size in range(1, 6) for some in combinations(State, size)]
    for states in wanted_states:
        for session_id in SESSIONS:
            matching = [
                session
                for session in machine.sessions()
                if session.state in states and session_id in ("", session.session_id)
            ]
            for offset in (0, 1, 3, len(matching), 2**63):
                for limit in (1, 2, 100):
                    page, total = machine.page(states, session_id, offset, limit)
                    assert total == len(matching)
                    assert page == matching[offset : offset + limit]


def test_the_counters_are_what_counting_gives(make: Make) -> None:
    drive = mixed(make, ended_history_max=2)
    statistics = drive.machine.statistics()
    counted = Counter(session.state for session in drive.machine.sessions())
    open_states = [state for state in State if state not in FINAL_STATES]
    assert statistics.sessions_by_state == {state.value: counted[state] for state in open_states}
    assert min(statistics.sessions_by_state.values()) > 0 and statistics.ended_history == 2
    assert statistics.quarantined_shards == 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda books, by: books.num_by_state.update({State.READY: 1 + by}), "in each state"),
        (lambda books, by: setattr(books.buffer, "num_quarantined", 1 + by), "shards in quarantine"),
    ],
)
def test_validate_finds_counters_that_do_not_agree(
    make: Make, spoil: Callable[[Books, int], None], message: str
) -> None:
    machine = mixed(make).machine
    machine.validate()
    spoil(machine.books, 1)
    with pytest.raises(InvariantBroken, match=message):
        machine.validate()
    spoil(machine.books, 0)


def test_what_has_ended_keeps_no_checksums_and_knows_a_repeated_commit_all_the_same(make: Make) -> None:
    drive = make(1)
    handle = drive.transferring("a", 1)
    first = drive.commit(handle)
    assert drive.session(handle).shards[0].packed_checksums
    drive.abort(handle)
    assert not drive.session(handle).shards[0].packed_checksums
    assert drive.commit(handle) == first
    others = tuple((one + 1, other) for one, other in ((1, 1), (2, 2)))
    assert refused(drive.commit(handle, checksums=others), Reason.STALE_HANDLE)


@given(
    st.lists(st.integers(1, 2_000), min_size=1, max_size=12),
    st.booleans(),
    st.integers(1, 3_000),
    st.sampled_from([64, 256, 4_096]),
)
def test_planes_lie_in_a_contiguous_slab_as_the_layout_says(
    widths: list[int], is_fused: bool, num_tokens: int, alignment_bytes: int
) -> None:
    layout = Layout(tuple(widths), () if is_fused else tuple(reversed(widths)))
    *offsets, size_bytes = plane_offsets_bytes(layout, num_tokens, alignment_bytes)
    slab = Extent(alignment_bytes * 7, size_bytes)
    told = shard_plane_offsets_bytes(layout, num_tokens, (slab,), alignment_bytes)
    assert told == tuple(slab.offset_bytes + offset for offset in offsets)

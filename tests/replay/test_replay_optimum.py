"""The bounds of somebody who knows the future, held against trying everything."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import generate, request, small, turns_of

from snapd.replay.chains import chain_turns
from snapd.replay.optimum import Piece, omniscient_tokens, optimal_tokens, packed_tokens, reusable_tokens
from snapd.replay.prefill import Prefilled
from snapd.replay.result import bounds, run_result
from snapd.replay.run import Run, run_trace
from snapd.replay.sync import Sync

pieces_strategy = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 4)).map(
        lambda t: Piece(t[0], t[0] + t[1], t[2])
    ),
    max_size=7,
)


def peak(pieces: list[Piece]) -> int:
    times = {piece.start_ns for piece in pieces}
    return max((sum(p.tokens for p in pieces if p.start_ns <= at < p.end_ns) for at in times), default=0)


def best_of_whole(pieces: list[Piece], capacity: int) -> int:
    return max(
        sum(piece.tokens for piece in chosen)
        for count in range(len(pieces) + 1)
        for chosen in combinations(pieces, count)
        if peak(list(chosen)) <= capacity
    )


@given(pieces_strategy, st.integers(0, 8))
def test_packing_is_the_best_of_all_choices_for_pieces_of_one_token(pieces, capacity):
    """Cut into single tokens, parts of pieces are whole pieces, and trying every choice is exact."""
    units = [piece._replace(tokens=1) for piece in pieces]
    assert packed_tokens(units, capacity) == best_of_whole(units, capacity)


@given(pieces_strategy, st.integers(0, 8))
def test_packing_is_never_below_the_best_choice_of_whole_pieces(pieces, capacity):
    found = packed_tokens(pieces, capacity)
    assert best_of_whole(pieces, capacity) <= found <= sum(piece.tokens for piece in pieces)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 3)).map(
            lambda t: Piece(t[0], t[0] + t[1], t[2])
        ),
        max_size=4,
    ),
    st.integers(0, 6),
)
def test_packing_in_parts_is_exact(pieces, capacity):
    """A piece of three tokens is three pieces of one token."""
    units = [piece._replace(tokens=1) for piece in pieces for _ in range(piece.tokens)]
    assert packed_tokens(pieces, capacity) == best_of_whole(units, capacity)


def test_a_piece_that_is_wanted_at_once_takes_no_room():
    assert packed_tokens([Piece(3, 3, 50), Piece(3, 2, 7)], 0) == 57


def test_what_ends_when_another_begins_leaves_it_the_room():
    assert packed_tokens([Piece(0, 5, 10), Piece(5, 9, 10)], 10) == 20


def test_what_is_wanted_last_goes_first():
    assert packed_tokens([Piece(0, 100, 10), Piece(1, 5, 10), Piece(6, 9, 10)], 10) == 20


def test_a_snapshot_that_serves_two_branches_is_kept_once():
    """The buffer holds one; somebody who knows the future keeps it for the second next turn too."""
    turns = turns_of(
        request(0, 1_300, 100, (1, 2)),
        request(10_000, 2_000, 9, (1, 2)),
        request(20_000, 2_100, 9, (1, 2, 3)),
    )
    prefilled = [Prefilled(0, 1), Prefilled(10, 11), Prefilled(20, 21)]
    run = Run("snapshot", Sync(), prefilled, [5, 15, 25], pool_tokens=0)
    assert [turn.parent for turn in turns] == [-1, 0, 0]
    assert optimal_tokens(run, turns, 1_399, 0.0) == 2 * 1_399
    assert optimal_tokens(run, turns, 1_000, 0.0) == 2 * 1_000
    # Nothing can be had before it is over the link.
    assert optimal_tokens(run, turns, 1_399, 0.01) == 1_399


def test_an_answer_that_does_not_exist_yet_cannot_be_reused():
    turns = turns_of(request(0, 1_300, 100, (1, 2)), request(400, 2_000, 9, (1, 2)))
    run = run_trace("snapshot", small(), turns)
    assert run.ended_ns[0] > run.prefilled[1].began_ns
    assert omniscient_tokens(run, turns, 1 << 30) == 1_300
    assert bounds(run, small(), turns).optimal_reused_tokens == 1_300


@settings(max_examples=15)
@given(
    st.integers(0, 500),
    st.sampled_from(["eager", "on-demand", "hybrid"]),
    st.sampled_from(["suffix", "hint", "session"]),
    st.sampled_from(["lru", "gdsf", "lfuda", "sieve", "clairvoyant"]),
    st.sampled_from([9_000, 40_000]),
)
def test_no_run_reuses_more_than_the_bounds(seed, ingest, send, policy, pool):
    model = small(ingest=ingest, send=send, policy=policy, kv_pool_tokens=pool, resend=False)
    turns = chain_turns(generate(seed, sessions=25))
    none = run_trace("none", model, turns)
    run = run_trace("snapshot", model, turns)
    reused = run_result(run, none, model, turns).reused_tokens
    limits = bounds(run, model, turns)
    assert reused <= limits.optimal_reused_tokens <= sum(reusable_tokens(turn, turns) for turn in turns)
    assert reused <= limits.omniscient_reused_tokens
    own = run_result(none, none, model, turns).reused_tokens
    assert own <= omniscient_tokens(none, turns, model.kv_pool_tokens)


def test_with_room_for_everything_the_bounds_are_all_that_existed_in_time():
    model = small(kv_pool_tokens=10_000_000, buffer_bytes=1 << 30)
    turns = chain_turns(generate(2))
    run = run_trace("snapshot", model, turns)
    limits = bounds(run, model, turns)
    reused = run_result(run, run_trace("none", model, turns), model, turns).reused_tokens
    assert limits.optimal_reused_tokens == reused
    # What was on its way from D when the next turn began cannot be had from the buffer.
    assert 0.98 < reused / limits.omniscient_reused_tokens <= 1

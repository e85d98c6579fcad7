"""Which request is the next turn of which."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_cases import generate, request, turns_of

from snapd.replay.chains import NO_TURN, chain_turns
from snapd.replay.trace import Request


def parents(*requests: Request) -> list[int]:
    return [turn.parent for turn in turns_of(*requests)]


def test_a_prompt_that_begins_with_another_and_its_answer_is_its_next_turn():
    assert parents(request(0, 1_100, 50, (0, 1)), request(9, 1_150, 50, (0, 1))) == [NO_TURN, 0]


def test_a_prompt_that_has_no_room_for_the_answer_is_not():
    assert parents(request(0, 1_100, 50, (0, 1)), request(9, 1_149, 50, (0, 1))) == [NO_TURN, NO_TURN]


def test_an_equal_prompt_is_no_next_turn():
    assert parents(request(0, 1_100, 50, (0, 1)), request(9, 1_100, 50, (0, 1))) == [NO_TURN, NO_TURN]


def test_without_an_answer_an_equal_prompt_goes_on():
    assert parents(request(0, 1_100, 0, (0, 1)), request(9, 1_100, 5, (0, 1))) == [NO_TURN, 0]


def test_a_prompt_below_one_block_is_gone_on_from_by_nothing():
    assert parents(request(0, 100, 5, (7,)), request(9, 900, 5, (7,))) == [NO_TURN, NO_TURN]


def test_a_prompt_that_ends_with_a_whole_block_counts_that_block():
    assert parents(request(0, 1_024, 50, (0, 1)), request(9, 2_000, 1, (0, 1))) == [NO_TURN, 0]
    assert parents(request(0, 1_024, 50, (0, 1)), request(9, 2_000, 1, (0, 2))) == [NO_TURN, NO_TURN]


def test_a_shared_system_prompt_links_nothing():
    """Block 0 is followed by five different blocks; with one less it would be somebody's own."""
    heads = [request(at, 700, 5, (0, 10 + at)) for at in range(4)]
    assert parents(*heads, request(9, 2_000, 5, (0, 99))) == [NO_TURN] * 5
    assert parents(*heads[1:], request(9, 2_000, 5, (0, 99)))[-1] == 2


def test_a_one_block_prompt_is_linked_as_long_as_few_go_on_from_it():
    assert parents(request(0, 700, 5, (5, 6)), request(9, 2_000, 5, (5, 7))) == [NO_TURN, 0]


def test_two_may_go_on_from_one_turn_and_the_second_is_a_session_of_its_own():
    turns = turns_of(
        request(0, 1_100, 50, (0, 1)),
        request(9, 2_000, 50, (0, 1, 2)),
        request(20, 2_000, 50, (0, 1, 3)),
        request(30, 3_000, 50, (0, 1, 3)),
    )
    assert [turn.parent for turn in turns] == [NO_TURN, 0, 0, 2]
    assert turns[0].children == [1, 2]
    ids = [turn.session_id for turn in turns]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_the_longest_earlier_turn_is_taken():
    turns = turns_of(
        request(0, 1_100, 10, (0, 1)), request(5, 1_700, 10, (0, 1, 2)), request(9, 2_500, 10, (0, 1, 2))
    )
    assert turns[2].parent == 1


def test_of_equally_long_ones_the_latest_is_taken():
    turns = turns_of(
        request(0, 1_100, 10, (0, 1)), request(5, 1_100, 20, (0, 1)), request(9, 2_500, 10, (0, 1))
    )
    assert turns[2].parent == 1


def test_a_longer_one_whose_answer_does_not_fit_is_passed_over_for_a_shorter_one():
    turns = turns_of(
        request(0, 1_100, 10, (0, 1)), request(5, 1_700, 900, (0, 1, 2)), request(9, 1_800, 1, (0, 1, 2))
    )
    assert turns[2].parent == 0


def test_the_last_block_alone_is_not_enough():
    assert parents(request(0, 1_100, 10, (0, 1)), request(9, 2_500, 10, (4, 1))) == [NO_TURN, NO_TURN]


def test_nothing_goes_on_from_the_future():
    assert parents(request(0, 2_500, 10, (0, 1)), request(9, 1_100, 10, (0, 1))) == [NO_TURN, NO_TURN]


def test_named_sessions_decide_whatever_the_blocks_say():
    turns = turns_of(
        request(0, 1_100, 10, (0, 1), session_id="a"),
        request(5, 1_100, 10, (0, 1), session_id="b"),
        request(9, 2_500, 10, (0, 1), session_id="a"),
    )
    assert [turn.parent for turn in turns] == [NO_TURN, NO_TURN, 0]
    assert turns[0].session_id == turns[2].session_id != turns[1].session_id


def test_a_named_session_without_blocks_has_the_ones_that_its_history_gives():
    turns = turns_of(
        Request(0, 1_100, 10, None, "a"), Request(1, 2_000, 10, None, "a"), Request(2, 1_100, 10, None, 7)
    )
    first, second, other = turns
    assert second.blocks[: len(first.blocks)] == first.blocks
    assert len(second.blocks) == 3
    assert not set(other.blocks) & set(second.blocks)


def test_a_named_session_whose_history_was_cut_begins_anew():
    first, second = turns_of(Request(0, 3_000, 10, None, "a"), Request(1, 1_100, 10, None, "a"))
    assert second.parent == NO_TURN
    assert not set(first.blocks) & set(second.blocks)
    assert first.session_id != second.session_id


def test_kv_exists_for_all_but_the_last_sampled_token():
    (turn,) = turns_of(request(0, 700, 50, ()))
    assert (turn.kv_tokens, turn.tail_tokens) == (749, 700 - 512)
    (turn,) = turns_of(request(0, 700, 0, ()))
    assert turn.kv_tokens == 700


@given(st.integers(0, 1_000))
def test_links_point_back_and_sessions_are_chains(seed):
    turns = chain_turns(generate(seed, sessions=12))
    for turn in turns:
        assert turn.parent < turn.index
        assert all(turns[child].parent == turn.index for child in turn.children)
        if turn.parent != NO_TURN:
            before = turns[turn.parent]
            assert turn.blocks[: len(before.blocks)] == before.blocks
            assert turn.input_tokens >= before.end_tokens
    tails = [(turn.session_id, turn.parent) for turn in turns]
    assert len(set(tails)) == len(tails)


def test_the_generated_sessions_are_found():
    turns = chain_turns(generate(3, sessions=40))
    assert sum(turn.parent != NO_TURN for turn in turns) == pytest.approx(len(turns) - 40, abs=3)

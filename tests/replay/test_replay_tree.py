"""P's kv_pool and tree: no slot is lost, and what goes goes in the right order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_cases import generate, request, turns_of

from snapd.errors import InvariantBroken
from snapd.replay.chains import chain_turns
from snapd.replay.tree import PrefixTree


def prefill(tree: PrefixTree, turn) -> int:
    """Prefill a turn, and return what was resident of its prompt."""
    match = tree.match_prompt(turn)
    slots = turn.input_tokens - match.tokens
    assert tree.allocate(slots)
    tree.insert_prompt(turn, match, slots)
    tree.validate()
    return match.tokens


def sync(tree: PrefixTree, turn) -> int:
    """Bring a turn's rest to P, and return the slots that it took."""
    resident = tree.match_turn(turn)
    slots = turn.kv_tokens - resident.tokens
    assert tree.allocate(slots)
    tree.insert_synced(turn, resident, slots, turn.kv_tokens)
    tree.validate()
    return slots


def chain(*lengths: tuple[int, int]):
    return turns_of(
        *(request(at * 100, tokens, answer, (1, 2)) for at, (tokens, answer) in enumerate(lengths))
    )


def test_a_prompt_is_resident_but_for_its_last_token():
    (turn,) = turns_of(request(0, 1_300, 9, ()))
    tree = PrefixTree(5_000, [turn])
    assert prefill(tree, turn) == 0
    assert (tree.free_tokens, tree.unused_tokens) == (3_700, 1_300)
    match = tree.match_prompt(turn)
    assert match.tokens == 1_024
    tree.release(turn, match)


def test_a_prompt_of_whole_blocks_computes_one_token_again():
    (turn,) = turns_of(request(0, 1_024, 9, ()))
    tree = PrefixTree(5_000, [turn])
    prefill(tree, turn)
    assert prefill(tree, turn) == 1_023
    assert tree.free_tokens == 5_000 - 1_024


def test_without_a_sync_a_next_turn_finds_the_prompt_and_with_one_the_answer_too():
    first, second = chain((1_300, 100), (2_000, 9))
    tree = PrefixTree(5_000, [first, second])
    prefill(tree, first)
    assert prefill(tree, second) == 1_300
    tree = PrefixTree(5_000, [first, second])
    prefill(tree, first)
    assert sync(tree, first) == 99
    match = tree.match_prompt(second)
    assert (match.tokens, match.unsynced_tokens) == (1_399, 1_300)
    tree.release(second, match)
    assert prefill(tree, second) == 1_399
    assert tree.free_tokens == 5_000 - 2_000


def test_a_branch_finds_what_the_first_one_left():
    first, second, branch = turns_of(
        request(0, 1_300, 300, (1, 2)), request(100, 2_000, 9, (1, 2, 3)), request(200, 2_005, 9, (1, 2, 3))
    )
    turns = [first, second, branch]
    tree = PrefixTree(9_000, turns)
    prefill(tree, first)
    sync(tree, first)
    prefill(tree, second)
    # The tail is part of the second turn's third block now.
    assert prefill(tree, branch) == 1_536


def test_two_branches_at_once_share_the_tail_and_lose_no_slot():
    first, left, right, third = turns_of(
        request(0, 1_300, 100, (1, 2)),
        request(100, 2_000, 90, (1, 2, 3)),
        request(200, 2_100, 9, (1, 2, 4)),
        request(300, 2_050, 9, (1, 2, 3)),
    )
    assert [turn.parent for turn in (left, right, third)] == [0, 0, 0]
    tree = PrefixTree(9_000, [first, left, right, third])
    prefill(tree, first)
    sync(tree, first)
    matches = [(turn, tree.match_prompt(turn)) for turn in (left, right)]
    for turn, match in matches:
        assert match.tokens == 1_399
        assert tree.allocate(turn.input_tokens - match.tokens)
    for turn, match in matches:
        tree.insert_prompt(turn, match, turn.input_tokens - match.tokens)
        tree.validate()
        # The tail lies beside the third block, not after it.
        again = tree.match_prompt(third)
        assert again.tokens == 1_536
        tree.release(third, again)
    assert tree.in_flight_tokens == 0


def test_a_sync_that_comes_after_the_next_turn_finds_everything_there():
    first, second = chain((1_300, 100), (2_000, 9))
    tree = PrefixTree(5_000, [first, second])
    prefill(tree, first)
    prefill(tree, second)
    assert sync(tree, first) == 0
    assert tree.free_tokens == 3_000
    # No tail without slots: what it stood for goes with the second turn's blocks.
    assert (first.index,) not in tree._nodes


def test_a_sync_puts_back_what_was_evicted():
    first, second = chain((1_300, 100), (2_000, 9))
    tree = PrefixTree(2_000, [first, second])
    prefill(tree, first)
    assert tree.allocate(2_000)
    tree.give_back(2_000)
    assert sync(tree, first) == 1_399
    match = tree.match_prompt(second)
    assert (match.tokens, match.unsynced_tokens) == (1_399, 0)
    tree.release(second, match)


def test_the_least_recently_used_goes_first_and_leaves_before_their_parents():
    old, new = turns_of(request(0, 1_024, 9, (1, 2)), request(100, 1_024, 9, (5, 6)))
    tree = PrefixTree(2_048, [old, new])
    prefill(tree, old)
    prefill(tree, new)
    prefill(tree, old)
    assert tree.allocate(512)
    tree.give_back(512)
    assert tree.match_prompt(new).tokens == 512
    assert tree.match_prompt(old).tokens == 1_023


def test_what_is_in_use_is_not_evicted_and_nothing_is_when_it_would_not_help():
    (turn,) = turns_of(request(0, 1_024, 9, ()))
    tree = PrefixTree(2_000, [turn])
    prefill(tree, turn)
    match = tree.match_prompt(turn)
    assert not tree.allocate(1_500)
    assert (tree.free_tokens, tree.evicted_tokens) == (976, 0)
    tree.release(turn, match)
    assert tree.allocate(1_500)
    assert tree.evicted_tokens == 1_024


def test_validate_sees_a_lost_slot():
    tree = PrefixTree(100, [])
    tree.free_tokens -= 1
    with pytest.raises(InvariantBroken):
        tree.validate()


def test_a_prompt_that_repeats_a_block_loses_no_slot():
    (turn,) = turns_of(request(0, 1_536, 9, (7, 8, 7)))
    tree = PrefixTree(5_000, [turn])
    prefill(tree, turn)
    prefill(tree, turn)


@given(st.integers(0, 300), st.integers(12_000, 60_000), st.lists(st.integers(0, 3), min_size=1))
def test_whatever_happens_in_any_order_no_slot_is_lost(seed, pool, order):
    turns = chain_turns(generate(seed, sessions=8))
    tree = PrefixTree(pool, turns)
    under_way = []
    for step, turn in enumerate(turns):
        match = tree.match_prompt(turn)
        slots = turn.input_tokens - match.tokens
        if tree.allocate(slots):
            under_way.append((turn, match, slots))
        else:
            tree.release(turn, match)
        what = order[step % len(order)]
        while len(under_way) > what:
            done, match, slots = under_way.pop(0)
            tree.insert_prompt(done, match, slots)
            tree.validate()
            resident = tree.match_turn(done)
            lacking = max(0, done.kv_tokens - resident.tokens)
            if what % 2 and tree.allocate(lacking):
                tree.insert_synced(done, resident, lacking, done.kv_tokens)
            else:
                tree.release(done, resident)
            tree.validate()

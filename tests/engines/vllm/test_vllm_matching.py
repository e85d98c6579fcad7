"""Which tokens go, and which of a snapshot's tokens a request takes."""

from typing import Any

import pytest

from snapd.engines.vllm.matching import Choice, choose, is_orphan, loadable_tokens, pushable_tokens
from snapd.wire import LookupRep

BLOCK = 32


def found(
    num_tokens: int = 288, *, start: int = 0, matched: int = 288, session: str = "s", **changes: Any
) -> LookupRep:
    fields: dict[str, Any] = {
        "id": 1, "slab_handle": 7, "session_id": session, "num_tokens": num_tokens, "token_start": start,
        "matched_tokens": matched, "resident_hint_tokens": 0, "ranks": (0,),
    }  # fmt: skip
    return LookupRep(**(fields | changes))


def choice_of(reply: LookupRep, **changes: Any) -> Choice | None:
    asked: dict[str, Any] = {
        "is_by_session": False, "session_id": "s", "num_tokens": 340, "resident_tokens": 0,
        "block_tokens": BLOCK, "ranks": (0,), "least_tokens": 1,
    }  # fmt: skip
    return choose(reply, **(asked | changes))


@pytest.mark.parametrize(
    ("num_tokens", "computed", "wanted"),
    [(300, 299, 288), (289, 288, 288), (288, 288, 256), (300, 310, 288), (300, 40, 32), (1, 0, 0), (0, 0, 0)],
)
def test_d_sends_whole_blocks_without_the_token_that_was_sampled_last(
    num_tokens: int, computed: int, wanted: int
) -> None:
    assert pushable_tokens(num_tokens, computed, BLOCK) == wanted


@pytest.mark.parametrize(("num_tokens", "wanted"), [(340, 320), (321, 320), (320, 288), (32, 0), (0, 0)])
def test_p_leaves_a_token_to_compute(num_tokens: int, wanted: int) -> None:
    assert loadable_tokens(num_tokens, BLOCK) == wanted


def test_a_snapshot_that_the_prompt_contains_is_taken_whole_and_all_its_tokens_compared() -> None:
    assert choice_of(found()) == Choice(
        slab_handle=7, session_id="s", token_start=0, wanted_tokens=288, checked_tokens=288
    )


def test_of_another_session_only_a_snapshot_that_the_prompt_contains_is_taken() -> None:
    assert choice_of(found(session="other")) is not None
    assert choice_of(found(matched=256, session="other")) is None
    assert choice_of(found(matched=256, session="other"), session_id="") is None


def test_of_its_own_session_what_the_prompt_shares_is_taken_and_no_more_compared() -> None:
    choice = choice_of(found(matched=96))
    assert choice is not None and (choice.wanted_tokens, choice.checked_tokens) == (96, 96)


def test_a_prompt_that_ends_with_the_snapshot_leaves_its_last_block_and_is_compared_whole() -> None:
    choice = choice_of(found(), num_tokens=288)
    assert choice is not None and (choice.wanted_tokens, choice.checked_tokens) == (256, 288)


def test_only_whole_blocks_are_taken_of_a_snapshot_that_ends_inside_one() -> None:
    choice = choice_of(found(300, matched=300))
    assert choice is not None and (choice.wanted_tokens, choice.checked_tokens) == (288, 300)


def test_what_was_found_by_name_is_taken_if_all_of_it_can_be_compared() -> None:
    assert choice_of(found(matched=0), is_by_session=True) is not None
    assert choice_of(found(384, matched=384), is_by_session=True) is None


@pytest.mark.parametrize(("resident", "least", "is_taken"), [
    (256, 1, True), (288, 1, False), (320, 1, False), (256, 32, True), (256, 33, False), (288, 0, False),
])  # fmt: skip
def test_what_saves_too_little_is_left(resident: int, least: int, is_taken: bool) -> None:
    assert (choice_of(found(), resident_tokens=resident, least_tokens=least) is not None) is is_taken


def test_a_suffix_needs_all_before_it() -> None:
    suffix = found(160, start=128, matched=288)
    assert choice_of(suffix, resident_tokens=96) is None
    choice = choice_of(suffix, resident_tokens=128)
    assert choice is not None and (choice.token_start, choice.wanted_tokens) == (128, 288)
    assert is_orphan(suffix, 340, 96)
    assert not is_orphan(suffix, 340, 128)
    assert not is_orphan(suffix, 287, 96), "its tokens cannot be compared"
    assert not is_orphan(found(slab_handle=0, start=128), 340, 96)


@pytest.mark.parametrize("ranks", [(0, 1), (1,), ()])
def test_shards_of_other_ranks_are_never_taken(ranks: tuple[int, ...]) -> None:
    """With another number of ranks a shard of the same width may hold other heads."""
    assert choice_of(found(ranks=ranks)) is None


def test_nothing_found_is_nothing_taken() -> None:
    assert choice_of(found(slab_handle=0)) is None

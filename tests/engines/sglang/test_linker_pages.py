"""Which snapshots cover a prompt's pages, when all that is known of a page is its key."""

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapd.engines.sglang_pages import LOOKUPS_MAX, FoundRun, Segment, cover, cut, run_name


def chain(text: str) -> tuple[str, ...]:
    """Return a key for every character, chained to those before it, as SGLang chains pages."""
    keys, parent = [], b""
    for character in text:
        parent = hashlib.sha256(parent + character.encode()).digest()
        keys.append(parent.hex())
    return tuple(keys)


class Daemon:
    """Finds snapshots as the daemon does: the one with the farthest key; the newest of several."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, ...]] = []
        self.asked = 0

    def push(self, text: str, start: int = 0) -> int:
        """Have pages ``[start, len(text))`` of a prompt; return the handle."""
        self.runs.append(chain(text)[start:])
        return len(self.runs)

    def name(self, handle: int) -> str:
        return run_name(None, self.runs[handle - 1])

    def find(self, keys: Sequence[str]) -> FoundRun | None:
        assert keys, "the daemon refuses to look nothing up"
        self.asked += 1
        for matched in range(len(keys), 0, -1):
            for handle in range(len(self.runs), 0, -1):
                run = self.runs[handle - 1]
                if keys[matched - 1] in run:
                    return FoundRun(
                        slab_handle=handle,
                        name=self.name(handle),
                        num_pages=len(run),
                        matched_pages=matched,
                    )
        return None


def used(segments: Sequence[Segment]) -> list[tuple[int, int, int, bool]]:
    return [(s.slab_handle, s.first_page, s.num_pages, s.is_rest_wanted) for s in segments]


def test_a_snapshot_that_begins_where_p_ends_is_used_whole() -> None:
    daemon = Daemon()
    handle = daemon.push("promptanswer", start=6)
    segments = cover(chain("promptanswer and more")[6:], daemon.find)
    assert used(segments) == [(handle, 0, 6, False)]
    assert segments[0].digest == chain("promptanswer")[-1]


def test_pages_that_p_has_are_left_out() -> None:
    daemon = Daemon()
    handle = daemon.push("promptanswer")
    assert used(cover(chain("promptanswer and more")[6:], daemon.find)) == [(handle, 6, 6, False)]


def test_a_prompt_that_goes_another_way_uses_what_is_equal_and_leaves_the_rest() -> None:
    daemon = Daemon()
    handle = daemon.push("promptanswer", start=6)
    segments = cover(chain("promptanswXX")[6:], daemon.find)
    assert used(segments) == [(handle, 0, 4, True)]
    assert chain("promptanswer")[-1].startswith(segments[0].digest) and segments[0].digest


def test_a_run_of_which_neither_end_is_known_is_not_used() -> None:
    """Where its pages lie cannot be told; to guess would be another page's bytes."""
    daemon = Daemon()
    daemon.push("promptanswer")
    assert cover(chain("promptanswXX")[6:], daemon.find) == ()


def test_several_snapshots_are_put_together() -> None:
    daemon = Daemon()
    second = daemon.push("onetwothree", start=3)
    first = daemon.push("one")
    third = daemon.push("onetwothreefour", start=11)
    segments = cover(chain("onetwothreefour!"), daemon.find)
    assert used(segments) == [(first, 0, 3, False), (second, 0, 8, False), (third, 0, 4, False)]


def test_what_overlaps_is_taken_once() -> None:
    daemon = Daemon()
    first, second = daemon.push("abcdef"), daemon.push("abcdefghi", start=3)
    segments = cover(chain("abcdefghi"), daemon.find)
    assert sum(segment.num_pages for segment in segments) == 9
    assert used(segments) == [(first, 0, 3, True), (second, 0, 6, False)]


def test_nothing_behind_a_gap_is_used() -> None:
    daemon = Daemon()
    first = daemon.push("one")
    daemon.push("onetwothree", start=6)
    assert used(cover(chain("onetwothree"), daemon.find)) == [(first, 0, 3, False)]


@pytest.mark.parametrize("name", ["", "chat-17", "x/short-short", f"x/{'0' * 32}{'1' * 33}"])
def test_a_snapshot_with_another_kind_of_name_is_not_used(name: str) -> None:
    def find(keys: Sequence[str]) -> FoundRun | None:
        return FoundRun(slab_handle=1, name=name, num_pages=len(keys), matched_pages=len(keys))

    assert cover(chain("prompt"), find) == ()


def test_ends_that_contradict_each_other_are_not_believed() -> None:
    """Five pages from the first to the last key, and the daemon says six: one of the two is wrong."""
    keys = chain("prompt")
    found = FoundRun(slab_handle=1, name=run_name(None, keys[:5]), num_pages=6, matched_pages=5)
    assert cover(keys, lambda _: found) == ()


def test_a_match_outside_the_run_is_not_believed() -> None:
    keys = chain("prompt")
    found = FoundRun(slab_handle=1, name=run_name(None, [keys[0], "f" * 64]), num_pages=2, matched_pages=6)
    assert cover(keys, lambda _: found) == ()


def test_how_often_the_daemon_is_asked_is_bounded() -> None:
    daemon = Daemon()
    text = "x" * 40
    for end in range(1, 41):
        daemon.push(text[:end], start=end - 1)
    assert len(cover(chain(text), daemon.find)) < 40
    assert daemon.asked == LOOKUPS_MAX


def test_a_miss_costs_one_question() -> None:
    daemon = Daemon()
    assert cover(chain("prompt"), daemon.find) == ()
    assert daemon.asked == 1


def test_fewer_pages_than_were_found_may_be_wanted() -> None:
    daemon = Daemon()
    first, second = daemon.push("one"), daemon.push("onetwo", start=3)
    segments = cover(chain("onetwo"), daemon.find)
    assert used(cut(segments, 4)) == [(first, 0, 3, False), (second, 0, 1, True)]
    assert used(cut(segments, 3)) == [(first, 0, 3, False)]
    assert cut(segments, 6) == segments


def test_a_name_fits_however_long_the_session_id_is() -> None:
    assert len(run_name("é" * 500, chain("ab")).encode()) <= 512
    assert run_name("chat/1", chain("ab")).startswith("chat/1/")


@given(
    st.text("ab", min_size=1, max_size=12),
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=12), st.integers(0, 11)), max_size=6),
    st.integers(0, 6),
)
def test_every_page_that_is_used_has_its_own_key(
    prompt: str, pushes: list[tuple[str, int]], held: int
) -> None:
    """Whatever was pushed, and whatever P holds: the n-th page used of a run is the n-th key asked for."""
    daemon = Daemon()
    for text, start in pushes:
        if start < len(text):
            daemon.push(text, start)
    keys = chain(prompt)[held:]
    at = 0
    for segment in cover(keys, daemon.find):
        run = daemon.runs[segment.slab_handle - 1]
        stop = segment.first_page + segment.num_pages
        assert run[segment.first_page : stop] == keys[at : at + segment.num_pages]
        assert segment.is_rest_wanted == (stop < len(run))
        assert run[-1].startswith(segment.digest)
        at += segment.num_pages

"""How long a peer rests that failed."""

import pytest

from snapd.errors import PeerResting
from snapd.transport.backoff import REST_MAX_MS, Backoff


class Clock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.now_ms = 5_000

    def __call__(self) -> float:
        return self.now_ms / 1_000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backoff(clock: Clock) -> Backoff:
    return Backoff(clock=clock)


def rest_ms(backoff: Backoff, peer: str = "p") -> int:
    try:
        backoff.begin(peer)
    except PeerResting as error:
        assert str(error.retry_after_ms) in str(error)
        return error.retry_after_ms
    return 0


def fail(backoff: Backoff, clock: Clock, *, may_retry_once: bool = False) -> int:
    """Let the next try fail, as soon as there may be one; return how long the peer rests then."""
    clock.now_ms += rest_ms(backoff)
    backoff.failed("p", backoff.begin("p"), may_retry_once=may_retry_once)
    return rest_ms(backoff)


def test_the_rest_doubles_from_100_ms_to_30_s_and_stays_there(backoff: Backoff, clock: Clock) -> None:
    rests = [fail(backoff, clock) for _ in range(12)]
    assert rests == [
        100,
        200,
        400,
        800,
        1600,
        3200,
        6400,
        12_800,
        25_600,
        REST_MAX_MS,
        REST_MAX_MS,
        REST_MAX_MS,
    ]


def test_a_peer_is_never_given_up(backoff: Backoff, clock: Clock) -> None:
    for _ in range(2_000):
        assert fail(backoff, clock) <= REST_MAX_MS
    clock.now_ms += REST_MAX_MS
    assert rest_ms(backoff) == 0


def test_it_rests_until_the_time_is_over_and_not_a_millisecond_longer(backoff: Backoff, clock: Clock) -> None:
    assert fail(backoff, clock) == 100
    clock.now_ms += 99
    assert rest_ms(backoff) == 1
    clock.now_ms += 1
    assert rest_ms(backoff) == 0


def test_the_first_success_makes_all_forgotten(backoff: Backoff, clock: Clock) -> None:
    for _ in range(5):
        fail(backoff, clock)
    backoff.succeeded("p")
    assert rest_ms(backoff) == 0
    assert len(backoff) == 0
    assert fail(backoff, clock) == 100


def test_the_first_failure_may_be_tried_again_at_once_and_the_second_rests(
    backoff: Backoff, clock: Clock
) -> None:
    assert [fail(backoff, clock, may_retry_once=True) for _ in range(4)] == [0, 100, 200, 400]
    backoff.succeeded("p")
    assert fail(backoff, clock, may_retry_once=True) == 0


def test_a_failure_after_one_that_rested_is_not_tried_again_at_once(backoff: Backoff, clock: Clock) -> None:
    assert fail(backoff, clock) == 100
    assert fail(backoff, clock, may_retry_once=True) == 200


def test_what_was_under_way_together_fails_once(backoff: Backoff) -> None:
    rounds = [backoff.begin("p") for _ in range(10)]
    for begun_in_round in rounds:
        backoff.failed("p", begun_in_round)
    assert rest_ms(backoff) == 100


def test_what_began_before_the_last_failure_does_not_count_later_either(
    backoff: Backoff, clock: Clock
) -> None:
    early = backoff.begin("p")
    fail(backoff, clock)
    fail(backoff, clock)
    assert rest_ms(backoff) == 200
    backoff.failed("p", early)
    assert rest_ms(backoff) == 200


def test_peers_do_not_touch_each_other(backoff: Backoff) -> None:
    backoff.failed("p", backoff.begin("p"))
    assert rest_ms(backoff, "q") == 0
    backoff.succeeded("q")
    assert rest_ms(backoff) == 100


def test_only_so_many_peers_are_remembered_those_that_failed_last(clock: Clock) -> None:
    backoff = Backoff(peers_max=3, clock=clock)
    for peer in ("a", "b", "c"):
        backoff.failed(peer, backoff.begin(peer))
    clock.now_ms += 100
    backoff.failed("a", backoff.begin("a"))
    backoff.failed("d", backoff.begin("d"))
    assert len(backoff) == 3
    assert [rest_ms(backoff, peer) for peer in ("a", "b", "d")] == [200, 0, 100]
    clock.now_ms += 100
    backoff.failed("b", backoff.begin("b"))
    assert rest_ms(backoff, "b") == 100, "it was forgotten"

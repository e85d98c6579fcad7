"""Whatever becomes of attempts, a router that applies the events holds the pages of the READY snapshots."""

import pytest
from events_driver import PAGE, EventsDriver
from hypothesis import given, settings
from hypothesis import strategies as st

from snapd.core import events as e
from snapd.core.events import State
from snapd.errors import Reason

# Sessions branch off each other, so that snapshots share pages in every way.
TREE = [tuple(range(100, 140)), (*range(100, 112), *range(200, 228)), (*range(100, 124), *range(300, 316))]
SMALL = {"kv_events_pages_max": 8, "kv_events_queue_bytes_max": 64 << 10}

OFFER = st.tuples(
    st.just("offer"),
    st.integers(0, 3),  # session
    st.sampled_from(TREE),
    st.integers(1, 40),  # tokens
    st.integers(0, 5),  # pages before the first
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
OTHER = st.tuples(
    st.sampled_from(["commit", "fail", "abort", "lease", "vote", "vote no", "keep", "fire", "advance"]),
    st.integers(0, 7),
    st.integers(0, 1),
)


class Lives:
    """Runs a story, one step after the other."""

    def __init__(self, ranks: int, config: dict[str, int] | None = None) -> None:
        self.driver = EventsDriver(
            ranks, units=10, config=config, ready_ttl_ms=900, lease_ms=300, quarantine_ms=200,
            reserve_timeout_ms=500, transfer_timeout_ms=500,
        )  # fmt: skip
        self.leases: list[tuple[int, int, int]] = []

    def step(self, kind: str, *rest: object) -> None:
        if kind == "offer":
            self._offer(*rest)  # type: ignore[arg-type]
            return
        number, rank = rest
        assert isinstance(number, int) and isinstance(rank, int)
        driver = self.driver
        handles = [*driver.machine.books.open]
        handle = handles[number % len(handles)] if handles else 1
        rank %= len(driver.ranks)
        lease = self.leases[number % len(self.leases)] if self.leases else (1, 0, 1)
        match kind:
            case "commit" if handles and driver.state(handle) is not State.READY:
                driver.commit(handle, rank)
            case "fail":
                driver.fail(handle, reason=Reason.TRANSFER_FAILED, drained=True)
            case "abort":
                driver.abort(handle, drained=bool(rank))
            case "lease":
                granted = driver.lease(handle, rank)
                if isinstance(granted, e.Leased):
                    self.leases.append((handle, rank, granted.lease_id))
            case "vote":
                driver.vote(*lease)
            case "vote no":
                driver.vote_no(*lease, Reason.CHECKSUM_MISMATCH)
            case "keep":
                driver.vote_no(*lease, Reason.ALLOC_FAILED_ON_FINALIZE, keep=True)
            case "fire" if driver.timers:
                driver.fire(sorted(driver.timers, key=repr)[number % len(driver.timers)])
            case "advance":
                driver.advance(100 * number)

    def _offer(
        self, session: int, tokens: tuple[int, ...], num_tokens: int, pages: int,
        keys: bool, token_ids: bool, hashes: bool, hint: bool,
    ) -> None:  # fmt: skip
        token_start = min(pages * PAGE, (num_tokens - 1) // PAGE * PAGE)
        handle = self.driver.offer(
            f"s{session}", tokens[:num_tokens], token_start=token_start, send_keys=keys,
            send_token_ids=token_ids, send_hashes=hashes, use_resident_hint=hint,
        )  # fmt: skip
        # Mostly, as many stories would never come to anything.
        if handle and session:
            self.driver.make_ready(handle)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(OFFER, OTHER), max_size=25), st.integers(1, 2))
def test_a_router_holds_exactly_the_pages_of_the_ready_snapshots(story, ranks):
    lives = Lives(ranks)
    driver = lives.driver
    for step in story:
        lives.step(*step)
        driver.check()
    seen = len(driver.passed_on)
    assert driver.passed_on == driver.records[-seen:] if seen else not driver.told
    driver.close()
    assert driver.outlet.consumer.pages == {}
    _nothing_is_kept(driver)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(OFFER, OTHER), max_size=25), st.integers(0, 40))
def test_where_there_is_no_room_a_router_holds_less_and_never_more(story, busy_at):
    lives = Lives(1, SMALL)
    driver = lives.driver
    for number, step in enumerate(story):
        # The queue is full for some steps: stores are left out, removals never.
        driver.outlet.queued_bytes = (64 << 10) * (busy_at <= number < busy_at + 5)
        lives.step(*step)
        found = driver.outlet.consumer.pages.keys()
        assert found <= driver.wanted().keys()
        assert len(found) <= driver.kv_events.ledger.num_pages <= 8
    driver.close()
    assert driver.outlet.consumer.pages == {}
    _nothing_is_kept(driver)


def _nothing_is_kept(driver: EventsDriver) -> None:
    kv_events = driver.kv_events
    assert (kv_events.ledger.num_pages, kv_events.ledger.num_told, kv_events.ledger.num_snapshots) == (
        0,
        0,
        0,
    )
    assert not kv_events._facts and not kv_events._facts_bytes
    assert kv_events.stored_pages == kv_events.removed_pages


@pytest.mark.parametrize("ending", ["ingested", "evicted", "expired", "aborted", "superseded", "stopped"])
def test_each_way_in_which_a_ready_snapshot_ends_takes_its_pages_back(ending):
    driver = EventsDriver(units=6, ready_ttl_ms=20_000)
    handle = driver.make_ready(driver.offer("s", TREE[0][:16]))
    assert len(driver.outlet.consumer.pages) == 4
    match ending:
        case "ingested":
            driver.vote(handle, 0, driver.lease(handle).lease_id)
        case "evicted":
            # The arena has room for three; the oldest makes room.
            for session in ("t", "u", "v"):
                driver.make_ready(driver.offer(session, TREE[1][16:20], send_keys=False))
        case "expired":
            driver.advance(20_000)
        case "aborted":
            driver.abort(handle)
        case "superseded":
            driver.make_ready(driver.offer("s", TREE[0][:16], send_keys=False))
        case "stopped":
            driver.post(e.StopAsked)
    assert driver.session(handle).reason == {
        "ingested": Reason.OK, "evicted": Reason.EVICTED, "expired": Reason.READY_EXPIRED,
        "aborted": Reason.CLIENT_ABORT, "superseded": Reason.SUPERSEDED, "stopped": Reason.DAEMON_STOPPED,
    }[ending]  # fmt: skip
    assert driver.outlet.consumer.pages == {}


def test_a_newer_snapshot_of_a_session_tells_its_new_pages_only_and_keeps_the_shared_ones():
    driver = EventsDriver()
    driver.make_ready(driver.offer("s", TREE[0][:16]))
    driver.make_ready(driver.offer("s", TREE[0][:24]))
    first, second = driver.outlet.changes
    assert len(first.hashes) == 4 and len(second.hashes) == 2
    assert second.parent == first.hashes[-1]
    driver.check()


def test_what_is_being_read_is_still_there():
    driver = EventsDriver(ready_ttl_ms=20_000, lease_ms=10_000)
    handle = driver.make_ready(driver.offer("s", TREE[0][:16]))
    driver.lease(handle)
    driver.abort(handle)
    driver.check()
    assert len(driver.outlet.consumer.pages) == 4
    driver.advance(10_000)
    assert driver.outlet.consumer.pages == {}

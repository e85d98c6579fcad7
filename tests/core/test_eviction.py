"""Every policy against a naive model that scans everything, and what the core tells an order."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from core_driver import TWO_PLANES, Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from snapd.core import eviction as ev
from snapd.core.events import State
from snapd.core.session import Settings
from snapd.errors import InvariantBroken, Reason
from snapd.layout import fingerprint

Make = Callable[..., Driver]
POLICIES = get_args(ev.PolicyName)
HISTORY_MAX = 3


def snapshot(session: str = "s", tokens: int = 16, start: int = 0, **ranks: int) -> ev.Snapshot:
    sizes = {int(rank[1:]): size_bytes for rank, size_bytes in ranks.items()} or {0: 512}
    return ev.Snapshot(("layout", session), start, tokens, sizes)


def order_of(policy: str = "lru", **sessions: ev.Snapshot) -> Any:
    """Return an order in which every snapshot was offered; the handles are 1, 2, ..."""
    order = ev.victim_order(policy, HISTORY_MAX)  # type: ignore[arg-type]
    for handle, one in enumerate(sessions.values(), start=1):
        order.insert(handle, one)
        order.offer(handle)
    return order


# --- naive models: plain lists, scanned whole every time --------------------------------------------------


class Naive:
    """Who is known and who is a candidate. ``order`` says which of them goes first."""

    def __init__(self) -> None:
        self.known: dict[int, ev.Snapshot] = {}
        self.candidates: set[int] = set()

    def insert(self, handle: int, one: ev.Snapshot) -> None:
        self.known[handle] = one
        self.used(handle)

    def use(self, handle: int) -> None:
        if handle in self.known:
            self.used(handle)

    def used(self, handle: int) -> None: ...

    def offer(self, handle: int) -> None:
        self.candidates.add(handle)

    def withhold(self, handle: int) -> None:
        self.candidates.discard(handle)

    def discard(self, handle: int, evicted: bool) -> None:
        self.withhold(handle)
        self.known.pop(handle, None)

    def order(self) -> list[int]:
        raise NotImplementedError


class NaiveLru(Naive):
    def __init__(self) -> None:
        super().__init__()
        self.list: list[int] = []

    def offer(self, handle: int) -> None:
        if handle not in self.list:
            self.list.append(handle)
        super().offer(handle)

    def withhold(self, handle: int) -> None:
        super().withhold(handle)
        self.list = [other for other in self.list if other != handle]

    def used(self, handle: int) -> None:
        if handle in self.list:
            self.list = [other for other in self.list if other != handle] + [handle]

    def order(self) -> list[int]:
        return self.list


class NaiveLfuda(Naive):
    def __init__(self) -> None:
        super().__init__()
        self.age = 0.0
        self.uses: list[tuple[Any, int]] = []
        self.priority: dict[int, tuple[float, int]] = {}
        self.events = 0

    def worth(self, one: ev.Snapshot) -> float:
        return 1.0

    def used(self, handle: int) -> None:
        self.events += 1
        one = self.known[handle]
        count = dict(self.uses).get(one.session, 0) + 1
        self.uses = [pair for pair in self.uses if pair[0] != one.session] + [(one.session, count)]
        self.uses = self.uses[-HISTORY_MAX:]
        self.priority[handle] = (self.age + count * self.worth(one), self.events)

    def discard(self, handle: int, evicted: bool) -> None:
        super().discard(handle, evicted)
        if evicted:
            self.age = max(self.age, self.priority[handle][0])

    def order(self) -> list[int]:
        return sorted(self.candidates, key=self.priority.__getitem__)


class NaiveGdsf(NaiveLfuda):
    def worth(self, one: ev.Snapshot) -> float:
        middle = (one.token_start + one.token_start + one.num_tokens) / 2
        return one.num_tokens * (1 + middle / 16_384) / sum(one.bytes_by_rank.values())


class NaiveSieve(Naive):
    """The paper's list with its bits and its hand. Victims that were passed over are tried first again."""

    def __init__(self) -> None:
        super().__init__()
        self.list: list[int] = []  # Oldest first.
        self.bits: dict[int, bool] = {}
        self.hand: int | None = None  # The one that it looks at next; None: the oldest.
        self.passed_over: list[int] = []

    def insert(self, handle: int, one: ev.Snapshot) -> None:
        self.known[handle] = one
        self.list.append(handle)
        self.bits[handle] = False

    def used(self, handle: int) -> None:
        self.bits[handle] = True
        self.passed_over = [other for other in self.passed_over if other != handle]

    def withhold(self, handle: int) -> None:
        super().withhold(handle)
        self.passed_over = [other for other in self.passed_over if other != handle]

    def walk(self) -> Iterator[tuple[int, dict[int, bool], int | None]]:
        """Yield victims as the hand finds them, the bits then, and where it stands afterwards."""
        bits, hand, found = dict(self.bits), self.hand, set(self.passed_over)
        while self.candidates - found:
            hand = self.list[0] if hand is None else hand
            newer = self.list[self.list.index(hand) + 1 :]
            following = newer[0] if newer else None
            if hand in self.candidates and hand not in found and not bits[hand]:
                found.add(hand)
                yield hand, dict(bits), following
            bits[hand] = False
            hand = following

    def order(self) -> list[int]:
        return self.passed_over + [handle for handle, _, _ in self.walk()]

    def discard(self, handle: int, evicted: bool) -> None:
        if evicted and handle not in self.passed_over:
            skipped: list[int] = []
            for victim, bits, following in self.walk():
                if victim == handle:
                    self.bits, self.hand = bits, following
                    break
                skipped.append(victim)
            self.passed_over += skipped
        super().discard(handle, evicted)
        if handle not in self.list:
            return
        if self.hand == handle:
            newer = self.list[self.list.index(handle) + 1 :]
            self.hand = newer[0] if newer else None
        self.list.remove(handle)


NAIVE: dict[str, type[Naive]] = {
    "lru": NaiveLru,
    "gdsf": NaiveGdsf,
    "lfuda": NaiveLfuda,
    "sieve": NaiveSieve,
}

sizes = st.dictionaries(st.integers(0, 2), st.integers(1, 4).map(lambda units: units * 256), min_size=1)
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("insert"), st.booleans(), st.sampled_from("abcde"), st.integers(0, 3), st.integers(1, 5),
            sizes,
        ),
        st.tuples(st.sampled_from(["use", "use", "use", "offer", "withhold", "discard"]), st.integers(0, 7)),
        st.tuples(st.just("evict"), st.sampled_from([0, 0, 0, 1, 2])),
    ),
    # Without a least size most examples are short, and say little.
    min_size=20,
    max_size=50,
)  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=steps)
@settings(max_examples=100, deadline=None)
def test_the_victims_are_those_of_the_naive_model(policy: str, steps: list[tuple[Any, ...]]) -> None:
    order, naive, last = order_of(policy), NAIVE[policy](), 0
    for step in steps:
        kind = step[0]
        if kind == "insert":
            last += 1
            one = ev.Snapshot(("layout", step[2]), step[3] * 8_192, step[4] * 4_096, step[5])
            order.insert(last, one)
            naive.insert(last, one)
            if step[1]:
                order.offer(last)
                naive.offer(last)
        elif kind == "evict":
            victims = list(order.victims())
            if len(victims) > step[1]:
                order.discard(victims[step[1]], evicted=True)
                naive.discard(victims[step[1]], True)
        else:
            handle = last - step[1]
            if kind == "discard":
                order.discard(handle)
                naive.discard(handle, False)
            elif kind != "offer" or handle in naive.known:
                getattr(order, kind)(handle)
                getattr(naive, kind)(handle)
        order.validate()
        assert list(order.victims()) == naive.order()
        assert set(order.handles()) == naive.known.keys()
        assert len(order) == len(naive.candidates)
        assert {handle for handle in range(last + 2) if handle in order} == naive.candidates
        for rank in range(3):
            exact = sum(naive.known[handle].bytes_by_rank.get(rank, 0) for handle in naive.candidates)
            assert order.evictable_bytes(rank) == exact


# --- what each policy is for ------------------------------------------------------------------------------


def test_lru_takes_a_return_from_a_lease_for_use() -> None:
    order = order_of(a=snapshot(), b=snapshot(), c=snapshot())
    order.use(1)
    assert list(order.victims()) == [2, 3, 1]
    order.withhold(2)
    order.offer(2)
    assert list(order.victims()) == [3, 1, 2]
    order.offer(3)
    assert list(order.victims()) == [3, 1, 2], "it had been offered before"


@pytest.mark.parametrize("policy", ["gdsf", "lfuda"])
def test_what_a_session_was_used_for_is_remembered_by_its_next_snapshot(policy: str) -> None:
    order = order_of(policy, a=snapshot("often"), b=snapshot("once"), c=snapshot("never"))
    order.use(1)
    order.discard(1)
    order.insert(4, snapshot("often"))
    order.offer(4)
    order.use(2)
    assert list(order.victims()) == [3, 2, 4]


@pytest.mark.parametrize("policy", ["gdsf", "lfuda"])
def test_old_fame_fades(policy: str) -> None:
    """Each victim's rank is added to what comes later, so a session of three uses goes in the end."""
    order = order_of(policy, a=snapshot("famous"))
    order.use(1)
    order.use(1)
    victims = []
    for handle in range(2, 7):
        order.insert(handle, snapshot(f"new {handle}"))
        order.offer(handle)
        victims.append(next(order.victims()))
        order.discard(victims[-1], evicted=True)
    assert victims == [2, 3, 1, 4, 5]


@pytest.mark.parametrize("policy", ["gdsf", "lfuda"])
def test_no_more_sessions_are_remembered_than_allowed(policy: str) -> None:
    order = order_of(policy, **{name: snapshot(name) for name in "abcdef"})
    order.validate()
    order._uses["layout", "one too many"] = 1
    with pytest.raises(InvariantBroken, match="more than 3 sessions"):
        order.validate()


def test_gdsf_lets_go_first_what_saves_least_for_its_bytes() -> None:
    order = order_of(
        "gdsf",
        wide=snapshot("a", tokens=16_384, r0=2_000),
        narrow=snapshot("b", tokens=16_384, r0=1_000),
        ranks=snapshot("c", tokens=16_384, r0=1_000, r1=2_000),
        late=snapshot("d", tokens=16_384, start=65_536, r0=2_000),
    )
    assert list(order.victims()) == [3, 1, 2, 4]


def test_sieve_spares_what_was_used_once_and_keeps_its_place() -> None:
    order = order_of("sieve", a=snapshot(), b=snapshot(), c=snapshot())
    order.use(1)
    order.use(1)
    assert list(order.victims()) == [2, 3, 1]
    order.discard(2, evicted=True)
    order.insert(4, snapshot())
    order.offer(4)
    assert list(order.victims()) == [3, 4, 1], "the hand has passed the first, and comes to it last"


def test_the_hand_of_sieve_goes_round_before_it_meets_what_came_after_its_last_victim() -> None:
    order = order_of("sieve", a=snapshot(), b=snapshot())
    order.use(1)
    order.discard(2, evicted=True)
    order.insert(3, snapshot())
    order.offer(3)
    assert list(order.victims()) == [1, 3], "nothing was newer than the victim, so a new round begins"


# --- the tables themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_sums_do_not_follow_a_mapping_that_the_caller_changes_later(policy: str) -> None:
    bytes_by_rank = {0: 100}
    order = order_of(policy, a=ev.Snapshot(("", ""), 0, 1, bytes_by_rank))
    bytes_by_rank[0] = 1
    order.discard(1)
    assert order.evictable_bytes(0) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_snapshot_becomes_ready_once(policy: str) -> None:
    order = order_of(policy, a=snapshot())
    with pytest.raises(InvariantBroken, match="twice"):
        order.insert(1, snapshot())
    assert list(order.victims()) == [1]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_order_that_is_empty_takes_everything_calmly(policy: str) -> None:
    order = order_of(policy)
    order.use(7)
    order.withhold(7)
    order.discard(7)
    order.discard(7, evicted=True)
    order.validate()
    assert (list(order.victims()), len(order), list(order.handles())) == ([], 0, [])
    assert order.evictable_bytes(0) == 0


BREAKS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "sums": ("lru", lambda order: order._evictable_bytes.update({0: 1}), "evictable bytes"),
    "unknown": ("lru", lambda order: order._snapshots.pop(1), "unknown to the order"),
    "ranked sums": ("lfuda", lambda order: order._evictable_bytes.update({0: 1}), "evictable bytes"),
    "sieved sums": ("sieve", lambda order: order._evictable_bytes.update({0: 1}), "evictable bytes"),
    "rank": ("lfuda", lambda order: order._ranks.update({9: (0.0,)}), "has a rank"),
    "candidate": ("lfuda", lambda order: order._candidates.remove(1), "order of their ranks"),
    "moved": ("lfuda", lambda order: order._ranks.update({1: (9.0, 9)}), "order of their ranks"),
    "place": ("sieve", lambda order: order._places.update({9: 9}), "a place in the round"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_validate_sees_what_is_off(name: str) -> None:
    policy, change, message = BREAKS[name]
    order = order_of(policy, a=snapshot("a"), b=snapshot("b"))
    order.validate()
    change(order)
    with pytest.raises(InvariantBroken, match=message):
        order.validate()


# --- the core ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kind"),
    [("lru", ev.LruOrder), ("gdsf", ev.GdsfOrder), ("lfuda", ev.LfudaOrder), ("sieve", ev.SieveOrder)],
)
def test_the_settings_name_the_policy(make: Make, policy: str, kind: type) -> None:
    drive = make(eviction_policy=policy, session_history_max=2)
    assert type(drive.machine.books.victims) is kind
    for name in "abcd":
        drive.ready(name)
    assert len(getattr(drive.machine.books.victims, "_uses", "ab")) == 2


def test_lru_is_the_default() -> None:
    assert Settings().eviction_policy == "lru"
    assert POLICIES == ev.POLICIES and POLICIES[0] == "lru"


class Told(ev.LruOrder):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Any, ...]] = []

    def insert(self, handle: int, snapshot: ev.Snapshot) -> None:
        self.told.append(("insert", handle, snapshot))
        super().insert(handle, snapshot)

    def use(self, handle: int) -> None:
        self.told.append(("use", handle))
        super().use(handle)

    def offer(self, handle: int) -> None:
        self.told.append(("offer", handle))
        super().offer(handle)

    def withhold(self, handle: int) -> None:
        self.told.append(("withhold", handle))
        super().withhold(handle)

    def discard(self, handle: int, *, evicted: bool = False) -> None:
        self.told.append(("discard", handle, evicted))
        _ = super(ev.LruOrder, self).discard(handle, evicted=evicted)

    def since(self) -> list[tuple[Any, ...]]:
        told, self.told = self.told, []
        return told


def test_the_core_tells_an_order_of_ones_own_what_it_is_to_know(make: Make) -> None:
    order = Told()
    drive = make(2, units=4, victims=order)
    assert drive.machine.books.victims is order
    handle = drive.ready("s", 16, token_start=32)
    key = (fingerprint(TWO_PLANES), "s")
    assert order.since() == [
        ("insert", handle, ev.Snapshot(key, 32, 16, {0: 512, 1: 512})), ("offer", handle),
    ]  # fmt: skip
    drive.look_up("s")
    assert order.since() == [("use", handle)]
    leases = [drive.lease(handle, rank).lease_id for rank in range(2)]
    assert order.since() == [("use", handle), ("withhold", handle), ("withhold", handle)], (
        "once for all ranks"
    )
    drive.look_up("s")
    drive.vote_no(handle, 0, leases[0], Reason.ALLOC_FAILED_ON_FINALIZE, keep=True)
    assert order.since() == [("use", handle)], "rank 1 still reads"
    drive.vote_no(handle, 1, leases[1], Reason.ALLOC_FAILED_ON_FINALIZE, keep=True)
    assert order.since() == [("offer", handle)]
    drive.ready("t")
    order.since()
    newer = drive.reserved("u")
    assert drive.reason(handle) is Reason.EVICTED
    assert order.since() == [("discard", handle, True), ("withhold", handle)]
    drive.abort(newer)
    assert order.since() == [("discard", newer, False), ("withhold", newer)], "it was never READY"


def test_what_is_not_drained_is_known_and_no_candidate(make: Make) -> None:
    drive = make(eviction_policy="lfuda")
    first = drive.transferring("a")
    drive.commit(first, drained=False)
    second = drive.ready("b")
    drive.look_up("a")
    order = drive.machine.books.victims
    assert (set(order.handles()), list(order.victims())) == ({first, second}, [second])
    drive.drained(first)
    assert list(order.victims()) == [second, first], "the look-up counted all the same"


class YoungestFirst(ev.RankedOrder):
    def rank_of(self, handle: int, snapshot: ev.Snapshot) -> ev.Rank:
        return (-handle,)


def test_an_order_of_ones_own_decides_who_is_evicted(make: Make) -> None:
    drive = make(units=8, victims=YoungestFirst())
    handles = [drive.ready(name) for name in "abcd"]
    drive.reserved("e", 16)
    assert [drive.state(handle) for handle in handles] == [State.READY] * 3 + [State.ABORTED]
    assert drive.reason(handles[3]) is Reason.EVICTED


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_evicted_when_that_cannot_make_room(make: Make, policy: str) -> None:
    """One arena could be cleared and the other could not: the order is asked, and nobody goes."""
    drive = make(2, units=4, eviction_policy=policy)
    drive.reserved("held", 16, ranks=(1,))
    drive.reserved("held too", 16, ranks=(1,))
    ready = [drive.ready(name, 16, ranks=(0,)) for name in "ab"]
    before = list(drive.machine.books.victims.victims())
    result = drive.prepare("c", 16)
    assert result.reason is Reason.SNAPSHOT_BUF_FULL
    assert list(drive.machine.books.victims.victims()) == before
    assert [drive.state(handle) for handle in ready] == [State.READY] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_leased_snapshot_is_never_evicted(make: Make, policy: str) -> None:
    drive = make(units=4, eviction_policy=policy)
    leased, idle = drive.ready("a"), drive.ready("b")
    drive.lease(leased)
    drive.reserved("c")
    assert (drive.state(leased), drive.reason(idle)) == (State.READY, Reason.EVICTED)
    assert drive.prepare("d").reason is Reason.SNAPSHOT_BUF_FULL


def test_the_naive_models_cover_every_policy() -> None:
    assert tuple(NAIVE) == POLICIES

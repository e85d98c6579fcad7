"""Which snapshot makes room for another: the order of victims, by a policy that has a name.

The core says what happens to a snapshot: it became READY (``insert``), it was looked up or leased
(``use``), it may be evicted from now on (``offer``), it is being read (``withhold``), it has ended
(``discard``). An order answers with candidates, best victim first. Candidates are what was offered and
not withheld since: READY, unleased, drained. What happens while one is no candidate is remembered.

Every operation costs O(log n) at most, and O(ranks); for ``lru`` it does not depend on n. Nothing here
knows a clock: ageing and recency go by the events.

Source: design, section 3 (LRU); each policy names its paper.
"""

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, get_args

from sortedcontainers import SortedList

from snapd.compiling import mypyc_attr
from snapd.errors import InvariantBroken

PolicyName: TypeAlias = Literal["lru", "gdsf", "lfuda", "sieve"]
Rank: TypeAlias = tuple[float, ...]

# Where attending to all tokens before costs a prefill as much as the rest of the model does. It depends on
# the model: about 8,000 with 3 B active parameters, 50,000 with 70 B. Only the proportion matters here.
ATTENTION_KNEE_TOKENS: Final = 16_384


class Snapshot(NamedTuple):
    """What an order may know of a READY snapshot.

    Attributes:
        session: layout fingerprint and session id; equal for all attempts of one session.
        token_start: its first token.
        num_tokens: of the snapshot.
        bytes_by_rank: of its extents in each rank's arena, padding included.
    """

    session: tuple[str, str]
    token_start: int
    num_tokens: int
    bytes_by_rank: Mapping[int, int]

    @property
    def total_bytes(self) -> int:
        """Bytes over all ranks."""
        return sum(self.bytes_by_rank.values())


class VictimOrder(Protocol):
    """What the core asks of an order. ``in`` and ``len`` are about the candidates."""

    def insert(self, handle: int, snapshot: Snapshot) -> None:
        """The snapshot became READY, which counts as use; it is no candidate yet."""

    def use(self, handle: int) -> None:
        """It was looked up, or a first rank leases it. An unknown one is ignored."""

    def offer(self, handle: int) -> None:
        """It is a candidate from now on: nobody reads it, and nothing can land in it. May be repeated."""

    def withhold(self, handle: int) -> None:
        """It is no candidate any more, and may come back. May be repeated."""

    def discard(self, handle: int, *, evicted: bool = False) -> None:
        """It has ended, as a victim or not. An unknown one is ignored."""

    def victims(self) -> Iterator[int]:
        """Iterate over the candidates, best victim first, changing nothing; do not change it meanwhile."""

    def evictable_bytes(self, rank: int) -> int:
        """Return how many bytes of *rank* evicting every candidate would free."""

    def handles(self) -> Collection[int]:
        """Return all that was inserted and not discarded, candidates or not."""

    def __contains__(self, handle: object) -> bool:
        """Whether it is a candidate."""

    def __len__(self) -> int:
        """How many candidates there are."""

    def validate(self) -> None:
        """Check the order's own tables against each other.

        Raises:
            InvariantBroken: they differ.
        """


@mypyc_attr(allow_interpreted_subclasses=True)
class _Order(ABC):
    """Who is known, who is a candidate, and the exact sum of their bytes per rank."""

    def __init__(self) -> None:
        self._snapshots: dict[int, Snapshot] = {}
        self._evictable_bytes: Counter[int] = Counter()

    def insert(self, handle: int, snapshot: Snapshot) -> None:
        """See :class:`VictimOrder`.

        Raises:
            InvariantBroken: the handle is known already.
        """
        if handle in self._snapshots:
            raise InvariantBroken(f"attempt {handle} became READY twice")
        # A copy: the sums must not depend on what the caller does with the mapping later.
        self._snapshots[handle] = snapshot._replace(bytes_by_rank=dict(snapshot.bytes_by_rank))

    def offer(self, handle: int) -> None:
        """See :class:`VictimOrder`."""
        if handle not in self:
            self._evictable_bytes.update(self._snapshots[handle].bytes_by_rank)
            self._enter(handle)

    def withhold(self, handle: int) -> None:
        """See :class:`VictimOrder`."""
        if handle in self:
            self._evictable_bytes.subtract(self._snapshots[handle].bytes_by_rank)
            self._leave(handle)

    def discard(self, handle: int, *, evicted: bool = False) -> None:
        """See :class:`VictimOrder`."""
        del evicted
        self.withhold(handle)
        self._snapshots.pop(handle, None)

    def evictable_bytes(self, rank: int) -> int:
        """See :class:`VictimOrder`."""
        return self._evictable_bytes[rank]

    def handles(self) -> Collection[int]:
        """See :class:`VictimOrder`."""
        return self._snapshots.keys()

    def validate(self) -> None:
        """See :class:`VictimOrder`."""
        exact: Counter[int] = Counter()
        for handle in self.victims():
            if handle not in self._snapshots:
                raise InvariantBroken(f"attempt {handle} is evictable and unknown to the order")
            exact.update(self._snapshots[handle].bytes_by_rank)
        if exact != self._evictable_bytes:
            raise InvariantBroken(
                f"evictable bytes are {dict(exact)}, kept was {dict(self._evictable_bytes)}"
            )

    @abstractmethod
    def victims(self) -> Iterator[int]:
        """See :class:`VictimOrder`."""

    @abstractmethod
    def use(self, handle: int) -> None:
        """See :class:`VictimOrder`."""

    @abstractmethod
    def __contains__(self, handle: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _enter(self, handle: int) -> None:
        """Make a known snapshot a candidate."""

    @abstractmethod
    def _leave(self, handle: int) -> None:
        """Make a candidate none."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LruOrder(_Order):
    """Least recently used first; coming back from a lease is use as well. Every operation is O(ranks).

    Paper: Mattson, Gecsei, Slutz, Traiger, "Evaluation Techniques for Storage Hierarchies", IBM Systems
    Journal 9(2), 1970.
    """

    def __init__(self) -> None:
        super().__init__()
        # Not a dict: finding the oldest key after many were moved away from the front costs a dict O(n).
        self._candidates: OrderedDict[int, None] = OrderedDict()

    def victims(self) -> Iterator[int]:
        """See :class:`VictimOrder`."""
        return iter(self._candidates)

    def use(self, handle: int) -> None:
        """Make a candidate the most recently used; one that is not becomes that when it is offered."""
        if handle in self._candidates:
            self._candidates.move_to_end(handle)

    def __contains__(self, handle: object) -> bool:
        return handle in self._candidates

    def __len__(self) -> int:
        return len(self._candidates)

    def _enter(self, handle: int) -> None:
        self._candidates[handle] = None

    def _leave(self, handle: int) -> None:
        del self._candidates[handle]


@mypyc_attr(allow_interpreted_subclasses=True)
class RankedOrder(_Order):
    """Candidates by a rank that each snapshot has, lowest first; equal ones least recently used first.

    To make another order, give ``rank_of``; it is asked when a snapshot becomes READY and after each use,
    and what it said is kept while the snapshot is no candidate.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[int, Rank] = {}
        self._by_rank: SortedList[tuple[Rank, int]] = SortedList()
        self._candidates: set[int] = set()
        # Stands for time: one more with every insert and use.
        self._tick = 0

    @abstractmethod
    def rank_of(self, handle: int, snapshot: Snapshot) -> Rank:
        """Return the snapshot's rank as of now, a tuple as long as any other; the lowest goes first."""

    def insert(self, handle: int, snapshot: Snapshot) -> None:
        """See :class:`VictimOrder`."""
        super().insert(handle, snapshot)
        self._rank_anew(handle)

    def use(self, handle: int) -> None:
        """See :class:`VictimOrder`."""
        if handle not in self._snapshots:
            return
        is_candidate = handle in self._candidates
        if is_candidate:
            self._leave(handle)
        self._rank_anew(handle)
        if is_candidate:
            self._enter(handle)

    def _rank_anew(self, handle: int) -> None:
        self._tick += 1
        self._ranks[handle] = (*self.rank_of(handle, self._snapshots[handle]), self._tick)

    def discard(self, handle: int, *, evicted: bool = False) -> None:
        """See :class:`VictimOrder`."""
        super().discard(handle, evicted=evicted)
        self._ranks.pop(handle, None)

    def victims(self) -> Iterator[int]:
        """See :class:`VictimOrder`."""
        for _, handle in self._by_rank:
            yield handle

    def __contains__(self, handle: object) -> bool:
        return handle in self._candidates

    def __len__(self) -> int:
        return len(self._candidates)

    def _enter(self, handle: int) -> None:
        self._candidates.add(handle)
        self._by_rank.add((self._ranks[handle], handle))

    def _leave(self, handle: int) -> None:
        self._candidates.remove(handle)
        self._by_rank.remove((self._ranks[handle], handle))

    def validate(self) -> None:
        """See :class:`VictimOrder`."""
        super().validate()
        if self._ranks.keys() != self._snapshots.keys():
            raise InvariantBroken("not exactly what is known to the order has a rank")
        if list(self._by_rank) != sorted((self._ranks[handle], handle) for handle in self._candidates):
            raise InvariantBroken("the candidates are not in the order of their ranks")


@mypyc_attr(allow_interpreted_subclasses=True)
class LfudaOrder(RankedOrder):
    """Least frequently used first, with dynamic ageing: rank = age + uses, age = rank of the last victim.

    The uses are those of the session, not of the one snapshot: a snapshot ends when it is ingested, and it
    is the session that comes back. At most *history_max* sessions are remembered, the most recently used.

    Paper: Arlitt, Cherkasova, Dilley, Friedrich, Jin, "Evaluating Content Management Techniques for Web
    Proxy Caches", ACM SIGMETRICS Performance Evaluation Review 27(4), 2000.
    """

    def __init__(self, history_max: int) -> None:
        super().__init__()
        self._history_max = history_max
        self._uses: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._age = 0.0

    def value_of(self, snapshot: Snapshot) -> float:
        """Return what one use of it is worth."""
        del snapshot
        return 1.0

    def rank_of(self, handle: int, snapshot: Snapshot) -> Rank:
        """Count a use of the session, and return age + uses * value."""
        del handle
        uses = self._uses.pop(snapshot.session, 0) + 1
        self._uses[snapshot.session] = uses
        if len(self._uses) > self._history_max:
            self._uses.popitem(last=False)
        return (self._age + uses * self.value_of(snapshot),)

    def discard(self, handle: int, *, evicted: bool = False) -> None:
        """A victim's rank is the age of what is used from now on, so that old fame fades."""
        if evicted and handle in self._ranks:
            # A victim may have been passed over for earlier ones: the age never falls.
            self._age = max(self._age, self._ranks[handle][0])
        super().discard(handle, evicted=evicted)

    def validate(self) -> None:
        """See :class:`VictimOrder`."""
        super().validate()
        if len(self._uses) > self._history_max:
            raise InvariantBroken(f"uses of more than {self._history_max} sessions are remembered")


class GdsfOrder(LfudaOrder):
    """GreedyDual-Size-Frequency: rank = age + uses * saved work / bytes.

    The work is that of a prefill, counted in tokens at the start of a prompt: a token far in costs more, as
    it attends to all before it. So what is kept saves P most for the bytes that it takes: narrow layouts
    before wide ones, the end of a long session before a short one. Uses are counted as in ``lfuda``.

    Paper: Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy",
    HP Laboratories report HPL-98-69R1, 1998; after Cao, Irani, "Cost-Aware WWW Proxy Caching Algorithms",
    USITS 1997.
    """

    def value_of(self, snapshot: Snapshot) -> float:
        """Return the prefill work that one use saves for each byte."""
        middle_tokens = snapshot.token_start + snapshot.num_tokens / 2
        work_tokens = snapshot.num_tokens * (1 + middle_tokens / ATTENTION_KNEE_TOKENS)
        return work_tokens / snapshot.total_bytes


class SieveOrder(RankedOrder):
    """SIEVE: a hand goes round from old to new, spares what was used since it last came by, evicts the rest.

    The paper clears a bit of all that the hand passes, which may be very many at once. Here a snapshot's
    rank is the lap in which the hand evicts it, and its place in the round: being used puts it off to the
    lap after the hand's next visit. That gives the same victims, in O(log n).

    Paper: Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
    Algorithm for Web Caches", NSDI 2024.
    """

    def __init__(self) -> None:
        super().__init__()
        # Oldest first.
        self._places: OrderedDict[int, int] = OrderedDict()
        self._last_place = 0
        # Where the last victim was: its lap, and its place.
        self._hand = (0, 0)

    def rank_of(self, handle: int, snapshot: Snapshot) -> Rank:
        """Return lap and place: a new one is met in this lap, a used one is spared once."""
        del snapshot
        if handle not in self._places:
            if next(reversed(self._places.values()), 0) <= self._hand[1]:
                # Nothing is newer than the last victim: the next round has begun, and the new one comes last.
                self._hand = (self._hand[0] + 1, 0)
            self._last_place += 1
            self._places[handle] = self._last_place
            return (self._hand[0], self._last_place)
        return (self._next_visit(handle) + 1, self._places[handle])

    def _next_visit(self, handle: int) -> int:
        lap, place = self._hand
        return lap if self._places[handle] > place else lap + 1

    def _enter(self, handle: int) -> None:
        # While it was read the hand may have gone past: it is met again in the lap after.
        lap = max(self._ranks[handle][0], self._next_visit(handle))
        self._ranks[handle] = (lap, *self._ranks[handle][1:])
        super()._enter(handle)

    def discard(self, handle: int, *, evicted: bool = False) -> None:
        """The hand stops at a victim."""
        if evicted and handle in self._ranks:
            lap, place, _ = self._ranks[handle]
            self._hand = max(self._hand, (int(lap), int(place)))
        super().discard(handle, evicted=evicted)
        self._places.pop(handle, None)

    def validate(self) -> None:
        """See :class:`VictimOrder`."""
        super().validate()
        if self._places.keys() != self._snapshots.keys():
            raise InvariantBroken("not exactly what is known to the order has a place in the round")


def victim_order(policy: PolicyName, history_max: int) -> VictimOrder:
    """Return an empty order.

    Args:
        policy: its name.
        history_max: sessions whose uses are remembered, where the policy counts them.
    """
    match policy:
        case "lru":
            return LruOrder()
        case "gdsf":
            return GdsfOrder(history_max)
        case "lfuda":
            return LfudaOrder(history_max)
        case "sieve":
            return SieveOrder()


POLICIES: Final[tuple[PolicyName, ...]] = get_args(PolicyName)

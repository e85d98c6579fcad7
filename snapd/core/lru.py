"""What can be evicted, least recently used first, and how many bytes that would give each rank.

Source: design, section 3 (LRU).
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

from snapd.errors import InvariantBroken

K = TypeVar("K", bound=Hashable)


class LruIndex(Generic[K]):
    """An ordered set of evictable keys with the exact sum of their bytes per rank.

    Every operation costs O(ranks), whatever the number of keys.
    """

    def __init__(self) -> None:
        # Not a dict: finding the oldest key after many were moved away from the front costs a dict O(n).
        self._bytes_by_rank: OrderedDict[K, dict[int, int]] = OrderedDict()
        self._evictable_bytes: Counter[int] = Counter()

    def touch(self, key: K, bytes_by_rank: Mapping[int, int]) -> None:
        """Make *key* the most recently used; its bytes replace those given before."""
        self.discard(key)
        # A copy: the sum must not depend on what the caller does with the mapping later.
        self._bytes_by_rank[key] = dict(bytes_by_rank)
        self._evictable_bytes.update(bytes_by_rank)

    def discard(self, key: K) -> None:
        """Remove *key* if it is there."""
        self._evictable_bytes.subtract(self._bytes_by_rank.pop(key, {}))

    def __contains__(self, key: K) -> bool:
        return key in self._bytes_by_rank

    def __len__(self) -> int:
        return len(self._bytes_by_rank)

    def oldest(self) -> K | None:
        """Return the least recently used key, or ``None``."""
        return next(iter(self._bytes_by_rank), None)

    def oldest_first(self) -> Iterator[K]:
        """Iterate over the keys, least recently used first; do not change the index meanwhile."""
        return iter(self._bytes_by_rank)

    def evictable_bytes(self, rank: int) -> int:
        """Return how many bytes of *rank* evicting every key would free."""
        return self._evictable_bytes[rank]

    def validate(self) -> None:
        """Check the running sums against the keys.

        Raises:
            InvariantBroken: they differ.
        """
        exact: Counter[int] = Counter()
        for bytes_by_rank in self._bytes_by_rank.values():
            exact.update(bytes_by_rank)
        if exact != self._evictable_bytes:
            raise InvariantBroken(
                f"evictable bytes are {dict(exact)}, kept was {dict(self._evictable_bytes)}"
            )

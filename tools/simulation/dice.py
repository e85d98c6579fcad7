"""Chance that a seed repeats: splitmix64, cheap to make, and the same on every machine and in every process.

Paper: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
"""

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

_T = TypeVar("_T")
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


class Dice:
    """A stream of numbers.

    Args:
        seed: names the stream; any int.
        labels: tell streams of one seed apart.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int, *labels: int) -> None:
        self._state = seed & _MASK
        for label in labels:
            self._state = (self.bits() ^ label) & _MASK

    def bits(self) -> int:
        """Return 64 random bits."""
        self._state = state = (self._state + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        return state ^ (state >> 31)

    def below(self, limit: int) -> int:
        """Return an int from 0 to *limit* - 1; 0 when the limit is 0."""
        return (self.bits() * limit) >> 64

    def between(self, first: int, last: int) -> int:
        """Return an int from *first* to *last*, both included."""
        return first + self.below(last - first + 1)

    def chance(self, percent: int) -> bool:
        """Return True so often."""
        return self.below(100) < percent

    def pick(self, items: Sequence[_T]) -> _T:
        """Return one of *items*."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[_T]) -> list[_T]:
        """Return *items* in another order."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in items]

    def weighted(self, weights: Mapping[_T, int]) -> _T:
        """Return a key, as often as its weight says."""
        left = self.below(sum(weights.values()))
        for item, weight in weights.items():
            left -= weight
            if left < 0:
                return item
        raise ValueError("no weight is above 0")

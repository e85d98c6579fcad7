"""Integers in order, for the allocator's holes.

``sortedcontainers`` does as much and more, but it is Python that is not compiled with the core, and its
iterators took a third of the time of an allocation. Here are only the few operations that are needed.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

# Inserting in a list of so many moves 4 KB at most.
_BLOCK_MAX: Final = 512


class SortedInts:
    """Distinct integers in ascending order, in blocks. Every operation is O(log n) with short moves.

    Args:
        block_max: a block with more is halved; one with less than a quarter is put to the one beside it.
    """

    __slots__ = ("_block_max", "_blocks", "_lasts")

    def __init__(self, block_max: int = _BLOCK_MAX) -> None:
        self._block_max = block_max
        self._blocks: list[list[int]] = []
        # The last of each block: in which one a value belongs.
        self._lasts: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def __iter__(self) -> Iterator[int]:
        for block in self._blocks:
            yield from block

    def add(self, value: int) -> None:
        """Put in a value that is not there yet."""
        blocks, lasts = self._blocks, self._lasts
        if not blocks:
            blocks.append([value])
            lasts.append(value)
            return
        at = bisect_left(lasts, value)
        if at == len(lasts):
            at -= 1
            lasts[at] = value
        block = blocks[at]
        insort(block, value)
        if len(block) > self._block_max:
            half = len(block) // 2
            blocks.insert(at + 1, block[half:])
            del block[half:]
            lasts.insert(at, block[-1])

    def remove(self, value: int) -> None:
        """Take a value out.

        Raises:
            ValueError: it is not there.
        """
        blocks, lasts = self._blocks, self._lasts
        at = bisect_left(lasts, value)
        if at == len(lasts):
            raise ValueError(f"{value} is not there")
        block = blocks[at]
        place = bisect_left(block, value)
        if block[place] != value:
            raise ValueError(f"{value} is not there")
        del block[place]
        if not block:
            del blocks[at], lasts[at]
            return
        lasts[at] = block[-1]
        # With the one before it or, if that is long, with the one behind it.
        if 4 * len(block) < self._block_max and not self._join(at - 1):
            self._join(at)

    def _join(self, at: int) -> bool:
        """Make one block of a block and the one behind it, if both are there and it would be half full."""
        blocks, lasts = self._blocks, self._lasts
        if at < 0 or at + 1 >= len(blocks) or len(blocks[at]) + len(blocks[at + 1]) > self._block_max // 2:
            return False
        blocks[at].extend(blocks[at + 1])
        del blocks[at + 1], lasts[at]
        return True

    def first_from(self, least: int) -> int | None:
        """Return the smallest that is not below *least*."""
        at = bisect_left(self._lasts, least)
        if at == len(self._lasts):
            return None
        block = self._blocks[at]
        return block[bisect_left(block, least)]

    def last(self) -> int | None:
        """Return the largest."""
        return self._lasts[-1] if self._lasts else None

    def down_to(self, least: int) -> Iterator[int]:
        """Yield the values from the largest down to *least*."""
        for block in reversed(self._blocks):
            for value in reversed(block):
                if value < least:
                    return
                yield value

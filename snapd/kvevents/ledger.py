"""Which pages were told to be there, and by how many READY snapshots each is held.

Two snapshots that share pages are told once, and a page is told to be gone when the last of them is. Whoever
applies the events in order then holds exactly the pages of the snapshots in here. No clock, socket or thread.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from snapd.errors import InvariantBroken

# As array has it: signed, eight bytes.
_INT64: Final = "q"


class Ledger:
    """Counts holders of pages, until all are told to be gone.

    What it keeps of a snapshot: eight bytes a page, and of a page once: its number and a count.

    Args:
        pages_max: of all snapshots together, shared pages counted for each.

    Attributes:
        num_pages: of all snapshots together.
    """

    def __init__(self, pages_max: int) -> None:
        self._pages_max = pages_max
        self._holders: dict[int, int] = {}
        self._pages: dict[int, array[int]] = {}
        self.num_pages = 0

    @property
    def num_snapshots(self) -> int:
        """Snapshots that hold pages."""
        return len(self._pages)

    @property
    def num_told(self) -> int:
        """Distinct pages that were told to be there."""
        return len(self._holders)

    def has_room(self, num_pages: int) -> bool:
        """Return whether a snapshot of so many pages can be added."""
        return self.num_pages + num_pages <= self._pages_max

    def add(self, handle: int, hashes: Sequence[int]) -> list[range]:
        """Hold the pages of a snapshot, and return which of them are new, as ranges of neighbours.

        Args:
            handle: of the snapshot; not in here yet.
            hashes: of its pages, in order.
        """
        if handle in self._pages or not self.has_room(len(hashes)):
            raise InvariantBroken(f"attempt {handle} cannot be held: it is, or there is no room")
        holders = self._holders
        new: list[int] = []
        for index, number in enumerate(hashes):
            count = holders.get(number, 0)
            holders[number] = count + 1
            if not count:
                new.append(index)
        self._pages[handle] = array(_INT64, hashes)
        self.num_pages += len(hashes)
        return _ranges(new)

    def drop(self, handle: int) -> list[int]:
        """Let go of a snapshot, and return the pages that nobody holds any more, deepest first."""
        pages = self._pages.pop(handle, None)
        if pages is None:
            return []
        self.num_pages -= len(pages)
        holders = self._holders
        gone: list[int] = []
        for number in reversed(pages):
            count = holders[number] - 1
            if count:
                holders[number] = count
            else:
                del holders[number]
                gone.append(number)
        return gone

    def clear(self) -> list[int]:
        """Let go of everything, and return the pages that were held, the latest first."""
        gone = list(reversed(self._holders))
        self._holders.clear()
        self._pages.clear()
        self.num_pages = 0
        return gone


def _ranges(indexes: Iterable[int]) -> list[range]:
    """Return ascending indexes as ranges of neighbours."""
    ascending = list(indexes)
    if not ascending:
        return []
    cuts = [place for place, (left, right) in enumerate(pairwise(ascending), 1) if right != left + 1]
    return [
        range(ascending[start], ascending[stop - 1] + 1)
        for start, stop in pairwise((0, *cuts, len(ascending)))
    ]

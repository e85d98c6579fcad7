"""The bytes that a self-test moves: every one is compared, and none looks right in another place.

They repeat with a period that is prime, so that a piece which lands elsewhere differs, and what was there
before differs from them as well. Making and comparing them costs little beside moving them.
"""

import random
from typing import Final

from snapd.units import format_bytes

PERIOD_BYTES: Final = 1_048_573
# What the arena holds before, so that zeros and untouched bytes are seen.
POISON: Final = 0xA5


def period_of(seed: int) -> bytes:
    """Return the bytes of one period."""
    return random.Random(seed).randbytes(PERIOD_BYTES)  # noqa: S311 - nothing secret


def fill(memory: memoryview, seed: int) -> None:
    """Write the pattern of *seed* into *memory*, shape [size_bytes]."""
    period = period_of(seed)
    for start in range(0, len(memory), PERIOD_BYTES):
        piece = memory[start : start + PERIOD_BYTES]
        piece[:] = period[: len(piece)]


def poison(memory: memoryview) -> None:
    """Fill *memory*, shape [size_bytes], with ``POISON``."""
    block = bytes((POISON,)) * min(PERIOD_BYTES, len(memory))
    for start in range(0, len(memory), len(block) or 1):
        piece = memory[start : start + len(block)]
        piece[:] = block[: len(piece)]


def difference(memory: memoryview, seed: int) -> str:
    """Return where *memory*, shape [size_bytes], differs from the pattern of *seed*, or nothing."""
    period = period_of(seed)
    first, num_wrong, num_periods = -1, 0, 0
    for start in range(0, len(memory), PERIOD_BYTES):
        found = bytes(memory[start : start + PERIOD_BYTES])
        wanted = period if len(found) == PERIOD_BYTES else period[: len(found)]
        num_periods += 1
        if found != wanted:
            num_wrong += 1
            first = start + _first_difference(found, wanted) if first < 0 else first
    if first < 0:
        return ""
    untouched = ", where nothing was written" if memory[first] == POISON else ""
    return (
        f"wrong bytes in {num_wrong:,} of {num_periods:,} parts of {format_bytes(PERIOD_BYTES)}, "
        f"the first at {first:,}{untouched}"
    )


def _first_difference(found: bytes, wanted: bytes) -> int:
    """Return the first index at which two unequal texts of one length differ."""
    low, high = 0, len(found)
    while high - low > 1:
        middle = (low + high) // 2
        if found[low:middle] == wanted[low:middle]:
            low = middle
        else:
            high = middle
    return low

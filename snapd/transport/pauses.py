"""How long to sleep between two looks at something that may take microseconds or a second.

Source: design, section 7.
"""

from typing import Final

SHORTEST_S: Final = 0.000_02
# So an end is seen late by that much of what came before it, and a long wait costs few looks. In the
# first half of a millisecond the pauses are the shortest: a thread that sleeps longer goes on more slowly.
PART: Final = 0.03


def pause_s(waited_s: float, longest_s: float) -> float:
    """Return the next pause of a wait: a part of what was waited so far, *longest_s* at most."""
    return min(max(waited_s * PART, SHORTEST_S), longest_s)

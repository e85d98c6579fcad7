"""Bugs in the daemon, on purpose: an exception at a place of a request's handling where nobody foresees one.

A seam is a place that the daemon passes again and again. A bug is armed for one of them, and raised when it
has been passed some times more. What the daemon promises for that: whoever asked is told ``internal-error``,
if anybody asked; nothing more is done; the log is ended with that reason, the process with status 70; and the
next life closes what the log has open.
"""

from typing import Final

from tools.simulation.dice import Dice
from tools.simulation.failure import BUGS, Bug

# Where a bug may be, in the order in which a request comes by, with weights.
SEAMS: Final = {
    "request": 2,  # a request's handler begins
    "event": 3,  # the core is given an event, and has not looked at it
    "core": 4,  # the core has changed, and nobody has heard of it
    "record": 3,  # a record is about to be logged; those of the same event before it are
    "logged": 3,  # it has been
    "end": 1,  # somebody is about to be told how an attempt ended
    "timer": 1,  # a deadline has passed
    "answer": 3,  # the core's answer is about to be written
    "answered": 3,  # it has been
    "lines": 1,  # replies of a turn are out, and its lines are about to be made
    "connection": 1,  # somebody connects, or is gone
}
_PASSES_MAX: Final = 6


class Bugs:
    """The bug that waits in one life of the daemon, and the one that came up.

    Attributes:
        raised: so far.
    """

    def __init__(self) -> None:
        self.raised = 0
        self._seam = ""
        self._left = 0
        self._kind: type[Bug] = Bug

    def arm(self, dice: Dice) -> None:
        """Let one come up, some time from now."""
        self._seam = dice.weighted(SEAMS)
        self._left = dice.below(_PASSES_MAX)
        self._kind = dice.pick(BUGS)

    def disarm(self) -> None:
        """Let none come up any more."""
        self._seam = ""

    def pass_by(self, seam: str) -> None:
        """Come by a seam.

        Raises:
            Bug: it is time.
        """
        if seam != self._seam:
            return
        if self._left:
            self._left -= 1
            return
        self._seam = ""
        self.raised += 1
        raise self._kind(f"a bug at {seam}")

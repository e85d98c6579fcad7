"""What a run ends with when something is wrong, and the bugs that are no fault of snapd's."""

from typing import Final


class Broken(AssertionError):
    """A rule was seen to be broken.

    Not a ``SnapdError``: no part of snapd that handles those may swallow it.

    Attributes:
        kind: which rule, a short name.
        detail: what was seen.
    """

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = detail
        super().__init__(f"{kind}: {detail}")


class Bug(Exception):
    """An exception that nobody foresees, raised in the daemon on purpose; never by itself, see ``BUGS``."""


class _BrokenTable(Bug, KeyError):
    pass


class _BrokenState(Bug, RuntimeError):
    pass


class _BrokenValue(Bug, ValueError):
    pass


class _BrokenCheck(Bug, AssertionError):
    pass


# As bugs are of several kinds, and some handler may take one of them for something else.
BUGS: Final[tuple[type[Bug], ...]] = (_BrokenTable, _BrokenState, _BrokenValue, _BrokenCheck)

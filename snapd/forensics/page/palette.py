"""One colour a reason, on the page and in the pictures: one family of hues for each kind of cause.

Green: ok. Reds: bytes or tokens were wrong. Oranges: the transfer. Yellows: no room. Violets: what was asked
for is not there. Blues and greys: it ended in the course of things.
"""

from typing import Final, NamedTuple

from snapd.errors import Reason

OPEN: Final = "open"


class Colour(NamedTuple):
    """The same colour on a light and on a dark ground, as ``#rrggbb``."""

    light: str
    dark: str


OTHER: Final = Colour("#7d858c", "#8d969e")
LIVE: Final = Colour("#4a86c8", "#4f8fd6")
QUARANTINED: Final = Colour("#e08a1e", "#f0a13c")
HOLE: Final = Colour("#7a4fc9", "#b597f5")

COLOURS: Final[dict[str, Colour]] = {
    Reason.OK: Colour("#2f9e7f", "#3cad8a"),
    Reason.CHECKSUM_MISMATCH: Colour("#c2294a", "#f0506e"),
    Reason.TOKEN_MISMATCH: Colour("#de5c83", "#f58aaa"),
    Reason.PARTIAL_TRANSFER: Colour("#8f1d45", "#c94a78"),
    Reason.INTERNAL_ERROR: Colour("#6d0f2b", "#b02c54"),
    Reason.INGEST_FAILED: Colour("#b0348a", "#dc6bb8"),
    Reason.TRANSFER_FAILED: Colour("#d4501c", "#f2733a"),
    Reason.TRANSFER_TIMEOUT: Colour("#e8883c", "#f7a663"),
    Reason.WRITER_GONE: Colour("#9a4f24", "#c27d4e"),
    Reason.RESERVE_TIMEOUT: Colour("#efb07c", "#dfa978"),
    Reason.SNAPSHOT_BUF_FULL: Colour("#d3a40c", "#e0b22e"),
    Reason.ALLOC_FAILED: Colour("#b39117", "#c9a83a"),
    Reason.ALLOC_FAILED_ON_FINALIZE: Colour("#8d7a1a", "#b3a04a"),
    Reason.EVICTED: Colour("#dfc96a", "#d8c675"),
    Reason.TOO_LARGE: Colour("#6b5d1a", "#94863f"),
    Reason.LIMIT_REACHED: Colour("#aaa03c", "#bcb35a"),
    Reason.SESSION_NOT_RESIDENT: Colour("#7a4fc9", "#a583f0"),
    Reason.PREFIX_NOT_RESIDENT: Colour("#ab82dc", "#c6a5f0"),
    Reason.LAYOUT_MISMATCH: Colour("#553399", "#8567cc"),
    Reason.INVALID_REQUEST: Colour("#4d3a75", "#8f7fb8"),
    Reason.WRONG_RANK: Colour("#6d5f9c", "#aa9bd6"),
    Reason.READY_EXPIRED: Colour("#3a78b8", "#6aa5de"),
    Reason.SUPERSEDED: Colour("#86a8c8", "#86a5c2"),
    Reason.CLIENT_ABORT: Colour("#5d7489", "#9ab0c4"),
    Reason.DRAINING: Colour("#9aa5ad", "#7f8a93"),
    Reason.DAEMON_STOPPED: Colour("#66727c", "#6f7a84"),
    Reason.DAEMON_RESTARTED: Colour("#39444e", "#b6c0c9"),
    OPEN: Colour("#b5bbc1", "#565e66"),
}


def colour(reason: str) -> Colour:
    """Return the colour of *reason*, which may be one that this version does not know."""
    return COLOURS.get(reason, OTHER)

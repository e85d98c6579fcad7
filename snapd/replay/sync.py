"""How a turn's KV gets from D to P: what the models of P and D ask of it, and the run without any."""

from collections import Counter
from dataclasses import dataclass, field

from snapd.errors import Reason
from snapd.replay.chains import Turn


@dataclass(slots=True)
class SyncCounts:
    """What became of the attempts.

    Attributes:
        attempts: tries to bring one snapshot over, refused ones included.
        reasons: how they ended.
        nothing_to_send: turns of which P lacked nothing, so that there was no attempt.
        sent_tokens: over the link from D to P.
        written_ns: time that P's memory was busy with them.
        copied_ns: time that P spent on copies out of the buffer.
        bounced: tries of P to ingest that found no slots.
        fitting: attempts whose snapshot fits an empty buffer.
    """

    attempts: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)
    nothing_to_send: int = 0
    sent_tokens: int = 0
    written_ns: int = 0
    copied_ns: int = 0
    bounced: int = 0
    fitting: int = 0


class Sync:
    """The run without a sync; the others build on it."""

    def __init__(self) -> None:
        self.counts = SyncCounts()

    def turn_ended(self, turn: Turn) -> None:
        """D has sampled the last token of the answer."""

    def ingest_before_step(self) -> int:
        """P is about to begin a step; return for how long it copies first, in ns."""
        return 0

    def has_for(self, turn: Turn) -> bool:
        """Return whether P could ingest something for a turn that it is about to prefill."""
        del turn
        return False

    def ingest_before_prefill(self, turn: Turn) -> int:
        """P is about to prefill a turn; return for how long it copies first, in ns. 0: it cannot."""
        del turn
        return 0

    def copies_done(self) -> None:
        """The copies that P has begun are done."""

"""What a push through staging buffers knows of one rank's part of it.

Source: design, section 8.
"""

from collections import deque

from snapd.kv.control import Commitment
from snapd.kv.devicestaged import DeviceGather, PieceGathering
from snapd.kv.devicestaging import DeviceRing
from snapd.kv.flights import FeedFlight, Flight, Piece
from snapd.kv.ringfeed import RingFeed
from snapd.kv.staged import StagedSource
from snapd.kv.staging import Ring, StagingBuffer
from snapd.kv.writers import RankWriter
from snapd.wire import RankGrant


class Shard:
    """One rank's part of a push.

    Attributes:
        grant: where it goes.
        source: what is sent; None: not begun.
        writer: how it is written.
        ring: where its buffers come from.
        buffer: what is being filled by this thread.
        filling: what is being filled by a GPU, in order.
        ready: pieces that were filled, or failed, and are to be written.
        flying: writes under way, or the feed.
        feeds: those that were begun; all but the last have failed.
        last_piece: the last one, if the commit goes behind it.
        notice: the commit's own write.
        is_drained: no write that was final so far can still land.
        commit: the commit under way.
        is_committed: the daemon has it.
    """

    def __init__(self, grant: RankGrant, ring: Ring) -> None:
        self.grant = grant
        self.ring = ring
        self.source: StagedSource | DeviceGather | None = None
        self.writer: RankWriter | None = None
        self.filling: deque[tuple[StagingBuffer, PieceGathering]] = deque()
        self.buffer: StagingBuffer | None = None
        self.ready: deque[Piece] = deque()
        self.flying: list[Flight | FeedFlight] = []
        self.feeds: list[RingFeed] = []
        self.last_piece: Piece | None = None
        self.notice: Flight | None = None
        self.is_drained = True
        self.commit: Commitment | None = None
        self.is_committed = False

    @property
    def is_on_gpu(self) -> bool:
        """Whether a GPU gathers it."""
        return isinstance(self.ring, DeviceRing)

    @property
    def is_fed(self) -> bool:
        """Whether the transport asks for its pieces, as far as is known."""
        return self.is_on_gpu and self.writer is not None and self.writer.takes_feeds

    @property
    def feeding(self) -> FeedFlight | None:
        """The feed under way."""
        return next((flight for flight in self.flying if isinstance(flight, FeedFlight)), None)

    @property
    def is_gathered(self) -> bool:
        """Whether every byte is in a buffer, or further."""
        return self.source is not None and self.source.done

    @property
    def is_written(self) -> bool:
        """Whether every byte is in the arena."""
        return self.is_gathered and not self.ready and not self.flying

"""D: decodes at a constant pace, and keeps what it has decoded until it needs the room."""

from collections import OrderedDict, deque
from collections.abc import Callable

from snapd.replay.chains import NO_TURN, Turn
from snapd.replay.clock import SimClock
from snapd.replay.model import Model
from snapd.units import NS_PER_MS


class Decode:
    """One D, or several that share the load evenly.

    Args:
        model: pace and pool.
        clock: of the run.
        ended: called when a turn's last token is sampled.

    Attributes:
        waited: turns for which there was no room at once.
    """

    def __init__(self, model: Model, clock: SimClock, ended: Callable[[Turn], None]) -> None:
        self._model = model
        self._clock = clock
        self._ended = ended
        self._free_tokens = model.decode_pool_tokens
        self._waiting: deque[tuple[Turn, Callable[[], None]]] = deque()
        # Tokens by turn, least recently used first; turns that are being sent are not among them.
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._sending: dict[int, tuple[int, int]] = {}
        self.waited = 0

    def reserve(self, turn: Turn, then: Callable[[], None]) -> None:
        """Call *then* as soon as there is room for prompt and answer."""
        if turn.end_tokens > self._model.decode_pool_tokens:
            # It decodes elsewhere; what P holds is let go as if it had been sent.
            then()
            return
        if turn.parent != NO_TURN:
            # What comes now holds all of it.
            self._free_tokens += self._kept.pop(turn.parent, 0)
        if self._waiting or not self._take(turn.end_tokens):
            self.waited += 1
            self._waiting.append((turn, then))
            return
        then()

    def _take(self, num_tokens: int) -> bool:
        while self._free_tokens < num_tokens and self._kept:
            _, kept_tokens = self._kept.popitem(last=False)
            self._free_tokens += kept_tokens
        if self._free_tokens < num_tokens:
            return False
        self._free_tokens -= num_tokens
        return True

    def begin(self, turn: Turn) -> None:
        """The prompt's KV is there."""
        decode_ns = round(turn.output_tokens * self._model.tpot_ms * NS_PER_MS)
        self._clock.at(self._clock.now_ns() + decode_ns, lambda: self._end(turn))

    def _end(self, turn: Turn) -> None:
        if turn.end_tokens <= self._model.decode_pool_tokens:
            self._kept[turn.index] = turn.end_tokens
        self._ended(turn)
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._take(self._waiting[0][0].end_tokens):
            _, then = self._waiting.popleft()
            then()

    def has(self, turn: Turn) -> bool:
        """Return whether the turn's KV is still there."""
        return turn.index in self._kept or turn.index in self._sending

    def pin(self, turn: Turn) -> None:
        """Keep the turn's KV while it is sent; may be repeated."""
        count, tokens = self._sending.get(turn.index, (0, 0))
        self._sending[turn.index] = (count + 1, tokens or self._kept.pop(turn.index, 0))

    def unpin(self, turn: Turn) -> None:
        """It has been sent; it may be dropped from now on."""
        count, tokens = self._sending.pop(turn.index)
        if count > 1:
            self._sending[turn.index] = (count - 1, tokens)
        else:
            self._kept[turn.index] = tokens
            self._serve()

"""The design that snapd replaces: P allocates slots in its own pool when D asks, and D writes there."""

from snapd.errors import Reason
from snapd.replay.chains import Turn
from snapd.replay.decode import Decode
from snapd.replay.link import Link
from snapd.replay.model import Model
from snapd.replay.sync import Sync
from snapd.replay.tree import PrefixTree


class DirectSync(Sync):
    """One try at the end of each turn."""

    def __init__(self, model: Model, tree: PrefixTree, to_prefill: Link) -> None:
        super().__init__()
        self._model = model
        self._tree = tree
        self._to_prefill = to_prefill

    def connect(self, decode: Decode) -> None:
        """Say who D is."""
        self._decode = decode

    def turn_ended(self, turn: Turn) -> None:
        """Ask P for slots, and write if there are any."""
        decode = self._decode
        counts = self.counts
        if turn.kv_tokens <= turn.input_tokens:
            counts.nothing_to_send += 1
            return
        counts.attempts += 1
        counts.fitting += 1
        sends_all = self._model.direct_send == "session"
        slots = turn.kv_tokens - (0 if sends_all else turn.input_tokens)
        resident = self._tree.match_turn(turn)
        is_prefix_gone = not sends_all and resident.tokens < turn.input_tokens
        self._tree.release(turn, resident)
        if is_prefix_gone or not decode.has(turn):
            counts.reasons[Reason.SESSION_NOT_RESIDENT] += 1
            return
        # That design took what its allocator had free; what the tree holds was not evicted for a write.
        if (self._model.direct_alloc == "free" and self._tree.free_tokens < slots) or not self._tree.allocate(
            slots
        ):
            counts.reasons[Reason.ALLOC_FAILED] += 1
            return
        decode.pin(turn)
        counts.sent_tokens += slots
        counts.written_ns += self._model.hbm_ns(slots)
        self._to_prefill.send(self._model.link_ns(slots), lambda: self._written(turn, slots))

    def _written(self, turn: Turn, slots: int) -> None:
        self._decode.unpin(turn)
        resident = self._tree.match_turn(turn)
        if resident.tokens < turn.kv_tokens - slots:
            # The prefix went while D wrote.
            self._tree.release(turn, resident)
            self._tree.give_back(slots)
            self.counts.reasons[Reason.SESSION_NOT_RESIDENT] += 1
            return
        self.counts.reasons[Reason.OK] += 1
        self._tree.insert_synced(turn, resident, slots, turn.kv_tokens)

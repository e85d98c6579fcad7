"""P's kv_pool and radix tree: blocks of 512 tokens, and a tail at the end of each turn.

A block's id stands for all tokens up to its end, so the tree is flat: a prefix is resident as far as its
blocks are, one after the other. What follows a turn's last whole block, the rest of its prompt and what a
sync brought of its answer, is the turn's tail. Slots are free, or belong to nodes, or are in flight: held by
prefills, direct writes and ingests under way. Nodes that nobody uses are evicted when slots are wanted, least
recently used first, leaves before what they hang on. An engine evicts whole leaves, which may be longer.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from snapd.errors import InvariantBroken
from snapd.replay.chains import NO_TURN, Turn
from snapd.replay.trace import BLOCK_TOKENS

TailKey: TypeAlias = tuple[int]
# A block's id, or a turn's index in a tuple: its tail.
NodeKey: TypeAlias = int | TailKey


class _Node:
    """*slots* belong to it; *users* keep it from eviction; *tokens* is its length."""

    __slots__ = ("is_synced", "slots", "tokens", "users")

    def __init__(self, slots: int, tokens: int, is_synced: bool) -> None:
        self.slots = slots
        self.tokens = tokens
        self.users = 0
        self.is_synced = is_synced


class Match:
    """The resident part of a turn. It cannot be evicted until it is released or inserted.

    Attributes:
        blocks: how many of the turn's blocks.
        tail: the node after them: the turn's own tail, or that of the turn before.
        tokens: how far it reaches.
        unsynced_tokens: how far it would without what syncs have brought.
    """

    __slots__ = ("blocks", "tail", "tokens", "unsynced_tokens")

    def __init__(self, blocks: int, tail: TailKey | None, tokens: int, unsynced_tokens: int) -> None:
        self.blocks = blocks
        self.tail = tail
        self.tokens = tokens
        self.unsynced_tokens = unsynced_tokens


class PrefixTree:
    """The slots of P and what is in them.

    Attributes:
        free_tokens: slots of nobody.
        unused_tokens: slots of nodes that can be evicted.
        in_flight_tokens: slots that are being written.
        evicted_tokens: so many were evicted until now.
    """

    def __init__(self, pool_tokens: int, turns: Sequence[Turn]) -> None:
        self.pool_tokens = pool_tokens
        self.free_tokens = pool_tokens
        self.unused_tokens = 0
        self.in_flight_tokens = 0
        self.evicted_tokens = 0
        self._turns = turns
        self._nodes: dict[NodeKey, _Node] = {}
        # Nodes that nobody uses. A path is touched from its end, so a node comes before its parent.
        self._unused: OrderedDict[NodeKey, None] = OrderedDict()
        # Turns whose tail became part of a later turn's blocks, and which turn that was.
        self._continued_by: dict[int, Turn] = {}

    # --- slots

    def allocate(self, num_tokens: int) -> bool:
        """Take slots, and evict for them; False: there are not so many, and nothing was evicted."""
        if self.free_tokens + self.unused_tokens < num_tokens:
            return False
        while self.free_tokens < num_tokens:
            key, _ = self._unused.popitem(last=False)
            slots = self._nodes.pop(key).slots
            self.unused_tokens -= slots
            self.free_tokens += slots
            self.evicted_tokens += slots
        self.free_tokens -= num_tokens
        self.in_flight_tokens += num_tokens
        return True

    def give_back(self, num_tokens: int) -> None:
        """Free slots in flight."""
        self.free_tokens += num_tokens
        self.in_flight_tokens -= num_tokens

    # --- prefixes

    def match_prompt(self, turn: Turn) -> Match:
        """Return what is resident of a turn's prompt, all but its last token at most."""
        blocks, first_synced = self._resident_blocks(turn)
        tail: TailKey | None = None
        tokens = blocks * BLOCK_TOKENS
        unsynced_tokens = first_synced * BLOCK_TOKENS
        if turn.parent != NO_TURN:
            before = self._turns[turn.parent]
            node = self._nodes.get((before.index,))
            if node is not None and blocks == len(before.blocks):
                tail = (before.index,)
                if first_synced == blocks:
                    unsynced_tokens = min(before.input_tokens, tokens + node.tokens)
                tokens += node.tokens
        if tokens >= turn.input_tokens:
            tokens = turn.input_tokens - 1
        return self._held(turn, Match(blocks, tail, tokens, min(unsynced_tokens, tokens)))

    def match_turn(self, turn: Turn) -> Match:
        """Return what is resident of a turn itself: its prompt, and what a sync has brought of its answer."""
        blocks, first_synced = self._resident_blocks(turn)
        tokens = blocks * BLOCK_TOKENS
        node = self._nodes.get((turn.index,))
        if node is None and blocks == len(turn.blocks) and turn.index in self._continued_by:
            further, _ = self._resident_blocks(self._continued_by[turn.index])
            tokens = min(turn.kv_tokens, further * BLOCK_TOKENS)
        if node is None or blocks < len(turn.blocks):
            return self._held(turn, Match(blocks, None, tokens, first_synced * BLOCK_TOKENS))
        return self._held(
            turn, Match(blocks, (turn.index,), tokens + node.tokens, first_synced * BLOCK_TOKENS)
        )

    def _resident_blocks(self, turn: Turn) -> tuple[int, int]:
        """Return how many of the first blocks are resident, and how many before one that a sync brought."""
        nodes = self._nodes
        first_synced = -1
        count = 0
        for block in turn.blocks:
            node = nodes.get(block)
            if node is None:
                break
            if node.is_synced and first_synced < 0:
                first_synced = count
            count += 1
        return count, count if first_synced < 0 else first_synced

    def insert_prompt(self, turn: Turn, match: Match, slots: int) -> None:
        """Put a turn's prompt into the tree, of which *slots* in flight hold what was not matched.

        The match is over. The tail of the turn before becomes part of the blocks that now reach over it.
        """
        if match.tail is not None:
            node = self._nodes[match.tail]
            if node.users == 1:
                del self._nodes[match.tail]
                self._continued_by[match.tail[0]] = turn
                self.in_flight_tokens += node.slots
                slots += node.slots
            else:  # A branch goes on from it as well, and shares these slots.
                node.users -= 1
        self._release(self._path(turn, match.blocks, None))
        slots = self._add_blocks(turn, slots, is_synced=False)
        tail: TailKey | None = None
        if turn.tail_tokens:
            tail = (turn.index,)
            slots = self._add(tail, slots, turn.tail_tokens, is_synced=False)
        # Copies of what somebody else has put there meanwhile.
        self.give_back(slots)
        self._touch(self._path(turn, len(turn.blocks), tail))

    def insert_synced(self, turn: Turn, match: Match, slots: int, end_tokens: int) -> None:
        """Put what a sync brought into the tree: *slots* in flight hold all after the match, to *end_tokens*.

        The match is over.
        """
        self._release(self._path(turn, match.blocks, match.tail))
        slots = self._add_blocks(turn, slots, is_synced=True)
        tail: TailKey | None = None
        tail_tokens = end_tokens - len(turn.blocks) * BLOCK_TOKENS
        if tail_tokens > 0:
            tail = (turn.index,)
            node = self._nodes.get(tail)
            if node is None:
                tail = tail if slots else None
                if tail is not None:
                    slots = self._add(tail, slots, tail_tokens, is_synced=True)
            else:
                added = min(slots, max(0, tail_tokens - node.tokens))
                node.tokens += added
                node.slots += added
                self.in_flight_tokens -= added
                slots -= added
                if not node.users:
                    self.unused_tokens += added
        self.give_back(slots)
        self._touch(self._path(turn, len(turn.blocks), tail))

    def _add_blocks(self, turn: Turn, slots: int, *, is_synced: bool) -> int:
        """Add the blocks that are missing, and return the slots that are left."""
        for block in reversed(dict.fromkeys(block for block in turn.blocks if block not in self._nodes)):
            slots = self._add(block, slots, BLOCK_TOKENS, is_synced=is_synced)
        return slots

    def _add(self, key: NodeKey, slots: int, tokens: int, *, is_synced: bool) -> int:
        """Add a node that owns as many of *slots* as it can, and return the others."""
        # A branch has fewer slots than tokens: the first are those of the tail that it has left.
        own = min(tokens, slots)
        self._nodes[key] = _Node(own, tokens, is_synced)
        self._unused[key] = None
        self.in_flight_tokens -= own
        self.unused_tokens += own
        return slots - own

    # --- use

    def release(self, turn: Turn, match: Match) -> None:
        """Let what was matched be evicted again; it counts as used."""
        path = self._path(turn, match.blocks, match.tail)
        self._release(path)
        self._touch(path)

    @staticmethod
    def _path(turn: Turn, blocks: int, tail: TailKey | None) -> list[NodeKey]:
        """Return the nodes from the end to the root."""
        path: list[NodeKey] = list(reversed(turn.blocks[:blocks]))
        return path if tail is None else [tail, *path]

    def _held(self, turn: Turn, match: Match) -> Match:
        for key in self._path(turn, match.blocks, match.tail):
            node = self._nodes[key]
            node.users += 1
            if node.users == 1:
                del self._unused[key]
                self.unused_tokens -= node.slots
        return match

    def _release(self, path: Iterable[NodeKey]) -> None:
        for key in path:
            node = self._nodes[key]
            node.users -= 1
            if not node.users:
                self._unused[key] = None
                self.unused_tokens += node.slots

    def _touch(self, path: Iterable[NodeKey]) -> None:
        for key in path:
            if key in self._unused:
                self._unused.move_to_end(key)

    def validate(self) -> None:
        """Check the books.

        Raises:
            InvariantBroken: slots are lost, or counted twice.
        """
        held_tokens = sum(node.slots for node in self._nodes.values())
        if self.free_tokens + held_tokens + self.in_flight_tokens != self.pool_tokens:
            raise InvariantBroken("free slots, the tree's and those in flight are not the pool")
        if sum(self._nodes[key].slots for key in self._unused) != self.unused_tokens:
            raise InvariantBroken("the slots that can be evicted are counted wrongly")
        if min(self.free_tokens, self.in_flight_tokens) < 0:
            raise InvariantBroken("there are fewer slots than none")
        if any((node.users == 0) != (key in self._unused) for key, node in self._nodes.items()):
            raise InvariantBroken("a node that is in use can be evicted, or one that is not cannot")

"""Which request is the next turn of which.

A trace with hash_ids does not say it. The rule: request B is the next turn of request A when

1. A came earlier, and has at least one whole block of 512 tokens;
2. A's whole blocks are the first blocks of B;
3. B's prompt is at least as long as A's prompt and answer together, as the answer comes back in it;
4. A's last whole block is A's own: not more than four different blocks follow it anywhere in the trace, the
   rest of A's own prompt and three ways to go on. One with more is a prompt that many sessions share, such as
   block 0.

Of several such A the one with the most whole blocks is taken, and of these the latest. Two requests may go
on from the same A (an answer that was asked for twice): both are its next turns, and the second begins a
session of its own.

Where lines name a ``session_id``, that decides: B is the next turn of the line before it in its session, if
rule 3 holds. If it does not, the history was cut, and B goes on with nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from snapd.replay.trace import BLOCK_TOKENS, Request

# More than this, and a block is a shared prompt.
FOLLOWERS_MAX: Final = 4
NO_TURN: Final = -1


@dataclass(slots=True)
class Turn:
    """A request, and its place in its session.

    Attributes:
        index: place in the trace.
        at_ns: when it arrives.
        input_tokens, output_tokens: of prompt and answer.
        blocks: ids of the prompt's whole blocks.
        session_id: the conversation; a branch has one of its own.
        parent: index of the turn that it goes on from; ``NO_TURN``: none.
        children: indices of the turns that go on from it, in order of time.
    """

    index: int
    at_ns: int
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session_id: str
    parent: int
    children: list[int]

    @property
    def end_tokens(self) -> int:
        """Tokens of the conversation after the turn."""
        return self.input_tokens + self.output_tokens

    @property
    def kv_tokens(self) -> int:
        """Tokens that have KV when the turn ends: all but the last sampled one."""
        return max(self.input_tokens, self.end_tokens - 1)

    @property
    def tail_tokens(self) -> int:
        """Prompt tokens after its last whole block."""
        return self.input_tokens - len(self.blocks) * BLOCK_TOKENS


def chain_turns(requests: Sequence[Request]) -> list[Turn]:
    """Return the turns of a trace, linked by the rule above.

    Args:
        requests: in order of time.
    """
    followers: defaultdict[int, set[int]] = defaultdict(set)
    for request in requests:
        ids = request.hash_ids or ()
        for block, following in pairwise(ids):
            if len(followers[block]) <= FOLLOWERS_MAX:
                followers[block].add(following)
    turns: list[Turn] = []
    # The latest turn by its last whole block, and by its named session.
    by_last_block: dict[int, list[int]] = {}
    by_name: dict[str, int] = {}
    for request in requests:
        name = None if request.session_id is None else str(request.session_id)
        blocks = _whole_blocks(request, name, turns, by_name)
        if name is not None:
            parent = _named_parent(request, by_name.get(name, NO_TURN), turns)
        else:
            parent = _inferred_parent(request, blocks, turns, by_last_block)
        turn = Turn(
            len(turns), request.at_ns, request.input_length, request.output_length, blocks, "", parent, []
        )
        turn.session_id = _session_id(turn, name, turns)
        turns.append(turn)
        if parent != NO_TURN:
            turns[parent].children.append(turn.index)
        if name is not None:
            by_name[name] = turn.index
        elif blocks and len(followers[blocks[-1]]) <= FOLLOWERS_MAX:
            by_last_block.setdefault(blocks[-1], []).append(turn.index)
    return turns


def _session_id(turn: Turn, name: str | None, turns: list[Turn]) -> str:
    if turn.parent != NO_TURN and not turns[turn.parent].children:
        return turns[turn.parent].session_id
    return f"s{turn.index}" if name is None else f"{name}.{turn.index}"


def _whole_blocks(
    request: Request, name: str | None, turns: list[Turn], by_name: dict[str, int]
) -> tuple[int, ...]:
    whole_blocks = request.input_length // BLOCK_TOKENS
    if request.hash_ids is not None:
        return request.hash_ids[:whole_blocks]
    # Ids below zero are of no trace; they are the session's for as long as its history only grows.
    assert name is not None
    before = turns[by_name[name]] if name in by_name else None
    goes_on = before is not None and request.input_length >= before.end_tokens
    known = before.blocks if before is not None and goes_on else ()
    first = -(len(turns) + 1) << 24
    return known + tuple(first - place for place in range(len(known), whole_blocks))


def _named_parent(request: Request, before: int, turns: list[Turn]) -> int:
    if before != NO_TURN and request.input_length >= turns[before].end_tokens:
        return before
    return NO_TURN


def _inferred_parent(
    request: Request, blocks: tuple[int, ...], turns: list[Turn], by_last_block: dict[int, list[int]]
) -> int:
    for place in range(len(blocks) - 1, -1, -1):
        for index in reversed(by_last_block.get(blocks[place], ())):
            before = turns[index]
            if before.blocks == blocks[: place + 1] and before.end_tokens <= request.input_length:
                return index
    return NO_TURN

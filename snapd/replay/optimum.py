"""What could have been reused by somebody who knows the future: two upper bounds.

Both are fractional interval packings. A piece of KV that is to be reused must be kept from when it exists
until then; pieces may be kept in part, and at no time may more be kept than there is room. Whoever knows the
future drops what is needed last, and for pieces of which every token is worth the same that is optimal.

* ``optimal``: of the buffer. P's own cache held what it held in the run, and what it lacked at a next turn
  may come out of the buffer. No eviction policy and no ingest time can bring more to what P has.
* ``omniscient``: of P's pool and the buffer together, as one cache of blocks that knows the future. The
  rule that a block is of use only after those before it is left out, and so are the slots in flight.

Both keep the times of the run: when a turn was prefilled, and when it had ended on D.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from snapd.replay.chains import NO_TURN, Turn
from snapd.replay.run import NEVER, Run
from snapd.replay.trace import BLOCK_TOKENS


class Piece(NamedTuple):
    """Tokens that are there from *start_ns* on, and are wanted once, at *end_ns*."""

    start_ns: int
    end_ns: int
    tokens: int


def packed_tokens(pieces: Iterable[Piece], capacity_tokens: int) -> int:
    """Return how many tokens can be kept until they are wanted, parts of pieces included.

    A piece takes room in ``[start_ns, end_ns)``; one that is wanted as soon as it is there takes none.
    """
    kept_tokens = 0
    used_tokens = 0
    left: dict[int, int] = {}
    by_latest: list[tuple[int, int]] = []
    by_earliest: list[tuple[int, int]] = []
    for number, piece in enumerate(sorted(pieces)):
        while by_earliest and by_earliest[0][0] <= piece.start_ns:
            _, over = heapq.heappop(by_earliest)
            tokens = left.pop(over, 0)
            used_tokens -= tokens
            kept_tokens += tokens
        if piece.end_ns <= piece.start_ns:
            kept_tokens += piece.tokens
            continue
        left[number] = piece.tokens
        used_tokens += piece.tokens
        heapq.heappush(by_latest, (-piece.end_ns, number))
        heapq.heappush(by_earliest, (piece.end_ns, number))
        while used_tokens > capacity_tokens:
            _, latest = by_latest[0]
            dropped_tokens = min(left.get(latest, 0), used_tokens - capacity_tokens)
            if dropped_tokens == left.get(latest, 0):
                heapq.heappop(by_latest)
                left.pop(latest, None)
            else:
                left[latest] -= dropped_tokens
            used_tokens -= dropped_tokens
    return kept_tokens + sum(left.values())


def reusable_tokens(turn: Turn, turns: Sequence[Turn]) -> int:
    """Return how many tokens of a turn's prompt the turn before leaves; one is always computed."""
    if turn.parent == NO_TURN:
        return 0
    return min(turns[turn.parent].kv_tokens, turn.input_tokens - 1)


def _prefilled(run: Run, turns: Sequence[Turn]) -> list[Turn]:
    """Return the next turns that P has prefilled, in the order in which it began."""
    began = [turn for turn in turns if run.prefilled[turn.index].began_ns != NEVER]
    return sorted(began, key=lambda turn: (run.prefilled[turn.index].began_ns, turn.index))


def optimal_tokens(run: Run, turns: Sequence[Turn], buffer_tokens: int, link_ns_per_token: float) -> int:
    """Return the bound for the buffer.

    Args:
        run: a snapshot run.
        turns: of the trace.
        buffer_tokens: that the buffer holds.
        link_ns_per_token: at the link's whole bandwidth.
    """
    own_tokens = 0
    pieces: list[Piece] = []
    # A snapshot that was kept for a first next turn is there for a second one too.
    last_use_ns: dict[int, int] = {}
    for turn in _prefilled(run, turns):
        wanted = reusable_tokens(turn, turns)
        if not wanted:
            continue
        done = run.prefilled[turn.index]
        own = min(wanted, run.own_tokens.get(turn.index, done.cached_tokens))
        own_tokens += own
        ended_ns = run.ended_ns[turn.parent]
        lacking = wanted - own
        there_ns = ended_ns + round(lacking * link_ns_per_token)
        if lacking and ended_ns != NEVER and there_ns <= done.began_ns:
            start_ns = max(there_ns, last_use_ns.get(turn.parent, 0))
            pieces.append(Piece(start_ns, done.began_ns, lacking))
            last_use_ns[turn.parent] = done.began_ns
    return own_tokens + packed_tokens(pieces, buffer_tokens)


def omniscient_tokens(run: Run, turns: Sequence[Turn], capacity_tokens: int) -> int:
    """Return the bound for P's pool and the buffer together.

    Args:
        run: any run.
        turns: of the trace.
        capacity_tokens: of both.
    """
    pieces: list[Piece] = []
    # From when on a block is there, after its latest use; the same for the rest of a turn after its blocks.
    block_ns: dict[int, int] = {}
    rest_ns: dict[int, int] = {}
    for turn in _prefilled(run, turns):
        done = run.prefilled[turn.index]
        wanted = reusable_tokens(turn, turns)
        before = turns[turn.parent] if wanted else None
        whole_blocks = wanted // BLOCK_TOKENS
        for place, block in enumerate(turn.blocks):
            if before is not None and place < whole_blocks:
                end_tokens = (place + 1) * BLOCK_TOKENS
                piece = _piece(run, before, end_tokens, block_ns.get(block), done.began_ns, BLOCK_TOKENS)
                pieces.extend(piece)
            block_ns[block] = done.done_ns
        if before is not None and wanted % BLOCK_TOKENS:
            known_ns = rest_ns.get(before.index)
            pieces.extend(_piece(run, before, wanted, known_ns, done.began_ns, wanted % BLOCK_TOKENS))
            rest_ns[before.index] = done.done_ns
    return packed_tokens(pieces, capacity_tokens)


def _piece(
    run: Run, before: Turn, end_tokens: int, known_ns: int | None, at_ns: int, tokens: int
) -> tuple[Piece, ...]:
    """Return what must be kept of a turn for the next; nothing if it does not exist by then."""
    if known_ns is None:
        if end_tokens <= before.input_tokens:
            known_ns = run.prefilled[before.index].done_ns
        else:
            known_ns = run.ended_ns[before.index]
            if known_ns == NEVER or known_ns > at_ns:
                # Its prompt's part may be reused all the same.
                tokens = max(0, tokens - (end_tokens - before.input_tokens))
                known_ns = run.prefilled[before.index].done_ns
    return (Piece(known_ns, at_ns, tokens),) if tokens else ()

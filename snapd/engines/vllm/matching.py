"""Which tokens D sends and which P takes: whole blocks, past what P holds, never the last token.

Pure: nothing here asks a daemon or an engine.

Source: design, sections 4 and 9.
"""

from collections.abc import Sequence

import msgspec

from snapd.units import align_down
from snapd.wire import LookupRep


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that a request may start from.

    Attributes:
        slab_handle, session_id: of the attempt.
        token_start: the first token that it holds.
        wanted_tokens: what P would have after the load, from token 0 on; whole blocks.
        checked_tokens: so many of the request's tokens are compared. All of the snapshot's where they can be;
            else those that the page keys have shown to be equal.
    """

    slab_handle: int
    session_id: str
    token_start: int
    wanted_tokens: int
    checked_tokens: int


def pushable_tokens(num_tokens: int, num_computed_tokens: int, block_tokens: int) -> int:
    """Return how many tokens of a request that has finished D can send: whole blocks that have their KV.

    The token that was sampled last has none. What is computed ahead of it, for draft tokens or by a step that
    is still under way, is not of this request's tokens.
    """
    return align_down(max(0, min(num_computed_tokens, num_tokens - 1)), block_tokens)


def loadable_tokens(num_tokens: int, block_tokens: int) -> int:
    """Return how many tokens of a request P can take: whole blocks, and one token is left to compute."""
    return align_down(max(0, num_tokens - 1), block_tokens)


def choose(
    found: LookupRep,
    *,
    is_by_session: bool,
    session_id: str,
    num_tokens: int,
    resident_tokens: int,
    block_tokens: int,
    ranks: Sequence[int],
    least_tokens: int,
) -> Choice | None:
    """Return what to load of a snapshot that was found, or None.

    Args:
        found: the daemon's answer.
        is_by_session: it was asked for by name, so that nothing is known of its tokens yet.
        session_id: the request's own; empty: it names none.
        num_tokens: the request's.
        resident_tokens: what P holds of them; whole blocks.
        block_tokens: tokens in a block.
        ranks: P's; the shards of another number of ranks hold other heads.
        least_tokens: nothing that saves fewer is loaded.
    """
    if not found.slab_handle or tuple(found.ranks) != tuple(ranks):
        return None
    end_tokens = found.token_start + found.num_tokens
    matched_tokens = end_tokens if is_by_session else min(found.matched_tokens, end_tokens)
    if matched_tokens > num_tokens:
        return None
    is_whole = matched_tokens == end_tokens
    if not is_whole and found.session_id != session_id:
        # Loading consumes it, and its own session would miss the rest.
        return None
    wanted_tokens = min(align_down(matched_tokens, block_tokens), loadable_tokens(num_tokens, block_tokens))
    is_beside = found.token_start > resident_tokens
    if is_beside or wanted_tokens - resident_tokens < max(1, least_tokens):
        return None
    return Choice(
        slab_handle=found.slab_handle,
        session_id=found.session_id,
        token_start=found.token_start,
        wanted_tokens=wanted_tokens,
        checked_tokens=end_tokens if is_whole else wanted_tokens,
    )


def is_orphan(found: LookupRep, num_tokens: int, resident_tokens: int) -> bool:
    """Return whether a session's snapshot builds on a prefix that P holds no longer.

    It cannot be used for this request, nor after it: P will have computed what it holds by then.
    """
    end_tokens = found.token_start + found.num_tokens
    return bool(found.slab_handle) and resident_tokens < found.token_start and end_tokens <= num_tokens

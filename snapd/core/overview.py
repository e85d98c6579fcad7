"""What an overview of the daemon holds: maps of the arenas, groups of attempts, and D workers.

Everything in it is bounded, whatever the daemon holds. It is put together by ``core/survey.py``.
"""

from typing import Final, Literal, TypeAlias

import msgspec

from snapd.core.events import State

Order: TypeAlias = Literal["deadline", "age", "bytes"]

# Cells of one arena's map, and of all maps together: each takes four numbers in a reply.
CELLS_MAX: Final = 256
CELLS_TOTAL_MAX: Final = 4_096
ATTEMPTS_MAX: Final = 100
PEERS_MAX: Final = 64


class ArenaMap(msgspec.Struct, frozen=True, kw_only=True):
    """Where in an arena what lies. What no field names is free.

    Attributes:
        rank: whose arena.
        cell_bytes: of every cell but the last, which ends where the arena does.
        writing_bytes: held by RESERVED and TRANSFERRING attempts in each cell, shape [cells].
        ready_bytes: by READY attempts, where this rank has no lease.
        leased_bytes: by READY attempts, where it has one.
        quarantined_bytes: nobody's, and not to be reused yet.
        num_shards: how many shards those are, in the same order.
    """

    rank: int
    cell_bytes: int
    writing_bytes: tuple[int, ...]
    ready_bytes: tuple[int, ...]
    leased_bytes: tuple[int, ...]
    quarantined_bytes: tuple[int, ...]
    num_shards: tuple[int, int, int, int]


class AttemptGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The open attempts in one state; those of which a rank has a lease are a group of their own.

    Attributes:
        bytes: payload of all ranks' shards.
        oldest_since_ns: when the first of them came into the state; 0: there is none.
        next_deadline_ns: the first of their deadlines; 0: there is none.
    """

    state: State
    is_leased: bool
    count: int = 0
    bytes: int = 0
    oldest_since_ns: int = 0
    next_deadline_ns: int = 0


class AttemptLine(msgspec.Struct, frozen=True, kw_only=True):
    """One open attempt, in short.

    Attributes:
        deadline_ns: of the state; of the first lease to end, if it is leased.
        peer: what D calls itself, else its process.
        num_committed: ranks that have committed, out of *num_ranks*.
    """

    slab_handle: int
    session_id: str
    state: State
    is_leased: bool
    abort_wanted: str
    peer: str
    num_tokens: int
    token_start: int
    bytes: int
    created_ns: int
    state_since_ns: int
    deadline_ns: int
    num_committed: int
    num_ranks: int


class PeerLine(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one D worker's attempts.

    Attributes:
        peer: what D calls itself, else its process; empty: all those that are not listed, together.
        open_attempts: now.
        open_bytes: payload of these.
        ended: attempts that have ended.
        ok: of these, with P having the snapshot.
        refused: prepares.
        bytes_ok: payload of the ones that were ok.
        last_problem: the reason of the last end or refusal that was not ok.
        last_ns: when one of its attempts last ended or was refused; 0: none has.
    """

    peer: str
    open_attempts: int = 0
    open_bytes: int = 0
    ended: int = 0
    ok: int = 0
    refused: int = 0
    bytes_ok: int = 0
    last_problem: str = ""
    last_ns: int = 0


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """A picture of all open attempts, taken a few at a time so that nobody waits for it.

    With few attempts it is exact. With very many it may be some seconds old, and its parts may be of
    slightly different times.

    Attributes:
        surveyed_ns: when the picture was finished.
        maps: one an arena.
        groups: open attempts by state.
        attempts: those that come first in the order asked for, at most 100; these are as of now.
        peers: D workers, those with open attempts first, then the latest; at most 64, and one for the others.
    """

    surveyed_ns: int
    maps: tuple[ArenaMap, ...]
    groups: tuple[AttemptGroup, ...]
    attempts: tuple[AttemptLine, ...]
    peers: tuple[PeerLine, ...]

"""The state machine of an attempt, whole, as one literal.

Every pair (state, event) is decided in exactly one of three ways:

* ``TRANSITIONS``: the event is acted upon. The cell names the states that may follow and the
  action, a method of ``core.lives.Lives``.
* ``ABSORBED``: nothing changes. An exact repeat gets its first answer again, a start while it is open.
* ``REJECTED``: nothing changes, and whoever asked is told why.

A state that is listed among its own successors may be kept: the action decides, for instance
whether the last rank has committed. What does not fit the table stands below it, marked.

Source: design, section 3. The diagram in the docs is drawn from this file.
"""

from typing import Final, NamedTuple

from snapd.core import events as e
from snapd.core.events import FINAL_STATES, State
from snapd.errors import Reason

S = State


class Cell(NamedTuple):
    """What an event does in a state.

    Attributes:
        successors: the states in which the attempt may be afterwards.
        action: name of the method of ``Lives`` that does it.
    """

    successors: tuple[State, ...]
    action: str


TRANSITIONS: Final[dict[State, dict[type[e.SessionEvent], Cell]]] = {
    S.RESERVED: {
        e.TransferStarted: Cell((S.TRANSFERRING,), "start_transfer"),
        e.RankCommitted: Cell((S.RESERVED, S.TRANSFERRING, S.READY, S.ABORTED), "commit_rank"),
        e.TransferFailed: Cell((S.RESERVED, S.ABORTED), "fail_transfer"),
        e.AbortAsked: Cell((S.ABORTED,), "abort"),
        e.WriterExited: Cell((S.ABORTED,), "lose_writer"),
        e.ReserveTimedOut: Cell((S.RESERVED, S.ABORTED), "expire_state"),
        e.SupersededBy: Cell((S.ABORTED,), "supersede"),
        e.DaemonStopping: Cell((S.ABORTED,), "stop"),
    },
    S.TRANSFERRING: {
        e.RankCommitted: Cell((S.TRANSFERRING, S.READY, S.ABORTED), "commit_rank"),
        e.WriterDrained: Cell((S.TRANSFERRING,), "note_drained"),
        e.TransferFailed: Cell((S.TRANSFERRING, S.ABORTED), "fail_transfer"),
        e.AbortAsked: Cell((S.ABORTED,), "abort"),
        e.WriterExited: Cell((S.ABORTED,), "lose_writer"),
        e.TransferTimedOut: Cell((S.TRANSFERRING, S.ABORTED), "expire_state"),
        e.SupersededBy: Cell((S.ABORTED,), "supersede"),
        e.DaemonStopping: Cell((S.ABORTED,), "stop"),
    },
    S.READY: {
        e.LeaseAsked: Cell((S.READY,), "grant_lease"),
        e.VoteCast: Cell((S.READY, S.INGESTED, S.ABORTED), "count_vote"),
        e.LeaseTimedOut: Cell((S.READY, S.ABORTED), "revoke_lease"),
        e.LookedUp: Cell((S.READY,), "touch"),
        e.WriterDrained: Cell((S.READY,), "note_drained"),
        e.WriterExited: Cell((S.READY,), "note_exit"),
        e.AbortAsked: Cell((S.READY, S.ABORTED), "abort"),
        e.ReadyExpired: Cell((S.READY, S.ABORTED), "expire_state"),
        e.VictimChosen: Cell((S.ABORTED,), "evict"),
        e.SupersededBy: Cell((S.READY, S.ABORTED), "supersede"),
        e.DaemonStopping: Cell((S.ABORTED,), "stop"),
    },
    S.INGESTED: {},
    S.ABORTED: {},
}

REJECTED: Final[dict[State, dict[type[e.SessionEvent], Reason]]] = {
    S.RESERVED: {
        e.LeaseAsked: Reason.WRONG_STATE,
        e.VoteCast: Reason.WRONG_STATE,
        e.WriterDrained: Reason.WRONG_STATE,
        e.VictimChosen: Reason.WRONG_STATE,
    },
    S.TRANSFERRING: {
        e.LeaseAsked: Reason.WRONG_STATE,
        e.VoteCast: Reason.WRONG_STATE,
        e.VictimChosen: Reason.WRONG_STATE,
    },
    S.READY: {e.TransferFailed: Reason.WRONG_STATE},
    S.INGESTED: {},
    S.ABORTED: {},
}

_STALE_STATE_TIMERS: Final[frozenset[type[e.SessionEvent]]] = frozenset(
    {e.ReserveTimedOut, e.TransferTimedOut, e.ReadyExpired}
)
_EVERY_EVENT: Final[frozenset[type[e.SessionEvent]]] = frozenset({
    e.TransferStarted, e.RankCommitted, e.TransferFailed, e.AbortAsked, e.WriterDrained, e.WriterExited,
    e.LeaseAsked, e.VoteCast, e.LookedUp, e.ReserveTimedOut, e.TransferTimedOut, e.ReadyExpired,
    e.LeaseTimedOut, e.VictimChosen, e.SupersededBy, e.DaemonStopping,
})  # fmt: skip

ABSORBED: Final[dict[State, frozenset[type[e.SessionEvent]]]] = {
    S.RESERVED: (_STALE_STATE_TIMERS - {e.ReserveTimedOut}) | {e.LeaseTimedOut, e.LookedUp},
    S.TRANSFERRING: (_STALE_STATE_TIMERS - {e.TransferTimedOut})
    | {e.TransferStarted, e.LeaseTimedOut, e.LookedUp},
    S.READY: (_STALE_STATE_TIMERS - {e.ReadyExpired}) | {e.TransferStarted, e.RankCommitted},
    S.INGESTED: _EVERY_EVENT,
    S.ABORTED: _EVERY_EVENT,
}

# --- What does not fit the table ---------------------------------------------------------------

# Events that an attempt absorbs once it has ended and that are heard all the same by the quarantine
# in which its bytes lie: as drain proof from the writer, or as the end of a read.
HEARD_BY_QUARANTINE: Final[frozenset[type[e.SessionEvent]]] = frozenset({
    e.WriterDrained, e.TransferFailed, e.AbortAsked, e.WriterExited, e.VoteCast,
})  # fmt: skip

# The reasons that a vote of "no" may give, and those that end the attempt whatever `keep` says:
# bytes that did not match will not match at the next try.
VOTE_NO_REASONS: Final = frozenset({
    Reason.ALLOC_FAILED_ON_FINALIZE, Reason.CHECKSUM_MISMATCH, Reason.TOKEN_MISMATCH,
    Reason.PREFIX_NOT_RESIDENT, Reason.INGEST_FAILED,
})  # fmt: skip
NEVER_KEPT: Final = frozenset({Reason.CHECKSUM_MISMATCH})
TRANSFER_FAILED_REASONS: Final = frozenset({Reason.TRANSFER_FAILED, Reason.SESSION_NOT_RESIDENT})

# The state whose clock each timer is.
STATE_TIMER: Final[dict[State, type[e.TimerEvent]]] = {
    S.RESERVED: e.ReserveTimedOut,
    S.TRANSFERRING: e.TransferTimedOut,
    S.READY: e.ReadyExpired,
}
STATE_TIMER_REASON: Final[dict[State, Reason]] = {
    S.RESERVED: Reason.RESERVE_TIMEOUT,
    S.TRANSFERRING: Reason.TRANSFER_TIMEOUT,
    S.READY: Reason.READY_EXPIRED,
}
assert set(STATE_TIMER) == set(State) - FINAL_STATES

"""Every operation of the client library, once: what is asked, and what becomes of the answer.

A function here makes a ``Call``: the request, the reply that answers it, and how the reply
becomes a result. It does no I/O and knows no connection. ``Client`` and ``AsyncClient`` turn
each function into a method with the same parameters and this docstring.

Any call can also raise:

* ``DaemonUnreachable``, ``ConnectionLost``, ``RequestTimeout``: see ``snapd.errors``;
* ``ProtocolError``: what answered does not speak this protocol;
* ``InvalidRequest``: a value cannot be sent or is out of range;
* ``InternalError``: a bug in the daemon.

Every function takes *timeout_s*, in seconds; None: the client's default.

Source: design, section 5.
"""

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeAlias, TypeVar, cast

import msgspec

from snapd.core.events import PlaneChecksums, State
from snapd.core.overview import Order
from snapd.errors import Reason, WrongRank, error_for
from snapd.layout import Layout
from snapd.wire import (
    AbortReq,
    AckRep,
    BeginIngestRep,
    BeginIngestReq,
    CommitReq,
    DeclareLayoutRep,
    DeclareLayoutReq,
    DrainedReq,
    DrainReq,
    GetRep,
    GetReq,
    HelloRep,
    ListRep,
    ListReq,
    LookupRep,
    LookupReq,
    PingRep,
    PingReq,
    RankGrant,
    Reply,
    Request,
    SnapshotPrepareReceiveReqInput,
    SnapshotPrepareReceiveReqOutput,
    StatsRep,
    StatsReq,
    TransferFailedReq,
    TransferStartedReq,
    VoteRep,
    VoteReq,
    WatchReq,
)

_T = TypeVar("_T")
_ReplyT = TypeVar("_ReplyT", bound=Reply)
_Convert: TypeAlias = Callable[[Reply, HelloRep], _T]

NO_ID: Final = 0


class Call(Generic[_T]):
    """One operation, ready to be sent. Immutable; may be submitted any number of times.

    Attributes:
        request: what is asked, with the id still open; None: only that the connection stands.
        reply_type: what answers it.
        convert: makes the result of the reply and of the connection's hello; may raise ``RequestError``.
        timeout_s: how long the whole call may take; None: the client's default.
    """

    __slots__ = ("convert", "reply_type", "request", "timeout_s")

    def __init__(
        self,
        request: Request | None,
        reply_type: type[Reply],
        convert: _Convert[_T],
        timeout_s: float | None,
    ) -> None:
        self.request = request
        self.reply_type = reply_type
        self.convert = convert
        self.timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"Call({type(self.request).__name__})"


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """A slab in every rank's arena: where D may write, and until when it has to start.

    Attributes:
        slab_handle: names the attempt from here on.
        epoch: the life of the daemon that granted it; goes with the handle into every later call.
        session_id: as asked.
        num_tokens: tokens granted, from *token_start* on.
        token_start: as asked, or later when the resident hint was used.
        resident_hint_tokens: what P is believed to hold of the session.
        ranks: one grant a rank: base pointer, offsets and strides in bytes, extents.
        expires_ms: the transfer has to start within it, from the grant on.
        layout_fingerprint, token_digest: as asked; empty: not known to whoever made this.
    """

    slab_handle: int
    epoch: str
    session_id: str
    num_tokens: int
    token_start: int
    resident_hint_tokens: int
    ranks: tuple[RankGrant, ...]
    expires_ms: int
    layout_fingerprint: str = ""
    token_digest: str = ""

    def for_rank(self, rank: int) -> RankGrant:
        """Return the grant of *rank*'s shard.

        Raises:
            WrongRank: the attempt has no shard for it.
        """
        for grant in self.ranks:
            if grant.rank == rank:
                return grant
        raise WrongRank(f"rank {rank} is not among {[grant.rank for grant in self.ranks]}")


def _as_is(request: Request, reply_type: type[_ReplyT], timeout_s: float | None) -> Call[_ReplyT]:
    """Return a call whose result is the reply itself."""
    return Call(request, reply_type, lambda reply, _hello: cast("_ReplyT", reply), timeout_s)


def greet(*, timeout_s: float | None = None) -> Call[HelloRep]:
    """Have a connection that has said hello; nothing else is asked."""
    return Call(None, HelloRep, lambda _reply, hello: hello, timeout_s)


def ping(*, timeout_s: float | None = None) -> Call[PingRep]:
    """Ask whether the daemon answers; the reply names its epoch."""
    return _as_is(PingReq(id=NO_ID), PingRep, timeout_s)


def declare_layout(rank: int, layout: Layout, *, timeout_s: float | None = None) -> Call[str]:
    """Say what *rank*'s kv_pool looks like, and return the layout's fingerprint.

    D may push snapshots of that layout from then on. The client remembers it, and declares it
    again when it meets another epoch of the daemon.

    Raises:
        InvalidRequest: the layout is out of range.
        WrongRank: the daemon has no arena for *rank*.
        LimitReached: too many layouts are declared.
    """
    return Call(
        DeclareLayoutReq(id=NO_ID, rank=rank, layout=layout),
        DeclareLayoutRep,
        lambda reply, _hello: cast("DeclareLayoutRep", reply).layout_fingerprint,
        timeout_s,
    )


# --- D -----------------------------------------------------------------------------------------


def prepare_receive(
    session_id: str,
    num_tokens: int,
    layout_fingerprint: str,
    *,
    token_start: int = 0,
    token_digest: str = "",
    page_keys: Sequence[str] = (),
    ranks: Sequence[int] = (),
    use_resident_hint: bool = False,
    is_only_writer: bool = False,
    token_ids: bytes = b"",
    block_hashes: bytes = b"",
    timeout_s: float | None = None,
) -> Call[Grant]:
    """Ask for a slab in every rank's arena, and return the grant.

    Never sent twice: if the connection ends before the reply, the attempt that may have come of
    it ends by its reserve timer.

    Args:
        session_id: the caller's name for the conversation.
        num_tokens: tokens to bring over.
        layout_fingerprint: of D's kv_pool; P must have declared it.
        token_start: the first of them; a multiple of the page size.
        token_digest: ``layout.token_digest`` of all tokens from 0 to the end of the snapshot.
        page_keys: ``layout.page_keys`` of the same tokens; may be empty.
        ranks: shards wanted; empty: every rank.
        use_resident_hint: let the daemon leave out what P is believed to hold.
        is_only_writer: this process makes every write; its exit is drain proof.
        token_ids: for KV events: of the tokens from *token_start* on, packed by
            ``snapd.kvevents.hashes.pack_token_ids``; no more than the daemon's hello wants.
        block_hashes: for KV events: one a whole page from token 0 on, packed by ``pack_block_hashes``.
        timeout_s: for the whole call.

    Raises:
        BufferFull: no room now; ``retry_after_ms`` says when to ask again.
        TooLarge: it can never fit.
        LayoutMismatch: P declared no such layout.
        LimitReached: too many attempts are open.
        Draining: the daemon takes no new attempts.

    Source: design, sections 3 and 5.
    """
    request = SnapshotPrepareReceiveReqInput(
        id=NO_ID,
        session_id=session_id,
        num_tokens=num_tokens,
        layout_fingerprint=layout_fingerprint,
        token_start=token_start,
        token_digest=token_digest,
        page_keys=tuple(page_keys),
        ranks=tuple(ranks),
        use_resident_hint=use_resident_hint,
        is_only_writer=is_only_writer,
        token_ids=token_ids,
        block_hashes=block_hashes,
    )

    def convert(reply: Reply, hello: HelloRep) -> Grant:
        output = cast("SnapshotPrepareReceiveReqOutput", reply)
        if not output.ok:
            raise error_for(output.reason, output.detail, output.retry_after_ms)
        return Grant(
            slab_handle=output.slab_handle,
            epoch=hello.epoch,
            session_id=session_id,
            num_tokens=output.num_tokens,
            token_start=output.token_start,
            resident_hint_tokens=output.resident_hint_tokens,
            ranks=output.ranks,
            expires_ms=output.expires_ms,
            layout_fingerprint=layout_fingerprint,
            token_digest=token_digest,
        )

    return Call(request, SnapshotPrepareReceiveReqOutput, convert, timeout_s)


def transfer_started(slab_handle: int, *, epoch: str = "", timeout_s: float | None = None) -> Call[AckRep]:
    """Say that D is about to write; the attempt's transfer timer starts.

    Raises:
        StaleHandle: the attempt has ended, or belongs to another *epoch*.
        WrongState: it is past writing.
    """
    return _as_is(TransferStartedReq(id=NO_ID, slab_handle=slab_handle, epoch=epoch), AckRep, timeout_s)


def commit(
    slab_handle: int,
    rank: int,
    num_bytes: int,
    num_tokens: int,
    checksums: PlaneChecksums,
    *,
    drained: bool = True,
    epoch: str = "",
    timeout_s: float | None = None,
) -> Call[AckRep]:
    """Say that every byte of *rank*'s shard is there. An exact repeat gets the first answer.

    With *drained* False the bytes are read as usual, and go to quarantine afterwards: call ``drained`` as
    soon as there is proof. A repeat changes nothing about it.

    Args:
        slab_handle: the attempt.
        rank: whose shard.
        num_bytes: payload bytes written, without padding.
        num_tokens: tokens written.
        checksums: a pair of 64-bit sums a plane, shape [num_planes]; Python ints.
        drained: no write of the shard can still land. False: a write that failed before it was repeated may.
        epoch: the grant's; empty: not checked.
        timeout_s: for the whole call.

    Raises:
        StaleHandle: the attempt has ended, or belongs to another *epoch*.
        WrongRank: it has no shard for *rank*.
        RequestError: ``partial-transfer``: other counts than were granted; the attempt has ended.
    """
    request = CommitReq(
        id=NO_ID,
        slab_handle=slab_handle,
        epoch=epoch,
        rank=rank,
        num_bytes=num_bytes,
        num_tokens=num_tokens,
        checksums=checksums,
        drained=drained,
    )
    return _as_is(request, AckRep, timeout_s)


def transfer_failed(
    slab_handle: int,
    *,
    reason: Reason = Reason.TRANSFER_FAILED,
    drained: bool = False,
    rank: int | None = None,
    epoch: str = "",
    timeout_s: float | None = None,
) -> Call[AckRep]:
    """Say that a write failed, or that D no longer holds the session; the attempt ends.

    Args:
        slab_handle: the attempt.
        reason: ``transfer-failed`` or ``session-not-resident``.
        drained: no write of *rank*'s shard can still land.
        rank: whose shard; None: every one.
        epoch: the grant's; empty: not checked.
        timeout_s: for the whole call.

    Raises:
        StaleHandle: the attempt is not known, or belongs to another *epoch*.
    """
    request = TransferFailedReq(
        id=NO_ID, slab_handle=slab_handle, epoch=epoch, reason=reason, drained=drained, rank=rank
    )
    return _as_is(request, AckRep, timeout_s)


def abort(
    slab_handle: int, *, drained: bool = False, epoch: str = "", timeout_s: float | None = None
) -> Call[AckRep]:
    """End the attempt. The reply's ``pending`` says that it waits for a reader.

    Args:
        slab_handle: the attempt.
        drained: no write of it can still land.
        epoch: the grant's; empty: not checked.
        timeout_s: for the whole call.

    Raises:
        StaleHandle: the attempt is not known, or belongs to another *epoch*.
    """
    return _as_is(
        AbortReq(id=NO_ID, slab_handle=slab_handle, epoch=epoch, drained=drained), AckRep, timeout_s
    )


def drained(
    slab_handle: int, *, rank: int | None = None, epoch: str = "", timeout_s: float | None = None
) -> Call[AckRep]:
    """Give drain proof: no write of *rank* (None: any) can still land.

    For an attempt that has ended, or a rank that was committed with ``drained=False``.

    Raises:
        WrongState: the rank is still being written.
        WrongRank: the attempt has no shard for *rank*.
        StaleHandle: the attempt is not known, or belongs to another *epoch*.
    """
    return _as_is(DrainedReq(id=NO_ID, slab_handle=slab_handle, epoch=epoch, rank=rank), AckRep, timeout_s)


# --- P -----------------------------------------------------------------------------------------


def begin_ingest(
    slab_handle: int,
    rank: int,
    layout_fingerprint: str,
    *,
    session_id: str = "",
    epoch: str = "",
    timeout_s: float | None = None,
) -> Call[BeginIngestRep]:
    """Take the lease on *rank*'s shard of a READY snapshot: where it lies, and what D committed.

    Args:
        slab_handle: the attempt.
        rank: the reader.
        layout_fingerprint: of its kv_pool.
        session_id: whose snapshot the reader takes it for; empty: not checked.
        epoch: the grant's; empty: not checked.
        timeout_s: for the whole call.

    Raises:
        StaleHandle: the attempt has ended, or is another session's, or belongs to another *epoch*.
        WrongState: it is not READY, or is about to end.
        WrongRank: it has no shard for *rank*.
        LayoutMismatch: it was written with another layout.
    """
    request = BeginIngestReq(
        id=NO_ID,
        slab_handle=slab_handle,
        epoch=epoch,
        rank=rank,
        layout_fingerprint=layout_fingerprint,
        session_id=session_id,
    )
    return _as_is(request, BeginIngestRep, timeout_s)


def vote(
    slab_handle: int,
    rank: int,
    lease_id: int,
    ok: bool,
    *,
    reason: Reason = Reason.OK,
    keep: bool = False,
    epoch: str = "",
    timeout_s: float | None = None,
) -> Call[VoteRep]:
    """Say whether *rank*'s shard is in its kv_pool and matches; return the decision of all ranks.

    The reply waits until every rank has voted, or the round ends. Insert only if ``commit`` is true.

    Args:
        slab_handle: the attempt.
        rank: the voter.
        lease_id: from ``begin_ingest``.
        ok: the bytes are there and match.
        reason: why not.
        keep: a "no" that leaves the snapshot READY for another try.
        epoch: the grant's; empty: not checked.
        timeout_s: for the whole call; at least the lease's time is sensible.

    Raises:
        StaleHandle: the attempt has ended, or belongs to another *epoch*.
        RequestError: ``lease-expired``: the vote came too late; do not insert.
    """
    request = VoteReq(
        id=NO_ID,
        slab_handle=slab_handle,
        epoch=epoch,
        rank=rank,
        lease_id=lease_id,
        ok=ok,
        reason=reason,
        keep=keep,
    )
    return _as_is(request, VoteRep, timeout_s)


def lookup(
    layout_fingerprint: str,
    *,
    session_id: str = "",
    page_keys: Sequence[str] = (),
    resident_tokens: int = 0,
    timeout_s: float | None = None,
) -> Call[LookupRep]:
    """Find a READY snapshot: a session's, or the longest prefix of a prompt. ``slab_handle`` 0: none.

    Args:
        layout_fingerprint: of the asker's kv_pool.
        session_id: the session, or empty when asking by *page_keys*.
        page_keys: of the asker's prompt, one a whole page from token 0 on.
        resident_tokens: what the asker holds; a suffix that starts later is of no use to it.
        timeout_s: for the whole call.

    Raises:
        InvalidRequest: neither, or too many page keys.
    """
    request = LookupReq(
        id=NO_ID,
        layout_fingerprint=layout_fingerprint,
        session_id=session_id,
        page_keys=tuple(page_keys),
        resident_tokens=resident_tokens,
    )
    return _as_is(request, LookupRep, timeout_s)


# --- anybody -----------------------------------------------------------------------------------


def get(slab_handle: int, *, epoch: str = "", timeout_s: float | None = None) -> Call[GetRep]:
    """Return one attempt, open or remembered.

    Raises:
        StaleHandle: it is not known, or belongs to another *epoch*.
    """
    return _as_is(GetReq(id=NO_ID, slab_handle=slab_handle, epoch=epoch), GetRep, timeout_s)


def list_sessions(
    *,
    states: Sequence[State] = (),
    session_id: str = "",
    offset: int = 0,
    limit: int = 100,
    timeout_s: float | None = None,
) -> Call[ListRep]:
    """Return a page of attempts.

    Args:
        states: only these; empty: the open ones.
        session_id: only this session's.
        offset: attempts to skip.
        limit: attempts to return, at most 1,000.
        timeout_s: for the whole call.
    """
    request = ListReq(id=NO_ID, states=tuple(states), session_id=session_id, offset=offset, limit=limit)
    return _as_is(request, ListRep, timeout_s)


def stats(
    *, overview: Order | None = None, bounds: bool = False, timeout_s: float | None = None
) -> Call[StatsRep]:
    """Return the daemon's counters, books and bounds.

    Args:
        overview: have a picture of what is open too, with the attempts that come first in this order:
            ``deadline``, the nearest; ``age``, the oldest; ``bytes``, the largest.
        bounds: have every bound too, with where it comes from and how much of it is in use.
        timeout_s: for the whole call.
    """
    return _as_is(StatsReq(id=NO_ID, overview=overview, bounds=bounds), StatsRep, timeout_s)


def drain(draining: bool = True, *, timeout_s: float | None = None) -> Call[AckRep]:
    """Have the daemon take no new attempts, or take them again."""
    return _as_is(DrainReq(id=NO_ID, draining=draining), AckRep, timeout_s)


def watch(session_id: str = "", *, timeout_s: float | None = None) -> Call[AckRep]:
    """Ask for every transition from now on, on this connection; only *session_id*'s, if given."""
    return _as_is(WatchReq(id=NO_ID, session_id=session_id), AckRep, timeout_s)

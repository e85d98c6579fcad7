"""Requests into events: what of a request the core is asked.

Source: design, section 5.
"""

from collections.abc import Callable
from typing import Any, Final

from snapd import wire as w
from snapd.core import events as e
from snapd.errors import InvariantBroken


def event_of(request: w.AnyRequest, conn_id: int, at_ns: int, cause_id: int) -> e.Event:
    """Return the event that a request stands for; the ones that are more than that have handlers."""
    make = _EVENTS.get(type(request))
    if make is None:
        raise InvariantBroken(f"no event for {type(request).__name__}")
    return make(request, conn_id, at_ns, cause_id)


def _layout_declared(request: w.DeclareLayoutReq, conn_id: int, at_ns: int, cause_id: int) -> e.Event:
    del conn_id
    return e.LayoutDeclared(at_ns=at_ns, cause_id=cause_id, rank=request.rank, layout=request.layout)


def _transfer_started(request: w.TransferStartedReq, conn_id: int, at_ns: int, cause_id: int) -> e.Event:
    return e.TransferStarted(at_ns=at_ns, cause_id=cause_id, slab_handle=request.slab_handle, conn_id=conn_id)


def _rank_committed(request: w.CommitReq, conn_id: int, at_ns: int, cause_id: int) -> e.Event:
    return e.RankCommitted(
        at_ns=at_ns,
        cause_id=cause_id,
        slab_handle=request.slab_handle,
        rank=request.rank,
        num_bytes=request.num_bytes,
        num_tokens=request.num_tokens,
        checksums=request.checksums,
        drained=request.drained,
        conn_id=conn_id,
    )


def _transfer_failed(request: w.TransferFailedReq, conn_id: int, at_ns: int, cause_id: int) -> e.Event:
    del conn_id
    return e.TransferFailed(
        at_ns=at_ns,
        cause_id=cause_id,
        slab_handle=request.slab_handle,
        reason=request.reason,
        drained=request.drained,
        rank=request.rank,
    )


def _abort_asked(request: w.AbortReq, conn_id: int, at_ns: int, cause_id: int) -> e.Event:
    del conn_id
    return e.AbortAsked(
        at_ns=at_ns, cause_id=cause_id, slab_handle=request.slab_handle, drained=request.drained
    )


def _writer_drained(request: w.DrainedReq, conn_id: int, at_ns: int, cause_id: int) -> e.Event:
    del conn_id
    return e.WriterDrained(at_ns=at_ns, cause_id=cause_id, slab_handle=request.slab_handle, rank=request.rank)


def _lease_asked(request: w.BeginIngestReq, conn_id: int, at_ns: int, cause_id: int) -> e.Event:
    return e.LeaseAsked(
        at_ns=at_ns,
        cause_id=cause_id,
        slab_handle=request.slab_handle,
        rank=request.rank,
        layout_fingerprint=request.layout_fingerprint,
        session_id=request.session_id,
        conn_id=conn_id,
    )


def _vote_cast(request: w.VoteReq, conn_id: int, at_ns: int, cause_id: int) -> e.Event:
    del conn_id
    return e.VoteCast(
        at_ns=at_ns,
        cause_id=cause_id,
        slab_handle=request.slab_handle,
        rank=request.rank,
        lease_id=request.lease_id,
        ok=request.ok,
        reason=request.reason,
        keep=request.keep,
    )


def _lookup_asked(request: w.LookupReq, conn_id: int, at_ns: int, cause_id: int) -> e.Event:
    del conn_id
    return e.LookupAsked(
        at_ns=at_ns,
        cause_id=cause_id,
        layout_fingerprint=request.layout_fingerprint,
        session_id=request.session_id,
        page_keys=request.page_keys,
        resident_tokens=request.resident_tokens,
    )


def _drain_asked(request: w.DrainReq, conn_id: int, at_ns: int, cause_id: int) -> e.Event:
    del conn_id
    return e.DrainAsked(at_ns=at_ns, cause_id=cause_id, draining=request.draining)


# By class: a match would look at one after the other, at every request.
_EVENTS: Final[dict[type[w.Request], Callable[[Any, int, int, int], e.Event]]] = {
    w.DeclareLayoutReq: _layout_declared,
    w.TransferStartedReq: _transfer_started,
    w.CommitReq: _rank_committed,
    w.TransferFailedReq: _transfer_failed,
    w.AbortReq: _abort_asked,
    w.DrainedReq: _writer_drained,
    w.BeginIngestReq: _lease_asked,
    w.VoteReq: _vote_cast,
    w.LookupReq: _lookup_asked,
    w.DrainReq: _drain_asked,
}

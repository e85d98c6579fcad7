"""Which request needs which role, and whether a connection may make it of this attempt or tenant.

What belongs to others is answered as if it were not there: who asks learns nothing about it.

Source: design, section 5.
"""

from typing import Final

from snapd import wire as w
from snapd.access import Rights, RoleName
from snapd.core.books import Books
from snapd.core.session import Session
from snapd.errors import Reason

_NEEDED: Final[dict[type[w.Request], frozenset[RoleName]]] = {
    w.HelloReq: frozenset(),
    w.PingReq: frozenset(),
    w.SnapshotPrepareReceiveReqInput: frozenset({"pusher"}),
    w.TransferStartedReq: frozenset({"pusher"}),
    w.CommitReq: frozenset({"pusher"}),
    w.TransferFailedReq: frozenset({"pusher"}),
    w.DrainedReq: frozenset({"pusher"}),
    w.AbortReq: frozenset({"pusher", "operator"}),
    w.DeclareLayoutReq: frozenset({"ingester"}),
    w.BeginIngestReq: frozenset({"ingester"}),
    w.VoteReq: frozenset({"ingester"}),
    w.LookupReq: frozenset({"ingester"}),
    w.MapBufferReq: frozenset({"pusher", "ingester"}),
    w.GetReq: frozenset({"pusher", "ingester", "operator"}),
    w.ListReq: frozenset({"operator"}),
    w.StatsReq: frozenset({"operator"}),
    w.WatchReq: frozenset({"operator"}),
    w.DrainReq: frozenset({"operator"}),
}


def refusal(rights: Rights, request: w.AnyRequest, books: Books) -> tuple[Reason, str] | None:
    """Return why *rights* do not cover *request*, or None: they do.

    Callers with every right need not ask.
    """
    needed = _NEEDED[type(request)]
    if needed and not needed & rights.roles:
        return Reason.PERMISSION_DENIED, f"{rights.owner} is no {' or '.join(sorted(needed))} (access rules)"
    if isinstance(request, w.HandleRequest | w.GetReq):
        session = books.find(request.slab_handle)
        # An unknown handle is answered by the core, in the same words as this.
        if session is not None and not _may_touch(rights, request, session):
            return Reason.STALE_HANDLE, f"no attempt {request.slab_handle} in this epoch"
    elif isinstance(request, w.MapBufferReq):
        if request.writable and "pusher" not in rights.roles:
            return Reason.PERMISSION_DENIED, f"{rights.owner} is no pusher: it may map to read only"
    elif rights.tenants is not None:
        return _tenant_refusal(rights.tenants, rights.owner, request, books)
    return None


def _may_touch(rights: Rights, request: w.AnyRequest, session: Session) -> bool:
    if "operator" in rights.roles and isinstance(request, w.AbortReq | w.GetReq):
        return True
    if rights.tenants is not None and session.layout.namespace.tenant not in rights.tenants:
        return False
    if isinstance(request, w.BeginIngestReq | w.VoteReq):
        return True
    if isinstance(request, w.GetReq) and "ingester" in rights.roles:
        return True
    return session.owner == rights.owner


def _tenant_refusal(
    tenants: frozenset[str], owner: str, request: w.AnyRequest, books: Books
) -> tuple[Reason, str] | None:
    if isinstance(request, w.DeclareLayoutReq):
        tenant = request.layout.namespace.tenant
    elif isinstance(request, w.SnapshotPrepareReceiveReqInput | w.LookupReq):
        declared = books.directory.layout(request.layout_fingerprint)
        if declared is None and isinstance(request, w.LookupReq):
            # Snapshots outlive the table of layouts, and whose this one is cannot be said any more.
            return Reason.LAYOUT_MISMATCH, "no P has declared this layout, or it was forgotten since"
        if declared is None:
            return None  # The core says what is wrong with it.
        tenant = declared.layout.namespace.tenant
    else:
        return None
    if tenant in tenants:
        return None
    return Reason.PERMISSION_DENIED, f"{owner} has no access to this layout's tenant (access rules)"

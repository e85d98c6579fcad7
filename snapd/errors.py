"""Reasons and errors: why something ended or was refused, and what to do about it.

``Reason`` is a closed enum shared by wire, log and docs. A reason is a fact about an attempt
or a request; an error is how the client library raises one. The class says who erred:

* ``RequestError``: the caller asked for what cannot be had; the connection is fine.
* ``ConnectionProblem``: nobody knows whether the daemon acted; ask again, commits are idempotent.
* ``ProtocolError``: the peer does not speak this protocol; the connection is closed.
* ``StartupError``: the daemon cannot run as configured; nothing was started.
"""

import enum
from typing import ClassVar, Final


class Reason(enum.StrEnum):
    """Why an attempt ended, or why a request was refused."""

    OK = "ok"
    # A prepare that is refused: no session comes into being, only a record.
    SNAPSHOT_BUF_FULL = "snapshot-buf-full"
    TOO_LARGE = "too-large"
    LAYOUT_MISMATCH = "layout-mismatch"
    LIMIT_REACHED = "limit-reached"
    DRAINING = "draining"
    # An attempt that ends ABORTED.
    PARTIAL_TRANSFER = "partial-transfer"
    TRANSFER_FAILED = "transfer-failed"
    SESSION_NOT_RESIDENT = "session-not-resident"
    CLIENT_ABORT = "client-abort"
    WRITER_GONE = "writer-gone"
    RESERVE_TIMEOUT = "reserve-timeout"
    TRANSFER_TIMEOUT = "transfer-timeout"
    ALLOC_FAILED_ON_FINALIZE = "alloc-failed-on-finalize"
    CHECKSUM_MISMATCH = "checksum-mismatch"
    TOKEN_MISMATCH = "token-mismatch"
    PREFIX_NOT_RESIDENT = "prefix-not-resident"
    INGEST_FAILED = "ingest-failed"
    EVICTED = "evicted"
    READY_EXPIRED = "ready-expired"
    SUPERSEDED = "superseded"
    DAEMON_STOPPED = "daemon-stopped"
    DAEMON_RESTARTED = "daemon-restarted"
    # A lease or an ingest round that ends; the attempt may live on.
    LEASE_EXPIRED = "lease-expired"
    ROUND_ABORTED = "round-aborted"
    # A request that is refused; nothing changes.
    STALE_HANDLE = "stale-handle"
    WRONG_STATE = "wrong-state"
    WRONG_RANK = "wrong-rank"
    INVALID_REQUEST = "invalid-request"
    UNKNOWN_TYPE = "unknown-type"
    PERMISSION_DENIED = "permission-denied"
    INTERNAL_ERROR = "internal-error"
    # Written by the design that snapd replaces, where D wrote straight into P's pool.
    ALLOC_FAILED = "alloc-failed"


REASON_HELP: Final[dict[Reason, str]] = {
    Reason.OK: "P has the snapshot in its tree.",
    Reason.SNAPSHOT_BUF_FULL: "No room, and evicting could not make any. Try again after retry_after_ms; "
    "if it happens often, give the arena more bytes or let P ingest sooner.",
    Reason.TOO_LARGE: "The snapshot is larger than an arena can hold. Raise size_bytes, or send a suffix.",
    Reason.LAYOUT_MISMATCH: "No P rank declared this layout. Compare model, dtype, page size, LoRA, salt and "
    "weight version on both sides; after a restart wait until P has declared its layout again.",
    Reason.LIMIT_REACHED: "A configured limit was reached. Raise sessions_max or end some attempts.",
    Reason.DRAINING: "The daemon takes no new attempts: it is being stopped. Use another one.",
    Reason.PARTIAL_TRANSFER: "A rank committed other byte or token counts than were granted. D has a bug, or "
    "its pool and the declared layout differ.",
    Reason.TRANSFER_FAILED: "D reported that a write failed. Look at D's log and at the transport.",
    Reason.SESSION_NOT_RESIDENT: "D no longer holds the session's KV. Push sooner after the turn ends.",
    Reason.CLIENT_ABORT: "A client or an operator aborted the attempt.",
    Reason.WRITER_GONE: "The process that was writing exited before it committed.",
    Reason.RESERVE_TIMEOUT: "D got a slab and did not start. Look at D, or raise reserve_timeout_ms.",
    Reason.TRANSFER_TIMEOUT: "D did not commit in time. Look at the transport, raise transfer_timeout_ms, or "
    "lower transfer_min_mb_per_s.",
    Reason.ALLOC_FAILED_ON_FINALIZE: "P's kv_pool had no slots when it wanted to ingest. Retry with "
    "keep=true, or leave P more room.",
    Reason.CHECKSUM_MISMATCH: "The bytes that P read are not those that D committed; nothing reached the "
    "tree. A late write or a broken transport: look for other attempts at the same extents.",
    Reason.TOKEN_MISMATCH: "P asked for other tokens than D pushed: it mixed sessions or turns.",
    Reason.PREFIX_NOT_RESIDENT: "P evicted the prefix that the suffix builds on; the next push is full.",
    Reason.INGEST_FAILED: "P failed while it ingested, for a reason of its own. Look at P's log.",
    Reason.EVICTED: "This READY snapshot made room for another, by eviction_policy. Raise size_bytes.",
    Reason.READY_EXPIRED: "Nobody ingested the snapshot within ready_ttl_ms.",
    Reason.SUPERSEDED: "A newer attempt for the same session replaced it.",
    Reason.DAEMON_STOPPED: "The daemon was stopped while the attempt was open.",
    Reason.DAEMON_RESTARTED: "The daemon died while the attempt was open.",
    Reason.LEASE_EXPIRED: "A rank did not vote within lease_ms; the reader must not insert.",
    Reason.ROUND_ABORTED: "Another rank voted no, or did not vote in time; no rank inserts.",
    Reason.STALE_HANDLE: "The handle names no open attempt of this epoch. Prepare again.",
    Reason.WRONG_STATE: "The attempt is not in a state in which this can be done.",
    Reason.WRONG_RANK: "The attempt has no shard for this rank.",
    Reason.INVALID_REQUEST: "A field is missing, of the wrong type, or out of range.",
    Reason.UNKNOWN_TYPE: "The daemon does not know this kind of request. Compare versions.",
    Reason.PERMISSION_DENIED: "The caller's user may not do this.",
    Reason.INTERNAL_ERROR: "A bug in snapd. Please report it with the log.",
    Reason.ALLOC_FAILED: "P's kv_pool had no slots when D wanted to write (older logs only).",
}
assert set(REASON_HELP) == set(Reason), "every reason says what to do about it"


class SnapdError(Exception):
    """Base of everything that this package raises on purpose."""


class RequestError(SnapdError):
    """The daemon understood the request and refused it; nothing changed.

    Attributes:
        code: the reason, as on the wire and in the log.
        retryable: the same request may succeed later.
        retry_after_ms: when to try again, if the daemon said so.
    """

    code: ClassVar[Reason] = Reason.INVALID_REQUEST
    retryable: ClassVar[bool] = False

    def __init__(self, message: str = "", *, reason: Reason | None = None, retry_after_ms: int = 0) -> None:
        self.reason = reason or self.code
        self.retry_after_ms = retry_after_ms
        super().__init__(f"{self.reason}: {message or REASON_HELP[self.reason]}")


class BufferFull(RequestError):
    """No room for the snapshot now."""

    code = Reason.SNAPSHOT_BUF_FULL
    retryable = True


class TooLarge(RequestError):
    """The snapshot can never fit."""

    code = Reason.TOO_LARGE


class LayoutMismatch(RequestError):
    """The layout is not one that P declared, or a plane is outside the layout."""

    code = Reason.LAYOUT_MISMATCH


class LimitReached(RequestError):
    """A configured bound was reached."""

    code = Reason.LIMIT_REACHED
    retryable = True


class Draining(RequestError):
    """The daemon takes no new attempts."""

    code = Reason.DRAINING


class StaleHandle(RequestError):
    """The handle names no open attempt of this epoch."""

    code = Reason.STALE_HANDLE


class WrongState(RequestError):
    """The attempt is not in a state in which this can be done."""

    code = Reason.WRONG_STATE


class WrongRank(RequestError):
    """The attempt has no shard for this rank."""

    code = Reason.WRONG_RANK


class InvalidRequest(RequestError):
    """A field is missing, of the wrong type, or out of range."""

    code = Reason.INVALID_REQUEST


class UnknownType(RequestError):
    """The daemon does not know this kind of request."""

    code = Reason.UNKNOWN_TYPE


class PermissionDenied(RequestError):
    """The caller's user may not do this."""

    code = Reason.PERMISSION_DENIED


class InternalError(RequestError):
    """A bug in the daemon; the request may or may not have had an effect."""

    code = Reason.INTERNAL_ERROR


ERROR_BY_REASON: Final[dict[Reason, type[RequestError]]] = {
    cls.code: cls
    for cls in (
        BufferFull, TooLarge, LayoutMismatch, LimitReached, Draining, StaleHandle, WrongState, WrongRank,
        InvalidRequest, UnknownType, PermissionDenied, InternalError,
    )
}  # fmt: skip


def error_for(reason: Reason, message: str = "", retry_after_ms: int = 0) -> RequestError:
    """Return the typed error for a refusal; an ended attempt's reason comes as ``RequestError``."""
    cls = ERROR_BY_REASON.get(reason, RequestError)
    return cls(message, reason=reason, retry_after_ms=retry_after_ms)


class ConnectionProblem(SnapdError):
    """The daemon could not be asked, or its answer did not come."""


class DaemonUnreachable(ConnectionProblem):
    """No daemon listens where it was looked for."""


class ConnectionLost(ConnectionProblem):
    """The connection ended before the reply came; the request may have had its effect."""


class RequestTimeout(ConnectionProblem):
    """No reply within the call's timeout; the request may have had its effect."""


class ProtocolError(SnapdError):
    """The peer sent what is no frame of this protocol; the connection is closed."""


class TransportError(SnapdError):
    """The data plane could not write; the message says where and why."""


class PeerResting(TransportError):
    """The peer failed a moment ago and is not tried yet.

    Attributes:
        retry_after_ms: when it will be.
    """

    def __init__(self, message: str, retry_after_ms: int) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(message)


class ExtraMissing(SnapdError, ImportError):
    """A package that this part needs is not installed; the message says how to install it."""


class ConfigError(SnapdError):
    """The configuration is wrong; the message names the key and what to write instead."""


class UnsupportedEngine(SnapdError):
    """The engine has a pool, a tree or a setting that its adapter does not know; the message says which."""


class StartupError(SnapdError):
    """The daemon cannot run as configured; the message says what to change."""


class InvariantBroken(SnapdError):
    """An internal cross-check failed: a bug in snapd."""

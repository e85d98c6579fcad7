"""Control protocol v1: messages and framing.

A frame is a u32 little-endian length and then one msgpack message. A message is a map whose
``type`` names the struct below. Every request carries an ``id`` of the client's choosing; its
reply carries the same one and may come out of order. What the daemon sends unasked has no id.

Unknown fields are ignored, so either side may be newer. An unknown type is answered with
``ErrorRep``; a frame over the limit, or one that is no message at all, ends the connection.

Source: design, section 5.
"""

from typing import Any, ClassVar, Final, TypeAlias

import msgspec

from snapd.core.events import PlaneChecksums, State
from snapd.core.overview import Order, Overview
from snapd.core.session import SessionView, Statistics
from snapd.core.slab import Extent
from snapd.errors import ProtocolError, Reason
from snapd.layout import Layout

PROTOCOL_VERSION: Final = 1
LENGTH_BYTES: Final = 4
LIST_MAX: Final = 1_000


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    pass


class Request(_Message, frozen=True, kw_only=True):
    """Base of the requests."""

    # A request that may be sent again on a new connection, without harm, when no reply came.
    IS_REPEATABLE: ClassVar[bool] = True

    id: int


class Reply(_Message, frozen=True, kw_only=True):
    """Base of the replies; ``id`` is the request's."""

    id: int


class Push(_Message, frozen=True, kw_only=True):
    """Base of what the daemon sends unasked."""


class HandleRequest(Request, frozen=True, kw_only=True):
    """Base of the requests that name an attempt.

    Attributes:
        slab_handle: the attempt.
        epoch: of the daemon that granted it; another epoch's is refused. Empty: not checked.
    """

    slab_handle: int
    epoch: str = ""


# --- hello, ping, layouts ----------------------------------------------------------------------


class HelloReq(Request, frozen=True, kw_only=True):
    """The first request of a connection.

    Attributes:
        client: what the client calls itself, such as the worker's name; in the log as ``peer``.
    """

    protocol: int = PROTOCOL_VERSION
    client: str = ""


class ArenaOffer(msgspec.Struct, frozen=True, kw_only=True):
    """An arena, as a client needs to know it.

    Attributes:
        base_ptr: where it starts in the transport's address space (shm: 0, an offset into the fd).
    """

    rank: int
    device: str
    size_bytes: int
    base_ptr: int


class MooncakeAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How Mooncake reaches the daemon's arenas.

    Attributes:
        segment_name: under which its engine is known.
        protocol: ``tcp``, ``rdma`` or ``nvlink_intra``; D's engine must use the same.
        metadata_server: the same on both sides; ``P2PHANDSHAKE``: there is none.
    """

    segment_name: str
    protocol: str
    metadata_server: str


class KVEventsWanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a prepare may bring for the KV events that the daemon publishes.

    Attributes:
        token_ids_max: token ids in one request; 0: none are wanted.
    """

    token_ids_max: int


class HelloRep(Reply, frozen=True, kw_only=True):
    """Who the daemon is, and what it offers.

    Attributes:
        transport_address: what a writer must know to reach the arenas (Mooncake: the segment name).
        mooncake: the rest of it, when the transport is Mooncake.
        kv_events: it publishes KV events; None: it does not.
    """

    protocol: int
    epoch: str
    version: str
    arenas: tuple[ArenaOffer, ...]
    transport: str
    transport_address: str
    alignment_bytes: int
    frame_bytes_max: int
    requests_in_flight_max: int
    page_keys_max: int
    lease_ms: int
    mooncake: MooncakeAddress | None = None
    kv_events: KVEventsWanted | None = None


class PingReq(Request, frozen=True, kw_only=True):
    """Is anybody there?"""


class PingRep(Reply, frozen=True, kw_only=True):
    """Yes."""

    epoch: str


class DeclareLayoutReq(Request, frozen=True, kw_only=True):
    """A P rank says what its kv_pool looks like; D may then push snapshots of that layout."""

    rank: int
    layout: Layout


class DeclareLayoutRep(Reply, frozen=True, kw_only=True):
    """The layout's name from here on."""

    layout_fingerprint: str


# --- D -----------------------------------------------------------------------------------------


class SnapshotPrepareReceiveReqInput(Request, frozen=True, kw_only=True):
    """D wants a slab in every rank's arena.

    Attributes:
        session_id: the caller's name for the conversation.
        num_tokens: tokens to bring over.
        token_start: the first of them; a multiple of the page size.
        layout_fingerprint: of D's kv_pool.
        token_digest: ``layout.token_digest`` of all tokens from 0 to the end of the snapshot.
        page_keys: one a whole page from token 0 on; may be empty.
        ranks: shards wanted; empty: every rank.
        use_resident_hint: let the daemon leave out what P is believed to hold.
        is_only_writer: this process makes every write; its exit is drain proof.
        token_ids: for KV events only: of the tokens from *token_start* on, as many as are told, four bytes
            each, little-endian.
        block_hashes: for KV events only: what D's engine calls the pages, one a whole page from token 0 on,
            eight bytes each, little-endian and signed; empty: the page keys are taken.
    """

    IS_REPEATABLE: ClassVar[bool] = False

    session_id: str
    num_tokens: int
    layout_fingerprint: str
    token_start: int = 0
    token_digest: str = ""
    page_keys: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    use_resident_hint: bool = False
    is_only_writer: bool = False
    token_ids: bytes = b""
    block_hashes: bytes = b""


class RankGrant(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank's shard goes.

    Attributes:
        rank: whose arena.
        snapshot_buf_base_ptr: the arena's first byte in the transport's address space.
        k_layer_offsets: from there, in bytes, where each layer's K (or fused) plane starts, shape [layers].
        v_layer_offsets: the same for V; empty when fused.
        stride_k_bytes: bytes a token takes in each K plane, shape [layers].
        stride_v_bytes: the same for V.
        extents: what the slab holds, ``[offset_bytes, size_bytes]`` each; no write may leave them.
    """

    rank: int
    snapshot_buf_base_ptr: int
    k_layer_offsets: tuple[int, ...]
    v_layer_offsets: tuple[int, ...]
    stride_k_bytes: tuple[int, ...]
    stride_v_bytes: tuple[int, ...]
    extents: tuple[Extent, ...]


class SnapshotPrepareReceiveReqOutput(Reply, frozen=True, kw_only=True):
    """The grant, or why there is none.

    Attributes:
        ok: there is a slab.
        reason: why not.
        detail: the same, for a person.
        retry_after_ms: when to ask again; 0: not for this reason.
        slab_handle: names the attempt from here on.
        num_tokens: tokens granted, from *token_start* on.
        token_start: as asked, or later when the resident hint was used.
        resident_hint_tokens: what P is believed to hold of the session.
        ranks: one grant a rank.
        expires_ms: the transfer has to start within it.
    """

    ok: bool
    reason: Reason = Reason.OK
    detail: str = ""
    retry_after_ms: int = 0
    slab_handle: int = 0
    num_tokens: int = 0
    token_start: int = 0
    resident_hint_tokens: int = 0
    ranks: tuple[RankGrant, ...] = ()
    expires_ms: int = 0


class TransferStartedReq(HandleRequest, frozen=True, kw_only=True):
    """D is about to write."""


class CommitReq(HandleRequest, frozen=True, kw_only=True):
    """Every byte of one rank's shard is there.

    Attributes:
        rank: whose shard.
        num_bytes: payload bytes written, without padding.
        num_tokens: tokens written.
        checksums: a pair of 64-bit sums a plane, shape [num_planes].
        drained: no write of the shard can still land. False: every byte is there, but a write that
            failed before it was repeated may still land.
    """

    rank: int
    num_bytes: int
    num_tokens: int
    checksums: PlaneChecksums
    drained: bool = True


class TransferFailedReq(HandleRequest, frozen=True, kw_only=True):
    """A write failed, or D no longer holds the session.

    Attributes:
        reason: ``transfer-failed`` or ``session-not-resident``.
        drained: no write of *rank*'s shard can still land.
        rank: whose shard; None: every one.
    """

    reason: Reason = Reason.TRANSFER_FAILED
    drained: bool = False
    rank: int | None = None


class AbortReq(HandleRequest, frozen=True, kw_only=True):
    """End the attempt; *drained* as above."""

    drained: bool = False


class DrainedReq(HandleRequest, frozen=True, kw_only=True):
    """Drain proof for an attempt that has ended, or for a rank that committed without it."""

    rank: int | None = None


# --- P -----------------------------------------------------------------------------------------


class BeginIngestReq(HandleRequest, frozen=True, kw_only=True):
    """A P rank wants to read its shard.

    Attributes:
        session_id: whose snapshot it takes it for; another's is refused. Empty: not checked.
    """

    rank: int
    layout_fingerprint: str
    session_id: str = ""


class BeginIngestRep(Reply, frozen=True, kw_only=True):
    """The lease.

    Attributes:
        lease_id: names the lease; goes into the vote.
        lease_ms: the vote must arrive within it, from now on.
        token_digest: of all tokens from 0 to the end of the snapshot, as D gave it; may be empty.
        checksums: what D committed, shape [num_planes].
        grant: where the shard lies.
    """

    session_id: str
    lease_id: int
    lease_ms: int
    num_tokens: int
    token_start: int
    token_digest: str
    checksums: PlaneChecksums
    grant: RankGrant


class VoteReq(HandleRequest, frozen=True, kw_only=True):
    """The rank's shard is in its kv_pool and matches, or why not; *keep*: leave it READY."""

    rank: int
    lease_id: int
    ok: bool
    reason: Reason = Reason.OK
    keep: bool = False


class VoteRep(Reply, frozen=True, kw_only=True):
    """The decision, the same for all ranks. Insert only when *commit* is true."""

    commit: bool
    reason: Reason
    state: State


class LookupReq(Request, frozen=True, kw_only=True):
    """What is there: for a session, or the longest prefix of a prompt by page keys.

    Attributes:
        resident_tokens: what the asker holds; a suffix that starts later is of no use to it.
    """

    layout_fingerprint: str
    session_id: str = ""
    page_keys: tuple[str, ...] = ()
    resident_tokens: int = 0


class LookupRep(Reply, frozen=True, kw_only=True):
    """The READY snapshot that was found; ``slab_handle`` 0: none."""

    slab_handle: int
    session_id: str
    num_tokens: int
    token_start: int
    matched_tokens: int
    resident_hint_tokens: int
    ranks: tuple[int, ...]


class SnapshotFinalizeIngestReqInput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """What an orchestrator sends to P's worker; the worker's ``Ingester`` answers it, not the daemon."""

    session_id: str
    token_ids: tuple[int, ...]
    slab_handle: int


class SnapshotFinalizeIngestReqOutput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """The answer of P's worker."""

    ok: bool
    reason: Reason
    num_tokens: int = 0


# --- anybody -----------------------------------------------------------------------------------


class MapBufferReq(Request, frozen=True, kw_only=True):
    """Hand over an arena. Asked on a connection of its own, as its last request.

    Attributes:
        writable: for writing too. An arena on a GPU can be written in any case.
    """

    rank: int
    writable: bool = False


class CudaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What opens an arena on a GPU in another process of the host.

    Attributes:
        ipc_handle: a CUDA IPC handle of 64 bytes.
        gpu_uuid: which GPU: ``GPU-`` and 32 hexadecimal digits in five groups.
        device: ``cuda:N`` as the daemon counts; another process may count otherwise.
    """

    ipc_handle: bytes
    gpu_uuid: str
    device: str


class MapBufferRep(Reply, frozen=True, kw_only=True):
    """The arena: its file descriptor comes with this frame (SCM_RIGHTS), unless it is on a GPU.

    Attributes:
        cuda: it is on a GPU, and no file descriptor comes.
    """

    rank: int
    size_bytes: int
    epoch: str
    cuda: CudaMemory | None = None


class GetReq(HandleRequest, frozen=True, kw_only=True):
    """One attempt, open or remembered."""


class GetRep(Reply, frozen=True, kw_only=True):
    """The attempt, and the daemon's clock to hold its times against."""

    session: SessionView
    now_ns: int


class ListReq(Request, frozen=True, kw_only=True):
    """Attempts, a page at a time.

    Attributes:
        states: only these; empty: the open ones.
        session_id: only this session's.
        offset: attempts to skip.
        limit: attempts to return, at most 1,000.
    """

    states: tuple[State, ...] = ()
    session_id: str = ""
    offset: int = 0
    limit: int = 100


class ListRep(Reply, frozen=True, kw_only=True):
    """A page of attempts; *total* counts all that match."""

    sessions: tuple[SessionView, ...]
    total: int
    now_ns: int


class StatsReq(Request, frozen=True, kw_only=True):
    """Counters, books and bounds.

    Attributes:
        overview: say also what is open: the attempts that come first in this order; None: do not.
        bounds: say also every bound, where it comes from, and how much of it is in use.
    """

    overview: Order | None = None
    bounds: bool = False


class BoundView(msgspec.Struct, frozen=True, kw_only=True):
    """A bound of the daemon.

    Attributes:
        name: the setting, with its table; or module and constant of what is fixed.
        value: in *unit*.
        unit: of the value; empty: a number.
        origin: where it comes from: ``default``, the file's path, ``environment NAME``, ``command line``, or
            ``fixed``.
        used: how much of it is in use now, the most of any where each client has its own; null: that is not
            counted.
        is_rolling: it is made to be full: the oldest goes.
        what: is bounded, if the name does not say so.
        at_bound: what comes at it.
    """

    name: str
    value: int
    unit: str
    origin: str
    used: int | None = None
    is_rolling: bool = False
    what: str = ""
    at_bound: str = ""


class LogStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How the event log fares."""

    path: str
    lines_written: int
    bytes_written: int
    queued_lines: int
    queued_bytes: int
    dropped: int
    write_errors: int
    last_error: str
    rotations: int


class MooncakeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How the daemon uses Mooncake, and what became of notifications.

    Attributes:
        package: name and version of what is installed.
        registered_pieces: pieces of arenas that are registered.
        is_loopback_only: its sockets take no connection from another host.
        notifications_taken: those that committed a rank's shard or were passed on as a hint.
        notifications_refused: commits that the core refused.
        notifications_ignored: garbage, of another epoch, of no open attempt, or none were wanted.
        settings: Mooncake's variables in effect; secrets are left out.
    """

    package: str
    segment_name: str
    protocol: str
    devices: str
    metadata_server: str
    is_loopback_only: bool
    registered_pieces: int
    notify: str
    notifications_taken: int
    notifications_refused: int
    notifications_ignored: int
    settings: dict[str, str]


class KVEventStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What is published for routers, and what of it was not.

    Attributes:
        address: where, with the port that was taken.
        replay_address: where the latest batches can be asked for again; empty: nowhere.
        batches: sent so far; the next sequence number.
        stored_pages: pages that were told to be there, so far.
        removed_pages: pages that were told to be gone, so far.
        snapshots: READY snapshots that are told at present.
        pages: distinct pages of these.
        unpublished: READY snapshots that were not told, by why: ``no-hashes``, D sent neither page keys nor
            block hashes; ``pages-max``, ``queue-full``, there was no room.
        facts_dropped: attempts of which token ids or block hashes were not kept.
        queued_bytes: what waits to be sent, about.
        buffered_batches: kept for replays.
        replays: answered so far.
        bad_requests: requests for a replay that were none.
        send_errors: batches and answers that ZeroMQ did not take.
    """

    address: str
    replay_address: str
    topic: str
    medium: str
    batches: int
    stored_pages: int
    removed_pages: int
    snapshots: int
    pages: int
    unpublished: dict[str, int]
    facts_dropped: int
    queued_bytes: int
    buffered_batches: int
    replays: int
    bad_requests: int
    send_errors: int


class StatsRep(Reply, frozen=True, kw_only=True):
    """Everything that ``snapd status`` shows.

    Attributes:
        overview: what is open, if it was asked for.
        bounds: every bound, if they were asked for.
        is_compiled: the modules that requests go through are compiled.
    """

    version: str
    epoch: str
    pid: int
    uptime_ms: int
    now_ns: int
    transport: str
    connections: int
    watchers: int
    requests_waiting: int
    timers: int
    core: Statistics
    log: LogStatistics
    limits: dict[str, int]
    mooncake: MooncakeStatistics | None = None
    overview: Overview | None = None
    kv_events: KVEventStatistics | None = None
    bounds: tuple[BoundView, ...] = ()
    is_compiled: bool = False


class WatchReq(Request, frozen=True, kw_only=True):
    """Push every transition from now on; only of *session_id*, if given."""

    session_id: str = ""


class WatchTransition(Push, frozen=True, kw_only=True):
    """An attempt changed its state; fields as in the log."""

    at_ns: int
    session_id: str
    slab_handle: int
    from_state: str
    to_state: str
    reason: Reason
    num_tokens: int
    token_start: int
    bytes: int
    duration_ms: float


class WatchRefused(Push, frozen=True, kw_only=True):
    """A prepare was refused; fields as in the log."""

    at_ns: int
    session_id: str
    reason: Reason
    num_tokens: int
    detail: str


class WatchLost(Push, frozen=True, kw_only=True):
    """So many pushes were lost because the watcher did not read."""

    count: int


class SessionEnded(Push, frozen=True, kw_only=True):
    """An attempt that this connection prepared, wrote or read has ended.

    Attributes:
        drain_wanted: stop writing, then send ``DrainedReq``: its bytes wait for that.
    """

    slab_handle: int
    session_id: str
    state: State
    reason: Reason
    drain_wanted: bool


class TransferNotified(Push, frozen=True, kw_only=True):
    """A notification came with a transfer into an attempt that this connection prepared.

    A hint to look, no proof: whoever reaches the transport can send it, and it may be lost.
    """

    slab_handle: int
    session_id: str
    rank: int


class TransferNotification(msgspec.Struct, frozen=True, kw_only=True):
    """What a writer sends through the transport, as JSON, after the last write of a rank's shard.

    Attributes:
        slab_handle: the attempt.
        epoch: of the daemon that granted it; another epoch's is ignored.
        rank: whose shard.
        num_bytes: as in ``CommitReq``, and the others as well; a hint needs none of them.
    """

    slab_handle: int
    epoch: str
    rank: int
    num_bytes: int = 0
    num_tokens: int = 0
    checksums: PlaneChecksums = ()
    drained: bool = True


class DrainReq(Request, frozen=True, kw_only=True):
    """Take no new attempts; or take them again."""

    draining: bool = True


class AckRep(Reply, frozen=True, kw_only=True):
    """Done, or already done.

    Attributes:
        state: the attempt's state after it.
        pending: the abort waits for a reader.
    """

    state: State | None = None
    pending: bool = False


class ErrorRep(Reply, frozen=True, kw_only=True):
    """Not done."""

    reason: Reason
    detail: str = ""
    retry_after_ms: int = 0


AnyRequest: TypeAlias = (
    HelloReq
    | PingReq
    | DeclareLayoutReq
    | SnapshotPrepareReceiveReqInput
    | TransferStartedReq
    | CommitReq
    | TransferFailedReq
    | AbortReq
    | DrainedReq
    | BeginIngestReq
    | VoteReq
    | LookupReq
    | MapBufferReq
    | GetReq
    | ListReq
    | StatsReq
    | WatchReq
    | DrainReq
)
AnyReply: TypeAlias = (
    HelloRep
    | PingRep
    | DeclareLayoutRep
    | SnapshotPrepareReceiveReqOutput
    | BeginIngestRep
    | VoteRep
    | LookupRep
    | MapBufferRep
    | GetRep
    | ListRep
    | StatsRep
    | AckRep
    | ErrorRep
)
AnyPush: TypeAlias = SessionEnded | TransferNotified | WatchTransition | WatchRefused | WatchLost


# --- framing -----------------------------------------------------------------------------------


class FrameSplitter:
    """Cuts a byte stream into frames. Holds at most one frame that is not whole.

    Args:
        frame_bytes_max: a frame that announces more is refused before it is read.
    """

    def __init__(self, frame_bytes_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()

    @property
    def is_inside_frame(self) -> bool:
        """A frame has begun and is not whole."""
        return bool(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Return the payloads that *data* completes.

        Whole frames before a bad one are returned, and ``check`` or the next call raises: what is served
        does not depend on how the stream was cut.

        Raises:
            ProtocolError: the first frame announces nothing, or more than the limit.
        """
        buffer = self._buffer
        if buffer or type(data) is not bytes:
            buffer += data
            self.check()
            if len(buffer) < LENGTH_BYTES + int.from_bytes(buffer[:LENGTH_BYTES], "little"):
                # Not copied before it is whole: it may come byte by byte.
                return []
            data = bytes(buffer)
            buffer.clear()
        # What came is cut where it lies, and only what is left over is kept.
        payloads: list[bytes] = []
        start, size = 0, len(data)
        while size - start >= LENGTH_BYTES:
            length = int.from_bytes(data[start : start + LENGTH_BYTES], "little")
            end = start + LENGTH_BYTES + length
            if not 0 < length <= self._frame_bytes_max or size < end:
                break
            payloads.append(data[start + LENGTH_BYTES : end])
            start = end
        if start < size:
            buffer += data[start:]
            if not start:
                self.check()
        return payloads

    def check(self) -> None:
        """Check what the frame that has begun announces.

        Raises:
            ProtocolError: nothing, or more than the limit.
        """
        if len(self._buffer) < LENGTH_BYTES:
            return
        length = int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
        if not 0 < length <= self._frame_bytes_max:
            raise ProtocolError(f"a frame of {length} bytes; 1 to {self._frame_bytes_max} can be had")


_encoder: Final = msgspec.msgpack.Encoder()
_request_decoder: Final = msgspec.msgpack.Decoder(AnyRequest)
_answer_decoder: Final = msgspec.msgpack.Decoder(AnyReply | AnyPush)


class _Header(msgspec.Struct):
    id: int = 0
    type: str = ""


_header_decoder: Final = msgspec.msgpack.Decoder(_Header)
_BAD_PAYLOAD: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
_ANSWER_TYPES: Final = frozenset(cls.__name__ for cls in (AnyReply | AnyPush).__args__)
_REQUEST_TYPES: Final = frozenset(cls.__name__ for cls in AnyRequest.__args__)


def encode_frame(message: Request | Reply | Push) -> bytes:
    """Return *message* as a frame."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def decode_request(payload: bytes) -> AnyRequest | ErrorRep:
    """Return the request in *payload*, or the reply to one that is wrong but has an id.

    Raises:
        ProtocolError: the payload is no message at all.
    """
    try:
        return _request_decoder.decode(payload)
    except msgspec.ValidationError as error:
        try:
            header = _header_decoder.decode(payload)
        except _BAD_PAYLOAD as worse:
            raise ProtocolError(f"no message: {worse}") from None
        if header.type not in _REQUEST_TYPES:
            return ErrorRep(
                id=header.id, reason=Reason.UNKNOWN_TYPE, detail=f"unknown type {header.type[:64]!r}"
            )
        return ErrorRep(id=header.id, reason=Reason.INVALID_REQUEST, detail=f"{header.type}: {error}")
    except _BAD_PAYLOAD as error:
        raise ProtocolError(f"no message: {error}") from None


def decode_answer(payload: bytes) -> AnyReply | AnyPush | None:
    """Return the reply or push in *payload*; None for a push of a kind that this version does not know.

    Raises:
        ProtocolError: it is neither.
    """
    try:
        answer: AnyReply | AnyPush = _answer_decoder.decode(payload)
    except msgspec.ValidationError as error:
        try:
            header = _header_decoder.decode(payload)
        except _BAD_PAYLOAD as worse:
            raise ProtocolError(f"the daemon sent what is no message: {worse}") from None
        if header.id == 0 and header.type not in _ANSWER_TYPES:
            return None
        raise ProtocolError(f"the daemon sent a bad {header.type or 'message'}: {error}") from None
    except _BAD_PAYLOAD as error:
        raise ProtocolError(f"the daemon sent what is no message: {error}") from None
    return answer


_notification_encoder: Final = msgspec.json.Encoder()
_notification_decoder: Final = msgspec.json.Decoder(TransferNotification)


def encode_notification(notification: TransferNotification) -> str:
    """Return the text of a transport's notification."""
    return _notification_encoder.encode(notification).decode()


def decode_notification(text: str) -> TransferNotification:
    """Return what a transport's notification says.

    Raises:
        ProtocolError: it is none.
    """
    try:
        notification = _notification_decoder.decode(text)
        # JSON has numbers of any size; what msgpack cannot hold could not be passed on.
        _encoder.encode(notification)
    except (*_BAD_PAYLOAD, UnicodeEncodeError, OverflowError) as error:
        raise ProtocolError(f"no notification: {error}") from None
    return notification


def schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a message type or union, for schemas/."""
    return msgspec.json.schema(kind)

"""What the orchestrator and its workers say to each other, over a socketpair.

A frame is a u32 little-endian length and a msgpack message, as in the control protocol. A command
has an ``id``, and is answered once with the same one. A worker that reads the end of the stream
ends itself, so that none outlives the orchestrator.
"""

import select
import socket
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from snapd.errors import Reason
from snapd.units import MIB, MS_PER_S
from snapd.wire import (
    LENGTH_BYTES,
    FrameSplitter,
    SnapshotFinalizeIngestReqInput,
    SnapshotFinalizeIngestReqOutput,
)

MESSAGE_BYTES_MAX: Final = 256 * MIB
READ_BYTES: Final = 256 * 1024
ROLE_DECODER: Final = "D"
ROLE_PREFILL: Final = "P"


def pack_slots(slots: Sequence[int]) -> bytes:
    """Return slot numbers as little-endian int64."""
    return array("q", slots).tobytes()


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told at its start, as JSON on its command line.

    Attributes:
        role: D or P.
        index: which D, or which rank.
        channel_fd: the worker's end of the socketpair.
        socket_path: the daemon's.
        seed: for the KV bytes.
        decoder_fds: memory of the D pools; for a D its own, by rank; for a P rank those of its rank, by D.
        decoder_slots: slots of each.
        prefill_fd: memory of the P pool; -1 for a D.
        prefill_slots: slots of it.
        verify: compare checksums; off shows what the byte comparison finds without them.
        flip_push: this push of D 0, counted from 1, has a byte changed in the arena afterwards; 0: none.
        piece_bytes: the longest write, where the arena cannot be mapped.
    """

    role: str
    index: int
    channel_fd: int
    socket_path: str
    seed: int
    decoder_fds: tuple[int, ...]
    decoder_slots: int
    prefill_fd: int = -1
    prefill_slots: int = 0
    verify: bool = True
    flip_push: int = 0
    piece_bytes: int = MIB


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    id: int = 0


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``[start, stop)`` of a session, which one turn made."""

    turn: int
    start: int
    stop: int


# --- to D --------------------------------------------------------------------------------------


class Decode(_Message, frozen=True, kw_only=True):
    """Put a session's KV into the pool: random bytes, drawn from seed, session, turn and rank.

    Attributes:
        session: its number.
        segments: which tokens, and which turn made them.
        slots: of the whole session, int64, in token order.
    """

    session: int
    segments: tuple[Segment, ...]
    slots: bytes


class PushTurn(_Message, frozen=True, kw_only=True):
    """Push a session's snapshot.

    Attributes:
        session: its number.
        session_id: its name.
        token_ids: all tokens, from the first on.
        slots: where they are, int64.
        pace_ms: wait so long after each piece, and tell how far it is; 0: as fast as it goes.
        prepare_retries: how often to ask again when the buffer is full.
    """

    session: int
    session_id: str
    token_ids: tuple[int, ...]
    slots: bytes
    pace_ms: int = 0
    prepare_retries: int = 20


# --- to P --------------------------------------------------------------------------------------


class Finalize(_Message, frozen=True, kw_only=True):
    """Bring a snapshot home, then compare the session with what D has.

    Attributes:
        request: what an orchestrator sends to P.
        decoder: whose pool holds the session.
        slots: where, int64.
        is_last_try: do not keep the snapshot when there are no slots.
        stall_ms: hold the lease for so long before anything is read.
    """

    request: SnapshotFinalizeIngestReqInput
    decoder: int
    slots: bytes
    is_last_try: bool = False
    stall_ms: int = 0


class Prefill(_Message, frozen=True, kw_only=True):
    """P's own work: take up to *num_tokens* slots for *duration_ms*. Not answered.

    Attributes:
        idle_victims: sessions that are not over and may be evicted for it.
    """

    num_tokens: int
    duration_ms: int
    idle_victims: int = 0


class SessionOver(_Message, frozen=True, kw_only=True):
    """A session has ended: its cache goes first. Not answered."""

    session_id: str


class Report(_Message, frozen=True, kw_only=True):
    """Say what is in the tree; then let it go."""


class Stop(_Message, frozen=True, kw_only=True):
    """End in order. Answered by the end of the process."""


# --- answers -----------------------------------------------------------------------------------


class Started(_Message, frozen=True, kw_only=True):
    """The worker is set up."""


class Failed(_Message, frozen=True, kw_only=True):
    """The worker cannot go on."""

    detail: str


class Decoded(_Message, frozen=True, kw_only=True):
    """The KV is in the pool."""

    num_bytes: int


class PushMoved(_Message, frozen=True, kw_only=True):
    """How far a paced push is. Not an answer."""

    session: int
    slab_handle: int
    bytes_done: int
    bytes_total: int


class PushEnded(_Message, frozen=True, kw_only=True):
    """How a push ended on D's side.

    Attributes:
        refusals: prepares that were refused before.
        retried_pieces: writes that failed and were repeated.
        drained: no write can still land.
    """

    ok: bool
    reason: Reason
    detail: str = ""
    slab_handle: int = 0
    token_start: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    refusals: int = 0
    retried_pieces: int = 0
    drained: bool = True


class Finalized(_Message, frozen=True, kw_only=True):
    """What became of a finalize, and of the comparison.

    Attributes:
        output: P's answer.
        had_no_slots: this rank could not allocate; not another one.
        num_bytes: of the rank's shard, if it was ingested.
        compared_bytes: compared with D's pool: the whole session, from token 0 on.
        differing_planes: planes of which a byte differs.
    """

    output: SnapshotFinalizeIngestReqOutput
    had_no_slots: bool = False
    num_bytes: int = 0
    compared_bytes: int = 0
    differing_planes: int = 0


class Inserted(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The tree took a session's tokens up to *end_tokens*."""

    session_id: str
    end_tokens: int
    slab_handle: int


class TreeReport(_Message, frozen=True, kw_only=True):
    """What a rank's tree and pool hold.

    Attributes:
        inserted: everything that was ever inserted.
        resident: what is in the tree now: end of each session.
        evicted: sessions that had to go.
        alloc_failures: times that an ingest got no slots.
        total_slots: of the pool.
        free_slots, cached_slots: before the tree was let go; together they are the pool's.
        free_slots_after: when it was.
    """

    inserted: tuple[Inserted, ...]
    resident: dict[str, int]
    evicted: int
    alloc_failures: int
    total_slots: int
    free_slots: int
    cached_slots: int
    free_slots_after: int


ToWorker: TypeAlias = Decode | PushTurn | Finalize | Prefill | SessionOver | Report | Stop
FromWorker: TypeAlias = Started | Failed | Decoded | PushMoved | PushEnded | Finalized | TreeReport

_encoder: Final = msgspec.msgpack.Encoder()
_to_worker: Final = msgspec.msgpack.Decoder(ToWorker)
_from_worker: Final = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """Return *message* as a frame."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def decode_answer(payload: bytes) -> FromWorker:
    """Return what a worker said."""
    answer: FromWorker = _from_worker.decode(payload)
    return answer


class WorkerChannel:
    """A worker's end of the socketpair."""

    def __init__(self, fd: int) -> None:
        self._sock = socket.socket(fileno=fd)
        self._splitter = FrameSplitter(MESSAGE_BYTES_MAX)
        self._waiting: deque[bytes] = deque()

    def send(self, message: FromWorker) -> None:
        """Send a message."""
        self._sock.sendall(encode(message))

    def receive(self, timeout_s: float | None) -> ToWorker | None:
        """Return the next command; None: there was none in time.

        Args:
            timeout_s: how long to wait; None: for ever.

        Raises:
            EOFError: the orchestrator has ended.
        """
        while not self._waiting:
            poller = select.poll()
            poller.register(self._sock, select.POLLIN)
            if not poller.poll(None if timeout_s is None else timeout_s * MS_PER_S):
                return None
            data = self._sock.recv(READ_BYTES)
            if not data:
                raise EOFError
            self._waiting += self._splitter.feed(data)
        command: ToWorker = _to_worker.decode(self._waiting.popleft())
        return command

"""The sockets, and the thread that they live in.

The event loop only appends to a queue and wakes the thread; encoding, sending and replays are the thread's.
A subscriber that does not keep up loses batches, which it sees by their sequence numbers, and can ask for the
latest again; nobody waits for it.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import zmq

from snapd.kvevents.changes import Change
from snapd.kvevents.events import END_OF_REPLAY, SEQUENCE_BYTES, EventBatch, encode_batch, sequence_frame
from snapd.units import MS_PER_S

# Subscribers of a daemon that was here before come back within this: a SUB socket tries every 100 ms.
SETTLE_S: Final = 1.0
_REQUESTS_A_TURN: Final = 16
# Identity, an empty frame, the first sequence number wanted.
_REQUEST_FRAMES: Final = 3
# Of what comes in: subscriptions, and requests.
_MESSAGE_BYTES_MAX: Final = 1_024


class Publisher:
    """Sends changes as batches of events, and the latest again to whoever asks.

    Args:
        publish: a bound PUB socket; from ``start`` on it is the thread's.
        replay: a bound ROUTER socket, or None.
        topic: the first frame of every message.
        data_parallel_rank: in every batch.
        buffer_batches: kept for replays.
        buffer_bytes_max: the same, in bytes.
        linger_ms: for what was sent and has not left at the end.
        on_bug: told what nobody foresaw, from the thread; it has ended then.

    Attributes:
        batches: sent so far; the next sequence number.
        buffered_batches: kept at present.
        replays: requests that were answered.
        bad_requests: those that could not be.
        send_errors: batches and answers that ZeroMQ did not take.
    """

    def __init__(
        self,
        publish: "zmq.Socket[bytes]",
        replay: "zmq.Socket[bytes] | None",
        *,
        topic: str,
        data_parallel_rank: int,
        buffer_batches: int,
        buffer_bytes_max: int,
        linger_ms: int,
        on_bug: Callable[[BaseException], None],
        settle_s: float = SETTLE_S,
    ) -> None:
        self.batches = 0
        self.buffered_batches = 0
        self.replays = 0
        self.bad_requests = 0
        self.send_errors = 0
        self._publish = publish
        self._replay = replay
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._buffer_batches = buffer_batches
        self._buffer_bytes_max = buffer_bytes_max
        self._linger_ms = linger_ms
        self._on_bug = on_bug
        self._settle_s = settle_s
        self._queue: deque[Change] = deque()
        self._buffer: deque[tuple[bytes, bytes]] = deque()
        self._buffered_bytes = 0
        # One is written by the loop only, the other by the thread only.
        self._bytes_in = 0
        self._bytes_out = 0
        self._is_closing = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="snapd-kv-events", daemon=True)

    @property
    def queued_bytes(self) -> int:
        """What waits to be sent, about."""
        return self._bytes_in - self._bytes_out

    @property
    def buffered_bytes(self) -> int:
        """What is kept at present."""
        return self._buffered_bytes

    def start(self) -> None:
        """Begin to send what is put."""
        self._thread.start()

    def put(self, change: Change) -> None:
        """Take a change; never blocks and never raises."""
        self._bytes_in += change.num_bytes
        self._queue.append(change)
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Send what was put, and end the thread; its sockets are closed then. Waits for it, not for long."""
        self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._wake_fd)

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self._on_bug(error)
        finally:
            for socket in (self._publish, self._replay):
                if socket is not None:
                    socket.close(linger=self._linger_ms)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        settled_s = time.monotonic() + self._settle_s
        while True:
            # Looked at before the queue: what was put before the end is sent.
            is_closing = self._is_closing
            wait_s = settled_s - time.monotonic()
            is_settled = wait_s <= 0 or is_closing
            if is_settled:
                self._send_queued()
            if is_closing:
                return
            ready = dict(poller.poll(None if is_settled else int(wait_s * MS_PER_S) + 1))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)

    def _send_queued(self) -> None:
        while self._queue:
            change = self._queue.popleft()
            for event in change.events():
                batch = EventBatch(ts=time.time(), events=[event], data_parallel_rank=self._rank)
                self._send(encode_batch(batch))
            self._bytes_out += change.num_bytes
            if self._replay is not None:
                self._answer(self._replay)

    def _send(self, payload: bytes) -> None:
        sequence = sequence_frame(self.batches)
        self.batches += 1
        self._keep(sequence, payload)
        try:
            self._publish.send_multipart((self._topic, sequence, payload), zmq.NOBLOCK)
        except zmq.ZMQError:
            # A PUB socket drops rather than blocks, so it is something else: the batch can be asked for.
            self.send_errors += 1

    def _keep(self, sequence: bytes, payload: bytes) -> None:
        if self._replay is None:
            return
        self._buffer.append((sequence, payload))
        self._buffered_bytes += len(payload)
        while len(self._buffer) > self._buffer_batches or self._buffered_bytes > self._buffer_bytes_max:
            _, oldest = self._buffer.popleft()
            self._buffered_bytes -= len(oldest)
        self.buffered_batches = len(self._buffer)

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """Answer some of the requests that wait."""
        for _ in range(_REQUESTS_A_TURN):
            try:
                frames = replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != _REQUEST_FRAMES or frames[1] or len(frames[2]) > SEQUENCE_BYTES:
                self.bad_requests += 1
                continue
            try:
                self._send_again(replay, frames[0], int.from_bytes(frames[2], "big"))
            except zmq.ZMQError:
                self.send_errors += 1
            else:
                self.replays += 1

    def _send_again(self, replay: "zmq.Socket[bytes]", asker: bytes, first: int) -> None:
        # A ROUTER drops what an asker does not read: its queue has room for one whole answer.
        for sequence, payload in self._buffer:
            if int.from_bytes(sequence, "big") >= first:
                replay.send_multipart((asker, b"", self._topic, sequence, payload), zmq.NOBLOCK)
        replay.send_multipart((asker, b"", b"", END_OF_REPLAY, b""), zmq.NOBLOCK)


def bound(context: "zmq.Context[Any]", kind: int, endpoint: str, queue_batches: int) -> "zmq.Socket[bytes]":
    """Return a socket that is bound.

    Args:
        context: whose socket.
        kind: ``zmq.PUB`` or ``zmq.ROUTER``.
        endpoint: where.
        queue_batches: batches that may wait for one peer; what is more is dropped.

    Raises:
        zmq.ZMQError: it cannot be bound.
    """
    socket: zmq.Socket[bytes] = context.socket(kind)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.setsockopt(zmq.SNDHWM, queue_batches)
        socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
        socket.bind(endpoint)
    except BaseException:
        socket.close()
        raise
    return socket

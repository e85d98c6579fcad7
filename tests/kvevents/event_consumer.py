"""A router's index, as plain as can be: it applies events in order and is strict about them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import zmq

from snapd.kvevents.changes import Change
from snapd.kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, decode_batch

WAIT_MS = 20_000
T = TypeVar("T")


@dataclass
class Consumer:
    """What a router would believe.

    Attributes:
        pages: token ids of each page that is there, by its hash; empty when they were not told.
        parents: hash of the page before each.
        clears: how often everything was forgotten.
    """

    pages: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parents: dict[int, int | None] = field(default_factory=dict)
    clears: int = 0

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events; a page is stored when it is not there, and removed when it is."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    assert event.block_hashes
                    for number in event.block_hashes:
                        del self.pages[number]
                        del self.parents[number]
                case AllBlocksCleared():
                    self.pages.clear()
                    self.parents.clear()
                    self.clears += 1

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        assert event.block_hashes
        assert len(event.token_ids) in (0, size * len(event.block_hashes)), "all its tokens, or none"
        parent = event.parent_block_hash
        for index, number in enumerate(event.block_hashes):
            assert number not in self.pages, "stored twice"
            self.pages[number] = tuple(event.token_ids[index * size : (index + 1) * size])
            self.parents[number] = parent
            parent = number


class Lists:
    """An outlet that keeps what it is given, and hands it to a consumer at once."""

    def __init__(self) -> None:
        self.consumer = Consumer()
        self.changes: list[Change] = []
        self.queued_bytes = 0

    def put(self, change: Change) -> None:
        self.changes.append(change)
        self.consumer.apply(change.events())


class Subscriber:
    """A real SUB socket that decodes what comes, and knows gaps by their sequence numbers."""

    def __init__(self, context: "zmq.Context", endpoint: str, topic: bytes = b"", queue: int = 0) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        if queue:
            self.socket.setsockopt(zmq.RCVHWM, queue)
            self.socket.setsockopt(zmq.RCVBUF, 4_096)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        self.socket.connect(endpoint)
        self.consumer = Consumer()
        self.sequences: list[int] = []
        self.frames: list[list[bytes]] = []
        self.batches: list[EventBatch] = []

    def receive(self, *, is_applied: bool = True) -> EventBatch:
        """Return the next batch, after having applied it."""
        assert self.socket.poll(WAIT_MS), "no batch came"
        frames = self.socket.recv_multipart()
        _, sequence, payload = frames
        batch = decode_batch(payload)
        self.frames.append(frames)
        self.batches.append(batch)
        self.sequences.append(int.from_bytes(sequence, "big"))
        if is_applied:
            self.consumer.apply(batch.events)
        return batch

    def until(self, condition: Callable[[Consumer], bool]) -> Consumer:
        """Receive until the consumer is as wanted."""
        while not condition(self.consumer):
            self.receive()
        return self.consumer

    def close(self) -> None:
        self.socket.close()


def replayed(context: "zmq.Context", endpoint: str, first: int) -> list[list[bytes]]:
    """Ask for the batches from a sequence number on; return all frames, the end marker's last."""
    asker = context.socket(zmq.DEALER)
    asker.setsockopt(zmq.LINGER, 0)
    asker.setsockopt(zmq.RCVHWM, 0)
    try:
        asker.connect(endpoint)
        asker.send_multipart((b"", first.to_bytes(8, "big")))
        answer: list[list[bytes]] = []
        while not answer or answer[-1][-1]:
            assert asker.poll(WAIT_MS), f"no answer after {len(answer)} batches"
            answer.append(asker.recv_multipart())
        return answer
    finally:
        asker.close()

"""Real sockets: what is sent, what can be had again, and that nobody waits for a slow subscriber."""

import contextlib
import itertools
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from event_consumer import WAIT_MS, Subscriber, replayed
from raw_client import wait_for

from snapd.kvevents.changes import Change, Cleared, Removed, Stored
from snapd.kvevents.events import BLOCKS_MAX, END_OF_REPLAY, AllBlocksCleared, decode_batch
from snapd.kvevents.publisher import Publisher, bound

TOPIC = "kv@node:one@model"
WAIT_S = WAIT_MS / 1000


class Running:
    """A publisher with its sockets, and subscribers to it."""

    def __init__(self, stack: contextlib.ExitStack, **fields: Any) -> None:
        self.context = stack.enter_context(zmq.Context())
        self.stack = stack
        self.bugs: list[BaseException] = []
        batches = fields.pop("buffer_batches", 1_000)
        publish = bound(self.context, zmq.PUB, "tcp://127.0.0.1:0", fields.pop("queue_batches", batches))
        replay = None
        if fields.pop("replay", True):
            replay = bound(self.context, zmq.ROUTER, "tcp://127.0.0.1:0", batches + 1)
        self.address, self.replay_address = (
            each.getsockopt_string(zmq.LAST_ENDPOINT) if each else "" for each in (publish, replay)
        )
        self.publisher = Publisher(
            publish,
            replay,
            topic=TOPIC,
            data_parallel_rank=2,
            buffer_batches=batches,
            buffer_bytes_max=fields.pop("buffer_bytes_max", 1 << 20),
            linger_ms=500,
            on_bug=self.bugs.append,
            settle_s=fields.pop("settle_s", 0.0),
        )
        assert not fields
        stack.callback(self.close)

    def close(self) -> None:
        """Close once."""
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None
            assert not self.bugs

    def subscriber(self, topic: bytes = b"", queue: int = 0) -> Subscriber:
        """Return a subscriber that the publisher knows of: one that has heard something."""
        subscriber = Subscriber(self.context, self.address, topic, queue)
        self.stack.callback(subscriber.close)
        for _ in range(400):
            self.publisher.put(Cleared())
            if subscriber.socket.poll(50):
                return subscriber
        raise AssertionError("the subscriber heard nothing")


@pytest.fixture
def run() -> Iterator[Any]:
    """A function that makes a publisher which runs."""
    with contextlib.ExitStack() as stack:

        def make(*, start: bool = True, **fields: Any) -> Running:
            running = Running(stack, **fields)
            if start:
                running.publisher.start()
            return running

        yield make


def stored(*hashes: int) -> Stored:
    return Stored(
        hashes=list(hashes), parent=None, token_ids=b"", block_size=4, medium="CPU_PINNED", lora_name=None,
        cache_salt=None, session_id="s",
    )  # fmt: skip


def last_of(subscriber: Subscriber, change: Change) -> None:
    """Receive until *change* has come."""
    (wanted,) = change.events()
    while subscriber.receive(is_applied=False).events != [wanted]:
        pass


def test_a_message_is_topic_sequence_number_and_batch(run):
    running = run()
    subscriber = running.subscriber(topic=b"kv@")
    running.publisher.put(stored(1, 2))
    subscriber.until(lambda consumer: len(consumer.pages) == 2)
    topic, sequence, payload = subscriber.frames[-1]
    assert topic == TOPIC.encode() and len(sequence) == 8
    batch = decode_batch(payload)
    assert batch.data_parallel_rank == 2 and batch.ts > 1_700_000_000 and len(batch.events) == 1


def test_sequence_numbers_begin_at_0_and_have_no_gaps(run):
    running = run()
    for _ in range(5):
        running.publisher.put(Cleared())
    subscriber = running.subscriber()
    running.publisher.put(removed_after := stored(7))
    last_of(subscriber, removed_after)
    sequences = subscriber.sequences
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    answer = replayed(running.context, running.replay_address, 0)
    assert [int.from_bytes(frames[2], "big") for frames in answer[:-1]] == list(range(sequences[-1] + 1))


def test_a_subscriber_to_another_topic_hears_nothing(run):
    running = run()
    other = Subscriber(running.context, running.address, b"another")
    running.stack.callback(other.close)
    subscriber = running.subscriber()
    running.publisher.put(stored(1))
    last_of(subscriber, stored(1))
    assert not other.socket.poll(0)


def test_a_replay_has_the_batches_from_the_one_asked_for_on_and_an_end(run):
    running = run()
    subscriber = running.subscriber()
    for number in range(10):
        running.publisher.put(stored(number))
    last_of(subscriber, stored(9))
    last = subscriber.sequences[-1]
    answer = replayed(running.context, running.replay_address, last - 3)
    assert [frames[0] for frames in answer] == [b""] * 5
    assert answer[-1] == [b"", b"", END_OF_REPLAY, b""]
    # As the live ones were: topic, sequence number and batch.
    assert [frames[1:] for frames in answer[:-1]] == subscriber.frames[-4:]
    assert running.publisher.replays == 1


def test_what_comes_later_can_be_asked_for_too_and_what_is_not_there_ends_at_once(run):
    running = run()
    subscriber = running.subscriber()
    last_of(subscriber, Cleared())
    for first in (10_000, 2**64 - 1):
        assert replayed(running.context, running.replay_address, first) == [[b"", b"", END_OF_REPLAY, b""]]


def test_the_buffer_keeps_the_latest_batches_only(run):
    running = run(buffer_batches=4, queue_batches=1_000)
    subscriber = running.subscriber()
    for number in range(20):
        running.publisher.put(stored(number))
    last_of(subscriber, stored(19))
    answer = replayed(running.context, running.replay_address, 0)
    assert [decode_batch(frames[3]).events[0].block_hashes for frames in answer[:-1]] == [
        [16],
        [17],
        [18],
        [19],
    ]
    assert running.publisher.buffered_batches == 4


def test_the_buffer_is_bounded_in_bytes_too(run):
    running = run(buffer_bytes_max=2_000)
    subscriber = running.subscriber()
    for number in range(20):
        running.publisher.put(stored(*range(50 * number, 50 * number + 50)))
    last_of(subscriber, stored(*range(950, 1_000)))
    answer = replayed(running.context, running.replay_address, 0)
    sizes = [len(frames[3]) for frames in answer[:-1]]
    assert sum(sizes) <= 2_000 < sum(sizes) + max(sizes)
    assert decode_batch(answer[-2][3]).events[0].block_hashes[0] == 950


def test_without_a_replay_address_nothing_is_kept(run):
    running = run(replay=False)
    subscriber = running.subscriber()
    running.publisher.put(stored(1))
    last_of(subscriber, stored(1))
    assert running.publisher.buffered_batches == 0


def test_requests_that_are_none_are_counted_and_the_next_is_answered(run):
    running = run()
    running.subscriber()
    asker = running.context.socket(zmq.DEALER)
    asker.setsockopt(zmq.LINGER, 0)
    running.stack.callback(asker.close)
    asker.connect(running.replay_address)
    for frames in ([b"\0" * 8], [b"x", b"\0" * 8], [b"", b"\0" * 9], [b"", b"\0" * 8, b""]):
        asker.send_multipart(frames)
    asker.send_multipart([b"", b"\xff" * 8])
    assert asker.poll(WAIT_MS)
    assert asker.recv_multipart() == [b"", b"", END_OF_REPLAY, b""]
    assert (running.publisher.bad_requests, running.publisher.replays) == (4, 1)


def test_garbage_closes_its_own_connection_only(run):
    running = run()
    subscriber = running.subscriber()
    for address in (running.address, running.replay_address):
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 4_096)
    running.publisher.put(stored(1))
    last_of(subscriber, stored(1))
    assert replayed(running.context, running.replay_address, 2**63) == [[b"", b"", END_OF_REPLAY, b""]]
    assert running.publisher.replays == 1


def test_a_large_message_closes_its_connection_before_it_is_read(run):
    running = run()
    large = running.context.socket(zmq.DEALER)
    large.setsockopt(zmq.LINGER, 0)
    running.stack.callback(large.close)
    monitor = large.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    large.connect(running.replay_address)
    large.send_multipart([b"", b"\0" * 100_000])
    assert monitor.poll(WAIT_MS), "it was not closed"
    large.disable_monitor()
    assert replayed(running.context, running.replay_address, 2**63) == [[b"", b"", END_OF_REPLAY, b""]]
    assert (running.publisher.bad_requests, running.publisher.replays) == (0, 1)


def test_a_subscriber_that_does_not_read_loses_batches_and_nobody_waits_for_it(run):
    """It sees by the numbers that it lacks some, and can have them again."""
    running = run(queue_batches=20, buffer_batches=2_000, buffer_bytes_max=64 << 20)
    slow = running.subscriber(queue=1)
    begun = running.publisher.batches
    # Some 20 MB: more than the sockets and queues on the way hold.
    hashes = list(range(1 << 60, (1 << 60) + BLOCKS_MAX))
    for _ in range(1_000):
        running.publisher.put(Removed(hashes, "CPU_PINNED"))
    wait_for(lambda: running.publisher.batches >= begun + 1_000, "everything is sent")
    slow.consumer.apply = lambda events: None
    while slow.socket.poll(500):
        slow.receive()
    running.publisher.put(Cleared())
    slow.receive()
    assert slow.batches[-1].events == [AllBlocksCleared()]
    assert len(slow.sequences) < 1_000
    assert any(right != left + 1 for left, right in itertools.pairwise(slow.sequences))
    answer = replayed(running.context, running.replay_address, slow.sequences[0])
    found = [int.from_bytes(frames[2], "big") for frames in answer[:-1]]
    assert found == list(range(slow.sequences[0], slow.sequences[-1] + 1))


def test_the_first_batch_waits_for_subscribers_that_come_back(run):
    """A daemon that was restarted tells those who followed its forerunner, and who connect a moment later."""
    running = run(settle_s=WAIT_S, start=False)
    running.publisher.put(Cleared())
    running.publisher.start()
    subscriber = Subscriber(running.context, "tcp://127.0.0.1:1")
    running.stack.callback(subscriber.close)
    monitor = subscriber.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    subscriber.socket.connect(running.address)
    assert monitor.poll(WAIT_MS)
    subscriber.socket.disable_monitor()
    # Its subscription comes right behind; closing sends what waits.
    assert not subscriber.socket.poll(200)
    assert running.publisher.batches == 0
    running.close()
    assert subscriber.receive().events == [AllBlocksCleared()]
    assert subscriber.sequences == [0]


def test_what_was_put_before_the_end_is_sent(run):
    running = run()
    subscriber = running.subscriber()
    # More than a socket takes at once.
    batches = [stored(*range(number * BLOCKS_MAX, (number + 1) * BLOCKS_MAX)) for number in range(500)]
    for batch in batches:
        running.publisher.put(batch)
    publisher = running.publisher
    running.close()
    assert publisher.queued_bytes == 0
    last_of(subscriber, batches[-1])


def test_what_was_sent_has_time_to_leave_before_its_socket_closes():
    class Closing:
        """A PUB socket that notes how it is closed."""

        lingers: list[int] = []

        def send_multipart(self, frames: tuple[bytes, ...], flags: int) -> None:
            assert len(frames) == 3 and flags == zmq.NOBLOCK

        def close(self, linger: int) -> None:
            self.lingers.append(linger)

    publisher = Publisher(
        Closing(), None, topic="", data_parallel_rank=0, buffer_batches=1, buffer_bytes_max=1,
        linger_ms=700, on_bug=print, settle_s=WAIT_S,
    )  # fmt: skip
    publisher.put(Cleared())
    publisher.start()
    publisher.close()
    assert publisher.batches == 1
    assert Closing.lingers == [700]


def test_an_ipv6_address_can_be_bound():
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"there is no IPv6 here: {error}")
    with zmq.Context() as context, bound(context, zmq.PUB, "tcp://[::1]:0", 10) as publish:
        assert publish.getsockopt_string(zmq.LAST_ENDPOINT).startswith("tcp://[::1]:")


def test_a_publisher_that_never_started_can_be_closed(run):
    running = run(start=False)
    running.publisher.put(Cleared())
    running.publisher.close()
    running.publisher = None


def test_what_waits_is_counted_until_it_is_sent(run):
    running = run(start=False)
    running.publisher.put(stored(1, 2, 3))
    assert running.publisher.queued_bytes == stored(1, 2, 3).num_bytes
    publisher = running.publisher
    publisher.start()
    running.close()
    assert publisher.queued_bytes == 0


def test_what_nobody_foresaw_is_told_and_ends_the_thread(run):
    class Broken:
        num_bytes = 1

        def events(self) -> Iterator[Any]:
            raise ZeroDivisionError

    running = run()
    running.publisher.put(Broken())
    running.publisher.close()
    running.publisher = None
    (bug,) = running.bugs
    assert isinstance(bug, ZeroDivisionError)

"""What tests with a real daemon share: its settings, and a subscriber that it knows of."""

from typing import Any

import zmq
from event_consumer import Subscriber
from raw_client import LAYOUT, RawClient, wait_for

from snapd import wire as w
from snapd.kvevents.events import BlockRemoved
from snapd.kvevents.hashes import page_key_hashes
from snapd.layout import fingerprint, page_keys

PAGE = LAYOUT.page_size_tokens
TOKENS = tuple(range(70, 110))
TOPIC = "kv@10.0.0.1:8000@model"
ANY_PORT = "tcp://127.0.0.1:0"
SETTINGS: dict[str, object] = {
    "kv_events_address": ANY_PORT,
    "kv_events_replay_address": ANY_PORT,
    "kv_events_topic": TOPIC,
    "kv_events_data_parallel_rank": 3,
    "metrics_address": ":0",
}


def statistics(client: RawClient) -> w.KVEventStatistics:
    found = client.stats().kv_events
    assert found is not None
    return found


def keys(num_tokens: int) -> tuple[str, ...]:
    return page_keys(TOKENS[:num_tokens], PAGE)


def names(num_tokens: int) -> list[int]:
    return page_key_hashes(keys(num_tokens), fingerprint(LAYOUT))


def heard(context: "zmq.Context[Any]", client: RawClient, topic: bytes = b"kv@") -> Subscriber:
    """Return a subscriber that the daemon knows of, and that has read all that came so far."""
    subscriber = Subscriber(context, statistics(client).address, topic)

    def is_heard() -> int:
        abort(client, client.ready("warm", PAGE, page_keys=page_keys(range(PAGE), PAGE)))
        return subscriber.socket.poll(50)

    wait_for(is_heard, "the subscriber to be heard")
    last = names(len(TOKENS))[-1]
    abort(client, client.ready("last", len(TOKENS), page_keys=keys(len(TOKENS))))
    while True:
        (event,) = subscriber.receive(is_applied=False).events
        if isinstance(event, BlockRemoved) and last in event.block_hashes:
            return subscriber


def abort(client: RawClient, handle: int) -> None:
    client.ask(w.AbortReq, slab_handle=handle, drained=True)

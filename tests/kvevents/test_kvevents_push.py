"""What a Pusher gives the daemon for its events, and what routers hear of it."""

from typing import Any

import msgspec
import pytest
import zmq
from events_daemon import SETTINGS, heard, statistics
from kv_cases import MHA, Pair, paged, paired
from raw_client import RawClient, running

from snapd.errors import InvalidRequest
from snapd.kv.control import PrepareRequest
from snapd.kvevents.events import BlockRemoved
from snapd.kvevents.hashes import (
    page_key_hashes,
    sglang_block_hashes,
    unpack_block_hashes,
    unpack_token_ids,
)
from snapd.layout import page_keys
from snapd.wire import KVEventsWanted

PAGE = 16
TOKENS = tuple(range(1_000, 1_000 + 5 * PAGE + 3))
WHOLE = 5


@pytest.fixture(scope="module")
def daemon() -> Any:
    with running(**SETTINGS, size="4MiB") as started:
        yield started


@pytest.fixture
def context() -> Any:
    with zmq.Context() as made:
        yield made


def asked(pair: Pair, token_ids: tuple[int, ...], **fields: Any) -> PrepareRequest:
    """Return what the pusher asks of the daemon for a push that fails at once."""
    seen: list[PrepareRequest] = []

    def prepare(request: PrepareRequest) -> Any:
        seen.append(request)
        raise InvalidRequest("seen")

    pair.pusher.control.prepare = prepare  # type: ignore[method-assign]
    assert not pair.push("s", token_ids, **fields).ok
    return seen[0]


def test_a_push_is_told_with_its_tokens_under_the_engines_names_and_taken_back_by_the_ingest(context, daemon):
    push = {"send_token_ids": True, "block_hashes": sglang_block_hashes}
    with RawClient(daemon.socket_path) as client, paired(daemon, paged(MHA, PAGE), push=push) as pair:
        subscriber = heard(context, client)
        handle = pair.ready("s", TOKENS)
        (stored,) = subscriber.receive().events
        names = sglang_block_hashes("s", TOKENS, PAGE)
        assert stored.block_hashes == names and len(names) == WHOLE
        assert tuple(stored.token_ids) == TOKENS[: WHOLE * PAGE]
        assert (stored.block_size, stored.session_id) == (PAGE, "s")
        assert all(answer.ok for answer in pair.ingest("s", TOKENS, handle))
        assert subscriber.receive().events == [BlockRemoved(block_hashes=names[::-1], medium="CPU_PINNED")]
        # The next turn sends what P lacks; it hangs below what P has.
        longer = (*TOKENS, *range(PAGE))
        pair.ready("s", longer)
        (stored,) = subscriber.receive().events
        names = sglang_block_hashes("s", longer, PAGE)
        assert (stored.parent_block_hash, stored.block_hashes) == (names[WHOLE - 1], names[WHOLE:])
        assert tuple(stored.token_ids) == longer[WHOLE * PAGE : (WHOLE + 1) * PAGE]
        subscriber.close()


def test_unless_told_otherwise_the_daemon_names_the_pages_and_hears_no_token_ids(context, daemon):
    with RawClient(daemon.socket_path) as client, paired(daemon, paged(MHA, PAGE)) as pair:
        subscriber = heard(context, client)
        pair.ready("s", TOKENS)
        (stored,) = subscriber.receive().events
        keys = page_keys(TOKENS, PAGE)
        assert stored.block_hashes == page_key_hashes(keys, pair.pusher.layout_fingerprint)
        assert stored.token_ids == []
        subscriber.close()


def test_token_ids_begin_with_the_first_token_that_is_asked_for_and_are_as_many_as_are_wanted(daemon):
    push = {"send_token_ids": True, "block_hashes": sglang_block_hashes}
    with paired(daemon, paged(MHA, PAGE), push=push) as pair:
        request = asked(pair, TOKENS, token_start=2 * PAGE)
        assert tuple(unpack_token_ids(request.token_ids)) == TOKENS[2 * PAGE :]
        assert unpack_block_hashes(request.block_hashes) == sglang_block_hashes("s", TOKENS, PAGE)
        said = pair.pusher.control.hello()
        less = msgspec.structs.replace(said, page_keys_max=3, kv_events=KVEventsWanted(token_ids_max=20))
        pair.pusher.control.hello = lambda: less  # type: ignore[method-assign]
        request = asked(pair, TOKENS)
        assert tuple(unpack_token_ids(request.token_ids)) == TOKENS[:20]
        assert unpack_block_hashes(request.block_hashes) == sglang_block_hashes("s", TOKENS, PAGE)[:3]
        assert len(request.page_keys) == 3


def test_to_a_daemon_that_publishes_no_events_none_of_it_is_sent(daemon):
    push = {"send_token_ids": True, "block_hashes": sglang_block_hashes}
    with paired(daemon, paged(MHA, PAGE), push=push) as pair:
        silent = msgspec.structs.replace(pair.pusher.control.hello(), kv_events=None)
        pair.pusher.control.hello = lambda: silent  # type: ignore[method-assign]
        request = asked(pair, TOKENS)
        assert (request.token_ids, request.block_hashes) == (b"", b"")


def test_token_ids_that_no_event_can_hold_are_left_out_and_the_push_goes_on(daemon):
    push = {"send_token_ids": True, "block_hashes": sglang_block_hashes}
    with paired(daemon, paged(MHA, PAGE), push=push) as pair:
        assert pair.push("s", (-1, *TOKENS[1:])).ok
        request = asked(pair, (-1, *TOKENS[1:]))
        assert (request.token_ids, request.block_hashes) == (b"", b"")


def test_each_of_the_two_can_be_sent_alone(daemon):
    with paired(daemon, paged(MHA, PAGE), push={"send_token_ids": True}) as pair:
        request = asked(pair, TOKENS)
        assert request.token_ids and not request.block_hashes
    with paired(daemon, paged(MHA, PAGE), push={"block_hashes": sglang_block_hashes}) as pair:
        request = asked(pair, TOKENS)
        assert request.block_hashes and not request.token_ids
    with RawClient(daemon.socket_path) as client:
        assert statistics(client).facts_dropped == 0

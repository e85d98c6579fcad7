"""Both clients against the real daemon, as a process of its own."""

import asyncio

import pytest
import uvloop
from client_cases import PATIENCE_S, num_fds

from snapd import calls
from snapd.client import AsyncClient, Client
from snapd.core.events import State
from snapd.errors import (
    BufferFull,
    ConnectionLost,
    DaemonUnreachable,
    Draining,
    InvalidRequest,
    LayoutMismatch,
    LimitReached,
    Reason,
    RequestError,
    RequestTimeout,
    StaleHandle,
    TooLarge,
    WrongRank,
    WrongState,
)
from snapd.layout import Layout, fingerprint, page_keys, snapshot_bytes, token_digest
from snapd.mapping import map_arena
from snapd.wire import AckRep, WatchRefused, WatchTransition

LAYOUT = Layout((64, 64), (64, 64), page_size_tokens=4)
NAME = fingerprint(LAYOUT)
SUMS = ((1, 2), (3, 4), (5, 6), (7, 8))
NUM_TOKENS = 100
NUM_BYTES = snapshot_bytes(LAYOUT, NUM_TOKENS)


@pytest.fixture
def two_ranks(start_daemon):
    return start_daemon(ranks=2)


@pytest.fixture
def client(two_ranks):
    with Client(str(two_ranks.socket_path), timeout_s=PATIENCE_S) as client:
        for rank in (0, 1):
            assert client.declare_layout(rank, LAYOUT) == NAME
        yield client


def push(client, session_id="s"):
    grant = client.prepare_receive(session_id, NUM_TOKENS, NAME)
    for rank in (0, 1):
        client.commit(grant.slab_handle, rank, NUM_BYTES, NUM_TOKENS, SUMS, epoch=grant.epoch)
    return grant


def test_a_snapshot_goes_all_the_way(client, two_ranks):
    tokens = list(range(NUM_TOKENS))
    grant = client.prepare_receive(
        "chat", NUM_TOKENS, NAME, token_digest=token_digest(tokens), page_keys=page_keys(tokens, 4)
    )
    handle, epoch = grant.slab_handle, grant.epoch
    assert epoch == client.epoch
    assert (grant.session_id, grant.num_tokens, grant.expires_ms > 0) == ("chat", NUM_TOKENS, True)
    assert client.transfer_started(handle, epoch=epoch).state is State.TRANSFERRING
    path = str(two_ranks.socket_path)
    for rank in (0, 1):
        target = grant.for_rank(rank)
        with client.map_buffer(rank, True) as written, map_arena(path, rank, timeout_s=PATIENCE_S) as seen:
            start = target.snapshot_buf_base_ptr + target.v_layer_offsets[1]
            written.buffer[start : start + 4] = b"KV%d!" % rank
            assert bytes(seen.buffer[start : start + 4]) == b"KV%d!" % rank
            assert seen.epoch == epoch
        state = client.commit(handle, rank, NUM_BYTES, NUM_TOKENS, SUMS, epoch=epoch).state
    assert state is State.READY

    assert client.lookup(NAME, session_id="chat").slab_handle == handle
    assert client.lookup(NAME, page_keys=page_keys(tokens, 4)).matched_tokens == NUM_TOKENS
    leases = [client.begin_ingest(handle, rank, NAME, epoch=epoch) for rank in (0, 1)]
    assert [lease.checksums for lease in leases] == [SUMS, SUMS]
    assert leases[1].grant == grant.for_rank(1)
    first = client.submit(calls.vote(handle, 0, leases[0].lease_id, True, epoch=epoch))
    assert client.ping().epoch == epoch
    assert first.poll() is None
    decision = client.vote(handle, 1, leases[1].lease_id, True, epoch=epoch)
    assert (decision.commit, decision.state) == (True, State.INGESTED)
    assert first.wait().commit
    (told,) = client.take_ended()
    assert (told.slab_handle, told.state, told.drain_wanted) == (handle, State.INGESTED, False)
    assert client.get(handle).session.state is State.INGESTED
    assert client.list_sessions(states=[State.INGESTED]).total == 1
    assert client.stats().core.attempts_ok == 1


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_snapshot_goes_all_the_way_with_asyncio(two_ranks, run):
    async def main():
        async with AsyncClient(str(two_ranks.socket_path), timeout_s=PATIENCE_S) as client:
            await asyncio.gather(client.declare_layout(0, LAYOUT), client.declare_layout(1, LAYOUT))
            grant = await client.prepare_receive("chat", NUM_TOKENS, NAME)
            handle = grant.slab_handle
            await asyncio.gather(
                *[client.commit(handle, rank, NUM_BYTES, NUM_TOKENS, SUMS) for rank in (0, 1)]
            )
            leases = await asyncio.gather(*[client.begin_ingest(handle, rank, NAME) for rank in (0, 1)])
            votes = [client.vote(handle, lease.grant.rank, lease.lease_id, True) for lease in leases]
            assert [decision.commit for decision in await asyncio.gather(*votes)] == [True, True]
            assert [told.slab_handle for told in client.take_ended()] == [handle]
            mapped = await client.map_buffer(1)
            assert mapped.size_bytes == client.hello.arenas[1].size_bytes
            mapped.close()

    run(main())


def test_refusals_come_as_their_own_errors(client):
    grant = client.prepare_receive("s", NUM_TOKENS, NAME)
    handle = grant.slab_handle
    refused = {
        LayoutMismatch: calls.prepare_receive("s", 10, "0" * 32),
        TooLarge: calls.prepare_receive("s", 1_000_000, NAME),
        InvalidRequest: calls.prepare_receive("s", 0, NAME),
        WrongRank: calls.commit(handle, 7, NUM_BYTES, NUM_TOKENS, SUMS),
        WrongState: calls.begin_ingest(handle, 0, NAME),
        StaleHandle: calls.abort(handle + 1),
    }
    for error, call in refused.items():
        with pytest.raises(error):
            client.call(call)
    with pytest.raises(WrongRank):
        client.map_buffer(7)
    with pytest.raises(RequestError, match="partial-transfer") as caught:
        client.commit(handle, 0, NUM_BYTES - 1, NUM_TOKENS, SUMS)
    assert caught.value.reason is Reason.PARTIAL_TRANSFER


def test_a_full_buffer_says_when_to_ask_again(client):
    with pytest.raises(BufferFull) as caught:
        for index in range(100):
            client.prepare_receive(f"s-{index}", 20_000, NAME)
    assert caught.value.retry_after_ms > 0
    assert caught.value.retryable


def test_a_transfer_that_fails_is_ended_and_drained(client):
    first, second = (client.prepare_receive(name, NUM_TOKENS, NAME) for name in ("a", "b"))
    state = client.transfer_failed(first.slab_handle, reason=Reason.SESSION_NOT_RESIDENT).state
    assert state is State.ABORTED
    assert client.stats().core.quarantined_shards == 2
    client.drained(first.slab_handle)
    assert client.stats().core.quarantined_shards == 0
    client.abort(second.slab_handle, drained=True)
    told = client.take_ended()
    assert [(push.session_id, push.reason) for push in told] == [
        ("a", Reason.SESSION_NOT_RESIDENT),
        ("b", Reason.CLIENT_ABORT),
    ]


def test_drain_refuses_new_attempts_until_it_is_taken_back(client):
    assert isinstance(client.drain(), AckRep)
    with pytest.raises(Draining):
        client.prepare_receive("s", NUM_TOKENS, NAME)
    client.drain(False)
    assert client.prepare_receive("s", NUM_TOKENS, NAME).slab_handle


def test_a_watch_sees_transitions_and_refusals(client):
    with client.watch() as watch, client.watch("other") as other:
        grant = client.prepare_receive("s", NUM_TOKENS, NAME)
        with pytest.raises(LayoutMismatch):
            client.prepare_receive("other", NUM_TOKENS, "0" * 32)
        reserved, refused = watch.next(PATIENCE_S), watch.next(PATIENCE_S)
        assert isinstance(reserved, WatchTransition)
        assert (reserved.slab_handle, reserved.to_state) == (grant.slab_handle, "RESERVED")
        assert isinstance(refused, WatchRefused)
        assert other.next(PATIENCE_S) == refused
        with pytest.raises(RequestTimeout):
            watch.next(0)


def test_who_prepared_hears_that_somebody_else_ended_it(client, two_ranks):
    grant = client.prepare_receive("s", NUM_TOKENS, NAME)
    client.transfer_started(grant.slab_handle)
    with Client(str(two_ranks.socket_path)) as operator:
        operator.abort(grant.slab_handle)
        operator.ping()
    client.ping()
    (told,) = client.take_ended()
    assert (told.slab_handle, told.reason, told.drain_wanted) == (
        grant.slab_handle,
        Reason.CLIENT_ABORT,
        True,
    )


@pytest.mark.parametrize("is_crash", [False, True], ids=["stopped", "killed"])
def test_a_restart_while_idle_is_another_epoch_in_which_p_is_known_again(client, two_ranks, is_crash):
    hellos = []
    grant = push(client)
    with Client(str(two_ranks.socket_path), timeout_s=PATIENCE_S, on_new_epoch=hellos.append) as p_worker:
        p_worker.declare_layout(0, LAYOUT)
        p_worker.declare_layout(1, LAYOUT)
        if is_crash:
            two_ranks.kill()
        two_ranks.restart()
        p_worker.ping()
        assert [hello.epoch for hello in hellos] == [p_worker.epoch]
        assert p_worker.epoch != grant.epoch
        fresh = client.prepare_receive("s", NUM_TOKENS, NAME)
        assert fresh.epoch == client.epoch == p_worker.epoch
        assert client.reconnects == p_worker.reconnects == 1
        for call in (calls.begin_ingest(grant.slab_handle, 0, NAME, epoch=grant.epoch), calls.get(1)):
            with pytest.raises(StaleHandle):
                client.call(call)


def test_a_vote_that_waits_when_the_daemon_dies_is_lost(client, two_ranks):
    grant = push(client)
    lease = client.begin_ingest(grant.slab_handle, 0, NAME)
    vote = client.submit(calls.vote(grant.slab_handle, 0, lease.lease_id, True, epoch=grant.epoch))
    client.ping()
    two_ranks.kill()
    with pytest.raises(ConnectionLost):
        vote.wait()
    with pytest.raises(DaemonUnreachable):
        client.ping()
    two_ranks.restart()
    with pytest.raises(StaleHandle):
        client.vote(grant.slab_handle, 0, lease.lease_id, True, epoch=grant.epoch)


def test_too_many_connections_are_refused_by_name(start_daemon):
    daemon = start_daemon(connections_max=2)
    first, second = Client(str(daemon.socket_path)), Client(str(daemon.socket_path))
    with first, second:
        first.ping()
        second.ping()
        with Client(str(daemon.socket_path)) as third, pytest.raises(LimitReached, match="connections_max"):
            third.ping()
        with pytest.raises(LimitReached, match="connections_max"):
            first.map_buffer(0)


def test_200_clients_and_mappings_come_and_go(two_ranks):
    path = str(two_ranks.socket_path)
    before = num_fds()
    for index in range(200):
        with Client(path) as client:
            client.connect()
            with client.map_buffer(index % 2, populate=False):
                pass
    assert num_fds() == before
    with Client(path) as client:
        wanted = client.stats().connections
        # The daemon may not have noticed the last ones yet.
        while wanted > 1:
            wanted = client.stats().connections


def test_a_thousand_calls_may_be_under_way_at_once(client):
    pendings = [client.submit(calls.ping()) for _ in range(1_000)]
    assert {pending.wait().epoch for pending in pendings} == {client.epoch}

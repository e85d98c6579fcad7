"""Threads that share a client, and watches."""

import asyncio
import collections
import itertools
import os
import threading

import pytest
from client_cases import (
    PATIENCE_S,
    SHORT_S,
    VOTE,
    AsyncDriver,
    SyncDriver,
    begin,
    connected,
    daemon,
    drive,
    ended,
    in_thread,
    transition,
    wait_until,
)

from snapd import calls, links
from snapd.client import Client
from snapd.core.events import State
from snapd.errors import (
    ConnectionLost,
    LimitReached,
    Reason,
    RequestTimeout,
    StaleHandle,
)
from snapd.exchange import PUSHES_MAX
from snapd.wire import (
    ErrorRep,
    PingRep,
    VoteRep,
    WatchLost,
    WatchReq,
)

# --- threads -----------------------------------------------------------------------------------


def test_threads_share_one_client_and_each_gets_its_own_answers(daemon):
    num_threads, num_calls = 8, 100
    errors = []

    def script():
        peer = daemon.accept()
        peer.greet()
        held = []
        for count in itertools.count(1):
            request = peer.read()
            if request is None:
                return
            held.append(request)
            # Turn the order round, but never wait for more than what is surely under way.
            if len(held) == 2 or not peer.has_more():
                peer.send(
                    *[
                        ErrorRep(id=r.id, reason=Reason.STALE_HANDLE, detail=f"<{r.slab_handle}>")
                        for r in held[::-1]
                    ]
                )
                held.clear()
            if count == num_threads * num_calls:
                return

    def work(number):
        try:
            for index in range(num_calls):
                handle = number * num_calls + index
                with pytest.raises(StaleHandle, match=f"<{handle}>"):
                    client.get(handle)
        except BaseException as error:
            errors.append(error)

    with Client(daemon.path, timeout_s=PATIENCE_S) as client, daemon.playing(script):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert client.in_flight == 0


def test_a_thread_that_waits_for_a_vote_does_not_hold_up_the_others(daemon):
    with Client(daemon.path, timeout_s=PATIENCE_S) as client:
        peer, _ = connected(client, daemon)
        join = in_thread(lambda: client.call(VOTE))
        vote = peer.read()
        with daemon.playing(lambda: [peer.send(PingRep(id=peer.read().id, epoch="e")) for _ in range(20)]):
            for _ in range(20):
                client.ping()
        peer.send(VoteRep(id=vote.id, commit=True, reason=Reason.OK, state=State.INGESTED))
        assert join().commit


def test_a_reply_that_another_thread_reads_wakes_the_one_that_waits_for_it(daemon):
    with Client(daemon.path, timeout_s=PATIENCE_S) as client:
        peer, _ = connected(client, daemon)
        for _ in range(50):
            join = in_thread(lambda: client.call(calls.ping(timeout_s=PATIENCE_S)))
            request = peer.read()
            wait_until(lambda: client._link._has_leader)
            with client._link._changed:
                # Read under the leader's nose, before it can.
                peer.send(PingRep(id=request.id, epoch="e"))
                client._link._pump()
            assert join().epoch == "e"
            # Once awake, the next to sleep is not woken by the same call again.
            assert client._link._wake.read(8) is None


def test_a_forked_child_does_not_use_the_parents_connection(daemon):
    """The daemon would take the parent's exit for the end of what the child writes."""
    with Client(daemon.path, timeout_s=PATIENCE_S) as client:
        peer, _ = connected(client, daemon)
        pending = client.submit(VOTE)
        vote = peer.read()
        peer.send(VoteRep(id=vote.id, commit=True, reason=Reason.OK, state=State.INGESTED))
        pid = os.fork()
        if pid == 0:
            refused = 0
            for use in (client.ping, client.take_ended, pending.poll, pending.wait):
                try:
                    use()
                except RuntimeError:
                    refused += 1
            client.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
        assert not peer.has_more()
        assert pending.poll().commit, "the child has taken nothing, and ended nothing"


def test_two_threads_may_take_the_same_ends(daemon):
    class TakenMeanwhile(collections.deque):
        def __len__(self):
            return 1  # What a thread sees just before another one takes the last.

    with Client(daemon.path, timeout_s=PATIENCE_S) as client:
        connected(client, daemon)
        client._exchange.ended = TakenMeanwhile([ended(7)])
        assert [push.slab_handle for push in client.take_ended()] == [7]
        assert client.take_ended() == []


def test_what_does_not_fit_the_socket_is_written_by_the_thread_that_sleeps(daemon):
    big = calls.lookup("f" * 32, page_keys=["k" * 32] * 50_000)
    with Client(daemon.path, timeout_s=PATIENCE_S) as client:
        peer, _ = connected(client, daemon)
        join = in_thread(lambda: client.call(VOTE))
        vote = peer.read()
        wait_until(lambda: client._link._has_leader)
        pending = client.submit(big)

        def script():
            request = peer.read()
            peer.send(ErrorRep(id=request.id, reason=Reason.LIMIT_REACHED))
            peer.send(VoteRep(id=vote.id, commit=True, reason=Reason.OK, state=State.INGESTED))

        with daemon.playing(script):
            # Nobody but the sleeping thread works until the vote is there.
            assert join().commit
        with pytest.raises(LimitReached):
            pending.poll()


def test_a_follower_takes_over_when_the_leader_is_done(daemon):
    with Client(daemon.path, timeout_s=PATIENCE_S) as client:
        peer, _ = connected(client, daemon)
        joins, requests = [], []
        for _ in range(3):
            joins.append(in_thread(client.ping))
            requests.append(peer.read())
        for request in requests:
            peer.send(PingRep(id=request.id, epoch=f"e-{request.id}"))
        assert {join().epoch for join in joins} == {f"e-{request.id}" for request in requests}


def test_close_ends_what_is_under_way_in_other_threads(daemon):
    client = Client(daemon.path, timeout_s=PATIENCE_S)
    peer, _ = connected(client, daemon)
    join = in_thread(lambda: client.call(VOTE))
    peer.read()
    wait_until(lambda: client._link._has_leader)
    client.close()
    with pytest.raises(ConnectionLost, match="closed"):
        join()
    assert peer.read() is None
    assert client._link._wake.closed


def test_a_closed_client_stays_closed(daemon, drive):
    driver = drive()
    _, pending = begin(driver, daemon, calls.ping())
    driver.close()
    driver.close()
    with pytest.raises(ConnectionLost, match="closed"):
        driver.wait(pending)
    with pytest.raises(ConnectionLost, match="closed"):
        driver.call(calls.ping())
    with pytest.raises(ConnectionLost, match="closed"):
        driver.connect(wait_s=1_000 * PATIENCE_S)
    assert not daemon.has_caller()


def test_an_interrupted_call_is_forgotten(daemon, monkeypatch):
    with Client(daemon.path) as client:
        connected(client, daemon)

        def interrupt(errand, until_s):
            raise KeyboardInterrupt

        monkeypatch.setattr(client._link, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.ping()
        assert client.in_flight == 0


def test_poll_does_not_wait_for_a_flood_to_end(daemon, monkeypatch):
    monkeypatch.setattr(links, "READS_MAX", 2)
    monkeypatch.setattr(links, "READ_BYTES", 64)
    with Client(daemon.path) as client:
        peer, _ = connected(client, daemon)
        for handle in range(10):
            peer.send(ended(handle))
        assert 0 < len(client.take_ended()) < 10


# --- watch -------------------------------------------------------------------------------------


def watching(driver, daemon, **options):
    peers = []

    def script():
        peer = daemon.accept()
        peer.greet()
        request = peer.ack()
        assert isinstance(request, WatchReq)
        peers.append((peer, request))

    with daemon.playing(script):
        watch = driver.watch(**options)
    return watch, *peers[0]


def test_a_watch_has_a_connection_of_its_own_and_gives_pushes_in_order(daemon, drive):
    driver = drive()
    watch, peer, request = watching(driver, daemon, session_id="s")
    assert request.session_id == "s"
    assert driver.client.epoch == ""
    sent = [transition(1), WatchLost(count=3), transition(2)]
    peer.send(*sent)
    assert [driver.next_push(watch) for _ in sent] == sent
    driver.close_watch(watch)
    assert peer.read() is None


def test_a_watch_in_which_nothing_happens_times_out_and_goes_on(daemon, drive):
    driver = drive()
    watch, peer, _ = watching(driver, daemon)
    with pytest.raises(RequestTimeout):
        driver.next_push(watch, SHORT_S)
    peer.send(transition(1))
    assert driver.next_push(watch) == transition(1)
    driver.close_watch(watch)


def test_a_watch_whose_daemon_hangs_up_says_so_after_the_last_push(daemon, drive):
    driver = drive()
    watch, peer, _ = watching(driver, daemon)
    peer.send(transition(1))
    peer.close()
    assert driver.next_push(watch) == transition(1)
    with pytest.raises(ConnectionLost):
        driver.next_push(watch)
    assert not daemon.has_caller()
    driver.close_watch(watch)


def test_a_watch_that_is_refused_is_raised_and_hangs_up(daemon, drive):
    driver = drive()
    peers = []

    def script():
        peers.append(daemon.accept())
        peers[0].greet()
        peers[0].send(ErrorRep(id=peers[0].read().id, reason=Reason.LIMIT_REACHED))

    with daemon.playing(script), pytest.raises(LimitReached):
        driver.watch()
    assert peers[0].read() is None


def test_a_watch_reads_no_more_than_it_has_room_for_and_loses_nothing(daemon, drive):
    driver = drive()
    watch, peer, _ = watching(driver, daemon)
    num_pushes = 20 * PUSHES_MAX
    most = 0
    with daemon.playing(lambda: peer.send(*[transition(at_ns) for at_ns in range(num_pushes)])):
        for at_ns in range(num_pushes):
            assert driver.next_push(watch).at_ns == at_ns
            most = max(most, len(watch._pushes))
    assert most < 3 * PUSHES_MAX
    driver.close_watch(watch)


def test_the_loop_does_not_watch_for_what_there_is_no_room_for(daemon):
    driver = AsyncDriver(daemon.path)
    watch, peer, _ = watching(driver, daemon)
    link = watch._link
    with daemon.playing(lambda: peer.send(*[transition(at_ns) for at_ns in range(5 * PUSHES_MAX)])):
        while link.exchange.wants_read:
            driver.pump()
            link.pump()
        assert not driver.loop.remove_reader(link._channel.sock.fileno())
        for _ in range(5 * PUSHES_MAX):
            driver.next_push(watch)
    assert link._is_reading
    driver.close_watch(watch)
    driver.end()


def test_a_loop_over_a_watch_ends_when_another_thread_closes_it(daemon):
    driver = SyncDriver(daemon.path)
    watch, peer, _ = watching(driver, daemon)
    join = in_thread(lambda: list(watch))
    peer.send(transition(1))
    wait_until(lambda: watch._link._has_leader)
    watch.close()
    assert join() in ([transition(1)], [])
    with pytest.raises(ConnectionLost):
        watch.next(0)
    driver.end()


def test_a_loop_over_a_watch_raises_when_the_daemon_hangs_up(daemon):
    driver = SyncDriver(daemon.path)
    watch, peer, _ = watching(driver, daemon)
    peer.send(transition(1))
    peer.close()
    with pytest.raises(ConnectionLost):
        list(watch)
    watch.close()
    driver.end()


def test_an_async_loop_over_a_watch_ends_when_another_task_closes_it(daemon):
    driver = AsyncDriver(daemon.path)
    watch, _, _ = watching(driver, daemon)

    async def main():
        task = asyncio.create_task(collect())
        await asyncio.sleep(0)
        await watch.close()
        return await task

    async def collect():
        return [push async for push in watch]

    assert driver.run(main()) == []
    driver.end()


def test_an_async_loop_over_a_watch_raises_when_the_daemon_hangs_up(daemon):
    driver = AsyncDriver(daemon.path)
    watch, peer, _ = watching(driver, daemon)
    peer.close()

    async def collect():
        return [push async for push in watch]

    with pytest.raises(ConnectionLost):
        driver.run(collect())
    driver.end()

"""The daemon dies, stops, comes back; so does the network, and D: pushes over Mooncake go on afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
from kv_cases import PATIENCE_S
from late_cases import HOUR_MS, check_books, num_tcp_sockets, stopped, unread_bytes
from raw_client import LogFollower, is_all_free, wait_for
from restart_cases import (
    SAME_PORT_TRIES,
    Decoder,
    Ports,
    decoder,
    epochs,
    hold,
    ingest,
    meet_again,
    metadata_server,
    outcome,
    own_network,
    prefill,
    set_loopback,
)

from snapd.errors import Reason
from snapd.kv.push import PushResult

pytest.importorskip("mooncake.engine", exc_type=ImportError)

StartDaemon = Callable[..., Any]


@pytest.fixture
def mooncake(start_daemon: StartDaemon) -> StartDaemon:
    """A function that starts a daemon with Mooncake and a small arena."""

    def start(**settings: object) -> Any:
        dotted = {key.replace("__", "."): value for key, value in settings.items()}
        return start_daemon(**({"transport": "mooncake", "size": "8MiB"} | dotted))

    return start


def test_the_same_d_goes_on_after_the_daemon_was_killed_under_its_push(mooncake: StartDaemon) -> None:
    daemon = mooncake()
    with prefill(daemon) as pair, decoder(pair) as d:
        ingest(pair, "first", d.push("first"))
        handle = hold(pair, d, "s")
        daemon.kill()
        d.go_on()
        lost = d.result()
        assert (lost.ok, lost.reason, lost.slab_handle) == (False, Reason.TRANSFER_FAILED, handle)
        refused = d.push("s")
        assert (refused.ok, refused.reason, refused.slab_handle) == (False, Reason.TRANSFER_FAILED, 0)
        daemon.restart()
        meet_again(pair)
        again = d.push("s")
        assert (again.attempts, again.token_start) == (1, 0)
        ingest(pair, "s", again)
        former, present = epochs(daemon)
        assert former != present == pair.d.connect().epoch
        assert outcome(daemon, handle) == "daemon-restarted"
        assert is_all_free(pair.core())


def test_a_push_over_a_restart_is_prepared_again_in_the_new_epoch(mooncake: StartDaemon) -> None:
    """Its grant is refused as stale; nothing that it wrote or says is taken for the new one."""
    daemon = mooncake()
    with prefill(daemon) as pair, decoder(pair) as d:
        for session_id, renew in (("stale", False), ("renewed", True)):
            handle = hold(pair, d, session_id, renew=renew)
            daemon.kill()
            daemon.restart()
            meet_again(pair)
            d.go_on()
            result = d.result()
            if renew:
                assert result.attempts == 2 and result.slab_handle != handle
                ingest(pair, session_id, result)
            else:
                assert (result.ok, result.reason, result.slab_handle) == (False, Reason.STALE_HANDLE, handle)
                assert pair.core().attempts == 0 and is_all_free(pair.core())
            assert outcome(daemon, handle) == "daemon-restarted"
        assert len(set(epochs(daemon))) == 3


# --- the same address in another life --------------------------------------------------------------


def test_the_same_d_reaches_a_restarted_daemon_on_the_same_port(mooncake: StartDaemon) -> None:
    """What D's engine knows of that address is of the daemon before: other memory, another port for data."""
    with own_network(), Ports() as ports:
        daemon = mooncake(**ports.settings)
        with prefill(daemon) as pair, decoder(pair) as d:
            first = ports.of(pair)
            hold(pair, d, "s")
            for _ in range(SAME_PORT_TRIES):
                daemon.kill()
                ports.free_another_for_data(first)
                daemon.restart()
                meet_again(pair)
                if ports.of(pair).rpc_port == first.rpc_port:
                    break
            assert ports.of(pair).rpc_port == first.rpc_port
            assert ports.of(pair).data_port != first.data_port
            d.go_on()
            result = d.result()
            assert result.attempts == 2
            ingest(pair, "s", result)
            ingest(pair, "next", d.push("next", seed=8))
            assert is_all_free(pair.core())


def test_the_same_d_finds_a_restarted_daemon_through_a_metadata_server(mooncake: StartDaemon) -> None:
    """Where what the killed one had said of itself is still told."""
    with metadata_server() as url:
        daemon = mooncake(mooncake__metadata_server=url)
        with prefill(daemon) as pair, decoder(pair) as d:
            ingest(pair, "first", d.push("first"))
            hold(pair, d, "s")
            daemon.kill()
            daemon.restart()
            meet_again(pair)
            d.go_on()
            result = d.result()
            assert result.attempts == 2
            ingest(pair, "s", result)
            assert is_all_free(pair.core())
        # While there is a server to say goodbye to.
        daemon.stop()


# --- a peer that failed is tried again ---------------------------------------------------------------


def test_a_peer_that_cannot_be_reached_rests_longer_each_time_and_is_tried_again(
    mooncake: StartDaemon,
) -> None:
    """The network between D and the daemon's arena is gone; its control socket is not."""
    with own_network():
        daemon = mooncake(size="32MiB", quarantine_ms=HOUR_MS)
        follower = LogFollower(daemon.log_path)
        with prefill(daemon) as pair, decoder(pair, retries_max=1) as d:
            ingest(pair, "first", d.push("first"))
            epoch = pair.d.connect().epoch
            set_loopback(is_there=False)
            failed, rests_ms = [], [0]
            # The first is 100 ms.
            while rests_ms[-1] <= 100:
                result = d.push("s")
                assert (result.ok, result.reason) == (False, Reason.TRANSFER_FAILED)
                if result.slab_handle:
                    failed.append(result.slab_handle)
                elif result.retry_after_ms > rests_ms[-1]:
                    rests_ms.append(result.retry_after_ms)
            assert len(failed) >= 2, "between the rests it was tried"
            set_loopback(is_there=True)
            result = wait_for(lambda: push_once_rested(d), "the first push after the rest", PATIENCE_S)
            ingest(pair, "s", result)
            ingest(pair, "next", d.push("next", seed=8))
            assert pair.d.connect().epoch == epoch
            for handle in failed:
                assert outcome(daemon, handle) == "transfer-failed"
            check_books(pair, follower)


def push_once_rested(d: Decoder) -> PushResult | None:
    """Push; None: the peer rests still. Once it is tried it must be reached."""
    result = d.push("s")
    if result.slab_handle == 0:
        assert result.retry_after_ms > 0, result
        return None
    return result


# --- D dies ------------------------------------------------------------------------------------------


def test_a_d_that_is_started_again_goes_on_and_nothing_of_the_former_is_left(mooncake: StartDaemon) -> None:
    daemon = mooncake(quarantine_ms=1_000)
    follower = LogFollower(daemon.log_path)
    with prefill(daemon) as pair:
        before = num_tcp_sockets(daemon)
        connections = pair.d.stats().connections
        with decoder(pair) as d:
            ingest(pair, "first", d.push("first"))
            handle = hold(pair, d, "s")
        with decoder(pair) as d:
            result = d.push("s")
            ingest(pair, "s", result)
            assert outcome(daemon, handle) in ("writer-gone", "superseded")
        wait_for(lambda: num_tcp_sockets(daemon) <= before, "the data connections are gone", PATIENCE_S)
        wait_for(lambda: pair.d.stats().connections == connections, "so are the others", PATIENCE_S)
        wait_for(pair.is_all_free, "every byte is free", PATIENCE_S)
        assert pair.core().open_sessions == 0
        check_books(pair, follower)


# --- the daemon stands still -------------------------------------------------------------------------


def test_a_daemon_that_stands_still_in_a_push_harms_nothing(mooncake: StartDaemon) -> None:
    """What D has sent lies in the daemon's sockets meanwhile. The push ends well, or with a reason."""
    daemon = mooncake(quarantine_ms=HOUR_MS)
    follower = LogFollower(daemon.log_path)
    with prefill(daemon) as pair, decoder(pair) as d:
        for number in range(3):
            handle = hold(pair, d, f"s{number}", seed=number)
            with stopped(daemon.process.pid):
                d.go_on()
                wait_for(lambda: unread_bytes(daemon) > 0, "bytes are on the way", PATIENCE_S)
            result = d.result()
            assert result.slab_handle == handle
            if not result.ok:
                assert result.reason == Reason.TRANSFER_FAILED and not result.drained
                result = d.push(f"s{number}", seed=number)
            ingest(pair, f"s{number}", result)
            check_books(pair, follower)

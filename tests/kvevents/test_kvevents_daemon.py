"""A real daemon and real subscribers: what becomes of snapshots is heard, from the first to the last."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq
from daemon_process import DaemonProcess, clean_environment
from event_consumer import replayed
from events_daemon import ANY_PORT, PAGE, SETTINGS, TOKENS, TOPIC, abort, heard, keys, names, statistics
from raw_client import RawClient, running, wait_for
from test_metrics import scrape, series

from snapd import wire as w
from snapd.config import Config
from snapd.errors import StartupError
from snapd.kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from snapd.kvevents.hashes import pack_block_hashes, pack_token_ids, sglang_block_hashes
from snapd.kvevents.serving import opened


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    with zmq.Context() as made:
        yield made


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """A daemon for those tests that leave it as it was."""
    with running(**SETTINGS) as started:
        yield started


def test_a_life_is_told_from_ready_to_ingested(context, daemon):
    with RawClient(daemon.socket_path) as client:
        subscriber = heard(context, client)
        handle = client.ready("s", 10, page_keys=keys(10))
        batch = subscriber.receive()
        (stored,) = batch.events
        assert stored == BlockStored(
            block_hashes=names(10), parent_block_hash=None, token_ids=[], block_size=PAGE, lora_id=None,
            medium="CPU_PINNED", lora_name=None, session_id="s",
        )  # fmt: skip
        assert batch.data_parallel_rank == 3
        assert subscriber.frames[-1][0] == TOPIC.encode()
        found = statistics(client)
        assert (found.snapshots, found.pages) == (1, 2)
        client.ingest(handle)
        assert subscriber.receive().events == [
            BlockRemoved(block_hashes=names(10)[::-1], medium="CPU_PINNED")
        ]
        found = statistics(client)
        assert (found.snapshots, found.pages, found.stored_pages) == (0, 0, found.removed_pages)
        assert found.batches == subscriber.sequences[-1] + 1
        subscriber.close()


def test_token_ids_and_names_of_a_prepare_are_told_when_it_is_ready(context, daemon):
    with RawClient(daemon.socket_path) as client:
        subscriber = heard(context, client)
        hashes = sglang_block_hashes("s", TOKENS[:16], PAGE)
        handle = client.ready(
            "s", 8, token_start=8, page_keys=keys(16), token_ids=pack_token_ids(TOKENS[8:16]),
            block_hashes=pack_block_hashes(hashes),
        )  # fmt: skip
        (stored,) = subscriber.receive().events
        assert (stored.block_hashes, stored.parent_block_hash) == (hashes[2:], hashes[1])
        assert tuple(stored.token_ids) == TOKENS[8:16]
        abort(client, handle)
        subscriber.close()


def test_metrics_say_what_is_told_and_what_is_not(daemon):
    with RawClient(daemon.socket_path) as client:
        before, pages = scrape(daemon), series("snapd_kv_events_pages")
        handle = client.ready("s", 10, page_keys=keys(10))
        abort(client, client.ready("nameless", 10))
        wait_for(lambda: statistics(client).queued_bytes == 0)
        # A scrape that is a moment old is shown again.
        wait_for(lambda: scrape(daemon)[pages] > before[pages], "a scrape of its own")
        found = scrape(daemon)
        abort(client, handle)
    risen = {name: found[name] - before[name] for name in found if name[0].startswith("snapd_kv_events")}
    assert risen[pages] == 2
    assert risen[series("snapd_kv_events_stored_pages_total")] == 2
    assert risen[series("snapd_kv_events_batches_total")] == 1
    assert risen[series("snapd_kv_events_unpublished_total", why="no-hashes")] == 1
    assert risen[series("snapd_kv_events_unpublished_total", why="queue-full")] == 0
    assert found[series("snapd_kv_events_queued_bytes")] == 0


def test_hello_says_that_token_ids_are_wanted_and_how_many(daemon):
    with RawClient(daemon.socket_path) as client:
        assert client.ask(w.HelloReq).kv_events == w.KVEventsWanted(token_ids_max=262_144)


def test_the_latest_batches_can_be_had_by_a_replay_and_the_first_of_all_is_a_clear(context, daemon):
    with RawClient(daemon.socket_path) as client:
        handle = client.ready("s", 10, page_keys=keys(10))
        batches = wait_for(lambda: statistics(client).queued_bytes == 0 and statistics(client).batches)
        answer = replayed(context, statistics(client).replay_address, 0)
        abort(client, handle)
    events = [decode_batch(frames[3]).events for frames in answer[:-1]]
    assert len(events) == batches
    assert events[0] == [AllBlocksCleared()] and events[-1][0].block_hashes == names(10)


def test_the_end_takes_everything_back_and_says_so(context):
    with running(**SETTINGS) as daemon, RawClient(daemon.socket_path) as client:
        subscriber = heard(context, client)
        client.ready("s", 10, page_keys=keys(10))
        client.granted("t", 10, page_keys=keys(10))
        subscriber.until(lambda consumer: len(consumer.pages) == 2)
        daemon.stop()
        assert subscriber.receive().events == [
            BlockRemoved(block_hashes=names(10)[::-1], medium="CPU_PINNED")
        ]
        assert subscriber.receive().events == [AllBlocksCleared()]
        assert subscriber.sequences == list(range(subscriber.sequences[0], subscriber.sequences[-1] + 1))
        subscriber.close()


def test_after_a_crash_the_next_epoch_clears_what_the_last_one_told(context):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running(kv_events_address=f"tcp://127.0.0.1:{port}", kv_events_replay_address=ANY_PORT) as daemon:
        with RawClient(daemon.socket_path) as client:
            subscriber = heard(context, client, b"")
            client.ready("s", 10, page_keys=keys(10))
            subscriber.until(lambda consumer: len(consumer.pages) == 2)
        daemon.kill()
        daemon.restart()
        # It reconnects by itself, and the daemon waits for it a moment.
        subscriber.until(lambda consumer: not consumer.pages)
        assert subscriber.batches[-1].events == [AllBlocksCleared()]
        assert subscriber.sequences[-1] == 0
        subscriber.close()


def test_where_clearing_is_off_nothing_but_what_was_told_is_taken_back(context):
    with (
        running(
            kv_events_address=ANY_PORT, kv_events_replay_address=ANY_PORT, kv_events_clear_all="false"
        ) as daemon,
        RawClient(daemon.socket_path) as client,
    ):
        subscriber = heard(context, client, b"")
        client.ready("s", 10, page_keys=keys(10))
        subscriber.until(lambda consumer: len(consumer.pages) == 2)
        daemon.stop()
        subscriber.until(lambda consumer: not consumer.pages)
        assert subscriber.consumer.clears == 0
        assert not subscriber.socket.poll(200)
        subscriber.close()


def test_a_subscriber_that_listens_itself_is_connected_to(context):
    """So does llm-d's router: it binds, and publishers connect."""
    with context.socket(zmq.SUB) as listening:
        listening.setsockopt(zmq.SUBSCRIBE, b"kv@")
        port = listening.bind_to_random_port("tcp://127.0.0.1")
        connected = SETTINGS | {"kv_events_connect_address": f"tcp://localhost:{port}"}
        with running(**connected) as daemon, RawClient(daemon.socket_path) as client:

            def is_heard() -> int:
                abort(client, client.ready("s", 10, page_keys=keys(10)))
                return listening.poll(50)

            wait_for(is_heard, "the listening subscriber to be sent events")
            topic, _, payload = listening.recv_multipart()
        assert topic == TOPIC.encode() and decode_batch(payload).data_parallel_rank == 3


def test_while_they_are_off_nothing_is_said_of_them_and_zmq_is_not_loaded():
    with running() as daemon, RawClient(daemon.socket_path) as client:
        assert client.ask(w.HelloReq).kv_events is None
        client.ready("s", 10, page_keys=keys(10), token_ids=pack_token_ids(TOKENS[:10]))
        assert client.stats().kv_events is None
        maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
        assert "zmq" not in maps


async def test_it_says_where_it_publishes_and_warns_when_others_can_listen():
    config = Config(kv_events_address="tcp://0.0.0.0:0", kv_events_replay_address=ANY_PORT)
    with structlog.testing.capture_logs() as said, opened(config) as stream:
        stream.observing({}, lambda record: None)
        async with stream.publishing():
            pass
    where, warning = said
    assert where["address"].startswith("tcp://0.0.0.0:") and not where["address"].endswith(":0")
    assert where["replay_address"].startswith("tcp://127.0.0.1:")
    assert warning["log_level"] == "warning" and "without a password" in warning["event"]
    assert warning["event"].startswith("kv_events_address ")


# --- it cannot --------------------------------------------------------------------------------


def serve(directory: Path, environment: dict[str, str] | None = None, **overrides: object) -> tuple[int, str]:
    """Run a daemon that is expected to end at once; return its status and what it said last."""
    command = [sys.executable, "-m", "snapd.cli.main", "serve", "--socket", str(directory / "snapd.sock")]
    command += ["--log", str(directory / "log.jsonl"), "--set", "size=1MiB"]
    for key, value in overrides.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(
        command, env=clean_environment() | (environment or {}), capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()[-1]


def test_an_address_that_is_taken_ends_the_start_and_says_why(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        status, said = serve(tmp_path, kv_events_address=ANY_PORT, kv_events_replay_address=address)
    assert status == 1
    assert "kv_events_replay_address" in said and address in said and "Address already in use" in said
    assert not (tmp_path / "snapd.sock").exists()


@pytest.mark.parametrize("name", ["kv_events_address", "kv_events_replay_address"])
def test_each_address_must_be_one_of_this_host(name):
    config = Config(**({"kv_events_address": ANY_PORT} | {name: "tcp://192.0.2.7:5557"}))
    with (
        pytest.raises(StartupError, match=f"{name} 'tcp://192.0.2.7:5557' cannot be listened at"),
        opened(config),
    ):
        pass


def test_without_pyzmq_it_says_what_to_install(tmp_path):
    (tmp_path / "zmq.py").write_text("raise ImportError('not installed')")
    status, said = serve(tmp_path, {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}, kv_events_address=ANY_PORT)
    assert status == 2
    assert "kv-snapd[kv-events]" in said and "kv_events_address" in said


def test_without_pyzmq_a_daemon_that_publishes_nothing_runs(tmp_path):
    (tmp_path / "zmq.py").write_text("raise ImportError('not installed')")
    done = subprocess.run(
        [sys.executable, "-c", "import snapd.daemon, snapd.kv.control, snapd.kvevents.hashes"],
        env=clean_environment() | {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


async def test_a_publisher_that_ends_unforeseen_is_told_to_the_loop():
    """The daemon's loop takes it for a bug, and stops."""

    class Broken:
        num_bytes = 1

        def events(self) -> Any:
            raise ZeroDivisionError

    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, found: told.put_nowait(found))
    with opened(Config(kv_events_address=ANY_PORT, kv_events_clear_all=False)) as stream:
        stream.observing({}, lambda record: None)
        async with stream.publishing():
            stream._publisher.put(Broken())
            found = await asyncio.wait_for(told.get(), 20)
    assert isinstance(found["exception"], ZeroDivisionError)

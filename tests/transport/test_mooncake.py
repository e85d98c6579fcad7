"""What is particular to Mooncake, over TCP on loopback: peers that stop, end, and come back."""

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from target import SIZE_BYTES, Target, wait_for
from test_backoff import Clock
from test_mooncake_feed import ListFeed

from snapd.errors import PeerResting, TransportError
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import Progress, TicketState, Write
from snapd.transport.mooncake_engine import MooncakeEngine
from snapd.transport.mooncake_engines import MooncakeEngines
from snapd.transport.mooncake_writer import MooncakeWriter

DONE = Progress(TicketState.DONE, is_drained=True)
StartTarget = Callable[[], Target]
# A call that waits for a stopped peer waits for a minute.
PROMPT_S = 10.0


class MakeWriter:
    """Makes writers that know the source, and closes them."""

    def __init__(self, engines: MooncakeEngines, source: int) -> None:
        self.engines = engines
        self.source = source
        self._made: list[MooncakeWriter] = []

    def __call__(self, target: Target, size_bytes: int = SIZE_BYTES, **options: Any) -> MooncakeWriter:
        epoch = f"epoch of {target.process.pid}"
        writer = MooncakeWriter(
            self.engines, target.segment_name, epoch, target.base_ptr, size_bytes, **options
        )
        self._made.append(writer)
        writer.register_source(self.source, SIZE_BYTES)
        return writer

    def close(self) -> None:
        for writer in self._made:
            writer.close()

    def write(self, target: Target, offset: int, size_bytes: int) -> Write:
        return Write(self.source + offset, target.base_ptr + offset, size_bytes)


@pytest.fixture
def new_writer(engines: MooncakeEngines, source: tuple[mmap.mmap, int]) -> Iterator[MakeWriter]:
    made = MakeWriter(engines, source[1])
    yield made
    made.close()


def finish(writer: MooncakeWriter, ticket: int) -> Progress:
    found: list[Progress] = []
    wait_for(lambda: found.append(writer.poll(ticket)) or found[-1].is_final)
    return found[-1]


def test_what_a_feed_gives_arrives(
    new_writer: MakeWriter, target: Target, source: tuple[mmap.mmap, int]
) -> None:
    writer = new_writer(target)
    size_bytes = SIZE_BYTES // 64
    feed = ListFeed([new_writer.write(target, number * size_bytes, size_bytes) for number in range(64)])
    assert finish(writer, writer.submit_feed(feed)) == DONE
    assert target.memory[:] == source[0][:]
    assert feed.is_back


def test_a_write_to_a_stopped_peer_runs_then_fails_and_lands_all_the_same(
    new_writer: MakeWriter, start_target: StartTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why FAILED is no drain proof."""
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "1")
    target = start_target()
    writer = new_writer(target)
    assert finish(writer, writer.submit([new_writer.write(target, 0, 1)])) == DONE
    target.stop()
    ticket = writer.submit([new_writer.write(target, 4096, 4096), new_writer.write(target, 8192, 65536)])
    assert writer.poll(ticket) == Progress(TicketState.RUNNING)
    progress = finish(writer, ticket)
    assert (progress.state, progress.is_drained) == (TicketState.FAILED, False)
    assert not any(target.memory[4096:])
    target.go_on()
    wait_for(lambda: target.memory[8192 + 65535] != 0)
    assert all(target.memory[4096 : 8192 + 65536])
    # The peer was only away: the same writer goes on.
    assert finish(writer, writer.submit([new_writer.write(target, 1 << 20, 64)])) == DONE


def test_a_write_that_a_stopped_peer_takes_in_time_is_done(
    new_writer: MakeWriter, start_target: StartTarget
) -> None:
    target = start_target()
    writer = new_writer(target)
    assert finish(writer, writer.submit([new_writer.write(target, 0, 1)])) == DONE
    target.stop()
    ticket = writer.submit([new_writer.write(target, 0, SIZE_BYTES)])
    for _ in range(100):
        assert writer.poll(ticket) == Progress(TicketState.RUNNING), "DONE is said by the peer only"
    target.go_on()
    assert finish(writer, ticket) == DONE
    assert all(target.memory[:])


def test_the_first_contact_with_a_stopped_peer_keeps_nobody_waiting(
    new_writer: MakeWriter, start_target: StartTarget, target: Target
) -> None:
    stopped = start_target()
    stopped.stop()
    began_s = time.monotonic()
    clock = Clock()
    writer = new_writer(stopped, clock=clock, connect_timeout_s=5)
    ticket = writer.submit([new_writer.write(stopped, 0, 64)])
    assert writer.poll(ticket) == Progress(TicketState.RUNNING)
    other = new_writer(target)
    assert finish(other, other.submit([new_writer.write(target, 0, 64)])) == DONE
    clock.now_ms += 5_000
    progress = writer.poll(ticket)
    assert (progress.state, progress.is_drained) == (TicketState.FAILED, True)
    with pytest.raises(PeerResting):
        writer.submit([new_writer.write(stopped, 0, 64)])
    assert time.monotonic() - began_s < PROMPT_S
    # Once it goes on it is reached, and what was told to have failed never begins.
    stopped.go_on()
    wait_for(lambda: writer._engine.is_open(stopped.segment_name))
    wait_for(lambda: not is_resting(writer))
    assert finish(writer, writer.submit([new_writer.write(stopped, 4096, 64)])) == DONE
    assert not any(stopped.memory[:4096])


def is_resting(writer: MooncakeWriter) -> bool:
    try:
        writer._engines.backoff.begin(writer._peer)
    except PeerResting:
        return True
    return False


def test_an_ended_peer_fails_at_once_and_its_successor_is_reached_by_the_same_engine(
    new_writer: MakeWriter, start_target: StartTarget
) -> None:
    old = start_target()
    writer = new_writer(old)
    assert finish(writer, writer.submit([new_writer.write(old, 0, 64)])) == DONE
    old.stop()
    ticket = writer.submit([new_writer.write(old, 0, SIZE_BYTES)] * 3)
    old.kill()
    progress = finish(writer, ticket)
    assert (progress.state, progress.is_drained) == (TicketState.FAILED, False)
    new = start_target()
    other = new_writer(new)
    assert other._engine is writer._engine
    assert finish(other, other.submit([new_writer.write(new, 0, 64)])) == DONE


def test_an_ended_peer_may_be_tried_twice_and_then_rests(
    new_writer: MakeWriter, start_target: StartTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = start_target()
    writer = new_writer(target)
    # It rests 100 ms, and a slow machine may take longer than that to ask.
    monkeypatch.setattr(writer._engines.backoff, "_clock", Clock())
    assert finish(writer, writer.submit([new_writer.write(target, 0, 64)])) == DONE
    target.kill()
    for _ in range(2):
        assert finish(writer, writer.submit([new_writer.write(target, 0, 64)])).state is TicketState.FAILED
    with pytest.raises(PeerResting) as caught:
        writer.submit([new_writer.write(target, 0, 64)])
    assert 0 < caught.value.retry_after_ms <= 100


def test_where_nobody_listens_nothing_begins(new_writer: MakeWriter, start_target: StartTarget) -> None:
    target = start_target()
    target.kill()
    writer = new_writer(target)
    progress = finish(writer, writer.submit([new_writer.write(target, 0, 64)]))
    assert (progress.state, progress.is_drained) == (TicketState.FAILED, True)
    assert progress.detail == f"nobody answers at {target.segment_name}"


def test_a_peer_refuses_what_lies_outside_its_registered_memory(
    new_writer: MakeWriter, target: Target
) -> None:
    writer = new_writer(target, 2 * SIZE_BYTES)
    beyond = Write(new_writer.source, target.base_ptr + SIZE_BYTES - 32, 64)
    assert finish(writer, writer.submit([beyond])).state is TicketState.FAILED
    assert not any(target.memory[:])
    assert finish(writer, writer.submit([new_writer.write(target, 0, 64)])) == DONE, "it lives"


def test_a_notification_comes_whole_and_with_its_write(new_writer: MakeWriter, target: Target) -> None:
    target.notifications()
    writer = new_writer(target)
    text = "ä" * 100_000
    assert finish(writer, writer.submit_notification(new_writer.write(target, 64, 8), text)) == DONE
    assert any(target.memory[64:72])
    assert target.notifications() == [text]
    assert target.notifications() == []


def test_a_notification_to_a_stopped_peer_waits_in_a_thread(
    new_writer: MakeWriter, start_target: StartTarget
) -> None:
    target = start_target()
    writer = new_writer(target)
    assert finish(writer, writer.submit([new_writer.write(target, 0, 1)])) == DONE
    target.stop()
    began_s = time.monotonic()
    ticket = writer.submit_notification(new_writer.write(target, 64, 8), "text")
    for _ in range(100):
        assert writer.poll(ticket) == Progress(TicketState.RUNNING)
    assert time.monotonic() - began_s < PROMPT_S
    target.go_on()
    assert finish(writer, ticket) == DONE
    assert target.notifications() == ["text"]


def test_memory_that_overlaps_what_is_registered_is_refused(
    engines: MooncakeEngines, source: tuple[mmap.mmap, int]
) -> None:
    engines.register_source(source[1], 8192)
    with pytest.raises(TransportError, match="overlaps memory that is registered already"):
        engines.register_source(source[1] + 4096, 64)
    engines.unregister_source(source[1], 8192)


def test_a_range_without_a_free_port_is_refused_where_the_engine_would_end_the_process(
    mooncake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        settings = {"MC_MIN_RPC_PORT": port, "MC_MAX_RPC_PORT": port}
        for name in settings:
            monkeypatch.setenv(name, "")  # What the engine sets is taken back.
        with pytest.raises(TransportError, match=f"0 of the ports {port} to {port} are free"):
            MooncakeEngine(MooncakeConfig(settings=settings))


def test_a_peer_that_comes_back_on_its_old_address_is_reached_by_a_fresh_engine(mooncake: None) -> None:
    """With ports of its own a peer can be made to: in a network namespace."""
    unshare = ["unshare", "--user", "--map-root-user", "--net"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    script = Path(__file__).with_name("stale_segment.py")
    done = subprocess.run(
        [*unshare, sys.executable, str(script)],
        env={**os.environ, "MC_LOG_LEVEL": "ERROR", "PYTHONPATH": str(script.parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"first": "done", "old engine": "failed", "fresh engine": "done"}


@pytest.mark.parametrize(("host", "device"), [("127.0.0.1", b"lo"), ("0.0.0.0", b"")])
def test_an_engine_with_a_loopback_host_listens_for_this_host_only(host: str, device: bytes) -> None:
    """Its registered memory could be read and written from elsewhere."""
    before = set(listeners())
    engine = MooncakeEngine(MooncakeConfig(host=host))
    opened = {port: bound_to for port, bound_to in listeners().items() if port not in before}
    engine.close()
    assert len(opened) >= 2, "one for the handshake, one for data"
    assert set(opened.values()) == {device}


def listeners() -> dict[int, bytes]:
    """Return the device that each listening socket of this process is bound to, by port."""
    found: dict[int, bytes] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                bound_to = sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")
                found[sock.getsockname()[1]] = bound_to
    return found

"""Copies into an arena of another GPU, with memory of the host and events that pass when the test says so.

The real ones are in tests/gpu.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from snapd.cudamapping import MappedCudaArena
from snapd.errors import ConnectionLost, TransportError
from snapd.kv import peerwriter
from snapd.kv.peerwriter import PeerWriter
from snapd.transport.base import Progress, TicketState, Write

BASE = 1 << 40
SIZE_BYTES = 1 << 12
RUNNING = Progress(TicketState.RUNNING)
DONE = Progress(TicketState.DONE, is_drained=True)


class FakeArena:
    """An arena of the host that pretends to be mapped from a GPU."""

    device = "cpu"

    def __init__(self) -> None:
        self.memory = torch.zeros(SIZE_BYTES, dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        self.is_gone = False
        self.is_copied = False

    def check_alive(self) -> None:
        if self.is_gone:
            raise ConnectionLost("the daemon is gone")

    def view(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        if offset_bytes < 0 or offset_bytes + size_bytes > SIZE_BYTES:
            raise ValueError("they leave the arena")
        view = self.memory[offset_bytes : offset_bytes + size_bytes]
        return view.clone() if self.is_copied else view


class FakeEvent:
    def __init__(self) -> None:
        self.is_passed = False
        self.error: Exception | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_passed


class FakeStream:
    def __init__(self) -> None:
        self.events: list[FakeEvent] = []
        self.error: Exception | None = None
        self.waits = 0

    def record_event(self) -> FakeEvent:
        if self.error is not None:
            raise self.error
        self.events.append(FakeEvent())
        return self.events[-1]

    def synchronize(self) -> None:
        self.waits += 1


class Stage:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arena = FakeArena()
        arena: Any = self.arena
        assert not isinstance(arena, MappedCudaArena)
        self.source = torch.arange(SIZE_BYTES, dtype=torch.int64).to(torch.uint8)
        monkeypatch.setattr(peerwriter, "_Bytes", self.bytes_at)
        self.writer = PeerWriter(arena, BASE, torch.device("cpu"))
        self.streams = [FakeStream(), FakeStream()]
        self.entered: list[FakeStream] = []
        self.copies = 0
        self.fail_at: dict[int, BaseException] = {}
        monkeypatch.setattr(torch.cuda, "stream", self.enter)
        monkeypatch.setattr(torch.Tensor, "copy_", lambda *given, **options: self.copy(*given, **options))

    @staticmethod
    def bytes_at(address: int, size_bytes: int) -> torch.Tensor:
        memory = (ctypes.c_uint8 * size_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def on_gpus(self) -> None:
        """Have copies run on streams from now on."""
        streams: Any = self.streams
        self.writer._streams = streams

    @contextlib.contextmanager
    def enter(self, stream: FakeStream) -> Iterator[None]:
        self.entered.append(stream)
        yield
        self.entered.remove(stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        if self.writer._streams:
            assert self.entered == self.streams, "a copy joins the current stream of both devices"
        if self.copies in self.fail_at:
            raise self.fail_at[self.copies]
        self.copies += 1
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
        return target

    def write(self, offset: int, size_bytes: int = 16) -> Write:
        return Write(self.source.data_ptr() + offset, BASE + offset, size_bytes)

    def has_landed(self, offset: int, size_bytes: int = 16) -> bool:
        span = slice(offset, offset + size_bytes)
        return torch.equal(self.arena.memory[span], self.source[span])


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage(monkeypatch)
    made.on_gpus()
    return made


def test_a_ticket_is_done_when_its_event_has_passed(stage: Stage) -> None:
    ticket = stage.writer.submit([stage.write(16), stage.write(256)])
    assert stage.has_landed(16) and stage.has_landed(256)
    assert stage.writer.poll(ticket) == RUNNING
    stage.writer.cancel(ticket)
    assert stage.writer.poll(ticket) == RUNNING, "it has begun"
    (event,) = stage.streams[1].events
    event.is_passed = True
    assert stage.writer.poll(ticket) == DONE
    with pytest.raises(TransportError, match="no ticket"):
        stage.writer.poll(ticket)
    assert stage.streams[0].events == [], "the source's stream says it"


def test_nothing_is_done_at_once(stage: Stage) -> None:
    assert stage.writer.poll(stage.writer.submit([])) == DONE
    assert stage.streams[1].events == []


def test_a_write_outside_or_to_a_daemon_that_is_gone_begins_nothing(stage: Stage) -> None:
    for writes in ([stage.write(16), stage.write(SIZE_BYTES)], [stage.write(-16)]):
        with pytest.raises(TransportError, match="could not begin: they leave"):
            stage.writer.submit(writes)
    stage.arena.is_gone = True
    for none_or_one in ([], [stage.write(0)]):
        with pytest.raises(TransportError, match="gone"):
            stage.writer.submit(none_or_one)
    assert stage.copies == 0


def test_memory_that_torch_would_copy_is_not_written_to(stage: Stage) -> None:
    stage.arena.is_copied = True
    with pytest.raises(TransportError, match="instead of sharing"):
        stage.writer.submit([stage.write(16)])
    assert stage.copies == 0


def test_copies_that_began_before_one_that_could_not_are_polled(stage: Stage) -> None:
    stage.fail_at[1] = RuntimeError("CUDA error")
    ticket = stage.writer.submit([stage.write(16), stage.write(256), stage.write(512)])
    assert stage.copies == 1
    assert stage.writer.poll(ticket) == RUNNING, "its source is being read"
    stage.streams[1].events[-1].is_passed = True
    ended = stage.writer.poll(ticket)
    assert (ended.state, ended.is_drained) == (TicketState.FAILED, True)
    assert "CUDA error" in ended.detail


def test_a_copy_whose_event_cannot_be_recorded_has_begun_and_is_no_drain_proof(stage: Stage) -> None:
    stage.streams[1].error = RuntimeError("CUDA error")
    ended = stage.writer.poll(stage.writer.submit([stage.write(16)]))
    assert (ended.state, ended.is_drained) == (TicketState.FAILED, False)


def test_a_copy_that_nobody_can_ask_about_is_no_drain_proof(stage: Stage) -> None:
    ticket = stage.writer.submit([stage.write(16)])
    stage.streams[1].events[-1].error = RuntimeError("CUDA error")
    ended = stage.writer.poll(ticket)
    assert (ended.state, ended.is_drained) == (TicketState.FAILED, False)
    assert "nobody knows" in ended.detail


def test_an_interrupt_waits_for_what_began(stage: Stage) -> None:
    """There is no ticket that would say when the source is free."""
    stage.fail_at[1] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        stage.writer.submit([stage.write(16), stage.write(256)])
    assert stage.streams[1].waits == 1


def test_a_copy_has_a_stream_of_its_own_on_both_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch joins the current stream of the target too."""
    made: list[tuple[torch.device, FakeStream]] = []
    entered: list[FakeStream] = []
    empty = torch.empty

    def new_stream(device: torch.device) -> FakeStream:
        made.append((device, FakeStream()))
        return made[-1][1]

    @contextlib.contextmanager
    def enter(stream: FakeStream) -> Iterator[None]:
        entered.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    arena: Any = FakeArena()
    arena.device = "cuda:1"
    PeerWriter(arena, BASE, torch.device("cuda:0"))
    assert [str(device) for device, _ in made] == ["cuda:1", "cuda:0"]
    assert entered == [stream for _, stream in made], "the source's GPU is the current one"


def test_the_way_is_opened_when_the_writer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        torch.Tensor,
        "copy_",
        lambda target, source, non_blocking: copies.append((target.numel(), non_blocking)),
    )
    arena: Any = FakeArena()
    PeerWriter(arena, BASE, torch.device("cpu"))
    assert copies == [(1, True)]

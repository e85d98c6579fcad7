"""The shm transport: bytes land where they are sent, and nothing is written outside the arena."""

import ctypes
from collections.abc import Iterator
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from own_life import own_life

from snapd.arena import HostArena
from snapd.errors import TransportError
from snapd.mapping import MappedArena, _map
from snapd.transport.base import ArenaOfferer, ArenaWriter, TicketState, Write
from snapd.transport.shm import ShmOfferer, ShmWriter

SIZE_BYTES = 64 * 1024


def mapped(host: HostArena, *, writable: bool = True) -> MappedArena:
    fd = host.open_fd(writable=writable)
    address, populated = _map(fd, SIZE_BYTES, writable, False, monotonic() + 5)
    return MappedArena(host.rank, SIZE_BYTES, writable, "epoch", address, populated, own_life())


@pytest.fixture
def host() -> Iterator[HostArena]:
    with HostArena(0, SIZE_BYTES, hugepages="off", prefault=False) as made:
        yield made


@pytest.fixture
def arena(host: HostArena) -> Iterator[MappedArena]:
    with mapped(host) as made:
        yield made


@pytest.fixture
def seen(host: HostArena) -> Iterator[MappedArena]:
    """The same memory, as P maps it."""
    with mapped(host, writable=False) as made:
        yield made


def source(size_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


def of(plane: torch.Tensor) -> bytes:
    return bytes(plane.tolist())


def test_writes_land_where_they_are_sent_and_nowhere_else(arena: MappedArena, seen: MappedArena) -> None:
    writer = ShmWriter(arena)
    first, last = source(1000, 1), source(5, 2)
    ticket = writer.submit(
        [
            Write(first.data_ptr(), 256, first.numel()),
            Write(last.data_ptr(), SIZE_BYTES - 5, last.numel()),
        ]
    )
    assert writer.poll(ticket).state is TicketState.DONE
    expected = bytearray(SIZE_BYTES)
    expected[256:1256] = of(first)
    expected[-5:] = of(last)
    assert bytes(seen.buffer) == bytes(expected)


def test_targets_count_from_the_base_pointer(arena: MappedArena, seen: MappedArena) -> None:
    base_ptr = 1 << 40
    data = source(64)
    writer = ShmWriter(arena, base_ptr)
    writer.submit([Write(data.data_ptr(), base_ptr + 512, 64)])
    assert bytes(seen.buffer[512:576]) == of(data)
    with pytest.raises(TransportError):
        writer.submit([Write(data.data_ptr(), 512, 64)])


@pytest.mark.parametrize(
    ("target", "size_bytes"),
    [(-1, 8), (-8, 8), (SIZE_BYTES - 7, 8), (SIZE_BYTES, 1), (1 << 62, 8), (0, SIZE_BYTES + 1), (16, -1)],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_write_outside_the_arena_is_refused_and_nothing_of_its_set_is_copied(
    arena: MappedArena, seen: MappedArena, target: int, size_bytes: int, place: int
) -> None:
    data = source(64)
    writes = [Write(data.data_ptr(), 1024, 64)]
    writes.insert(place, Write(data.data_ptr(), target, size_bytes))
    writer = ShmWriter(arena)
    with pytest.raises(TransportError, match="outside an arena"):
        writer.submit(writes)
    assert not any(seen.buffer)
    with pytest.raises(TransportError):
        writer.poll(1)


@pytest.mark.parametrize(
    ("target", "size_bytes"), [(0, SIZE_BYTES), (SIZE_BYTES - 1, 1), (SIZE_BYTES, 0), (0, 0)]
)
def test_a_write_up_to_the_edge_is_taken(arena: MappedArena, target: int, size_bytes: int) -> None:
    data = source(SIZE_BYTES)
    writer = ShmWriter(arena)
    assert writer.poll(writer.submit([Write(data.data_ptr(), target, size_bytes)])).state is TicketState.DONE
    assert bytes(arena.buffer[target : target + size_bytes]) == of(data[:size_bytes])


def test_the_end_of_a_ticket_is_told_once(arena: MappedArena) -> None:
    writer = ShmWriter(arena)
    data = source(8)
    tickets = [writer.submit([Write(data.data_ptr(), 0, 8)]) for _ in range(3)]
    assert len(set(tickets)) == 3
    for ticket in reversed(tickets):
        assert writer.poll(ticket).state is TicketState.DONE
        with pytest.raises(TransportError, match=f"no ticket {ticket}"):
            writer.poll(ticket)
    with pytest.raises(TransportError):
        writer.poll(99)
    assert writer._tickets == set(), "nothing is remembered of what was told"


def test_between_calls_every_write_has_landed(arena: MappedArena, seen: MappedArena) -> None:
    writer: ArenaWriter = ShmWriter(arena)
    data = source(4096)
    ticket = writer.submit([Write(data.data_ptr(), 0, 4096)])
    assert writer.poll(ticket).is_drained
    assert bytes(seen.buffer[:4096]) == of(data)


def test_close_lets_go_of_the_arena(arena: MappedArena) -> None:
    writer = ShmWriter(arena)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        arena.buffer  # noqa: B018


def test_a_writer_that_is_closed_writes_no_more(arena: MappedArena) -> None:
    """The address may be another mapping's by then."""
    held = arena.buffer  # The memory stays, so that a write that is let through is seen.
    writer = ShmWriter(arena)
    writer.close()
    data = ctypes.create_string_buffer(b"\xff" * 8, 8)
    with pytest.raises(TransportError, match="closed"):
        writer.submit([Write(ctypes.addressof(data), 0, 8)])
    with pytest.raises(TransportError, match="closed"):
        writer.submit([])
    assert not any(held[:8])


def test_the_daemons_side_registers_nothing_and_has_no_address(host: HostArena) -> None:
    offerer: ArenaOfferer = ShmOfferer()
    assert (offerer.name, offerer.register(host), offerer.address()) == ("shm", 0, "")
    offerer.close()


def test_the_exit_of_a_writer_is_proof_on_the_host_only(host: HostArena) -> None:
    """A forked child keeps its parent's context on a GPU alive, and what the parent launched there."""
    offerer = ShmOfferer()
    offerer.register(host)
    assert offerer.is_exit_drain_proof
    on_gpu: Any = SimpleNamespace(rank=1, size_bytes=4096, device="cuda:0")
    offerer.register(on_gpu)
    assert not offerer.is_exit_drain_proof

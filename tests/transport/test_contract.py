"""The contract of ``ArenaWriter``, kept by every transport and by the fake with faults."""

import abc
import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

import pytest
from careful_engine import CarefulEngine
from fake_writer import FakeArena, FakeWriter
from own_life import own_life
from target import SIZE_BYTES, Target, wait_for

from snapd.arena import HostArena
from snapd.errors import TransportError
from snapd.mapping import MappedArena, _map
from snapd.transport.base import ArenaWriter, Progress, TicketState, Write
from snapd.transport.mooncake_engines import MooncakeEngines
from snapd.transport.mooncake_submitter import Submitter
from snapd.transport.mooncake_writer import MooncakeWriter
from snapd.transport.shm import ShmWriter

IN_FLIGHT_BYTES_MAX = 64 * 1024
DONE = Progress(TicketState.DONE, is_drained=True)


class Rig(abc.ABC):
    """A writer of a transport, what it writes into, and what can happen to its peer."""

    needs_sources = True

    def __init__(self, source: int) -> None:
        self.source = source
        self.writer = self.new_writer()

    def new_writer(self) -> ArenaWriter:
        """Return a writer for the arena as it is now, which knows the source."""
        writer = self.bare_writer()
        writer.register_source(self.source, SIZE_BYTES)
        return writer

    @abc.abstractmethod
    def bare_writer(self) -> ArenaWriter: ...

    @property
    @abc.abstractmethod
    def base_ptr(self) -> int: ...

    @property
    @abc.abstractmethod
    def memory(self) -> Sequence[int]: ...

    def in_flight_bytes_seen_max(self) -> int:
        return 0

    @abc.abstractmethod
    def lose_peer(self) -> None:
        """Let the peer end."""

    @abc.abstractmethod
    def return_peer(self) -> None:
        """Let another peer take its place: a new life, with an address of its own."""

    def close(self) -> None:
        self.writer.close()

    def write(self, offset: int, size_bytes: int, source_offset: int = 0) -> Write:
        return Write(self.source + source_offset, self.base_ptr + offset, size_bytes)

    def finish(self, ticket: int, writer: ArenaWriter | None = None) -> Progress:
        """Poll until it is final."""
        progress = Progress(TicketState.RUNNING)

        def is_final() -> bool:
            nonlocal progress
            progress = (writer or self.writer).poll(ticket)
            assert progress.is_final or not progress.is_drained, "nothing is proven while it runs"
            return progress.is_final

        wait_for(is_final)
        return progress


class ShmRig(Rig):
    needs_sources = False

    def __init__(self, source: int) -> None:
        self._arena = HostArena(0, SIZE_BYTES, hugepages="off", prefault=False)
        self._seen = self._map(False)
        super().__init__(source)

    def _map(self, writable: bool) -> MappedArena:
        fd = self._arena.open_fd(writable=writable)
        address, populated = _map(fd, SIZE_BYTES, writable, False, monotonic() + 5)
        return MappedArena(0, SIZE_BYTES, writable, "epoch", address, populated, own_life())

    def bare_writer(self) -> ArenaWriter:
        return ShmWriter(self._map(True), self.base_ptr)

    @property
    def base_ptr(self) -> int:
        return 1 << 40

    @property
    def memory(self) -> Sequence[int]:
        return self._seen.buffer

    def lose_peer(self) -> None:
        """The memory stays."""

    def return_peer(self) -> None:
        """A new writer maps it anew."""

    def close(self) -> None:
        super().close()
        self._seen.close()
        self._arena.close()


class FakeRig(Rig):
    def __init__(self, source: int) -> None:
        self._arena = FakeArena(SIZE_BYTES)
        self._writers: list[FakeWriter] = []
        super().__init__(source)

    def bare_writer(self) -> ArenaWriter:
        self._writers.append(FakeWriter(self._arena, in_flight_bytes_max=IN_FLIGHT_BYTES_MAX))
        return self._writers[-1]

    @property
    def base_ptr(self) -> int:
        return self._arena.base_ptr

    @property
    def memory(self) -> Sequence[int]:
        return self._arena.memory

    def in_flight_bytes_seen_max(self) -> int:
        return self._writers[0].in_flight_bytes_seen_max

    def lose_peer(self) -> None:
        self._writers[0].plan(*["fails-late"] * 100)

    def return_peer(self) -> None:
        self._arena = FakeArena(SIZE_BYTES, base_ptr=1 << 41)


class MooncakeRig(Rig):
    def __init__(
        self, source: int, target: Target, engines: MooncakeEngines, start: Callable[[], Target]
    ) -> None:
        self._target = target
        self._engines = engines
        self._start = start
        super().__init__(source)

    def bare_writer(self) -> ArenaWriter:
        writer = MooncakeWriter(
            self._engines,
            self._target.segment_name,
            f"epoch of {self._target.process.pid}",
            self.base_ptr,
            SIZE_BYTES,
            in_flight_bytes_max=IN_FLIGHT_BYTES_MAX,
        )
        assert isinstance(writer._engine, CarefulEngine)
        self._engine = writer._engine
        self._engine.flying_bytes_seen_max = 0
        return writer

    @property
    def base_ptr(self) -> int:
        return self._target.base_ptr

    @property
    def memory(self) -> Sequence[int]:
        return self._target.memory

    def in_flight_bytes_seen_max(self) -> int:
        return self._engine.flying_bytes_seen_max

    def lose_peer(self) -> None:
        self._target.kill()

    def return_peer(self) -> None:
        self._target = self._start()


@pytest.fixture(params=["shm", "fake", "mooncake", "mooncake, in a thread"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source_address(source: tuple[mmap.mmap, int]) -> int:
    return source[1]


def make_rig(kind: str, source_address: int, request: pytest.FixtureRequest, *, is_own: bool) -> Rig:
    if kind == "shm":
        return ShmRig(source_address)
    if kind == "fake":
        return FakeRig(source_address)
    start = request.getfixturevalue("start_target")
    target = start() if is_own else request.getfixturevalue("target")
    engines = request.getfixturevalue("engines")
    if kind != "mooncake":
        # As out of a GPU.
        request.getfixturevalue("monkeypatch").setattr(
            engines, "submitter", Submitter(contextlib.nullcontext)
        )
    return MooncakeRig(source_address, target, engines, start)


@pytest.fixture
def rig(kind: str, source_address: int, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = make_rig(kind, source_address, request, is_own=False)
    yield made
    made.close()


@pytest.fixture
def own_rig(kind: str, source_address: int, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """With a peer that may be harmed."""
    made = make_rig(kind, source_address, request, is_own=True)
    yield made
    made.close()


@pytest.fixture
def data(source: tuple[mmap.mmap, int]) -> bytes:
    return source[0][:]


def test_writes_land_where_they_are_sent_and_nowhere_else(rig: Rig, data: bytes) -> None:
    writes = [rig.write(256, 1000), rig.write(SIZE_BYTES - 5, 5, 77), rig.write(8192, 300_000, 13)]
    assert rig.finish(rig.writer.submit(writes)) == DONE
    expected = bytearray(SIZE_BYTES)
    expected[256:1256] = data[:1000]
    expected[-5:] = data[77:82]
    expected[8192:308_192] = data[13:300_013]
    assert bytes(rig.memory) == bytes(expected)


def test_the_end_of_a_ticket_is_told_once(rig: Rig) -> None:
    tickets = [rig.writer.submit([rig.write(0, 64)]) for _ in range(3)]
    assert len(set(tickets)) == 3
    for ticket in reversed(tickets):
        assert rig.finish(ticket) == DONE
        for call in (rig.writer.poll, rig.writer.cancel):
            with pytest.raises(TransportError, match=f"no ticket {ticket}"):
                call(ticket)


def test_a_ticket_that_was_never_given_out_is_refused(rig: Rig) -> None:
    for call in (rig.writer.poll, rig.writer.cancel):
        with pytest.raises(TransportError, match="no ticket 99"):
            call(99)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [(-1, 8), (SIZE_BYTES - 7, 8), (SIZE_BYTES, 1), (0, SIZE_BYTES + 1), (16, -1), (-(1 << 40), 8)],
)
def test_a_set_with_a_write_outside_the_arena_is_refused_and_nothing_of_it_begins(
    rig: Rig, offset: int, size_bytes: int, place: int
) -> None:
    writes = [rig.write(1024, 64)]
    writes.insert(place, rig.write(offset, size_bytes))
    with pytest.raises(TransportError, match="outside"):
        rig.writer.submit(writes)
    # What is written afterwards comes after what would have begun.
    assert rig.finish(rig.writer.submit([rig.write(SIZE_BYTES - 1, 1)])) == DONE
    assert not any(rig.memory[:-1])


@pytest.mark.parametrize(
    ("offset", "size_bytes"), [(0, SIZE_BYTES), (SIZE_BYTES - 1, 1), (SIZE_BYTES, 0), (0, 0)]
)
def test_a_write_up_to_the_edge_is_taken(rig: Rig, data: bytes, offset: int, size_bytes: int) -> None:
    assert rig.finish(rig.writer.submit([rig.write(offset, size_bytes)])) == DONE
    assert bytes(rig.memory[offset : offset + size_bytes]) == data[:size_bytes]
    assert not any(rig.memory[:offset])


def test_an_empty_set_is_done(rig: Rig) -> None:
    assert rig.finish(rig.writer.submit([])) == DONE


@pytest.mark.parametrize(("source_offset", "size_bytes"), [(SIZE_BYTES - 63, 64), (-1, 64), (1 << 30, 1)])
def test_a_source_that_is_not_registered_is_refused(rig: Rig, source_offset: int, size_bytes: int) -> None:
    if not rig.needs_sources:
        pytest.skip("it reads from anywhere")
    with pytest.raises(TransportError, match="not registered"):
        rig.writer.submit([rig.write(0, 64), rig.write(128, size_bytes, source_offset)])
    assert rig.finish(rig.writer.submit([rig.write(SIZE_BYTES - 1, 1)])) == DONE
    assert not any(rig.memory[:-1])


def test_many_writes_land_with_few_of_them_under_way(rig: Rig, data: bytes) -> None:
    piece = 4096
    writes = [rig.write(at, piece, at) for at in range(0, SIZE_BYTES, piece)]
    assert rig.finish(rig.writer.submit(writes)) == DONE
    assert bytes(rig.memory) == data
    assert rig.in_flight_bytes_seen_max() <= IN_FLIGHT_BYTES_MAX
    if rig.needs_sources:
        assert rig.in_flight_bytes_seen_max() > piece, "more than one at a time"


def test_the_bound_is_shared_by_tickets_and_one_larger_write_goes_alone(rig: Rig, data: bytes) -> None:
    large = 3 * IN_FLIGHT_BYTES_MAX
    tickets = [rig.writer.submit([rig.write(at, large, at)]) for at in range(0, 10 * large, large)]
    for ticket in tickets:
        assert rig.finish(ticket) == DONE
    assert bytes(rig.memory[: 10 * large]) == data[: 10 * large]
    assert rig.in_flight_bytes_seen_max() <= large


def test_polling_the_last_ticket_is_enough_for_those_before_it(rig: Rig) -> None:
    half = IN_FLIGHT_BYTES_MAX // 2
    tickets = [rig.writer.submit([rig.write(0, half)] * 5) for _ in range(4)]
    assert rig.finish(tickets[-1]) == DONE
    assert [rig.writer.poll(ticket) for ticket in tickets[:-1]] == [DONE] * 3


def test_after_a_cancel_the_writes_that_had_begun_have_landed_and_no_other(rig: Rig) -> None:
    piece = IN_FLIGHT_BYTES_MAX // 2
    writes = [rig.write(at, piece, at) for at in range(0, SIZE_BYTES, piece)]
    ticket = rig.writer.submit(writes)
    rig.writer.cancel(ticket)
    progress = rig.finish(ticket)
    assert progress.is_drained
    landed = [bool(rig.memory[at]) for at in range(0, SIZE_BYTES, piece)]
    assert landed == sorted(landed, reverse=True), "in order"
    assert (progress.state is TicketState.DONE) == all(landed)
    assert progress.state in (TicketState.DONE, TicketState.CANCELLED)
    # Another ticket is not touched by it.
    assert rig.finish(rig.writer.submit([rig.write(SIZE_BYTES - 1, 1)])) == DONE
    assert [bool(rig.memory[at]) for at in range(0, SIZE_BYTES, piece)] == landed


def test_what_has_begun_is_done_when_it_is_cancelled(kind: str, rig: Rig, data: bytes) -> None:
    if kind == "mooncake, in a thread":
        pytest.skip("the thread may not have come to it")
    assert rig.finish(rig.writer.submit([rig.write(0, 1)])) == DONE, "the first contact is over"
    ticket = rig.writer.submit([rig.write(0, 64)])
    rig.writer.cancel(ticket)
    assert rig.finish(ticket) == DONE
    assert bytes(rig.memory[:64]) == data[:64]


def test_a_peer_that_ends_fails_what_is_begun_and_that_is_not_drained(own_rig: Rig) -> None:
    if isinstance(own_rig, ShmRig):
        pytest.skip("memory has no peer that could end")
    assert own_rig.finish(own_rig.writer.submit([own_rig.write(0, 64)])) == DONE
    own_rig.lose_peer()
    progress = own_rig.finish(own_rig.writer.submit([own_rig.write(at, 64) for at in range(0, 6400, 64)]))
    assert progress.state is TicketState.FAILED
    assert not progress.is_drained
    assert progress.detail


def test_a_new_life_of_the_peer_is_reached_by_a_new_writer(own_rig: Rig, data: bytes) -> None:
    assert own_rig.finish(own_rig.writer.submit([own_rig.write(0, 64)])) == DONE
    own_rig.lose_peer()
    own_rig.return_peer()
    writer = own_rig.new_writer()
    try:
        assert own_rig.finish(writer.submit([own_rig.write(128, 64)]), writer) == DONE
        assert bytes(own_rig.memory[128:192]) == data[:64]
    finally:
        writer.close()


def test_a_closed_writer_begins_nothing_and_its_tickets_end(rig: Rig) -> None:
    ticket = rig.writer.submit([rig.write(at, 4096) for at in range(0, SIZE_BYTES, 4096)])
    rig.writer.close()
    rig.writer.close()
    with pytest.raises(TransportError, match="closed"):
        rig.writer.submit([rig.write(0, 64)])
    progress = rig.finish(ticket)
    assert progress.is_drained
    assert progress.state in (TicketState.DONE, TicketState.CANCELLED)

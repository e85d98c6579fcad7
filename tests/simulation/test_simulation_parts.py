"""What the simulation is made of: chance, time, connections, bytes, a disk."""

import errno
from pathlib import Path

import pytest
import torch

from snapd.core import records as rec
from snapd.kv.checksum import plane_checksum
from snapd.layout import fingerprint
from snapd.units import NS_PER_MS
from tools.simulation import clock
from tools.simulation.checks import EpochChecks
from tools.simulation.clock import Loop, Node, Timeline
from tools.simulation.dice import Dice
from tools.simulation.disk import Disk
from tools.simulation.failure import Broken
from tools.simulation.memory import Content, Place, checksum, cut_in_pieces
from tools.simulation.network import BUFFER_BYTES_MAX, PIPE_BYTES, PeerSocket, Pipe, Wire
from tools.simulation.plan import LAYOUTS
from tools.simulation.prefill import Ingest


@pytest.mark.parametrize("size_bytes", [0, 1, 7, 8, 9, 256, 1_001])
def test_the_checksum_is_that_of_the_kv_package(size_bytes: int) -> None:
    data = Dice(size_bytes).bits().to_bytes(8, "little") * 200
    plane = torch.frombuffer(bytearray(data[:size_bytes] or b"\0"), dtype=torch.uint8)[:size_bytes]
    assert checksum(data[:size_bytes]) == plane_checksum(plane)


def test_chance_is_the_same_everywhere() -> None:
    """The figures of splitmix64 for seed 0, as its authors give them."""
    dice = Dice(0)
    assert [dice.bits() for _ in range(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert Dice(1, 2).bits() != Dice(1, 3).bits()
    assert {Dice(seed).between(3, 5) for seed in range(50)} == {3, 4, 5}
    assert sorted(Dice(4).shuffled("abcde")) == list("abcde") != Dice(4).shuffled("abcde")
    assert {Dice(seed).weighted({"a": 1, "b": 0, "c": 2}) for seed in range(50)} == {"a", "c"}


def test_any_other_token_rank_or_layout_has_other_bytes() -> None:
    content = Content()
    (layout, name), (_, other_name) = [(one, fingerprint(one)) for one in LAYOUTS[:2]]
    planes = content.planes(layout, name, 1, 0, 4, 12)
    assert [len(plane) for plane in planes] == [8 * stride for stride in layout.plane_stride_bytes]
    assert len({*planes, *content.planes(layout, name, 2, 0, 4, 12)}) == 2 * layout.num_planes
    assert not {*planes} & {*content.planes(layout, name, 1, 1, 4, 12)}
    assert not {*planes} & {*content.planes(layout, other_name, 1, 0, 4, 12)}
    longer = content.planes(layout, name, 1, 0, 0, 16)
    assert [one[4 * 16 : 12 * 16] for one in longer] == planes, "a longer snapshot begins with the shorter"


def test_pieces_are_all_of_a_shard() -> None:
    planes = [bytes(range(40)), bytes(range(100, 140))]
    for parts in (1, 2, 3):
        pieces = cut_in_pieces(1, 0, [Place(0, 40), Place(64, 40)], planes, Dice(parts).below, parts)
        buffer = bytearray(104)
        for piece in pieces:
            for offset, data in piece.writes:
                buffer[offset : offset + len(data)] = data
        assert (buffer[:40], buffer[64:]) == (planes[0], planes[1])


# --- time ---------------------------------------------------------------------------------------


def test_a_stopped_process_does_later_what_it_had_to_do_and_a_dead_one_nothing() -> None:
    timeline = Timeline(Dice(1))
    stopped, dead = Node(timeline), Node(timeline)
    done: list[tuple[str, int]] = []
    stopped.after(10, lambda: done.append(("stopped", timeline.now_ns)))
    dead.after(10, lambda: done.append(("dead", timeline.now_ns)))
    timeline.at(5, dead.kill)
    timeline.at(5, lambda: stopped.stop_for(NS_PER_MS))
    timeline.run()
    ((who, at_ns),) = done
    assert who == "stopped" and NS_PER_MS <= at_ns < 2 * NS_PER_MS


def test_a_run_without_end_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "EVENTS_MAX", 100)
    timeline = Timeline(Dice(1))

    def again() -> None:
        timeline.after(1, again)

    again()
    with pytest.raises(Broken, match="no-rest"):
        timeline.run()


def test_a_clock_that_jumps_makes_due_what_lies_behind() -> None:
    timeline = Timeline(Dice(1))
    node = Node(timeline)
    loop = Loop(node, Dice(1))
    fired: list[str] = []
    loop.call_later(1.0, lambda: fired.append("soon"))
    loop.call_later(9.0, lambda: fired.append("later")).cancel()
    timeline.at(5, lambda: loop.jump(2_000))
    timeline.run()
    assert fired == ["soon"] and timeline.now_ns < NS_PER_MS
    assert loop.time() >= 2.0


# --- connections --------------------------------------------------------------------------------


def test_a_pipe_keeps_the_order_whatever_the_latency() -> None:
    timeline = Timeline(Dice(1))
    arrived: list[bytes] = []
    pipe = Pipe(timeline, Node(timeline), Dice(7), NS_PER_MS, arrived.append)
    sent = [b"%d," % number for number in range(200)]
    for data in sent:
        pipe.send(data)
        pipe.latency_ns = pipe.latency_ns * 9 // 10
    pipe.end()
    timeline.run()
    assert b"".join(arrived) == b"".join(sent)
    assert len(arrived) > len(sent), "some arrived in two parts"
    assert arrived[-1] == b""


def test_a_pipe_that_is_cut_delivers_a_part_and_then_the_end() -> None:
    lengths = set()
    for seed in range(40):
        timeline = Timeline(Dice(seed))
        arrived: list[bytes] = []
        pipe = Pipe(timeline, Node(timeline), Dice(seed), NS_PER_MS, arrived.append)
        pipe.send(b"0123456789")
        pipe.cut()
        pipe.send(b"never")
        timeline.run()
        assert arrived[-1] == b"" and b"0123456789".startswith(b"".join(arrived))
        lengths.add(len(b"".join(arrived)))
    assert len(lengths) > 5


def test_a_pipe_has_room_for_so_much() -> None:
    timeline = Timeline(Dice(1))
    pipe = Pipe(timeline, Node(timeline), Dice(1), NS_PER_MS, lambda data: None)
    pipe.send(bytes(PIPE_BYTES - 1))
    assert pipe.room_bytes == 1


# --- the disk -----------------------------------------------------------------------------------


def test_a_full_disk_takes_nothing_or_a_part(tmp_path: Path) -> None:
    disk = Disk(tmp_path, Dice(3))
    disk.is_full = True
    with Path(disk.path).open("ab", buffering=0) as file:
        taken = []
        for _ in range(60):
            try:
                taken.append(disk.calls.write(file.fileno(), b"a line\n"))
            except OSError as error:
                assert error.errno == errno.ENOSPC
        disk.is_full = False
        assert disk.calls.write(file.fileno(), b"a line\n") == 7
    assert taken and all(0 < count < 7 for count in taken) and len(taken) < 40
    assert disk.failures == 60


# --- what is watched ------------------------------------------------------------------------------


def test_bytes_that_an_attempt_has_no_more_are_neither_written_nor_read() -> None:
    arenas = (rec.ArenaInfo(0, "cpu", 4_096, 256),)
    started = rec.DaemonStarted(at_ns=0, version="", protocol=1, pid=1, transport="shm", arenas=arenas)
    checks = EpochChecks("epoch", started, 1_000)
    checks.held[1, 0] = 256
    checks.check_landing(1, 0)
    checks.check_reading(1, 0)
    checks.released[2, 0] = "time"
    checks.check_landing(2, 0)
    assert checks.late_landings == 1, "the time is no proof"
    for why in ("final", "drained", "writer-gone", "lease-ended"):
        checks.released[2, 0] = why
        with pytest.raises(Broken, match="write-after-free"):
            checks.check_landing(2, 0)
    with pytest.raises(Broken, match="read-after-free"):
        checks.check_reading(2, 0)
    checks.clock_jumps = 1
    checks.check_reading(2, 0)


@pytest.mark.parametrize("what", ["heard", "inserted"])
def test_ranks_that_do_not_do_the_same_are_noticed(what: str) -> None:
    ingest = Ingest((0, 0), (1, "epoch"), (1, 8), (0, 1), "told", 1)
    getattr(ingest, what).update({0: True, 1: False})
    ingest.end(0, is_alive=True)
    with pytest.raises(Broken, match="ranks-differ"):
        ingest.end(1, is_alive=True)


def test_a_rank_that_died_need_not_insert_and_the_first_ones_death_means_no() -> None:
    ingest = Ingest((0, 0), (1, "epoch"), (1, 8), (0, 1), "told", 1)
    ingest.inserted.update({0: False, 1: True})
    ingest.end(0, is_alive=False)
    ingest.end(1, is_alive=True)
    assert ingest.leader.value == ("commit", False) and ingest.is_over.value


def test_a_client_that_does_not_read_takes_no_more_than_it_may() -> None:
    timeline = Timeline(Dice(1))
    node = Node(timeline)
    wire = Wire(
        timeline, node, node, Loop(node, Dice(1)).as_asyncio(), Sleeper(), PeerSocket(1, 1), Dice(1), 1
    )
    wire.transport.write(bytes(BUFFER_BYTES_MAX))
    with pytest.raises(Broken, match="unbounded"):
        wire.transport.write(bytes(2 * PIPE_BYTES))


class Sleeper:
    """A client that never reads."""

    def wake(self) -> None:
        """Sleep on."""

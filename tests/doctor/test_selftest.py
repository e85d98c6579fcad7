"""The self-test: every byte counts, and a child that hangs or dies is a result."""

import io
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import BinaryIO
from unittest import mock

import msgspec
import pytest

from snapd.doctor import endpoint, pattern, selftest
from snapd.doctor import messages as m
from snapd.doctor.selftest import SelfTestFailed, load_mooncake, move_bytes
from snapd.errors import TransportError
from snapd.mapping import map_arena
from snapd.transport.base import Write
from snapd.transport.shm import ShmWriter
from snapd.units import KIB, MIB
from snapd.wire import MapBufferReq, PingReq, encode_frame

SIZE_BYTES = 3 * MIB + 17
# A child that hangs is given so long: longer where it had not come to where it hangs.
HANGS_S = (1.0, 4.0, 16.0, 64.0)
UseFake = Callable[[str], Path]


def memory_of(size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))


# --- the pattern -------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, pattern.PERIOD_BYTES - 1, pattern.PERIOD_BYTES, SIZE_BYTES - 1])
def test_one_wrong_bit_is_found_wherever_it_is(index: int) -> None:
    memory = memory_of(SIZE_BYTES)
    pattern.fill(memory, 7)
    assert pattern.difference(memory, 7) == ""
    memory[index] ^= 1
    assert f"the first at {index:,}" in pattern.difference(memory, 7)


def test_bytes_of_another_run_are_wrong() -> None:
    memory = memory_of(SIZE_BYTES)
    pattern.fill(memory, 7)
    assert "wrong bytes in 4 of 4 parts" in pattern.difference(memory, 8)


def test_a_piece_in_the_place_of_another_is_wrong() -> None:
    memory = memory_of(SIZE_BYTES)
    pattern.fill(memory, 7)
    memory[MIB : 2 * MIB] = bytes(memory[:MIB])
    assert pattern.difference(memory, 7)


def test_untouched_bytes_are_named() -> None:
    memory = memory_of(SIZE_BYTES)
    pattern.poison(memory)
    assert set(memory.tobytes()) == {pattern.POISON}
    pattern.fill(memory[:MIB], 7)
    assert "where nothing was written" in pattern.difference(memory, 7)


# --- shared memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [4 * KIB, SIZE_BYTES, 17 * MIB])
def test_shm_moves_every_byte(size_bytes: int) -> None:
    moved = move_bytes("shm", size_bytes)
    assert (moved.size_bytes, moved.difference) == (size_bytes, "")
    assert moved.gb_per_s > 0 and moved.latency_us > 0


class FaultyWriter(ShmWriter):
    """Writes the last piece one byte too far to the left."""

    def submit(self, writes: Sequence[Write]) -> int:
        *most, last = writes
        if len(writes) > 1:
            last = Write(last.source_address, last.target_ptr - 1, last.size_bytes)
        return super().submit([*most, last])


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_writer_that_misplaces_bytes_is_found_out(
    is_faulty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_faulty:
        monkeypatch.setattr(endpoint, "ShmWriter", FaultyWriter)
    task = m.Task(
        role="target", transport="shm", size_bytes=17 * MIB, seed=1, socket_path=str(tmp_path / "sock")
    )
    said: list[m.FromChild] = []
    is_offered, is_written = threading.Event(), threading.Event()

    class Heard(io.BytesIO):
        """Tells the target to compare once everything is written."""

        def readline(self, size: int | None = -1, /) -> bytes:
            assert is_written.wait(20)
            return m.CHECK

    def say(message: m.FromChild) -> None:
        said.append(message)
        if isinstance(message, m.Offer):
            is_offered.set()

    target = threading.Thread(target=endpoint.receive, args=(task, say, Heard()))
    target.start()
    assert is_offered.wait(20)
    (offer,) = (message for message in said if isinstance(message, m.Offer))
    line = msgspec.json.encode(offer) + b"\n"
    endpoint.send(msgspec.structs.replace(task, role="writer"), said.append, io.BytesIO(line))
    is_written.set()
    target.join(20)
    (checked,) = (message for message in said if isinstance(message, m.Checked))
    assert bool(checked.difference) is is_faulty


@pytest.mark.parametrize("size_bytes", [1, 8 * MIB, 8 * MIB + 1, 20 * MIB])
def test_the_pieces_cover_every_byte_once(size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[Write]] = []

    def finish(writer: object, writes: list[Write]) -> float:
        begun.append(writes)
        return 0.0

    monkeypatch.setattr(endpoint, "_finish", finish)
    endpoint.move(mock.Mock(), 1_000, 50, size_bytes, 8 * MIB, lambda _: None)
    *small, pieces = begun
    assert len(small) == 1 + endpoint.LATENCY_ROUNDS
    assert all(writes == [Write(1_000, 50, min(size_bytes, endpoint.SMALL_BYTES))] for writes in small)
    at = 0
    for piece in pieces:
        assert (piece.source_address, piece.target_ptr) == (1_000 + at, 50 + at)
        at += piece.size_bytes
    assert at == size_bytes


@pytest.mark.parametrize(("each_s", "rounds"), [(0.001, endpoint.LATENCY_ROUNDS), (0.3, 2)])
def test_the_latency_is_of_small_writes_without_the_first_and_takes_no_long(
    each_s: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_s = iter([9.0, *[each_s] * rounds, 2.0])
    monkeypatch.setattr(endpoint, "_finish", lambda *_: next(taken_s))
    written = endpoint.move(mock.Mock(), 0, 0, MIB, MIB, lambda _: None)
    assert (written.seconds, written.latency_s) == (2.0, each_s)
    assert not list(taken_s)


# --- Mooncake, with faults ---------------------------------------------------------------------


def failure(size_bytes: int = SIZE_BYTES, timeout_s: float = 20.0) -> str:
    with pytest.raises(SelfTestFailed) as caught:
        move_bytes("mooncake", size_bytes, timeout_s=timeout_s)
    return str(caught.value)


def test_the_fake_moves_every_byte_and_its_noise_stays_out(fake_mooncake: UseFake) -> None:
    fake_mooncake("noise")
    assert load_mooncake() == ()
    assert move_bytes("mooncake", SIZE_BYTES).difference == ""


def test_one_corrupted_byte_is_found(fake_mooncake: UseFake) -> None:
    fake_mooncake("corrupt")
    assert f"the first at {SIZE_BYTES - 1:,}" in move_bytes("mooncake", SIZE_BYTES).difference


def test_writes_that_are_acknowledged_and_never_land_are_found(fake_mooncake: UseFake) -> None:
    fake_mooncake("nothing lands")
    assert "where nothing was written" in move_bytes("mooncake", SIZE_BYTES).difference


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("hang at start", "was starting Mooncake for tcp"),
        ("never ends", "the writing process was writing"),
    ],
)
def test_a_child_that_hangs_is_ended_at_the_deadline(fault: str, wanted: str, fake_mooncake: UseFake) -> None:
    fake_mooncake(fault)
    for hang_s in HANGS_S:
        begun_s = monotonic()
        said = failure(timeout_s=hang_s)
        assert said.startswith(f"not done within {hang_s:g} s: ")
        assert hang_s <= monotonic() - begun_s < hang_s + 30
        if wanted in said:
            break
    assert wanted in said


def test_loading_that_hangs_is_ended(fake_mooncake: UseFake) -> None:
    fake_mooncake("hang at import")
    for hang_s in HANGS_S:
        with pytest.raises(SelfTestFailed) as caught:
            load_mooncake(hang_s)
        if "the process was loading Mooncake" in str(caught.value):
            return
    pytest.fail(str(caught.value))


@pytest.mark.parametrize(
    ("fault", "who"), [("target dies", "the receiving process"), ("writer dies", "the writing process")]
)
def test_a_child_that_crashes_is_noticed_at_once(fault: str, who: str, fake_mooncake: UseFake) -> None:
    fake_mooncake(fault)
    said = failure(timeout_s=60)
    assert said.startswith(who)
    assert signal.SIGSEGV.name in said


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("write fails", "a write failed"),
        ("no start", "initialize: -1"),
        ("no registration", "register_memory: -7"),
        ("import error", "undefined symbol: cuMemGone"),
        ("odd error", "RuntimeError: nobody thought of this"),
    ],
)
def test_what_mooncake_refuses_is_passed_on(fault: str, wanted: str, fake_mooncake: UseFake) -> None:
    fake_mooncake(fault)
    said = failure()
    assert wanted in said
    assert "ended with status" not in said


def test_no_child_is_left_behind(fake_mooncake: UseFake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mooncake("hang at start")
    children: list[selftest._Child] = []
    begin = selftest._Child.__init__

    def remember(child: selftest._Child, task: m.Task, name: str) -> None:
        begin(child, task, name)
        children.append(child)

    monkeypatch.setattr(selftest._Child, "__init__", remember)
    failure(timeout_s=0.5)
    assert [child._process.returncode for child in children] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("Segmentation fault", "said what is no message"),
        ('{"type":"Written","seconds":1.0,"latency_s":1.0}', "said Written out of turn"),
    ],
)
def test_a_child_that_says_what_nobody_asked_for_is_a_failure(
    said: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "_RUN", f"print({said!r}, flush=True); input()")
    with pytest.raises(SelfTestFailed, match=wanted):
        move_bytes("shm", SIZE_BYTES)


def test_a_child_that_hangs_up_and_lives_on_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_END_S", 0.1)
    monkeypatch.setattr(selftest, "_RUN", "import os; os.close(1); input()")
    with pytest.raises(SelfTestFailed, match="the process hung up while starting"):
        load_mooncake()


def test_what_a_child_said_last_on_stderr_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_RUN", "import sys; sys.exit('E1 first\\nE2 no device\\n')")
    with pytest.raises(SelfTestFailed, match=r"ended with status 1 while starting \(E2 no device\)"):
        load_mooncake()


# --- the processes, one by one -----------------------------------------------------------------


def hand_over_to(
    client: Callable[[str], None], directory: Path, heard: BinaryIO | None = None
) -> list[m.FromChild]:
    """Run a shm target, with a client in place of a writer; return what it said."""
    said: list[m.FromChild] = []
    threads: list[threading.Thread] = []

    def say(message: m.FromChild) -> None:
        said.append(message)
        if isinstance(message, m.Offer):
            threads.append(threading.Thread(target=client, args=(message.address,)))
            threads[0].start()

    task = m.Task(role="target", transport="shm", size_bytes=4 * KIB, socket_path=f"{directory}/sock")
    try:
        endpoint.receive(task, say, heard or io.BytesIO())
    finally:
        for thread in threads:
            thread.join(20)
    return said


def test_a_writer_that_hangs_up_before_it_has_the_arena_is_told(tmp_path: Path) -> None:
    def hang_up(address: str) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(address)

    with pytest.raises(TransportError, match="hung up"):
        hand_over_to(hang_up, tmp_path)


def test_a_writer_that_asks_for_something_else_is_told(tmp_path: Path) -> None:
    def ask(address: str) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(address)
            sock.sendall(encode_frame(PingReq(id=1)))

    with pytest.raises(TransportError, match="asked for PingReq"):
        hand_over_to(ask, tmp_path)


def test_the_connection_stays_as_long_as_the_target(tmp_path: Path) -> None:
    """Where there is no pidfd, its end is the end of the memory on a GPU."""
    has_hung_up = []

    def ask(address: str) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(address)
            sock.sendall(encode_frame(MapBufferReq(id=1, rank=0, writable=True)))
            assert sock.recv(65_536)
            assert is_waiting.wait(20)
            poller = select.poll()
            poller.register(sock, 0)
            has_hung_up.append(bool(poller.poll(0)))
            is_looked_at.set()

    is_waiting, is_looked_at = threading.Event(), threading.Event()

    class Heard(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            is_waiting.set()
            assert is_looked_at.wait(20)
            return b""

    hand_over_to(ask, tmp_path, Heard())
    assert has_hung_up == [False]


def test_a_target_that_is_not_told_to_compare_does_not(tmp_path: Path) -> None:
    said = hand_over_to(lambda address: map_arena(address, 0, writable=True).close(), tmp_path)
    assert said[-1] == m.Stage("waiting for the writes")


def test_a_writer_without_an_offer_writes_nothing() -> None:
    said: list[m.FromChild] = []
    task = m.Task(role="writer", transport="shm", size_bytes=4 * KIB)
    endpoint.send(task, said.append, io.BytesIO())
    assert said == [m.Stage("making the bytes")]


def test_a_child_that_cannot_be_started_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest.sys, "executable", "/nowhere/python")
    with pytest.raises(SelfTestFailed, match="cannot be started"):
        move_bytes("shm", SIZE_BYTES)

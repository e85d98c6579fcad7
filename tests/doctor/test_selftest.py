"""The self-test: every byte counts, and a child that hangs or dies is a result."""

import io
import mmap
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

import msgspec
import pytest

from snapd.doctor import endpoint, pattern, selftest
from snapd.doctor import messages as m
from snapd.doctor.selftest import SelfTestFailed, load_mooncake, move_bytes
from snapd.transport.base import Write
from snapd.transport.shm import ShmWriter
from snapd.units import KIB, MIB

SIZE_BYTES = 3 * MIB + 17
# A child that hangs is given so long.
HANG_S = 1.5
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
    assert moved.gb_per_s > 0


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


def test_a_piece_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy:
        def register_source(self, address: int, size_bytes: int) -> None: ...

        def submit(self, writes: Sequence[Write]) -> int:
            self.writes = list(writes)
            return 1

        def poll(self, ticket: int) -> object:
            return endpoint.TicketState

    with mmap.mmap(-1, SIZE_BYTES) as source:
        pieces: list[Write] = []
        monkeypatch.setattr(endpoint, "_finish", lambda writer, writes: pieces.extend(writes))
        endpoint.move(Lazy(), 0, 100, len(source), lambda _: None)  # type: ignore[arg-type]
    covered = sorted((write.target_ptr - 100, write.size_bytes) for write in pieces[1:])
    assert sum(size_bytes for _, size_bytes in covered) == SIZE_BYTES


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
    begun_s = monotonic()
    said = failure(timeout_s=HANG_S)
    assert said.startswith("not done within 1.5 s: ")
    assert wanted in said
    assert HANG_S <= monotonic() - begun_s < HANG_S + 5


def test_loading_that_hangs_is_ended(fake_mooncake: UseFake) -> None:
    fake_mooncake("hang at import")
    with pytest.raises(SelfTestFailed, match="the process was loading Mooncake"):
        load_mooncake(HANG_S)


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
    ],
)
def test_what_mooncake_refuses_is_passed_on(fault: str, wanted: str, fake_mooncake: UseFake) -> None:
    fake_mooncake(fault)
    assert wanted in failure()


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


def test_a_child_that_cannot_be_started_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest.sys, "executable", "/nowhere/python")
    with pytest.raises(SelfTestFailed, match="cannot be started"):
        move_bytes("shm", SIZE_BYTES)

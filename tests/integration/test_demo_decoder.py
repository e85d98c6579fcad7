"""The demo's D worker: its loop, what it says of a push, and what the session that asked makes of it."""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from daemon_process import DaemonProcess

from snapd.client import Client
from snapd.demo import messages as m
from snapd.demo.chaos import Chaos
from snapd.demo.decoder import Decoder, _Push
from snapd.demo.memory import create_pool_memory
from snapd.demo.plan import PAGE_SIZE_TOKENS, RANKS, make_plan
from snapd.demo.session import SessionRun
from snapd.demo.stage import Options, Seat, Stage, Tally
from snapd.demo.trace import default_trace_path, read_trace
from snapd.demo.workers import DemoError
from snapd.errors import Reason
from snapd.kv.push import PushResult
from snapd.units import MIB

WAIT_S = 20.0
SLOTS = 256


@pytest.fixture
def daemon_of_two(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """A daemon with an arena for each of the demo's ranks."""
    return start_daemon(ranks=RANKS)


class RunningDecoder:
    """A D worker in a thread of this process.

    Attributes:
        decoder: the worker.
    """

    def __init__(self, socket_path: Path) -> None:
        slots = SLOTS + PAGE_SIZE_TOKENS
        fds = tuple(create_pool_memory(f"rank {rank}", slots) for rank in range(RANKS))
        self._own, theirs = socket.socketpair()
        self._own.settimeout(WAIT_S)
        setup = m.Setup(
            role=m.ROLE_DECODER, index=0, channel_fd=theirs.detach(), socket_path=str(socket_path), seed=1,
            decoder_fds=fds, decoder_slots=slots, piece_bytes=64 * 1024,
        )  # fmt: skip
        self.decoder = Decoder(setup, m.WorkerChannel(setup.channel_fd))
        for fd in fds:
            os.close(fd)
        self._stream = self._own.makefile("rb")
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with contextlib.suppress(EOFError):
            self.decoder.run()

    def __enter__(self) -> Self:
        self._thread.start()
        assert isinstance(self.hear(), m.Started)
        return self

    def __exit__(self, *_: object) -> None:
        self._own.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._stream.close()
        self._own.close()

    def say(self, *commands: m.ToWorker) -> None:
        self._own.sendall(b"".join(m.encode(command) for command in commands))

    def hear(self) -> m.FromWorker:
        size_bytes = int.from_bytes(self._stream.read(4), "little")
        return m.decode_answer(self._stream.read(size_bytes))


def push_turn(message_id: int, pace_ms: int) -> m.PushTurn:
    slots = m.pack_slots(range(SLOTS))
    return m.PushTurn(
        id=message_id,
        session=0,
        session_id="agent",
        token_ids=tuple(range(SLOTS)),
        slots=slots,
        pace_ms=pace_ms,
    )


def test_d_decodes_while_a_push_is_under_way(daemon_of_two: DaemonProcess) -> None:
    with Client(str(daemon_of_two.socket_path)) as p, RunningDecoder(daemon_of_two.socket_path) as worker:
        for rank in range(RANKS):
            p.declare_layout(rank, worker.decoder._pusher.layout)
        worker.say(push_turn(1, pace_ms=50))
        assert isinstance(worker.hear(), m.PushMoved)
        segments = (m.Segment(0, 0, SLOTS),)
        worker.say(m.Decode(id=2, session=1, segments=segments, slots=m.pack_slots(range(SLOTS))))
        heard = [worker.hear()]
        while not isinstance(heard[-1], m.PushEnded):
            heard.append(worker.hear())
        assert any(isinstance(message, m.Decoded) for message in heard[:-2]), "it had to wait for the push"
        assert heard[-1].ok and heard[-1].drained


def test_d_without_commands_looks_after_writes_of_a_push_that_has_ended(daemon_of_two: DaemonProcess) -> None:
    class Lingering:
        """A pusher whose last write is over when it is looked at for the third time."""

        lingering = 3

        def poll(self) -> None:
            self.lingering -= self.lingering > 0

    worker = RunningDecoder(daemon_of_two.socket_path)
    pusher = worker.decoder._pusher = Lingering()  # type: ignore[assignment]
    with worker:
        deadline_s = time.monotonic() + WAIT_S
        while pusher.lingering:
            assert time.monotonic() < deadline_s, "nobody looked"


def test_d_says_what_became_of_writes_that_failed(daemon_of_two: DaemonProcess) -> None:
    with RunningDecoder(daemon_of_two.socket_path) as worker:
        push = _Push(push_turn(7, pace_ms=0), refusals=2)
        worker.decoder._pushes.append(push)
        result = PushResult(ok=False, reason=Reason.TRANSFER_FAILED, retried_pieces=3, drained=False)
        worker.decoder._finish(push, result)
        assert worker.hear() == m.PushEnded(
            id=7, ok=False, reason=Reason.TRANSFER_FAILED, refusals=2, retried_pieces=3, drained=False
        )


class ScriptedWorker:
    """D and P at once, with its answers to pushes; whoever asks more of it hears that it failed."""

    name = "D 0"

    def __init__(self, *answers: m.PushEnded) -> None:
        self._answers = list(answers)

    def tell(self, command: m.ToWorker) -> None:
        """Take a command that is not answered."""

    async def call(self, command: m.ToWorker, answer_type: type[m.FromWorker]) -> m.FromWorker:
        """Answer."""
        if answer_type is m.Decoded:
            return m.Decoded(num_bytes=0)
        if isinstance(command, m.PushTurn) and self._answers:
            return self._answers.pop(0)
        raise DemoError("that is all")


def play_first_session(*answers: m.PushEnded) -> tuple[Tally, str]:
    """Play the first session with a scripted D until it fails; return what was counted, and the error."""
    plan = make_plan(read_trace(default_trace_path()), total_bytes=16 * MIB, decoders=2)
    worker: Any = ScriptedWorker(*answers)
    client: Any = None

    async def play() -> tuple[Tally, str]:
        seat = Seat(0, worker, plan.decoder_slots)
        seat.is_up.set()
        options = Options(trace_path=default_trace_path(), out_dir=Path(), total_bytes=16 * MIB)
        stage = Stage(options, plan, client, [seat], [worker] * RANKS)
        with pytest.raises(DemoError) as caught:
            await SessionRun(stage, Chaos(plan, 1, is_on=False), plan.sessions[0], 1_000).run()
        return stage.tally, str(caught.value)

    return asyncio.run(play())


def test_d_that_cannot_push_ends_the_demo_with_its_reason() -> None:
    ended = m.PushEnded(ok=False, reason=Reason.TRANSFER_FAILED, detail="no engine")
    _, error = play_first_session(ended)
    assert error == "D 0 cannot push: no engine"


def test_writes_that_failed_are_counted() -> None:
    failed = m.PushEnded(
        ok=False, reason=Reason.TRANSFER_FAILED, slab_handle=5, retried_pieces=3, drained=False
    )
    done = m.PushEnded(ok=True, reason=Reason.OK, slab_handle=6, retried_pieces=1, drained=False)
    tally, error = play_first_session(failed, done)
    assert error == "that is all"
    assert (tally.retried_pieces, tally.undrained_commits) == (4, 1)
    assert tally.pushes_again == 1

"""The self-test, seen from doctor: child processes, a deadline, and a result whatever they do.

Nothing native runs in this process. A child that hangs is ended at the deadline, and one that dies is
noticed at once; both are results.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from snapd.doctor import messages as m
from snapd.errors import SnapdError
from snapd.mooncakeconfig import MooncakeConfig
from snapd.units import MS_PER_S, format_ms

TIMEOUT_S_DEFAULT: Final = 60.0
_END_S: Final = 5.0
_READ_BYTES: Final = 64 * 1024
_STDERR_BYTES_MAX: Final = 16 * 1024
_STDERR_LINE_MAX: Final = 300
# Settings of a daemon are for the daemon; a child takes all it needs from its task.
_SETTINGS_PREFIX: Final = "SNAPD_"
# The child finds modules where this process does; -P keeps the current directory out of it.
_RUN: Final = (
    "import json, os, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from snapd.doctor.endpoint import main; os._exit(main(sys.argv[2]))"
)
_from_child: Final = msgspec.json.Decoder(m.FromChild)

_T = TypeVar("_T", m.Loaded, m.Seen, m.Offer, m.Written, m.Checked)


class SelfTestFailed(SnapdError):
    """The self-test did not come to its end; the message says what happened."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a self-test ended.

    Attributes:
        size_bytes: moved.
        seconds: it took.
        latency_us: of one small write, in the middle of several.
        difference: what is wrong with the bytes; empty: nothing.
    """

    size_bytes: int
    seconds: float
    latency_us: float
    difference: str

    @property
    def gb_per_s(self) -> float:
        """The speed, in units of 10**9 bytes a second."""
        return self.size_bytes / self.seconds / 1e9 if self.seconds else 0.0


def load_mooncake(timeout_s: float = TIMEOUT_S_DEFAULT) -> tuple[str, ...]:
    """Load Mooncake in a child, and return what this build can do, such as ``CUDA``.

    Raises:
        SelfTestFailed: it cannot be loaded.
    """
    with contextlib.ExitStack() as stack:
        children = _Children(stack, time.monotonic() + timeout_s, timeout_s)
        probe = children.start(m.Task(role="probe", transport="mooncake"), "the process")
        return children.hear(probe, m.Loaded).supports


def see_gpus(arena_gpus: Sequence[int], timeout_s: float = TIMEOUT_S_DEFAULT) -> m.Seen:
    """Let a child ask the driver for the GPUs.

    Args:
        arena_gpus: indices of those whose memory is to be looked at, with their neighbours.
        timeout_s: for everything.

    Raises:
        SelfTestFailed: the driver crashed the child, or gave no answer in time.
    """
    with contextlib.ExitStack() as stack:
        children = _Children(stack, time.monotonic() + timeout_s, timeout_s)
        task = m.Task(role="gpus", transport="shm", arena_gpus=tuple(arena_gpus))
        return children.hear(children.start(task, "the process"), m.Seen)


def move_bytes(
    transport: Literal["shm", "mooncake"],
    size_bytes: int,
    *,
    mooncake: MooncakeConfig | None = None,
    timeout_s: float = TIMEOUT_S_DEFAULT,
    device: str = m.HOST_DEVICE,
    source_device: str = m.HOST_DEVICE,
) -> Result:
    """Let a child write into the arena of another one, which compares every byte.

    Args:
        transport: how.
        size_bytes: how much.
        mooncake: how to use Mooncake, for that transport.
        timeout_s: for everything.
        device: of the arena: ``cpu`` or ``cuda:N``.
        source_device: of the bytes that are written.

    Raises:
        SelfTestFailed: a process could not go on, died, or was not done in time.
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="snapd-doctor-"))
        children = _Children(stack, time.monotonic() + timeout_s, timeout_s)
        task = m.Task(
            role="target",
            transport=transport,
            mooncake=mooncake or MooncakeConfig(),
            size_bytes=size_bytes,
            seed=secrets.randbits(64),
            socket_path=str(Path(directory) / "arena.sock"),
            device=device,
            source_device=source_device,
        )
        target = children.start(task, "the receiving process")
        writer = children.start(msgspec.structs.replace(task, role="writer"), "the writing process")
        offer = children.hear(target, m.Offer)
        writer.tell(msgspec.json.encode(offer) + b"\n")
        written = children.hear(writer, m.Written)
        target.tell(m.CHECK)
        checked = children.hear(target, m.Checked)
        return Result(
            size_bytes=size_bytes,
            seconds=written.seconds,
            latency_us=written.latency_s * 1e6,
            difference=checked.difference,
        )


class _Child:
    """A process of a self-test.

    Attributes:
        name: for messages.
        doing: what it said last that it does.
    """

    def __init__(self, task: m.Task, name: str) -> None:
        self.name = name
        self.doing = "starting"
        self._unread = b""
        self._said: deque[m.FromChild] = deque()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by ``end``
        self._process = subprocess.Popen(  # noqa: S603 - this program's own module
            [sys.executable, "-P", "-c", _RUN, json.dumps(sys.path), msgspec.json.encode(task).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS_PREFIX)},
            # Ctrl-C is for doctor, which ends its children.
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def fileno(self) -> int:
        """Return what to wait on for its next words."""
        return self._stdout.fileno()

    def tell(self, line: bytes) -> None:
        """Send it a line. If it is gone, ``hear`` will say so."""
        with contextlib.suppress(OSError):
            self._stdin.write(line)
            self._stdin.flush()

    def read(self) -> None:
        """Take in what it says; call when there is something to read.

        Raises:
            SelfTestFailed: it is gone, cannot go on, or what it said is no message.
        """
        data = os.read(self.fileno(), _READ_BYTES)
        if not data:
            raise SelfTestFailed(self._gone())
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            try:
                message = _from_child.decode(line)
            except msgspec.MsgspecError as error:
                raise SelfTestFailed(f"{self.name} said what is no message ({error})") from None
            if isinstance(message, m.Failed):
                raise SelfTestFailed(f"{self.name}, {self.doing}: {message.detail}")
            if isinstance(message, m.Stage):
                self.doing = message.doing
            else:
                self._said.append(message)

    def answer(self) -> m.FromChild | None:
        """Return the oldest answer that nobody has taken yet."""
        return self._said.popleft() if self._said else None

    def _gone(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.returncode
        if code is None:
            how = "hung up"
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
        else:
            how = f"ended with status {code}"
        return f"{self.name} {how} while {self.doing}{self.last_words()}"

    def last_words(self) -> str:
        """Return the last line that it wrote to stderr, in brackets; or nothing."""
        with contextlib.suppress(OSError, ValueError):
            size_bytes = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size_bytes - _STDERR_BYTES_MAX))
            lines = self._stderr.read().decode(errors="replace").split("\n")
            if said := [line.strip() for line in lines if line.strip()]:
                return f" ({said[-1][:_STDERR_LINE_MAX]})"
        return ""

    def end(self) -> None:
        """Kill it and whatever it started. One that hangs in the kernel is left to it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        for pipe in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(OSError):
                pipe.close()


class _Children:
    """The processes of one self-test, and its deadline."""

    def __init__(self, stack: contextlib.ExitStack, deadline_s: float, timeout_s: float) -> None:
        self._stack = stack
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        self._all: list[_Child] = []

    def start(self, task: m.Task, name: str) -> _Child:
        try:
            child = _Child(task, name)
        except (OSError, ValueError) as error:
            raise SelfTestFailed(f"{name} cannot be started: {error}") from None
        self._stack.callback(child.end)
        self._all.append(child)
        return child

    def hear(self, wanted: _Child, kind: type[_T]) -> _T:
        """Return the next answer of *wanted*; the failure of any child ends the wait.

        Raises:
            SelfTestFailed: a child failed, died, or the time is over.
        """
        while (answer := wanted.answer()) is None:
            left_s = self._deadline_s - time.monotonic()
            ready = _readable(self._all, left_s) if left_s > 0 else []
            if not ready:
                raise SelfTestFailed(self._too_late())
            for child in ready:
                child.read()
        if not isinstance(answer, kind):
            raise SelfTestFailed(f"{wanted.name} said {type(answer).__name__} out of turn")
        return answer

    def _too_late(self) -> str:
        doing = "; ".join(f"{child.name} was {child.doing}{child.last_words()}" for child in self._all)
        return f"not done within {format_ms(self._timeout_s * MS_PER_S)}: {doing}"


def _readable(children: Sequence[_Child], timeout_s: float) -> list[_Child]:
    """Return the children that said something or are gone; none if the time is over."""
    poller = select.poll()
    by_fd = {child.fileno(): child for child in children}
    for fd in by_fd:
        poller.register(fd, select.POLLIN)
    # At least one millisecond: 0 would not wait at all and end the test too early.
    return [by_fd[fd] for fd, _ in poller.poll(max(1, int(timeout_s * MS_PER_S)))]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

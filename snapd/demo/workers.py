"""The demo's processes, seen from the orchestrator: how they start, what they say, how they end."""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from snapd.client import Client
from snapd.demo import messages as m
from snapd.errors import ConnectionProblem, SnapdError
from snapd.wire import LENGTH_BYTES

START_S: Final = 60.0
STOP_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1
_LAST_LINES: Final = 30
_ERROR_PREFIX: Final = "snapd: "

_AnswerT = TypeVar("_AnswerT", bound=m.FromWorker)


class DemoError(SnapdError):
    """The demo cannot go on; the message says which process failed and how."""


class WorkerGone(DemoError):
    """The worker process has ended."""


def _die_with_parent() -> None:
    """In the child, before exec: end when the orchestrator is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _environment() -> dict[str, str]:
    """Return this environment without settings of a daemon: they are for another one."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SNAPD_")}


async def _spawn(
    arguments: Sequence[str], messages_path: Path, fds: Sequence[int]
) -> asyncio.subprocess.Process:
    with messages_path.open("ab") as messages:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=subprocess.DEVNULL,
            stdout=messages,
            stderr=messages,
            pass_fds=fds,
            env=_environment(),
            # Ctrl-C is for the orchestrator, which ends the others in order.
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def error_of(path: Path) -> str:
    """Return the one line with which a command of snapd has failed; else the end of its messages."""
    said = last_lines(path)
    lines = [line for line in said.splitlines() if line.startswith(_ERROR_PREFIX)]
    return lines[-1].removeprefix(_ERROR_PREFIX) if lines else f"\n{said}"


def last_lines(path: Path) -> str:
    """Return the end of a file of messages, for an error."""
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_LAST_LINES:])


async def end_process(process: asyncio.subprocess.Process) -> int:
    """Wait until a process has ended; after a while end it by force. Return its exit status."""
    try:
        return await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


def bad_end(name: str, status: int, messages_path: Path) -> list[str]:
    """Return what was wrong with the end of a process, if anything was, and what it said last."""
    if not status:
        return []
    how = f"status {status}"
    with contextlib.suppress(ValueError):
        how += f" ({signal.Signals(-status).name})"
    said = last_lines(messages_path)
    return [f"{name} ended with {how}; " + (f"it said last:\n{said}" if said else "it said nothing")]


class Daemon:
    """The daemon's process.

    Attributes:
        client: asks it for statistics, and aborts.
    """

    def __init__(self, process: asyncio.subprocess.Process, client: Client, messages_path: Path) -> None:
        self.process = process
        self.client = client
        self._messages_path = messages_path

    @classmethod
    async def start(cls, config_path: Path, socket_path: str, messages_path: Path) -> "Daemon":
        """Start ``snapd serve``, and return when it answers.

        Raises:
            DemoError: it ends, or does not answer.
        """
        arguments = ("-m", "snapd.cli.main", "serve", "--config", str(config_path))
        process = await _spawn(arguments, messages_path, ())
        daemon = cls(process, Client(socket_path, name="demo"), messages_path)
        deadline_s = asyncio.get_running_loop().time() + START_S
        while True:
            try:
                daemon.client.connect()
                return daemon
            except ConnectionProblem:
                if process.returncode is None and asyncio.get_running_loop().time() < deadline_s:
                    await asyncio.sleep(0.02)
                    continue
            except BaseException:
                await daemon.stop()
                raise
            await daemon.stop()
            raise DemoError(f"the daemon did not start: {error_of(messages_path)}")

    async def stop(self) -> list[str]:
        """End it in order, and return what was wrong with its end."""
        self.client.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        return bad_end("the daemon", await end_process(self.process), self._messages_path)


class Worker:
    """A D worker or a P rank.

    Attributes:
        name: for people.
        process: of the present life.
        lives: how often it was started.
        on_moved: called with every ``PushMoved``.
    """

    def __init__(self, name: str, setup: m.Setup, messages_path: Path) -> None:
        self.name = name
        self.lives = 0
        self.on_moved: Callable[[Worker, m.PushMoved], None] | None = None
        self._setup = setup
        self._messages_path = messages_path
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[m.FromWorker]] = {}
        self._last_id = 0
        self._failure = ""

    @property
    def pid(self) -> int:
        """Of the present life; 0 before the first."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start the process, and return when it is set up.

        Raises:
            DemoError: it is not; the message says why.
        """
        own, theirs = socket.socketpair()
        with theirs:
            setup = msgspec.structs.replace(self._setup, channel_fd=theirs.fileno())
            arguments = ("-m", "snapd.demo.worker", msgspec.json.encode(setup).decode())
            fds = [theirs.fileno(), *setup.decoder_fds]
            fds += [setup.prefill_fd] if setup.prefill_fd >= 0 else []
            try:
                self._process = await _spawn(arguments, self._messages_path, fds)
            except BaseException:
                own.close()
                raise
        self.lives += 1
        self._failure = ""
        reader, self._writer = await asyncio.open_unix_connection(sock=own)
        # Its first word has no id.
        started = self._expect(0)
        self._reading = asyncio.create_task(self._read(reader))
        try:
            await asyncio.wait_for(started, START_S)
        except WorkerGone:
            raise DemoError(f"{self.name} did not start:\n{last_lines(self._messages_path)}") from None
        except TimeoutError:
            raise DemoError(f"{self.name} did not start within {START_S:g} s") from None

    async def call(self, command: m.ToWorker, answer_type: type[_AnswerT]) -> _AnswerT:
        """Send a command and return its answer.

        Raises:
            WorkerGone: the process has ended before it.
            DemoError: the worker said that it failed.
        """
        self._last_id += 1
        answer = self._expect(self._last_id)
        self._send(msgspec.structs.replace(command, id=self._last_id))
        result = await answer
        if not isinstance(result, answer_type):
            raise DemoError(f"{self.name} answered {type(command).__name__} with {type(result).__name__}")
        return result

    def tell(self, command: m.ToWorker) -> None:
        """Send a command that is not answered."""
        self._send(command)

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def wait_gone(self) -> int:
        """Return the exit status once the process has ended and everything it said was read."""
        assert self._process is not None and self._reading is not None
        await self._reading
        return await end_process(self._process)

    async def stop(self) -> list[str]:
        """End it in order, and return what was wrong with its end; before a start, do nothing."""
        if self._process is None:
            return []
        with contextlib.suppress(DemoError):
            self._send(m.Stop())
        if self._writer is not None:
            self._writer.close()
        status = await end_process(self._process)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        return bad_end(self.name, status, self._messages_path)

    def _expect(self, message_id: int) -> asyncio.Future[m.FromWorker]:
        future: asyncio.Future[m.FromWorker] = asyncio.get_running_loop().create_future()
        # Nobody may be left to look at it when everything ends at once.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._answers[message_id] = future
        return future

    def _send(self, command: m.ToWorker) -> None:
        if self._writer is None or self._writer.is_closing():
            raise WorkerGone(f"{self.name} has ended")
        self._writer.write(m.encode(command))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand on what the worker says, until it has ended."""
        try:
            while True:
                head = await reader.readexactly(LENGTH_BYTES)
                message = m.decode_answer(await reader.readexactly(int.from_bytes(head, "little")))
                if isinstance(message, m.PushMoved):
                    if self.on_moved is not None:
                        self.on_moved(self, message)
                elif isinstance(message, m.Failed):
                    self._failure = message.detail
                elif (future := self._answers.pop(message.id, None)) is not None and not future.done():
                    future.set_result(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            if self._writer is not None:
                self._writer.close()
            self._fail_all()

    def _fail_all(self) -> None:
        error: DemoError = WorkerGone(f"{self.name} has ended; what it said is in {self._messages_path}")
        if self._failure:
            error = DemoError(f"{self.name} failed: {self._failure}")
        waiting, self._answers = self._answers, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)

"""One process of a self-test.

It may hang or die: whoever started it has a deadline, and ends it. The native code of an engine may write
to stdout or stderr; what this process says goes over a copy of stdout that only it knows.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

import msgspec

from snapd.arena import HostArena
from snapd.doctor import messages as m
from snapd.doctor import pattern
from snapd.errors import SnapdError, TransportError
from snapd.mapping import map_arena
from snapd.transport.base import ArenaWriter, TicketState, Write
from snapd.transport.shm import ShmWriter
from snapd.units import KIB, MIB
from snapd.wire import FrameSplitter, MapBufferRep, MapBufferReq, decode_request, encode_frame

PIECE_BYTES: Final = 8 * MIB
_FIRST_BYTES: Final = 4 * KIB
_POLL_S: Final = 0.000_2
_REQUEST_BYTES_MAX: Final = 64 * KIB
_MAP_S: Final = 3_600.0
_PR_SET_PDEATHSIG: Final = 1
_SUPPORT: Final = "SUPPORT_"

Say = Callable[[m.FromChild], None]


def main(argument: str) -> int:
    """Run one process of a self-test, and return its exit status.

    End the process with ``os._exit``: what an engine's threads do at the interpreter's end is no finding.

    Args:
        argument: a ``messages.Task`` as JSON.
    """
    # With doctor gone, nobody would end a process that hangs.
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    # A crash is expected here, and its core would hold an arena.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    said = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def say(message: m.FromChild) -> None:
        said.write(msgspec.json.encode(message) + b"\n")

    task = msgspec.json.decode(argument, type=m.Task)
    try:
        run(task, say, sys.stdin.buffer)
    except BrokenPipeError:
        return 1
    except SnapdError as error:
        say(m.Failed(str(error)))
        return 1
    except Exception as error:
        say(m.Failed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def run(task: m.Task, say: Say, heard: BinaryIO) -> None:
    """Do a task.

    Raises:
        SnapdError: it cannot be done; says why.
    """
    if task.role == "probe":
        probe(say)
    elif task.role == "target":
        receive(task, say, heard)
    else:
        send(task, say, heard)


def probe(say: Say) -> None:
    """Load Mooncake, and tell what it can do."""
    from snapd.transport.mooncake_package import load_engine_module

    say(m.Stage("loading Mooncake"))
    module = load_engine_module()
    supports = sorted(
        name.removeprefix(_SUPPORT)
        for name, value in vars(module).items()
        if name.startswith(_SUPPORT) and value
    )
    say(m.Loaded(tuple(supports)))


# --- the target --------------------------------------------------------------------------------


def receive(task: m.Task, say: Say, heard: BinaryIO) -> None:
    """Offer an arena, and compare every byte when told to."""
    say(m.Stage("making the arena"))
    with HostArena(0, task.size_bytes, hugepages="off") as arena:
        memory = memoryview((ctypes.c_ubyte * task.size_bytes).from_address(arena.map())).cast("B")
        pattern.poison(memory)
        if task.transport == "shm":
            _hand_over(task.socket_path, arena, say)
        else:
            _offer_mooncake(task, arena, say)
        say(m.Stage("waiting for the writes"))
        if heard.readline() == m.CHECK:
            say(m.Stage("comparing the bytes"))
            say(m.Checked(pattern.difference(memory, task.seed)))
            heard.readline()


def _hand_over(socket_path: str, arena: HostArena, say: Say) -> None:
    """Give the arena's file descriptor to the writer, as the daemon would."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(socket_path)
        listener.listen(1)
        say(m.Offer(socket_path, 0, arena.size_bytes))
        connection, _ = listener.accept()
    with connection:
        splitter = FrameSplitter(_REQUEST_BYTES_MAX)
        payloads: list[bytes] = []
        while not payloads:
            data = connection.recv(_REQUEST_BYTES_MAX)
            if not data:
                raise TransportError("the writer hung up before it had the arena")
            payloads = splitter.feed(data)
        request = decode_request(payloads[0])
        if not isinstance(request, MapBufferReq):
            raise TransportError(f"the writer asked for {type(request).__name__}")
        reply = MapBufferRep(id=request.id, rank=request.rank, size_bytes=arena.size_bytes, epoch="doctor")
        fd = arena.open_fd(writable=request.writable)
        try:
            socket.send_fds(connection, [encode_frame(reply)], [fd])
        finally:
            os.close(fd)


def _offer_mooncake(task: m.Task, arena: HostArena, say: Say) -> None:
    from snapd.transport.mooncake_offerer import MooncakeOfferer

    say(m.Stage(f"starting Mooncake for {task.mooncake.protocol}"))
    offerer = MooncakeOfferer(task.mooncake, piece_bytes=0)
    _kept.append(offerer)
    say(m.Stage("registering the arena with Mooncake"))
    base_ptr = offerer.register(arena)
    say(m.Offer(offerer.address(), base_ptr, arena.size_bytes))


# Deleting an engine takes a second: the end of the process does it.
_kept: Final[list[object]] = []


# --- the writer --------------------------------------------------------------------------------


def send(task: m.Task, say: Say, heard: BinaryIO) -> None:
    """Fill a source, write all of it into the target's arena, and tell how long that took."""
    say(m.Stage("making the bytes"))
    with mmap.mmap(-1, task.size_bytes) as source:
        with memoryview(source) as memory:
            pattern.fill(memory, task.seed)
        line = heard.readline()
        if not line:
            return
        offer = msgspec.json.decode(line, type=m.Offer)
        with _writer(task, offer, say) as writer:
            seconds = move(writer, _address_of(source), offer.base_ptr, task.size_bytes, say)
            say(m.Written(seconds))
            heard.readline()


@contextlib.contextmanager
def _writer(task: m.Task, offer: m.Offer, say: Say) -> Iterator[ArenaWriter]:
    if task.transport == "shm":
        say(m.Stage("mapping the arena"))
        writer: ArenaWriter = ShmWriter(map_arena(offer.address, 0, writable=True, timeout_s=_MAP_S))
    else:
        from snapd.transport.mooncake_engines import MooncakeEngines
        from snapd.transport.mooncake_writer import MooncakeWriter

        say(m.Stage(f"starting Mooncake for {task.mooncake.protocol}"))
        engines = MooncakeEngines(task.mooncake)
        _kept.append(engines)
        epoch = secrets.token_hex(8)
        writer = MooncakeWriter(engines, offer.address, epoch, offer.base_ptr, offer.size_bytes)
    try:
        yield writer
    finally:
        writer.close()


def move(writer: ArenaWriter, source_address: int, base_ptr: int, size_bytes: int, say: Say) -> float:
    """Write *size_bytes* in pieces, and return how many seconds it took.

    Raises:
        TransportError: a write failed.
    """
    say(m.Stage("registering the source"))
    writer.register_source(source_address, size_bytes)
    # The first contact is not what is measured.
    say(m.Stage("reaching the arena"))
    _finish(writer, [Write(source_address, base_ptr, min(_FIRST_BYTES, size_bytes))])
    say(m.Stage("writing"))
    writes = [
        Write(source_address + start, base_ptr + start, min(PIECE_BYTES, size_bytes - start))
        for start in range(0, size_bytes, PIECE_BYTES)
    ]
    begun_s = time.perf_counter()
    _finish(writer, writes)
    return time.perf_counter() - begun_s


def _finish(writer: ArenaWriter, writes: list[Write]) -> None:
    ticket = writer.submit(writes)
    while not (progress := writer.poll(ticket)).is_final:
        time.sleep(_POLL_S)
    if progress.state is not TicketState.DONE:
        raise TransportError(f"a write {progress.state.value}: {progress.detail}")


def _address_of(memory: mmap.mmap) -> int:
    # The object that holds the buffer goes at once: a mapping that is held cannot be closed.
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))

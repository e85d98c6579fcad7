"""One process of a self-test.

It may hang or die: whoever started it has a deadline, and ends it. The native code of an engine may write
to stdout or stderr; what this process says goes over a copy of stdout that only it knows.
"""

import contextlib
import ctypes
import os
import resource
import secrets
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

import msgspec

from snapd import cuda
from snapd.arena import HostArena
from snapd.cudaarena import CudaArena
from snapd.doctor import messages as m
from snapd.doctor import pattern
from snapd.doctor.buffers import arena_on, neighbour_of, source_on
from snapd.errors import SnapdError, TransportError
from snapd.mapping import map_arena
from snapd.transport.base import ArenaWriter, TicketState, Write
from snapd.transport.shm import ShmWriter
from snapd.units import KIB, MIB
from snapd.wire import (
    CudaMemory,
    FrameSplitter,
    MapBufferRep,
    MapBufferReq,
    decode_request,
    encode_frame,
)

PIECE_BYTES: Final = 8 * MIB
# Between GPUs it is the number of writes that costs.
GPU_PIECE_BYTES: Final = 64 * MIB
SMALL_BYTES: Final = 4 * KIB
LATENCY_ROUNDS: Final = 32
_LATENCY_S_MAX: Final = 0.5
_POLL_S: Final = 0.000_2
# A write that may be over at once is looked at without a pause for so long.
_SPIN_S: Final = 0.002
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
    elif task.role == "gpus":
        see_gpus(task, say)
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


def see_gpus(task: m.Task, say: Say) -> None:
    """Start the driver, and tell what this process sees."""
    say(m.Stage("starting the NVIDIA driver"))
    try:
        driver = cuda.driver()
    except cuda.CudaError as error:
        say(m.Seen(why_not=str(error)))
        return
    num_gpus = len(driver.gpus)
    arena_gpus = {index for index in task.arena_gpus if index < num_gpus}
    wanted = arena_gpus | {neighbour_of(index, num_gpus) for index in arena_gpus}
    say(m.Stage("asking for the memory of the GPUs"))
    say(m.Seen(tuple(_seen(driver, gpu, with_memory=gpu.index in wanted) for gpu in driver.gpus)))


def _seen(driver: cuda.Driver, gpu: cuda.Gpu, *, with_memory: bool) -> m.SeenGpu:
    try:
        peers = tuple(
            other.index for other in driver.gpus if other is not gpu and driver.can_access_peer(gpu, other)
        )
        if not with_memory:
            return m.SeenGpu(index=gpu.index, name=gpu.name, peers=peers)
        context = cuda.Context(driver, gpu)
        try:
            free_bytes, total_bytes = context.memory_bytes()
        finally:
            context.release()
    except cuda.CudaError as error:
        return m.SeenGpu(index=gpu.index, name=gpu.name, why_not=str(error))
    return m.SeenGpu(
        index=gpu.index, name=gpu.name, peers=peers, free_bytes=free_bytes, total_bytes=total_bytes
    )


# --- the target --------------------------------------------------------------------------------


def receive(task: m.Task, say: Say, heard: BinaryIO) -> None:
    """Offer an arena, and compare every byte when told to."""
    say(m.Stage("making the arena"))
    with contextlib.ExitStack() as stack:
        arena, buffer = stack.enter_context(arena_on(task.device, task.size_bytes))
        pattern.poison(buffer.view)
        buffer.upload()
        if task.transport == "shm":
            _hand_over(task.socket_path, arena, say, stack)
        else:
            _offer_mooncake(task, arena, say)
        say(m.Stage("waiting for the writes"))
        if heard.readline() == m.CHECK:
            say(m.Stage("comparing the bytes"))
            buffer.download()
            say(m.Checked(pattern.difference(buffer.view, task.seed)))
            heard.readline()


def _hand_over(socket_path: str, arena: HostArena | CudaArena, say: Say, stack: contextlib.ExitStack) -> None:
    """Give what opens the arena to the writer, as the daemon would; the connection stays open."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(socket_path)
        listener.listen(1)
        say(m.Offer(socket_path, 0, arena.size_bytes))
        # Where there is no pidfd, the writer takes its end for the end of this process.
        connection = stack.enter_context(listener.accept()[0])
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
    memory = None
    if isinstance(arena, CudaArena):
        memory = CudaMemory(ipc_handle=arena.ipc_handle(), gpu_uuid=arena.gpu_uuid, device=arena.device)
    reply = MapBufferRep(
        id=request.id, rank=request.rank, size_bytes=arena.size_bytes, epoch="doctor", cuda=memory
    )
    if isinstance(arena, CudaArena):
        connection.sendall(encode_frame(reply))
        return
    fd = arena.open_fd(writable=request.writable)
    try:
        socket.send_fds(connection, [encode_frame(reply)], [fd])
    finally:
        os.close(fd)


def _offer_mooncake(task: m.Task, arena: HostArena | CudaArena, say: Say) -> None:
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
    with source_on(task.source_device, task.size_bytes) as source:
        pattern.fill(source.view, task.seed)
        source.upload()
        line = heard.readline()
        if not line:
            return
        offer = msgspec.json.decode(line, type=m.Offer)
        piece_bytes = PIECE_BYTES if task.device == m.HOST_DEVICE else GPU_PIECE_BYTES
        with source.current(), _writer(task, offer, say) as writer:
            say(move(writer, source.address, offer.base_ptr, task.size_bytes, piece_bytes, say))
            heard.readline()


@contextlib.contextmanager
def _writer(task: m.Task, offer: m.Offer, say: Say) -> Iterator[ArenaWriter]:
    if task.transport == "shm":
        say(m.Stage("mapping the arena"))
        arena = map_arena(offer.address, 0, writable=True, timeout_s=_MAP_S, device=task.source_device)
        writer: ArenaWriter = ShmWriter(arena)
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


def move(
    writer: ArenaWriter, source_address: int, base_ptr: int, size_bytes: int, piece_bytes: int, say: Say
) -> m.Written:
    """Write *size_bytes* in pieces, and return how long that and a small write took.

    Raises:
        TransportError: a write failed.
    """
    say(m.Stage("registering the source"))
    writer.register_source(source_address, size_bytes)
    small = Write(source_address, base_ptr, min(SMALL_BYTES, size_bytes))
    # The first contact is not what is measured.
    say(m.Stage("reaching the arena"))
    _finish(writer, [small])
    say(m.Stage("writing a little"))
    latencies_s: list[float] = []
    while len(latencies_s) < LATENCY_ROUNDS and sum(latencies_s) < _LATENCY_S_MAX:
        latencies_s.append(_finish(writer, [small]))
    say(m.Stage("writing"))
    writes = [
        Write(source_address + start, base_ptr + start, min(piece_bytes, size_bytes - start))
        for start in range(0, size_bytes, piece_bytes)
    ]
    return m.Written(_finish(writer, writes), statistics.median(latencies_s))


def _finish(writer: ArenaWriter, writes: list[Write]) -> float:
    """Return how many seconds the writes took."""
    begun_s = time.perf_counter()
    ticket = writer.submit(writes)
    while not (progress := writer.poll(ticket)).is_final:
        if time.perf_counter() - begun_s > _SPIN_S:
            time.sleep(_POLL_S)
    taken_s = time.perf_counter() - begun_s
    if progress.state is not TicketState.DONE:
        raise TransportError(f"a write {progress.state.value}: {progress.detail}")
    return taken_s

"""Load for the control plane's benchmark: daemons in processes of their own, and a client that costs little.

The client writes frames that were encoded before, with handles patched in, and reads of a reply only what
it needs. Several connections are under way at once, so that the daemon never waits for the client.
"""

import collections
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

import msgspec

from snapd import wire as w
from snapd.layout import Layout, fingerprint, snapshot_bytes
from snapd.units import NS_PER_S

R = TypeVar("R", bound=w.Reply)
ROOT: Final = Path(__file__).parent.parent
START_S: Final = 60.0
ANSWER_S: Final = 60.0
_READ_BYTES: Final = 1 << 18
_PR_SET_PDEATHSIG: Final = 1
# 48 layers, K and V of 1,024 bytes a token: 96 planes, as Qwen3-30B-A3B has them.
LAYOUT: Final = Layout((1024,) * 48, (1024,) * 48, page_size_tokens=16)
# What has as few planes as can be, where a hundred thousand snapshots must fit a small arena.
THIN_LAYOUT: Final = Layout((64,), (64,), page_size_tokens=1)
_PLACEHOLDER: Final = (1 << 63) + 0x5A5A5A5A5A5A5A
_libc: Final = ctypes.CDLL(None)

# The daemon as it is; the same without a log; and with a ticker that notes how late the loop comes to it.
PLAIN: Final = "from snapd.cli.main import main; main()"
NO_LOG: Final = "from tools.control_load import serve_without_log; serve_without_log()"
PUSHER: Final = "import sys; from tools.control_load import push; push(*sys.argv[1:])"
PROBED: Final = "from tools.control_load import serve_probed; serve_probed()"
TICK_S: Final = 0.001


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start_process(
    program: str, *arguments: str, stdout: int | None = None, site: Path | None = None
) -> "subprocess.Popen[bytes]":
    """Start a Python program that ends with this one.

    Args:
        program: the code.
        arguments: for it.
        stdout: with it the program is talked with over pipes.
        site: where snapd is, if it is not this one.
    """
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        # What lies in the present directory comes before the path.
        cwd=site or ROOT,
        env=os.environ | ({"PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))} if site else {}),
        stdin=subprocess.DEVNULL if stdout is None else subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        preexec_fn=_end_with_parent,
    )


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """End a process that was started here."""
    process.kill()
    process.communicate()


def pin(pid: int, core: int) -> None:
    """Have all threads of a process run on one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


@contextlib.contextmanager
def pinned_apart(pid: int) -> Iterator[None]:
    """Have this process and another one run on a core each, where there are two.

    Left alone, the scheduler has them on one core or on two, for seconds at a time, and a reply takes 17 or
    60 us.
    """
    cores = sorted(os.sched_getaffinity(0))
    pin(os.getpid(), cores[0])
    pin(pid, cores[-1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def cpu_ns(pid: int) -> int:
    """Return the CPU time that all threads of a process have had, ended ones left out."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns


class Daemon:
    """``snapd serve`` in a process of its own, in a directory of its own.

    Args:
        directory: made if need be.
        program: ``PLAIN``, ``NO_LOG`` or ``PROBED``.
        settings: over the defaults.
        site: where snapd is, if it is not this one.
    """

    def __init__(
        self,
        directory: Path,
        program: str = PLAIN,
        settings: Mapping[str, object] | None = None,
        site: Path | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.socket_path = str(directory / "snapd.sock")
        self.log_path = directory / "d-to-p-sync.jsonl"
        self.probe_path = directory / "probe.json"
        (directory / "snapd.toml").touch()
        wanted: dict[str, object] = {"size": "256MiB", "prefault": "false", "drain_timeout_ms": "100"} | dict(
            settings or {}
        )
        arguments = ["serve", "--config", str(directory / "snapd.toml")]
        arguments += ["--socket", self.socket_path, "--log", str(self.log_path)]
        for name, value in wanted.items():
            arguments += ["--set", f"{name}={value}"]
        os.environ["BENCH_PROBE"] = str(self.probe_path)
        self.process = start_process(program, *arguments, site=site)
        wait_until(self._accepts, self.process)

    @property
    def pid(self) -> int:
        """The daemon's process."""
        return self.process.pid

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            return sock.connect_ex(self.socket_path) == 0

    def stop(self) -> None:
        """Let it drain and end."""
        self.process.terminate()
        self.process.wait(START_S)

    def probe(self) -> None:
        """Have the ticker begin anew (SIGUSR1)."""
        self.probe_path.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)

    def late_ns(self) -> list[int]:
        """Return how late the loop came to each tick since ``probe``."""
        self.process.send_signal(signal.SIGUSR2)
        wait_until(self.probe_path.exists, self.process)
        late_ns: list[int] = msgspec.json.decode(self.probe_path.read_bytes())
        return late_ns

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def wait_until(is_there: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    """Wait for what a process brings about; it must live on meanwhile."""
    deadline_s = time.monotonic() + START_S
    while not is_there():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"{process.args!r} did not come up: status {process.poll()}")
        time.sleep(0.005)


# --- the load -----------------------------------------------------------------------------------


class _Answer(msgspec.Struct):
    type: str
    id: int = 0
    slab_handle: int = 0
    lease_id: int = 0
    commit: bool = True
    ok: bool = True
    detail: str = ""


_decode_answer: Final = msgspec.msgpack.Decoder(_Answer).decode


class Template:
    """A frame with numbers to be patched in: each stands in it as nine bytes."""

    def __init__(self, request: w.Request) -> None:
        payload = msgspec.msgpack.encode(request)
        self._parts = payload.split(msgspec.msgpack.encode(_PLACEHOLDER))
        length = sum(map(len, self._parts)) + 9 * (len(self._parts) - 1)
        self._parts[0] = length.to_bytes(w.LENGTH_BYTES, "little") + self._parts[0] + b"\xcf"
        self._parts[1:-1] = [part + b"\xcf" for part in self._parts[1:-1]]

    def fill(self, *numbers: int) -> bytes:
        """Return the frame with these numbers, in the order of the fields."""
        frame = self._parts[0]
        for number, part in zip(numbers, self._parts[1:], strict=True):
            frame += number.to_bytes(8, "big") + part
        return frame


class Wire:
    """A connection that is written to and read from in batches."""

    def __init__(self, socket_path: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.connect(socket_path)
        self._sock.settimeout(ANSWER_S)
        self._rest = b""

    def send(self, frames: Sequence[bytes]) -> None:
        """Write frames at once."""
        self._sock.sendall(b"".join(frames))

    def answers(self, count: int) -> list[_Answer]:
        """Return so many replies in the order of their ids; what the daemon tells unasked is left out.

        Raises:
            RuntimeError: one of them is a refusal.
        """
        found: list[_Answer] = []
        while len(found) < count:
            data = self._rest + self._sock.recv(_READ_BYTES)
            if not data:
                raise RuntimeError("the daemon hung up")
            start, end = 0, len(data)
            while end - start >= w.LENGTH_BYTES:
                stop = start + w.LENGTH_BYTES + int.from_bytes(data[start : start + 4], "little")
                if stop > end:
                    break
                answer = _decode_answer(data[start + 4 : stop])
                start = stop
                if answer.id:
                    found.append(answer)
                    if answer.type == "ErrorRep" or not (answer.ok and answer.commit):
                        raise RuntimeError(f"the daemon refused: {answer}")
            self._rest = data[start:]
        found.sort(key=lambda answer: answer.id)
        return found

    def one(self, request: w.Request, reply_type: type[R]) -> R:
        """Ask, and return the reply whole, as an ordinary client does."""
        self._sock.sendall(w.encode_frame(request))
        data = self._sock.recv(_READ_BYTES)
        while len(data) < w.LENGTH_BYTES + int.from_bytes(data[: w.LENGTH_BYTES], "little"):
            data += self._sock.recv(_READ_BYTES)
        return msgspec.msgpack.decode(memoryview(data)[w.LENGTH_BYTES :], type=reply_type)

    def ask(self, *requests: w.Request) -> list[_Answer]:
        """Ask and wait."""
        self.send([w.encode_frame(request) for request in requests])
        return self.answers(len(requests))

    def close(self) -> None:
        """Hang up."""
        self._sock.close()


class Lives:
    """Whole lives of sessions over several connections: prepare, start, commit, begin, vote.

    Args:
        socket_path: the daemon's.
        layout: of every snapshot; declared here.
        num_tokens: of every snapshot.
        connections: that take turns.
        batch: sessions under way on each.
    """

    def __init__(
        self,
        socket_path: str,
        layout: Layout = LAYOUT,
        num_tokens: int = 16,
        connections: int = 4,
        batch: int = 16,
    ) -> None:
        self._wires = [Wire(socket_path) for _ in range(connections)]
        self._batch = batch
        self._layout = layout
        self._num_tokens = num_tokens
        self.prints = fingerprint(layout)
        for wire in self._wires:
            wire.ask(w.HelloReq(id=1, client="bench"), w.DeclareLayoutReq(id=2, rank=0, layout=layout))
        shard_bytes = snapshot_bytes(layout, num_tokens)
        hole = _PLACEHOLDER
        self._start = Template(w.TransferStartedReq(id=hole, slab_handle=hole))
        self._commit = Template(
            w.CommitReq(
                id=hole, slab_handle=hole, rank=0, num_bytes=shard_bytes, num_tokens=num_tokens,
                checksums=((1 << 60, 1 << 61),) * layout.num_planes,
            )
        )  # fmt: skip
        self._begin = Template(
            w.BeginIngestReq(id=hole, slab_handle=hole, rank=0, layout_fingerprint=self.prints)
        )
        self._vote = Template(w.VoteReq(id=hole, slab_handle=hole, rank=0, lease_id=hole, ok=True))
        self._names = 0

    def prepare(self, request_id: int) -> w.SnapshotPrepareReceiveReqInput:
        """Return the request for another session."""
        self._names += 1
        return w.SnapshotPrepareReceiveReqInput(
            id=request_id,
            session_id=f"agent-{os.getpid()}-{self._names}",
            num_tokens=self._num_tokens,
            layout_fingerprint=self.prints,
        )

    def _begin_batch(self, wire: Wire) -> Iterator[None]:
        """Take one batch through its lives; yields whenever it waits for the daemon."""
        ids = range(1, self._batch + 1)
        # Encoded before, as it were: the encoder is C, and a session needs a name of its own.
        wire.send([w.encode_frame(self.prepare(request_id)) for request_id in ids])
        yield
        handles = [answer.slab_handle for answer in wire.answers(self._batch)]
        frames: list[bytes] = []
        for request_id, handle in zip(ids, handles, strict=True):
            frames.append(self._start.fill(request_id + 1_000, handle))
            frames.append(self._commit.fill(request_id + 2_000, handle))
            frames.append(self._begin.fill(request_id + 3_000, handle))
        wire.send(frames)
        yield
        leases = [answer.lease_id for answer in wire.answers(3 * self._batch)[2 * self._batch :]]
        votes = [self._vote.fill(n, h, lease) for n, h, lease in zip(ids, handles, leases, strict=True)]
        wire.send(votes)
        yield
        wire.answers(self._batch)

    def run(self, lives: int) -> int:
        """Take at least so many sessions through their lives, and return how many."""
        batches = -(-lives // self._batch)
        waiting = collections.deque(
            (wire, self._begin_batch(wire)) for wire in self._wires[: max(1, min(len(self._wires), batches))]
        )
        begun = len(waiting)
        while waiting:
            wire, steps = waiting.popleft()
            if next(steps, 0) is None:
                waiting.append((wire, steps))
            elif begun < batches:
                begun += 1
                waiting.append((wire, self._begin_batch(wire)))
        return batches * self._batch

    def fill(self, count: int) -> None:
        """Leave so many more snapshots READY."""
        wire = self._wires[0]
        left = count
        while left:
            batch = min(left, 256)
            left -= batch
            ids = range(1, batch + 1)
            wire.send([w.encode_frame(self.prepare(request_id)) for request_id in ids])
            handles = [answer.slab_handle for answer in wire.answers(batch)]
            wire.send([self._commit.fill(n, handle) for n, handle in zip(ids, handles, strict=True)])
            wire.answers(batch)

    def rotations(self) -> int:
        """Return how often the log was rotated."""
        return self._wires[0].one(w.StatsReq(id=1), w.StatsRep).log.rotations

    def close(self) -> None:
        """Hang up."""
        for wire in self._wires:
            wire.close()


class Cost(NamedTuple):
    """What a number of lives took: of the clock, and of the daemon's CPU, its log's thread included."""

    lives: int
    wall_s: float
    daemon_cpu_s: float

    @property
    def per_wall_s(self) -> float:
        """Lives a second of the clock."""
        return self.lives / self.wall_s

    @property
    def per_cpu_s(self) -> float:
        """Lives a second of one core of the daemon."""
        return self.lives / self.daemon_cpu_s


def time_lives(daemon: Daemon, load: Lives, lives: int) -> Cost:
    """Take sessions through their lives and return what it took."""
    cpu_before_ns, started_ns = cpu_ns(daemon.pid), time.perf_counter_ns()
    done = load.run(lives)
    wall_s = (time.perf_counter_ns() - started_ns) / NS_PER_S
    return Cost(done, wall_s, (cpu_ns(daemon.pid) - cpu_before_ns) / NS_PER_S)


# --- what runs in the daemon's process ----------------------------------------------------------


def serve_without_log() -> None:
    """``snapd serve`` that throws its records away."""
    from snapd import daemon
    from snapd.cli.main import main
    from snapd.core.records import Record
    from snapd.eventlog import EventLog

    class NoLog(EventLog):
        def write_all(self, records: Sequence[Record]) -> None:
            del records

    daemon.EventLog = NoLog  # type: ignore[attr-defined]
    main()


def serve_probed() -> None:
    """``snapd serve`` whose loop ticks every millisecond and notes how late each tick is."""
    import asyncio

    from snapd import daemon
    from snapd.cli.main import main
    from snapd.server import Server

    path = Path(os.environ["BENCH_PROBE"])
    late_ns: list[int] = []

    def watch(loop: asyncio.AbstractEventLoop) -> None:
        expected_ns = time.monotonic_ns() + int(TICK_S * NS_PER_S)

        def tick() -> None:
            nonlocal expected_ns
            now_ns = time.monotonic_ns()
            late_ns.append(max(0, now_ns - expected_ns))
            expected_ns = now_ns + int(TICK_S * NS_PER_S)
            loop.call_later(TICK_S, tick)

        def show() -> None:
            scratch = path.with_suffix(".new")
            scratch.write_bytes(msgspec.json.encode(late_ns))
            scratch.rename(path)

        loop.call_later(TICK_S, tick)
        loop.add_signal_handler(signal.SIGUSR1, late_ns.clear)
        loop.add_signal_handler(signal.SIGUSR2, show)

    class ProbedServer(Server):
        def __init__(self, config, loop, *more, **others) -> None:  # type: ignore[no-untyped-def]
            super().__init__(config, loop, *more, **others)
            watch(loop)

    daemon.Server = ProbedServer  # type: ignore[attr-defined]
    main()


@contextlib.contextmanager
def loaded(daemon: Daemon, layout: Layout = LAYOUT, **shape: int) -> Iterator[Lives]:
    """Yield a load for a daemon."""
    load = Lives(daemon.socket_path, layout, **shape)
    try:
        yield load
    finally:
        load.close()


def push(socket_path: str, mib: str) -> None:
    """Push snapshots of 64 MiB over shm, so many MiB in all, once told to; say how long it took."""
    import torch

    from snapd.client import Client
    from snapd.kv.pool import KVPool
    from snapd.kv.push import Pusher
    from snapd.units import MIB

    num_tokens = 64 * MIB // (8 * 2 * 1024)
    buffers = [torch.ones((num_tokens, 4, 128), dtype=torch.bfloat16) for _ in range(16)]
    slots = torch.arange(num_tokens)
    with Client(socket_path, timeout_s=ANSWER_S) as client:
        pusher = Pusher(client, {0: KVPool.mha(buffers[:8], buffers[8:], 16)}, send_page_keys=False)
        client.declare_layout(0, pusher.layout)
        print("ready", flush=True)
        sys.stdin.readline()
        started_s = time.perf_counter()
        for number in range(int(mib) // 64):
            result = pusher.push(f"pushed-{number % 2}", range(num_tokens), slots)
            if not result.ok:
                raise RuntimeError(f"a push failed: {result}")
        seconds = time.perf_counter() - started_s
        print(msgspec.json.encode({"mib": int(mib), "seconds": seconds}).decode(), flush=True)
        pusher.close()

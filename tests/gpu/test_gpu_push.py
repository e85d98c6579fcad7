"""Pushes of pools on real GPUs: a real daemon with an arena on a GPU, mapped and over Mooncake's NVLink."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU that torch can use", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[1] / "integration"))

from daemon_process import DaemonProcess, clean_environment
from kv_cases import KINDS, MHA, TOKENS, Kind, make_pool, random_slots

from snapd import cuda
from snapd.client import Client
from snapd.core.events import State
from snapd.errors import InvalidRequest, Reason
from snapd.kv import devicepush
from snapd.kv.control import NotifyControl
from snapd.kv.copy import gather
from snapd.kv.devicecopy import CopyJobs
from snapd.kv.devicemapped import DeviceMappedJob
from snapd.kv.devicestaging import allocate_gpu
from snapd.kv.flights import FeedFlight, Flights
from snapd.kv.pool import KVPool
from snapd.kv.push import Pusher, PushJob, PushSettings
from snapd.kv.slabs import Slabs
from snapd.kv.stagedjob import StagedJob
from snapd.kv.torchcopy import TorchGatherJob, TorchScatterJob
from snapd.layout import Namespace
from snapd.mooncakeconfig import MooncakeConfig

HAS_MOONCAKE = importlib.util.find_spec("mooncake") is not None
NUM_GPUS = torch.cuda.device_count()
NUM_SLOTS = 512
KIB, MIB = 1 << 10, 1 << 20
PATIENCE_S = 60.0
# Some tenths of a second: host code of a few ms runs meanwhile.
SLEEP_CYCLES = 1_000_000_000
QUIET = MooncakeConfig(settings={"MC_LOG_LEVEL": "ERROR"})
# Many pieces even of a small snapshot, and a ring that is smaller than it.
SMALL = PushSettings(
    piece_bytes=4 * KIB,
    gpu_piece_bytes=4 * KIB,
    ring_bytes=16 * KIB,
    gpu_in_flight_bytes_max=8 * KIB,
    map_arenas=False,
)
BIG = Kind(k_rows=((4, 128),) * 8, v_rows=((4, 128),) * 8)
BIG_SLOTS, BIG_TOKENS = 24_000, 20_000

TORCH = CopyJobs("torch", TorchGatherJob, TorchScatterJob, is_async=True)
no_mooncake = pytest.mark.skipif(not HAS_MOONCAKE, reason="Mooncake is not installed")
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="this machine has not two GPUs")
TRANSPORTS = ["shm", pytest.param("nvlink_intra", marks=no_mooncake)]
# Where the pools are, and where the arena is: on one GPU, and on two.
PLACES = [("cuda:0", "cuda:0"), pytest.param(("cuda:1", "cuda:0"), marks=two_gpus)]


@contextlib.contextmanager
def running(transport: str, device: str = "cuda:0", **settings: Any) -> Iterator[DaemonProcess]:
    if transport != "shm":
        settings |= {"transport": "mooncake", "mooncake.protocol": transport}
    with tempfile.TemporaryDirectory(prefix="snapd-") as name:
        daemon = DaemonProcess(Path(name), {"device": device, "size": "64MiB"} | settings)
        try:
            yield daemon
        finally:
            daemon.stop()
        assert "Traceback" not in daemon.stderr, daemon.stderr


@pytest.fixture(scope="module")
def daemons() -> Iterator[Any]:
    """A function that returns the module's daemon for a transport; its arena is on GPU 0."""
    with contextlib.ExitStack() as stack:
        started: dict[str, DaemonProcess] = {}

        def daemon(transport: str) -> DaemonProcess:
            if transport not in started:
                started[transport] = stack.enter_context(running(transport, size="512MiB"))
            return started[transport]

        yield daemon


def on_gpu(host: KVPool, kind: Kind, device: str) -> KVPool:
    """Return a pool with the same bytes on a GPU."""
    rows = [*kind.k_rows, *kind.v_rows]
    buffers = [
        place.rows.to(device).view(kind.dtype).view(host.num_slots, *row)
        for place, row in zip(host.planes, rows, strict=True)
    ]
    half = len(kind.k_rows)
    if not kind.v_rows:
        return KVPool.mla(buffers, kind.page_size_tokens)
    return KVPool.mha(buffers[:half], buffers[half:], kind.page_size_tokens)


class D:
    """A pusher with pools on GPUs, what they hold, and a P that declared the layout and looks at slabs."""

    def __init__(
        self,
        daemon: DaemonProcess,
        kind: Kind = MHA,
        devices: tuple[str, ...] = ("cuda:0",),
        num_slots: int = NUM_SLOTS,
        settings: PushSettings = SMALL,
    ) -> None:
        self.kind = kind
        self.num_slots = num_slots
        self.client = Client(str(daemon.socket_path), timeout_s=PATIENCE_S)
        self.host = {rank: make_pool(kind, num_slots, seed=rank + 1) for rank in range(len(devices))}
        self.pools = {rank: on_gpu(self.host[rank], kind, device) for rank, device in enumerate(devices)}
        self.namespace = Namespace(tenant=f"tenant-{time.monotonic_ns()}")
        self.pusher = Pusher(self.client, self.pools, self.namespace, settings=settings, mooncake=QUIET)
        for rank in self.pools:
            self.client.declare_layout(rank, self.pusher.layout)
        self.slabs = Slabs(self.client, writable=False)

    def slots(self, num_tokens: int) -> torch.Tensor:
        return random_slots(self.kind, self.num_slots, num_tokens, seed=7)

    def start(self, num_tokens: int = len(TOKENS), **options: Any) -> PushJob:
        return self.pusher.start("s", range(num_tokens), self.slots(num_tokens), **options)

    def check_ready(self, job: PushJob, change: int = 0) -> None:
        """The slab holds the slots' bytes, the daemon the sums of them, and nothing is under way.

        Args:
            change: what was added to every byte of the pools before they were gathered.
        """
        assert job.result.ok and job.result.drained, job.result
        grant = job.grant
        assert grant is not None
        assert self.client.get(grant.slab_handle).session.state is State.READY
        for rank_grant in grant.ranks:
            host = self.host[rank_grant.rank]
            for place in host.planes:
                place.rows.add_(change)
            planes = [
                torch.empty(grant.num_tokens * place.stride_bytes, dtype=torch.uint8) for place in host.planes
            ]
            sums = gather(host, self.slots(grant.num_tokens), planes)
            got = self.slabs.planes(rank_grant, grant.num_tokens, grant.epoch)
            for index, (plane, wanted) in enumerate(zip(got, planes, strict=True)):
                assert torch.equal(plane.cpu(), wanted), f"rank {rank_grant.rank}, plane {index}"
            lease = self.client.begin_ingest(
                grant.slab_handle, rank_grant.rank, self.pusher.layout_fingerprint, session_id="s"
            )
            self.client.vote(
                grant.slab_handle, rank_grant.rank, lease.lease_id,
                ok=False, reason=Reason.INGEST_FAILED, keep=True, epoch=grant.epoch,
            )  # fmt: skip
            assert [tuple(pair) for pair in lease.checksums] == [tuple(pair) for pair in sums]
        assert (self.pusher.in_flight_bytes, self.pusher.lingering) == (0, 0)

    def close(self) -> None:
        self.slabs.close()
        self.pusher.close()
        self.client.close()


@contextlib.contextmanager
def deployed(daemon: DaemonProcess, *arguments: Any, **options: Any) -> Iterator[D]:
    d = D(daemon, *arguments, **options)
    try:
        yield d
    finally:
        for session in d.client.list_sessions(limit=100).sessions:
            d.client.abort(session.slab_handle, drained=True)
        d.close()


def finish(job: PushJob, max_bytes: int = 64 * MIB) -> PushJob:
    deadline_s = time.monotonic() + PATIENCE_S
    while not job.step(max_bytes):
        assert time.monotonic() < deadline_s, "the push does not end"
        job.wait()
    return job


def sleep_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        return stream.record_event()


# --- what arrives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_pool_arrives_bit_for_bit(
    daemons: Any, transport: str, name: str, places: tuple[str, str]
) -> None:
    with deployed(daemons(transport), KINDS[name], (places[0],)) as d:
        job = finish(d.start())
        is_mapped = transport == "shm"
        assert isinstance(job, DeviceMappedJob if is_mapped else StagedJob)
        d.check_ready(job)
        assert d.pusher.staging_bytes == (0 if is_mapped else SMALL.ring_bytes)


@no_mooncake
@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_over_nvlink_bytes_go_straight_into_an_arena_that_can_be_mapped(
    daemons: Any, name: str, places: tuple[str, str]
) -> None:
    with deployed(daemons("nvlink_intra"), KINDS[name], (places[0],), settings=PushSettings()) as d:
        job = finish(d.start())
        assert isinstance(job, DeviceMappedJob)
        d.check_ready(job)
        assert d.pusher.staging_bytes == 0


@two_gpus
@pytest.mark.parametrize("name", KINDS)
def test_an_arena_that_the_pools_gpu_does_not_reach_is_copied_to(
    daemons: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a host whose GPUs have no peer access, where the driver copies through the host's memory."""
    monkeypatch.setattr(cuda.Driver, "can_access_peer", lambda *_: False)
    with deployed(daemons("shm"), KINDS[name], ("cuda:1",)) as d:
        job = finish(d.start())
        assert isinstance(job, StagedJob)
        d.check_ready(job)
        assert d.pusher.staging_bytes == SMALL.ring_bytes


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_large_snapshot_arrives_in_large_pieces(
    daemons: Any, transport: str, places: tuple[str, str]
) -> None:
    settings = PushSettings(
        gpu_piece_bytes=16 * MIB, ring_bytes=64 * MIB, gpu_in_flight_bytes_max=32 * MIB, map_arenas=False
    )
    with deployed(daemons(transport), BIG, (places[0],), BIG_SLOTS, settings) as d:
        job = finish(d.start(BIG_TOKENS))
        assert job.result.bytes == BIG_TOKENS * 16 * 1024 == job.bytes_done
        d.check_ready(job)


@no_mooncake
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_mooncakes_threads_ask_for_the_pieces_of_a_ring(
    daemons: Any, places: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[FeedFlight] = []
    submit_feed = Flights.submit_feed

    def note(*arguments: Any, **options: Any) -> FeedFlight:
        fed.append(submit_feed(*arguments, **options))
        return fed[-1]

    monkeypatch.setattr(Flights, "submit_feed", note)
    with deployed(daemons("nvlink_intra"), BIG, (places[0],), BIG_SLOTS, SMALL_OF_BIG) as d:
        # Triton itself is asked for the first piece only.
        gpukernels = pytest.importorskip("snapd.kv.gpukernels", reason="Triton is not installed")
        asked: list[object] = []
        launch = gpukernels.launch
        monkeypatch.setattr(gpukernels, "launch", lambda *a, **o: asked.append(launch(*a, **o)) or asked[-1])
        job = finish(d.start(BIG_TOKENS))
        assert len(fed) == len(asked) == 1
        assert job.bytes_done == job.result.bytes > 100 * SMALL_OF_BIG.gpu_piece_bytes
        d.check_ready(job)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_torchs_operations_do_the_same(daemons: Any, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devicepush, "choose_copy", lambda device: TORCH)
    for name in ("mha, pages", "odd"):
        with deployed(daemons(transport), KINDS[name]) as d:
            d.check_ready(finish(d.start()))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pushes_follow_one_another(daemons: Any, transport: str) -> None:
    with deployed(daemons(transport)) as d:
        for num_tokens in (80, 33, 1, 80):
            d.check_ready(finish(d.start(num_tokens, use_resident_hint=False), max_bytes=1))


@no_mooncake
def test_without_a_control_connection_the_commit_goes_with_the_transfer() -> None:
    with running("nvlink_intra", **{"mooncake.notify": "commit"}) as daemon, deployed(daemon) as d:
        hello = d.client.connect()
        pusher = Pusher(NotifyControl(hello), d.pools, d.namespace, settings=SMALL, mooncake=QUIET)
        grant = d.pusher.prepare("s", range(80))
        job = finish(pusher.start_granted(grant, d.slots(80)))
        assert job.result.ok, job.result
        deadline_s = time.monotonic() + PATIENCE_S
        while d.client.get(grant.slab_handle).session.state is not State.READY:
            assert time.monotonic() < deadline_s, "the notification did not come"
            time.sleep(0.01)
        d.check_ready(job)
        pusher.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@two_gpus
def test_every_rank_has_a_gpu_of_its_own(transport: str) -> None:
    with tempfile.TemporaryDirectory(prefix="snapd-") as name:
        directory = Path(name)
        settings: dict[str, Any] = {}
        if transport != "shm":
            settings = {"transport": "mooncake", "mooncake.protocol": transport}
        daemon = TwoArenas(directory, settings)
        try:
            with deployed(daemon, MHA, ("cuda:0", "cuda:1")) as d:
                d.check_ready(finish(d.start()))
            with deployed(daemon, MHA, ("cuda:1", "cuda:0")) as d:
                d.check_ready(finish(d.start()))
        finally:
            daemon.stop()


class TwoArenas(DaemonProcess):
    """A daemon with an arena on each of two GPUs."""

    def _start(self) -> Any:
        # ``size`` from a higher level would set every listed arena.
        self.overrides.pop("size", None)
        self.config_path.write_text(
            "".join(
                f'[[arena]]\nrank = {rank}\ndevice = "cuda:{rank}"\nsize_bytes = {64 * MIB}\n'
                for rank in (0, 1)
            )
        )
        return super()._start()


# --- order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("with_event", [True, False], ids=["event", "current stream"])
def test_a_push_comes_after_the_pass_that_writes_the_pages_and_no_step_waits_for_it(
    daemons: Any, transport: str, with_event: bool
) -> None:
    with deployed(daemons(transport)) as d:
        # What is made or opened once may wait for the GPU.
        finish(d.start(use_resident_hint=False))
        torch.cuda.synchronize()
        forward = torch.cuda.Stream("cuda:0")
        asleep = sleep_on(forward)
        with torch.cuda.stream(forward):
            for place in d.pools[0].planes:
                place.rows.add_(1)
            written = forward.record_event()
            job = d.start(use_resident_hint=False, after=[written] if with_event else None)
        for _ in range(20):
            assert not job.step(MIB)
            assert job.bytes_done == 0
        started_s = time.monotonic()
        job.wait()
        assert time.monotonic() - started_s < 0.1
        assert not asleep.query(), "a step waited for the GPU"
        d.check_ready(finish(job), change=1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_once_a_pusher_is_made_nothing_is_compiled(daemons: Any, transport: str) -> None:
    gpukernels = pytest.importorskip("snapd.kv.gpukernels", reason="Triton is not installed")
    with deployed(daemons(transport)) as d:
        compiled = len(gpukernels._move.device_caches[0][0])
        d.check_ready(finish(d.start()))
        assert len(gpukernels._move.device_caches[0][0]) == compiled


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_an_event_a_push_sends_what_was_there(daemons: Any, transport: str) -> None:
    """What the test above would see if events were not waited for."""
    with deployed(daemons(transport)) as d:
        finish(d.start(use_resident_hint=False))
        torch.cuda.synchronize()
        forward = torch.cuda.Stream("cuda:0")
        asleep = sleep_on(forward)
        with torch.cuda.stream(forward):
            for place in d.pools[0].planes:
                place.rows.add_(1)
        job = finish(d.start(use_resident_hint=False, after=()))
        assert not asleep.query()
        d.check_ready(job)
        torch.cuda.synchronize()


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_step_waits_for_what_the_default_stream_does(
    daemons: Any, transport: str, places: tuple[str, str], is_first: bool
) -> None:
    """Streams that others make may wait for the default one; an engine's passes run on it."""
    with deployed(daemons(transport), devices=(places[0],)) as d:
        # What is made or opened once may wait for the GPU here.
        d.pusher.connect()
        if not is_first:
            finish(d.start(use_resident_hint=False))
        torch.cuda.synchronize()
        asleep = sleep_on(torch.cuda.default_stream(places[0]))
        # Four pieces are gathered, and one of them is to be written, long before the sleep is over.
        job = d.start(use_resident_hint=False, after=())
        longest_s = 0.0
        deadline_s = time.monotonic() + PATIENCE_S
        steps_asleep = 0
        while not job.done:
            assert time.monotonic() < deadline_s, "the push does not end"
            started_s = time.monotonic()
            job.step(MIB)
            longest_s = max(longest_s, time.monotonic() - started_s)
            steps_asleep += not asleep.query()
            time.sleep(0.001)
        assert longest_s < 0.1, f"a step took {longest_s:.3f} s"
        assert steps_asleep >= 2
        d.check_ready(job)
        torch.cuda.synchronize()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_push_that_is_cancelled_behind_the_gpu_gives_drain_proof_when_it_is_true(
    daemons: Any, transport: str
) -> None:
    with deployed(daemons(transport)) as d:
        finish(d.start(use_resident_hint=False))
        torch.cuda.synchronize()
        forward = torch.cuda.Stream("cuda:0")
        asleep = sleep_on(forward)
        job = d.start(use_resident_hint=False, after=[asleep])
        # What a push through the ring launches, threads launch.
        while not job.step(MIB) and transport != "shm" and d.pusher._gpus.ring_for(0).lent == 0:
            job.wait()
        result = job.cancel(Reason.SESSION_NOT_RESIDENT)
        assert not asleep.query()
        assert job.grant is not None
        if transport == "shm":
            assert not result.drained and d.pusher.lingering == 1
        else:
            # Nothing was written to the arena; the ring's buffers are kept meanwhile.
            assert result.drained and d.pusher._gpus.ring_for(0).lent > 0
        torch.cuda.synchronize()
        d.pusher.poll()
        assert d.pusher.lingering == 0
        assert d.client.stats().core.quarantined_shards == 0
        if transport != "shm":
            assert d.pusher._gpus.ring_for(0).lent == 0
        d.check_ready(finish(d.start(use_resident_hint=False)))


# --- who dies ------------------------------------------------------------------------------------------

CHILD = """
import sys
import time
sys.path.append({integration!r})
sys.path.append({here!r})
import torch
from kv_cases import random_slots
from snapd import cuda
from snapd.client import Client
from snapd.kv.push import Pusher
from snapd.layout import Namespace
import test_gpu_push as t

with Client({socket!r}, timeout_s=60) as client:
    pool = t.on_gpu(t.make_pool(t.BIG, t.BIG_SLOTS, seed=1), t.BIG, "cuda:0")
    pusher = Pusher(client, {{0: pool}}, Namespace(tenant="child"), settings=t.SMALL_OF_BIG, mooncake=t.QUIET)
    client.declare_layout(0, pusher.layout)
    slots = random_slots(t.BIG, t.BIG_SLOTS, t.BIG_TOKENS, seed=7)
    # Else the whole gather would be over before anybody looks.
    side = torch.cuda.Stream("cuda:0")
    after = [t.sleep_on(side) for _ in range(10 if {is_mapped} else 0)]
    job = pusher.start("s", range(t.BIG_TOKENS), slots, after=after)
    assert job.grant is not None, job.result
    for _ in range(3):
        assert not job.step(1), job.result
    print(job.grant.slab_handle, flush=True)
    time.sleep(60)
"""
SMALL_OF_BIG = PushSettings(
    piece_bytes=MIB, gpu_piece_bytes=MIB, ring_bytes=4 * MIB, gpu_in_flight_bytes_max=2 * MIB,
    map_arenas=False,
)  # fmt: skip


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_attempt_of_a_killed_d_ends_at_once_and_its_slab_waits(transport: str) -> None:
    """Its exit is no drain proof: a fork may keep its context, and what it launched, alive."""
    here = Path(__file__).parent
    with (
        running(transport, size="512MiB", quarantine_ms=3_600_000) as daemon,
        Client(str(daemon.socket_path), timeout_s=PATIENCE_S) as client,
    ):
        script = textwrap.dedent(CHILD).format(
            integration=str(here.parent / "integration"),
            here=str(here),
            socket=str(daemon.socket_path),
            is_mapped=transport == "shm",
        )
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=clean_environment()
        ) as child:
            assert child.stdout is not None
            said = ""
            while not said.strip().isdigit():
                said = child.stdout.readline()
                assert said, "the child has ended"
            handle = int(said)
            assert client.get(handle).session.state is State.TRANSFERRING
            child.kill()
            child.wait()
        deadline_s = time.monotonic() + PATIENCE_S
        while client.get(handle).session.state is not State.ABORTED:
            assert time.monotonic() < deadline_s, "the attempt did not end"
            time.sleep(0.01)
        assert client.get(handle).session.reason == Reason.WRITER_GONE
        assert client.stats().core.quarantined_shards == 1


FORKING_CHILD = """
import os
import sys
import time
sys.path.append({integration!r})
sys.path.append({here!r})
import torch
from kv_cases import random_slots
from snapd import cuda
from snapd.client import Client
from snapd.kv.push import Pusher
from snapd.layout import Namespace
import test_gpu_push as t

with Client({socket!r}, timeout_s=60) as client:
    pool = t.on_gpu(t.make_pool(t.MHA, t.NUM_SLOTS, seed=1), t.MHA, "cuda:0")
    pusher = Pusher(client, {{0: pool}}, Namespace(tenant="child"), settings=t.SMALL, mooncake=t.QUIET)
    client.declare_layout(0, pusher.layout)
    slots = random_slots(t.MHA, t.NUM_SLOTS, 80, seed=7)
    pid = os.fork()
    if not pid:
        time.sleep(120)
        os._exit(0)
    side = torch.cuda.Stream("cuda:0")
    after = [t.sleep_on(side) for _ in range(8)]
    job = pusher.start("s", range(80), slots, after=after)
    assert job.grant is not None, job.result
    for _ in range(3):
        assert not job.step(1), job.result
    print(job.grant.slab_handle, pid, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_d_had_launched_lands_in_no_slab_that_is_free_though_a_fork_of_it_lives() -> None:
    """The fork holds D's descriptors of the device, and so keeps D's context: it lands, in quarantine."""
    here = Path(__file__).parent
    with (
        running("shm", quarantine_ms=3_600_000) as daemon,
        Client(str(daemon.socket_path), timeout_s=PATIENCE_S) as client,
        contextlib.ExitStack() as stack,
    ):
        slabs = Slabs(client, writable=False)
        stack.callback(slabs.close)
        arena: Any = slabs.arena(0, client.connect().epoch)
        memory = torch.as_tensor(arena.view(0, arena.size_bytes), device=arena.device)
        before = memory.clone()
        started_s = time.monotonic()
        sleep_on(torch.cuda.Stream("cuda:0")).synchronize()
        one_sleep_s = time.monotonic() - started_s
        script = textwrap.dedent(FORKING_CHILD).format(
            integration=str(here.parent / "integration"), here=str(here), socket=str(daemon.socket_path)
        )
        child = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=clean_environment()
            )
        )
        stack.callback(child.kill)
        assert child.stdout is not None
        said: list[str] = []
        while len(said) != 2 or not all(word.isdigit() for word in said):
            line = child.stdout.readline()
            assert line, "the child has ended"
            said = line.split()
        handle, fork_pid = (int(word) for word in said)
        stack.callback(os.kill, fork_pid, signal.SIGKILL)
        child.kill()
        child.wait()
        deadline_s = time.monotonic() + PATIENCE_S
        while client.get(handle).session.state is not State.ABORTED:
            assert time.monotonic() < deadline_s, "the attempt did not end"
            time.sleep(0.01)
        os.kill(fork_pid, 0)  # It lives.
        assert torch.equal(memory, before), "it landed before D was gone: the sleeps were too short"
        # Twice as long as D's eight sleeps would take, were they to go on.
        until_s = time.monotonic() + 16 * one_sleep_s
        while time.monotonic() < until_s:
            landed = int((memory != before).sum())
            if landed:
                is_free = client.stats().core.quarantined_shards == 0
                assert not is_free, f"{landed} bytes landed in a slab that is free"
            time.sleep(0.05)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_pusher_goes_on_with_the_next_daemon(transport: str) -> None:
    with running(transport) as daemon, deployed(daemon) as d:
        d.check_ready(finish(d.start()))
        daemon.kill()
        daemon.restart()
        d.client.connect()
        d.check_ready(finish(d.start()))


def test_a_push_whose_daemon_is_gone_ends(daemons: Any) -> None:
    with running("shm") as daemon:
        d = D(daemon)
        job = d.start(after=())
        job.step(1)
        daemon.kill()
        finish(job)
        assert not job.result.ok
        d.close()


# --- what is refused -----------------------------------------------------------------------------------


def test_an_arena_on_the_host_is_no_place_for_a_gpus_bytes() -> None:
    with running("shm", "cpu") as daemon, deployed(daemon) as d:
        result = d.start().result
        assert not result.ok and 'device = "cuda:N"' in result.detail
        assert d.client.stats().core.open_sessions == 0


def test_an_arena_on_a_gpu_is_no_place_for_the_hosts_bytes(daemons: Any) -> None:
    with deployed(daemons("shm")) as d:
        pusher = Pusher(d.client, d.host, d.namespace)
        result = pusher.start("s", range(80), d.slots(80)).result
        assert not result.ok and 'device = "cpu"' in result.detail
        pusher.close()


def test_slots_on_the_gpu_are_refused(daemons: Any) -> None:
    with deployed(daemons("shm")) as d, pytest.raises(InvalidRequest, match="on the CPU is wanted"):
        d.pusher.start("s", range(80), d.slots(80).to("cuda:0"))


# --- staging memory ------------------------------------------------------------------------------------


@pytest.mark.alone
def test_staging_memory_is_an_allocation_of_its_own_and_is_given_back() -> None:
    torch.zeros(1, device="cuda:0")
    torch.cuda.synchronize()
    free_bytes = torch.cuda.mem_get_info(0)[0]
    reserved_bytes = torch.cuda.memory_reserved(0)
    memory = allocate_gpu(torch.device("cuda:0"), 256 * MIB)
    assert memory.numel() == 256 * MIB and memory.device == torch.device("cuda:0")
    assert torch.cuda.memory_reserved(0) == reserved_bytes, "it is not torch's"
    assert free_bytes - torch.cuda.mem_get_info(0)[0] >= 256 * MIB
    memory.fill_(7)
    part = memory[100:200]
    del memory
    assert int(part.sum()) == 700
    del part
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info(0)[0] > free_bytes - 32 * MIB


@no_mooncake
def test_a_pusher_that_is_closed_in_mid_write_gives_its_memory_back_when_that_is_over(daemons: Any) -> None:
    with deployed(daemons("nvlink_intra")) as d:
        finish(d.start(use_resident_hint=False))
        torch.cuda.synchronize()
        sleep_on(torch.cuda.default_stream("cuda:0"))
        job = d.start(use_resident_hint=False, after=())
        deadline_s = time.monotonic() + PATIENCE_S
        while not job.step(MIB) and not d.pusher.in_flight_bytes:
            assert time.monotonic() < deadline_s, "no piece is written"
        job.cancel()
        started_s = time.monotonic()
        d.pusher.close()
        assert time.monotonic() - started_s < 12
        torch.cuda.synchronize()
        while d.pusher.staging_bytes:
            assert time.monotonic() < deadline_s, "staging memory is kept"
            time.sleep(0.01)


@pytest.mark.alone
@no_mooncake
def test_a_closed_pusher_gives_its_staging_memory_back(daemons: Any) -> None:
    daemon = daemons("nvlink_intra")
    settings = PushSettings(map_arenas=False)
    with deployed(daemon) as d:
        finish(d.start())
        torch.cuda.synchronize()
        free_bytes = torch.cuda.mem_get_info(0)[0]
        with deployed(daemon, settings=settings) as other:
            other.check_ready(finish(other.start()))
            assert other.pusher.staging_bytes == settings.ring_bytes
            assert free_bytes - torch.cuda.mem_get_info(0)[0] >= settings.ring_bytes
        torch.cuda.synchronize()
        assert torch.cuda.mem_get_info(0)[0] > free_bytes - 64 * MIB


# --- a dead daemon's memory ----------------------------------------------------------------------------


def wait_for_memory(free_bytes: int) -> None:
    """Wait until so much of GPU 0 is free."""
    deadline_s = time.monotonic() + PATIENCE_S
    while torch.cuda.mem_get_info(0)[0] < free_bytes:
        assert time.monotonic() < deadline_s, f"{free_bytes - torch.cuda.mem_get_info(0)[0]} bytes are kept"
        time.sleep(0.02)


@pytest.mark.alone
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_dead_daemons_memory_is_free_though_nobody_calls(transport: str) -> None:
    with running(transport, size="1GiB") as daemon, deployed(daemon, settings=PushSettings()) as d:
        job = finish(d.start())
        d.check_ready(job)
        torch.cuda.synchronize()
        free_bytes = torch.cuda.mem_get_info(0)[0]
        daemon.kill()
        # Its context is free in any case, some hundreds of MiB.
        wait_for_memory(free_bytes + 1024 * MIB)
        daemon.restart()
        d.client.connect()
        d.check_ready(finish(d.start()))


@pytest.mark.alone
@no_mooncake
def test_what_mooncake_mapped_of_a_dead_daemon_is_free_when_the_next_is_known() -> None:
    with running("nvlink_intra", size="1GiB") as daemon, deployed(daemon) as d:
        d.check_ready(finish(d.start()))
        assert d.pusher.staging_bytes
        torch.cuda.synchronize()
        free_bytes = torch.cuda.mem_get_info(0)[0]
        daemon.kill()
        daemon.restart()
        d.client.connect()
        d.check_ready(finish(d.start()))
        wait_for_memory(free_bytes - 64 * MIB)

"""Whole pushes into a daemon's arena on a GPU, as ratios to one write of the same bytes."""

import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from snapd.client import Client
from snapd.kv.devicejob import finish
from snapd.kv.devicemapped import DeviceMappedJob
from snapd.kv.gpucopy import GpuGatherJob
from snapd.kv.push import Pusher, PushJob, PushSettings
from snapd.kv.stagedjob import StagedJob
from snapd.kv.writers import current
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import Write
from snapd.transport.mooncake_engine import MooncakeEngine, WriteState
from snapd.units import GIB, MIB, MS_PER_S, align_up
from tools.gpu_data import LEAD_CYCLES, Data
from tools.gpu_link import Link, LinkEngine, link_writers

_START_S = 60.0
# Room for what is pushed and what is written raw.
_SNAPSHOTS = 2
_ARENA_SLACK_BYTES = 64 * MIB


@contextlib.contextmanager
def daemon_process(**settings: object) -> Iterator[str]:
    """Run a daemon with *settings*; yield its socket's path when it listens."""
    with tempfile.TemporaryDirectory(prefix="snapd-") as name:
        path = f"{name}/s"
        command = [sys.executable, "-m", "snapd.cli.main", "serve", "--socket", path, "--log", f"{name}/log"]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        said = Path(name) / "stderr"
        with said.open("wb") as stderr:
            process = subprocess.Popen(command, stderr=stderr)
        try:
            deadline_s = time.monotonic() + _START_S
            while not _accepts(path):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"the daemon does not listen: {said.read_text()[-2_000:]}")
                time.sleep(0.05)
            yield path
        finally:
            process.terminate()
            try:
                process.wait(_START_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(path) == 0


# How bytes go over nvlink_intra: straight into the arena, or through the ring, which Mooncake reads.
PUSH_SETTINGS: Final = {
    "mapped": PushSettings(),
    "ring": PushSettings(map_arenas=False),
    "ring of 1 GiB": PushSettings(
        map_arenas=False, ring_bytes=GIB, gpu_piece_bytes=256 * MIB, gpu_in_flight_bytes_max=GIB
    ),
}


class PushBench:
    """Pushes of *data* into one daemon, and raw writes of as many bytes into the same arena.

    With *link* both are behind it.
    """

    def __init__(self, client: Client, data: Data, settings: PushSettings, link: Link | None = None) -> None:
        self.client = client
        self.data = data
        self.slots = data.slots(is_random=True)
        self.tokens = list(range(self.slots.numel()))
        self.config = MooncakeConfig(settings={"MC_LOG_LEVEL": "ERROR"})
        self.link = link
        writer_for = None
        if link is not None:
            bytes_max = settings.gpu_in_flight_bytes_max
            writer_for = link_writers(self.config, link, data.slab.device, bytes_max)
        self.pusher = Pusher(
            client, {0: data.pool},
            mooncake=self.config, send_page_keys=False, settings=settings, writer_for=writer_for,
        )  # fmt: skip
        client.declare_layout(0, self.pusher.layout)
        self.hello = client.connect()
        self.device = data.slab.device
        self._raw: MooncakeEngine | None = None
        self._number = 0

    def push_ms(self) -> dict[str, float]:
        """Push once; return the whole wall time (``call``), and that from the grant on (``move``)."""
        torch.cuda.synchronize(self.device)
        started_s = time.perf_counter()
        job = self._start()
        granted_s = time.perf_counter()
        self._finish(job)
        ended_s = time.perf_counter()
        self.client.abort(job.result.slab_handle, drained=True)
        return {"call": (ended_s - started_s) * MS_PER_S, "move": (ended_s - granted_s) * MS_PER_S}

    def gpu_ms(self) -> float:
        """Push once; return what the GPU takes, from the first byte gathered to the last in the arena."""
        torch.cuda.synchronize(self.device)
        job = self._start()
        stream = self.pusher._gpus.stream_for(self.device)
        assert stream is not None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            # Until the host has launched what it can.
            torch.cuda._sleep(LEAD_CYCLES)  # type: ignore[no-untyped-call]
        start.record(stream)
        job.step(64 * MIB)
        if isinstance(job, DeviceMappedJob):
            end.record(stream)
        else:
            # Through the ring the host is part of it, so the end is seen as that of a raw write is.
            assert isinstance(job, StagedJob)
            (shard,) = job._shards
            if shard.feeding is not None:
                shard.feeding.feed.wait(_START_S)
            else:
                self._finish(job)
            end.record(torch.cuda.current_stream(self.device))
        self._finish(job)
        end.synchronize()
        self.client.abort(job.result.slab_handle, drained=True)
        return float(start.elapsed_time(end))

    def _start(self) -> PushJob:
        self._number += 1
        return self.pusher.start(f"s{self._number}", self.tokens, self.slots, after=())

    def _finish(self, job: PushJob) -> None:
        while not job.step(64 * MIB):
            job.wait()
        if not job.result.ok:
            raise RuntimeError(f"a push failed: {job.result}")

    def gather_ms(self) -> float:
        """Gather once into planes of this GPU; return the wall time."""
        torch.cuda.synchronize(self.device)
        started_s = time.perf_counter()
        finish(GpuGatherJob(self.data.pool, self.slots, self.data.planes, after=()))
        return (time.perf_counter() - started_s) * MS_PER_S

    def raw_ms(self) -> dict[str, float]:
        """Write the bytes once, as they lie, with one Mooncake write; return the wall and the GPU's time."""
        with current(self.device):
            assert self.hello.mooncake is not None
            segment_name = self.hello.mooncake.segment_name
            if self._raw is None:
                # The package itself: whatever snapd does around it counts against a push.
                protocol = self.hello.mooncake.protocol
                config = msgspec.structs.replace(self.config, protocol=protocol)
                self._raw = MooncakeEngine(config) if self.link is None else LinkEngine(config, self.link)
                self._raw.register(self.data.slab.data_ptr(), self.data.slab.numel())
                self._raw.open(segment_name, self.hello.arenas[0].base_ptr)
            self._number += 1
            grant = self.pusher.prepare(f"raw{self._number}", self.tokens)
            (rank,) = grant.ranks
            size_bytes = min(self.data.slab.numel(), rank.extents[0].size_bytes)
            target_ptr = rank.snapshot_buf_base_ptr + rank.extents[0].offset_bytes
            raw, source_address = self._raw, self.data.slab.data_ptr()

            def write() -> None:
                # On a stream of Mooncake's own, so only its end says when it is over.
                number = raw.submit(segment_name, Write(source_address, target_ptr, size_bytes))
                while (state := raw.check(number)) is WriteState.RUNNING:
                    pass
                if state is not WriteState.DONE:
                    raise RuntimeError("a raw write failed")

            times = _raw_times(write, self.device)
        self.client.abort(grant.slab_handle, drained=True)
        return times

    def copy_ms(self, other: torch.Tensor) -> dict[str, float]:
        """Copy the bytes once with torch; return the wall and the GPU's time."""
        return _raw_times(lambda: other.copy_(self.data.slab, non_blocking=True), self.device)

    def close(self) -> None:
        """Let go of everything."""
        self.pusher.close()
        if self._raw is not None:
            self._raw.close()


def _raw_times(write: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return what a write takes by the clock, and by events on the current stream.

    Args:
        write: writes; it is over when it returns, or when the current stream is.
        device: the source's.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    start.record(torch.cuda.current_stream(device))
    write()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    ended_s = time.perf_counter()
    return {"raw": (ended_s - started_s) * MS_PER_S, "raw_gpu": float(start.elapsed_time(end))}


def measure_push(
    data: Data,
    transport: str,
    target: torch.device,
    rounds: int,
    settings_of_d: PushSettings,
    link: Link | None = None,
) -> dict[str, Any]:
    """Measure pushes into an arena on *target*, behind *link* if there is one; what cannot be run says why.

    Returns:
        ``gpu_ms`` (by CUDA events: from the first byte gathered to the last in the arena), and by the clock
        ``move_ms`` (gather, write and commit), ``call_ms`` (with asking for the slab), ``gather_ms`` (into
        this GPU, alone), ``raw_ms`` (one write of the same bytes: Mooncake's, or over shm a copy;
        ``raw_gpu_ms``: by events), ratios, and ``daemon_gpu_bytes``: what the daemon takes of the GPU beyond
        its arena. ``push_over_raw`` is of both GPU times, ``move_over_raw`` and ``call_over_raw`` are of
        those by the clock. Or ``error``.
    """
    arena_bytes = align_up(_SNAPSHOTS * data.slab.numel() + _ARENA_SLACK_BYTES, 2 * MIB)
    settings: dict[str, object] = {
        "transport": transport, "device": str(target), "size": f"{arena_bytes}B",
        "reserve_timeout_ms": 60_000,
    }  # fmt: skip
    if transport == "mooncake":
        settings["mooncake.protocol"] = "nvlink_intra"
    try:
        torch.zeros(1, device=target)
        torch.cuda.synchronize(target)
        free_bytes = torch.cuda.mem_get_info(target)[0]
        with daemon_process(**settings) as path, Client(path, timeout_s=_START_S) as client:
            client.connect()
            cost_bytes = free_bytes - torch.cuda.mem_get_info(target)[0] - arena_bytes
            bench = PushBench(client, data, settings_of_d, link)
            try:
                figures = _push_figures(bench, transport, target, rounds)
            finally:
                bench.close()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return figures | {"daemon_gpu_bytes": cost_bytes}


def _push_figures(bench: PushBench, transport: str, target: torch.device, rounds: int) -> dict[str, Any]:
    other = None if transport == "mooncake" else torch.empty_like(bench.data.slab, device=target)
    taken: dict[str, list[float]] = {}
    for round_index in range(rounds + 1):
        times = bench.push_ms()
        times["gpu"] = bench.gpu_ms()
        times["gather"] = bench.gather_ms()
        times |= bench.raw_ms() if other is None else bench.copy_ms(other)
        if round_index:  # The first one warms.
            for name, ms in times.items():
                taken.setdefault(name, []).append(ms)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return {f"{name}_ms": round(ms, 3) for name, ms in medians.items()} | {
        "raw_gb_per_s": round(bench.data.moved_bytes / medians["raw"] / 1e6, 1),
        "push_over_raw": round(medians["raw_gpu"] / medians["gpu"], 4),
        "move_over_raw": round(medians["raw"] / medians["move"], 4),
        "call_over_raw": round(medians["raw"] / medians["call"], 4),
    }


def push_figures(
    data: Data, device: torch.device, rounds: int, link_gb_per_s: float | None = None
) -> dict[str, Any]:
    """Measure pushes over both transports into this GPU, and into another one if there is one.

    With *link_gb_per_s* also those through the ring into this GPU, behind an emulated link.
    """
    targets = {"one_gpu": device}
    if torch.cuda.device_count() > 1:
        targets["two_gpus"] = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    result: dict[str, Any] = {}
    for name, target in targets.items():
        for way, settings in PUSH_SETTINGS.items():
            result[f"nvlink_intra, {way}, {name}"] = measure_push(data, "mooncake", target, rounds, settings)
        result[f"shm, {name}"] = measure_push(data, "shm", target, rounds, PushSettings())
    if link_gb_per_s is not None:
        link = Link(device, link_gb_per_s * 1e9)
        for way in (way for way, settings in PUSH_SETTINGS.items() if not settings.map_arenas):
            result[f"nvlink_intra, {way}, a link of {link_gb_per_s:g} GB/s emulated"] = measure_push(
                data, "mooncake", device, rounds, PUSH_SETTINGS[way], link
            )
    if "two_gpus" not in targets:
        result["two_gpus"] = {"error": "there is one GPU"}
    return result

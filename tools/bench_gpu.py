"""Gather and scatter on a GPU, as ratios to a device-to-device copy of the same bytes in the same run.

And whole pushes into a daemon's arena on a GPU, as ratios to one write of the same bytes.
"""

import contextlib
import dataclasses
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import torch

from snapd.client import Client
from snapd.kv.devicejob import DeviceJob, finish
from snapd.kv.devicemapped import DeviceMappedJob
from snapd.kv.gpucopy import GpuGatherJob, GpuScatterJob
from snapd.kv.pool import KVPool
from snapd.kv.push import Pusher, PushJob, PushSettings
from snapd.kv.torchcopy import TorchGatherJob, TorchScatterJob
from snapd.kv.writers import current
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import Write
from snapd.transport.mooncake_engine import MooncakeEngine, WriteState
from snapd.units import GIB, MIB, MS_PER_S, align_up

LAYERS = 48
HEADS = 4
HEAD_DIM = 128
STRIDE_BYTES = HEADS * HEAD_DIM * 2
ORDERS = {"contiguous": False, "random": True}
# Long enough that the host has queued all work of a case before the device comes to it.
_LEAD_CYCLES = 60_000_000
# A forward pass: products of square matrices, some tens of ms on an H200, so longer than an ingest.
FORWARD_DIM = 8_192
FORWARD_PRODUCTS = 20
# The same bytes in launches between which other kernels get their turn; None: one launch.
INGEST_PIECES_BYTES = {"one launch": None, "pieces of 64 MiB": 64 * MIB}
_FORWARD_LEAD_CYCLES = _LEAD_CYCLES


@dataclasses.dataclass(frozen=True)
class Data:
    """Planes in one slab, as the daemon's are, and a pool with buffers of their own.

    Attributes:
        planes: uint8, shape [num_tokens * stride_bytes] each.
        pool: with a quarter more slots than tokens.
        buffers: the pool's, shape [slots, stride_bytes // 2], bfloat16 or uint8.
        slab: what the planes are parts of.
        moved_bytes: of all planes.
    """

    planes: tuple[torch.Tensor, ...]
    pool: KVPool
    buffers: tuple[torch.Tensor, ...]
    slab: torch.Tensor
    moved_bytes: int

    def slots(self, *, is_random: bool) -> torch.Tensor:
        """Return int64 slots on the CPU, shape [num_tokens]: from 0 on, or any."""
        num_tokens = self.planes[0].numel() // self.pool.planes[0].stride_bytes
        return torch.randperm(self.pool.num_slots)[:num_tokens] if is_random else torch.arange(num_tokens)


def make_data(widths_bytes: Sequence[int], num_tokens: int, device: torch.device) -> Data:
    """Return random planes and a random pool; K first and then V when the planes are even in number."""
    num_slots = num_tokens + num_tokens // 4
    starts = [0]
    for width in widths_bytes:
        starts.append(-(-(starts[-1] + width * num_tokens) // 256) * 256)
    slab = _random(starts[-1], device)
    planes = tuple(
        slab[start : start + width * num_tokens] for start, width in zip(starts, widths_bytes, strict=False)
    )
    buffers = tuple(_random(num_slots * width, device).view(num_slots, width) for width in widths_bytes)
    if all(width % 2 == 0 for width in widths_bytes):
        buffers = tuple(buffer.view(torch.bfloat16) for buffer in buffers)
    half = len(buffers) // 2
    pool = KVPool.mla(buffers) if len(buffers) % 2 else KVPool.mha(buffers[:half], buffers[half:])
    return Data(planes, pool, buffers, slab, num_tokens * sum(widths_bytes))


def _random(size_bytes: int, device: torch.device) -> torch.Tensor:
    words = torch.randint(-(1 << 62), 1 << 62, (-(-size_bytes // 8),), dtype=torch.int64, device=device)
    return words.view(torch.uint8)[:size_bytes]


def device_ms(run: Callable[[], object], lead_cycles: int = _LEAD_CYCLES) -> float:
    """Return what *run* takes on the current stream of the device, in ms, without the host's part."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(lead_cycles)  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def median_ms(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median of each case; a round runs every case once, the first round does not count."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(rounds + 1):
        for name, run in cases.items():
            ms = device_ms(run)
            if round_index:
                taken[name].append(ms)
    return {name: statistics.median(times) for name, times in taken.items()}


def _launch(kind: type[DeviceJob], data: Data, slots: torch.Tensor, *, checksum: bool = True) -> None:
    stream = torch.cuda.current_stream()
    job = kind(data.pool, slots, data.planes, checksum=checksum, stream=stream, after=())
    job.step(job.bytes_total)


def _by_layer(data: Data, slots: torch.Tensor, *, is_index_copy: bool) -> None:
    for buffer, plane in zip(data.buffers, data.planes, strict=True):
        rows = plane.view(buffer.dtype).view(slots.numel(), -1)
        if is_index_copy:
            buffer.index_copy_(0, slots, rows)
        else:
            buffer[slots] = rows


def _cases(data: Data, *, has_fallback: bool) -> dict[str, Callable[[], object]]:
    other = torch.empty_like(data.slab).random_()
    cases: dict[str, Callable[[], object]] = {"memcpy": lambda: other.copy_(data.slab)}

    def add(name: str, run: Callable[[], object]) -> None:
        cases[name] = run

    for order, is_random in ORDERS.items():
        slots = data.slots(is_random=is_random)
        on_device = slots.to(data.slab.device)
        for kind, what in ((GpuScatterJob, "scatter"), (GpuGatherJob, "gather")):
            for checksum in (True, False):
                name = f"{what}, {order}" + ("" if checksum else ", no sums")
                add(
                    name,
                    lambda kind=kind, slots=slots, checksum=checksum: _launch(  # type: ignore[misc]
                        kind, data, slots, checksum=checksum
                    ),
                )
        add(f"buffer[slots] = ..., {order}", lambda at=on_device: _by_layer(data, at, is_index_copy=False))  # type: ignore[misc]
        add(f"index_copy_, {order}", lambda at=on_device: _by_layer(data, at, is_index_copy=True))  # type: ignore[misc]
        if has_fallback:
            for fallback, what in ((TorchScatterJob, "scatter"), (TorchGatherJob, "gather")):
                add(
                    f"fallback {what}, {order}",
                    lambda kind=fallback, slots=slots: _launch(kind, data, slots),  # type: ignore[misc]
                )
    return cases


def _whole_call_ms(kind: type[DeviceJob], data: Data, slots: torch.Tensor, rounds: int) -> float:
    """Return what a caller that waits for a job sees, in ms of wall clock: checks and launch too."""
    taken = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        finish(kind(data.pool, slots, data.planes))
        taken.append((time.perf_counter() - started_s) * MS_PER_S)
    return statistics.median(taken[1:])


def forward_slowdown(data: Data, slots: torch.Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Measure what an ingest beside it costs a forward pass of bfloat16 matrix products.

    Returns:
        For each way to launch the ingest: ``alone_ms`` and ``beside_ms`` of the forward pass, their ratio
        ``slowdown``, ``ingest_ms`` of the ingest beside it, and ``stalled``: what the forward pass lost over
        what the ingest took; 1.0: it stood still meanwhile.
    """
    device = data.slab.device
    shape = (FORWARD_DIM, FORWARD_DIM)
    left, right = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def forward() -> None:
        for _ in range(FORWARD_PRODUCTS):
            torch.mm(left, right, out=out)

    def beside_ms(piece_bytes: int | None) -> tuple[float, float]:
        # Checked before, so that the host has queued everything before the device comes to it.
        job = GpuScatterJob(data.pool, slots, data.planes, stream=side, after=(), piece_bytes=piece_bytes)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def run() -> None:
            side.wait_stream(torch.cuda.current_stream(device))
            start.record(side)
            job.step(job.bytes_total)
            end.record(side)
            forward()

        forward_ms = device_ms(run, _FORWARD_LEAD_CYCLES)
        finish(job)
        end.synchronize()
        return forward_ms, float(start.elapsed_time(end))

    alone: list[float] = []
    beside: dict[str, list[tuple[float, float]]] = {name: [] for name in INGEST_PIECES_BYTES}
    for round_index in range(rounds + 1):
        alone_ms = device_ms(forward, _FORWARD_LEAD_CYCLES)
        times = {name: beside_ms(piece_bytes) for name, piece_bytes in INGEST_PIECES_BYTES.items()}
        if round_index:  # The first one warms.
            alone.append(alone_ms)
            for name, pair in times.items():
                beside[name].append(pair)
    median_alone_ms = statistics.median(alone)
    result: dict[str, dict[str, float]] = {}
    for name, pairs in beside.items():
        median_ms, ingest_ms = (statistics.median(values) for values in zip(*pairs, strict=True))
        result[name] = {
            "alone_ms": round(median_alone_ms, 3),
            "beside_ms": round(median_ms, 3),
            "slowdown": round(median_ms / median_alone_ms, 4),
            "ingest_ms": round(ingest_ms, 3),
            "stalled": round((median_ms - median_alone_ms) / ingest_ms, 3),
        }
    return result


# --- pushes ------------------------------------------------------------------------------------

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
    """Pushes of *data* into one daemon, and raw writes of as many bytes into the same arena."""

    def __init__(self, client: Client, data: Data, settings: PushSettings) -> None:
        self.client = client
        self.data = data
        self.slots = data.slots(is_random=True)
        self.tokens = list(range(self.slots.numel()))
        self.config = MooncakeConfig(settings={"MC_LOG_LEVEL": "ERROR"})
        self.pusher = Pusher(
            client, {0: data.pool}, mooncake=self.config, send_page_keys=False, settings=settings
        )
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

    def mapped_gpu_ms(self) -> float | None:
        """Push once; return what the GPU takes, from the first byte gathered to the last in the arena.

        None: bytes do not go straight into the arena, so that the host is part of it.
        """
        torch.cuda.synchronize(self.device)
        job = self._start()
        if not isinstance(job, DeviceMappedJob):
            self._finish(job)
            self.client.abort(job.result.slab_handle, drained=True)
            return None
        stream = self.pusher._gpus.stream_for(self.device)
        assert stream is not None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            # Until the host has launched it.
            torch.cuda._sleep(_LEAD_CYCLES)  # type: ignore[no-untyped-call]
        start.record(stream)
        job.step(64 * MIB)
        end.record(stream)
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

    def raw_ms(self) -> float:
        """Write the bytes once, as they lie, with one Mooncake write; return the wall time."""
        with current(self.device):
            assert self.hello.mooncake is not None
            segment_name = self.hello.mooncake.segment_name
            if self._raw is None:
                # The package itself: whatever snapd does around it counts against a push.
                protocol = self.hello.mooncake.protocol
                self._raw = MooncakeEngine(msgspec.structs.replace(self.config, protocol=protocol))
                self._raw.register(self.data.slab.data_ptr(), self.data.slab.numel())
                self._raw.open(segment_name, self.hello.arenas[0].base_ptr)
            self._number += 1
            grant = self.pusher.prepare(f"raw{self._number}", self.tokens)
            (rank,) = grant.ranks
            size_bytes = min(self.data.slab.numel(), rank.extents[0].size_bytes)
            target_ptr = rank.snapshot_buf_base_ptr + rank.extents[0].offset_bytes
            torch.cuda.synchronize(self.device)
            started_s = time.perf_counter()
            write = self._raw.submit(segment_name, Write(self.data.slab.data_ptr(), target_ptr, size_bytes))
            while (state := self._raw.check(write)) is WriteState.RUNNING:
                pass
            ended_s = time.perf_counter()
        self.client.abort(grant.slab_handle, drained=True)
        if state is not WriteState.DONE:
            raise RuntimeError("a raw write failed")
        return (ended_s - started_s) * MS_PER_S

    def copy_ms(self, target: torch.device, other: torch.Tensor) -> float:
        """Copy the bytes once with torch; return the wall time."""
        torch.cuda.synchronize(self.device)
        started_s = time.perf_counter()
        other.copy_(self.data.slab)
        torch.cuda.synchronize(self.device)
        torch.cuda.synchronize(target)
        return (time.perf_counter() - started_s) * MS_PER_S

    def close(self) -> None:
        """Let go of everything."""
        self.pusher.close()
        if self._raw is not None:
            self._raw.close()


def measure_push(
    data: Data, transport: str, target: torch.device, rounds: int, settings_of_d: PushSettings
) -> dict[str, Any]:
    """Measure pushes into an arena on *target*; what cannot be run says why.

    Returns:
        ``gpu_ms`` (by CUDA events: from the first byte gathered to the last in the arena; only where they go
        straight there), and by the clock ``move_ms`` (gather, write and commit), ``call_ms`` (with asking for
        the slab), ``gather_ms`` (into this GPU, alone), ``raw_ms`` (one write of the same bytes: Mooncake's,
        or over shm a copy), ratios, and ``daemon_gpu_bytes``: what the daemon takes of the GPU beyond its
        arena. ``push_over_raw`` is of ``gpu_ms``, or of ``move_ms`` where there is none. Or ``error``.
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
            bench = PushBench(client, data, settings_of_d)
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
        gpu_ms = bench.mapped_gpu_ms()
        if gpu_ms is not None:
            times["gpu"] = gpu_ms
        times["gather"] = bench.gather_ms()
        times["raw"] = bench.raw_ms() if other is None else bench.copy_ms(target, other)
        if round_index:  # The first one warms.
            for name, ms in times.items():
                taken.setdefault(name, []).append(ms)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return {f"{name}_ms": round(ms, 3) for name, ms in medians.items()} | {
        "raw_gb_per_s": round(bench.data.moved_bytes / medians["raw"] / 1e6, 1),
        "push_over_raw": round(medians["raw"] / medians.get("gpu", medians["move"]), 4),
        "move_over_raw": round(medians["raw"] / medians["move"], 4),
        "call_over_raw": round(medians["raw"] / medians["call"], 4),
    }


def push_figures(data: Data, device: torch.device, rounds: int) -> dict[str, Any]:
    """Measure pushes over both transports into this GPU, and into another one if there is one."""
    targets = {"one_gpu": device}
    if torch.cuda.device_count() > 1:
        targets["two_gpus"] = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    result: dict[str, Any] = {}
    for name, target in targets.items():
        for way, settings in PUSH_SETTINGS.items():
            result[f"nvlink_intra, {way}, {name}"] = measure_push(data, "mooncake", target, rounds, settings)
        result[f"shm, {name}"] = measure_push(data, "shm", target, rounds, PushSettings())
    if "two_gpus" not in targets:
        result["two_gpus"] = {"error": "there is one GPU"}
    return result


@click.command()
@click.option("--tokens", default=50_000, show_default=True, help="Tokens of the session.")
@click.option("--layers", default=LAYERS, show_default=True, help="Layers, with K and V each.")
@click.option("--rounds", default=11, show_default=True, help="Rounds; the median of each figure is shown.")
@click.option("--fallback", is_flag=True, help="Measure the copies by torch's own operations too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def main(tokens: int, layers: int, rounds: int, fallback: bool, as_json: bool) -> None:
    """Measure the GPU copies: K and V of 4 heads, 128 wide, bfloat16, in every layer."""
    if not torch.cuda.is_available():
        raise click.ClickException("there is no GPU that torch can use")
    device = torch.device("cuda", torch.cuda.current_device())
    data = make_data([STRIDE_BYTES] * (2 * layers), tokens, device)
    times_ms = median_ms(_cases(data, has_fallback=fallback), rounds)
    memcpy_ms = times_ms["memcpy"]
    rows = {
        name: {
            "ms": round(ms, 4),
            "gb_per_s": round(data.moved_bytes / ms / 1e6, 1),
            "ratio_to_memcpy": round(memcpy_ms / ms, 4),
        }
        for name, ms in times_ms.items()
    }
    slowdown = forward_slowdown(data, data.slots(is_random=True), rounds)
    pushes = push_figures(data, device, rounds)
    result = {
        "device": torch.cuda.get_device_name(device),
        "bytes": data.moved_bytes,
        "tokens": tokens,
        "rounds": rounds,
        "ingest_over_memcpy": {o: rows[f"scatter, {o}"]["ratio_to_memcpy"] for o in ORDERS},
        "gather_over_memcpy": {o: rows[f"gather, {o}"]["ratio_to_memcpy"] for o in ORDERS},
        "whole_call_ms": {
            what: round(_whole_call_ms(kind, data, data.slots(is_random=True), rounds), 3)
            for what, kind in (("scatter", GpuScatterJob), ("gather", GpuGatherJob))
        },
        "forward_slowdown": slowdown,
        "push": pushes,
        "push_over_raw": {
            name: figures["push_over_raw"] for name, figures in pushes.items() if "push_over_raw" in figures
        },
        "move_over_raw": {
            name: figures["move_over_raw"] for name, figures in pushes.items() if "move_over_raw" in figures
        },
        "daemon_gpu_bytes": {
            name: figures["daemon_gpu_bytes"]
            for name, figures in pushes.items()
            if "daemon_gpu_bytes" in figures
        },
        "rows": rows,
    }
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"{result['device']}, {data.moved_bytes / 1e9:.2f} GB, {tokens} tokens, {2 * layers} planes")
    for name, row in rows.items():
        click.echo(
            f"{name:34} {row['ms']:8.3f} ms {row['gb_per_s']:8.0f} GB/s  {row['ratio_to_memcpy']:6.3f}"
        )
    for name, figures in slowdown.items():
        click.echo(f"forward pass beside an ingest, {name}: {figures}")
    for name, figures in pushes.items():
        click.echo(f"push, {name}: {figures}")
    click.echo(f"whole call, random slots, ms of wall clock: {result['whole_call_ms']}")


if __name__ == "__main__":
    main()

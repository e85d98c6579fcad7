"""Gather and scatter on a GPU, as ratios to a device-to-device copy of the same bytes in the same run.

And whole pushes into a daemon's arena on a GPU, as ratios to one write of the same bytes.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NoReturn

import click
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from snapd.kv import gpucopy, torchcopy
from snapd.kv.devicejob import DeviceJob, finish
from snapd.kv.devicescatter import DeviceScatter, PrivateMemory
from snapd.kv.gpucopy import GpuGatherJob, GpuScatterJob
from snapd.kv.torchcopy import Summing, TorchGatherJob, TorchScatterJob
from snapd.units import MIB, MS_PER_S
from tools.gpu_data import LAYERS, LEAD_CYCLES, STRIDE_BYTES, Data, device_ms, make_data
from tools.gpu_pushes import push_figures

ORDERS: Final = {"contiguous": False, "random": True}
# A forward pass: products of square matrices, some tens of ms on an H200, so longer than an ingest.
FORWARD_DIM: Final = 8_192
FORWARD_PRODUCTS: Final = 20
# The same bytes in launches between which other kernels get their turn; None: one launch.
INGEST_PIECES_BYTES: Final = {"one launch": None, "pieces of 64 MiB": 64 * MIB}


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


def _no_job(*_: object, **__: object) -> NoReturn:
    raise AssertionError("nothing is moved")


def _read(data: Data, summing: Summing) -> None:
    """Sum all planes and move nothing, as the first pass of a load layer by layer does."""
    num_tokens = data.planes[0].numel() // data.pool.planes[0].stride_bytes
    device, stream = data.slab.device, torch.cuda.current_stream()
    scatter = DeviceScatter(
        _no_job, data.pool, data.planes, None, num_tokens, num_tokens, verify=True,
        stream_of=lambda _: stream, after=(), private=PrivateMemory(device, stream), summing=summing,
    )  # fmt: skip
    scatter.step(data.moved_bytes)


def _cases(data: Data, *, has_fallback: bool) -> dict[str, Callable[[], object]]:
    other = torch.empty_like(data.slab).random_()
    cases: dict[str, Callable[[], object]] = {
        "memcpy": lambda: other.copy_(data.slab),
        "sums alone": lambda: _read(data, gpucopy.SUMMING),
    }
    if has_fallback:
        cases["fallback sums alone"] = lambda: _read(data, torchcopy.SUMMING)

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

        forward_ms = device_ms(run, LEAD_CYCLES)
        finish(job)
        end.synchronize()
        return forward_ms, float(start.elapsed_time(end))

    alone: list[float] = []
    beside: dict[str, list[tuple[float, float]]] = {name: [] for name in INGEST_PIECES_BYTES}
    for round_index in range(rounds + 1):
        alone_ms = device_ms(forward, LEAD_CYCLES)
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


@click.command()
@click.option("--tokens", default=50_000, show_default=True, help="Tokens of the session.")
@click.option("--layers", default=LAYERS, show_default=True, help="Layers, with K and V each.")
@click.option("--rounds", default=11, show_default=True, help="Rounds; the median of each figure is shown.")
@click.option("--fallback", is_flag=True, help="Measure the copies by torch's own operations too.")
@click.option(
    "--link", "link_gb_per_s", type=float, metavar="GB/S",
    help="Push through the ring behind an emulated link of this speed, too.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def main(
    tokens: int, layers: int, rounds: int, fallback: bool, link_gb_per_s: float | None, as_json: bool
) -> None:
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
    pushes = push_figures(data, device, rounds, link_gb_per_s)
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

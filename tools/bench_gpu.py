"""Gather and scatter on a GPU, as ratios to a device-to-device copy of the same bytes in the same run."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import click
import torch

from snapd.kv.devicejob import DeviceJob, finish
from snapd.kv.gpucopy import GpuGatherJob, GpuScatterJob
from snapd.kv.pool import KVPool
from snapd.kv.torchcopy import TorchGatherJob, TorchScatterJob
from snapd.units import MS_PER_S

LAYERS = 48
HEADS = 4
HEAD_DIM = 128
STRIDE_BYTES = HEADS * HEAD_DIM * 2
ORDERS = {"contiguous": False, "random": True}
# Long enough that the host has queued all work of a case before the device comes to it.
_LEAD_CYCLES = 4_000_000


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


def device_ms(run: Callable[[], object]) -> float:
    """Return what *run* takes on the current stream of the device, in ms, without the host's part."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_LEAD_CYCLES)  # type: ignore[no-untyped-call]
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
    click.echo(f"whole call, random slots, ms of wall clock: {result['whole_call_ms']}")


if __name__ == "__main__":
    main()

"""Gather, scatter and checksum on the CPU, as a ratio to one memcpy of the same bytes in the same run.

What D's push and P's ingest do with an integrity key stands beside what they do without one.
"""

import json
import secrets
import statistics
import time
from collections.abc import Callable, Sequence

import click
import torch

from snapd.kv.checksum import plane_checksum
from snapd.kv.copy import GatherJob, gather, scatter
from snapd.kv.integrity import ALGORITHMS, KEY_BYTES_MIN, AttemptContext, KeyedIntegrity
from snapd.kv.keyedscatter import KeyedScatter
from snapd.kv.pool import KVPool
from snapd.units import MIB, NS_PER_S, align_down

LAYERS = 48
HEADS = 4
HEAD_DIM = 128
STRIDE_BYTES = HEADS * HEAD_DIM * 2
PAGE_SIZE_TOKENS = 16
KEYED_ORDER = "random slots"


def _slot_orders(num_slots: int, num_tokens: int) -> dict[str, tuple[int, torch.Tensor]]:
    """Return page size and slots of each case."""
    pages = torch.randperm(num_slots // PAGE_SIZE_TOKENS)[: num_tokens // PAGE_SIZE_TOKENS]
    paged = (pages[:, None] * PAGE_SIZE_TOKENS + torch.arange(PAGE_SIZE_TOKENS)).flatten()
    return {
        "contiguous": (1, torch.arange(num_tokens)),
        "random slots": (1, torch.randperm(num_slots)[:num_tokens]),
        "random pages of 16": (PAGE_SIZE_TOKENS, paged),
    }


def _keyed_cases(
    pool: KVPool, slots: torch.Tensor, planes: Sequence[torch.Tensor]
) -> dict[str, Callable[[], object]]:
    """Return the cases with an integrity key, each named after the one without."""
    cases: dict[str, Callable[[], object]] = {}
    for algorithm in ALGORITHMS:
        keyed = Keyed(algorithm)
        cases[f"checksum alone, {algorithm}"] = lambda keyed=keyed: keyed.hash(planes)  # type: ignore[misc]
        cases[f"gather, {KEYED_ORDER}, {algorithm}"] = lambda keyed=keyed: keyed.gather(pool, slots, planes)  # type: ignore[misc]
        cases[f"scatter, {KEYED_ORDER}, {algorithm}"] = lambda keyed=keyed: keyed.scatter(pool, slots, planes)  # type: ignore[misc]
    return cases


class Keyed:
    """The copies of a push and of an ingest with an integrity key."""

    def __init__(self, algorithm: str) -> None:
        self._integrity = KeyedIntegrity(secrets.token_bytes(KEY_BYTES_MIN), algorithm=algorithm)
        self._context = AttemptContext(
            epoch="bench", slab_handle=1, rank=0,
            layout_fingerprint="", token_start=0, num_tokens=0, token_digest="",
        )  # fmt: skip

    def hash(self, planes: Sequence[torch.Tensor]) -> None:
        """Make the MACs of planes, and nothing else."""
        for mac, plane in zip(self._integrity.macs(self._context, len(planes)), planes, strict=True):
            mac.add(plane)
            _ = mac.value

    def gather(self, pool: KVPool, slots: torch.Tensor, planes: Sequence[torch.Tensor]) -> None:
        """Do what a push over shared memory does."""
        job = GatherJob(pool, slots, planes, sums=self._integrity.macs(self._context, len(planes)))
        while not job.step(job.bytes_total):
            pass
        _ = job.checksums

    def scatter(self, pool: KVPool, slots: torch.Tensor, planes: Sequence[torch.Tensor]) -> None:
        """Do what an ingest does."""
        macs = self._integrity.accepted_macs(self._context, len(planes))
        num_tokens = slots.numel()
        job = KeyedScatter(pool, planes, slots, 0, num_tokens, stop_tokens=num_tokens, macs=macs)
        while not job.step(1 << 62):
            pass
        job.differing([(0, 0)] * len(planes))


@click.command()
@click.option("--mib", default=1024, show_default=True, help="Bytes to move, in MiB, over all planes.")
@click.option("--repeats", default=5, show_default=True, help="Rounds; the median of each figure is shown.")
@click.option("--threads", default=0, help="Threads of torch; 0 leaves them as they are.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def main(mib: int, repeats: int, threads: int, as_json: bool) -> None:
    """Measure the CPU byte-moving layer: 48 layers, K and V of 1,024 bytes a token each."""
    if threads:
        torch.set_num_threads(threads)
    num_planes = 2 * LAYERS
    num_tokens = align_down(mib * MIB // (num_planes * STRIDE_BYTES), PAGE_SIZE_TOKENS)
    num_slots = num_tokens + align_down(num_tokens // 4, PAGE_SIZE_TOKENS) + PAGE_SIZE_TOKENS
    moved_bytes = num_planes * num_tokens * STRIDE_BYTES
    buffers = [
        torch.randint(0, 1 << 15, (num_slots, HEADS, HEAD_DIM), dtype=torch.int16).view(torch.bfloat16)
        for _ in range(num_planes)
    ]
    slab = torch.zeros(moved_bytes, dtype=torch.uint8)
    planes = slab.chunk(num_planes)
    other = torch.ones(moved_bytes, dtype=torch.uint8)

    cases: dict[str, Callable[[], object]] = {
        "memcpy": lambda: slab.copy_(other),
        "checksum alone": lambda: [plane_checksum(plane) for plane in planes],
    }
    for name, (page_size_tokens, slots) in _slot_orders(num_slots, num_tokens).items():
        pool = KVPool.mha(buffers[:LAYERS], buffers[LAYERS:], page_size_tokens)
        if name == KEYED_ORDER:
            cases |= _keyed_cases(pool, slots, planes)
        for checksum in (True, False):
            suffix = name if checksum else f"{name}, no sums"
            cases[f"gather, {suffix}"] = lambda pool=pool, slots=slots, checksum=checksum: gather(  # type: ignore[misc]
                pool, slots, planes, checksum=checksum
            )
            cases[f"scatter, {suffix}"] = lambda pool=pool, slots=slots, checksum=checksum: scatter(  # type: ignore[misc]
                planes, pool, slots, checksum=checksum
            )

    # A round runs every case once, so that a slow moment of the machine hits them all alike.
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(repeats + 1):
        for name, run in cases.items():
            start_ns = time.perf_counter_ns()
            run()
            if round_index:
                seconds[name].append((time.perf_counter_ns() - start_ns) / NS_PER_S)
    gb_per_s = {name: moved_bytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    rows = {
        name: {"gb_per_s": round(rate, 2), "ratio_to_memcpy": round(rate / gb_per_s["memcpy"], 3)}
        for name, rate in gb_per_s.items()
    }
    for name, row in rows.items():
        plain, _, algorithm = name.rpartition(", ")
        if algorithm in ALGORITHMS:
            row["ratio_to_plain"] = round(gb_per_s[name] / gb_per_s[plain], 3)
    if as_json:
        click.echo(
            json.dumps(
                {"bytes": moved_bytes, "threads": torch.get_num_threads(), "repeats": repeats, "rows": rows}
            )
        )
        return
    click.echo(
        f"{moved_bytes / MIB:.0f} MiB, {num_tokens} tokens, {torch.get_num_threads()} threads of torch"
    )
    for name, row in rows.items():
        to_plain = f"  {row['ratio_to_plain']:6.3f} of without a key" if "ratio_to_plain" in row else ""
        click.echo(f"{name:38} {row['gb_per_s']:7.2f} GB/s  {row['ratio_to_memcpy']:6.3f}{to_plain}")


if __name__ == "__main__":
    main()

"""Time allocate and free with more and more live slabs; wanted: O(log n), so small growth.

Two cases, each in a fragmented arena with about as many holes as a busy one has:

* contiguous: a random slab is freed, then one of another size is allocated by best fit;
* scattered: only holes of one plane are left, so that a slab takes one extent per plane.
"""

import json
import random
import statistics
import time
from collections.abc import Sequence

import click

from snapd.core.slab import Extent, SlabAllocator
from snapd.units import KIB

SLAB_COUNTS = (100, 1_000, 10_000, 100_000)
SLAB_BYTES_MAX = 256 * KIB
PLANE_BYTES = 4 * KIB


def _take(slabs: SlabAllocator, plane_sizes_bytes: Sequence[int]) -> tuple[Extent, ...]:
    extents = slabs.allocate(plane_sizes_bytes)
    assert extents is not None, "the arena is made large enough for what is measured"
    return extents


def contiguous_ns(num_slabs: int, num_ops: int, seed: int) -> list[int]:
    """Return the ns that each pair of one free and one allocate took, with *num_slabs* live slabs."""
    rng = random.Random(seed)
    # A quarter more than the mean load: always room, and thousands of holes of all sizes.
    slabs = SlabAllocator(num_slabs * SLAB_BYTES_MAX * 5 // 8 + 32 * SLAB_BYTES_MAX)
    live = [_take(slabs, (rng.randint(1, SLAB_BYTES_MAX),)) for _ in range(num_slabs)]
    times_ns = []
    # One whole turnover first: the layout that the first fill leaves has no holes.
    for op in range(-num_slabs, num_ops):
        index = rng.randrange(num_slabs)
        sizes_bytes = (rng.randint(1, SLAB_BYTES_MAX),)
        started_ns = time.perf_counter_ns()
        slabs.free(live[index])
        extents = slabs.allocate(sizes_bytes)
        elapsed_ns = time.perf_counter_ns() - started_ns
        assert extents is not None, "a quarter of the arena is free"
        live[index] = extents
        if op >= 0:
            times_ns.append(elapsed_ns)
    return times_ns


def scattered_ns(num_slabs: int, num_ops: int, num_planes: int, seed: int) -> list[int]:
    """Return the ns that each pair of one free and one allocate of *num_planes* extents took."""
    num_holes = num_slabs + 4 * num_planes
    slabs = SlabAllocator(2 * num_holes * PLANE_BYTES)
    filled = [_take(slabs, (PLANE_BYTES,)) for _ in range(2 * num_holes)]
    for extents in filled[::2]:
        slabs.free(extents)
    # One-plane slabs stand between the holes; half of the holes are taken by scattered slabs.
    plane_sizes_bytes = (PLANE_BYTES,) * num_planes
    live = [_take(slabs, plane_sizes_bytes) for _ in range(num_holes // (2 * num_planes))]
    rng = random.Random(seed)
    times_ns = []
    for _ in range(num_ops):
        index = rng.randrange(len(live))
        started_ns = time.perf_counter_ns()
        slabs.free(live[index])
        extents_or_none = slabs.allocate(plane_sizes_bytes)
        times_ns.append(time.perf_counter_ns() - started_ns)
        assert extents_or_none is not None and len(extents_or_none) == num_planes, "no hole holds two planes"
        live[index] = extents_or_none
    return times_ns


def measure(num_ops: int, num_planes: int, seed: int) -> dict[str, dict[str, float]]:
    """Return p50 in ns by number of live slabs, and the growth from the fewest to the most, by case."""
    report: dict[str, dict[str, float]] = {}
    for case in ("contiguous", "scattered"):
        p50_ns: dict[str, float] = {}
        for num_slabs in SLAB_COUNTS:
            if case == "contiguous":
                times_ns = contiguous_ns(num_slabs, num_ops, seed)
            else:
                times_ns = scattered_ns(num_slabs, max(1, num_ops // num_planes), num_planes, seed)
            p50_ns[f"p50_ns_at_{num_slabs}"] = statistics.median(times_ns)
        first, *_, last = p50_ns.values()
        report[case] = {**p50_ns, "growth": round(last / first, 3)}
    return report


@click.command()
@click.option("--ops", "num_ops", default=20_000, show_default=True, help="Measured pairs at each size.")
@click.option("--planes", "num_planes", default=64, show_default=True, help="Planes of a scattered slab.")
@click.option("--seed", default=1, show_default=True, help="Seed of sizes and victims.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(num_ops: int, num_planes: int, seed: int, as_json: bool) -> None:
    """Time allocate and free at 100 to 100,000 live slabs."""
    report = measure(num_ops, num_planes, seed)
    if as_json:
        click.echo(json.dumps(report))
        return
    for case, figures in report.items():
        click.echo(case)
        for name, value in figures.items():
            click.echo(f"  {name:20} {value:>12,.10g}")


if __name__ == "__main__":
    main()

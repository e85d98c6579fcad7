# mypy: ignore-errors
# ruff: noqa
"""Temporary, not to be committed: sweeps the kernel's constants on a GPU and prints the best, within two minutes.

Run from the repository's root: python3 tools/gpu_tune.py
"""

import dataclasses
import itertools
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from snapd.kv import gpucopy, torchcopy
from snapd.kv import gpukernels as g
from tools.bench_gpu import Data, device_ms, make_data

STARTED = time.monotonic()
DEADLINE_S = float(sys.argv[1]) if len(sys.argv) > 1 else 115.0
DEVICE = torch.device("cuda:0")


def left_s() -> float:
    return DEADLINE_S - (time.monotonic() - STARTED)


class Case:
    """One direction and order of slots over one data set."""

    def __init__(
        self, data: Data, *, is_scatter: bool, is_random: bool, forced_word: int = 0, sums: bool = True
    ):
        self.is_scatter = is_scatter
        self.slots = data.slots(is_random=is_random).to(torch.int32).to(DEVICE)
        addresses = [plane.data_ptr() for plane in data.planes]
        groups, rows = gpucopy._table(data.pool.planes, addresses, g.TABLE_COLUMNS)
        (self.word, widths) = groups[0]
        assert len(groups) == 1
        if forced_word and forced_word < self.word:
            unit = min(self.word, 8)
            scale = unit // min(forced_word, 8)
            widths = [width * scale for width in widths]
            for row in rows:
                row[2] *= scale
                row[3] *= scale
            self.word = forced_word
        self.how = g.plan_launch(min(self.word, 8), widths, is_wide=self.word > 8)
        self.table = torch.tensor(rows, dtype=torch.int64, device=DEVICE)
        self.sums = torch.zeros((len(rows), 2), dtype=torch.int64, device=DEVICE) if sums else None
        self.data = data
        self.bytes = data.moved_bytes

    def run(self, tuning: g.Tuning) -> None:
        if self.sums is not None:
            self.sums.zero_()
        g.launch(
            self.table,
            self.slots,
            self.sums,
            0,
            self.slots.numel(),
            self.how,
            is_scatter=self.is_scatter,
            tuning=tuning,
        )

    def ms(self, tuning: g.Tuning, reps: int) -> float:
        self.run(tuning)  # compiles
        self.check(tuning)
        return statistics.median(device_ms(lambda: self.run(tuning)) for _ in range(reps))

    def check(self, tuning: g.Tuning) -> None:
        """Compare the first and last plane with the pool, and all sums with torch's."""
        at = self.slots.long()
        planes = self.data.planes
        for index in (0, len(planes) - 1):
            place = self.data.pool.planes[index]
            if not torch.equal(place.rows[at].flatten(), planes[index]):
                raise SystemExit(f"WRONG BYTES with {tuning}")
        if self.sums is not None:
            for index, plane in enumerate(planes):
                if index % 16:
                    continue
                padded = torch.zeros(-(-plane.numel() // 2048) * 2048, dtype=torch.uint8, device=DEVICE)
                padded[: plane.numel()] = plane
                expected = torch.stack(torchcopy._sum_words(padded.view(torch.int64)))
                if not torch.equal(expected, self.sums[index]):
                    raise SystemExit(f"WRONG SUMS with {tuning}")


def label(t: g.Tuning) -> str:
    return f"tile {t.tile_units:4} steps {t.steps:2} warps {t.num_warps} load '{t.load_cache}/{t.load_evict}' store '{t.store_cache}/{t.store_evict}'"


def sweep(title, cases, tunings, reps, memcpy_ms, keep, budget_s):
    """Time each tuning over all cases; rank by the worst ratio to memcpy."""
    began = time.monotonic()
    scored = []
    for tuning in tunings:
        if time.monotonic() - began > budget_s or left_s() < 3:
            print(f"  ({title}: time is up after {len(scored)} of {len(tunings)})")
            break
        try:
            ratios = [memcpy_ms * case.bytes / BYTES / case.ms(tuning, reps) for case in cases]
        except Exception as error:  # a constant that does not compile
            print("  failed", label(tuning), repr(error)[:120])
            continue
        scored.append((min(ratios), sum(ratios) / len(ratios), ratios, tuning))
    scored.sort(key=lambda item: item[:2], reverse=True)
    print(
        f"-- {title}: best {keep} of {len(scored)}; ratios {[f'{c.word}B ' + ('scatter' if c.is_scatter else 'gather') for c in cases]}"
    )
    for _, _, ratios, tuning in scored[:keep]:
        print("  ", " ".join(f"{ratio:.3f}" for ratio in ratios), label(tuning), flush=True)
    return [item[3] for item in scored[:keep]]


data = make_data([1024] * 96, 50_000, DEVICE)
BYTES = data.moved_bytes
other = torch.empty_like(data.slab)
copies = [device_ms(lambda: other.copy_(data.slab)) for _ in range(12)][2:]
memcpy_ms = statistics.median(copies)
print(f"{torch.cuda.get_device_name()} triton {g.triton.__version__} torch {torch.__version__}")
print(f"memcpy {memcpy_ms:.4f} ms ({min(copies):.4f} to {max(copies):.4f}), {BYTES / 1e9:.2f} GB")
scatter = Case(data, is_scatter=True, is_random=True)
gather = Case(data, is_scatter=False, is_random=True)
shapes = [
    g.Tuning(tile_units=tile, num_warps=warps, steps=steps)
    for tile, warps in ((512, 2), (512, 4), (1024, 2), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8))
    for steps in (1, 2, 4, 8, 16)
]
best = sweep("shapes, 16-byte accesses", [scatter, gather], shapes, 3, memcpy_ms, 5, 45)
narrow = [Case(data, is_scatter=s, is_random=True, forced_word=8) for s in (True, False)]
sweep("shapes, 8-byte accesses", narrow, best, 3, memcpy_ms, 5, 12)
modes = [
    dataclasses.replace(tuning, load_cache=lc, load_evict=le, store_cache=sc, store_evict=se)
    for tuning, (lc, le, sc, se) in itertools.product(
        best[:2],
        [
            (".cg", "", "", ""),
            ("", "evict_first", "", ""),
            ("", "", ".cs", ""),
            ("", "", "", "evict_first"),
            (".cg", "", ".cs", ""),
            ("", "evict_first", "", "evict_first"),
            (".cg", "", ".wt", ""),
        ],
    )
]
best += sweep("caches", [scatter, gather], modes, 5, memcpy_ms, 4, 22)
every = [
    Case(data, is_scatter=s, is_random=r, sums=v)
    for s in (True, False)
    for r in (False, True)
    for v in (True, False)
]
memcpy_ms = statistics.median(device_ms(lambda: other.copy_(data.slab)) for _ in range(11))
print(
    f"memcpy again {memcpy_ms:.4f} ms; next columns: scatter in order with/without sums, random with/without, gather the same"
)
final = sweep("final", every, best[:8], 9, memcpy_ms, 8, 20)
top = final[0] if final else g.DEFAULT_TUNING
del data, other, scatter, gather, narrow, every
torch.cuda.empty_cache()
for name, widths, tokens, word in (
    ("MLA bf16 1152 B", [1152] * 61, 30_000, 0),
    ("656 B", [656] * 61, 50_000, 0),
    ("1024 B as 4-byte units", [1024] * 48, 30_000, 4),
    ("132 B", [132] * 61, 100_000, 0),
    ("1023 B, 1-byte units", [1023] * 16, 30_000, 0),
):
    if left_s() < 5:
        print("time is up before", name)
        break
    data = make_data(widths, tokens, DEVICE)
    cases = [Case(data, is_scatter=s, is_random=True, forced_word=word) for s in (True, False)]
    tries = [top, *(dataclasses.replace(top, tile_units=tile, num_warps=4) for tile in (512, 1024, 2048))]
    sweep(f"{name}, columns {cases[0].how.columns}", cases, dict.fromkeys(tries), 3, memcpy_ms, 4, 8)
    del data, cases
print(f"took {time.monotonic() - STARTED:.0f} s. Best: {top}")

"""Microbenchmarks of the core in this process: what admission costs with more and more live slabs."""

import statistics
import time
from collections.abc import Callable
from itertools import count
from typing import Final, cast

from snapd.core import events as e
from snapd.core.eviction import POLICIES, PolicyName
from snapd.core.machine import Machine
from snapd.core.session import Settings
from snapd.core.slab import SlabAllocator
from snapd.layout import Layout
from tools.bench_slab import measure

SLAB_COUNTS: Final = (100, 1_000, 10_000, 100_000)
_UNIT_BYTES: Final = 256
_LAYOUT: Final = Layout((_UNIT_BYTES,), (_UNIT_BYTES,))


class _Full:
    """A machine whose arena is full of READY snapshots, and which has *spare* that a reader holds."""

    def __init__(self, policy: PolicyName, slabs: int) -> None:
        settings = Settings(sessions_max=2 * slabs + 10, eviction_policy=policy, ended_history_max=1_000)
        self.machine = Machine(settings, {0: SlabAllocator(slabs * 2 * _UNIT_BYTES)})
        self._handles = count(1)
        declared = self.machine.handle(e.LayoutDeclared(at_ns=1, cause_id=1, rank=0, layout=_LAYOUT))
        self._layout = cast("e.Declared", cast("e.Replied", declared[-1]).result).layout_fingerprint
        self.handles = [self.make_ready() for _ in range(slabs)]

    def prepare(self, num_tokens: int = 1) -> int:
        handle = next(self._handles)
        event = e.PrepareAsked(
            at_ns=1, cause_id=1, slab_handle=handle, session_id=str(handle),
            layout_fingerprint=self._layout, num_tokens=num_tokens,
        )  # fmt: skip
        self.machine.handle(event)
        return handle

    def make_ready(self) -> int:
        handle = self.prepare()
        sums = ((0, 0),) * 2
        self.machine.handle(
            e.RankCommitted(
                at_ns=1, cause_id=1, slab_handle=handle, rank=0, num_bytes=2 * _UNIT_BYTES, num_tokens=1,
                checksums=sums,
            )
        )  # fmt: skip
        return handle

    def lease(self, handle: int) -> None:
        self.machine.handle(
            e.LeaseAsked(
                at_ns=1, cause_id=1, slab_handle=handle, rank=0, layout_fingerprint=self._layout
            )
        )  # fmt: skip


def _median_us(ask: Callable[[], object], times: int) -> float:
    taken_ns = []
    for _ in range(times):
        started_ns = time.perf_counter_ns()
        ask()
        taken_ns.append(time.perf_counter_ns() - started_ns)
    return statistics.median(taken_ns) / 1_000


def eviction_us(most: int) -> dict[str, dict[str, float]]:
    """Return what a prepare costs that evicts, by policy, and one that is refused in vain, in us.

    ``refused``: every second slab is being read, so that evicting all the others makes room for many small
    planes and for no large one: the sums fit, and the holes do not.
    """
    sizes = [slabs for slabs in SLAB_COUNTS if slabs <= most]
    report: dict[str, dict[str, float]] = {}
    for policy in POLICIES:
        by_size = {}
        for slabs in sizes:
            full = _Full(policy, slabs)
            by_size[f"at_{slabs}"] = _median_us(full.make_ready, 300)
        report[f"evict_{policy}"] = by_size
    by_size = {}
    for slabs in sizes:
        full = _Full("lru", slabs)
        for handle in full.handles[::2]:
            full.lease(handle)
        by_size[f"at_{slabs}"] = _median_us(lambda full=full: full.prepare(3), 5)  # type: ignore[misc]
    report["refused"] = by_size
    for by_size in report.values():
        first, *_, last = by_size.values()
        by_size["growth"] = last / first
    for case, figures in measure(3_000, 64, 1).items():
        at_us = {name.removeprefix("p50_ns_"): ns / 1_000 for name, ns in figures.items() if "p50" in name}
        report[f"allocator_{case}"] = at_us | {"growth": figures["growth"]}
    return report

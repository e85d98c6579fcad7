"""One run of a trace: P, D, the links, and a sync of one kind, from first arrival to last deadline."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from snapd.errors import InvariantBroken
from snapd.executor import RecordSink
from snapd.replay.chains import Turn
from snapd.replay.clock import SimClock
from snapd.replay.decode import Decode
from snapd.replay.direct import DirectSync
from snapd.replay.link import Link
from snapd.replay.model import Model
from snapd.replay.prefill import Prefill, Prefilled
from snapd.replay.snapshot import NoLog, SnapshotSync
from snapd.replay.sync import Sync
from snapd.replay.tree import PrefixTree
from snapd.units import NS_PER_S

Mode: TypeAlias = Literal["none", "direct", "snapshot"]
# A deadline of 0 means none to the core, so time begins later.
START_NS: Final = NS_PER_S
NEVER: Final = -1


@dataclass(slots=True)
class Run:
    """What happened.

    Attributes:
        prefilled: what P did, by turn.
        ended_ns: when D had sampled the last token, by turn; ``NEVER``: it did not.
        own_tokens: what P held of a prompt before a snapshot was ingested for it, by turn.
        pool_tokens: P's.
        p_busy_ns: time that P spent in steps and copies.
        p_steps: steps that computed something.
        p_rejected: turns whose prompt is larger than P's pool.
        p_evicted_tokens: from P's tree.
        d_waited: turns for which D had no room at once.
        until_ns: when the last turn had ended.
        resent: snapshots that D sent whole after P had lost what the suffix built on.
        buffer_peak_bytes: most of the buffer that was taken.
    """

    mode: Mode
    sync: Sync
    prefilled: list[Prefilled]
    ended_ns: list[int]
    pool_tokens: int
    p_busy_ns: int = 0
    p_steps: int = 0
    p_rejected: int = 0
    p_evicted_tokens: int = 0
    d_waited: int = 0
    until_ns: int = 0
    own_tokens: dict[int, int] = field(default_factory=dict)
    resent: int = 0
    buffer_peak_bytes: int = 0


def run_trace(mode: Mode, model: Model, turns: Sequence[Turn], log: RecordSink | None = None) -> Run:
    """Run the trace and return what happened.

    Args:
        mode: ``none``: nothing comes back from D; ``direct``: D writes into P's pool; ``snapshot``: snapd.
        model: the machines.
        turns: in order of arrival.
        log: takes the core's records in the snapshot run.

    Raises:
        ConfigError: the buffer leaves P no slots.
        InvariantBroken: slots or snapshots were lost, a bug.
    """
    clock = SimClock()
    clock.at(START_NS, lambda: None)
    clock.run()
    pool_tokens = model.snapshot_pool_tokens if mode == "snapshot" else model.kv_pool_tokens
    tree = PrefixTree(pool_tokens, turns)
    to_decode, to_prefill = Link(clock), Link(clock)
    sync: Sync = Sync()
    if mode == "direct":
        sync = DirectSync(model, tree, to_prefill)
    elif mode == "snapshot":
        sync = SnapshotSync(model, clock, tree, to_prefill, turns, log or NoLog())
    ended_ns = [NEVER] * len(turns)

    def ended(turn: Turn) -> None:
        ended_ns[turn.index] = clock.now_ns() - START_NS
        sync.turn_ended(turn)

    decode = Decode(model, clock, ended)
    prefilled = [Prefilled() for _ in turns]
    prefill = Prefill(model, clock, tree, sync, to_decode, decode.reserve, decode.begin, prefilled)
    if isinstance(sync, DirectSync):
        sync.connect(decode)
    elif isinstance(sync, SnapshotSync):
        sync.connect(decode, prefill.wake)
    for turn in turns:
        clock.at(START_NS + turn.at_ns, lambda turn=turn: prefill.submit(turn))  # type: ignore[misc]
    clock.run()
    tree.validate()
    for result in prefilled:
        result.began_ns -= START_NS if result.began_ns >= 0 else 0
        result.done_ns -= START_NS if result.done_ns >= 0 else 0
    run = Run(
        mode,
        sync,
        prefilled,
        ended_ns,
        pool_tokens,
        p_busy_ns=prefill.busy_ns,
        p_steps=prefill.steps,
        p_rejected=prefill.rejected,
        p_evicted_tokens=tree.evicted_tokens,
        d_waited=decode.waited,
        until_ns=max(ended_ns),
    )
    if tree.in_flight_tokens:
        raise InvariantBroken(f"{tree.in_flight_tokens} slots of P are in flight at the end")
    if isinstance(sync, SnapshotSync):
        _close_snapshot(run, sync)
    return run


def _close_snapshot(run: Run, sync: SnapshotSync) -> None:
    """Hold the run's counts against the core's own."""
    sync.machine.validate()
    statistics = sync.machine.statistics()
    counted = {reason.value: count for reason, count in sync.counts.reasons.items() if count}
    known = {reason: count for reason, count in statistics.outcomes_by_reason.items() if count}
    if counted != known or statistics.open_sessions:
        raise InvariantBroken(f"the core counts outcomes {known}, the run {counted}")
    run.own_tokens = sync.own_tokens
    run.resent = sync.resent
    run.buffer_peak_bytes = sync.buffer_peak_bytes

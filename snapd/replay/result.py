"""What a replay says, as ``--json`` prints it."""

import math
from collections.abc import Sequence

import msgspec

from snapd.errors import Reason
from snapd.replay.chains import NO_TURN, Turn
from snapd.replay.model import Model
from snapd.replay.optimum import omniscient_tokens, optimal_tokens, reusable_tokens
from snapd.replay.run import NEVER, Run
from snapd.units import GIB, NS_PER_MS


class Spread(msgspec.Struct, frozen=True):
    """Of one time over many requests, in ms."""

    count: int
    mean_ms: float
    p50_ms: float
    p99_ms: float


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one run came to.

    Attributes:
        attempts: tries to bring one snapshot from D to P; a try that is refused and made again is two.
        ok: those after which P had it.
        ok_rate: of all attempts.
        fitting: attempts whose snapshot fits an empty buffer; the others are ``too-large``.
        ok_rate_fitting: of these.
        reasons: how attempts ended.
        nothing_to_send: turns without an attempt, as P had all of it: no or one token was decoded.
        reused_tokens: of the turns before, that P did not compute again at the next turn.
        recomputed_tokens: those that it did.
        reused_from_sync_tokens: of the reused ones, those that P would have lacked without what came back.
        sent_bytes: from D to P.
        resent: snapshots that D sent whole, after P had lost what a suffix builds on.
        alloc_failures: tries to ingest for which P had no slots, kept for later.
        buffer_peak_bytes: most of the buffer that was taken.
        kv_pool_tokens: P's, without the buffer.
        evicted_tokens: from P's tree.
        p_busy_share: of the time until the last token.
        prefilled: requests that P served; the others are larger than its pool.
        ttft_next_ms: until P's first token, of next turns.
        ttft_other_ms: the same of all others.
        ttft_saved_ms: prefill time that what came back has saved, less the copies, by the compute model.
        added_wait_ms: what others waited longer for P to begin than without any sync; may be below 0.
        copy_ms: P's time for copies out of the buffer.
        memory_ms: time that P's memory was busy with writes from D.
    """

    attempts: int
    ok: int
    ok_rate: float
    fitting: int
    ok_rate_fitting: float
    reasons: dict[str, int]
    nothing_to_send: int
    reused_tokens: int
    recomputed_tokens: int
    reused_from_sync_tokens: int
    sent_bytes: int
    resent: int
    alloc_failures: int
    buffer_peak_bytes: int
    kv_pool_tokens: int
    evicted_tokens: int
    p_busy_share: float
    prefilled: int
    ttft_next_ms: Spread
    ttft_other_ms: Spread
    ttft_saved_ms: float
    added_wait_ms: Spread
    copy_ms: float
    memory_ms: float


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was replayed.

    Attributes:
        next_turns: requests that go on from an earlier one.
        branches: of these, those whose earlier turn had gone on already.
        too_early: next turns that came before the turn before had ended on D, in the snapshot run.
        reusable_tokens: what next turns could reuse if everything were kept.
        answer_tokens: of these, those that only D has computed.
    """

    name: str
    requests: int
    bad_lines: tuple[str, ...]
    input_tokens: int
    output_tokens: int
    duration_s: float
    sessions: int
    next_turns: int
    branches: int
    too_early: int
    reusable_tokens: int
    answer_tokens: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One replay.

    Attributes:
        model: every figure of the model, with derived ones beside it.
        none: without any sync; what the others are held against.
        direct: D writes into P's pool.
        snapshot: snapd.
        optimal_reused_tokens: bound for the buffer: no eviction policy and no ingest time can do better.
        of_optimal: what the snapshot run reaches of it; mostly P's own cache.
        of_optimal_from_sync: the same without what P would have had anyway: what syncs brought, of that and
            what they could have brought besides.
        omniscient_reused_tokens: bound for P's pool and the buffer as one cache that knows the future.
        of_omniscient: what the snapshot run reaches of it.
    """

    version: str
    trace: TraceFacts
    model: Model
    token_bytes: int
    none: RunResult
    direct: RunResult
    snapshot: RunResult
    optimal_reused_tokens: int
    of_optimal: float
    of_optimal_from_sync: float
    omniscient_reused_tokens: int
    of_omniscient: float


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot run with one size of the buffer."""

    buffer_bytes: int
    snapshot: RunResult
    optimal_reused_tokens: int
    of_optimal: float
    of_optimal_from_sync: float
    omniscient_reused_tokens: int
    of_omniscient: float


class SweepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Replays of one trace with buffers of several sizes.

    Attributes:
        model: of all of them, but for the buffer's size.
        points: smallest buffer first.
    """

    version: str
    trace: TraceFacts
    model: Model
    token_bytes: int
    none: RunResult
    direct: RunResult
    points: tuple[SweepPoint, ...]


def spread(values_ns: Sequence[int]) -> Spread:
    """Return mean and nearest-rank percentiles; all 0 without values."""
    ordered = sorted(values_ns)
    if not ordered:
        return Spread(0, 0.0, 0.0, 0.0)

    def percentile(share: float) -> float:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)] / NS_PER_MS, 3)

    mean_ms = round(sum(ordered) / len(ordered) / NS_PER_MS, 3)
    return Spread(len(ordered), mean_ms, percentile(0.5), percentile(0.99))


def share(part: float, whole: float) -> float:
    """Return the share, to four digits; 0 of nothing."""
    return round(part / whole, 4) if whole else 0.0


def trace_facts(name: str, bad_lines: tuple[str, ...], turns: Sequence[Turn], snapshot: Run) -> TraceFacts:
    """Return what was replayed."""
    next_turns = [turn for turn in turns if turn.parent != NO_TURN]
    reusable = sum(reusable_tokens(turn, turns) for turn in next_turns)
    prompts = sum(min(turns[turn.parent].input_tokens, reusable_tokens(turn, turns)) for turn in next_turns)
    return TraceFacts(
        name=name,
        requests=len(turns),
        bad_lines=bad_lines,
        input_tokens=sum(turn.input_tokens for turn in turns),
        output_tokens=sum(turn.output_tokens for turn in turns),
        duration_s=round((turns[-1].at_ns - turns[0].at_ns) / 1e9, 3),
        sessions=len({turn.session_id for turn in turns}),
        next_turns=len(next_turns),
        branches=sum(max(0, len(turn.children) - 1) for turn in turns),
        too_early=sum(1 for turn in next_turns if not 0 <= snapshot.ended_ns[turn.parent] <= turn.at_ns),
        reusable_tokens=reusable,
        answer_tokens=reusable - prompts,
    )


def run_result(run: Run, none: Run, model: Model, turns: Sequence[Turn]) -> RunResult:
    """Return what a run came to.

    Args:
        run: of any kind.
        none: the run without a sync.
        model: of both.
        turns: of the trace.
    """
    counts = run.sync.counts
    reused = recomputed = synced = 0
    saved_ns = -counts.copied_ns
    next_ns: list[int] = []
    other_ns: list[int] = []
    added_ns: list[int] = []
    for turn in turns:
        done, without = run.prefilled[turn.index], none.prefilled[turn.index]
        if done.done_ns == NEVER:
            continue
        wanted = reusable_tokens(turn, turns)
        got = min(wanted, done.cached_tokens)
        reused += got
        recomputed += wanted - got
        synced += got - min(got, done.unsynced_tokens)
        saved_ns += model.prefill_ns(done.unsynced_tokens, turn.input_tokens)
        saved_ns -= model.prefill_ns(done.cached_tokens, turn.input_tokens)
        (other_ns if turn.parent == NO_TURN else next_ns).append(done.done_ns - turn.at_ns)
        if turn.parent == NO_TURN and without.began_ns != NEVER:
            added_ns.append(done.began_ns - without.began_ns)
    ok = counts.reasons[Reason.OK]
    return RunResult(
        attempts=counts.attempts,
        ok=ok,
        ok_rate=share(ok, counts.attempts),
        fitting=counts.fitting,
        ok_rate_fitting=share(ok, counts.fitting),
        reasons={reason.value: count for reason, count in counts.reasons.most_common()},
        nothing_to_send=counts.nothing_to_send,
        reused_tokens=reused,
        recomputed_tokens=recomputed,
        reused_from_sync_tokens=synced,
        sent_bytes=counts.sent_tokens * model.token_bytes,
        resent=run.resent,
        alloc_failures=counts.bounced,
        buffer_peak_bytes=run.buffer_peak_bytes,
        kv_pool_tokens=run.pool_tokens,
        evicted_tokens=run.p_evicted_tokens,
        p_busy_share=share(run.p_busy_ns, run.until_ns),
        prefilled=len(next_ns) + len(other_ns),
        ttft_next_ms=spread(next_ns),
        ttft_other_ms=spread(other_ns),
        ttft_saved_ms=round(saved_ns / NS_PER_MS, 3),
        added_wait_ms=spread(added_ns),
        copy_ms=round(counts.copied_ns / NS_PER_MS, 3),
        memory_ms=round(counts.written_ns / NS_PER_MS, 3),
    )


class Bounds(msgspec.Struct, frozen=True):
    """See ``Result``."""

    optimal_reused_tokens: int
    omniscient_reused_tokens: int

    def of_optimal_from_sync(self, found: RunResult) -> float:
        """See ``Result``."""
        brought = found.reused_from_sync_tokens
        return share(brought, brought + self.optimal_reused_tokens - found.reused_tokens)


def bounds(run: Run, model: Model, turns: Sequence[Turn]) -> Bounds:
    """Return what somebody who knows the future could have reused."""
    link_ns_per_token = model.link_ns(1_000_000) / 1_000_000
    return Bounds(
        optimal_tokens(run, turns, model.buffer_tokens, link_ns_per_token),
        omniscient_tokens(run, turns, run.pool_tokens + model.buffer_tokens),
    )


def shown_gib(size_bytes: int) -> float:
    """Return GiB, for axes."""
    return size_bytes / GIB

"""What a play came to: figures out of the event log, and every cross-check that failed."""

import msgspec

from snapd.demo import messages as m
from snapd.demo.chaos import Incident
from snapd.demo.logfacts import LogFacts, Percentiles
from snapd.demo.plan import Plan
from snapd.demo.stage import Seat, Tally
from snapd.wire import StatsRep


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The closing summary; ``--json`` prints it as it is.

    Attributes:
        transport: how bytes travelled from D to the daemon.
        sessions: sessions that were played.
        turns: turns of them.
        attempts: attempts that got a grant.
        ingested, aborted, refused: outcomes, by kind.
        corrupt: ingests of which a byte differed from what D had.
        bytes: payload of the attempts that were ingested, all ranks.
        compared_bytes: compared between P's slots and D's: every time the whole session.
        ok_rate: outcomes that are ok, of all.
        reasons: outcomes by reason.
        states_ms: time that attempts spent in each state.
        alloc_failed: attempts for which a rank had no slots when it finalized, once or more often.
        alloc_failures: how often in all.
        leases_expired: leases that ended because their rank did not vote in time.
        given_up: turns whose snapshot P did not get; the next turn's push brings the tokens along.
        pushes_again: pushes of a turn after its first.
        retried_pieces: writes that failed and were repeated.
        undrained_commits: commits without drain proof: a write that failed before may still have landed.
        quarantined_bytes: bytes that nobody could reuse for a while, because a write might still have landed
            or somebody might still have read; all ranks.
        tree_evicted: sessions that P's own work evicted from a tree.
        kills: D processes that were killed.
        incidents: what was done on purpose, and to which attempts.
        play_s: from the first request to the last comparison.
        wall_s: with start and end.
        gb_per_s: ``bytes`` over ``play_s``, in 10^9.
        push_gb_per_s: ``bytes`` over the time that their attempts were TRANSFERRING.
        faults: what must not happen; each a sentence. None: everything holds.
        seed: of everything random.
        log: the event log.
    """

    transport: str
    sessions: int
    turns: int
    attempts: int
    ingested: int
    aborted: int
    refused: int
    corrupt: int
    bytes: int
    compared_bytes: int
    ok_rate: float
    reasons: dict[str, int]
    states_ms: dict[str, Percentiles]
    alloc_failed: int
    alloc_failures: int
    leases_expired: int
    given_up: int
    pushes_again: int
    retried_pieces: int
    undrained_commits: int
    quarantined_bytes: int
    tree_evicted: int
    kills: int
    incidents: tuple[Incident, ...]
    play_s: float
    wall_s: float
    gb_per_s: float
    push_gb_per_s: float
    faults: tuple[str, ...]
    seed: int
    log: str

    @property
    def is_good(self) -> bool:
        """No byte differs, every attempt has an outcome, nothing leaked."""
        return not self.corrupt and not self.faults


def cross_check(
    facts: LogFacts, tally: Tally, stats: StatsRep, trees: list[m.TreeReport], seats: list[Seat]
) -> list[str]:
    """Hold the log, the daemon's books and what the workers saw against each other; return what differs."""
    faults = [*facts.faults, *tally.faults]

    def check(is_so: bool, otherwise: str) -> None:
        if not is_so:
            faults.append(otherwise)

    core = stats.core
    counted = {reason: count for reason, count in core.outcomes_by_reason.items() if count}
    check(counted == facts.reasons, f"the daemon counts outcomes {counted} and the log {facts.reasons}")
    check(core.open_sessions == 0, f"{core.open_sessions} attempts are open at the end")
    check(core.quarantined_shards == 0, f"{core.quarantined_shards} shards are in quarantine at the end")
    for arena in core.arenas:
        parts_bytes = arena.free_bytes + arena.live_bytes + arena.quarantined_bytes
        check(
            parts_bytes == arena.capacity_bytes,
            f"arena {arena.rank}: free + live + quarantined is no capacity",
        )
        leaked_bytes = arena.capacity_bytes - arena.free_bytes - arena.quarantined_bytes
        check(leaked_bytes == 0, f"arena {arena.rank}: {leaked_bytes} bytes leaked")
    check(stats.log.dropped == 0, f"the log lacks {stats.log.dropped} lines")
    ingested = {outcome.slab_handle: outcome.bytes for outcome in facts.ingested}
    check(sum(ingested.values()) == core.bytes_ingested, "the daemon and the log differ in bytes ingested")
    check(ingested == tally.ingested, "P's ranks ingested other attempts, or bytes, than the log says")
    unknown = tally.handles - facts.attempts.keys()
    check(not unknown, f"the log knows nothing of attempts {sorted(unknown)}")
    faults += _check_trees(trees)
    for seat in seats:
        check(seat.used_slots == 0, f"{seat.worker.name}: {seat.used_slots} slots leaked")
    return faults


def _check_trees(trees: list[m.TreeReport]) -> list[str]:
    faults: list[str] = []
    first = trees[0]
    for rank, tree in enumerate(trees):
        if sorted(tree.inserted) != sorted(first.inserted):
            faults.append(f"rank {rank} inserted other attempts than rank 0")
        latest = {entry.session_id: entry.end_tokens for entry in tree.inserted}
        if any(latest.get(session_id) != end_tokens for session_id, end_tokens in tree.resident.items()):
            faults.append(f"rank {rank} has a session in its tree that was not inserted so")
        if tree.free_slots + tree.cached_slots != tree.total_slots:
            faults.append(f"rank {rank}: free and cached slots are not the pool's {tree.total_slots}")
        if tree.free_slots_after != tree.total_slots:
            faults.append(f"rank {rank}: {tree.total_slots - tree.free_slots_after} slots leaked")
    return faults


def make_result(
    plan: Plan,
    facts: LogFacts,
    tally: Tally,
    trees: list[m.TreeReport],
    faults: list[str],
    incidents: list[Incident],
    *,
    play_s: float,
    wall_s: float,
    seed: int,
    log: str,
) -> Result:
    """Return the summary."""
    num_bytes = sum(outcome.bytes for outcome in facts.ingested)
    transferring_s = sum(outcome.transferring_ms for outcome in facts.ingested) / 1e3
    return Result(
        transport=facts.transport,
        sessions=len(plan.sessions),
        turns=plan.num_turns,
        attempts=len(facts.attempts),
        ingested=len(facts.ingested),
        aborted=facts.aborted,
        refused=facts.refused,
        corrupt=tally.corrupt,
        bytes=num_bytes,
        compared_bytes=tally.compared_bytes,
        ok_rate=round(facts.ok_rate, 4),
        reasons=facts.reasons,
        states_ms=facts.time_in_states(),
        alloc_failed=len(tally.alloc_failed),
        alloc_failures=sum(tree.alloc_failures for tree in trees),
        leases_expired=facts.leases_expired,
        given_up=tally.given_up,
        pushes_again=tally.pushes_again,
        retried_pieces=tally.retried_pieces,
        undrained_commits=tally.undrained_commits,
        quarantined_bytes=facts.quarantined_bytes,
        tree_evicted=sum(tree.evicted for tree in trees),
        kills=tally.kills,
        incidents=tuple(incidents),
        play_s=round(play_s, 3),
        wall_s=round(wall_s, 3),
        gb_per_s=round(num_bytes / play_s / 1e9, 3),
        push_gb_per_s=round(num_bytes / transferring_s / 1e9, 3) if transferring_s else 0.0,
        faults=tuple(faults),
        seed=seed,
        log=log,
    )

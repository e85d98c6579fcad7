"""A P rank: leases, copies what it may read, compares the sums, votes, and inserts when all ranks do.

It goes by the rules of ``snapd.kv.Ingester``: what it read too slowly is not trusted, a vote whose answer was
lost is cast once more, and the ranks of one engine all do what the first of them heard.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from snapd import calls
from snapd.calls import Call
from snapd.core.events import State
from snapd.errors import ConnectionProblem, Reason, RequestError, SnapdError
from snapd.units import NS_PER_MS, align_down
from snapd.wire import BeginIngestRep, LookupRep, VoteRep
from tools.simulation.client import TIMEOUT_MS, Ask, Signal, SimLink, Steps, Task
from tools.simulation.clock import Node
from tools.simulation.daemon import DAEMON_UID
from tools.simulation.dice import Dice
from tools.simulation.failure import Broken
from tools.simulation.memory import checksum, places_of
from tools.simulation.plan import PAGE_TOKENS

if TYPE_CHECKING:
    from tools.simulation.world import World

_VOTES_MAX: Final = 2
_TRIES_MAX: Final = 40
_NO_REASONS: Final = {
    "no-slots": (Reason.ALLOC_FAILED_ON_FINALIZE, False),
    "no-slots-kept": (Reason.ALLOC_FAILED_ON_FINALIZE, True),
    "broken": (Reason.INGEST_FAILED, False),
    "broken-kept": (Reason.INGEST_FAILED, True),
}


class Cached:
    """What a rank's tree holds of a session.

    Attributes:
        history: whose tokens.
        num_tokens: of them, from the first on.
        planes: their bytes, shape [num_planes].
    """

    def __init__(self, history: int, num_tokens: int, planes: list[bytes]) -> None:
        self.history = history
        self.num_tokens = num_tokens
        self.planes = planes


class Ingest:
    """One ingest over the ranks of an engine, and what they agree on.

    Attributes:
        key: which namespace, and which of its sessions.
        handle, epoch: the attempt.
        history, num_tokens: of the prompt.
        ranks: that take part.
        way: see ``plan.READS``.
        seed: of what chance there is in it.
        leader: what the first rank heard: True or False.
        heard: what each rank was answered to a vote of yes.
        inserted: what each rank did at the end.
        left: ranks that are not done.
    """

    def __init__(
        self,
        key: tuple[int, int],
        attempt: tuple[int, str],
        prompt: tuple[int, int],
        ranks: Sequence[int],
        way: str,
        seed: int,
    ) -> None:
        self.key = key
        self.handle, self.epoch = attempt
        self.history, self.num_tokens = prompt
        self.ranks = tuple(ranks)
        self.way = way
        self.seed = seed
        self.leader = Signal()
        self.heard: dict[int, bool] = {}
        self.inserted: dict[int, bool] = {}
        self.left = set(ranks)
        self.is_over = Signal()

    def say(self, rank: int, commit: bool) -> None:
        """A rank knows, as far as it goes; the first one's word counts."""
        if rank == self.ranks[0]:
            self.leader.set(("commit", commit))

    def end(self, rank: int, *, is_alive: bool) -> None:
        """A rank is done, or dead."""
        if rank not in self.left:
            return
        self.left.discard(rank)
        if not is_alive:
            self.say(rank, False)
            self.inserted.pop(rank, None)
        if not self.left:
            self.is_over.set(True)
            self._check()

    def _check(self) -> None:
        if len(set(self.heard.values())) > 1:
            raise Broken("ranks-differ", f"attempt {self.handle}: ranks were told {self.heard}")
        if len(set(self.inserted.values())) > 1:
            raise Broken("ranks-differ", f"attempt {self.handle}: ranks inserted {self.inserted}")


class Prefill:
    """One rank's process; it may die and come back, with nothing in its tree.

    Attributes:
        rank: of it.
        node: its process.
        link: its connection.
        tree: what it holds, by namespace and session.
        ingests: those under way.
    """

    def __init__(self, world: "World", rank: int) -> None:
        self._world = world
        self.rank = rank
        self.tree: dict[tuple[int, int], Cached] = {}
        self.ingests: list[Ingest] = []
        self.revive()

    def revive(self) -> None:
        """Start a process, which declares its layouts."""
        self._declared: set[str] = set()
        self.pid = self._world.new_pid()
        self.node = Node(self._world.timeline, self.pid * 1_000_000_007)
        latency_ns = self._world.plan.setup.latency_us * 1_000
        self.link = SimLink(self._world, self.node, f"p{self.rank}", self.pid, DAEMON_UID, latency_ns)
        Task(self._world, self.node, self.link, self._declare())

    def kill(self) -> None:
        """End the process."""
        self.node.kill()
        self.link.close()
        self.tree.clear()
        self._world.process_exited(self.pid)
        for ingest in list(self.ingests):
            ingest.end(self.rank, is_alive=False)
        self.ingests.clear()

    def notice(self) -> None:
        """Ask whether the daemon is there: in a new life of it this declares the layouts again."""
        Task(self._world, self.node, self.link, self._declare())

    def start(self, ingest: Ingest) -> None:
        """Take part in an ingest."""
        if not self.node.is_alive:
            ingest.end(self.rank, is_alive=False)
            return
        self.ingests.append(ingest)

        def over() -> None:
            self.ingests.remove(ingest)
            ingest.end(self.rank, is_alive=True)

        Task(self._world, self.node, self.link, self._ingest(ingest), over)

    def look_up(self, ingest: Ingest) -> None:
        """Find what there is of a session, then ingest it on every rank that has a shard."""
        if self.node.is_alive:
            Task(self._world, self.node, self.link, self._look_up(ingest))

    def resident_tokens(self, key: tuple[int, int], history: int) -> int:
        """Return how many of a history's tokens are in the tree."""
        cached = self.tree.get(key)
        return cached.num_tokens if cached is not None and cached.history == history else 0

    # --- tasks ---------------------------------------------------------------------------------

    def _declare(self) -> Steps:
        """Declare what was not; the client declares the rest again by itself, once it has to connect."""
        yield from self._try(calls.ping())
        for layout, name in self._world.layouts[: self._world.plan.setup.layouts]:
            if name in self._declared:
                continue
            told = yield from self._try(calls.declare_layout(self.rank, layout))
            if told not in (None, name):
                raise Broken("fingerprint", f"the daemon names a layout {told}, P {name}")
            if told == name:
                self._declared.add(name)

    def _try(self, call: Call[Any]) -> Any:
        for _ in range(_TRIES_MAX):
            try:
                return (yield Ask(call))
            except SnapdError:
                yield 100 * NS_PER_MS
        return None

    def _look_up(self, ingest: Ingest) -> Steps:
        _, name = self._world.layouts[ingest.key[0]]
        session_id = self._world.session_id(*ingest.key)
        resident_tokens = self.resident_tokens(ingest.key, ingest.history)
        keys: tuple[str, ...] = ()
        if ingest.way == "prefix":
            keys = self._world.content.page_keys(ingest.history, ingest.num_tokens, PAGE_TOKENS)
        try:
            found: LookupRep = yield Ask(
                calls.lookup(
                    name, session_id="" if keys else session_id, page_keys=keys[:24],
                    resident_tokens=resident_tokens if keys else 0,
                )
            )  # fmt: skip
        except SnapdError:
            return
        if found.slab_handle:
            ingest.handle, ingest.epoch = found.slab_handle, self.link.epoch
            if found.session_id != session_id:
                raise Broken("lookup", f"{found.session_id} was found for {session_id}")
            self._world.engine.begin(ingest, found.ranks)

    def _ingest(self, ingest: Ingest) -> Steps:
        dice = Dice(ingest.seed, self.rank)
        ingest.inserted[self.rank] = False
        yield dice.below(NS_PER_MS)
        if ingest.way in ("skewed", "revote") and self.rank == ingest.ranks[-1]:
            yield dice.between(50, 400) * NS_PER_MS
        _, name = self._world.layouts[ingest.key[0]]
        session_id = self._world.session_id(*ingest.key)
        if ingest.way == "odd":
            yield from self._ask_oddly(ingest, name, session_id, dice)
        asked_ns = self.node.now_ns()
        try:
            lease: BeginIngestRep = yield Ask(
                calls.begin_ingest(ingest.handle, self.rank, name, session_id=session_id, epoch=ingest.epoch)
            )
        except SnapdError:
            ingest.say(self.rank, False)
            return
        lease_end_ns = asked_ns + lease.lease_ms * NS_PER_MS
        answer = yield from self._read(ingest, lease, lease_end_ns, dice)
        if answer is None:
            ingest.say(self.rank, False)
            return
        copied, resident_tokens = answer
        commit = yield from self._vote_yes(ingest, lease, dice)
        ingest.say(self.rank, commit)
        _, commit = yield ingest.leader
        if commit:
            self._insert(ingest, lease, copied, resident_tokens)
            ingest.inserted[self.rank] = True

    def _ask_oddly(self, ingest: Ingest, name: str, session_id: str, dice: Dice) -> Steps:
        """Ask for what must be refused and change nothing."""
        handle, rank, epoch = ingest.handle, self.rank, ingest.epoch
        wrong: list[Call[Any]] = [
            calls.begin_ingest(handle, rank + 7, name, session_id=session_id, epoch=epoch),
            calls.begin_ingest(handle, rank, "f" * 32, session_id=session_id, epoch=epoch),
            calls.begin_ingest(handle, rank, name, session_id="another", epoch=epoch),
            calls.begin_ingest(handle, rank, name, session_id=session_id, epoch="0" * 16),
            calls.vote(handle, rank, 999_999, ok=True, epoch=epoch),
            calls.vote(handle, rank + 7, 1, ok=True, epoch=epoch),
            calls.vote(handle, rank, 1, ok=False, reason=Reason.OK, epoch=epoch),
            calls.transfer_failed(handle, reason=Reason.EVICTED, epoch=epoch),
            calls.declare_layout(rank + 7, self._world.layouts[0][0]),
            calls.lookup(name, page_keys=("k",) * 40),
            calls.list_sessions(limit=0),
        ]
        for call in dice.shuffled(wrong):
            try:
                yield Ask(call)
            except SnapdError:
                continue
            raise Broken("odd", f"attempt {handle}: what must be refused was done: {call.request}")

    def _read(self, ingest: Ingest, lease: BeginIngestRep, lease_end_ns: int, dice: Dice) -> Any:
        """Copy the shard; return its planes and what was resident, or vote no and return None."""
        end_tokens = lease.token_start + lease.num_tokens
        history = ingest.history + 500 if ingest.way == "tokens" else ingest.history
        digest = self._world.content.token_digest(history, end_tokens)
        if ingest.num_tokens < end_tokens or digest != lease.token_digest:
            yield from self._vote_no(ingest, lease, Reason.TOKEN_MISMATCH, keep=False)
            return None
        resident_tokens = min(self.resident_tokens(ingest.key, history), end_tokens)
        resident_tokens = align_down(resident_tokens, PAGE_TOKENS)
        if resident_tokens < lease.token_start:
            yield from self._vote_no(ingest, lease, Reason.PREFIX_NOT_RESIDENT, keep=dice.chance(50))
            return None
        if ingest.way in _NO_REASONS and self.rank == ingest.ranks[-1]:
            reason, keep = _NO_REASONS[ingest.way]
            yield from self._vote_no(ingest, lease, reason, keep=keep)
            return None
        if ingest.way == "one-rank" and self.rank != ingest.ranks[-1]:
            return None
        copied: list[bytes] = []
        memory = self._world.memory_of(ingest.epoch)[self.rank].buffer
        for place in places_of(lease.grant, lease.num_tokens):
            if self.node.now_ns() < lease_end_ns:
                self._world.check_reading(ingest.epoch, ingest.handle, self.rank)
            copied.append(bytes(memory[place.offset_bytes : place.offset_bytes + place.size_bytes]))
            if ingest.way == "dies" and self.rank == ingest.ranks[0]:
                self._world.kill_prefill(self, dice.between(50, 1_500))
            yield self._step_ns(ingest, lease, dice)
        if sums_differ(lease.checksums, copied):
            if self.node.now_ns() >= lease_end_ns:
                # Others may write there by now: nothing is known of the snapshot.
                yield from self._vote_no(ingest, lease, Reason.INGEST_FAILED, keep=True)
            else:
                self._world.corrupt_seen += 1
                yield from self._vote_no(ingest, lease, Reason.CHECKSUM_MISMATCH, keep=False)
            return None
        return copied, resident_tokens

    def _step_ns(self, ingest: Ingest, lease: BeginIngestRep, dice: Dice) -> int:
        lease_ms = self._world.plan.setup.settings["lease_ms"]
        if ingest.way == "slow":
            return dice.below(lease_ms * NS_PER_MS // (1 + len(lease.checksums)))
        if ingest.way == "too-late" and self.rank == ingest.ranks[-1]:
            return dice.between(lease_ms // 4, lease_ms) * NS_PER_MS
        return dice.below(200_000)

    def _vote_no(self, ingest: Ingest, lease: BeginIngestRep, reason: Reason, *, keep: bool) -> Steps:
        try:
            answer: VoteRep = yield Ask(
                calls.vote(
                    ingest.handle,
                    self.rank,
                    lease.lease_id,
                    ok=False,
                    reason=reason,
                    keep=keep,
                    epoch=ingest.epoch,
                )
            )
        except SnapdError:
            return
        if answer.commit:
            raise Broken("vote", f"attempt {ingest.handle}: rank {self.rank} votes no and is told to commit")
        if not keep and answer.state is not State.ABORTED:
            raise Broken("vote", f"attempt {ingest.handle} is {answer.state} after a no that ends it")

    def _vote_yes(self, ingest: Ingest, lease: BeginIngestRep, dice: Dice) -> Any:
        """Vote, twice if the answer is lost, and return whether to commit, as far as this rank knows."""
        vote = calls.vote(ingest.handle, self.rank, lease.lease_id, ok=True, epoch=ingest.epoch)
        if ingest.way == "revote":
            Task(self._world, self.node, self.link, self._repeat(vote, dice))
        for _ in range(_VOTES_MAX):
            try:
                answer: VoteRep = yield Ask(vote, lease.lease_ms + TIMEOUT_MS)
            except ConnectionProblem:
                continue
            except RequestError:
                return False
            told = {answer.commit, answer.reason is Reason.OK, answer.state is State.INGESTED}
            if len(told) > 1:
                message = f"commit {answer.commit}, {answer.reason}, {answer.state}"
                raise Broken("vote", f"attempt {ingest.handle}: {message}")
            ingest.heard[self.rank] = answer.commit
            return answer.commit
        return False

    def _repeat(self, vote: Any, dice: Dice) -> Steps:
        yield dice.between(1, 30) * NS_PER_MS
        try:
            yield Ask(vote)
        except SnapdError:
            return

    def _insert(
        self, ingest: Ingest, lease: BeginIngestRep, copied: list[bytes], resident_tokens: int
    ) -> None:
        """Put what was read into the tree, behind what is there. Every byte must be what D has."""
        layout, name = self._world.layouts[ingest.key[0]]
        key = ingest.key
        end_tokens = lease.token_start + lease.num_tokens
        cached = self.tree.get(key)
        if cached is None or cached.history != ingest.history:
            cached = Cached(ingest.history, 0, [b""] * layout.num_planes)
        if cached.num_tokens < resident_tokens:
            return  # It was evicted meanwhile; an engine would have pinned it.
        skip_tokens = resident_tokens - lease.token_start
        planes = [
            old[: resident_tokens * stride_bytes] + new[skip_tokens * stride_bytes :]
            for old, new, stride_bytes in zip(cached.planes, copied, layout.plane_stride_bytes, strict=True)
        ]
        self.tree[key] = Cached(ingest.history, end_tokens, planes)
        self._world.engine.note_insert(ingest, self.rank, end_tokens)
        if planes != self._world.content.planes(layout, name, ingest.history, self.rank, 0, end_tokens):
            raise Broken(
                "corrupt-tree",
                f"attempt {ingest.handle}: rank {self.rank}'s tree holds other bytes than D committed",
            )


def sums_differ(committed: Sequence[tuple[int, int]], planes: Sequence[bytes]) -> bool:
    """Return whether what was read is not what D committed."""
    return [tuple(pair) for pair in committed] != [checksum(plane) for plane in planes]

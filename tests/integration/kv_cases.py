"""P and D around a real daemon: pools of random bytes, P's slots and tree, and what must hold afterwards."""

import contextlib
import dataclasses
import gc
import itertools
import math
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from raw_client import LogFollower, check_sums, is_all_free, log_events, wait_for

from snapd.client import Client
from snapd.core.events import State
from snapd.core.session import SessionView, Statistics
from snapd.kv.ingest import Ingester, IngestJob
from snapd.kv.pool import KVPool
from snapd.kv.push import Pusher, PushJob, PushResult
from snapd.layout import Namespace
from snapd.mapping import MappedArena, map_arena
from snapd.wire import SnapshotFinalizeIngestReqOutput

POISON = 0xA5
STEP_BYTES = 1 << 20
PATIENCE_S = 30.0
HERE = Path(__file__).parent
TOKENS = tuple(range(500, 580))
_tenants = itertools.count()


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of kv_pool: the shape of a row in each layer's K (or fused) and V buffer."""

    k_rows: tuple[tuple[int, ...], ...]
    v_rows: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype = torch.bfloat16
    page_size_tokens: int = 1
    reserved_slots: int = 0


def paged(kind: Kind, page_size_tokens: int = 16) -> Kind:
    return dataclasses.replace(kind, page_size_tokens=page_size_tokens)


# K and V of different widths; strides of 32 and 48 bytes.
MHA = Kind(k_rows=((2, 8),) * 3, v_rows=((2, 12),) * 3)
MLA = Kind(k_rows=((1, 36),) * 3)
FP8 = Kind(k_rows=((2, 16),) * 2, v_rows=((2, 24),) * 2, dtype=torch.float8_e4m3fn)
# Strides that are no multiple of a word, and differ by layer.
ODD = Kind(k_rows=((7,), (13,), (3,)), dtype=torch.uint8)
KINDS = {
    "mha": MHA,
    "mha, pages": paged(MHA),
    "mla": MLA,
    "mla, pages": paged(MLA),
    "fp8": FP8,
    "fp8, pages": paged(FP8),
    "odd": ODD,
    "odd, pages": paged(ODD),
    # k_buffer[L] and v_buffer[L] of shape [slots, heads, dim]; slot 0 is for padding.
    "sglang": Kind(k_rows=((4, 16),) * 2, v_rows=((4, 16),) * 2, reserved_slots=1),
    # A block of 32 tokens as opaque rows.
    "vllm": Kind(k_rows=((40,),) * 2, page_size_tokens=32, reserved_slots=32),
}


def make_pool(kind: Kind, num_slots: int, seed: int | None) -> KVPool:
    """Return a pool of random bytes, the same for a seed in every process, or of poison."""
    generator = torch.Generator().manual_seed(seed or 0)

    def buffer(row: tuple[int, ...]) -> torch.Tensor:
        size_bytes = num_slots * math.prod(row) * kind.dtype.itemsize
        content = (
            torch.full((size_bytes,), POISON, dtype=torch.uint8)
            if seed is None
            else torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)
        )
        return content.view(kind.dtype).view(num_slots, *row)

    k_buffers, v_buffers = [buffer(row) for row in kind.k_rows], [buffer(row) for row in kind.v_rows]
    if not v_buffers:
        return KVPool.mla(k_buffers, kind.page_size_tokens)
    return KVPool.mha(k_buffers, v_buffers, kind.page_size_tokens)


def random_slots(kind: Kind, num_slots: int, num_tokens: int, seed: int) -> torch.Tensor:
    """Return slots for tokens: pages in random order, the last may be partial."""
    page = kind.page_size_tokens
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm((num_slots - kind.reserved_slots) // page, generator=generator)
    starts = kind.reserved_slots + pages * page
    return (starts[:, None] + torch.arange(page)).flatten()[:num_tokens]


class Tree:
    """P's slots and tree. Every slot is free, lent to an ingest, or in the tree.

    Attributes:
        allocations: tokens that were asked for, in order.
        limit_tokens: refuse to allocate more; None: as many as there are.
        inserts: sessions that were inserted, in order.
    """

    def __init__(self, kind: Kind, num_slots: int) -> None:
        self.page_size_tokens = kind.page_size_tokens
        slots = random_slots(kind, num_slots, num_slots, seed=99)
        self._pages = [int(slot) for slot in slots[:: kind.page_size_tokens]]
        self._free = list(self._pages)
        self._lent: set[int] = set()
        self._tree: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}
        self._locks: Counter[str] = Counter()
        self.touched: set[int] = set()
        self.allocations: list[int] = []
        self.inserts: list[str] = []
        self.limit_tokens: int | None = None

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._tree

    def tokens(self, session_id: str) -> tuple[int, ...]:
        return self._tree[session_id][0]

    def slots(self, session_id: str) -> torch.Tensor:
        return self._tree[session_id][1]

    def _page_starts(self, slots: torch.Tensor) -> list[int]:
        return slots[:: self.page_size_tokens].tolist()

    def lock_prefix(self, session_id: str, token_ids: Sequence[int]) -> int:
        self._locks[session_id] += 1
        if session_id not in self._tree:
            return 0
        pairs = zip(self._tree[session_id][0], token_ids, strict=False)
        return next(
            (i for i, (mine, other) in enumerate(pairs) if mine != other), len(self._tree[session_id][0])
        )

    def unlock_prefix(self, session_id: str) -> None:
        assert self._locks[session_id] > 0, "unlocked what was not locked"
        self._locks[session_id] -= 1

    def allocate(self, num_tokens: int) -> torch.Tensor | None:
        self.allocations.append(num_tokens)
        pages = -(-num_tokens // self.page_size_tokens)
        if pages > len(self._free) or (self.limit_tokens is not None and num_tokens > self.limit_tokens):
            return None
        taken, self._free = self._free[:pages], self._free[pages:]
        self._lent.update(taken)
        slots = (torch.tensor(taken)[:, None] + torch.arange(self.page_size_tokens)).flatten()[:num_tokens]
        self.touched.update(slots.tolist())
        return slots

    def free(self, slots: torch.Tensor) -> None:
        for page in self._page_starts(slots):
            assert page in self._lent, "gave back what was not lent"
            self._lent.remove(page)
            self._free.append(page)

    def insert(
        self, session_id: str, token_ids: Sequence[int], resident_tokens: int, slots: torch.Tensor
    ) -> None:
        assert self._locks[session_id] > 0, "inserted onto a prefix that is not pinned"
        assert resident_tokens + slots.numel() == len(token_ids)
        assert set(self._page_starts(slots)) <= self._lent, "inserted slots that were not lent"
        before = self._tree[session_id][1] if resident_tokens else torch.empty(0, dtype=torch.int64)
        self._free += self._page_starts(before[resident_tokens:])
        self._lent.difference_update(self._page_starts(slots))
        self._tree[session_id] = (tuple(token_ids), torch.cat((before[:resident_tokens], slots)))
        self.inserts.append(session_id)

    def evict(self, session_id: str) -> None:
        self._free += self._page_starts(self._tree.pop(session_id)[1])

    def check(self) -> None:
        """Nothing is lent, nothing is pinned, and every page is free or in the tree, once."""
        assert not self._lent, "slots leaked"
        assert not any(self._locks.values()), "a prefix is still pinned"
        in_tree = [page for _, slots in self._tree.values() for page in self._page_starts(slots)]
        assert sorted(self._free + in_tree) == sorted(self._pages)


class Pair:
    """D and P, each with a client of its own (P one a rank).

    Attributes:
        d, ps: the clients; pusher, ingesters: on them.
        d_pools, p_pools, trees: by rank.
    """

    def __init__(
        self,
        daemon: Any,
        kind: Kind = MHA,
        *,
        num_ranks: int = 1,
        num_slots: int = 512,
        namespace: Namespace | None = None,
        push: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        # Of its own unless given: what one test has ingested is no hint for the next.
        namespace = namespace or Namespace(tenant=f"tenant-{next(_tenants)}")
        self.kind = kind
        self.num_slots = num_slots
        self.daemon = daemon
        path = str(daemon.socket_path)
        ranks = range(num_ranks)
        self.d = Client(path, timeout_s=PATIENCE_S)
        self.ps = [Client(path, timeout_s=PATIENCE_S) for _ in ranks]
        self.d_pools = {rank: make_pool(kind, num_slots, seed=rank + 1) for rank in ranks}
        self.p_pools = {rank: make_pool(kind, num_slots, seed=None) for rank in ranks}
        self.trees = [Tree(kind, num_slots) for _ in ranks]
        self.ingesters = [
            Ingester(self.ps[rank], rank, self.p_pools[rank], self.trees[rank], namespace, **options)
            for rank in ranks
        ]
        self.pusher = Pusher(self.d, self.d_pools, namespace, **(push or {}))
        self._truth: dict[tuple[int, str], list[torch.Tensor]] = {}

    @property
    def tree(self) -> Tree:
        return self.trees[0]

    @property
    def token_bytes(self) -> int:
        return self.pusher.layout.token_bytes

    def slots(self, num_tokens: int, seed: int = 7) -> torch.Tensor:
        """Return slots in D's pools; fewer tokens of the same seed are a prefix."""
        return random_slots(self.kind, self.num_slots, num_tokens, seed)

    # --- D

    def start(self, session_id: str, token_ids: Sequence[int], slots: torch.Tensor, **fields: Any) -> PushJob:
        """Begin a push, and keep what D's slots hold, to compare."""
        for rank, pool in self.d_pools.items():
            self._truth[rank, session_id] = [plane.rows[slots].clone() for plane in pool.planes]
        return self.pusher.start(session_id, token_ids, slots, **fields)

    def push(
        self, session_id: str, token_ids: Sequence[int], slots: torch.Tensor | None = None, **fields: Any
    ) -> PushResult:
        job = self.start(
            session_id, token_ids, self.slots(len(token_ids)) if slots is None else slots, **fields
        )
        return finish(job).result

    def ready(self, session_id: str, token_ids: Sequence[int], **fields: Any) -> int:
        """Push, which must succeed, and return the handle."""
        result = self.push(session_id, token_ids, **fields)
        assert result.ok, result
        return result.slab_handle

    # --- P

    def start_ingest(self, session_id: str, token_ids: Sequence[int], handle: int) -> list[IngestJob]:
        return [ingester.start(session_id, token_ids, handle) for ingester in self.ingesters]

    def ingest(
        self, session_id: str, token_ids: Sequence[int], handle: int
    ) -> list[SnapshotFinalizeIngestReqOutput]:
        """Ingest on every rank, and return the answers, by rank."""
        return finish_all(self.start_ingest(session_id, token_ids, handle))

    # --- what is there

    def view(self, handle: int) -> SessionView:
        return self.d.get(handle).session

    def core(self) -> Statistics:
        return self.d.stats().core

    def is_all_free(self) -> bool:
        return is_all_free(self.core())

    def check(self) -> None:
        """P holds D's bytes for what is in its tree, no other slot was touched, and nothing leaked."""
        for rank, tree in enumerate(self.trees):
            tree.check()
            for plane_index, plane in enumerate(self.p_pools[rank].planes):
                for session_id, (tokens, slots) in tree._tree.items():
                    truth = self._truth[rank, session_id][plane_index][: len(tokens)]
                    assert torch.equal(plane.rows[slots], truth), f"rank {rank}, plane {plane_index}"
                untouched = torch.ones(self.num_slots, dtype=torch.bool)
                untouched[list(tree.touched)] = False
                assert bool((plane.rows[untouched] == POISON).all()), "a slot of somebody else was written"

    def close(self) -> None:
        for client in (self.d, *self.ps):
            client.close()
        self.pusher.close()
        for ingester in self.ingesters:
            ingester.close()


def finish_all(jobs: Sequence[IngestJob]) -> list[SnapshotFinalizeIngestReqOutput]:
    """Step all jobs until all have ended, and return the answers."""

    def step_all() -> bool:
        steps = [job.step(STEP_BYTES) for job in jobs]
        return all(steps)

    wait_for(step_all, "every rank has its answer", PATIENCE_S)
    return [job.result for job in jobs]


@contextlib.contextmanager
def paired(daemon: Any, kind: Kind = MHA, **options: Any) -> Iterator[Pair]:
    """Yield a pair; at its end P's pools, slots and tree are checked."""
    pair = Pair(daemon, kind, **options)
    try:
        yield pair
        pair.check()
    finally:
        pair.close()


def settle(daemon: Any, follower: LogFollower) -> None:
    """End what is open; then every byte is free, and the log alone tells the same story."""
    with Client(str(daemon.socket_path), timeout_s=PATIENCE_S) as client:
        for session in client.list_sessions(limit=1_000).sessions:
            client.abort(session.slab_handle, drained=True)
        for session in client.list_sessions(states=(State.ABORTED,), limit=1_000).sessions:
            client.drained(session.slab_handle)

        def is_settled() -> bool:
            core = client.stats().core
            check_sums(core)
            follower.follow()
            return is_all_free(core) and core.open_sessions == 0 and follower.agrees_with(core)

        wait_for(is_settled, "every byte is free and the log agrees")
        follower.end()


# --- the log -----------------------------------------------------------------------------------


def records(daemon: Any, event: type, handle: int) -> list[Any]:
    """Return an attempt's records of one kind."""
    lines = log_events(daemon.log_path)
    return [x.record for x in lines if isinstance(x.record, event) and x.record.slab_handle == handle]


def record(daemon: Any, event: type, handle: int) -> Any:
    """Return an attempt's only record of one kind, once it is there."""
    (found,) = wait_for(lambda: records(daemon, event, handle), f"a {event.__name__}")
    return found


# --- the arena ---------------------------------------------------------------------------------


def arena_of(daemon: Any, rank: int = 0) -> MappedArena:
    """Map an arena as a writer does; whoever holds it can write anywhere."""
    return map_arena(str(daemon.socket_path), rank, writable=True, timeout_s=PATIENCE_S)


def flip(arena: MappedArena, offset_bytes: int) -> None:
    arena.buffer[offset_bytes] ^= 0x10


def num_mappings() -> int:
    """Return how many times arenas are mapped in this process; what a failed test left is let go first."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("kv-snapd-arena")


# --- D in a process of its own -------------------------------------------------------------------


class Child:
    """A process with a push under way; ``tell`` has it go on.

    Attributes:
        handle: of its attempt.
    """

    def __init__(self, daemon: Any, session_id: str, num_tokens: int, steps: int) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable, str(HERE / "kv_child.py"), str(daemon.socket_path), session_id,
                str(num_tokens), str(steps),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, "the child has ended"
        self.handle = int(said)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def finish(self) -> PushResult:
        """Have it step to the end, and return the result."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("finish\n")
        self.process.stdin.flush()
        self.signal(signal.SIGCONT)
        return msgspec.json.decode(self.process.stdout.readline(), type=PushResult)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def child(daemon: Any, session_id: str, num_tokens: int, steps: int) -> Iterator[Child]:
    started = Child(daemon, session_id, num_tokens, steps)
    try:
        yield started
    finally:
        started.end()


def step_times(job: PushJob, times: int) -> None:
    """Step a push so many times by one piece; it must not be done."""
    for _ in range(times):
        assert not job.step(1)


def begun(pair: Pair, session_id: str = "s") -> tuple[PushJob, int]:
    """Begin a push and move a part of it; return the job and its handle."""
    job = pair.start(session_id, TOKENS, pair.slots(len(TOKENS)))
    step_times(job, 2)
    assert job.grant is not None
    assert 0 < job.bytes_done < len(TOKENS) * pair.token_bytes
    return job, job.grant.slab_handle


def finish(job: PushJob) -> PushJob:
    while not job.step(STEP_BYTES):
        job.wait()
    return job


def tokens_of(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(range(seed, seed + 3 * num_tokens, 3))


def corrupt_plane(daemon: Any, pair: Pair, handle: int, offset_bytes: int, rank: int = 0) -> None:
    """Change one byte of the first plane, as a late writer would."""
    arena = arena_of(daemon, rank)
    flip(arena, pair.view(handle).shards[rank].extents[0].offset_bytes + offset_bytes)
    arena.close()


def first_turn(pair: Pair, session_id: str, num_tokens: int) -> None:
    tokens = tokens_of(num_tokens)
    handle = pair.ready(session_id, tokens)
    assert all(answer.ok for answer in pair.ingest(session_id, tokens, handle))

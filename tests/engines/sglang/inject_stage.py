"""A real daemon, a D whose KV follows from its tokens, and P with SGLang's real slots and tree."""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang_cases import SIZE_TOKENS, is_true, make_allocator, make_pool, make_tree, tree_slots, truth

from snapd.client import Client
from snapd.core.events import State
from snapd.engines.sglang_inject import Injector
from snapd.engines.sglang_pools import kv_pool_of
from snapd.kv.push import Pusher
from snapd.layout import Namespace
from snapd.mapping import map_arena
from snapd.wire import SnapshotFinalizeIngestReqInput, SnapshotFinalizeIngestReqOutput
from tests.integration.daemon_process import DaemonProcess

PATIENCE_S = 60.0
# Nothing may end because the machine is busy.
PATIENT = {
    "lease_ms": 60_000,
    "reserve_timeout_ms": 120_000,
    "transfer_timeout_ms": 120_000,
    "ready_ttl_ms": 600_000,
}
STEP_BYTES = 1 << 20
_tenants = itertools.count()


@contextlib.contextmanager
def serving(**settings: object) -> Iterator[DaemonProcess]:
    """Run a daemon; it must stop cleanly at the end."""
    with tempfile.TemporaryDirectory(prefix="snapd-") as directory:
        daemon = DaemonProcess(Path(directory), {"size": "4MiB", "quarantine_ms": 50, **PATIENT, **settings})
        try:
            yield daemon
        finally:
            daemon.stop()
        assert "Traceback" not in daemon.stderr, daemon.stderr


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.002)


def tokens_of(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Return a session's tokens; fewer of the same seed are a prefix."""
    return tuple((1_000 * seed + 7 * index) % 32_000 for index in range(num_tokens))


class P:
    """One rank of P: SGLang's real pool, allocator and tree, and an injector.

    Attributes:
        held: slots that P's own requests have, by name; they are not in the tree.
    """

    def __init__(
        self,
        client: Client,
        kind: tuple[str, str, int],
        namespace: Namespace,
        *,
        rank: int = 0,
        size: int = SIZE_TOKENS,
        tree: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        pool_kind, tree_kind, self.page = kind
        self.allocator = make_allocator(make_pool(pool_kind, self.page, size))
        self.tree = make_tree(tree_kind, self.allocator, **(tree or {}))
        self.injector = Injector(client, rank, self.allocator, self.tree, namespace, **options)
        self.pool = self.injector.cache.pool
        self.held: dict[str, torch.Tensor] = {}

    @property
    def available(self) -> int:
        return int(self.allocator.available_size())

    def whole(self, num_tokens: int) -> int:
        return num_tokens // self.page * self.page

    def resident(self, token_ids: Sequence[int], **names: Any) -> int:
        """Return how much of *token_ids* is in the tree; all of it must be true KV."""
        slots = tree_slots(self.tree, token_ids, **names)
        assert is_true(self.pool, token_ids, slots), "the tree holds other bytes than the tokens' KV"
        return len(slots)

    def compute(self, token_ids: Sequence[int]) -> None:
        """Have a request of P's own computed, and cached as SGLang does it."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang_cases import key_of, write_truth

        token_ids = token_ids[: self.whole(len(token_ids))]
        prefix = tree_slots(self.tree, token_ids)
        slots = self.allocator.alloc(len(token_ids) - len(prefix))
        assert slots is not None
        write_truth(self.pool, token_ids, slots, start=len(prefix))
        value = torch.cat((prefix, slots))
        params = InsertParams(key=key_of(token_ids), value=value, prev_prefix_len=len(prefix))
        assert self.tree.insert(params).prefix_len == len(prefix)

    def hold(self, name: str, num_tokens: int) -> None:
        """Have a request of P's own take slots."""
        slots = self.allocator.alloc(num_tokens)
        assert slots is not None and len(slots) == num_tokens
        self.held[name] = slots

    def release(self, name: str) -> None:
        self.allocator.free(self.held.pop(name))

    def fill(self) -> None:
        self.hold("filler", self.available)

    def evict(self, num_tokens: int = SIZE_TOKENS) -> int:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        return int(self.tree.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted)

    def flush(self) -> None:
        """Empty everything, as SGLang does when weights change."""
        self.tree.reset()
        self.allocator.clear()
        self.held.clear()

    def pinned(self) -> int:
        return int(self.tree.protected_size())

    def check(self, *, under_way: Sequence[torch.Tensor] = ()) -> None:
        """Every slot is free, in the tree, P's own or an ingest's: exactly one of them, and nothing leaked.

        The first is SGLang's own check for leaks, with what ingests have counted.
        """
        held = sum(slots.numel() for slots in self.held.values())
        in_tree = self.tree.evictable_size() + self.tree.protected_size()
        books = (self.available, in_tree, held, self.injector.lent_tokens)
        assert sum(books) == self.allocator.size, f"{books} of {self.allocator.size}"
        # An empty RadixCache cannot be asked.
        in_tree = [self.tree.all_values_flatten()] if in_tree else []
        owned = [*in_tree, *self.held.values(), *under_way]
        slots = torch.cat(owned).to(torch.int64) if owned else torch.empty(0, dtype=torch.int64)
        pages = [self.allocator.get_all_free_pages(), torch.unique(slots // self.page)]
        named = torch.cat(pages).tolist()
        assert len(set(named)) == len(named), "a page has two owners"
        assert len(slots) == len(torch.unique(slots)), "a slot has two owners"
        assert sorted(named) == list(range(1, self.allocator.size // self.page + 1)), "a page has no owner"


class Stage:
    """D and P of one kind around a daemon.

    Attributes:
        p: rank 0; ps: all ranks.
    """

    def __init__(
        self,
        daemon: DaemonProcess,
        kind: tuple[str, str, int],
        *,
        num_ranks: int = 1,
        namespace: Namespace | None = None,
        agreement: Any = None,
        **options: Any,
    ) -> None:
        # Of its own: what one test ingested is no hint for the next.
        self.namespace = namespace or Namespace(tenant=f"tenant-{next(_tenants)}")
        self.daemon = daemon
        path = str(daemon.socket_path)
        self.clients = [Client(path, timeout_s=PATIENCE_S) for _ in range(num_ranks + 1)]
        self.ps = [
            P(client, kind, self.namespace, rank=rank, agreement=agreement, **options)
            for rank, client in enumerate(self.clients[1:])
        ]
        self.p = self.ps[0]
        self.d = self.clients[0]
        d_pool = kv_pool_of(make_pool(kind[0], kind[2], 64))
        self.pusher = Pusher(self.d, dict.fromkeys(range(num_ranks), d_pool), self.namespace)

    def ready(self, session_id: str, token_ids: Sequence[int], start: int = 0) -> int:
        """Push KV of tokens from *start* on; return the handle of the READY snapshot."""
        planes = [rows[start:].flatten() for rows in truth(self.p.pool, token_ids)]
        result = self.pusher.push_planes(
            session_id, token_ids, dict.fromkeys(self.pusher.pools, planes), token_start=start
        )
        assert result.ok, result
        return result.slab_handle

    def request(
        self, session_id: str, token_ids: Sequence[int], handle: int
    ) -> SnapshotFinalizeIngestReqInput:
        return SnapshotFinalizeIngestReqInput(
            session_id=session_id, token_ids=tuple(token_ids), slab_handle=handle
        )

    def ingest(
        self, session_id: str, token_ids: Sequence[int], handle: int
    ) -> SnapshotFinalizeIngestReqOutput:
        return self.p.injector.finalize_ingest(self.request(session_id, token_ids, handle))

    def state(self, handle: int) -> State:
        return self.d.get(handle).session.state

    def corrupt(self, handle: int, offset_bytes: int = 0) -> None:
        """Change a byte of the snapshot, as a late writer would."""
        view = self.d.get(handle).session
        arena = map_arena(str(self.daemon.socket_path), 0, writable=True, timeout_s=PATIENCE_S)
        arena.buffer[view.shards[0].extents[0].offset_bytes + offset_bytes] ^= 0x10
        arena.close()

    def close(self) -> None:
        for view in self.d.list_sessions(limit=1_000).sessions:
            self.d.abort(view.slab_handle, drained=True)
        for p in self.ps:
            p.injector.close()
        self.pusher.close()
        for client in self.clients:
            client.close()


@contextlib.contextmanager
def staged(daemon: DaemonProcess, kind: tuple[str, str, int], **options: Any) -> Iterator[Stage]:
    """Yield a stage; at its end P's books balance and nothing is pinned."""
    stage = Stage(daemon, kind, **options)
    try:
        yield stage
        for p in stage.ps:
            p.check()
            assert p.pinned() == 0, "a prefix is still pinned"
            assert p.injector.lent_tokens == 0
    finally:
        stage.close()

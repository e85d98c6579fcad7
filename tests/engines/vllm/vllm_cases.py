"""An engine without vLLM: the scheduler's side, its workers, and memory like a KV cache of vLLM's."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from daemon_process import DaemonProcess
from raw_client import wait_for

from snapd.client import Client
from snapd.core.session import SessionView
from snapd.engines.vllm.kvcache import pool_of
from snapd.engines.vllm.requests import RequestView
from snapd.engines.vllm.scheduling import SchedulerSide
from snapd.engines.vllm.settings import VllmSettings
from snapd.engines.vllm.tally import Counts, add_counts, total
from snapd.engines.vllm.working import WorkerSide
from snapd.errors import SnapdError
from snapd.layout import Namespace

BLOCK = 4
NUM_BLOCKS = 64
PATIENCE_S = 30.0
BASE = Namespace(model="tiny")


def tokens_of(num_tokens: int, seed: int = 0) -> list[int]:
    return [(at * 37 + seed * 1_000) % 900 for at in range(num_tokens)]


# A turn of 22 tokens, of which 20 go over, in blocks of D's; the next turn's prompt; P's blocks.
TURN = tokens_of(22)
SENT = 20
NEXT = [*TURN, *tokens_of(9, seed=1)]
D_BLOCKS = [9, 3, 7, 1, 20, 33]
P_BLOCKS = [40, 2, 17, 30, 8, 9, 10, 11]


@contextlib.contextmanager
def running_daemon(**overrides: object) -> Iterator[DaemonProcess]:
    with tempfile.TemporaryDirectory(prefix="snapd-") as directory:
        daemon = DaemonProcess(Path(directory), {"size": "4MiB", **overrides})
        try:
            yield daemon
        finally:
            daemon.stop()
        assert "Traceback" not in daemon.stderr, daemon.stderr


class Engine:
    """One engine; ``step`` does what vLLM does in a step without a forward pass.

    Attributes:
        caches: by rank and layer, shape [blocks, heads, tokens, content].
        sent, loaded, failed: what was reported so far.
        counts: of the scheduler and all workers.
    """

    def __init__(
        self,
        role: str,
        socket_path: object,
        *,
        ranks: int = 1,
        seed: int = 0,
        start: bool = True,
        worker_clock: Callable[[], float] | None = None,
        **settings: Any,
    ) -> None:
        self.settings = VllmSettings(
            socket_path=str(socket_path),
            **({"timeout_s": 20.0, "answer_wait_s": 1.0, "retry_s": 0.05, "load_timeout_s": 20.0} | settings),
        )
        options: dict[str, Any] = {
            "is_producer": "D" in role,
            "is_consumer": "P" in role,
            "name": f"test {role}",
        }
        generator = torch.Generator().manual_seed(seed)
        self.caches = [
            [torch.rand((NUM_BLOCKS, 2, BLOCK, 6), generator=generator) for _ in range(3)]
            for _ in range(ranks)
        ]
        self.scheduler = SchedulerSide(
            self.settings, block_tokens=BLOCK, ranks=range(ranks), is_one_process=ranks == 1, **options
        )
        self.workers = []
        for rank, layers in enumerate(self.caches):
            pool = pool_of(
                {str(layer): cache for layer, cache in enumerate(layers)},
                num_blocks=NUM_BLOCKS, block_tokens=BLOCK, backends=["TEST"], num_ranks=ranks,
            )  # fmt: skip
            clock = {} if worker_clock is None else {"clock": worker_clock}
            self.workers.append(
                WorkerSide(pool, BASE, self.settings, rank=rank, num_ranks=ranks, **options, **clock)
            )
            self.scheduler.set_layout(pool.layout(BASE))
        self.sent: list[set[str]] = [set() for _ in self.workers]
        self.loaded: list[set[str]] = [set() for _ in self.workers]
        self.failed: list[set[int]] = [set() for _ in self.workers]
        self.counts: Counts = {}
        if start:
            self.start()

    def start(self) -> None:
        for worker in self.workers:
            worker.start()

    def step(self) -> None:
        orders = self.scheduler.orders()
        for rank, worker in enumerate(self.workers):
            worker.take(orders)
            sent, loaded = worker.finished()
            self.sent[rank] |= sent
            self.loaded[rank] |= loaded
            self.failed[rank] |= worker.failed_blocks()
        self.scheduler.sent(set.intersection(*self.sent))
        self.scheduler.loaded(set.intersection(*self.loaded))
        for side in (self.scheduler, *self.workers):
            add_counts(self.counts, side.tally.take())

    def count(self, name: str, reason: str | None = None) -> float:
        self.step()
        return total(self.counts, name, reason)

    # --- D

    def finish(
        self, request_id: str, token_ids: Sequence[int], blocks: Sequence[int], **request: Any
    ) -> tuple[bool, dict[str, Any]]:
        """End a request; its last token was just sampled."""
        view = view_of(request_id, token_ids, **request)
        held, params = self.scheduler.finished(view, list(blocks))
        return held, (params or {}).get("snapd", {})

    def wait_sent(self, request_id: str) -> None:
        def is_sent() -> bool:
            self.step()
            return all(request_id in sent for sent in self.sent)

        wait_for(is_sent, f"{request_id} is sent", PATIENCE_S)

    def push(self, request_id: str, token_ids: Sequence[int], blocks: Sequence[int], **request: Any) -> int:
        """End a request, whose KV must be READY then, and return the handle."""
        held, answer = self.finish(request_id, token_ids, blocks, **request)
        assert held and answer["slab_handle"], answer
        self.wait_sent(request_id)
        assert self.count("pushes", "ok") == self.count("pushes"), self.counts
        return int(answer["slab_handle"])

    # --- P

    def match(self, request_id: str, token_ids: Sequence[int], resident: int = 0, **request: Any) -> int:
        """Return how many tokens the connector wants to load, when it knows."""
        view = view_of(request_id, token_ids, **request)

        def answer() -> tuple[int] | None:
            found = self.scheduler.match(view, resident)
            self.step()
            return None if found is None else (found,)

        return wait_for(answer, "an answer", PATIENCE_S)[0]

    def load(
        self,
        request_id: str,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        resident: int = 0,
        **request: Any,
    ) -> int:
        """Begin a request; return how many tokens were to be loaded. Then look at ``failed``."""
        num_tokens = self.match(request_id, token_ids, resident, **request)
        if num_tokens:
            self.scheduler.allocated(view_of(request_id, token_ids, **request), list(blocks), num_tokens)
            self.wait_loaded(request_id)
        return num_tokens

    def wait_loaded(self, request_id: str) -> None:
        def is_loaded() -> bool:
            self.step()
            return all(request_id in loaded for loaded in self.loaded)

        wait_for(is_loaded, f"{request_id} is loaded", PATIENCE_S)

    def holds(self, blocks: Sequence[int], other: "Engine", others: Sequence[int]) -> bool:
        """Return whether *blocks* of this engine are *others* of the other one, on every rank and layer."""
        return all(
            torch.equal(mine[list(blocks)], theirs[list(others)])
            for my_layers, their_layers in zip(self.caches, other.caches, strict=True)
            for mine, theirs in zip(my_layers, their_layers, strict=True)
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def view_of(request_id: str, token_ids: Sequence[int], session: str = "", **request: Any) -> RequestView:
    asked = request.pop("params", {"snapd": {"session_id": session}} if session else None)
    fields: dict[str, Any] = {
        "num_tokens": len(token_ids), "num_computed_tokens": len(token_ids) - 1, "num_output_tokens": 1,
    }  # fmt: skip
    return RequestView(
        request_id=request_id, tokens=lambda: list(token_ids), params=asked, **(fields | request)
    )


@contextlib.contextmanager
def pair(daemon: DaemonProcess, **options: Any) -> Iterator[tuple[Engine, Engine]]:
    """Yield D and P on one daemon, when P has declared its layout."""
    with (
        Engine("P", daemon.socket_path, seed=2, **options) as p,
        Engine("D", daemon.socket_path, seed=1, **options) as d,
    ):
        wait_declared(d, daemon)
        yield d, p


def wait_declared(d: Engine, daemon: DaemonProcess) -> None:
    """Return when P has declared its layout: a prepare is granted then."""
    from snapd.layout import fingerprint

    layout = d.workers[0]._pool.layout(BASE)
    name = fingerprint(layout)

    with Client(str(daemon.socket_path), timeout_s=PATIENCE_S) as client:

        def is_declared() -> bool:
            try:
                grant = client.prepare_receive("probe", BLOCK, name, ranks=range(len(d.workers)))
            except SnapdError:
                return False
            client.abort(grant.slab_handle, drained=True)
            return True

        wait_for(is_declared, "P has declared its layout", PATIENCE_S)


def session_of(daemon: DaemonProcess, handle: int) -> SessionView:
    with Client(str(daemon.socket_path), timeout_s=PATIENCE_S) as client:
        return client.get(handle).session


def flip(daemon: DaemonProcess, handle: int, rank: int = 0, offset_bytes: int = 5) -> None:
    """Change a byte of a snapshot in the arena, as a late writer would."""
    shard = next(x for x in session_of(daemon, handle).shards if x.rank == rank)
    with (
        Client(str(daemon.socket_path), timeout_s=PATIENCE_S) as client,
        client.map_buffer(rank, True) as arena,
    ):
        arena.buffer[shard.extents[0].offset_bytes + offset_bytes] ^= 0x10

"""A D and a P of plain kv_pools around a real daemon, as SGLang's scheduler would drive them."""

import contextlib
import hashlib
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from snapd.client import Client
from snapd.core.events import State
from snapd.core.session import SessionView
from snapd.engines.sglang_layers import LoadBatch
from snapd.engines.sglang_load import Loader
from snapd.engines.sglang_offload import Offloader
from snapd.engines.support import EngineSettings
from snapd.kv.layerpages import LayerPagesJob
from snapd.kv.pool import KVPool
from snapd.layout import Namespace, fingerprint
from snapd.mapping import map_arena
from tests.integration.daemon_process import DaemonProcess

PAGE = 4
NUM_SLOTS = 512
POISON = 0xA5
PATIENCE_S = 60.0
_tenants = itertools.count()


@contextlib.contextmanager
def serving(**settings: object) -> Iterator[DaemonProcess]:
    """Run a daemon; it must stop cleanly at the end."""
    with tempfile.TemporaryDirectory(prefix="snapd-") as directory:
        daemon = DaemonProcess(Path(directory), {"size": "4MiB", "quarantine_ms": 50, **settings})
        try:
            yield daemon
        finally:
            daemon.stop()
        assert "Traceback" not in daemon.stderr, daemon.stderr


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.002)


def keys_of(num_pages: int, seed: int = 0) -> tuple[str, ...]:
    """Return a prompt's page keys; fewer of the same seed are its beginning."""
    keys, parent = [], b""
    for page in range(num_pages):
        parent = hashlib.sha256(parent + f"{seed} {page}".encode()).digest()
        keys.append(parent.hex())
    return tuple(keys)


def make_pool() -> KVPool:
    """Return three layers of K and V, of poison."""
    buffers = [torch.full((NUM_SLOTS, 2, 8), POISON, dtype=torch.uint8) for _ in range(6)]
    return KVPool.mha(buffers[:3], buffers[3:], PAGE)


def slots_of(pages: Sequence[int]) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


def settings_of(daemon: DaemonProcess, **fields: object) -> EngineSettings:
    """Return settings that are patient with this machine, and ask again at once."""
    fields = {"timeout_s": 30.0, "retry_s": 0.01, **fields}
    return EngineSettings(socket_path=str(daemon.socket_path), **fields)  # type: ignore[arg-type]


class Stage:
    """D's pages are of bytes that follow from their key, so P's can be told right from wrong."""

    def __init__(
        self,
        daemon: DaemonProcess,
        *,
        rank: int = 0,
        agree: Callable[[bool], bool] | None = None,
        layer_wise: bool = True,
        **fields: object,
    ) -> None:
        self.daemon = daemon
        self.rank = rank
        self.namespace = Namespace(tenant=f"tenant-{next(_tenants)}")
        settings = settings_of(daemon, **fields)
        self.d_pool, self.p_pool = make_pool(), make_pool()
        self.loader = Loader(
            settings, rank, self.p_pool, lambda: self.namespace, agree=agree, layer_wise=layer_wise
        )
        self.offloader = Offloader(settings, rank, self.d_pool, lambda: self.namespace)
        self.client = Client(str(daemon.socket_path), timeout_s=PATIENCE_S)
        # Layers of the last batch that are there, and why it failed.
        self.layers: list[int] = []
        self.failed: list[BaseException] = []

    def write(self, keys: Sequence[str], pages: Sequence[int]) -> torch.Tensor:
        """Have D compute pages; return their slots."""
        for key, page in zip(keys, pages, strict=True):
            for index, plane in enumerate(self.d_pool.planes):
                rows = plane.rows[page * PAGE : (page + 1) * PAGE]
                rows.copy_(truth(key, index, rows.shape))
        return slots_of(pages)

    def offload(self, keys: Sequence[str], session_id: str | None = None, first_page: int = 1) -> bool:
        """Have D compute pages and push them; return what SGLang is told."""
        assert self.offloader.offer(
            keys, self.write(keys, range(first_page, first_page + len(keys))), session_id
        )
        return self.told()

    def told(self) -> bool:
        wait_until(lambda: self.offloader.completed() > 0, "the offload is done with")
        return self.offloader.take()

    def load(self, keys: Sequence[str], pages: Sequence[int], rid: str = "r") -> bool:
        """Have P load pages that it has looked up into these pages of its pool, as SGLang's batches do.

        Returns whether they are there; what is refused and what fails later is told apart by ``failed``.
        """
        if not self.loader.load(rid, keys, slots_of(pages)):
            assert not self.loader.has_queued
            return False
        return self.loader.finish(self.begin())

    def begin(self) -> LoadBatch:
        """Have everything begin that P was told to load."""
        self.layers = []
        self.failed = []
        return self.loader.start(self.layers.append, self.failed.append)

    def assert_loaded(self, keys: Sequence[str], pages: Sequence[int]) -> None:
        """P holds D's bytes in these pages, and poison everywhere else."""
        for index, plane in enumerate(self.p_pool.planes):
            untouched = torch.ones(NUM_SLOTS, dtype=torch.bool)
            for key, page in zip(keys, pages, strict=True):
                rows = plane.rows[page * PAGE : (page + 1) * PAGE]
                assert torch.equal(rows, truth(key, index, rows.shape)), f"plane {index}, page {page}"
                untouched[page * PAGE : (page + 1) * PAGE] = False
            assert bool((plane.rows[untouched] == POISON).all()), f"plane {index}: another slot was written"

    def sessions(self, *states: State) -> list[str]:
        """Return the names of the attempts that are in these states."""
        return [session.session_id for session in self.attempts(*(states or (State.READY,)))]

    def attempts(self, *states: State) -> list[SessionView]:
        """Return this stage's attempts that are in these states."""
        found = self.client.list_sessions(states=states, limit=1_000).sessions
        return [session for session in found if session.layout_fingerprint == self.fingerprint]

    def outcomes(self) -> list[str]:
        """Return how attempts ended, in the daemon's words."""
        return sorted(str(session.reason) for session in self.attempts(State.INGESTED, State.ABORTED))

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.d_pool.layout(self.namespace))

    def corrupt(self) -> None:
        """Change every byte of the daemon's arena."""
        arena = map_arena(str(self.daemon.socket_path), self.rank, True, PATIENCE_S)
        try:
            torch.frombuffer(arena.buffer, dtype=torch.uint8).bitwise_xor_(0x5A)
        finally:
            arena.close()

    def close(self) -> None:
        self.loader.close()
        self.offloader.close()
        self.client.close()


class Gate:
    """Holds the thread that moves layers, when a load has so many of them.

    Attributes:
        made: of the present test; they are opened before its stage is closed.
    """

    made: ClassVar[list["Gate"]] = []

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
        self.held, self.opened = threading.Event(), threading.Event()
        step = LayerPagesJob.step

        def gated(job: LayerPagesJob, max_bytes: int) -> bool:
            if job.is_verified and not job.done and job.layers_done == layers and not self.opened.is_set():
                self.held.set()
                assert self.opened.wait(PATIENCE_S)
            return step(job, max_bytes)

        monkeypatch.setattr(LayerPagesJob, "step", gated)
        self.made.append(self)

    def wait(self) -> None:
        assert self.held.wait(PATIENCE_S)


def truth(key: str, plane: int, shape: torch.Size) -> torch.Tensor:
    seed = int(key[:8], 16) * 8 + plane
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def staged(daemon: DaemonProcess, **fields: Any) -> Iterator[Stage]:
    stage = Stage(daemon, **fields)
    try:
        yield stage
    finally:
        for gate in Gate.made:
            gate.opened.set()
        Gate.made.clear()
        stage.close()

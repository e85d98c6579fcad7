"""Pages that come layer by layer into a pool on a real GPU, out of a daemon's arena there."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU that torch can use", allow_module_level=True)

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "integration")]

from kv_cases import KINDS, MHA, PATIENCE_S, Kind, random_slots, tokens_of
from raw_client import running
from test_gpu_ingest import DEVICE, NUM_SLOTS, GpuPair, asleep, two_gpus

from snapd.core.events import State
from snapd.errors import Reason
from snapd.kv import layerpages
from snapd.kv.ingest import Ingester
from snapd.kv.ingestpages import LentSlots
from snapd.kv.layerpages import LayerPagesJob
from snapd.layout import Namespace, token_digest

STEP_BYTES = 1 << 20
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def daemon() -> Iterator[Any]:
    with running(device="cuda:0", size="64MiB", quarantine_ms=50) as started:
        yield started


class LayerPair(GpuPair):
    """P asks for pages, into slots that it has chosen."""

    def __init__(self, daemon: Any, kind: Kind, device: torch.device) -> None:
        super().__init__(daemon, kind, device=device)
        self.pages = Ingester(self.p, 0, self.p_pool, LentSlots(), Namespace())
        self.tokens = tokens_of(NUM_TOKENS)
        self.slots = random_slots(kind, NUM_SLOTS, NUM_TOKENS, seed=3)

    def verified(self, handle: int, after: tuple[torch.cuda.Event, ...] = ()) -> LayerPagesJob:
        """Lease and compare; nothing is written."""
        job = LayerPagesJob(
            self.pages, "s", handle, self.slots, skip_tokens=0, digest=token_digest(self.tokens),
            keep_rest=False, vote_timeout_s=PATIENCE_S, after=after,
        )  # fmt: skip
        until(job, lambda: job.is_verified)
        return job

    def is_there(self, layer: int) -> bool:
        return all(
            torch.equal(self.rows(index).cpu()[self.slots], self._truth["s"][index])
            for index in self.p_pool.layers[layer]
        )

    def close(self) -> None:
        self.pages.close()
        super().close()


def until(job: LayerPagesJob, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come so far"
        if not job.step(STEP_BYTES):
            job.wait()


@contextlib.contextmanager
def paired(daemon: Any, kind: Kind = MHA, device: torch.device = DEVICE) -> Iterator[LayerPair]:
    pair = LayerPair(daemon, kind, device)
    try:
        yield pair
    finally:
        torch.cuda.synchronize(device)
        pair.close()


@pytest.mark.parametrize("groups_max", [1, 2, 8])
@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=two_gpus)])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_every_layer_is_ds_when_it_is_told(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, kind: Kind, device: str, groups_max: int
) -> None:
    monkeypatch.setattr(layerpages, "DEVICE_GROUPS_MAX", groups_max)
    with paired(daemon, kind, torch.device(device)) as pair:
        handle = pair.ready("s", pair.tokens)
        job = pair.verified(handle)
        torch.cuda.synchronize(device)
        assert pair.is_poison() and job.layers_done == 0 and pair.is_leased(handle)
        seen = 0
        while not job.done:
            for layer in range(seen, job.layers_done):
                assert pair.is_there(layer)
            seen = job.layers_done
            until(job, lambda seen=seen: job.done or job.layers_done > seen)
        assert job.has_landed and job.layers_done == len(kind.k_rows)
        assert all(pair.is_there(layer) for layer in range(len(kind.k_rows)))
        assert pair.state(handle) is State.INGESTED


def test_what_is_not_ds_is_refused_before_a_slot_is_written(daemon: Any) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", pair.tokens)
        pair.corrupt(handle, 4, 17)
        job = LayerPagesJob(
            pair.pages, "s", handle, pair.slots, skip_tokens=0, digest=token_digest(pair.tokens),
            keep_rest=False, vote_timeout_s=PATIENCE_S,
        )  # fmt: skip
        until(job, lambda: job.done)
        assert not job.is_verified and job.result.reason is Reason.CHECKSUM_MISMATCH and pair.is_poison()


def test_what_changes_between_the_passes_does_not_land(daemon: Any) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", pair.tokens)
        job = pair.verified(handle)
        pair.corrupt(handle, 2, 17)
        until(job, lambda: job.done)
        assert not job.has_landed and job.layers_done < 3
        assert job.result.reason is Reason.CHECKSUM_MISMATCH
        assert pair.state(handle) is State.ABORTED


def test_comparing_waits_for_no_forward_pass_and_moving_does(daemon: Any) -> None:
    with paired(daemon) as pair:
        pair.verified(pair.ready("s", pair.tokens)).cancel()
        handle = pair.ready("s", pair.tokens)
        busy = torch.cuda.Stream(DEVICE)
        asleep_until = asleep(busy)
        job = pair.verified(handle, (asleep_until,))
        assert not asleep_until.query(), "compared while the other stream sleeps"
        until(job, lambda: job.layers_done > 0)
        assert asleep_until.query(), "and nothing is written before that has ended"
        until(job, lambda: job.done)
        assert job.has_landed


def test_a_load_that_is_given_up_is_done_when_its_copies_have_ended(daemon: Any) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", pair.tokens)
        asleep_until = asleep(torch.cuda.Stream(DEVICE))
        job = pair.verified(handle, (asleep_until,))
        while not job.is_waiting_for_device:
            job.step(STEP_BYTES)
        assert job.cancel() and not job.done and not asleep_until.query()
        until(job, lambda: job.done)
        assert asleep_until.query() and not job.has_landed
        assert pair.state(handle) is State.READY and not pair.is_leased(handle)

"""Brings loads in that were verified, layer by layer, on a thread of its own, under SGLang's forward pass.

SGLang asks for loads one after the other while it makes up a batch, and has all of them begin with it. Layers
come in the order in which the forward pass needs them: the first one of every load, then the second. Votes
follow the last layer of all, so that a load that fails leaves the others' snapshots to be had again.

Nothing here needs SGLang.

Source: design, sections 8 and 9.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog
import torch

from snapd.errors import Reason
from snapd.kv.ingestjob import STEP_BYTES
from snapd.kv.layerpages import LayerPagesJob

# How often a GPU is asked how far it is.
_POLL_S: Final = 0.000_05

_log: Final = structlog.get_logger("snapd.engines")


class LoadFailed(Exception):
    """A load that was accepted does not come to its end; SGLang ends its requests."""


def be_on(device: torch.device) -> None:
    """Have the present thread work on *device*: a new one is on the first GPU, whatever the engine uses."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class LoadBatch:
    """Loads that begin together.

    Args:
        jobs: verified, or ended; any number.
        complete: called with every layer, in order, when it is there for all of them.
        fail: called, once, when that will not come to be.

    Attributes:
        has_landed: once it has ended: every layer is there, and the daemon has not said no.
        error: once it has ended: why it has not landed.
        is_unanswered: once it has ended: the daemon did not answer a vote.
    """

    def __init__(
        self,
        jobs: Sequence[LayerPagesJob],
        complete: Callable[[int], object] = lambda _: None,
        fail: Callable[[BaseException], object] = lambda _: None,
    ) -> None:
        self.jobs = tuple(jobs)
        self.complete = complete
        self.fail = fail
        self.has_landed = False
        self.error = ""
        self.is_unanswered = False
        self._is_stopping = threading.Event()
        self._ended = threading.Event()

    def stop(self) -> None:
        """Have it fail, unless its layers are all there; any thread."""
        self._is_stopping.set()

    @property
    def is_stopping(self) -> bool:
        """It is to fail."""
        return self._is_stopping.is_set()

    @property
    def has_ended(self) -> bool:
        """No slot is written for it any more."""
        return self._ended.is_set()

    def end(self) -> None:
        """It has ended; for the thread that brings it in."""
        self._ended.set()

    def wait(self) -> bool:
        """Wait until it has ended; return whether it has landed."""
        self._ended.wait()
        return self.has_landed


class LayerLoads:
    """Loads that wait for their batch, and those under way.

    Its methods are for the scheduler's thread.

    Args:
        num_layers: of the model.
        device: of the kv_pool.
        rank: for the thread's name.
    """

    def __init__(self, num_layers: int, device: torch.device, rank: int) -> None:
        self._num_layers = num_layers
        self._device = device
        self._queued: dict[str, tuple[LayerPagesJob, ...]] = {}
        # Not ended when last looked at.
        self._running: list[LoadBatch] = []
        self._given: queue.SimpleQueue[LoadBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"snapd-layers-{rank}", daemon=True)
        self._thread.start()

    # --- what waits ----------------------------------------------------------------------------

    def hold(self, rid: str, jobs: Sequence[LayerPagesJob]) -> None:
        """Take a request's loads, which are verified, until the batch begins."""
        self.cancel(rid)
        self._queued[rid] = tuple(jobs)

    def cancel(self, rid: str) -> bool:
        """Give a request's loads up whose batch has not begun; return whether there were any.

        Their slots are not written any more. That they are given up is told to the daemon later.
        """
        jobs = self._queued.pop(rid, None)
        if jobs is None:
            return False
        # They may have begun before their batch.
        ahead = [batch for batch in self._running if not set(jobs).isdisjoint(batch.jobs)]
        for batch in ahead:
            batch.stop()
        for batch in ahead:
            batch.wait()
        self.give_up(jobs)
        return True

    def give_up(self, jobs: Sequence[LayerPagesJob]) -> None:
        """Give up what is verified and not queued."""
        batch = LoadBatch(jobs)
        batch.stop()
        self._give(batch)

    def hurry(self) -> None:
        """Have begin what has waited for so long that its lease may end before it does."""
        for jobs in self._queued.values():
            if any(not job.done and job.is_late for job in jobs):
                self._give(LoadBatch(jobs))

    def settle(self, slab_handle: int) -> None:
        """Have everything end that reads a snapshot, as a rank has only one lease for it.

        What waits for its batch is brought in at once.
        """
        for jobs in self._queued.values():
            if any(job.slab_handle == slab_handle and not job.done for job in jobs):
                self._give(LoadBatch(jobs))
        for batch in self._running:
            if any(job.slab_handle == slab_handle for job in batch.jobs):
                batch.wait()

    # --- what begins ---------------------------------------------------------------------------

    def bring_in(self, jobs: Sequence[LayerPagesJob]) -> LoadBatch:
        """Bring loads in that do not wait for a batch, and return when they have ended."""
        batch = self._give(LoadBatch(jobs))
        batch.wait()
        return batch

    @property
    def has_queued(self) -> bool:
        """A load waits for its batch."""
        return bool(self._queued)

    def start(self, complete: Callable[[int], object], fail: Callable[[BaseException], object]) -> LoadBatch:
        """Have all that waits begin; see ``LoadBatch``."""
        jobs = [job for jobs in self._queued.values() for job in jobs]
        self._queued.clear()
        return self._give(LoadBatch(jobs, complete, fail))

    def _give(self, batch: LoadBatch) -> LoadBatch:
        self._running = [other for other in self._running if not other.has_ended]
        self._running.append(batch)
        self._given.put(batch)
        return batch

    def reset(self) -> None:
        """Give everything up, and return when no slot is written any more."""
        for rid in list(self._queued):
            self.cancel(rid)
        for batch in self._running:
            batch.stop()
        for batch in self._running:
            batch.wait()
        self._running.clear()

    def close(self) -> None:
        """As ``reset``, and for good."""
        self.reset()
        self._given.put(None)
        self._thread.join()

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        be_on(self._device)
        while (batch := self._given.get()) is not None:
            try:
                self._land(batch)
            except Exception as error:
                if not isinstance(error, LoadFailed):
                    _log.exception("a load failed, and its requests end with an error")
                batch.error = str(error)
                with _logged("a load failed, and the engine could not be told"):
                    batch.fail(error)
            finally:
                self._end(batch)

    def _land(self, batch: LoadBatch) -> None:
        """Bring every layer in, and vote.

        Raises:
            LoadFailed: a snapshot cannot be read any more, or is not what it was; or it was stopped.
        """
        told = 0
        while told < self._num_layers:
            behind = [job for job in batch.jobs if job.layers_done <= told]
            for job in behind:
                if batch.is_stopping:
                    raise LoadFailed("it was given up")
                if not job.done:
                    job.step(STEP_BYTES)
                _check(job)
            layers = min((job.layers_done for job in batch.jobs), default=self._num_layers)
            if layers == told and all(job.is_waiting_for_device for job in behind):
                time.sleep(_POLL_S)
            for layer in range(told, layers):
                batch.complete(layer)
            told = layers
        for job in batch.jobs:
            # All votes are cast before one is waited for.
            job.step(STEP_BYTES)
        for job in batch.jobs:
            _see_through(job)
            _check(job)
        batch.has_landed = True

    def _end(self, batch: LoadBatch) -> None:
        """Whatever became of it, nothing is written or leased for it any more."""
        # One that has voted is to hear what was decided.
        for act in (LayerPagesJob.cancel, _see_through):
            for job in batch.jobs:
                with _logged("a load that failed could not be given back cleanly"):
                    act(job)
        batch.is_unanswered = any(job.is_unanswered for job in batch.jobs)
        batch.end()


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log what goes wrong, so that the thread and the other loads go on."""
    try:
        yield
    except Exception:
        _log.exception(what)


def _check(job: LayerPagesJob) -> None:
    if not job.done or job.has_landed:
        return
    reason = job.result.reason
    if reason is Reason.CHECKSUM_MISMATCH:
        _log.error(
            "checksum-mismatch: the snapshot changed after it was compared, and nothing of it is used",
            slab_handle=job.slab_handle,
        )
    raise LoadFailed(f"snapshot {job.slab_handle}: {reason}")


def _see_through(job: LayerPagesJob) -> None:
    while not job.done:
        job.step(STEP_BYTES)
        job.wait()

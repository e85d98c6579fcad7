"""P's side: brings a READY snapshot into this rank's kv_pool, and into its tree only after "commit".

Lease, allocate, copy and sum in one pass, compare, vote, insert. What did not match, or was not
decided, never reaches the tree: its slots go back. On a GPU the copy is launched and then looked at; what
was launched cannot be stopped, so slots and lease go back when it has ended.

Source: design, sections 3 and 8.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog
import torch

from snapd.client import Client
from snapd.errors import InvalidRequest
from snapd.kv.devicecopy import choose_copy
from snapd.kv.devicewarm import warm_up
from snapd.kv.ingestjob import STEP_BYTES, IngestJob, IngestTimes, KVOwner, check_places
from snapd.kv.pool import KVPool
from snapd.kv.slabs import Slabs
from snapd.layout import Namespace, fingerprint
from snapd.wire import LookupRep, SnapshotFinalizeIngestReqInput, SnapshotFinalizeIngestReqOutput

__all__ = ["STEP_BYTES", "IngestJob", "IngestTimes", "Ingester", "KVOwner"]

# How long ``close`` waits for copies that were given up.
_CLOSE_S: Final = 10.0

_log: Final = structlog.get_logger("snapd.kv")


class Ingester:
    """Ingests snapshots into one rank's kv_pool.

    The layout is declared when this is made, and again by the client after a restart of the daemon.

    A pool on a GPU needs an arena on a GPU of the same host, best the same GPU; one on the host an arena
    there. Copies on a GPU run on a stream of their own; what they need is compiled when this is made.

    Args:
        client: the control connection.
        rank: this P rank.
        pool: its kv_pool.
        owner: its slots and tree.
        namespace: model, LoRA, salt, weight version, tenant.
        keep_on_alloc_failure: leave the snapshot READY when there are no slots, to try again later.
        keep_on_missing_prefix: leave a suffix READY when the tree lacks what it builds on. Without it the
            attempt ends at once, and other ranks that wait for this one's vote are told.
        agree: for an engine whose ranks must not differ even when the daemon dies between two of its
            answers. Called once an ingest, on every rank, with the slab_handle and whether this rank heard
            "commit"; returns what rank 0 heard, passed on in the engine's own process group. A rank that did
            not vote ok ignores the answer, which can only be "abort".
        verify: compare checksums. Off is for the tests that show what verification is for.

    Raises:
        ConfigError: the pool is on a GPU and the rank's arena on the host, or the other way round; nothing is
            declared.
        ConnectionProblem: the daemon cannot be asked.
    """

    def __init__(
        self,
        client: Client,
        rank: int,
        pool: KVPool,
        owner: KVOwner,
        namespace: Namespace = Namespace(),  # noqa: B008 - frozen
        *,
        keep_on_alloc_failure: bool = True,
        keep_on_missing_prefix: bool = True,
        agree: Callable[[int, bool], bool] | None = None,
        verify: bool = True,
    ) -> None:
        self.client = client
        self.rank = rank
        self.pool = pool
        self.owner = owner
        self.layout = pool.layout(namespace)
        self.layout_fingerprint = fingerprint(self.layout)
        self.keep_on_alloc_failure = keep_on_alloc_failure
        self.keep_on_missing_prefix = keep_on_missing_prefix
        self.agree = agree
        self.verify = verify
        self.slabs = Slabs(client, writable=False)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._ending: list[IngestJob] = []
        check_places(pool.device, rank, client.connect().arenas)
        self.copies = choose_copy(pool.device)
        if self.copies.is_async:
            warm_up(pool, self.copies)
        client.declare_layout(rank, self.layout)

    def lookup(self, session_id: str) -> LookupRep:
        """Return what is READY for a session; ``slab_handle`` 0: nothing."""
        return self.client.lookup(self.layout_fingerprint, session_id=session_id)

    def finalize_ingest(
        self, request: SnapshotFinalizeIngestReqInput, *, after: Sequence[torch.cuda.Event] | None = None
    ) -> SnapshotFinalizeIngestReqOutput:
        """Ingest a snapshot and return when it is in the tree, or is not going to be.

        With several ranks this waits for the others' votes, for at most the lease's time. *after* and errors
        as of ``start``.
        """
        job = self.start(request.session_id, request.token_ids, request.slab_handle, after=after)
        while not job.step(STEP_BYTES):
            job.wait()
        return job.result

    def start(
        self,
        session_id: str,
        token_ids: Sequence[int],
        slab_handle: int,
        *,
        after: Sequence[torch.cuda.Event] | None = None,
    ) -> IngestJob:
        """Begin an ingest that is done in steps, for a scheduler loop that must not wait.

        Args:
            session_id: whose.
            token_ids: from token 0 on, as far as the snapshot goes at least.
            slab_handle: of the attempt.
            after: on a GPU, recorded events that the copy waits for: of P's forward passes, which may still
                read slots that were given back. None: all that the current stream was given until now.

        Raises:
            InvalidRequest: *after* with a pool that is not on a GPU; nothing was asked for.
        """
        if after and self.pool.device.type != "cuda":
            raise InvalidRequest(f"the kv_pool is on {self.pool.device}, which has no events to wait for")
        self.reap()
        return IngestJob(self, session_id, token_ids, slab_handle, after)

    def reap(self) -> None:
        """Give back what copies on a GPU held that were given up and have ended by now. Never waits for it.

        Every ``start`` does it as well, so that it is done when nobody steps a job that was cancelled.
        """
        self._ending = [job for job in self._ending if not job.step(0)]

    def give_back_later(self, job: IngestJob) -> None:
        """Take note of a job that has been given up and whose copy still runs."""
        self._ending.append(job)

    def stream_of(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return this ingester's stream on *device*, always the same; None: it has none."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def close(self) -> None:
        """Wait for copies that were given up, and unmap the arena; the client stays open.

        A job that was neither given up nor is done keeps its part of the arena mapped.
        """
        until_s = time.monotonic() + _CLOSE_S
        self.reap()
        while self._ending and time.monotonic() < until_s:
            self._ending[0].wait()
            self.reap()
        if self._ending:
            _log.warning(
                "copies that were given up do not end; their slots stay lent", jobs=len(self._ending)
            )
        self.slabs.close()

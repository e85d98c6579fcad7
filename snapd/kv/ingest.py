"""P's side: brings a READY snapshot into this rank's kv_pool, and into its tree only after "commit".

Lease, allocate, copy and sum in one pass, compare, vote, insert. What did not match, or was not
decided, never reaches the tree: its slots go back. On a GPU the copy is launched and then looked at; what
was launched cannot be stopped, so slots and lease go back when it has ended.

Source: design, sections 3 and 8.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog
import torch

from snapd.client import Client
from snapd.cudamapping import MappedCudaArena
from snapd.errors import InvalidRequest, StaleHandle
from snapd.kv.devicecopy import choose_copy
from snapd.kv.devicejob import Streams
from snapd.kv.devicescatter import PrivateMemory, ReadingLane
from snapd.kv.devicewarm import warm_up
from snapd.kv.ingestjob import STEP_BYTES, IngestJob, IngestTimes, KVOwner, check_places
from snapd.kv.integrity import KeyedIntegrity, check_on_host, check_verified
from snapd.kv.pool import KVPool
from snapd.kv.slabs import Slabs, arena_bytes, device_names
from snapd.layout import Namespace, fingerprint
from snapd.wire import LookupRep, SnapshotFinalizeIngestReqInput, SnapshotFinalizeIngestReqOutput

__all__ = ["STEP_BYTES", "IngestJob", "IngestTimes", "Ingester", "KVOwner"]

# How long ``close`` waits for copies that were given up.
_CLOSE_S: Final = 10.0
# Of an arena on another GPU, so that the way there is open.
_TRIED_BYTES: Final = 256

_log: Final = structlog.get_logger("snapd.kv")


class Ingester:
    """Ingests snapshots into one rank's kv_pool.

    The layout is declared when this is made, and again by the client after a restart of the daemon.

    A pool on a GPU needs an arena on a GPU of the same host, best the same GPU; one on the host an arena
    there. Copies on a GPU run on a stream of their own; what they need is compiled when this is made, and the
    arena is mapped.

    Planes are copied before they are used when they are on another GPU, or when what P holds ends inside a
    checksum word: to at most 256 MiB of the pool's GPU, or one plane if that is larger, for all ingests
    together. ``close`` gives them back.

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
        integrity: the key that D has too: MACs are compared in place of the usual checksums. For a pool on
            the host.

    Raises:
        ConfigError: the pool is on a GPU and the rank's arena on the host, or the other way round; there is
            an integrity key, and the pool is on a GPU or *verify* is off. Nothing is declared.
        ConnectionProblem: the daemon cannot be asked.
        MapFailed: this process cannot map the arena.
        DeviceMemoryFull: the GPU has no memory for a small copy, or for planes of another GPU.
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
        integrity: KeyedIntegrity | None = None,
    ) -> None:
        if integrity is not None:
            check_verified(verify)
            check_on_host(pool.device)
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
        self.integrity = integrity
        self.slabs = Slabs(client, writable=False, devices=device_names({rank: pool}))
        self._streams = Streams()
        self._ending: list[IngestJob] = []
        self._troubled: weakref.WeakSet[IngestJob] = weakref.WeakSet()
        hello = client.connect()
        check_places(pool.device, rank, hello.arenas)
        self.copies = choose_copy(pool.device)
        if self.copies.is_async:
            self.copies = warm_up(pool, self.copies)
        self.private = PrivateMemory(pool.device, self.stream_of(pool.device))
        self.reading = ReadingLane(pool.device)
        # A daemon that was restarted this moment is asked again by the first ingest.
        with contextlib.suppress(StaleHandle):
            self._map(hello.epoch)
        client.declare_layout(rank, self.layout)

    def _map(self, epoch: str) -> None:
        """Map the arena, and open the way to it if it is on another GPU, so that no ingest has to."""
        arena = self.slabs.arena(self.rank, epoch)
        if not isinstance(arena, MappedCudaArena) or torch.device(arena.device) == self.pool.device:
            return
        far = arena_bytes(arena, 0, min(_TRIED_BYTES, arena.size_bytes))
        near, source_stream = self.private.take(far.numel()), self.stream_of(far.device)
        stream = self.stream_of(self.pool.device)
        with torch.cuda.stream(source_stream), torch.cuda.stream(stream):
            near[: far.numel()].copy_(far)
        if stream is not None:
            stream.synchronize()

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
        wanted_tokens: int | None = None,
        layout_fingerprint: str = "",
        after: Sequence[torch.cuda.Event] | None = None,
    ) -> IngestJob:
        """Begin an ingest that is done in steps, for a scheduler loop that must not wait.

        Args:
            session_id: whose.
            token_ids: from token 0 on, as far as the snapshot goes at least; with *wanted_tokens* as far as
                that at least.
            slab_handle: of the attempt.
            wanted_tokens: bring tokens before this one only; a multiple of the page size. The whole snapshot
                is summed all the same, and it is INGESTED for good. If *token_ids* end before the snapshot
                does, their digest cannot be compared: whoever passes this has found the snapshot by their
                page keys, at least so far. None: all of it.
            layout_fingerprint: of the same layout in another namespace, which was declared too; empty: of
                the ingester's own.
            after: on a GPU, recorded events that the copy waits for: of P's forward passes, which may still
                read slots that were given back. None: all that the current stream was given until now.

        Raises:
            InvalidRequest: *after* with a pool that is not on a GPU; nothing was asked for.
        """
        if after and self.pool.device.type != "cuda":
            raise InvalidRequest(f"the kv_pool is on {self.pool.device}, which has no events to wait for")
        self.reap()
        return IngestJob(self, session_id, token_ids, slab_handle, after, wanted_tokens, layout_fingerprint)

    def reap(self) -> None:
        """Give back what copies on a GPU held that were given up and have ended by now. Never waits for it.

        Every ``start`` does it as well, so that it is done when nobody steps a job that was cancelled. What
        the owner raises meanwhile is logged, as it concerns none of those that come after.
        """
        for job in tuple(self._ending):
            with self._past_trouble(job):
                job.step(0)
        self._ending = [job for job in self._ending if not job.done]

    @contextlib.contextmanager
    def _past_trouble(self, job: IngestJob) -> Iterator[None]:
        try:
            yield
        except Exception:
            if job not in self._troubled:
                _log.exception("an ingest that was given up could not be given back cleanly")
            self._troubled.add(job)

    def give_back_later(self, job: IngestJob) -> None:
        """Take note of a job that has been given up and whose copy still runs."""
        self._ending.append(job)

    def stream_of(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return this ingester's stream on *device*, always the same; None: it has none."""
        return self._streams.on(device)

    def close(self) -> None:
        """Wait for copies that were given up, and unmap the arena; the client stays open.

        A job that was neither given up nor is done keeps its part of the arena mapped. On a GPU it launches
        nothing more, and ends as if the daemon were gone.
        """
        until_s = time.monotonic() + _CLOSE_S
        self.reap()
        while time.monotonic() < until_s:
            # What the GPU cannot even be asked about will not end.
            job = next((job for job in self._ending if job not in self._troubled), None)
            if job is None:
                break
            with self._past_trouble(job):
                job.wait()
            self.reap()
        if self._ending:
            _log.warning(
                "copies that were given up do not end; their slots stay lent", jobs=len(self._ending)
            )
        self.slabs.close()
        self.private.close()
        self.reading.close()

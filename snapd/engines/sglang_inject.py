"""Direct injection for SGLang: a snapshot goes into P's slots and radix tree, without SGLang taking part.

Everything here belongs to the scheduler's thread, between two batches. An orchestrator's request comes to
every rank of the engine at the same point of its loop, and every rank answers it::

    injector = Injector(client, rank, scheduler.token_to_kv_pool_allocator, scheduler.tree_cache, namespace)
    output = injector.finalize_ingest(SnapshotFinalizeIngestReqInput(...))

Source: design, sections 3, 5 and 9.
"""

from collections.abc import Sequence
from typing import Any

import torch

from snapd.client import Client
from snapd.engines.sglang_inject_cache import Pinned, SglangCache
from snapd.engines.sglang_inject_ranks import Agreement, Round
from snapd.engines.sglang_pools import DISTRIBUTIONS, TESTED_VERSIONS
from snapd.engines.support import check_version
from snapd.errors import ConfigError, InvalidRequest, Reason, RequestError
from snapd.kv.ingest import Ingester
from snapd.kv.ingestjob import STEP_BYTES, IngestJob
from snapd.kv.integrity import KeyedIntegrity
from snapd.layout import Namespace
from snapd.units import align_up
from snapd.wire import LookupRep, SnapshotFinalizeIngestReqInput, SnapshotFinalizeIngestReqOutput


class CacheOwner:
    """Lends slots of SGLang's to ingests, and inserts what they brought. A ``KVOwner``.

    Attributes:
        round: of the ingest that is being started or decided.
    """

    def __init__(self, cache: SglangCache) -> None:
        self._cache = cache
        self._pinned: dict[str, Pinned] = {}
        # By identity: after a flush the same numbers may be lent again.
        self._lent: dict[int, tuple[torch.Tensor, Any]] = {}
        self.round = Round(None)

    @property
    def lent_tokens(self) -> int:
        """Slots that are neither free nor in the tree, as ingests have them."""
        page = self._cache.page_size_tokens
        return sum(
            align_up(slots.numel(), page) for slots, life in self._lent.values() if life == self._cache.life
        )

    def lock_prefix(self, session_id: str, token_ids: Sequence[int]) -> int:
        """Return how many tokens the tree holds, in whole pages, and pin them.

        Raises:
            RequestError: another rank has no lease; or another ingest of the session is under way.
        """
        if not self.round.all_leased(session_id not in self._pinned):
            if session_id in self._pinned:
                raise RequestError(f"session {session_id} is being ingested", reason=Reason.WRONG_STATE)
            raise RequestError("another rank cannot ingest the snapshot now", reason=Reason.ROUND_ABORTED)
        pinned = self._pinned[session_id] = self._cache.pin(token_ids)
        return pinned.num_tokens

    def unlock_prefix(self, session_id: str) -> None:
        """Undo ``lock_prefix``."""
        self._cache.unpin(self._pinned.pop(session_id))

    def allocate(self, num_tokens: int) -> torch.Tensor | None:
        """Return slots for *num_tokens*; None: there is no room, and evicting would not make it."""
        slots = self._cache.allocate(num_tokens)
        if slots is not None:
            self._lent[id(slots)] = (slots, self._cache.life)
        return slots

    def free(self, slots: torch.Tensor) -> None:
        """Take slots back that were not inserted."""
        self._cache.free(*self._take_back(slots))

    def insert(
        self, session_id: str, token_ids: Sequence[int], resident_tokens: int, slots: torch.Tensor
    ) -> None:
        """Put tokens from *resident_tokens* on into the tree; a last page that is not full is given back.

        Raises:
            RequestError: the tree was emptied since they were copied.
        """
        del resident_tokens  # As many as are pinned: the tree holds whole pages.
        pinned = self._pinned[session_id]
        self._take_back(slots)
        if pinned.life != self._cache.life:
            raise RequestError("SGLang's cache was flushed meanwhile", reason=Reason.INGEST_FAILED)
        self._cache.insert(token_ids, pinned, slots)

    def is_flushed(self, session_id: str) -> bool:
        """Return whether SGLang gave the slots of this session's ingest to everybody since it began."""
        pinned = self._pinned.get(session_id)
        return pinned is not None and pinned.life != self._cache.life

    def _take_back(self, slots: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return self._lent.pop(id(slots))


class Injection:
    """An ingest under way. Made by ``Injector.start``; ``step`` until it says that it is done."""

    def __init__(self, job: IngestJob, owner: CacheOwner, session_id: str) -> None:
        self._job = job
        self._owner = owner
        self._session_id = session_id

    @property
    def done(self) -> bool:
        """It has ended, one way or the other."""
        return self._job.done

    @property
    def result(self) -> SnapshotFinalizeIngestReqOutput:
        """How it ended.

        Raises:
            InvalidRequest: it has not.
        """
        return self._job.result

    def step(self, max_bytes: int) -> bool:
        """Move up to *max_bytes*, or look for the decision; return whether it ended.

        After a flush nothing is moved any more: the slots may be somebody else's.
        """
        if not self._job.done and self._owner.is_flushed(self._session_id) and self._job.cancel():
            return self._job.done
        return self._job.step(max_bytes)

    def wait(self) -> None:
        """Wait a little for the other ranks or for the GPU; not while there are bytes to move."""
        self._job.wait()

    def cancel(self) -> bool:
        """Give it up; the snapshot stays READY. False: this rank has voted, so step on."""
        return self._job.cancel()


class Injector:
    """Brings snapshots into the slots and the tree of one rank of P's.

    With several ranks every rank is asked at the same point of its scheduler's loop, for the same ingests in
    the same order: either all have a lease before any tree is touched, and insert after the same "commit", or
    none does.

    Args:
        client: the control connection.
        rank: this P rank.
        allocator: SGLang's, with its kv_pool.
        tree: SGLang's radix tree over it.
        namespace: model, LoRA, salt, weight version, tenant.
        extra_key: what SGLang keeps these tokens apart by in its tree. A LoRA has one: its id, which every
            process makes up anew. The salt is the namespace's.
        agreement: the other ranks. None: there is one.
        keep_on_alloc_failure: leave the snapshot READY when there are no slots, to try again later.
        keep_on_missing_prefix: leave a suffix READY when the tree lacks what it builds on.
        verify: compare checksums. Off is for the tests that show what verification is for.
        integrity: the key that D has too; see ``snapd.engines.support.read_integrity``.

    Attributes:
        cache: the slots and the tree.
        ingester: does the work.

    Raises:
        UnsupportedEngine: a part of SGLang is of a kind that is not known, or set up in such a way.
        ConfigError: the namespace and *extra_key* say different things; or the pool is on a GPU and the arena
            is not, or the other way round.
        SnapdError: see ``snapd.kv.ingest.Ingester``.
    """

    def __init__(
        self,
        client: Client,
        rank: int,
        allocator: Any,
        tree: Any,
        namespace: Namespace = Namespace(),  # noqa: B008 - frozen
        *,
        extra_key: str | None = None,
        agreement: Agreement | None = None,
        keep_on_alloc_failure: bool = True,
        keep_on_missing_prefix: bool = True,
        verify: bool = True,
        integrity: KeyedIntegrity | None = None,
    ) -> None:
        check_version("SGLang", DISTRIBUTIONS, TESTED_VERSIONS)
        self.cache = namespaced_cache(allocator, tree, namespace, extra_key)
        self._agreement = agreement
        self._owner = CacheOwner(self.cache)
        self.ingester = Ingester(
            client,
            rank,
            self.cache.pool,
            self._owner,
            namespace,
            keep_on_alloc_failure=keep_on_alloc_failure,
            keep_on_missing_prefix=keep_on_missing_prefix,
            agree=None if agreement is None else self._agree,
            verify=verify,
            integrity=integrity,
        )

    @property
    def lent_tokens(self) -> int:
        """Slots that ingests under way have: neither free nor in the tree, and no leak of SGLang's."""
        return self._owner.lent_tokens

    def lookup(self, session_id: str) -> LookupRep:
        """Return what is READY for a session; ``slab_handle`` 0: nothing."""
        return self.ingester.lookup(session_id)

    def finalize_ingest(
        self, request: SnapshotFinalizeIngestReqInput, *, after: Sequence[torch.cuda.Event] | None = None
    ) -> SnapshotFinalizeIngestReqOutput:
        """Ingest a snapshot, and return when it is in the tree or is not going to be.

        Args:
            request: an orchestrator's; the same one on every rank.
            after: on a GPU, recorded events that the copy waits for: with overlapped scheduling, one of the
                stream that runs the forward passes. None: all that the current stream was given until now.

        Raises:
            InvalidRequest: *after* with a pool that is not on a GPU; nothing was asked for.
        """
        job = self._start(request, after)
        while not job.step(STEP_BYTES):
            job.wait()
        return job.result

    def start(
        self, request: SnapshotFinalizeIngestReqInput, *, after: Sequence[torch.cuda.Event] | None = None
    ) -> Injection:
        """Begin an ingest that is done in steps: one a turn of the scheduler's loop, before the next batch.

        While it is under way SGLang's check for leaks, which it makes when idle, misses ``lent_tokens``.

        Raises:
            InvalidRequest: there are several ranks: slots would come back at another time on each, and the
                ranks of SGLang would decide differently. Or as for ``finalize_ingest``.
        """
        if self._agreement is not None:
            raise InvalidRequest("with several ranks an ingest is done in one go: use finalize_ingest")
        return self._start(request, after)

    def _start(
        self, request: SnapshotFinalizeIngestReqInput, after: Sequence[torch.cuda.Event] | None
    ) -> Injection:
        self._owner.round = Round(self._agreement)
        job = self.ingester.start(request.session_id, request.token_ids, request.slab_handle, after=after)
        return Injection(job, self._owner, request.session_id)

    def _agree(self, slab_handle: int, commit: bool) -> bool:
        del slab_handle
        return self._owner.round.all_commit(commit)

    def close(self) -> None:
        """Wait for copies that were given up, and unmap the arena; the client stays open."""
        self.ingester.close()


def namespaced_cache(allocator: Any, tree: Any, namespace: Namespace, extra_key: str | None) -> SglangCache:
    """Return the slots and the tree, for tokens of one namespace.

    Raises:
        ConfigError: tokens would be found under other names in the tree than at the daemon.
        UnsupportedEngine, ExtraMissing, LayoutMismatch: see ``SglangCache``.
    """
    if namespace.lora and extra_key is None:
        raise ConfigError(
            f"namespace.lora is {namespace.lora!r}: say as extra_key what SGLang calls it in its tree"
        )
    if extra_key is not None and not (namespace.lora or namespace.tenant):
        raise ConfigError(
            "there is an extra_key: name what it stands for in namespace.lora or namespace.tenant"
        )
    return SglangCache(allocator, tree, extra_key=extra_key, cache_salt=namespace.cache_salt or None)

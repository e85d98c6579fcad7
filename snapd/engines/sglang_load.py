"""P's side of SGLang's linker: says which pages the daemon has, and loads them or has SGLang compute them.

A load is verified before SGLang hears that it is queued: SGLang falls back to computing when a load is
refused, but ends the request with an error when one fails later, under a forward pass that has begun. The
bytes are moved after that, layer by layer (``sglang_layers``); or, without ``layer_wise``, before it as well.

Nothing here needs SGLang.

Source: design, sections 8 and 9.
"""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import structlog
import torch

from snapd.client import Client
from snapd.engines.sglang_layers import LayerLoads, LoadBatch, be_on
from snapd.engines.sglang_pages import FoundRun, Segment, cover, cut
from snapd.engines.support import EngineSettings, read_integrity
from snapd.errors import ConnectionProblem, Reason, RequestTimeout, SnapdError
from snapd.kv.ingest import STEP_BYTES, Ingester
from snapd.kv.ingestpages import LentSlots, PagesJob
from snapd.kv.layerpages import LayerPagesJob
from snapd.kv.pool import KVPool
from snapd.layout import Namespace

# Requests whose pages were looked up and that were not loaded yet.
PLANS_MAX: Final = 4_096
# Keys of pages that were found for them, over all requests. SGLang does not tell of requests that end while
# they wait.
PLAN_KEYS_MAX: Final = 500_000
# SGLang asks again for every waiting request whenever it makes up a batch.
PLAN_FRESH_S: Final = 0.05
WARN_S: Final = 30.0

_log: Final = structlog.get_logger("snapd.engines")


class Warner:
    """Warns of the same kind of trouble at most once in ``WARN_S``, and says how often it was left out.

    For any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def __call__(self, what: str, **facts: object) -> None:
        """Warn; *what* is one of a few fixed sentences."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._next_s.get(what, now_s):
                self._unsaid[what] = self._unsaid.get(what, 0) + 1
                return
            self._next_s[what] = now_s + WARN_S
            unsaid = self._unsaid.pop(what, 0)
        _log.warning(what, **facts, **({"unsaid": unsaid} if unsaid else {}))


class _Plan(msgspec.Struct, frozen=True):
    """What was found for a request.

    Attributes:
        asked: how many keys it was looked up by, and the last one, which follows from those before it.
        keys: of the pages that were found, from the first on.
        segments: where they are.
        made_s: when.
    """

    asked: tuple[int, str]
    keys: tuple[str, ...]
    segments: tuple[Segment, ...]
    made_s: float


class LoadCounts(msgspec.Struct):
    """What became of it, since the start.

    Attributes:
        loaded_pages: pages of loads that SGLang was not told to compute instead.
        refused_loads: loads that it was.
        failed_batches: forward passes whose loads, or some of them, failed after that.
        resting_lookups: lookups that were not asked, as the daemon had not answered a moment ago.
    """

    loaded_pages: int = 0
    refused_loads: int = 0
    failed_batches: int = 0
    resting_lookups: int = 0


class Loader:
    """Finds and loads pages for one P rank.

    Its methods are for the scheduler's thread. A thread of its own keeps the connection, so that the daemon
    knows P's layout though P has nothing to ask, also after a restart; another one moves layers.

    Args:
        settings: the operator's.
        rank: of P's tensor-parallel ranks; its arena.
        pool: P's kv_pool.
        namespace: as it is now; asked before every lookup, as the weights' version may change.
        agree: on several ranks returns whether all of them say yes; called once a load, on every rank.
        layer_wise: move the bytes of a load that is verified when its batch begins; False: before it is
            accepted.
        clock: seconds, monotonic.

    Raises:
        ConfigError: P's pool cannot be filled from the daemon's arena, or the integrity key is no good, and
            what to set.
        ExtraMissing: a package that the integrity key needs is not installed.
        MapFailed: this process cannot map the arena.
    """

    def __init__(
        self,
        settings: EngineSettings,
        rank: int,
        pool: KVPool,
        namespace: Callable[[], Namespace],
        *,
        agree: Callable[[bool], bool] | None = None,
        layer_wise: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = LoadCounts()
        self._settings = settings
        self._integrity = read_integrity(settings)
        self._rank = rank
        self._pool = pool
        self._namespace = namespace
        self._agree = agree or bool
        self._clock = clock
        self._warn = Warner(clock)
        self._plans: OrderedDict[str, _Plan] = OrderedDict()
        self._plan_keys = 0
        self._is_resting = False
        self._num_layers = len(pool.layers)
        # Loads that were whole before they were accepted.
        self._whole: set[str] = set()
        self._layers: LayerLoads | None = None
        self._client = Client(settings.socket_path, timeout_s=settings.timeout_s, name=f"sglang-p{rank}")
        # What is used now, and of which namespace; the keeper makes them, the scheduler only reads.
        self._made: tuple[Namespace, Ingester] | None = None
        self._stop = threading.Event()
        with self._connection_trouble():
            self._make_ingester()
        if layer_wise:
            self._layers = LayerLoads(self._num_layers, pool.device, rank)
        self._keeper = threading.Thread(target=self._keep, name=f"snapd-keeper-{rank}", daemon=True)
        self._keeper.start()

    # --- the connection ------------------------------------------------------------------------

    def _make_ingester(self) -> None:
        """Declare P's layout in the present namespace, and have what a load needs."""
        namespace = self._namespace()
        made = self._made
        if made is not None and made[0] == namespace:
            self._client.ping()
            return
        ingester = Ingester(
            self._client, self._rank, self._pool, LentSlots(), namespace,
            verify=self._settings.verify, integrity=self._integrity,
        )  # fmt: skip
        # The one before is let go of by whoever uses it last.
        self._made = (namespace, ingester)
        _log.info(
            "P finds snapshots", socket_path=self._settings.socket_path, rank=self._rank,
            layout_fingerprint=ingester.layout_fingerprint,
        )  # fmt: skip

    def _keep(self) -> None:
        be_on(self._pool.device)
        while not self._stop.wait(self._settings.retry_s):
            try:
                with self._connection_trouble():
                    self._make_ingester()
                    self._is_resting = False
            except SnapdError as error:
                self._warn("P cannot use this daemon, and computes everything", error=str(error))
            except Exception:
                _log.exception("P's connection to the daemon failed")

    @contextlib.contextmanager
    def _connection_trouble(self) -> Iterator[None]:
        try:
            yield
        except ConnectionProblem as error:
            self._rest(str(error))

    def _rest(self, why: str) -> None:
        # Until the keeper hears from the daemon: the scheduler waits once for one that hangs.
        self._is_resting = True
        self._warn(
            "the daemon cannot be asked, and P computes what it might have",
            error=why, retry_s=self._settings.retry_s,
        )  # fmt: skip

    def _usable(self) -> Ingester | None:
        """Return what to ask with now, or None."""
        made = self._made
        if made is None or self._is_resting:
            self.counts.resting_lookups += 1
            return None
        if made[0] != self._namespace():
            # What is there is of other weights; the keeper will see.
            return None
        return made[1]

    # --- lookup --------------------------------------------------------------------------------

    def lookup(self, rid: str, keys: Sequence[str]) -> int:
        """Return how many pages of a request, from the first key on, can be loaded; within ``timeout_s``.

        Args:
            rid: the request.
            keys: of the pages that SGLang does not hold, in order.
        """
        asked = (len(keys), keys[-1] if keys else "")
        plan = self._plans.get(rid)
        is_fresh = plan is not None and self._clock() < plan.made_s + PLAN_FRESH_S
        if plan is None or not is_fresh or plan.asked != asked:
            segments = self._cover(keys)
            num_pages = sum(segment.num_pages for segment in segments)
            plan = _Plan(asked, tuple(keys[:num_pages]), segments, self._clock())
            self._take_plan(rid)
            self._plans[rid] = plan
            self._plan_keys += num_pages
            while len(self._plans) > PLANS_MAX or (self._plan_keys > PLAN_KEYS_MAX and len(self._plans) > 1):
                self._take_plan(next(iter(self._plans)))
        num_pages = len(plan.keys)
        return num_pages if num_pages * self._pool.page_size_tokens >= self._settings.min_load_tokens else 0

    def _cover(self, keys: Sequence[str]) -> tuple[Segment, ...]:
        ingester = self._usable()
        if ingester is None or not keys:
            return ()
        until_s = self._clock() + self._settings.timeout_s
        client, page_size_tokens = ingester.client, self._pool.page_size_tokens

        def find(wanted: Sequence[str]) -> FoundRun | None:
            timeout_s = until_s - self._clock()
            if timeout_s <= 0:
                raise RequestTimeout("the daemon took too long to say what it has")
            reply = client.lookup(ingester.layout_fingerprint, page_keys=wanted, timeout_s=timeout_s)
            if reply.slab_handle == 0:
                return None
            return FoundRun(
                slab_handle=reply.slab_handle,
                name=reply.session_id,
                num_pages=reply.num_tokens // page_size_tokens,
                matched_pages=reply.matched_tokens // page_size_tokens,
            )

        try:
            with self._connection_trouble():
                return cover(keys[: client.hello.page_keys_max], find)
        except SnapdError as error:
            self._warn("the daemon refused a lookup", error=str(error))
        return ()

    def _take_plan(self, rid: str) -> _Plan | None:
        plan = self._plans.pop(rid, None)
        self._plan_keys -= 0 if plan is None else len(plan.keys)
        return plan

    def forget(self, rid: str) -> bool:
        """The request does not need what was found for it; return whether a load waited to begin.

        The slots of that one are not written any more.
        """
        self._take_plan(rid)
        was_whole = rid in self._whole
        self._whole.discard(rid)
        return (self._layers is not None and self._layers.cancel(rid)) or was_whole

    def forget_all(self) -> None:
        """SGLang has been emptied: give up what has begun as well, and return when no slot is written."""
        self._plans.clear()
        self._plan_keys = 0
        self._whole.clear()
        if self._layers is not None:
            self._layers.reset()

    # --- load ----------------------------------------------------------------------------------

    def load(
        self,
        rid: str,
        keys: Sequence[str],
        slots: torch.Tensor,
        after: Sequence[torch.cuda.Event] | None = None,
    ) -> bool:
        """Return whether pages, on all ranks, are what D committed; if so, they come with the next batch.

        Args:
            rid: the request, for which they were looked up.
            keys: of the first pages that ``lookup`` was asked for.
            slots: where to put them, int64, shape [len(keys) * page size], on the CPU or the pool's device.
            after: on a GPU, events after which the slots may be written.
        """
        jobs: list[LayerPagesJob] = []
        try:
            loaded = self._load(rid, tuple(keys), slots, after, jobs)
        except SnapdError as error:
            self._warn("a load failed, and P computes instead", error=str(error))
            loaded = False
        except Exception:
            _log.exception("a load failed, and P computes instead")
            loaded = False
        agreed = self._agree(loaded)
        if agreed:
            self.counts.loaded_pages += len(keys)
        else:
            self.counts.refused_loads += 1
        if self._layers is None:
            self._whole |= {rid} if agreed else set()
        elif agreed:
            self._layers.hold(rid, jobs)
        elif jobs:
            self._layers.give_up(jobs)
        return agreed

    def _load(
        self,
        rid: str,
        keys: tuple[str, ...],
        slots: torch.Tensor,
        after: Sequence[torch.cuda.Event] | None,
        jobs: list[LayerPagesJob],
    ) -> bool:
        """Return whether pages were loaded, or verified; *jobs* gets what is to be moved, also if not."""
        plan, ingester = self._take_plan(rid), self._usable()
        if ingester is None or plan is None or plan.keys[: len(keys)] != keys:
            return False
        segments = cut(plan.segments, len(keys))
        if self._layers is not None:
            # Every launch would copy them anew.
            slots = slots.cpu()
            self._layers.hurry()
            for segment in segments:
                self._layers.settle(segment.slab_handle)
        at = 0
        for segment in segments:
            stop = at + segment.num_pages * self._pool.page_size_tokens
            job = self._new_job(ingester, segment, slots[at:stop], after)
            if isinstance(job, LayerPagesJob):
                jobs.append(job)
            if not self._verify(job, segment):
                return False
            at = stop
        if self._layers is not None and any(job.is_late for job in jobs):
            # A second pass may be too much for what is left of the leases once SGLang depends on it.
            batch = self._layers.bring_in(jobs)
            if not batch.has_landed:
                self._warn("a snapshot could not be read, and P computes instead", reason=batch.error)
            return batch.has_landed
        return True

    def _new_job(
        self,
        ingester: Ingester,
        segment: Segment,
        slots: torch.Tensor,
        after: Sequence[torch.cuda.Event] | None,
    ) -> PagesJob:
        kind = PagesJob if self._layers is None else LayerPagesJob
        return kind(
            ingester, segment.name, segment.slab_handle, slots,
            skip_tokens=segment.first_page * self._pool.page_size_tokens,
            digest=segment.digest,
            keep_rest=segment.is_rest_wanted,
            vote_timeout_s=self._settings.timeout_s,
            after=after,
        )  # fmt: skip

    def _verify(self, job: PagesJob, segment: Segment) -> bool:
        """Step a job until its snapshot is verified, or loaded; return whether it is."""
        try:
            while not (isinstance(job, LayerPagesJob) and job.is_verified) and not job.step(STEP_BYTES):
                job.wait()
        except Exception:
            # What a GPU was given cannot be stopped, and SGLang is about to lend the slots to others.
            while not job.done:
                job.wait()
            raise
        if not job.done:
            return True
        result = job.result
        if result.reason is Reason.CHECKSUM_MISMATCH:
            _log.error(
                "checksum-mismatch: the snapshot is not what D committed, and P computes instead",
                session_id=segment.name, slab_handle=segment.slab_handle,
            )  # fmt: skip
        elif result.reason is Reason.LEASE_EXPIRED:
            # No answer came in time, as a rule.
            self._rest("it did not answer while a snapshot was read")
        elif not result.ok:
            self._warn("a snapshot could not be read, and P computes instead", reason=result.reason)
        return result.ok

    # --- layers --------------------------------------------------------------------------------

    @property
    def has_queued(self) -> bool:
        """A load waits for its batch."""
        return bool(self._whole) or (self._layers is not None and self._layers.has_queued)

    def start(self, complete: Callable[[int], object], fail: Callable[[BaseException], object]) -> LoadBatch:
        """Have all loads begin that wait, and return without waiting for them.

        Args:
            complete: called with every layer when its bytes are in the slots, in order; from any thread.
            fail: called when they will not be; from any thread.
        """
        self._whole.clear()
        if self._layers is not None:
            return self._layers.start(complete, fail)
        batch = LoadBatch(())
        for layer in range(self._num_layers):
            complete(layer)
        batch.has_landed = True
        batch.end()
        return batch

    def finish(self, batch: LoadBatch) -> bool:
        """Wait until no slot is written for *batch*; return whether what is there may be used."""
        has_landed = batch.wait()
        if batch.is_unanswered:
            self._rest("it did not answer when a snapshot was read")
        if not has_landed:
            self.counts.failed_batches += 1
            self._warn(
                "a load failed after it was accepted; its requests end with an error", error=batch.error
            )
        return has_landed

    def close(self) -> None:
        """Hang up; the threads end."""
        self._stop.set()
        if self._layers is not None:
            self._layers.close()
        self._keeper.join()
        self._client.close()
        if self._made is not None:
            self._made[1].close()
            self._made = None

"""D's side of SGLang's linker: pushes the pages that SGLang offloads, on a thread of its own.

SGLang offers the pages of a tree node once, when the node comes into being: of a prompt, of a chunk of it, of
an answer. It keeps them locked until it hears that they are done, so what waits here is bounded, and what is
too much is refused: SGLang offers it again. Which node follows which is not said, so each is a snapshot, and
P puts them together.

Nothing here needs SGLang.

Source: design, sections 8 and 9.
"""

import dataclasses
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

import structlog
import torch

from snapd.client import Client
from snapd.core.events import State
from snapd.engines.sglang_layers import be_on
from snapd.engines.sglang_load import Warner
from snapd.engines.sglang_pages import run_name
from snapd.engines.support import EngineSettings, read_integrity
from snapd.errors import Reason, SnapdError
from snapd.kv.integrity import check_on_host
from snapd.kv.pool import KVPool
from snapd.kv.pushjob import PushJob
from snapd.kv.pushpages import PagesPusher
from snapd.layout import Namespace
from snapd.units import MIB

OFFERS_MAX: Final = 256
# Of the kv_pool: pages that wait are locked, and D needs the rest.
_QUEUED_SHARE: Final = 4
# Keys of pages that were pushed, over all sessions.
KNOWN_KEYS_MAX: Final = 200_000
# Between two looks at whether the push is still wanted.
_STEP_BYTES: Final = 16 * MIB

_log: Final = structlog.get_logger("snapd.engines")


class KnownPages:
    """Keys of pages that P has, or will find in the daemon; the least recently pushed are forgotten.

    Args:
        keys_max: how many are remembered.
    """

    def __init__(self, keys_max: int = KNOWN_KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._handles: OrderedDict[str, int] = OrderedDict()
        self._keys: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def missing(self, keys: Sequence[str]) -> range:
        """Return the pages from the first to the last that is not known, as indexes of *keys*."""
        unknown = [at for at, key in enumerate(keys) if key not in self._handles]
        return range(unknown[0], unknown[-1] + 1) if unknown else range(0)

    def add(self, slab_handle: int, keys: Sequence[str]) -> None:
        """Remember what an attempt brought over."""
        self._keys[slab_handle] = tuple(keys)
        for key in keys:
            self._handles.pop(key, None)
            self._handles[key] = slab_handle
        while len(self._handles) > self._keys_max:
            _, handle = self._handles.popitem(last=False)
            # How that one ends could not be told of all its keys any more.
            self.ended(handle, is_ingested=False)

    def ended(self, slab_handle: int, *, is_ingested: bool) -> None:
        """An attempt has ended: P has its pages, or nobody has."""
        keys = self._keys.pop(slab_handle, ())
        if is_ingested:
            return
        for key in keys:
            if self._handles.get(key) == slab_handle:
                del self._handles[key]

    def forget_open(self) -> None:
        """Whether P has taken what it had not taken yet is not known any more."""
        for handle in list(self._keys):
            self.ended(handle, is_ingested=False)


@dataclasses.dataclass(frozen=True, eq=False)
class _Offer:
    """Pages that SGLang offered, as they wait."""

    keys: tuple[str, ...]
    slots: torch.Tensor
    session_id: str | None
    events: Sequence[torch.cuda.Event]
    namespace: Namespace


class Offloader:
    """Pushes what one D rank offers to the same rank of P.

    ``offer``, ``completed`` and ``take`` are for the scheduler's thread and never wait for the daemon; so are
    ``reset`` and ``close``, which wait for the push under way to stop.

    Args:
        settings: the operator's.
        rank: of D's tensor-parallel ranks, and of P's.
        pool: D's kv_pool.
        namespace: as it is now; asked for every offer.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the integrity key is no good, or the pool is on a GPU and there is one.
        ExtraMissing: a package that the integrity key needs is not installed.
    """

    def __init__(
        self,
        settings: EngineSettings,
        rank: int,
        pool: KVPool,
        namespace: Callable[[], Namespace],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pushed_pages = 0
        self._settings = settings
        self._integrity = read_integrity(settings)
        if self._integrity is not None:
            check_on_host(pool.device)
        self._rank = rank
        self._pool = pool
        self._namespace = namespace
        self._clock = clock
        self._warn = Warner(clock)
        self._known = KnownPages()
        self._rest_until_s = 0.0
        self._connection = ("", 0, 0)
        self._client = Client(settings.socket_path, timeout_s=settings.timeout_s, name=f"sglang-d{rank}")
        self._pusher: tuple[Namespace, PagesPusher] | None = None
        self._changed = threading.Condition()
        self._waiting: deque[_Offer] = deque()
        self._waiting_tokens = 0
        self._told: deque[bool] = deque()
        self._is_busy = False
        self._is_stopping = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"snapd-offload-{rank}", daemon=True)
        self._thread.start()

    # --- the scheduler's thread ----------------------------------------------------------------

    def offer(
        self,
        keys: Sequence[str],
        slots: torch.Tensor,
        session_id: str | None = None,
        events: Sequence[torch.cuda.Event] = (),
    ) -> bool:
        """Take pages to push; False: not now, there are too many already.

        Args:
            keys: one a page, of pages that follow each other.
            slots: where they are, int64, on any device, shape [len(keys) * page size]; they stay as they are
                until ``completed`` counts them.
            session_id: SGLang's.
            events: after which the pages are written and *slots* can be read.
        """
        offer = _Offer(tuple(keys), slots, session_id, events, self._namespace())
        with self._changed:
            # One that waits for nobody is taken however long it is.
            is_full = self._waiting_tokens + slots.numel() > self._pool.num_slots // _QUEUED_SHARE
            if self._is_closed or len(self._waiting) >= OFFERS_MAX or (is_full and self._waiting_tokens):
                return False
            self._waiting.append(offer)
            self._waiting_tokens += slots.numel()
            self._changed.notify_all()
        return True

    def completed(self) -> int:
        """Return how many offers are done with and not taken yet, in the order in which they came."""
        with self._changed:
            return len(self._told)

    def take(self) -> bool:
        """Take the oldest of them; True: P has the pages or will find them. False: offer them again."""
        with self._changed:
            return self._told.popleft()

    def reset(self) -> None:
        """Give everything up, and return when no slot is read any more."""
        with self._changed:
            self._is_stopping = True
            self._waiting_tokens -= sum(offer.slots.numel() for offer in self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_busy)
            self._is_stopping = False
            self._told.clear()

    def close(self) -> None:
        """As ``reset``, for good; the client hangs up."""
        self.reset()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    # --- its own thread ------------------------------------------------------------------------

    def _run(self) -> None:
        be_on(self._pool.device)
        try:
            self._warm_up()
            while (offer := self._next()) is not None:
                is_done = False
                try:
                    is_done = self._push(offer)
                except Exception:
                    _log.exception("an offload failed")
                finally:
                    with self._changed:
                        self._is_busy = False
                        self._waiting_tokens -= offer.slots.numel()
                        self._told.append(is_done)
                        self._changed.notify_all()
        finally:
            if self._pusher is not None:
                self._pusher[1].close()
            self._client.close()

    def _warm_up(self) -> None:
        """Have the memory that pushes need, before there is one; and tell the operator what is wrong."""
        try:
            self._look_around(self._pusher_for(self._namespace()))
        except SnapdError as error:
            self._trouble(str(error))
        except Exception:
            _log.exception("D's connection to the daemon failed")

    def _next(self) -> _Offer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            self._is_busy = True
            return self._waiting.popleft()

    def _push(self, offer: _Offer) -> bool:
        """Push what P lacks; return what SGLang hears of it."""
        for event in offer.events:
            event.synchronize()
        if self._clock() < self._rest_until_s:
            return False
        try:
            pusher = self._pusher_for(offer.namespace)
            page_keys_max = self._look_around(pusher)
            missing = self._known.missing(offer.keys)
            if len(missing) * self._pool.page_size_tokens < max(1, self._settings.min_push_tokens):
                return True
            slots = offer.slots.cpu()
            for start in range(missing.start, missing.stop, page_keys_max):
                pages = range(start, min(start + page_keys_max, missing.stop))
                if not self._push_run(pusher, offer, slots, pages):
                    return False
        except SnapdError as error:
            self._trouble(str(error))
            return False
        return True

    def _pusher_for(self, namespace: Namespace) -> PagesPusher:
        if self._pusher is None or self._pusher[0] != namespace:
            if self._pusher is not None:
                self._pusher[1].close()
                # Of other weights: their pages have other bytes under the same keys.
                self._known = KnownPages()
            pusher = PagesPusher(self._client, {self._rank: self._pool}, namespace, integrity=self._integrity)
            self._pusher = (namespace, pusher)
        return self._pusher[1]

    def _look_around(self, pusher: PagesPusher) -> int:
        """Learn how attempts ended and whether the daemon was restarted; return the keys that it takes."""
        hello = pusher.connect()
        connection = (hello.epoch, self._client.reconnects, self._client.ended_dropped)
        if connection != self._connection:
            # How attempts ended meanwhile was not told, and in another life of the daemon all are gone.
            self._connection = connection
            self._known.forget_open()
        for ended in self._client.take_ended():
            pusher.ended.append(ended)
        while pusher.ended:
            ended = pusher.ended.popleft()
            self._known.ended(ended.slab_handle, is_ingested=ended.state is State.INGESTED)
        return hello.page_keys_max

    def _push_run(self, pusher: PagesPusher, offer: _Offer, slots: torch.Tensor, pages: range) -> bool:
        keys = offer.keys[pages.start : pages.stop]
        page_size_tokens = self._pool.page_size_tokens
        job = pusher.start_pages(
            run_name(offer.session_id, keys),
            keys,
            slots[pages.start * page_size_tokens : pages.stop * page_size_tokens],
            digest=keys[-1],
            after=() if self._pool.device.type == "cuda" else None,
        )
        result = self._finish(job).result
        if result.ok:
            self._known.add(result.slab_handle, keys)
            self.pushed_pages += len(keys)
        elif result.slab_handle == 0 and result.reason is Reason.TRANSFER_FAILED:
            self._trouble(result.detail)
        else:
            self._warn(
                "pages were not pushed, and P may have to compute them",
                reason=result.reason, detail=result.detail,
            )  # fmt: skip
        return result.ok

    def _finish(self, job: PushJob) -> PushJob:
        while not job.step(_STEP_BYTES):
            with self._changed:
                is_stopping = self._is_stopping
            if is_stopping:
                job.cancel(Reason.SESSION_NOT_RESIDENT)
                break
            job.wait()
        return job

    def _trouble(self, why: str) -> None:
        self._rest_until_s = self._clock() + self._settings.retry_s
        self._warn(
            "the daemon cannot be asked, and pages stay here", error=why, retry_s=self._settings.retry_s
        )

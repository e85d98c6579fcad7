"""D's side of direct injection for SGLang: sessions are pushed out of the tree while the engine goes on.

A request that has finished is in the tree, in whole pages. They are pinned there until the push is final: the
engine waits for nothing, and nothing is evicted under a push. All of it belongs to the scheduler's thread,
which polls once a turn of its loop, also when the engine is idle::

    pushes = SessionPushes(client, scheduler.token_to_kv_pool_allocator, scheduler.tree_cache, namespace)
    pushes.start("chat-17", prompt_ids + output_ids)
    for push in pushes.poll(): ...

Source: design, section 8.
"""

from collections.abc import Sequence
from typing import Any, Final

import structlog
import torch

from snapd.client import Client
from snapd.engines.sglang_inject import namespaced_cache
from snapd.engines.sglang_inject_cache import Pinned, SglangCache
from snapd.engines.sglang_pools import DISTRIBUTIONS, TESTED_VERSIONS
from snapd.engines.support import check_version
from snapd.errors import LimitReached, Reason, RequestError
from snapd.kv.control import PushControl
from snapd.kv.integrity import KeyedIntegrity
from snapd.kv.push import STEP_BYTES, Pusher
from snapd.kv.pushjob import PushJob, PushResult, PushSettings, RefusedJob
from snapd.kv.writers import WriterFor
from snapd.layout import Namespace
from snapd.mooncakeconfig import MooncakeConfig
from snapd.units import align_down

PUSHES_MAX: Final = 16
_log: Final = structlog.get_logger("snapd.engines")


class SessionPush:
    """A push under way, and the pages that it keeps in the tree. Made by ``SessionPushes.start``.

    Attributes:
        session_id: whose.
        num_tokens: tokens of the session that D holds and that are pinned, from the first on.
    """

    def __init__(self, session_id: str, job: PushJob, cache: SglangCache, pinned: Pinned | None) -> None:
        self.session_id = session_id
        self.num_tokens = 0 if pinned is None else pinned.num_tokens
        self._job = job
        self._cache = cache
        self._pinned = pinned
        if job.done:
            self._unpin()

    @property
    def done(self) -> bool:
        """It has ended, one way or the other, and its pages are SGLang's again."""
        return self._pinned is None

    @property
    def result(self) -> PushResult:
        """How it ended.

        Raises:
            InvalidRequest: it has not.
        """
        return self._job.result

    def cancel(self, reason: Reason = Reason.TRANSFER_FAILED) -> PushResult:
        """End it from D's side; its pages are SGLang's again."""
        try:
            return self._job.cancel(reason)
        finally:
            self._unpin()

    def step(self, max_bytes: int) -> int:
        """Move up to *max_bytes*, a piece at least if there is room for it; return how many were moved.

        After a flush nothing is read any more: the pages may be somebody else's.
        """
        if self._pinned is None:
            return 0
        if self._pinned.life != self._cache.life:
            self.cancel(Reason.SESSION_NOT_RESIDENT)
            return 0
        before_bytes = self._job.bytes_done
        try:
            self._job.step(max_bytes)
        except Exception:
            # It has ended all the same, and the engine goes on.
            _log.exception("a push failed", session_id=self.session_id)
        if self._job.done:
            self._unpin()
        return self._job.bytes_done - before_bytes

    def _unpin(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            self._cache.unpin(pinned)


class SessionPushes:
    """Pushes sessions out of SGLang's tree, several at a time.

    Args:
        client: the control connection; or another way to speak to the daemon.
        allocator: SGLang's, with its kv_pool.
        tree: SGLang's radix tree over it.
        namespace: model, LoRA, salt, weight version, tenant: as P has it.
        rank: P's rank that gets the bytes.
        extra_key: see ``snapd.engines.sglang_inject.Injector``.
        pushes_max: more are refused.
        settings, mooncake, integrity, writer_for: see ``snapd.kv.push.Pusher``.

    Attributes:
        pusher: does the work.

    Raises:
        UnsupportedEngine, ConfigError, SnapdError: as for ``Injector`` and ``Pusher``.
    """

    def __init__(
        self,
        client: Client | PushControl,
        allocator: Any,
        tree: Any,
        namespace: Namespace = Namespace(),  # noqa: B008 - frozen
        *,
        rank: int = 0,
        extra_key: str | None = None,
        pushes_max: int = PUSHES_MAX,
        settings: PushSettings = PushSettings(),  # noqa: B008 - frozen
        mooncake: MooncakeConfig = MooncakeConfig(),  # noqa: B008 - frozen
        integrity: KeyedIntegrity | None = None,
        writer_for: WriterFor | None = None,
    ) -> None:
        check_version("SGLang", DISTRIBUTIONS, TESTED_VERSIONS)
        self._cache = namespaced_cache(allocator, tree, namespace, extra_key)
        self._pushes_max = pushes_max
        self._open: list[SessionPush] = []
        self.pusher = Pusher(
            client,
            {rank: self._cache.pool},
            namespace,
            settings=settings,
            mooncake=mooncake,
            integrity=integrity,
            writer_for=writer_for,
        )

    @property
    def num_open(self) -> int:
        """Pushes under way."""
        return len(self._open)

    def start(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        token_start: int = 0,
        use_resident_hint: bool = True,
        after: Sequence[torch.cuda.Event] | None = None,
    ) -> SessionPush:
        """Begin to push what D holds of a session whose request has finished.

        The last token that was sampled has no KV, and a page that is not full is not in the tree: neither is
        sent. If anything else is missing it was evicted: that is refused as ``session-not-resident``, and the
        daemon is not asked.

        Args:
            session_id: the conversation.
            token_ids: prompt and answer.
            token_start: first token to send; a multiple of the page size.
            use_resident_hint: send only what P is believed to lack.
            after: on a GPU, recorded events that the gather waits for. None: all that the current stream was
                given until now.

        Raises:
            InvalidRequest: there are events, and the pool is not on a GPU.
        """
        if len(self._open) >= self._pushes_max:
            return self._refused(session_id, LimitReached(f"{len(self._open)} pushes are under way"))
        pinned = self._cache.pin(token_ids)
        if pinned.num_tokens < max(1, align_down(len(token_ids) - 1, self._cache.page_size_tokens)):
            self._cache.unpin(pinned)
            detail = f"D holds {pinned.num_tokens} of {len(token_ids)} tokens"
            return self._refused(session_id, RequestError(detail, reason=Reason.SESSION_NOT_RESIDENT))
        try:
            job = self.pusher.start(
                session_id,
                token_ids[: pinned.num_tokens],
                pinned.slots,
                token_start=token_start,
                use_resident_hint=use_resident_hint,
                after=after,
            )
        except BaseException:
            self._cache.unpin(pinned)
            raise
        push = SessionPush(session_id, job, self._cache, pinned)
        if not push.done:
            self._open.append(push)
        return push

    def _refused(self, session_id: str, error: RequestError) -> SessionPush:
        return SessionPush(session_id, RefusedJob(error), self._cache, None)

    def poll(self, max_bytes: int = STEP_BYTES) -> list[SessionPush]:
        """Move up to *max_bytes*, of the oldest first; return the pushes that ended."""
        self.pusher.poll()
        for push in self._open:
            if max_bytes <= 0:
                break
            max_bytes -= push.step(max_bytes)
        ended = [push for push in self._open if push.done]
        self._open = [push for push in self._open if not push.done]
        return ended

    def close(self) -> None:
        """Give up what is under way, and close the pusher; the client stays open."""
        for push in self._open:
            push.cancel()
        self._open.clear()
        self.pusher.close()

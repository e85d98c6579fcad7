"""Notifications that come with transfers: hints to whoever prepared, or commits without a connection.

A transport carries them next to the bytes, so they may be lost, be repeated, and come from anybody who
reaches the transport. A hint changes nothing. A commit goes through the same checks as one over the
control socket; its checksums decide what reaches a tree.

Source: design, sections 5 and 7.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from snapd import wire as w
from snapd.core import events as e
from snapd.core.session import PREPARER
from snapd.errors import ProtocolError
from snapd.executor import Executor
from snapd.limits import Limits
from snapd.mooncakeconfig import MooncakeConfig
from snapd.server import Server
from snapd.service import event_of
from snapd.units import MS_PER_S

# Handled before everybody else gets their turn.
TURN_MAX: Final = 64
# When none are wanted they are thrown away all the same: the transport would keep them for ever.
_POLL_UNWANTED_MS: Final = 1_000


class NotificationCounts(msgspec.Struct):
    """What became of notifications.

    Attributes:
        taken: committed a rank's shard, or were passed on as a hint.
        refused: commits that the core refused.
        ignored: all others.
    """

    taken: int = 0
    refused: int = 0
    ignored: int = 0


class Notifications:
    """Takes notifications from a transport, a bounded number at a time, until it is closed.

    Args:
        config: whether they are wanted, for what, and how often to look.
        limits: how many may wait to be handled. A commit of a hundred planes has some thousand characters.
        epoch: this life of the daemon; others' notifications are ignored.
        executor: runs the core.
        server: knows the connections.
        loop: the running loop.
        take: returns the texts that have come since it was last called.
    """

    def __init__(
        self,
        config: MooncakeConfig,
        limits: Limits,
        epoch: str,
        executor: Executor,
        server: Server,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[], list[str]],
    ) -> None:
        self.counts = NotificationCounts()
        self._mode = config.notify
        self._limits = limits
        self._pause_s = (_POLL_UNWANTED_MS if self._mode == "off" else config.notify_poll_ms) / MS_PER_S
        self._epoch = epoch
        self._executor = executor
        self._server = server
        self._loop = loop
        self._take = take
        self._pending: deque[str] = deque()
        self._next: asyncio.TimerHandle = loop.call_later(self._pause_s, self._turn)

    def usage(self) -> dict[str, int]:
        """Return how much of its bounds is in use, by setting."""
        return {
            "limits.notifications_max": len(self._pending),
            "limits.notifications_chars_max": sum(map(len, self._pending)),
        }

    def close(self) -> None:
        """Look no more."""
        self._next.cancel()

    def _turn(self) -> None:
        if not self._pending:
            self._look()
        for _ in range(min(TURN_MAX, len(self._pending))):
            self._handle(self._pending.popleft())
        self._next = self._loop.call_later(0.0 if self._pending else self._pause_s, self._turn)

    def _look(self) -> None:
        texts = self._take()
        if self._mode == "off":
            self._ignore(len(texts), "notifications unwanted", notify=self._mode)
            return
        limits = self._limits
        chars_max = limits.notification_chars_max
        short = [text for text in texts if len(text) <= chars_max]
        self._ignore(len(texts) - len(short), "notifications too long", characters_max=chars_max)
        pending_chars = 0
        for text in short[: limits.notifications_max]:
            pending_chars += len(text)
            if pending_chars > limits.notifications_chars_max:
                break
            self._pending.append(text)
        self._ignore(
            len(short) - len(self._pending),
            "too many notifications",
            notifications_max=limits.notifications_max,
            characters_max=limits.notifications_chars_max,
        )

    def _handle(self, text: str) -> None:
        try:
            notification = w.decode_notification(text)
        except ProtocolError as error:
            self._ignore(1, "bad notification", error=str(error))
            return
        if notification.epoch != self._epoch:
            self._ignore(1, "notification of another epoch", epoch=notification.epoch[:32])
        elif self._mode == "hint":
            self._pass_on(notification)
        else:
            self._commit(notification)

    def _pass_on(self, notification: w.TransferNotification) -> None:
        """Tell the connection that prepared the attempt, if both are there still."""
        session = self._executor.machine.books.open.get(notification.slab_handle)
        is_told = (
            session is not None
            and notification.rank in session.shards
            and self._server.tell_notified(
                session.told_conn_ids[PREPARER],
                w.TransferNotified(
                    slab_handle=session.handle, session_id=session.session_id, rank=notification.rank
                ),
            )
        )
        if is_told:
            self.counts.taken += 1
        else:
            self.counts.ignored += 1

    def _commit(self, notification: w.TransferNotification) -> None:
        request = w.CommitReq(
            id=0,
            slab_handle=notification.slab_handle,
            rank=notification.rank,
            num_bytes=notification.num_bytes,
            num_tokens=notification.num_tokens,
            checksums=notification.checksums,
            drained=notification.drained,
        )

        def on_result(result: e.Result) -> None:
            if isinstance(result, e.Accepted):
                self.counts.taken += 1
            else:
                self.counts.refused += 1

        # Nobody can be answered, so there is no connection either that is told how the attempt ends.
        self._executor.ask(lambda at_ns, cause_id: event_of(request, 0, at_ns, cause_id), on_result)

    def _ignore(self, count: int, why: str, **facts: object) -> None:
        if count > 0:
            self.counts.ignored += count
            self._server.warnings.warn(why, count=count, **facts)

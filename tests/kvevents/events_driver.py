"""A core whose records are followed, and the naive answer to what a router should hold."""

from collections.abc import Sequence
from typing import Any

from core_driver import Driver
from event_consumer import Lists

from snapd import wire as w
from snapd.config import Config
from snapd.core import events as e
from snapd.core.events import State
from snapd.core.records import Record
from snapd.kvevents.hashes import (
    pack_block_hashes,
    pack_token_ids,
    page_key_hashes,
    sglang_block_hashes,
)
from snapd.kvevents.observer import KVEvents
from snapd.layout import page_keys

PAGE = 4


class EventsDriver(Driver):
    """A driver whose observer sees every record after its event, as the executor has it.

    Attributes:
        outlet: applies what is published to a consumer.
        told: token ids of the session, and whether they and the hashes were sent, by handle.
        passed_on: records that came through.
    """

    def __init__(self, ranks: int = 1, *, config: dict[str, Any] | None = None, **fields: Any) -> None:
        self.told: dict[int, tuple[tuple[int, ...], int, bool, bool]] = {}
        self.outlet = Lists()
        self.passed_on: list[Record] = []
        self._observe: Any = None
        super().__init__(ranks, **fields)
        config = {"kv_events_address": "tcp://127.0.0.1:0", "kv_events_clear_all": False} | (config or {})
        self.kv_events = KVEvents(Config(**config), self.machine.books.open, self.outlet)
        self._observe = self.kv_events.observing(self.passed_on.append)
        self.kv_events.start()

    def handle_event(self, event: e.Event) -> list[e.Instruction]:
        seen = len(self.records)
        instructions = super().handle_event(event)
        if self._observe is not None:
            for record in self.records[seen:]:
                self._observe(record)
        return instructions

    def offer(
        self,
        session_id: str,
        token_ids: Sequence[int],
        *,
        token_start: int = 0,
        send_keys: bool = True,
        send_token_ids: bool = False,
        send_hashes: bool = False,
        **fields: Any,
    ) -> int:
        """Prepare for a session's tokens, as a Pusher does; return the handle, or 0 when refused."""
        result = self.prepare(
            session_id,
            len(token_ids) - token_start,
            token_start=token_start,
            page_keys=page_keys(token_ids, PAGE) if send_keys else (),
            **fields,
        )
        if not isinstance(result, e.Granted):
            return 0
        request = w.SnapshotPrepareReceiveReqInput(
            id=1,
            session_id=session_id,
            num_tokens=len(token_ids) - token_start,
            token_start=token_start,
            layout_fingerprint="not read",
            token_ids=pack_token_ids(token_ids[token_start:]) if send_token_ids else b"",
            block_hashes=(
                pack_block_hashes(sglang_block_hashes(session_id, token_ids, PAGE)) if send_hashes else b""
            ),
        )
        self.kv_events.on_grant(request, result)
        names_known = send_keys or send_hashes
        self.told[result.slab_handle] = (tuple(token_ids), token_start, names_known, send_hashes)
        return result.slab_handle

    def make_ready(self, handle: int) -> int:
        """Commit what was offered, on every rank."""
        for rank in self.session(handle).shards:
            self.commit(handle, rank)
        assert self.state(handle) is State.READY
        return handle

    def wanted(self) -> dict[int, tuple[int, ...]]:
        """Return the pages of the READY snapshots, by what each should be called, with their tokens."""
        pages: dict[int, tuple[int, ...]] = {}
        for handle, session in self.machine.books.open.items():
            token_ids, _, names_known, sent_hashes = self.told[handle]
            if session.state is not State.READY or not names_known:
                continue
            if sent_hashes:
                names = sglang_block_hashes("", token_ids, PAGE)
            else:
                names = page_key_hashes(page_keys(token_ids, PAGE), session.key[0])
            for index in range(session.token_start // PAGE, session.end_tokens // PAGE):
                pages[names[index]] = token_ids[index * PAGE : (index + 1) * PAGE]
        return pages

    def check(self) -> None:
        """The consumer holds exactly the pages of the READY snapshots, with their tokens or with none."""
        found, wanted = self.outlet.consumer.pages, self.wanted()
        assert found.keys() == wanted.keys()
        assert all(tokens in ((), wanted[name]) for name, tokens in found.items())

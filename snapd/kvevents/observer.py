"""Follows the records of the core, and says what is to be published.

A snapshot that became READY is told, and told to be gone when it is READY no more, for whatever reason. What
is told is decided here, on the event loop, in bounded memory: a snapshot for which there is no room is not
told at all, and counted. So nothing that was told is ever forgotten, and no removal is left out.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from snapd import wire as w
from snapd.config import Config
from snapd.core import events as e
from snapd.core.records import Record, SessionTransition
from snapd.core.session import Session
from snapd.kvevents.changes import CHANGE_BYTES, Change, Cleared, Removed, Stored
from snapd.kvevents.hashes import page_key_hashes, unpack_block_hashes
from snapd.kvevents.ledger import Ledger
from snapd.kveventsconfig import BLOCK_HASH_BYTES, TOKEN_ID_BYTES

# Why a READY snapshot was not told, or not with all that D said of it.
Why: TypeAlias = Literal["no-hashes", "pages-max", "queue-full"]
WHYS: Final[tuple[Why, ...]] = ("no-hashes", "pages-max", "queue-full")


class Outlet(Protocol):
    """Where changes go."""

    @property
    def queued_bytes(self) -> int:
        """What waits there."""
        ...

    def put(self, change: Change) -> None:
        """Take a change; never blocks and never raises."""
        ...


@dataclass(frozen=True, slots=True)
class _Facts:
    """What D said of an attempt, for events only.

    Attributes:
        token_start: the first token of *token_ids*.
        token_ids: packed.
        block_hashes: packed, one a page from token 0 on.
    """

    token_start: int
    token_ids: bytes
    block_hashes: bytes

    @property
    def num_bytes(self) -> int:
        return CHANGE_BYTES + len(self.token_ids) + len(self.block_hashes)


class KVEvents:
    """What is told of one daemon's buffer.

    Args:
        config: bounds and names.
        open_sessions: the core's open attempts, by handle.
        outlet: takes the changes.

    Attributes:
        ledger: what is told at present.
        unpublished: READY snapshots that were not told, by why.
        facts_dropped: attempts of which not all was kept that D said for events.
        stored_pages: pages that were told to be there, so far.
        removed_pages: pages that were told to be gone, so far.
    """

    def __init__(self, config: Config, open_sessions: Mapping[int, Session], outlet: Outlet) -> None:
        self._config = config
        self._open = open_sessions
        self._outlet = outlet
        self._facts: dict[int, _Facts] = {}
        self._facts_bytes = 0
        self.ledger = Ledger(config.kv_events_pages_max)
        self.unpublished: Counter[Why] = Counter()
        self.facts_dropped = 0
        self.stored_pages = 0
        self.removed_pages = 0

    def start(self) -> None:
        """Tell that nothing is there, if that is wanted: a daemon that was here before told something."""
        if self._config.kv_events_clear_all:
            self._outlet.put(Cleared())

    def stop(self) -> None:
        """Tell that nothing is there any more."""
        self._tell_removed(self.ledger.clear())
        self._facts.clear()
        self._facts_bytes = 0
        if self._config.kv_events_clear_all:
            self._outlet.put(Cleared())

    # --- what D says ---------------------------------------------------------------------------

    def on_grant(self, request: w.SnapshotPrepareReceiveReqInput, granted: e.Granted) -> None:
        """Keep what D said for events until the attempt is READY, if there is room.

        What does not fit is left out, as it is no reason to refuse a snapshot.
        """
        if not (request.token_ids or request.block_hashes):
            return
        said = _Facts(request.token_start, request.token_ids, request.block_hashes)
        kept = self._what_fits(said)
        self.facts_dropped += kept is not said
        if kept is not None:
            self._facts[granted.slab_handle] = kept
            self._facts_bytes += kept.num_bytes

    def _what_fits(self, said: _Facts) -> _Facts | None:
        """Return all of it, the block hashes alone, or nothing."""
        is_sound = (
            len(said.token_ids) % TOKEN_ID_BYTES == 0
            and len(said.token_ids) <= self._config.kv_events_token_ids_max * TOKEN_ID_BYTES
            and len(said.block_hashes) % BLOCK_HASH_BYTES == 0
            and len(said.block_hashes) <= self._config.page_keys_max * BLOCK_HASH_BYTES
        )
        if not is_sound:
            return None
        if self._has_room(said.num_bytes):
            return said
        less = _Facts(said.token_start, b"", said.block_hashes)
        return less if less.block_hashes and self._has_room(less.num_bytes) else None

    @property
    def waiting_bytes(self) -> int:
        """What waits to be published, and what attempts bring for it."""
        return self._outlet.queued_bytes + self._facts_bytes

    def _has_room(self, num_bytes: int) -> bool:
        return self.waiting_bytes + num_bytes <= self._config.kv_events_queue_bytes_max

    def _take_facts(self, handle: int) -> _Facts | None:
        facts = self._facts.pop(handle, None)
        if facts is not None:
            self._facts_bytes -= facts.num_bytes
        return facts

    # --- what the core does --------------------------------------------------------------------

    def observing(self, on_record: Callable[[Record], None]) -> Callable[[Record], None]:
        """Return what looks at a record and then passes it on."""

        def observe(record: Record) -> None:
            if type(record) is SessionTransition:
                self._note(record)
            on_record(record)

        return observe

    def _note(self, transition: SessionTransition) -> None:
        if transition.to_state == e.State.READY:
            self._tell_stored(self._open[transition.slab_handle])
        elif transition.from_state == e.State.READY:
            self._tell_removed(self.ledger.drop(transition.slab_handle))
        elif transition.to_state in e.FINAL_STATES:
            self._take_facts(transition.slab_handle)

    def _tell_stored(self, session: Session) -> None:
        facts = self._take_facts(session.handle)
        hashes, parent = _named_pages(session, facts)
        token_ids = _token_ids(session, facts, len(hashes))
        if not hashes:
            self.unpublished["no-hashes"] += 1
        elif not self.ledger.has_room(len(hashes)):
            self.unpublished["pages-max"] += 1
        elif not self._has_room(CHANGE_BYTES + len(hashes) * BLOCK_HASH_BYTES + len(token_ids)):
            self.unpublished["queue-full"] += 1
        else:
            for new in self.ledger.add(session.handle, hashes):
                self._tell_new(session, hashes, parent, token_ids, new)

    def _tell_new(
        self, session: Session, hashes: list[int], parent: int | None, token_ids: bytes, new: range
    ) -> None:
        """Tell neighbouring pages: first those whose token ids are known."""
        layout = session.layout
        page_bytes = layout.page_size_tokens * TOKEN_ID_BYTES
        known = max(new.start, min(new.stop, len(token_ids) // page_bytes))
        for start, stop in ((new.start, known), (known, new.stop)):
            if start < stop:
                self.stored_pages += stop - start
                self._outlet.put(
                    Stored(
                        hashes=hashes[start:stop],
                        parent=hashes[start - 1] if start else parent,
                        token_ids=token_ids[start * page_bytes : stop * page_bytes],
                        block_size=layout.page_size_tokens,
                        medium=self._config.kv_events_medium,
                        lora_name=layout.namespace.lora or None,
                        cache_salt=layout.namespace.cache_salt or None,
                        session_id=session.session_id,
                    )
                )

    def _tell_removed(self, hashes: list[int]) -> None:
        if hashes:
            self.removed_pages += len(hashes)
            self._outlet.put(Removed(hashes, self._config.kv_events_medium))


def _named_pages(session: Session, facts: _Facts | None) -> tuple[list[int], int | None]:
    """Return the block hashes of the whole pages that a snapshot holds, and that of the page before them.

    D's own numbers, if it sent any; else those of the page keys, as many as there are.
    """
    page_size_tokens = session.layout.page_size_tokens
    first = session.token_start // page_size_tokens
    begin, end = max(0, first - 1), session.end_tokens // page_size_tokens
    if facts is not None and facts.block_hashes:
        packed = facts.block_hashes[begin * BLOCK_HASH_BYTES : end * BLOCK_HASH_BYTES]
        named = unpack_block_hashes(packed)
    else:
        named = page_key_hashes(session.page_keys[begin:end], session.key[0])
    if first and named:
        return named[1:], named[0]
    return named, None


def _token_ids(session: Session, facts: _Facts | None, num_pages: int) -> bytes:
    """Return the token ids of a snapshot's whole pages, packed, as far as D told them."""
    if facts is None:
        return b""
    page_bytes = session.layout.page_size_tokens * TOKEN_ID_BYTES
    # The grant may start later than D asked.
    begin = (session.token_start - facts.token_start) * TOKEN_ID_BYTES
    told = facts.token_ids[begin : begin + num_pages * page_bytes]
    return told[: len(told) // page_bytes * page_bytes]

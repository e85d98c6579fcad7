"""Whether an attempt may begin, what makes room for it, and how snapshots are found.

Source: design, sections 3 and 4.
"""

from collections.abc import Callable

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.attempt import Session, Shard
from snapd.core.books import Books
from snapd.core.events import OK, RESERVED
from snapd.core.lives import Lives
from snapd.core.session import (
    DIGEST_CHARS_MAX,
    PREPARER,
    RETRY_AFTER_MS_MIN,
)
from snapd.errors import InvalidRequest, Reason
from snapd.layout import Layout, fingerprint, snapshot_bytes
from snapd.units import NS_PER_MS, align_down


class Admission:
    """Takes declarations, prepares and lookups."""

    def __init__(self, books: Books, lives: Lives, take: Callable[[e.SessionEvent], None]) -> None:
        self._books = books
        self._out = books.outbox
        self._lives = lives
        self._take = take

    # --- layouts

    def declare_layout(self, event: e.LayoutDeclared) -> None:
        """Remember the layout of a rank's kv_pool."""
        if event.rank not in self._books.buffer.arenas:
            ranks = self._books.buffer.ranks
            self._out.refuse(Reason.WRONG_RANK, f"there is no arena {event.rank}; there are {ranks}")
            return
        try:
            event.layout.check()
        except InvalidRequest as error:
            self._out.refuse(Reason.INVALID_REQUEST, str(error))
            return
        name = fingerprint(event.layout)
        self._books.directory.declare(name, event.layout, event.rank)
        self._out.reply(e.Declared(name))

    # --- prepare

    def prepare(self, event: e.PrepareAsked) -> None:
        """Hand out a slab in every rank's arena, or in none."""
        books = self._books
        key = (event.layout_fingerprint, event.session_id)
        declared = books.directory.layout(event.layout_fingerprint)
        layout = declared.layout if declared else None
        ranks = tuple(sorted(event.ranks)) if event.ranks else books.buffer.ranks
        refusal = self._check_numbers(event, ranks)
        if refusal is None and (declared is None or not declared.ranks.issuperset(ranks)):
            refusal = self._unknown_layout(event, ranks)
        if refusal is None and layout is not None:
            refusal = self._check_pages(event, layout)
        if refusal is None and books.is_draining:
            refusal = e.Refused(Reason.DRAINING, "the daemon is being stopped")
        if refusal is None and len(books.open) + len(books.buffer.quarantine) >= books.settings.sessions_max:
            detail = f"{books.settings.sessions_max} attempts are open or in quarantine (sessions_max)"
            refusal = e.Refused(Reason.LIMIT_REACHED, detail, self._retry_after_ms())
        if refusal is not None or layout is None or declared is None:
            assert refusal is not None
            self._refuse(event, refusal, layout, len(ranks))
            return
        token_start, hint_tokens = self._where_to_start(event, layout, key)
        num_tokens = event.token_start + event.num_tokens - token_start
        planes = declared.planes
        extents = books.buffer.take(ranks, planes, num_tokens)
        if extents is None:
            sizes_bytes = planes.sizes_bytes(num_tokens)
            refusal = self._make_room(ranks, sizes_bytes, event.slab_handle)
            if refusal is not None:
                self._refuse(event, refusal, layout, len(ranks))
                return
            extents = books.buffer.allocate(ranks, sizes_bytes)
        session = Session(
            handle=event.slab_handle,
            key=key,
            planes=planes,
            num_tokens=num_tokens,
            token_start=token_start,
            token_digest=event.token_digest,
            page_keys=self._page_keys_to_hold(event),
            shards={rank: Shard(rank, extents[rank]) for rank in ranks},
            told_conn_ids={PREPARER: event.conn_id},
            writer_id=event.writer_id,
            created_ns=event.at_ns,
            state=RESERVED,
            peer=event.peer,
            owner=event.owner,
        )
        self._begin(session, hint_tokens)

    def _page_keys_to_hold(self, event: e.PrepareAsked) -> tuple[str, ...]:
        """Return the keys, or none when all attempts together would hold too many.

        The snapshot is then found by its session only: a search that finds less is no reason to refuse.
        """
        books = self._books
        has_room = books.page_keys_held + len(event.page_keys) <= books.settings.page_keys_total_max
        return event.page_keys if has_room else ()

    def _begin(self, session: Session, hint_tokens: int) -> None:
        books = self._books
        older = books.directory.writing(session.key)
        if older is not None:
            self._take(e.SupersededBy(at_ns=self._out.now_ns, slab_handle=older, newer_handle=session.handle))
        books.begin(session)
        self._record_begin(session)
        self._lives.start_clock(session)
        self._out.reply(
            e.Granted(
                slab_handle=session.handle,
                num_tokens=session.num_tokens,
                token_start=session.token_start,
                resident_hint_tokens=hint_tokens,
                layout=session.layout,
                shards=tuple(
                    [
                        e.ShardGrant(
                            shard.rank,
                            shard.extents,
                            session.planes.offsets_bytes(
                                session.num_tokens, shard.extents, books.buffer.alignment_bytes
                            ),
                        )
                        for shard in session.shards.values()
                    ]
                ),
                deadline_ns=session.deadline_ns,
            )
        )

    def _record_begin(self, session: Session) -> None:
        out = self._out
        out.record(
            r.SessionTransition(
                at_ns=out.now_ns,
                cause_id=out.cause_id,
                session_id=session.session_id,
                slab_handle=session.handle,
                from_state="",
                to_state=session.state,
                reason=OK,
                num_tokens=session.num_tokens,
                token_start=session.token_start,
                bytes=session.total_bytes,
                duration_ms=0.0,
                peer=session.peer,
            )
        )
        for shard in session.shards.values():
            out.record(
                r.SlabAllocated(
                    at_ns=out.now_ns,
                    cause_id=out.cause_id,
                    session_id=session.session_id,
                    slab_handle=session.handle,
                    rank=shard.rank,
                    bytes=session.shard_bytes,
                    extents=shard.extents,
                )
            )

    def _check_numbers(self, event: e.PrepareAsked, ranks: tuple[int, ...]) -> e.Refused | None:
        settings = self._books.settings
        # A session id that is short in characters needs no count of its bytes: one takes four at most.
        name = event.session_id
        if not name or (
            4 * len(name) > settings.session_id_bytes_max
            and len(name.encode()) > settings.session_id_bytes_max
        ):
            detail = f"session_id must have 1 to {settings.session_id_bytes_max} bytes"
        elif event.num_tokens < 1:
            detail = f"num_tokens is {event.num_tokens}; it must be at least 1"
        elif event.token_start < 0:
            detail = f"token_start is {event.token_start}; it must not be negative"
        elif event.token_start + event.num_tokens > settings.num_tokens_max:
            end_tokens = event.token_start + event.num_tokens
            detail = f"the snapshot ends at token {end_tokens}; num_tokens_max is {settings.num_tokens_max}"
        elif len(event.page_keys) > settings.page_keys_max:
            detail = f"{len(event.page_keys)} page keys; page_keys_max is {settings.page_keys_max}"
        elif len(event.token_digest) > DIGEST_CHARS_MAX or (
            event.page_keys and max(map(len, event.page_keys)) > DIGEST_CHARS_MAX
        ):
            # An attempt keeps these for as long as it is remembered.
            detail = f"token_digest or a page key is longer than {DIGEST_CHARS_MAX} characters"
        elif event.ranks and (
            len(set(ranks)) != len(ranks) or not set(ranks) <= self._books.buffer.arenas.keys()
        ):
            detail = f"ranks {list(ranks)} are not distinct ranks out of {list(self._books.buffer.ranks)}"
        elif (
            self._books.find(event.slab_handle) is not None
            or event.slab_handle in self._books.buffer.quarantine
        ):
            detail = f"handle {event.slab_handle} has been used"
        else:
            return None
        return e.Refused(Reason.INVALID_REQUEST, detail)

    def _unknown_layout(self, event: e.PrepareAsked, ranks: tuple[int, ...]) -> e.Refused:
        known = {
            rank: sorted(
                name for name, declared in self._books.directory.layouts.items() if rank in declared.ranks
            )
            for rank in ranks
        }
        missing = next(rank for rank, names in known.items() if event.layout_fingerprint not in names)
        said = f"it declared {', '.join(known[missing][:4])}" if known[missing] else "it declared none yet"
        name = event.layout_fingerprint[:DIGEST_CHARS_MAX]
        return e.Refused(
            Reason.LAYOUT_MISMATCH,
            f"rank {missing} has not declared the layout {name!r}; {said}",
            0 if known[missing] else self._books.settings.retry_after_ms_max,
        )

    @staticmethod
    def _check_pages(event: e.PrepareAsked, layout: Layout) -> e.Refused | None:
        page_size_tokens = layout.page_size_tokens
        end_tokens = event.token_start + event.num_tokens
        if event.token_start % page_size_tokens:
            detail = f"token_start {event.token_start} is not a multiple of the page size {page_size_tokens}"
        elif len(event.page_keys) > end_tokens // page_size_tokens:
            detail = (
                f"{len(event.page_keys)} page keys for {end_tokens} tokens in pages of {page_size_tokens}"
            )
        else:
            return None
        return e.Refused(Reason.INVALID_REQUEST, detail)

    def _where_to_start(self, event: e.PrepareAsked, layout: Layout, key: tuple[str, str]) -> tuple[int, int]:
        """Return the first token to send, and what P is believed to hold.

        A hint that covers the whole snapshot is of another history of the session: it is not used.
        """
        hint_tokens = self._books.directory.hint_tokens(key)
        if event.use_resident_hint:
            usable_tokens = align_down(hint_tokens, layout.page_size_tokens)
            if event.token_start < usable_tokens < event.token_start + event.num_tokens:
                return usable_tokens, hint_tokens
        return event.token_start, hint_tokens

    def _make_room(
        self, ranks: tuple[int, ...], sizes_bytes: tuple[int, ...], newer_handle: int
    ) -> e.Refused | None:
        """Evict what must go, if that can make room at all; otherwise refuse and evict nothing."""
        books = self._books
        if not books.buffer.fits_ever(ranks, sizes_bytes):
            need_bytes = sum(sizes_bytes)
            return e.Refused(Reason.TOO_LARGE, f"{need_bytes} bytes a rank would not fit an empty arena")
        victims = books.buffer.plan_eviction(
            ranks,
            sizes_bytes,
            books.victims.victims(),
            lambda handle: {rank: shard.extents for rank, shard in books.open[handle].shards.items()},
            books.victims.evictable_bytes,
            lambda: books.open.keys() - set(books.victims.victims()),
        )
        if victims is None:
            return e.Refused(Reason.SNAPSHOT_BUF_FULL, self._how_full(ranks), self._retry_after_ms())
        for handle in victims:
            books.open[handle].newer_handle = newer_handle
            self._take(e.VictimChosen(at_ns=self._out.now_ns, slab_handle=handle))
        return None

    def _how_full(self, ranks: tuple[int, ...]) -> str:
        parts: list[str] = []
        for rank in ranks:
            view = self._books.buffer.view(rank, self._books.victims.evictable_bytes(rank))
            parts.append(
                f"arena {rank}: {view.free_bytes} bytes free, {view.evictable_bytes} evictable, "
                f"{view.quarantined_bytes} in quarantine of {view.capacity_bytes}"
            )
        return "; ".join(parts)

    def _retry_after_ms(self) -> int:
        """Return when to try again: about when the next quarantine ends, within bounds."""
        first_ns = self._books.buffer.first_release_ns()
        wait_ms = RETRY_AFTER_MS_MIN * 5 if first_ns is None else (first_ns - self._out.now_ns) // NS_PER_MS
        return max(RETRY_AFTER_MS_MIN, min(self._books.settings.retry_after_ms_max, wait_ms))

    def _refuse(
        self, event: e.PrepareAsked, refusal: e.Refused, layout: Layout | None, num_ranks: int
    ) -> None:
        """Refuse: no session, but a record and an outcome."""
        out = self._out
        session_id = event.session_id[: self._books.settings.session_id_bytes_max]
        # A refused request may hold any number that the wire can carry.
        num_bytes = snapshot_bytes(layout, max(event.num_tokens, 0)) * num_ranks if layout else 0
        self._books.outcomes[refusal.reason] += 1
        out.record(
            r.SyncRefused(
                at_ns=out.now_ns,
                cause_id=out.cause_id,
                session_id=session_id,
                reason=refusal.reason,
                num_tokens=event.num_tokens,
                token_start=event.token_start,
                bytes=num_bytes,
                detail=refusal.detail,
                retry_after_ms=refusal.retry_after_ms,
            )
        )
        out.record(
            r.SyncOutcome(
                at_ns=out.now_ns,
                cause_id=out.cause_id,
                session_id=session_id,
                ok=False,
                reason=refusal.reason,
                num_tokens=event.num_tokens,
                token_start=event.token_start,
                bytes=num_bytes,
                duration_ms=0.0,
                reserved_ms=0.0,
                transferring_ms=0.0,
                ready_ms=0.0,
                peer=event.peer,
            )
        )
        out.refuse(refusal.reason, refusal.detail, refusal.retry_after_ms)

    # --- lookup

    def look_up(self, event: e.LookupAsked) -> None:
        """Find a READY snapshot by session, or by the longest prefix; finding it counts as use."""
        if len(event.page_keys) > self._books.settings.page_keys_max:
            detail = (
                f"{len(event.page_keys)} page keys; page_keys_max is {self._books.settings.page_keys_max}"
            )
            self._out.refuse(Reason.INVALID_REQUEST, detail)
            return
        if event.session_id:
            found, matched_tokens = self._by_session(event)
        else:
            found, matched_tokens = self._by_prefix(event)
        hint_tokens = self._books.directory.hint_tokens((event.layout_fingerprint, event.session_id))
        if found is None:
            self._out.reply(e.Found(resident_hint_tokens=hint_tokens))
            return
        self._take(e.LookedUp(at_ns=self._out.now_ns, slab_handle=found.handle))
        self._out.reply(
            e.Found(
                slab_handle=found.handle,
                session_id=found.session_id,
                num_tokens=found.num_tokens,
                token_start=found.token_start,
                matched_tokens=matched_tokens,
                resident_hint_tokens=hint_tokens,
                ranks=tuple(found.shards),
            )
        )

    def _by_session(self, event: e.LookupAsked) -> tuple[Session | None, int]:
        handle = self._books.directory.ready((event.layout_fingerprint, event.session_id))
        session = self._books.open[handle] if handle is not None else None
        if session is None or session.abort_wanted is not None:
            return None, 0
        return session, session.end_tokens

    def _by_prefix(self, event: e.LookupAsked) -> tuple[Session | None, int]:
        for handle, num_pages in self._books.directory.longest_prefix(
            event.layout_fingerprint, event.page_keys
        ):
            session = self._books.open[handle]
            matched_tokens = num_pages * session.layout.page_size_tokens
            if matched_tokens <= event.resident_tokens:
                break  # No later match is longer, and many share a short one.
            if session.token_start <= event.resident_tokens and session.abort_wanted is None:
                return session, matched_tokens
        return None, 0

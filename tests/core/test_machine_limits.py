"""Every table has a bound, and what is counted is exact."""

from collections.abc import Callable

import msgspec
import pytest
from core_driver import TWO_PLANES, Driver, layout_of, refused

from snapd.compiling import is_compiled
from snapd.core import events as e
from snapd.core.books import Books, Outbox
from snapd.core.buffer import Buffer, Quarantined
from snapd.core.directory import Directory
from snapd.core.events import State
from snapd.core.eviction import Snapshot
from snapd.core.machine import Machine
from snapd.core.session import RETRY_AFTER_MS_MIN, Settings, transfer_time_ns
from snapd.core.slab import Extent, SlabAllocator
from snapd.errors import InvariantBroken, Reason
from snapd.layout import Layout, Namespace, fingerprint
from snapd.units import MB

Make = Callable[..., Driver]
NOTHING = Snapshot(("", ""), 0, 0, {})


def test_the_defaults_are_those_of_the_design() -> None:
    settings = Settings()
    assert settings.reserve_timeout_ms == 10_000
    assert (settings.transfer_timeout_ms, settings.transfer_min_mb_per_s) == (30_000, 100)
    assert (settings.ready_ttl_ms, settings.lease_ms, settings.quarantine_ms) == (300_000, 10_000, 60_000)
    assert (RETRY_AFTER_MS_MIN, settings.retry_after_ms_max) == (20, 5_000)


def test_the_time_of_the_bytes_is_exact() -> None:
    assert transfer_time_ns(100 * MB, 100) == 10**9
    assert transfer_time_ns(1, 3) == 333


def test_the_history_of_ended_attempts_forgets_the_oldest(make: Make) -> None:
    drive = make(1, ended_history_max=3)
    handles = []
    for name in "abcde":
        handle = drive.reserved(name)
        drive.abort(handle, drained=True)
        handles.append(handle)
    assert [session.handle for session in drive.machine.sessions()] == handles[2:]
    assert drive.machine.statistics().ended_history == 3
    assert drive.machine.statistics().outcomes_by_reason == {"client-abort": 5}


def test_no_history_at_all_is_a_bound_too(make: Make) -> None:
    drive = make(1, ended_history_max=0)
    handle = drive.reserved()
    drive.abort(handle, drained=True)
    assert drive.machine.view(handle) is None


def test_hints_forget_the_session_that_was_ingested_longest_ago(make: Make) -> None:
    drive = make(1, session_history_max=2)
    for name in ("a", "b", "a", "c"):
        drive.ingested(name)
    assert [drive.hint(name) for name in "abc"] == [16, 0, 16]
    assert drive.machine.statistics().session_history == 2


def test_layouts_forget_the_one_that_was_used_longest_ago(make: Make) -> None:
    layouts = [layout_of(model=str(i)) for i in range(4)]
    drive = make(1, layouts_max=2, layouts=layouts[:2])
    old = drive.reserved("old", layout_fingerprint=fingerprint(layouts[1]))
    drive.reserved("s", layout_fingerprint=fingerprint(layouts[0]))
    drive.post(e.LayoutDeclared, rank=0, layout=layouts[2])
    assert drive.machine.statistics().layouts == 2
    gone = drive.prepare("t", layout_fingerprint=fingerprint(layouts[1]))
    assert refused(gone, Reason.LAYOUT_MISMATCH)
    assert isinstance(drive.prepare("u", layout_fingerprint=fingerprint(layouts[0])), e.Granted)
    drive.post(e.LayoutDeclared, rank=0, layout=layouts[2])
    drive.post(e.LayoutDeclared, rank=0, layout=layouts[3])
    assert refused(drive.prepare("v", layout_fingerprint=fingerprint(layouts[0])), Reason.LAYOUT_MISMATCH)
    assert drive.commit(old) == e.Accepted(State.READY), "an open attempt has its layout with it"


def test_declaring_again_counts_as_use(make: Make) -> None:
    layouts = [layout_of(model=str(i)) for i in range(3)]
    drive = make(1, layouts_max=2, layouts=(layouts[0], layouts[1], layouts[0], layouts[2]))
    assert list(drive.machine.books.directory.layouts) == [fingerprint(layouts[0]), fingerprint(layouts[2])]


def test_a_tenant_that_declares_very_many_layouts_drives_out_its_own(make: Make) -> None:
    layouts = {
        name: Layout((16, 16), page_size_tokens=4, namespace=Namespace(model=name, tenant=name[0]))
        for name in ("a0", "b0", "b1", "b2", "b3", "b4", "c0")
    }
    drive = make(1, layouts_max=4, layouts=tuple(layouts.values()))
    known = drive.machine.books.directory.layouts
    assert list(known) == [fingerprint(layouts[name]) for name in ("a0", "b3", "b4", "c0")]


def test_statistics_are_a_snapshot(make: Make) -> None:
    drive = make(2, units=16)
    before = drive.machine.statistics()
    drive.reserved("a")
    drive.transferring("b")
    leased = drive.ready("c")
    drive.lease(leased)
    drive.ready("d", page_keys=("1", "2"))
    drive.ingested("e")
    drive.fail(drive.transferring("f"), rank=1, drained=True)
    drive.prepare("g", 0)
    drive.start(leased)
    after = drive.machine.statistics()
    assert before.sessions_by_state == {"RESERVED": 0, "TRANSFERRING": 0, "READY": 0}
    assert after.sessions_by_state == {"RESERVED": 1, "TRANSFERRING": 1, "READY": 2}
    assert after.outcomes_by_reason == {"invalid-request": 1, "ok": 1, "transfer-failed": 1}
    assert (after.attempts, after.attempts_ok, after.open_sessions, after.ended_history) == (6, 1, 4, 2)
    assert (after.quarantined_shards, after.session_history, after.layouts, after.page_keys) == (1, 1, 1, 2)
    assert (after.messages_absorbed, after.requests_refused) == (1, 1)
    assert (after.bytes_committed, after.bytes_ingested) == (3 * 1024, 1024)
    assert not after.is_draining
    first, second = after.arenas
    assert (first.rank, first.free_bytes, first.live_bytes, first.quarantined_bytes) == (0, 1536, 2048, 512)
    assert (second.rank, second.free_bytes, second.live_bytes, second.quarantined_bytes) == (1, 2048, 2048, 0)
    assert (first.evictable_bytes, first.capacity_bytes, first.num_holes) == (512, 4096, 1)
    assert first.largest_hole_bytes == 1536
    with pytest.raises(AttributeError):
        after.attempts = 3  # type: ignore[misc]


def test_a_view_shows_an_attempt_and_nothing_shows_what_is_unknown(make: Make) -> None:
    drive = make(2)
    handle = drive.reserved("s", 10, token_start=4)
    drive.commit(handle, 1)
    view = drive.machine.view(handle)
    assert view is not None
    assert (view.slab_handle, view.session_id, view.layout_fingerprint) == (
        handle,
        "s",
        fingerprint(TWO_PLANES),
    )
    assert (view.state, view.reason, view.num_tokens, view.token_start) == ("TRANSFERRING", "ok", 10, 4)
    assert (view.bytes, view.is_leased, view.abort_wanted) == (640, False, "")
    assert [shard.is_committed for shard in view.shards] == [False, True]
    assert all(shard.extents for shard in view.shards)
    assert view.state_since_ns > view.created_ns and view.deadline_ns > view.state_since_ns
    assert drive.machine.view(77) is None


def test_open_attempts_are_listed_before_the_ended_ones(make: Make) -> None:
    drive = make(1)
    ended = drive.ingested("a")
    opened = [drive.reserved("b"), drive.reserved("c")]
    assert [session.handle for session in drive.machine.sessions()] == [*opened, ended]


def test_a_thousand_lives_leave_nothing_behind(make: Make) -> None:
    """Nothing leaks, however an attempt ends."""
    drive = make(2, quarantine_ms=10, ended_history_max=4, session_history_max=4)
    for i in range(60):
        drive.ingested(f"s{i % 7}", page_keys=("p",))
        drive.abort(drive.transferring("t", writer_id=1 + i % 2))
        drive.fail(drive.reserved("u"), drained=True)
        drive.tell(e.WriterGone, writer_id=1)
        drive.advance(11)
    statistics = drive.machine.statistics()
    assert statistics.open_sessions == statistics.quarantined_shards == statistics.page_keys == 0
    assert (statistics.ended_history, statistics.session_history) == (4, 4)
    assert drive.machine.books.handles_of_writer == {}
    assert [view.free_bytes for view in statistics.arenas] == [2048, 2048]


# --- the parts by themselves


def test_a_buffer_needs_an_arena() -> None:
    with pytest.raises(ValueError, match="at least one arena"):
        Buffer({}, 256)


def test_a_buffer_lists_its_ranks_in_order() -> None:
    assert Buffer({2: SlabAllocator(512), 0: SlabAllocator(512)}, 256).ranks == (0, 2)


def test_taking_more_than_there_is_is_a_bug() -> None:
    buffer = Buffer({0: SlabAllocator(512)}, 256)
    with pytest.raises(InvariantBroken, match="arena 0 had room"):
        buffer.allocate((0,), (1024,))


def test_a_shard_goes_to_quarantine_once() -> None:
    buffer = Buffer({0: SlabAllocator(512)}, 256)
    item = Quarantined("s", 200, buffer.allocate((0,), (256,))[0], 1, 5, "undrained")
    buffer.put_in_quarantine(1, 0, item)
    with pytest.raises(InvariantBroken, match="in quarantine already"):
        buffer.put_in_quarantine(1, 0, item)
    assert buffer.first_release_ns() == 5
    assert buffer.release(1, 0) == item
    assert buffer.first_release_ns() is None


def test_the_first_release_is_the_earliest_of_the_oldest_attempt() -> None:
    buffer = Buffer({0: SlabAllocator(512), 1: SlabAllocator(512)}, 256)
    extents = buffer.allocate((0, 1), (256,))
    buffer.put_in_quarantine(1, 0, Quarantined("s", 200, extents[0], 1, 9, "undrained"))
    buffer.put_in_quarantine(1, 1, Quarantined("s", 200, extents[1], 1, 5, "leased", 3))
    assert buffer.first_release_ns() == 5


def quarantined_buffer() -> Buffer:
    buffer = Buffer({0: SlabAllocator(1024)}, 256)
    extents = buffer.allocate((0,), (256,))[0]
    buffer.put_in_quarantine(1, 0, Quarantined("s", 200, extents, 1, 5, "undrained"))
    return buffer


def test_the_books_of_a_buffer_are_checked() -> None:
    buffer = quarantined_buffer()
    owned = {0: list(buffer.allocate((0,), (256,))[0])}
    buffer.validate(owned)
    with pytest.raises(InvariantBroken, match="are not the live ones"):
        buffer.validate({})
    with pytest.raises(InvariantBroken, match="are not the live ones"):
        buffer.validate({0: [*owned[0], Extent(512, 256)]})
    buffer._quarantined_bytes[0] += 1
    with pytest.raises(InvariantBroken, match="do not add up"):
        buffer.validate(owned)
    buffer = quarantined_buffer()
    buffer.quarantine[2] = {}
    with pytest.raises(InvariantBroken, match="empty entry"):
        buffer.validate({})


class _LeakyAllocator(SlabAllocator):
    @property
    def live_bytes(self) -> int:
        return 0


@pytest.mark.skipif(is_compiled(), reason="what is compiled cannot be replaced")
def test_free_and_live_must_be_the_capacity() -> None:
    buffer = Buffer({0: _LeakyAllocator(1024)}, 256)
    owned = {0: list(buffer.allocate((0,), (256,))[0])}
    with pytest.raises(InvariantBroken, match="is not the capacity"):
        buffer.validate(owned)


def test_a_plan_of_eviction_changes_nothing(make: Make) -> None:
    drive = make(2)
    for name in "abcd":
        drive.ready(name)
    buffer, books = drive.machine.books.buffer, drive.machine.books
    before = [(list(a.live()), list(a.holes())) for a in buffer.arenas.values()]

    def extents_of(handle: int) -> dict[int, tuple[Extent, ...]]:
        return {rank: shard.extents for rank, shard in books.open[handle].shards.items()}

    def plan(units: int) -> list[int] | None:
        return buffer.plan_eviction(
            (0, 1), (256,) * units, books.victims.victims(), extents_of, books.victims.evictable_bytes
        )

    oldest_first = list(books.open)
    assert [plan(units) for units in (1, 2, 3, 8)] == [
        oldest_first[:1], oldest_first[:1], oldest_first[:2], oldest_first,
    ]  # fmt: skip
    assert plan(9) is None
    assert [(list(a.live()), list(a.holes())) for a in buffer.arenas.values()] == before


def test_a_plan_that_the_sums_allow_and_the_holes_do_not_is_given_up() -> None:
    """One plane larger than every hole: the sum is enough, and it does not fit all the same."""
    buffer = Buffer({0: SlabAllocator(1024)}, 256)
    extents = {handle: buffer.allocate((0,), (256,)) for handle in range(4)}
    before = list(buffer.arenas[0].live())
    victims = [0, 2]
    plan = buffer.plan_eviction((0,), (512,), victims, extents.__getitem__, lambda rank: 512)
    assert plan is None and list(buffer.arenas[0].live()) == before
    plan = buffer.plan_eviction((0,), (512,), [0, 2, 3], extents.__getitem__, lambda rank: 768)
    assert plan == [0, 2, 3] and list(buffer.arenas[0].live()) == before


def test_sums_that_cannot_be_enough_are_refused_without_a_walk() -> None:
    buffer = Buffer({0: SlabAllocator(1024)}, 256)
    buffer.allocate((0,), (1024,))

    def walk() -> list[int]:
        raise AssertionError("nobody should ask for victims")

    class Walk:
        def __iter__(self) -> object:
            return walk()

    assert buffer.plan_eviction((0,), (257,), Walk(), lambda handle: {}, lambda rank: 256) is None  # type: ignore[arg-type]


def test_forgetting_an_unknown_writer_is_no_error() -> None:
    books = Books(Settings(), {0: SlabAllocator(256)}, 256)
    books.forget_writer(3, 4)
    books.handles_of_writer[3] = {5}
    books.forget_writer(3, 4)
    assert books.handles_of_writer == {3: {5}}


def test_an_outbox_starts_empty_for_every_event() -> None:
    outbox = Outbox()
    first = outbox.begin(e.StopAsked(at_ns=1, cause_id=7))
    outbox.refuse(Reason.DRAINING, "no", 3)
    assert first == [e.Replied(7, e.Refused(Reason.DRAINING, "no", 3))]
    outbox.reply(e.Accepted(), 0)
    assert len(first) == 1, "nobody asked, nobody is answered"
    assert outbox.begin(e.StopAsked(at_ns=2)) == []
    outbox.refuse(Reason.DRAINING)
    outbox.reply(e.Accepted(), 9)
    assert outbox.requests_refused == 1
    assert (outbox.now_ns, outbox.cause_id) == (2, 0)


# --- the machine's own cross-checks find what they are there to find


def spoil(drive: Driver, how: Callable[[Machine], object], match: str) -> None:
    how(drive.machine)
    with pytest.raises(InvariantBroken, match=match):
        drive.machine.validate()


def busy() -> tuple[Driver, int, int, int, int]:
    drive = Driver(2, units=16, ended_history_max=2)
    ended = drive.ingested("e", page_keys=("1",))
    reserved = drive.reserved("r", writer_id=3)
    ready = drive.ready("y", page_keys=("1",))
    leased = drive.ready("l")
    drive.lease(leased)
    return drive, ended, reserved, ready, leased


SPOILERS: dict[str, tuple[Callable[..., object], str]] = {
    "page keys held": (
        lambda m, en, rs, rd, ls: setattr(m.books, "page_keys_held", 2),
        "number of page keys",
    ),
    "page keys over": (
        lambda m, en, rs, rd, ls: setattr(
            m.books, "settings", msgspec.structs.replace(m.books.settings, page_keys_total_max=0)
        ),
        "more page keys are held",
    ),
    "handle": (lambda m, en, rs, rd, ls: setattr(m.books.open[rs], "handle", 5), "is open, and is not"),
    "final": (
        lambda m, en, rs, rd, ls: setattr(m.books.open[rs], "state", State.ABORTED),
        "is open, and is not",
    ),
    "deadline": (
        lambda m, en, rs, rd, ls: setattr(m.books.open[rs], "deadline_ns", 0),
        "is open, and is not",
    ),
    "no shards": (lambda m, en, rs, rd, ls: m.books.open[rs].shards.clear(), "unknown ranks"),
    "unknown rank": (
        lambda m, en, rs, rd, ls: m.books.open[rs].shards.update({9: m.books.open[rs].shards.pop(1)}),
        "unknown ranks",
    ),
    "no extents": (
        lambda m, en, rs, rd, ls: setattr(m.books.open[rs].shards[0], "extents", ()),
        "holds nothing in arena 0",
    ),
    "committed": (
        lambda m, en, rs, rd, ls: setattr(m.books.open[rs].shards[0], "is_committed", True),
        "RESERVED and was written or read",
    ),
    "leased early": (
        lambda m, en, rs, rd, ls: setattr(
            m.books.open[rs].shards[0], "lease", m.books.open[ls].shards[0].lease
        ),
        "RESERVED and was written or read",
    ),
    "leased in transfer": (
        lambda m, en, rs, rd, ls: (
            setattr(m.books.open[rs], "state", State.TRANSFERRING),
            setattr(m.books.open[rs].shards[0], "lease", m.books.open[ls].shards[0].lease),
        ),
        "leased and not READY",
    ),
    "old vote": (
        lambda m, en, rs, rd, ls: (
            m.books.open[ls].shards[0].lease.waiting.append(1),
            setattr(m.books.open[ls], "round", 2),
        ),
        "a round that is over waits",
    ),
    "ready unwritten": (
        lambda m, en, rs, rd, ls: setattr(m.books.open[rd].shards[0], "is_committed", False),
        "not what its ranks say",
    ),
    "written unready": (
        lambda m, en, rs, rd, ls: setattr(m.books.open[rd], "state", State.TRANSFERRING),
        "not what its ranks say",
    ),
    "waits for nobody": (
        lambda m, en, rs, rd, ls: setattr(m.books.open[rd], "abort_wanted", Reason.EVICTED),
        "waits for readers and has none",
    ),
    "drained unwritten": (
        lambda m, en, rs, rd, ls: setattr(m.books.open[rs].shards[0], "is_drained", True),
        "drained and not committed",
    ),
    "undrained and evictable": (
        lambda m, en, rs, rd, ls: setattr(m.books.open[rd].shards[0], "is_drained", False),
        "whether it is evictable",
    ),
    "undrained and forgotten": (
        lambda m, en, rs, rd, ls: (
            setattr(m.books.open[rd].shards[0], "is_drained", False),
            m.books.victims.discard(rd),
        ),
        "whether only drain proof is missing",
    ),
    "drained and waiting": (
        lambda m, en, rs, rd, ls: m.books.undrained.add(rd),
        "whether only drain proof is missing",
    ),
    "leased and waiting": (
        lambda m, en, rs, rd, ls: m.books.undrained.add(ls),
        "whether only drain proof is missing",
    ),
    "waiting and unknown": (
        lambda m, en, rs, rd, ls: m.books.undrained.add(77),
        "not open waits for drain proof",
    ),
    "not evictable": (lambda m, en, rs, rd, ls: m.books.victims.discard(rd), "whether it is evictable"),
    "evictable": (lambda m, en, rs, rd, ls: m.books.victims.offer(ls), "whether it is evictable"),
    "evictable and reserved": (
        lambda m, en, rs, rd, ls: (m.books.victims.insert(rs, NOTHING), m.books.victims.offer(rs)),
        "whether it is evictable",
    ),
    "evictable and unknown": (
        lambda m, en, rs, rd, ls: (m.books.victims.insert(77, NOTHING), m.books.victims.offer(77)),
        "not open is evictable",
    ),
    "in the order and reserved": (
        lambda m, en, rs, rd, ls: m.books.victims.insert(rs, NOTHING),
        "does not know exactly what is READY",
    ),
    "ready and not in the order": (
        lambda m, en, rs, rd, ls: m.books.victims.discard(ls),
        "does not know exactly what is READY",
    ),
    "victims' sums": (
        lambda m, en, rs, rd, ls: m.books.victims._evictable_bytes.update({0: 1}),
        "evictable bytes",
    ),
    "ended state": (
        lambda m, en, rs, rd, ls: setattr(m.books.ended[en], "state", State.READY),
        "has ended and holds something",
    ),
    "ended extents": (
        lambda m, en, rs, rd, ls: setattr(m.books.ended[en].shards[1], "extents", (Extent(0, 256),)),
        "has ended and holds something",
    ),
    "ended lease": (
        lambda m, en, rs, rd, ls: setattr(
            m.books.ended[en].shards[1], "lease", m.books.open[ls].shards[0].lease
        ),
        "has ended and holds something",
    ),
    "both": (lambda m, en, rs, rd, ls: m.books.ended.update({rs: m.books.ended[en]}), "both open and ended"),
    "history": (
        lambda m, en, rs, rd, ls: m.books.ended.update({1: m.books.ended[en], 2: m.books.ended[en]}),
        "larger than ended_history_max",
    ),
    "writing": (lambda m, en, rs, rd, ls: m.books.directory._writing.clear(), "RESERVED and TRANSFERRING"),
    "ready missing": (lambda m, en, rs, rd, ls: m.books.directory._ready.popitem(), "table of READY"),
    "ready unknown": (
        lambda m, en, rs, rd, ls: m.books.directory._ready.update({("", ""): 77}),
        "table of READY",
    ),
    "page keys": (
        lambda m, en, rs, rd, ls: m.books.directory._by_page.clear(),
        "table of page keys is wrong",
    ),
    "page key empty": (
        lambda m, en, rs, rd, ls: m.books.directory._by_page.update({("", ""): {}}),
        "empty entry is left",
    ),
    "layouts": (
        lambda m, en, rs, rd, ls: setattr(m.books.directory, "_layouts_max", 0),
        "larger than its bound",
    ),
    "hints": (lambda m, en, rs, rd, ls: setattr(m.books.directory, "_hints_max", 0), "larger than its bound"),
    "writer empty": (
        lambda m, en, rs, rd, ls: m.books.handles_of_writer.update({9: set()}),
        "kept for attempts that are over",
    ),
    "writer over": (
        lambda m, en, rs, rd, ls: m.books.handles_of_writer.update({9: {en}}),
        "kept for attempts that are over",
    ),
    "allocator": (
        lambda m, en, rs, rd, ls: setattr(m.books.buffer.arenas[0], "_free_bytes", 3),
        "free_bytes is 3",
    ),
}


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_validate_finds_what_does_not_agree(spoiler: str) -> None:
    drive, *handles = busy()
    how, match = SPOILERS[spoiler]
    spoil(drive, lambda machine: how(machine, *handles), match)


def test_the_table_binds_the_actions(make: Make) -> None:
    """An action that goes where the table does not let it is a bug, and is found at once."""
    drive = make(1)
    handle = drive.reserved()
    session, lives = drive.session(handle), drive.machine._lives
    with pytest.raises(InvariantBroken, match="may not go from RESERVED to READY"):
        lives._enter(session, State.READY, Reason.OK)
    lives.allowed = (State.ABORTED,)
    session.state = State.INGESTED
    with pytest.raises(InvariantBroken, match="may not go from INGESTED"):
        lives._enter(session, State.ABORTED, Reason.OK)
    session.state = State.RESERVED
    lives.allowed = ()


def test_an_action_that_does_not_do_what_the_table_says_is_found(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from snapd.core import machine as module

    drive = make(1)
    handle = drive.reserved()
    with monkeypatch.context() as patch:
        patch.setitem(module._ACTIONS, "start_transfer", lambda lives, session, event: None)
        with pytest.raises(InvariantBroken, match="TransferStarted left attempt"):
            drive.start(handle)
    drive.machine._lives.allowed = ()


def test_a_directory_forgets_nothing_of_others() -> None:
    directory = Directory(2, 2)
    directory.set_hint(("f", "a"), 0)
    assert directory.num_hints == 0
    directory.set_hint(("f", "a"), 3)
    directory.set_hint(("f", "b"), 4)
    directory.set_hint(("f", "a"), 0)
    assert [directory.hint_tokens(("f", name)) for name in "ab"] == [0, 4]

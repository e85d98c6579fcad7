"""What must hold whatever D does: other bytes than D's never reach the tree, and none are used too early."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kv_cases import (
    FP8,
    MHA,
    MLA,
    ODD,
    PATIENCE_S,
    STEP_BYTES,
    TOKENS,
    Kind,
    Pair,
    arena_of,
    flip,
    paged,
    paired,
    record,
    settle,
)
from raw_client import LogFollower, running, wait_for

from snapd.core import records as rec
from snapd.core.events import State
from snapd.core.slab import Extent
from snapd.errors import Reason
from snapd.kv.copy import ScatterJob, gather
from snapd.kv.push import PushJob
from snapd.mapping import MappedArena
from snapd.units import KIB, MIB
from snapd.wire import RankGrant

# Long beside a push on a busy machine, as those that are in time have the same.
TIMEOUT_MS = 1_000


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, LogFollower]]:
    with running(size="4MiB", quarantine_ms=50) as daemon:
        yield daemon, LogFollower(daemon.log_path)


@pytest.fixture
def daemon(served: tuple[Any, LogFollower]) -> Iterator[Any]:
    """A daemon; after each test all its bytes are free and its log has told the story."""
    yield served[0]
    settle(*served)


@pytest.fixture
def arena(daemon: Any) -> Iterator[MappedArena]:
    """The arena, mapped writable, as one who writes too late has it."""
    with arena_of(daemon) as mapped:
        yield mapped


def pushed(pair: Pair, session_id: str = "s", tokens: Sequence[int] = TOKENS, **fields: Any) -> PushJob:
    job = pair.start(session_id, tokens, pair.slots(len(tokens)), **fields)
    while not job.step(STEP_BYTES):
        pass
    assert job.result.ok, job.result
    return job


def places(grant: RankGrant, num_tokens: int) -> list[tuple[int, int]]:
    """Return where each plane lies in the arena, and its size, in bytes."""
    offsets = (*grant.k_layer_offsets, *grant.v_layer_offsets)
    strides = (*grant.stride_k_bytes, *grant.stride_v_bytes)
    return [(offset, stride * num_tokens) for offset, stride in zip(offsets, strides, strict=True)]


def plane_offsets(job: PushJob) -> list[tuple[int, int]]:
    assert job.grant is not None
    return places(job.grant.ranks[0], job.grant.num_tokens)


# --- guarantee 1: bytes that reach the tree are those that D committed -------------------------------------


@pytest.mark.parametrize("kind", [MHA, MLA, FP8, ODD, paged(MHA)], ids=["mha", "mla", "fp8", "odd", "pages"])
def test_any_byte_that_changes_after_the_commit_is_noticed(
    daemon: Any, arena: MappedArena, kind: Kind
) -> None:
    """The first, a middle and the last byte of every plane; padding between planes is nobody's."""
    with paired(daemon, kind) as pair:
        num_planes = pair.pusher.layout.num_planes
        for plane_index in range(num_planes):
            for where in (0, 1, 2):
                job = pushed(pair)
                offset, size_bytes = plane_offsets(job)[plane_index]
                flip(arena, offset + (0, size_bytes // 2, size_bytes - 1)[where])
                (answer,) = pair.ingest("s", TOKENS, job.result.slab_handle)
                assert (answer.ok, answer.reason) == (False, Reason.CHECKSUM_MISMATCH)
                pair.check()
        assert pair.tree.inserts == []
        assert pair.ingest("s", TOKENS, pushed(pair).result.slab_handle)[0].ok


def test_a_corrupt_snapshot_ends_in_quarantine_with_its_reason_in_the_log(
    start_daemon: Callable[..., Any],
) -> None:
    daemon = start_daemon(quarantine_ms=3_600_000)
    with paired(daemon) as pair, arena_of(daemon) as arena:
        job = pushed(pair)
        handle = job.result.slab_handle
        flip(arena, plane_offsets(job)[0][0])
        assert pair.ingest("s", TOKENS, handle)[0].reason == Reason.CHECKSUM_MISMATCH
        view = pair.view(handle)
        assert (view.state, view.reason) == (State.ABORTED, Reason.CHECKSUM_MISMATCH)
        (books,) = pair.core().arenas
        assert books.live_bytes == 0 and books.quarantined_bytes > 0, "whoever wrote there may go on"
        held = record(daemon, rec.SlabQuarantined, handle)
        assert (held.why, held.extents) == ("corrupt", record(daemon, rec.SlabAllocated, handle).extents)
        outcome = record(daemon, rec.SyncOutcome, handle)
        assert (outcome.ok, outcome.reason) == (False, Reason.CHECKSUM_MISMATCH)


def test_without_verification_the_changed_byte_arrives(daemon: Any, arena: MappedArena) -> None:
    """The control: it is verification and nothing else that keeps it out."""
    pair = Pair(daemon, verify=False)
    job = pushed(pair)
    flip(arena, plane_offsets(job)[0][0])
    assert pair.ingest("s", TOKENS, job.result.slab_handle)[0].ok
    with pytest.raises(AssertionError, match="plane 0"):
        pair.check()
    pair.close()


def test_without_verification_whole_bytes_arrive_whole(daemon: Any) -> None:
    for kind in (MHA, ODD, paged(ODD)):
        with paired(daemon, kind, verify=False) as pair:
            for num_tokens in (37, 80):
                handle = pair.ready("s", TOKENS[:num_tokens], use_resident_hint=False)
                assert pair.ingest("s", TOKENS[:num_tokens], handle)[0].ok


@pytest.mark.parametrize("change", ["zeros", "swapped rows", "another session's bytes"])
def test_what_a_late_or_lost_write_leaves_is_noticed(daemon: Any, arena: MappedArena, change: str) -> None:
    with paired(daemon) as pair:
        job, other = pushed(pair, "s"), pushed(pair, "other")
        (start, size_bytes), (other_start, _) = plane_offsets(job)[0], plane_offsets(other)[1]
        plane = arena.buffer[start : start + size_bytes]
        if change == "zeros":
            plane[64:128] = bytes(64)
        elif change == "swapped rows":
            plane[0:32], plane[32:64] = bytes(plane[32:64]), bytes(plane[0:32])
        else:
            plane[:] = arena.buffer[other_start : other_start + size_bytes]
        assert pair.ingest("s", TOKENS, job.result.slab_handle)[0].reason == Reason.CHECKSUM_MISMATCH
        assert pair.tree.inserts == []
        assert pair.ingest("other", TOKENS, other.result.slab_handle)[0].ok


@pytest.mark.parametrize("kind", [MHA, ODD], ids=["mha", "odd"])
@pytest.mark.parametrize("held", [0, 37])
def test_a_write_while_p_copies_is_noticed_or_comes_too_late(
    daemon: Any, arena: MappedArena, kind: Kind, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is summed is what went into the pool: a write between the two is none."""
    step = ScatterJob.step

    def write_then_step(job: ScatterJob, max_bytes: int) -> bool:
        if not job.bytes_done:
            flip(arena, last_byte[0])
        is_done = step(job, max_bytes)
        if is_done:
            # Everything is in the pool by now: this one must harm neither the pool nor the verdict.
            flip(arena, last_byte[0])
        return is_done

    with paired(daemon, kind) as pair:
        if held:
            handle = pair.ready("s", TOKENS[:held])
            assert pair.ingest("s", TOKENS[:held], handle)[0].ok
        job = pushed(pair, use_resident_hint=False)
        offset, size_bytes = plane_offsets(job)[-1]
        last_byte = [offset + size_bytes - 1]
        (ingest,) = pair.start_ingest("s", TOKENS, job.result.slab_handle)
        monkeypatch.setattr(ScatterJob, "step", write_then_step)
        wait_for(lambda: ingest.step(1), "the end")
        # With odd strides and a part that P holds, a private copy was made before the write.
        assert ingest.result.ok is (kind is ODD and held > 0)
        pair.check()


# --- guarantee 2: no byte is used again while a former owner may still write ----------------------------


def overlap(mine: tuple[Extent, ...], others: tuple[Extent, ...]) -> bool:
    return any(a.offset_bytes < b.end_bytes and b.offset_bytes < a.end_bytes for a in mine for b in others)


class LateWriter:
    """A D that does not hear, holds its mapping, and writes its planes when it likes."""

    def __init__(self, pair: Pair, session_id: str) -> None:
        self.pair = pair
        self.slots = pair.slots(len(TOKENS), seed=77)
        self.arena = arena_of(pair.daemon)
        self.grant = pair.pusher.prepare(session_id, TOKENS)
        pair.d.transfer_started(self.grant.slab_handle, epoch=self.grant.epoch)
        self.extents = self.grant.ranks[0].extents

    def wait_for_timeout(self) -> None:
        handle = self.grant.slab_handle
        wait_for(lambda: self.pair.view(handle).state is State.ABORTED, "the timeout", PATIENCE_S)
        assert self.pair.view(handle).reason == Reason.TRANSFER_TIMEOUT

    def write(self) -> None:
        grant = self.grant.ranks[0]
        bytes_of_arena = torch.frombuffer(self.arena.buffer, dtype=torch.uint8)
        planes = [
            bytes_of_arena[start : start + size] for start, size in places(grant, self.grant.num_tokens)
        ]
        gather(self.pair.d_pools[0], self.slots, planes)

    def close(self) -> None:
        self.arena.close()


def test_a_late_write_during_the_quarantine_lands_in_bytes_that_nobody_owns(
    start_daemon: Callable[..., Any],
) -> None:
    daemon = start_daemon(transfer_timeout_ms=TIMEOUT_MS, quarantine_ms=3_600_000)
    with paired(daemon) as pair:
        late = LateWriter(pair, "late")
        late.wait_for_timeout()
        jobs = [pushed(pair, f"s{number}") for number in range(4)]
        for job in jobs:
            assert job.grant is not None
            assert not overlap(job.grant.ranks[0].extents, late.extents)
        late.write()
        for number, job in enumerate(jobs):
            assert pair.ingest(f"s{number}", TOKENS, job.result.slab_handle)[0].ok
        (books,) = pair.core().arenas
        assert books.quarantined_bytes > 0 and books.live_bytes == 0
        pair.d.drained(late.grant.slab_handle, epoch=late.grant.epoch)
        assert pair.is_all_free()
        late.close()


def test_a_write_after_the_quarantine_into_anothers_bytes_is_refused_by_p(
    start_daemon: Callable[..., Any],
) -> None:
    """Guarantee 1 holds where guarantee 2 has reached its end."""
    daemon = start_daemon(transfer_timeout_ms=TIMEOUT_MS, quarantine_ms=50)
    with paired(daemon) as pair:
        late = LateWriter(pair, "late")
        late.wait_for_timeout()
        wait_for(pair.is_all_free, "the quarantine is over", PATIENCE_S)
        assert record(daemon, rec.SlabReleased, late.grant.slab_handle).why == "time"
        job = pushed(pair)
        assert job.grant is not None and overlap(job.grant.ranks[0].extents, late.extents)
        late.write()
        (answer,) = pair.ingest("s", TOKENS, job.result.slab_handle)
        assert (answer.ok, answer.reason) == (False, Reason.CHECKSUM_MISMATCH)
        assert pair.tree.inserts == []
        late.close()


def test_the_late_ones_commit_is_refused(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(transfer_timeout_ms=TIMEOUT_MS, quarantine_ms=50)
    with paired(daemon) as pair:
        job = pair.start("s", TOKENS, pair.slots(len(TOKENS)))
        assert job.grant is not None
        handle = job.grant.slab_handle
        wait_for(
            lambda: pair.view(handle).state is State.ABORTED and pair.is_all_free(), "all is over", PATIENCE_S
        )
        while not job.step(STEP_BYTES):
            pass
        assert (job.result.ok, job.result.reason) == (False, Reason.TRANSFER_TIMEOUT)
        assert pair.ingesters[0].lookup("s").slab_handle == 0
        assert pair.ingest("s", TOKENS, handle)[0].reason == Reason.STALE_HANDLE


# --- one extent a plane ---------------------------------------------------------------------------------


FRAGMENTED = {
    # Planes of 80 and 120 KiB, and of about 120, 60 and 30 KiB.
    "mha": (Kind(k_rows=((1024,),) * 2, v_rows=((1536,),) * 2), 40),
    "odd": (Kind(k_rows=((2047,), (1023,), (511,)), dtype=torch.uint8), 60),
}


@pytest.mark.parametrize("name", FRAGMENTED)
def test_in_a_fragmented_arena_every_plane_has_an_extent_of_its_own(
    start_daemon: Callable[..., Any], name: str
) -> None:
    """No hole takes the whole slab; the planes lie apart, and the bytes come out right."""
    daemon = start_daemon(size=f"{MIB}B")
    follower = LogFollower(daemon.log_path)
    kind, num_tokens = FRAGMENTED[name]
    tokens = TOKENS[:num_tokens]
    filler = Kind(k_rows=((128 * KIB,),), dtype=torch.uint8)
    with paired(daemon, filler, num_slots=8) as fillers, paired(daemon, kind, num_slots=128) as pair:
        handles = [fillers.ready(f"filler-{number}", (number,)) for number in range(8)]
        for handle in handles[::2]:
            fillers.d.abort(handle)
        (books,) = pair.core().arenas
        assert books.largest_hole_bytes < num_tokens * pair.token_bytes < books.free_bytes
        job = pushed(pair, tokens=tokens)
        assert job.grant is not None
        extents = job.grant.ranks[0].extents
        assert len(extents) == pair.pusher.layout.num_planes
        assert [x.offset_bytes for x in extents] == [offset for offset, _ in plane_offsets(job)]
        assert any(b.offset_bytes != a.end_bytes for a, b in itertools.pairwise(extents))
        assert pair.ingest("s", tokens, job.result.slab_handle)[0].ok
        for number in range(1, 8, 2):
            (answer,) = fillers.ingest(f"filler-{number}", (number,), handles[number])
            assert answer.ok, "its neighbours are whole"
    settle(daemon, follower)

"""A shard in pieces: the bytes and sums of a gather, in as few and as long pieces as there can be."""

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_copy import naive_sums, planes_of, pool_of, random_u8, slots_of

from snapd.core.slab import Extent
from snapd.errors import InvalidRequest
from snapd.kv import copy as copy_module
from snapd.kv import staged as staged_module
from snapd.kv.copy import gather
from snapd.kv.pool import KVPool
from snapd.kv.staged import StagedCopyJob, StagedGatherJob, StagedPiece
from snapd.units import align_up, ceil_div

POISON = 0xA5


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    # The copies are small: threads would only wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[None, 2048], ids=["whole chunks", "small chunks"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks and short runs bring small inputs to every path."""
    if request.param is not None:
        monkeypatch.setattr(copy_module, "CHUNK_BYTES", request.param)
        monkeypatch.setattr(staged_module, "CHUNK_BYTES", request.param)
        monkeypatch.setattr(copy_module, "RUN_BYTES_MIN", request.param // 4)


class Place:
    """Where a shard lies: offsets and extents in an arena of poison."""

    def __init__(
        self, sizes: Sequence[int], *, alignment: int = 256, scattered: bool = False, base: int = 512
    ) -> None:
        offsets = [base]
        for size in sizes:
            offsets.append(align_up(offsets[-1] + size, alignment))
        self.offsets, end = offsets[:-1], offsets[-1]
        self.extents = [Extent(base, end - base)]
        if scattered:
            # One extent a plane, in the other direction, with a hole of one alignment between two.
            self.offsets, at = [], base
            for size in reversed(sizes):
                self.offsets.insert(0, at)
                at += align_up(size, alignment) + alignment
            self.extents = [
                Extent(offset, align_up(size, alignment))
                for offset, size in zip(self.offsets, sizes, strict=True)
            ]
            end = at
        self.arena = torch.full((end + 512,), POISON, dtype=torch.uint8)

    def put(self, piece: StagedPiece, buffer: torch.Tensor) -> None:
        assert any(
            extent.offset_bytes <= piece.offset_bytes
            and piece.offset_bytes + piece.size_bytes <= extent.end_bytes
            for extent in self.extents
        ), "a piece leaves its extent"
        self.arena[piece.offset_bytes : piece.offset_bytes + piece.size_bytes] = buffer[: piece.size_bytes]


Job = StagedGatherJob | StagedCopyJob


def run(job: Job, place: Place, max_bytes: int = 0) -> list[StagedPiece]:
    """Fill and land every piece, through one dirty buffer that is not a byte too long."""
    buffer = torch.full((job.piece_bytes_max,), 0xEE, dtype=torch.uint8)
    pieces = []
    while not job.done:
        if max_bytes:
            job.begin(buffer)
            piece = job.step(max_bytes)
            while piece is None:
                before = job.bytes_done
                piece = job.step(max_bytes)
                assert job.bytes_done > before, "every step moves something"
        else:
            piece = job.fill(buffer)
        assert piece is not None
        place.put(piece, buffer)
        pieces.append(piece)
        buffer.fill_(0xEE)
    assert job.fill(buffer) is None
    assert job.bytes_done == job.bytes_total
    assert len(pieces) == job.num_pieces
    assert max(piece.size_bytes for piece in pieces) == job.piece_bytes_max
    return pieces


def check(
    pool: KVPool, slots: torch.Tensor, piece_bytes: int, max_bytes: int = 0, **options: object
) -> list[StagedPiece]:
    """Stage *slots* and compare every byte of the arena, and the sums, with a plain gather."""
    sizes = [slots.numel() * plane.stride_bytes for plane in pool.planes]
    place = Place(sizes, **options)  # type: ignore[arg-type]
    _, planes = planes_of(pool, slots.numel())
    sums = gather(pool, slots, planes)
    job = StagedGatherJob(pool, slots, place.offsets, place.extents, piece_bytes)
    pieces = run(job, place, max_bytes)
    assert job.checksums == sums
    check_arena(place, planes)
    assert all(piece.size_bytes <= piece_bytes for piece in pieces)

    again = Place(sizes, **options)  # type: ignore[arg-type]
    copied = StagedCopyJob(planes, again.offsets, again.extents, piece_bytes)
    run(copied, again, max_bytes)
    assert copied.checksums == sums
    check_arena(again, planes)
    return pieces


def check_arena(place: Place, planes: Sequence[torch.Tensor]) -> None:
    """Every plane is where it should be; outside it there is what was, or the zeros of the slab's padding."""
    rest = torch.ones(place.arena.numel(), dtype=torch.bool)
    for offset, plane in zip(place.offsets, planes, strict=True):
        assert torch.equal(place.arena[offset : offset + plane.numel()], plane)
        rest[offset : offset + plane.numel()] = False
    in_slab = torch.zeros(place.arena.numel(), dtype=torch.bool)
    for extent in place.extents:
        in_slab[extent.offset_bytes : extent.end_bytes] = True
    assert bool((place.arena[rest & ~in_slab] == POISON).all()), "a byte outside the slab was written"
    padding = place.arena[rest & in_slab]
    assert bool(((padding == POISON) | (padding == 0)).all()), "what a buffer held before went over"


WIDTHS = {
    "mha": [64, 64, 64, 64],
    "K and V differ": [48, 256, 16, 132],
    "mla": [656, 656, 656],
    "odd": [3, 6, 132, 656],
    "bytes": [1, 5, 7],
}


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("kind", ["contiguous", "runs", "random"])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_the_arena_holds_what_a_gather_makes(widths: list[int], page: int, kind: str) -> None:
    longest = max(widths) * 16
    for num_tokens, piece_bytes in ((1, longest), (77, longest), (77, 3 * longest + 7), (128, 1 << 20)):
        pool, slots = pool_of(widths, 192, page), slots_of(kind, 192, num_tokens, page)
        for scattered in (False, True):
            check(pool, slots, piece_bytes, scattered=scattered)


@pytest.mark.usefixtures("chunk_bytes")
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_pool_any_slots_and_any_piece(data: st.DataObject) -> None:
    page = data.draw(st.sampled_from([1, 2, 4, 16]))
    pages = data.draw(st.integers(1, 12))
    order = data.draw(st.permutations(range(pages)))[: data.draw(st.integers(1, pages))]
    slots = [number * page + token for number in order for token in range(page)]
    num_tokens = len(slots) - data.draw(st.integers(0, page - 1))
    widths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    pool = pool_of(widths, pages * page, page, data.draw(st.sampled_from([0, 0, 1, 8])))
    least = max(width * (16 // math.gcd(16, width)) for width in widths)
    check(
        pool,
        torch.tensor(slots[:num_tokens]),
        data.draw(st.integers(least, 4 * least) | st.integers(least, 1 << 14)),
        data.draw(st.sampled_from([0, 1, 64])),
        # Planes that start anywhere too, as a copy through a buffer of words then does not fit.
        alignment=data.draw(st.sampled_from([1, 8, 256])),
        scattered=data.draw(st.booleans()),
        base=data.draw(st.sampled_from([0, 3, 256])),
    )


@pytest.mark.parametrize("num_tokens", [16, 160, 1_600])
def test_the_number_of_pieces_is_that_of_the_bytes_and_not_of_the_planes_or_tokens(num_tokens: int) -> None:
    widths = [64] * (400 // (num_tokens // 16))
    pool = pool_of(widths, 2_000, 16)
    pieces = check(pool, slots_of("random", 2_000, num_tokens, 16), 1 << 16)
    total_bytes = num_tokens * 64 * len(widths)
    assert ceil_div(total_bytes, 1 << 16) <= len(pieces) <= ceil_div(total_bytes, (1 << 16) - 1024) + 1


def test_every_extent_begins_a_piece_even_where_the_next_follows_at_once() -> None:
    pool = pool_of([64, 64], 64)
    job = StagedGatherJob(pool, torch.arange(8), [0, 512], [Extent(0, 512), Extent(512, 512)], 1 << 16)
    buffer = torch.zeros(job.piece_bytes_max, dtype=torch.uint8)
    assert [job.fill(buffer), job.fill(buffer)] == [StagedPiece(0, 512), StagedPiece(512, 512)]
    assert job.done


def test_a_plane_that_lies_before_the_last_one_begins_a_piece() -> None:
    pool = pool_of([64, 64], 64)
    job = StagedGatherJob(pool, torch.arange(8), [512, 0], [Extent(0, 1024)], 1 << 16)
    buffer = torch.zeros(job.piece_bytes_max, dtype=torch.uint8)
    assert [job.fill(buffer), job.fill(buffer)] == [StagedPiece(512, 512), StagedPiece(0, 512)]


def test_a_piece_of_words_is_gathered_straight_into_the_buffer() -> None:
    """Pieces are cut so that words stay aligned: nothing goes by way of a private buffer."""
    for width, page in ((56, 1), (132, 4), (48, 16)):
        pool = pool_of([width] * 3, 192, page)
        slots = slots_of("random", 192, 128, page)
        place = Place([128 * width] * 3)
        job = StagedGatherJob(pool, slots, place.offsets, place.extents, 5_000)
        run(job, place)
        assert job._private.numel() == 0


def test_what_is_sent_is_what_was_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are those of the buffer, even if a slot changes between the copy and the sum."""
    pool = pool_of([64], 64)
    copy = StagedGatherJob._copy

    def copy_and_change(job: StagedGatherJob, own: torch.Tensor, part: torch.Tensor) -> None:
        copy(job, own, part)
        own.zero_()

    monkeypatch.setattr(StagedGatherJob, "_copy", copy_and_change)
    job = StagedGatherJob(pool, torch.arange(8), [0], [Extent(0, 512)], 512)
    buffer = torch.zeros(512, dtype=torch.uint8)
    assert job.fill(buffer) is not None
    assert job.checksums == (naive_sums(buffer.numpy().tobytes()),)
    assert bool(buffer.any())


def test_pages_that_do_not_fit_into_a_piece_are_cut() -> None:
    pieces = check(pool_of([64, 80], 256, 32), slots_of("random", 256, 100, 32), 1024)
    assert len(pieces) > 10


@pytest.mark.parametrize(
    ("offsets", "extents", "piece_bytes", "message"),
    [
        ([0], [Extent(0, 2048)], 1024, "1 offsets"),
        ([0, 512], [Extent(0, 1000)], 1024, "leaves its extents"),
        ([0, 512], [Extent(512, 512)], 1024, "leaves its extents"),
        ([0, 256], [Extent(0, 1024)], 1024, "share bytes"),
        ([0, 512], [Extent(0, 1024)], 63, "piece_bytes"),
    ],
)
def test_a_place_that_does_not_fit_is_refused(
    offsets: list[int], extents: list[Extent], piece_bytes: int, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        StagedGatherJob(pool_of([64, 64], 64), torch.arange(8), offsets, extents, piece_bytes)


def test_slots_are_checked_before_a_byte_moves() -> None:
    with pytest.raises(InvalidRequest, match="the pool has 64"):
        StagedGatherJob(pool_of([64], 64), torch.arange(60, 68), [0], [Extent(0, 512)], 512)


def test_a_buffer_that_is_too_short_or_of_another_kind_is_refused() -> None:
    job = StagedGatherJob(pool_of([64], 64), torch.arange(8), [0], [Extent(0, 512)], 512)
    with pytest.raises(InvalidRequest, match="511 bytes for pieces of 512"):
        job.begin(torch.zeros(511, dtype=torch.uint8))
    with pytest.raises(InvalidRequest, match="uint8"):
        job.begin(torch.zeros(512))
    with pytest.raises(InvalidRequest, match="no piece"):
        job.step(1)
    with pytest.raises(InvalidRequest, match="still to be moved"):
        job.checksums  # noqa: B018
    job.begin(torch.zeros(512, dtype=torch.uint8))
    with pytest.raises(InvalidRequest, match="being filled"):
        job.begin(torch.zeros(512, dtype=torch.uint8))
    assert job.step(1) is not None and job.done
    with pytest.raises(InvalidRequest, match="all is filled"):
        job.begin(torch.zeros(512, dtype=torch.uint8))


def test_planes_that_were_gathered_before_keep_the_sums_that_they_come_with() -> None:
    plane = random_u8(500)
    job = StagedCopyJob([plane], [0], [Extent(0, 512)], 512, [(1, 2)])
    with pytest.raises(InvalidRequest, match="still to be moved"):
        job.checksums  # noqa: B018
    assert job.fill(torch.zeros(512, dtype=torch.uint8)) == StagedPiece(0, 500)
    assert job.checksums == ((1, 2),)


def test_planes_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="plane 1"):
        StagedCopyJob([random_u8(8), torch.zeros(8)], [0, 256], [Extent(0, 512)], 512)
    with pytest.raises(InvalidRequest, match="piece_bytes"):
        StagedCopyJob([random_u8(8)], [0], [Extent(0, 512)], 15)
    with pytest.raises(InvalidRequest, match="offsets"):
        StagedCopyJob([], [], [Extent(0, 512)], 512)

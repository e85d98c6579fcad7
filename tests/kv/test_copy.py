"""Gather and scatter against a copy of one slot and one plane at a time."""

import itertools
import math
import mmap
import os
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapd.errors import InvalidRequest, InvariantBroken
from snapd.kv import copy as copy_module
from snapd.kv.checksum import checksums_equal, plane_checksum
from snapd.kv.copy import GatherJob, ScatterJob, gather, scatter
from snapd.kv.pool import KVPool

POISON = 0xA5
GAP_BYTES = 256


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random_u8(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def pool_of(
    strides_bytes: list[int], num_slots: int, page: int = 1, pad_bytes: int = 0, shift: int = 0
) -> KVPool:
    """A pool of one plane a stride, each *shift* bytes into its storage; with V if even in number."""
    buffers = [
        random_u8(num_slots * (width + pad_bytes) + shift)[shift:].view(num_slots, -1)[:, :width]
        for width in strides_bytes
    ]
    half = len(buffers) // 2
    return KVPool.mla(buffers, page) if len(buffers) % 2 else KVPool.mha(buffers[:half], buffers[half:], page)


def slots_of(kind: str, num_slots: int, num_tokens: int, page: int = 1) -> torch.Tensor:
    pages = num_slots // page
    wanted = -(-num_tokens // page)
    if kind == "contiguous":
        order = torch.arange(pages - wanted, pages)
    elif kind == "reversed":
        order = torch.arange(pages).flip(0)[:wanted]
    elif kind == "runs":
        before, run, after = torch.arange(pages).split(
            [pages // 8, pages // 4, pages - pages // 8 - pages // 4]
        )
        order = torch.cat((before.flip(0), run, after.flip(0)))[:wanted]
    else:
        order = torch.randperm(pages)[:wanted]
    return (order[:, None] * page + torch.arange(page)).flatten()[:num_tokens]


def planes_of(pool: KVPool, num_tokens: int, shift: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A poisoned slab and one plane in it for each of the pool's, with gaps between them."""
    sizes = [num_tokens * place.stride_bytes for place in pool.planes]
    starts = [GAP_BYTES + shift]
    for size_bytes in sizes:
        starts.append(-(-(starts[-1] + size_bytes + GAP_BYTES) // 256) * 256 + shift)
    slab = torch.full((starts[-1] + GAP_BYTES,), POISON, dtype=torch.uint8)
    return slab, [slab[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def store_of(pool: KVPool, index: int) -> np.ndarray:
    """All bytes of the storage of a plane's buffer, padding too."""
    storage = pool.planes[index].rows.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).numpy()


def naive_rows(pool: KVPool, index: int, slots: torch.Tensor) -> bytes:
    place = pool.planes[index]
    store = store_of(pool, index).tobytes()
    first = place.rows.storage_offset()
    starts = (first + int(slot) * place.pitch_bytes for slot in slots)
    return b"".join(store[start : start + place.stride_bytes] for start in starts)


def naive_sums(data: bytes) -> tuple[int, int]:
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype="<u8")
    positions = np.arange(1, len(words) + 1, dtype=np.uint64)
    return int(words.sum(dtype=np.uint64)), int((words * positions).sum(dtype=np.uint64))


def check_both_ways(
    pool: KVPool, slots: torch.Tensor, *, checksum: bool = True, shift: int = 0, max_bytes: int = 0
) -> None:
    """Gather and scatter *slots* and compare all bytes of both sides, and the sums, with the naive copy."""
    num_tokens = slots.numel()
    expected = [naive_rows(pool, index, slots) for index in range(len(pool.planes))]
    before = [store_of(pool, index).tobytes() for index in range(len(pool.planes))]
    slab, planes = planes_of(pool, num_tokens, shift)
    wanted = np.full(slab.numel(), POISON, dtype=np.uint8)
    for plane, data in zip(planes, expected, strict=True):
        start = plane.storage_offset()
        wanted[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)
    pointers = [plane.data_ptr() for plane in planes]

    job = GatherJob(pool, slots, planes, checksum=checksum)
    done_bytes = 0
    while not job.step(max_bytes or job.bytes_total):
        assert done_bytes < job.bytes_done < job.bytes_total
        done_bytes = job.bytes_done
    assert job.bytes_done == job.bytes_total
    assert slab.numpy().tobytes() == wanted.tobytes()
    assert [plane.data_ptr() for plane in planes] == pointers
    assert [store_of(pool, index).tobytes() for index in range(len(pool.planes))] == before
    sums = tuple(naive_sums(data) for data in expected) if checksum else ()
    assert job.checksums == sums

    target_stores, target_planes = [], []
    for index, place in enumerate(pool.planes):
        store = torch.full((len(before[index]),), POISON, dtype=torch.uint8)
        target_stores.append(store)
        target_planes.append(
            store.as_strided(
                (pool.num_slots, place.stride_bytes), (place.pitch_bytes, 1), place.rows.storage_offset()
            )
        )
    target = KVPool(target_planes, (), pool.page_size_tokens)
    assert scatter(planes, target, slots, checksum=checksum) == sums
    assert slab.numpy().tobytes() == wanted.tobytes()
    for index, (place, store) in enumerate(zip(target.planes, target_stores, strict=True)):
        image = np.full(store.numel(), POISON, dtype=np.uint8)
        for token, slot in enumerate(slots.tolist()):
            start = place.rows.storage_offset() + slot * place.pitch_bytes
            row = expected[index][token * place.stride_bytes : (token + 1) * place.stride_bytes]
            image[start : start + place.stride_bytes] = np.frombuffer(row, dtype=np.uint8)
        assert store.numpy().tobytes() == image.tobytes()


@pytest.fixture(params=[None, 2048], ids=["whole chunks", "small chunks"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks and short runs bring small inputs to every path."""
    if request.param is not None:
        monkeypatch.setattr(copy_module, "CHUNK_BYTES", request.param)
        monkeypatch.setattr(copy_module, "RUN_BYTES_MIN", request.param // 4)


WIDTHS = {
    "mha": [64, 64, 64, 64],
    "K and V differ": [48, 256, 16, 132],
    "mla": [656, 656, 656],
    "odd": [3, 6, 132, 656],
    "fp8 latent": [132],
    "bytes": [1, 5, 7],
}


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("kind", ["contiguous", "reversed", "runs", "random"])
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_all_bytes_arrive_and_no_others_change(widths: list[int], page: int, kind: str) -> None:
    for num_tokens in (1, 77, 128):
        check_both_ways(pool_of(widths, 192, page), slots_of(kind, 192, num_tokens, page))


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("kind", ["contiguous", "runs", "random"])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("pad_bytes", [1, 4, 16, 64])
def test_padded_pools(pad_bytes: int, page: int, kind: str) -> None:
    check_both_ways(pool_of([64, 132, 656, 7], 192, page, pad_bytes), slots_of(kind, 192, 77, page))


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("kind", ["contiguous", "random"])
@pytest.mark.parametrize("pad_bytes", [0, 16])
@pytest.mark.parametrize("page", [1, 16])
def test_without_sums_the_bytes_are_the_same(page: int, pad_bytes: int, kind: str) -> None:
    pool = pool_of([64, 132, 656, 7], 192, page, pad_bytes)
    check_both_ways(pool, slots_of(kind, 192, 77, page), checksum=False)


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("shift", [1, 4, 8])
def test_planes_at_any_address(shift: int, checksum: bool) -> None:
    for kind in ("contiguous", "random"):
        check_both_ways(
            pool_of([64, 656], 192, 4), slots_of(kind, 192, 77, 4), checksum=checksum, shift=shift
        )


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("shift", [1, 4, 8])
def test_pools_at_any_address(shift: int, checksum: bool) -> None:
    for kind in ("contiguous", "random"):
        pool = pool_of([64, 656], 192, 4, shift=shift)
        check_both_ways(pool, slots_of(kind, 192, 77, 4), checksum=checksum)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_pool_and_any_slots(data: st.DataObject) -> None:
    page = data.draw(st.sampled_from([1, 2, 4, 16]))
    pages = data.draw(st.integers(1, 12))
    num_slots = pages * page + data.draw(st.integers(0, page - 1))
    order = data.draw(st.permutations(range(pages)))[: data.draw(st.integers(1, pages))]
    slots = [number * page + token for number in order for token in range(page)]
    num_tokens = len(slots) - data.draw(st.integers(0, page - 1))
    widths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    pool = pool_of(widths, num_slots, page, data.draw(st.sampled_from([0, 0, 1, 8])))
    check_both_ways(pool, torch.tensor(slots[:num_tokens]), max_bytes=data.draw(st.sampled_from([0, 1, 64])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_engine_dtypes_keep_every_bit(dtype: torch.dtype) -> None:
    """Signalling NaNs too: nothing passes through a float register as a value."""
    k = [torch.full((64, 2, 64), 0xFF, dtype=torch.uint8).view(dtype), random_u8(64, 2, 64).view(dtype)]
    k[1].view(torch.int32).view(-1)[::7] = 0x7F800001
    v = [random_u8(64, 2, 32).view(dtype), torch.full((64, 4, 32), 0x7F, dtype=torch.uint8).view(dtype)]
    check_both_ways(KVPool.mha(k, v), torch.randperm(64)[:50])


def test_full_chunks_of_every_path() -> None:
    """Planes larger than a chunk, as engines have them, with a run among random pages."""
    pool = pool_of([1024, 1020], 12_000, 16)
    pages = torch.randperm(300)
    pages = torch.cat((pages[:150], torch.arange(300, 700), pages[150:]))
    slots = (pages[:, None] * 16 + torch.arange(16)).flatten()[:-3]
    _, planes = planes_of(pool, slots.numel())
    sums = gather(pool, slots, planes)
    for plane, place, actual in zip(planes, pool.planes, sums, strict=True):
        assert torch.equal(plane.view(-1, place.stride_bytes), place.rows[slots])
        assert actual == naive_sums(plane.numpy().tobytes())
    target = pool_of([1024, 1020], 12_000, 16)
    others = torch.ones(12_000, dtype=torch.bool)
    others[slots] = False
    before = [place.rows[others] for place in target.planes]
    assert scatter(planes, target, slots) == sums
    for place, source, untouched in zip(target.planes, pool.planes, before, strict=True):
        assert torch.equal(place.rows[slots], source.rows[slots])
        assert torch.equal(place.rows[others], untouched)


def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    taken: list[str] = []
    for name in ("_move_run", "_move_indexed"):
        original = getattr(copy_module.CopyJob, name)

        def spy(self, *args, original=original, name=name):
            taken.append(name)
            return original(self, *args)

        monkeypatch.setattr(copy_module.CopyJob, name, spy)
    return taken


def test_consecutive_slots_take_the_plain_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = _recorded(monkeypatch)
    pool = pool_of([64], 64)
    gather(pool, torch.arange(3, 40), planes_of(pool, 37)[1])
    assert taken == ["_move_run"]


def test_a_run_of_a_dense_pool_needs_no_private_buffer() -> None:
    pool = pool_of([64], 64)
    job = GatherJob(pool, torch.arange(3, 40), planes_of(pool, 37)[1])
    assert job.step(job.bytes_total)
    assert job._private.numel() == 0


def test_a_long_run_among_others_takes_the_plain_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = _recorded(monkeypatch)
    pool = pool_of([1024], 1024)
    slots = torch.cat((torch.arange(10).flip(0), torch.arange(100, 900), torch.arange(20, 30).flip(0)))
    gather(pool, slots, planes_of(pool, slots.numel())[1])
    assert taken == ["_move_indexed", "_move_run", "_move_indexed"]


def test_whole_pages_are_moved_by_page_and_the_partial_last_one_as_a_run() -> None:
    slots = slots_of("reversed", 192, 77, 16)
    pieces = copy_module._pieces(slots, 64, 16)
    assert pieces == [copy_module.Piece(0, 64, False), copy_module.Piece(64, 77, True)]


def test_a_run_shorter_than_a_granule_is_left_to_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_module, "RUN_BYTES_MIN", 512)
    slots = torch.tensor([90, 10, 11, 12, 13, 50, 40, 30, 20])
    assert copy_module._pieces(slots, 131, 1) == [copy_module.Piece(0, 9, False)]


@pytest.mark.usefixtures("chunk_bytes")
@given(
    data=st.data(), page=st.sampled_from([1, 4, 16]), stride_bytes=st.sampled_from([1, 3, 6, 131, 64, 656])
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_cover_all_tokens_and_end_at_whole_pages_and_words(
    data: st.DataObject, page: int, stride_bytes: int
) -> None:
    parts = data.draw(st.lists(st.tuples(st.integers(1, 400), st.booleans()), min_size=1, max_size=5))
    order = [
        page_number
        for at, (length, is_run) in enumerate(parts)
        for page_number in range(at * 1000, at * 1000 + length)[:: 1 if is_run else -1]
    ]
    slots = (torch.tensor(order)[:, None] * page + torch.arange(page)).flatten()
    slots = slots[: slots.numel() - data.draw(st.integers(0, page - 1))]
    pieces = copy_module._pieces(slots, stride_bytes, page)
    assert [piece.start for piece in pieces] == [0, *[piece.stop for piece in pieces[:-1]]]
    assert pieces[-1].stop == slots.numel()
    for piece in pieces:
        assert piece.start < piece.stop
        assert piece.start % page == 0
        assert piece.start * stride_bytes % 8 == 0
        size_bytes = (piece.stop - piece.start) * stride_bytes
        assert size_bytes <= max(copy_module.CHUNK_BYTES, math.lcm(page, 8) * stride_bytes)
        if piece.is_run:
            assert torch.equal(
                slots[piece.start : piece.stop] - slots[piece.start], torch.arange(piece.stop - piece.start)
            )


def test_a_pool_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        pool = pool_of([64, 132], 32)
    check_both_ways(pool, torch.randperm(32)[:20])
    _, planes = planes_of(pool, 20)
    expected = [random_u8(plane.numel()) for plane in planes]
    slots = torch.randperm(32)[:20]
    scatter(expected, pool, slots)
    gather(pool, slots, planes)
    assert all(torch.equal(plane, data) for plane, data in zip(planes, expected, strict=True))


def test_mapped_planes_are_written_in_place_and_read_only_ones_are_only_read() -> None:
    fd = os.memfd_create("planes")
    size_bytes = 64 * 20 + 132 * 20
    os.ftruncate(fd, size_bytes)
    pool, target = pool_of([64, 132], 32), pool_of([64, 132], 32)
    slots = torch.randperm(32)[:20]
    writable = torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
    sums = gather(pool, slots, [writable[: 64 * 20], writable[64 * 20 :]])
    assert os.pread(fd, size_bytes, 0) == naive_rows(pool, 0, slots) + naive_rows(pool, 1, slots)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        readable = torch.frombuffer(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ), dtype=torch.uint8)
    for checksum in (True, False):
        for order in (slots, torch.arange(7, 27)):
            back = scatter([readable[: 64 * 20], readable[64 * 20 :]], target, order, checksum=checksum)
            assert back == (sums if checksum else ())
            assert torch.equal(target.planes[0].rows[order], pool.planes[0].rows[slots])
    os.close(fd)


@pytest.mark.parametrize("kind", ["contiguous", "random"])
@pytest.mark.parametrize("pad_bytes", [0, 8])
def test_a_late_write_into_the_slab_never_passes(
    kind: str, pad_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write between a copy and its sum leaves sums that are true of the pool, not of the slab."""
    pool, target = pool_of([64], 64, 1, pad_bytes), pool_of([64], 64, 1, pad_bytes)
    slots = slots_of(kind, 64, 50)
    _, (plane,) = planes_of(pool, 50)
    true_sums = (naive_sums(naive_rows(pool, 0, slots)),)
    original = copy_module.ChecksumAccumulator.add

    def late(self, chunk, word_offset=None):
        plane[100:108] = 0
        original(self, chunk, word_offset)

    monkeypatch.setattr(copy_module.ChecksumAccumulator, "add", late)
    assert gather(pool, slots, [plane]) == true_sums
    monkeypatch.undo()
    assert checksums_equal(true_sums, [plane_checksum(plane)]) == [0]

    gather(pool, slots, [plane])
    monkeypatch.setattr(copy_module.ChecksumAccumulator, "add", late)
    sums = scatter([plane], target, slots)
    assert sums == (naive_sums(naive_rows(target, 0, slots)),) == true_sums


def test_steps_are_bounded_and_sums_wait_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_module, "CHUNK_BYTES", 1024)
    pool = pool_of([64, 64], 128)
    _, planes = planes_of(pool, 100)
    job = GatherJob(pool, torch.randperm(128)[:100], planes)
    seen = [0]
    while not job.step(2048):
        seen.append(job.bytes_done)
        with pytest.raises(InvalidRequest, match="still to be moved"):
            _ = job.checksums
    seen.append(job.bytes_done)
    assert seen[-1] == job.bytes_total == 12_800
    assert all(0 < after - before <= 2048 for before, after in itertools.pairwise(seen))
    assert len(seen) >= 7
    assert job.step(1)
    assert job.bytes_done == job.bytes_total


def test_a_step_of_no_bytes_still_moves_a_piece() -> None:
    pool = pool_of([64], 16)
    job = ScatterJob(pool, torch.arange(16), planes_of(pool, 16)[1])
    assert job.step(0)


def _bad_planes(planes: list[torch.Tensor], case: str) -> list[torch.Tensor]:
    if case == "one too few":
        return planes[:1]
    if case == "one too many":
        return [*planes, torch.zeros(8, dtype=torch.uint8)]
    if case == "too short":
        return [planes[0], planes[1][:-1]]
    if case == "too long":
        return [planes[0], torch.zeros(planes[1].numel() + 1, dtype=torch.uint8)]
    if case == "another dtype":
        return [planes[0], planes[1].view(torch.int8)]
    if case == "2-D":
        return [planes[0], planes[1].view(1, -1)]
    if case == "on another device":
        return [planes[0], planes[1].to("meta")]
    if case == "overlap":
        return [planes[0], planes[0]]
    return [planes[0], torch.zeros(2 * planes[1].numel(), dtype=torch.uint8)[::2]]


@pytest.mark.parametrize(
    "case",
    ["one too few", "one too many", "too short", "too long", "another dtype", "2-D", "on another device",
     "overlap", "not contiguous"],
)  # fmt: skip
def test_planes_that_do_not_fit_are_refused_and_nothing_moves(case: str) -> None:
    pool = pool_of([64, 64], 32)
    slots = torch.randperm(32)[:20]
    slab, planes = planes_of(pool, 20)
    before = [store_of(pool, index).tobytes() for index in range(2)]
    bad = _bad_planes(planes, case)
    with pytest.raises(InvalidRequest):
        gather(pool, slots, bad)
    with pytest.raises(InvalidRequest):
        scatter(bad, pool, slots)
    assert bool((slab == POISON).all())
    assert [store_of(pool, index).tobytes() for index in range(2)] == before


@pytest.mark.parametrize("slots", [[0, 32], [-1, 0], [3, 3]])
def test_slots_that_do_not_fit_are_refused_and_nothing_moves(slots: list[int]) -> None:
    pool = pool_of([64], 32)
    slab, planes = planes_of(pool, 2)
    before = store_of(pool, 0).tobytes()
    with pytest.raises(InvalidRequest):
        gather(pool, torch.tensor(slots), planes)
    with pytest.raises(InvalidRequest):
        scatter(planes, pool, torch.tensor(slots))
    assert bool((slab == POISON).all())
    assert store_of(pool, 0).tobytes() == before


def test_a_pool_on_another_device_is_refused() -> None:
    pool = KVPool.mla([torch.zeros(8, 16, dtype=torch.uint8, device="meta")])
    with pytest.raises(InvalidRequest, match="for the CPU"):
        gather(pool, torch.arange(8), [torch.zeros(128, dtype=torch.uint8)])


def test_rows_of_another_shape_are_never_given_new_storage() -> None:
    pool = pool_of([64], 16)
    job = GatherJob(pool, torch.randperm(16), planes_of(pool, 16)[1])
    with pytest.raises(InvariantBroken, match="rows of shape"):
        job._move_rows(pool.planes[0].words, torch.arange(4), torch.zeros(3, 4, dtype=torch.complex128))


@pytest.mark.parametrize("what", ["stale", "swapped", "zeroed"])
def test_a_damaged_plane_shows_when_it_is_scattered(what: str) -> None:
    pool, target = pool_of([64, 132], 64), pool_of([64, 132], 64)
    slots = torch.randperm(64)[:50]
    _, planes = planes_of(pool, 50)
    sums = gather(pool, slots, planes)
    if what == "swapped":
        planes[1][:132], planes[1][132:264] = planes[1][132:264].clone(), planes[1][:132].clone()
    else:
        planes[1][1000:1100] = 0 if what == "zeroed" else random_u8(100)
    assert checksums_equal(sums, scatter(planes, target, slots)) == [1]

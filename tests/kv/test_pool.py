"""A kv_pool as rows of bytes: what is seen, and what is refused."""

import pytest
import torch

from snapd.errors import InvalidRequest, LayoutMismatch
from snapd.kv.pool import KVPool, check_slots_of
from snapd.layout import Namespace

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]


def buffers(count: int, slots: int = 8, heads: int = 2, dim: int = 4, dtype: torch.dtype = torch.bfloat16):
    return [torch.zeros(slots, heads, dim, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_the_bytes_of_the_slots(dtype: torch.dtype) -> None:
    k = torch.randint(0, 256, (8, 2, 12 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    v = torch.randint(0, 256, (8, 2, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    pool = KVPool.mha([k], [v])
    for plane, buffer in zip(pool.planes, (k, v), strict=True):
        assert torch.equal(plane.rows, buffer.view(torch.uint8).view(8, -1))
        assert torch.equal(plane.words.view(torch.uint8), plane.rows)
        assert plane.rows.data_ptr() == plane.words.data_ptr() == buffer.data_ptr()
        assert plane.flat is not None
        assert torch.equal(plane.flat, plane.rows.flatten())


def test_a_write_to_a_row_is_a_write_to_the_engine() -> None:
    (k,) = buffers(1)
    KVPool.mla([k]).planes[0].rows[3] = 255
    assert bool((k.view(torch.uint8)[3] == 255).all())
    assert not bool(k.view(torch.uint8)[[0, 1, 2, 4, 5, 6, 7]].any())


@pytest.mark.parametrize(
    ("stride_bytes", "word_bytes"), [(3, 1), (6, 2), (132, 4), (136, 8), (656, 16), (1024, 16)]
)
def test_words_are_as_wide_as_a_row_allows(stride_bytes: int, word_bytes: int) -> None:
    plane = KVPool.mla([torch.zeros(8, stride_bytes, dtype=torch.uint8)], 4).planes[0]
    assert plane.word_bytes == plane.words.element_size() == word_bytes
    assert plane.words.shape == (8, stride_bytes // word_bytes)
    assert plane.pages is not None
    assert plane.pages.shape == (2, 4 * stride_bytes // plane.page_word_bytes)
    assert plane.page_word_bytes >= word_bytes


def test_words_are_as_wide_as_the_address_allows() -> None:
    store = torch.zeros(1024 + 4, dtype=torch.uint8)
    assert store.data_ptr() % 16 == 0
    shifted = KVPool.mla([store[4:].view(8, 128)], 4).planes[0]
    assert (shifted.word_bytes, shifted.page_word_bytes) == (4, 4)
    assert KVPool.mla([store[:1024].view(8, 128)]).planes[0].word_bytes == 16


def test_words_are_as_wide_as_the_distance_of_slots_allows() -> None:
    padded = torch.zeros(8, 132, dtype=torch.uint8)[:, :128]
    plane = KVPool.mla([padded], 4).planes[0]
    assert (plane.stride_bytes, plane.pitch_bytes, plane.word_bytes) == (128, 132, 4)
    assert plane.flat is None
    assert plane.pages is None


def test_k_and_v_of_one_tensor_are_a_padded_pool() -> None:
    both = torch.randint(0, 256, (8, 2, 2, 16), dtype=torch.uint8)
    pool = KVPool.mha([both[:, 0]], [both[:, 1]])
    assert torch.equal(pool.planes[1].rows, both[:, 1].reshape(8, -1))
    assert pool.planes[0].pitch_bytes == 64


def test_the_layout_has_k_of_all_layers_then_v() -> None:
    k = [torch.zeros(8, 2, dim, dtype=torch.bfloat16) for dim in (8, 16)]
    v = [torch.zeros(8, 2, dim, dtype=torch.bfloat16) for dim in (4, 12)]
    pool = KVPool.mha(k, v, 4)
    layout = pool.layout(Namespace(model="m"))
    assert layout.k_stride_bytes == (32, 64)
    assert layout.v_stride_bytes == (16, 48)
    assert (layout.dtype, layout.page_size_tokens, layout.namespace.model) == ("bfloat16", 4, "m")
    assert pool.num_slots == 8


@pytest.mark.parametrize("shape", [(8, 1, 16), (8, 16)])
def test_a_fused_pool_has_no_v(shape: tuple[int, ...]) -> None:
    layout = KVPool.mla([torch.zeros(shape, dtype=torch.uint8)] * 2).layout(Namespace())
    assert layout.k_stride_bytes == (16, 16)
    assert layout.v_stride_bytes == ()


def test_a_layout_out_of_range_is_refused() -> None:
    pool = KVPool.mla([torch.zeros(1, (1 << 24) + 1, dtype=torch.uint8)])
    with pytest.raises(InvalidRequest, match="stride"):
        pool.layout(Namespace())


def test_a_single_slot_has_no_distance() -> None:
    single = torch.zeros(16, dtype=torch.uint8).as_strided((1, 16), (4, 1))
    assert KVPool.mla([single]).planes[0].pitch_bytes == 16


@pytest.mark.parametrize(
    ("k", "v", "match"),
    [
        ([], [], "make no pool"),
        (buffers(2), buffers(1), "make no pool"),
        ([torch.zeros(8)], None, "shape"),
        ([torch.zeros(2, 2, 2, 2)], None, "shape"),
        ([torch.zeros(0, 4)], None, "shape"),
        ([torch.zeros(8, 4, dtype=torch.float64)], None, "dtype"),
        ([torch.zeros(8, 4, 2).transpose(1, 2)], None, "gaps"),
        ([torch.zeros(8, 8)[:, ::2]], None, "gaps"),
        ([torch.zeros(1, 8).expand(8, 8)], None, "bytes apart"),
        ([torch.zeros(64).as_strided((8, 8), (4, 1))], None, "bytes apart"),
        (buffers(1), buffers(1, slots=7), "V buffer 0"),
        (buffers(1), buffers(1, dtype=torch.float16), "V buffer 0"),
        (buffers(1), [torch.zeros(8, 2, 4, dtype=torch.bfloat16, device="meta")], "V buffer 0"),
    ],
)
def test_buffers_that_are_no_pool_are_refused(k, v, match: str) -> None:
    with pytest.raises(LayoutMismatch, match=match):
        KVPool.mla(k) if v is None else KVPool(k, v, 1)


def test_a_pool_with_k_and_v_needs_v() -> None:
    with pytest.raises(LayoutMismatch, match="needs V"):
        KVPool.mha(buffers(1), [])


@pytest.mark.parametrize("page_size_tokens", [0, -1, (1 << 16) + 1])
def test_a_page_size_out_of_range_is_refused(page_size_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="page_size_tokens"):
        KVPool.mla(buffers(1), page_size_tokens)


def pool_of(num_slots: int, page_size_tokens: int) -> KVPool:
    return KVPool.mla([torch.zeros(num_slots, 8, dtype=torch.uint8)], page_size_tokens)


@pytest.mark.parametrize(
    ("page_size_tokens", "slots"),
    [
        (1, [0]),
        (1, [7, 0, 3]),
        (4, [4, 5, 6, 7, 0, 1, 2, 3]),
        (4, [8, 9, 10, 11, 0]),
        (4, [4]),
        (4, [12, 13]),
    ],
)
def test_good_slots_pass(page_size_tokens: int, slots: list[int]) -> None:
    pool_of(14, page_size_tokens).check_slots(torch.tensor(slots), len(slots))


@pytest.mark.parametrize(
    ("page_size_tokens", "slots", "num_tokens", "match"),
    [
        (1, torch.tensor([0, 1], dtype=torch.int32), 2, "int64"),
        (1, torch.zeros(2, dtype=torch.int64, device="meta"), 2, "on the CPU"),
        (1, torch.tensor([[0, 1]]), 2, "shape"),
        (1, torch.tensor([0, 1]), 3, "shape"),
        (1, torch.tensor([0, 1]), 1, "shape"),
        (1, torch.tensor([], dtype=torch.int64), 0, "shape"),
        (1, torch.tensor([0, -1]), 2, "span -1 to 0"),
        (1, torch.tensor([0, 14]), 2, "span 0 to 14"),
        (1, torch.tensor([3, 1, 3]), 3, "twice"),
        (4, torch.tensor([1, 2, 3, 4]), 4, "starts at no multiple"),
        (4, torch.tensor([0, 1, 2, 3, 6]), 5, "starts at no multiple"),
        (4, torch.tensor([0, 1, 3, 2]), 4, "not consecutive"),
        (4, torch.tensor([0, 1, 2, 3, 4, 6]), 6, "not consecutive"),
        (4, torch.tensor([0, 1, 2, 7]), 4, "not consecutive"),
        (4, torch.tensor([4, 5, 6, 7, 4, 5, 6, 7]), 8, "twice"),
    ],
)
def test_bad_slots_are_refused(
    page_size_tokens: int, slots: torch.Tensor, num_tokens: int, match: str
) -> None:
    with pytest.raises(InvalidRequest, match=match):
        pool_of(14, page_size_tokens).check_slots(slots, num_tokens)


def test_the_allocator_is_told_once_of_each_stream_and_each_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.zeros((2, 8, 4), dtype=torch.uint8)
    other = torch.zeros((8, 4), dtype=torch.uint8)
    pool = KVPool.mla([store[0], store[1], other])
    told: list[tuple[int, object]] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda rows, stream: told.append((rows.data_ptr(), stream))
    )
    pool.keep_for("one")  # type: ignore[arg-type]
    assert not told, "the host has no streams"
    pool.device = torch.device("cuda:0")
    for stream in ("one", "two", "one"):
        pool.keep_for(stream)  # type: ignore[arg-type]
    assert sorted({stream for _, stream in told}) == ["one", "two"]
    assert len(told) == 4, "two storages, two streams"


def test_slots_of_several_pools_are_right_for_the_smallest() -> None:
    small, large = pool_of(14, 4), pool_of(16, 4)
    checked = check_slots_of([large, small], torch.tensor([4, 5, 6, 7, 0, 1]), 6)
    assert checked.fit(small) and checked.fit(large)
    assert not checked.fit(pool_of(13, 4)) and not checked.fit(pool_of(16, 1))
    rest = checked.from_token(4)
    assert rest.slots.tolist() == [0, 1] and rest.fit(small)
    with pytest.raises(InvalidRequest, match="the pool has 14"):
        check_slots_of([large, small], torch.tensor([12, 13, 14, 15]), 4)

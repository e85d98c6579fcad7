"""The checksum against big integers, and what it must notice."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapd.errors import InvalidRequest
from snapd.kv import checksum as checksum_module
from snapd.kv.checksum import CHUNK_BYTES, ChecksumAccumulator, checksums_equal, plane_checksum, words_view

MOD = 1 << 64


def naive(data: bytes) -> tuple[int, int]:
    data = data + bytes(-len(data) % 8)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    return sum(words) % MOD, sum((index + 1) * word for index, word in enumerate(words)) % MOD


def naive_fast(data: bytes) -> tuple[int, int]:
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype="<u8")
    positions = np.arange(1, len(words) + 1, dtype=np.uint64)
    return int(words.sum(dtype=np.uint64)), int((words * positions).sum(dtype=np.uint64))


def plane_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def random_bytes(size_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size_bytes)


@given(data=st.binary(max_size=5000))
@settings(max_examples=80, deadline=None)
def test_it_is_the_definition_in_big_integers(data: bytes) -> None:
    assert plane_checksum(plane_of(data)) == naive(data)


@pytest.mark.parametrize("size_bytes", [1, 7, 8, 2040, 2048, 2056, 65536 + 3, 256 * 8 * 3 + 8])
def test_sizes_about_a_row_of_words(size_bytes: int) -> None:
    data = random_bytes(size_bytes)
    assert plane_checksum(plane_of(data)) == naive(data)


def test_all_ones_wrap_around() -> None:
    data = b"\xff" * (1 << 16)
    assert plane_checksum(plane_of(data)) == naive(data)


@pytest.mark.parametrize("size_bytes", [CHUNK_BYTES, CHUNK_BYTES + 5, 2 * CHUNK_BYTES + 2048 + 24])
def test_planes_of_several_chunks(size_bytes: int) -> None:
    data = random_bytes(size_bytes)
    assert plane_checksum(plane_of(data)) == naive_fast(data)


@pytest.mark.parametrize("shift", range(1, 9))
def test_a_plane_at_any_address(shift: int) -> None:
    data = random_bytes(8192)
    assert plane_checksum(plane_of(bytes(shift) + data)[shift:]) == naive(data)


@pytest.mark.parametrize("storage_shift", [0, 4])
def test_unaligned_bytes_are_never_seen_as_words(storage_shift: int) -> None:
    """Where the storage itself starts does not show in a tensor's offset."""
    store = torch.frombuffer(bytearray(64), dtype=torch.uint8, offset=4)
    flat = store[storage_shift : storage_shift + 16]
    assert (words_view(flat) is None) == (flat.data_ptr() % 8 != 0 or storage_shift % 8 != 0)
    assert words_view(torch.zeros(16, dtype=torch.uint8)) is not None


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_chunks_in_any_order_give_the_plane(data: st.DataObject) -> None:
    raw = data.draw(st.binary(min_size=1, max_size=3000))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, (len(raw) - 1) // 8)), max_size=6)))
    edges = [0, *[cut for cut in cuts if cut * 8 < len(raw)]]
    plane = plane_of(raw)
    chunks = [
        (start, plane[start * 8 : stop * 8 if stop is not None else None])
        for start, stop in zip(edges, [*edges[1:], None], strict=True)
    ]
    in_order, shuffled = ChecksumAccumulator(), ChecksumAccumulator()
    for _, chunk in chunks:
        in_order.add(chunk)
    for start, chunk in data.draw(st.permutations(chunks)):
        shuffled.add(chunk, start)
    assert in_order.value == shuffled.value == naive(raw)
    assert in_order.size_bytes == shuffled.size_bytes == len(raw)


def test_offsets_beyond_32_bits() -> None:
    data, offset = random_bytes(64), (1 << 33) + 5
    accumulator = ChecksumAccumulator()
    accumulator.add(plane_of(data), offset)
    sum0, sum1 = naive(data)
    assert accumulator.value == (sum0, (sum1 + offset * sum0) % MOD)


def test_a_chunk_after_one_that_ends_inside_a_word_is_refused() -> None:
    accumulator = ChecksumAccumulator()
    accumulator.add(plane_of(b"x" * 9))
    before = accumulator.value
    with pytest.raises(InvalidRequest, match="must be the plane's last"):
        accumulator.add(plane_of(b"x" * 8))
    assert accumulator.value == before
    assert accumulator.size_bytes == 9


def test_a_chunk_that_ends_inside_a_word_before_another_is_refused() -> None:
    accumulator = ChecksumAccumulator()
    accumulator.add(plane_of(b"x" * 8), 4)
    with pytest.raises(InvalidRequest, match="is not the last"):
        accumulator.add(plane_of(b"x" * 9), 0)


def test_a_negative_offset_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="negative"):
        ChecksumAccumulator().add(plane_of(b"x" * 8), -1)


@pytest.mark.parametrize(
    "plane",
    [
        torch.zeros(8, dtype=torch.int8),
        torch.zeros(2, 8, dtype=torch.uint8),
        torch.zeros(16, dtype=torch.uint8)[::2],
    ],
    ids=["int8", "2-D", "not contiguous"],
)
def test_other_tensors_are_refused(plane: torch.Tensor) -> None:
    with pytest.raises(InvalidRequest, match="is wanted"):
        plane_checksum(plane)


def test_a_plane_on_another_device_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="is on meta; cpu is wanted"):
        plane_checksum(torch.zeros(8, dtype=torch.uint8, device="meta"))


SIZE_BYTES = 8 * 1024
ROW_BYTES = 64
ORIGINAL = random_bytes(SIZE_BYTES, seed=1)
EXPECTED = naive(ORIGINAL)


@given(bit=st.integers(0, SIZE_BYTES * 8 - 1))
@settings(max_examples=150, deadline=None)
def test_a_flipped_bit_shows(bit: int) -> None:
    changed = bytearray(ORIGINAL)
    changed[bit // 8] ^= 1 << bit % 8
    assert plane_checksum(plane_of(bytes(changed))) != EXPECTED


def _swapped(unit_bytes: int, first: int, second: int) -> bytes:
    changed = bytearray(ORIGINAL)
    a, b = (slice(index * unit_bytes, (index + 1) * unit_bytes) for index in (first, second))
    changed[a], changed[b] = ORIGINAL[b], ORIGINAL[a]
    return bytes(changed)


@pytest.mark.parametrize("unit_bytes", [8, ROW_BYTES], ids=["words", "rows"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_swapped_units_show(unit_bytes: int, data: st.DataObject) -> None:
    last = SIZE_BYTES // unit_bytes - 1
    first, second = data.draw(
        st.tuples(st.integers(0, last), st.integers(0, last)).filter(lambda p: p[0] != p[1])
    )
    actual = plane_checksum(plane_of(_swapped(unit_bytes, first, second)))
    assert actual != EXPECTED
    assert actual[0] == EXPECTED[0], "only the weighted sum can see it"


@given(data=st.data(), stale=st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_stale_or_zeroed_range_shows(data: st.DataObject, stale: bool) -> None:
    start = data.draw(st.integers(0, SIZE_BYTES - 16))
    stop = data.draw(st.integers(start + 16, SIZE_BYTES))
    other = random_bytes(SIZE_BYTES, seed=2) if stale else bytes(SIZE_BYTES)
    changed = ORIGINAL[:start] + other[start:stop] + ORIGINAL[stop:]
    assert plane_checksum(plane_of(changed)) != EXPECTED


def test_a_range_that_is_late_by_one_row_shows() -> None:
    late = ORIGINAL[-ROW_BYTES:] + ORIGINAL[:-ROW_BYTES]
    assert plane_checksum(plane_of(late)) != EXPECTED


def test_planes_that_differ_are_named() -> None:
    a, b, c = (1, 2), (3, 4), (5, 6)
    assert checksums_equal([a, b, c], [a, b, c]) == []
    assert checksums_equal([a, b, c], [a, (3, 5), (4, 6)]) == [1, 2]


def test_a_plane_that_one_side_lacks_differs() -> None:
    assert checksums_equal([(1, 2), (3, 4)], [(1, 2)]) == [1]
    assert checksums_equal([], [(1, 2)]) == [0]


def test_it_works_inside_and_after_inference_mode() -> None:
    with torch.inference_mode():
        accumulator = ChecksumAccumulator()
        accumulator.add(plane_of(ORIGINAL[:4096]))
    accumulator.add(plane_of(ORIGINAL[4096:]))
    assert accumulator.value == EXPECTED


def test_the_package_imports_without_torch() -> None:
    code = "import sys, snapd.kv; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "torch" in vars(checksum_module)

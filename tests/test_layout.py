"""Planes and the names of what they hold."""

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapd.errors import InvalidRequest, LayoutMismatch
from snapd.layout import (
    LAYERS_MAX,
    NAME_CHARS_MAX,
    PAGE_SIZE_TOKENS_MAX,
    STRIDE_BYTES_MAX,
    Layout,
    Namespace,
    fingerprint,
    page_keys,
    plane_offset_bytes,
    plane_offsets_bytes,
    plane_sizes_bytes,
    snapshot_bytes,
    token_digest,
)

STRIDES = st.integers(1, 5_000)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    num_layers = draw(st.integers(1, 6))
    k_stride_bytes = draw(st.tuples(*[STRIDES] * num_layers))
    v_stride_bytes = draw(st.one_of(st.just(()), st.tuples(*[STRIDES] * num_layers)))
    return Layout(k_stride_bytes, v_stride_bytes)


def test_planes_are_k_of_all_layers_then_v_of_all_layers():
    layout = Layout(k_stride_bytes=(10, 20), v_stride_bytes=(30, 40))
    assert layout.plane_stride_bytes == (10, 20, 30, 40)
    assert (layout.num_layers, layout.num_planes, layout.token_bytes) == (2, 4, 100)
    assert plane_sizes_bytes(layout, 3) == (30, 60, 90, 120)
    assert snapshot_bytes(layout, 3) == 300
    assert plane_offsets_bytes(layout, 3, 64) == (0, 64, 128, 256, 384)


def test_a_fused_layout_has_one_plane_a_layer():
    layout = Layout(k_stride_bytes=(576, 576))
    assert (layout.num_layers, layout.num_planes, layout.token_bytes) == (2, 2, 1152)
    assert plane_offsets_bytes(layout, 1, 256) == (0, 768, 1536)


@given(layouts(), st.integers(0, 1_000), st.sampled_from([1, 256, 4096]))
def test_planes_are_aligned_apart_and_as_tight_as_alignment_allows(layout, num_tokens, alignment_bytes):
    offsets = plane_offsets_bytes(layout, num_tokens, alignment_bytes)
    sizes = plane_sizes_bytes(layout, num_tokens)
    assert len(offsets) == layout.num_planes + 1
    assert sum(sizes) == snapshot_bytes(layout, num_tokens)
    for plane_index, size_bytes in enumerate(sizes):
        start = plane_offset_bytes(layout, plane_index, num_tokens, alignment_bytes)
        assert start == offsets[plane_index]
        assert start % alignment_bytes == 0
        assert 0 <= offsets[plane_index + 1] - (start + size_bytes) < alignment_bytes


@pytest.mark.parametrize("plane_index", [-1, 4])
def test_a_plane_outside_the_layout_is_refused(plane_index):
    with pytest.raises(LayoutMismatch, match=f"plane {plane_index} is outside a layout of 4 planes"):
        plane_offset_bytes(Layout((1, 1), (1, 1)), plane_index, 1, 256)


@pytest.mark.parametrize(
    "layout",
    [
        Layout((1,)),
        Layout((STRIDE_BYTES_MAX,) * LAYERS_MAX, (1,) * LAYERS_MAX),
        Layout((1,), page_size_tokens=PAGE_SIZE_TOKENS_MAX),
        Layout((1,), dtype="d" * NAME_CHARS_MAX, namespace=Namespace(model="m" * NAME_CHARS_MAX)),
    ],
)
def test_layouts_up_to_the_bounds_are_taken(layout):
    layout.check()


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        (Layout(()), "k_stride_bytes has 0 layers"),
        (Layout((1,) * (LAYERS_MAX + 1)), f"k_stride_bytes has {LAYERS_MAX + 1} layers"),
        (Layout((1, 1), (1,)), "v_stride_bytes has 1 layers and k_stride_bytes 2"),
        (Layout((0,)), "stride is outside"),
        (Layout((1,), (-1,)), "stride is outside"),
        (Layout((STRIDE_BYTES_MAX + 1,)), "stride is outside"),
        (Layout((1,), page_size_tokens=0), "page_size_tokens 0 is outside"),
        (Layout((1,), page_size_tokens=PAGE_SIZE_TOKENS_MAX + 1), "page_size_tokens"),
        (Layout((1,), dtype="d" * (NAME_CHARS_MAX + 1)), "longer than"),
        *(
            (Layout((1,), namespace=Namespace(**{name: "x" * (NAME_CHARS_MAX + 1)})), "longer than")
            for name in Namespace.__struct_fields__
        ),
    ],
)
def test_layouts_outside_the_bounds_are_refused_by_field(layout, wanted):
    with pytest.raises(InvalidRequest, match=wanted):
        layout.check()


BASE = Layout((8, 8), (8, 8), namespace=Namespace("m", "l", "c", "w", "t"))


@pytest.mark.parametrize(
    "other",
    [
        Layout((8, 16), (8, 8), namespace=BASE.namespace),
        Layout((8, 8), (8, 16), namespace=BASE.namespace),
        Layout((8, 8, 8, 8), (), namespace=BASE.namespace),
        msgspec.structs.replace(BASE, dtype="float16"),
        msgspec.structs.replace(BASE, page_size_tokens=2),
        *(
            msgspec.structs.replace(
                BASE, namespace=msgspec.structs.replace(BASE.namespace, **{name: "other"})
            )
            for name in Namespace.__struct_fields__
        ),
        # The same text, divided otherwise.
        msgspec.structs.replace(BASE, namespace=Namespace("ml", "", "c", "w", "t")),
    ],
)
def test_any_difference_changes_the_fingerprint(other):
    assert fingerprint(other) != fingerprint(BASE)


def test_the_fingerprint_survives_the_wire_and_is_the_same_in_every_process():
    assert fingerprint(msgspec.msgpack.decode(msgspec.msgpack.encode(BASE), type=Layout)) == fingerprint(BASE)
    # Pinned: two versions of this package on P and D must name a layout alike.
    assert fingerprint(BASE) == "b198a54799c7afbd56ba32add4675f8e"


def test_the_token_digest_depends_on_every_token_and_its_place():
    digests = {
        token_digest(tokens) for tokens in ([], [0], [0, 0], [1, 2], [2, 1], [1, 2, 3], [-1], [1 << 40])
    }
    assert len(digests) == 8
    assert token_digest(iter([1, 2])) == token_digest((1, 2))


def test_token_digests_and_page_keys_are_the_same_in_every_process():
    assert token_digest(range(5)) == "60227ef9ab922de7bfba7adf77185db1"
    assert page_keys(range(5), 2) == ("83617169fca76d82820f513331495f53", "97365edcf1045a75408db6614f039c6d")
    raw = b"".join(token.to_bytes(8, "little") for token in range(2))
    assert page_keys((0, 1), 2) == (hashlib.blake2b(raw, digest_size=16, person=b"snapd-page").hexdigest(),)


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
def test_page_keys_are_equal_as_far_as_the_tokens_are(left, right, page_size_tokens):
    left_keys, right_keys = page_keys(left, page_size_tokens), page_keys(right, page_size_tokens)
    assert len(left_keys) == len(left) // page_size_tokens
    for index, (left_key, right_key) in enumerate(zip(left_keys, right_keys, strict=False)):
        end = (index + 1) * page_size_tokens
        assert (left_key == right_key) == (left[:end] == right[:end])

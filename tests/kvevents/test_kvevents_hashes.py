"""What pages are called, and how token ids and names go over the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapd.errors import InvalidRequest
from snapd.kvevents.hashes import (
    pack_block_hashes,
    pack_token_ids,
    page_key_hashes,
    sglang_block_hashes,
    signed,
    unpack_block_hashes,
    unpack_token_ids,
)
from snapd.layout import Layout, Namespace, fingerprint, page_keys

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_come_back_as_they_were(token_ids):
    packed = pack_token_ids(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert unpack_token_ids(packed) == token_ids


@given(st.lists(st.integers(INT64_MIN, INT64_MAX)))
def test_block_hashes_come_back_as_they_were(block_hashes):
    packed = pack_block_hashes(block_hashes)
    assert len(packed) == 8 * len(block_hashes)
    assert unpack_block_hashes(packed) == block_hashes


def test_numbers_go_over_the_wire_little_endian():
    assert pack_token_ids([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert pack_block_hashes([1, -2]) == b"\x01" + b"\0" * 7 + b"\xfe" + b"\xff" * 7


def test_unsigned_and_longer_hashes_become_the_signed_number_of_their_low_64_bits():
    assert unpack_block_hashes(pack_block_hashes([2**64 - 1, 2**63, (5 << 64) + 7])) == [-1, INT64_MIN, 7]
    assert [signed(number) for number in (INT64_MAX, 2**63, -1)] == [INT64_MAX, INT64_MIN, -1]


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_id_that_has_no_32_bits_is_refused(token_id):
    with pytest.raises(InvalidRequest):
        pack_token_ids([token_id])


def test_equal_prefixes_have_equal_names_and_others_have_not():
    name = fingerprint(Layout((64,), page_size_tokens=4))
    one = page_key_hashes(page_keys(range(16), 4), name)
    longer = page_key_hashes(page_keys(range(24), 4), name)
    other = page_key_hashes(page_keys([9, *range(1, 16)], 4), name)
    assert longer[:4] == one and len(set(longer)) == 6
    assert not set(one) & set(other)
    assert all(INT64_MIN <= number <= INT64_MAX for number in longer)


def test_equal_tokens_in_two_namespaces_have_two_names():
    keys = page_keys(range(16), 4)
    names = [
        fingerprint(Layout((64,), page_size_tokens=4, namespace=Namespace(lora=lora, cache_salt=salt)))
        for lora, salt in (("", ""), ("a", ""), ("b", ""), ("", "a"))
    ]
    hashes = [number for name in names for number in page_key_hashes(keys, name)]
    assert len(set(hashes)) == len(hashes)


def test_page_keys_that_are_no_hex_have_names_too():
    first, second = page_key_hashes(["no hex at all", "nor this"], "fingerprint")
    assert first != second
    assert page_key_hashes(["no hex at all"], "fingerprint") == [first]


def test_a_page_key_is_named_by_its_first_64_bits_xor_those_of_the_fingerprint():
    assert page_key_hashes(["00000000000000ff" + "5" * 16], "000000000000000f" + "7" * 16) == [0xF0]


def test_sglangs_names_are_those_that_its_workers_publish():
    """The numbers are SGLang's own, for 4 and 2 tokens a page; a last page that is not whole has none."""
    assert sglang_block_hashes("s", [1, 2, 3, 4], 4) == [-3488128144981237669]
    assert sglang_block_hashes("s", [1, 2, 3, 4, 5], 4) == [-3488128144981237669]
    assert sglang_block_hashes("s", [10, 20, 30, 40, 50, 60, 70, 80], 2) == [
        978178666101069530,
        -895308556211281782,
        -8033692805846017938,
        835415944263129316,
    ]

"""What a page is called in events: a signed 64-bit number that stands for all tokens up to its end.

The daemon makes it of the page key, with the layout's fingerprint mixed in, as equal tokens in two namespaces
are two pages. D may send numbers of its own instead: those of its engine, so that a router can hang a
snapshot below pages that P's engine published.
"""

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from snapd.errors import InvalidRequest
from snapd.kveventsconfig import BLOCK_HASH_BYTES, TOKEN_ID_BYTES

# From (session id, token ids, page size in tokens) to one number a whole page, from token 0 on.
BlockHasher: TypeAlias = Callable[[str, Sequence[int], int], Sequence[int]]

_BITS: Final = 64
_MASK: Final = (1 << _BITS) - 1
_HEX_DIGITS: Final = _BITS // 4
# Typecodes of four and of eight bytes.
_UINT32: Final = "I"
_INT64: Final = "q"
assert array(_UINT32).itemsize == TOKEN_ID_BYTES
assert array(_INT64).itemsize == BLOCK_HASH_BYTES


def signed(number: int) -> int:
    """Return the low 64 bits of *number*, read as a signed number."""
    low = number & _MASK
    return low - (1 << _BITS) if low >> (_BITS - 1) else low


def page_key_hashes(page_keys: Iterable[str], layout_fingerprint: str) -> list[int]:
    """Return what pages are called by their keys, in this layout and namespace."""
    mixed = _number(layout_fingerprint)
    return [signed(_number(key) ^ mixed) for key in page_keys]


def _number(digest: str) -> int:
    """Return the first 64 bits of a digest in hex; a digest of it when it is no such thing."""
    try:
        return int(digest[:_HEX_DIGITS], 16)
    except ValueError:
        return int.from_bytes(hashlib.blake2b(digest.encode(), digest_size=8).digest(), "big")


def sglang_block_hashes(session_id: str, token_ids: Sequence[int], page_size_tokens: int) -> list[int]:
    """Return what SGLang's radix tree calls the pages: no LoRA, no salt, no bigrams.

    SHA-256 over the digest of the page before and the page's token ids, four bytes each, little-endian;
    the first eight bytes of it are the number.
    """
    del session_id
    packed = pack_token_ids(token_ids)
    page_bytes = page_size_tokens * TOKEN_ID_BYTES
    digest = b""
    hashes: list[int] = []
    for start in range(0, len(packed) - page_bytes + 1, page_bytes):
        digest = hashlib.sha256(digest + packed[start : start + page_bytes]).digest()
        hashes.append(int.from_bytes(digest[:BLOCK_HASH_BYTES], "big", signed=True))
    return hashes


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    """Return token ids as they go over the wire: four bytes each, little-endian.

    Raises:
        InvalidRequest: one is negative or has more than 32 bits.
    """
    try:
        return _packed(array(_UINT32, token_ids))
    except OverflowError:
        raise InvalidRequest("a token id is outside 0 to 2^32 - 1") from None


def unpack_token_ids(packed: bytes | memoryview) -> list[int]:
    """Return what ``pack_token_ids`` packed."""
    return _unpacked(_UINT32, packed)


def pack_block_hashes(block_hashes: Iterable[int]) -> bytes:
    """Return block hashes as they go over the wire: eight bytes each, little-endian; longer ones are cut."""
    return _packed(array(_INT64, map(signed, block_hashes)))


def unpack_block_hashes(packed: bytes | memoryview) -> list[int]:
    """Return what ``pack_block_hashes`` packed, as signed numbers."""
    return _unpacked(_INT64, packed)


def _packed(numbers: "array[int]") -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _unpacked(typecode: str, packed: bytes | memoryview) -> list[int]:
    numbers = array(typecode)
    numbers.frombytes(packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()

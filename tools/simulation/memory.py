"""Bytes: what the KV of a history is, the arenas that hold it, checksums, and writes in pieces.

A history is a sequence of tokens; its KV is made of its name, so that any byte of another history, place,
plane, rank or layout differs. A plane's bytes of fewer tokens are a prefix of those of more.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from operator import mul
from typing import Final, NamedTuple

from snapd import layout as layouts
from snapd.core.events import PlaneChecksums
from snapd.layout import Layout
from snapd.wire import RankGrant

TOKENS_MAX: Final = 96
# Histories have tokens of their own; a later turn of one has those of the earlier, and more.
_TOKENS_APART: Final = 1_000
_MOD: Final = 1 << 64


def checksum(data: bytes) -> tuple[int, int]:
    """Return both sums of a plane, as ``snapd.kv.checksum.plane_checksum`` defines them."""
    words = array("Q")
    words.frombytes(data + bytes(-len(data) % 8))
    return sum(words) % _MOD, sum(map(mul, words, range(1, len(words) + 1))) % _MOD


class Content:
    """The true KV of all histories, made when it is first wanted."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, int, int], list[bytes]] = {}
        self._sums: dict[tuple[str, int, int, int, int], PlaneChecksums] = {}
        self._digests: dict[tuple[int, int], str] = {}
        self._keys: dict[tuple[int, int, int], tuple[str, ...]] = {}

    def planes(self, layout: Layout, name: str, history: int, rank: int, start: int, end: int) -> list[bytes]:
        """Return the bytes of tokens *start* to *end* of each plane, shape [num_planes]."""
        streams = self._streams.get((name, history, rank))
        if streams is None:
            key = f"{name}/{history}/{rank}/".encode()
            streams = [
                hashlib.shake_128(key + b"%d" % plane).digest(TOKENS_MAX * stride_bytes)
                for plane, stride_bytes in enumerate(layout.plane_stride_bytes)
            ]
            self._streams[(name, history, rank)] = streams
        return [
            stream[start * stride_bytes : end * stride_bytes]
            for stream, stride_bytes in zip(streams, layout.plane_stride_bytes, strict=True)
        ]

    def sums(
        self, layout: Layout, name: str, history: int, rank: int, start: int, end: int
    ) -> PlaneChecksums:
        """Return their checksums."""
        key = (name, history, rank, start, end)
        found = self._sums.get(key)
        if found is None:
            planes = self.planes(layout, name, history, rank, start, end)
            found = self._sums[key] = tuple(checksum(plane) for plane in planes)
        return found

    def token_digest(self, history: int, num_tokens: int) -> str:
        """Return the digest of a history's first tokens."""
        key = (history, num_tokens)
        if key not in self._digests:
            self._digests[key] = layouts.token_digest(tokens_of(history, num_tokens))
        return self._digests[key]

    def page_keys(self, history: int, num_tokens: int, page_size_tokens: int) -> tuple[str, ...]:
        """Return the page keys of a history's first tokens."""
        key = (history, num_tokens, page_size_tokens)
        if key not in self._keys:
            self._keys[key] = layouts.page_keys(tokens_of(history, num_tokens), page_size_tokens)
        return self._keys[key]


def tokens_of(history: int, num_tokens: int) -> range:
    """Return a history's first tokens."""
    return range(history * _TOKENS_APART, history * _TOKENS_APART + num_tokens)


class SimArena:
    """One rank's memory, as the daemon's service and whoever mapped it see it."""

    device: Final = "cpu"

    def __init__(self, rank: int, size_bytes: int) -> None:
        self.rank = rank
        self.size_bytes = size_bytes
        self.buffer = bytearray(size_bytes)

    def open_fd(self, *, writable: bool = False) -> int:
        """Refuse: nobody maps it by descriptor.

        Raises:
            OSError: always.
        """
        del writable
        raise OSError(24, "too many open files")


class Place(NamedTuple):
    """Where one plane lies in an arena."""

    offset_bytes: int
    size_bytes: int


def places_of(grant: RankGrant, num_tokens: int) -> list[Place]:
    """Return where each plane of a shard lies, shape [num_planes]."""
    offsets = (*grant.k_layer_offsets, *grant.v_layer_offsets)
    strides = (*grant.stride_k_bytes, *grant.stride_v_bytes)
    return [Place(offset, stride * num_tokens) for offset, stride in zip(offsets, strides, strict=True)]


class Piece(NamedTuple):
    """A part of a shard that is written at once.

    Attributes:
        handle: the attempt.
        rank: whose arena.
        writes: offset in the arena, and bytes.
    """

    handle: int
    rank: int
    writes: tuple[tuple[int, bytes], ...]


def cut_in_pieces(
    handle: int,
    rank: int,
    places: Sequence[Place],
    planes: Sequence[bytes],
    cut: Callable[[int], int],
    parts: int,
) -> list[Piece]:
    """Cut a shard into *parts* pieces: each has a part of some planes, so that none is whole by itself."""
    writes: list[tuple[int, bytes]] = []
    for place, plane in zip(places, planes, strict=True):
        at = cut(len(plane) + 1) if parts > 1 else len(plane)
        writes.append((place.offset_bytes, plane[:at]))
        if at < len(plane):
            writes.append((place.offset_bytes + at, plane[at:]))
    share = -(-len(writes) // parts)
    return [Piece(handle, rank, tuple(writes[i : i + share])) for i in range(0, len(writes), share)]

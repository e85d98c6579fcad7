"""The checksum of a plane: two 64-bit sums, the same on CPU and GPU.

The plane's bytes, zero-padded to a multiple of 8, are little-endian u64 words w_0 .. w_{n-1}:

    sum0 = sum of w_i              mod 2^64
    sum1 = sum of (i + 1) * w_i    mod 2^64

with i counted from the plane's first word. Both are sums, so parts may be added in any order;
sum1 tells positions apart, so that stale ranges and swapped rows show. It finds faults, not forgers.

Source: design, section 8.
"""

import sys
from collections.abc import Sequence
from typing import Final, Protocol

import torch

from snapd.errors import InvalidRequest
from snapd.units import MIB, ceil_div

PlaneChecksum = tuple[int, int]

WORD_BYTES: Final = 8
# One pass at a time: large enough that starting torch's threads is cheap beside it, small enough to stay
# in the cache between the copy and the two reductions.
CHUNK_BYTES: Final = 4 * MIB

# A chunk is summed as [rows, ROW_WORDS]: along rows and along columns, both plain vector adds. A multiply
# per word (a dot product with the positions) is four times as slow.
_ROW_WORDS: Final = 256
_CHUNK_WORDS: Final = CHUNK_BYTES // WORD_BYTES
# Sums are taken modulo this.
SUM_MODULUS: Final = 1 << 64
_CPU: Final = torch.device("cpu")
_POSITIONS: Final = torch.arange(
    max(_ROW_WORDS, _CHUNK_WORDS // _ROW_WORDS) + 1, dtype=torch.int64, device="cpu"
)
assert CHUNK_BYTES % (WORD_BYTES * _ROW_WORDS) == 0, "a full chunk has no ragged row"
assert sys.byteorder == "little", "words are little-endian"


def is_aligned(flat: torch.Tensor, word_bytes: int) -> bool:
    """Return whether *flat* (uint8) may be seen as words of *word_bytes*, by address and by offset."""
    return flat.data_ptr() % word_bytes == 0 and int(flat.storage_offset()) % word_bytes == 0


def words_view(flat: torch.Tensor) -> torch.Tensor | None:
    """Return *flat* (uint8, 1-D, contiguous, a multiple of 8 bytes) as int64 words, or None if unaligned."""
    return flat.view(torch.int64) if is_aligned(flat, WORD_BYTES) else None


def check_plane(plane: torch.Tensor, what: str = "plane", device: torch.device = _CPU) -> None:
    """Check that *plane* is a uint8, 1-D, contiguous tensor on *device*.

    Raises:
        InvalidRequest: it is not; the message starts with *what*.
    """
    if plane.dtype is not torch.uint8 or plane.dim() != 1 or not plane.is_contiguous():
        raise InvalidRequest(
            f"{what} is {plane.dtype} of shape {tuple(plane.shape)}; uint8, 1-D and contiguous is wanted"
        )
    if plane.device != device:
        raise InvalidRequest(f"{what} is on {plane.device}; {device} is wanted")


def _sum_words(words: torch.Tensor) -> PlaneChecksum:
    """Return both sums of at most ``_CHUNK_WORDS`` int64 words, the first at position 1; not reduced."""
    rows, tail_words = divmod(words.numel(), _ROW_WORDS)
    body_words = words.numel() - tail_words
    sum0 = sum1 = 0
    if rows:
        body = words[:body_words].view(rows, _ROW_WORDS)
        row_sums, column_sums = body.sum(1), body.sum(0)  # int64 wraps: arithmetic mod 2^64
        sum0 = int(row_sums.sum())
        sum1 = int(torch.dot(row_sums, _POSITIONS[:rows])) * _ROW_WORDS
        sum1 += int(torch.dot(column_sums, _POSITIONS[1 : _ROW_WORDS + 1]))
    if tail_words:
        tail = words[body_words:]
        tail_sum0 = int(tail.sum())
        sum0 += tail_sum0
        sum1 += int(torch.dot(tail, _POSITIONS[1 : tail_words + 1])) + body_words * tail_sum0
    return sum0, sum1


def _sum_bytes(chunk: torch.Tensor) -> PlaneChecksum:
    """Return both sums of at most ``CHUNK_BYTES`` bytes, of any length and alignment; not reduced."""
    words = None if chunk.numel() % WORD_BYTES else words_view(chunk)
    if words is None:
        words = torch.zeros(ceil_div(chunk.numel(), WORD_BYTES), dtype=torch.int64)
        words.view(torch.uint8)[: chunk.numel()].copy_(chunk)
    return _sum_words(words)


class PlaneSums(Protocol):
    """What becomes the pair of numbers that is compared: a ``ChecksumAccumulator``, or a keyed one."""

    def add(self, chunk: torch.Tensor, word_offset: int | None = None) -> None:
        """Add a chunk of the plane; see ``ChecksumAccumulator.add``."""
        ...

    @property
    def value(self) -> PlaneChecksum:
        """The pair, of what was added so far."""
        ...


class ChecksumAccumulator:
    """The checksum of a plane that arrives in chunks.

    Chunks may come in any order when each names its ``word_offset``. Holes and repeats are the caller's to
    avoid; ``size_bytes`` says how much was added.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._sum0 = 0
        self._sum1 = 0
        self._next_word = 0
        self._end_word = 0
        self._ragged_end_word: int | None = None

    def add(self, chunk: torch.Tensor, word_offset: int | None = None) -> None:
        """Add a chunk of the plane.

        Args:
            chunk: uint8, 1-D, contiguous, on the CPU. Its length is a multiple of 8 bytes, unless it is the
                plane's last.
            word_offset: the plane's word that the chunk starts with; None for the one after the chunk before.

        Raises:
            InvalidRequest: the tensor is of another kind, the offset is negative, or the chunk and one whose
                length is no multiple of 8 cannot both be of one plane. Nothing was added.
        """
        check_plane(chunk, "chunk")
        start_word = self._next_word if word_offset is None else word_offset
        end_word = start_word + ceil_div(chunk.numel(), WORD_BYTES)
        if start_word < 0:
            raise InvalidRequest(f"word_offset {start_word} is negative")
        if self._ragged_end_word is not None and end_word >= self._ragged_end_word:
            raise InvalidRequest("a chunk that ends inside a word must be the plane's last")
        if chunk.numel() % WORD_BYTES:
            if self._end_word >= end_word:
                raise InvalidRequest(
                    f"a chunk of {chunk.numel()} bytes ends inside a word and is not the last"
                )
            self._ragged_end_word = end_word
        for part_index, part in enumerate(torch.split(chunk, CHUNK_BYTES)):
            sum0, sum1 = _sum_bytes(part)
            # A part's own positions start at 1; this moves them to where the part lies in the plane.
            self._sum1 += sum1 + (start_word + part_index * _CHUNK_WORDS) * sum0
            self._sum0 += sum0
        self.size_bytes += chunk.numel()
        self._next_word = end_word
        self._end_word = max(self._end_word, end_word)

    @property
    def value(self) -> PlaneChecksum:
        """Both sums of what was added so far, each in [0, 2^64)."""
        return self._sum0 % SUM_MODULUS, self._sum1 % SUM_MODULUS


def plane_checksum(plane: torch.Tensor) -> PlaneChecksum:
    """Return (sum0, sum1) of a whole plane.

    Args:
        plane: uint8, 1-D, contiguous, on the CPU, of any length. It is only read.

    Raises:
        InvalidRequest: the tensor is of another kind.

    Source: design, section 8.
    """
    accumulator = ChecksumAccumulator()
    accumulator.add(plane)
    return accumulator.value


def checksums_equal(expected: Sequence[PlaneChecksum], actual: Sequence[PlaneChecksum]) -> list[int]:
    """Return the indexes of the planes that differ; none means equal.

    A plane that only one side has differs.
    """
    shared = min(len(expected), len(actual))
    differ = [index for index in range(shared) if tuple(expected[index]) != tuple(actual[index])]
    return differ + list(range(shared, max(len(expected), len(actual))))

"""Gather and scatter by torch's own operations, on any device: the fallback where Triton does not run.

Plane after plane, by way of a private buffer, which is what is summed: a slab may change meanwhile. Bytes
and sums are those of the other copies; only the time differs.

Source: design, section 8.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final

import torch

from snapd.kv.checksum import WORD_BYTES
from snapd.kv.devicejob import DeviceJob
from snapd.kv.pool import PlaneRows, bytes_as_words
from snapd.units import MIB, align_down, align_up

# Bounds the private buffer; large enough that starting a kernel is cheap beside it.
CHUNK_BYTES: Final = 64 * MIB
# The same for what is only summed.
SUMMED_BYTES: Final = 64 * MIB

# Words are summed as [rows, ROW_WORDS], see ``checksum``.
_ROW_WORDS: Final = 256
ROW_BYTES: Final = _ROW_WORDS * WORD_BYTES


def sum_words(words: torch.Tensor, first_word: int = 0) -> torch.Tensor:
    """Return both sums of each part, on the device, int64 of shape [num_parts, 2].

    Args:
        words: int64, shape [num_parts, num_words]; a multiple of ``ROW_BYTES`` each.
        first_word: of its plane, where each part starts.
    """
    rows = words.view(words.shape[0], -1, _ROW_WORDS)
    row_sums, column_sums = rows.sum(2), rows.sum(1)  # int64 wraps: arithmetic mod 2^64
    num_rows = rows.shape[1]
    positions = torch.arange(max(num_rows, _ROW_WORDS) + 1, dtype=torch.int64, device=words.device)
    sum0 = row_sums.sum(1)
    of_rows = (row_sums * positions[:num_rows]).sum(1) * _ROW_WORDS
    of_columns = (column_sums * positions[1 : _ROW_WORDS + 1]).sum(1)
    return torch.stack((sum0, of_rows + of_columns + sum0 * first_word), 1)


def sum_parts(parts: Sequence[torch.Tensor], first_word: int) -> torch.Tensor:
    """Return both sums of each part, on the device, int64 of shape [num_parts, 2].

    Args:
        parts: uint8, shape [size_bytes] each, of equal size, on one device. They are copied first.
        first_word: of its plane, where each part starts.
    """
    size_bytes = parts[0].numel()
    private = torch.stack(tuple(parts))
    if size_bytes % ROW_BYTES:
        private = torch.nn.functional.pad(private, (0, align_up(size_bytes, ROW_BYTES) - size_bytes))
    return sum_words(private.view(torch.int64), first_word)


@dataclasses.dataclass(frozen=True)
class Summing:
    """How a device sums what is not moved.

    Attributes:
        sum_parts: as ``torchcopy.sum_parts``.
        is_copying: parts are copied first, so no more than ``SUMMED_BYTES`` at once are asked for.
    """

    sum_parts: Callable[[Sequence[torch.Tensor], int], torch.Tensor]
    is_copying: bool


class _TorchJob(DeviceJob):
    """Moves plane after plane, each in chunks."""

    _index_dtype = torch.int64

    def _check_device(self, device: torch.device) -> None:
        """Every device will do."""

    def _prepare(self) -> None:
        """There is nothing to make."""

    def _move(self, slots: torch.Tensor, sums: torch.Tensor | None, start: int, stop: int) -> None:
        for index, place in enumerate(self._places):
            # Every chunk but the last ends at a whole word.
            granule = WORD_BYTES // math.gcd(WORD_BYTES, place.stride_bytes)
            step = max(granule, align_down(CHUNK_BYTES // place.stride_bytes, granule))
            for first in range(start, stop, step):
                last = min(first + step, stop)
                private = self._move_chunk(place, slots[first:last], self._planes[index], first)
                if sums is not None:
                    sums[index] += sum_words(private[None], first * place.stride_bytes // WORD_BYTES)[0]

    def _move_chunk(
        self, place: PlaneRows, slots: torch.Tensor, plane: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Move the tokens of *slots*, from token *first* on; return what was moved, with zeros after it."""
        size_bytes = slots.numel() * place.stride_bytes
        private = torch.empty(align_up(size_bytes, ROW_BYTES), dtype=torch.uint8, device=plane.device)
        private[size_bytes:] = 0
        shape = (slots.numel(), place.stride_bytes // place.word_bytes)
        rows = bytes_as_words(private.untyped_storage(), 0, shape, place.stride_bytes, place.word_bytes)
        start_bytes = first * place.stride_bytes
        part = plane[start_bytes : start_bytes + size_bytes]
        self._move_rows(place.words, slots, rows, private[:size_bytes], part)
        return private.view(torch.int64)

    @abc.abstractmethod
    def _move_rows(
        self,
        table: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        private: torch.Tensor,
        part: torch.Tensor,
    ) -> None:
        """Move between rows of *table* and *part* by way of *private*; *rows* is a view of it."""


class TorchGatherJob(_TorchJob):
    """Copies pool slots into planes."""

    def _move_rows(
        self,
        table: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        private: torch.Tensor,
        part: torch.Tensor,
    ) -> None:
        torch.index_select(table, 0, slots, out=rows)
        part.copy_(private)


class TorchScatterJob(_TorchJob):
    """Copies planes into pool slots; what is summed is what the pool got."""

    def _move_rows(
        self,
        table: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        private: torch.Tensor,
        part: torch.Tensor,
    ) -> None:
        private.copy_(part)
        table.index_copy_(0, slots, rows)


SUMMING: Final = Summing(sum_parts, is_copying=True)

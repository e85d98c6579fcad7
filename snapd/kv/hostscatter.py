"""P's copy out of an arena on the host, with what P holds already: moved in bounded steps, and summed.

Source: design, section 8.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from snapd.kv.checksum import CHUNK_BYTES, WORD_BYTES, ChecksumAccumulator, PlaneChecksum, plane_checksum
from snapd.kv.devicecopy import SlotCopy
from snapd.kv.pool import KVPool

_MOD: Final = 1 << 64


class HostScatter:
    """Scatters the tokens of a shard that are wanted, and sums all of them.

    Tokens before *skip_tokens* are in the pool already, and those from *stop_tokens* on are not wanted: they
    are summed where they lie and not moved.

    Attributes:
        is_launched: never: what a step has moved is moved.
        is_idle: always: nothing goes on between two steps.
        finished: None: there is no device whose event it could be.
    """

    is_launched: Final = False
    is_idle: Final = True
    finished: Final = None

    def __init__(
        self,
        make_job: Callable[..., SlotCopy],
        pool: KVPool,
        planes: Sequence[torch.Tensor],
        slots: torch.Tensor | None,
        skip_tokens: int,
        num_tokens: int,
        *,
        stop_tokens: int | None = None,
        verify: bool,
    ) -> None:
        self._verify = verify
        stop_tokens = num_tokens if stop_tokens is None else stop_tokens
        strides_bytes = [plane.numel() // num_tokens for plane in planes]
        cuts_bytes = [(width * skip_tokens, width * stop_tokens) for width in strides_bytes]
        self._whole: tuple[PlaneChecksum, ...] | None = None
        if any(_is_inside_word(plane, cuts) for plane, cuts in zip(planes, cuts_bytes, strict=True)):
            # A cut is inside a word: sum and scatter a private copy, so that what is summed is used.
            planes = [plane.clone() for plane in planes]
            self._whole = tuple(plane_checksum(plane) for plane in planes) if verify else ()
        self._still_sums = [ChecksumAccumulator() for _ in planes]
        still = verify and self._whole is None
        self._todo = _chunks(self._still_sums, planes if still else (), cuts_bytes)
        self._next_still = next(self._todo, None)
        self._skips_bytes = [skip_bytes for skip_bytes, _ in cuts_bytes]
        moved = [plane[skip:stop] for plane, (skip, stop) in zip(planes, cuts_bytes, strict=True)]
        self._job = None if slots is None else make_job(pool, slots, moved, checksum=verify)

    def step(self, max_bytes: int) -> bool:
        """Sum or move some bytes, at least one piece; return whether all were."""
        done_bytes = 0
        while self._next_still is not None:
            if done_bytes >= max_bytes:
                return False
            sums, chunk, first_word = self._next_still
            sums.add(chunk, first_word)
            done_bytes += chunk.numel()
            self._next_still = next(self._todo, None)
        return self._job is None or self._job.step(max_bytes - done_bytes)

    def checksums(self) -> tuple[PlaneChecksum, ...]:
        """Return the checksum of every plane, shape [num_planes]."""
        if self._whole is not None:
            return self._whole
        moved = self._job.checksums if self._job is not None else ((0, 0),) * len(self._still_sums)
        sums: list[PlaneChecksum] = []
        for still, part, skip_bytes in zip(self._still_sums, moved, self._skips_bytes, strict=True):
            still0, still1 = still.value
            # The positions of what was moved start at 1; this puts them where they are in the plane.
            moved1 = part[1] + skip_bytes // WORD_BYTES * part[0]
            sums.append(((still0 + part[0]) % _MOD, (still1 + moved1) % _MOD))
        return tuple(sums)


def _is_inside_word(plane: torch.Tensor, cuts_bytes: Sequence[int]) -> bool:
    """Return whether a cut that is not the plane's end divides a checksum word."""
    return any(cut_bytes % WORD_BYTES for cut_bytes in cuts_bytes if cut_bytes != plane.numel())


def _chunks(
    sums: Sequence[ChecksumAccumulator],
    planes: Sequence[torch.Tensor],
    cuts_bytes: Sequence[tuple[int, int]],
) -> Iterator[tuple[ChecksumAccumulator, torch.Tensor, int]]:
    """Yield what lies outside the cuts of each plane, in order, and the word that it starts with."""
    for accumulator, plane, (skip_bytes, stop_bytes) in zip(sums, planes, cuts_bytes, strict=False):
        for start_bytes, part in ((0, plane[:skip_bytes]), (stop_bytes, plane[stop_bytes:])):
            at_bytes = start_bytes
            for chunk in torch.split(part, CHUNK_BYTES) if part.numel() else ():
                yield accumulator, chunk, at_bytes // WORD_BYTES
                at_bytes += chunk.numel()

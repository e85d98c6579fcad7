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
    """Scatters the tokens of a shard that are missing, and sums all of them.

    Tokens before *skip_tokens* are in the pool already: they are summed where they lie and not moved.

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
        verify: bool,
    ) -> None:
        self._verify = verify
        strides_bytes = [plane.numel() // num_tokens for plane in planes]
        skips_bytes = [width * skip_tokens for width in strides_bytes]
        self._whole: tuple[PlaneChecksum, ...] | None = None
        if any(skip_bytes % WORD_BYTES for skip_bytes in skips_bytes):
            # The cut is inside a word: sum and scatter a private copy, so that what is summed is used.
            planes = [plane.clone() for plane in planes]
            self._whole = tuple(plane_checksum(plane) for plane in planes) if verify else ()
        self._head_sums = [ChecksumAccumulator() for _ in planes]
        heads = [plane[:skip] for plane, skip in zip(planes, skips_bytes, strict=True)]
        self._todo = _chunks(self._head_sums, heads if verify and self._whole is None else ())
        self._next_head = next(self._todo, None)
        self._skips_bytes = skips_bytes
        tails = [plane[skip:] for plane, skip in zip(planes, skips_bytes, strict=True)]
        self._job = None if slots is None else make_job(pool, slots, tails, checksum=verify)

    def step(self, max_bytes: int) -> bool:
        """Sum or move some bytes, at least one piece; return whether all were."""
        done_bytes = 0
        while self._next_head is not None:
            if done_bytes >= max_bytes:
                return False
            sums, chunk = self._next_head
            sums.add(chunk)
            done_bytes += chunk.numel()
            self._next_head = next(self._todo, None)
        return self._job is None or self._job.step(max_bytes - done_bytes)

    def checksums(self) -> tuple[PlaneChecksum, ...]:
        """Return the checksum of every plane, shape [num_planes]."""
        if self._whole is not None:
            return self._whole
        tails = self._job.checksums if self._job is not None else ((0, 0),) * len(self._head_sums)
        sums: list[PlaneChecksum] = []
        for head, tail, skip_bytes in zip(self._head_sums, tails, self._skips_bytes, strict=True):
            head0, head1 = head.value
            # The tail's positions start at 1; this moves them behind the head's.
            moved1 = tail[1] + skip_bytes // WORD_BYTES * tail[0]
            sums.append(((head0 + tail[0]) % _MOD, (head1 + moved1) % _MOD))
        return tuple(sums)


def _chunks(
    sums: Sequence[ChecksumAccumulator], planes: Sequence[torch.Tensor]
) -> Iterator[tuple[ChecksumAccumulator, torch.Tensor]]:
    for accumulator, plane in zip(sums, planes, strict=False):
        if plane.numel():
            for chunk in torch.split(plane, CHUNK_BYTES):
                yield accumulator, chunk

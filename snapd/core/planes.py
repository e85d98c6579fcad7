"""What the planes of one layout take and where they lie, worked out once for all its snapshots.

A layout has a hundred planes and more, nearly always of one width: then one sum stands for all of them.

Source: design, section 4.
"""

from itertools import accumulate
from typing import Final

from snapd.core.extent import Extent
from snapd.layout import Layout
from snapd.units import align_up


class Planes:
    """The planes of a layout.

    Attributes:
        even_bytes: bytes of a token in each plane, if every plane has the same; else 0.
        layout: of which they are.
        num_planes: K of all layers, then V of all layers.
        token_bytes: payload bytes of one token over all of them.
    """

    __slots__ = ("_stride_bytes", "even_bytes", "layout", "num_planes", "token_bytes")

    def __init__(self, layout: Layout) -> None:
        self.layout: Final = layout
        self._stride_bytes: Final = layout.plane_stride_bytes
        self.num_planes: Final = len(self._stride_bytes)
        self.token_bytes: Final = sum(self._stride_bytes)
        is_even = len(set(self._stride_bytes)) == 1
        self.even_bytes: Final = self._stride_bytes[0] if is_even else 0

    def __repr__(self) -> str:
        return f"Planes({self.layout!r})"

    def sizes_bytes(self, num_tokens: int) -> tuple[int, ...]:
        """Return the payload bytes of each plane, shape [num_planes]."""
        if self.even_bytes:
            return (self.even_bytes * num_tokens,) * self.num_planes
        return tuple([stride_bytes * num_tokens for stride_bytes in self._stride_bytes])

    def offsets_bytes(
        self, num_tokens: int, extents: tuple[Extent, ...], alignment_bytes: int
    ) -> tuple[int, ...]:
        """Return where each plane starts, in bytes from the arena's first byte, shape [num_planes].

        *extents* holds one contiguous extent, or one a plane. In a contiguous one the planes lie as
        ``layout.plane_offsets_bytes`` says.
        """
        if len(extents) != 1:
            return tuple([extent.offset_bytes for extent in extents])
        start = extents[0].offset_bytes
        if self.even_bytes:
            size_bytes = align_up(self.even_bytes * num_tokens, alignment_bytes)
            return tuple(range(start, start + self.num_planes * size_bytes, size_bytes))
        sizes_bytes = [align_up(stride * num_tokens, alignment_bytes) for stride in self._stride_bytes[:-1]]
        return tuple(accumulate(sizes_bytes, initial=start))

"""A piece of an arena."""

import msgspec


class Extent(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """A contiguous byte range of an arena; written as ``[offset_bytes, size_bytes]``."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        """The first byte after the extent, as an offset in the arena."""
        return self.offset_bytes + self.size_bytes

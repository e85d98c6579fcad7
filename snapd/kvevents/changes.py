"""What the observer tells the publisher: a change, kept small until it is made into events.

A change becomes one or more events of bounded size; each goes out as a batch of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from snapd.kvevents.events import (
    BLOCKS_MAX,
    TOKEN_IDS_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
)
from snapd.kvevents.hashes import unpack_token_ids
from snapd.kveventsconfig import BLOCK_HASH_BYTES, TOKEN_ID_BYTES

# What a change takes beside its pages, about.
CHANGE_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Stored:
    """Neighbouring pages that are new.

    Attributes:
        hashes: one a page.
        parent: the page before the first; None: there is none.
        token_ids: packed, of all these pages; empty: not known.
    """

    hashes: list[int]
    parent: int | None
    token_ids: bytes
    block_size: int
    medium: str
    lora_name: str | None
    cache_salt: str | None
    session_id: str

    @property
    def num_bytes(self) -> int:
        """What it takes while it waits, about."""
        return CHANGE_BYTES + len(self.hashes) * BLOCK_HASH_BYTES + len(self.token_ids)

    def events(self) -> Iterator[Event]:
        """Yield its events, each the continuation of the one before."""
        step = max(1, min(BLOCKS_MAX, TOKEN_IDS_MAX // self.block_size))
        page_bytes = self.block_size * TOKEN_ID_BYTES
        parent = self.parent
        for start in range(0, len(self.hashes), step):
            hashes = self.hashes[start : start + step]
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=unpack_token_ids(self.token_ids[start * page_bytes : (start + step) * page_bytes]),
                block_size=self.block_size,
                lora_id=None,
                medium=self.medium,
                lora_name=self.lora_name,
                session_id=self.session_id,
                cache_salt=self.cache_salt,
            )
            parent = hashes[-1]


@dataclass(frozen=True, slots=True)
class Removed:
    """Pages that nobody holds any more."""

    hashes: list[int]
    medium: str

    @property
    def num_bytes(self) -> int:
        """What it takes while it waits, about."""
        return CHANGE_BYTES + len(self.hashes) * BLOCK_HASH_BYTES

    def events(self) -> Iterator[Event]:
        """Yield its events."""
        for start in range(0, len(self.hashes), BLOCKS_MAX):
            yield BlockRemoved(block_hashes=self.hashes[start : start + BLOCKS_MAX], medium=self.medium)


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is there any more."""

    num_bytes: int = CHANGE_BYTES

    def events(self) -> Iterator[Event]:
        """Yield its event."""
        yield AllBlocksCleared()


Change: TypeAlias = Stored | Removed | Cleared

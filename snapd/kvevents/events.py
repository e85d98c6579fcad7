"""The wire form of KV events: that of vLLM and SGLang, as both have it.

A message has three frames: topic, sequence number (8 bytes, big-endian), and a msgpack array
``[ts, events, data_parallel_rank]``. An event is a msgpack map whose ``type`` names it; the fields below are
those that both engines know, under the names and in the order of vLLM's. What both leave out when it is
unset is left out here too, and what either demands is always there.
"""

from typing import Final, TypeAlias

import msgspec

SEQUENCE_BYTES: Final = 8
# What follows the last batch of a replay, in place of a sequence number.
END_OF_REPLAY: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
# One event holds at most this many, so that neither a message nor the making of one is large.
BLOCKS_MAX: Final = 2_048
TOKEN_IDS_MAX: Final = 16_384


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, gc=False):
    pass


class BlockStored(_Event, frozen=True, kw_only=True):
    """Pages that can be had from here on.

    Attributes:
        block_hashes: signed 64-bit numbers, one a page, in order; each stands for all tokens up to its end.
        parent_block_hash: of the page before the first; None: there is none.
        token_ids: of the pages, ``block_size`` each, in order; empty: nobody told them.
        block_size: tokens in a page.
        lora_id: always None.
        medium: which of the worker's memories.
        lora_name: the adapter; None: the model itself.
        cache_salt: SGLang's name for it; vLLM's classes do not know it.
        session_id: whose snapshot it was; others may share the pages.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    session_id: str | None = None
    cache_salt: str | None = None


class BlockRemoved(_Event, frozen=True, kw_only=True):
    """Pages that are gone from *medium*."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(_Event, frozen=True, kw_only=True):
    """Nothing is there any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one message holds.

    Attributes:
        ts: unix seconds.
        data_parallel_rank: of P.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(EventBatch)


def encode_batch(batch: EventBatch) -> bytes:
    """Return the third frame of a message."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """Return what the third frame holds.

    Raises:
        msgspec.MsgspecError: it is none that snapd wrote.
    """
    return _decoder.decode(payload)


def sequence_frame(sequence: int) -> bytes:
    """Return the second frame of a message."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")

"""A D that does not hear: it writes into its grant for ever, other bytes each time."""

import ctypes
import itertools
import mmap
import sys
import time

from snapd.client import Client
from snapd.layout import token_digest
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import Write
from snapd.transport.mooncake_engines import MooncakeEngines
from snapd.transport.mooncake_writer import MooncakeWriter
from snapd.units import KIB

PIECE_BYTES = 64 * KIB
WORD_BYTES = 8
PATIENCE_S = 30.0
POLL_S = 0.000_5


def main(socket_path: str, session_id: str, num_tokens: int, layout_fingerprint: str) -> None:
    """Every piece holds the number of the round in which it was written, over and over."""
    client = Client(socket_path, timeout_s=PATIENCE_S)
    hello = client.connect()
    grant = client.prepare_receive(
        session_id,
        num_tokens,
        layout_fingerprint,
        token_digest=token_digest(range(num_tokens)),
        is_only_writer=True,
    )
    client.transfer_started(grant.slab_handle, epoch=grant.epoch)
    (arena,) = hello.arenas
    writer = MooncakeWriter(
        MooncakeEngines.shared(MooncakeConfig()),
        hello.transport_address,
        hello.epoch,
        arena.base_ptr,
        arena.size_bytes,
    )
    memory = mmap.mmap(-1, PIECE_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    writer.register_source(address, PIECE_BYTES)
    writes = [
        Write(address, arena.base_ptr + offset_bytes, min(PIECE_BYTES, extent.end_bytes - offset_bytes))
        for extent in grant.ranks[0].extents
        for offset_bytes in range(extent.offset_bytes, extent.end_bytes, PIECE_BYTES)
    ]
    print(grant.slab_handle, flush=True)
    for number in itertools.count(1):
        memory[:] = number.to_bytes(WORD_BYTES, "little") * (PIECE_BYTES // WORD_BYTES)
        ticket = writer.submit(writes)
        while not writer.poll(ticket).is_final:
            time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])

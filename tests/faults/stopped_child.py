"""A D that writes all it can at a time, so that it can be stopped in the middle of it.

It says its handle, waits for a line, pushes, says the result, and then that nothing of it is under way.
"""

import sys
import threading

import msgspec
from kv_cases import PATIENCE_S, make_pool, random_slots
from late_cases import WIDE

from snapd.client import Client
from snapd.kv.push import Pusher, PushSettings
from snapd.units import MIB

NUM_SLOTS = 1_024
PIECE_BYTES = MIB
AT_ONCE_BYTES = 1 << 40
_POLL_S = 0.005


def main(socket_path: str, session_id: str, num_tokens: int) -> None:
    with Client(socket_path, timeout_s=PATIENCE_S) as client:
        settings = PushSettings(
            piece_bytes=PIECE_BYTES, ring_bytes=8 * PIECE_BYTES, in_flight_bytes_max=8 * PIECE_BYTES
        )
        pusher = Pusher(client, {0: make_pool(WIDE, NUM_SLOTS, seed=42)}, settings=settings)
        slots = random_slots(WIDE, NUM_SLOTS, num_tokens, seed=7)
        job = pusher.start(session_id, range(num_tokens), slots)
        assert job.grant is not None, job.result
        print(job.grant.slab_handle, flush=True)
        sys.stdin.readline()
        while not job.step(AT_ONCE_BYTES):
            job.wait()
        print(msgspec.json.encode(job.result).decode(), flush=True)
        while pusher.lingering:
            pusher.poll()
            threading.Event().wait(_POLL_S)
        print("over", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

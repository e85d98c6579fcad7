"""D in a process of its own: pushes a few steps, says so, and goes on when it is told to."""

import sys

import msgspec
from kv_cases import MHA, PATIENCE_S, make_pool, random_slots, step_times

from snapd.client import Client
from snapd.kv.push import Pusher

NUM_SLOTS = 512
SEED = 1


def main(socket_path: str, session_id: str, num_tokens: int, steps: int) -> None:
    with Client(socket_path, timeout_s=PATIENCE_S) as client:
        pusher = Pusher(client, {0: make_pool(MHA, NUM_SLOTS, SEED)})
        slots = random_slots(MHA, NUM_SLOTS, num_tokens, seed=7)
        job = pusher.start(session_id, range(num_tokens), slots)
        step_times(job, steps)
        assert job.grant is not None
        print(job.grant.slab_handle, flush=True)
        if sys.stdin.readline():
            while not job.step(1):
                pass
            print(msgspec.json.encode(job.result).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

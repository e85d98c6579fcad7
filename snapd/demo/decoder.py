"""A D worker: makes KV in its pools, one a P rank, and pushes it."""

import random
import time

import torch

from snapd.client import Client
from snapd.demo import messages as m
from snapd.demo.memory import NAMESPACE, ROW_WORDS, PoolMemory, slots_tensor
from snapd.demo.plan import NUM_PLANES, STRIDE_BYTES
from snapd.errors import Reason
from snapd.kv.push import Pusher
from snapd.units import MIB, MS_PER_S

_STEP_BYTES = 8 * MIB
_INT64_MIN = -(1 << 63)


class Decoder:
    """Runs one D worker's commands, one after another."""

    def __init__(self, setup: m.Setup, channel: m.WorkerChannel) -> None:
        self._setup = setup
        self._channel = channel
        self._memory = [
            PoolMemory(fd, setup.decoder_slots, writable=True) for fd in setup.decoder_fds
        ]  # by rank
        self._client = Client(setup.socket_path, name=f"demo D {setup.index}")
        pools = {rank: memory.pool() for rank, memory in enumerate(self._memory)}
        self._pusher = Pusher(self._client, pools, NAMESPACE)
        self._pushes = 0

    def run(self) -> None:
        """Do what is asked until told to stop.

        Raises:
            EOFError: the orchestrator has ended.
        """
        self._client.connect()
        self._channel.send(m.Started())
        while True:
            match self._channel.receive(None):
                case m.Decode() as command:
                    self._channel.send(m.Decoded(id=command.id, num_bytes=self._decode(command)))
                case m.PushTurn() as command:
                    self._channel.send(self._push(command))
                case m.Stop():
                    self._pusher.close()
                    self._client.close()
                    return

    def _decode(self, command: m.Decode) -> int:
        slots = slots_tensor(command.slots)
        num_bytes = 0
        for segment in command.segments:
            wanted = slots[segment.start : segment.stop]
            for rank, memory in enumerate(self._memory):
                words = random_words(self._setup.seed, command.session, segment, rank)
                for plane, values in zip(memory.planes, words, strict=True):
                    plane.index_copy_(0, wanted, values)
                num_bytes += words.numel() * words.element_size()
        return num_bytes

    def _push(self, command: m.PushTurn) -> m.PushEnded:
        slots = slots_tensor(command.slots)
        refusals = 0
        while True:
            job = self._pusher.start(command.session_id, command.token_ids, slots)
            if job.grant is not None:
                break
            if not job.result.retry_after_ms or refusals == command.prepare_retries:
                return self._ended(command, refusals + 1, job.result.reason, job.result.detail)
            refusals += 1
            time.sleep(job.result.retry_after_ms / MS_PER_S)
        total_bytes = job.grant.num_tokens * STRIDE_BYTES * NUM_PLANES * len(self._memory)
        while not job.step(1 if command.pace_ms else _STEP_BYTES):
            if command.pace_ms:
                self._channel.send(
                    m.PushMoved(
                        session=command.session,
                        slab_handle=job.grant.slab_handle,
                        bytes_done=job.bytes_done,
                        bytes_total=total_bytes,
                    )
                )
                time.sleep(command.pace_ms / MS_PER_S)
        result = job.result
        self._pushes += 1
        if result.ok and self._pushes == self._setup.flip_push and self._setup.index == 0:
            self._flip_byte(result.slab_handle)
        return m.PushEnded(
            id=command.id,
            ok=result.ok,
            reason=result.reason,
            detail=result.detail,
            slab_handle=result.slab_handle,
            token_start=result.token_start,
            num_tokens=result.num_tokens,
            num_bytes=result.bytes,
            refusals=refusals,
        )

    @staticmethod
    def _ended(command: m.PushTurn, refusals: int, reason: Reason, detail: str) -> m.PushEnded:
        return m.PushEnded(id=command.id, ok=False, reason=reason, detail=detail, refusals=refusals)

    def _flip_byte(self, slab_handle: int) -> None:
        """Write into a slab that was committed, as a late write would."""
        shard = self._client.get(slab_handle).session.shards[0]
        with self._client.map_buffer(shard.rank, writable=True) as arena:
            arena.buffer[shard.extents[0].offset_bytes + 5] ^= 0xFF


def random_words(seed: int, session: int, segment: m.Segment, rank: int) -> torch.Tensor:
    """Return the KV of a segment: random int64, shape [NUM_PLANES, tokens, ROW_WORDS]; always the same."""
    generator = torch.Generator()
    rng = random.Random(f"kv/{seed}/{session}/{segment.turn}/{rank}")  # noqa: S311 - not for secrets
    generator.manual_seed(rng.getrandbits(63))
    words = torch.empty((NUM_PLANES, segment.stop - segment.start, ROW_WORDS), dtype=torch.int64)
    return words.random_(_INT64_MIN, None, generator=generator)

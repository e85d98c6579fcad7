"""A D worker: makes KV in its pools, one a P rank, and pushes it."""

import random
import time
from collections import deque
from dataclasses import dataclass

import torch

from snapd.client import Client
from snapd.demo import messages as m
from snapd.demo.memory import NAMESPACE, ROW_WORDS, PoolMemory, slots_tensor
from snapd.demo.plan import NUM_PLANES, TOKEN_BYTES
from snapd.kv.push import Pusher, PushJob, PushResult, PushSettings
from snapd.units import MIB, MS_PER_S

_STEP_BYTES = 8 * MIB
# Pieces of staging memory, and how many are under way at a time.
_RING_PIECES = 16
_IN_FLIGHT_PIECES = 8
_LINGER_POLL_S = 0.005
_INT64_MIN = -(1 << 63)


@dataclass(slots=True)
class _Push:
    """A push that was asked for; nothing of it is done before *not_before_s*."""

    command: m.PushTurn
    job: PushJob | None = None
    refusals: int = 0
    not_before_s: float = 0.0


class Decoder:
    """A scheduler loop: commands, and a step of the push whose turn it is; nothing waits for the daemon.

    Pushes are done one after another, in the order in which they were asked for.
    """

    def __init__(self, setup: m.Setup, channel: m.WorkerChannel) -> None:
        self._setup = setup
        self._channel = channel
        self._memory = [
            PoolMemory(fd, setup.decoder_slots, writable=True) for fd in setup.decoder_fds
        ]  # by rank
        self._client = Client(setup.socket_path, name=f"demo D {setup.index}")
        pools = {rank: memory.pool() for rank, memory in enumerate(self._memory)}
        settings = PushSettings(
            piece_bytes=setup.piece_bytes,
            ring_bytes=_RING_PIECES * setup.piece_bytes,
            in_flight_bytes_max=_IN_FLIGHT_PIECES * setup.piece_bytes,
        )
        self._pusher = Pusher(self._client, pools, NAMESPACE, settings=settings)
        self._pushes: deque[_Push] = deque()
        self._pushes_ok = 0

    def run(self) -> None:
        """Do what is asked until told to stop.

        Raises:
            EOFError: the orchestrator has ended.
        """
        self._client.connect()
        self._channel.send(m.Started())
        while True:
            match self._channel.receive(self._idle_s()):
                case m.Decode() as command:
                    self._channel.send(m.Decoded(id=command.id, num_bytes=self._decode(command)))
                case m.PushTurn() as command:
                    self._pushes.append(_Push(command))
                case m.Stop():
                    self._stop()
                    return
            self._step()

    def _idle_s(self) -> float | None:
        """Return how long to wait for a command; None: for ever."""
        if self._pushes:
            return max(0.0, self._pushes[0].not_before_s - time.monotonic())
        # What an attempt that has ended was writing is looked after until it is over.
        return _LINGER_POLL_S if self._pusher.lingering else None

    def _stop(self) -> None:
        for push in self._pushes:
            if push.job is not None:
                push.job.cancel()
        self._pusher.close()
        self._client.close()

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

    # --- pushes --------------------------------------------------------------------------------

    def _step(self) -> None:
        """Do a little of the push whose turn it is, and answer when it is over."""
        if not self._pushes:
            self._pusher.poll()
            return
        push = self._pushes[0]
        if time.monotonic() < push.not_before_s:
            return
        if push.job is None:
            self._begin(push)
            return
        command, job = push.command, push.job
        if job.step(1 if command.pace_ms else _STEP_BYTES):
            self._finish(push, job.result)
        elif command.pace_ms:
            assert job.grant is not None
            self._channel.send(
                m.PushMoved(
                    session=command.session,
                    slab_handle=job.grant.slab_handle,
                    bytes_done=job.bytes_done,
                    bytes_total=job.grant.num_tokens * TOKEN_BYTES * len(self._memory),
                )
            )
            push.not_before_s = time.monotonic() + command.pace_ms / MS_PER_S
        else:
            job.wait()

    def _begin(self, push: _Push) -> None:
        """Ask for a slab; if there is none now, ask again when the daemon says."""
        command = push.command
        job = self._pusher.start(command.session_id, command.token_ids, slots_tensor(command.slots))
        if job.grant is not None:
            push.job = job
            return
        is_over = not job.result.retry_after_ms or push.refusals == command.prepare_retries
        push.refusals += 1
        if is_over:
            self._finish(push, job.result)
        push.not_before_s = time.monotonic() + job.result.retry_after_ms / MS_PER_S

    def _finish(self, push: _Push, result: PushResult) -> None:
        self._pushes.popleft()
        self._pushes_ok += result.ok
        if result.ok and self._pushes_ok == self._setup.flip_push and self._setup.index == 0:
            self._flip_byte(result.slab_handle)
        self._channel.send(
            m.PushEnded(
                id=push.command.id,
                ok=result.ok,
                reason=result.reason,
                detail=result.detail,
                slab_handle=result.slab_handle,
                token_start=result.token_start,
                num_tokens=result.num_tokens,
                num_bytes=result.bytes,
                refusals=push.refusals,
                retried_pieces=result.retried_pieces,
                drained=result.drained,
            )
        )

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

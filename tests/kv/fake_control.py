"""A daemon that a push speaks to, in this process: arenas of bytes, grants, and all that was said to it."""

from collections.abc import Sequence
from typing import Any

import torch

from snapd.calls import Grant
from snapd.core.events import State
from snapd.core.slab import Extent
from snapd.errors import Reason, SnapdError, StaleHandle
from snapd.kv.control import Commitment, Notify, PrepareRequest, RankCommit
from snapd.kv.pool import KVPool
from snapd.layout import Layout, Namespace, plane_offsets_bytes
from snapd.units import align_up
from snapd.wire import ArenaOffer, HelloRep, RankGrant, SessionEnded
from tests.transport.fake_writer import FakeArena, FakeWriter

ALIGNMENT_BYTES = 256
Said = tuple[Any, ...]


class _Answered:
    def __init__(self, control: "FakeControl") -> None:
        self._control = control
        self.is_forgotten = False

    def poll(self) -> bool:
        self._control.polls_left -= 1
        if self._control.refuse_commit is not None:
            raise self._control.refuse_commit
        return self._control.polls_left < 0

    def wait(self, timeout_s: float) -> None:
        self._control.said.append(("waited",))

    def forget(self) -> None:
        self.is_forgotten = True


class FakeControl:
    """A ``PushControl`` that records.

    Attributes:
        said: what was said, in order.
        ends: how attempts ended that is still to be told.
        commits: by handle and rank.
        polls_left: how often a commit is polled before it is answered.
    """

    is_notifying = False

    def __init__(self, arena_bytes: int = 1 << 20, num_ranks: int = 1, *, is_scattered: bool = False) -> None:
        self.arenas = {rank: FakeArena(arena_bytes, (rank + 1) << 40) for rank in range(num_ranks)}
        self.is_scattered = is_scattered
        self.epoch = "one"
        self.connections = 0
        self.said: list[Said] = []
        self.ends: list[SessionEnded] = []
        self.commits: dict[tuple[int, int], RankCommit] = {}
        self.commitments: list[_Answered] = []
        self.refuse_commit: SnapdError | None = None
        self.refuse_start: SnapdError | None = None
        self.polls_left = 0
        self.lifetime: int | None = None
        self.last_handle = 0
        self._next_offset = ALIGNMENT_BYTES
        self.layout: Layout | None = None

    def said_kinds(self) -> list[str]:
        return [said[0] for said in self.said]

    def about(self, *kinds: str) -> list[Said]:
        return [said for said in self.said if said[0] in kinds]

    def end(self, handle: int, reason: Reason) -> None:
        self.ends.append(
            SessionEnded(
                slab_handle=handle, session_id="s", state=State.ABORTED, reason=reason, drain_wanted=True
            )
        )

    # --- the contract

    def hello(self) -> HelloRep:
        return HelloRep(
            id=0,
            protocol=1,
            epoch=self.epoch,
            version="0",
            arenas=tuple(
                ArenaOffer(rank=rank, device="cpu", size_bytes=len(arena.memory), base_ptr=arena.base_ptr)
                for rank, arena in self.arenas.items()
            ),
            transport="mooncake",
            transport_address="",
            alignment_bytes=ALIGNMENT_BYTES,
            frame_bytes_max=1 << 20,
            requests_in_flight_max=8,
            page_keys_max=8,
            lease_ms=1_000,
        )

    def prepare(self, request: PrepareRequest) -> Grant:
        self.said.append(("prepare", request.session_id))
        return self.grant(request.num_tokens, request.token_start)

    def grant(self, num_tokens: int, token_start: int = 0) -> Grant:
        assert self.layout is not None
        self.last_handle += 1
        layout = self.layout
        strides = layout.plane_stride_bytes
        if self.is_scattered:
            offsets, extents = [], []
            for stride in strides:
                size_bytes = align_up(stride * num_tokens, ALIGNMENT_BYTES)
                offsets.append(self._next_offset)
                extents.append(Extent(self._next_offset, size_bytes))
                self._next_offset += size_bytes + ALIGNMENT_BYTES
        else:
            *relative, size_bytes = plane_offsets_bytes(layout, num_tokens, ALIGNMENT_BYTES)
            offsets = [self._next_offset + offset for offset in relative]
            extents = [Extent(self._next_offset, size_bytes)]
            self._next_offset += size_bytes
        return Grant(
            slab_handle=self.last_handle,
            epoch=self.epoch,
            session_id="s",
            num_tokens=num_tokens,
            token_start=token_start,
            resident_hint_tokens=0,
            ranks=tuple(
                RankGrant(
                    rank=rank,
                    snapshot_buf_base_ptr=arena.base_ptr,
                    k_layer_offsets=tuple(offsets[: layout.num_layers]),
                    v_layer_offsets=tuple(offsets[layout.num_layers :]),
                    stride_k_bytes=layout.k_stride_bytes,
                    stride_v_bytes=layout.v_stride_bytes,
                    extents=tuple(extents),
                )
                for rank, arena in self.arenas.items()
            ),
            expires_ms=10_000,
        )

    def started(self, grant: Grant) -> None:
        if grant.epoch != self.epoch:
            raise StaleHandle("another epoch")
        if self.refuse_start is not None:
            raise self.refuse_start
        self.said.append(("started", grant.slab_handle))

    def check(self, grant: Grant, connections: int) -> int:
        if connections != self.connections:
            self.started(grant)
        return self.connections

    def commit(self, grant: Grant, commit: RankCommit, notify: Notify) -> Commitment:
        self.said.append(("commit", grant.slab_handle, commit.rank, commit.drained))
        self.commits[grant.slab_handle, commit.rank] = commit
        self.commitments.append(_Answered(self))
        return self.commitments[-1]

    def failed(self, grant: Grant, reason: Reason, *, drained: bool) -> None:
        self.said.append(("failed", grant.slab_handle, reason, drained))

    def drained(self, grant: Grant, rank: int) -> None:
        self.said.append(("drained", grant.slab_handle, rank))

    def take_ended(self) -> list[SessionEnded]:
        taken, self.ends = self.ends, []
        return taken

    def lifetime_ms(self, num_bytes: int) -> int | None:
        return self.lifetime


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Fleet:
    """The writers that were asked for, by rank and epoch."""

    def __init__(self, control: FakeControl, **options: Any) -> None:
        self.control = control
        self.options = options
        self.made: dict[tuple[int, str], FakeWriter] = {}

    def __call__(self, hello: HelloRep, rank: int, epoch: str) -> FakeWriter:
        assert (rank, epoch) not in self.made, "one writer a rank and epoch"
        assert epoch == hello.epoch
        self.made[rank, epoch] = FakeWriter(self.control.arenas[rank], **self.options)
        return self.made[rank, epoch]

    def of(self, rank: int = 0, epoch: str = "one") -> FakeWriter:
        return self.made[rank, epoch]


def pools_of(strides: Sequence[int], num_slots: int, num_ranks: int = 1, page: int = 1) -> dict[int, KVPool]:
    def buffer(stride: int) -> torch.Tensor:
        return torch.randint(0, 256, (num_slots, stride), dtype=torch.uint8)

    return {rank: KVPool.mla([buffer(stride) for stride in strides], page) for rank in range(num_ranks)}


def layout_of(pools: dict[int, KVPool]) -> Layout:
    return pools[0].layout(Namespace())

"""Slabs: the planes of a grant as tensors, and the bounds that a grant has to keep."""

import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from own_life import own_life

from snapd.arena import HostArena
from snapd.core.slab import Extent
from snapd.errors import InvalidRequest, SnapdError, StaleHandle
from snapd.kv.slabs import Slabs
from snapd.mapping import MappedArena, _map
from snapd.wire import RankGrant

SIZE_BYTES = 64 * 1024
NUM_TOKENS = 10


class FakeClient:
    """Hands over arenas of this process, as the daemon of *epoch* would.

    Attributes:
        mapped: (rank, writable) of every hand-over.
    """

    def __init__(self, hosts: dict[int, HostArena]) -> None:
        self.hosts = hosts
        self.epoch = "epoch-1"
        self.mapped: list[tuple[int, bool]] = []
        self.arenas: list[MappedArena] = []

    def map_buffer(self, rank: int, writable: bool = False, device: str | None = None) -> MappedArena:
        assert device is None, "the pools of these tests are on the host"
        self.mapped.append((rank, writable))
        fd = self.hosts[rank].open_fd(writable=writable)
        try:
            address, populated = _map(fd, SIZE_BYTES, writable, False, monotonic() + 5)
        finally:
            os.close(fd)
        self.arenas.append(
            MappedArena(rank, SIZE_BYTES, writable, self.epoch, address, populated, own_life())
        )
        return self.arenas[-1]


@pytest.fixture
def client() -> Iterator[FakeClient]:
    with (
        HostArena(0, SIZE_BYTES, hugepages="off", prefault=False) as first,
        HostArena(1, SIZE_BYTES, hugepages="off", prefault=False) as second,
    ):
        yield FakeClient({0: first, 1: second})


MakeSlabs = Callable[..., Slabs]


@pytest.fixture
def make(client: FakeClient) -> Iterator[MakeSlabs]:
    made: list[Slabs] = []

    def make_slabs(*, writable: bool = True) -> Slabs:
        made.append(Slabs(client, writable=writable))  # type: ignore[arg-type]
        return made[-1]

    yield make_slabs
    for slabs in made:
        slabs.close()


def grant(**changes: Any) -> RankGrant:
    """Two K planes of 160 and 80 bytes and two V planes of 240 and 30 bytes, in one extent."""
    fields: dict[str, Any] = {
        "rank": 0,
        "snapshot_buf_base_ptr": 0,
        "k_layer_offsets": (4096, 4352),
        "v_layer_offsets": (4608, 4864),
        "stride_k_bytes": (16, 8),
        "stride_v_bytes": (24, 3),
        "extents": (Extent(4096, 1024),),
    }
    return RankGrant(**(fields | changes))


def test_planes_are_the_arenas_bytes_at_the_grants_places(client: FakeClient, make: MakeSlabs) -> None:
    planes = make().planes(grant(), NUM_TOKENS, "epoch-1")
    assert [(plane.dtype, plane.shape) for plane in planes] == [
        (torch.uint8, (size_bytes,)) for size_bytes in (160, 80, 240, 30)
    ]
    for number, plane in enumerate(planes, 1):
        plane.fill_(number)
    expected = bytearray(SIZE_BYTES)
    for number, (offset, size_bytes) in enumerate([(4096, 160), (4352, 80), (4608, 240), (4864, 30)], 1):
        expected[offset : offset + size_bytes] = bytes([number]) * size_bytes
    assert bytes(client.arenas[0].buffer) == bytes(expected)
    start = client.arenas[0].address
    assert [plane.data_ptr() for plane in planes] == [start + offset for offset in (4096, 4352, 4608, 4864)]


def test_planes_may_each_have_an_extent_of_their_own_in_any_order(
    client: FakeClient, make: MakeSlabs
) -> None:
    offsets = (32768, 256, SIZE_BYTES - 256, 0)
    extents = tuple(Extent(offset, 256) for offset in offsets)
    planes = make().planes(
        grant(k_layer_offsets=offsets[:2], v_layer_offsets=offsets[2:], extents=extents),
        NUM_TOKENS,
        "epoch-1",
    )
    assert [plane.data_ptr() for plane in planes] == [client.arenas[0].address + offset for offset in offsets]


def test_a_plane_may_fill_its_extent_and_the_arena_to_the_last_byte(make: MakeSlabs) -> None:
    whole = grant(
        k_layer_offsets=(0,), stride_k_bytes=(SIZE_BYTES // 8,), v_layer_offsets=(), stride_v_bytes=(),
        extents=(Extent(0, SIZE_BYTES),),
    )  # fmt: skip
    (plane,) = make().planes(whole, 8, "epoch-1")
    assert plane.numel() == SIZE_BYTES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"extents": (Extent(-256, 8192),)}, "leaves arena", id="an extent before the arena"),
        pytest.param({"extents": (Extent(0, SIZE_BYTES + 1),)}, "leaves arena", id="an extent past the end"),
        pytest.param(
            {"extents": (Extent(4096, 1024), Extent(SIZE_BYTES - 256, 512))},
            "leaves arena",
            id="the last of two",
        ),
        pytest.param(
            {"extents": (Extent(SIZE_BYTES - 256, 512), Extent(4096, 1024))},
            "leaves arena",
            id="in any order",
        ),
        pytest.param(
            # The one that reaches furthest need not start last.
            {"extents": (Extent(4096, SIZE_BYTES), Extent(8192, 256))},
            "leaves arena",
            id="one in another",
        ),
        pytest.param({"extents": ()}, "leaves the grant's extents", id="no extents"),
        pytest.param({"k_layer_offsets": (4095, 4352)}, "leaves the grant's extents", id="a plane before it"),
        pytest.param({"v_layer_offsets": (4608, 5091)}, "leaves the grant's extents", id="a plane past it"),
        pytest.param(
            {"k_layer_offsets": (-4096, 4352)}, "leaves the grant's extents", id="a negative offset"
        ),
        pytest.param({"stride_v_bytes": (24, 103)}, "leaves the grant's extents", id="too wide a plane"),
        pytest.param({"stride_k_bytes": (0, 8)}, "leaves the grant's extents", id="an empty plane"),
        pytest.param({"stride_k_bytes": (-16, 8)}, "leaves the grant's extents", id="a negative width"),
        pytest.param(
            {"extents": (Extent(4096, 100), Extent(4196, 924))},
            "leaves the grant's extents",
            id="a plane across two extents",
        ),
        pytest.param({"stride_k_bytes": (16,)}, r"2 \+ 2 planes and 1 \+ 2 widths", id="a width is missing"),
        pytest.param(
            {"v_layer_offsets": (4608,)}, r"2 \+ 1 planes and 2 \+ 2 widths", id="a plane is missing"
        ),
        pytest.param(
            {"k_layer_offsets": (4096,), "v_layer_offsets": (4352, 4608, 4864)},
            r"1 \+ 3 planes",
            id="K and V are mixed up",
        ),
    ],
)
def test_a_grant_that_leaves_its_bounds_is_refused(
    make: MakeSlabs, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make().planes(grant(**changes), NUM_TOKENS, "epoch-1")


@pytest.mark.parametrize("num_tokens", [0, -1, 11_000])
def test_other_token_counts_than_the_grants_are_refused(make: MakeSlabs, num_tokens: int) -> None:
    with pytest.raises(InvalidRequest):
        make().planes(grant(), num_tokens, "epoch-1")


def test_an_arena_is_mapped_once_when_it_is_first_needed(client: FakeClient, make: MakeSlabs) -> None:
    slabs = make(writable=False)
    assert client.mapped == []
    for _ in range(3):
        slabs.planes(grant(), NUM_TOKENS, "epoch-1")
        slabs.planes(grant(rank=1), NUM_TOKENS, "epoch-1")
    assert client.mapped == [(0, False), (1, False)]
    make(writable=True).arena(0, "epoch-1")
    assert client.mapped[-1] == (0, True)


def test_after_a_restart_the_new_arena_is_mapped_and_the_old_one_let_go(
    client: FakeClient, make: MakeSlabs
) -> None:
    slabs = make()
    old = slabs.arena(0, "epoch-1")
    client.epoch = "epoch-2"
    new = slabs.arena(0, "epoch-2")
    assert new is not old and slabs.arena(0, "epoch-2") is new
    with pytest.raises(ValueError, match="closed"):
        old.buffer  # noqa: B018


def test_a_grant_of_an_epoch_that_is_over_is_stale(client: FakeClient, make: MakeSlabs) -> None:
    slabs = make()
    slabs.planes(grant(), NUM_TOKENS, "epoch-1")
    client.epoch = "epoch-2"
    slabs.planes(grant(), NUM_TOKENS, "epoch-2")
    for _ in range(2):
        with pytest.raises(StaleHandle):
            slabs.planes(grant(), NUM_TOKENS, "epoch-1")
    assert slabs.planes(grant(), NUM_TOKENS, "epoch-2")


def test_an_arena_that_a_stale_grant_found_is_not_mapped_again(client: FakeClient, make: MakeSlabs) -> None:
    slabs = make()
    old = slabs.arena(0, "epoch-1")
    old.life.close()  # As if its daemon had ended.
    client.epoch = "epoch-2"
    for _ in range(3):
        with pytest.raises(StaleHandle):
            slabs.arena(0, "epoch-1")
    assert slabs.arena(0, "epoch-2") is client.arenas[1]
    assert len(client.mapped) == 2


def test_a_late_call_with_an_epoch_that_is_over_leaves_the_mapping_alone(
    client: FakeClient, make: MakeSlabs
) -> None:
    """Of a job that was begun before the daemon was restarted."""
    slabs = make()
    client.epoch = "epoch-2"
    new = slabs.arena(0, "epoch-2")
    with pytest.raises(StaleHandle, match="its epoch is epoch-2, the grant's epoch-1"):
        slabs.arena(0, "epoch-1")
    assert slabs.arena(0, "epoch-2") is new and new.buffer
    assert client.mapped == [(0, True)], "the daemon is not even asked"


def test_a_mapping_makes_room_for_the_daemons_that_there_is_whatever_was_granted(
    client: FakeClient, make: MakeSlabs
) -> None:
    """The client has heard of another life, and the daemon hands over what is of neither."""
    slabs = make()
    known = slabs.arena(0, "epoch-1")
    client.epoch = "epoch-3"
    with pytest.raises(StaleHandle, match="its epoch is epoch-3, the grant's epoch-2"):
        slabs.arena(0, "epoch-2")
    with pytest.raises(ValueError, match="closed"):
        known.buffer  # noqa: B018
    assert slabs.arena(0, "epoch-3") is client.arenas[-1] and len(client.mapped) == 2


def test_after_close_an_arena_is_mapped_anew(client: FakeClient, make: MakeSlabs) -> None:
    slabs = make()
    slabs.arena(0, "epoch-1")
    slabs.close()
    assert slabs.planes(grant(), NUM_TOKENS, "epoch-1")
    assert client.mapped == [(0, True)] * 2


def test_an_arena_of_another_epoch_than_asked_for_waits_for_its_grant(
    client: FakeClient, make: MakeSlabs
) -> None:
    slabs = make()
    client.epoch = "epoch-2"
    with pytest.raises(StaleHandle):
        slabs.arena(0, "epoch-1")
    assert slabs.arena(0, "epoch-2") is client.arenas[0] and len(client.mapped) == 1


def test_a_plane_keeps_its_memory_mapped_after_close(client: FakeClient, make: MakeSlabs) -> None:
    slabs = make()
    (plane, *_) = slabs.planes(grant(), NUM_TOKENS, "epoch-1")
    tail = plane[100:]
    plane.fill_(7)
    client.arenas.clear()
    slabs.close()
    del plane
    assert tail.tolist() == [7] * 60
    fd = client.hosts[0].open_fd(writable=False)
    with mmap.mmap(fd, SIZE_BYTES, prot=mmap.PROT_READ) as seen:
        assert seen[4096:4256] == b"\x07" * 160
    os.close(fd)


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("kv-snapd-arena")


def test_the_mapping_goes_with_its_last_plane(client: FakeClient, make: MakeSlabs) -> None:
    before = num_mappings()
    slabs = make()
    planes = slabs.planes(grant(), NUM_TOKENS, "epoch-1")
    client.arenas.clear()
    assert num_mappings() == before + 1
    slabs.close()
    assert num_mappings() == before + 1
    part = planes[3][1:]
    planes.clear()
    assert num_mappings() == before + 1
    del part
    assert num_mappings() == before


def test_planes_of_an_arena_for_reading_are_read_without_a_warning(
    client: FakeClient, make: MakeSlabs
) -> None:
    make(writable=True).planes(grant(), NUM_TOKENS, "epoch-1")[0].fill_(9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planes = make(writable=False).planes(grant(), NUM_TOKENS, "epoch-1")
        assert planes[0].clone().tolist() == [9] * 160


def test_what_the_daemon_refuses_is_raised_and_nothing_is_kept(client: FakeClient, make: MakeSlabs) -> None:
    slabs = make()

    def refuse(rank: int, writable: bool = False, device: str | None = None) -> MappedArena:
        raise InvalidRequest(f"no arena {rank}")

    client.map_buffer = refuse  # type: ignore[method-assign]
    with pytest.raises(SnapdError, match="no arena 0"):
        slabs.planes(grant(), NUM_TOKENS, "epoch-1")
    assert slabs._arenas == {}

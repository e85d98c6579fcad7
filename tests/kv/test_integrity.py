"""Keys, contexts and MACs; and that every copy makes them of bytes that nobody else can change."""

import hashlib
import hmac
import itertools
import json
import os
import pickle
import stat
import struct
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fake_control import FakeControl, Fleet, layout_of, pools_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_push_staged import NotifyingWriter

from snapd.core.slab import Extent
from snapd.engines.support import EngineSettings, read_integrity
from snapd.errors import ConfigError, ExtraMissing, InvalidRequest, InvariantBroken
from snapd.kv import integrity as integrity_module
from snapd.kv.checksum import ChecksumAccumulator, PlaneChecksum
from snapd.kv.control import NotifyControl
from snapd.kv.copy import GatherJob, ScatterJob, gather
from snapd.kv.ingest import Ingester
from snapd.kv.integrity import (
    ALGORITHMS,
    KEY_BYTES_MAX,
    AttemptContext,
    KeyedIntegrity,
    PlaneMac,
    context_of,
    differing_planes,
    mismatch_facts,
    read_key,
)
from snapd.kv.keyedscatter import KeyedScatter
from snapd.kv.pool import KVPool
from snapd.kv.push import Pusher, PushSettings
from snapd.kv.staged import StagedCopyJob, StagedGatherJob
from snapd.units import KIB

KEY = bytes(range(32))
OTHER_KEY = bytes(range(100, 140))
CONTEXT = AttemptContext(
    epoch="e", slab_handle=7, rank=1, layout_fingerprint="f", token_start=16, num_tokens=80, token_digest="d"
)
# Of rows that are no multiple of a word too.
STRIDES = (64, 48, 7)
NUM_SLOTS = 256
NUM_TOKENS = 90


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plane_of(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def mac_of(
    planes: Sequence[torch.Tensor], integrity: KeyedIntegrity, context: AttemptContext = CONTEXT
) -> Any:
    macs = integrity.macs(context, len(planes))
    for mac, plane in zip(macs, planes, strict=True):
        mac.add(plane)
    return tuple(mac.value for mac in macs)


# --- what a MAC is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_mac_is_what_the_docs_say(algorithm: str) -> None:
    def mac(key: bytes, data: bytes, size_bytes: int) -> bytes:
        if algorithm == "blake2b":
            return hashlib.blake2b(data, key=key, digest_size=32).digest()[:size_bytes]
        return pytest.importorskip("blake3").blake3(data, key=key).digest(size_bytes)

    person = b"snapd-integrity"
    key = hashlib.blake2b(msgspec.msgpack.encode((algorithm, KEY)), digest_size=32, person=person).digest()
    facts = ("snapd-kv-integrity-1", algorithm, "e", 7, 1, "f", 16, 80, "d", 1)
    expected = mac(mac(key, msgspec.msgpack.encode(facts), 32), b"of plane 1", 16)
    macs = mac_of(
        [plane_of(b"of plane 0"), plane_of(b"of plane 1")], KeyedIntegrity(KEY, algorithm=algorithm)
    )
    assert struct.pack("<QQ", *macs[1]) == expected


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("blake3", (8131506761764594825, 3532523835031516590)),
        ("blake2b", (12805380839144794370, 13548348286641799219)),
    ],
)
def test_two_releases_make_the_same_mac(algorithm: str, expected: PlaneChecksum) -> None:
    assert mac_of([plane_of(bytes(1000))], KeyedIntegrity(KEY, algorithm=algorithm)) == (expected,)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "x"},
        {"slab_handle": 8},
        {"rank": 0},
        {"layout_fingerprint": "x"},
        {"token_start": 0},
        {"num_tokens": 79},
        {"token_digest": "x"},
        # The same characters at other places.
        {"epoch": "ed", "token_digest": ""},
    ],
    ids=str,
)
def test_a_mac_of_another_attempt_place_or_time_differs(change: dict[str, Any]) -> None:
    integrity, plane = KeyedIntegrity(KEY, algorithm="blake2b"), plane_of(b"bytes")
    other = msgspec.structs.replace(CONTEXT, **change)
    assert mac_of([plane], integrity) != mac_of([plane], integrity, other)


def test_equal_planes_have_macs_of_their_own() -> None:
    first, second = mac_of([plane_of(b"bytes")] * 2, KeyedIntegrity(KEY, algorithm="blake2b"))
    assert first != second


def test_keys_and_algorithms_differ() -> None:
    plane = plane_of(b"bytes")
    kinds = [
        KeyedIntegrity(key, algorithm=algorithm)
        for key in (KEY, OTHER_KEY, KEY + b"\0")
        for algorithm in ALGORITHMS
    ]
    assert len({mac_of([plane], kind) for kind in kinds}) == len(kinds)
    assert len({kind.key_ids for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(deadline=None, max_examples=30)
@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=5))
def test_pieces_give_the_mac_of_the_whole(algorithm: str, data: bytes, cuts: list[int]) -> None:
    integrity = KeyedIntegrity(KEY, algorithm=algorithm)
    (mac,) = integrity.macs(CONTEXT, 1)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        mac.add(plane_of(data)[start:stop])
    assert (mac.value,) == mac_of([plane_of(data)], integrity)
    assert mac.size_bytes == len(data)


def test_a_piece_out_of_token_order_is_refused() -> None:
    (mac,) = KeyedIntegrity(KEY, algorithm="blake2b").macs(CONTEXT, 1)
    mac.add(plane_of(bytes(16)), 0)
    for wrong in (0, 1, 3):
        with pytest.raises(InvariantBroken, match="token order"):
            mac.add(plane_of(bytes(16)), wrong)
    mac.add(plane_of(bytes(16)), 2)
    mac.begin_part()
    mac.add(plane_of(bytes(8)), 0)
    mac.add(plane_of(bytes(8)), 1)
    assert mac.size_bytes == 48


def test_a_tensor_with_gaps_is_refused() -> None:
    (mac,) = KeyedIntegrity(KEY, algorithm="blake2b").macs(CONTEXT, 1)
    with pytest.raises(InvalidRequest):
        mac.add(plane_of(bytes(16))[::2])


# --- comparing -------------------------------------------------------------------------------------


def checked(
    integrity: KeyedIntegrity, planes: Sequence[torch.Tensor], expected: Sequence[PlaneChecksum]
) -> list[int]:
    macs = integrity.accepted_macs(CONTEXT, len(planes))
    for mac, plane in zip(macs, planes, strict=True):
        mac.add(plane)
    return differing_planes(expected, macs)


def test_every_accepted_key_fits_and_no_mixture_of_them() -> None:
    planes = [plane_of(b"one"), plane_of(b"two"), plane_of(b"three")]
    new, old = (mac_of(planes, KeyedIntegrity(key)) for key in (KEY, OTHER_KEY))
    p = KeyedIntegrity(KEY, accepted=[OTHER_KEY])
    assert checked(p, planes, new) == checked(p, planes, old) == []
    assert checked(p, planes, [new[0], old[1], new[2]]) == [1]
    assert checked(p, planes, [old[0], old[1], new[2]]) == [2]
    assert checked(KeyedIntegrity(KEY), planes, old) == [0, 1, 2]
    assert mac_of(planes, p) == new, "D makes them with the first"


def test_planes_of_one_side_only_and_what_is_no_mac_differ() -> None:
    planes = [plane_of(b"one"), plane_of(b"two")]
    integrity = KeyedIntegrity(KEY)
    macs = mac_of(planes, integrity)
    assert checked(integrity, planes, macs) == []
    assert checked(integrity, planes, macs[:1]) == [1]
    assert checked(integrity, planes, [*macs, macs[0]]) == [2]
    assert checked(integrity, planes, []) == [0, 1]
    assert checked(integrity, [], macs) == [0, 1]
    low, high = macs[0]
    assert checked(integrity, planes, [(low + (1 << 64), high), macs[1]]) == [0]
    assert checked(integrity, planes, [(-1, high), macs[1]]) == [0]
    for bit in range(64):
        assert checked(integrity, planes, [(low ^ 1 << bit, high), macs[1]]) == [0]
        assert checked(integrity, planes, [(low, high ^ 1 << bit), macs[1]]) == [0]


def test_macs_are_compared_in_constant_time_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return compare_digest(a, b)

    compare_digest = hmac.compare_digest
    monkeypatch.setattr(integrity_module.hmac, "compare_digest", compare)
    planes = [plane_of(b"one"), plane_of(b"two")]
    assert checked(KeyedIntegrity(KEY, accepted=[OTHER_KEY]), planes, [(1, 2), (3, 4)]) == [0, 1]
    assert len(compared) == 4


def test_the_log_says_whether_keys_may_differ() -> None:
    keyed = KeyedIntegrity(KEY)
    assert "hint" not in mismatch_facts(keyed, 1, 4)
    assert mismatch_facts(keyed, 4, 4)["integrity_key_ids"] == list(keyed.key_ids)
    assert "D may have no integrity key, or another one" in str(mismatch_facts(keyed, 4, 4)["hint"])
    assert "P has none" in str(mismatch_facts(None, 4, 4)["hint"])


# --- keys ------------------------------------------------------------------------------------------


def key_file(tmp_path: Path, content: bytes = KEY, mode: int = 0o600) -> Path:
    path = tmp_path / "integrity.key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_both_sides_read_the_same_key(tmp_path: Path) -> None:
    path = key_file(tmp_path, OTHER_KEY, 0o400)
    assert read_key(path) == OTHER_KEY
    other = tmp_path / "old.key"
    other.write_bytes(KEY)
    other.chmod(0o600)
    read = KeyedIntegrity.from_files(path, accepted_paths=[str(other)])
    assert read.key_ids == KeyedIntegrity(OTHER_KEY, accepted=[KEY]).key_ids
    blake2b = KeyedIntegrity.from_files(str(path), algorithm="blake2b")
    assert blake2b.key_ids == KeyedIntegrity(OTHER_KEY, algorithm="blake2b").key_ids


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o777])
def test_a_key_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode=mode)
    with pytest.raises(ConfigError, match=rf"{path} has mode {mode:04o}.*chmod 600"):
        read_key(path)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o440, 0o400])
def test_a_key_of_root_may_be_read_by_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """As a secret that is mounted into a container is."""
    path = key_file(tmp_path, mode=mode)
    stand_in(monkeypatch, st_uid=0, euid=1234)
    assert read_key(path) == KEY


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602, 0o650])
def test_a_key_of_root_that_all_can_read_or_a_group_can_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    path = key_file(tmp_path, mode=mode)
    stand_in(monkeypatch, st_uid=0, euid=1234)
    with pytest.raises(ConfigError, match="others can read or change it"):
        read_key(path)


def test_a_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = key_file(tmp_path)
    stand_in(monkeypatch, st_uid=4321, euid=1234)
    with pytest.raises(ConfigError, match="belongs to user 4321: make it this user's, 1234"):
        read_key(path)


def stand_in(monkeypatch: pytest.MonkeyPatch, *, st_uid: int, euid: int) -> None:
    """Have the file belong to somebody, and this process be somebody."""
    fstat = os.fstat

    def owned(descriptor: int) -> os.stat_result:
        facts = tuple(fstat(descriptor))
        return os.stat_result((*facts[: stat.ST_UID], st_uid, *facts[stat.ST_UID + 1 :]))

    monkeypatch.setattr(integrity_module.os, "fstat", owned)
    monkeypatch.setattr(integrity_module.os, "geteuid", lambda: euid)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has 0 bytes; 32 random ones"),
        (KEY[:31], "has 31 bytes; 32 random ones"),
        (bytes(range(256)) * 16 + b"!", "more than 4096 bytes"),
        (bytes(64), "repeats a few bytes"),
        (b"secret!" * 10, "repeats a few bytes"),
    ],
)
def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path, content: bytes, said: str) -> None:
    path = key_file(tmp_path, content)
    with pytest.raises(ConfigError, match=said) as caught:
        KeyedIntegrity.from_files(path)
    assert str(path) in str(caught.value)
    assert "secret" not in str(caught.value)
    for arguments in ({"key": content}, {"key": KEY, "accepted": [content]}):
        with pytest.raises(ConfigError, match=said):
            KeyedIntegrity(**arguments)  # type: ignore[arg-type]


def test_a_key_as_long_as_can_be_is_taken(tmp_path: Path) -> None:
    assert len(read_key(key_file(tmp_path, bytes(range(256)) * (KEY_BYTES_MAX // 256)))) == KEY_BYTES_MAX


def test_a_path_that_leads_to_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*umask 077"):
        read_key(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key("with\0null")
    with pytest.raises(ConfigError, match="no regular file"):
        read_key(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        read_key(tmp_path / "pipe")


def test_a_key_shows_nowhere() -> None:
    integrity = KeyedIntegrity(KEY, accepted=[OTHER_KEY])
    shown = [repr(integrity), str(integrity), f"{integrity.key_ids}", str(mismatch_facts(integrity, 1, 1))]
    for text in shown:
        for key in (KEY, OTHER_KEY):
            assert key.hex() not in text and repr(key)[2:-1] not in text
        assert not any(stretched.hex() in text for stretched in integrity._keys)
    assert all(key_id in repr(integrity) for key_id in integrity.key_ids)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(integrity)
    assert not hasattr(integrity, "__dict__")


def test_without_blake3_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other algorithm is taken instead: the two sides would never match."""
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ExtraMissing, match=r"kv-snapd\[integrity\].*blake2b on both sides"):
        KeyedIntegrity(KEY)
    KeyedIntegrity(KEY, algorithm="blake2b")


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="'md5' is unknown; there are blake3, blake2b"):
        KeyedIntegrity(KEY, algorithm="md5")


# --- D's copies ------------------------------------------------------------------------------------


def slots_of(pool: KVPool, num_tokens: int, order: str) -> torch.Tensor:
    page = pool.page_size_tokens
    pages = (
        torch.randperm(pool.num_slots // page) if order == "random" else torch.arange(pool.num_slots // page)
    )
    return (pages[:, None] * page + torch.arange(page)).flatten()[:num_tokens]


def pool_of(page_size_tokens: int = 1, num_slots: int = NUM_SLOTS) -> KVPool:
    buffers = [torch.randint(0, 256, (num_slots, 1, width), dtype=torch.uint8) for width in STRIDES]
    return KVPool.mla(buffers, page_size_tokens)


def truth_of(pool: KVPool, slots: torch.Tensor) -> list[torch.Tensor]:
    return [place.rows[slots].flatten() for place in pool.planes]


class Watched:
    """A MAC that notes where the bytes lie that it is made of."""

    def __init__(self, mac: PlaneMac, note: Callable[[torch.Tensor], None]) -> None:
        self._mac = mac
        self._note = note

    def add(self, chunk: torch.Tensor, word_offset: int | None = None) -> None:
        self._note(chunk)
        self._mac.add(chunk, word_offset)

    @property
    def value(self) -> PlaneChecksum:
        return self._mac.value


def watched(buffers: Sequence[torch.Tensor]) -> tuple[list[Watched], list[int]]:
    """Return MACs of *buffers*' planes, and the sizes of what was hashed; nothing may lie in the buffers."""
    sizes: list[int] = []

    def note(chunk: torch.Tensor) -> None:
        start, stop = chunk.data_ptr(), chunk.data_ptr() + chunk.numel()
        for buffer in buffers:
            assert stop <= buffer.data_ptr() or buffer.data_ptr() + buffer.numel() <= start, "read back"
        sizes.append(chunk.numel())

    return [Watched(mac, note) for mac in KeyedIntegrity(KEY).macs(CONTEXT, len(STRIDES))], sizes


@pytest.mark.parametrize("page_size_tokens", [1, 16])
@pytest.mark.parametrize("order", ["random", "run"])
def test_a_gather_makes_the_mac_of_ds_own_bytes(page_size_tokens: int, order: str) -> None:
    pool = pool_of(page_size_tokens)
    slots = slots_of(pool, NUM_TOKENS, order)
    planes = [torch.zeros(NUM_TOKENS * width, dtype=torch.uint8) for width in STRIDES]
    macs, _ = watched(planes)
    job = GatherJob(pool, slots, planes, sums=macs)
    while not job.step(1):
        pass
    assert job.checksums == mac_of(truth_of(pool, slots), KeyedIntegrity(KEY))
    assert all(map(torch.equal, planes, truth_of(pool, slots)))


def places() -> tuple[list[int], list[Extent]]:
    offsets = [0]
    for width in STRIDES:
        offsets.append(-(-(offsets[-1] + width * NUM_TOKENS) // 256) * 256)
    return offsets[:-1], [Extent(0, offsets[-1])]


def arrived(job: StagedGatherJob | StagedCopyJob, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Fill every piece, and return the planes as the arena gets them."""
    offsets, (extent,) = places()
    arena = torch.zeros(extent.size_bytes, dtype=torch.uint8)
    while not job.done:
        job.begin(buffer)
        while (piece := job.step(100)) is None:
            pass
        arena[piece.offset_bytes : piece.offset_bytes + piece.size_bytes] = buffer[: piece.size_bytes]
    return [arena[at : at + width * NUM_TOKENS] for at, width in zip(offsets, STRIDES, strict=True)]


@pytest.mark.parametrize("page_size_tokens", [1, 16])
@pytest.mark.parametrize("order", ["random", "run"])
def test_a_staged_gather_makes_the_mac_of_what_no_transport_has_registered(
    page_size_tokens: int, order: str
) -> None:
    """Whoever can write to registered memory can write to a staging buffer, before it is hashed there."""
    pool = pool_of(page_size_tokens)
    slots = slots_of(pool, NUM_TOKENS, order)
    buffer = torch.zeros(1 * KIB, dtype=torch.uint8)
    macs, sizes = watched([buffer])
    job = StagedGatherJob(pool, slots, *places(), 1 * KIB, macs)
    assert all(map(torch.equal, arrived(job, buffer), truth_of(pool, slots)))
    assert job.checksums == mac_of(truth_of(pool, slots), KeyedIntegrity(KEY))
    assert job.num_pieces > 5 and sum(sizes) == sum(STRIDES) * NUM_TOKENS


def test_staged_planes_are_hashed_where_they_were_gathered() -> None:
    planes = [torch.randint(0, 256, (NUM_TOKENS * width,), dtype=torch.uint8) for width in STRIDES]
    buffer = torch.zeros(1 * KIB, dtype=torch.uint8)
    macs, _ = watched([buffer])
    job = StagedCopyJob(planes, *places(), 1 * KIB, None, macs)
    assert all(map(torch.equal, arrived(job, buffer), planes))
    assert job.checksums == mac_of(planes, KeyedIntegrity(KEY))


def test_without_a_key_a_staged_gather_still_sums_in_the_buffer() -> None:
    """It is cheaper, and the usual checksum is no defence anyway."""
    pool = pool_of()
    job = StagedGatherJob(pool, slots_of(pool, NUM_TOKENS, "random"), *places(), 1 * KIB)
    assert job._is_part_own and isinstance(job._sums[0], ChecksumAccumulator)


# --- P's copy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size_tokens", [1, 16])
@pytest.mark.parametrize(
    ("skip", "stop"),
    [(0, NUM_TOKENS), (48, NUM_TOKENS), (0, 64), (32, 64), (NUM_TOKENS, NUM_TOKENS), (16, 16)],
)
@pytest.mark.parametrize("max_bytes", [0, 700, 1 << 20])
def test_a_scatter_moves_what_is_wanted_and_makes_the_mac_of_all(
    page_size_tokens: int, skip: int, stop: int, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapd.kv.keyedscatter.CHUNK_BYTES", 1_000)
    planes = [torch.randint(0, 256, (NUM_TOKENS * width,), dtype=torch.uint8) for width in STRIDES]
    arena = [plane.clone() for plane in planes]
    pool = pool_of(page_size_tokens)
    before = [place.rows.clone() for place in pool.planes]
    slots = slots_of(pool, stop - skip, "random") if stop > skip else None
    integrity = KeyedIntegrity(KEY)
    macs = integrity.accepted_macs(CONTEXT, len(STRIDES))
    job = KeyedScatter(pool, arena, slots, skip, NUM_TOKENS, stop_tokens=stop, macs=macs)
    steps = 1
    while not job.step(max_bytes):
        steps += 1
    assert steps > 1 or max_bytes > 1
    assert job.differing(mac_of(planes, integrity)) == []
    for place, old, plane, width in zip(pool.planes, before, planes, STRIDES, strict=True):
        expected = old
        if slots is not None:
            expected[slots] = plane[skip * width : stop * width].view(-1, width)
        assert torch.equal(place.rows, expected)
    assert job.step(max_bytes), "and it stays done"


@pytest.mark.parametrize("order", ["random", "run"])
@pytest.mark.parametrize("moment", ["before the hash", "after the hash"])
def test_what_changes_in_the_arena_after_it_was_read_is_not_used(
    order: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes = [torch.randint(0, 256, (NUM_TOKENS * width,), dtype=torch.uint8) for width in STRIDES]
    arena = [plane.clone() for plane in planes]
    read: list[int] = []

    def scribble() -> None:
        # Only where a copy was taken: what is not read yet would differ, as it should.
        for plane in arena[: len(read)]:
            plane.fill_(0xEE)

    def then_scribble(move: Callable[..., None]) -> Callable[..., None]:
        def moved(self: ScatterJob, *arguments: Any) -> None:
            # A run is copied into the pool at once; other tokens were copied before.
            is_run = move is copy
            if is_run:
                move(self, *arguments)
            if moment == "before the hash":
                read.append(1)
                scribble()
            if not is_run:
                move(self, *arguments)

        return moved

    move_rows, copy = ScatterJob._move_rows, ScatterJob._copy
    monkeypatch.setattr(ScatterJob, "_move_rows", then_scribble(move_rows))
    monkeypatch.setattr(ScatterJob, "_copy", then_scribble(copy))
    add = PlaneMac.add

    def add_and_scribble(mac: PlaneMac, chunk: torch.Tensor, word_offset: int | None = None) -> None:
        add(mac, chunk, word_offset)
        if moment == "after the hash":
            read.append(1)
            scribble()

    integrity = KeyedIntegrity(KEY)
    expected = mac_of(planes, integrity)
    monkeypatch.setattr(PlaneMac, "add", add_and_scribble)
    pool = pool_of()
    slots = slots_of(pool, NUM_TOKENS, order)
    macs = integrity.accepted_macs(CONTEXT, len(STRIDES))
    job = KeyedScatter(pool, arena, slots, 0, NUM_TOKENS, stop_tokens=NUM_TOKENS, macs=macs)
    while not job.step(1):
        pass
    assert job.differing(expected) == []
    assert all(map(torch.equal, truth_of(pool, slots), planes)), "the pool has the bytes that were hashed"
    assert all(bool((plane == 0xEE).all()) for plane in arena), "and the arena others"


def test_what_is_hashed_and_not_used_is_hashed_out_of_a_private_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    planes = [torch.randint(0, 256, (NUM_TOKENS * width,), dtype=torch.uint8) for width in STRIDES]
    add = PlaneMac.add

    def add_private(mac: PlaneMac, chunk: torch.Tensor, word_offset: int | None = None) -> None:
        for plane in planes:
            assert not plane.data_ptr() <= chunk.data_ptr() < plane.data_ptr() + plane.numel()
        add(mac, chunk, word_offset)

    monkeypatch.setattr(PlaneMac, "add", add_private)
    macs = KeyedIntegrity(KEY).accepted_macs(CONTEXT, len(STRIDES))
    pool = pool_of()
    job = KeyedScatter(pool, planes, slots_of(pool, 20, "random"), 30, NUM_TOKENS, stop_tokens=50, macs=macs)
    assert job.step(1 << 20)
    assert [mac.size_bytes for mac in macs] == [plane.numel() for plane in planes]


# --- a pusher --------------------------------------------------------------------------------------


class Stage:
    def __init__(self, integrity: KeyedIntegrity, **options: Any) -> None:
        self.control = FakeControl(num_ranks=2, **options)
        self.pools = pools_of((64, 48, 256), NUM_SLOTS, 2)
        self.control.layout = layout_of(self.pools)
        self.fleet = Fleet(self.control, polls=1, in_flight_bytes_max=1 << 30)
        self.integrity = integrity
        self.pusher = self.make(self.control)

    def make(self, control: Any) -> Pusher:
        settings = PushSettings(piece_bytes=4 * KIB, ring_bytes=64 * KIB, in_flight_bytes_max=16 * KIB)
        return Pusher(control, self.pools, settings=settings, writer_for=self.fleet, integrity=self.integrity)

    def expected(self, grant: Any, rank: int, slots: torch.Tensor) -> Any:
        context = AttemptContext(
            epoch=grant.epoch, slab_handle=grant.slab_handle, rank=rank,
            layout_fingerprint=self.pusher.layout_fingerprint,
            token_start=grant.token_start, num_tokens=grant.num_tokens, token_digest=grant.token_digest,
        )  # fmt: skip
        planes = [
            torch.empty(len(slots) * place.stride_bytes, dtype=torch.uint8)
            for place in self.pools[rank].planes
        ]
        gather(self.pools[rank], slots, planes)
        return mac_of(planes, self.integrity, context)


def test_a_push_commits_macs_of_its_attempt() -> None:
    stage = Stage(KeyedIntegrity(KEY))
    slots = torch.randperm(NUM_SLOTS)[:100]
    for _ in range(2):
        job = stage.pusher.start("s", range(100), slots)
        while not job.step(1 << 20):
            job.wait()
        assert job.result.ok and job.grant is not None
        for rank in (0, 1):
            commit = stage.control.commits[job.result.slab_handle, rank]
            assert commit.checksums == stage.expected(job.grant, rank, slots)


def test_a_commit_that_goes_with_the_transfer_has_macs() -> None:
    stage = Stage(KeyedIntegrity(KEY))
    slots = torch.randperm(NUM_SLOTS)[:100]
    grant = msgspec.structs.replace(stage.control.grant(100), token_digest="of the tokens")
    writers: dict[int, NotifyingWriter] = {}

    def writer_for(hello: Any, rank: int, epoch: str) -> NotifyingWriter:
        writers[rank] = NotifyingWriter(stage.control.arenas[rank])
        return writers[rank]

    stage.fleet = writer_for  # type: ignore[assignment]
    lone = stage.make(NotifyControl(stage.control.hello()))
    job = lone.start_granted(grant, slots)
    while not job.step(1 << 20):
        job.wait()
    assert job.result.ok
    for rank in (0, 1):
        (text,) = writers[rank].texts
        assert tuple(map(tuple, json.loads(text)["checksums"])) == stage.expected(grant, rank, slots)


def test_gathered_planes_are_pushed_with_macs_and_sums_of_before_are_refused() -> None:
    stage = Stage(KeyedIntegrity(KEY))
    slots = torch.arange(100)
    planes = {}
    for rank, pool in stage.pools.items():
        planes[rank] = [torch.empty(100 * place.stride_bytes, dtype=torch.uint8) for place in pool.planes]
        gather(pool, slots, planes[rank])
    with pytest.raises(InvalidRequest, match="leave the checksums out"):
        stage.pusher.push_planes("s", range(100), planes, {0: [(1, 2)] * 3, 1: [(1, 2)] * 3})
    assert stage.control.said == [], "nothing was asked"
    result = stage.pusher.push_planes("s", range(100), planes)
    assert result.ok, result
    grant = msgspec.structs.replace(stage.control.grant(100), slab_handle=result.slab_handle)
    for rank in (0, 1):
        committed = stage.control.commits[result.slab_handle, rank].checksums
        assert committed == stage.expected(grant, rank, slots)


def test_the_grants_layout_is_bound_where_it_says() -> None:
    stage = Stage(KeyedIntegrity(KEY))
    grant = stage.control.grant(100)
    assert context_of(grant, 1, "own").layout_fingerprint == "own"
    other = msgspec.structs.replace(grant, layout_fingerprint="of another namespace")
    assert context_of(other, 1, "own").layout_fingerprint == "of another namespace"


# --- what is refused -------------------------------------------------------------------------------


def test_a_pool_on_a_gpu_is_refused() -> None:
    pool: Any = types.SimpleNamespace(device=torch.device("cuda", 1), layout=pool_of().layout)
    with pytest.raises(
        ConfigError, match="kv_pool is on cuda:1, and keyed integrity is for pools on the host"
    ):
        Pusher(FakeControl(), {0: pool}, integrity=KeyedIntegrity(KEY))
    unused: Any = None
    with pytest.raises(ConfigError, match="kv_pool is on cuda:1"):
        Ingester(unused, 0, pool, unused, integrity=KeyedIntegrity(KEY))


def test_a_key_without_verification_is_refused() -> None:
    unused: Any = None
    with pytest.raises(ConfigError, match="verify is off, and there is an integrity key"):
        Ingester(unused, 0, pool_of(), unused, verify=False, integrity=KeyedIntegrity(KEY))


# --- an engine's settings --------------------------------------------------------------------------


def test_an_engines_settings_name_the_key_file(tmp_path: Path) -> None:
    assert read_integrity(EngineSettings()) is None
    path = str(key_file(tmp_path))
    old = tmp_path / "old.key"
    old.write_bytes(OTHER_KEY)
    old.chmod(0o600)
    read = read_integrity(EngineSettings(integrity_key_path=path))
    assert read is not None and read.key_ids == KeyedIntegrity(KEY).key_ids
    read = read_integrity(
        EngineSettings(
            integrity_key_path=path, integrity_other_key_path=str(old), integrity_algorithm="blake2b"
        )
    )
    assert read is not None
    assert read.key_ids == KeyedIntegrity(KEY, accepted=[OTHER_KEY], algorithm="blake2b").key_ids
    with pytest.raises(ConfigError, match="verify is off"):
        read_integrity(EngineSettings(integrity_key_path=path, verify=False))
    with pytest.raises(ConfigError, match="integrity_key_path is not"):
        read_integrity(EngineSettings(integrity_other_key_path=path))
    Path(path).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_integrity(EngineSettings(integrity_key_path=path))

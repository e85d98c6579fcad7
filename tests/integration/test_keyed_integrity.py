"""Keyed integrity over a real daemon: what somebody who can write anywhere in the arena cannot do."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import torch
from kv_cases import (
    KINDS,
    MHA,
    PATIENCE_S,
    POISON,
    TOKENS,
    Kind,
    Pair,
    arena_of,
    corrupt_plane,
    finish,
    finish_all,
    first_turn,
    paired,
    settle,
    tokens_of,
)
from raw_client import LogFollower, running, wait_for

from snapd.client import Client
from snapd.core.events import State
from snapd.errors import Reason, SnapdError
from snapd.kv.copy import ScatterJob, gather
from snapd.kv.ingest import Ingester
from snapd.kv.ingestpages import LentSlots, PagesJob
from snapd.kv.integrity import AttemptContext, KeyedIntegrity, context_of
from snapd.kv.push import NotifyControl, Pusher, PushSettings
from snapd.kv.pushpages import PagesPusher
from snapd.layout import fingerprint, page_keys, token_digest
from snapd.mapping import MappedArena
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.mooncake_package import load_engine_module
from snapd.units import KIB

KEY = bytes(range(32))
OTHER_KEY = bytes(range(100, 132))
KEYED = KeyedIntegrity(KEY)
# Planes that are as long as each other.
ALIKE = Kind(k_rows=((2, 8),) * 2, v_rows=((2, 8),) * 2)
SMALL = PushSettings(piece_bytes=KIB, ring_bytes=32 * KIB, in_flight_bytes_max=4 * KIB)
QUIET = MooncakeConfig(settings={"MC_LOG_LEVEL": "ERROR"})


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, LogFollower]]:
    with running(ranks=2, size="4MiB", quarantine_ms=50) as daemon:
        yield daemon, LogFollower(daemon.log_path)


@pytest.fixture
def daemon(served: tuple[Any, LogFollower]) -> Iterator[Any]:
    """A daemon with two ranks; after each test all its bytes are free and its log has told the story."""
    yield served[0]
    settle(*served)


@pytest.fixture(scope="module")
def _mooncake() -> None:
    try:
        load_engine_module()
    except SnapdError as error:
        pytest.skip(str(error))


def keyed(
    daemon: Any,
    kind: Kind = MHA,
    d: KeyedIntegrity | None = KEYED,
    p: KeyedIntegrity | None = KEYED,
    **options: Any,
) -> Any:
    """Yield a pair whose sides have these keys."""
    return paired(daemon, kind, push={"integrity": d, **options.pop("push", {})}, integrity=p, **options)


@dataclasses.dataclass(frozen=True)
class Slab:
    """Where a rank's shard lies, seen by somebody who can write anywhere."""

    arena: MappedArena
    places: list[tuple[int, int]]

    def read(self, plane: int) -> bytes:
        offset, size = self.places[plane]
        return bytes(self.arena.buffer[offset : offset + size])

    def write(self, plane: int, data: bytes, at: int = 0) -> None:
        offset = self.places[plane][0] + at
        self.arena.buffer[offset : offset + len(data)] = data


def slab_of(pair: Pair, grant: Any, rank: int = 0) -> Slab:
    shard = grant.for_rank(rank)
    offsets = (*shard.k_layer_offsets, *shard.v_layer_offsets)
    widths = (*shard.stride_k_bytes, *shard.stride_v_bytes)
    sizes = [width * grant.num_tokens for width in widths]
    return Slab(arena_of(pair.daemon, rank), list(zip(offsets, sizes, strict=True)))


def pushed(pair: Pair, session_id: str = "s", tokens: Sequence[int] = TOKENS, **fields: Any) -> Any:
    """Push, which must succeed, and return the grant."""
    job = finish(pair.start(session_id, tokens, pair.slots(len(tokens)), **fields))
    assert job.grant is not None and job.result.ok, job.result
    return job.grant


def refused(pair: Pair, handle: int, session_id: str = "s", tokens: Sequence[int] = TOKENS) -> None:
    """Ingest, which must end as a mismatch, with nothing in any tree."""
    answers = pair.ingest(session_id, tokens, handle)
    reasons = {answer.reason for answer in answers}
    assert Reason.CHECKSUM_MISMATCH in reasons and reasons <= {Reason.CHECKSUM_MISMATCH, Reason.ROUND_ABORTED}
    assert not any(answer.ok for answer in answers)
    assert all(session_id not in tree for tree in pair.trees)
    view = pair.view(handle)
    assert (view.state, view.reason) == (State.ABORTED, Reason.CHECKSUM_MISMATCH)


# --- what arrives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_pool_arrives_bit_for_bit(daemon: Any, kind: str) -> None:
    with keyed(daemon, KINDS[kind], num_ranks=2) as pair:
        handle = pair.ready("s", tokens_of(71))
        assert all(answer.ok for answer in pair.ingest("s", tokens_of(71), handle))
        assert all(tree.inserts == ["s"] for tree in pair.trees)
        assert pair.is_all_free()


@pytest.mark.parametrize("kind", ["mha", "odd", "mha, pages"])
def test_what_p_holds_already_is_hashed_and_not_moved(daemon: Any, kind: str) -> None:
    with keyed(daemon, KINDS[kind]) as pair:
        first_turn(pair, "s", 48)
        # From before what P holds.
        result = pair.push("s", tokens_of(75), token_start=32, use_resident_hint=False)
        assert (result.ok, result.token_start) == (True, 32)
        assert pair.ingest("s", tokens_of(75), result.slab_handle)[0].ok
        assert pair.tree.allocations == [48, 75 - 48]
        # From where P is believed to hold it.
        result = pair.push("s", tokens_of(90))
        assert result.ok and result.token_start > 32
        assert pair.ingest("s", tokens_of(90), result.slab_handle)[0].ok
        # All of it again: there is nothing to move, and all is hashed.
        handle = pair.ready("s", tokens_of(90), use_resident_hint=False)
        corrupt_plane(daemon, pair, handle, 0)
        assert pair.ingest("s", tokens_of(90), handle)[0].reason is Reason.CHECKSUM_MISMATCH
        assert pair.tree.tokens("s") == tokens_of(90), "what was there before stays"


def test_a_change_in_what_is_not_moved_is_seen(daemon: Any) -> None:
    with keyed(daemon) as pair:
        first_turn(pair, "s", 40)
        grant = pushed(pair, "s", tokens_of(80), use_resident_hint=False)
        slab = slab_of(pair, grant)
        slab.write(2, bytes([slab.read(2)[8] ^ 1]), at=8)
        (answer,) = pair.ingest("s", tokens_of(80), grant.slab_handle)
        assert (answer.ok, answer.reason) == (False, Reason.CHECKSUM_MISMATCH)
        assert pair.tree.tokens("s") == tokens_of(40)


def test_a_part_of_a_snapshot_is_used_and_all_of_it_is_hashed(daemon: Any) -> None:
    with keyed(daemon) as pair:
        for session_id, is_changed in (("a", False), ("b", True)):
            grant = pushed(pair, session_id)
            if is_changed:
                slab = slab_of(pair, grant)
                slab.write(5, bytes([slab.read(5)[-1] ^ 1]), at=slab.places[5][1] - 1)
            job = pair.ingesters[0].start(session_id, TOKENS[:50], grant.slab_handle, wanted_tokens=50)
            (answer,) = finish_all([job])
            assert answer.ok is not is_changed
            assert (session_id in pair.tree) is not is_changed
        assert pair.tree.tokens("a") == TOKENS[:50]


def test_pages_that_an_engine_has_keys_for_arrive(daemon: Any) -> None:
    """Their tokens are not known here: what D gave as their digest is bound, not what P puts there."""
    kind = KINDS["mha, pages"]
    with keyed(daemon, kind) as pair:
        slots = pair.slots(64)
        pusher = PagesPusher(pair.d, pair.d_pools, pair.pusher.layout.namespace, integrity=KEYED)
        keys = page_keys(range(64), 16)
        job = finish(pusher.start_pages("pages", keys, slots, digest="of the engine"))
        assert job.result.ok, job.result
        pusher.close()
        owner = LentSlots()
        with Client(str(daemon.socket_path), timeout_s=PATIENCE_S) as client:
            namespace = pair.pusher.layout.namespace
            ingester = Ingester(client, 0, pair.p_pools[0], owner, namespace, integrity=KEYED)
            taken = pair.tree.allocate(32)
            assert taken is not None
            pages = PagesJob(
                ingester, "pages", job.result.slab_handle, taken,
                skip_tokens=32, digest="of the engine", keep_rest=False, vote_timeout_s=PATIENCE_S,
            )  # fmt: skip
            (answer,) = finish_all([pages])
            assert answer.ok, answer
            for d_plane, p_plane in zip(pair.d_pools[0].planes, pair.p_pools[0].planes, strict=True):
                assert torch.equal(p_plane.rows[taken], d_plane.rows[slots[32:]])
            ingester.close()
        pair.tree.free(taken)


def test_a_grant_of_another_namespace_is_bound_to_it(daemon: Any) -> None:
    """As where one pusher serves LoRAs and salts for which somebody else prepares."""
    with keyed(daemon) as pair:
        own = pair.pusher.layout
        other = msgspec.structs.replace(own, namespace=msgspec.structs.replace(own.namespace, lora="l"))
        pair.ps[0].declare_layout(0, other)
        slots = pair.slots(len(TOKENS))
        pair._truth[0, "s"] = [plane.rows[slots].clone() for plane in pair.d_pools[0].planes]
        for prepared, asked in ((other, other), (other, own)):
            grant = pair.d.prepare_receive(
                "s", len(TOKENS), fingerprint(prepared), token_digest=token_digest(TOKENS), ranks=(0,)
            )
            grant = grant if asked is other else msgspec.structs.replace(grant, layout_fingerprint="")
            assert finish(pair.pusher.start_granted(grant, slots)).result.ok
            job = pair.ingesters[0].start(
                "s", TOKENS, grant.slab_handle, layout_fingerprint=fingerprint(prepared)
            )
            (answer,) = finish_all([job])
            assert answer.ok is (asked is other)
            if answer.ok:
                pair.tree.evict("s")


@pytest.mark.parametrize("algorithm", ["blake3", "blake2b"])
def test_planes_that_were_gathered_before_arrive(daemon: Any, algorithm: str) -> None:
    integrity = KeyedIntegrity(KEY, algorithm=algorithm)
    with keyed(daemon, d=integrity, p=integrity, num_ranks=2) as pair:
        slots = pair.slots(len(TOKENS))
        planes = {}
        for rank, pool in pair.d_pools.items():
            pair._truth[rank, "s"] = [plane.rows[slots].clone() for plane in pool.planes]
            planes[rank] = [plane.rows[slots].flatten() for plane in pool.planes]
        result = pair.pusher.push_planes("s", TOKENS, planes)
        assert result.ok, result
        assert all(answer.ok for answer in pair.ingest("s", TOKENS, result.slab_handle))
        result = pair.pusher.push_planes("t", TOKENS, planes)
        corrupt_plane(daemon, pair, result.slab_handle, 3, rank=1)
        refused(pair, result.slab_handle, "t")


# --- what somebody writes into the arena -------------------------------------------------------------


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_flipped_bit_in_any_plane_is_seen(daemon: Any, where: str) -> None:
    with keyed(daemon) as pair:
        for plane in range(pair.pusher.layout.num_planes):
            grant = pushed(pair)
            slab = slab_of(pair, grant)
            size = slab.places[plane][1]
            at = {"first": 0, "middle": size // 2, "last": size - 1}[where]
            slab.write(plane, bytes([slab.read(plane)[at] ^ 1 << plane % 8]), at=at)
            slab.arena.close()
            refused(pair, grant.slab_handle)


def forged(plane: bytes) -> bytes:
    """Return other bytes with the same two sums: 1, -2 and 1 are 0 together, at places in a row too."""
    words = [int.from_bytes(plane[at : at + 8], "little") for at in range(0, len(plane), 8)]
    for first in range(0, len(words) - 2, 3):
        for word, added in ((first, 1), (first + 1, -2), (first + 2, 1)):
            words[word] = (words[word] + added * 0x1234567) % (1 << 64)
    return b"".join(word.to_bytes(8, "little") for word in words)


@pytest.mark.parametrize("is_keyed", [False, True])
def test_bytes_that_were_made_to_have_the_same_sums_pass_without_a_key_only(
    daemon: Any, is_keyed: bool
) -> None:
    """What keyed integrity is for: two sums find accidents, not somebody who computes what to write."""
    integrity = KEYED if is_keyed else None
    with keyed(daemon, d=integrity, p=integrity) as pair:
        grant = pushed(pair)
        slab = slab_of(pair, grant)
        for plane in range(len(slab.places)):
            slab.write(plane, forged(slab.read(plane)))
        slab.arena.close()
        if is_keyed:
            refused(pair, grant.slab_handle)
            return
        assert pair.ingest("s", TOKENS, grant.slab_handle)[0].ok
        slots = pair.tree.slots("s")
        for truth, plane_rows in zip(pair._truth[0, "s"], pair.p_pools[0].planes, strict=True):
            assert not torch.equal(plane_rows.rows[slots], truth), "forged KV is in the tree"
        pair.tree.evict("s")


def test_planes_that_were_swapped_are_seen(daemon: Any) -> None:
    with keyed(daemon, ALIKE) as pair:
        grant = pushed(pair)
        slab = slab_of(pair, grant)
        first, second = slab.read(0), slab.read(3)
        slab.write(0, second)
        slab.write(3, first)
        refused(pair, grant.slab_handle)


def committed_by_hand(
    pair: Pair,
    integrity: KeyedIntegrity,
    change: dict[str, Any],
    swap: tuple[int, int] | None = None,
) -> int:
    """Write D's own bytes, and commit MACs of another context; return the handle."""
    grant = pair.pusher.prepare("s", TOKENS)
    pair.d.transfer_started(grant.slab_handle, epoch=grant.epoch)
    slots, planes = pair.slots(len(TOKENS)), []
    pair._truth[0, "s"] = [plane.rows[slots].clone() for plane in pair.d_pools[0].planes]
    slab = slab_of(pair, grant)
    for index, place in enumerate(pair.d_pools[0].planes):
        planes.append(place.rows[slots].flatten())
        slab.write(index, bytes(planes[-1].tolist()))
    context = msgspec.structs.replace(context_of(grant, 0, "?"), **change)
    macs = list(integrity.macs(context, len(planes)))
    if swap is not None:
        macs[swap[0]], macs[swap[1]] = macs[swap[1]], macs[swap[0]]
    for mac, plane in zip(macs, planes, strict=True):
        mac.add(plane)
    num_bytes = sum(plane.numel() for plane in planes)
    sums = tuple(mac.value for mac in macs)
    pair.d.commit(grant.slab_handle, 0, num_bytes, len(TOKENS), sums, epoch=grant.epoch)
    return int(grant.slab_handle)


def test_macs_of_the_attempt_itself_fit(daemon: Any) -> None:
    """What the tests after this one change one thing of."""
    with keyed(daemon) as pair:
        assert pair.ingest("s", TOKENS, committed_by_hand(pair, KEYED, {}))[0].ok


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "another"},
        {"slab_handle": 1},
        {"rank": 1},
        {"layout_fingerprint": "another"},
        {"token_start": 16},
        {"num_tokens": len(TOKENS) - 1},
        {"token_digest": "another"},
    ],
    ids=str,
)
def test_macs_of_another_attempt_place_or_time_are_refused(daemon: Any, change: dict[str, Any]) -> None:
    assert set(change) <= set(AttemptContext.__struct_fields__)
    with keyed(daemon) as pair:
        refused(pair, committed_by_hand(pair, KEYED, change))


def test_macs_of_another_plane_are_refused(daemon: Any) -> None:
    with keyed(daemon, ALIKE) as pair:
        refused(pair, committed_by_hand(pair, KEYED, {}, swap=(0, 1)))


def test_a_snapshot_of_before_does_not_come_back(daemon: Any) -> None:
    """Its bytes, and the MACs that were committed with it, of the same session and the same tokens."""
    with keyed(daemon) as pair:
        first = pushed(pair)
        slab = slab_of(pair, first)
        old = [slab.read(plane) for plane in range(len(slab.places))]
        lease = pair.ps[0].begin_ingest(first.slab_handle, 0, pair.pusher.layout_fingerprint, session_id="s")
        old_macs = lease.checksums
        pair.ps[0].vote(
            first.slab_handle, 0, lease.lease_id, ok=False, keep=True, reason=Reason.INGEST_FAILED
        )
        pair.d.abort(first.slab_handle, drained=True)
        # The bytes alone.
        for place in pair.d_pools[0].planes:
            place.rows.bitwise_xor_(1)
        second = pushed(pair)
        slab = slab_of(pair, second)
        for plane, data in enumerate(old):
            slab.write(plane, data)
        refused(pair, second.slab_handle)
        # And with the old MACs, as somebody could send them who can notify the daemon.
        third = pair.pusher.prepare("s", TOKENS)
        pair.d.transfer_started(third.slab_handle, epoch=third.epoch)
        slab = slab_of(pair, third)
        for plane, data in enumerate(old):
            slab.write(plane, data)
        num_bytes = sum(map(len, old))
        pair.d.commit(third.slab_handle, 0, num_bytes, len(TOKENS), old_macs, epoch=third.epoch)
        refused(pair, third.slab_handle)


@pytest.mark.parametrize("order", ["random", "run"])
def test_what_changes_after_it_was_read_does_not_reach_the_tree(
    daemon: Any, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no moment between check and use: what was hashed is what is inserted."""
    with keyed(daemon) as pair:
        grant = pushed(pair)
        slab = slab_of(pair, grant)
        changed: list[str] = []

        def scribble(way: str) -> None:
            # One piece a plane, and in order: so many planes were read.
            plane = len(changed)
            slab.write(plane, b"\xee" * slab.places[plane][1])
            changed.append(way)

        move_rows, copy = ScatterJob._move_rows, ScatterJob._copy

        def move_rows_late(job: ScatterJob, *arguments: Any) -> None:
            scribble("random")
            move_rows(job, *arguments)

        def copy_early(job: ScatterJob, *arguments: Any) -> None:
            copy(job, *arguments)
            scribble("run")

        monkeypatch.setattr(ScatterJob, "_move_rows", move_rows_late)
        monkeypatch.setattr(ScatterJob, "_copy", copy_early)
        if order == "run":
            pair.tree._free.sort()
        assert pair.ingest("s", TOKENS, grant.slab_handle)[0].ok
        assert changed == [order] * len(slab.places), "the arena is another by now"
        pair.check()


def test_of_two_ranks_none_inserts_when_one_was_written_to(daemon: Any) -> None:
    with keyed(daemon, num_ranks=2) as pair:
        handle = pair.ready("s", TOKENS)
        corrupt_plane(daemon, pair, handle, 17, rank=1)
        refused(pair, handle)


# --- keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "p", "hint"),
    [
        (KEYED, KeyedIntegrity(OTHER_KEY), "another one"),
        (KEYED, KeyedIntegrity(KEY, algorithm="blake2b"), "another one"),
        (None, KEYED, "D may have no integrity key"),
        (KEYED, None, "D may have an integrity key, and P has none"),
    ],
    ids=["different keys", "different algorithms", "P only", "D only"],
)
def test_sides_whose_keys_differ_never_match(
    daemon: Any, d: KeyedIntegrity | None, p: KeyedIntegrity | None, hint: str
) -> None:
    with keyed(daemon, d=d, p=p) as pair:
        handle = pair.ready("s", TOKENS)
        with structlog.testing.capture_logs() as lines:
            refused(pair, handle)
        (line,) = [line for line in lines if "not those that D committed" in line["event"]]
        assert line["log_level"] == "warning" and hint in line["hint"]
        assert (line["slab_handle"], line["session_id"], line["rank"]) == (handle, "s", 0)
        for key in (KEY, OTHER_KEY):
            assert key.hex() not in str(line) and repr(key)[2:-1] not in str(line)
        assert bool((pair.p_pools[0].planes[0].rows[pair.tree._pages] == POISON).any())


def test_one_plane_that_differs_is_no_sign_of_another_key(daemon: Any) -> None:
    with keyed(daemon) as pair:
        handle = pair.ready("s", TOKENS)
        corrupt_plane(daemon, pair, handle, 0)
        with structlog.testing.capture_logs() as lines:
            refused(pair, handle)
        (line,) = [line for line in lines if "not those that D committed" in line["event"]]
        assert (line["differing_planes"], line["num_planes"]) == (1, 6) and "hint" not in line
        assert line["integrity_key_ids"] == list(KEYED.key_ids)


def test_keys_are_changed_without_a_snapshot_lost(daemon: Any, tmp_path: Path) -> None:
    paths = {}
    for name, key in (("old", KEY), ("new", OTHER_KEY)):
        paths[name] = tmp_path / name
        paths[name].write_bytes(key)
        paths[name].chmod(0o600)
    old = KeyedIntegrity.from_files(paths["old"])
    both = KeyedIntegrity.from_files(paths["old"], accepted_paths=[paths["new"]])
    turned = KeyedIntegrity.from_files(paths["new"], accepted_paths=[paths["old"]])
    new = KeyedIntegrity.from_files(paths["new"])
    # P first, then D, then P forgets the old one; also where each process is both.
    for d, p in (
        (old, old),
        (both, old),
        (old, both),
        (new, both),
        (turned, both),
        (both, turned),
        (new, new),
    ):
        with keyed(daemon, d=d, p=p) as pair:
            assert pair.ingest("s", TOKENS, pair.ready("s", TOKENS))[0].ok
    with keyed(daemon, d=old, p=new) as pair:
        refused(pair, pair.ready("s", TOKENS))


# --- Mooncake ----------------------------------------------------------------------------------------


def over_mooncake(daemon: Any, kind: Kind = MHA, **options: Any) -> Any:
    return keyed(daemon, kind, push={"settings": SMALL, "mooncake": QUIET}, **options)


@pytest.mark.usefixtures("_mooncake")
def test_over_mooncake_too(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(ranks=2, size="4MiB", transport="mooncake")
    for name in ("mha", "odd, pages"):
        with over_mooncake(daemon, KINDS[name], num_ranks=2) as pair:
            handle = pair.ready("s", TOKENS)
            assert all(answer.ok for answer in pair.ingest("s", TOKENS, handle))
            handle = pair.ready("t", TOKENS)
            corrupt_plane(daemon, pair, handle, 17, rank=1)
            refused(pair, handle, "t")
    with over_mooncake(daemon, num_ranks=2) as pair:
        planes = {}
        slots = pair.slots(len(TOKENS))
        for rank, pool in pair.d_pools.items():
            pair._truth[rank, "s"] = [plane.rows[slots].clone() for plane in pool.planes]
            planes[rank] = [torch.zeros_like(plane.rows[slots].flatten()) for plane in pool.planes]
            gather(pool, slots, planes[rank])
        result = pair.pusher.push_planes("s", TOKENS, planes)
        assert result.ok, result
        assert all(answer.ok for answer in pair.ingest("s", TOKENS, result.slab_handle))


@pytest.mark.usefixtures("_mooncake")
def test_a_commit_that_anybody_could_send_is_worth_what_its_macs_are(
    start_daemon: Callable[..., Any],
) -> None:
    daemon = start_daemon(size="4MiB", transport="mooncake", **{"mooncake.notify": "commit"})
    with over_mooncake(daemon) as pair:
        slots, hello = pair.slots(len(TOKENS)), pair.d.connect()
        pair._truth[0, "s"] = [plane.rows[slots].clone() for plane in pair.d_pools[0].planes]
        for integrity in (KEYED, None, KeyedIntegrity(OTHER_KEY)):
            # Somebody else prepares, and hands grant and hello over.
            grant = pair.pusher.prepare("s", TOKENS, use_resident_hint=False)
            lone = Pusher(
                NotifyControl(hello), pair.d_pools, pair.pusher.layout.namespace,
                settings=SMALL, mooncake=QUIET, integrity=integrity,
            )  # fmt: skip
            job = finish(lone.start_granted(grant, slots))
            assert job.result.ok, job.result
            wait_for(
                lambda handle=grant.slab_handle: pair.view(handle).state is State.READY, "the commit has come"
            )
            if integrity is KEYED:
                assert pair.ingest("s", TOKENS, grant.slab_handle)[0].ok
                pair.tree.evict("s")
            else:
                refused(pair, grant.slab_handle)
            lone.close()

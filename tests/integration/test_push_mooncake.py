"""Pushes over Mooncake: a real daemon, real TCP, and bytes that come out of P's pool as they were in D's."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kv_cases import KINDS, MHA, TOKENS, Kind, Pair, begun, finish, paired, record, settle, tokens_of
from raw_client import LogFollower, running, wait_for

from snapd.client import Client
from snapd.core import records as rec
from snapd.core.events import State
from snapd.errors import Reason, SnapdError
from snapd.kv.copy import gather
from snapd.kv.push import NotifyControl, Pusher, PushSettings
from snapd.kv.writers import RankWriter
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.mooncake_package import load_engine_module
from snapd.units import KIB, MIB

QUARANTINE_MS = 2_000
HOUR_MS = 3_600_000
PIECE_BYTES = 1 * KIB
QUIET = MooncakeConfig(settings={"MC_LOG_LEVEL": "ERROR"})
# Many pieces even of a small snapshot, and a ring that is smaller than it.
SMALL = PushSettings(
    piece_bytes=PIECE_BYTES, ring_bytes=8 * 4 * KIB, in_flight_bytes_max=4 * PIECE_BYTES, retries_max=3
)
PUSH: dict[str, Any] = {"settings": SMALL, "mooncake": QUIET}


@pytest.fixture(scope="module", autouse=True)
def _mooncake() -> None:
    try:
        load_engine_module()
    except SnapdError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def served(_mooncake: None) -> Iterator[tuple[Any, LogFollower]]:
    with running(ranks=2, size="4MiB", quarantine_ms=QUARANTINE_MS, transport="mooncake") as daemon:
        yield daemon, LogFollower(daemon.log_path)


@pytest.fixture
def daemon(served: tuple[Any, LogFollower]) -> Iterator[Any]:
    """A daemon with two ranks; after each test all its bytes are free and its log has told the story."""
    yield served[0]
    settle(*served)


def over_mooncake(daemon: Any, kind: Kind = MHA, **options: Any) -> Any:
    return paired(daemon, kind, push=PUSH, **options)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_pool_arrives_bit_for_bit(daemon: Any, name: str) -> None:
    with over_mooncake(daemon, KINDS[name], num_ranks=2) as pair:
        result = pair.push("s", TOKENS)
        assert (result.ok, result.drained, result.retried_pieces) == (True, True, 0), result
        assert result.bytes == len(TOKENS) * pair.token_bytes * 2
        assert all(answer.ok for answer in pair.ingest("s", TOKENS, result.slab_handle))
        assert pair.pusher.staging_bytes <= SMALL.ring_bytes
        assert pair.is_all_free()


def test_a_second_turn_sends_the_new_tokens(daemon: Any) -> None:
    with over_mooncake(daemon) as pair:
        for num_tokens in (40, 80):
            tokens = tokens_of(num_tokens)
            result = pair.push("s", tokens)
            assert result.ok and result.num_tokens == 40
            assert pair.ingest("s", tokens, result.slab_handle)[0].ok


def test_a_push_in_small_steps_leaves_room_for_other_calls(daemon: Any) -> None:
    with over_mooncake(daemon, num_ranks=2) as pair:
        job = pair.start("s", TOKENS, pair.slots(len(TOKENS)))
        assert job.grant is not None
        states = set()
        while not job.step(1):
            states.add(pair.d.get(job.grant.slab_handle).session.state)
            job.wait()
        # It is READY when the daemon has the last commit, a moment before the push hears of that.
        assert State.TRANSFERRING in states and states <= {State.TRANSFERRING, State.READY}
        assert all(answer.ok for answer in pair.ingest("s", TOKENS, job.grant.slab_handle))


def test_the_number_of_writes_is_that_of_the_bytes(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    submit = RankWriter.submit

    def note_and_submit(writer: RankWriter, buffer: Any, write: Any) -> int:
        sizes.append(write.size_bytes)
        return submit(writer, buffer, write)

    monkeypatch.setattr(RankWriter, "submit", note_and_submit)
    with paired(daemon, push={"mooncake": QUIET}) as pair:
        handle = pair.ready("s", TOKENS)
        assert len(sizes) == 1, "6 planes of 80 tokens"
        assert pair.ingest("s", TOKENS, handle)[0].ok


def test_two_pushes_of_one_pusher_take_turns(daemon: Any) -> None:
    with over_mooncake(daemon, num_ranks=2) as pair:
        jobs = [pair.start(f"s{number}", TOKENS, pair.slots(len(TOKENS))) for number in range(3)]
        while not all(job.done for job in jobs):
            for job in jobs:
                job.step(PIECE_BYTES)
            jobs[-1].wait()
        for number, job in enumerate(jobs):
            assert job.result.ok
            assert all(answer.ok for answer in pair.ingest(f"s{number}", TOKENS, job.result.slab_handle))


def fragment(pair: Pair, fillers: Pair) -> None:
    """Leave holes of which none takes the whole snapshot."""
    handles = [fillers.ready(f"filler-{number}", (number,)) for number in range(8)]
    for handle in handles[::2]:
        fillers.d.abort(handle)


def test_in_a_fragmented_arena_every_plane_goes_to_its_extent(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(size=f"{MIB}B", transport="mooncake")
    filler = Kind(k_rows=((128 * KIB,),), dtype=torch.uint8)
    kind = Kind(k_rows=((1024,),) * 2, v_rows=((1536,),) * 2)
    tokens = TOKENS[:40]
    push = {"settings": PushSettings(piece_bytes=128 * KIB, ring_bytes=MIB), "mooncake": QUIET}
    with (
        paired(daemon, filler, num_slots=8, push=push) as fillers,
        paired(daemon, kind, num_slots=128, push=push) as pair,
    ):
        fragment(pair, fillers)
        job = finish(pair.start("s", tokens, pair.slots(40)))
        assert job.grant is not None and job.result.ok
        extents = job.grant.ranks[0].extents
        assert len(extents) == pair.pusher.layout.num_planes
        assert any(b.offset_bytes != a.end_bytes for a, b in itertools.pairwise(extents))
        assert pair.ingest("s", tokens, job.result.slab_handle)[0].ok


def test_an_arena_that_is_registered_in_pieces_is_written_in_each_of_them(
    start_daemon: Callable[..., Any],
) -> None:
    daemon = start_daemon(size=f"{MIB}B", transport="mooncake", register_piece_bytes=256 * KIB)
    kind = Kind(k_rows=((1024,),) * 2, v_rows=((1024,),) * 2)
    push = {"settings": PushSettings(piece_bytes=64 * KIB, ring_bytes=256 * KIB), "mooncake": QUIET}
    with paired(daemon, kind, push=push) as pair:
        handles = {}
        for number in range(3):
            tokens = tokens_of(40, seed=number)
            handles[f"s{number}"] = (tokens, pair.ready(f"s{number}", tokens))
        pieces = {
            extent.offset_bytes // (256 * KIB)
            for _, handle in handles.values()
            for extent in pair.view(handle).shards[0].extents
        }
        assert pieces == {0, 1, 2, 3}
        for session_id, (tokens, handle) in handles.items():
            assert pair.ingest(session_id, tokens, handle)[0].ok


@pytest.mark.parametrize("with_sums", [True, False])
def test_planes_that_were_gathered_before_arrive_as_they_are(daemon: Any, with_sums: bool) -> None:
    with over_mooncake(daemon, num_ranks=2) as pair:
        slots = pair.slots(len(TOKENS))
        planes: dict[int, list[torch.Tensor]] = {}
        sums = {}
        for rank, pool in pair.d_pools.items():
            planes[rank] = [
                torch.empty(plane.stride_bytes * len(TOKENS), dtype=torch.uint8) for plane in pool.planes
            ]
            sums[rank] = gather(pool, slots, planes[rank])
            pair._truth[rank, "s"] = [plane.rows[slots].clone() for plane in pool.planes]
        result = pair.pusher.push_planes("s", TOKENS, planes, sums if with_sums else None)
        assert result.ok, result
        assert all(answer.ok for answer in pair.ingest("s", TOKENS, result.slab_handle))


# --- how a push ends early ------------------------------------------------------------------------


def test_an_abort_in_the_middle_is_answered_with_drain_proof(start_daemon: Callable[..., Any]) -> None:
    """The quarantine's hour is not waited for."""
    daemon = start_daemon(size="4MiB", transport="mooncake", quarantine_ms=HOUR_MS)
    with over_mooncake(daemon) as pair, Client(str(daemon.socket_path)) as operator:
        job, handle = begun(pair)
        operator.abort(handle)
        assert record(daemon, rec.SlabQuarantined, handle).why == "undrained"
        pair.d.ping()
        assert job.step(1)
        assert (job.result.ok, job.result.reason) == (False, Reason.CLIENT_ABORT)
        wait_for(lambda: pair.pusher.poll() or pair.is_all_free(), "the writes are over")
        assert record(daemon, rec.SlabReleased, handle).why == "drained"
        assert pair.pusher.lingering == 0


def test_a_push_that_is_cancelled_is_drained_soon(daemon: Any) -> None:
    with over_mooncake(daemon) as pair:
        job, handle = begun(pair)
        assert job.cancel(Reason.SESSION_NOT_RESIDENT).reason is Reason.SESSION_NOT_RESIDENT
        wait_for(lambda: pair.pusher.poll() or pair.is_all_free(), "the writes are over", QUARANTINE_MS / 4e3)
        assert pair.view(handle).reason == Reason.SESSION_NOT_RESIDENT


def test_a_newer_push_of_the_session_supersedes_one_under_way(daemon: Any) -> None:
    with over_mooncake(daemon) as pair:
        older, _ = begun(pair)
        newer, _ = begun(pair)
        assert older.step(1) and older.result.reason is Reason.SUPERSEDED
        assert pair.ingest("s", TOKENS, finish(newer).result.slab_handle)[0].ok


def test_a_daemon_that_is_gone_ends_the_push_and_a_restarted_one_is_pushed_to(
    start_daemon: Callable[..., Any],
) -> None:
    daemon = start_daemon(size="4MiB", transport="mooncake")
    with over_mooncake(daemon) as pair:
        job, handle = begun(pair)
        daemon.kill()
        assert not finish(job).result.ok
        daemon.restart()
        for p in pair.ps:
            p.connect()  # P declares its layout again.
        result = pair.push("s", TOKENS)
        assert result.ok and result.slab_handle != handle
        assert pair.ingest("s", TOKENS, result.slab_handle)[0].ok


# --- without a control connection -----------------------------------------------------------------


def test_a_d_without_a_control_connection_commits_with_the_transfer(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(ranks=2, size="4MiB", transport="mooncake", **{"mooncake.notify": "commit"})
    with over_mooncake(daemon, num_ranks=2) as pair:
        slots = pair.slots(len(TOKENS))
        # Somebody else prepares, and hands grant and hello over.
        grant, hello = pair.pusher.prepare("s", TOKENS), pair.d.connect()
        lone = Pusher(NotifyControl(hello), pair.d_pools, pair.pusher.layout.namespace, **PUSH)
        for rank, pool in pair.d_pools.items():
            pair._truth[rank, "s"] = [plane.rows[slots].clone() for plane in pool.planes]
        job = finish(lone.start_granted(grant, slots))
        assert job.result.ok, job.result
        wait_for(lambda: pair.view(grant.slab_handle).state is State.READY, "the commits have come")
        assert all(answer.ok for answer in pair.ingest("s", TOKENS, grant.slab_handle))
        lone.close()

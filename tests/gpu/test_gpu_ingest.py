"""P's side on a real GPU: a daemon with an arena there, and a pool beside it or on the next GPU."""

import contextlib
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from snapd import cuda, cudamapping
from snapd.client import Client
from snapd.core.events import State
from snapd.errors import ConfigError, InvalidRequest, Reason
from snapd.kv import devicescatter, ingest, torchcopy
from snapd.kv.copy import gather
from snapd.kv.devicecopy import CopyJobs, choose_copy
from snapd.kv.ingest import Ingester, IngestJob
from snapd.kv.pool import KVPool
from snapd.kv.slabs import Slabs
from snapd.kv.torchcopy import TorchGatherJob, TorchScatterJob
from snapd.layout import Namespace, token_digest
from snapd.units import MS_PER_S

if not torch.cuda.is_available():
    pytest.skip("there is no GPU that torch can use", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[1] / "integration"))

from kv_cases import KINDS, MHA, PATIENCE_S, POISON, Kind, Tree, make_pool, random_slots, tokens_of
from raw_client import running, wait_for

DEVICE = torch.device("cuda:0")
# Some tenths of a second: host code of a few ms runs meanwhile.
SLEEP_CYCLES = 1_000_000_000
# What a step may take; a step that waited for the sleep above would take far longer.
STEP_MS_MAX = 50
STEP_BYTES = 1 << 20
NUM_SLOTS = 512
LARGE = Kind(k_rows=((4, 64),) * 2, v_rows=((4, 64),) * 2)

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has not two GPUs")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Any]:
    with running(device="cuda:0", size="64MiB", quarantine_ms=50) as started:
        yield started


class DeviceTree(Tree):
    """Slots are on the GPU, as an engine's may be."""

    def allocate(self, num_tokens: int) -> torch.Tensor | None:
        slots = super().allocate(num_tokens)
        return None if slots is None else slots.to(DEVICE)

    def free(self, slots: torch.Tensor) -> None:
        super().free(slots.cpu())

    def insert(
        self, session_id: str, token_ids: Sequence[int], resident_tokens: int, slots: torch.Tensor
    ) -> None:
        super().insert(session_id, token_ids, resident_tokens, slots.cpu())


def gpu_pool(kind: Kind, num_slots: int, device: torch.device) -> KVPool:
    """Return a pool of poison on a GPU."""
    host = make_pool(kind, num_slots, seed=None)
    buffers = [place.rows.to(device).view(kind.dtype) for place in host.planes]
    num_layers = len(kind.k_rows)
    if not kind.v_rows:
        return KVPool.mla(buffers, kind.page_size_tokens)
    return KVPool.mha(buffers[:num_layers], buffers[num_layers:], kind.page_size_tokens)


class GpuPair:
    """D, with a pool on the host, and P, with one on a GPU."""

    def __init__(
        self,
        daemon: Any,
        kind: Kind = MHA,
        *,
        device: torch.device = DEVICE,
        num_slots: int = NUM_SLOTS,
        tree: type[Tree] = Tree,
        **options: Any,
    ) -> None:
        self.kind, self.num_slots, self.device = kind, num_slots, device
        self.d = Client(str(daemon.socket_path), timeout_s=PATIENCE_S)
        self.p = Client(str(daemon.socket_path), timeout_s=PATIENCE_S)
        self.d_pool = make_pool(kind, num_slots, seed=1)
        self.p_pool = gpu_pool(kind, num_slots, device)
        self.tree = tree(kind, num_slots)
        self.ingester = Ingester(self.p, 0, self.p_pool, self.tree, Namespace(), **options)
        self.slabs = Slabs(self.d, writable=True)
        self._truth: dict[str, list[torch.Tensor]] = {}
        self._planes: dict[int, list[torch.Tensor]] = {}

    def ready(self, session_id: str, token_ids: Sequence[int], token_start: int = 0) -> int:
        """Push by a plain copy, and return the handle."""
        num_tokens = len(token_ids) - token_start
        slots = random_slots(self.kind, self.num_slots, len(token_ids), seed=7)
        self._truth[session_id] = [plane.rows[slots].clone() for plane in self.d_pool.planes]
        host = [torch.empty(num_tokens * p.stride_bytes, dtype=torch.uint8) for p in self.d_pool.planes]
        sums = gather(self.d_pool, slots[token_start:], host)
        grant = self.d.prepare_receive(
            session_id,
            num_tokens,
            self.ingester.layout_fingerprint,
            token_start=token_start,
            token_digest=token_digest(token_ids),
        )
        self.d.transfer_started(grant.slab_handle, epoch=grant.epoch)
        planes = self.slabs.planes(grant.for_rank(0), num_tokens, grant.epoch)
        for plane, source in zip(planes, host, strict=True):
            plane.copy_(source)
        torch.cuda.synchronize(planes[0].device)
        num_bytes = sum(plane.numel() for plane in host)
        self.d.commit(grant.slab_handle, 0, num_bytes, num_tokens, sums, epoch=grant.epoch)
        self._planes[grant.slab_handle] = planes
        return grant.slab_handle

    def corrupt(self, handle: int, plane_index: int, offset_bytes: int) -> None:
        self._planes[handle][plane_index][offset_bytes] ^= 0x10
        torch.cuda.synchronize(0)

    def start(self, handle: int, token_ids: Sequence[int], **fields: Any) -> IngestJob:
        return self.ingester.start("s", token_ids, handle, **fields)

    def ingest(self, handle: int, token_ids: Sequence[int]) -> Any:
        return finished(self.start(handle, token_ids)).result

    def state(self, handle: int) -> State:
        return self.d.get(handle).session.state

    def is_leased(self, handle: int) -> bool:
        return self.d.get(handle).session.is_leased

    def rows(self, plane_index: int) -> torch.Tensor:
        return self.p_pool.planes[plane_index].rows

    def is_poison(self) -> bool:
        return all(bool((place.rows == POISON).all()) for place in self.p_pool.planes)

    def check(self) -> None:
        """P holds D's bytes for what is in its tree, no other slot was touched, and nothing leaked."""
        self.tree.check()
        for plane_index in range(len(self.p_pool.planes)):
            rows = self.rows(plane_index).cpu()
            for session_id, (tokens, slots) in self.tree._tree.items():
                truth = self._truth[session_id][plane_index][: len(tokens)]
                assert torch.equal(rows[slots], truth), f"plane {plane_index}"
            untouched = torch.ones(self.num_slots, dtype=torch.bool)
            untouched[list(self.tree.touched)] = False
            assert bool((rows[untouched] == POISON).all()), "a slot of somebody else was written"

    def close(self) -> None:
        self.ingester.close()
        self._planes.clear()
        self.slabs.close()
        for client in (self.d, self.p):
            client.close()


def finished(job: IngestJob) -> IngestJob:
    """Step an ingest to its end."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not job.step(STEP_BYTES):
        assert time.monotonic() < deadline_s, "the ingest does not end"
        job.wait()
    return job


@contextlib.contextmanager
def paired(daemon: Any, kind: Kind = MHA, **options: Any) -> Iterator[GpuPair]:
    pair = GpuPair(daemon, kind, **options)
    try:
        yield pair
        pair.check()
    finally:
        torch.cuda.synchronize(pair.device)
        pair.close()


def asleep(stream: torch.cuda.Stream, times: int = 1) -> torch.cuda.Event:
    """Keep *stream* busy; return the event at the end of it."""
    with torch.cuda.stream(stream):
        for _ in range(times):
            torch.cuda._sleep(SLEEP_CYCLES)
        return stream.record_event()


def warmed(pair: GpuPair) -> GpuPair:
    """Bring one session over, so that memory is there which is made on first use; drop it again."""
    tokens = tokens_of(40)
    assert pair.ingest(pair.ready("s", tokens), tokens).ok
    pair.tree.evict("s")
    pair.tree.touched.clear()
    pair.tree.inserts.clear()
    for place in pair.p_pool.planes:
        place.rows.fill_(POISON)
    torch.cuda.synchronize(pair.device)
    return pair


# --- bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [Tree, DeviceTree], ids=["slots on the host", "slots on the GPU"])
@pytest.mark.parametrize("kind", KINDS)
def test_p_holds_ds_bytes_and_no_other_slot_is_touched(daemon: Any, kind: str, tree: type[Tree]) -> None:
    with paired(daemon, KINDS[kind], tree=tree) as pair:
        handle = pair.ready("s", tokens_of(71))
        answer = pair.ingest(handle, tokens_of(71))
        assert (answer.ok, answer.reason, answer.num_tokens) == (True, Reason.OK, 71)
        assert pair.tree.tokens("s") == tokens_of(71)
        assert pair.state(handle) is State.INGESTED


def test_a_large_session_of_random_slots(daemon: Any) -> None:
    with paired(daemon, LARGE, num_slots=12_000) as pair:
        tokens = tokens_of(10_007)
        assert pair.ingest(pair.ready("s", tokens), tokens).ok


HALVES = [("mha", 48, 75), ("odd", 48, 75), ("odd", 37, 75), ("odd, pages", 50, 75), ("fp8", 37, 75)]


def check_halves(pair: GpuPair, had: int, pushed: int) -> None:
    """P has a part already; then it has all of it."""
    page = pair.kind.page_size_tokens
    assert pair.ingest(pair.ready("s", tokens_of(had)), tokens_of(had)).ok
    handle = pair.ready("s", tokens_of(pushed))
    assert pair.ingest(handle, tokens_of(pushed)).ok
    assert pair.tree.allocations == [had, pushed - had // page * page]
    pair.check()
    # Everything is there.
    assert pair.ingest(pair.ready("s", tokens_of(pushed)), tokens_of(pushed)).ok


@pytest.mark.parametrize(("kind", "had", "pushed"), HALVES)
def test_of_a_snapshot_that_p_holds_in_part_the_rest_is_moved(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, kind: str, had: int, pushed: int
) -> None:
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 1_000)
    monkeypatch.setattr(torchcopy, "SUMMED_BYTES", 1_000)
    with paired(daemon, KINDS[kind], tree=DeviceTree) as pair:
        check_halves(pair, had, pushed)


def test_a_suffix_goes_onto_the_prefix_that_p_holds(daemon: Any) -> None:
    with paired(daemon, KINDS["odd, pages"]) as pair:
        assert pair.ingest(pair.ready("s", tokens_of(48)), tokens_of(48)).ok
        assert pair.ingest(pair.ready("s", tokens_of(75), token_start=32), tokens_of(75)).ok
        assert pair.tree.tokens("s") == tokens_of(75)


@pytest.mark.parametrize("kind", ["mha", "odd, pages"])
def test_torchs_own_operations_bring_the_same_bytes(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    fallback = CopyJobs("torch", TorchGatherJob, TorchScatterJob, is_async=True)
    monkeypatch.setattr(ingest, "choose_copy", lambda device: fallback)
    with paired(daemon, KINDS[kind]) as pair:
        check_halves(pair, 37, 75)


@pytest.mark.parametrize("plane_index", [0, -1])
@pytest.mark.parametrize("kind", ["mha", "mla, pages", "fp8", "odd"])
def test_any_byte_that_changes_after_the_commit_is_noticed(daemon: Any, kind: str, plane_index: int) -> None:
    with paired(daemon, KINDS[kind]) as pair:
        for offset_bytes in (0, 100, -1):
            handle = pair.ready("s", tokens_of(71))
            pair.corrupt(handle, plane_index, offset_bytes)
            answer = pair.ingest(handle, tokens_of(71))
            assert (answer.ok, answer.reason) == (False, Reason.CHECKSUM_MISMATCH)
            assert pair.state(handle) is State.ABORTED
            pair.tree.check()
        assert pair.tree.inserts == []


@pytest.mark.parametrize("kind", ["mha", "odd"])
def test_a_byte_that_changes_in_what_p_holds_or_at_the_cut_is_noticed(daemon: Any, kind: str) -> None:
    with paired(daemon, KINDS[kind]) as pair:
        assert pair.ingest(pair.ready("s", tokens_of(37)), tokens_of(37)).ok
        width = pair.ingester.layout.k_stride_bytes[0]
        for offset_bytes in (9, 37 * width - 1, 37 * width):
            handle = pair.ready("s", tokens_of(75))
            pair.corrupt(handle, 0, offset_bytes)
            assert pair.ingest(handle, tokens_of(75)).reason == Reason.CHECKSUM_MISMATCH
        assert pair.tree.inserts == ["s"]


@two_gpus
@pytest.mark.parametrize(("kind", "had", "pushed"), HALVES)
@pytest.mark.parametrize("private_bytes", [None, 1_000, 1 << 20])
def test_a_pool_on_a_peer_of_the_arenas_gpu(
    daemon: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    had: int,
    pushed: int,
    private_bytes: int | None,
) -> None:
    """It is scattered from there; or copied to private memory first, where its GPU does not reach it."""
    if private_bytes is not None:
        monkeypatch.setattr(cuda.Driver, "can_access_peer", lambda *_: False)
        monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", private_bytes)
    assert torch.cuda.current_device() == 0
    with paired(daemon, KINDS[kind], device=torch.device("cuda:1")) as pair:
        check_halves(pair, had, pushed)
        handle = pair.ready("t", tokens_of(75))
        pair.corrupt(handle, -1, -1)
        answer = finished(pair.ingester.start("t", tokens_of(75), handle)).result
        assert answer.reason == Reason.CHECKSUM_MISMATCH
    assert torch.cuda.current_device() == 0


@two_gpus
def test_a_pool_on_a_peer_is_not_written_before_its_own_forward_pass_has_ended(daemon: Any) -> None:
    peer = torch.device("cuda:1")
    with paired(daemon, device=peer) as pair:
        warmed(pair)
        handle = pair.ready("s", tokens_of(71))
        forward = torch.cuda.Stream(peer)
        asleep(forward)
        with torch.cuda.stream(forward):
            seen = pair.rows(0).clone()
            read = forward.record_event()
        job = pair.start(handle, tokens_of(71), after=[read])
        assert finished(job).result.ok
        assert bool((seen == POISON).all())


# --- order -------------------------------------------------------------------------------------------


def test_slots_are_not_written_before_a_forward_pass_has_read_them(daemon: Any) -> None:
    with paired(daemon) as pair:
        warmed(pair)
        handle = pair.ready("s", tokens_of(71))
        forward = torch.cuda.Stream(DEVICE)
        asleep(forward)
        with torch.cuda.stream(forward):
            seen = pair.rows(0).clone()
            read = forward.record_event()
        job = pair.start(handle, tokens_of(71), after=[read])
        assert not job.step(STEP_BYTES)
        assert not read.query()
        assert finished(job).result.ok
        assert read.query()
        assert bool((seen == POISON).all())


def test_without_events_all_that_the_current_stream_was_given_comes_first(daemon: Any) -> None:
    with paired(daemon) as pair:
        warmed(pair)
        handle = pair.ready("s", tokens_of(71))
        torch.cuda._sleep(SLEEP_CYCLES)
        seen = pair.rows(0).clone()
        job = pair.start(handle, tokens_of(71))
        assert not job.step(STEP_BYTES)
        assert finished(job).result.ok
        assert bool((seen == POISON).all())


def test_with_an_empty_list_nothing_is_waited_for(daemon: Any) -> None:
    """What the tests above would see if events were not waited for."""
    with paired(daemon) as pair:
        warmed(pair)
        handle = pair.ready("s", tokens_of(71))
        forward = torch.cuda.Stream(DEVICE)
        end = asleep(forward)
        assert finished(pair.start(handle, tokens_of(71), after=())).result.ok
        assert not end.query()
        end.synchronize()


def test_slots_that_the_owner_makes_on_the_current_stream_are_waited_for(daemon: Any) -> None:
    """Whatever events the caller gives."""
    with paired(daemon, tree=DeviceTree) as pair:
        warmed(pair)
        handle = pair.ready("s", tokens_of(71))
        allocate = pair.tree.allocate

        def allocate_late(num_tokens: int) -> torch.Tensor | None:
            slots = allocate(num_tokens)
            assert slots is not None
            late = torch.full_like(slots, -1)
            torch.cuda._sleep(SLEEP_CYCLES)
            return late.copy_(slots, non_blocking=True)

        pair.tree.allocate = allocate_late  # type: ignore[method-assign]
        assert finished(pair.start(handle, tokens_of(71), after=())).result.ok


def test_another_stream_can_wait_for_the_copy(daemon: Any) -> None:
    with paired(daemon) as pair:
        warmed(pair)
        handle = pair.ready("s", tokens_of(71))
        end = asleep(torch.cuda.Stream(DEVICE))
        job = pair.start(handle, tokens_of(71), after=[end])
        with pytest.raises(InvalidRequest, match="no copy is launched"):
            _ = job.finished
        assert not job.step(STEP_BYTES)
        slots = job._slots
        assert slots is not None
        reader = torch.cuda.Stream(DEVICE)
        with torch.cuda.stream(reader):
            reader.wait_event(job.finished)
            seen = pair.rows(0).clone()
        assert not end.query()
        reader.synchronize()
        assert torch.equal(seen.cpu()[slots], pair._truth["s"][0])
        assert finished(job).result.ok
        assert job.finished.query()


def test_one_stream_serves_all_ingests(daemon: Any) -> None:
    with paired(daemon) as pair:
        own = pair.ingester.stream_of(DEVICE)
        assert own is not None and own == pair.ingester.stream_of(DEVICE)
        assert own != torch.cuda.default_stream(DEVICE)


# --- nothing waits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [Tree, DeviceTree], ids=["slots on the host", "slots on the GPU"])
def test_a_scheduler_is_not_kept_waiting_while_the_device_sleeps(daemon: Any, tree: type[Tree]) -> None:
    with paired(daemon, tree=tree) as pair:
        warmed(pair)
        handle = pair.ready("s", tokens_of(71))
        end = asleep(torch.cuda.Stream(DEVICE))
        job = pair.start(handle, tokens_of(71), after=[end])
        for _ in range(50):
            started_s = time.monotonic()
            assert not job.step(STEP_BYTES)
            assert (time.monotonic() - started_s) * MS_PER_S < STEP_MS_MAX
        assert not end.query(), "the device sleeps still"
        assert not job.is_waiting and job.is_on_device
        assert pair.is_leased(handle) and pair.tree.inserts == []
        assert finished(job).result.ok


@pytest.mark.parametrize("kind", ["mha", "odd"])
def test_nor_when_a_part_of_it_is_there(daemon: Any, kind: str) -> None:
    with paired(daemon, KINDS[kind]) as pair:
        check_halves(pair, 37, 75)
        handle = pair.ready("s", tokens_of(90))
        assert pair.tree.tokens("s") == tokens_of(75)
        end = asleep(torch.cuda.Stream(DEVICE))
        job = pair.start(handle, tokens_of(90), after=[end])
        for _ in range(50):
            assert not job.step(STEP_BYTES)
        assert not end.query(), "the device sleeps still"
        assert finished(job).result.ok


# --- what is given up ends first ---------------------------------------------------------------------


def test_slots_of_a_cancelled_ingest_go_back_when_its_copy_has_ended(daemon: Any) -> None:
    with paired(daemon) as pair:
        warmed(pair)
        handle = pair.ready("s", tokens_of(71))
        end = asleep(torch.cuda.Stream(DEVICE))
        job = pair.start(handle, tokens_of(71), after=[end])
        assert not job.step(STEP_BYTES)
        assert job.cancel()
        assert not job.step(STEP_BYTES) and not end.query()
        assert len(pair.tree._lent) == 71 and pair.is_leased(handle)
        finished(job)
        assert end.query()
        assert job.result.reason == Reason.INGEST_FAILED
        assert not pair.tree._lent and pair.tree.inserts == []
        assert not pair.is_leased(handle) and pair.state(handle) is State.READY
        assert pair.ingest(handle, tokens_of(71)).ok


def test_what_nobody_steps_is_given_back_by_a_later_call(daemon: Any) -> None:
    with paired(daemon) as pair:
        warmed(pair)
        handle = pair.ready("s", tokens_of(71))
        end = asleep(torch.cuda.Stream(DEVICE))
        job = pair.start(handle, tokens_of(71), after=[end])
        assert not job.step(STEP_BYTES)
        assert job.cancel()
        del job
        pair.ingester.reap()
        assert len(pair.tree._lent) == 71
        torch.cuda.synchronize(DEVICE)
        pair.ingester.reap()
        assert not pair.tree._lent


@pytest.mark.parametrize("wrong", [[NUM_SLOTS, 1], [3, 3], [-1, 2], [2**32 + 5, 1], [5 - 2**32, 1]], ids=str)
def test_wrong_slots_on_the_device_are_refused_and_nothing_is_written(daemon: Any, wrong: list[int]) -> None:
    with paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(2))
        given = torch.tensor(wrong, device=DEVICE)
        returned: list[torch.Tensor] = []
        pair.tree.allocate = lambda num_tokens: given  # type: ignore[method-assign]
        pair.tree.free = returned.append  # type: ignore[method-assign]
        answer = pair.ingest(handle, tokens_of(2))
        assert (answer.ok, answer.reason) == (False, Reason.INVALID_REQUEST)
        assert [x is given for x in returned] == [True]
        torch.cuda.synchronize(DEVICE)
        assert pair.is_poison()


# --- where pool and arena are, and who dies ------------------------------------------------------------


def test_an_arena_on_the_host_is_refused_with_what_to_set() -> None:
    with (
        running(size="4MiB") as daemon,
        Client(str(daemon.socket_path)) as client,
        pytest.raises(ConfigError, match='on cuda:0, and its arena on cpu: set device = "cuda:0"'),
    ):
        Ingester(client, 0, gpu_pool(MHA, 64, DEVICE), Tree(MHA, 64))


def test_a_pool_on_the_host_is_refused_with_what_to_set(daemon: Any) -> None:
    with (
        Client(str(daemon.socket_path)) as client,
        pytest.raises(ConfigError, match='on cpu, and its arena on cuda:0: set device = "cpu"'),
    ):
        Ingester(client, 0, make_pool(MHA, 64, seed=None), Tree(MHA, 64))


def test_a_daemon_that_dies_between_lease_and_copy_is_noticed_and_nothing_is_read() -> None:
    with running(device="cuda:0", size="64MiB") as daemon, paired(daemon) as pair:
        handle = pair.ready("s", tokens_of(71))
        job = pair.start(handle, tokens_of(71))
        daemon.kill()
        wait_for(lambda: pair.ingester.slabs._arenas[0].is_abandoned, "its end is seen")
        assert finished(job).result.reason == Reason.LEASE_EXPIRED
        assert pair.tree.inserts == [] and not pair.tree._lent
        torch.cuda.synchronize(DEVICE)
        assert pair.is_poison()
        with pytest.raises(InvalidRequest, match="no copy is launched"):
            _ = job.finished


def test_after_a_restart_of_the_daemon_the_next_ingest_reads_the_new_arena() -> None:
    with running(device="cuda:0", size="64MiB") as daemon, paired(daemon) as pair:
        lost = pair.start(pair.ready("s", tokens_of(71)), tokens_of(71))
        daemon.kill()
        daemon.restart()
        assert not finished(lost).result.ok
        for client in (pair.p, pair.d):
            client.connect(wait_s=PATIENCE_S)
        assert pair.ingest(pair.ready("s", tokens_of(71)), tokens_of(71)).ok


def test_an_ingest_of_a_dead_daemon_reads_nothing_whatever_was_mapped_since() -> None:
    with running(device="cuda:0", size="64MiB") as daemon, paired(daemon) as pair:
        lost = pair.start(pair.ready("s", tokens_of(71)), tokens_of(71))
        daemon.kill()
        daemon.restart()
        for client in (pair.p, pair.d):
            client.connect(wait_s=PATIENCE_S)
        handle = pair.ready("t", tokens_of(71))
        other = pair.ingester.start("t", tokens_of(71), handle)
        assert not lost.is_on_device and lost.step(STEP_BYTES)
        assert lost.result.reason == Reason.LEASE_EXPIRED
        torch.cuda.synchronize(DEVICE)
        assert pair.is_poison()
        assert finished(other).result.ok
        assert pair.tree.inserts == ["t"]


def test_a_dead_daemons_arena_is_let_go_of_though_nobody_asks_for_anything() -> None:
    others = set(cudamapping._openings)
    with running(device="cuda:0", size="64MiB") as daemon, paired(daemon) as pair:
        job = finished(pair.start(pair.ready("s", tokens_of(71)), tokens_of(71)))
        assert job.result.ok
        pair._planes.clear()
        gc.collect()
        opened = set(cudamapping._openings) - others
        assert opened
        daemon.kill()
        wait_for(lambda: not opened & set(cudamapping._openings))
        daemon.restart()
        for client in (pair.p, pair.d):
            client.connect(wait_s=PATIENCE_S)
        assert pair.ingest(pair.ready("s", tokens_of(71)), tokens_of(71)).ok


def test_letting_go_of_a_dead_daemons_arena_does_not_wait_for_a_forward_pass() -> None:
    with running(device="cuda:0", size="64MiB") as daemon, paired(daemon) as pair:
        warmed(pair)
        daemon.kill()
        daemon.restart()
        for client in (pair.p, pair.d):
            client.connect(wait_s=PATIENCE_S)
        old_planes = list(pair._planes.values())
        pair._planes.clear()
        handle = pair.ready("s", tokens_of(71))
        num_openings = len(cudamapping._openings)
        # The new one is asked for meanwhile, which takes some tenths of a second on a busy host.
        end = asleep(torch.cuda.Stream(DEVICE), 8)
        old_planes.clear()
        gc.collect()
        job = pair.start(handle, tokens_of(71), after=())
        for _ in range(5):
            job.step(STEP_BYTES)
        assert not end.query(), "the device sleeps still"
        assert len(cudamapping._openings) < num_openings, "the old one is let go of"
        assert finished(job).result.ok
        cudamapping.wait_closed()
        assert end.query()


# --- memory ----------------------------------------------------------------------------------------------


def held_in_part(pair: GpuPair, sessions: Sequence[str]) -> dict[str, int]:
    """Let P hold 37 tokens of each session, so that a word is cut, and return handles of 75."""
    handles = {}
    for session in sessions:
        handle = pair.ready(session, tokens_of(37))
        assert finished(pair.ingester.start(session, tokens_of(37), handle)).result.ok
        handles[session] = pair.ready(session, tokens_of(75))
    return handles


def test_private_memory_is_taken_once_for_all_ingests(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    size_bytes = 8 << 20
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", size_bytes)
    with paired(daemon, KINDS["odd"]) as pair:
        handles = held_in_part(pair, "abcde")
        before = torch.cuda.memory_allocated(DEVICE)
        jobs = [pair.ingester.start(session, tokens_of(75), handle) for session, handle in handles.items()]
        assert torch.cuda.memory_allocated(DEVICE) - before < size_bytes
        while not all(job.done for job in jobs):
            for job in jobs:
                job.step(1)
                assert torch.cuda.memory_allocated(DEVICE) - before < 2 * size_bytes
        assert all(job.result.ok for job in jobs)
        assert pair.ingester.private.size_bytes == size_bytes


def test_when_the_device_is_full_the_snapshot_stays_and_is_ingested_later(daemon: Any) -> None:
    with paired(daemon, KINDS["odd"]) as pair:
        (handle,) = held_in_part(pair, "s").values()
        job = pair.start(handle, tokens_of(75))
        torch.cuda.synchronize(DEVICE)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-6, DEVICE)
        try:
            assert finished(job).result.reason == Reason.INGEST_FAILED
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
        assert pair.state(handle) is State.READY and not pair.is_leased(handle) and not pair.tree._lent
        assert pair.ingest(handle, tokens_of(75)).ok


@two_gpus
def test_ingests_from_a_peer_take_turns_with_the_private_memory(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda.Driver, "can_access_peer", lambda *_: False)
    monkeypatch.setattr(devicescatter, "PRIVATE_BYTES", 10_000)
    with paired(daemon, KINDS["sglang"], device=torch.device("cuda:1")) as pair:
        assert pair.ingester.private.size_bytes == 10_000, "it is needed for sure, so it is there at once"
        handles = {session: pair.ready(session, tokens_of(75)) for session in "abc"}
        jobs = [pair.ingester.start(session, tokens_of(75), handle) for session, handle in handles.items()]
        while not all(job.done for job in jobs):
            for job in jobs:
                job.step(1)
        assert all(job.result.ok for job in jobs)


def test_the_arena_is_mapped_before_the_first_ingest(daemon: Any) -> None:
    with paired(daemon) as pair:
        assert list(pair.ingester.slabs._arenas) == [0]


def test_the_jobs_are_those_of_the_pools_device(daemon: Any) -> None:
    with paired(daemon) as pair:
        assert pair.ingester.copies is choose_copy(DEVICE)
        assert pair.ingester.copies.is_async

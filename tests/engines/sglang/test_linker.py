"""SnapdLinker in SGLang's own trees: a D's and a P's in one process, with a real daemon between them."""

import itertools
import os
import sys
import threading
import types
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from linker_stage import PATIENCE_S, Gate, serving, wait_until

from snapd.client import Client
from snapd.core.events import State
from snapd.errors import ConfigError, Reason, UnsupportedEngine
from snapd.mapping import map_arena
from tests.integration.daemon_process import DaemonProcess

pytestmark = pytest.mark.usefixtures("sglang")

SIZE_TOKENS = 1_024
KINDS = tuple(itertools.product(("mha", "mla"), ("python", "rust"), (1, 16)))
_models = itertools.count()


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with serving(size="16MiB") as served:
        yield served


@pytest.fixture(scope="module")
def server_args(sglang: None) -> Any:
    """SGLang's arguments, published as a scheduler's process does."""
    del sglang
    # SGLang compiles its hash of pages with what is beside the interpreter.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="dummy", device="cpu")
    publish(arguments, role="test", ranks=SpawnRanks(world_rank=0))
    return arguments


class Engine:
    """SGLang's pool, allocator and tree with a linker, and what its scheduler does with them."""

    def __init__(self, server_args: Any, kind: tuple[str, str, int], settings: dict[str, Any]) -> None:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        pool_kind, core, self.page = kind
        common: dict[str, Any] = {
            "size": SIZE_TOKENS, "page_size": self.page, "dtype": torch.bfloat16, "layer_num": 3,
            "device": "cpu", "enable_memory_saver": False,
        }  # fmt: skip
        if pool_kind == "mha":
            self.pool = MHATokenToKVPool(head_num=2, head_dim=16, **common)
            self.buffers = [*self.pool.k_buffer, *self.pool.v_buffer]
        else:
            self.pool = MLATokenToKVPool(kv_lora_rank=24, qk_rope_head_dim=8, **common)
            self.buffers = list(self.pool.kv_buffer)
        arguments = (SIZE_TOKENS, torch.bfloat16, "cpu", self.pool)
        self.allocator = (
            TokenToKVPoolAllocator(*arguments, need_sort=False)
            if self.page == 1
            else PagedTokenToKVPoolAllocator(
                SIZE_TOKENS, self.page, torch.bfloat16, "cpu", self.pool, need_sort=False
            )
        )
        rows = ReqToTokenPool(size=8, max_context_len=1_024, device="cpu", enable_memory_saver=False)
        self.params = CacheInitParams(
            disable=False, req_to_token_pool=rows, token_to_kv_pool_allocator=self.allocator,
            page_size=self.page,
        )  # fmt: skip
        self.params.tree_components = (ComponentType.FULL,)
        self.params.tree_core_backend = core
        self.tree = UnifiedRadixCache(self.params)
        config = {
            "linker": "SnapdLinker", "linker_module_path": "snapd.engines.sglang_linker",
            "linker_extra_config": settings,
        }  # fmt: skip
        self.linker = create_unified_cache_linker(
            server_args, self.params, backend="dynamic", config=config, components=set(self.tree.components)
        )
        self.tree.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)

    def request(self, rid: str, tokens: Sequence[int], **fields: Any) -> Any:
        """Return a request that the scheduler has just matched."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        request = Req(rid, "", array("q", tokens), SamplingParams(max_new_tokens=4), **fields)
        request.init_next_round_input(self.tree)
        return request

    def load(self, request: Any) -> torch.Tensor | None:
        """Load what was found for a request, as when a batch is made up; return its slots."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        _, request.last_node = self.tree.init_load_back(
            InitLoadBackParams(
                best_match_node=request.best_match_node, host_hit_length=request.host_hit_length, req=request
            )
        )
        return self.tree.linker.private_load_indices.get(request.rid)

    def forward(self, request: Any) -> None:
        """Do what a forward pass does to the cache: wait for every layer, and then for the loads."""
        index = self.tree.ready_to_load_host_cache()
        self.linker.layer_done_counter.set_consumer(index)
        for layer in range(3):
            self.pool.get_key_buffer(layer)
        assert self.tree.finish_external_linker_loads([request]) == []

    def compute(self, rid: str, tokens: Sequence[int], session_id: str | None = None) -> torch.Tensor:
        """Compute a request's KV, and have it inserted, as after its forward pass; return its slots."""
        request = self.request(rid, (*tokens, 5, 6, 7))
        request.session_id = session_id
        request.lock = self.tree.lock(request.last_node)
        held = self.tree.path_device_indices(request.last_node)[: request.prefix_len]
        slots = torch.cat([held, self.allocator.alloc(len(tokens) - len(held)).long()])
        for index, buffer in enumerate(self.buffers):
            for at in range(len(held), len(tokens)):
                buffer[slots[at]] = truth(tokens[: at + 1], index, buffer[0])
        self.insert(request, slots)
        return slots

    def insert(self, request: Any, slots: torch.Tensor) -> None:
        """Have the tree take a request's tokens, and hear of the offloads that this leads to."""
        rows = self.tree.req_to_token_pool
        rows.alloc([request])
        rows.write((request.kv.req_pool_idx, slice(0, len(slots))), slots.to(torch.int32))
        request.kv.kv_allocated_len = request.kv.kv_committed_len = len(slots)
        self.tree.checkpoint(request, up_to=len(slots))
        wait_until(self._settled, "every offload is done with")
        self.tree.unlock(request.lock)

    def _settled(self) -> bool:
        self.tree.check_hicache_events()
        return not self.tree.linker.pending_offloads

    def assert_holds(self, tokens: Sequence[int], slots: torch.Tensor, start: int = 0) -> None:
        for index, buffer in enumerate(self.buffers):
            for at, slot in enumerate(slots.tolist(), start):
                assert torch.equal(buffer[slot], truth(tokens[: at + 1], index, buffer[0]))

    def assert_nothing_is_lost(self) -> None:
        """Every slot can be had again."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=10**6))
        assert self.allocator.available_size() == SIZE_TOKENS


def truth(tokens: Sequence[int], plane: int, like: torch.Tensor) -> torch.Tensor:
    """Return the KV of the last token, which follows from all before it."""
    seed = hash((tuple(tokens), plane)) & 0x7FFF_FFFF
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.dtype)


class Pair:
    """A D and a P."""

    def __init__(
        self, daemon: DaemonProcess, server_args: Any, kind: tuple[str, str, int], **settings: Any
    ) -> None:
        self.daemon = daemon
        common = {
            "socket_path": str(daemon.socket_path), "timeout_s": 30.0, "retry_s": 0.05,
            "model": f"model-{next(_models)}", **settings,
        }  # fmt: skip
        self.p = Engine(server_args, kind, common | {"role": "prefill"})
        self.d = Engine(server_args, kind, common | {"role": "decode"})

    def corrupt(self) -> None:
        arena = map_arena(str(self.daemon.socket_path), 0, True, PATIENCE_S)
        try:
            for at in range(0, arena.size_bytes, 64):
                arena.buffer[at] ^= 0x5A
        finally:
            arena.close()

    def close(self) -> None:
        for engine in (self.d, self.p):
            engine.tree.release_host_resources()
            engine.assert_nothing_is_lost()


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}, {kind[1]}, page {kind[2]}")
def pair(daemon: DaemonProcess, server_args: Any, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(daemon, server_args, request.param)
    yield made
    made.close()


@pytest.fixture
def paged(daemon: DaemonProcess, server_args: Any) -> Iterator[Pair]:
    made = Pair(daemon, server_args, ("mha", "rust", 16))
    yield made
    made.close()


PROMPT = tuple(range(1_000, 1_064))
ANSWER = tuple(range(2_000, 2_096))


def test_what_d_computes_p_loads_and_its_tree_takes(pair: Pair) -> None:
    """P computed the prompt itself, and loads the answer only."""
    p, tokens = pair.p, (*PROMPT, *ANSWER)
    own = p.compute("p1", PROMPT)
    pair.d.compute("d1", PROMPT)
    pair.d.compute("d1", tokens)
    request = p.request("p2", (*tokens, 5, 6, 7))
    assert (request.prefix_len, request.host_hit_length) == (len(PROMPT), len(ANSWER))
    request.lock = p.tree.lock(request.last_node)
    slots = p.load(request)
    assert slots is not None
    p.forward(request)
    p.assert_holds(tokens, slots, start=len(PROMPT))
    p.insert(request, torch.cat([own, slots]))
    again = p.request("p3", (*tokens, 9))
    assert (again.prefix_len, again.host_hit_length) == (len(tokens), 0)
    assert torch.equal(p.tree.path_device_indices(again.last_node), torch.cat([own, slots]))


def test_a_prompt_that_goes_another_way_loads_what_is_equal(pair: Pair) -> None:
    pair.d.compute("d1", (*PROMPT, *ANSWER))
    equal = (*PROMPT, *ANSWER[:48])
    request = pair.p.request("p1", (*equal, *range(3_000, 3_040)))
    assert (request.prefix_len, request.host_hit_length) == (0, len(equal))
    slots = pair.p.load(request)
    assert slots is not None
    pair.p.forward(request)
    pair.p.assert_holds(equal, slots)
    pair.p.allocator.free(slots)


def test_corrupt_bytes_make_sglang_compute(pair: Pair) -> None:
    pair.d.compute("d1", (*PROMPT, *ANSWER))
    request = pair.p.request("p1", (*PROMPT, *ANSWER, 5))
    assert request.host_hit_length == len(PROMPT) + len(ANSWER)
    pair.corrupt()
    assert pair.p.load(request) is None
    assert pair.p.tree.ready_to_load_host_cache() == -1
    assert pair.p.allocator.available_size() == SIZE_TOKENS


def test_pages_of_another_salt_are_not_found(paged: Pair) -> None:
    paged.d.compute("d1", PROMPT)
    assert paged.p.request("p1", (*PROMPT, 5), extra_key="salt").host_hit_length == 0
    assert paged.p.request("p2", (*PROMPT, 5)).host_hit_length == len(PROMPT)


def test_sglangs_session_is_in_the_snapshots_name(paged: Pair) -> None:
    paged.d.compute("d1", PROMPT, session_id="chat-17")
    with Client(str(paged.daemon.socket_path), timeout_s=PATIENCE_S) as client:
        names = [s.session_id for s in client.list_sessions(states=(State.READY,), limit=1_000).sessions]
    assert any(name.startswith("chat-17/") for name in names)


def test_a_load_that_is_cancelled_is_not_waited_for(paged: Pair) -> None:
    paged.d.compute("d1", PROMPT)
    request = paged.p.request("p1", (*PROMPT, 5))
    slots = paged.p.load(request)
    paged.p.tree.linker.release_request("p1")
    assert paged.p.tree.ready_to_load_host_cache() == -1
    assert paged.p.tree.finish_external_linker_loads([request]) == []
    assert not paged.p.linker.cancel_queued_load("p1")
    paged.p.allocator.free(slots)


def loaded(pair: Pair) -> tuple[Any, torch.Tensor]:
    """Have D compute and P accept a load, as a batch that is made up; return its request and its slots."""
    pair.d.compute("d1", (*PROMPT, *ANSWER))
    request = pair.p.request("p1", (*PROMPT, *ANSWER, 5))
    slots = pair.p.load(request)
    assert slots is not None
    return request, slots


def test_a_layer_is_waited_for_and_no_longer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass has the first layer while the second is not there, and waits for that one."""
    p, gate = pair.p, Gate(monkeypatch, layers=1)
    request, slots = loaded(pair)
    index = p.tree.ready_to_load_host_cache()
    p.linker.layer_done_counter.set_consumer(index)
    gate.wait()
    p.pool.get_key_buffer(0)
    for at, buffer in enumerate(p.buffers):
        is_first = at % 3 == 0
        for place in (0, len(slots) - 1):
            expected = truth((*PROMPT, *ANSWER)[: place + 1], at, buffer[0])
            assert torch.equal(buffer[int(slots[place])], expected) is is_first
    futures = p.linker.layer_done_counter.futures[index]
    assert [future.done() for future in futures] == [True, False, False]
    waits, read = threading.Event(), threading.Event()
    wait = futures[1].exception

    def wait_and_tell() -> BaseException | None:
        waits.set()
        return wait()

    def read_second_layer() -> None:
        p.pool.get_value_buffer(1)
        read.set()

    monkeypatch.setattr(futures[1], "exception", wait_and_tell)
    thread = threading.Thread(target=read_second_layer)
    thread.start()
    assert waits.wait(PATIENCE_S)
    assert not read.is_set() and not futures[1].done()
    gate.opened.set()
    thread.join()
    assert p.tree.finish_external_linker_loads([request]) == []
    p.assert_holds((*PROMPT, *ANSWER), slots)
    p.allocator.free(slots)


def test_bytes_that_change_after_they_were_compared_end_the_request_with_an_error(pair: Pair) -> None:
    """SGLang drops what the forward pass made of them, and its tree never has them."""
    p = pair.p
    request, slots = loaded(pair)
    pair.corrupt()
    index = p.tree.ready_to_load_host_cache()
    p.linker.layer_done_counter.set_consumer(index)
    for layer in range(3):
        p.pool.get_key_buffer(layer)
    assert p.tree.finish_external_linker_loads([request]) == [request]
    assert request.skip_radix_cache_insert
    assert request.discard_output_reason.status_code == 503
    p.allocator.free(slots)
    again = p.request("p2", (*PROMPT, *ANSWER, 5))
    assert (again.prefix_len, again.host_hit_length) == (0, 0)


def test_a_load_whose_lease_was_over_ends_the_request_when_its_layers_were_all_there(
    paged: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon says so when it is asked at the end."""
    p, gate = paged.p, Gate(monkeypatch, layers=3)
    request, slots = loaded(paged)
    index = p.tree.ready_to_load_host_cache()
    gate.wait()
    p.linker.layer_done_counter.set_consumer(index)
    for layer in range(3):
        p.pool.get_key_buffer(layer)
    with Client(str(paged.daemon.socket_path), timeout_s=PATIENCE_S) as client:
        for job in p.linker._batches[index].jobs:
            refusal = {"ok": False, "reason": Reason.INGEST_FAILED, "keep": True}
            client.vote(job.slab_handle, 0, job._lease.lease_id, **refusal)
    gate.opened.set()
    assert p.tree.finish_external_linker_loads([request]) == [request]
    assert p.linker._batches == {}
    p.allocator.free(slots)


def test_sglangs_flush_returns_when_no_slot_is_written_any_more(
    paged: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, gate = paged.p, Gate(monkeypatch, layers=1)
    loaded(paged)
    index = p.tree.ready_to_load_host_cache()
    gate.wait()
    futures = p.linker.layer_done_counter.futures[index]
    batch = p.linker._batches[index]
    thread = threading.Thread(target=p.tree.reset)
    thread.start()
    wait_until(lambda: batch.is_stopping, "asked to stop")
    assert thread.is_alive() and not batch.has_ended
    gate.opened.set()
    thread.join()
    assert batch.has_ended and all(future.done() for future in futures)
    assert p.linker._batches == {} and p.linker.layer_done_counter.futures == {}
    p.allocator.clear()
    p.tree.req_to_token_pool.clear()
    request = p.request("p2", (*PROMPT, *ANSWER, 5))
    slots = p.load(request)
    assert slots is not None
    p.forward(request)
    p.assert_holds((*PROMPT, *ANSWER), slots)
    p.allocator.free(slots)


def test_loads_can_be_whole_before_they_are_accepted(daemon: DaemonProcess, server_args: Any) -> None:
    pair = Pair(daemon, server_args, ("mha", "rust", 16), layer_wise=False)
    request, slots = loaded(pair)
    pair.p.assert_holds((*PROMPT, *ANSWER), slots)
    pair.p.forward(request)
    pair.p.allocator.free(slots)
    pair.close()


def test_p_offloads_nothing_and_sglang_does_not_ask_again(paged: Pair) -> None:
    paged.p.compute("p1", PROMPT)
    assert not paged.p.tree.linker.pending_offloads
    assert paged.p.linker.num_completed_offloads() == 0
    assert paged.d.request("d1", (*PROMPT, 5)).host_hit_length == 0


def test_d_looks_nothing_up(paged: Pair) -> None:
    paged.d.compute("d1", PROMPT)
    assert paged.d.linker.lookup("d2", [types.SimpleNamespace(name="kv", keys=["a"])]) == []
    assert not paged.d.linker.load("d2", [])


def test_emptying_sglangs_cache_leaves_the_daemons(paged: Pair) -> None:
    paged.d.compute("d1", PROMPT)
    for engine in (paged.d, paged.p):
        engine.tree.reset()
        engine.allocator.clear()
        engine.tree.req_to_token_pool.clear()
    assert paged.p.request("p1", (*PROMPT, 5)).host_hit_length == len(PROMPT)


def test_without_a_daemon_sglang_goes_on(server_args: Any) -> None:
    with serving() as daemon:
        pair = Pair(daemon, server_args, ("mha", "rust", 16))
        daemon.stop()
        pair.d.compute("d1", PROMPT)
        assert pair.p.request("p1", (*PROMPT, 5)).host_hit_length == 0
        pair.close()
        daemon.restart()


def test_other_weights_have_other_pages_from_then_on(paged: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own version, which changes while it serves."""
    from sglang.srt import runtime_context

    paged.d.compute("d1", PROMPT)
    assert paged.p.request("p1", (*PROMPT, 5)).host_hit_length == len(PROMPT)
    weights = types.SimpleNamespace(weight_version="2")
    monkeypatch.setattr(runtime_context, "get_serving", lambda: weights)
    assert paged.p.request("p2", (*PROMPT, 5)).host_hit_length == 0
    more = tuple(range(4_000, 4_064))

    def is_found() -> bool:
        # The first ones may come before P has declared the layout of its new weights.
        paged.d.tree.reset()
        paged.d.allocator.clear()
        paged.d.tree.req_to_token_pool.clear()
        paged.d.compute("d2", more)
        return paged.p.request("p3", (*more, 5)).host_hit_length == len(more)

    wait_until(is_found, "found")
    assert paged.p.request("p4", (*PROMPT, 5)).host_hit_length == 0


def test_a_weights_version_that_is_set_is_kept(server_args: Any) -> None:
    del server_args
    from snapd.engines.sglang_linker import _weight_version
    from snapd.engines.support import EngineSettings

    assert _weight_version(EngineSettings(weight_version="mine"))() == "mine"


# --- what is refused ---------------------------------------------------------------------------


def test_a_role_must_be_known(server_args: Any) -> None:
    del server_args
    from snapd.engines.sglang_linker import Role, read_role

    assert read_role({}, "prefill")[0] is Role.PREFILL
    assert read_role({"role": "decode"}, "null")[0] is Role.DECODE
    assert read_role({"tenant": "a"}, "decode")[1].tenant == "a"
    with pytest.raises(ConfigError, match="role is 'null': set it to 'prefill' or 'decode'"):
        read_role({}, "null")
    with pytest.raises(ConfigError, match="role is 'both'"):
        read_role({"role": "both"}, "prefill")
    with pytest.raises(ConfigError, match="did you mean 'tenant'"):
        read_role({"tennant": "a"}, "prefill")


@pytest.mark.parametrize(
    ("fields", "components", "says"),
    [
        ({}, ("FULL", "SWA"), "FULL, SWA"),
        ({}, ("FULL", "MAMBA"), "MAMBA"),
        ({"mtp_draft_device_pools": (1,)}, ("FULL",), "draft model"),
        ({"sidecar_draft_device_pools": (1,)}, ("FULL",), "draft model"),
        ({"pp_size": 2}, ("FULL",), "pipeline parallelism"),
        ({"attn_cp_size": 2}, ("FULL",), "context parallelism"),
        ({"dp": True}, ("FULL",), "data parallel"),
    ],
)
def test_what_snapd_does_not_move_is_refused_by_name(
    server_args: Any, fields: dict[str, Any], components: tuple[str, ...], says: str
) -> None:
    del server_args
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from snapd.engines.sglang_linker import check_supported

    known = {
        "mtp_draft_device_pools": (), "sidecar_draft_device_pools": (), "pp_size": 1, "attn_cp_size": 1,
    }  # fmt: skip
    params = types.SimpleNamespace(**known | fields)
    chosen = {ComponentType[name] for name in components}
    with pytest.raises(UnsupportedEngine, match=says):
        check_supported(params, chosen, is_dp_attention=fields.get("dp", False))
    check_supported(types.SimpleNamespace(**known), {ComponentType.FULL}, is_dp_attention=False)

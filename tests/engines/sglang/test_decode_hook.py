"""D's loop hears that offers are done: the hook, in SGLang's own registry."""

import collections
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from snapd.errors import UnsupportedEngine

pytestmark = pytest.mark.usefixtures("sglang")

TARGET = "sglang.srt.managers.scheduler.Scheduler.process_decode_queue"


@pytest.fixture
def scheduler(sglang: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A scheduler that says what it was asked; SGLang's own cannot be imported without kernels."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from snapd.engines import sglang_decode

    done: list[str] = []

    class Scheduler:
        tree_cache = types.SimpleNamespace(check_hicache_events=lambda: done.append("offloads"))

        def __init__(self) -> None:
            self.done = done

        def process_decode_queue(self) -> None:
            done.append("queue")

    module = types.ModuleType("sglang.srt.managers.scheduler")
    module.Scheduler = Scheduler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(HookRegistry, "_hooks", collections.defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    sglang_decode._hook_decode_loop.cache_clear()
    yield Scheduler()
    sglang_decode._hook_decode_loop.cache_clear()


def test_every_step_of_ds_loop_hears_of_offloads(scheduler: Any) -> None:
    """Once, however many linkers there were, and before requests are admitted."""
    from snapd.engines.sglang_decode import hear_of_offloads

    hear_of_offloads("decode", can_switch=False)
    hear_of_offloads("decode", can_switch=False)
    scheduler.process_decode_queue()
    assert scheduler.done == ["offloads", "queue"]


@pytest.mark.parametrize("mode", ["null", "prefill"])
def test_other_loops_hear_of_them_by_themselves(scheduler: Any, mode: str) -> None:
    from snapd.engines.sglang_decode import hear_of_offloads

    hear_of_offloads(mode, can_switch=False)
    scheduler.process_decode_queue()
    assert scheduler.done == ["queue"]


def test_a_hook_that_sglang_does_not_take_is_refused(scheduler: Any) -> None:
    """SGLang passes over a function that was hooked before, and says nothing."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from snapd.engines.sglang_decode import hear_of_offloads

    HookRegistry.register(TARGET, lambda scheduler: None)
    HookRegistry.apply_hooks()
    with pytest.raises(UnsupportedEngine, match="another plugin has one"):
        hear_of_offloads("decode", can_switch=False)


def test_a_release_without_such_a_loop_is_refused(scheduler: Any) -> None:
    from snapd.engines.sglang_decode import hear_of_offloads

    del type(scheduler).process_decode_queue
    with pytest.raises(UnsupportedEngine, match="process_decode_queue"):
        hear_of_offloads("decode", can_switch=False)


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_an_engine_that_may_change_its_part_is_refused(scheduler: Any, mode: str) -> None:
    from snapd.engines.sglang_decode import hear_of_offloads

    with pytest.raises(UnsupportedEngine, match="--enable-pd-role-switch"):
        hear_of_offloads(mode, can_switch=True)


@pytest.mark.parametrize(
    ("mode", "can_switch", "why"), [("prefill", True, "--enable-pd-role-switch"), ("decode", False, TARGET)]
)
def test_a_linker_looks_at_the_mode_before_anything_else(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, mode: str, can_switch: bool, why: str
) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.plugins.hook_registry import HookRegistry

    from snapd.engines.sglang_linker import SnapdLinker

    HookRegistry.register(TARGET, lambda scheduler: None)
    HookRegistry.apply_hooks()
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: types.SimpleNamespace(attn_dp_enabled=False))
    arguments = types.SimpleNamespace(disaggregation_mode=mode, enable_pd_role_switch=can_switch)
    params = types.SimpleNamespace(
        mtp_draft_device_pools=None, sidecar_draft_device_pools=None, pp_size=1, attn_cp_size=1
    )
    with pytest.raises(UnsupportedEngine, match=why):
        SnapdLinker(arguments, params, components=[ComponentType.FULL])

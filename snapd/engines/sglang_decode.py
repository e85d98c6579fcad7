"""D's offers under ``--disaggregation-mode decode``: has SGLang hear that they are done.

SGLang locks the pages that it offers to a linker, and unlocks them in its cache's ``check_hicache_events``.
The loops of P and of an ordinary engine call it in every step. D's loop calls it for HiCache only, which is
never there beside a linker: every page that D has offered would stay locked, until no slot is left and D
admits nothing any more. So SGLang's registry of hooks, its place for plugins, has it called in each step.

Source: design, section 9.
"""

import functools
from typing import Any, Final

from snapd.engines.sglang_pools import attribute, sglang_module
from snapd.errors import UnsupportedEngine

_DECODE: Final = "decode"
_STEP: Final = "process_decode_queue"
_TARGET: Final = f"sglang.srt.managers.scheduler.Scheduler.{_STEP}"


def hear_of_offloads(disaggregation_mode: str, *, can_switch: bool) -> None:
    """Have D's loop in this process, if it is to run here, take what the linker is done with.

    Args:
        disaggregation_mode: SGLang's.
        can_switch: it may become another one while SGLang runs.

    Raises:
        UnsupportedEngine: that cannot be had, and D would stop admitting requests after a while; or the mode
            may change, and the linker's part with it.
    """
    if can_switch:
        raise UnsupportedEngine(
            "a P that becomes a D is not supported, nor the other way round: serve without "
            "--enable-pd-role-switch"
        )
    if disaggregation_mode == _DECODE:
        _hook_decode_loop()


@functools.cache
def _hook_decode_loop() -> None:
    plugins = sglang_module("plugins.hook_registry")
    scheduler = attribute(sglang_module("managers.scheduler"), "Scheduler")
    before = attribute(scheduler, _STEP)
    registry = attribute(plugins, "HookRegistry")
    registry.register(_TARGET, _take_offloads, attribute(plugins, "HookType").BEFORE)
    # It logs what goes wrong, and passes over a function that was hooked before.
    registry.apply_hooks()
    if attribute(scheduler, _STEP) is before:
        raise UnsupportedEngine(
            f"SGLang takes no hook for {_TARGET} any more, which D needs to unlock what it has pushed: "
            "another plugin has one; leave it out by SGLANG_PLUGINS"
        )


def _take_offloads(scheduler: Any) -> None:
    scheduler.tree_cache.check_hicache_events()

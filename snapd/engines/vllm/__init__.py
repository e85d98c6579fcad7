"""vLLM's connector, for ``"kv_connector_module_path": "snapd.engines.vllm"``.

vLLM itself is imported when ``SnapdConnector`` is asked for. What decides is in modules that know nothing of
vLLM: ``matching`` and ``scheduling`` for the scheduler's side, ``working`` for the workers', ``kvcache`` for
the memory; ``connector`` is where they meet vLLM.

Source: design, section 9.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snapd.engines.vllm.connector import SnapdConnector

__all__ = ["SnapdConnector"]


def __getattr__(name: str) -> Any:
    if name == "SnapdConnector":
        from snapd.engines.vllm.connector import SnapdConnector

        return SnapdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

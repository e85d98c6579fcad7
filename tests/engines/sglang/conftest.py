"""SGLang's real classes on the CPU. What needs them is skipped, with the reason, where there are none."""

import importlib
import warnings
from pathlib import Path

import pytest

from tools.engines.torchvision_ops import declare_torchvision_ops

HERE = Path(__file__).parent
TIMEOUT_S = 600


def _why_not() -> str:
    """Import what the tests use of SGLang; return why that is not possible, or nothing."""
    declare_torchvision_ops()
    try:
        with warnings.catch_warnings():
            # It names the kinds of GPU that it cannot use here.
            warnings.simplefilter("ignore")
            importlib.import_module("sglang.srt.mem_cache.unified_radix_cache")
    except ImportError as error:
        return f"SGLang cannot be imported: {error}"
    return ""


@pytest.fixture(scope="session")
def sglang() -> None:
    """Skip the test where there is no SGLang."""
    why_not = _why_not()
    if why_not:
        pytest.skip(why_not)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give a test here time: it may be the one that imports SGLang, or has it compile a part of itself."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))

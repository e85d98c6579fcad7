"""SGLang's real classes on the CPU. What needs them is skipped, with the reason, where there are none."""

import importlib
import warnings

import pytest

from tools.engines.torchvision_ops import declare_torchvision_ops


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

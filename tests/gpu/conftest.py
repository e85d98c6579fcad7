"""Which tests nobody else may use the GPU beside."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what holds a GPU's free memory against that of the start; see ``tools/gpu_check.py``."""
    for item in items:
        if "free_at_first" in getattr(item, "fixturenames", ()):
            item.add_marker("alone")

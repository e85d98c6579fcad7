"""Every driver that a test makes is closed at its end: all attempts end once, and nothing leaks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_driver import Driver


@pytest.fixture
def make() -> Iterator[Callable[..., Driver]]:
    """Make drivers; each is stopped, and its log proved, when the test ends."""
    drivers: list[Driver] = []

    def make_driver(*args: Any, **kwargs: Any) -> Driver:
        drivers.append(Driver(*args, **kwargs))
        return drivers[-1]

    yield make_driver
    for driver in drivers:
        driver.close()

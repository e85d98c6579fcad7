"""A path on which Mooncake is a fake."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.doctor.fake_mooncake import install


def forget_mooncake() -> dict[str, object]:
    """Take Mooncake's modules out of this process, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "mooncake"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def fresh_mooncake() -> Iterator[None]:
    """Whatever a test imports as Mooncake is gone afterwards, and what was there before is back."""
    before = forget_mooncake()
    yield
    forget_mooncake()
    sys.modules.update(before)  # type: ignore[arg-type]


@pytest.fixture
def fake_mooncake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_mooncake: None
) -> Callable[[str], Path]:
    """A function that puts a fake Mooncake first on the path, with a fault."""

    def use(fault: str, *needed: str) -> Path:
        monkeypatch.setenv("FAKE_MOONCAKE", fault)
        directory = install(tmp_path / "fake", *needed)
        monkeypatch.syspath_prepend(str(directory))
        return directory

    return use

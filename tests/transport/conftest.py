"""Targets of Mooncake in processes of their own, and this process's engines."""

import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from careful_engine import CarefulEngine
from target import Target, address_of

from snapd.errors import SnapdError
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.mooncake_engines import MooncakeEngines
from snapd.transport.mooncake_package import load_engine_module

SOURCE_BYTES = 8 * 1024 * 1024


@pytest.fixture(scope="session")
def mooncake() -> None:
    """Skips where Mooncake is not installed, with the reason."""
    try:
        load_engine_module()
    except SnapdError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def shared_target(mooncake: None) -> Iterator[Target]:
    """For tests that do it no harm: a process takes a while to start."""
    target = Target()
    yield target
    target.close()


@pytest.fixture
def target(shared_target: Target) -> Target:
    """A target with an empty arena."""
    shared_target.clear()
    return shared_target


@pytest.fixture
def start_target(mooncake: None) -> Iterator[Callable[[], Target]]:
    """A function that starts a target of one's own."""
    with ExitStack() as stack:

        def start() -> Target:
            made = Target()
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture(scope="session")
def engines_of_session(mooncake: None) -> MooncakeEngines:
    """Deleting an engine takes a second: one for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_LOG_LEVEL", "ERROR")
        engines = MooncakeEngines(MooncakeConfig(), make=CarefulEngine)
        engines.release(engines.acquire("127.0.0.1:1", "none"), "127.0.0.1:1")
    return engines


@pytest.fixture
def engines(engines_of_session: MooncakeEngines) -> Iterator[MooncakeEngines]:
    """This process's engines; at the end nothing is left of a test."""
    yield engines_of_session
    engines_of_session.settle()
    assert engines_of_session._sources == {}
    assert [use.writers for use in engines_of_session._uses] == [{}]


@pytest.fixture
def source() -> tuple[mmap.mmap, int]:
    """Bytes to send, none of them 0, and their address."""
    memory = mmap.mmap(-1, SOURCE_BYTES)
    memory[:] = (bytes(range(1, 252)) * (SOURCE_BYTES // 251 + 1))[:SOURCE_BYTES]
    return memory, address_of(memory)

"""Arenas on GPUs with an engine that is not there: what is current while Mooncake looks at the memory."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from cuda_fake import BROKEN, MIB, install

from snapd import cuda
from snapd.cudaarena import CudaArena
from snapd.errors import StartupError
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport import mooncake_offerer
from snapd.transport.mooncake_offerer import MooncakeOfferer


class FakeEngine:
    """Notes which GPU is current when memory is registered and when it is taken back."""

    package = "fake 1"
    settings = {}
    segment_name = "127.0.0.1:17000"

    def __init__(self, config):
        self.seen = []

    def register(self, address, size_bytes):
        self.seen.append(("register", address, size_bytes, *cuda.load_library().stack))

    def unregister(self, address):
        self.seen.append(("unregister", address, *cuda.load_library().stack))

    def probe(self, segment_name):
        return True

    def close(self):
        pass


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(cuda, "load_library", None)
    monkeypatch.setattr(cuda, "_driver", None)
    monkeypatch.setattr(mooncake_offerer, "MooncakeEngine", FakeEngine)
    driver = install()
    yield driver
    driver.check_clean()


def test_each_arena_is_registered_and_taken_back_with_its_own_gpu_current(fake):
    offerer = MooncakeOfferer(MooncakeConfig(), 4 * MIB)
    with CudaArena(0, "cuda:0", 2 * MIB) as first, CudaArena(1, "cuda:1", 6 * MIB) as second:
        assert offerer.register(first) == first.address
        assert offerer.register(second) == second.address
        offerer.close()
        assert offerer._engine.seen == [
            ("register", first.address, 2 * MIB, 0),
            ("register", second.address, 4 * MIB, 1),
            ("register", second.address + 4 * MIB, 2 * MIB, 1),
            ("unregister", second.address + 4 * MIB, 1),
            ("unregister", second.address, 1),
            ("unregister", first.address, 0),
        ]


def test_over_nvlink_an_arena_is_registered_whole(fake):
    """An IPC handle opens the whole allocation, so a piece's would open another place than its own."""
    offerer = MooncakeOfferer(MooncakeConfig(protocol="nvlink_intra"), 4 * MIB)
    with CudaArena(0, "cuda:0", 6 * MIB) as arena:
        offerer.register(arena)
        assert offerer._engine.seen == [("register", arena.address, 6 * MIB, 0)]
        offerer.close()


def test_a_gpu_that_cannot_be_made_current_is_a_startup_error(fake):
    offerer = MooncakeOfferer(MooncakeConfig(), 0)
    with CudaArena(0, "cuda:0", 2 * MIB) as arena:
        fake.fails["cuCtxPushCurrent_v2"] = BROKEN
        with pytest.raises(StartupError, match=r"arena 0: .*cannot be registered .*PushCurrent"):
            offerer.register(arena)
        fake.fails.clear()
    offerer.close()


def test_what_cannot_be_taken_back_does_not_keep_the_daemon_from_ending(fake, capsys):
    offerer = MooncakeOfferer(MooncakeConfig(), 0)
    with CudaArena(0, "cuda:0", 2 * MIB) as arena:
        offerer.register(arena)
        fake.fails["cuCtxPushCurrent_v2"] = BROKEN
        offerer.close()
        fake.fails.clear()
    assert "registration was not taken back" in capsys.readouterr().out

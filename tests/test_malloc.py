"""The C library's threshold for mappings stays where it is: large blocks go back when they are freed."""

import ctypes
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from snapd import malloc
from snapd.malloc import THRESHOLD_BYTES, VARIABLE, keep_threshold

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="this C library has no such threshold"
)
# A large block is freed; whether a smaller one, large still, is a mapping of its own after that.
PATTERN = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
                 "fordblks", "keepcost")]
libc.mallinfo.restype = Info
def is_own_mapping():
    libc.free(libc.malloc(24 << 20))
    before = libc.mallinfo().hblks
    block = libc.malloc(4 << 20)
    count = libc.mallinfo().hblks - before
    libc.free(block)
    return count == 1
"""


def child(script: str, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "GLIBC_TUNABLES")}
    return subprocess.run(
        [sys.executable, "-c", PATTERN + textwrap.dedent(script)],
        env=env | environment, capture_output=True, text=True, check=True, timeout=60,
    ).stdout.strip()  # fmt: skip


def test_left_alone_a_block_that_was_freed_takes_later_ones_into_the_heap() -> None:
    """What the others are held against: if this changes, the module is not needed any more."""
    assert child("print(is_own_mapping())") == "False"


def test_with_the_threshold_kept_large_blocks_go_back_whatever_was_freed_before() -> None:
    script = """
        from snapd.malloc import keep_threshold
        libc.free(libc.malloc(24 << 20))
        print(keep_threshold(), is_own_mapping(), is_own_mapping())
    """
    assert child(script) == "True True True"


def test_with_the_threshold_kept_the_end_of_the_heap_goes_back_too() -> None:
    script = """
        from snapd.malloc import keep_threshold
        libc.free(libc.malloc(24 << 20))
        keep_threshold()
        blocks = [libc.malloc(100 << 10) for _ in range(200)]
        grown = libc.mallinfo().arena
        for block in blocks:
            libc.free(block)
        print(grown > 20 << 20, libc.mallinfo().arena < 10 << 20)
    """
    assert child(script) == "True True"
    # Its end is left to whoever has said what it shall be.
    assert child(script, MALLOC_TRIM_THRESHOLD_=str(64 << 20)) == "True False"


def test_a_daemon_keeps_it_before_its_loop_begins() -> None:
    script = """
        from snapd import daemon
        from snapd.config import Config

        async def serve(config, origin):
            print(is_own_mapping())
            return 0

        daemon._serve = serve
        daemon.run(Config())
    """
    assert child(script) == "True"


@pytest.mark.parametrize(
    "environment",
    [{VARIABLE: str(64 << 20)}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=67108864:glibc.x=1"}],
)
def test_what_the_environment_says_counts(environment: dict[str, str]) -> None:
    script = """
        from snapd.malloc import keep_threshold
        print(keep_threshold(), is_own_mapping())
    """
    assert child(script, **environment) == "False False"
    assert not keep_threshold(environment)


@pytest.mark.parametrize("libc", [SimpleNamespace(), SimpleNamespace(mallopt=lambda option, value: 1)])
def test_another_c_library_is_let_be(libc: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: libc)
    assert keep_threshold({}) is False


def test_a_process_that_cannot_look_into_its_c_library_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: object) -> None:
        raise OSError("static")

    monkeypatch.setattr(malloc.ctypes, "CDLL", refuse)
    assert keep_threshold({}) is False


def test_the_threshold_is_the_one_that_glibc_begins_with() -> None:
    assert THRESHOLD_BYTES == 131_072

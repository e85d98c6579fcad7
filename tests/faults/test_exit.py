"""A process ends while threads of ours are inside torch or Mooncake: in order, and not by an abort."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from snapd.errors import TransportError
from snapd.transport.mooncake_calls import CALLS, Calls

RUN_S = 90.0
_ROOT = Path(__file__).parents[2]

# What is looked after says that it is over, or does not answer.
KEPT = """
import mmap, sys, threading
import torch
from snapd.kv.keeper import KEEPER

class Kept:
    def __init__(self):
        self.memory = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)

    def settle(self):
        if sys.argv[1] == "silent":
            threading.Event().wait()
        return sys.argv[1] == "over"

KEEPER.ensure()
for _ in range(int(sys.argv[2])):
    KEEPER.keep(Kept().settle)
print("ends")
"""

# The peer stands still, and goes on at various times after this process has begun to end.
WAITING = """
import mmap, os, signal, sys, time
sys.path.insert(0, "tests/transport")
from target import SIZE_BYTES, Target, address_of, wait_for
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import Write
from snapd.transport.mooncake_calls import CALLS
from snapd.transport.mooncake_engines import MooncakeEngines
from snapd.transport.mooncake_writer import MooncakeWriter

what, delay_s = sys.argv[1], float(sys.argv[2])
memory = mmap.mmap(-1, SIZE_BYTES)
target = Target()
engines = MooncakeEngines.shared(MooncakeConfig())
writer = MooncakeWriter(engines, target.segment_name, "epoch", target.base_ptr, SIZE_BYTES)
writer.register_source(address_of(memory), SIZE_BYTES)
write = Write(address_of(memory), target.base_ptr, 64)
if what == "notice":
    ticket = writer.submit([write])
    wait_for(lambda: writer.poll(ticket).is_final)
    target.stop()
    writer.submit_notification(write, "text")
else:
    target.stop()
    writer.submit([write])
wait_for(lambda: CALLS.count == 1)
pid = target.process.pid
if os.fork() == 0:
    time.sleep(delay_s)
    os.kill(pid, signal.SIGCONT)
    os._exit(0)
print("ends")
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True, text=True, timeout=RUN_S, cwd=_ROOT, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "count"), [("over", 2_000), ("silent", 100)])
def test_a_process_ends_well_while_much_is_looked_after(answer: str, count: int) -> None:
    """The last reference to a tensor is dropped by another thread, which torch lets into the interpreter."""
    done = run(KEPT, answer, str(count))
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("what", "delay_s"), [("opening", "0.1"), ("opening", "0.3"), ("notice", "0.2")])
def test_a_process_ends_well_while_a_thread_comes_back_from_mooncake(what: str, delay_s: str) -> None:
    """Its peer stood still, and goes on while the process ends."""
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    done = run(WAITING, what, delay_s)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


def test_calls_under_way_are_waited_for_and_none_begins_any_more() -> None:
    calls, is_inside, may_go = Calls(), threading.Event(), threading.Event()

    def call() -> None:
        with calls.under_way():
            is_inside.set()
            may_go.wait(RUN_S)

    thread = threading.Thread(target=call)
    thread.start()
    is_inside.wait(RUN_S)
    assert not calls.rest(0), "one is left"
    with pytest.raises(TransportError, match="ending"), calls.under_way():
        pass
    threading.Timer(0, may_go.set).start()
    assert calls.rest(RUN_S)
    thread.join(RUN_S)


def test_a_forked_child_knows_of_no_call() -> None:
    """The threads that are in them stay in the parent."""
    with CALLS.under_way():
        child = os.fork()
        if not child:
            os._exit(CALLS.count)
        assert os.waitpid(child, 0)[1] == 0
        assert CALLS.count >= 1

"""The first push and the first ingest of a process wait for no GPU: what they need was loaded before."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU that torch can use", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[1] / "integration"))

from daemon_process import clean_environment
from raw_client import running

HERE = Path(__file__).parent
PATIENCE_S = 120
HEAD = """
import sys
from types import SimpleNamespace
sys.path += [{integration!r}, {here!r}]
import torch
daemon = SimpleNamespace(socket_path={socket!r})
"""
PUSH = """
import test_gpu_push as t
d = t.D(daemon)
slots = d.slots(len(t.TOKENS))
d.pusher.connect()
asleep = t.sleep_on(torch.cuda.Stream("cuda:0"))
job = d.pusher.start("s", t.TOKENS, slots, after=[asleep])
for _ in range(5):
    assert not job.step(1), job.result
assert not asleep.query(), "a step waited"
assert t.finish(job).result.ok, job.result
d.close()
"""
INGEST = """
import test_gpu_ingest as t
kind, had, num_tokens, device = {case}
kinds = t.KINDS | dict(
    large=t.LARGE, mixed=t.Kind(k_rows=((1024,), (768,), (132,), (656,)), dtype=torch.uint8)
)
device = torch.device(device)
pair = t.GpuPair(daemon, kinds[kind], num_slots=4096, device=device)
tokens = tuple(range(num_tokens))
if had:
    # Only what the tree says counts; nothing was ingested before.
    pair.tree.lock_prefix = lambda session_id, token_ids: had
    pair.tree.unlock_prefix = lambda session_id: None
    pair.tree.insert = lambda *arguments: None
handle = pair.ready("s", tokens)
torch.cuda.synchronize(device)
asleep = t.asleep(torch.cuda.Stream(device))
job = pair.start(handle, tokens, after=() if had == num_tokens else [asleep])
for _ in range(5):
    assert job.step(t.STEP_BYTES) is False or had == num_tokens, job.result
assert not asleep.query(), "a step waited"
assert t.finished(job).result.ok, job.result
pair.close()
"""
# A kind of pool, how many tokens P holds, how many there are, and where the pool is: all of it, behind a
# part, with sums of many rows, with a cut word, and from another GPU.
INGESTS = [
    ("mha", 0, 71, "cuda:0"),
    ("mha", 37, 71, "cuda:0"),
    ("large", 2001, 3001, "cuda:0"),
    ("large", 3001, 3001, "cuda:0"),
    ("odd", 37, 71, "cuda:0"),
    ("mixed", 37, 71, "cuda:0"),
    ("mixed", 0, 71, "cuda:1"),
    ("mixed", 36, 71, "cuda:1"),
]


@pytest.mark.parametrize("case", INGESTS, ids=str)
def test_no_step_of_the_first_ingest_waits(case: tuple[str, int, int, str]) -> None:
    if case[-1] == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("this machine has not two GPUs")
    with running(device="cuda:0", size="64MiB") as daemon:
        run_child(INGEST, daemon, case=repr(case))


@pytest.mark.parametrize("transport", ["shm", "nvlink_intra"])
def test_no_step_of_the_first_push_waits(transport: str) -> None:
    settings: dict[str, object] = {"device": "cuda:0", "size": "64MiB"}
    if transport != "shm":
        settings |= {"transport": "mooncake", "mooncake.protocol": transport}
    with running(**settings) as daemon:
        run_child(PUSH, daemon)


def run_child(what: str, daemon: Any, **fields: str) -> None:
    """Run a script in a process that has loaded nothing yet."""
    script = textwrap.dedent(HEAD + what).format(
        integration=str(HERE.parent / "integration"), here=str(HERE), socket=str(daemon.socket_path), **fields
    )
    child = subprocess.run(
        [sys.executable, "-c", script],
        env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]

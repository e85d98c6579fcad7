"""The first push and the first ingest of a process wait for no GPU: what they need was loaded before."""

import subprocess
import sys
import textwrap
from pathlib import Path

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
pair = t.GpuPair(daemon)
tokens = t.tokens_of(71)
handle = pair.ready("s", tokens)
asleep = t.asleep(torch.cuda.Stream("cuda:0"))
job = pair.start(handle, tokens, after=[asleep])
for _ in range(5):
    assert not job.step(t.STEP_BYTES), job.result
assert not asleep.query(), "a step waited"
assert t.finished(job).result.ok, job.result
pair.close()
"""


@pytest.mark.parametrize(
    ("what", "transport"), [("push", "shm"), ("push", "nvlink_intra"), ("ingest", "shm")]
)
def test_no_step_of_the_first_one_waits(what: str, transport: str) -> None:
    settings: dict[str, object] = {"device": "cuda:0", "size": "64MiB"}
    if transport != "shm":
        settings |= {"transport": "mooncake", "mooncake.protocol": transport}
    with running(**settings) as daemon:
        script = textwrap.dedent(HEAD + (PUSH if what == "push" else INGEST)).format(
            integration=str(HERE.parent / "integration"), here=str(HERE), socket=str(daemon.socket_path)
        )
        child = subprocess.run(
            [sys.executable, "-c", script],
            env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]

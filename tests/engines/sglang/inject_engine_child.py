"""A real ``sglang.Engine`` on the CPU whose scheduler pushes and ingests: ``inject_engine_child.py TASK``.

One engine is both D and P: what it computed as D is flushed and overwritten before it ingests as P. What
happened goes to the task's ``out`` as JSON.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
# A slot that is missing while the engine is idle ends it.
os.environ.setdefault("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")

from tools.engines.torchvision_ops import declare_torchvision_ops

# SGLang's own children import this module again, and need them too.
declare_torchvision_ops()

FLUSH_S = 60.0


def snapd_begin(self: Any, socket_path: str) -> None:
    from snapd.client import Client
    from snapd.engines.sglang_inject import Injector
    from snapd.engines.sglang_inject_push import SessionPushes
    from snapd.layout import Namespace

    parts = (self.token_to_kv_pool_allocator, self.tree_cache, Namespace(model="small"))
    client = Client(socket_path, timeout_s=60)
    self.snapd = (Injector(client, 0, *parts), SessionPushes(client, *parts))


def snapd_push(self: Any, token_ids: list[int], out: str) -> None:
    pushes = self.snapd[1]
    push = pushes.start("chat", token_ids)
    while not push.done:
        pushes.poll()
    facts = {"ok": push.result.ok, "handle": push.result.slab_handle, "num_tokens": push.num_tokens}
    Path(out).write_text(json.dumps(facts))


def snapd_poison(self: Any) -> None:
    for plane in self.snapd[0].cache.pool.planes:
        plane.rows.fill_(0x41)


def snapd_finalize(self: Any, token_ids: list[int], slab_handle: int, out: str) -> None:
    from snapd.wire import SnapshotFinalizeIngestReqInput

    request = SnapshotFinalizeIngestReqInput(
        session_id="chat", token_ids=tuple(token_ids), slab_handle=slab_handle
    )
    output = self.snapd[0].finalize_ingest(request)
    Path(out).write_text(json.dumps({"ok": output.ok, "reason": output.reason}))


if __name__ == "__mp_main__":
    from sglang.srt.managers.scheduler import Scheduler

    for rpc in (snapd_begin, snapd_push, snapd_poison, snapd_finalize):
        setattr(Scheduler, rpc.__name__, rpc)


def generate(engine: Any, token_ids: list[int], max_tokens: int) -> tuple[list[int], int]:
    """Return a greedy answer, and how many tokens of the prompt were not computed."""
    output = engine.generate(
        input_ids=token_ids,
        sampling_params={"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
    )
    return output["output_ids"], output["meta_info"]["cached_tokens"]


def flush(engine: Any) -> None:
    """Empty the engine's cache; it is refused until the last request's end has gone round."""
    until_s = time.monotonic() + FLUSH_S
    while not engine.flush_cache().success:
        assert time.monotonic() < until_s, "the cache is not flushed"
        time.sleep(0.05)


def play(task: dict[str, Any]) -> dict[str, Any]:
    """Return what came of it: answers, cached tokens, and how push and ingest ended."""
    from sglang.srt.entrypoints.engine import Engine

    scratch = task["out"] + ".rpc"
    engine = Engine(**task["engine"])
    try:
        engine.collective_rpc("snapd_begin", socket_path=task["socket"])
        first, _ = generate(engine, task["prompt"], task["max_tokens"])
        held = [*task["prompt"], *first]
        turn = [*held, *task["more"]]
        flush(engine)
        expected, expected_cached = generate(engine, turn, task["max_tokens"])
        flush(engine)
        generate(engine, task["prompt"], task["max_tokens"])
        engine.collective_rpc("snapd_push", token_ids=held, out=scratch)
        pushed = json.loads(Path(scratch).read_text())
        flush(engine)
        engine.collective_rpc("snapd_poison")
        engine.collective_rpc("snapd_finalize", token_ids=held, slab_handle=pushed["handle"], out=scratch)
        ingested = json.loads(Path(scratch).read_text())
        answer, cached = generate(engine, turn, task["max_tokens"])
        # Idle for a while: SGLang looks for leaks.
        flush(engine)
        return {
            "pushed": pushed, "ingested": ingested, "expected": expected, "answer": answer,
            "expected_cached": expected_cached, "cached": cached,
        }  # fmt: skip
    finally:
        engine.shutdown()


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(given["out"]).write_text(json.dumps(play(given)))

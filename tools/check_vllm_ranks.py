"""vLLM engines of two workers each: ``python -m tools.check_vllm_ranks``; prints one line of JSON.

Every worker pushes and loads a shard of its own. When one worker's shard is corrupt, all of them compute.
Takes twice the processes of ``check_vllm``, so it is apart. Exit status 1: something is not so.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from tools.check_vllm import ANSWER, PROMPT, whole, words
from tools.vllm_engines import Daemon, Server, make_model, say, wait_for

RANKS: Final = 2


class Engines:
    """A D, a P and an engine without snapd, and the daemon."""

    def __init__(self, directory: Path) -> None:
        # vLLM refuses to bind the threads of more workers than there are NUMA nodes.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        self.daemon = Daemon(directory)
        self._directory = directory
        make_model(directory / "model")
        self.d = self._server("D", "kv_producer")
        self.p = self._server("P", "kv_consumer")
        self.r = self._server("R", "")
        self.servers = [self.d, self.p, self.r]

    def _server(self, name: str, role: str) -> Server:
        transfer: dict[str, Any] = {
            "kv_connector": "SnapdConnector",
            "kv_connector_module_path": "snapd.engines.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket_path": str(self.daemon.socket_path)},
        }
        ranks = ("--tensor-parallel-size", str(RANKS))
        model = self._directory / "model"
        return Server(name, model, self._directory, *ranks, transfer=transfer if role else None, mp=True)

    def turn(self, session: str, seed: int, corrupt_rank: int | None) -> dict[str, Any]:
        """Do two turns, and return how the attempt between them ended; P's answer must be right."""
        prompt = words(seed, PROMPT)
        history = [*prompt, *self.d.ask(prompt, ANSWER, session).token_ids]
        view = self.daemon.ready(session)
        assert [shard.rank for shard in view.shards] == list(range(RANKS)), view.shards
        if corrupt_rank is not None:
            self.daemon.corrupt(view, corrupt_rank)
        second = [*history, *words(seed + 1, 20)]
        answer = self.p.ask(second, ANSWER, session)
        assert answer.token_ids == self.r.ask(second, ANSWER).token_ids, f"{session}: the answer differs"
        assert answer.cached_tokens in (0, whole(len(history) - 1)), answer.cached_tokens

        def outcome() -> dict[str, Any] | None:
            return next((x for x in self.daemon.outcomes() if x["slab_handle"] == view.slab_handle), None)

        return wait_for(outcome, "the attempt's outcome", 30.0)


def check(engines: Engines) -> None:
    """Check a turn, and one turn for each worker's shard corrupted."""
    engines.daemon.start(ranks=RANKS)
    for server in engines.servers:
        server.wait_up()
    say("the engines are up")
    said = engines.turn("whole", 1, None)
    assert said["ok"], said
    for rank in range(RANKS):
        said = engines.turn(f"corrupt {rank}", 3 + 2 * rank, rank)
        assert (said["ok"], said["reason"]) == (False, "checksum-mismatch"), said
    loads = engines.p.metric("vllm:snapd_loads_total", reason="ok")
    assert loads == RANKS, f"{loads} loads on {RANKS} workers"


def main() -> int:
    """Start everything, check it, and say what came of it."""
    directory = Path(tempfile.mkdtemp(prefix="snapd-vllm-"))
    engines = Engines(directory)
    try:
        check(engines)
    except (AssertionError, SystemExit) as error:
        say(f"no: {error}\nlogs are in {directory}")
        return 1
    finally:
        for server in engines.servers:
            server.stop()
        engines.daemon.stop()
    shutil.rmtree(directory)
    print(json.dumps({"engine": "vllm", "workers": RANKS, "turns": 1 + RANKS, "equal": True}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

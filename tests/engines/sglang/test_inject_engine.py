"""Direct injection in the scheduler of a real engine, with a model whose answers depend on the KV."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_process import ENVIRONMENT, HERE, REPOSITORY, engine_config, make_model
from inject_stage import serving

from snapd.errors import Reason

pytestmark = [pytest.mark.usefixtures("sglang"), pytest.mark.slow, pytest.mark.timeout(900)]


def test_after_an_injection_the_next_turn_computes_the_new_tokens_only_and_answers_the_same(
    tmp_path: Path,
) -> None:
    """Of 200 + 60 tokens 259 have KV, and 256 fill pages. SGLang's strict check for leaks is on."""
    make_model(tmp_path / "model")
    task = {
        "engine": engine_config(tmp_path / "model", None),
        "prompt": [(37 * index + 11) % 2_000 for index in range(200)],
        "more": [(91 * index + 5) % 2_000 for index in range(40)],
        "max_tokens": 60,
        "out": str(tmp_path / "out.json"),
    }
    path = os.pathsep.join((str(REPOSITORY), str(HERE / "standin"), os.environ.get("PYTHONPATH", "")))
    with serving(size="16MiB") as daemon:
        (tmp_path / "task.json").write_text(json.dumps({**task, "socket": str(daemon.socket_path)}))
        result = subprocess.run(
            [sys.executable, str(HERE / "inject_engine_child.py"), str(tmp_path / "task.json")],
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
    assert result.returncode == 0, result.stderr[-4_000:]
    facts = json.loads((tmp_path / "out.json").read_text())
    assert facts["pushed"]["ok"] and facts["pushed"]["num_tokens"] == 256
    assert facts["ingested"] == {"ok": True, "reason": Reason.OK}
    assert (facts["expected_cached"], facts["cached"]) == (0, 256)
    assert facts["answer"] == facts["expected"]

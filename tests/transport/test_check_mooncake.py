"""The script that checks Mooncake between two processes, as it is run on a machine with GPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mooncake.engine", exc_type=ImportError)

ROOT = Path(__file__).parents[2]


def test_every_fact_holds_over_tcp() -> None:
    command = [
        sys.executable, "tools/check_mooncake.py", "--protocol", "tcp", "--device", "cpu",
        "--bytes", "32MiB", "--rounds", "1", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["pairs"]["cpu to cpu"]
    assert len(found["facts"]) >= 8 and all(found["facts"].values())
    assert found["figures"]["one_descriptor_gb_per_s"] > 0

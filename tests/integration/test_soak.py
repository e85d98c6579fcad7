"""The soak in a short form: memory and file descriptors stay as they are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_and_descriptors_are_flat_over_many_lives(tmp_path: Path) -> None:
    plot = tmp_path / "soak.png"
    command = [sys.executable, str(ROOT / "tools" / "soak.py"), "--json", "--plot", str(plot)]
    command += ["--lives", "30000", "--live", "3000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["lives"] >= 30_000
    assert result["log_dropped"] == 0
    # It is stated as some 5 KB.
    assert result["bytes_a_live_session"] < 8_000
    assert plot.stat().st_size > 10_000

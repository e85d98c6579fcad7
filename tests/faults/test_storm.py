"""Daemon, D and P are killed at random moments, over and over, and every guarantee holds after each kill.

With ``SNAPD_SOAK=1`` there are hundreds of kills; ``SNAPD_SOAK_KILLS`` and ``SNAPD_SOAK_SEED`` choose how
many and which. The figures are the last line of what the test says.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from fault_cases import IS_SOAK
from storm_cases import ARENA, QUARANTINE_MS, Storm

KILLS = {"shm": (6, 320), "mooncake": (5, 220)}
LANES = 3


@pytest.mark.slow
@pytest.mark.timeout(1_200 if IS_SOAK else 240)
@pytest.mark.parametrize("transport", KILLS)
def test_kills_at_random_moments_break_no_guarantee(
    start_daemon: Callable[..., Any], transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No wrong byte, one outcome for each attempt over all epochs, nothing leaked, everybody else served."""
    if transport == "mooncake":
        pytest.importorskip("mooncake.engine", exc_type=ImportError)
    num_kills = int(os.environ.get("SNAPD_SOAK_KILLS", KILLS[transport][IS_SOAK]))
    seed = int(os.environ.get("SNAPD_SOAK_SEED", "1"))
    daemon = start_daemon(transport=transport, size=ARENA, quarantine_ms=QUARANTINE_MS)
    storm = Storm(daemon, LANES, seed)
    storm.serve_all()
    storm.check()
    for _ in range(num_kills):
        storm.strike()
        storm.serve_all()
        storm.check()
    figures = storm.end()
    with capsys.disabled():
        print(f"\n{json.dumps({'transport': transport, 'seed': seed} | figures)}")
    assert sum(figures["kills"].values()) == num_kills
    assert figures["kills_mid_turn"] > num_kills // 4, "they hit nobody at work"
    if IS_SOAK:
        wanted = {"ok", "writer-gone", "daemon-restarted", "prefix-not-resident"}
        assert wanted <= figures["outcomes"].keys(), "the kills came at all sorts of moments"

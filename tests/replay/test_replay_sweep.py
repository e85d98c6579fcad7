"""Processes of a sweep: how they end."""

import multiprocessing
import signal
import time

import pytest
import sweep_points
from replay_cases import generate, small

from snapd.replay import replay as replay_module
from snapd.replay.replay import SweepBroken, sweep
from snapd.replay.trace import Trace
from snapd.units import MIB

TRACE = Trace("t", generate(1, sessions=3), ())
SIZES = (MIB, 2 * MIB, 4 * MIB)


def test_an_interrupted_sweep_does_not_wait_for_what_is_under_way(monkeypatch):
    monkeypatch.setattr(replay_module, "_sweep_point", sweep_points.only_the_first_ends)
    begun_s = time.monotonic()

    def interrupt(size_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(TRACE, small(), SIZES, processes=2, done=interrupt)
    assert time.monotonic() - begun_s < sweep_points.WAIT_S / 2
    assert not multiprocessing.active_children()


def test_processes_of_a_sweep_do_not_see_what_interrupts_it(monkeypatch):
    monkeypatch.setattr(replay_module, "_sweep_point", sweep_points.mask)
    with replay_module._begun(TRACE, [small(), small()], 2) as found:
        assert all(signal.SIGINT in mask for mask in found)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_process_of_a_sweep_that_is_killed_is_said(monkeypatch):
    monkeypatch.setattr(replay_module, "_sweep_point", sweep_points.killed)
    with pytest.raises(SweepBroken, match="--processes"):
        sweep(TRACE, small(), SIZES, processes=2)
    assert not multiprocessing.active_children()

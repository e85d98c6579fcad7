"""Watchers that do not read: the daemon's memory stays bounded, they hear of it, the others are served."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from daemon_process import clean_environment
from fault_cases import num_fds, serve
from kv_cases import PATIENCE_S, paired
from late_cases import end_with_the_tests, stopped
from raw_client import RawClient, rss_bytes, wait_for

from snapd import wire as w
from snapd.units import KIB, MIB

NUM_WATCHERS = 24
QUEUE_MAX = 100
# So that what all watchers together do not read is far more than the daemon may grow.
LIVES = 400
LONG_ID = "x" * 480
GROWTH_BYTES_MAX = 8 * MIB
TRANSITIONS_A_LIFE = 4


def live(client: RawClient, number: int) -> None:
    client.ingest(client.ready(f"{LONG_ID}{number}"))
    client.pushes.clear()


@pytest.mark.slow
def test_watchers_that_never_read_cost_bounded_memory_and_nobody_else(
    start_daemon: Callable[..., Any],
) -> None:
    daemon = start_daemon(watch_queue_max=QUEUE_MAX, watchers_max=NUM_WATCHERS)
    pid = daemon.process.pid
    with paired(daemon) as pair, RawClient(daemon.socket_path) as client:
        serve(pair)
        for number in range(LIVES // 10):
            live(client, number)
        fds, before_bytes = num_fds(pid), rss_bytes(pid)
        watchers = [RawClient(daemon.socket_path, receive_buffer_bytes=4 * KIB) for _ in range(NUM_WATCHERS)]
        for watcher in watchers:
            watcher.ask(w.WatchReq)
        for number in range(LIVES):
            live(client, number)
        serve(pair)
        all_bytes = LIVES * TRANSITIONS_A_LIFE * NUM_WATCHERS * len(LONG_ID)
        grown_bytes = rss_bytes(pid) - before_bytes
        assert grown_bytes < GROWTH_BYTES_MAX < all_bytes, f"{grown_bytes / MIB:.1f} MiB"
        # One reads at last: it is told how much it has missed, and then misses nothing.
        reader, *others = watchers
        seen = lost = 0
        while seen + lost < TRANSITIONS_A_LIFE * LIVES:
            push = reader.push()
            if isinstance(push, w.WatchLost):
                lost += push.count
            else:
                seen += len(push.session_id) > len(LONG_ID)
        assert lost > 0
        for watcher in watchers:
            watcher.close()
        wait_for(lambda: num_fds(pid) <= fds, "nothing is left of them", PATIENCE_S)
        assert pair.d.stats().watchers == 0
        assert len(others) == NUM_WATCHERS - 1
        serve(pair)


@pytest.mark.slow
def test_snapd_watch_that_stood_still_says_what_it_has_missed(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(watch_queue_max=QUEUE_MAX)
    watch = subprocess.Popen(
        [sys.executable, "-m", "snapd.cli.main", "watch", "--socket", str(daemon.socket_path)],
        stdout=subprocess.PIPE, text=True, env=clean_environment(), preexec_fn=end_with_the_tests,
    )  # fmt: skip
    assert watch.stdout is not None
    try:
        with paired(daemon) as pair, RawClient(daemon.socket_path) as client:
            wait_for(lambda: pair.d.stats().watchers == 1, "it watches", PATIENCE_S)
            with stopped(watch.pid):
                for number in range(LIVES):
                    live(client, number)
                serve(pair)
            told: list[str] = []
            reader = threading.Thread(target=lambda lines: [told.append(line) for line in lines],
                                      args=(watch.stdout,), daemon=True)  # fmt: skip
            reader.start()
            handles: list[str] = []

            def has_caught_up() -> bool:
                """What happens while it still lags behind is among what it has missed."""
                handles.append(str(client.ready("last")))
                threading.Event().wait(0.05)
                return any(handle in line for line in told[-200:] for handle in handles)

            wait_for(has_caught_up, "it has caught up", PATIENCE_S)
            assert any("lost: this side read too slowly" in line for line in told)
            assert len(told) < TRANSITIONS_A_LIFE * LIVES
            os.kill(watch.pid, signal.SIGINT)
            watch.wait(PATIENCE_S)
            wait_for(lambda: pair.d.stats().watchers == 0, "it is gone", PATIENCE_S)
            reader.join(PATIENCE_S)
    finally:
        watch.kill()
        watch.wait()
        watch.stdout.close()

"""D is stopped in the middle of a write, past every deadline, and goes on when its bytes are another's."""

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fault_cases import IS_SOAK
from kv_cases import PATIENCE_S, Pair, arena_of, record
from late_cases import HOUR_MS, WIDE, check_books, end, end_with_the_tests, overlap, stopped
from raw_client import LogFollower, wait_for
from stopped_child import NUM_SLOTS

from snapd.core import records as rec
from snapd.core.events import State
from snapd.core.slab import Extent
from snapd.errors import Reason
from snapd.kv.push import PushResult
from snapd.layout import Namespace
from snapd.mapping import MappedArena
from snapd.units import KIB

HERE = Path(__file__).parent
# A token is 16 KiB. Long beside what it takes to stop a process, which only has a processor now and then.
NUM_TOKENS = {"shm": 1_024, "mooncake": 512}
TOKENS = tuple(range(1_024))
TIMEOUT_MS = 3_000
LOOK_BYTES = 64
TRIES = 20


class StoppableD:
    """``stopped_child`` in a process of its own.

    Attributes:
        handle: of its attempt.
        extents: what was granted to it.
    """

    def __init__(self, pair: Pair, session_id: str, num_tokens: int) -> None:
        integration = HERE.parent / "integration"
        command = [sys.executable, str(HERE / "stopped_child.py"), str(pair.daemon.socket_path)]
        self.process = subprocess.Popen(
            [*command, session_id, str(num_tokens)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_the_tests,
            env={"PYTHONPATH": f"{integration}:{HERE.parents[1]}", "MC_LOG_LEVEL": "ERROR"},
        )  # fmt: skip
        self.handle = int(self.hear())
        self.extents = pair.view(self.handle).shards[0].extents
        self._stop = contextlib.ExitStack()

    def stop(self) -> None:
        """Let it stand still, until it shall go on."""
        self._stop.enter_context(stopped(self.process.pid))

    def go_on(self) -> None:
        self._stop.close()

    def end(self) -> None:
        self.go_on()
        end(self.process)

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "D has ended"
        return line.strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def result(self) -> PushResult:
        """Return how its push ended, once nothing of it is under way."""
        result = msgspec.json.decode(self.hear(), type=PushResult)
        assert self.hear() == "over"
        return result


def blocks(arena: MappedArena, extents: tuple[Extent, ...]) -> Iterator[bool]:
    """Yield, for places all over the extents, whether something was written there; it was zero before."""
    for extent in extents:
        for start in range(extent.offset_bytes, extent.end_bytes - LOOK_BYTES, 64 * KIB):
            yield any(arena.buffer[start : start + LOOK_BYTES])


@contextlib.contextmanager
def stopped_mid_write(pair: Pair, arena: MappedArena, num_tokens: int) -> Iterator[StoppableD]:
    """Yield a D that stands still when it has written a part of its bytes; it ends with the block."""
    for number in range(TRIES):
        d = StoppableD(pair, f"old-{number}", num_tokens)
        try:
            d.go()
            wait_for(lambda d=d: any(blocks(arena, d.extents)), "it writes", PATIENCE_S)
            d.stop()
            if not all(blocks(arena, d.extents)):
                yield d
                return
            d.go_on()
            d.result()
            pair.ps[0].abort(d.handle, drained=True)
            for extent in d.extents:
                ctypes.memset(arena.address + extent.offset_bytes, 0, extent.size_bytes)
        finally:
            d.end()
    pytest.fail(f"of {TRIES} pushes none could be stopped in the middle")


def await_timeout(pair: Pair, d: StoppableD) -> None:
    wait_for(lambda: pair.view(d.handle).state is State.ABORTED, "the timeout", PATIENCE_S)
    assert pair.view(d.handle).reason == Reason.TRANSFER_TIMEOUT


def check_refused(daemon: Any, d: StoppableD) -> None:
    """D goes on, and what it says changes nothing."""
    d.go_on()
    result = d.result()
    assert (result.ok, result.reason) == (False, Reason.TRANSFER_TIMEOUT)
    assert record(daemon, rec.SyncOutcome, d.handle).reason == Reason.TRANSFER_TIMEOUT


@contextlib.contextmanager
def p_and_new_owner(daemon: Any) -> Iterator[Pair]:
    pair = Pair(daemon, WIDE, num_slots=NUM_SLOTS, namespace=Namespace())
    try:
        yield pair
        pair.check()
    finally:
        pair.close()


@pytest.fixture(params=NUM_TOKENS)
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "mooncake":
        pytest.importorskip("mooncake.engine", exc_type=ImportError)
    return str(request.param)


@pytest.mark.slow
def test_a_d_that_goes_on_after_the_quarantine_spoils_no_tree(
    start_daemon: Callable[..., Any], transport: str
) -> None:
    """Its bytes are another session's, which is READY; what P then reads there it refuses."""
    num_tokens = NUM_TOKENS[transport]
    daemon = start_daemon(
        transport=transport, size="20MiB", transfer_timeout_ms=TIMEOUT_MS, quarantine_ms=100
    )
    follower = LogFollower(daemon.log_path)
    tokens = TOKENS[:num_tokens]
    with p_and_new_owner(daemon) as pair, contextlib.closing(arena_of(daemon)) as arena:
        with stopped_mid_write(pair, arena, num_tokens) as d:
            await_timeout(pair, d)
            wait_for(pair.is_all_free, "the quarantine is over", PATIENCE_S)
            assert record(daemon, rec.SlabReleased, d.handle).why == "time"
            handle = pair.ready("new", tokens)
            assert overlap(pair.view(handle).shards[0].extents, d.extents)
            check_refused(daemon, d)
        (answer,) = pair.ingest("new", tokens, handle)
        # Over Mooncake what was under way may have been all that D had begun to write.
        if answer.ok:
            assert transport == "mooncake" and pair.tree.inserts == ["new"]
        else:
            assert answer.reason == Reason.CHECKSUM_MISMATCH and pair.tree.inserts == []
        pair.check()
        wait_for(pair.is_all_free, "what was spoiled has left its quarantine", PATIENCE_S)
        assert pair.ingest("next", tokens, pair.ready("next", tokens))[0].ok
        check_books(pair, follower)


@pytest.mark.slow
@pytest.mark.skipif(not IS_SOAK, reason="with SNAPD_SOAK=1 only")
def test_a_d_that_goes_on_in_the_quarantine_meets_nobodys_bytes(
    start_daemon: Callable[..., Any], transport: str
) -> None:
    num_tokens = NUM_TOKENS[transport]
    daemon = start_daemon(
        transport=transport, size="40MiB", transfer_timeout_ms=TIMEOUT_MS, quarantine_ms=HOUR_MS
    )
    follower = LogFollower(daemon.log_path)
    tokens = TOKENS[:num_tokens]
    with p_and_new_owner(daemon) as pair, contextlib.closing(arena_of(daemon)) as arena:
        with stopped_mid_write(pair, arena, num_tokens) as d:
            await_timeout(pair, d)
            handle = pair.ready("new", tokens)
            assert not overlap(pair.view(handle).shards[0].extents, d.extents)
            assert record(daemon, rec.SlabQuarantined, d.handle).extents == d.extents
            check_refused(daemon, d)
        assert pair.ingest("new", tokens, handle)[0].ok
        released = record(daemon, rec.SlabReleased, d.handle)
        assert (released.was, released.why) == ("quarantined", "drained"), "D gave proof"
        assert pair.is_all_free()
        check_books(pair, follower)

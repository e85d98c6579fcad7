"""Daemons over Mooncake (TCP on loopback), a D that does not hear, and what it is seen to write."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kv_cases import HERE, PATIENCE_S, Kind, Pair
from late_rogue import PIECE_BYTES, WORD_BYTES
from raw_client import LogFollower, check_sums, wait_for

from snapd.core.slab import Extent
from snapd.mapping import MappedArena
from snapd.units import MIB

# Four planes of 4 KiB a token: 64 tokens are a MiB.
WIDE = Kind(k_rows=((2048,),) * 2, v_rows=((2048,),) * 2)
ROGUE_TOKENS = 64
ROGUE_BYTES = MIB
HOUR_MS = 3_600_000

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_the_tests() -> None:
    """In a child: a test run that is killed leaves nothing behind, not even what is stopped."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Inside, the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: _state(pid) == "T", "the process is stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Rogue:
    """``late_rogue`` in a process of its own.

    Attributes:
        handle: of its attempt.
        extents: what was granted to it, and it writes.
    """

    def __init__(self, pair: Pair, session_id: str = "rogue") -> None:
        self._before = num_tcp_sockets(pair.daemon)
        self._daemon = pair.daemon
        self.process = subprocess.Popen(
            [
                sys.executable, str(HERE / "late_rogue.py"), str(pair.daemon.socket_path), session_id,
                str(ROGUE_TOKENS), pair.pusher.layout_fingerprint,
            ],
            stdout=subprocess.PIPE, text=True, preexec_fn=end_with_the_tests,
        )  # fmt: skip
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, "the rogue has ended"
        self.handle = int(said)
        self.extents = pair.view(self.handle).shards[0].extents

    def end(self) -> None:
        """Kill it, and wait until the daemon has taken its last byte off the sockets."""
        assert num_tcp_sockets(self._daemon) > self._before
        end(self.process)
        wait_for(
            lambda: num_tcp_sockets(self._daemon) <= self._before, "its connections are gone", PATIENCE_S
        )


@contextlib.contextmanager
def rogue(pair: Pair, session_id: str = "rogue") -> Iterator[Rogue]:
    started = Rogue(pair, session_id)
    try:
        yield started
    finally:
        end(started.process)


def tcp_sockets(daemon: Any) -> list[list[str]]:
    """Return what the kernel shows of each TCP socket that the daemon has open."""
    directory = Path(f"/proc/{daemon.process.pid}")
    tables = [(directory / "net" / name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    by_inode = {f"socket:[{line.split()[9]}]": line.split() for lines in tables for line in lines}
    found = []
    for entry in (directory / "fd").iterdir():
        with contextlib.suppress(OSError):
            if (line := by_inode.get(str(entry.readlink()))) is not None:
                found.append(line)
    return found


def num_tcp_sockets(daemon: Any) -> int:
    return len(tcp_sockets(daemon))


def unread_bytes(daemon: Any) -> int:
    """Return how much lies in the daemon's TCP sockets."""
    listening = "0A"  # There it counts connections.
    return sum(int(line[4].partition(":")[2], 16) for line in tcp_sockets(daemon) if line[3] != listening)


class Watcher:
    """Looks at what the rogue writes, in an arena that is mapped for reading.

    Args:
        arena: mapped.
        extents: the rogue's.
    """

    def __init__(self, arena: MappedArena, extents: Sequence[Extent]) -> None:
        self._arena = arena
        self._places = [
            offset_bytes
            for extent in extents
            for offset_bytes in range(extent.offset_bytes, extent.end_bytes, PIECE_BYTES)
        ]

    def words(self) -> list[int]:
        """Return the first word of every piece."""
        buffer = self._arena.buffer
        return [int.from_bytes(buffer[place : place + WORD_BYTES], "little") for place in self._places]

    def wait_for_writes(self) -> None:
        """Return when every piece was written by a round that began after now."""
        latest = max(self._round(word) for word in self.words())
        wait_for(
            lambda: all(self._round(word) > latest for word in self.words()),
            "the rogue goes on writing",
            PATIENCE_S,
        )

    @staticmethod
    def _round(word: int) -> int:
        """Return the rogue's round; 0: somebody else's bytes, which are random."""
        return word if word < 1 << 32 else 0


def check_books(pair: Pair, follower: LogFollower) -> None:
    """Free, live and quarantined bytes are the arena, and the log alone tells the same story.

    The follower holds every allocation in the log against all extents that are live or in quarantine.
    """

    def is_told() -> bool:
        core = pair.core()
        check_sums(core)
        follower.follow()
        return follower.agrees_with(core)

    wait_for(is_told, "the log agrees with the books")


def overlap(mine: Sequence[Extent], others: Sequence[Extent]) -> bool:
    return any(a.offset_bytes < b.end_bytes and b.offset_bytes < a.end_bytes for a in mine for b in others)

"""Writes the snapshot run's records as the daemon would: a d-to-p-sync.jsonl of simulated time."""

import time
from pathlib import Path
from typing import Final, Self

from snapd import __version__
from snapd.core import records as r
from snapd.core.session import Settings
from snapd.errors import StartupError
from snapd.eventlog import EventLog, LogSettings
from snapd.replay.model import ALIGNMENT_BYTES, Model
from snapd.units import MIB, NS_PER_S
from snapd.wire import PROTOCOL_VERSION

# `ts` of the trace's start: a replay has no date of its own, and the same run gives the same log.
START_TS: Final = 946_684_800
_LOOK_EVERY_LINES: Final = 4_096
_QUEUE_LINES_MAX: Final = 1 << 18
_QUEUE_BYTES_MAX: Final = 256 * MIB
_WAIT_S: Final = 0.005
_CLOSE_S: Final = 60.0


class ReplayLog:
    """A sink for one snapshot run; a context manager.

    Args:
        path: of a file that does not exist yet, or is empty.
        model: names the arena and the policy.

    Raises:
        StartupError: it cannot be written, or holds something.
    """

    def __init__(self, path: Path, model: Model) -> None:
        if path.exists() and path.stat().st_size:
            raise StartupError(f"--log {path} holds something already: name a file that does not exist")
        settings = LogSettings(
            path=str(path), rotate_bytes=0, queue_bytes_max=_QUEUE_BYTES_MAX, queue_lines_max=_QUEUE_LINES_MAX
        )
        self._path = path
        self._last_ns = 0
        self._lines = 0
        self._ok = 0
        self._attempts = 0
        self._log = EventLog(settings, f"{model.seed:032x}", self._wall_clock)
        arena = r.ArenaInfo(
            0, "cuda:0" if model.buffer_in == "device" else "cpu", model.buffer_bytes, ALIGNMENT_BYTES
        )
        self.write(
            r.DaemonStarted(
                at_ns=NS_PER_S, version=__version__, protocol=PROTOCOL_VERSION, pid=0, transport="replay",
                arenas=(arena,), eviction_policy="lru" if model.policy == "clairvoyant" else model.policy,
                quarantine_ms=Settings().quarantine_ms,
            )
        )  # fmt: skip

    def _wall_clock(self) -> float:
        return START_TS + self._last_ns / NS_PER_S

    def write(self, record: r.Record) -> None:
        """Take a record; waits for the disk when very many are queued, as nobody waits for a replay."""
        self._last_ns = record.at_ns
        self._lines += 1
        if isinstance(record, r.SyncOutcome):
            # As the core counts them: a prepare that was refused is no attempt of its.
            self._attempts += bool(record.slab_handle)
            self._ok += record.ok
        self._log.write(record)
        if self._lines % _LOOK_EVERY_LINES == 0:
            statistics = self._log.statistics()
            while statistics.queued_lines > _QUEUE_LINES_MAX // 2 and not statistics.failing:
                time.sleep(_WAIT_S)
                statistics = self._log.statistics()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the last line and all that waits.

        Raises:
            StartupError: not all of it could be written.
        """
        self.write(
            r.DaemonStopped(
                at_ns=self._last_ns, reason="replay-over", attempts=self._attempts, attempts_ok=self._ok
            )
        )
        waiting = self._log.close(_CLOSE_S)
        statistics = self._log.statistics()
        if waiting or statistics.records_dropped:
            lost = waiting + statistics.records_dropped
            raise StartupError(
                f"--log {self._path}: {lost} lines could not be written: {statistics.last_error}"
            )

"""Runs plans, adds up what came of them, and writes and reads cases."""

import contextlib
import gc
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from snapd.errors import Reason
from tools.simulation.plan import Plan, draw_plan
from tools.simulation.world import Result, World

# Memory, where there is such a place: every run writes a log and deletes it.
_SHM: Final = Path("/dev/shm")
# Runs leave circles behind; looking for them after every few is cheaper than all the time.
_COLLECT_EVERY: Final = 16
_NS_PER_MINUTE: Final = 60_000_000_000


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is kept as a test.

    Attributes:
        found: what was wrong when it was found; empty: nothing, it is kept for what it reaches.
        plan: all that it depends on.
    """

    found: str
    plan: Plan


def save_case(path: Path, case: Case) -> None:
    """Write a case."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(case), indent=1) + b"\n")


def load_case(path: Path) -> Case:
    """Read a case.

    Raises:
        OSError: the file cannot be read.
        msgspec.DecodeError: it is no case.
    """
    return msgspec.json.decode(path.read_bytes(), type=Case)


def run_plan(plan: Plan, trace: Callable[[str], None] | None = None) -> Result:
    """Run a plan in a directory of its own."""
    where = str(_SHM) if _SHM.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="snapd-simulation-", dir=where) as directory:
        return World(plan, Path(directory), trace).run()


def run_seed(seed: int, trace: Callable[[str], None] | None = None) -> Result:
    """Run what is drawn from a seed."""
    return run_plan(draw_plan(seed), trace)


@contextlib.contextmanager
def _collecting_seldom() -> Iterator[Callable[[], None]]:
    """Leave the garbage alone, and give what collects it every few calls."""
    calls = 0

    def collect() -> None:
        nonlocal calls
        calls += 1
        if calls % _COLLECT_EVERY == 0:
            gc.collect()

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()


class Totals:
    """What came of many runs.

    Attributes:
        failed: those that broke a rule.
        cpu_ns: of this process, user and system.
    """

    def __init__(self) -> None:
        self.failed: list[Result] = []
        self.cpu_ns = 0
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._older: Counter[str] = Counter()
        self._facts: Counter[str] = Counter()

    def run(self, seeds: range, progress: Callable[[int, "Totals"], None] | None = None) -> None:
        """Run the seeds, one after another."""
        with _collecting_seldom() as collect:
            for number, seed in enumerate(seeds, 1):
                begin_ns = time.process_time_ns()
                self.add(run_seed(seed))
                collect()
                self.cpu_ns += time.process_time_ns() - begin_ns
                if progress is not None:
                    progress(number, self)

    def add(self, result: Result) -> None:
        """Count a run."""
        self._counts.update(
            seeds=1,
            events=result.events,
            core_events=result.core_events,
            sessions=result.sessions,
            inserted=result.inserted,
            lines=result.lines,
        )
        self._reasons.update(result.reasons)
        self._older.update(result.older)
        self._facts.update(result.facts)
        if result.violation:
            self.failed.append(result)

    @property
    def sessions(self) -> int:
        """Attempts that began."""
        return self._counts["sessions"]

    @property
    def reasons_missing(self) -> list[str]:
        """Reasons that came up neither in snapd's runs nor in what older lines tell."""
        return sorted({str(reason) for reason in Reason} - set(+self._reasons) - set(+self._older))

    def report(self, command: Callable[[int], str]) -> dict[str, Any]:
        """Return everything, for JSON.

        Args:
            command: gives the command that repeats a seed.
        """
        minutes = self.cpu_ns / _NS_PER_MINUTE
        return {
            **self._counts,
            "violations": len(self.failed),
            "sessions_per_minute": round(self._counts["sessions"] / minutes) if minutes else 0,
            "cpu_s": round(self.cpu_ns / 1e9, 2),
            "reasons": dict(sorted(self._reasons.items())),
            "older_reasons": dict(sorted(self._older.items())),
            "reasons_missing": self.reasons_missing,
            "facts": dict(sorted(self._facts.items())),
            "failed": [
                {"seed": result.seed, "violation": result.violation, "command": command(result.seed)}
                for result in self.failed
            ],
        }

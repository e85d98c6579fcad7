"""A daemon, Ds and Ps that are killed at random moments, and what must hold after each kill."""

import atexit
import collections
import functools
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from daemon_process import clean_environment
from fault_cases import num_fds
from late_cases import end_with_the_tests
from raw_client import check_sums, is_all_free, wait_for
from storm_child import Role, Told, Turn

from snapd.client import Client
from snapd.core import records as r
from snapd.core.session import Statistics
from snapd.errors import Reason, SnapdError
from snapd.eventlog import Line, decode_line
from snapd.forensics.proof import Proof, ProofReport, Where

# The machine may be busy with something else.
PATIENCE_S = 60.0
TURN_TOKENS = (24, 56)
# Enough for all that a kill leaves in quarantine, and for all lanes.
ARENA = "24MiB"
QUARANTINE_MS = 300
# Up to when after the last check a kill comes: a push and its ingest take about as long.
KILL_S_MAX = 0.06
# How long a lane waits before it does a turn again; a daemon may name a longer time.
AGAIN_MS_MIN, AGAIN_MS_MAX = 10, 200
# Mooncake waits for 30 s for a peer unless it is told otherwise.
IMPATIENT = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "1", "MC_TCP_STATUS_TIMEOUT_SEC": "1", "MC_LOG_LEVEL": "ERROR"}
DAEMON, D, P = "daemon", "D", "P"
VICTIMS = (DAEMON, D, D, P)
_HERE = Path(__file__).parent


@functools.cache
def _nursery() -> str:
    """Start ``storm_child``, once in this process, and return where it is spoken to."""
    directory = tempfile.mkdtemp(prefix="snapd-")
    atexit.register(shutil.rmtree, directory)
    path = f"{directory}/w.sock"
    integration = _HERE.parent / "integration"
    process = subprocess.Popen(
        [sys.executable, str(_HERE / "storm_child.py"), path],
        stdin=subprocess.DEVNULL,
        env=clean_environment() | {"PYTHONPATH": os.pathsep.join([str(integration), *sys.path])},
        preexec_fn=end_with_the_tests,
    )
    atexit.register(process.kill)
    wait_for(Path(path).exists, "workers can be had", PATIENCE_S)
    return path


class Worker:
    """A D or a P.

    Attributes:
        pid: its process; 0: it has not begun yet.
        sock: what it says comes here.
    """

    def __init__(self, role: Role) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE_S)
        path = _nursery()
        wait_for(lambda: self.sock.connect_ex(path) == 0, "a worker can be had", PATIENCE_S)
        self.pid = 0
        self._heard = b""
        self._say(role)

    def _say(self, message: Role | Turn) -> None:
        self.sock.sendall(msgspec.json.encode(message) + b"\n")

    def ask(self, turn: Turn) -> None:
        self._say(turn)

    def hear(self) -> list[Told]:
        """Return what it has said of turns; it must be there still."""
        data = self.sock.recv(1 << 16)
        assert data, f"worker {self.pid} has ended by itself"
        *whole, self._heard = (self._heard + data).split(b"\n")
        told = [msgspec.json.decode(line, type=Told) for line in whole]
        if told and not self.pid:
            self.pid = told.pop(0).pid
        return told

    def kill(self) -> None:
        """End it at once, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{self.pid}").exists(), "it is gone", PATIENCE_S)
        self.sock.close()

    def arenas(self) -> list[str]:
        """Return which arenas are mapped in it."""
        return [
            line for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines() if "kv-snapd" in line
        ]


class Lane:
    """One D and one P, which bring one session after another home, a turn at a time.

    Attributes:
        served: turns that came home.
        is_disturbed: something that it needs was killed since: what it does now may fail.
        is_paused: begin no other turn.
        failures: reasons of turns that had to be done again.
    """

    def __init__(self, storm: "Storm", number: int) -> None:
        self._storm = storm
        self.name = f"lane {number}"
        self._fields = {
            "tenant": f"tenant-{number}",
            "seed": 100 + number,
            "socket_path": str(storm.daemon.socket_path),
            "mooncake": IMPATIENT,
        }
        self.workers: dict[str, Worker] = {}
        self._at_work = ""
        self._session = number * 1_000_000
        self._turn = 0
        self._not_before_s = 0.0
        self.served = 0
        self.is_disturbed = False
        self.is_paused = False
        self.failures: Counter[str] = Counter()
        for who in (D, P):
            self._start(who)

    def __repr__(self) -> str:
        pids = {who: worker.pid for who, worker in self.workers.items()}
        return f"<{self.name}: {self.served} served, at work {self._at_work!r}, {pids}, {self.failures}>"

    def _start(self, who: str) -> None:
        role = msgspec.convert({"is_prefill": who == P} | self._fields, Role)
        self.workers[who] = Worker(role)

    @property
    def is_ready(self) -> bool:
        return all(worker.pid for worker in self.workers.values())

    @property
    def is_idle(self) -> bool:
        return not self._at_work

    def kill(self, who: str) -> None:
        """Kill D or P, and start another."""
        self.workers[who].kill()
        self.is_disturbed = True
        if self._at_work == who:
            self._at_work = ""
        self._start(who)

    def _ask(self, who: str, slab_handle: int = 0) -> None:
        self._at_work = who
        self.workers[who].ask(
            Turn(
                session_id=f"{self.name}-{self._session}",
                num_tokens=TURN_TOKENS[self._turn],
                slots_seed=self._session,
                slab_handle=slab_handle,
                is_last=self._turn == len(TURN_TOKENS) - 1,
            )
        )

    def go_on(self) -> None:
        """Begin the next turn, or the same one again, if it is time."""
        is_time = time.monotonic() >= self._not_before_s
        if self.is_ready and self.is_idle and is_time and not self.is_paused:
            self._ask(D)

    def hear(self, who: str) -> None:
        """Take what D or P says."""
        for told in self.workers[who].hear():
            assert self._at_work == who
            self._at_work = ""
            assert not told.wrong_planes, f"{self.name}: {told}"
            assert not told.fault, f"{self.name}: {told}"
            if not told.ok:
                self._fail(told)
            elif who == D:
                self._ask(P, told.slab_handle)
            else:
                self._come_home(told)

    def _fail(self, told: Told) -> None:
        # A daemon that was killed while this lane was between turns knows P's layout when P speaks again.
        is_known = self.is_disturbed or told.reason == Reason.LAYOUT_MISMATCH
        assert is_known, f"{self.name}: nothing was done to it, and {told}"
        self.failures[told.reason] += 1
        pause_ms = min(max(told.retry_after_ms, AGAIN_MS_MIN), AGAIN_MS_MAX)
        self._not_before_s = time.monotonic() + pause_ms / 1_000

    def _come_home(self, told: Told) -> None:
        self.served += 1
        self.is_disturbed = False
        self._storm.inserted.add(told.slab_handle)
        self._turn += 1
        if self._turn == len(TURN_TOKENS):
            self._turn = 0
            self._session += 1

    def close(self) -> None:
        for worker in self.workers.values():
            worker.sock.close()
            if worker.pid:
                wait_for(lambda w=worker: not Path(f"/proc/{w.pid}").exists(), "it has ended", PATIENCE_S)


class Log:
    """Follows the event log over all lives of the daemon, and holds it against every rule.

    Attributes:
        outcomes: reasons, by attempt.
        allocated: attempts that got bytes, by epoch.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_bytes = self._lines = 0
        self._proof = Proof()
        self.outcomes: dict[int, list[str]] = collections.defaultdict(list)
        self.allocated: dict[str, set[int]] = collections.defaultdict(set)

    def follow(self) -> None:
        """Take the lines that have come since."""
        with self._path.open("rb") as file:
            file.seek(self._offset_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset_bytes += len(whole)
        for raw in whole.splitlines():
            self._lines += 1
            # A daemon that is killed may leave a line that is cut off.
            line = decode_line(raw)
            self._proof.feed(line, Where(self._path.name, self._lines))
            if not isinstance(line, Line):
                continue
            if isinstance(line.record, r.SyncOutcome) and line.record.slab_handle:
                self.outcomes[line.record.slab_handle].append(str(line.record.reason))
            elif isinstance(line.record, r.SlabAllocated):
                self.allocated[line.header.epoch].add(line.record.slab_handle)
        assert not self._proof.violations, self._proof.violations

    def agrees_with(self, core: Statistics) -> bool:
        """The present epoch's lines tell the same story as the daemon's counters."""
        self.follow()
        books = self._proof.books()
        told = [(arena.rank, arena.live_bytes, arena.quarantined_bytes) for arena in books.arenas]
        return (
            told == [(arena.rank, arena.live_bytes, arena.quarantined_bytes) for arena in core.arenas]
            and core.attempts == books.attempts
            and core.open_sessions == len(books.open)
        )

    def report(self) -> ProofReport:
        return self._proof.finish()


class Storm:
    """The daemon, its lanes, and kills.

    Attributes:
        inserted: attempts that a P has put into its tree.
        kills: by victim.
        kills_mid_turn: of those, how many hit a lane at work.
    """

    def __init__(self, daemon: Any, num_lanes: int, seed: int) -> None:
        self.daemon = daemon
        self.log = Log(daemon.log_path)
        self.rng = random.Random(f"storm/{seed}")
        self.inserted: set[int] = set()
        self.kills: Counter[str] = Counter()
        self.kills_mid_turn = 0
        self._client = Client(str(daemon.socket_path), timeout_s=PATIENCE_S)
        self._client.connect()
        self.fds_alone = num_fds(daemon.process.pid)
        self.lanes = [Lane(self, number) for number in range(num_lanes)]
        self._fds: dict[int, int] = {}

    def _pump(self, wait_s: float) -> None:
        """Take what workers say, for so long at most, and have the lanes go on."""
        for lane in self.lanes:
            lane.go_on()
        heard = {
            worker.sock.fileno(): (lane, who) for lane in self.lanes for who, worker in lane.workers.items()
        }
        poller = select.poll()
        for fd in heard:
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll(wait_s * 1_000):
            lane, who = heard[fd]
            lane.hear(who)

    def _pump_until(self, condition: Any, what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{what}: it did not come about; {self.lanes}"
            self._pump(0.01)

    def serve_all(self) -> None:
        """Return when every lane was served once more, and all stand still."""
        for lane in self.lanes:
            lane.is_paused = False
        before = [lane.served for lane in self.lanes]

        def is_served() -> bool:
            for lane, served in zip(self.lanes, before, strict=True):
                lane.is_paused = lane.served > served
            return all(lane.is_paused and lane.is_idle and lane.is_ready for lane in self.lanes)

        self._pump_until(is_served, "everybody is served")

    def strike(self) -> None:
        """Kill somebody at a random moment."""
        for lane in self.lanes:
            lane.is_paused = False
        until_s = time.monotonic() + self.rng.uniform(0, KILL_S_MAX)
        while (left_s := until_s - time.monotonic()) > 0:
            self._pump(min(left_s, 0.005))
        victim = self.rng.choice(VICTIMS)
        self.kills[victim] += 1
        if victim == DAEMON:
            self.kills_mid_turn += any(not lane.is_idle for lane in self.lanes)
            for lane in self.lanes:
                lane.is_disturbed = True
            self.daemon.kill()
            self.daemon.restart()
            return
        lane = self.rng.choice([lane for lane in self.lanes if lane.is_ready])
        self.kills_mid_turn += not lane.is_idle
        lane.kill(victim)

    def check(self) -> None:
        """All stand still: nothing is open, the books add up, and the log tells the same story."""

        def agrees() -> bool:
            try:
                core = self._client.stats().core
            except SnapdError:
                return False  # It was restarted; the next call connects anew.
            check_sums(core)
            is_over = core.open_sessions == 0 and not any(arena.live_bytes for arena in core.arenas)
            return is_over and self.log.agrees_with(core)

        wait_for(agrees, "nothing is open, and the log agrees", PATIENCE_S)
        assert all(len(reasons) == 1 for reasons in self.log.outcomes.values())
        for lane in self.lanes:
            for who, worker in lane.workers.items():
                assert len(worker.arenas()) <= 1, f"{who} has a former daemon's mapped: {worker.arenas()}"

    def end(self) -> dict[str, Any]:
        """Everything has ended and is free; return the figures."""
        wait_for(lambda: is_all_free(self._client.stats().core), "every byte is free", PATIENCE_S)
        for lane in self.lanes:
            lane.close()
        wait_for(
            lambda: num_fds(self.daemon.process.pid) <= self.fds_alone,
            "the daemon's file descriptors are closed",
            PATIENCE_S,
        )
        self._client.close()
        self.daemon.stop()
        self.log.follow()
        report = self.log.report()
        allocated = set().union(*self.log.allocated.values())
        assert allocated == set(self.log.outcomes), "every attempt has one outcome, over all epochs"
        assert not (report.open_attempts or report.open_leases or report.events_dropped)
        # What P put into its tree in the last moment of a daemon has no other outcome than its end.
        lost = {handle for handle in self.inserted if self.log.outcomes.get(handle) != [str(Reason.OK)]}
        for handle in lost:
            assert self.log.outcomes.get(handle, [str(Reason.DAEMON_RESTARTED)]) == [
                str(Reason.DAEMON_RESTARTED)
            ]
        assert len(lost) <= self.kills[DAEMON] * len(self.lanes)
        failures: Counter[str] = Counter()
        for lane in self.lanes:
            failures += lane.failures
        return {
            "kills": dict(self.kills),
            "kills_mid_turn": self.kills_mid_turn,
            "epochs": report.epochs,
            "attempts": report.attempts,
            "outcomes": report.outcomes,
            "ingested_and_compared": len(self.inserted),
            "inserted_and_not_logged": len(lost),
            "done_again": dict(failures),
            "log_lines": report.lines,
            "torn_lines": report.torn_lines,
        }

"""Logs of random lives, real daemons and the demo break no rule; a changed line is seen, or says the same."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proof_cases import FILE, SINGLE, TWO_PLANES, UNITS, Driver, Log, log_of, prove

from snapd import wire as w
from snapd.core import events as e
from snapd.core import records as r
from snapd.errors import Reason
from snapd.forensics.proof import ProofReport
from snapd.forensics.proof import ViolationKind as K
from snapd.layout import fingerprint

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from daemon_process import DaemonProcess
from raw_client import RawClient, wait_for

ROOT = Path(__file__).parents[2]
# More for a long run by hand.
EXAMPLES = int(os.environ.get("SNAPD_PROOF_EXAMPLES", "60"))
NO_REASONS = (
    Reason.ALLOC_FAILED_ON_FINALIZE, Reason.CHECKSUM_MISMATCH, Reason.TOKEN_MISMATCH,
    Reason.PREFIX_NOT_RESIDENT, Reason.INGEST_FAILED,
)  # fmt: skip
LAYOUTS = (TWO_PLANES, SINGLE)


class RandomLife:
    """Does one thing after another to a machine, of which most make sense."""

    def __init__(self, ranks: int) -> None:
        self.drive = Driver(
            ranks, units=UNITS, layouts=LAYOUTS, quarantine_ms=500, lease_ms=300, reserve_timeout_ms=400,
            transfer_timeout_ms=450,
        )  # fmt: skip
        self.handles: list[int] = []
        self.leases: list[tuple[int, int, int]] = []

    def act(self, what: str, pick: int, flag: bool) -> None:
        drive = self.drive
        if what == "prepare" or not self.handles:
            self._prepare(pick, flag)
            return
        handle = self.handles[-1 - pick % min(len(self.handles), 6)]
        rank = pick % len(drive.ranks)
        match what:
            case "ready":
                for each in drive.session(handle).shards:
                    drive.commit(handle, each, drained=flag or each != rank)
            case "start":
                drive.start(handle)
            case "commit":
                drive.commit(handle, rank, drained=flag, num_tokens=pick % 13 + 8 if pick % 5 == 0 else 16)
            case "fail":
                drive.fail(handle, drained=flag, reason=Reason.TRANSFER_FAILED)
            case "abort":
                drive.abort(handle, drained=flag)
            case "drained":
                drive.drained(handle)
            case "lease":
                for each in drive.ranks if flag else (rank,):
                    lease = drive.lease(handle, each)
                    if isinstance(lease, e.Leased):
                        self.leases.append((handle, each, lease.lease_id))
            case "ingest":
                for lease in self.leases[-len(drive.ranks) :]:
                    drive.vote(*lease)
            case "vote_no" if self.leases:
                drive.vote_no(*self.leases[-1], NO_REASONS[pick % 5], keep=flag)
            case "writer_gone":
                drive.tell(e.WriterGone, writer_id=pick % 3 + 1, drained=flag)
            case "wait":
                drive.advance(301_000 if pick == 0 else pick * 30)
            case "stand_still":
                drive.jump(pick * 20)

    def _prepare(self, pick: int, flag: bool) -> None:
        ranks = (0,) if pick % 7 == 0 else ()
        result = self.drive.prepare(
            "abcd"[pick % 4], 16 if pick % 9 else 900, ranks=ranks, writer_id=pick % 4,
            layout_fingerprint=fingerprint(LAYOUTS[not flag]),
        )  # fmt: skip
        if isinstance(result, e.Granted):
            self.handles.append(result.slab_handle)


deeds = st.lists(
    st.tuples(
        st.sampled_from([
            "prepare", "prepare", "prepare", "start", "ready", "ready", "lease", "lease", "ingest", "commit",
            "fail", "abort", "drained", "vote_no", "writer_gone", "wait", "stand_still",
        ]),
        st.integers(0, 30),
        st.booleans(),
    ),
    min_size=5,
    max_size=50,
)  # fmt: skip


def life_of(ranks: int, acts: list[tuple[str, int, bool]], *, is_stopped: bool = True) -> Log:
    life = RandomLife(ranks)
    for act in acts:
        life.act(*act)
    return log_of(life.drive, is_stopped=is_stopped)


@settings(max_examples=EXAMPLES, deadline=None)
@given(ranks=st.integers(1, 3), acts=deeds, is_stopped=st.booleans())
def test_random_lives_break_no_rule(ranks: int, acts: list[tuple[str, int, bool]], is_stopped: bool) -> None:
    report = life_of(ranks, acts, is_stopped=is_stopped).prove(overdue_grace_ms=1 << 40)
    assert report.is_good and report.is_whole, report.violations
    assert not is_stopped or report.open_attempts == 0


@settings(max_examples=EXAMPLES, deadline=None)
@given(ranks=st.integers(1, 2), acts=deeds, data=st.data())
def test_random_lives_without_their_beginning_break_no_rule(
    ranks: int, acts: list[tuple[str, int, bool]], data: st.DataObject
) -> None:
    raw = life_of(ranks, acts).raw()
    cut = data.draw(st.integers(1, len(raw) - 1))
    report = prove(raw[cut:], overdue_grace_ms=1 << 40)
    assert report.is_good and not report.is_beginning_known, report.violations


@settings(max_examples=EXAMPLES, deadline=None)
@given(ranks=st.integers(1, 2), acts=deeds, data=st.data())
def test_random_lives_with_lines_dropped_break_no_rule(
    ranks: int, acts: list[tuple[str, int, bool]], data: st.DataObject
) -> None:
    log = life_of(ranks, acts)
    begin = data.draw(st.integers(2, len(log)))
    count = data.draw(st.integers(1, len(log) - begin + 1))
    at_ns = log[begin + count - 1].at_ns
    del log.entries[begin - 1 : begin - 1 + count]
    log.insert(begin, r.EventsDropped(at_ns=at_ns, count=count, why="queue-full"))
    report = log.prove(overdue_grace_ms=1 << 40)
    assert report.is_good and report.events_dropped == count, report.violations


# --- one line is changed -----------------------------------------------------------------------


def deleted_is_harmless(record: r.Record) -> bool:
    """Without its stop, a daemon lives on; bytes that nobody took meanwhile may be in quarantine still."""
    return isinstance(record, r.DaemonStopped) or (
        isinstance(record, r.SlabReleased) and record.was == "quarantined"
    )


def swapped_is_harmless(first: Any, second: Any) -> bool:
    """Lines of one moment that are about two attempts or two ranks say the same in either order."""
    names = [(getattr(one, "slab_handle", 0), getattr(one, "rank", None)) for one in (first, second)]
    return first.at_ns == second.at_ns and names[0] != names[1] and any(handle for handle, _ in names)


@settings(max_examples=EXAMPLES * 2, deadline=None)
@given(ranks=st.integers(1, 2), acts=deeds, data=st.data(), how=st.sampled_from(["delete", "double", "swap"]))
def test_changed_line_is_seen_even_if_the_numbers_hide_it(
    ranks: int, acts: list[tuple[str, int, bool]], data: st.DataObject, how: str
) -> None:
    log = life_of(ranks, acts)
    original = log.prove(overdue_grace_ms=1 << 40)
    line = data.draw(st.integers(1, len(log) - (how == "swap")))
    first = log[line]
    if how == "delete":
        log.delete(line)
        is_harmless = deleted_is_harmless(first)
    elif how == "double":
        log.insert(line + 1, first)
        is_harmless = False
    else:
        is_harmless = swapped_is_harmless(first, log[line + 1])
        log.entries[line - 1 : line + 1] = log.entries[line - 1 : line + 1][::-1]
    report = log.prove(overdue_grace_ms=1 << 40)
    assert is_harmless or not report.is_good, (how, line, first)
    assert not report.is_good or how == "delete" or report == original, "it says the same"


@settings(max_examples=EXAMPLES, deadline=None)
@given(ranks=st.integers(1, 2), acts=deeds, data=st.data(), how=st.sampled_from(["delete", "double", "swap"]))
def test_changed_line_is_seen_by_its_number_but_for_the_first_and_the_last(
    ranks: int, acts: list[tuple[str, int, bool]], data: st.DataObject, how: str
) -> None:
    """Without its first line a log may have been rotated, without its last one its daemon lives."""
    raw = life_of(ranks, acts).raw()
    line = data.draw(st.integers(1, len(raw) - (how == "swap")))
    is_end = how == "delete" and line in (1, len(raw))
    if how == "delete":
        del raw[line - 1]
    elif how == "double":
        raw.insert(line, raw[line - 1])
    else:
        raw[line - 1 : line + 1] = raw[line - 1 : line + 1][::-1]
    report = prove(raw, overdue_grace_ms=1 << 40)
    assert report.is_good if is_end else K.SEQUENCE_GAP in report.counts, (how, line)


# --- real daemons ------------------------------------------------------------------------------


def prove_file(path: Path) -> ProofReport:
    return prove(path.read_bytes().splitlines())


def written(path: Path, kind: str, count: int) -> bool:
    return path.read_bytes().count(b'"event":"%s"' % kind.encode()) >= count


def test_daemon_that_is_killed_with_open_attempts_and_started_again_breaks_no_rule() -> None:
    with tempfile.TemporaryDirectory(prefix="snapd-") as directory:
        daemon = DaemonProcess(Path(directory), {"quarantine_ms": 50})
        try:
            with RawClient(daemon.socket_path) as client:
                client.declare()
                client.ingest(client.ready("a"))
                client.ask(w.AbortReq, slab_handle=client.granted("b"))
                client.lease(client.ready("c"))
                client.granted("d")
                wait_for(lambda: written(daemon.log_path, "slab.released", 2), "everything is written")
            report = prove_file(daemon.log_path)
            assert report.is_good and (report.open_attempts, report.open_leases) == (2, 1)
            daemon.kill()
            daemon.restart()
            with RawClient(daemon.socket_path) as client:
                client.declare()
                client.ingest(client.ready("e"))
        finally:
            daemon.stop()
        report = prove_file(daemon.log_path)
    assert report.is_good and report.is_whole, report.violations
    assert (report.epochs, report.crashed_epochs, report.open_attempts) == (2, 1, 0)
    assert report.outcomes == {"client-abort": 1, "daemon-restarted": 2, "ok": 2}


def write_trace(path: Path) -> Path:
    lines = [
        {
            "timestamp": 1000 * turn + 50 * session,
            "input_length": 1024 * (turn + 1),
            "output_length": 512,
            "hash_ids": [100 * session + block for block in range(2 * (turn + 1))],
        }
        for turn in range(3)
        for session in range(6)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_log_of_the_demo_with_chaos_breaks_no_rule(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "snapd.cli.main", "demo", "--json", "--total", "16MiB", "--chaos",
        "--seed", "5", "--trace", str(write_trace(tmp_path / "trace.jsonl")), "--out", str(out),
    ]  # fmt: skip
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["kills"] == 3
    report = prove_file(out / FILE)
    assert report.is_good and report.is_whole, report.violations
    assert report.outcomes["writer-gone"] == 3 and report.open_attempts == 0
    assert all(arena.free_bytes == arena.capacity_bytes for arena in report.arenas)

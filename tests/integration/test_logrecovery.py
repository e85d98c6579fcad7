"""What a daemon that died left open: read back from real logs, cut off, damaged and rotated."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from eventlog_cases import ONE_OF_EACH, read, rotated, settings, wait_until

from snapd import logrecovery
from snapd.core import records as rec
from snapd.core.events import State
from snapd.errors import Reason
from snapd.eventlog import EventLog, Line, decode_line
from snapd.logrecovery import FormerEpoch, OpenAttempt, closing_records, read_open_attempts

FLOW = ("", State.RESERVED, State.TRANSFERRING, State.READY, State.INGESTED)
KEEP = 50


def started(former_epoch: str = "", closed_attempts: int = 0) -> rec.DaemonStarted:
    return rec.DaemonStarted(
        at_ns=1, version="1", protocol=1, pid=1, transport="shm", arenas=(),
        former_epoch=former_epoch, closed_attempts=closed_attempts,
    )  # fmt: skip


def stopped(reason: str = "signal") -> rec.DaemonStopped:
    return rec.DaemonStopped(at_ns=1, reason=reason, attempts=0, attempts_ok=0)


def step(slab_handle: int, state: str, duration_ms: float = 0.0, /, **changes: Any) -> rec.SessionTransition:
    fields: dict[str, Any] = {
        "at_ns": 1, "session_id": f"s{slab_handle}", "slab_handle": slab_handle, "reason": Reason.OK,
        "from_state": FLOW[FLOW.index(State(state)) - 1], "to_state": state,
        "num_tokens": 10, "token_start": 3, "bytes": 4096, "duration_ms": duration_ms,
    }  # fmt: skip
    return rec.SessionTransition(**(fields | changes))


def outcome(slab_handle: int, former_epoch: str = "") -> rec.SyncOutcome:
    return rec.SyncOutcome(
        at_ns=1, session_id=f"s{slab_handle}", slab_handle=slab_handle, ok=True, reason=Reason.OK,
        num_tokens=10, token_start=3, bytes=4096, duration_ms=0.0, reserved_ms=0.0,
        transferring_ms=0.0, ready_ms=0.0, former_epoch=former_epoch,
    )  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def write(path: Path, epoch: str, *records: rec.Record, clock: Clock | None = None, **changes: Any) -> None:
    log = EventLog(settings(path, **changes), epoch, clock or Clock())
    for record in records:
        log.write(record)
    assert log.close(10) == 0


def keys(former: FormerEpoch | None) -> list[tuple[str, int, str]]:
    assert former is not None
    return [(one.epoch, one.slab_handle, one.state) for one in former.attempts]


def open_in(lines: list[Any]) -> dict[tuple[str, int], str]:
    """The naive answer, from all lines at once."""
    found: dict[tuple[str, int], str] = {}
    for line in lines:
        record = line.record if isinstance(line, Line) else None
        if isinstance(record, rec.SessionTransition):
            found[record.former_epoch or line.header.epoch, record.slab_handle] = record.to_state
        elif isinstance(record, rec.SyncOutcome):
            found.pop((record.former_epoch or line.header.epoch, record.slab_handle), None)
    return found


def test_without_a_log_or_with_an_empty_one_there_is_nothing_to_close(tmp_path: Path) -> None:
    assert read_open_attempts(str(tmp_path / "log"), KEEP) is None
    (tmp_path / "log").touch()
    assert read_open_attempts(str(tmp_path / "log"), KEEP) is None
    (tmp_path / "log").write_bytes(b"\x00" * 5000 + b"\nno line\n")
    assert read_open_attempts(str(tmp_path / "log"), KEEP) is None


def test_an_attempt_without_an_outcome_is_open_and_its_times_are_those_of_the_log(tmp_path: Path) -> None:
    write(
        tmp_path / "log", "e1", started(), step(1, "RESERVED", peer="d3"), step(2, "RESERVED"),
        step(1, "TRANSFERRING", 1250.5), step(2, "TRANSFERRING"), outcome(2), *ONE_OF_EACH[4:9],
    )  # fmt: skip
    former = read_open_attempts(str(tmp_path / "log"), KEEP)
    attempt = OpenAttempt(
        epoch="e1", session_id="s1", slab_handle=1, state="TRANSFERRING", reason=Reason.OK,
        num_tokens=10, token_start=3, bytes=4096, entered=(("RESERVED", 1002.0), ("TRANSFERRING", 1004.0)),
        ended_ts=1011.0, reserved_ms=1250.5, transferring_ms=7000.0, ready_ms=0.0, peer="d3",
    )  # fmt: skip
    assert former == FormerEpoch(epoch="e1", ended_ts=1011.0, attempts=(attempt,))
    assert closing_records(former, 77) == [
        step(1, "INGESTED", 7000.0, at_ns=77, from_state="TRANSFERRING", to_state="ABORTED",
             reason=Reason.DAEMON_RESTARTED, former_epoch="e1"),
        rec.SyncOutcome(
            at_ns=77, session_id="s1", slab_handle=1, ok=False, reason=Reason.DAEMON_RESTARTED, num_tokens=10,
            token_start=3, bytes=4096, duration_ms=8250.5, reserved_ms=1250.5, transferring_ms=7000.0,
            ready_ms=0.0, former_epoch="e1", peer="d3",
        ),
    ]  # fmt: skip


def test_a_clock_that_was_set_back_gives_no_negative_time(tmp_path: Path) -> None:
    clock = Clock()
    write(tmp_path / "log", "e1", started(), step(1, "RESERVED"), clock=clock)
    clock.now_s = 5.0
    write(tmp_path / "log", "e1", *ONE_OF_EACH[4:5], clock=clock)
    former = read_open_attempts(str(tmp_path / "log"), KEEP)
    assert former is not None
    assert former.attempts[0].reserved_ms == 0.0
    assert closing_records(former, 1)[0].duration_ms == 0.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("state", "reason", "ok"), [("INGESTED", Reason.OK, True), ("ABORTED", Reason.EVICTED, False)]
)
def test_an_attempt_that_had_ended_gets_the_outcome_that_belongs_to_its_end(
    tmp_path: Path, state: str, reason: Reason, ok: bool
) -> None:
    ended = step(1, "INGESTED", 5.0, to_state=state, reason=reason)
    write(tmp_path / "log", "e1", started(), step(1, "READY"), ended)
    former = read_open_attempts(str(tmp_path / "log"), KEEP)
    assert former is not None
    (closing,) = closing_records(former, 9)
    assert isinstance(closing, rec.SyncOutcome)
    assert (closing.ok, closing.reason, closing.ready_ms, closing.duration_ms) == (ok, reason, 5.0, 5.0)


def test_an_orderly_stop_leaves_nothing_open_and_is_seen_without_reading_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "log", "e1", started(), step(1, "RESERVED"), stopped())
    monkeypatch.setattr(logrecovery, "_Reading", None)
    assert read_open_attempts(str(tmp_path / "log"), KEEP) is None


def test_a_stop_that_is_the_last_whole_line_is_seen_behind_a_fragment(tmp_path: Path) -> None:
    write(tmp_path / "log", "e1", started(), step(1, "RESERVED"), stopped())
    with (tmp_path / "log").open("ab") as file:
        file.write(b'{"ts":1.0,"at')
    assert read_open_attempts(str(tmp_path / "log"), KEEP) is None


@pytest.mark.parametrize("left_bytes", [90, -2])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_an_epoch_whose_first_line_was_cut_off_never_was(
    tmp_path: Path, is_stopped: bool, left_bytes: int
) -> None:
    """Readers pass over what is torn, so nobody else knows that epoch either."""
    path = tmp_path / "log"
    write(path, "e1", started(), step(1, "RESERVED"), *([stopped()] if is_stopped else []))
    whole_bytes = path.stat().st_size
    write(path, "e2", started("e1", 1))
    os.truncate(path, (whole_bytes if left_bytes > 0 else path.stat().st_size) + left_bytes)
    former = read_open_attempts(str(path), KEEP)
    if is_stopped:
        assert former is None
    else:
        assert former is not None and former.epoch == "e1"
        assert keys(former) == [("e1", 1, "RESERVED")]
    write(path, "e3", started(), step(2, "RESERVED"))
    assert keys(read_open_attempts(str(path), KEEP))[-1:] == [("e3", 2, "RESERVED")]


def test_an_epoch_of_which_only_unknown_lines_are_there_was(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, "e1", started(), step(1, "RESERVED"))
    with path.open("ab") as file:
        file.write(b'{"ts":9.0,"at_ns":1,"seq":1,"epoch":"e2","event":"of.a.later.version","more":1}\n')
    former = read_open_attempts(str(path), KEEP)
    assert former is not None and (former.epoch, former.ended_ts) == ("e2", 9.0)
    assert keys(former) == [("e1", 1, "RESERVED")]


def test_a_stop_in_the_middle_ends_what_was_before_it_only(tmp_path: Path) -> None:
    write(tmp_path / "log", "e1", started(), step(1, "RESERVED"), stopped())
    write(tmp_path / "log", "e2", started(), step(2, "RESERVED"))
    assert keys(read_open_attempts(str(tmp_path / "log"), KEEP)) == [("e2", 2, "RESERVED")]


@pytest.mark.parametrize("then", [(), (started(), step(2, "RESERVED"))], ids=["at-the-end", "before-more"])
def test_a_stop_because_of_a_bug_leaves_open_what_was_open(
    tmp_path: Path, then: tuple[rec.Record, ...]
) -> None:
    write(tmp_path / "log", "e1", started(), step(1, "RESERVED"), stopped("internal-error"))
    if then:
        write(tmp_path / "log", "e2", *then)
    former = read_open_attempts(str(tmp_path / "log"), KEEP)
    assert keys(former)[:1] == [("e1", 1, "RESERVED")]
    assert len(keys(former)) == (2 if then else 1)


def test_a_crash_with_nothing_open_still_names_the_epoch(tmp_path: Path) -> None:
    write(tmp_path / "log", "e1", started(), step(1, "RESERVED"), outcome(1))
    assert read_open_attempts(str(tmp_path / "log"), KEEP) == FormerEpoch(
        epoch="e1", ended_ts=1003.0, attempts=()
    )


def test_equal_handles_of_several_epochs_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, "e1", started(), step(1, "RESERVED"), step(2, "RESERVED"), *ONE_OF_EACH[4:9])
    write(path, "e2", started("e1", 2), outcome(1, "e1"), step(1, "RESERVED"), step(2, "READY"), outcome(2))
    former = read_open_attempts(str(path), KEEP)
    assert keys(former) == [("e1", 2, "RESERVED"), ("e2", 1, "RESERVED")]
    assert former is not None
    assert (former.epoch, former.attempts[0].ended_ts) == ("e2", 1008.0)
    closing = closing_records(former, 1)
    assert [one.former_epoch for one in closing] == ["e1", "e1", "e2", "e2"]  # type: ignore[union-attr]
    write(path, "e3", started("e2", 2), *closing)
    assert keys(read_open_attempts(str(path), KEEP)) == []
    assert open_in(read(path)) == {}


def test_a_recovery_that_died_between_the_two_lines_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, "e1", started(), step(1, "RESERVED"))
    former = read_open_attempts(str(path), KEEP)
    assert former is not None
    transition, ending = closing_records(former, 1)
    write(path, "e2", started("e1", 1), transition)
    again = read_open_attempts(str(path), KEEP)
    assert keys(again) == [("e1", 1, "ABORTED")]
    assert again is not None
    assert closing_records(again, 1) == [ending]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[2:]))  # the beginning is gone
    again = read_open_attempts(str(path), KEEP)
    assert again is not None
    assert closing_records(again, 1) == [ending]


def test_a_complete_recovery_ends_the_story_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    write(path, "e1", *[step(n, "RESERVED") for n in range(1, 4)])
    former = read_open_attempts(str(path), KEEP)
    assert former is not None
    write(path, "e2", started("e1", 3), *closing_records(former, 1), step(9, "RESERVED"))
    seen: list[bytes] = []
    take = logrecovery._Reading.take

    def watched(self: logrecovery._Reading, raw: bytes) -> None:
        seen.append(raw)
        take(self, raw)

    monkeypatch.setattr(logrecovery._Reading, "take", watched)
    assert keys(read_open_attempts(str(path), KEEP)) == [("e2", 9, "RESERVED")]
    assert b"daemon.started" in seen[0]


def test_lines_that_cannot_matter_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "log", "e1", step(1, "RESERVED"), *ONE_OF_EACH[4:9] * 20)
    decoded: list[bytes] = []
    monkeypatch.setattr(logrecovery, "decode_line", lambda raw: (decoded.append(raw), decode_line(raw))[1])
    assert keys(read_open_attempts(str(tmp_path / "log"), KEEP)) == [("e1", 1, "RESERVED")]
    assert len(decoded) == 2  # the last line, to see whether it is a stop, and the first of the epoch


def test_lines_in_another_form_are_understood(tmp_path: Path) -> None:
    write(tmp_path / "log", "e0", step(1, "RESERVED"), stopped())
    write(tmp_path / "log", "e\\1", step(1, "RESERVED"), step(2, "RESERVED"), outcome(2))
    content = (tmp_path / "log").read_bytes().replace(b',"', b', "').replace(b'":', b'": ')
    (tmp_path / "log").write_bytes(content)
    assert keys(read_open_attempts(str(tmp_path / "log"), KEEP)) == [("e\\1", 1, "RESERVED")]


def test_garbage_unknown_events_and_lines_without_end_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logrecovery, "LINE_BYTES_MAX", 1000)
    path = tmp_path / "log"
    write(path, "e1", outcome(1))
    ends = path.read_bytes()
    path.unlink()
    write(path, "e1", started(), step(1, "RESERVED"), step(2, "RESERVED"), outcome(2))
    lines = path.read_bytes().splitlines(keepends=True)
    odd = [
        b"\n", b"\xff\xfe\n", b"{}\n", b"[1]\n", b"\x00" * 10_000 + b"\n", lines[1][:80] + b"\n",
        b'{"ts":1.0,"at_ns":1,"seq":9,"epoch":"e1","event":"session.moved","slab_handle":2}\n',
        b'{"ts":1.0,"at_ns":1,"seq":9,"epoch":"e1","event":"sync.outcome","slab_handle":1}\n',
        b"\x00" * 1000 + ends,
    ]  # fmt: skip
    path.write_bytes(b"".join(odd[n % len(odd)] + line for n, line in enumerate(lines * 2)) + b"".join(odd))
    assert keys(read_open_attempts(str(path), KEEP)) == [("e1", 1, "RESERVED")]
    with path.open("rb") as file:
        assert max(len(raw) for raw in logrecovery._lines(file)) < 1000


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 8, 100])
def test_what_is_looked_for_backward_is_found_once_wherever_the_blocks_end(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logrecovery, "_BLOCK_BYTES", block_bytes)
    (tmp_path / "file").write_bytes(b"xx.needle..needleneedl.needle")
    with (tmp_path / "file").open("rb") as file:
        assert list(logrecovery._find_backward(file, b"needle")) == [23, 11, 3]


def test_a_start_that_knew_of_no_former_epoch_ends_nothing(tmp_path: Path) -> None:
    write(tmp_path / "log", "e1", started(), step(1, "RESERVED"))
    write(tmp_path / "log", "e2", started(), step(1, "READY"))
    former = read_open_attempts(str(tmp_path / "log"), KEEP)
    assert keys(former) == [("e1", 1, "RESERVED"), ("e2", 1, "READY")]


def test_a_name_that_looks_like_a_stop_is_none(tmp_path: Path) -> None:
    name = '"event":"daemon.stopped"'
    write(tmp_path / "log", "e1", step(1, "RESERVED"), step(2, "RESERVED", session_id=name))
    assert len(keys(read_open_attempts(str(tmp_path / "log"), KEEP))) == 2


def random_records(seed: int) -> list[list[rec.Record]]:
    """Three lives of a daemon, each of which dies somewhere; the later ones close part of what they find."""
    rng = random.Random(seed)
    lives: list[list[rec.Record]] = []
    open_before: list[tuple[str, int]] = []
    for epoch in ("e0", "e1", "e2"):
        records: list[rec.Record] = [started(f"e{len(lives) - 1}" if lives else "", len(open_before))]
        closed = rng.randint(0, len(open_before))
        for former_epoch, handle in open_before[:closed]:
            records.append(step(handle, "RESERVED", to_state="ABORTED", former_epoch=former_epoch))
            records.append(outcome(handle, former_epoch))
        states: dict[int, int] = {}
        for _ in range(60):
            handle = rng.randint(1, 12)
            states[handle] = states.get(handle, 0) + 1
            if states[handle] < len(FLOW):
                records.append(step(handle, FLOW[states[handle]]))
            elif states[handle] == len(FLOW):
                records.append(outcome(handle))
            records.append(ONE_OF_EACH[rng.randint(4, 8)])
        open_before = open_before[closed:]
        open_before += [(epoch, handle) for handle, state in states.items() if state < len(FLOW)]
        lives.append(records)
    return lives


@pytest.mark.parametrize("seed", range(5))
def test_rotated_logs_of_several_crashes_cut_anywhere_read_like_one_list_of_lines(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logrecovery, "_BLOCK_BYTES", 700)  # so that what is looked for lies across borders
    path = tmp_path / "log"
    clock = Clock()
    for number, records in enumerate(random_records(seed)):
        write(path, f"e{number}", *records, clock=clock, rotate_bytes=6000, rotate_keep=KEEP)
    rng = random.Random(seed)
    while files := [file for file in rotated(path) if file.stat().st_size]:
        lines = [decode_line(raw) for file in files for raw in file.read_bytes().splitlines()]
        former = read_open_attempts(str(path), KEEP)
        found = {(one.epoch, one.slab_handle): one.state for one in former.attempts} if former else {}
        assert found == open_in(lines)
        os.truncate(files[-1], max(files[-1].stat().st_size - rng.randint(1, 400), 0))


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from test_logrecovery import *
log = EventLog(settings(Path(sys.argv[1]), rotate_bytes=20_000, rotate_keep=KEEP), "e1")
log.write(started())
handle = 0
while True:
    handle += 1
    for state in FLOW[1 : 2 + handle % 4]:
        log.write(step(handle, state))
    if handle % 5:
        log.write(outcome(handle))
    wait_until(lambda: log.statistics().queued_lines < 100)
"""


def test_after_kill_9_the_next_start_closes_every_open_attempt_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    script = KILLED.format(tests=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", script, str(path)]) as child:
        wait_until(lambda: (tmp_path / "log.5").exists())
        child.send_signal(signal.SIGKILL)
    before = [decode_line(raw) for file in rotated(path) for raw in file.read_bytes().splitlines()]
    former = read_open_attempts(str(path), KEEP)
    assert former is not None
    assert {key[:2]: key[2] for key in keys(former)} == open_in(before)
    assert len(former.attempts) > 20
    closing = closing_records(former, 1)
    write(path, "e2", started("e1", len(former.attempts)), *closing, rotate_bytes=20_000, rotate_keep=KEEP)
    after = [decode_line(raw) for file in rotated(path) for raw in file.read_bytes().splitlines()]
    assert open_in(after) == {}
    outcomes = [
        (line.record.former_epoch or line.header.epoch, line.record.slab_handle)
        for line in after
        if isinstance(line, Line) and isinstance(line.record, rec.SyncOutcome)
    ]
    assert len(outcomes) == len(set(outcomes))
    assert keys(read_open_attempts(str(path), KEEP)) == []

"""The log of a replay is one that the daemon could have written."""

import json
from pathlib import Path

import jsonschema
import pytest
from replay_cases import generate, small

from snapd.core import records as r
from snapd.core.session import Settings
from snapd.demo.logfacts import LogFacts
from snapd.errors import StartupError
from snapd.eventlog import Line, decode_line, log_line_schema
from snapd.replay.logsink import ReplayLog
from snapd.replay.replay import replay
from snapd.replay.trace import Trace


@pytest.fixture
def logged(tmp_path: Path):
    path = tmp_path / "d-to-p-sync.jsonl"
    model = small(send="session", ingest="on-demand", ready_ttl_ms=30_000)
    with ReplayLog(path, model) as log:
        result = replay(Trace("t", generate(4), ()), model, log)
    return path, result


def test_the_log_holds_together_and_tells_what_the_result_tells(logged):
    path, result = logged
    facts = LogFacts(path)
    assert facts.faults == []
    assert facts.reasons == result.snapshot.reasons
    assert len(facts.outcomes) == result.snapshot.attempts
    assert facts.transport == "replay"


def test_every_line_is_of_the_schema(logged):
    path, _ = logged
    validator = jsonschema.Draft202012Validator(log_line_schema())
    lines = path.read_bytes().splitlines()
    for raw in (*lines[:40], *lines[-40:]):
        validator.validate(json.loads(raw))


def test_first_and_last_line_are_those_of_a_daemon_that_was_stopped(logged):
    path, result = logged
    lines = [decode_line(raw) for raw in path.read_bytes().splitlines()]
    first, last = lines[0], lines[-1]
    assert isinstance(first, Line) and isinstance(last, Line)
    assert isinstance(first.record, r.DaemonStarted)
    assert first.record.arenas[0].size_bytes == result.model.buffer_bytes
    assert first.record.quarantine_ms == Settings().quarantine_ms
    assert isinstance(last.record, r.DaemonStopped)
    refused = result.snapshot.reasons.get("too-large", 0) + result.snapshot.reasons.get(
        "snapshot-buf-full", 0
    )
    granted = result.snapshot.attempts - refused
    assert (last.record.attempts, last.record.attempts_ok) == (granted, result.snapshot.ok)
    times = [line.record.at_ns for line in lines]
    assert times == sorted(times)


def test_the_same_run_writes_the_same_log(tmp_path):
    logs = []
    for name in ("a", "b"):
        path = tmp_path / name
        with ReplayLog(path, small()) as log:
            replay(Trace("t", generate(4, sessions=10), ()), small(), log)
        logs.append(path.read_bytes())
    assert logs[0] == logs[1]


def test_a_file_that_holds_something_is_left_alone(tmp_path):
    path = tmp_path / "log"
    path.write_text("precious\n")
    with pytest.raises(StartupError, match="holds something already"):
        ReplayLog(path, small())
    assert path.read_text() == "precious\n"


def test_a_replay_waits_for_the_disk_instead_of_dropping_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("snapd.replay.logsink._LOOK_EVERY_LINES", 1)
    monkeypatch.setattr("snapd.replay.logsink._QUEUE_LINES_MAX", 64)
    path = tmp_path / "log"
    with ReplayLog(path, small()) as log:
        result = replay(Trace("t", generate(4), ()), small(), log)
    assert path.read_bytes().count(b'"event":"sync.outcome"') == result.snapshot.attempts


def test_a_full_disk_is_an_error_at_the_end(tmp_path):
    log = ReplayLog(tmp_path / "log", small())
    log._log.close(5)
    log.write(r.DaemonStopped(at_ns=1, reason="x", attempts=0, attempts_ok=0))
    with pytest.raises(StartupError, match="could not be written"):
        log.close()

"""The log that is made up is as the daemon writes it."""

from pathlib import Path

import pytest

from snapd.eventlog import EventLog, Line, LogSettings, decode_line
from tools.make_log import make_log

LINES = 2_000


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    logs = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert make_log(tmp_path / name / "log", LINES, seed=seed) >= LINES
        logs.append((tmp_path / name / "log").read_bytes())
    assert logs[0] == logs[1] != logs[2]


def test_lines_are_those_that_the_daemon_would_write(tmp_path: Path) -> None:
    """The event log writes the same bytes for the same records."""
    make_log(tmp_path / "made", LINES, epochs=1)
    raw = (tmp_path / "made").read_bytes()
    lines = [decode_line(line) for line in raw.splitlines()]
    assert all(isinstance(line, Line) for line in lines)
    known = [line for line in lines if isinstance(line, Line)]
    times = iter([line.header.ts for line in known])
    settings = LogSettings(path=str(tmp_path / "written"), rotate_bytes=0)
    log = EventLog(settings, known[0].header.epoch, wall_clock=lambda: next(times))
    for line in known:
        log.write(line.record)
    assert log.close(10.0) == 0
    assert (tmp_path / "written").read_bytes() == raw


def test_a_log_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    with pytest.raises(FileExistsError):
        make_log(tmp_path / "log", 10)

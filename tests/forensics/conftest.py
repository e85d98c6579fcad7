"""Logs that several tests read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from forensics_logs import loaded

from snapd.forensics.facts import Selection
from snapd.forensics.lines import LogInput
from snapd.forensics.tables import LogTables
from tools.make_log import make_log

MADE_LINES = 12_000


@pytest.fixture(scope="session")
def made_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a rotated log of three epochs, in which everything happens; only for reading."""
    directory = tmp_path_factory.mktemp("made")
    make_log(directory / "d-to-p-sync.jsonl", MADE_LINES, arena_bytes=3 << 30, rotate_bytes=1 << 20)
    return directory


@pytest.fixture(scope="session")
def _made_tables(made_log: Path) -> Iterator[tuple[LogTables, LogInput]]:
    with loaded(made_log) as found:
        yield found


@pytest.fixture
def made_tables(_made_tables: tuple[LogTables, LogInput]) -> Iterator[tuple[LogTables, LogInput]]:
    """That log's tables, and its files."""
    yield _made_tables
    _made_tables[0].select(Selection())

# ruff: noqa: S608 - what stands in a query comes from here, or is quoted
"""A log as tables in a database: what a report, a drawing or a story asks, without the log in memory.

``LogTables`` is a DuckDB database in a temporary file. It has these tables; a column that a row has no
value for is NULL, and times are unix seconds unless their name says otherwise.

``records``: one row a line that was understood, each once.
    ``file`` (index into ``files``), ``line_no`` (from 1, in its file), ``epoch_no`` (0 is the oldest; older
    logs: -1), ``ts, at_ns, seq, epoch, event``, every field of ``snapd.core.records`` under its own name
    (``extents``, ``ranks`` and ``arenas`` as JSON text), ``peer``, and ``extra``: the fields that this
    version does not know, as JSON text. A line of an older log has the event ``older.attempt``.
    ``ORDER BY epoch_no, seq, file, line_no`` is the log's order.

``attempts``: one row an attempt that has ended, or a prepare that was refused.
    ``epoch, epoch_no`` (of the attempt, not of who closed it), ``slab_handle`` (NULL: refused, or older log),
    ``session_id, peer`` (who D was; NULL: the log does not say), ``ok, reason, num_tokens, token_start,
    bytes, started_ts, ended_ts, duration_ms, reserved_ms, transferring_ms, ready_ms, last_state`` (from
    which it ended), ``became_ready, is_refusal, is_older`` (a line of an older log), ``is_begin_missing``
    (its first lines are not in the log), ``newer_handle`` (who took over), ``file, line_no, seq`` (of the
    outcome).

``open_attempts``: attempts without an outcome: ``epoch, epoch_no, slab_handle, session_id, peer, state,
    since_ts, started_ts, num_tokens, bytes``.

``epochs``: ``epoch_no, epoch, begin_ts, end_ts, first_seq, last_seq, lines, missing_lines`` (numbers that are
    not in the log), ``dropped`` (records that the daemon could not write), ``has_begin, stop_reason`` (NULL:
    it did not end in order, or the end is missing), ``version, transport, former_epoch``.

``files``: ``file, path, size_bytes, compression, lines, unreadable, is_cut_off, damage``.

``unreadable``: the first lines that say nothing: ``file, line_no, why, text``.

``total(value, test)`` is the sum of the values for which *test* is true, 0 if there are none.

``since``, ``until`` and ``epoch`` narrow ``attempts`` and ``open_attempts``; ``records`` has everything.

Source: design, section 6.
"""

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any, Final, Self

import msgspec

from snapd.core.records import ArenaInfo
from snapd.errors import ExtraMissing
from snapd.forensics.arenamap import POINTS_MAX, ArenaSeries, ArenaStart, SlabRow, sample_arenas
from snapd.forensics.facts import Selection
from snapd.forensics.garbage import uncollected
from snapd.forensics.lines import LogInput, LogUnreadable, Progress
from snapd.forensics.loading import load
from snapd.forensics.scratch import ScratchDirectory
from snapd.units import MIB, align_down

MEMORY_BYTES_MAX: Final = 320 * MIB
_THREADS_MAX: Final = 4
_FETCH_ROWS: Final = 20_000
_extents_decoder: Final = msgspec.json.Decoder(tuple[tuple[int, int], ...])
_arenas_decoder: Final = msgspec.json.Decoder(tuple[ArenaInfo, ...])


class LogTables:
    """The database. Use it as a context manager, or close it: its file is deleted then.

    Args:
        log: what to read; it may be closed afterwards.
        progress: called with the bytes read and those to read.
        memory_bytes_max: what the database may use; beyond it, it goes to disk.

    Attributes:
        connection: for queries. It may be used by one thread at a time.
        files: what was found in each file, in the log's order.
        unreadable: the first lines that say nothing, at most a thousand.
        epochs: oldest first.
        lines: all that are not empty.
        duplicates: lines that were there more than once, and are counted once.
        selection: which attempts the tables show.

    Raises:
        LogUnreadable: a file cannot be read, or the database has no room.
        ExtraMissing: DuckDB or pyarrow is not installed.
    """

    def __init__(
        self, log: LogInput, progress: Progress | None = None, *, memory_bytes_max: int = MEMORY_BYTES_MAX
    ) -> None:
        duckdb = _import_duckdb()
        self.selection = Selection()
        self.connection: Any = None
        self._arena_series: dict[int, list[ArenaSeries]] = {}
        self._scratch = ScratchDirectory()
        directory = self._scratch.path
        try:
            self.connection = duckdb.connect(
                str(directory / "log.duckdb"),
                config={
                    "memory_limit": f"{memory_bytes_max}B",
                    "temp_directory": str(directory),
                    # Reading is Python's work: more threads would only wait for it, and not idly.
                    "threads": 1,
                    "preserve_insertion_order": False,
                },
            )
            self.files, self.unreadable, self.epochs, self.duplicates = load(self.connection, log, progress)
            self.connection.execute(f"SET threads = {min(os.cpu_count() or 1, _THREADS_MAX)}")
            self.select(Selection())
        except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
            self.close()
            raise LogUnreadable(
                f"the tables cannot be kept in {directory}: {error}. Set TMPDIR to a disk with room"
            ) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the database."""
        try:
            with contextlib.suppress(Exception):
                self.connection.close()
        finally:
            self._scratch.delete()

    @property
    def lines(self) -> int:
        """Lines of all files that are not empty."""
        return sum(file.lines for file in self.files)

    def select(self, selection: Selection) -> None:
        """Narrow ``attempts`` and ``open_attempts``, and forget it when *selection* is empty."""
        tests = [
            "TRUE" if selection.since_ts is None else f"ended_ts >= {selection.since_ts!r}",
            "TRUE" if selection.until_ts is None else f"ended_ts < {selection.until_ts!r}",
            f"epoch = {_quoted(selection.epoch)}" if selection.epoch else "TRUE",
        ]
        where = " AND ".join(tests)
        self.connection.execute(
            f"CREATE OR REPLACE VIEW attempts AS SELECT * FROM all_attempts WHERE {where}"
        )
        where = " AND ".join(tests).replace("ended_ts", "since_ts")
        self.connection.execute(
            f"CREATE OR REPLACE VIEW open_attempts AS SELECT * FROM all_open WHERE {where}"
        )
        self.selection = selection
        self._arena_series.clear()

    def rows(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Return all rows of a query, which should be few."""
        found: list[tuple[Any, ...]] = self.connection.execute(query, list(parameters)).fetchall()
        return found

    def value(self, query: str, *parameters: object) -> Any:
        """Return the first column of the first row; None if there is no row."""
        row = self.connection.execute(query, list(parameters)).fetchone()
        return None if row is None else row[0]

    def stream(self, query: str, *parameters: object) -> Iterator[tuple[Any, ...]]:
        """Yield rows, not all of them in memory. Make no other query until the end."""
        cursor = self.connection.execute(query, list(parameters))
        while batch := cursor.fetchmany(_FETCH_ROWS):
            yield from batch

    def span_ts(self) -> tuple[float, float] | None:
        """Return the first and the last time that is looked at; None: the log has no times."""
        first, last = self.rows("SELECT min(ts), max(ts) FROM records")[0]
        if first is None:
            return None
        chosen = [e for e in self.epochs if e.epoch == self.selection.epoch]
        if chosen:
            first, last = chosen[0].begin_ts, chosen[0].end_ts
        if self.selection.since_ts is not None:
            first = max(first, self.selection.since_ts)
        if self.selection.until_ts is not None:
            last = min(last, self.selection.until_ts)
        return first, max(first, last)

    def arenas(self, points_max: int = POINTS_MAX) -> list[ArenaSeries]:
        """Return what was live, in quarantine and free over the selected time, for each epoch and rank.

        An arena whose epoch has no beginning in the log has no known size, and its bytes are a lower bound.
        """
        if points_max not in self._arena_series:
            self._arena_series[points_max] = self._follow_arenas(points_max)
        return self._arena_series[points_max]

    def _follow_arenas(self, points_max: int) -> list[ArenaSeries]:
        span = self.span_ts()
        if span is None:
            return []
        facts = {epoch.epoch: epoch for epoch in self.epochs}
        starts = {
            (epoch, arena.rank): ArenaStart(
                arena.device,
                align_down(arena.size_bytes, max(arena.alignment_bytes, 1)),
                facts[epoch].missing_lines == 0 and facts[epoch].dropped == 0,
            )
            for epoch, arenas in self.rows("SELECT epoch, arenas FROM records WHERE event = 'daemon.started'")
            for arena in _arenas_decoder.decode(arenas)
        }
        where = "TRUE" if not self.selection.epoch else f"epoch = {_quoted(self.selection.epoch)}"
        if self.selection.until_ts is not None:
            where += f" AND ts < {self.selection.until_ts!r}"
        rows = self.stream(
            "SELECT epoch, rank, ts, event, slab_handle, was, extents FROM records "
            "WHERE event IN ('slab.allocated', 'slab.quarantined', 'slab.released') "
            f"AND {where} ORDER BY epoch_no, seq, file, line_no"
        )
        decode = _extents_decoder.decode
        slabs = (
            SlabRow(epoch, rank, ts, event, handle, was, decode(extents))
            for epoch, rank, ts, event, handle, was, extents in rows
        )
        with uncollected():
            return sample_arenas(slabs, starts, *span, points_max)


def _import_duckdb() -> Any:
    try:
        importlib.import_module("pyarrow")
        return importlib.import_module("duckdb")
    except ImportError as error:
        raise ExtraMissing(
            # One that is there and does not load has no name: then what it says is better than nothing.
            f"reading logs needs {error.name}, which is not installed: pip install 'kv-snapd[forensics]'"
            if error.name
            else f"reading logs needs duckdb and pyarrow, and one of them does not load ({error}): "
            "pip install --force-reinstall 'kv-snapd[forensics]'"
        ) from None


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"

# ruff: noqa: S608 - what stands in a query comes from here
"""Reads the lines of a log into the tables that ``tables`` describes.

Source: design, section 6.
"""

import importlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from snapd.forensics.decoding import (
    KINDS,
    OLD_EVENT,
    OLD_KIND,
    SQL_TYPES,
    UNKNOWN_KIND,
    Kind,
    Unreadable,
    all_columns,
    bad_column,
    event_of,
    read_slowly,
)
from snapd.forensics.facts import EpochFacts, FileFacts, UnreadableLine
from snapd.forensics.garbage import uncollected
from snapd.forensics.lines import Block, LogInput, Progress

BATCH_LINES: Final = 20_000
# What is not committed the database keeps in memory, beyond what it is allowed.
COMMIT_LINES: Final = 200_000
UNREADABLE_KEPT_MAX: Final = 1_000
_TEXT_CHARS_MAX: Final = 200
_astuple: Final = msgspec.structs.astuple


class Loaded(NamedTuple):
    """What was found on the way.

    Attributes:
        files: in the log's order.
        unreadable: the first lines that say nothing, at most ``UNREADABLE_KEPT_MAX``.
        epochs: oldest first.
        duplicates: lines that came more than once, and are in the tables once.
    """

    files: list[FileFacts]
    unreadable: list[UnreadableLine]
    epochs: list[EpochFacts]
    duplicates: int


def load(database: Any, log: LogInput, progress: Progress | None = None) -> Loaded:
    """Make the tables in an empty database.

    Raises:
        LogUnreadable: a file cannot be read.
    """
    return _Loader(database, log).run(progress)


class _Batch:
    """Rows of one kind that wait to be inserted."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.decode: Callable[[bytes], Any] = kind.decode
        self.values: list[Any] = []
        self.line_nos: list[int] = []
        # Of lines that were read slowly only: who asked, and unknown fields, by row.
        self.more: dict[int, tuple[str | None, str]] = {}

    def clear(self) -> None:
        self.values.clear()
        self.line_nos.clear()
        self.more.clear()


class _Loader:
    def __init__(self, database: Any, log: LogInput) -> None:
        self._database = database
        self._log = log
        self._files = [
            FileFacts(path=source.path, size_bytes=source.size_bytes, compression=source.compression)
            for source in log.sources
        ]
        self._kept: list[UnreadableLine] = []
        self._batches = {event: _Batch(kind) for event, kind in KINDS.items()}
        self._unknown = _Batch(UNKNOWN_KIND)
        self._old = _Batch(OLD_KIND)
        self._file = 0
        self._waiting = 0
        self._uncommitted = 0
        self._epoch = ""
        self._next_seq = 0
        self._appeared: dict[str, int] = {}  # epochs, as they come
        self._may_repeat = False

    def run(self, progress: Progress | None) -> Loaded:
        columns = {"file": int, "line_no": int, **all_columns(), "peer": str, "extra": str}
        fields = ", ".join(f'"{name}" {SQL_TYPES[kept]}' for name, kept in columns.items())
        self._database.execute(_TOTAL)
        self._database.execute(f"CREATE TABLE lines_read ({fields})")
        with uncollected():
            self._database.begin()
            for block in self._log.blocks(progress):
                self._take(block)
            self._insert()
            self._database.commit()
        duplicates = self._drop_repeats() if self._may_repeat else 0
        self._make_files()
        epochs = self._make_epochs()
        for query in (_RECORDS, _LIVES, _ATTEMPTS, _OPEN):
            self._database.execute(query)
        return Loaded(self._files, self._kept, epochs, duplicates)

    # --- lines ---------------------------------------------------------------------------------

    def _take(self, block: Block) -> None:
        if block.source_index != self._file or self._waiting >= BATCH_LINES:
            self._insert()
            self._file = block.source_index
        find = self._batches.get
        epoch, next_seq = self._epoch, self._next_seq
        for number, raw in enumerate(block.lines, block.first_line_no):
            batch = find(event_of(raw))
            try:
                value = None if batch is None else batch.decode(raw)
            except (msgspec.DecodeError, RecursionError):
                value = None
            if batch is None or value is None:
                if raw:
                    self._next_seq = next_seq
                    self._take_slowly(number, raw)
                    epoch, next_seq = self._epoch, self._next_seq
                continue
            batch.values.append(value)
            batch.line_nos.append(number)
            if value.seq == next_seq and value.epoch == epoch:
                next_seq += 1
            else:
                self._next_seq = next_seq
                self._note_jump(value.epoch, value.seq)
                epoch, next_seq = self._epoch, self._next_seq
        self._next_seq = next_seq
        self._waiting += len(block.lines)
        file = self._files[block.source_index]
        file.lines += len(block.lines) - block.lines.count(b"")
        file.is_cut_off = file.is_cut_off or block.is_cut_off
        file.damage = block.damage or file.damage

    def _take_slowly(self, number: int, raw: bytes) -> None:
        row = read_slowly(raw)
        if isinstance(row, Unreadable):
            self._note_unreadable(number, raw, row)
            return
        batch = self._old
        if row.kind is not OLD_KIND:
            batch = self._batches.get(row.kind.event.encode(), self._unknown)
            self._note_jump(row.value.epoch, row.value.seq)
        if row.peer is not None or row.extra:
            batch.more[len(batch.values)] = (row.peer, row.extra)
        batch.values.append(row.value)
        batch.line_nos.append(number)

    def _note_jump(self, epoch: str, seq: int) -> None:
        """Take a number that may not be the one after the last line's."""
        if epoch != self._epoch:
            # An epoch that comes back: this may be a copy.
            self._may_repeat = self._may_repeat or epoch in self._appeared
            self._epoch = epoch
            self._appeared.setdefault(epoch, len(self._appeared))
        elif seq < self._next_seq:
            self._may_repeat = True
        self._next_seq = seq + 1

    def _note_unreadable(self, number: int, raw: bytes, line: Unreadable) -> None:
        file = self._files[self._file]
        file.unreadable += 1
        if len(self._kept) < UNREADABLE_KEPT_MAX:
            text = raw[: 4 * _TEXT_CHARS_MAX].decode(errors="replace")[:_TEXT_CHARS_MAX]
            self._kept.append(UnreadableLine(path=file.path, line_no=number, why=line.why, text=text))

    # --- into the database ---------------------------------------------------------------------

    def _insert(self) -> None:
        for batch in (*self._batches.values(), self._unknown, self._old):
            self._weed_out(batch)
            if batch.values:
                self._insert_batch(batch)
            batch.clear()
        self._uncommitted += self._waiting
        self._waiting = 0
        if self._uncommitted >= COMMIT_LINES:
            self._database.commit()
            self._database.begin()
            self._uncommitted = 0

    def _weed_out(self, batch: _Batch) -> None:
        """Take lines out in which a column that is kept as JSON holds something else."""
        if not batch.values or all(
            are_all(decoder, [getattr(value, name) for value in batch.values])
            for name, decoder in batch.kind.checks.items()
        ):
            return
        kept = [index for index, value in enumerate(batch.values) if not bad_column(batch.kind, value)]
        for index in sorted(set(range(len(batch.values))).difference(kept)):
            value = batch.values[index]
            why = f"{batch.kind.event}: {bad_column(batch.kind, value)}"
            self._note_unreadable(batch.line_nos[index], msgspec.json.encode(value), Unreadable(why))
        batch.more = {new: batch.more[old] for new, old in enumerate(kept) if old in batch.more}
        batch.values = [batch.values[index] for index in kept]
        batch.line_nos = [batch.line_nos[index] for index in kept]

    def _insert_batch(self, batch: _Batch) -> None:
        pa: Any = importlib.import_module("pyarrow")
        types = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}
        arrays: dict[str, Any] = {"line_no": pa.array(batch.line_nos, pa.int64())}
        columns = zip(*map(_astuple, batch.values), strict=True)
        for (name, kept), column in zip(batch.kind.columns.items(), columns, strict=True):
            if kept is msgspec.Raw:
                arrays[name] = pa.array(list(map(bytes, column)), pa.binary()).cast(pa.string())
            else:
                arrays[name] = pa.array(column, types[kept])
        if batch.more:
            nothing = (None, None)
            more = [batch.more.get(index, nothing) for index in range(len(batch.values))]
            arrays.setdefault("peer", pa.array([peer for peer, _ in more], pa.string()))
            arrays["extra"] = pa.array([extra or None for _, extra in more], pa.string())
        self._database.register("batch", pa.table(arrays))
        self._database.execute(f"INSERT INTO lines_read BY NAME SELECT {self._file} AS file, * FROM batch")
        self._database.unregister("batch")

    def _drop_repeats(self) -> int:
        before = self._count_lines()
        self._database.execute(
            "DELETE FROM lines_read WHERE rowid IN (SELECT unnest(list(rowid ORDER BY file, line_no)[2:]) "
            "FROM lines_read WHERE seq IS NOT NULL GROUP BY epoch, seq HAVING count(*) > 1)"
        )
        return before - self._count_lines()

    def _count_lines(self) -> int:
        count: int = self._database.execute("SELECT count(*) FROM lines_read").fetchone()[0]
        return count

    # --- what follows from the records ---------------------------------------------------------

    def _make_files(self) -> None:
        self._database.execute(_FILES)
        self._fill("files", [(index, *_astuple(file)) for index, file in enumerate(self._files)])
        self._database.execute(_UNREADABLE)
        by_path = {file.path: index for index, file in enumerate(self._files)}
        self._fill("unreadable", [(by_path[line.path], *_astuple(line)[1:]) for line in self._kept])

    def _fill(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        """Insert rows all at once: one at a time takes a millisecond each."""
        if not rows:
            return
        pa: Any = importlib.import_module("pyarrow")
        columns = {f"c{index}": pa.array(column) for index, column in enumerate(zip(*rows, strict=True))}
        self._database.register("batch", pa.table(columns))
        self._database.execute(f"INSERT INTO {table} SELECT * FROM batch")
        self._database.unregister("batch")

    def _make_epochs(self) -> list[EpochFacts]:
        """Number the epochs: by the former one that each names, else as they come in the files."""
        found = self._database.execute(_FIND_EPOCHS).fetchall()
        found.sort(key=lambda row: self._appeared[row[0]])
        names = EpochFacts.__struct_fields__
        epochs = _in_order([EpochFacts(**dict(zip(names, row, strict=True))) for row in found])
        self._database.execute(_EPOCHS)
        self._fill("epochs", [(number, *_astuple(epoch)) for number, epoch in enumerate(epochs)])
        return epochs


def are_all(decoder: msgspec.json.Decoder[list[Any]], values: list[msgspec.Raw]) -> bool:
    """Whether all these pieces of JSON are of one shape: asked at once, as it is nearly always so."""
    try:
        decoder.decode(b"[" + b",".join(values) + b"]")
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _in_order(epochs: list[EpochFacts]) -> list[EpochFacts]:
    """Return the epochs, oldest first: as they come, but each after the one that it names as its former."""
    names = {epoch.epoch for epoch in epochs}
    later: dict[str, list[EpochFacts]] = {}
    roots: list[EpochFacts] = []
    for epoch in epochs:
        if epoch.former_epoch in names and epoch.former_epoch != epoch.epoch:
            later.setdefault(str(epoch.former_epoch), []).append(epoch)
        else:
            roots.append(epoch)
    ordered: dict[str, EpochFacts] = {}
    # Those that name each other in a circle are reached from no root: they come last.
    for root in (*roots, *epochs):
        chain = [root]
        while chain:
            epoch = chain.pop()
            if epoch.epoch not in ordered:
                ordered[epoch.epoch] = epoch
                chain += reversed(later.get(epoch.epoch, []))
    return list(ordered.values())


# --- the tables --------------------------------------------------------------------------------

# A sum of what a damaged log says may be larger than any column.
_TOTAL: Final = """
CREATE MACRO total(value, test) AS
least(greatest(coalesce(sum(value) FILTER (test), 0), -9223372036854775808), 9223372036854775807)::BIGINT
"""

_FILES: Final = """
CREATE TABLE files (file BIGINT, path VARCHAR, size_bytes BIGINT, compression VARCHAR, lines BIGINT,
                    unreadable BIGINT, is_cut_off BOOLEAN, damage VARCHAR)
"""

_UNREADABLE: Final = "CREATE TABLE unreadable (file BIGINT, line_no BIGINT, why VARCHAR, text VARCHAR)"

_FIND_EPOCHS: Final = """
SELECT epoch, min(ts), max(ts), min(seq), max(seq), count(*),
       max(seq) - min(seq) + 1 - count(*), total("count", TRUE),
       bool_or(event = 'daemon.started'),
       any_value(reason) FILTER (event = 'daemon.stopped'),
       any_value(version), any_value(transport),
       any_value(nullif(former_epoch, '')) FILTER (event = 'daemon.started')
FROM lines_read WHERE seq IS NOT NULL GROUP BY epoch
"""

_EPOCHS: Final = """
CREATE TABLE epochs (epoch_no BIGINT, epoch VARCHAR, begin_ts DOUBLE, end_ts DOUBLE, first_seq BIGINT,
                     last_seq BIGINT, lines BIGINT, missing_lines BIGINT, dropped BIGINT, has_begin BOOLEAN,
                     stop_reason VARCHAR, version VARCHAR, transport VARCHAR, former_epoch VARCHAR)
"""

_RECORDS: Final = """
CREATE VIEW records AS SELECT lines_read.*, coalesce(epochs.epoch_no, -1) AS epoch_no
FROM lines_read LEFT JOIN epochs ON lines_read.epoch = epochs.epoch
"""

_LIVES: Final = """
CREATE TEMP TABLE lives AS
SELECT coalesce(nullif(former_epoch, ''), epoch) AS epoch, slab_handle,
       any_value(session_id) AS session_id,
       any_value(nullif(peer, '')) AS peer,
       min(ts) FILTER (from_state = '') AS started_ts,
       bool_or(to_state = 'READY') AS became_ready,
       any_value(from_state) FILTER (to_state IN ('INGESTED', 'ABORTED')) AS last_state,
       arg_max(to_state, (ts, seq)) AS state,
       max(ts) AS since_ts,
       any_value(nullif(newer_handle, 0)) AS newer_handle,
       any_value(num_tokens) AS num_tokens,
       any_value(bytes) AS bytes
FROM records WHERE event = 'session.transition' GROUP BY 1, 2
"""

_ATTEMPTS: Final = f"""
CREATE TABLE all_attempts AS
WITH outcomes AS (
    SELECT coalesce(nullif(former_epoch, ''), epoch) AS epoch, nullif(slab_handle, 0) AS slab_handle,
           session_id, nullif(peer, '') AS peer, ok, reason, num_tokens, token_start, bytes, ts, duration_ms,
           reserved_ms, transferring_ms, ready_ms, event = '{OLD_EVENT}' AS is_older, file, line_no, seq,
           epoch_no AS line_epoch
    FROM records WHERE event IN ('sync.outcome', '{OLD_EVENT}')
),
firsts AS (
    -- An attempt that is said to have ended twice is counted once.
    SELECT * FROM outcomes
    QUALIFY slab_handle IS NULL
        OR row_number() OVER (PARTITION BY epoch, slab_handle ORDER BY line_epoch, seq) = 1
)
SELECT firsts.epoch, coalesce(epochs.epoch_no, -1) AS epoch_no, firsts.slab_handle,
       firsts.session_id, coalesce(firsts.peer, lives.peer) AS peer,
       ok, reason, firsts.num_tokens, token_start, firsts.bytes,
       coalesce(started_ts, ts - duration_ms / 1000) AS started_ts, ts AS ended_ts, duration_ms,
       reserved_ms, transferring_ms, ready_ms,
       last_state,
       CASE WHEN is_older THEN NULL
            ELSE coalesce(became_ready, FALSE) OR ok OR ready_ms > 0 END AS became_ready,
       NOT is_older AND firsts.slab_handle IS NULL AS is_refusal, is_older,
       NOT is_older AND firsts.slab_handle IS NOT NULL AND started_ts IS NULL AS is_begin_missing,
       newer_handle, file, line_no, seq
FROM firsts
LEFT JOIN lives ON firsts.epoch = lives.epoch AND firsts.slab_handle = lives.slab_handle
LEFT JOIN epochs ON firsts.epoch = epochs.epoch
"""

_OPEN: Final = """
CREATE TABLE all_open AS
SELECT lives.epoch, coalesce(epochs.epoch_no, -1) AS epoch_no, lives.slab_handle, lives.session_id,
       lives.peer, state, since_ts, started_ts, lives.num_tokens, lives.bytes
FROM lives LEFT JOIN epochs ON lives.epoch = epochs.epoch
ANTI JOIN all_attempts ON lives.epoch = all_attempts.epoch AND lives.slab_handle = all_attempts.slab_handle
"""

"""What is found of a log beside its records: its files, its epochs, and the lines that say nothing.

Source: design, section 6.
"""

import msgspec


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which attempts are looked at.

    Attributes:
        since_ts, until_ts: those that ended at or after, and before; None: no bound.
        epoch: those of this epoch; empty: of all.
    """

    since_ts: float | None = None
    until_ts: float | None = None
    epoch: str = ""


class FileFacts(msgspec.Struct, kw_only=True):
    """What was found in one file.

    Attributes:
        path: as it was named.
        size_bytes: on disk.
        compression: ``""``, ``gzip`` or ``zstd``.
        lines: all that are not empty.
        unreadable: those that say nothing.
        is_cut_off: the last line is not whole.
        damage: why the file could not be read to its end; empty: it could.
    """

    path: str
    size_bytes: int
    compression: str
    lines: int = 0
    unreadable: int = 0
    is_cut_off: bool = False
    damage: str = ""


class UnreadableLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line that says nothing.

    Attributes:
        path, line_no: where it is.
        why: what is wrong with it.
        text: its beginning.
    """

    path: str
    line_no: int
    why: str
    text: str


class EpochFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One life of the daemon, as far as the log has it; see the table ``epochs``."""

    epoch: str
    begin_ts: float
    end_ts: float
    first_seq: int
    last_seq: int
    lines: int
    missing_lines: int
    dropped: int
    has_begin: bool
    stop_reason: str | None
    version: str | None
    transport: str | None
    former_epoch: str | None

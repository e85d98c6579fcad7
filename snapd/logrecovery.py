"""What a daemon that died left open, read back from its log, and the lines that close it.

The files are read a line at a time, and only what is still open is kept. Lines that were cut off or
damaged, or that this version does not know, are passed over.

Source: design, section 6.
"""

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from snapd.core.events import FINAL_STATES, State
from snapd.core.records import DaemonStarted, DaemonStopped, Record, SessionTransition, SyncOutcome
from snapd.errors import Reason
from snapd.eventlog import Line, UnknownLine, decode_line
from snapd.logfile import rotated_path
from snapd.units import KIB, MIB, MS_PER_S

# Longer ones are garbage: a slab of 2048 extents makes a line of less than 100 KiB.
LINE_BYTES_MAX: Final = 1 * MIB
_TAIL_BYTES: Final = 64 * KIB
_BLOCK_BYTES: Final = 1 * MIB
_HEADER_BYTES_MAX: Final = 1 * KIB
# Lines in which an attempt is closed, with room for others in between.
_CLOSING_LINES: Final = 4
_HEADER: Final = re.compile(
    rb'\{"ts":([0-9]+\.[0-9]+),"at_ns":\d+,"seq":\d+,"epoch":"([^"\\]*)","event":"([^"\\]*)"'
)
_mattering: Final[dict[bytes, msgspec.json.Decoder[Record]]] = {
    b"session.transition": msgspec.json.Decoder(SessionTransition),
    b"sync.outcome": msgspec.json.Decoder(SyncOutcome),
    b"daemon.stopped": msgspec.json.Decoder(DaemonStopped),
}


class OpenAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that has no outcome in the log.

    Attributes:
        epoch: the life of the daemon that it belongs to.
        session_id: the session.
        slab_handle: the attempt; together with *epoch* it is unique.
        state: the last one that it is known to have entered.
        reason: why it entered that one.
        num_tokens: tokens of the snapshot.
        token_start: first token of the snapshot.
        bytes: payload bytes.
        entered: each state with the time at which it was entered, in unix seconds, in order.
        ended_ts: unix time of the last line of its epoch: it was open until then, as far as is known.
        reserved_ms, transferring_ms, ready_ms: time spent in each state, until *ended_ts*.
    """

    epoch: str
    session_id: str
    slab_handle: int
    state: str
    reason: Reason
    num_tokens: int
    token_start: int
    bytes: int
    entered: tuple[tuple[str, float], ...]
    ended_ts: float
    reserved_ms: float
    transferring_ms: float
    ready_ms: float
    peer: str = ""


class FormerEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """The last life of the daemon in the log, which did not end in order.

    Attributes:
        epoch: its id.
        ended_ts: unix time of its last line.
        attempts: what is open, of that epoch and of earlier ones, in the order of their first lines.
    """

    epoch: str
    ended_ts: float
    attempts: tuple[OpenAttempt, ...]


def read_open_attempts(path: str, keep: int) -> FormerEpoch | None:
    """Return what the log's daemon left open; None if there is no log, or it was stopped in order.

    Open is an attempt with a session.transition and no sync.outcome. An orderly stop, and a start whose
    closing lines are complete, end the story before them: nothing older is read.

    Args:
        path: the log; rotated files beside it are read as well, oldest first.
        keep: how many rotated files there may be.

    Raises:
        OSError: a file is there and cannot be read.
    """
    paths = [name for name in (rotated_path(path, i) for i in range(keep + 1)) if _size_bytes(name)]
    if not paths or _stopped_in_order(paths[0]):
        return None
    first, offset_bytes = _where_to_begin(paths)
    reading = _Reading()
    for index in range(first, -1, -1):
        with Path(paths[index]).open("rb") as file:
            file.seek(offset_bytes if index == first else 0)
            for raw in _lines(file):
                reading.take(raw)
    return reading.result()


def closing_records(former: FormerEpoch, at_ns: int) -> list[Record]:
    """Return the records that end each open attempt: ABORTED, then its outcome, ``daemon-restarted``.

    An attempt that had reached a final state before the daemon died lacks its outcome only, and gets
    the one that belongs to that state.

    Args:
        former: what ``read_open_attempts`` returned.
        at_ns: monotonic time now. Durations come from the log, as that clock may have begun anew.
    """
    records: list[Record] = []
    for attempt in former.attempts:
        reason = attempt.reason
        if attempt.state not in FINAL_STATES:
            reason = Reason.DAEMON_RESTARTED
            records.append(
                SessionTransition(
                    at_ns=at_ns,
                    session_id=attempt.session_id,
                    slab_handle=attempt.slab_handle,
                    from_state=attempt.state,
                    to_state=State.ABORTED,
                    reason=reason,
                    num_tokens=attempt.num_tokens,
                    token_start=attempt.token_start,
                    bytes=attempt.bytes,
                    duration_ms=_since_ms(attempt.entered[-1][1], attempt.ended_ts),
                    former_epoch=attempt.epoch,
                )
            )
        records.append(
            SyncOutcome(
                at_ns=at_ns,
                session_id=attempt.session_id,
                slab_handle=attempt.slab_handle,
                ok=attempt.state == State.INGESTED,
                reason=reason,
                num_tokens=attempt.num_tokens,
                token_start=attempt.token_start,
                bytes=attempt.bytes,
                duration_ms=attempt.reserved_ms + attempt.transferring_ms + attempt.ready_ms,
                reserved_ms=attempt.reserved_ms,
                transferring_ms=attempt.transferring_ms,
                ready_ms=attempt.ready_ms,
                former_epoch=attempt.epoch,
                peer=attempt.peer,
            )
        )
    return records


class _Open:
    """An attempt while the log is being read."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.last: SessionTransition
        self.entered: list[tuple[str, float]] = []
        self.spent_ms: dict[str, float] = {}
        self.peer = ""

    def enter(self, record: SessionTransition, ts: float) -> None:
        self.last = record
        self.peer = self.peer or record.peer
        self.entered.append((record.to_state, ts))
        if record.from_state:
            self.spent_ms[record.from_state] = max(record.duration_ms, 0.0)

    def result(self, ended_ts: float) -> OpenAttempt:
        spent_ms = dict(self.spent_ms)
        spent_ms[self.last.to_state] = _since_ms(self.entered[-1][1], ended_ts)
        return OpenAttempt(
            epoch=self.epoch,
            session_id=self.last.session_id,
            slab_handle=self.last.slab_handle,
            state=self.last.to_state,
            reason=self.last.reason,
            num_tokens=self.last.num_tokens,
            token_start=self.last.token_start,
            bytes=self.last.bytes,
            entered=tuple(self.entered),
            ended_ts=ended_ts,
            reserved_ms=spent_ms.get(State.RESERVED, 0.0),
            transferring_ms=spent_ms.get(State.TRANSFERRING, 0.0),
            ready_ms=spent_ms.get(State.READY, 0.0),
            peer=self.peer,
        )


class _Reading:
    """The open attempts after each line, and nothing else of what was read."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], _Open] = {}
        self._ended_ts: dict[str, float] = {}
        self._raw_epoch = b""
        self._epoch = ""
        self._raw_ts: bytes | float = 0.0  # of the line before; made a number when its epoch is over
        self._stopped = False

    def take(self, raw: bytes) -> None:
        # Most lines are told apart by their first bytes, and never decoded. The first one of an epoch is: one
        # that was cut off begins none.
        match = _HEADER.match(raw)
        if match is not None and match[2] == self._raw_epoch:
            ts, epoch, event = match.groups()
            self._note(epoch, ts)
            decoder = _mattering.get(event)
            if decoder is None:
                return
            try:
                self._apply(decoder.decode(raw), float(ts))
            except msgspec.DecodeError:
                return
        else:
            line = decode_line(raw)
            if isinstance(line, Line | UnknownLine):
                self._note(line.header.epoch.encode(), line.header.ts)
            if isinstance(line, Line):
                self._apply(line.record, line.header.ts)

    def result(self) -> FormerEpoch | None:
        if not self._epoch or self._stopped:
            return None
        self._ended_ts[self._epoch] = float(self._raw_ts)
        attempts = tuple(
            attempt.result(self._ended_ts.get(attempt.epoch, attempt.entered[-1][1]))
            for attempt in self._open.values()
        )
        return FormerEpoch(epoch=self._epoch, ended_ts=self._ended_ts[self._epoch], attempts=attempts)

    def _note(self, raw_epoch: bytes, raw_ts: bytes | float) -> None:
        if raw_epoch != self._raw_epoch:
            # Epochs follow each other; keep the end of those only that left something open.
            left_open = {key[0] for key in self._open}
            self._ended_ts[self._epoch] = float(self._raw_ts)
            self._ended_ts = {name: end for name, end in self._ended_ts.items() if name in left_open}
            self._raw_epoch = raw_epoch
            self._epoch = raw_epoch.decode(errors="replace")
        self._raw_ts = raw_ts
        self._stopped = False

    def _apply(self, record: Record, ts: float) -> None:
        if _is_orderly_stop(record):
            self._open.clear()
            self._stopped = True
        elif isinstance(record, SessionTransition):
            key = (record.former_epoch or self._epoch, record.slab_handle)
            attempt = self._open.get(key)
            if attempt is None:
                attempt = self._open[key] = _Open(key[0])
            attempt.enter(record, ts)
        elif isinstance(record, SyncOutcome):
            self._open.pop((record.former_epoch or self._epoch, record.slab_handle), None)


def _since_ms(begin_ts: float, end_ts: float) -> float:
    """Return the time between two wall clock readings; that clock may have been set back."""
    return max(end_ts - begin_ts, 0.0) * MS_PER_S


def _size_bytes(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:
        return 0


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines from here on; what has no newline within ``LINE_BYTES_MAX`` is passed over."""
    while raw := file.readline(LINE_BYTES_MAX):
        if raw.endswith(b"\n") or len(raw) < LINE_BYTES_MAX:  # the last line may be whole but for its newline
            yield raw
            continue
        while raw and not raw.endswith(b"\n"):
            raw = file.readline(LINE_BYTES_MAX)


def _stopped_in_order(path: str) -> bool:
    """Whether the last line of the newest file is that of an orderly stop."""
    with Path(path).open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
        tail = file.read()
    line = decode_line(tail[tail.rfind(b"\n", 0, len(tail) - 1) + 1 :])
    return isinstance(line, Line) and _is_orderly_stop(line.record)


def _is_orderly_stop(record: Record) -> bool:
    """Whether *record* says that the daemon has ended every attempt before it stopped."""
    return isinstance(record, DaemonStopped) and record.reason != Reason.INTERNAL_ERROR


def _where_to_begin(paths: list[str]) -> tuple[int, int]:
    """Return the index of the oldest file that is needed, and the offset in it."""
    for index, path in enumerate(paths):
        with Path(path).open("rb") as file:
            for at in _find_backward(file, b'"event":"daemon.st'):
                # The event follows the header, which is short.
                before = max(at - _HEADER_BYTES_MAX, 0)
                file.seek(before)
                begin = before + file.read(at - before).rfind(b"\n") + 1
                file.seek(begin)
                line = decode_line(file.readline(LINE_BYTES_MAX))
                if isinstance(line, Line) and _ends_the_story(line.record, file):
                    return index, begin
    return len(paths) - 1, 0


def _find_backward(file: BinaryIO, needle: bytes) -> Iterator[int]:
    """Yield the offsets of *needle*, the last one first. The file may be moved in meanwhile."""
    begin = os.fstat(file.fileno()).st_size
    overlap = b""
    while begin > 0:
        size_bytes = min(begin, _BLOCK_BYTES)
        begin -= size_bytes
        file.seek(begin)
        block = file.read(size_bytes) + overlap
        end = len(block)
        while (at := block.rfind(needle, 0, end)) >= 0:
            yield begin + at
            end = at
        # One that lies across the border is found in the next block, and only there.
        overlap = block[: len(needle) - 1]


def _ends_the_story(record: Record, file: BinaryIO) -> bool:
    """Whether *record*, after which *file* stands, shows that nothing before it is open."""
    if _is_orderly_stop(record):
        return True
    if not isinstance(record, DaemonStarted) or not record.former_epoch:
        return False
    # The closing lines come first after the start; it may have died in the middle of them.
    missing = record.closed_attempts
    for raw in islice(_lines(file), _CLOSING_LINES * missing):
        line = decode_line(raw)
        if isinstance(line, Line) and isinstance(line.record, SyncOutcome) and line.record.former_epoch:
            missing -= 1
        if missing == 0:
            break
    return missing == 0

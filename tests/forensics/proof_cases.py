"""Good logs out of the real core, and how they are changed, written and proved."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from snapd.core import records as r
from snapd.core.slab import Extent
from snapd.errors import Reason
from snapd.eventlog import AnyLine, decode_line
from snapd.forensics.proof import Proof, ProofReport, Violation, Where
from snapd.layout import fingerprint

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from core_driver import TWO_PLANES, UNIT, Driver, layout_of

FILE = "d-to-p-sync.jsonl"
NS_PER_MS = 1_000_000
UNITS = 8


@dataclass
class Entry:
    epoch: str
    record: r.Record
    skipped: int = 0  # numbers that are left out before this line


class Log:
    """A log that can be changed. Lines count from 1, and are numbered again when they are written."""

    def __init__(self, *records: r.Record, epoch: str = "e1") -> None:
        self.entries = [Entry(epoch, record) for record in records]

    def __len__(self) -> int:
        return len(self.entries)

    def __add__(self, other: "Log") -> "Log":
        joined = Log()
        joined.entries = self.entries + other.entries
        return joined

    def __getitem__(self, line_no: int) -> Any:
        return self.entries[line_no - 1].record

    def find(self, kind: type[r.Record], nth: int = 0, **fields: object) -> int:
        """Return the number of the nth line of a kind with these fields; -1 is the last one."""
        found = [
            number
            for number, entry in enumerate(self.entries, 1)
            if type(entry.record) is kind
            and all(getattr(entry.record, name) == value for name, value in fields.items())
        ]
        return found[nth]

    def change(self, line_no: int, **fields: object) -> int:
        entry = self.entries[line_no - 1]
        entry.record = msgspec.structs.replace(entry.record, **fields)
        return line_no

    def delete(self, line_no: int) -> Entry:
        return self.entries.pop(line_no - 1)

    def insert(self, line_no: int, record: r.Record, epoch: str = "") -> int:
        self.entries.insert(line_no - 1, Entry(epoch or self.entries[line_no - 2].epoch, record))
        return line_no

    def raw(self) -> list[bytes]:
        """Return the lines as they are written."""
        seqs: dict[str, int] = {}
        lines: list[bytes] = []
        for entry in self.entries:
            seqs[entry.epoch] = seq = seqs.get(entry.epoch, 0) + 1 + entry.skipped
            body = msgspec.json.encode(entry.record)
            lines.append(b'{"ts":1.5,"seq":%d,"epoch":"%s",%s' % (seq, entry.epoch.encode(), body[1:]))
        return lines

    def prove(self, **options: Any) -> ProofReport:
        return prove(self.raw(), **options)


def prove(raw: Iterable[bytes], first_line_no: int = 1, **options: Any) -> ProofReport:
    """Prove lines as they lie in a file."""
    return prove_lines(map(decode_line, raw), first_line_no, **options)


def prove_lines(lines: Iterable[AnyLine], first_line_no: int = 1, **options: Any) -> ProofReport:
    proof = Proof(**options)
    for line_no, line in enumerate(lines, first_line_no):
        proof.feed(line, Where(FILE, line_no))
    return proof.finish()


def named(violation: Violation) -> tuple[str, tuple[int, ...]]:
    """Return the kind of a violation and the lines that it names."""
    assert all(line.file == FILE for line in violation.lines)
    return violation.kind, tuple(line.line_no for line in violation.lines)


# --- good logs ---------------------------------------------------------------------------------


def started(ranks: int = 2, **fields: Any) -> r.DaemonStarted:
    arenas = tuple(
        r.ArenaInfo(rank=rank, device="cpu", size_bytes=UNITS * UNIT, alignment_bytes=UNIT)
        for rank in range(ranks)
    )
    values: dict[str, Any] = {
        "at_ns": 1, "version": "1", "protocol": 1, "pid": 1, "transport": "shm", "arenas": arenas,
    }  # fmt: skip
    return r.DaemonStarted(**(values | fields))


def stopped(drive: Driver, reason: str = "SIGTERM") -> r.DaemonStopped:
    statistics = drive.machine.statistics()
    return r.DaemonStopped(
        at_ns=drive.now_ns, reason=reason, attempts=statistics.attempts, attempts_ok=statistics.attempts_ok
    )


def log_of(drive: Driver, epoch: str = "e1", *, is_stopped: bool = True, **start: Any) -> Log:
    """Return what a driver has logged; stopped in order, with all quarantines over."""
    if is_stopped:
        drive.close()
    end = [stopped(drive)] if is_stopped else []
    start = {"quarantine_ms": drive.settings.quarantine_ms} | start
    return Log(started(len(drive.ranks), **start), *drive.records, *end, epoch=epoch)


def made(act: Callable[[Driver], object], ranks: int = 2, **settings: Any) -> Callable[[], Log]:
    """Return a function that returns the log of what *act* does, each time a new one."""

    @cache
    def records() -> Log:
        drive = Driver(ranks, units=UNITS, **settings)
        act(drive)
        return log_of(drive)

    def make() -> Log:
        log = Log()
        log.entries = [Entry(entry.epoch, entry.record) for entry in records().entries]
        return log

    return make


def _corrupt(drive: Driver) -> None:
    handle = drive.ready()
    lease_ids = [drive.lease(handle, rank).lease_id for rank in drive.ranks]
    drive.vote_no(handle, 0, lease_ids[0], Reason.CHECKSUM_MISMATCH)


def _revoked(drive: Driver) -> None:
    handle = drive.ready()
    drive.lease(handle, 0)
    drive.advance(11_000)
    drive.lease(handle, 0)


def _failed(drive: Driver) -> None:
    drive.fail(drive.transferring(), drained=True, reason=Reason.TRANSFER_FAILED)


def _undrained(drive: Driver) -> None:
    handle = drive.transferring()
    drive.abort(handle)
    drive.jump(5)
    drive.drained(handle)


def _evicted(drive: Driver) -> None:
    for name in "abcde":
        drive.ready(name)


def _refused(drive: Driver) -> None:
    drive.prepare("big", 10_000)
    drive.ingested()


def _stopped_while_read(drive: Driver) -> None:
    drive.lease(drive.ready(), 0)


def _several(drive: Driver) -> None:
    drive.ingested("a")
    drive.jump(3)
    drive.ingested("b")


SINGLE = layout_of(1, model="single")


def _pages(drive: Driver) -> None:
    """Every hole is one unit long, so that the next slab has an extent a plane."""
    name = fingerprint(SINGLE)
    handles = [drive.reserved(str(n), ranks=(0,), layout_fingerprint=name) for n in range(UNITS)]
    for handle in handles[::2]:
        drive.abort(handle, drained=True)
    drive.ingested("wide")


one_life = made(lambda drive: drive.ingested())
two_lives = made(_several)
aborted = made(lambda drive: drive.abort(drive.transferring()))
one_rank_aborted = made(lambda drive: drive.abort(drive.transferring(ranks=(0,))))
undrained = made(_undrained)
failed = made(_failed)
corrupt = made(_corrupt)
revoked = made(_revoked)
evicted = made(_evicted)
refused = made(_refused)
stopped_while_read = made(_stopped_while_read)
writer_gone = made(lambda drive: (drive.transferring(writer_id=3), drive.tell(_writer_gone(), writer_id=3)))
pages = made(_pages, layouts=(TWO_PLANES, SINGLE))
GOOD: dict[str, Callable[[], Log]] = {
    "one_life": one_life, "two_lives": two_lives, "aborted": aborted, "undrained": undrained,
    "failed": failed, "corrupt": corrupt, "revoked": revoked, "evicted": evicted, "refused": refused,
    "stopped_while_read": stopped_while_read, "writer_gone": writer_gone,
    "one_rank_aborted": one_rank_aborted, "pages": pages,
}  # fmt: skip


def _writer_gone() -> Any:
    from snapd.core import events as e

    return e.WriterGone


def extents(*pairs: tuple[int, int]) -> tuple[Extent, ...]:
    """Return extents, given in units of the arena."""
    return tuple(Extent(offset * UNIT, size * UNIT) for offset, size in pairs)

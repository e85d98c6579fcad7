"""Logs for tests: lines by hand, and what a plain reading of a log says."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from snapd.core import records as r
from snapd.eventlog import LINE_TYPES, Line, decode_line
from snapd.forensics.lines import LogInput
from snapd.forensics.report import Report, build_report
from snapd.forensics.tables import LogTables, Selection

TS = 1_767_225_600.0
NAMES = {cls: event for event, cls in LINE_TYPES.items()}
ARENA = r.ArenaInfo(0, "cpu", 1 << 20, 256)


@dataclass
class Writer:
    """Makes the lines of one epoch, a millisecond apart."""

    epoch: str = "e1"
    ts: float = TS
    seq: int = 0
    lines: list[bytes] = field(default_factory=list)

    def add(self, record: r.Record, **more: Any) -> bytes:
        """Add the line of a record, with fields that this version does not know."""
        self.seq += 1
        header = {
            "ts": self.ts + self.seq / 1_000, "at_ns": record.at_ns or self.seq * 1_000_000, "seq": self.seq,
            "epoch": self.epoch, "event": NAMES[type(record)],
        }  # fmt: skip
        fields = {name: value for name, value in msgspec.to_builtins(record).items() if name not in header}
        self.lines.append(msgspec.json.encode(header | fields | more))
        return self.lines[-1]

    def start(self, *arenas: r.ArenaInfo, former_epoch: str = "") -> None:
        self.add(
            r.DaemonStarted(
                at_ns=0, version="0", protocol=1, pid=1, transport="shm", arenas=arenas or (ARENA,),
                former_epoch=former_epoch,
            )
        )  # fmt: skip

    def stop(self) -> None:
        self.add(r.DaemonStopped(at_ns=0, reason="SIGTERM", attempts=0, attempts_ok=0))

    def move(self, handle: int, before: str, after: str, reason: str = "ok", **fields: Any) -> None:
        session_id = fields.pop("session_id", f"s{handle}")
        more = {name: fields.pop(name) for name in ("peer",) if name in fields}
        self.add(
            r.SessionTransition(
                at_ns=0, session_id=session_id, slab_handle=handle, from_state=before, to_state=after,
                reason=r.Reason(reason), num_tokens=10, token_start=0, bytes=1_000_000,
                duration_ms=fields.pop("duration_ms", 2.0), **fields,
            ),
            **more,
        )  # fmt: skip

    def slab(self, handle: int, what: str, *extents: tuple[int, int], rank: int = 0, **fields: Any) -> None:
        cls = {"allocated": r.SlabAllocated, "quarantined": r.SlabQuarantined, "released": r.SlabReleased}[
            what
        ]
        if what == "released":
            fields = {"was": "live", "why": "final", "duration_ms": 1.0} | fields
        if what == "quarantined":
            fields = {"until_ns": 1 << 40, "why": "undrained"} | fields
        self.add(
            cls(
                at_ns=0, session_id=f"s{handle}", slab_handle=handle, rank=rank, bytes=1_000_000,
                extents=tuple(r.Extent(*extent) for extent in extents), **fields,
            )
        )  # fmt: skip

    def outcome(self, handle: int, reason: str = "ok", **fields: Any) -> None:
        times = {"duration_ms": 10.0, "reserved_ms": 1.0, "transferring_ms": 4.0, "ready_ms": 5.0} | fields
        session_id = times.pop("session_id", f"s{handle}")
        self.add(
            r.SyncOutcome(
                at_ns=0, session_id=session_id, slab_handle=handle, ok=reason == "ok",
                reason=r.Reason(reason), num_tokens=10, token_start=0, bytes=1_000_000, ranks=(0,), **times,
            )
        )  # fmt: skip

    def refuse(self, session_id: str, reason: str = "snapshot-buf-full") -> None:
        same = {"session_id": session_id, "reason": r.Reason(reason), "num_tokens": 10, "token_start": 0}
        full = {"detail": "arena 0: 0 bytes free", "retry_after_ms": 50}
        self.add(r.SyncRefused(at_ns=0, bytes=1_000_000, **same, **full))
        self.add(
            r.SyncOutcome(
                at_ns=0, ok=False, bytes=1_000_000, duration_ms=0.0, reserved_ms=0.0, transferring_ms=0.0,
                ready_ms=0.0, **same,
            )
        )  # fmt: skip

    def life(self, handle: int, reason: str = "ok", **fields: Any) -> None:
        """A whole attempt that became READY."""
        self.move(handle, "", "RESERVED", duration_ms=0.0, **fields)
        self.slab(handle, "allocated", (handle * 256, 256))
        self.move(handle, "RESERVED", "TRANSFERRING", duration_ms=1.0)
        self.move(handle, "TRANSFERRING", "READY", duration_ms=4.0)
        self.move(handle, "READY", "INGESTED" if reason == "ok" else "ABORTED", reason, duration_ms=5.0)
        self.slab(handle, "released", (handle * 256, 256))
        self.outcome(handle, reason)

    def text(self) -> bytes:
        return b"".join(line + b"\n" for line in self.lines)


def compact(line: dict[str, Any]) -> bytes:
    """Write a line without blanks, as the daemon does; numbers may be larger than msgspec takes."""
    return json.dumps(line, separators=(",", ":")).encode()


def write_old(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Write an older log: an object a line."""
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


@contextlib.contextmanager
def loaded(*names: Path | str) -> Iterator[tuple[LogTables, LogInput]]:
    """The tables of a log."""
    with LogInput([str(name) for name in names]) as log, LogTables(log) as tables:
        yield tables, log


def report_of(*names: Path | str, selection: Selection | None = None, top: int = 10) -> Report:
    """The report of a log."""
    with loaded(*names) as (tables, log):
        tables.select(selection or Selection())
        return build_report(tables, log, top=top)


@dataclass
class Plain:
    """What a plain reading says, all in memory."""

    reasons: Counter[str] = field(default_factory=Counter)
    sessions: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    ok_bytes: int = 0
    ready_ms: list[float] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    evictions: int = 0
    quarantined: int = 0
    lines: int = 0


def read_plainly(paths: Sequence[Path]) -> Plain:
    """Read whole files, one after the other."""
    plain = Plain()
    for path in paths:
        for raw in path.read_bytes().splitlines():
            plain.lines += 1
            line = decode_line(raw)
            assert isinstance(line, Line)
            match line.record:
                case r.SyncOutcome() as outcome:
                    plain.reasons[outcome.reason.value] += 1
                    plain.sessions[outcome.session_id] += 1
                    plain.refused += not outcome.slab_handle
                    plain.ok_bytes += outcome.bytes if outcome.ok else 0
                    if outcome.ready_ms:
                        plain.ready_ms.append(outcome.ready_ms)
                    plain.durations.append(outcome.duration_ms)
                    plain.evictions += outcome.reason == "evicted"
                case r.SlabQuarantined():
                    plain.quarantined += 1
    return plain

"""Logs for the page's tests: a made-up night of a daemon, with a full buffer, a slow network and a crash.

The records are those of snapd, the extents those of its allocator, the times are random and seeded.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from snapd.core import records as r
from snapd.core.slab import Extent, SlabAllocator
from snapd.errors import Reason
from snapd.forensics.lines import LogInput
from snapd.forensics.report import Report, build_report
from snapd.forensics.tables import LogTables

BEGIN_TS = 1_767_200_000.0
TOKEN_BYTES = 12_288
PLANES = 8
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


class _Attempt:
    def __init__(
        self, session_id: str, handle: int, num_tokens: int, token_start: int, at: float, ranks: int
    ) -> None:
        self.session_id, self.handle = session_id, handle
        self.num_tokens, self.token_start = num_tokens, token_start
        self.rank_bytes = num_tokens * TOKEN_BYTES
        self.bytes = self.rank_bytes * ranks
        self.state, self.since, self.held_since = "", at, at
        self.spent = {"RESERVED": 0.0, "TRANSFERRING": 0.0, "READY": 0.0}
        self.extents: list[tuple[Extent, ...]] = []
        self.leases: list[int] = []


class Night:
    """Writes the log of *attempts* prepares over *hours*, from the same *seed* always the same."""

    def __init__(
        self, path: Path, attempts: int, *, hours: float = 8.0, seed: int = 1, ranks: int = 2,
        arena_bytes: int = 4 << 30, crash_at: float | None = 0.6, hostile: bool = True,
        leave_open: bool = True,
    ) -> None:  # fmt: skip
        self._random = random.Random(seed)
        self._file = path.open("wb")
        self._encode = msgspec.json.Encoder().encode
        self._ranks, self._arena_bytes = ranks, arena_bytes
        self._span, self._hostile = hours * 3600, hostile
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []
        self._counter = self._leases = 0
        self._epoch, self._seq, self._epoch_no = "", 0, 0
        self._open: dict[int, _Attempt] = {}
        self.outcomes: dict[str, int] = {}
        self.ended: list[tuple[str, int, str]] = []
        self.sessions: set[str] = set()
        self._start(0.0, "")
        for k in range(attempts):
            # More at the end of each hour.
            hour = (k + 0.5) / attempts * hours
            at = (int(hour) + (hour % 1) ** 0.7) * 3600 + self._random.uniform(-20, 20)
            self._later(max(at, 0.01), self._prepare)
        if crash_at is not None:
            self._later(crash_at * self._span, self._crash)
        while self._queue and (not leave_open or self._queue[0][0] <= self._span):
            at, _, action = heapq.heappop(self._queue)
            action(at)
        self._file.close()

    # --- time and lines

    def _later(self, at: float, action: Callable[[float], None]) -> None:
        self._counter += 1
        heapq.heappush(self._queue, (at, self._counter, action))

    def _in_epoch(self, at: float, action: Callable[[float], None]) -> None:
        epoch = self._epoch
        self._later(at, lambda now: action(now) if self._epoch == epoch else None)

    def _write(self, at: float, record: r.Record) -> None:
        self._seq += 1
        body = self._encode(record)
        head = b'{"ts":%.6f,"at_ns":%d,"seq":%d,"epoch":"%s",' % (
            BEGIN_TS + at, record.at_ns, self._seq, self._epoch.encode()
        )  # fmt: skip
        event_end = body.index(b',"at_ns":')
        rest = body.index(b",", event_end + 1) if b"," in body[event_end + 1 :] else len(body) - 1
        self._file.write(head + body[1:event_end] + body[rest:] + b"\n")

    def _ids(self, attempt: _Attempt, at: float) -> dict[str, Any]:
        return {"at_ns": self._ns(at), "session_id": attempt.session_id, "slab_handle": attempt.handle}

    def _ns(self, at: float) -> int:
        return 5_000_000_000 + round(at * 1e9)

    def _start(self, at: float, former: str, closed: int = 0) -> None:
        self._epoch_no += 1
        self._epoch, self._seq = f"{self._epoch_no:02d}{self._random.getrandbits(56):014x}", 0
        self._arenas = [SlabAllocator(self._arena_bytes) for _ in range(self._ranks)]
        infos = tuple(r.ArenaInfo(k, f"cuda:{k}", self._arena_bytes, 256) for k in range(self._ranks))
        self._write(at, r.DaemonStarted(
            at_ns=self._ns(at), version="0.1.0", protocol=1, pid=4711, transport="mooncake", arenas=infos,
            former_epoch=former, closed_attempts=closed,
        ))  # fmt: skip

    def _crash(self, at: float) -> None:
        lost, former = list(self._open.values()), self._epoch
        self._open.clear()
        self._epoch = ""
        self._later(at + 7.0, lambda now: self._restart(now, former, lost))

    def _restart(self, at: float, former: str, lost: list[_Attempt]) -> None:
        self._start(at, former, len(lost))
        for attempt in lost:
            self._end(attempt, at, Reason.DAEMON_RESTARTED, None, former=former)

    # --- lives

    def _prepare(self, at: float) -> None:
        if not self._epoch:
            return  # Nobody listens.
        rnd = self._random
        share = at / self._span
        session = f"agent-{rnd.randrange(1, 400):03d}/turns"
        if self._hostile and rnd.random() < 0.01:
            session = HOSTILE
        self.sessions.add(session)
        turn = rnd.random() < 0.7
        tokens = int(rnd.lognormvariate(8.2 if turn else 9.6, 0.6))
        if 0.34 < share < 0.40:
            tokens *= 6
        attempt = _Attempt(
            session, rnd.getrandbits(53) | 1, tokens, tokens * 3 if turn else 0, at, self._ranks
        )
        sizes = [tokens * TOKEN_BYTES // PLANES] * PLANES
        taken: list[tuple[Extent, ...]] = []
        for arena in self._arenas:
            extents = arena.allocate(sizes)
            if extents is None:
                for other, got in zip(self._arenas, taken, strict=False):
                    other.free(got)
                self._refuse(attempt, at)
                return
            taken.append(extents)
        attempt.extents = taken
        self._open[attempt.handle] = attempt
        self._move(attempt, at, "RESERVED", Reason.OK)
        for rank, extents in enumerate(taken):
            self._write(at, r.SlabAllocated(
                **self._ids(attempt, at), rank=rank,
                bytes=attempt.rank_bytes, extents=extents,
            ))  # fmt: skip
        start = at + rnd.lognormvariate(-5, 0.8)
        if rnd.random() < 0.008:
            self._in_epoch(at + 10.0, lambda now: self._end(attempt, now, Reason.RESERVE_TIMEOUT, None))
        elif rnd.random() < 0.02:
            self._in_epoch(start, lambda now: self._end(attempt, now, Reason.SESSION_NOT_RESIDENT, "drained"))
        else:
            self._in_epoch(start, lambda now: self._transfer(attempt, now))

    def _transfer(self, attempt: _Attempt, at: float) -> None:
        rnd, share = self._random, at / self._span
        self._move(attempt, at, "TRANSFERRING", Reason.OK)
        slow = 0.70 < share < 0.74
        seconds = attempt.bytes / (rnd.lognormvariate(1.6, 0.5) * (0.02 if slow else 1.0) * 1e9) + 0.001
        if slow and rnd.random() < 0.5:
            self._in_epoch(at + 33.0, lambda now: self._end(attempt, now, Reason.TRANSFER_TIMEOUT, None))
        elif rnd.random() < 0.01:
            self._in_epoch(
                at + seconds / 2, lambda now: self._end(attempt, now, Reason.TRANSFER_FAILED, None)
            )
        else:
            self._in_epoch(at + seconds, lambda now: self._ready(attempt, now))

    def _ready(self, attempt: _Attempt, at: float) -> None:
        rnd = self._random
        self._move(attempt, at, "READY", Reason.OK)
        share = at / self._span
        if rnd.random() < 0.01:
            self._in_epoch(at + 300.0, lambda now: self._end(attempt, now, Reason.READY_EXPIRED, "final"))
            return
        wait = rnd.lognormvariate(3.4 if 0.33 < share < 0.40 else 2.0, 1.0)
        self._in_epoch(at + wait, lambda now: self._lease(attempt, now))

    def _lease(self, attempt: _Attempt, at: float) -> None:
        rnd = self._random
        for rank in range(self._ranks):
            self._leases += 1
            attempt.leases.append(self._leases)
            self._write(at, r.LeaseGranted(
                **self._ids(attempt, at), rank=rank,
                lease_id=self._leases, round=1, until_ns=self._ns(at + 10),
            ))  # fmt: skip
        end = at + rnd.lognormvariate(-4.5, 0.4)
        luck = rnd.random()
        reason = Reason.OK if luck >= 0.015 else Reason.ALLOC_FAILED_ON_FINALIZE
        reason = Reason.CHECKSUM_MISMATCH if luck < 0.001 else reason
        self._in_epoch(end, lambda now: self._finish(attempt, now, reason, self._ns(now) - self._ns(at)))

    def _finish(self, attempt: _Attempt, at: float, reason: Reason, lease_ns: int) -> None:
        for rank in range(self._ranks):
            self._write(at, r.LeaseEnded(
                **self._ids(attempt, at), rank=rank, lease_id=attempt.leases[rank],
                ok=reason is Reason.OK, reason=reason, duration_ms=lease_ns / 1e6,
            ))  # fmt: skip
        self._end(attempt, at, reason, None if reason is Reason.CHECKSUM_MISMATCH else "final")

    def _quarantine(self, attempt: _Attempt, at: float, why: r.QuarantineWhy) -> None:
        for rank, extents in enumerate(attempt.extents):
            self._write(at, r.SlabQuarantined(
                **self._ids(attempt, at), rank=rank,
                bytes=attempt.rank_bytes, extents=extents, until_ns=self._ns(at) + 60_000_000_000, why=why,
            ))  # fmt: skip
        attempt.held_since = at
        self._in_epoch(at + 60, lambda now: self._release(attempt, now, "quarantined", "time"))

    def _release(self, attempt: _Attempt, at: float, was: r.ReleasedFrom, why: r.ReleaseWhy) -> None:
        held_ms = (self._ns(at) - self._ns(attempt.held_since)) / 1e6
        for rank, extents in enumerate(attempt.extents):
            self._arenas[rank].free(extents)
            self._write(at, r.SlabReleased(
                **self._ids(attempt, at), rank=rank,
                bytes=attempt.rank_bytes, extents=extents, was=was, why=why, duration_ms=held_ms,
            ))  # fmt: skip

    # --- records of sessions

    def _move(self, attempt: _Attempt, at: float, to: str, reason: Reason, former: str = "") -> None:
        spent_ms = (self._ns(at) - self._ns(attempt.since)) / 1e6 if attempt.state else 0.0
        if attempt.state:
            attempt.spent[attempt.state] += spent_ms
        self._write(at, r.SessionTransition(
            **self._ids(attempt, at), from_state=attempt.state,
            to_state=to, reason=reason, num_tokens=attempt.num_tokens, token_start=attempt.token_start,
            bytes=attempt.bytes, duration_ms=spent_ms, former_epoch=former,
        ))  # fmt: skip
        attempt.state, attempt.since = to, at

    def _end(
        self, attempt: _Attempt, at: float, reason: Reason, freed: r.ReleaseWhy | None, former: str = ""
    ) -> None:
        self._move(attempt, at, "INGESTED" if reason is Reason.OK else "ABORTED", reason, former)
        if freed is not None:
            self._release(attempt, at, "live", freed)
        elif not former:
            self._quarantine(attempt, at, "corrupt" if reason is Reason.CHECKSUM_MISMATCH else "undrained")
        self._open.pop(attempt.handle, None)
        self._outcome(attempt, at, reason, former)

    def _outcome(self, attempt: _Attempt, at: float, reason: Reason, former: str = "") -> None:
        self.ended.append((attempt.session_id, attempt.handle if attempt.state else 0, reason.value))
        self.outcomes[reason.value] = self.outcomes.get(reason.value, 0) + 1
        spent = attempt.spent
        self._write(at, r.SyncOutcome(
            at_ns=self._ns(at), session_id=attempt.session_id, ok=reason is Reason.OK, reason=reason,
            num_tokens=attempt.num_tokens, token_start=attempt.token_start, bytes=attempt.bytes,
            duration_ms=sum(spent.values()), reserved_ms=spent["RESERVED"],
            transferring_ms=spent["TRANSFERRING"], ready_ms=spent["READY"],
            slab_handle=attempt.handle if attempt.state else 0,
            ranks=tuple(range(self._ranks)) if attempt.state else (), former_epoch=former,
        ))  # fmt: skip

    def _refuse(self, attempt: _Attempt, at: float) -> None:
        self._write(at, r.SyncRefused(
            at_ns=self._ns(at), session_id=attempt.session_id, reason=Reason.SNAPSHOT_BUF_FULL,
            num_tokens=attempt.num_tokens, token_start=attempt.token_start, bytes=attempt.bytes,
            retry_after_ms=250,
        ))  # fmt: skip
        self._outcome(attempt, at, Reason.SNAPSHOT_BUF_FULL)


@contextmanager
def opened(path: Path) -> Iterator[tuple[LogTables, Report]]:
    """A log's tables and its report."""
    with LogInput([str(path)]) as log, LogTables(log) as tables:
        yield tables, build_report(tables, log)

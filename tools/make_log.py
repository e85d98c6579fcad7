"""Write an event log of N lines: the real core under a made-up clock, with D workers and P ranks of chance.

The records are the core's own and are encoded as the daemon does it, so that what the log tells can be
proved. There are several epochs, one of which ends without closing anything; rotated files; evictions,
quarantine, refusals, leases that run out, and sessions of many turns. The same seed gives the same bytes.
"""

import functools
import heapq
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from snapd.core import events as e
from snapd.core import records as r
from snapd.core.machine import Machine
from snapd.core.session import Settings
from snapd.core.slab import SlabAllocator
from snapd.errors import Reason
from snapd.eventlog import LINE_TYPES
from snapd.layout import Layout, fingerprint
from snapd.logfile import LogFile, LogSettings
from snapd.logrecovery import closing_records, read_open_attempts
from snapd.units import GIB, MIB, NS_PER_MS, NS_PER_S

START_TS: Final = 1_767_225_600.0  # 2026-01-01T00:00:00Z
ALIGNMENT_BYTES: Final = 256
# 16 KiB a token and rank.
LAYOUT: Final = Layout(k_stride_bytes=(512,) * 16, v_stride_bytes=(512,) * 16)
PREPARES_PER_S: Final = 6.0
BYTES_PER_S: Final = 4e9
_BATCH_LINES: Final = 4_096
_HANDLE_BITS: Final = 53
_EPOCH_CHARS: Final = 16
_encode: Final = msgspec.json.Encoder().encode
_EVENT_NAME: Final = {cls: _encode(event) for event, cls in LINE_TYPES.items()}


class LogSink:
    """Numbers records and appends them to a log that rotates."""

    def __init__(self, path: Path, rotate_bytes: int, rotate_keep: int) -> None:
        self.lines = 0
        self.kinds: Counter[str] = Counter()
        self.now_ns = 0
        self._file = LogFile(
            LogSettings(path=str(path), rotate_bytes=rotate_bytes, rotate_keep=max(rotate_keep, 1))
        )
        self._file.open()
        self._batch: list[bytes] = []
        self._seq = 0
        self._epoch = b""
        self._wall_s = 0.0

    def begin_epoch(self, epoch: str, boot_ns: int) -> None:
        """Count from 1 again; the monotonic clock is *boot_ns* behind the time since the start."""
        self._epoch = _encode(epoch)
        self._seq = 0
        self._wall_s = START_TS - boot_ns / NS_PER_S

    def write(self, record: r.Record) -> None:
        """Add the next line."""
        self._seq += 1
        self.lines += 1
        event = _EVENT_NAME[type(record)]
        at_ns = b"%d" % record.at_ns
        body = _encode(record)
        self._batch.append(
            b'{"ts":%.6f,"at_ns":%s,"seq":%d,"epoch":%s,"event":%s%s\n'
            % (
                self._wall_s + record.at_ns / NS_PER_S,
                at_ns,
                self._seq,
                self._epoch,
                event,
                body[len(b'{"event":,"at_ns":') + len(event) + len(at_ns) :],
            )
        )
        if len(self._batch) >= _BATCH_LINES:
            self.flush()

    def flush(self) -> None:
        """Write what waits, in files that are not larger than they may be."""
        while self._batch:
            self._file.refresh()
            if self._file.size_bytes and self._file.room_bytes < len(self._batch[0]):
                self._file.rotate()
            count = size_bytes = 0
            for line in self._batch:
                size_bytes += len(line)
                if count and size_bytes > self._file.room_bytes:
                    break
                count += 1
            _, error = self._file.append(b"".join(self._batch[:count]))
            if error is not None:
                raise error
            del self._batch[:count]

    def close(self) -> None:
        """Write what waits and close the file."""
        self.flush()
        self._file.close()


class Epoch:
    """One life of the daemon: a core, its timers, and those who talk to it."""

    def __init__(
        self,
        rng: random.Random,
        sink: LogSink,
        now_ns: int,
        *,
        ranks: int,
        arena_bytes: int,
        settings: Settings,
    ) -> None:
        self._rng = rng
        self._sink = sink
        self.now_ns = now_ns
        self._ranks = ranks
        self._fingerprint = fingerprint(LAYOUT)
        self.machine = Machine(
            settings,
            {rank: SlabAllocator(arena_bytes, alignment_bytes=ALIGNMENT_BYTES) for rank in range(ranks)},
            alignment_bytes=ALIGNMENT_BYTES,
        )
        self._timers: dict[Any, Any] = {}
        self._agenda: list[tuple[int, int, Callable[[], object]]] = []
        self._steps = 0
        self._sessions: list[tuple[str, int]] = []
        self._sessions_made = 0
        self._results: list[e.Result] = []
        for rank in range(ranks):
            self._post(e.LayoutDeclared(at_ns=now_ns, rank=rank, layout=LAYOUT))
        self._in(0, self._prepare_next)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Go on until *is_over*."""
        while not is_over():
            at_ns, _, action = heapq.heappop(self._agenda)
            self.now_ns = max(self.now_ns, at_ns)
            action()

    def stop(self) -> None:
        """End every open attempt, as SIGTERM does."""
        self._post(e.StopAsked(at_ns=self.now_ns))

    @property
    def _minute(self) -> int:
        return self.now_ns // (60 * NS_PER_S)

    # --- the core ------------------------------------------------------------------------------

    def _in(self, wait_ms: float, action: Callable[[], object]) -> None:
        self._steps += 1
        heapq.heappush(self._agenda, (self.now_ns + int(wait_ms * NS_PER_MS), self._steps, action))

    def _post(self, event: e.Event) -> e.Result | None:
        """Hand an event to the core, and return its answer if it has one now."""
        result = None
        for instruction in self.machine.handle(event):
            match instruction:
                case e.RecordWritten():
                    self._sink.write(instruction.record)
                case e.TimerArmed():
                    self._timers[instruction.key] = instruction.event
                    self._arm(instruction.key, instruction.event)
                case e.TimerCancelled():
                    self._timers.pop(instruction.key, None)
                case e.Replied():
                    result = instruction.result
                case _:
                    pass
        return result

    def _arm(self, key: Any, event: Any) -> None:
        def fire() -> None:
            armed = self._timers.get(key)
            if armed == event:
                del self._timers[key]
                self._post(msgspec.structs.replace(armed, at_ns=self.now_ns))

        self._steps += 1
        heapq.heappush(self._agenda, (event.deadline_ns, self._steps, fire))

    def _tell(self, kind: type[e.Event], **fields: Any) -> e.Result | None:
        self._steps += 1
        return self._post(kind(at_ns=self.now_ns, cause_id=self._steps, **fields))

    # --- D -------------------------------------------------------------------------------------

    def _prepare_next(self) -> None:
        rng = self._rng
        # Bursts fill the arena; what lies between them empties it.
        is_burst = self._minute % 5 in (0, 2)
        self._in(rng.expovariate(PREPARES_PER_S * (3 if is_burst else 1)) * 1_000, self._prepare_next)
        if self._sessions and rng.random() < 0.7:
            index = rng.randrange(len(self._sessions))
            session_id, tokens = self._sessions[index]
            self._sessions[index] = (session_id, tokens + rng.randrange(100, 3_000))
        else:
            self._sessions_made += 1
            session_id, tokens = f"agent-{self._sessions_made:06}", rng.randrange(500, 12_000)
            self._sessions.append((session_id, tokens))
            if len(self._sessions) > 400:
                self._sessions.pop(rng.randrange(len(self._sessions)))
        handle = rng.getrandbits(_HANDLE_BITS) or 1
        chance = rng.random()
        granted = self._tell(
            e.PrepareAsked,
            slab_handle=handle,
            session_id=session_id,
            layout_fingerprint="0" * 32 if chance < 0.002 else self._fingerprint,
            num_tokens=tokens * 1_000 if chance > 0.999 else tokens,
            use_resident_hint=True,
        )
        if isinstance(granted, e.Granted) and chance > 0.01:  # The others never start.
            self._in(rng.uniform(0.2, 5.0), lambda: self._start(handle, granted.num_tokens))

    def _start(self, handle: int, tokens: int) -> None:
        rng = self._rng
        self._tell(e.TransferStarted, slab_handle=handle)
        num_bytes = tokens * LAYOUT.token_bytes
        push_ms = num_bytes * self._ranks / BYTES_PER_S * 1_000 * rng.uniform(0.8, 2.5)
        chance = rng.random()
        # Now and then the network is bad for a minute, and quarantine fills the arena.
        is_bad = self._minute % 20 == 7 and rng.random() < 0.5
        if is_bad or chance < 0.02:
            reason = Reason.SESSION_NOT_RESIDENT if chance < 0.008 else Reason.TRANSFER_FAILED
            drained = chance < 0.01
            self._in(
                push_ms * rng.random(),
                lambda: self._tell(e.TransferFailed, slab_handle=handle, reason=reason, drained=drained),
            )
            if not drained and rng.random() < 0.5:
                self._in(push_ms + 400, lambda: self._tell(e.WriterDrained, slab_handle=handle))
            return
        if chance < 0.025:
            self._in(push_ms, lambda: self._tell(e.AbortAsked, slab_handle=handle))
            return
        if chance < 0.03:
            return  # It hangs, until the timer.
        for rank in range(self._ranks):
            commit = functools.partial(self._commit, handle, rank, tokens, num_bytes, chance)
            self._in(push_ms * rng.uniform(0.9, 1.0), commit)

    def _commit(self, handle: int, rank: int, tokens: int, num_bytes: int, chance: float) -> None:
        accepted = self._tell(
            e.RankCommitted,
            slab_handle=handle,
            rank=rank,
            num_bytes=num_bytes - (chance > 0.998),
            num_tokens=tokens,
            checksums=((handle, rank),) * LAYOUT.num_planes,
            drained=chance < 0.97,
        )
        is_ready = isinstance(accepted, e.Accepted) and accepted.state is e.State.READY
        # What nobody fetches waits until it is evicted, superseded or too old.
        if is_ready and self._rng.random() < 0.85:
            self._in(self._rng.expovariate(1 / 1_500), lambda: self._begin_ingest(handle))

    # --- P -------------------------------------------------------------------------------------

    def _begin_ingest(self, handle: int) -> None:
        rng = self._rng
        chance = rng.random()
        for rank in range(self._ranks):
            leased = self._tell(
                e.LeaseAsked, slab_handle=handle, rank=rank, layout_fingerprint=self._fingerprint
            )
            if not isinstance(leased, e.Leased):
                return
            if chance < 0.005 and rank == 0:
                continue  # It never votes.
            is_no = rank == self._ranks - 1 and chance > 0.96
            vote = functools.partial(self._vote, handle, rank, leased.lease_id, chance if is_no else 0.0)
            self._in(rng.uniform(3, 60), vote)

    def _vote(self, handle: int, rank: int, lease_id: int, chance: float) -> None:
        reason, keep = Reason.OK, False
        if chance > 0.998:
            reason = Reason.CHECKSUM_MISMATCH
        elif chance > 0.995:
            reason = Reason.PREFIX_NOT_RESIDENT
        elif chance:
            reason, keep = Reason.ALLOC_FAILED_ON_FINALIZE, chance > 0.97
        self._tell(
            e.VoteCast,
            slab_handle=handle,
            rank=rank,
            lease_id=lease_id,
            ok=not chance,
            reason=reason,
            keep=keep,
        )
        if keep:
            self._in(self._rng.uniform(100, 2_000), lambda: self._begin_ingest(handle))


def make_log(
    path: Path,
    lines: int,
    *,
    seed: int = 1,
    epochs: int = 3,
    ranks: int = 2,
    arena_bytes: int = 8 * GIB,
    rotate_bytes: int = 0,
    rotate_keep: int = 100,
) -> int:
    """Write a log of about *lines* lines to *path*, which must not exist; return how many there are.

    Args:
        path: the newest file; rotated ones lie beside it.
        lines: how many at least; an epoch ends with the event that reaches its share of them.
        seed: of all chance.
        epochs: lives of the daemon; every second one, but for the last, is killed.
        ranks: arenas.
        arena_bytes: size of each.
        rotate_bytes: size of a file; 0: one file.
        rotate_keep: rotated files that are kept.
    """
    if path.exists():
        raise FileExistsError(f"{path} is there already")
    rng = random.Random(seed)
    sink = LogSink(path, rotate_bytes, rotate_keep)
    settings = Settings(ready_ttl_ms=60_000)
    # The monotonic clock goes on from epoch to epoch, as on a machine that was not booted anew.
    now_ns = 3_600 * NS_PER_S
    for index in range(epochs):
        sink.flush()
        former = read_open_attempts(str(path), rotate_keep) if index else None
        sink.begin_epoch("".join(rng.choices("0123456789abcdef", k=_EPOCH_CHARS)), 3_600 * NS_PER_S)
        sink.write(
            r.DaemonStarted(
                at_ns=now_ns,
                version="0.1.0",
                protocol=1,
                pid=1_000 + index,
                transport="shm",
                arenas=tuple(r.ArenaInfo(rank, "cpu", arena_bytes, ALIGNMENT_BYTES) for rank in range(ranks)),
                former_epoch=former.epoch if former else "",
                closed_attempts=len(former.attempts) if former else 0,
                quarantine_ms=settings.quarantine_ms,
            )
        )
        for record in closing_records(former, now_ns) if former else ():
            sink.write(record)
        life = Epoch(rng, sink, now_ns, ranks=ranks, arena_bytes=arena_bytes, settings=settings)
        share = lines * (index + 1) // epochs
        life.run(lambda share=share: sink.lines >= share - 1)  # type: ignore[misc]
        now_ns = life.now_ns
        if index % 2 == 0 or index == epochs - 1:
            life.stop()
            figures = life.machine.statistics()
            sink.write(
                r.DaemonStopped(
                    at_ns=now_ns, reason="SIGTERM", attempts=figures.attempts, attempts_ok=figures.attempts_ok
                )
            )
        now_ns += 20 * NS_PER_S
    sink.close()
    return sink.lines


@click.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--lines", default=1_000_000, show_default=True, help="Lines to write at least.")
@click.option("--seed", default=1, show_default=True)
@click.option("--epochs", default=3, show_default=True)
@click.option("--ranks", default=2, show_default=True)
@click.option("--arena-mib", default=8_192, show_default=True)
@click.option("--rotate-mib", default=0, show_default=True, help="Size of a file; 0: one file.")
def main(path: Path, lines: int, seed: int, epochs: int, ranks: int, arena_mib: int, rotate_mib: int) -> None:
    """Write a log to PATH; rotated files lie beside it."""
    written = make_log(
        path,
        lines,
        seed=seed,
        epochs=epochs,
        ranks=ranks,
        arena_bytes=arena_mib * MIB,
        rotate_bytes=rotate_mib * MIB,
    )
    click.echo(f"{written:,} lines")


if __name__ == "__main__":
    main()

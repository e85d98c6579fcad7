"""A push under way: what all of them share, and how they end.

Source: design, section 8.
"""

import abc
import time

import msgspec

from snapd.calls import Grant
from snapd.errors import InvalidRequest, Reason, RequestError, SnapdError, TransportError
from snapd.kv.control import Attempts, PushControl
from snapd.layout import Layout, snapshot_bytes
from snapd.units import MIB, MS_PER_S
from snapd.wire import SessionEnded


class PushSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How bytes go over a transport that cannot map the arena.

    Attributes:
        piece_bytes: the longest write.
        ring_bytes: staging memory, at most; allocated as it is needed. On a GPU all of it at once, with room
            for two pieces at least, and each GPU has its own.
        in_flight_bytes_max: how much is written at a time; one piece at least.
        gpu_piece_bytes, gpu_in_flight_bytes_max: the same for pools on a GPU, where a write costs as much
            as some MiB of it.
        map_arenas: over ``nvlink_intra``, gather straight into arenas that the pool's GPU reaches, as over
            shared memory: there is no staging memory and no second copy then. False: write with Mooncake.
        retries_max: how often a piece is written again (out of a GPU over Mooncake, a rank's whole part), and
            how often in a row, with no write done between, a peer that rests is waited for.
        gather_threads: torch's threads while a piece is gathered on the CPU; None: as torch is set. On few
            cores more than one get in the way of the transport's own.
    """

    piece_bytes: int = 16 * MIB
    ring_bytes: int = 256 * MIB
    in_flight_bytes_max: int = 64 * MIB
    gpu_piece_bytes: int = 128 * MIB
    gpu_in_flight_bytes_max: int = 256 * MIB
    map_arenas: bool = True
    retries_max: int = 3
    gather_threads: int | None = 1


class PushResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a push ended on D's side.

    Attributes:
        ok: committed on every rank: the snapshot is READY.
        reason: why not.
        detail: the same, for a person.
        retry_after_ms: when the daemon, or the transport, said to try again; 0: it did not.
        slab_handle: the attempt, 0 if there was none.
        num_tokens, token_start: what was sent.
        bytes: payload bytes written, over all ranks.
        gather_ms: time spent moving and summing bytes.
        total_ms: from the request to the last commit.
        attempts: how many there were; 2: it was prepared again, in a new life of the daemon.
        retried_pieces: writes that failed and were repeated; a rank's whole part counts once.
        drained: no write can still land.
    """

    ok: bool
    reason: Reason
    detail: str = ""
    retry_after_ms: int = 0
    slab_handle: int = 0
    num_tokens: int = 0
    token_start: int = 0
    bytes: int = 0
    gather_ms: float = 0.0
    total_ms: float = 0.0
    attempts: int = 1
    retried_pieces: int = 0
    drained: bool = True


def refused(error: SnapdError) -> PushResult:
    """Return the result of a push that got no grant."""
    return PushResult(
        ok=False,
        reason=error.reason if isinstance(error, RequestError) else Reason.TRANSFER_FAILED,
        detail=str(error),
        retry_after_ms=getattr(error, "retry_after_ms", 0),
    )


def ended_early(ended: SessionEnded) -> RequestError:
    """Return the error of an attempt that was ended by somebody else."""
    return RequestError("the attempt was ended while it was being written", reason=ended.reason)


class PushJob(abc.ABC):
    """A push under way. Made by ``Pusher.start``; ``step`` until it says that it is done, or ``cancel``.

    Attributes:
        grant: where it goes; None: it was refused.
    """

    def __init__(self, grant: Grant | None) -> None:
        self.grant = grant
        self._result: PushResult | None = None

    @property
    def done(self) -> bool:
        """The push has ended, one way or the other."""
        return self._result is not None

    @property
    def result(self) -> PushResult:
        """How it ended.

        Raises:
            InvalidRequest: it has not.
        """
        if self._result is None:
            raise InvalidRequest("the push is not done: step it until it is")
        return self._result

    @property
    @abc.abstractmethod
    def bytes_done(self) -> int:
        """Payload bytes gathered so far, over all ranks."""

    @abc.abstractmethod
    def step(self, max_bytes: int) -> bool:
        """Move up to *max_bytes* (one piece at least, if it has room); return whether the push has ended."""

    @abc.abstractmethod
    def cancel(self, reason: Reason = Reason.TRANSFER_FAILED) -> PushResult:
        """End the push from D's side, for instance because the session's KV is being evicted."""

    def wait(self) -> None:  # noqa: B027 - most jobs never wait
        """Wait a little, if the last step had nothing to do but to wait; for callers without other work."""


class RefusedJob(PushJob):
    """A push that got no grant: it is done."""

    def __init__(self, error: SnapdError) -> None:
        super().__init__(None)
        self._result = refused(error)

    @property
    def bytes_done(self) -> int:
        """None."""
        return 0

    def step(self, max_bytes: int) -> bool:
        """Do nothing; return True."""
        del max_bytes
        return True

    def cancel(self, reason: Reason = Reason.TRANSFER_FAILED) -> PushResult:
        """Do nothing; return the result."""
        del reason
        return self.result


class GrantedJob(PushJob):
    """A push that has a grant: steps that are guarded, and how it ends.

    Args:
        grant: where it goes.
        layout: of the planes.
        control: what is said to the daemon.
        attempts: takes note of this one.
        started_s: when it was asked for.
    """

    grant: Grant

    def __init__(
        self, grant: Grant, layout: Layout, control: PushControl, attempts: Attempts, started_s: float
    ) -> None:
        super().__init__(grant)
        self._layout = layout
        self._control = control
        self._attempts = attempts
        self._started_s = started_s
        self._gather_s = 0.0
        self._retried_pieces = 0
        attempts.begin(grant.slab_handle)
        self._connections = control.connections
        try:
            control.started(grant)
        except SnapdError as error:
            self._give_up(error)

    @property
    def _shard_bytes(self) -> int:
        return snapshot_bytes(self._layout, self.grant.num_tokens)

    @property
    def _ranks(self) -> list[int]:
        return [rank_grant.rank for rank_grant in self.grant.ranks]

    def step(self, max_bytes: int) -> bool:
        """Move up to *max_bytes* (one piece at least, if it has room); return whether the push has ended."""
        if self._result is not None:
            return True
        try:
            self._check_still_wanted()
            self._advance(max_bytes)
        except SnapdError as error:
            self._give_up(error)
        except Exception as error:
            # The engine's own fault, or a copy that failed: no bytes are left behind because of it.
            self._give_up(TransportError(f"the copy failed: {error}"))
            raise
        return self.done

    def cancel(self, reason: Reason = Reason.TRANSFER_FAILED) -> PushResult:
        """End the push from D's side, for instance because the session's KV is being evicted."""
        if self._result is None:
            self._end(reason, "", 0, said=reason)
        return self.result

    def _check_still_wanted(self) -> None:
        ended = self._attempts.take_end(self.grant.slab_handle)
        if ended is not None:
            raise ended_early(ended)
        # The end may have been told to a connection that is gone: ask before another byte is written.
        self._connections = self._control.check(self.grant, self._connections)

    @abc.abstractmethod
    def _advance(self, max_bytes: int) -> None:
        """Do a step."""

    @abc.abstractmethod
    def _stop(self) -> dict[int, bool]:
        """Write no more; return, for each rank, whether no write can still land."""

    def _succeed(self, *, drained: bool) -> None:
        result = PushResult(
            ok=True,
            reason=Reason.OK,
            slab_handle=self.grant.slab_handle,
            num_tokens=self.grant.num_tokens,
            token_start=self.grant.token_start,
            bytes=self._shard_bytes * len(self.grant.ranks),
            gather_ms=self._gather_s * MS_PER_S,
            total_ms=(time.monotonic() - self._started_s) * MS_PER_S,
            retried_pieces=self._retried_pieces,
            drained=drained,
        )
        self._finish(result)

    def _give_up(self, error: SnapdError) -> None:
        """End an attempt that went wrong here."""
        # What is refused because the attempt has ended is refused as stale; why it ended was told before.
        ended = self._attempts.take_end(self.grant.slab_handle)
        if ended is not None:
            error = ended_early(ended)
        reason = error.reason if isinstance(error, RequestError) else Reason.TRANSFER_FAILED
        self._end(reason, str(error), getattr(error, "retry_after_ms", 0), said=Reason.TRANSFER_FAILED)

    def _end(self, reason: Reason, detail: str, retry_after_ms: int, *, said: Reason) -> None:
        try:
            drained = self._stop()
        except BaseException:
            # Nobody knows what is under way: no proof. But it ends, here and at the daemon.
            self._tell_end(dict.fromkeys(self._ranks, False), reason, detail, retry_after_ms, said=said)
            raise
        self._tell_end(drained, reason, detail, retry_after_ms, said=said)

    def _tell_end(
        self, drained: dict[int, bool], reason: Reason, detail: str, retry_after_ms: int, *, said: Reason
    ) -> None:
        is_drained = all(drained.values())
        self._control.failed(self.grant, said, drained=is_drained)
        if not is_drained:
            for rank in (rank for rank, is_proven in drained.items() if is_proven):
                self._control.drained(self.grant, rank)
        result = PushResult(
            ok=False,
            reason=reason,
            detail=detail,
            retry_after_ms=retry_after_ms,
            slab_handle=self.grant.slab_handle,
            num_tokens=self.grant.num_tokens,
            token_start=self.grant.token_start,
            retried_pieces=self._retried_pieces,
            drained=is_drained,
        )
        self._finish(result)

    def _finish(self, result: PushResult) -> None:
        self._result = result
        self._attempts.end(self.grant.slab_handle)

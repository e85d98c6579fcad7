"""What a push says to the daemon, and hears from it.

``ClientControl`` says it over the control connection. ``NotifyControl`` is for a D that has none: somebody
else prepared, and handed the grant over; a commit goes with the transfer, and nothing else is said.

Source: design, sections 5 and 7.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from snapd import calls
from snapd.calls import Grant
from snapd.client import Client, Pending
from snapd.core.events import PlaneChecksums
from snapd.errors import InvalidRequest, Reason, SnapdError, StaleHandle
from snapd.units import MB, MS_PER_S
from snapd.wire import AckRep, HelloRep, SessionEnded, TransferNotification, encode_notification

ENDED_MAX: Final = 1_024
# The daemon's defaults.
TRANSFER_TIMEOUT_MS: Final = 30_000
TRANSFER_MIN_MB_PER_S: Final = 100


class RankCommit(msgspec.Struct, frozen=True, kw_only=True):
    """Every byte of one rank's shard is there.

    Attributes:
        rank: whose shard.
        num_bytes: payload bytes, without padding.
        num_tokens: tokens.
        checksums: a pair of 64-bit sums a plane, shape [num_planes].
        drained: no write of the shard can still land.
    """

    rank: int
    num_bytes: int
    num_tokens: int
    checksums: PlaneChecksums
    drained: bool


class PrepareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for; see ``snapd.calls.prepare_receive``."""

    session_id: str
    num_tokens: int
    layout_fingerprint: str
    token_start: int
    token_digest: str
    page_keys: Sequence[str]
    ranks: Sequence[int]
    use_resident_hint: bool
    is_only_writer: bool
    token_ids: bytes = b""
    block_hashes: bytes = b""


class Commitment(Protocol):
    """A commit under way."""

    def poll(self) -> bool:
        """Return whether it has arrived. Never waits.

        Raises:
            SnapdError: it was refused, or nobody knows.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait a little for it."""
        ...

    def forget(self) -> None:
        """Nobody asks for it any more."""
        ...


# Sends a text behind the last bytes of the shard.
Notify: TypeAlias = Callable[[str], Commitment]


class PushControl(Protocol):
    """What a push says to the daemon, and hears from it.

    Attributes:
        is_notifying: commits go with the transfer, so the last piece is kept for it.
    """

    is_notifying: bool

    @property
    def epoch(self) -> str:
        """The daemon's epoch, as far as is known without asking."""
        ...

    @property
    def connections(self) -> int:
        """Counts connections: what was told to an earlier one may have been missed."""
        ...

    def hello(self) -> HelloRep:
        """Return what the daemon says of itself.

        Raises:
            SnapdError: it cannot be asked.
        """
        ...

    def prepare(self, request: PrepareRequest) -> Grant:
        """Ask for a slab; errors as ``Client.prepare_receive``."""
        ...

    def started(self, grant: Grant) -> None:
        """Say that the first write is about to begin.

        Raises:
            SnapdError: the attempt has ended, or the daemon cannot be asked.
        """
        ...

    def check(self, grant: Grant, connections: int) -> int:
        """Ask whether the attempt is still open, if its end may have been missed; return ``connections``.

        Raises:
            SnapdError: it has ended, or the daemon cannot be asked.
        """
        ...

    def commit(self, grant: Grant, commit: RankCommit, notify: Notify) -> Commitment:
        """Say that a rank's shard is there.

        Raises:
            SnapdError: it could not be said.
        """
        ...

    def failed(self, grant: Grant, reason: Reason, *, drained: bool) -> None:
        """Say that the attempt failed. If it cannot be said, a deadline ends the attempt."""
        ...

    def drained(self, grant: Grant, rank: int) -> None:
        """Give drain proof for a rank. If it cannot be said, the quarantine takes its time."""
        ...

    def take_ended(self) -> list[SessionEnded]:
        """Return, once, how attempts ended. Never waits."""
        ...

    def lifetime_ms(self, num_bytes: int) -> int | None:
        """Return when a push must give up by itself, from its start on; None: it will be told."""
        ...


class _Answer:
    """A commit whose answer is polled."""

    def __init__(self, pending: Pending[AckRep]) -> None:
        self._pending = pending

    def poll(self) -> bool:
        return self._pending.poll() is not None

    def wait(self, timeout_s: float) -> None:
        with contextlib.suppress(SnapdError):
            self._pending.wait(timeout_s)

    def forget(self) -> None:
        self._pending.forget()


class ClientControl:
    """A ``PushControl`` over the control connection.

    Attributes:
        client: the connection.
        rank: the only one whose shard is written here, when others of the same attempts are written in other
            processes: what fails here proves nothing of theirs. None: all are written here.
    """

    is_notifying = False

    def __init__(self, client: Client, rank: int | None = None) -> None:
        self.client = client
        self.rank = rank

    @property
    def epoch(self) -> str:
        """The daemon's epoch, as of the last connection."""
        return self.client.epoch

    @property
    def connections(self) -> int:
        """Counts connections."""
        return self.client.reconnects

    def hello(self) -> HelloRep:
        """Return what the daemon says of itself; connects if need be."""
        return self.client.connect()

    def prepare(self, request: PrepareRequest) -> Grant:
        """Ask for a slab."""
        return self.client.prepare_receive(
            request.session_id,
            request.num_tokens,
            request.layout_fingerprint,
            token_start=request.token_start,
            token_digest=request.token_digest,
            page_keys=request.page_keys,
            ranks=request.ranks,
            use_resident_hint=request.use_resident_hint,
            is_only_writer=request.is_only_writer,
            token_ids=request.token_ids,
            block_hashes=request.block_hashes,
        )

    def started(self, grant: Grant) -> None:
        """Say that the first write is about to begin."""
        self.client.transfer_started(grant.slab_handle, epoch=grant.epoch)

    def check(self, grant: Grant, connections: int) -> int:
        """Ask whether the attempt is still open, if there was another connection since."""
        if not self.client.is_connected or self.client.reconnects != connections:
            self.started(grant)
        return self.client.reconnects

    def commit(self, grant: Grant, commit: RankCommit, notify: Notify) -> Commitment:
        """Send the commit; its answer is polled."""
        del notify
        call = calls.commit(
            grant.slab_handle,
            commit.rank,
            commit.num_bytes,
            commit.num_tokens,
            commit.checksums,
            drained=commit.drained,
            epoch=grant.epoch,
        )
        return _Answer(self.client.submit(call))

    def failed(self, grant: Grant, reason: Reason, *, drained: bool) -> None:
        """Say that the attempt failed. One that has ended already takes it as drain proof."""
        with contextlib.suppress(SnapdError):
            self.client.transfer_failed(
                grant.slab_handle, reason=reason, drained=drained, rank=self.rank, epoch=grant.epoch
            )

    def drained(self, grant: Grant, rank: int) -> None:
        """Give drain proof for a rank."""
        with contextlib.suppress(SnapdError):
            self.client.drained(grant.slab_handle, rank=rank, epoch=grant.epoch)

    def take_ended(self) -> list[SessionEnded]:
        """Return, once, how attempts ended."""
        return self.client.take_ended()

    def lifetime_ms(self, num_bytes: int) -> int | None:
        """Return None: the daemon tells when the attempt's time is over."""
        del num_bytes
        return None


class NotifyControl:
    """A ``PushControl`` for a D without a control connection; the daemon's ``notify`` must be ``commit``.

    Whoever prepared hands over the ``Grant`` and the daemon's ``HelloRep``, and says ``transfer_started``
    where the reserve timeout is shorter than the push. How an attempt ends is not told, so a push gives up
    when the daemon would. That the daemon was restarted is not told either: ``renew`` says so.

    Args:
        hello: what the daemon said of itself.
        transfer_timeout_ms, transfer_min_mb_per_s: as the daemon has them.
    """

    is_notifying = True
    connections = 0

    def __init__(
        self,
        hello: HelloRep,
        *,
        transfer_timeout_ms: int = TRANSFER_TIMEOUT_MS,
        transfer_min_mb_per_s: int = TRANSFER_MIN_MB_PER_S,
    ) -> None:
        self._hello = hello
        self._transfer_timeout_ms = transfer_timeout_ms
        self._transfer_min_mb_per_s = transfer_min_mb_per_s

    @property
    def epoch(self) -> str:
        """The daemon's epoch, as it was handed over."""
        return self._hello.epoch

    def hello(self) -> HelloRep:
        """Return what was handed over."""
        return self._hello

    def renew(self, hello: HelloRep) -> None:
        """Hand over what the daemon says of itself now. Pushes of an earlier life end as stale."""
        self._hello = hello

    def prepare(self, request: PrepareRequest) -> Grant:
        """Refuse.

        Raises:
            InvalidRequest: always.
        """
        raise InvalidRequest(
            f"session {request.session_id}: without a control connection somebody else prepares; "
            "use start_granted with the grant"
        )

    def started(self, grant: Grant) -> None:
        """Say nothing: the attempt may commit straight from RESERVED."""

    def check(self, grant: Grant, connections: int) -> int:
        """Ask nothing, but see whether the grant is of the daemon's life that is known now."""
        del connections
        if grant.epoch != self.epoch:
            raise StaleHandle(
                f"the daemon was restarted: its epoch is {self.epoch}, the grant's {grant.epoch}"
            )
        return 0

    def commit(self, grant: Grant, commit: RankCommit, notify: Notify) -> Commitment:
        """Send the commit with the transfer."""
        text = encode_notification(
            TransferNotification(
                slab_handle=grant.slab_handle,
                epoch=grant.epoch,
                rank=commit.rank,
                num_bytes=commit.num_bytes,
                num_tokens=commit.num_tokens,
                checksums=commit.checksums,
                drained=commit.drained,
            )
        )
        return notify(text)

    def failed(self, grant: Grant, reason: Reason, *, drained: bool) -> None:
        """Say nothing: the deadline ends the attempt."""

    def drained(self, grant: Grant, rank: int) -> None:
        """Say nothing: the quarantine takes its time."""

    def take_ended(self) -> list[SessionEnded]:
        """Return nothing."""
        return []

    def lifetime_ms(self, num_bytes: int) -> int | None:
        """Return when the daemon ends the attempt."""
        return self._transfer_timeout_ms + num_bytes * MS_PER_S // (self._transfer_min_mb_per_s * MB)


class Attempts:
    """Which attempts are being written, and how they ended. One connection serves all jobs.

    Attributes:
        ended: how attempts ended that no job writes any more; the newest are kept.
    """

    def __init__(self, control: PushControl) -> None:
        self._control = control
        self._writing: dict[int, SessionEnded | None] = {}
        self.ended: deque[SessionEnded] = deque(maxlen=ENDED_MAX)

    def begin(self, slab_handle: int) -> None:
        """Take note that a job writes an attempt."""
        self._writing[slab_handle] = None

    def end(self, slab_handle: int) -> None:
        """Take note that it does not any more."""
        self._writing.pop(slab_handle, None)

    def take_end(self, slab_handle: int) -> SessionEnded | None:
        """Return how a job's attempt ended, once the daemon has said so."""
        for ended in self._control.take_ended():
            if ended.slab_handle in self._writing:
                self._writing[ended.slab_handle] = ended
            else:
                self.ended.append(ended)
        return self._writing.get(slab_handle)

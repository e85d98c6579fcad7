"""D's writers: one for each rank's arena and life of the daemon, and which memory each of them knows.

Source: design, section 7.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import msgspec
import torch

from snapd.errors import ConfigError, TransportError, WrongRank
from snapd.kv.peerwriter import PeerWriter
from snapd.kv.staging import StagingBuffer
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import ArenaWriter, FeedWriter, Progress, Write, WriteFeed
from snapd.wire import ArenaOffer, HelloRep

if TYPE_CHECKING:
    from snapd.transport.mooncake_engines import MooncakeEngines

# Makes the writer for a rank's arena in an epoch.
WriterFor: TypeAlias = Callable[[HelloRep, int, str], ArenaWriter]


def arena_offer(hello: HelloRep, rank: int) -> ArenaOffer:
    """Return what the daemon offers for *rank*.

    Raises:
        WrongRank: it has no such arena.
    """
    for arena in hello.arenas:
        if arena.rank == rank:
            return arena
    raise WrongRank(f"rank {rank} is not among {[arena.rank for arena in hello.arenas]}")


# The engines that write out of a GPU, by process, GPU and configuration: when one is made anew, all that was
# registered before is registered again, and its GPU must be the current one then.
_gpu_engines: Final[dict[tuple[int, torch.device, bytes], "MooncakeEngines"]] = {}


def current(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the calling thread's: Mooncake looks at memory, and copies, from the one that is."""
    if device is None or device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def mooncake_writers(
    config: MooncakeConfig, in_flight_bytes_max: int, devices: Mapping[int, torch.device] | None = None
) -> WriterFor:
    """Return what makes Mooncake's writers. They use the daemon's protocol and metadata server.

    Args:
        config: D's part of the settings.
        in_flight_bytes_max: how much a writer has under way at a time.
        devices: where each rank's pool is; a rank that is missing is on the host.
    """
    devices = devices or {}

    def make(hello: HelloRep, rank: int, epoch: str) -> ArenaWriter:
        # Only a D that pushes over Mooncake needs the package.
        from snapd.transport.mooncake_engines import MooncakeEngines
        from snapd.transport.mooncake_writer import MooncakeWriter

        address = hello.mooncake
        if address is None:
            raise TransportError("the daemon's transport is mooncake, and it says no address of it")
        arena = arena_offer(hello, rank)
        own = msgspec.structs.replace(
            config, protocol=address.protocol, metadata_server=address.metadata_server
        )
        device = devices.get(rank)
        if device is None or device.type != "cuda":
            engines = MooncakeEngines.shared(own)
        else:
            key = (os.getpid(), device, msgspec.json.encode(own, order="deterministic"))
            engines = _gpu_engines.get(key) or _gpu_engines.setdefault(
                key, MooncakeEngines(own, current=functools.partial(current, device))
            )
        return MooncakeWriter(
            engines,
            address.segment_name,
            epoch,
            arena.base_ptr,
            arena.size_bytes,
            in_flight_bytes_max=in_flight_bytes_max,
        )

    return make


def check_gpu_protocol(protocol: str) -> None:
    """Check that Mooncake, as it is installed here, reads from a GPU over *protocol*.

    Raises:
        ConfigError: it does not; says what to set.
        ExtraMissing, TransportError: there is none, or it cannot be loaded.
    """
    from snapd.transport.mooncake_package import load_engine_module

    if protocol != "nvlink_intra" and not getattr(load_engine_module(), "SUPPORT_CUDA", False):
        raise ConfigError(
            f'protocol = "{protocol}": the Mooncake that is installed cannot read from a GPU; install '
            'kv-snapd[mooncake] or kv-snapd[mooncake-cuda13], or set mooncake.protocol = "nvlink_intra"'
        )


class RankWriter:
    """A writer, and the buffers that it knows.

    Attributes:
        epoch: the daemon's life that it is for.

    Args:
        writer: the transport's.
        epoch: see above.
        device: where the buffers are; None: on the host.
    """

    def __init__(self, writer: ArenaWriter, epoch: str, device: torch.device | None = None) -> None:
        self.epoch = epoch
        self._writer = writer
        self._device = device
        self._known: set[tuple[int, int]] = set()

    @property
    def is_local_copy(self) -> bool:
        """Whether writes are copies of a GPU of this process, which end whatever a peer does."""
        return isinstance(self._writer, PeerWriter)

    @property
    def takes_feeds(self) -> bool:
        """Whether ``submit_feed`` can be used."""
        return getattr(self._writer, "takes_feeds", False)

    def make_known(self, buffer: StagingBuffer) -> None:
        """Make a buffer known before it is written from; errors as ``ArenaWriter.register_source``."""
        with current(self._device):
            self._make_known(buffer)

    def submit(self, buffer: StagingBuffer, write: Write) -> int:
        """Begin a write out of *buffer*, and return a ticket; errors as ``ArenaWriter.submit``."""
        with current(self._device):
            self._make_known(buffer)
            return self._writer.submit([write])

    def submit_notification(self, buffer: StagingBuffer, write: Write, text: str) -> int:
        """Begin a write that a text follows, and return a ticket.

        Raises:
            TransportError: the transport has no notifications, or as ``ArenaWriter.submit``.
        """
        submit = getattr(self._writer, "submit_notification", None)
        if submit is None:
            raise TransportError("this transport carries no notifications: a control connection is needed")
        with current(self._device):
            self._make_known(buffer)
            ticket: int = submit(write, text)
        return ticket

    def submit_feed(self, buffer: StagingBuffer, feed: WriteFeed) -> int:
        """Write a feed, and return a ticket; errors as ``FeedWriter.submit_feed``.

        Args:
            buffer: any of those that it writes from: its region is that of all.
            feed: what is written.
        """
        with current(self._device):
            self._make_known(buffer)
            return cast("FeedWriter", self._writer).submit_feed(feed)

    def _make_known(self, buffer: StagingBuffer) -> None:
        if buffer.region not in self._known:
            self._writer.register_source(*buffer.region)
            self._known.add(buffer.region)

    def poll(self, ticket: int) -> Progress:
        """Return how far a ticket has come; errors as ``ArenaWriter.poll``."""
        with current(self._device):  # What has room now begins.
            return self._writer.poll(ticket)

    def cancel(self, ticket: int) -> None:
        """Begin no further write of a ticket; errors as ``ArenaWriter.cancel``."""
        self._writer.cancel(ticket)

    def check_peer(self) -> None:
        """See whether the peer is to be tried now; nothing is written.

        Raises:
            PeerResting: it failed a moment ago.
        """
        with current(self._device):
            self._writer.poll(self._writer.submit(()))

    def close(self) -> None:
        """Begin nothing any more. Tickets that are open can still be polled."""
        with current(self._device):
            self._writer.close()


class Writers:
    """The writers of one pusher, made when they are first needed.

    Args:
        writer_for: makes them.
        devices: where each rank's buffers are; a rank that is missing has them on the host.
    """

    def __init__(self, writer_for: WriterFor, devices: Mapping[int, torch.device] | None = None) -> None:
        self._writer_for = writer_for
        self._devices = dict(devices or {})
        self._writers: dict[int, RankWriter] = {}

    def writer(self, hello: HelloRep, rank: int) -> RankWriter:
        """Return the writer for *rank*'s arena in the epoch of *hello*. An earlier epoch's are closed.

        Raises:
            SnapdError: it cannot be made, or there is no such arena.
        """
        for known_rank, known in list(self._writers.items()):
            if known.epoch != hello.epoch:
                del self._writers[known_rank]
                known.close()
        found = self._writers.get(rank)
        if found is None:
            device = self._devices.get(rank)
            with current(device):
                found = RankWriter(self._writer_for(hello, rank, hello.epoch), hello.epoch, device)
            self._writers[rank] = found
        return found

    def check_peers(self, hello: HelloRep, ranks: Iterable[int]) -> None:
        """See whether the daemon's arenas are to be tried now.

        Raises:
            PeerResting: one of them failed a moment ago.
            SnapdError: a writer cannot be made.
        """
        offered = {arena.rank for arena in hello.arenas}
        for rank in ranks:
            # A rank that is not offered is for the daemon to refuse.
            if rank in offered:
                self.writer(hello, rank).check_peer()

    def close(self) -> None:
        """Close all writers."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

"""KV events of one life of the daemon: bound early, so that what is wrong shows at start.

Source: design, section 10.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import structlog

from snapd import wire as w
from snapd.config import Config
from snapd.core import events as e
from snapd.core.records import Record
from snapd.core.session import Session
from snapd.errors import ConfigError, StartupError
from snapd.kvevents.observer import WHYS, KVEvents
from snapd.kveventsconfig import endpoint, event_address
from snapd.metricsaddress import is_loopback

try:
    import zmq

    from snapd.kvevents.publisher import Publisher, bound
except ImportError:
    HAS_ZMQ = False
else:
    HAS_ZMQ = True

if TYPE_CHECKING:
    _Socket = zmq.Socket[bytes]

_log: Final = structlog.get_logger("snapd.kvevents")


class Stream:
    """What one daemon publishes: the observer, and the publisher behind it.

    Args:
        config: what is published, and how much of it may wait.
        publish: bound.
        replay: bound, or None.
    """

    def __init__(self, config: Config, publish: "_Socket", replay: "_Socket | None") -> None:
        self._config = config
        self._addresses = tuple(
            "" if socket is None else str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
            for socket in (publish, replay)
        )
        self._publisher = Publisher(
            publish,
            replay,
            topic=config.kv_events_topic,
            data_parallel_rank=config.kv_events_data_parallel_rank,
            buffer_batches=config.kv_events_buffer_batches,
            buffer_bytes_max=config.kv_events_buffer_bytes_max,
            linger_ms=config.limits.kv_events_linger_ms,
            on_bug=self._on_bug,
        )
        self._observer: KVEvents | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def observing(
        self, open_sessions: Mapping[int, Session], on_record: Callable[[Record], None]
    ) -> Callable[[Record], None]:
        """Return what follows the core's records from now on, and passes each on.

        Args:
            open_sessions: the core's open attempts, by handle.
            on_record: sees every record too.
        """
        self._observer = KVEvents(self._config, open_sessions, self._publisher)
        return self._observer.observing(on_record)

    def on_grant(self, request: w.SnapshotPrepareReceiveReqInput, granted: e.Granted) -> None:
        """Keep what D said of an attempt for events."""
        assert self._observer is not None
        self._observer.on_grant(request, granted)

    @contextlib.asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Publish inside the block; at its end nothing is told to be there any more."""
        assert self._observer is not None
        self._loop = asyncio.get_running_loop()
        self._observer.start()
        self._publisher.start()
        self._announce()
        try:
            yield
        finally:
            self._observer.stop()
            await self._loop.run_in_executor(None, self._publisher.close)

    def usage(self) -> dict[str, int]:
        """Return how much of its bounds is in use, by setting."""
        assert self._observer is not None
        return {
            "kv_events_pages_max": self._observer.ledger.num_pages,
            "kv_events_queue_bytes_max": self._observer.waiting_bytes,
            "kv_events_buffer_batches": self._publisher.buffered_batches,
            "kv_events_buffer_bytes_max": self._publisher.buffered_bytes,
        }

    def statistics(self) -> w.KVEventStatistics:
        """Return how it fares."""
        observer, publisher = self._observer, self._publisher
        assert observer is not None
        return w.KVEventStatistics(
            address=self._addresses[0],
            replay_address=self._addresses[1],
            topic=self._config.kv_events_topic,
            medium=self._config.kv_events_medium,
            batches=publisher.batches,
            stored_pages=observer.stored_pages,
            removed_pages=observer.removed_pages,
            snapshots=observer.ledger.num_snapshots,
            pages=observer.ledger.num_told,
            unpublished={why: observer.unpublished[why] for why in WHYS},
            facts_dropped=observer.facts_dropped,
            queued_bytes=publisher.queued_bytes,
            buffered_batches=publisher.buffered_batches,
            replays=publisher.replays,
            bad_requests=publisher.bad_requests,
            send_errors=publisher.send_errors,
        )

    def _on_bug(self, error: BaseException) -> None:
        """Stop the daemon, as any bug does: routers would believe what is no longer so."""
        context = {"message": "the thread of KV events has ended", "exception": error}
        with contextlib.suppress(RuntimeError):
            # The loop may have ended meanwhile.
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.call_exception_handler, context)

    def _announce(self) -> None:
        _log.info(
            "kv events",
            address=self._addresses[0],
            replay_address=self._addresses[1],
            connect_address=self._config.kv_events_connect_address,
        )
        for name in ("kv_events_address", "kv_events_replay_address"):
            address = getattr(self._config, name)
            if address and not is_loopback(event_address(address)[0]):
                _log.warning(f"{name} is open to other hosts, without a password", address=address)


@contextlib.contextmanager
def opened(config: Config) -> Iterator[Stream]:
    """Bind ``kv_events_address`` and ``kv_events_replay_address``; connect to ``kv_events_connect_address``.

    Raises:
        ConfigError: pyzmq is not installed.
        StartupError: an address cannot be had.
    """
    if not HAS_ZMQ:
        raise ConfigError(
            f"kv_events_address = {config.kv_events_address!r} needs pyzmq: pip install "
            "'kv-snapd[kv-events]', or set kv_events_address to \"\""
        )
    with contextlib.ExitStack() as stack:
        # One of our own: what it waits for at its end is ours. Sockets close before it.
        context: zmq.Context[Any] = stack.enter_context(zmq.Context())
        batches = config.kv_events_buffer_batches
        publish = stack.enter_context(_bound(context, zmq.PUB, config, "kv_events_address", batches))
        if config.kv_events_connect_address:
            # It is tried for ever; while it is not there nothing waits for it.
            publish.setsockopt(zmq.IPV6, True)
            publish.connect(config.kv_events_connect_address)
        replay = None
        if config.kv_events_replay_address:
            # One whole answer, and what marks its end.
            replay = stack.enter_context(
                _bound(context, zmq.ROUTER, config, "kv_events_replay_address", batches + 1)
            )
        yield Stream(config, publish, replay)


def _bound(context: "zmq.Context[Any]", kind: int, config: Config, name: str, batches: int) -> "_Socket":
    address = getattr(config, name)
    try:
        return bound(context, kind, endpoint(*event_address(address)), batches)
    except zmq.ZMQError as error:
        raise StartupError(
            f"{name} {address!r} cannot be listened at: {error.strerror or error}; choose another port or "
            'address, or "" for none'
        ) from None

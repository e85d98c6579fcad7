"""Metrics of one life of the daemon: what counts, and the address at which it is told.

Source: design, section 10.
"""

import asyncio
import contextlib
import importlib.util
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

import structlog

from snapd.config import Config
from snapd.core.records import Record
from snapd.errors import StartupError
from snapd.executor import Executor
from snapd.metrics.definitions import Seen
from snapd.metrics.endpoint import Endpoint
from snapd.metrics.looplag import LoopLag
from snapd.metrics.requests import TimedService
from snapd.metrics.tally import Tally
from snapd.metricsaddress import is_loopback, listen_address
from snapd.server import Server
from snapd.service import Service

_log: Final = structlog.get_logger("snapd.metrics")
_BACKLOG: Final = 16


class Metrics:
    """Counts, and serves the counts.

    Args:
        config: where.
        sock: listens there already.

    Attributes:
        service_type: the service whose requests are timed.
    """

    service_type = TimedService

    def __init__(self, config: Config, sock: socket.socket) -> None:
        self._config = config
        self._sock = sock
        self._tally = Tally()

    def counted(self, server: Server) -> Callable[[Record], None]:
        """Return what counts a record and then shows it to those who watch."""
        note_of, watchers, show = self._tally.notes.get, server.watchers, server.show_record

        # As short as can be: it is called for every record.
        def on_record(record: Record) -> None:
            note = note_of(type(record))
            if note is not None:
                note(record)
            if watchers:
                show(record)

        return on_record

    @contextlib.asynccontextmanager
    async def serving(self, service: Service, server: Server, executor: Executor) -> AsyncIterator[None]:
        """Answer scrapes inside the block."""
        from snapd.metrics.exposition import Exposition

        assert isinstance(service, TimedService)
        loop = asyncio.get_running_loop()
        lag = LoopLag(loop)

        def look() -> Seen:
            return Seen(
                stats=service.statistics(),
                leased=executor.machine.num_leased,
                tally=self._tally,
                request_times=service.times,
                refused=service.refused,
                lag=lag,
                warnings=server.warnings.counts,
                config=self._config,
            )

        endpoint = Endpoint(loop, Exposition(look).text, self._config.limits)
        listener = await loop.create_server(endpoint.new_connection, sock=self._sock, backlog=_BACKLOG)
        service.usages.append(endpoint.usage)
        self._announce()
        try:
            yield
        finally:
            listener.close()
            endpoint.close()
            lag.close()

    def _announce(self) -> None:
        host, port = self._sock.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        _log.info("metrics", url=f"http://{address}/metrics")
        if not is_loopback(host):
            _log.warning("metrics are open to other hosts, without a password", address=address)


@contextlib.contextmanager
def opened(config: Config) -> Iterator[Metrics]:
    """Listen at ``metrics_address``; whoever comes before the daemon serves waits.

    Raises:
        StartupError: it cannot be listened at, or prometheus-client is not installed.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise StartupError(
            f"metrics_address = {config.metrics_address!r} needs prometheus-client: "
            "pip install 'kv-snapd[metrics]', or set metrics_address to \"\""
        )
    host, port = listen_address(config.metrics_address)
    with contextlib.closing(_listening_socket(config.metrics_address, host, port)) as sock:
        yield Metrics(config, sock)


def _listening_socket(shown: str, host: str, port: int) -> socket.socket:
    # For IPv6: a scope such as %eth0 is a number in the socket's address.
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        sock = socket.socket(family, kind)
        try:
            # The connections of a daemon that has just ended do not stand in the way.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            # At once, so that a second daemon at this address fails at its start.
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise StartupError(
            f"metrics_address {shown!r} cannot be listened at: {error.strerror or error}; choose another "
            'port or address, or "" for no metrics'
        ) from None
    sock.setblocking(False)
    return sock

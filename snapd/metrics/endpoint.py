"""HTTP for a scraper: ``GET /metrics``, on the event loop of the daemon.

As little HTTP as that takes: one request a connection, a bounded head, a bounded time, a bounded number of
connections. Whatever somebody sends concerns that connection only.
"""

import asyncio
from collections.abc import Callable
from typing import Final, cast

import structlog

from snapd.limits import Limits
from snapd.units import KIB, MS_PER_S

_log: Final = structlog.get_logger("snapd.metrics")
PATH: Final = b"/metrics"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
HEAD_BYTES_MAX: Final = 8 * KIB
_END_OF_HEAD: Final = (b"\r\n\r\n", b"\n\n")


class Endpoint:
    """Accepts scrapers' connections.

    Attributes:
        connections: those that are open, oldest first.
        connections_max: may be.
        timeout_s: of a connection, from the first byte to the last, in both directions.

    Args:
        loop: the running loop.
        text: returns the body.
        limits: of connections.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, text: Callable[[], bytes], limits: Limits) -> None:
        self.loop = loop
        self.text = text
        self.connections_max = limits.metrics_connections_max
        self.timeout_s = limits.metrics_timeout_ms / MS_PER_S
        self.connections: dict[Scraper, None] = {}

    def new_connection(self) -> "Scraper":
        """Return the protocol of a connection that is being accepted."""
        return Scraper(self)

    def usage(self) -> dict[str, int]:
        """Return how much of its bounds is in use, by setting."""
        return {"limits.metrics_connections_max": len(self.connections)}

    def close(self) -> None:
        """Cut every connection off."""
        for scraper in list(self.connections):
            scraper.abort()


class Scraper(asyncio.Protocol):
    """One connection: one request, one answer."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._head = b""
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request; when there are too many connections, the oldest goes."""
        # A transport of uvloop has the methods, and not the class.
        self._transport = cast("asyncio.Transport", transport)
        self._deadline = self._endpoint.loop.call_later(self._endpoint.timeout_s, self.abort)
        connections = self._endpoint.connections
        if len(connections) >= self._endpoint.connections_max:
            # Not the newest: idle connections must not lock the scraper out.
            next(iter(connections)).abort()
        connections[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        del exc
        self._transport = None
        self._endpoint.connections.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer once the head is whole; a body is not read."""
        if self._transport is None or self._transport.is_closing():
            return
        self._head += data[: HEAD_BYTES_MAX + 1 - len(self._head)]
        if any(end in self._head for end in _END_OF_HEAD):
            self._answer(*self._reply_to(self._head.split(b"\n", 1)[0].strip()))
        elif len(self._head) > HEAD_BYTES_MAX:
            self._answer("431 Request Header Fields Too Large", b"the request's head is too long\n")

    def abort(self) -> None:
        """Cut the connection off."""
        self._endpoint.connections.pop(self, None)
        if self._transport is not None:
            self._transport.abort()

    def _reply_to(self, request_line: bytes) -> tuple[str, bytes]:
        parts = request_line.split()
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return "400 Bad Request", b"this is no HTTP/1 request\n"
        method, target, _ = parts
        if target.split(b"?", 1)[0] != PATH:
            return "404 Not Found", b"metrics are at /metrics\n"
        if method != b"GET":
            return "405 Method Not Allowed", b"use GET\n"
        try:
            return "200 OK", self._endpoint.text()
        except Exception:
            # Of all that the daemon does this is what can best be done without.
            _log.exception("metrics cannot be told")
            return "500 Internal Server Error", b"a bug in snapd; its stderr says more\n"

    def _answer(self, status: str, body: bytes) -> None:
        assert self._transport is not None
        content_type = CONTENT_TYPE if status.startswith("200") else "text/plain; charset=utf-8"
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
            f"{'Allow: GET' + chr(13) + chr(10) if status.startswith('405') else ''}"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        self._transport.write(head.encode() + body)
        # What was written still goes out; for whoever does not read it, the deadline ends it.
        self._transport.close()

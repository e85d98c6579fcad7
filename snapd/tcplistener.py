"""The control protocol over TCP: mutual TLS, or plain text on loopback.

Every socket is accepted here rather than by the loop, so that whoever comes too often is sent away before a
handshake costs anything.

Source: design, section 5.
"""

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from typing import Any, Final

import structlog

from snapd.config import Config
from snapd.errors import Reason, StartupError
from snapd.metricsaddress import listen_address
from snapd.ratelimit import AddressLimiter, network_of
from snapd.server import Connection, Server
from snapd.streams import TCP_OPTIONS
from snapd.units import MS_PER_S

_log: Final = structlog.get_logger("snapd.server")
# After an accept that failed, for instance because no file descriptor is left.
_ACCEPT_RETRY_S: Final = 0.1
# One address may have this part of all handshakes under way.
_SHARE_OF_HANDSHAKES: Final = 4
_NAMES_MAX: Final = 64


class _ServerTls(ssl.SSLObject):
    """A server's side of TLS that takes a certificate which cannot be read for a failed handshake.

    Names in it may be no UTF-8. The loop would take what Python then raises for a bug, and the daemon end.
    """

    def getpeercert(self, binary_form: bool = False) -> Any:
        """Return the client's certificate; what is wrong with it is an ``ssl.SSLError``."""
        try:
            return super().getpeercert(binary_form)
        except ValueError as error:
            raise ssl.SSLError(f"the client's certificate cannot be read: {error}") from None


def server_context(config: Config) -> ssl.SSLContext | None:
    """Return how TLS is spoken: 1.3, and with certificates on both sides. None: it is not.

    Raises:
        StartupError: a file cannot be read, or key and certificate do not belong together.
    """
    if not config.tls_certificate_path:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = _ServerTls
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # A client that comes again is looked at again: its certificate may have been withdrawn.
    context.num_tickets = 0
    path = config.tls_certificate_path
    try:
        # A key with a passphrase would have the daemon wait for somebody to type it.
        context.load_cert_chain(path, config.tls_key_path, password="")
        path = config.tls_client_ca_path
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise StartupError(
            f"TLS cannot be set up from {path} (key {config.tls_key_path}): {error}. PEM files that the "
            "daemon's user may read are wanted, and a key without a passphrase"
        ) from None
    return context


def names_of(certificate: "dict[str, Any] | None") -> list[str]:
    """Return the names in a certificate, as ``getpeercert`` gives it: DNS and URI, else the common name.

    The first of very many only: each is held against each rule while everybody else waits.
    """
    if not certificate:
        return []
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI")]
    if not names:
        parts = (part for group in certificate.get("subject", ()) for part in group)
        names = [value for kind, value in parts if kind == "commonName"]
    return names[:_NAMES_MAX]


class TcpConnection(Connection):
    """A client that is perhaps on another host: it can map nothing, and its exit is not seen."""

    is_local = False

    def __init__(self, server: Server, conn_id: int, address: str, *, is_plain: bool) -> None:
        super().__init__(server, conn_id)
        self._address = address
        self._is_plain = is_plain

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the client in, or say why not; it must say something soon."""
        super().connection_made(transport)
        if not self._is_closed:
            self._start_frame_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._server.tcp_connections.discard(self.conn_id)
        super().connection_lost(exc)

    def _identify(self) -> tuple[Reason, str] | None:
        assert self._transport is not None
        warn, access = self._server.warnings.warn, self._server.access
        if self._is_plain:
            rights, who = access.of_loopback(), "whoever connects without TLS"
        else:
            names = names_of(self._transport.get_extra_info("peercert"))
            rights, who = (
                access.of_certificate(names),
                f"certificate {', '.join(names)[:200] or 'without a name'}",
            )
        if rights is None:
            warn("peer refused", address=self._address, certificate=who)
            return Reason.PERMISSION_DENIED, f"{who} has no rule in access"
        self.rights = rights
        self.label = rights.owner
        return None

    def _too_many(self) -> tuple[Reason, str] | None:
        tcp_connections, tcp_connections_max = self._server.tcp_connections, self._config.tcp_connections_max
        if len(tcp_connections) >= tcp_connections_max:
            self._server.warnings.warn("too many TCP connections", tcp_connections_max=tcp_connections_max)
            return (
                Reason.LIMIT_REACHED,
                f"{tcp_connections_max} TCP connections are open (tcp_connections_max)",
            )
        refusal = self._too_many_of_one(tcp_connections_max, "tcp_connections_max")
        if refusal is None:
            tcp_connections.add(self.conn_id)
        return refusal

    def _who(self) -> dict[str, object]:
        return {"address": self._address, "client": self.label}

    def writer_id(self) -> int:
        """Return 0: its process cannot be watched."""
        return 0


class TcpListener:
    """Accepts clients over TCP.

    Args:
        config: address, files and bounds.
        server: what they are clients of.
        loop: the running loop.

    Attributes:
        address: where it listens, with the real port.

    Raises:
        StartupError: the address cannot be had, or TLS cannot be set up.
    """

    def __init__(self, config: Config, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._config = config
        self._server = server
        self._loop = loop
        self._context = server_context(config)
        self._limiter = AddressLimiter(config.tls_handshakes_per_s, config.limits.tcp_addresses_max)
        self._places = asyncio.Semaphore(config.tls_handshakes_max)
        self._shaking: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = _bind(config.tcp_address, config.limits.accept_backlog)
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._start(self._accept())

    def reload(self) -> None:
        """Read the certificates again. Who is connected stays so; when they are wrong, the old ones go on."""
        try:
            self._context = server_context(self._config)
        except StartupError as error:
            _log.error("the certificates were not loaded anew, the old ones go on", error=str(error))
        else:
            _log.info("the certificates were loaded anew")

    def usage(self) -> dict[str, int]:
        """Return how much of its bounds is in use, by setting."""
        return {
            "tls_handshakes_max": self._shaking.total(),
            "limits.tcp_addresses_max": len(self._limiter),
        }

    async def close(self) -> None:
        """Accept nobody any more, and end the handshakes under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    def _start(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A bug: the loop's handler stops the daemon.
            self._loop.call_exception_handler({"message": "TCP listener", "exception": task.exception()})

    async def _accept(self) -> None:
        while True:
            await self._places.acquire()
            try:
                sock, peer = await self._loop.sock_accept(self._socket)
            except OSError as error:
                self._places.release()
                self._server.warnings.warn("cannot accept", error=error.strerror)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            except BaseException:
                self._places.release()
                raise
            address = str(peer[0])
            if self._may_shake(address):
                self._shaking[network_of(address)] += 1
                self._start(self._let_in(sock, address))
            else:
                self._places.release()
                sock.close()
                self._server.warnings.warn("too many TCP connections a second", address=address)
                # Others get their turn, however fast these come.
                await asyncio.sleep(0)

    def _may_shake(self, address: str) -> bool:
        share = max(1, self._config.tls_handshakes_max // _SHARE_OF_HANDSHAKES)
        if self._shaking[network_of(address)] >= share:
            return False
        return self._limiter.admit(address, self._loop.time())

    async def _let_in(self, sock: socket.socket, address: str) -> None:
        network = network_of(address)
        context = self._context
        handshake_s = self._config.tls_handshake_timeout_ms / MS_PER_S
        try:
            with contextlib.suppress(OSError):
                for option in TCP_OPTIONS:
                    sock.setsockopt(*option)
            sock.setblocking(False)
            await self._loop.connect_accepted_socket(
                lambda: TcpConnection(
                    self._server, self._server.next_conn_id(), address, is_plain=context is None
                ),
                sock,
                ssl=context,
                ssl_handshake_timeout=handshake_s if context is not None else None,
            )
        except (OSError, EOFError) as error:
            # ssl's errors and timeouts are among them. Whoever is no client gets no more than this.
            self._server.warnings.warn("TLS handshake failed", address=address, error=str(error)[:200])
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise
        finally:
            self._shaking[network] -= 1
            if self._shaking[network] <= 0:
                del self._shaking[network]
            self._places.release()


def _bind(address: str, backlog: int) -> socket.socket:
    host, port = listen_address(address)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise StartupError(
            f"tcp_address {address} cannot be had: {error.strerror}. Is it an address of this host, and free?"
        ) from None
    return sock

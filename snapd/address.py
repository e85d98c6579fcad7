"""Where a daemon is: the path of its unix socket, or an address that begins with ``tls://`` or ``tcp://``.

Source: design, section 5.
"""

import ipaddress
import threading
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from snapd.errors import ConfigError

PORT_MAX: Final = 65_535
_FILES: Final = ("ca", "cert", "key")
_EXAMPLE: Final = (
    "tls://snapd.example:9465?ca=/etc/kv-snapd/ca.pem&cert=/etc/kv-snapd/d.pem&key=/etc/kv-snapd/d.key"
)
SockAddr: TypeAlias = tuple[int, tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What a client shows, and whom it believes. PEM files.

    Attributes:
        ca_path: of the CAs that may have signed the daemon's certificate.
        certificate_path: the client's own.
        key_path: of that certificate.
        server_name: the name that the daemon's certificate must have.
    """

    ca_path: str
    certificate_path: str
    key_path: str
    server_name: str


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A daemon's ``tcp_address``, as a client writes it.

    Attributes:
        text: as it was written, without what stands behind ``?``.
        tls: None: plain text, which daemons speak on loopback only.
    """

    text: str
    host: str
    port: int
    tls: TlsFiles | None


def parse_address(text: str) -> TcpAddress | str:
    """Return the TCP address that *text* is, or the path of a unix socket, which everything else is.

    Raises:
        ConfigError: it begins as a TCP address and is none; says what to write.
    """
    if not text.startswith(("tls://", "tcp://")):
        return text
    try:
        parts = urllib.parse.urlsplit(text)
        host, port = parts.hostname, parts.port
        given = urllib.parse.parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise ConfigError(f"{text} is no address: {error}. Write it like {_EXAMPLE}") from None
    if not host or not port or parts.path not in ("", "/") or parts.username is not None or parts.fragment:
        raise ConfigError(f"{text} is no address with a host and a port. Write it like {_EXAMPLE}")
    shown = text.partition("?")[0]
    repeated = [name for name, values in given.items() if len(values) > 1]
    known = (*_FILES, "name") if parts.scheme == "tls" else ()
    unknown = [name for name in given if name not in known]
    if repeated or unknown:
        raise ConfigError(
            f"{shown}: {(repeated + unknown)[0]!r} is unknown here, or there twice: see {_EXAMPLE}"
        )
    if parts.scheme == "tcp":
        return TcpAddress(shown, host, port, None)
    values = {name: value[0] for name, value in given.items()}
    missing = [name for name in _FILES if not values.get(name)]
    if missing:
        raise ConfigError(f"{shown} needs {' and '.join(missing)}: write it like {_EXAMPLE}")
    try:
        ca, cert, key = (str(Path(values[name]).expanduser()) for name in _FILES)
    except (RuntimeError, ValueError) as error:  # There is no such user, or no user can be called so.
        raise ConfigError(f"{shown}: a path begins with ~: {error} Write it like {_EXAMPLE}") from None
    return TcpAddress(shown, host, port, TlsFiles(ca, cert, key, values.get("name") or host))


class Resolver:
    """Finds out what a host's name stands for, in a thread, so that nobody waits for it.

    The latest answer is kept. After a failed connection it is asked anew: the daemon may have moved. A name
    that stands for several addresses gives them turn by turn, one after each failure.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._lock = threading.Lock()
        self._is_asking = False
        self._found: list[SockAddr] = []
        self._num_doubts = 0
        self._error: OSError | None = None

    def take(self) -> SockAddr | None:
        """Return family and address; None: not known yet.

        Raises:
            OSError: it cannot be found out; the next call asks again.
        """
        try:
            version = ipaddress.ip_address(self._host.partition("%")[0]).version
        except ValueError:
            pass
        else:
            import socket

            if version == 4:
                return socket.AF_INET, (self._host, self._port)
            return socket.AF_INET6, (self._host, self._port)
        with self._lock:
            error, self._error = self._error, None
            if error is not None:
                raise error
            if not self._found:
                self._ask()
                return None
            return self._found[self._num_doubts % len(self._found)]

    def doubt(self) -> None:
        """The address did not do: ask what it is now. Until it is known the old ones stand."""
        with self._lock:
            if self._found:
                self._num_doubts += 1
                self._ask()

    def _ask(self) -> None:
        if not self._is_asking:
            self._is_asking = True
            threading.Thread(target=self._look_up, name="snapd-resolver", daemon=True).start()

    def _look_up(self) -> None:
        import socket

        found: list[SockAddr] = []
        error: OSError | None = None
        try:
            infos = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            found = [(family, tuple(address)) for family, _, _, _, address in infos]
        except OSError as problem:
            error = problem
        except Exception as problem:  # A thread must not end without an answer.
            error = OSError(str(problem))
        with self._lock:
            self._is_asking = False
            self._found, self._error = found or self._found, error

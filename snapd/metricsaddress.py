"""The address at which metrics are served: loopback unless another one is written out.

Source: design, section 10.
"""

import ipaddress
from typing import Final

LOOPBACK: Final = "127.0.0.1"
PORT_MAX: Final = 65_535
WANTED: Final = (
    'write an address and a port, such as "127.0.0.1:9464" or "[::1]:9464", ":9464" for loopback, '
    'or "" for no metrics'
)


def listen_address(text: str) -> tuple[str, int]:
    """Return host and port of an address such as ``127.0.0.1:9464``, ``[::1]:9464`` or ``:9464``.

    Without a host it is loopback. Names other than ``localhost`` are not taken: what one stands for is
    decided elsewhere, and might be open to other hosts. Port 0 takes any free port.

    Raises:
        ValueError: *text* is no such address.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= PORT_MAX):
        raise ValueError(f"there is no port from 0 to {PORT_MAX} at its end")
    if host in ("", "localhost"):
        return LOOPBACK, int(port)
    is_bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if is_bracketed else host
    try:
        version = ipaddress.ip_address(bare).version
    except ValueError:
        raise ValueError(f"{host!r} is no IP address") from None
    if is_bracketed != (version == 6):
        raise ValueError("an IPv6 address, and no other, stands in brackets")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Return whether an address that ``listen_address`` gave can be reached from this host only."""
    return ipaddress.ip_address(host).is_loopback

"""Bounds that an operator seldom changes: the table ``[limits]`` of the configuration.

The defaults suit nearly everybody. What bounds attempts, connections and the log in the first place has a
setting of its own in ``config.py``; what is part of the protocol, or of how a module works, is no setting,
and stands in ``fixedbounds.py``.

Source: design, sections 5, 6 and 10.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from snapd.units import GIB, KIB, MIB

_HOUR_MS: Final = 3_600_000


def _count(description: str, le: int) -> Meta:
    return Meta(ge=1, le=le, description=description)


def _ms(description: str, ge: int = 1) -> Meta:
    return Meta(ge=ge, le=_HOUR_MS, description=description)


def _size(description: str, ge: int, le: int) -> Meta:
    return Meta(ge=ge, le=le, description=description, extra={"size": True})


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The table ``[limits]``."""

    accept_backlog: Annotated[
        int,
        _count(
            "Connections that may wait to be accepted, on each of the control sockets. Beyond it clients of "
            "the unix socket are refused and try again; those over TCP wait in the kernel.",
            65_535,
        ),
    ] = 256
    congested_bytes: Annotated[
        int,
        _size(
            "A client that has this much unread gets no more requests taken until it reads; its requests "
            "wait in its own socket. At most what `reply_buffer_bytes_max` leaves beside one frame.",
            KIB,
            GIB,
        ),
    ] = 64 * KIB
    warning_interval_ms: Annotated[
        int,
        _ms(
            "The same kind of warning about clients is written to stderr once in this time, and else counted."
        ),
    ] = 5_000
    tcp_addresses_max: Annotated[
        int,
        _count(
            "Addresses whose new TCP connections are counted; the one not seen for longest is forgotten.",
            10_000_000,
        ),
    ] = 4_096
    retry_after_ms_max: Annotated[
        int, _ms("The longest `retry_after_ms` that a refused prepare is told; it is never longer.", ge=20)
    ] = 5_000
    notifications_max: Annotated[
        int,
        _count("Notifications of a transport that may wait; more are ignored and counted.", 10_000_000),
    ] = 4_096
    notifications_chars_max: Annotated[
        int,
        _count(
            "Characters of all notifications that wait together; more are ignored and counted. At least "
            "`limits.notification_chars_max`.",
            GIB,
        ),
    ] = 16 * MIB
    notification_chars_max: Annotated[
        int, _count("Characters of one notification; a longer one is ignored and counted.", GIB)
    ] = 256 * KIB
    log_back_off_ms_max: Annotated[
        int,
        _ms("The longest pause after a log write that failed, before it is tried again.", ge=50),
    ] = 2_000
    log_close_ms: Annotated[
        int,
        _ms("What the log has to write what is queued when the daemon stops; what is left is dropped."),
    ] = 5_000
    stop_grace_ms: Annotated[
        int,
        _ms(
            "What the end may last beyond `drain_timeout_ms`, as the service manager is told, which then "
            "waits no longer; above `limits.log_close_ms` and `limits.kv_events_linger_ms` together."
        ),
    ] = 30_000
    metrics_connections_max: Annotated[
        int, _count("Connections for metrics that may be open; the oldest is cut off.", 65_536)
    ] = 32
    metrics_timeout_ms: Annotated[
        int, _ms("A connection for metrics is cut off after this, from its first byte to its last.")
    ] = 10_000
    kv_events_linger_ms: Annotated[
        int,
        _ms("What KV events have to be sent when the daemon stops; what is not sent by then is dropped."),
    ] = 500

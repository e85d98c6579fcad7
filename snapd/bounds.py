"""Every bound of the daemon: those that can be set, with what comes at each, and those that are fixed.

Value and range of a setting are the configuration's. Fixed ones are in ``fixedbounds.py``. What
``snapd status`` shows of bounds, and the tables of docs/bounds.md, come from here.

Source: design, sections 5, 10 and 12.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from snapd.config import DEFAULT_ORIGIN, Config
from snapd.fixedbounds import DAEMON
from snapd.wire import BoundView

FIXED: Final = "fixed"

# fmt: off
# What comes at each setting that is a bound; keys of tables with their table.
SETTINGS: Final[dict[str, str]] = {
    "sessions_max": "a prepare is refused with `limit-reached`; attempts in quarantine count",
    "ended_history_max": "the oldest ended attempt is forgotten; `snapd show` does not find it, the log does",
    "session_history_max":
        "the session that was ingested longest ago is forgotten; its next push is a full one",
    "layouts_max":
        "of the tenant that has most layouts, the one that was used longest ago is forgotten; "
        "prepares for it are refused with `layout-mismatch` until P declares it again",
    "page_keys_max": "a request with more is refused with `invalid-request`",
    "page_keys_total_max": "an attempt is taken without its page keys, and found by its session only",
    "session_id_bytes_max": "a request beyond it is refused with `invalid-request`",
    "num_tokens_max": "a request beyond it is refused with `invalid-request`",
    "connections_max":
        "a new connection is told `limit-reached`, and closed; a client that has some rights only "
        "has at most half of them",
    "tcp_connections_max": "the same, for those over TCP",
    "tls_handshake_timeout_ms": "the client is cut off",
    "tls_handshakes_max":
        "new connections wait in the kernel; one address has at most a quarter of them, and more "
        "of its connections are closed",
    "tls_handshakes_per_s":
        "connections of an address beyond it, and beyond ten times as many at once, are closed",
    "watchers_max": "the next one that wants to watch is refused with `limit-reached`",
    "watch_queue_max": "a slow watcher loses transitions, and is told how many",
    "frame_bytes_max": "the connection is closed",
    "frame_timeout_ms":
        "the connection is closed; over TCP also when its first frame does not come within this",
    "reply_buffer_bytes_max": "a client that does not read is cut off",
    "requests_in_flight_max": "a request beyond it is refused with `limit-reached`",
    "reserve_timeout_ms": "the attempt ends: `reserve-timeout`",
    "transfer_timeout_ms": "the attempt ends: `transfer-timeout`",
    "transfer_min_mb_per_s": "the time for an attempt's bytes, on top of `transfer_timeout_ms`",
    "ready_ttl_ms": "the attempt ends: `ready-expired`",
    "lease_ms": "the lease is revoked, and the rank's vote is refused with `lease-expired`",
    "quarantine_ms": "bytes without drain proof may be used again",
    "drain_timeout_ms": "SIGTERM waits for readers no longer",
    "log_queue_bytes_max": "log lines are dropped and counted, and the count is logged",
    "log_queue_lines_max": "log lines are dropped and counted, and the count is logged",
    "log_rotate_bytes": "the log goes on in a new file",
    "log_rotate_keep": "the oldest file is deleted",
    "kv_events_token_ids_max": "pages beyond are told without token ids",
    "kv_events_pages_max": "a snapshot is not told to routers, and counted",
    "kv_events_queue_bytes_max":
        "token ids are left out first, then snapshots are not told, and both are counted",
    "kv_events_buffer_batches":
        "the oldest batch can no longer be asked for; a subscriber that lags loses batches",
    "kv_events_buffer_bytes_max": "the oldest batch can no longer be asked for",
    "limits.accept_backlog":
        "clients of the unix socket are refused and try again; those over TCP wait in the kernel",
    "limits.congested_bytes": "no more of the client's requests are taken: they wait in its own socket",
    "limits.warning_interval_ms": "the same warning on stderr is counted instead",
    "limits.tcp_addresses_max": "the address not seen for longest is forgotten, with a full allowance",
    "limits.retry_after_ms_max": "a `retry_after_ms` is never longer",
    "limits.notifications_max": "more are ignored and counted",
    "limits.notifications_chars_max": "more are ignored and counted",
    "limits.notification_chars_max": "it is ignored and counted",
    "limits.log_back_off_ms_max": "a log write that failed is tried again",
    "limits.log_close_ms": "what is queued for the log when the daemon stops is dropped",
    "limits.stop_grace_ms": "the service manager, which is told so, waits for the daemon's end no longer",
    "limits.metrics_connections_max": "the oldest connection for metrics is cut off",
    "limits.metrics_timeout_ms": "the connection for metrics is cut off",
    "limits.kv_events_linger_ms": "KV events that are not sent when the daemon stops are dropped",
}
# fmt: on
# Made to be full: what is oldest goes, and nobody is refused anything.
ROLLING: Final = frozenset(
    {
        "ended_history_max",
        "session_history_max",
        "limits.tcp_addresses_max",
        "kv_events_buffer_batches",
        "kv_events_buffer_bytes_max",
    }
)  # fmt: skip


def unit_of(setting: str) -> str:
    """Return the unit of a setting that is a bound; empty: a number."""
    if setting.endswith(("_ms", "_ms_max")):
        return "ms"
    if "_bytes" in setting:
        return "bytes"
    return "MB/s" if setting.endswith("_mb_per_s") else ""


def value_of(config: Config, setting: str) -> int:
    """Return what a setting that is a bound is set to; keys of tables with their table."""
    table, _, name = setting.rpartition(".")
    value: int = getattr(getattr(config, table) if table else config, name)
    return value


def views(config: Config, origin: Mapping[str, str], used: Mapping[str, int]) -> Iterator[BoundView]:
    """Yield every bound of a daemon.

    Args:
        config: its configuration.
        origin: where each setting came from; what is missing is a default.
        used: how much of a setting is in use, where that can be counted.
    """
    for setting, at_bound in SETTINGS.items():
        yield BoundView(
            name=setting,
            value=value_of(config, setting),
            unit=unit_of(setting),
            origin=origin.get(setting, DEFAULT_ORIGIN),
            used=used.get(setting),
            is_rolling=setting in ROLLING,
            at_bound=at_bound,
        )
    for bound in DAEMON:
        yield BoundView(
            name=bound.name,
            value=bound.value,
            unit=bound.unit,
            origin=FIXED,
            what=bound.what,
            at_bound=bound.at_bound,
        )

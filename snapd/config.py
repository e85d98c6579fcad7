"""The daemon's settings: one frozen struct, and how it is built.

A value comes from the first of these that names it: a command-line flag, the environment
(``SNAPD_LEASE_MS=5000``), the TOML file (``lease_ms = 5000``), the default below. Everything
that is wrong is a ``ConfigError`` that names the key, the value, where it stands, and what
to write instead.

Source: design, sections 3, 4 and 10.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from snapd.access import UID_MAX, AccessRule, check_rules
from snapd.configvalues import Setting, known, setting_of, settings_of, typed
from snapd.core.eviction import PolicyName
from snapd.errors import ConfigError
from snapd.kveventsconfig import (
    BLOCK_HASH_BYTES,
    TOKEN_ID_BYTES,
    TOPIC_BYTES_MAX,
    Address,
    BufferBatches,
    BufferBytesMax,
    ClearAll,
    ConnectAddress,
    DataParallelRank,
    Medium,
    PagesMax,
    QueueBytesMax,
    ReplayAddress,
    TokenIdsMax,
    Topic,
    check_peer,
    event_address,
)
from snapd.kveventsconfig import CONNECT_WANTED as EVENT_PEER_WANTED
from snapd.kveventsconfig import WANTED as EVENT_WANTED
from snapd.limits import Limits
from snapd.metricsaddress import WANTED, is_loopback, listen_address
from snapd.mooncakeconfig import MooncakeConfig, Variable, VariableName
from snapd.units import GIB, KIB, MIB, TIB, format_bytes

DEFAULT_CONFIG_PATH: Final = Path("/etc/kv-snapd/snapd.toml")
ENVIRONMENT_PREFIX: Final = "SNAPD_"
CONFIG_PATH_VARIABLE: Final = "SNAPD_CONFIG"
DEFAULT_ORIGIN: Final = "default"
COMMAND_LINE: Final = "command line"
LOG_NAME: Final = "d-to-p-sync.jsonl"

DAY_MS: Final = 24 * 60 * 60 * 1000
# sockaddr_un.sun_path holds 108 bytes with the final NUL.
SOCKET_PATH_BYTES_MAX: Final = 107
CONFIG_FILE_BYTES_MAX: Final = MIB
RANKS_MAX: Final = 256
RANK_MAX: Final = 65_535
ARENA_BYTES_MIN: Final = MIB
ARENA_BYTES_MAX: Final = 16 * TIB
ARENA_BYTES_DEFAULT: Final = 8 * GIB
ALIGNMENT_BYTES_MIN: Final = 256
ALIGNMENT_BYTES_MAX: Final = MIB
# A page key is 32 hex digits; msgpack puts 2 bytes before it.
PAGE_KEY_BYTES: Final = 34
# What the other fields of a request take at most, beside session id and page keys.
REQUEST_OVERHEAD_BYTES: Final = 16 * KIB
COUNT_MAX: Final = 100_000_000
PIECES_MAX: Final = 4_096

TCP_WANTED: Final = 'write an address and a port, such as "10.0.0.5:9465" or "[::]:9465", or "" for none'

assert ALIGNMENT_BYTES_MIN & (ALIGNMENT_BYTES_MIN - 1) == 0, "alignments are powers of two"
assert ALIGNMENT_BYTES_MAX <= ARENA_BYTES_MIN, "the smallest arena holds one aligned block"
assert ARENA_BYTES_MIN <= ARENA_BYTES_DEFAULT <= ARENA_BYTES_MAX, "the default arena is allowed"


def _ms(description: str) -> Meta:
    return Meta(ge=1, le=DAY_MS, description=description)


def _count(description: str, le: int = COUNT_MAX, ge: int = 1) -> Meta:
    return Meta(ge=ge, le=le, description=description)


def _size(description: str, ge: int, le: int) -> Meta:
    """Bounds of a number of bytes, which may be written as a size such as ``"8GiB"``."""
    return Meta(ge=ge, le=le, description=description, extra={"size": True})


Device = Annotated[
    str,
    Meta(
        # "$" alone would let a final newline through.
        pattern=r"^(cpu|cuda:(0|[1-9][0-9]{0,2}))(?!\n)$",
        description="Where the arena's memory is: `cpu`, or `cuda:N` for GPU N.",
        examples=["cpu", "cuda:0"],
    ),
]
ArenaBytes = Annotated[
    int, _size("Size of the arena. A size such as `8GiB`, or bytes.", ARENA_BYTES_MIN, ARENA_BYTES_MAX)
]


class ArenaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's arena: an ``[[arena]]`` table of the file."""

    rank: Annotated[int, _count("The P rank that the arena belongs to; no two alike.", RANK_MAX, 0)] = 0
    device: Device = "cpu"
    size_bytes: ArenaBytes = ARENA_BYTES_DEFAULT


class ArenaShorthand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal arenas in three keys, in place of ``[[arena]]`` tables."""

    ranks: Annotated[int, _count("Makes this many equal arenas, for ranks 0, 1, ...", RANKS_MAX)] = 1
    size: ArenaBytes = ARENA_BYTES_DEFAULT
    device: Device = "cpu"


def _systemd_directory(env: Mapping[str, str], name: str) -> str:
    """Return the first directory that systemd put in a variable, or nothing."""
    return env.get(name, "").split(":")[0]


def default_socket_path(env: Mapping[str, str], uid: int) -> str:
    """Return where the control socket is unless configured: in systemd's, root's or the user's directory."""
    if directory := _systemd_directory(env, "RUNTIME_DIRECTORY"):
        return f"{directory}/snapd.sock"
    if uid == 0:
        return "/run/kv-snapd/snapd.sock"
    if directory := env.get("XDG_RUNTIME_DIR", ""):
        return f"{directory}/kv-snapd/snapd.sock"
    return f"/tmp/kv-snapd-{uid}/snapd.sock"  # noqa: S108 - the server makes the directory 0700 and checks its owner


def default_log_path(env: Mapping[str, str], uid: int) -> str:
    """Return where the event log is unless configured: systemd's, root's or the user's state directory."""
    for name in ("LOGS_DIRECTORY", "STATE_DIRECTORY"):
        if directory := _systemd_directory(env, name):
            return f"{directory}/{LOG_NAME}"
    if uid == 0:
        return f"/var/log/kv-snapd/{LOG_NAME}"
    if directory := env.get("XDG_STATE_HOME", ""):
        return f"{directory}/kv-snapd/{LOG_NAME}"
    if home := env.get("HOME", ""):
        return f"{home}/.local/state/kv-snapd/{LOG_NAME}"
    return f"/tmp/kv-snapd-{uid}/{LOG_NAME}"  # noqa: S108 - the same directory as the socket's


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting of the daemon. Times are whole milliseconds; sizes are bytes, or such as ``"8GiB"``."""

    socket_path: Annotated[
        str,
        Meta(
            min_length=1,
            description="Unix socket of the control protocol, at most 107 bytes long. Unless set: in "
            "`$RUNTIME_DIRECTORY` (systemd), `/run/kv-snapd` (root), `$XDG_RUNTIME_DIR/kv-snapd` or "
            "`/tmp/kv-snapd-UID`.",
        ),
    ] = msgspec.field(default_factory=lambda: default_socket_path(os.environ, os.geteuid()))
    allowed_uids: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=UID_MAX)], ...],
        Meta(
            max_length=1024,
            description="Users that may connect, by number, and do everything. The daemon's own user and "
            "root always may.",
        ),
    ] = ()
    access: Annotated[
        tuple[AccessRule, ...],
        Meta(
            max_length=1024,
            description="One `[[access]]` table for each kind of client that may do some things only; the "
            "first that fits counts. Over TLS nobody is let in without one.",
        ),
    ] = ()
    tcp_address: Annotated[
        str,
        Meta(
            max_length=255,
            description="Where clients of other hosts may connect, such as `10.0.0.5:9465`, over TLS. Empty: "
            "nowhere. Without `tls_certificate_path` it is plain TCP, and must be loopback.",
            extra={"wanted": TCP_WANTED},
        ),
    ] = ""
    tcp_connections_max: Annotated[
        int,
        _count(
            "Connections to `tcp_address` that may be open at a time, and half as many of one client; more "
            "are refused.",
            65_536,
        ),
    ] = 1_024
    tls_certificate_path: Annotated[
        str, Meta(description="PEM file with the daemon's certificate, and those between it and its CA.")
    ] = ""
    tls_key_path: Annotated[str, Meta(description="PEM file with the key of that certificate.")] = ""
    tls_client_ca_path: Annotated[
        str, Meta(description="PEM file with the CAs whose certificates clients may show.")
    ] = ""
    tls_handshake_timeout_ms: Annotated[
        int, _ms("A client that has not finished its TLS handshake after this is cut off.")
    ] = 5_000
    tls_handshakes_max: Annotated[
        int, _count("TLS handshakes that may be under way at a time; others wait to be accepted.", 65_536)
    ] = 64
    tls_handshakes_per_s: Annotated[
        int,
        _count(
            "New TCP connections a second that one address may make, and ten times as many at once; more "
            "are closed.",
            1_000_000,
        ),
    ] = 20
    arenas: Annotated[
        tuple[ArenaConfig, ...],
        Meta(
            min_length=1,
            max_length=RANKS_MAX,
            description="One `[[arena]]` table for each P rank. `ranks`, `size` and `device` are the "
            "short form for equal arenas.",
        ),
    ] = msgspec.field(default=(ArenaConfig(),), name="arena")
    alignment_bytes: Annotated[
        int,
        _size(
            "Every plane starts on a multiple of this; a power of two.",
            ALIGNMENT_BYTES_MIN,
            ALIGNMENT_BYTES_MAX,
        ),
    ] = ALIGNMENT_BYTES_MIN
    register_piece_bytes: Annotated[
        int,
        _size(
            "Register the arena with the transport in pieces of this size, which no extent crosses; a "
            "multiple of `alignment_bytes`. 0: in one piece.",
            0,
            ARENA_BYTES_MAX,
        ),
    ] = 0
    hugepages: Annotated[
        Literal["auto", "on", "off"],
        Meta(description="Hugepages for host arenas: `auto` takes them if there are any, `on` needs them."),
    ] = "auto"
    prefault: Annotated[
        bool, Meta(description="Touch every page of a host arena at start, so that no push waits for one.")
    ] = True
    transport: Annotated[
        Literal["shm", "mooncake"],
        Meta(
            description="How bytes travel: `shm` for a D on the same host, `mooncake` (an extra package) "
            "between hosts or GPUs."
        ),
    ] = "shm"
    mooncake: Annotated[
        MooncakeConfig, Meta(description="Mooncake's settings; not used with another transport.")
    ] = MooncakeConfig()

    reserve_timeout_ms: Annotated[int, _ms("A grant that D does not start using for this long ends.")] = (
        10_000
    )
    transfer_timeout_ms: Annotated[
        int,
        _ms(
            "A started transfer must commit within this, plus the time of its bytes at "
            "`transfer_min_mb_per_s`."
        ),
    ] = 30_000
    transfer_min_mb_per_s: Annotated[
        int, _count("The slowest transfer that is waited for, in MB a second.", 1_000_000)
    ] = 100
    ready_ttl_ms: Annotated[
        int, _ms("A READY snapshot that nobody ingests for this long expires; above `lease_ms`.")
    ] = 300_000
    lease_ms: Annotated[int, _ms("How long a rank may read a snapshot before it must have voted.")] = 10_000
    quarantine_ms: Annotated[
        int, _ms("How long bytes without drain proof rest before they may be used again.")
    ] = 60_000

    eviction_policy: Annotated[
        PolicyName,
        Meta(
            description="Which idle READY snapshot makes room first: `lru` the least recently used, `lfuda` "
            "that of the session least often used, `gdsf` the one that saves least prefill work for its "
            "bytes, `sieve` the oldest not used again. `snapd replay` compares them."
        ),
    ] = "lru"
    sessions_max: Annotated[int, _count("Attempts that may be open at one time.")] = 100_000
    ended_history_max: Annotated[
        int, _count("Ended attempts that are remembered, to answer repeats and for `snapd show`.")
    ] = 10_000
    session_history_max: Annotated[
        int, _count("Sessions whose last ingested range is remembered, so that D sends a suffix only.")
    ] = 100_000
    layouts_max: Annotated[int, _count("Layouts that may be declared at one time.", 65_536)] = 256
    page_keys_max: Annotated[int, _count("Page keys in one request; they must fit a frame.", 1_000_000)] = (
        16_384
    )
    page_keys_total_max: Annotated[
        int,
        _count("Page keys that open attempts hold together; beyond it new ones are found by session only."),
    ] = 500_000
    session_id_bytes_max: Annotated[int, _size("Length of a session id in UTF-8.", 1, 64 * KIB)] = 512
    num_tokens_max: Annotated[int, _count("Tokens in one snapshot.", 1 << 31)] = 16_777_216

    connections_max: Annotated[int, _count("Connections open at one time.", 1_000_000)] = 1_024
    watchers_max: Annotated[int, _count("Connections that watch at one time.", 1_000_000)] = 64
    watch_queue_max: Annotated[
        int, _count("Transitions that may wait for one slow watcher before some are dropped.")
    ] = 4_096
    frame_bytes_max: Annotated[int, _size("A longer frame closes its connection.", 64 * KIB, GIB)] = 4 * MIB
    frame_timeout_ms: Annotated[int, _ms("A frame that has begun must end within this.")] = 10_000
    reply_buffer_bytes_max: Annotated[
        int,
        _size(
            "A client with more unread replies than this is cut off; at least `frame_bytes_max`.",
            64 * KIB,
            16 * GIB,
        ),
    ] = 8 * MIB
    requests_in_flight_max: Annotated[
        int, _count("Requests of one connection that may be under way.", 1_000_000)
    ] = 1_024
    drain_timeout_ms: Annotated[int, _ms("How long SIGTERM waits for ranks that are reading.")] = 5_000

    log_path: Annotated[
        str,
        Meta(
            min_length=1,
            description="The event log. Unless set: in `$LOGS_DIRECTORY` or `$STATE_DIRECTORY` (systemd), "
            "`/var/log/kv-snapd` (root), `$XDG_STATE_HOME/kv-snapd` or `~/.local/state/kv-snapd`.",
        ),
    ] = msgspec.field(default_factory=lambda: default_log_path(os.environ, os.geteuid()))
    log_rotate_bytes: Annotated[
        int, _size("The log is rotated when it is this large. 0: never.", 0, ARENA_BYTES_MAX)
    ] = 256 * MIB
    log_rotate_keep: Annotated[int, _count("Rotated logs that are kept.", 10_000)] = 8
    log_queue_bytes_max: Annotated[
        int, _size("Log lines that wait for the disk, in bytes; more are dropped and counted.", 64 * KIB, GIB)
    ] = 32 * MIB
    log_queue_lines_max: Annotated[
        int, _count("Log lines that wait for the disk; more are dropped and counted.")
    ] = 65_536

    metrics_address: Annotated[
        str,
        Meta(
            max_length=255,
            description="Where Prometheus may ask for metrics, such as `127.0.0.1:9464`, or `:9464` for the "
            "same. Empty: nowhere. Needs the extra `metrics`. There is no password: an address that other "
            "hosts reach must be written out.",
            extra={"wanted": WANTED},
        ),
    ] = ""

    kv_events_address: Address = ""
    kv_events_replay_address: ReplayAddress = ""
    kv_events_connect_address: ConnectAddress = ""
    kv_events_topic: Topic = ""
    kv_events_medium: Medium = "CPU_PINNED"
    kv_events_data_parallel_rank: DataParallelRank = 0
    kv_events_clear_all: ClearAll = True
    kv_events_token_ids_max: TokenIdsMax = 262_144
    kv_events_pages_max: PagesMax = 500_000
    kv_events_queue_bytes_max: QueueBytesMax = 64 * MIB
    kv_events_buffer_batches: BufferBatches = 10_000
    kv_events_buffer_bytes_max: BufferBytesMax = 64 * MIB

    limits: Annotated[Limits, Meta(description="Bounds that are seldom changed.")] = Limits()

    @property
    def is_open_to_other_users(self) -> bool:
        """Users other than the daemon's own and root may connect over the unix socket."""
        return bool(self.allowed_uids) or any(rule.uid >= 0 for rule in self.access)

    def check(self, origin: Mapping[str, str] | None = None) -> None:
        """Check every range, and the relations between settings.

        Args:
            origin: where each value came from, by attribute, for the message.

        Raises:
            ConfigError: a setting is out of range, or two do not fit together.
        """
        origin = origin or {}

        def shown(name: str) -> str:
            return f"{name} = {getattr(self, name)!r} ({origin.get(name, DEFAULT_ORIGIN)})"

        for name, setting in _SETTINGS.items():
            value = msgspec.to_builtins(getattr(self, setting.attribute))
            for key, part, leaf in _leaves(name, value, setting):
                typed(origin.get(leaf.attribute, "config"), key, part, leaf, text=False)
        socket_path_bytes = len(os.fsencode(self.socket_path))
        if socket_path_bytes > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                f"{shown('socket_path')} is {socket_path_bytes} bytes long, and a unix socket's path has at "
                f"most {SOCKET_PATH_BYTES_MAX}: choose a shorter directory, such as /run/kv-snapd"
            )
        for name in ("socket_path", "log_path"):
            if "\0" in getattr(self, name):
                raise ConfigError(f"{shown(name)} has a NUL in it: write a path")
            try:
                getattr(self, name).encode()
            except UnicodeEncodeError:
                raise ConfigError(f"{shown(name)} is not UTF-8: write another path") from None
        if self.metrics_address:
            try:
                listen_address(self.metrics_address)
            except ValueError as error:
                raise ConfigError(f"{shown('metrics_address')} is no address: {error}: {WANTED}") from None
        self._check_kv_events(origin)
        self._check_access(origin)
        if self.alignment_bytes & (self.alignment_bytes - 1):
            raise ConfigError(f"{shown('alignment_bytes')} is no power of two: write 256, 512, 1024, ...")
        if self.register_piece_bytes % self.alignment_bytes:
            raise ConfigError(
                f"{shown('register_piece_bytes')} is no multiple of {shown('alignment_bytes')}: "
                f'write 0 for one piece, or a multiple such as "4GiB"'
            )
        for arena in self.arenas:
            # Each piece is registered for itself, and the time for one grows with their number.
            if self.register_piece_bytes and arena.size_bytes > self.register_piece_bytes * PIECES_MAX:
                raise ConfigError(
                    f"{shown('register_piece_bytes')} cuts the arena of rank {arena.rank}, "
                    f"{format_bytes(arena.size_bytes)}, into more than {PIECES_MAX} pieces: raise it, for "
                    f'instance to "4GiB"'
                )
        if self.lease_ms >= self.ready_ttl_ms:
            raise ConfigError(
                f"{shown('lease_ms')} must be below {shown('ready_ttl_ms')}: "
                f"lower the first or raise the second"
            )
        if self.reply_buffer_bytes_max < self.frame_bytes_max:
            raise ConfigError(
                f"{shown('reply_buffer_bytes_max')} must not be below {shown('frame_bytes_max')}: "
                f"one reply must fit; raise the first or lower the second"
            )
        request_bytes = (
            self.page_keys_max * PAGE_KEY_BYTES + self.session_id_bytes_max + REQUEST_OVERHEAD_BYTES
        )
        if request_bytes > self.frame_bytes_max:
            raise ConfigError(
                f"{shown('page_keys_max')} makes requests of {format_bytes(request_bytes)}, more than "
                f"{shown('frame_bytes_max')}: lower the first or raise the second"
            )
        self._check_limits(origin)
        self._check_arenas_and_transport(origin)

    def _check_limits(self, origin: Mapping[str, str]) -> None:
        """Check what must hold between two of the table ``[limits]``."""

        def shown(name: str) -> str:
            where = origin.get(f"limits.{name}", DEFAULT_ORIGIN)
            return f"limits.{name} = {getattr(self.limits, name)} ({where})"

        limits = self.limits
        if limits.notification_chars_max > limits.notifications_chars_max:
            raise ConfigError(
                f"{shown('notification_chars_max')} must not be above {shown('notifications_chars_max')}: "
                "one notification must fit; lower the first or raise the second"
            )
        if limits.log_close_ms >= limits.stop_grace_ms:
            raise ConfigError(
                f"{shown('log_close_ms')} must be below {shown('stop_grace_ms')}: the service manager must "
                "wait for the log; lower the first or raise the second"
            )
        if limits.log_close_ms + limits.kv_events_linger_ms >= limits.stop_grace_ms:
            raise ConfigError(
                f"{shown('kv_events_linger_ms')} and {shown('log_close_ms')} together must be below "
                f"{shown('stop_grace_ms')}: the service manager must wait for both; lower one or raise "
                "the last"
            )

    def _check_kv_events(self, origin: Mapping[str, str]) -> None:
        def shown(name: str) -> str:
            return f"{name} = {getattr(self, name)!r} ({origin.get(name, DEFAULT_ORIGIN)})"

        for name in ("kv_events_address", "kv_events_replay_address"):
            if address := getattr(self, name):
                try:
                    event_address(address)
                except ValueError as error:
                    raise ConfigError(f"{shown(name)} is no address: {error}: {EVENT_WANTED}") from None
        if self.kv_events_connect_address:
            try:
                check_peer(self.kv_events_connect_address)
            except ValueError as error:
                raise ConfigError(
                    f"{shown('kv_events_connect_address')} is no address: {error}: {EVENT_PEER_WANTED}"
                ) from None
        if not self.kv_events_address:
            for name in ("kv_events_replay_address", "kv_events_connect_address"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{shown(name)} is of no use while kv_events_address is empty: set both or none"
                    )
            return
        topic = self.kv_events_topic.encode(errors="surrogateescape")
        if len(topic) > TOPIC_BYTES_MAX:
            raise ConfigError(
                f"{shown('kv_events_topic')} is {len(topic)} bytes long: write at most {TOPIC_BYTES_MAX}"
            )
        request_bytes = (
            self.page_keys_max * (PAGE_KEY_BYTES + BLOCK_HASH_BYTES)
            + self.kv_events_token_ids_max * TOKEN_ID_BYTES
            + self.session_id_bytes_max
            + REQUEST_OVERHEAD_BYTES
        )
        if request_bytes > self.frame_bytes_max:
            raise ConfigError(
                f"{shown('kv_events_token_ids_max')} makes requests of {format_bytes(request_bytes)}, more "
                f"than {shown('frame_bytes_max')}: lower the first or raise the second"
            )

    def _check_access(self, origin: Mapping[str, str]) -> None:
        def shown(name: str) -> str:
            return f"{name} = {getattr(self, name)!r} ({origin.get(name, DEFAULT_ORIGIN)})"

        check_rules(self.access, {0, *self.allowed_uids})
        names = ("tls_certificate_path", "tls_key_path", "tls_client_ca_path")
        given = [name for name in names if getattr(self, name)]
        if given and len(given) < len(names):
            missing = " and ".join(name for name in names if name not in given)
            raise ConfigError(f"{shown(given[0])} needs {missing} beside it: TLS is used on both sides")
        if not self.tcp_address:
            if given:
                raise ConfigError(f"{shown(given[0])} is for tcp_address, which is empty: {TCP_WANTED}")
            return
        try:
            host, _ = listen_address(self.tcp_address)
        except ValueError as error:
            raise ConfigError(f"{shown('tcp_address')} is no address: {error}: {TCP_WANTED}") from None
        if not given and not is_loopback(host):
            raise ConfigError(
                f"{shown('tcp_address')} can be reached from other hosts, and there is no TLS: set "
                f"{', '.join(names)} (`snapd certs init` makes some to try with), or write a loopback address"
            )
        if given and not any(rule.certificate for rule in self.access):
            raise ConfigError(
                f"{shown('tcp_address')}: no [[access]] table names a certificate, so nobody would be let in"
            )
        if not given and not any(rule.loopback for rule in self.access):
            raise ConfigError(
                f"{shown('tcp_address')} is without TLS, and no [[access]] table has loopback = true, so "
                "nobody would be let in"
            )

    def _check_arenas_and_transport(self, origin: Mapping[str, str]) -> None:
        arenas = f"({origin.get('arenas', DEFAULT_ORIGIN)})"
        ranks = [arena.rank for arena in self.arenas]
        for rank in ranks:
            if ranks.count(rank) > 1:
                raise ConfigError(
                    f"arena {arenas}: rank {rank} has more than one arena: give each [[arena]] its own rank, "
                    f"such as rank = {max(ranks) + 1}"
                )
        if self.transport == "mooncake" and self.mooncake.host in ("0.0.0.0", "::"):  # noqa: S104
            where = origin.get("mooncake.host", DEFAULT_ORIGIN)
            raise ConfigError(
                f"mooncake.host = {self.mooncake.host!r} ({where}) is no address at which a peer reaches "
                "this host: write its name or address; the engine listens on every address anyway"
            )
        on_host = [arena.rank for arena in self.arenas if arena.device == "cpu"]
        if self.transport == "mooncake" and self.mooncake.protocol == "nvlink_intra" and on_host:
            where = origin.get("mooncake.protocol", DEFAULT_ORIGIN)
            raise ConfigError(
                f"mooncake.protocol = 'nvlink_intra' ({where}) moves bytes between GPUs, and arena "
                f'{on_host[0]} {arenas} is on device "cpu": give every arena device = "cuda:N", or set '
                'mooncake.protocol to "tcp" or "rdma"'
            )


class Loaded(NamedTuple):
    """A configuration, and where it came from.

    Attributes:
        config: the settings, checked.
        origin: for each attribute of ``Config``, and each key of a table (``mooncake.host``): ``default``,
            the file's path, ``environment NAME`` or ``command line``.
        path: the file that was read, if any.
    """

    config: Config
    origin: Mapping[str, str]
    path: Path | None


class _Given(NamedTuple):
    """A value that a source gives for a key; a higher level wins."""

    value: Any
    origin: str
    level: int


_SETTINGS: Final = settings_of(Config)
_SHORTHAND: Final = settings_of(ArenaShorthand)
_ARENA: Final = settings_of(ArenaConfig)
_TABLES: Final = tuple(name for name, setting in _SETTINGS.items() if setting.is_table)
_TABLED: Final = {key: leaf for name in _TABLES for key, leaf in _SETTINGS[name].table.items()}
_FILE_KEYS: Final = _SETTINGS | _SHORTHAND
_KEYS: Final = _FILE_KEYS | _TABLED
assert len(_KEYS) == len(_SETTINGS) + len(_SHORTHAND) + len(_TABLED), "no two settings have one key"
# Each of Mooncake's own variables is a key: ``mooncake.settings.MC_GID_INDEX``.
_MOONCAKE_SETTINGS: Final = "mooncake.settings"
_VARIABLE_NAME: Final = setting_of(_MOONCAKE_SETTINGS, _MOONCAKE_SETTINGS, VariableName)
_VARIABLE: Final = setting_of(_MOONCAKE_SETTINGS, _MOONCAKE_SETTINGS, Variable)
# What no text can stand for: it has no environment variable.
_WITHOUT_VARIABLE: Final = frozenset({"access", "arena", *_TABLES, _MOONCAKE_SETTINGS})


def environment_name(key: str) -> str:
    """Return the variable that sets a key: ``lease_ms`` is ``SNAPD_LEASE_MS``.

    A key of a table: ``mooncake.host`` is ``SNAPD_MOONCAKE_HOST``.
    """
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "_")


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of the TOML file: the keys of ``Config`` and of ``ArenaShorthand``.

    ``msgspec.json.schema(Config)`` alone knows neither the shorthand nor that a size may be text.
    """
    schema = msgspec.json.schema(Config)
    definitions = schema["$defs"]
    short = msgspec.json.schema(ArenaShorthand)["$defs"]["ArenaShorthand"]["properties"]
    definitions["Config"]["properties"] |= short
    for name, settings in (("Config", _FILE_KEYS), ("ArenaConfig", _ARENA), ("Limits", settings_of(Limits))):
        for key, setting in settings.items():
            if setting.is_size:
                definitions[name]["properties"][key]["type"] = ["integer", "string"]
    return schema


def load_config(path: Path | None, env: Mapping[str, str], overrides: Mapping[str, object]) -> Config:
    """Return the configuration; see :func:`load`."""
    return load(path, env, overrides).config


def load(path: Path | None, env: Mapping[str, str], overrides: Mapping[str, object]) -> Loaded:
    """Build the configuration: defaults, below the file, below the environment, below *overrides*.

    Args:
        path: the TOML file; when None, ``$SNAPD_CONFIG``, else /etc/kv-snapd/snapd.toml if it exists.
        env: the environment; only ``SNAPD_*`` and the directories that make up the defaults are read.
        overrides: values of flags by key, typed or as text; None means that the flag was not given.

    Raises:
        ConfigError: a key is unknown, a value is wrong, two values do not fit together, or the file
            cannot be read.
    """
    path = _find_file(path, env)
    given: dict[str, _Given] = {}
    if path is not None:
        for name, value in _read_file(path).items():
            setting = known(str(path), name, _FILE_KEYS)
            for key, part, leaf in _leaves(name, value, setting, str(path)):
                given[key] = _Given(typed(str(path), key, part, leaf, text=False), str(path), 1)
    key_of_variable = {environment_name(key): key for key in _KEYS if key not in _WITHOUT_VARIABLE}
    for variable, text in sorted(env.items()):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable != CONFIG_PATH_VARIABLE:
            if variable == environment_name(_MOONCAKE_SETTINGS):
                raise ConfigError(
                    f"environment: {variable} cannot be set: set Mooncake's own variables, such as "
                    "MC_GID_INDEX=3"
                )
            key = known("environment", variable, key_of_variable)
            value = typed("environment", variable, text, _KEYS[key], text=True)
            given[key] = _Given(value, f"environment {variable}", 2)
    for name, value in overrides.items():
        if value is not None:
            for key, part, leaf in _leaves(name, value, _flag_setting(name), COMMAND_LINE):
                given[key] = _Given(typed(COMMAND_LINE, key, part, leaf, text=True), COMMAND_LINE, 3)

    uid = os.geteuid()
    values: dict[str, Any] = {
        "socket_path": default_socket_path(env, uid),
        "log_path": default_log_path(env, uid),
    }
    settings = (*_SETTINGS.values(), *_TABLED.values())
    origin = dict.fromkeys((s.attribute for s in settings if not s.is_table), DEFAULT_ORIGIN)
    for key, (value, source, _) in given.items():
        if key != "arena" and key in _SETTINGS:
            values[key] = _expand_home(value, env) if key.endswith("_path") else value
            origin[key] = source
    values["arenas"], origin["arenas"] = _arenas(given)
    values["mooncake"] = MooncakeConfig(
        **_table("mooncake", given, origin), settings=_table(_MOONCAKE_SETTINGS, given, origin)
    )
    values["limits"] = Limits(**_table("limits", given, origin))
    config = Config(**values)
    config.check(origin)
    return Loaded(config, origin, path)


def _leaves(
    name: str, value: object, setting: Setting, source: str = "config"
) -> Iterator[tuple[str, object, Setting]]:
    """Yield every key that *value* sets, with its value and its setting: a table sets several.

    Raises:
        ConfigError: a key of a table is unknown.
    """
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if setting.is_table and isinstance(value, Mapping):
        short = {key.removeprefix(f"{name}."): leaf for key, leaf in setting.table.items()}
        for key, part in value.items():
            yield from _leaves(f"{name}.{key}", part, known(f"{source}: [{name}]", key, short), source)
    elif name == _MOONCAKE_SETTINGS and isinstance(value, Mapping):
        for variable, part in value.items():
            yield f"{name}.{variable}", part, _variable_setting(source, variable)
    else:
        yield name, value, setting


def _flag_setting(key: str) -> Setting:
    table, _, variable = key.rpartition(".")
    if table == _MOONCAKE_SETTINGS:
        return _variable_setting(COMMAND_LINE, variable)
    return known(COMMAND_LINE, key, _KEYS)


def _variable_setting(source: str, variable: str) -> Setting:
    """Return the setting of one of Mooncake's own variables. It is for Mooncake to say which there are."""
    typed(source, f"[{_MOONCAKE_SETTINGS}]", variable, _VARIABLE_NAME, text=False)
    return _VARIABLE._replace(attribute=f"{_MOONCAKE_SETTINGS}.{variable}")


def _table(table: str, given: Mapping[str, _Given], origin: dict[str, str]) -> dict[str, Any]:
    """Return what all sources set of a table together, and note the origin of each key."""
    found = {key: one for key, one in given.items() if key.rpartition(".")[0] == table}
    origin.update({key: one.origin for key, one in found.items()})
    return {key.rpartition(".")[2]: one.value for key, one in found.items()}


def _arenas(given: Mapping[str, _Given]) -> tuple[tuple[ArenaConfig, ...], str]:
    """Return the arenas and their origin: listed one by one, or from the shorthand.

    A ``size`` or ``device`` from a higher level than the list sets every listed arena.
    """
    listed = given.get("arena")
    lowest = listed.level if listed else 0
    short = {key: given[key] for key in _SHORTHAND if key in given and given[key].level >= lowest}
    for key, (value, source, level) in short.items():
        if listed and (level == listed.level or key == "ranks"):
            raise ConfigError(
                f"{source}: {key} = {value!r} cannot stand beside the [[arena]] tables ({listed.origin}): "
                f"remove one of them"
            )
    values = {key: value for key, (value, _, _) in short.items()}
    sources = dict.fromkeys(source for _, source, _ in (*([listed] if listed else []), *short.values()))
    origin = ", ".join(sources) or DEFAULT_ORIGIN
    if listed:
        changes = {"size_bytes" if key == "size" else key: value for key, value in values.items()}
        return tuple(msgspec.structs.replace(arena, **changes) for arena in listed.value), origin
    equal = ArenaShorthand(**values)
    return tuple(ArenaConfig(rank, equal.device, equal.size) for rank in range(equal.ranks)), origin


def _find_file(path: Path | None, env: Mapping[str, str]) -> Path | None:
    if path is not None:
        return path
    if CONFIG_PATH_VARIABLE in env:
        if not env[CONFIG_PATH_VARIABLE]:
            raise ConfigError(f"environment: {CONFIG_PATH_VARIABLE} is empty: write a path, or unset it")
        return Path(env[CONFIG_PATH_VARIABLE])
    try:
        return DEFAULT_CONFIG_PATH if DEFAULT_CONFIG_PATH.exists() else None
    except OSError:
        # It may be there and we may not look: reading it says so.
        return DEFAULT_CONFIG_PATH


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(CONFIG_FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: the configuration cannot be read: {what}") from error
    if len(raw) > CONFIG_FILE_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {format_bytes(CONFIG_FILE_BYTES_MAX)}: no configuration file")
    try:
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _expand_home(path: str, env: Mapping[str, str]) -> str:
    home = env.get("HOME", "")
    return home + path[1:] if home and (path == "~" or path.startswith("~/")) else path

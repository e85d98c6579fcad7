"""Mooncake's TransferEngine: one typed wrapper that checks every answer.

Only this module and ``mooncake_package`` touch the package, and only when an engine is made.

* The engine reads its settings from the environment when it is made, some of them once per process.
  ``MooncakeConfig.settings`` are put there first and win over what was set from outside, so that one
  file says how a process runs.
* ``initialize`` takes nearly everything and says 0: which transport it installs depends on the devices
  that it finds. What it would swallow is refused here beforehand, and tcp is asked for by name.
* Deleting a TransferEngine takes 0.9 s and holds the interpreter lock. So ``close`` only retires it, unless
  it is told otherwise; a process keeps at most ``RETIRED_MAX`` of them, and deletes the oldest when there are
  more.
* Over nvlink_intra it maps the arenas that it writes to, and unmaps them when it is deleted.
* A forked child has no threads of its parent's engines. There they are closed and never deleted, as that
  would crash it; it makes its own.

Source: design, section 7.
"""

import contextlib
import ctypes
import enum
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

from snapd.errors import TransportError
from snapd.mooncakeconfig import PEER_HANDSHAKE, MooncakeConfig, Protocol
from snapd.transport.base import Write
from snapd.transport.loopback import is_loopback, listening_inside_only
from snapd.transport.mooncake_package import find_package, load_engine_module
from snapd.units import ceil_div, format_bytes

NOTIFICATION_NAME: Final = "snapd"
RETIRED_MAX: Final = 4

_INFINIBAND: Final = Path("/sys/class/infiniband")
_DEVICES: Final = Path("/dev")
_FORCE_TCP: Final = "MC_FORCE_TCP"
_PORTS_DEFAULT: Final = (15_000, 17_000)
_PORT_MAX: Final = 65_535
# The engine tries 500 ports at random and then dies. With 3% of the range free, all of them are taken
# once in four million times.
_FREE_PORTS_PERCENT: Final = 3

_OPEN_POLL_S: Final = 0.001
# An id that says that nothing began: 0, and -1 as an unsigned number.
_NO_BATCH: Final = (0, 2**64 - 1)

_REGISTER_HELP: Final = {
    -7: "it overlaps memory that is registered already",
    -1: "it has no bytes, or the device refused it",
}
# Engines that are closed, oldest first, until they are deleted.
_retired: Final[deque[Any]] = deque()
_retired_lock: Final = threading.Lock()
# Those that were started, for a child.
_started: Final["weakref.WeakSet[MooncakeEngine]"] = weakref.WeakSet()
_environment_lock: Final = threading.Lock()


class WriteState(enum.Enum):
    """How far one write has come. The last two are final: its id must not be asked again."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class MooncakeEngine:
    """One TransferEngine. Every method may be called from any thread.

    Attributes:
        segment_name: under which peers reach this engine.
        package: name and version of the installed package.
        settings: Mooncake's variables as this engine found them.

    Args:
        config: how to use Mooncake.

    Raises:
        ExtraMissing: no package of Mooncake is installed.
        TransportError: it cannot be loaded or cannot run as configured; says what to change.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        if config.protocol not in get_args(Protocol):
            raise TransportError(f"protocol {config.protocol!r}: use one of {', '.join(get_args(Protocol))}")
        os.environ.update(config.settings)
        self._protocol = config.protocol
        with _protocol_in_environment(config.protocol):
            self._module: Any = load_engine_module()
            package = find_package()
            self.package = f"{package.name} {package.version}".strip() if package else "mooncake"
            self._refuse_what_would_be_swallowed(config)
            self.settings = {
                name: value for name, value in os.environ.items() if name.startswith(("MC_", "GLOG_"))
            }
            self._open: set[str] = set()
            self._registered: dict[int, int] = {}
            self._lock = threading.Lock()
            self._name_holder: socket.socket | None = None
            self.segment_name = self._start(config)

    def _start(self, config: MooncakeConfig) -> str:
        name = _bracketed(config.host)
        first, last = _port_range()
        ports = set(range(first, last + 1))
        if config.metadata_server != PEER_HANDSHAKE:
            # There the name is a key: two processes of a host with the same would answer for each other.
            self._name_holder = socket.socket()
            self._name_holder.bind(("", 0))
            ports.add(self._name_holder.getsockname()[1])
            name = f"{name}:{self._name_holder.getsockname()[1]}"
        self._raw: Any = self._module.TransferEngine()
        _started.add(self)
        # Registered memory can be read and written by whoever reaches the ports; D's staging memory too.
        with listening_inside_only(ports) if is_loopback(config.host) else contextlib.nullcontext():
            code = self._raw.initialize(name, config.metadata_server, config.protocol, config.devices)
        if code != 0:
            self.close()
            what_else = (
                "no port for data may be free"
                if config.metadata_server == PEER_HANDSHAKE
                else f"the metadata server {config.metadata_server} may not be reachable"
            )
            raise TransportError(
                f"Mooncake ({self.package}) cannot start with protocol {config.protocol} on {config.host} "
                f"(initialize: {code}): {what_else}; its own lines on stderr say more"
            )
        return f"{name}:{self._raw.get_rpc_port()}" if config.metadata_server == PEER_HANDSHAKE else name

    def _refuse_what_would_be_swallowed(self, config: MooncakeConfig) -> None:
        if config.protocol == "rdma":
            _check_rdma(config.devices)
        elif config.protocol == "nvlink_intra":
            if not getattr(self._module, "SUPPORT_INTRA_NVLINK", False):
                raise TransportError(
                    f"protocol nvlink_intra: {self.package} was built without it; install "
                    "kv-snapd[mooncake] or kv-snapd[mooncake-cuda13], or use tcp"
                )
            if not any(_DEVICES.glob("nvidia[0-9]*")):
                raise TransportError("protocol nvlink_intra: this machine shows no GPU; use tcp or rdma")
        if config.protocol != "tcp" and _FORCE_TCP in os.environ:
            raise TransportError(
                f"protocol {config.protocol}: {_FORCE_TCP} is set and would make it tcp: unset it"
            )
        _check_host(config.host)
        _check_ports()

    def register(self, address: int, size_bytes: int) -> None:
        """Register memory of this process, from which or into which writes will go.

        Raises:
            TransportError: it cannot be registered; says why.
        """
        code = self._raw.register_memory(address, size_bytes)
        if code != 0:
            why = _REGISTER_HELP.get(code, "on a GPU its device must be current in the calling thread")
            raise TransportError(
                f"Mooncake cannot register {format_bytes(size_bytes)} at {address:#x} "
                f"(register_memory: {code}): {why}"
            )
        with self._lock:
            self._registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        """Take a registration back.

        Raises:
            TransportError: nothing is registered there, or the engine refused.
        """
        with self._lock:
            self._registered.pop(address, None)
        code = self._raw.unregister_memory(address)
        if code != 0:
            raise TransportError(f"Mooncake cannot unregister {address:#x} (unregister_memory: {code})")

    def probe(self, segment_name: str) -> bool:
        """Return whether the peer answers. Waits for it."""
        return bool(self._raw.send_probe(segment_name) == 0)

    def take_notifications(self) -> list[str]:
        """Return the texts that peers sent since the last call, snapd's own only."""
        texts = []
        for notification in self._raw.get_notifies():
            try:
                if notification.name == NOTIFICATION_NAME:
                    texts.append(notification.msg)
            except UnicodeDecodeError:
                # Whoever reaches the port can send anything.
                continue
        return texts

    def is_open(self, segment_name: str) -> bool:
        """Return whether ``open`` has succeeded, so that ``submit`` will not wait."""
        return segment_name in self._open

    def open(self, segment_name: str, target_ptr: int) -> None:
        """Open a peer's segment, and write nothing. Waits for the peer, a minute if it is stopped.

        Args:
            segment_name: of the peer.
            target_ptr: any byte of its arena.

        Raises:
            TransportError: it cannot be opened.
        """
        # The engine opens with a lock held that every submit takes, so one peer that is stopped would keep
        # all others waiting. The probe takes no lock, and only who answers it is opened.
        if not self.probe(segment_name):
            raise TransportError(f"nobody answers at {segment_name}")
        if self._protocol != "tcp":
            # A write of nothing is no write to a GPU's copy engine. This call holds the interpreter lock
            # while it opens, but the peer has answered just now.
            if not self._raw.get_first_buffer_address(segment_name):
                raise TransportError(f"no arena can be reached at {segment_name}")
            with self._lock:
                self._open.add(segment_name)
            return
        # A write of nothing opens; get_first_buffer_address would hold the interpreter lock meanwhile.
        batch_id = self.submit(segment_name, Write(0, target_ptr, 0))
        while (state := self.check(batch_id)) is WriteState.RUNNING:
            time.sleep(_OPEN_POLL_S)
        if state is WriteState.FAILED:
            raise TransportError(f"no arena can be reached at {segment_name}")
        with self._lock:
            self._open.add(segment_name)

    def submit(self, segment_name: str, write: Write) -> int:
        """Begin a write and return its id. Waits for the peer if its segment is not open.

        Raises:
            TransportError: nothing began.
        """
        batch_id = int(
            self._raw.transfer_submit_write(
                segment_name, write.source_address, write.target_ptr, write.size_bytes
            )
        )
        if batch_id in _NO_BATCH:
            raise TransportError(f"a write to {segment_name} could not begin")
        return batch_id

    def check(self, batch_id: int) -> WriteState:
        """Return how far a write has come. Never ask again about one that is final: its id is reused."""
        status = self._raw.transfer_check_status(batch_id)
        if status == 0:
            return WriteState.RUNNING
        return WriteState.DONE if status == 1 else WriteState.FAILED

    def notify(self, segment_name: str, write: Write, text: str) -> None:
        """Write, and send a text that the peer takes after it. Waits for both.

        Raises:
            TransportError: one of them failed. The write may land all the same, and the text may have come.
        """
        code = self._raw.batch_transfer_sync(
            segment_name,
            [write.source_address],
            [write.target_ptr],
            [write.size_bytes],
            self._module.TransferOpcode.Write,
            self._module.TransferNotify(NOTIFICATION_NAME, text),
        )
        if code != 0:
            raise TransportError(f"a notification to {segment_name} failed (batch_transfer_sync: {code})")

    def close(self, *, is_deleted: bool = False) -> None:
        """Take all registrations back and retire the engine. Nothing may be under way. Twice is fine.

        Args:
            is_deleted: delete it now in place of keeping it for a while, and with it what it has mapped of
                peers. Over nvlink_intra that takes some tenths of a second, most of it without the lock.

        Raises:
            TransportError: a registration could not be taken back; the engine is gone all the same.
        """
        raw, self._raw = self._raw, _CLOSED
        if raw is _CLOSED:
            return
        with self._lock:
            addresses = list(self._registered)
            self._registered.clear()
            self._open.clear()
        refused = {address: code for address in addresses if (code := raw.unregister_memory(address)) != 0}
        if self._name_holder is not None:
            self._name_holder.close()
        if not is_deleted:
            _retire(raw)
        del raw  # Here, and not when the error below has been handled somewhere.
        if refused:
            where = ", ".join(f"{address:#x} ({code})" for address, code in refused.items())
            raise TransportError(f"Mooncake cannot unregister {where}")


class _Closed:
    """What stands for a closed engine."""

    def __getattr__(self, name: str) -> Any:
        raise TransportError(f"the engine is closed ({name})")


_CLOSED: Final = _Closed()


def _retire(raw: object) -> None:
    with _retired_lock:
        _retired.append(raw)
        doomed = _retired.popleft() if len(_retired) > RETIRED_MAX else None
    # Here the oldest is deleted, and everything in this process waits 0.9 s for it.
    del doomed


def _leave_to_parent() -> None:
    """Close the parent's engines in a forked child, and keep them from ever being deleted in it."""
    inherited = list(_retired)
    _retired.clear()
    for engine in list(_started):
        inherited.append(engine._raw)
        engine._raw = _CLOSED
    for raw in inherited:
        # One reference that nobody gives back.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))


os.register_at_fork(after_in_child=_leave_to_parent)


@contextlib.contextmanager
def _protocol_in_environment(protocol: str) -> Iterator[None]:
    """Ask for the protocol where the engine looks for it.

    tcp is forced only meanwhile: an engine that the host process makes for itself must not become tcp.
    """
    with _environment_lock:
        is_forced_here = protocol == "tcp" and _FORCE_TCP not in os.environ
        if is_forced_here:
            # Else it would take RDMA wherever it finds a device.
            os.environ[_FORCE_TCP] = "1"
        elif protocol == "nvlink_intra":
            os.environ["MC_INTRANODE_NVLINK"] = "1"
        try:
            yield
        finally:
            if is_forced_here:
                del os.environ[_FORCE_TCP]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _check_rdma(devices: str) -> None:
    try:
        present = sorted(path.name for path in _INFINIBAND.iterdir())
    except OSError:
        present = []
    if not present:
        raise TransportError(
            f"protocol rdma: this machine has no RDMA device ({_INFINIBAND} is empty); load its driver, or "
            "use tcp"
        )
    wanted = [name.strip() for name in devices.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in present]:
        raise TransportError(
            f"devices: {', '.join(unknown)} not found; this machine has {', '.join(present)}"
        )


def _family() -> socket.AddressFamily:
    return socket.AF_INET6 if "MC_USE_IPV6" in os.environ else socket.AF_INET


def _check_host(host: str) -> None:
    family = _family()
    kind = "IPv6" if family is socket.AF_INET6 else "IPv4"
    try:
        socket.getaddrinfo(host.strip("[]"), None, family)
    except (OSError, UnicodeError) as error:
        raise TransportError(
            f"host {host!r} does not resolve to an {kind} address ({error}): set a name or address of this "
            "machine that the peers can reach (IPv6 only with MC_USE_IPV6)"
        ) from None


def _check_ports() -> None:
    """Refuse a range of ports in which the engine would find none: it would die with a segmentation fault.

    Another process can still take the last one before the engine does.
    """
    first, last = _port_range()
    wanted = ceil_div((last - first + 1) * _FREE_PORTS_PERCENT, 100)
    free = 0
    for port in range(first, last + 1):
        free += _is_free(port)
        if free >= wanted:
            return
    raise TransportError(
        f"{free} of the ports {first} to {last} are free, and Mooncake wants {wanted} at least: widen "
        "MC_MIN_RPC_PORT to MC_MAX_RPC_PORT, or end what holds them"
    )


def _port_range() -> tuple[int, int]:
    names = ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT")
    values = [
        os.environ.get(name) or str(default) for name, default in zip(names, _PORTS_DEFAULT, strict=True)
    ]
    first, last = (int(value) if value.isascii() and value.isdigit() else -1 for value in values)
    if not 0 < first <= last <= _PORT_MAX:
        raise TransportError(f"{names[0]} to {names[1]}: {values[0]!r} to {values[1]!r} is no range of ports")
    return first, last


def _is_free(port: int) -> bool:
    with socket.socket(_family()) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError:
            return False
    return True

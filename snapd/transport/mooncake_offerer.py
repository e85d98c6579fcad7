"""Mooncake on the daemon's side: one engine with which every arena is registered, once.

Source: design, sections 4 and 7.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Final

import structlog

from snapd.cuda import CudaError
from snapd.errors import ExtraMissing, StartupError, TransportError
from snapd.mooncakeconfig import PEER_HANDSHAKE, MooncakeConfig
from snapd.transport.base import ArenaMemory
from snapd.transport.loopback import is_loopback, listening_inside_only
from snapd.transport.mooncake_engine import MooncakeEngine
from snapd.units import format_bytes

_log: Final = structlog.get_logger("snapd.mooncake")
_ADDRESS_TOLD: Final = "MC_TCP_BIND_ADDRESS"
_REGISTER_HELP: Final = {
    "tcp": "set register_piece_bytes to less (4GiB)",
    "rdma": "raise the limit of locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity in the unit), or "
    "set register_piece_bytes to less (4GiB)",
    "nvlink_intra": "use an arena on a GPU, or another protocol",
}


class MooncakeOfferer:
    """Registers arenas with an engine of its own, which takes writes from then on.

    Attributes:
        is_loopback_only: the engine's sockets take no connection from another host.
        registered_pieces: pieces that are registered.
        package: name and version of what is installed.
        settings: Mooncake's variables in effect.

    Args:
        config: how to use Mooncake.
        piece_bytes: arenas are registered in pieces of this size; 0: in one.

    Raises:
        StartupError: Mooncake is not there or cannot run as configured; says what to change.
    """

    name = "mooncake"
    # Its bytes may be under way in the network, in a socket of this process, or on a GPU, whose context a
    # forked child keeps, when the writer is gone.
    is_exit_drain_proof = False

    def __init__(self, config: MooncakeConfig, piece_bytes: int) -> None:
        self._config = config
        self._piece_bytes = piece_bytes
        self._registered: list[tuple[ArenaMemory, int]] = []
        self._is_probed = False
        self.is_loopback_only = is_loopback(config.host)
        if config.metadata_server != PEER_HANDSHAKE:
            # Else peers would be told the address of the first network device.
            os.environ.setdefault(_ADDRESS_TOLD, config.host)
        try:
            with listening_inside_only() if self.is_loopback_only else nullcontext():
                self._engine = MooncakeEngine(config)
        except (TransportError, ExtraMissing) as error:
            raise StartupError(f"transport = mooncake: {error}") from None
        self.package = self._engine.package
        self.settings = self._engine.settings

    @property
    def registered_pieces(self) -> int:
        """Pieces of all arenas that are registered."""
        return len(self._registered)

    def register(self, arena: ArenaMemory) -> int:
        """Map an arena, register it, and return its address: where writers' pointers start.

        Raises:
            StartupError: it cannot be mapped or registered, or nobody can reach the engine; says what to
                change. Nothing of the arena is registered then.
        """
        base = arena.map()
        done: list[tuple[ArenaMemory, int]] = []
        try:
            for offset_bytes, size_bytes in self._pieces(arena.size_bytes):
                self._register_piece(arena, base + offset_bytes, size_bytes, offset_bytes)
                done.append((arena, base + offset_bytes))
            self._probe()
        except StartupError:
            self._unregister(done)
            raise
        self._registered += done
        return base

    def _pieces(self, size_bytes: int) -> Iterator[tuple[int, int]]:
        piece_bytes = self._piece_bytes or size_bytes
        if self._config.protocol == "nvlink_intra":
            # A piece is shared by an IPC handle, which always opens the whole allocation.
            piece_bytes = size_bytes
        for offset_bytes in range(0, size_bytes, piece_bytes):
            yield offset_bytes, min(piece_bytes, size_bytes - offset_bytes)

    def _register_piece(self, arena: ArenaMemory, address: int, size_bytes: int, offset_bytes: int) -> None:
        try:
            # On a GPU Mooncake looks at the memory from the device that is current in this thread.
            with arena.current():
                self._engine.register(address, size_bytes)
        except (TransportError, CudaError) as error:
            raise StartupError(
                f"arena {arena.rank}: the piece of {format_bytes(size_bytes)} at {format_bytes(offset_bytes)}"
                f" of {format_bytes(arena.size_bytes)} cannot be registered with Mooncake ({error}): "
                f"{_REGISTER_HELP[self._config.protocol]}; 'snapd doctor' looks at the machine"
            ) from None

    def _probe(self) -> None:
        """Look, once, whether peers can reach the engine under the name that they are told."""
        if self._is_probed:
            return
        if not self._engine.probe(self.address()):
            raise StartupError(
                f"mooncake.host = {self._config.host!r}: this daemon's engine does not answer at "
                f"{self.address()}: set mooncake.host to a name or address of this host that peers can "
                "connect to"
            )
        self._is_probed = True

    def address(self) -> str:
        """Return the segment name."""
        return self._engine.segment_name

    def take_notifications(self) -> list[str]:
        """Return what writers have sent beside their writes since the last call."""
        return self._engine.take_notifications()

    def close(self) -> None:
        """Take the registrations back and stop the engine. May be called twice."""
        self._unregister(self._registered)
        self._registered = []
        try:
            self._engine.close()
        except TransportError as error:
            _log.warning("the engine was not closed", error=str(error))

    def _unregister(self, pieces: list[tuple[ArenaMemory, int]]) -> None:
        for arena, address in reversed(pieces):
            try:
                with arena.current():
                    self._engine.unregister(address)
            except (TransportError, CudaError) as error:
                # The process ends soon, and with it everything that is registered.
                _log.warning("registration was not taken back", error=str(error))

"""D's Mooncake engines of one process: shared by all writers, and made anew when what one knows is stale.

Source: design, section 7.
"""

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import ClassVar, Final, Self

import msgspec

from snapd.errors import TransportError
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.backoff import Backoff
from snapd.transport.mooncake_calls import CALLS
from snapd.transport.mooncake_engine import MooncakeEngine
from snapd.transport.mooncake_submitter import Current, Submitter
from snapd.units import format_bytes

SEGMENTS_MAX: Final = 1_024


class Opening:
    """A first contact under way, in a thread of its own.

    Attributes:
        is_over: the thread has ended.
        error: why it failed; empty while it runs and when it succeeded.
    """

    def __init__(self, engine: MooncakeEngine, segment_name: str, target_ptr: int, current: Current) -> None:
        self.is_over = False
        self.error = ""
        self._current = current
        self._engine = engine
        self._call = (segment_name, target_ptr)
        # A daemon thread: a peer that is stopped must not keep this process from ending.
        threading.Thread(target=self._run, name=f"snapd-open-{segment_name}", daemon=True).start()

    def _run(self) -> None:
        try:
            with CALLS.under_way(), self._current():
                self._engine.open(*self._call)
        except Exception as error:  # Whatever it was, whoever waits must hear of it.
            self.error = str(error) or type(error).__name__
        finally:
            self.is_over = True


class _Use(msgspec.Struct):
    """A live engine: how many writers use it for which segment, and which it has seen in which epoch."""

    engine: MooncakeEngine
    writers: Counter[str] = msgspec.field(default_factory=Counter)
    epochs: dict[str, str] = msgspec.field(default_factory=dict)
    openings: dict[str, Opening] = msgspec.field(default_factory=dict)


class MooncakeEngines:
    """D's engines of one process: one for all peers, as long as it can be.

    An engine caches a segment for good. When a daemon restarted on the same address, the cached one is
    stale and fails for ever, so a segment name that was used in another epoch gets a fresh engine, where
    all sources are registered again. The old one is closed once no writer uses it. Any thread may call.

    Over nvlink_intra an engine keeps the arenas that it wrote to mapped, and so their memory taken, also when
    their daemon is gone. There it is for one daemon only, and is deleted with the last writer to it: a writer
    to another one would keep all of them mapped.

    Attributes:
        backoff: of the peers, shared by all writers.
        current: makes what a thread of one's own needs current.
        submitter: begins writes, where beginning one may wait; None: nothing waits.

    Args:
        config: how to use Mooncake.
        make: makes an engine.
        backoff: of the peers.
        current: the sources are on a GPU, and this makes it the calling thread's; None: they are on the host.
    """

    _shared: ClassVar[dict[tuple[int, bytes], "MooncakeEngines"]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        config: MooncakeConfig,
        *,
        make: Callable[[MooncakeConfig], MooncakeEngine] = MooncakeEngine,
        backoff: Backoff | None = None,
        current: Current | None = None,
    ) -> None:
        self.backoff = Backoff() if backoff is None else backoff
        self.current: Current = contextlib.nullcontext if current is None else current
        self.submitter = None if current is None else Submitter(current)
        self._config = config
        self._make = make
        self._maps_arenas = config.protocol == "nvlink_intra"
        self._segments_max = 1 if self._maps_arenas else SEGMENTS_MAX
        self._current: _Use | None = None
        self._uses: list[_Use] = []
        self._sources: dict[tuple[int, int], int] = {}
        self._closing: list[Callable[[], bool]] = []
        self._lock = threading.RLock()

    @classmethod
    def shared(cls, config: MooncakeConfig) -> Self:
        """Return this process's engines for a configuration; made on the first call.

        After a fork the child gets its own: an engine's threads stay in the parent.
        """
        key = (os.getpid(), msgspec.json.encode(config, order="deterministic"))
        with cls._shared_lock:
            found = cls._shared.get(key)
            if found is None:
                found = cls._shared[key] = cls(config)
        assert isinstance(found, cls)
        return found

    def acquire(self, segment_name: str, epoch: str) -> MooncakeEngine:
        """Return the engine for a peer in one life of its daemon. Give it back with ``release``.

        Raises:
            ExtraMissing, TransportError: there is none yet and it cannot be made.
        """
        self.settle()
        with self._lock:
            use = self._suiting(segment_name, epoch) or self._fresh()
            use.epochs[segment_name] = epoch
            use.writers[segment_name] += 1
            return use.engine

    def release(self, engine: MooncakeEngine, segment_name: str) -> None:
        """Say that a writer to a segment uses the engine no more."""
        with self._lock:
            use = self._use(engine)
            use.writers[segment_name] -= 1
            if not use.writers[segment_name]:
                del use.writers[segment_name]
                if self._maps_arenas and use is self._current:
                    self._current = None
            self._drop_if_idle(use)

    def register_source(self, address: int, size_bytes: int) -> None:
        """Register memory with every engine. The same range again is counted.

        Raises:
            ExtraMissing, TransportError: it cannot be registered; no engine keeps it.
        """
        self.settle()
        with self._lock:
            if self._sources.get((address, size_bytes), 0) == 0:
                if not self._uses:
                    self._fresh()
                done: list[_Use] = []
                try:
                    for use in self._uses:
                        use.engine.register(address, size_bytes)
                        done.append(use)
                except TransportError:
                    for use in done:
                        use.engine.unregister(address)
                    raise
            self._sources[address, size_bytes] = self._sources.get((address, size_bytes), 0) + 1

    def unregister_source(self, address: int, size_bytes: int) -> None:
        """Take back one ``register_source``; the last one takes the registration back.

        Raises:
            TransportError: an engine refused, or the range is not registered.
        """
        with self._lock:
            count = self._sources.pop((address, size_bytes), 0)
            if count == 0:
                raise TransportError(f"{format_bytes(size_bytes)} at {address:#x} are not registered")
            if count > 1:
                self._sources[address, size_bytes] = count - 1
                return
            for use in self._uses:
                use.engine.unregister(address)

    def covers(self, address: int, size_bytes: int) -> bool:
        """Return whether all these bytes lie in one registered source."""
        end = address + size_bytes
        with self._lock:
            return any(start <= address and end <= start + length for start, length in self._sources)

    def open_soon(self, engine: MooncakeEngine, segment_name: str, target_ptr: int) -> Opening:
        """Return the first contact with a peer that is under way, or begin it. Does not wait."""
        with self._lock:
            openings = self._use(engine).openings
            opening = openings.get(segment_name)
            if opening is None or opening.is_over:
                opening = openings[segment_name] = Opening(engine, segment_name, target_ptr, self.current)
            return opening

    def keep(self, settle: Callable[[], bool]) -> None:
        """Look after a closed writer with writes under way: call *settle* now and then until it is True."""
        with self._lock:
            self._closing.append(settle)

    def settle(self) -> None:
        """Let closed writers whose writes are final by now let go of their sources."""
        with self._lock:
            closing, self._closing = self._closing, []
        still = [settle for settle in closing if not settle()]
        with self._lock:
            self._closing += still

    def close(self) -> None:
        """Close all engines. Writers that are left can write no more."""
        with self._lock:
            uses, self._uses, self._current = self._uses, [], None
            self._sources.clear()
            self._closing.clear()
        for use in uses:
            use.engine.close()

    def _suiting(self, segment_name: str, epoch: str) -> _Use | None:
        """Return an engine that knows of no other life of the peer, and may know of one peer more."""
        # An old one is not to be used for new writers, but where each is for one daemon none is old.
        for use in self._uses if self._maps_arenas else [self._current]:
            if use is None or use.epochs.get(segment_name, epoch) != epoch:
                continue
            if segment_name in use.epochs or len(use.epochs) < self._segments_max:
                return use
        return None

    def _fresh(self) -> _Use:
        engine = self._make(self._config)
        try:
            for address, size_bytes in self._sources:
                engine.register(address, size_bytes)
        except TransportError:
            engine.close()
            raise
        old, self._current = self._current, _Use(engine)
        self._uses.append(self._current)
        if old is not None:
            self._drop_if_idle(old)
        return self._current

    def _drop_if_idle(self, use: _Use) -> None:
        if use is not self._current and not use.writers:
            self._uses.remove(use)
            if self._maps_arenas:
                self._delete_soon(use.engine)
            else:
                use.engine.close()

    def _delete_soon(self, engine: MooncakeEngine) -> None:
        """Delete an engine in a thread of its own, as it takes long; if that cannot be, close it."""
        try:
            # Not in the thread: it would let go of the engine, and so delete it, when the process is ending.
            CALLS.begin()
        except TransportError:
            engine.close()
            return
        try:
            threading.Thread(target=self._delete, args=(engine,), name="snapd-delete", daemon=True).start()
        except RuntimeError:  # The process ends, or has too many.
            CALLS.end()
            engine.close()

    def _delete(self, engine: MooncakeEngine) -> None:
        try:
            with contextlib.suppress(TransportError), self.current():
                engine.close(is_deleted=True)
        finally:
            CALLS.end()

    def _use(self, engine: MooncakeEngine) -> _Use:
        for use in self._uses:
            if use.engine is engine:
                return use
        raise TransportError("the engines are closed")

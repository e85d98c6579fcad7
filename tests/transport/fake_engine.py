"""An engine that does what a test says; its ids are reused at once, as Mooncake's are."""

import threading

from snapd.errors import TransportError
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import Write
from snapd.transport.mooncake_engine import MooncakeEngine, WriteState


class FakeEngine(MooncakeEngine):
    """A ``MooncakeEngine`` without Mooncake."""

    def __init__(self, config: MooncakeConfig | None = None) -> None:
        self.config = config or MooncakeConfig()
        self.registered: dict[int, int] = {}
        self.refuses: set[int] = set()
        self.opened: list[tuple[str, int]] = []
        self.may_open = threading.Event()
        self.may_open.set()
        self.open_error: Exception | None = None
        self.takes_writes = True
        self.flying: dict[int, Write] = {}
        self.states: dict[int, WriteState] = {}
        self.begun: list[Write] = []
        self.may_notify = threading.Event()
        self.may_notify.set()
        self.notify_error: Exception | None = None
        self.notified: list[tuple[str, Write, str]] = []
        self.is_closed = False
        self.is_deleted = threading.Event()
        self._open: set[str] = set()

    def register(self, address: int, size_bytes: int) -> None:
        if address in self.refuses:
            raise TransportError("register_memory: -7")
        assert address not in self.registered
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        if self.registered.pop(address, None) is None:
            raise TransportError("unregister_memory: -3")

    def probe(self, segment_name: str) -> bool:
        raise NotImplementedError

    def open(self, segment_name: str, target_ptr: int) -> None:
        self.opened.append((segment_name, target_ptr))
        assert self.may_open.wait(20)
        if self.open_error is not None:
            raise self.open_error
        self._open.add(segment_name)

    def submit(self, segment_name: str, write: Write) -> int:
        assert segment_name in self._open, "it would wait"
        if not self.takes_writes:
            raise TransportError("a write could not begin")
        batch_id = next(number for number in range(1, 10_000) if number not in self.flying)
        self.flying[batch_id] = write
        self.states[batch_id] = WriteState.RUNNING
        self.begun.append(write)
        return batch_id

    def check(self, batch_id: int) -> WriteState:
        assert batch_id in self.flying, "it was final"
        if self.states[batch_id] is not WriteState.RUNNING:
            del self.flying[batch_id]
        return self.states[batch_id]

    def notify(self, segment_name: str, write: Write, text: str) -> None:
        assert segment_name in self._open
        assert self.may_notify.wait(20)
        if self.notify_error is not None:
            raise self.notify_error
        self.notified.append((segment_name, write, text))

    def close(self, *, is_deleted: bool = False) -> None:
        assert not self.is_closed
        self.is_closed = True
        if is_deleted:
            self.is_deleted.set()

    def end(self, state: WriteState = WriteState.DONE, count: int = 1 << 30) -> None:
        """Let the first *count* writes that are under way end."""
        running = [batch_id for batch_id in self.flying if self.states[batch_id] is WriteState.RUNNING]
        for batch_id in running[:count]:
            self.states[batch_id] = state

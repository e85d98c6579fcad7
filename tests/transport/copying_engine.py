"""An engine that any thread may write with: it copies at once, unless the test has planned another ending."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Literal

from snapd.errors import TransportError
from snapd.transport.base import Write
from snapd.transport.mooncake_engine import WriteState
from tests.transport.fake_engine import FakeEngine

# lands: copied and done. fails: begun, and failed. refused: it did not begin. unknown: nobody knows whether
# it has. stuck: under way until ``unstick``.
Ending = Literal["lands", "fails", "refused", "unknown", "stuck"]


class CopyingEngine(FakeEngine):
    """A ``FakeEngine`` that plans.

    Attributes:
        plan: how the next writes end, in the order in which they begin; those after them land.
        most_flying_bytes: the most that was under way at a time.
    """

    def __init__(self, put: Callable[[Write], None] = lambda _: None) -> None:
        super().__init__()
        self.plan: deque[Ending] = deque()
        self.most_flying_bytes = 0
        self._put = put
        self._stuck: dict[int, Write] = {}
        self._lock = threading.Lock()

    def submit(self, segment_name: str, write: Write) -> int:
        with self._lock:
            ending = self.plan.popleft() if self.plan else "lands"
            if ending == "refused":
                raise TransportError("a write could not begin")
            batch_id = super().submit(segment_name, write)
            self.most_flying_bytes = max(
                self.most_flying_bytes, sum(flying.size_bytes for flying in self.flying.values())
            )
            if ending == "unknown":
                del self.flying[batch_id]
                raise RuntimeError("CUDA error")
            if ending == "stuck":
                self._stuck[batch_id] = write
            else:
                self._finish(batch_id, write, ending)
            return batch_id

    def _finish(self, batch_id: int, write: Write, ending: Ending) -> None:
        if ending == "lands":
            self._put(write)
        self.states[batch_id] = WriteState.DONE if ending == "lands" else WriteState.FAILED

    def check(self, batch_id: int) -> WriteState:
        with self._lock:
            return super().check(batch_id)

    @property
    def stuck(self) -> list[Write]:
        """What is stuck, in the order in which it began."""
        with self._lock:
            return list(self._stuck.values())

    def unstick(self, ending: Ending = "lands", count: int = 1_000) -> None:
        """Let the first *count* writes that are stuck end."""
        with self._lock:
            for batch_id in list(self._stuck)[:count]:
                self._finish(batch_id, self._stuck.pop(batch_id), ending)

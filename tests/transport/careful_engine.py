"""An engine that is strict about how it is used."""

import threading

from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import Write
from snapd.transport.mooncake_engine import MooncakeEngine, WriteState


class CarefulEngine(MooncakeEngine):
    """Knows what is under way, and wants no id asked again that is final."""

    def __init__(self, config: MooncakeConfig) -> None:
        super().__init__(config)
        self.flying: dict[int, int] = {}
        self.flying_bytes_seen_max = 0
        self._flying_lock = threading.Lock()  # Another thread may submit.

    def submit(self, segment_name: str, write: Write) -> int:
        batch_id = super().submit(segment_name, write)
        with self._flying_lock:
            assert batch_id not in self.flying
            self.flying[batch_id] = write.size_bytes
            self.flying_bytes_seen_max = max(self.flying_bytes_seen_max, sum(self.flying.values()))
        return batch_id

    def check(self, batch_id: int) -> WriteState:
        with self._flying_lock:
            assert batch_id in self.flying, "it was final"
            state = super().check(batch_id)
            if state is not WriteState.RUNNING:
                del self.flying[batch_id]
        return state

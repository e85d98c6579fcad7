"""How long a peer rests that failed: 100 ms, doubling to 30 s, until the first success.

Pure: the clock is handed in. A peer is never given up for good. At most ``peers_max`` of them are
remembered; the one that failed least recently is forgotten first, which only means that it is tried.

Source: design, section 7.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

import msgspec

from snapd.errors import PeerResting
from snapd.units import MS_PER_S, ceil_div

REST_MIN_MS: Final = 100
REST_MAX_MS: Final = 30_000
PEERS_MAX: Final = 1_024


class _Failures(msgspec.Struct):
    count: int = 0
    rest_ms: int = 0
    until_us: int = 0
    round: int = 0


class Backoff:
    """Peers that failed, and until when they rest.

    What was under way when a peer failed fails with it, and must not lengthen the rest: every try names
    the *round* in which it began, and only the first failure of a round counts. Any thread may call.

    Args:
        rest_min_ms: the first rest.
        rest_max_ms: the longest one.
        peers_max: how many peers are remembered.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        rest_min_ms: int = REST_MIN_MS,
        rest_max_ms: int = REST_MAX_MS,
        peers_max: int = PEERS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert 0 < rest_min_ms <= rest_max_ms, "a rest that grows"
        assert peers_max >= 1
        self._rest_min_ms = rest_min_ms
        self._rest_max_ms = rest_max_ms
        self._peers_max = peers_max
        self._clock = clock
        self._peers: OrderedDict[Hashable, _Failures] = OrderedDict()
        self._last_round = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many peers are remembered."""
        return len(self._peers)

    def begin(self, peer: Hashable) -> int:
        """Return the round of a try that begins now, for ``failed``.

        Raises:
            PeerResting: the peer rests; says for how long.
        """
        with self._lock:
            found = self._peers.get(peer)
            if found is None:
                return 0
            left_ms = ceil_div(found.until_us - self._now_us(), 1_000)
            if left_ms > 0:
                times = "once" if found.count == 1 else f"{found.count} times in a row"
                raise PeerResting(f"the peer failed {times} and is tried again in {left_ms} ms", left_ms)
            return found.round

    def failed(self, peer: Hashable, begun_in_round: int, *, may_retry_once: bool = False) -> None:
        """Note a failure.

        Args:
            peer: which failed.
            begun_in_round: what ``begin`` returned for this try.
            may_retry_once: the first failure in a row does not make the peer rest, the second does. For a
                write on a peer that answered before, so that a piece can be tried again within its push.
        """
        with self._lock:
            found = self._peers.get(peer)
            if found is None:
                found = self._peers[peer] = _Failures()
                if len(self._peers) > self._peers_max:
                    self._peers.popitem(last=False)
            elif begun_in_round != found.round:
                return
            self._peers.move_to_end(peer)
            self._last_round += 1
            found.round = self._last_round
            found.count += 1
            if may_retry_once and found.count == 1:
                return
            found.rest_ms = min(2 * found.rest_ms or self._rest_min_ms, self._rest_max_ms)
            found.until_us = self._now_us() + found.rest_ms * 1_000

    def succeeded(self, peer: Hashable) -> None:
        """Note a success: the peer has no past."""
        with self._lock:
            self._peers.pop(peer, None)

    def _now_us(self) -> int:
        return round(self._clock() * MS_PER_S * 1_000)

"""D in a process of its own: one Pusher for all that it is told to push; it says how its writes go."""

import sys
from collections.abc import Sequence

import msgspec
from kv_cases import PATIENCE_S, make_pool, random_slots
from late_cases import WIDE
from restart_cases import IN_FLIGHT_BYTES_MAX, NUM_SLOTS, PIECE_BYTES, RING_BYTES, Asked, Told

from snapd.client import Client
from snapd.kv.push import Pusher, PushSettings
from snapd.kv.writers import mooncake_writers
from snapd.layout import Namespace
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import ArenaWriter, Progress, TicketState, Write
from snapd.wire import HelloRep


def say(told: Told) -> None:
    print(msgspec.json.encode(told).decode(), flush=True)


class Hold:
    """Stands still once, behind so many writes."""

    def __init__(self) -> None:
        self.left = 0

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            say(Told(event="held"))
            sys.stdin.readline()


class ToldWriter:
    """A writer that says which writes failed, and holds."""

    def __init__(self, writer: ArenaWriter, hold: Hold) -> None:
        self._writer = writer
        self._hold = hold

    def register_source(self, address: int, size_bytes: int) -> None:
        self._writer.register_source(address, size_bytes)

    def submit(self, writes: Sequence[Write]) -> int:
        ticket = self._writer.submit(writes)
        if writes:
            self._hold.count()
        return ticket

    def poll(self, ticket: int) -> Progress:
        progress = self._writer.poll(ticket)
        if progress.state is TicketState.FAILED:
            say(Told(event="write-failed", is_drained=progress.is_drained, detail=progress.detail))
        return progress

    def cancel(self, ticket: int) -> None:
        self._writer.cancel(ticket)

    def close(self) -> None:
        self._writer.close()


def main(socket_path: str, tenant: str, retries_max: int) -> None:
    hold = Hold()
    make = mooncake_writers(MooncakeConfig(), IN_FLIGHT_BYTES_MAX)

    def writer_for(hello: HelloRep, rank: int, epoch: str) -> ArenaWriter:
        return ToldWriter(make(hello, rank, epoch), hold)

    with Client(socket_path, timeout_s=PATIENCE_S) as client:
        pusher = Pusher(
            client,
            {0: make_pool(WIDE, NUM_SLOTS, seed=1)},
            Namespace(tenant=tenant),
            settings=PushSettings(
                piece_bytes=PIECE_BYTES,
                ring_bytes=RING_BYTES,
                in_flight_bytes_max=IN_FLIGHT_BYTES_MAX,
                retries_max=retries_max,
            ),
            writer_for=writer_for,
        )
        say(Told(event="begun"))
        for line in sys.stdin:
            asked = msgspec.json.decode(line, type=Asked)
            tokens = range(asked.num_tokens)
            slots = random_slots(WIDE, NUM_SLOTS, asked.num_tokens, asked.seed)
            hold.left = asked.hold_after
            result = pusher.push(asked.session_id, tokens, slots, renew=asked.renew)
            say(Told(event="result", result=result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

"""Ds in processes of their own: one Pusher each for all that it is told; it says how its writes go."""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec
from kv_cases import PATIENCE_S, make_pool, random_slots
from late_cases import WIDE, end_with_the_tests
from restart_cases import (
    IN_FLIGHT_BYTES_MAX,
    NUM_SLOTS,
    PIECE_BYTES,
    RING_BYTES,
    Asked,
    AskedFor,
    Told,
    enter_network,
)

from snapd.client import Client
from snapd.kv.push import Pusher, PushSettings
from snapd.kv.writers import mooncake_writers
from snapd.layout import Namespace
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import ArenaWriter, Progress, TicketState, Write
from snapd.wire import HelloRep


class Line:
    """What the tests and one D say to each other.

    Attributes:
        lines: what is said to it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.lines = sock.makefile("r")
        self._sock = sock

    def say(self, told: Told) -> None:
        self._sock.sendall(msgspec.json.encode(told) + b"\n")


class Hold:
    """Stands still once, behind so many writes."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.left = 0

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.line.say(Told(event="held"))
            self.line.lines.readline()


class ToldWriter:
    """A writer that says which writes failed, and holds."""

    def __init__(self, writer: ArenaWriter, hold: Hold) -> None:
        self._writer = writer
        self._hold = hold
        self._writes: dict[int, Write] = {}

    def register_source(self, address: int, size_bytes: int) -> None:
        self._writer.register_source(address, size_bytes)

    def submit(self, writes: Sequence[Write]) -> int:
        ticket = self._writer.submit(writes)
        if writes:
            (self._writes[ticket],) = writes
            self._hold.count()
        return ticket

    def poll(self, ticket: int) -> Progress:
        progress = self._writer.poll(ticket)
        if progress.state is TicketState.FAILED:
            write = self._writes[ticket]
            self._hold.line.say(
                Told(
                    event="write-failed",
                    is_drained=progress.is_drained,
                    target_ptr=write.target_ptr,
                    size_bytes=write.size_bytes,
                )
            )
        return progress

    def cancel(self, ticket: int) -> None:
        self._writer.cancel(ticket)

    def close(self) -> None:
        self._writer.close()


def decode(line: Line, asked_for: AskedFor) -> None:
    """Be a D until nobody listens."""
    if asked_for.network:
        with Path(asked_for.network).open("rb") as network:
            enter_network(network.fileno())
    os.environ.update(asked_for.mooncake)
    hold = Hold(line)
    make = mooncake_writers(MooncakeConfig(), IN_FLIGHT_BYTES_MAX)

    def writer_for(hello: HelloRep, rank: int, epoch: str) -> ArenaWriter:
        return ToldWriter(make(hello, rank, epoch), hold)

    with Client(asked_for.socket_path, timeout_s=PATIENCE_S) as client:
        pusher = Pusher(
            client,
            {0: make_pool(WIDE, NUM_SLOTS, seed=1)},
            Namespace(tenant=asked_for.tenant),
            settings=PushSettings(
                piece_bytes=PIECE_BYTES,
                ring_bytes=RING_BYTES,
                in_flight_bytes_max=IN_FLIGHT_BYTES_MAX,
                retries_max=asked_for.retries_max,
            ),
            writer_for=writer_for,
        )
        line.say(Told(event="begun", pid=os.getpid()))
        for text in line.lines:
            asked = msgspec.json.decode(text, type=Asked)
            slots = random_slots(WIDE, NUM_SLOTS, asked.num_tokens, asked.seed)
            hold.left = asked.hold_after
            result = pusher.push(asked.session_id, range(asked.num_tokens), slots, renew=asked.renew)
            line.say(Told(event="result", result=result))


def main(path: str) -> None:
    """Listen, and fork a D for every connection: what takes long, importing torch, is done once."""
    # Nobody waits for them: how they end is seen at their connections.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            sock, _ = listener.accept()
            if os.fork() == 0:
                break
            sock.close()
    end_with_the_tests()
    line = Line(sock)
    try:
        decode(line, msgspec.json.decode(line.lines.readline(), type=AskedFor))
    except Exception:
        traceback.print_exc()
    finally:
        # Else an engine would be deleted, which takes a second.
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

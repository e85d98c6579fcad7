"""A daemon that comes back on the same address; run in a network of its own, where ports can be had again.

Prints one JSON line: how a write ended with the engine that knew the old life, and with what
``MooncakeEngines`` gives for the new one.
"""

import fcntl
import json
import mmap
import os
import socket
import struct
from pathlib import Path

from target import SIZE_BYTES, Target, address_of, wait_for

from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import TicketState, Write
from snapd.transport.mooncake_engines import MooncakeEngines
from snapd.transport.mooncake_writer import MooncakeWriter

_SIOCSIFFLAGS = 0x8914
_UP_AND_RUNNING = 0x1 | 0x40
PORTS = range(22_200, 22_203)
TRIES_MAX = 40


def raise_loopback() -> None:
    with socket.socket() as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _UP_AND_RUNNING))
    # Else a port stays taken for a minute after its connections were closed.
    Path("/proc/sys/net/ipv4/tcp_max_tw_buckets").write_text("0")


def start(ports: range) -> Target:
    return Target({"MC_MIN_RPC_PORT": str(ports[0]), "MC_MAX_RPC_PORT": str(ports[-1])})


def data_port(target: Target) -> int:
    """Return the other port on which a target listens."""
    inodes = {
        str(entry.readlink())[len("socket:[") : -1]
        for entry in Path(f"/proc/{target.process.pid}/fd").iterdir()
        if str(entry.readlink()).startswith("socket:[")
    }
    own = int(target.segment_name.rpartition(":")[2])
    listening = "0A"
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == listening and fields[9] in inodes and port != own:
                return port
    raise AssertionError("a target listens on two ports")


def come_back(old: Target, old_data_port: int) -> Target:
    """Start targets until one has the address of *old*; its bytes it has to take elsewhere."""
    with socket.create_server(("", old_data_port)):
        for _ in range(TRIES_MAX):
            target = start(PORTS)
            if target.segment_name == old.segment_name:
                assert data_port(target) != old_data_port
                return target
            target.close()
    raise AssertionError("the address did not come back")


def outcome(writer: MooncakeWriter, write: Write) -> TicketState:
    ticket = writer.submit([write])
    found = []
    wait_for(lambda: found.append(writer.poll(ticket)) or found[-1].is_final)
    return found[-1].state


def main() -> None:
    raise_loopback()
    memory = mmap.mmap(-1, SIZE_BYTES)
    engines = MooncakeEngines(MooncakeConfig())

    def writer_for(target: Target, epoch: str) -> MooncakeWriter:
        writer = MooncakeWriter(engines, target.segment_name, epoch, target.base_ptr, SIZE_BYTES)
        writer.register_source(address_of(memory), SIZE_BYTES)
        return writer

    old = start(PORTS)
    writer = writer_for(old, "first")
    first = outcome(writer, Write(address_of(memory), old.base_ptr, 64))
    port = data_port(old)
    old.kill()
    new = come_back(old, port)
    stale = writer_for(new, "first")
    fresh = writer_for(new, "second")
    told = {
        "first": first.value,
        "old engine": outcome(stale, Write(address_of(memory), new.base_ptr, 64)).value,
        "fresh engine": outcome(fresh, Write(address_of(memory), new.base_ptr, 64)).value,
    }
    new.close()
    print(json.dumps(told), flush=True)
    os._exit(0)  # Deleting the engines would take a second each.


if __name__ == "__main__":
    main()

"""Stands for mooncake.engine: moves bytes between processes, with the fault in FAKE_MOONCAKE."""

import ctypes
import os
import signal
import socket
import struct
import threading
from pathlib import Path

from snapd import cuda

try:
    from cuda_fake import FakeDriver
except ImportError:  # Only where GPUs are faked too.
    FakeDriver = ()

SUPPORTS = os.environ.get("FAKE_MOONCAKE_SUPPORTS", "").split(",")
SUPPORT_CUDA = "CUDA" in SUPPORTS
SUPPORT_INTRA_NVLINK = "INTRA_NVLINK" in SUPPORTS
FAULT = os.environ.get("FAKE_MOONCAKE", "")
HEADER = struct.Struct("<QQ")
SMALL = 4096

if FAULT == "hang at import":
    if mark := os.environ.get("FAKE_MOONCAKE_MARK"):
        Path(mark).touch()
    threading.Event().wait()
if FAULT == "noise":
    os.write(1, b"a native line on stdout\n")
    os.write(2, b"WARNING: a native line on stderr\n")
if FAULT == "import error":
    raise ImportError("undefined symbol: cuMemGone")


def read(sock, size):
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


if FAULT == "odd error":
    raise RuntimeError("nobody thought of this")


def is_current(address):
    """Whether memory is on the host, or on the GPU that is current in this thread."""
    driver = cuda.load_library() if cuda._driver else None
    memory = driver._find(address) if isinstance(driver, FakeDriver) else None
    return memory is None or driver.stack[-1:] == [memory.gpu]


class TransferEngine:
    def __init__(self):
        self.batches = 0
        self.faulty = set()
        self.listener = None

    def initialize(self, host, metadata, protocol, devices):
        if FAULT == "hang at start":
            threading.Event().wait()
        if FAULT == "no start":
            return -1
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.serve, daemon=True).start()
        return 0

    def get_rpc_port(self):
        return self.listener.getsockname()[1]

    def serve(self):
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self.receive, args=(connection,), daemon=True).start()

    def receive(self, connection):
        with connection:
            try:
                address, size = HEADER.unpack(read(connection, HEADER.size))
                data = read(connection, size)
            except EOFError:
                return
            if size > SMALL and FAULT == "target dies":
                os.kill(os.getpid(), signal.SIGSEGV)
            if size > SMALL and FAULT == "corrupt":
                data = data[:-1] + bytes((data[-1] ^ 1,))
            if not (size > SMALL and FAULT == "nothing lands"):
                ctypes.memmove(address, data, size)
            connection.sendall(b"!")

    def register_memory(self, address, size, location="*"):
        if not is_current(address):
            return -600
        return -7 if FAULT == "no registration" else 0

    def unregister_memory(self, address):
        return 0

    def get_first_buffer_address(self, segment):
        return 1

    def send_probe(self, segment):
        return 0

    def get_notifies(self):
        return []

    def transfer_submit_write(self, segment, source, target, size):
        self.batches += 1
        if not is_current(source):
            return 0
        if size > SMALL and FAULT == "writer dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if size > SMALL and FAULT in ("never ends", "write fails"):
            self.faulty.add(self.batches)
            return self.batches
        host, _, port = segment.rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(HEADER.pack(target, size) + ctypes.string_at(source, size))
            connection.recv(1)
        return self.batches

    def transfer_check_status(self, batch):
        if batch not in self.faulty:
            return 1
        return 0 if FAULT == "never ends" else -1

"""What the control plane's round trip is held against: two servers that do nothing but answer.

Both answer every prepare with the same grant: one as the daemon's protocol does, with uvloop and msgspec,
the other as engines talk inside themselves, with pyzmq REQ/REP and pickle.
"""

import asyncio
import pickle
from pathlib import Path
from typing import Final

import msgspec
import uvloop
import zmq

from snapd import wire as w

BARE: Final = "import sys; from tools.control_floors import serve_bare; serve_bare(*sys.argv[1:])"
ZMQ: Final = "import sys; from tools.control_floors import serve_zmq; serve_zmq(*sys.argv[1:])"
_ANSWER_MS: Final = 10_000


def _grant(path: str) -> w.SnapshotPrepareReceiveReqOutput:
    return msgspec.msgpack.decode(Path(path).read_bytes(), type=w.SnapshotPrepareReceiveReqOutput)


def serve_bare(socket_path: str, grant_path: str) -> None:
    """Answer frames until killed."""
    grant = _grant(grant_path)

    class Answers(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport
            self.splitter = w.FrameSplitter(1 << 22)

        def data_received(self, data: bytes) -> None:
            for payload in self.splitter.feed(data):
                request = w.decode_request(payload)
                is_prepare = isinstance(request, w.SnapshotPrepareReceiveReqInput)
                reply = grant if is_prepare else w.PingRep(id=request.id, epoch="")
                self.transport.write(w.encode_frame(reply))  # type: ignore[attr-defined]

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_unix_server(Answers, socket_path)
        await server.serve_forever()

    uvloop.run(serve())


def serve_zmq(endpoint: str, grant_path: str) -> None:
    """Answer pickles until killed."""
    grant = _grant(grant_path)
    socket = zmq.Context().socket(zmq.REP)
    socket.bind(endpoint)
    while True:
        request = pickle.loads(socket.recv())
        is_prepare = isinstance(request, w.SnapshotPrepareReceiveReqInput)
        socket.send(pickle.dumps(grant if is_prepare else w.PingRep(id=request.id, epoch=""), protocol=5))


class ZmqClient:
    """Asks with pickles."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.RCVTIMEO, _ANSWER_MS)
        self._socket.connect(endpoint)

    def ask(self, request: w.Request) -> object:
        """Ask, and return what came."""
        self._socket.send(pickle.dumps(request, protocol=5))
        return pickle.loads(self._socket.recv())

    def close(self) -> None:
        """Hang up."""
        self._socket.close(0)
        self._context.term()

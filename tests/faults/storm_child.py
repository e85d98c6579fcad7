"""D and P in processes of their own, to be killed: forked from one that has imported torch already."""

import contextlib
import itertools
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator

import msgspec
from kv_cases import Tree, make_pool, random_slots
from late_cases import WIDE, end_with_the_tests

from snapd.client import Client
from snapd.errors import Reason, SnapdError
from snapd.kv.ingest import Ingester
from snapd.kv.push import Pusher, PushSettings
from snapd.layout import Namespace
from snapd.units import KIB
from snapd.wire import SnapshotFinalizeIngestReqInput

NUM_SLOTS = 256
PIECE_BYTES = 64 * KIB
ANSWER_S = 30.0
_AGAIN_S = 0.02
# How often a P that has nothing to do asks whether the daemon is another one by now: until it has, its
# layout is not declared there, and no D gets a slab for it.
_PING_S = 0.05


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is to be.

    Attributes:
        is_prefill: a P; else a D.
        tenant: of the namespace of its lane.
        seed: of the bytes in D's pool.
        mooncake: Mooncake's variables.
    """

    is_prefill: bool
    socket_path: str
    tenant: str
    seed: int
    mooncake: dict[str, str]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that D pushes or P ingests: tokens ``[0, num_tokens)`` of a session.

    Attributes:
        slots_seed: where they are in D's pool; the same for all turns of a session.
        slab_handle: of the attempt that P ingests.
        is_last: P throws the session out afterwards.
    """

    session_id: str
    num_tokens: int
    slots_seed: int
    slab_handle: int = 0
    is_last: bool = False


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says when it has begun, and of each turn.

    Attributes:
        pid: of the worker.
        ok, reason, detail: how the turn went.
        slab_handle: of the attempt.
        wrong_planes: planes in P's tree of which a byte is not D's.
        fault: what P's books say against it.
    """

    pid: int
    ok: bool = True
    reason: str = ""
    detail: str = ""
    slab_handle: int = 0
    retry_after_ms: int = 0
    wrong_planes: int = 0
    fault: str = ""


class Line:
    """What the conductor and one worker say to each other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._heard = b""

    def say(self, **fields: object) -> None:
        told = msgspec.convert({"pid": os.getpid()} | fields, Told)
        self._sock.sendall(msgspec.json.encode(told) + b"\n")

    def role(self) -> Role:
        (line,) = itertools.islice(self._lines(None), 1)
        assert line
        return msgspec.json.decode(line, type=Role)

    def turns(self, pause_s: float | None = None) -> Iterator[Turn | None]:
        """Yield what is asked for; None when nothing was for so long."""
        for line in self._lines(pause_s):
            yield msgspec.json.decode(line, type=Turn) if line else None

    def _lines(self, pause_s: float | None) -> Iterator[bytes]:
        while True:
            while b"\n" in self._heard:
                line, _, self._heard = self._heard.partition(b"\n")
                yield line
            if not select.select([self._sock], [], [], pause_s)[0]:
                yield b""
            elif data := self._sock.recv(1 << 16):
                self._heard += data
            else:
                return


def decode(line: Line, role: Role) -> None:
    """Be a D until nobody listens."""
    with Client(role.socket_path, timeout_s=ANSWER_S) as client:
        settings = PushSettings(
            piece_bytes=PIECE_BYTES, ring_bytes=8 * PIECE_BYTES, in_flight_bytes_max=4 * PIECE_BYTES
        )
        pool = make_pool(WIDE, NUM_SLOTS, role.seed)
        pusher = Pusher(client, {0: pool}, Namespace(tenant=role.tenant), settings=settings)
        line.say()
        for turn in line.turns():
            assert turn is not None
            slots = random_slots(WIDE, NUM_SLOTS, turn.num_tokens, turn.slots_seed)
            result = pusher.push(turn.session_id, range(turn.num_tokens), slots)
            line.say(
                ok=result.ok,
                reason=result.reason,
                detail=result.detail,
                slab_handle=result.slab_handle,
                retry_after_ms=result.retry_after_ms or 0,
            )


def prefill(line: Line, role: Role) -> None:
    """Be a P until nobody listens."""
    truth = make_pool(WIDE, NUM_SLOTS, role.seed)
    with Client(role.socket_path, timeout_s=ANSWER_S) as client:
        pool, tree = make_pool(WIDE, NUM_SLOTS, None), Tree(WIDE, NUM_SLOTS)
        ingester = _ingester(client, pool, tree, Namespace(tenant=role.tenant))
        line.say()
        for turn in line.turns(_PING_S):
            if turn is None:
                with contextlib.suppress(SnapdError):
                    client.ping()
                continue
            request = SnapshotFinalizeIngestReqInput(
                session_id=turn.session_id,
                token_ids=tuple(range(turn.num_tokens)),
                slab_handle=turn.slab_handle,
            )
            answer = ingester.finalize_ingest(request)
            wrong_planes, fault = 0, ""
            for session_id, (tokens, slots) in tree._tree.items():
                seed = int(session_id.rpartition("-")[2])
                theirs = random_slots(WIDE, NUM_SLOTS, len(tokens), seed)
                for own_plane, plane in zip(pool.planes, truth.planes, strict=True):
                    wrong_planes += not own_plane.rows[slots].equal(plane.rows[theirs])
            try:
                tree.check()
            except AssertionError as error:
                fault = str(error)
            if answer.ok and turn.is_last:
                tree.evict(turn.session_id)
            line.say(
                ok=answer.ok,
                reason=answer.reason or Reason.OK,
                slab_handle=turn.slab_handle,
                wrong_planes=wrong_planes,
                fault=fault,
            )


def _ingester(client: Client, pool: object, tree: Tree, namespace: Namespace) -> Ingester:
    """Return an ingester as soon as there is a daemon: it may just have been killed."""
    while True:
        try:
            return Ingester(client, 0, pool, tree, namespace, keep_on_missing_prefix=False)
        except SnapdError:
            threading.Event().wait(_AGAIN_S)


def main(path: str) -> None:
    """Listen, and fork a worker for every connection."""
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
        role = line.role()
        os.environ.update(role.mooncake)
        (prefill if role.is_prefill else decode)(line, role)
    except BrokenPipeError:
        pass
    except Exception:
        traceback.print_exc()
    finally:
        # Else an engine would be deleted, which takes a second.
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

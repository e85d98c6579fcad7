"""What the tests of ``snapd top`` share: D and P in one, answers of a daemon, and names that mean harm."""

from typing import Any

import msgspec

from snapd import calls
from snapd import wire as w
from snapd.client import Client
from snapd.core.events import State
from snapd.core.overview import ArenaMap, AttemptGroup, AttemptLine, Overview, PeerLine
from snapd.core.session import ArenaView, Statistics
from snapd.errors import Reason, RequestError
from snapd.layout import Layout
from snapd.units import MIB, NS_PER_S

LAYOUT = Layout(k_stride_bytes=(256,) * 2, v_stride_bytes=(256,) * 2)
NUM_TOKENS = 256
# Escapes, controls of both kinds, marks that turn the direction, join or stack, wide and very long names.
HOSTILE = (
    "\x1b[2J\x1b[Hgone\x07",
    "\x9b31mred\x85",
    "two\nlines\r\tand\x08tabs",
    "\u202eright to left\u202c \u2066",
    "שלום עולם مرحبا",
    "z\u0351\u0363a\u0310\u0349l\u0353go" * 20,
    "👩\u200d👩\u200d👧\u200d👦🏳\ufe0f\u200d🌈🇩🇪",
    "漢字かな交じり文" * 40,
    "\u1100\u1161\u11a8" * 9,
    "\ufdfd﷽ ﷺ",
    "\ud7b0\u115f\u3164\u2800",
    "x" * 512,
    "[bold red]no markup[/]",
    "\U000e0041\ufeff\u00ad\u200b",
)


class Workers:
    """D and P in one process: drives attempts through the client.

    Args:
        address: of the daemon's socket.
        peer: what D calls itself.
    """

    def __init__(self, address: str, peer: str = "d-7") -> None:
        self.d = Client(address, name=peer, timeout_s=30.0)
        self.p = Client(address, name="p-0", timeout_s=30.0)
        self.ranks = [arena.rank for arena in self.d.connect().arenas]
        for rank in self.ranks:
            self.fingerprint = self.p.declare_layout(rank, LAYOUT)

    def close(self) -> None:
        self.d.close()
        self.p.close()

    def reserved(self, session_id: str, num_tokens: int = NUM_TOKENS) -> int:
        return self.d.prepare_receive(session_id, num_tokens, self.fingerprint).slab_handle

    def transferring(self, session_id: str) -> int:
        handle = self.reserved(session_id)
        self.d.transfer_started(handle)
        return handle

    def ready(self, session_id: str) -> int:
        handle = self.transferring(session_id)
        num_bytes = LAYOUT.token_bytes * NUM_TOKENS
        for rank in self.ranks:
            self.d.commit(handle, rank, num_bytes, NUM_TOKENS, ((1, 2),) * LAYOUT.num_planes)
        return handle

    def leased(self, session_id: str) -> int:
        handle = self.ready(session_id)
        self.p.begin_ingest(handle, self.ranks[0], self.fingerprint)
        return handle

    def ingested(self, session_id: str) -> int:
        handle = self.ready(session_id)
        leases = {r: self.p.begin_ingest(handle, r, self.fingerprint).lease_id for r in self.ranks}
        votes = [self.p.submit(calls.vote(handle, r, lease, True)) for r, lease in leases.items()]
        assert all(vote.wait().commit for vote in votes)
        return handle

    def quarantined(self, session_id: str) -> int:
        handle = self.transferring(session_id)
        self.d.abort(handle)
        return handle

    def refused(self, session_id: str) -> None:
        try:
            self.reserved(session_id, 1_000_000)
        except RequestError as error:
            assert error.reason is Reason.TOO_LARGE
        else:
            raise AssertionError("it fits")

    def one_of_each(self) -> None:
        """Bring an attempt into every state, and one to every kind of end."""
        self.reserved("one-reserved")
        self.transferring("one-transferring")
        self.ready("one-ready")
        self.leased("one-leased")
        self.ingested("one-ingested")
        self.quarantined("one-quarantined")
        self.refused("one-refused")


# --- answers of a daemon that does not exist -----------------------------------------------------

START_NS = 5_000 * NS_PER_S
START_S = 1_700_000_000.0


def attempt_line(number: int = 1, **changes: Any) -> AttemptLine:
    fields: dict[str, Any] = {
        "slab_handle": number,
        "session_id": f"chat-{number}",
        "state": State.READY,
        "is_leased": False,
        "abort_wanted": "",
        "peer": "d-7",
        "num_tokens": 1_000,
        "token_start": 0,
        "bytes": number * MIB,
        "created_ns": START_NS - number * NS_PER_S,
        "state_since_ns": START_NS - number * NS_PER_S // 2,
        "deadline_ns": START_NS + number * NS_PER_S,
        "num_committed": 2,
        "num_ranks": 2,
    }
    return AttemptLine(**(fields | changes))


def arena_map(rank: int = 0, capacity_bytes: int = 64 * MIB) -> ArenaMap:
    cell = capacity_bytes // 64
    return ArenaMap(
        rank=rank,
        cell_bytes=cell,
        writing_bytes=(cell,) * 8 + (0,) * 56,
        ready_bytes=(0,) * 8 + (cell,) * 16 + (0,) * 40,
        leased_bytes=(0,) * 24 + (cell // 4,) * 8 + (0,) * 32,
        quarantined_bytes=(0,) * 32 + (cell // 2,) * 8 + (0,) * 24,
        num_shards=(8, 16, 2, 4),
    )


def arena_view(rank: int = 0, capacity_bytes: int = 64 * MIB) -> ArenaView:
    of_map = arena_map(rank, capacity_bytes)
    live = sum(of_map.writing_bytes) + sum(of_map.ready_bytes) + sum(of_map.leased_bytes)
    kept = sum(of_map.quarantined_bytes)
    free = capacity_bytes - live - kept
    return ArenaView(rank, capacity_bytes, free, live, kept, sum(of_map.ready_bytes), free // 2, 3)


def statistics(**changes: Any) -> Statistics:
    fields: dict[str, Any] = {
        "sessions_by_state": {"RESERVED": 1, "TRANSFERRING": 2, "READY": 3},
        "outcomes_by_reason": {"ok": 80, "evicted": 10, "snapshot-buf-full": 5},
        "attempts": 96,
        "attempts_ok": 80,
        "open_sessions": 6,
        "quarantined_shards": 4,
        "ended_history": 90,
        "session_history": 50,
        "layouts": 1,
        "page_keys": 0,
        "page_keys_held": 0,
        "messages_absorbed": 0,
        "requests_refused": 5,
        "bytes_committed": 900 * MIB,
        "bytes_ingested": 800 * MIB,
        "is_draining": False,
        "arenas": (arena_view(0), arena_view(1)),
    }
    return Statistics(**(fields | changes))


def overview(**changes: Any) -> Overview:
    groups = [(State.RESERVED, False), (State.TRANSFERRING, False), (State.READY, False), (State.READY, True)]
    fields: dict[str, Any] = {
        "surveyed_ns": START_NS,
        "maps": (arena_map(0), arena_map(1)),
        "groups": tuple(
            AttemptGroup(
                state=state,
                is_leased=is_leased,
                count=number + 1,
                bytes=MIB,
                oldest_since_ns=START_NS - NS_PER_S,
                next_deadline_ns=START_NS + NS_PER_S,
            )
            for number, (state, is_leased) in enumerate(groups)
        ),
        "attempts": tuple(attempt_line(number) for number in range(1, 7)),
        "peers": (PeerLine(peer="d-7", open_attempts=6, open_bytes=6 * MIB, ended=90, ok=80, refused=5,
                           bytes_ok=800 * MIB, last_problem="evicted", last_ns=START_NS - NS_PER_S),),
    }  # fmt: skip
    return Overview(**(fields | changes))


def answer(after_s: float = 0.0, **changes: Any) -> w.StatsRep:
    """Return what a daemon that has run for 100 s at first says *after_s* seconds later."""
    fields: dict[str, Any] = {
        "id": 1,
        "version": "9.9.9",
        "epoch": "0123456789abcdef",
        "pid": 4_242,
        "uptime_ms": 100_000 + round(after_s * 1_000),
        "now_ns": START_NS + round(after_s * NS_PER_S),
        "transport": "shm",
        "connections": 3,
        "watchers": 1,
        "requests_waiting": 0,
        "timers": 6,
        "core": statistics(),
        "log": w.LogStatistics(
            path="log", lines_written=1_000, bytes_written=1, queued_lines=0, queued_bytes=0, dropped=0,
            write_errors=0, last_error="", rotations=0,
        ),
        "limits": {},
        "overview": overview(),
    }  # fmt: skip
    return w.StatsRep(**(fields | changes))


def transition(number: int = 1, **changes: Any) -> w.WatchTransition:
    fields: dict[str, Any] = {
        "at_ns": START_NS,
        "session_id": f"chat-{number}",
        "slab_handle": number,
        "from_state": "TRANSFERRING",
        "to_state": "READY",
        "reason": Reason.OK,
        "num_tokens": 100,
        "token_start": 0,
        "bytes": MIB,
        "duration_ms": 12.0,
    }
    return w.WatchTransition(**(fields | changes))


def refusal(**changes: Any) -> w.WatchRefused:
    push = w.WatchRefused(
        at_ns=START_NS, session_id="big", reason=Reason.TOO_LARGE, num_tokens=9, detail="it does not fit"
    )
    return msgspec.structs.replace(push, **changes)

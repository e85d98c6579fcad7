"""What goes wrong on purpose: D processes killed in the middle of a push, an abort, a lease that runs out."""

import asyncio
import contextlib
import random
from typing import Final

import msgspec

from snapd.client import Client
from snapd.demo import messages as m
from snapd.demo.plan import Plan
from snapd.demo.workers import Worker
from snapd.errors import SnapdError

KILLS: Final = 3
ABORTS: Final = 1
STALLS: Final = 1
# Pushes that are ended in the middle.
STRUCK_PUSHES: Final = KILLS + ABORTS
PACE_MS: Final = 3
TURNS_A_FLOOD: Final = 36
# How far a push is when it is struck.
_STRUCK_AT: Final = 0.3

TurnKey = tuple[int, int]


class Incident(msgspec.Struct):
    """Something that was done to an attempt.

    Attributes:
        what: ``killed``, ``aborted`` or ``stalled``.
        session_id: whose attempt.
        slab_handle: which.
        worker: the D that was writing, or the P rank that was reading.
        pid: of it.
        at_s: seconds from the start of the play.
        at_bytes, total_bytes: how far the push was.
    """

    what: str
    session_id: str
    slab_handle: int
    worker: str
    pid: int
    at_s: float
    at_bytes: int = 0
    total_bytes: int = 0


class Chaos:
    """Decides from the seed which turns are struck, and strikes.

    Without ``--chaos`` only large prompts on P are left, which evict an idle session.

    Attributes:
        incidents: what was done.
        floods: turns that bring such a prompt; the rank that it hits.
        stalls: turns at whose finalize rank 1 holds its lease for too long.
    """

    def __init__(self, plan: Plan, seed: int, *, is_on: bool) -> None:
        rng = random.Random(f"chaos/{seed}")  # noqa: S311 - not for secrets
        self.incidents: list[Incident] = []
        self._kills: set[TurnKey] = set()
        self._aborts: set[TurnKey] = set()
        self.stalls: set[TurnKey] = set()
        later = [
            (session.index, number) for session in plan.sessions for number in range(1, len(session.turns))
        ]
        num_floods = max(1, plan.num_turns // TURNS_A_FLOOD)
        self.floods = {turn: rng.randrange(2) for turn in rng.sample(later, min(num_floods, len(later)))}
        if not is_on:
            return
        every = [(session.index, number) for session in plan.sessions for number in range(len(session.turns))]
        # Not the last ones: what happens afterwards is to be seen.
        every.sort(key=lambda turn: _arrival_s(plan, turn))
        early = every[: max(1, len(every) * 3 // 4)]
        struck = rng.sample(early, min(KILLS + ABORTS + STALLS, len(early)))
        self._kills = set(struck[:KILLS])
        self._aborts = set(struck[KILLS : KILLS + ABORTS])
        self.stalls = set(struck[KILLS + ABORTS :])

    def pace_ms(self, turn: TurnKey) -> int:
        """Return how slow a turn's first push is to be: one that is struck must last for a while."""
        return PACE_MS if turn in self._kills or turn in self._aborts else 0

    def takes_kill(self, turn: TurnKey, moved: m.PushMoved) -> bool:
        """Return whether this push is to be killed now; once a turn."""
        return self._take(self._kills, turn, moved)

    def takes_abort(self, turn: TurnKey, moved: m.PushMoved) -> bool:
        """Return whether this push is to be aborted now; once a turn."""
        return self._take(self._aborts, turn, moved)

    def takes_stall(self, turn: TurnKey) -> bool:
        """Return whether this finalize is to hold its lease for too long; once a turn."""
        if turn not in self.stalls:
            return False
        self.stalls.discard(turn)
        return True

    @staticmethod
    def _take(turns: set[TurnKey], turn: TurnKey, moved: m.PushMoved) -> bool:
        if turn not in turns or moved.bytes_done < _STRUCK_AT * moved.bytes_total:
            return False
        turns.discard(turn)
        return True

    def note(
        self,
        what: str,
        session_id: str,
        worker: Worker,
        slab_handle: int,
        at_s: float,
        moved: m.PushMoved | None,
    ) -> None:
        """Remember what was done."""
        self.incidents.append(
            Incident(
                what=what,
                session_id=session_id,
                slab_handle=slab_handle,
                worker=worker.name,
                pid=worker.pid,
                at_s=round(at_s, 3),
                at_bytes=moved.bytes_done if moved else 0,
                total_bytes=moved.bytes_total if moved else 0,
            )
        )


async def abort_attempt(client: Client, slab_handle: int) -> None:
    """Abort an attempt as an operator would; it may have ended meanwhile."""
    with contextlib.suppress(SnapdError):
        await asyncio.to_thread(client.abort, slab_handle)


def _arrival_s(plan: Plan, turn: TurnKey) -> float:
    return next(s for s in plan.sessions if s.index == turn[0]).turns[turn[1]].arrives_s

"""What the sessions of a play share: workers, the D pools' slots, counters, and the clock."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import msgspec

from snapd.client import Client
from snapd.demo.plan import PAGE_SIZE_TOKENS, Plan
from snapd.demo.workers import DemoError, Worker
from snapd.units import ceil_div

FINALIZE_RETRIES: Final = 200
FINALIZE_WAIT_MS: Final = 40

Transport = Literal["shm", "mooncake"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the user chose.

    Attributes:
        trace_path: requests.
        total_bytes: payload to move at least, over all ranks.
        decoders: D processes.
        transport: how bytes travel from D to the daemon.
        finalize_retries: how often a rank tries again when it gets no slots; 0: give up at once.
        chaos: kill D processes in the middle of pushes, and more.
        seed: of everything that is random.
        speed: seconds of the trace in one second; None: chosen.
        out_dir: where the log goes.
        verify, flip_push: for tests, see ``messages.Setup``.
    """

    trace_path: Path
    out_dir: Path
    total_bytes: int
    decoders: int = 2
    transport: Transport = "shm"
    finalize_retries: int = FINALIZE_RETRIES
    chaos: bool = False
    seed: int = 1
    speed: float | None = None
    verify: bool = True
    flip_push: int = 0


class Tally(msgspec.Struct):
    """What happened so far, as the orchestrator and its workers saw it.

    Attributes:
        turns, turns_done: turns that have arrived, and that are over.
        sessions_done: sessions that are over.
        pushed_bytes: payload that D has committed.
        pushes_again: pushes of a turn after its first.
        retried_pieces: writes that failed and were repeated.
        undrained_commits: commits that came without drain proof, because a write before had failed.
        handles: attempts that D was granted.
        ingested: attempts that both ranks inserted, by handle, with the bytes of all ranks.
        compared_bytes: compared between P and D.
        corrupt: ingests of which a byte differed.
        alloc_failed: attempts for which a rank had no slots when it finalized.
        given_up: turns of which P never got the KV for itself; the next one brings it along.
        kills: D processes that were killed.
        faults: what must not happen, each a sentence.
    """

    turns: int = 0
    turns_done: int = 0
    sessions_done: int = 0
    pushed_bytes: int = 0
    pushes_again: int = 0
    retried_pieces: int = 0
    undrained_commits: int = 0
    handles: set[int] = msgspec.field(default_factory=set)
    ingested: dict[int, int] = msgspec.field(default_factory=dict)
    compared_bytes: int = 0
    corrupt: int = 0
    alloc_failed: set[int] = msgspec.field(default_factory=set)
    given_up: int = 0
    kills: int = 0
    faults: list[str] = msgspec.field(default_factory=list)


class Seat:
    """A D worker's place: it outlives the process.

    The orchestrator keeps the slots of the pool, as a scheduler would, so that a D that is killed
    takes nothing of the books with it.

    Attributes:
        index: which D.
        is_up: set while a process is there.
        deaths: how often the process was killed; whoever put KV there before has to do it again.
    """

    def __init__(self, index: int, worker: Worker, num_slots: int) -> None:
        self.index = index
        self.worker = worker
        self.is_up = asyncio.Event()
        self.deaths = 0
        self._total_pages = num_slots // PAGE_SIZE_TOKENS
        self._free_pages = list(range(self._total_pages))

    @property
    def free_slots(self) -> int:
        """Slots of free pages."""
        return len(self._free_pages) * PAGE_SIZE_TOKENS

    @property
    def used_slots(self) -> int:
        """Slots of pages that sessions hold."""
        return (self._total_pages - len(self._free_pages)) * PAGE_SIZE_TOKENS

    def take(self, num_tokens: int) -> list[int]:
        """Return slots for a session; only if there are enough."""
        pages = [self._free_pages.pop() for _ in range(ceil_div(num_tokens, PAGE_SIZE_TOKENS))]
        return [page * PAGE_SIZE_TOKENS + at for page in pages for at in range(PAGE_SIZE_TOKENS)][:num_tokens]

    def give(self, slots: Iterable[int]) -> None:
        """Take a session's slots back."""
        # Not in order, so that later sessions lie scattered.
        self._free_pages[:0] = sorted(
            {slot // PAGE_SIZE_TOKENS for slot in slots}, key=lambda page: page * 7 % 61
        )


class Stage:
    """Everything that a session needs to run."""

    def __init__(
        self, options: Options, plan: Plan, client: Client, seats: list[Seat], ranks: list[Worker]
    ) -> None:
        self.options = options
        self.plan = plan
        self.client = client
        self.seats = seats
        self.ranks = ranks
        self.tally = Tally()
        self._room = asyncio.Condition()
        self._start_s = asyncio.get_running_loop().time()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the play began."""
        return asyncio.get_running_loop().time() - self._start_s

    async def until(self, at_s: float) -> None:
        """Wait until a time of the play."""
        await asyncio.sleep(max(0.0, at_s - self.elapsed_s))

    async def take_slots(self, num_tokens: int) -> tuple[Seat, list[int]]:
        """Return the D with the most room, and slots of it; waits until there is room."""
        async with self._room:
            while True:
                seat = max(self.seats, key=lambda seat: seat.free_slots)
                if seat.free_slots >= num_tokens:
                    return seat, seat.take(num_tokens)
                await self._room.wait()

    async def give_slots(self, seat: Seat, slots: list[int]) -> None:
        """Take slots back, and let somebody else have them."""
        async with self._room:
            seat.give(slots)
            self._room.notify_all()

    async def respawn(self, seat: Seat) -> None:
        """Start a D anew after it was killed.

        Raises:
            DemoError: it does not start.
        """
        await seat.worker.wait_gone()
        try:
            await seat.worker.start()
        except DemoError as error:
            raise DemoError(f"after a kill: {error}") from None
        seat.is_up.set()

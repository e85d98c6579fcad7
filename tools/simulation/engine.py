"""P as a whole: an orchestrator that tells its ranks what to ingest, one ingest of a session at a time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from snapd.units import NS_PER_MS
from tools.simulation.decoder import Attempt
from tools.simulation.dice import Dice
from tools.simulation.prefill import Ingest, Prefill

if TYPE_CHECKING:
    from tools.simulation.world import World


class Engine:
    """The ranks of one P.

    Attributes:
        ranks: their processes.
        inserted: snapshots that the last of their ranks has put into its tree.
    """

    def __init__(self, world: "World") -> None:
        self.inserted = 0
        self.ranks = [Prefill(world, rank) for rank in range(world.plan.setup.ranks)]
        self._world = world
        self._busy: dict[tuple[int, int], Ingest] = {}

    def unfinished(self) -> list[Ingest]:
        """Return the ingests that are not over on every rank."""
        return [ingest for ingest in self._busy.values() if ingest.left]

    def became_ready(self, attempt: Attempt) -> None:
        """Every rank of an attempt is committed: P is told, or finds it, sooner or later, or never."""
        turn = attempt.turn
        if turn.read == "never":
            return
        dice = Dice(turn.seed, 4)
        delay_ms = dice.between(1_000, 5_000) if turn.read == "later" else dice.between(1, 60)
        self._world.timeline.after(delay_ms * NS_PER_MS, lambda: self._take_up(attempt))
        if turn.read in ("no-slots-kept", "broken-kept"):
            again_ms = delay_ms + dice.between(100, 900)
            again = self._ingest_of(attempt, "told", turn.seed + 1)
            self._world.timeline.after(again_ms * NS_PER_MS, lambda: self.begin(again, attempt.ranks))

    def _take_up(self, attempt: Attempt) -> None:
        turn = attempt.turn
        ingest = self._ingest_of(attempt, turn.read, turn.seed)
        if turn.read == "flipped":
            self._world.flip(attempt.grant, Dice(turn.seed, 6))
        if turn.read == "forgotten" and not self._is_busy(ingest):
            for rank in attempt.ranks:
                self.ranks[rank].tree.pop((turn.layout, turn.session), None)
        if turn.read in ("found", "prefix"):
            story = self._world.story(turn.layout, turn.session)
            ingest.history, ingest.num_tokens = story.history, story.num_tokens
            self.ranks[attempt.ranks[0]].look_up(ingest)
        else:
            self.begin(ingest, attempt.ranks)
        if turn.read == "twice":
            again = self._ingest_of(attempt, "told", turn.seed + 1)
            ingest.is_over.then(lambda: self._again(again))

    def _again(self, ingest: Ingest) -> None:
        self._world.timeline.after(5 * NS_PER_MS, lambda: self.begin(ingest, ingest.ranks))

    @staticmethod
    def _ingest_of(attempt: Attempt, way: str, seed: int) -> Ingest:
        turn, grant = attempt.turn, attempt.grant
        prompt = (attempt.history, grant.token_start + grant.num_tokens)
        return Ingest(
            (turn.layout, turn.session), (attempt.handle, grant.epoch), prompt, attempt.ranks, way, seed
        )

    def begin(self, ingest: Ingest, ranks: Sequence[int]) -> None:
        """Have every rank ingest an attempt, unless the session is in hand."""
        if self._is_busy(ingest):
            return
        ingest.ranks = tuple(sorted(ranks))
        ingest.left = set(ranks)
        self._busy[ingest.key] = ingest
        self._world.note(f"ingest of attempt {ingest.handle} on ranks {ingest.ranks}: {ingest.way}")
        for rank in ingest.ranks:
            self.ranks[rank].start(ingest)

    def _is_busy(self, ingest: Ingest) -> bool:
        busy = self._busy.get(ingest.key)
        return busy is not None and bool(busy.left)

    def note_insert(self, ingest: Ingest, rank: int, end_tokens: int) -> None:
        """A rank inserts."""
        if rank == ingest.ranks[-1]:
            self.inserted += 1
            self._world.story(*ingest.key).ingested = (ingest.history, end_tokens)

    def forget(self, dice: Dice) -> None:
        """Evict a session from every rank's tree, unless it is being ingested."""
        for key in sorted({key for rank in self.ranks for key in rank.tree}):
            is_pinned = key in self._busy and self._busy[key].left
            if not is_pinned and dice.chance(50):
                for rank in self.ranks:
                    rank.tree.pop(key, None)

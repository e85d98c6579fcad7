"""A D worker: prepares, writes piece by piece, commits; or fails, dawdles, dies, repeats itself, is too late.

It goes by the rules of ``snapd.kv``: it looks whether the attempt has ended before it writes more, says
drained only once every write of the shard is final, and commits with ``drained=False`` what it had to write
twice.
"""

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from snapd import calls
from snapd.calls import Call, Grant
from snapd.errors import ConnectionProblem, Reason, RequestError, SnapdError
from snapd.layout import Layout
from snapd.units import NS_PER_MS, align_down
from snapd.wire import TransferNotification, encode_notification
from tools.simulation.client import Ask, Signal, SimLink, Steps, Task
from tools.simulation.clock import Node
from tools.simulation.daemon import DAEMON_UID
from tools.simulation.dice import Dice
from tools.simulation.failure import Broken
from tools.simulation.memory import Piece, cut_in_pieces, places_of
from tools.simulation.plan import PAGE_TOKENS, Turn

if TYPE_CHECKING:
    from tools.simulation.world import World

_PREPARES_MAX: Final = 3
_RETRY_WAIT_MS_MAX: Final = 1_500
_LATE_REPEAT_MS: Final = 2_500


class Attempt:
    """What D knows of an attempt.

    Attributes:
        turn: why it pushes.
        grant: where to.
        layout, name: of the planes; the name is the fingerprint.
        history: whose tokens.
    """

    def __init__(self, turn: Turn, grant: Grant, layout: Layout, name: str, history: int) -> None:
        self.turn = turn
        self.grant = grant
        self.layout = layout
        self.name = name
        self.history = history
        self.flights: list[Flight] = []

    @property
    def handle(self) -> int:
        """Its name."""
        return self.grant.slab_handle

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a shard."""
        return [one.rank for one in self.grant.ranks]

    def is_drained(self, ranks: Iterable[int]) -> bool:
        """Whether no write of these ranks' shards can still land."""
        return all(flight.is_over for flight in self.flights if flight.piece.rank in ranks)


class Flight:
    """A write under way.

    Attributes:
        piece: what is written.
        landed: is set when it has.
        is_over: it has landed, or never will.
    """

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.landed = Signal()
        self.is_over = False


class Decoder:
    """A D worker; it may die and come back.

    Attributes:
        node: its process.
        link: its connection.
        pid: of the process.
    """

    def __init__(self, world: "World", index: int) -> None:
        self._world = world
        self._index = index
        self.pid = 0
        self.revive()

    def revive(self) -> None:
        """Start a process."""
        self.pid = self._world.new_pid()
        self.node = Node(self._world.timeline, self.pid * 1_000_000_007)
        latency_ns = self._world.plan.setup.latency_us * 1_000
        self.link = SimLink(self._world, self.node, f"d{self._index}", self.pid, DAEMON_UID, latency_ns)

    def kill(self) -> None:
        """End the process. What it would have written itself is never written."""
        self.node.kill()
        self.link.close()
        self._world.process_exited(self.pid)

    def start(self, turn: Turn) -> None:
        """A turn has ended here."""
        if self.node.is_alive:
            Task(self._world, self.node, self.link, self._push(turn))

    # --- a push --------------------------------------------------------------------------------

    def _push(self, turn: Turn) -> Steps:
        world, dice = self._world, Dice(turn.seed)
        story = world.story_of(turn)
        layout, name = world.layouts[turn.layout]
        history, end_tokens = story.history, story.num_tokens
        start_tokens = 0
        if turn.has_suffix and story.ingested[0] == history:
            start_tokens = min(
                align_down(story.ingested[1], PAGE_TOKENS), align_down(end_tokens - 1, PAGE_TOKENS)
            )
        call = calls.prepare_receive(
            story.session_id,
            end_tokens - start_tokens,
            name,
            token_start=start_tokens,
            token_digest=world.content.token_digest(history, end_tokens),
            page_keys=world.content.page_keys(history, end_tokens, PAGE_TOKENS) if turn.has_keys else (),
            ranks=turn.ranks,
            use_resident_hint=turn.use_hint,
            is_only_writer=dice.chance(85),
        )
        if turn.write in ("too-large", "odd"):
            yield from self._ask_in_vain(turn, name, story.session_id, dice)
            return
        grant: Grant | None = None
        for _ in range(_PREPARES_MAX):
            try:
                grant = yield Ask(call)
                break
            except RequestError as error:
                if not (error.retryable or error.retry_after_ms):
                    return
                yield (min(error.retry_after_ms, _RETRY_WAIT_MS_MAX) + dice.below(50)) * NS_PER_MS
            except SnapdError:
                return
        if grant is None:
            return
        world.check_grant(grant, layout, end_tokens)
        attempt = Attempt(turn, grant, layout, name, history)
        try:
            yield from self._write(attempt, dice)
        except SnapdError as error:
            yield from self._give_up(attempt, error)

    def _ask_in_vain(self, turn: Turn, name: str, session_id: str, dice: Dice) -> Steps:
        """Ask for what can never be had."""
        wrong: list[Call[Grant]] = [
            calls.prepare_receive(session_id, 100_000, name),
            calls.prepare_receive(session_id, 0, name),
            calls.prepare_receive(session_id, 4, name, token_start=-4),
            calls.prepare_receive(session_id, 4, name, token_start=3),
            calls.prepare_receive("", 4, name),
            calls.prepare_receive("x" * 40, 4, name),
            calls.prepare_receive(session_id, 4, name, ranks=(0, 9)),
            calls.prepare_receive(session_id, 4, name, ranks=(0, 0)),
            calls.prepare_receive(session_id, 4, name, page_keys=("k",) * 2),
            calls.prepare_receive(session_id, 4, name, page_keys=("k",) * 40),
            calls.prepare_receive(session_id, 4, name, token_digest="d" * 65),
            calls.prepare_receive(session_id, 2_000_000, name),
        ]
        for call in wrong[:1] if turn.write == "too-large" else dice.shuffled(wrong[1:]):
            try:
                yield Ask(call)
            except SnapdError:
                continue
            raise Broken("admission", f"a grant for what can never be had: {call.request}")

    def _write(self, attempt: Attempt, dice: Dice) -> Steps:
        """Write and commit, each rank in turn.

        Raises:
            SnapdError: something went wrong, and the daemon is to be told.
        """
        way = attempt.turn.write
        grant = attempt.grant
        if way == "never":
            yield self._world.plan.setup.settings["reserve_timeout_ms"] * NS_PER_MS + dice.below(
                400 * NS_PER_MS
            )
        if way not in ("unstarted", "partial"):
            yield Ask(calls.transfer_started(attempt.handle, epoch=grant.epoch))
        for number, rank in enumerate(attempt.ranks):
            is_last = number == len(attempt.ranks) - 1
            # Of several ranks the last one fails while the others are still being written.
            is_left = way == "half-failed" and not is_last
            yield from self._write_rank(attempt, rank, dice, is_left=is_left)
            if is_left:
                continue
            if is_last and way in ("failed", "failed-undrained", "gone", "abort", "half-failed"):
                yield from self._fail(attempt, rank, dice)
                return
            if is_last and way == "silent":
                return
            yield from self._commit(attempt, rank, dice, is_last=is_last)
        self._world.engine.became_ready(attempt)
        if way == "retried":
            if dice.chance(25):
                self._world.kill_decoder(self, dice.between(50, 1_500))
                yield 1
            yield from self._prove_later(attempt, dice)

    def _write_rank(self, attempt: Attempt, rank: int, dice: Dice, *, is_left: bool) -> Steps:
        way = attempt.turn.write
        grant = attempt.grant
        rank_grant = grant.for_rank(rank)
        planes = self._world.content.planes(
            attempt.layout, attempt.name, attempt.history, rank, grant.token_start,
            grant.token_start + grant.num_tokens,
        )  # fmt: skip
        places = places_of(rank_grant, grant.num_tokens)
        pieces = cut_in_pieces(attempt.handle, rank, places, planes, dice.below, dice.between(1, 3))
        late = dice.below(len(pieces)) if way in ("late", "retried", "failed-undrained") else -1
        mine: list[Flight] = []
        for number, piece in enumerate(pieces):
            if self.link.take_end(attempt.handle) is not None and way != "late":
                raise RequestError("the attempt has ended", reason=Reason.STALE_HANDLE)
            if number and way == "dies":
                self._world.kill_decoder(self, dice.between(50, 1_500))
                yield 1
            delay_ns = dice.between(20_000, 2 * NS_PER_MS)
            if way == "slow":
                delay_ns = dice.between(100, 700) * NS_PER_MS
            if is_left:
                delay_ns = dice.between(50, 600) * NS_PER_MS
            if number == late:
                delay_ns = self._late_ns(attempt, dice)
            mine.append(self._submit(attempt, piece, delay_ns))
            if number == late and way == "retried":
                # It failed, as far as is known, and is written once more.
                mine[-1] = self._submit(attempt, piece, dice.between(20_000, 2 * NS_PER_MS))
        if way == "failed-undrained" or is_left:
            return
        for flight in mine:
            yield flight.landed

    def _late_ns(self, attempt: Attempt, dice: Dice) -> int:
        """Return when a write lands that is late: after the end, and perhaps after the quarantine."""
        settings = self._world.plan.setup.settings
        if attempt.turn.write == "late":
            over_ms: int = settings["transfer_timeout_ms"] + settings["quarantine_ms"]
            return (over_ms * dice.between(30, 130) // 100 + dice.below(300)) * NS_PER_MS
        return dice.below(_LATE_REPEAT_MS * NS_PER_MS)

    def _submit(self, attempt: Attempt, piece: Piece, delay_ns: int) -> Flight:
        """Begin a write. Over the network it lands whatever becomes of this process."""
        flight = Flight(piece)
        attempt.flights.append(flight)
        epoch = attempt.grant.epoch

        def land() -> None:
            self._world.land(epoch, piece)
            flight.is_over = True
            flight.landed.set(True)

        node = None if self._world.plan.setup.is_network else self.node
        self._world.timeline.after(delay_ns, land, node)
        return flight

    def _commit(self, attempt: Attempt, rank: int, dice: Dice, *, is_last: bool) -> Steps:
        grant, way = attempt.grant, attempt.turn.write
        num_bytes = attempt.layout.token_bytes * grant.num_tokens
        is_wrong = way == "partial" and is_last
        sums = self._world.content.sums(
            attempt.layout, attempt.name, attempt.history, rank, grant.token_start,
            grant.token_start + grant.num_tokens,
        )  # fmt: skip
        if way == "notified":
            notification = TransferNotification(
                slab_handle=attempt.handle,
                epoch=grant.epoch,
                rank=rank,
                num_bytes=num_bytes,
                num_tokens=grant.num_tokens,
                checksums=sums,
                drained=attempt.is_drained((rank,)),
            )
            self._world.notify(encode_notification(notification), dice)
            return
        call = calls.commit(
            attempt.handle,
            rank,
            num_bytes - is_wrong * dice.below(2),
            grant.num_tokens - is_wrong,
            sums,
            drained=attempt.is_drained((rank,)),
            epoch=grant.epoch,
        )
        yield Ask(call)
        if is_wrong:
            raise Broken("commit", f"attempt {attempt.handle}: other counts than were granted were accepted")
        if way == "recommit":
            # The answer was lost, as far as this D goes; then it says something else, which is refused.
            yield Ask(call)
            if dice.chance(40):
                other = calls.commit(
                    attempt.handle,
                    rank,
                    num_bytes,
                    grant.num_tokens,
                    ((1, 1),) * len(sums),
                    epoch=grant.epoch,
                )
                try:
                    yield Ask(other)
                except (RequestError, ConnectionProblem):
                    return
                raise Broken("commit", "a rank committed twice, with other figures")

    def _fail(self, attempt: Attempt, rank: int, dice: Dice) -> Steps:
        way, handle, epoch = attempt.turn.write, attempt.handle, attempt.grant.epoch
        is_drained = attempt.is_drained(attempt.ranks)
        if way == "abort":
            yield Ask(calls.abort(handle, drained=is_drained and dice.chance(70), epoch=epoch))
        elif way == "half-failed":
            yield Ask(
                calls.transfer_failed(handle, drained=attempt.is_drained((rank,)), rank=rank, epoch=epoch)
            )
        else:
            reason = Reason.SESSION_NOT_RESIDENT if way == "gone" else Reason.TRANSFER_FAILED
            yield Ask(calls.transfer_failed(handle, reason=reason, drained=is_drained, epoch=epoch))
        if not is_drained:
            yield from self._prove_later(attempt, dice)

    def _give_up(self, attempt: Attempt, error: SnapdError) -> Steps:
        """Say that it failed; and once the last write has landed, that it is drained."""
        del error
        is_drained = attempt.is_drained(attempt.ranks)
        with contextlib.suppress(SnapdError):
            yield Ask(calls.transfer_failed(attempt.handle, drained=is_drained, epoch=attempt.grant.epoch))
        if not is_drained:
            yield from self._prove_later(attempt, Dice(attempt.turn.seed, 3))

    def _prove_later(self, attempt: Attempt, dice: Dice) -> Steps:
        """Give drain proof once every write has landed, as a rule."""
        if dice.chance(25):
            return
        is_for_all = dice.chance(50)
        for rank in attempt.ranks:
            for flight in attempt.flights:
                if is_for_all or flight.piece.rank == rank:
                    yield flight.landed
            try:
                wanted = None if is_for_all else rank
                yield Ask(calls.drained(attempt.handle, rank=wanted, epoch=attempt.grant.epoch))
            except SnapdError:
                return

"""What happens in a run: setup, turns and faults, drawn from a seed, or read from a case.

A plan is all that a run depends on. Every turn and every fault has a seed of its own, so that leaving one out
changes nothing of the others: that is what makes shrinking work.
"""

from typing import Any, Final

import msgspec

from snapd.layout import Layout, Namespace
from tools.simulation.dice import Dice
from tools.simulation.memory import TOKENS_MAX

PAGE_TOKENS: Final = 4

# How D goes about a turn, with weights.
WRITES: Final = {
    "whole": 30, "unstarted": 4, "never": 3, "silent": 3, "failed": 3, "failed-undrained": 2, "gone": 2,
    "abort": 2, "partial": 2, "late": 4, "retried": 5, "recommit": 4, "slow": 4, "dies": 2, "too-large": 2,
    "odd": 2, "half-failed": 2, "notified": 4,
}  # fmt: skip
# How P goes about what became READY.
READS: Final = {
    "told": 26, "found": 8, "prefix": 6, "never": 8, "later": 4, "slow": 4, "skewed": 4, "too-late": 3,
    "revote": 5, "no-slots": 3, "no-slots-kept": 3, "tokens": 2, "broken": 2, "broken-kept": 2,
    "forgotten": 3, "twice": 3, "one-rank": 2, "odd": 2, "dies": 2, "flipped": 3,
}  # fmt: skip
FAULTS: Final = {
    "crash": 6, "restart": 4, "stall": 4, "jump": 3, "wall": 2, "cut-d": 6, "cut-p": 6, "cut-all": 2,
    "lag-d": 3, "lag-p": 3, "stop-d": 5, "stop-p": 4, "kill-d": 4, "kill-p": 3, "disk-full": 4,
    "disk-slow": 3, "flip": 3, "forget": 3, "abort": 4, "drain": 2, "look": 3, "watch": 2, "replay": 6,
    "garbage": 3, "half-frame": 2, "unknown": 2, "stranger": 2, "crowd": 1, "flood": 2, "unmapped": 1,
    "limited": 2, "notices": 2,
}  # fmt: skip
# Drawn by itself, so that it changes nothing of the others: in so many of a hundred runs.
BUG: Final = "bug"
_BUG_PERCENT: Final = 12
# So many of a hundred runs begin in a log that the design before snapd has written to.
_OLDER_PERCENT: Final = 10
_OLDER_LINES_MAX: Final = 40


class Setup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run begins with.

    Attributes:
        ranks: P's, each with an arena.
        arena_bytes, piece_bytes: of each.
        decoders: D workers.
        layouts: how many of ``LAYOUTS`` P declares.
        is_network: what D has handed to the network may land after its exit.
        latency_us: of connections.
        settings: of the daemon.
        grace_ms: how late a deadline may be seen to.
        older_lines: of the design before snapd, that stand in the log already.
    """

    ranks: int = 2
    arena_bytes: int = 16_384
    piece_bytes: int = 0
    decoders: int = 2
    layouts: int = 2
    is_network: bool = False
    latency_us: int = 200
    settings: dict[str, Any] = {}
    grace_ms: int = 10_000
    older_lines: int = 0


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A turn of a session ended on D: what D and P do about it.

    Attributes:
        at_ms: when.
        seed: of what chance there is in it.
        decoder: which D.
        layout: which namespace.
        session: which of its sessions.
        grow: tokens that the turn added.
        is_fresh: the conversation began anew, with other tokens.
        use_hint: the daemon may leave out what P holds.
        has_suffix: D leaves out what it saw ingested.
        has_keys: D gives page keys.
        ranks: shards; empty: all.
        write, read: see ``WRITES`` and ``READS``.
    """

    at_ms: int
    seed: int
    decoder: int = 0
    layout: int = 0
    session: int = 0
    grow: int = 8
    is_fresh: bool = False
    use_hint: bool = False
    has_suffix: bool = False
    has_keys: bool = False
    ranks: tuple[int, ...] = ()
    write: str = "whole"
    read: str = "told"


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that goes wrong, or an operator does.

    Attributes:
        at_ms: when.
        seed: of what chance there is in it.
        kind: see ``FAULTS``, or ``BUG``.
        for_ms: how long, where it lasts.
        target: whom it hits, where there are several.
    """

    at_ms: int
    seed: int
    kind: str
    for_ms: int = 0
    target: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run depends on."""

    seed: int
    setup: Setup
    turns: tuple[Turn, ...] = ()
    faults: tuple[Fault, ...] = ()


LAYOUTS: Final = (
    Layout((16, 16), (16, 16), page_size_tokens=PAGE_TOKENS, namespace=Namespace(model="a", tenant="t1")),
    Layout((16, 16), (16, 16), page_size_tokens=PAGE_TOKENS, namespace=Namespace(model="a", tenant="t2")),
    Layout((24, 20, 9), (), dtype="float8", page_size_tokens=PAGE_TOKENS, namespace=Namespace(model="mla")),
    # Never declared.
    Layout((16,), (16,), page_size_tokens=PAGE_TOKENS, namespace=Namespace(model="unknown")),
)
UNDECLARED: Final = len(LAYOUTS) - 1

# Timeouts in the proportions of the defaults, and short beside a run.
_TIMES_MS: Final = {
    "reserve_timeout_ms": 500, "transfer_timeout_ms": 1_500, "ready_ttl_ms": 6_000, "lease_ms": 700,
    "quarantine_ms": 3_000, "drain_timeout_ms": 300, "frame_timeout_ms": 400,
}  # fmt: skip
_BOUNDS: Final = {
    "ended_history_max": 12, "session_history_max": 8, "layouts_max": 8, "page_keys_max": 24,
    "page_keys_total_max": 48, "session_id_bytes_max": 32, "num_tokens_max": 1_000_000, "connections_max": 24,
    "watchers_max": 2, "watch_queue_max": 4, "frame_bytes_max": 16_384, "reply_buffer_bytes_max": 32_768,
    "requests_in_flight_max": 16, "log_queue_bytes_max": 1 << 20, "log_queue_lines_max": 400,
    "log_rotate_bytes": 32_768, "transfer_min_mb_per_s": 100,
}  # fmt: skip


# The daemon's timers are never late by more than a process is held up after it was stopped: what is due then
# comes first, or in the same moment.
_GRACE_MS: Final = 200


def draw_setup(dice: Dice) -> Setup:
    """Draw what a run begins with."""
    settings: dict[str, Any] = dict(_TIMES_MS | _BOUNDS)
    settings["sessions_max"] = dice.pick((6, 12, 40, 40))
    settings["eviction_policy"] = dice.pick(("lru", "lru", "gdsf", "lfuda", "sieve"))
    if dice.chance(25):
        # Short enough that what is written late lands when others have the bytes.
        settings["quarantine_ms"] = 150
    if dice.chance(15):
        settings["log_queue_lines_max"] = 24
    arena_bytes = dice.pick((8_192, 12_288, 16_384, 24_576))
    return Setup(
        ranks=dice.pick((1, 2, 2, 2, 3)),
        arena_bytes=arena_bytes,
        piece_bytes=dice.pick((0, 0, 0, 4_096)),
        decoders=dice.between(1, 3),
        layouts=dice.between(1, UNDECLARED),
        is_network=dice.chance(40),
        latency_us=dice.pick((50, 200, 1_000)),
        settings=settings,
        grace_ms=_GRACE_MS,
    )


def draw_turn(dice: Dice, setup: Setup, at_ms: int, layout: int, sessions: int) -> Turn:
    """Draw one turn."""
    ranks: tuple[int, ...] = ()
    if setup.ranks > 1 and dice.chance(8):
        ranks = (dice.below(setup.ranks),)
    return Turn(
        at_ms=at_ms,
        seed=dice.bits() >> 32,
        decoder=dice.below(setup.decoders),
        layout=UNDECLARED if dice.chance(2) else layout,
        session=dice.below(sessions),
        grow=dice.between(1, TOKENS_MAX // 4),
        is_fresh=dice.chance(12),
        use_hint=dice.chance(40),
        has_suffix=dice.chance(15),
        has_keys=dice.chance(30),
        ranks=ranks,
        write=dice.weighted(WRITES),
        read=dice.weighted(READS),
    )


def draw_plan(seed: int) -> Plan:
    """Draw what happens in the run of a seed."""
    dice = Dice(seed, 1)
    setup = draw_setup(dice)
    num_turns = dice.between(12, 36)
    sessions = dice.between(2, 6)
    # Some runs are crowded, some leave time for everything to expire.
    pause_ms = dice.pick((40, 120, 120, 400, 1_200))
    at_ms = 20
    turns: list[Turn] = []
    for _ in range(num_turns):
        at_ms += dice.below(2 * pause_ms)
        turns.append(draw_turn(dice, setup, at_ms, dice.below(setup.layouts), sessions))
    faults: list[Fault] = []
    for _ in range(dice.pick((0, 2, 4, 8, 16))):
        faults += _draw_fault(dice, at_ms + 500)
    faults += _draw_bugs(Dice(seed, 11), at_ms + 500)
    faults.sort(key=lambda fault: fault.at_ms)
    older = Dice(seed, 12)
    if older.chance(_OLDER_PERCENT):
        setup = msgspec.structs.replace(setup, older_lines=older.between(1, _OLDER_LINES_MAX))
    return Plan(seed=seed, setup=setup, turns=tuple(turns), faults=tuple(faults))


def _draw_fault(dice: Dice, until_ms: int) -> list[Fault]:
    """Draw one; after a life of the daemon has ended, messages to it may come to the next."""
    kind = dice.weighted(FAULTS)
    fault = Fault(
        at_ms=dice.below(until_ms),
        seed=dice.bits() >> 32,
        kind=kind,
        for_ms=dice.pick((30, 100, 300, 1_000, 4_000)),
        target=dice.below(8),
    )
    if kind not in ("crash", "restart"):
        return [fault]
    later_ms = fault.at_ms + fault.for_ms + 350
    return [
        fault,
        *(
            Fault(at_ms=later_ms + dice.below(1_000), seed=dice.bits() >> 32, kind="replay")
            for _ in range(dice.below(3))
        ),
    ]


def _draw_bugs(dice: Dice, until_ms: int) -> list[Fault]:
    """Draw the bugs that the daemon has."""
    if not dice.chance(_BUG_PERCENT):
        return []
    return [
        Fault(
            at_ms=dice.below(until_ms), seed=dice.bits() >> 32, kind=BUG, for_ms=dice.pick((30, 300, 1_000))
        )
        for _ in range(dice.between(1, 2))
    ]


def encode_plan(plan: Plan) -> bytes:
    """Return a plan as JSON."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def decode_plan(data: bytes) -> Plan:
    """Return the plan in *data*.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return msgspec.json.decode(data, type=Plan)

"""What the demo will do: sessions and turns out of a trace, scaled to fit, and how large everything is.

The plan depends on the trace and the options alone; the same seed gives the same plan.
"""

import random
from typing import Final

import msgspec

from snapd.arena import available_memory_bytes
from snapd.config import ARENA_BYTES_MIN
from snapd.demo.trace import Request, chain_sessions
from snapd.errors import SnapdError
from snapd.units import MIB, MS_PER_S, align_up, ceil_div, format_bytes

RANKS: Final = 2
PAGE_SIZE_TOKENS: Final = 16
NUM_LAYERS: Final = 16
KV_HEADS: Final = 2
HEAD_DIM: Final = 128
ELEMENT_BYTES: Final = 2
STRIDE_BYTES: Final = KV_HEADS * HEAD_DIM * ELEMENT_BYTES
NUM_PLANES: Final = 2 * NUM_LAYERS
# Of one rank's shard.
TOKEN_BYTES: Final = NUM_PLANES * STRIDE_BYTES

ATTEMPTS_WANTED: Final = 110
TURNS_MAX: Final = 8
SESSION_TOKENS_MAX: Final = 6_144
VOCABULARY_TOKENS: Final = 151_936
# Some turns may be given up, and their last page is sent again: plan a little more than is wanted.
MARGIN: Final = 1.02
# A resident session takes slots on D from its first turn to its last, so this many run at a time.
SESSIONS_AT_ONCE: Final = 8
# Slots of P beyond what all running sessions need: for the largest snapshot, and this share for more.
SPARE_SHARE: Final = 0.15
# What one prompt's prefill takes of P's pool, and what all of them together may take.
PREFILL_SHARE: Final = 0.18
PREFILL_SHARE_MAX: Final = 0.55
# Every running session may be READY at one time, so that nothing has to be evicted.
ARENA_SHARE: Final = 1.05
WINDOW_S_PER_GIB: Final = 6.0
WINDOW_S_MIN: Final = 2.0
WINDOW_S_MAX: Final = 600.0
# Over a transport that does not map the arena: several pieces a shard, so that one is gathered while others
# travel.
PIECES_A_SHARD: Final = 8
PIECE_BYTES_MIN: Final = MIB // 16
PIECE_BYTES_MAX: Final = 4 * MIB
# torch and the interpreter, in a worker.
PROCESS_BYTES: Final = 260 * MIB


class NotEnoughMemory(SnapdError):
    """The demo would need more memory than there is; the message says how much, and what to lower."""


class Turn(msgspec.Struct, frozen=True):
    """One turn of a session.

    Attributes:
        arrives_s: when its request arrives, from the start of the play.
        end_tokens: tokens of the conversation after it, scaled.
        prefill_tokens: slots of P that its prompt's prefill takes for a while.
    """

    arrives_s: float
    end_tokens: int
    prefill_tokens: int


class SessionPlan(msgspec.Struct, frozen=True):
    """One session: what it is called, and its turns."""

    index: int
    session_id: str
    turns: tuple[Turn, ...]

    @property
    def end_tokens(self) -> int:
        """Tokens of the whole conversation."""
        return self.turns[-1].end_tokens

    def token_ids(self, seed: int) -> tuple[int, ...]:
        """Return the token ids of the whole conversation."""
        rng = random.Random(f"tokens/{seed}/{self.index}")  # noqa: S311 - not for secrets
        return tuple(rng.choices(range(VOCABULARY_TOKENS), k=self.end_tokens))


class Plan(msgspec.Struct, frozen=True):
    """Everything that is decided before the first process starts.

    Attributes:
        sessions: in order of their first turn.
        requests_in_trace, sessions_in_trace: what the trace holds.
        rounds: how often its sessions are gone through, to reach the wanted bytes.
        token_scale: tokens of the demo for one of the trace.
        speed: seconds of the trace that pass in one second of the play.
        decoder_slots, prefill_slots: slots of a kv_pool.
        arena_bytes: of each rank.
    """

    sessions: tuple[SessionPlan, ...]
    requests_in_trace: int
    sessions_in_trace: int
    rounds: int
    token_scale: float
    speed: float
    decoder_slots: int
    prefill_slots: int
    arena_bytes: int

    @property
    def num_turns(self) -> int:
        """Turns of all sessions: attempts, if none has to be made again."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all ranks when every turn's new tokens are sent once."""
        return sum(session.end_tokens for session in self.sessions) * TOKEN_BYTES * RANKS

    @property
    def piece_bytes(self) -> int:
        """The longest write of a push that goes in pieces."""
        shard_bytes = self.payload_bytes // RANKS // self.num_turns
        return min(max(align_up(shard_bytes // PIECES_A_SHARD, MIB // 16), PIECE_BYTES_MIN), PIECE_BYTES_MAX)

    def memory_bytes(self, decoders: int) -> int:
        """Return about how much memory the demo takes."""
        slots = (decoders * self.decoder_slots + self.prefill_slots) * RANKS
        return slots * TOKEN_BYTES + RANKS * self.arena_bytes + (decoders + RANKS) * PROCESS_BYTES


def make_plan(
    requests: list[Request],
    *,
    total_bytes: int,
    decoders: int,
    speed: float | None = None,
    quarantined_snapshots: int = 0,
) -> Plan:
    """Return the plan for a trace.

    Args:
        requests: of the trace, in order of time.
        total_bytes: payload to move at least, over all ranks.
        decoders: D processes.
        speed: as in ``Plan``; None: so that the play takes a time that suits *total_bytes*.
        quarantined_snapshots: how many of any length may be in quarantine at one time, and nobody has to
            wait for it.
    """
    chains = chain_sessions(requests)
    chosen = _choose(chains)
    wanted_tokens = ceil_div(int(total_bytes * MARGIN), TOKEN_BYTES * RANKS)
    scale = wanted_tokens / sum(chain[-1].end_tokens for chain in chosen)
    once_tokens = sum(_scaled_ends(chain, scale)[-1] for chain in chosen)
    rounds = ceil_div(wanted_tokens, once_tokens)
    if rounds > 1:
        # Longer sessions would not fit; go through them more often, and no further than is needed.
        scale *= wanted_tokens / (once_tokens * rounds)
    start_ms = chosen[0][0].timestamp
    span_s = (max(chain[-1].timestamp for chain in chosen) - start_ms) / MS_PER_S
    if speed is None:
        window_s = min(max(WINDOW_S_MIN, WINDOW_S_PER_GIB * total_bytes / 2**30), WINDOW_S_MAX)
        speed = max(span_s * rounds / window_s, 0.001)
    ends = [_scaled_ends(chain, scale) for chain in chosen]
    mean_tokens = sum(end[-1] for end in ends) // len(ends) + 1
    longest_tokens = max(end[-1] for end in ends)
    decoder_slots = align_up(
        max(longest_tokens, ceil_div(mean_tokens * SESSIONS_AT_ONCE, decoders)) + PAGE_SIZE_TOKENS,
        PAGE_SIZE_TOKENS,
    )
    running_slots = decoder_slots * decoders
    prefill_slots = align_up(int(running_slots * (1 + SPARE_SHARE)) + longest_tokens, PAGE_SIZE_TOKENS)
    prefill_tokens = int(prefill_slots * PREFILL_SHARE)
    sessions: list[SessionPlan] = []
    for play in range(rounds):
        for chain, end in zip(chosen, ends, strict=True):
            index = len(sessions)
            offset_ms = play * span_s * MS_PER_S - start_ms
            turns = tuple(
                Turn((turn.timestamp + offset_ms) / MS_PER_S / speed, tokens, prefill_tokens)
                for turn, tokens in zip(chain, end, strict=True)
            )
            sessions.append(SessionPlan(index, f"agent-{index:03d}", turns))
    arena_slots = int(running_slots * ARENA_SHARE) + quarantined_snapshots * longest_tokens
    arena_bytes = align_up(arena_slots * TOKEN_BYTES, MIB)
    return Plan(
        sessions=tuple(sorted(sessions, key=lambda session: session.turns[0].arrives_s)),
        requests_in_trace=len(requests),
        sessions_in_trace=len(chains),
        rounds=rounds,
        token_scale=scale,
        speed=speed,
        decoder_slots=decoder_slots,
        prefill_slots=prefill_slots,
        arena_bytes=max(arena_bytes, ARENA_BYTES_MIN),
    )


def _choose(chains: list[list[Request]]) -> list[list[Request]]:
    """Return sessions until there are enough turns: in order of time, those of several turns first."""
    ordered = sorted(chains, key=lambda chain: (len(chain) < 2, chain[0].timestamp))
    chosen: list[list[Request]] = []
    turns = 0
    for chain in ordered:
        if turns >= ATTEMPTS_WANTED:
            break
        chosen.append(chain[:TURNS_MAX])
        turns += len(chosen[-1])
    return sorted(chosen, key=lambda chain: chain[0].timestamp)


def _scaled_ends(chain: list[Request], scale: float) -> list[int]:
    """Return the tokens after each turn, scaled, each turn with one new token at least."""
    scale = min(scale, SESSION_TOKENS_MAX / chain[-1].end_tokens)
    ends: list[int] = []
    for turn in chain:
        # One page at least: a turn that stays inside a page would send what P has.
        least = (ends[-1] if ends else 0) + PAGE_SIZE_TOKENS
        ends.append(max(least, int(turn.end_tokens * scale) + 1))
    return ends


def check_memory(plan: Plan, decoders: int) -> None:
    """Check that what the plan takes can be had.

    Raises:
        NotEnoughMemory: it cannot.
    """
    available_bytes = available_memory_bytes()
    wanted_bytes = plan.memory_bytes(decoders)
    if available_bytes is not None and wanted_bytes > available_bytes:
        raise NotEnoughMemory(
            f"the demo takes about {format_bytes(wanted_bytes)} of memory, and "
            f"{format_bytes(available_bytes)} can be had: lower --total or --decoders"
        )

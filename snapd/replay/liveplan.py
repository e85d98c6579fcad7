"""What a live replay is asked for, what it plays of a trace, and what it came to."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import msgspec

from snapd.errors import ConfigError, InvalidRequest
from snapd.replay.chains import Turn
from snapd.units import MIB, NS_PER_S

CLIENT_NAME: Final = "snapd replay"


class LiveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a trace is replayed.

    Attributes:
        socket_path: the daemon's.
        ingest: ``eager``: as soon as a snapshot is READY; ``on-demand``: when the next turn arrives.
        max_tokens: if the longest session has more, all are shortened by the same factor.
        turns_at_once: turns under way at one time.
        layers, kv_heads, head_dim: of the kv_pools, in bfloat16; a token takes
            ``layers * 2 * kv_heads * head_dim * 2`` bytes a rank.
        pool_bytes: of P's kv_pool, a rank; what does not fit makes P evict idle sessions.
        seed: of the bytes.
        timeout_s: for each of the daemon's answers.
    """

    socket_path: str
    ingest: Literal["eager", "on-demand"] = "eager"
    max_tokens: int = 8_192
    turns_at_once: int = 4
    layers: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    pool_bytes: int = 256 * MIB
    seed: int = 1
    timeout_s: float = 30.0

    def check(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: a value is out of range; the message names it.
        """
        ranges: tuple[tuple[str, float, float, float], ...] = (
            ("max_tokens", self.max_tokens, 64, 1 << 24),
            ("turns_at_once", self.turns_at_once, 1, 1_024),
            ("layers", self.layers, 1, 256),
            ("kv_heads", self.kv_heads, 1, 1_024),
            ("head_dim", self.head_dim, 4, 4_096),
            ("pool_bytes", self.pool_bytes, MIB, 1 << 44),
            ("timeout_s", self.timeout_s, 0.001, 3_600),
        )
        for name, value, low, high in ranges:
            if not low <= value <= high:
                raise ConfigError(f"{name} = {value} of a live replay is outside {low} to {high}")
        if self.kv_heads * self.head_dim % 4:
            raise ConfigError(
                f"kv_heads * head_dim = {self.kv_heads * self.head_dim} of a live replay makes rows that are "
                "no whole 8-byte words: write a multiple of 4"
            )


class LiveResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a live replay came to. Bytes are payload, over all ranks; GB are 10^9 bytes.

    Attributes:
        sessions, turns: that were played.
        attempts: prepares, granted or refused, other than ``unused`` ones.
        ok: attempts that were ingested on every rank.
        ok_rate: ok of attempts; 0.0 when there were none.
        reasons: attempts by reason.
        unused: snapshots that were READY at the end, and no turn was left to use them.
        resent: snapshots that D pushed whole, after P had lost what a suffix builds on.
        reused_tokens: of prompts, that were in P's tree when their turn began; snapshots brought them.
        prompt_tokens: of all prompts, scaled.
        pushed_bytes: committed by D.
        bytes: ingested by P.
        compared_bytes: that were compared after that: every ingested one.
        corrupt: ingests of which a byte was not what D had made; must be 0.
        push_gb_per_s, ingest_gb_per_s: over the time spent copying and summing, on D's and on P's side.
        play_s: from the first turn to the last.
        late_ms_max, late_ms_mean: how long after its time a turn began.
        token_scale: tokens for one of the trace.
        token_bytes: of one token on one rank.
        arena_tokens: of the smallest arena.
    """

    sessions: int
    turns: int
    attempts: int
    ok: int
    ok_rate: float
    reasons: dict[str, int]
    unused: int
    resent: int
    reused_tokens: int
    prompt_tokens: int
    pushed_bytes: int
    bytes: int
    compared_bytes: int
    corrupt: int
    push_gb_per_s: float
    ingest_gb_per_s: float
    play_s: float
    late_ms_max: float
    late_ms_mean: float
    token_scale: float
    token_bytes: int
    arena_tokens: int

    @property
    def is_good(self) -> bool:
        """Not one byte differed."""
        return not self.corrupt


class LiveProgress(NamedTuple):
    """How far a replay is."""

    turns_done: int
    turns: int
    ok: int
    bytes: int
    late_ms: float


@dataclass(slots=True)
class Step:
    """A turn as it is played: when it begins, and the tokens of prompt and conversation, scaled."""

    due_s: float
    prompt_tokens: int
    end_tokens: int


@dataclass(slots=True)
class Session:
    """A session as it is played.

    Attributes:
        index: its number, which its bytes are made from.
        steps: its turns.
        done: how many of them are over.
        handle: of its READY snapshot; 0: there is none.
        token_start, end_tokens: of that snapshot.
    """

    index: int
    session_id: str
    steps: list[Step]
    done: int = 0
    handle: int = 0
    token_start: int = 0
    end_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the READY snapshot."""
        return self.end_tokens - self.token_start

    def token_ids(self, end_tokens: int) -> range:
        """Return the first token ids of the conversation; no two sessions share one."""
        first = self.index << 32
        return range(first, first + end_tokens)


class Plan(NamedTuple):
    """What is played.

    Attributes:
        sessions: with their turns, in order of the first.
        token_scale: as in ``LiveResult``.
    """

    sessions: list[Session]
    token_scale: float

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest session."""
        return max(session.steps[-1].end_tokens for session in self.sessions)

    @property
    def num_turns(self) -> int:
        """Turns of all sessions."""
        return sum(len(session.steps) for session in self.sessions)


def make_plan(turns: Iterable[Turn], max_tokens: int, page_size_tokens: int, run_id: str) -> Plan:
    """Return what is played of a trace.

    A turn that would end in the same page as the one before it is made a page longer, so that there is
    something to send.

    Args:
        turns: linked, at times that are divided by the speed-up already.
        max_tokens: the longest session's, at most; all are shortened by one factor.
        page_size_tokens: of the kv_pools.
        run_id: in the session ids, so that two replays have none in common.

    Raises:
        InvalidRequest: there is no turn.
    """
    ordered = sorted(turns, key=lambda turn: turn.at_ns)
    if not ordered:
        raise InvalidRequest("the trace has no turn to replay")
    scale = min(1.0, max_tokens / max(turn.kv_tokens for turn in ordered))
    sessions: dict[str, Session] = {}
    for turn in ordered:
        session = sessions.get(turn.session_id)
        if session is None:
            index = len(sessions)
            session = sessions[turn.session_id] = Session(index, f"replay-{run_id}-{index}", [])
        before_tokens = session.steps[-1].end_tokens if session.steps else 0
        end_tokens = max(int(turn.kv_tokens * scale), before_tokens + page_size_tokens)
        prompt_tokens = min(max(int(turn.input_tokens * scale), before_tokens), end_tokens)
        due_s = (turn.at_ns - ordered[0].at_ns) / NS_PER_S
        session.steps.append(Step(due_s, prompt_tokens, end_tokens))
    return Plan(list(sessions.values()), scale)

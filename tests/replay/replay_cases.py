"""Small traces of the format that replays read, made from a seed."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from snapd.replay.chains import Turn, chain_turns
from snapd.replay.model import Model, replace_checked
from snapd.replay.trace import BLOCK_TOKENS, Request
from snapd.units import MIB, ceil_div

# A model of a few MiB: 1,024 bytes a token, P computes 10,000 tokens a second at the start of a prompt.
SMALL = replace_checked(
    Model(),
    layers=2, kv_heads=1, head_dim=128, query_heads=1, active_params_billion=1e-3, prefill_tflops=0.02,
    chunk_tokens=1_024, step_overhead_ms=1.0, kv_pool_tokens=40_000, decode_pool_tokens=100_000,
    tpot_ms=5.0, link_gb_per_s=0.5, copy_gb_per_s=5.0, host_copy_gb_per_s=1.0, hbm_gb_per_s=50.0,
    buffer_bytes=4 * MIB,
)  # fmt: skip


def small(**changes: object) -> Model:
    return replace_checked(SMALL, **changes)


def request(at_ms: float, tokens: int, answer: int, ids: Iterable[int], **fields: Any) -> Request:
    """Return a request with the block ids given, and made-up ones for the rest of its blocks."""
    known = list(ids)
    blocks = ceil_div(tokens, BLOCK_TOKENS)
    own = [1_000_000 + round(at_ms) * 1_000 + place for place in range(len(known), blocks)]
    return Request(at_ms, tokens, answer, tuple((known + own)[:blocks]), **fields)


def generate(seed: int = 1, sessions: int = 40, span_ms: int = 60_000) -> list[Request]:
    """Return sessions of one to six turns that share a system prompt of one block, in order of time."""
    rng = random.Random(seed)
    next_id = 1
    requests = []
    for _ in range(sessions):
        at_ms = rng.uniform(0, span_ms)
        ids = [0]
        tokens = BLOCK_TOKENS
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            tokens += rng.randint(100, 3_000)
            # The last, partial block is another one once more tokens follow.
            whole = tokens // BLOCK_TOKENS
            while len(ids) < whole:
                ids.append(next_id)
                next_id += 1
            partial = [next_id] if tokens % BLOCK_TOKENS else []
            next_id += len(partial)
            answer = rng.choice((0, 1, 40, 200, 900))
            requests.append(Request(round(at_ms), tokens, answer, tuple(ids + partial)))
            tokens += answer
            at_ms += answer * SMALL.tpot_ms + rng.uniform(500, 20_000)
    return sorted(requests, key=lambda request: request.timestamp)


def turns_of(*requests: Request) -> list[Turn]:
    return chain_turns(sorted(requests, key=lambda request: request.timestamp))


def write_trace(path: Path, requests: Iterable[Request]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in requests))
    return path

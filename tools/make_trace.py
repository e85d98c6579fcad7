"""Write the demo's trace: multi-turn agent sessions, the same bytes every time.

Each session has a system prompt that it shares with others, a task, and turns: the agent's answer,
then a tool's result that comes as the next turn's input. Blocks of 512 tokens have ids; equal ids
mean equal prefixes.
"""

import random
from pathlib import Path

import click
import msgspec

SEED = 20_250_311
SESSIONS = 26
SPAN_MS = 240_000
BLOCK_TOKENS = 512
SYSTEM_BLOCKS = 2
DEFAULT_PATH = Path(__file__).parent.parent / "snapd" / "demo" / "agent_trace.jsonl"


class Blocks:
    """Gives ids to blocks: equal prefixes get equal ids."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, object], int] = {}

    def of(self, session: int, tokens: int) -> list[int]:
        """Return the ids of a session's first *tokens* tokens; a partial last block has one of its own."""
        ids: list[int] = []
        parent = -1
        for start in range(0, tokens, BLOCK_TOKENS):
            size = min(BLOCK_TOKENS, tokens - start)
            who = "system" if start // BLOCK_TOKENS < SYSTEM_BLOCKS else session
            parent = self._ids.setdefault((parent, (who, size)), len(self._ids))
            ids.append(parent)
        return ids


def requests() -> list[dict[str, object]]:
    """Return the requests in order of time."""
    rng = random.Random(SEED)
    blocks = Blocks()
    made: list[dict[str, object]] = []
    for session in range(SESSIONS):
        at_ms = session * SPAN_MS * 0.7 / SESSIONS + rng.uniform(0, 4_000)
        tokens = SYSTEM_BLOCKS * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS, 2_400)
        for _ in range(rng.choice((2, 3, 4, 4, 5, 5, 6, 7))):
            output = rng.randrange(60, 1_100)
            made.append({
                "timestamp": round(at_ms),
                "input_length": tokens,
                "output_length": output,
                "hash_ids": blocks.of(session, tokens),
            })  # fmt: skip
            # The answer, then a tool's result; now and then a long one.
            tokens += output + (rng.randrange(1_200, 2_600) if rng.random() < 0.2 else rng.randrange(80, 900))
            at_ms += 2_000 + output * 12 + rng.expovariate(1 / 6_000)
    return sorted(made, key=lambda request: (request["timestamp"], request["hash_ids"]))


@click.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), default=DEFAULT_PATH)
def main(path: Path) -> None:
    """Write the trace to PATH, by default into the package."""
    path.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in requests()))


if __name__ == "__main__":
    main()

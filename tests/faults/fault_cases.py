"""What several tests of faults do while something is wrong."""

import os
from pathlib import Path

from kv_cases import TOKENS, Pair
from raw_client import check_sums

# Hundreds of faults, in about ten minutes; without it a few.
IS_SOAK = os.environ.get("SNAPD_SOAK", "0") not in ("", "0")


def serve(pair: Pair) -> bool:
    """Bring a session home, bit by bit, and throw it out of the tree again; always True."""
    session_id = f"s{len(pair.tree.inserts)}"
    assert pair.ingest(session_id, TOKENS, pair.ready(session_id, TOKENS))[0].ok
    pair.check()
    pair.tree.evict(session_id)
    check_sums(pair.core())
    return True


def num_fds(pid: int) -> int:
    """Return how many file descriptors a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))

"""Tests here start the daemon as those of the integration do."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "integration"))

from vllm_cases import PATIENCE_S, running_daemon

from snapd.client import Client


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    with running_daemon(ranks=2, quarantine_ms=50) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: Any) -> Iterator[Any]:
    """A daemon with two ranks; after each test nothing is left of it."""
    yield shared
    with Client(str(shared.socket_path), timeout_s=PATIENCE_S) as client:
        for session in client.list_sessions(limit=1_000).sessions:
            client.abort(session.slab_handle, drained=True)

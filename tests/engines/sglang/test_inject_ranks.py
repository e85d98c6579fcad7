"""Two ranks of one engine: their trees stay alike, whatever goes wrong on one of them."""

from collections.abc import Iterator
from typing import Any

import pytest
from inject_stage import Stage, serving, staged, tokens_of
from inject_threads import Ranks, on_ranks
from sglang_cases import KINDS, SIZE_TOKENS, kind_id

from snapd.client import Client
from snapd.core.events import State
from snapd.errors import ConnectionLost, DaemonUnreachable, Reason
from snapd.wire import SnapshotFinalizeIngestReqOutput
from tests.integration.daemon_process import DaemonProcess

pytestmark = pytest.mark.usefixtures("sglang")
some_kinds = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind[0] == "mha" and kind[2] == 16], ids=kind_id
)
TOKENS, OTHER = tokens_of(96), tokens_of(80, seed=1)


@pytest.fixture(scope="module")
def daemon(sglang: None) -> Iterator[DaemonProcess]:
    with serving(ranks=2) as daemon:
        yield daemon


@pytest.fixture
def ranks() -> Ranks:
    return Ranks(2)


def crowded(stage: Stage) -> None:
    """Both ranks hold the same: something that would have to be evicted, and no room."""
    for p in stage.ps:
        p.compute(OTHER)
        p.hold("others", p.available)


def ingest(stage: Stage, handle: int) -> list[SnapshotFinalizeIngestReqOutput]:
    request = stage.request("s", TOKENS[:64], handle)
    return on_ranks([lambda p=p: p.injector.finalize_ingest(request) for p in stage.ps])


def alike(stage: Stage, *, ingested: bool) -> bool:
    """Return whether both trees hold the same, and what they should."""
    want = [64, 0] if ingested else [0, 80]
    return [[p.resident(TOKENS[:64]), p.resident(OTHER)] for p in stage.ps] == [want, want]


@some_kinds
def test_all_ranks_evict_and_insert(daemon: DaemonProcess, kind: Any, ranks: Ranks) -> None:
    with staged(daemon, kind, num_ranks=2, agreement=ranks) as stage:
        crowded(stage)
        results = ingest(stage, stage.ready("s", TOKENS[:64]))
        assert [(x.ok, x.reason) for x in results] == [(True, Reason.OK)] * 2
        assert alike(stage, ingested=True)
        assert ranks.questions == 2


@some_kinds
@pytest.mark.parametrize("broken", [0, 1])
def test_without_a_lease_on_one_rank_no_rank_touches_its_tree(
    daemon: DaemonProcess, kind: Any, ranks: Ranks, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one rank has evicted what the other finds: they schedule different batches, and hang."""

    def unreachable(*args: object, **fields: object) -> None:
        raise DaemonUnreachable("no daemon")

    with staged(daemon, kind, num_ranks=2, agreement=ranks) as stage:
        crowded(stage)
        handle = stage.ready("s", TOKENS[:64])
        with monkeypatch.context() as patched:
            patched.setattr(stage.clients[1 + broken], "begin_ingest", unreachable)
            results = ingest(stage, handle)
        assert [result.ok for result in results] == [False, False]
        assert results[1 - broken].reason is Reason.ROUND_ABORTED
        assert alike(stage, ingested=False)
        assert stage.state(handle) is State.READY
        assert all(result.ok for result in ingest(stage, handle))
        assert alike(stage, ingested=True)


@some_kinds
@pytest.mark.parametrize("deaf", [0, 1])
def test_when_one_rank_does_not_hear_the_decision_no_rank_inserts(
    daemon: DaemonProcess, kind: Any, ranks: Ranks, deaf: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost:
        def poll(self) -> None:
            raise ConnectionLost("no answer")

        wait = poll

    with staged(daemon, kind, num_ranks=2, agreement=ranks) as stage:
        handle = stage.ready("s", TOKENS[:64])
        client: Client = stage.clients[1 + deaf]
        submit = client.submit

        def submit_and_lose(call: Any) -> Lost:
            submit(call)
            return Lost()

        with monkeypatch.context() as patched:
            patched.setattr(client, "submit", submit_and_lose)
            assert [result.ok for result in ingest(stage, handle)] == [False, False]
        assert stage.state(handle) is State.INGESTED, "the daemon had decided"
        assert [p.available for p in stage.ps] == [SIZE_TOKENS] * 2


@some_kinds
def test_bytes_that_differ_on_one_rank_reach_no_tree(daemon: DaemonProcess, kind: Any, ranks: Ranks) -> None:
    with staged(daemon, kind, num_ranks=2, agreement=ranks) as stage:
        handle = stage.ready("s", TOKENS[:64])
        stage.corrupt(handle)
        results = ingest(stage, handle)
        assert [result.ok for result in results] == [False, False]
        assert results[0].reason is Reason.CHECKSUM_MISMATCH
        assert [p.available for p in stage.ps] == [SIZE_TOKENS] * 2
        assert ranks.questions == 2


def test_other_tokens_are_refused_on_all_ranks(daemon: DaemonProcess, ranks: Ranks) -> None:
    with staged(daemon, ("mha", "radix", 16), num_ranks=2, agreement=ranks) as stage:
        request = stage.request("s", OTHER, stage.ready("s", TOKENS[:64]))
        results = on_ranks([lambda p=p: p.injector.finalize_ingest(request) for p in stage.ps])
        assert {result.reason for result in results} <= {Reason.TOKEN_MISMATCH, Reason.STALE_HANDLE}
        assert ranks.questions == 1

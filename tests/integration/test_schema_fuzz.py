"""A hundred thousand messages made from the published schema, right and wrong, through the real socket."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from raw_client import (
    LAYOUT,
    Closed,
    LogFollower,
    RawClient,
    Stage,
    frame,
    rss_bytes,
    running,
    staged,
    wait_for,
)

from snapd import wire as w
from snapd.errors import Reason
from snapd.units import MIB

SCHEMA = json.loads((Path(__file__).parents[2] / "schemas" / "request.schema.json").read_text())
MESSAGES = 100_000
BATCH = 250
EDGES = (-(2**63), -1, 0, 1, 2, 7, 8, 255, 2**31, 2**53, 2**63 - 1, 2**64 - 1)
TEXTS = ("", "s", "a", "f" * 32, "\x00", "\x1b[31m", "é" * 40, "x" * 5_000, "evicted", "READY")
HASTY = {
    "ranks": 2, "reserve_timeout_ms": 2_000, "transfer_timeout_ms": 2_000, "lease_ms": 1_500,
    "ready_ttl_ms": 2_500, "quarantine_ms": 300, "layouts_max": 8, "session_history_max": 100,
    "ended_history_max": 100,
}  # fmt: skip


class Maker:
    """Makes values that a schema allows, and now and then others.

    Attributes:
        hints: values that mean something to the daemon, by the field's name.
        wrong: how often a value is of another type.
    """

    def __init__(self, rng: random.Random, wrong: float) -> None:
        self.rng = rng
        self.wrong = wrong
        self.hints: dict[str, list[Any]] = {}

    def message(self) -> Any:
        name = self.rng.choice(sorted(SCHEMA["discriminator"]["mapping"]))
        made = self.value(SCHEMA["$defs"][name])
        if self.rng.random() < self.wrong / 50:
            # What is no request at all costs its connection, and the rest of what was sent over it.
            return self.anything()
        if isinstance(made, dict) and self.rng.random() < self.wrong:
            made[self.rng.choice(("extra", "slab_handle", "rank", "num_tokens"))] = self.anything()
        return made

    def value(self, schema: dict[str, Any], name: str = "") -> Any:
        rng = self.rng
        if self.hints.get(name) and rng.random() < 0.6:
            return rng.choice(self.hints[name])
        if "$ref" in schema:
            return self.value(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return self.value(rng.choice(schema["anyOf"]))
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if name not in ("", "id", "type") and rng.random() < self.wrong / 4:
            return self.anything()
        match schema.get("type"):
            case "object":
                required = schema.get("required", ())
                return {
                    key: self.value(part, key)
                    for key, part in schema["properties"].items()
                    if key in required or rng.random() < 0.5
                }
            case "array":
                if "prefixItems" in schema:
                    return [self.value(part) for part in schema["prefixItems"]]
                return [self.value(schema["items"]) for _ in range(rng.choice((0, 1, 1, 2, 4, 9)))]
            case "integer":
                return rng.choice(EDGES) if rng.random() < 0.5 else rng.randrange(64)
            case "string":
                return rng.choice(TEXTS)
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
        raise AssertionError(f"the schema has something new: {schema}")

    def anything(self) -> Any:
        return self.rng.choice((None, -1, 2**64 - 1, 1.5, "x", b"\xff", [], {}, [[]], {"a": [1]}, True))


@pytest.fixture(scope="module")
def hasty() -> Iterator[tuple[Any, LogFollower]]:
    with running(**HASTY) as daemon:
        yield daemon, LogFollower(daemon.log_path)


@pytest.fixture
def stage(hasty: tuple[Any, LogFollower]) -> Iterator[Stage]:
    with staged(*hasty) as staging:
        yield staging


def test_the_maker_makes_every_kind_of_request_and_the_daemon_s_decoder_takes_most() -> None:
    """Without this the test below could send nothing but garbage."""
    maker = Maker(random.Random(1), wrong=0.0)
    kinds: Counter[str] = Counter()
    for _ in range(2_000):
        payload = msgspec.msgpack.encode(maker.message())
        decoded = w.decode_request(payload)
        kinds[type(decoded).__name__] += 1
    assert kinds.pop("ErrorRep", 0) < 200, "numbers beyond 64 bits signed are refused by field"
    assert set(kinds) == {kind.__name__ for kind in w.AnyRequest.__args__}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_messages_do_no_harm_and_leave_nothing(stage: Stage) -> None:
    rng = random.Random(7)
    maker = Maker(rng, wrong=0.1)
    maker.hints = {
        "layout_fingerprint": [stage.declared],
        "layout": [msgspec.to_builtins(LAYOUT)],
        "epoch": ["", stage.epoch],
        "rank": [0, 1],
        "ranks": [[], [0]],
        "num_tokens": [4, 8],
        "token_start": [0, 4],
        "protocol": [1],
        "draining": [False],
        "num_bytes": [8 * LAYOUT.token_bytes],
        "limit": [10],
        "offset": [0],
        "page_keys": [[], ["k" * 32]],
        "session_id": ["a", "b", "z"],
        "checksums": [[[1, 2]] * LAYOUT.num_planes],
    }
    replies: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    client, pid = stage.connect(), stage.daemon.process.pid
    settled_bytes = 0
    for number in range(MESSAGES // BATCH):
        if number % 20 == 0:
            owner = stage.connect()
        if number % 2 == 0:
            # They do not last: what comes aborts them, or leases them.
            stage.witness.ask(w.DrainReq, draining=False)
            handles = [owner.granted("x"), owner.ready("y"), owner.ready("z")]
            maker.hints |= {"slab_handle": handles, "lease_id": [owner.lease(handles[1]).lease_id]}
        if number == 100:
            # Histories and tables are as full as they get.
            settled_bytes = rss_bytes(pid)
        client = send_batch(stage, client, maker, number, replies, reasons)
        if number % 20 == 19:
            owner.close()
        if number % 50 == 49:
            stage.check()
    assert sum(replies.values()) > MESSAGES // 2
    # It came to all kinds of answers, good ones among them; only descriptors are not handed over in a stream.
    assert set(replies) >= {kind.__name__ for kind in w.AnyReply.__args__} - {"MapBufferRep"}
    wanted = {Reason.STALE_HANDLE, Reason.INVALID_REQUEST, Reason.WRONG_RANK, Reason.WRONG_STATE}
    assert wanted <= set(reasons)
    client.close()
    wait_for(
        lambda: stage.witness.stats().connections == 1 + len(list(open_clients(stage))), "others are gone"
    )
    stats = stage.witness.stats()
    assert stats.core.ended_history <= 100 and stats.core.session_history <= 100 and stats.core.layouts <= 8
    assert stats.requests_waiting == 0 and stats.watchers == 0
    assert rss_bytes(pid) - settled_bytes < 30 * MIB
    assert len(stage.daemon.stderr.splitlines()) < 1_000, "a flood of bad requests is no flood of lines"


def open_clients(stage: Stage) -> Iterator[RawClient]:
    return (client for client in stage._clients if client is not stage.witness and client.sock.fileno() >= 0)


def send_batch(
    stage: Stage, client: RawClient, maker: Maker, number: int, replies: Counter[str], reasons: Counter[str]
) -> RawClient:
    """Send one batch and read what comes; return the connection to go on with."""
    messages = [frame(msgspec.msgpack.encode(maker.message())) for _ in range(BATCH)]
    last_id = 10**15 + number
    client.send(b"".join(messages) + w.encode_frame(w.PingReq(id=last_id)))
    try:
        while getattr(answer := client.receive(), "id", None) != last_id:
            replies[type(answer).__name__] += 1
            if isinstance(answer, w.ErrorRep):
                reasons[answer.reason] += 1
    except Closed:
        client.close()
        return stage.connect()
    if number % 10 == 9:
        # One that watches has had its time: whoever is gone takes its watch along.
        client.close()
        return stage.connect()
    return client


@pytest.mark.slow
def test_ids_lookups_and_watches_that_nobody_asked_for_leave_no_state(stage: Stage) -> None:
    client, pid = stage.connect(), stage.daemon.process.pid
    before = stage.core()

    def flood(rounds: int) -> None:
        for number in range(rounds):
            requests = [
                w.LookupReq(id=1, layout_fingerprint=stage.declared, session_id=f"nobody-{number}-{i}")
                if i % 3
                else w.AbortReq(id=i, slab_handle=number * 1_000 + i + 1)
                for i in range(100)
            ]
            client.send(b"".join(map(w.encode_frame, requests)))
            for _ in requests:
                assert client.receive().id in (1, *range(0, 100, 3))
            with RawClient(stage.path) as watcher:
                assert isinstance(watcher.ask(w.WatchReq, session_id=f"nobody-{number}"), w.AckRep)

    flood(50)
    warm_bytes = rss_bytes(pid)
    flood(200)
    wait_for(lambda: stage.witness.stats().watchers == 0, "the watchers are gone")
    after = stage.core()
    for name in ("open_sessions", "ended_history", "session_history", "layouts", "page_keys"):
        assert getattr(after, name) == getattr(before, name), name
    assert rss_bytes(pid) - warm_bytes < 8 * MIB

"""Metrics of a real daemon: what is scraped is what the socket and the log say."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import pytest
from daemon_process import DaemonProcess
from prometheus_client.parser import text_string_to_metric_families
from raw_client import LAYOUT, RawClient, log_events, messages, running, wait_for

from snapd import wire as w
from snapd.config import load_config
from snapd.core import records as r
from snapd.errors import Reason
from snapd.metrics.definitions import METRICS, Seen
from snapd.metrics.looplag import LoopLag
from snapd.metrics.tally import Tally

StartDaemon = Callable[..., DaemonProcess]
# A sample's name and its labels.
Series = tuple[str, frozenset[tuple[str, str]]]
LARGE_TOKENS = 3_000
assert 2 * LARGE_TOKENS * LAYOUT.token_bytes > 1 << 20 > LARGE_TOKENS * LAYOUT.token_bytes


def url_of(daemon: DaemonProcess) -> str:
    """Return where a daemon says that it can be scraped."""
    (line,) = messages(daemon.stderr, "metrics")
    url = json.loads(line)["url"]
    assert isinstance(url, str)
    return url


def scrape_text(daemon: DaemonProcess) -> str:
    with urllib.request.urlopen(url_of(daemon), timeout=10) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        body = response.read()
        assert response.headers["Content-Length"] == str(len(body))
        return str(body, "utf-8")


def series(name: str, **labels: object) -> Series:
    return name, frozenset((label, str(value)) for label, value in labels.items())


def scrape(daemon: DaemonProcess) -> dict[Series, float]:
    """Return every sample of a scrape."""
    families = text_string_to_metric_families(scrape_text(daemon))
    return {
        series(sample.name, **sample.labels): sample.value for family in families for sample in family.samples
    }


def by_label(found: dict[Series, float], name: str, label: str) -> dict[str, float]:
    """Return the samples of a name by one of their labels, summed over the others; zeros are left out."""
    values: Counter[str] = Counter()
    for (sample_name, labels), value in found.items():
        if sample_name == name:
            values[dict(labels)[label]] += value  # type: ignore[assignment]
    return {key: value for key, value in values.items() if value}


class CountingClient(RawClient):
    """A client that knows how many requests of each kind it sent."""

    sent: Counter[str]

    def ask(self, kind: type[w.Request], **fields: Any) -> Any:
        self.sent = getattr(self, "sent", Counter())
        self.sent[kind.__name__] += 1
        return super().ask(kind, **fields)


def live(client: CountingClient) -> None:
    """One of each: ok, refused, evicted, aborted with and without drain proof, corrupt, and late."""
    client.ingest(client.ready("fine"))
    assert client.prepare("huge", 1_000_000).reason == "too-large"
    assert client.prepare("other", layout_fingerprint="nobody's").reason == "layout-mismatch"
    client.ready("old", LARGE_TOKENS)
    given_up = client.granted("new", LARGE_TOKENS)
    client.ask(w.AbortReq, slab_handle=given_up, drained=True)
    failed = client.granted("failed")
    client.start(failed)
    client.ask(w.TransferFailedReq, slab_handle=failed, reason=Reason.TRANSFER_FAILED, drained=False)
    corrupt = client.ready("bitten")
    lease_id = client.lease(corrupt).lease_id
    client.vote(corrupt, lease_id, ok=False, reason=Reason.CHECKSUM_MISMATCH)
    proven = client.granted("proven")
    client.start(proven)
    client.ask(w.TransferFailedReq, slab_handle=proven, reason=Reason.TRANSFER_FAILED, drained=False)
    client.ask(w.DrainedReq, slab_handle=proven)
    assert client.refusal(w.TransferStartedReq, slab_handle=1) == "stale-handle"
    assert client.refusal(w.TransferStartedReq, slab_handle=failed) == "stale-handle"
    assert client.refusal(w.GetReq, slab_handle=1) == "stale-handle"
    assert client.refusal(w.MapBufferReq, rank=7) == "wrong-rank"
    gap = client.granted("gap")
    client.granted("open")
    client.ask(w.AbortReq, slab_handle=gap, drained=True)


@pytest.fixture(scope="module")
def lived() -> Iterator[tuple[DaemonProcess, CountingClient]]:
    """A daemon in which something of everything has happened, and the one client that it still has."""
    with running(size="1MiB", metrics_address=":0") as daemon:
        # The second is not worth a line on stderr so soon after the first, but it counts.
        for _ in range(2):
            with RawClient(daemon.socket_path) as rude:
                rude.send(b"\xff" * 64)
                rude.until_closed()
        with CountingClient(daemon.socket_path) as client:
            live(client)
            wait_for(lambda: client.stats().connections == 1, "the rude client is forgotten")
            yield daemon, client


@pytest.fixture(scope="module")
def found(lived: tuple[DaemonProcess, CountingClient]) -> dict[Series, float]:
    """A scrape after all that; those before it may be a second old."""
    daemon, client = lived

    def settled() -> dict[Series, float] | None:
        log = client.stats().log
        sample = scrape(daemon)
        logged = sample[series("snapd_log_lines_written_total")]
        # Lines wait for company for a moment: those of the scrape's time must be on file as well.
        is_all = logged == len(log_events(daemon.log_path)) == client.stats().log.lines_written
        is_nothing_queued = log.queued_lines == sample[series("snapd_log_queued_lines")] == 0
        return sample if is_all and is_nothing_queued else None

    return wait_for(settled)


def test_outcomes_are_those_that_the_socket_tells(
    lived: tuple[DaemonProcess, CountingClient], found: dict[Series, float]
) -> None:
    core = lived[1].stats().core
    assert by_label(found, "snapd_outcomes_total", "reason") == core.outcomes_by_reason
    assert by_label(found, "snapd_outcomes_total", "outcome") == {"ok": 1, "refused": 2, "aborted": 6}
    assert found[series("snapd_outcomes_total", outcome="refused", reason="too-large")] == 1
    assert found[series("snapd_outcomes_total", outcome="refused", reason="draining")] == 0
    assert found[series("snapd_outcomes_total", outcome="aborted", reason="ready-expired")] == 0
    assert found[series("snapd_attempts_begun_total")] == core.attempts == 8
    assert found[series("snapd_evictions_total")] == 1
    assert found[series("snapd_evicted_bytes_total")] == LARGE_TOKENS * LAYOUT.token_bytes
    assert found[series("snapd_ingested_tokens_total")] == 8
    assert found[series("snapd_ingested_bytes_total")] == core.bytes_ingested == 8 * LAYOUT.token_bytes
    assert found[series("snapd_committed_bytes_total")] == core.bytes_committed


def test_states_and_arenas_are_those_that_the_socket_tells(
    lived: tuple[DaemonProcess, CountingClient], found: dict[Series, float]
) -> None:
    core = lived[1].stats().core
    for state, count in core.sessions_by_state.items():
        assert found[series("snapd_attempts_open", state=state)] == count
    assert core.sessions_by_state["RESERVED"] == 1
    assert found[series("snapd_quarantined_shards")] == core.quarantined_shards == 2
    (arena,) = core.arenas
    for field in ("capacity", "free", "live", "quarantined", "evictable", "largest_hole"):
        value = getattr(arena, f"{field}_bytes")
        assert found[series(f"snapd_arena_{field}_bytes", rank=0)] == value, field
    assert found[series("snapd_arena_holes", rank=0)] == arena.num_holes > 1
    share = found[series("snapd_arena_fragmentation_ratio", rank=0)]
    assert share == 1 - arena.largest_hole_bytes / arena.free_bytes > 0


def test_times_are_counted_once_for_each_line_of_the_log(
    lived: tuple[DaemonProcess, CountingClient], found: dict[Series, float]
) -> None:
    records = [line.record for line in log_events(lived[0].log_path)]
    transitions = [x for x in records if isinstance(x, r.SessionTransition) and x.from_state]
    for (state, to_state), count in Counter((x.from_state, x.to_state) for x in transitions).items():
        labels = {"state": state, "to_state": to_state}
        assert found[series("snapd_attempt_state_duration_seconds_count", **labels)] == count, labels
        spent_ms = sum(x.duration_ms for x in transitions if (x.from_state, x.to_state) == (state, to_state))
        total_s = found[series("snapd_attempt_state_duration_seconds_sum", **labels)]
        assert total_s == pytest.approx(spent_ms / 1_000)
    assert 0 not in {
        v for (name, _), v in found.items() if name == "snapd_attempt_state_duration_seconds_count"
    }
    leases = Counter(str(x.reason) for x in records if isinstance(x, r.LeaseEnded))
    assert by_label(found, "snapd_lease_duration_seconds_count", "reason") == leases
    assert leases == {"ok": 1, "checksum-mismatch": 1}
    kept = Counter(x.why for x in records if isinstance(x, r.SlabQuarantined))
    assert by_label(found, "snapd_quarantines_total", "why") == kept == {"undrained": 2, "corrupt": 1}
    released = Counter(x.why for x in records if isinstance(x, r.SlabReleased) and x.was == "quarantined")
    assert by_label(found, "snapd_quarantine_duration_seconds_count", "why") == released == {"drained": 1}


def test_every_bucket_holds_what_is_below_its_bound(found: dict[Series, float]) -> None:
    buckets: dict[Series, list[tuple[float, float]]] = {}
    for (name, labels), value in found.items():
        if name.endswith("_bucket"):
            rest = frozenset(item for item in labels if item[0] != "le")
            key = (name.removesuffix("_bucket") + "_count", rest)
            buckets.setdefault(key, []).append((float(dict(labels)["le"]), value))
    assert len(buckets) > 10
    for key, pairs in buckets.items():
        counts = [count for _, count in sorted(pairs)]
        assert counts == sorted(counts), key
        assert counts[-1] == found[key], key


def test_requests_are_counted_and_timed_by_kind(
    lived: tuple[DaemonProcess, CountingClient], found: dict[Series, float]
) -> None:
    counted = by_label(found, "snapd_request_duration_seconds_count", "kind")
    sent = dict(lived[1].sent)
    # The scrape came between two of them.
    assert 0 < counted.pop("StatsReq") < sent.pop("StatsReq")
    assert counted == sent
    for kind in counted:
        assert 0 < found[series("snapd_request_duration_seconds_sum", kind=kind)] < 10
    refused = {"stale-handle": 3, "wrong-rank": 1, "layout-mismatch": 0}
    assert by_label(found, "snapd_requests_refused_total", "reason") == {
        k: v for k, v in refused.items() if v
    }


def test_faults_of_peers_and_of_the_transport_are_counted(found: dict[Series, float]) -> None:
    assert by_label(found, "snapd_warnings_total", "kind") == {"bad-frame": 2}
    errors = by_label(found, "snapd_transport_errors_total", "kind")
    assert errors == {"transfer-failed": 2, "checksum-mismatch": 1}
    assert found[series("snapd_transport_errors_total", kind="writer-gone")] == 0


def test_the_rest_is_what_the_socket_tells(
    lived: tuple[DaemonProcess, CountingClient], found: dict[Series, float]
) -> None:
    stats = lived[1].stats()
    expected = {
        "connections": stats.connections,
        "connections_limit": stats.limits["connections_max"],
        "attempts_open_limit": stats.limits["sessions_max"],
        "watchers": 0,
        "requests_waiting": 0,
        "attempts_leased": 0,
        "draining": 0,
        "timers": stats.timers,
        "layouts": 1,
        "page_keys_held": 0,
        "sessions_remembered": stats.core.session_history,
        "ended_attempts_remembered": stats.core.ended_history,
        "messages_absorbed_total": stats.core.messages_absorbed,
        "log_written_bytes_total": stats.log.bytes_written,
        "log_records_dropped_total": 0,
        "log_write_errors_total": 0,
        "log_queued_lines": 0,
        "log_queued_bytes": 0,
        "log_rotations_total": 0,
    }
    assert {name: found[series(f"snapd_{name}")] for name in expected} == expected
    labels = {"version": stats.version, "transport": "shm", "eviction_policy": "lru"}
    assert found[series("snapd_build_info", **labels)] == 1
    assert found[series("process_resident_memory_bytes")] > 1 << 20


def test_the_loop_is_watched(lived: tuple[DaemonProcess, CountingClient]) -> None:
    daemon, _ = lived
    before = scrape(daemon)[series("snapd_event_loop_lag_seconds_count")]
    later = wait_for(
        lambda: (now := scrape(daemon))[series("snapd_event_loop_lag_seconds_count")] > before + 3 and now
    )
    assert 0 <= later[series("snapd_event_loop_lag_max_seconds")] < 10


def test_no_label_names_a_session_a_handle_or_an_epoch(
    lived: tuple[DaemonProcess, CountingClient], found: dict[Series, float]
) -> None:
    values = {value for _, labels in found for _, value in labels}
    epoch = lived[1].ask(w.PingReq).epoch
    sessions = {"fine", "huge", "old", "new", "failed", "bitten", "proven", "gap", "open"}
    assert not values & (sessions | {epoch})
    assert max(map(len, values)) < 40


def test_a_vote_that_waits_is_timed_until_its_reply(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(ranks=2, metrics_address="localhost:0")
    votes = series("snapd_request_duration_seconds_count", kind="VoteReq")
    with RawClient(daemon.socket_path) as one, RawClient(daemon.socket_path) as two:
        one.declare(rank=0)
        one.declare(rank=1)
        handle = one.granted(ranks=(0, 1))
        one.commit(handle, rank=0)
        one.commit(handle, rank=1)
        first, second = one.lease(handle, 0), two.lease(handle, 1)
        request_id = one.new_id()
        one.send(w.VoteReq(id=request_id, slab_handle=handle, rank=0, lease_id=first.lease_id, ok=True))
        waiting = wait_for(lambda: (now := scrape(daemon))[series("snapd_requests_waiting")] == 1 and now)
        assert votes not in waiting
        assert waiting[series("snapd_attempts_leased")] == 1
        assert two.vote(handle, second.lease_id, rank=1).commit
        assert one.reply_to(request_id).commit
        done = wait_for(lambda: (now := scrape(daemon)).get(votes) == 2 and now)
        # The scrapes lie between the vote and its answer; the other vote did not wait.
        assert done[series("snapd_request_duration_seconds_bucket", kind="VoteReq", le="0.001")] <= 1


def test_metrics_do_not_keep_watchers_from_seeing_transitions(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(metrics_address=":0")
    with RawClient(daemon.socket_path) as watcher, RawClient(daemon.socket_path) as client:
        watcher.ask(w.WatchReq)
        client.granted("seen")
        push = watcher.push()
        assert isinstance(push, w.WatchTransition) and push.session_id == "seen"


def test_a_daemon_that_drains_is_still_scraped(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(metrics_address=":0")
    with RawClient(daemon.socket_path) as client:
        client.ask(w.DrainReq, draining=True)
    assert wait_for(lambda: scrape(daemon)[series("snapd_draining")] == 1)


def test_a_daemon_that_stops_cuts_scrapers_off(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(metrics_address=":0")
    parts = urlsplit(url_of(daemon))
    with socket.create_connection((parts.hostname, parts.port), timeout=15) as sock:
        sock.sendall(b"GET ")
        daemon.stop()
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


def test_with_mooncake_its_notifications_are_told(lived: tuple[DaemonProcess, CountingClient]) -> None:
    mooncake = w.MooncakeStatistics(
        package="p", segment_name="s", protocol="tcp", devices="", metadata_server="m", is_loopback_only=True,
        registered_pieces=3, notify="commit", notifications_taken=5, notifications_refused=7,
        notifications_ignored=11, settings={},
    )  # fmt: skip
    stats = msgspec.structs.replace(lived[1].stats(), mooncake=mooncake)
    seen = Seen(stats, 0, Tally(), {}, {}, cast("LoopLag", None), {}, load_config(Path(os.devnull), {}, {}))
    samples = {metric.name: metric.samples for metric in METRICS}
    assert dict(samples["snapd_mooncake_registered_pieces"](seen)) == {(): 3}
    notifications = dict(samples["snapd_mooncake_notifications_total"](seen))
    assert notifications == {("taken",): 5, ("refused",): 7, ("ignored",): 11}
    assert dict(samples["snapd_transport_errors_total"](seen))["notification-refused",] == 7


# --- off by default ----------------------------------------------------------------------------


def internet_sockets(pid: int) -> list[str]:
    """Return the internet sockets that a process has."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The connection that asked whether it is up goes.
            inodes.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
    tables = ("tcp", "tcp6", "udp", "udp6")
    lines = [
        line
        for table in tables
        if (path := Path(f"/proc/{pid}/net/{table}")).exists()
        for line in path.read_text().splitlines()[1:]
    ]
    return [line for line in lines if line.split()[9] in inodes]


def test_no_port_is_open_unless_asked_for(start_daemon: StartDaemon) -> None:
    off = start_daemon()
    assert internet_sockets(off.process.pid) == []
    assert messages(off.stderr, "metrics") == []
    on = start_daemon(metrics_address=":0")
    assert len(internet_sockets(on.process.pid)) == 1, "this test would see one"


def test_a_daemon_without_metrics_imports_nothing_for_them() -> None:
    code = (
        "import sys, snapd.daemon; print(*(m for m in sys.modules if 'metrics.' in m or 'prometheus' in m))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert ended.stdout.strip() == ""


def test_without_a_host_only_this_host_can_scrape(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(metrics_address=":0")
    assert url_of(daemon).startswith("http://127.0.0.1:")
    assert messages(daemon.stderr, "metrics are open to other hosts, without a password") == []


def test_an_address_that_others_reach_is_taken_with_a_warning(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(metrics_address="0.0.0.0:0")
    assert len(messages(daemon.stderr, "metrics are open to other hosts, without a password")) == 1
    assert "snapd_build_info" in scrape_text(daemon)


def test_an_ipv6_address_stands_in_brackets(start_daemon: StartDaemon) -> None:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    daemon = start_daemon(metrics_address="[::1]:0")
    assert url_of(daemon).startswith("http://[::1]:")
    assert "snapd_build_info" in scrape_text(daemon)

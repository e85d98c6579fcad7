"""Dashboard, alerts and page speak of metrics that there are; and Prometheus' own tool agrees."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess
from prometheus_client.parser import text_string_to_metric_families
from raw_client import running
from test_metrics import CountingClient, live, scrape_text

from snapd.core.events import State
from snapd.core.session import ArenaView
from snapd.errors import Reason
from snapd.metrics.definitions import METRICS, fragmentation, table
from snapd.metrics.exposition import Exposition, buckets_of
from snapd.metrics.looplag import PERIOD_S, WINDOW_S, LoopLag
from snapd.metrics.tally import Histogram

ROOT = Path(__file__).parent.parent.parent
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"
ALERTS = ROOT / "deploy" / "prometheus-alerts.yml"
PAGE = ROOT / "docs" / "metrics.md"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
_NAME = re.compile(r"(?<![\w-])(?:snapd|process)_[a-z_]+\b")
_MATCHERS = re.compile(r"(snapd_[a-z_]+)\{([^}]*)\}")
_MATCHER = re.compile(r'([a-z_]+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
# Labels that Prometheus adds.
ADDED_LABELS = {"instance", "job", "le"}
ALERT_NAMES = re.findall(r"- alert: (\w+)", ALERTS.read_text())


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running(size="1MiB", metrics_address=":0") as started:
        with CountingClient(started.socket_path) as client:
            live(client)
        yield started


@pytest.fixture(scope="module")
def names(daemon: DaemonProcess) -> set[str]:
    """Return every name that a query can use, from a scrape."""
    found = set()
    for family in text_string_to_metric_families(scrape_text(daemon)):
        if family.type == "histogram":
            found |= {f"{family.name}_{suffix}" for suffix in ("bucket", "count", "sum")}
        else:
            found.add(family.name + ("_total" if family.type == "counter" else ""))
    return found


def test_a_scrape_has_every_metric_that_is_defined_with_its_kind(daemon: DaemonProcess) -> None:
    families = {family.name: family for family in text_string_to_metric_families(scrape_text(daemon))}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), sample


@pytest.mark.parametrize("path", [DASHBOARD, ALERTS, PAGE], ids=lambda path: path.name)
def test_every_name_in_a_file_is_scraped(path: Path, names: set[str]) -> None:
    histograms = {metric.name for metric in METRICS if metric.kind == "histogram"}
    # In prose a histogram goes without its suffix.
    known = names | (set() if path == DASHBOARD else histograms)
    used = set(_NAME.findall(path.read_text()))
    assert len(used) > 10
    assert used <= known, used - known


@pytest.mark.parametrize("path", [DASHBOARD, ALERTS, PAGE], ids=lambda path: path.name)
def test_every_label_and_value_in_a_query_can_occur(path: Path) -> None:
    labels = {
        metric.name + suffix: set(metric.labels) | ADDED_LABELS
        for metric in METRICS
        for suffix in ("", "_bucket", "_sum", "_count")
    }
    values: dict[str, set[str]] = {
        "reason": set(Reason), "state": set(State), "to_state": set(State),
        "outcome": {"ok", "aborted", "refused"}, "kind": set(Reason),
    }  # fmt: skip
    seen = 0
    for name, matchers in _MATCHERS.findall(path.read_text().replace('\\"', '"')):
        for label, value in _MATCHER.findall(matchers):
            seen += 1
            assert label in labels[name], (name, label)
            assert label in ADDED_LABELS or value in values[label], (name, label, value)
    assert seen >= 1


def queries() -> Iterator[str]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def test_the_dashboard_is_whole() -> None:
    board = json.loads(DASHBOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    cells = [
        (x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(set(cells)) == len(cells), "no two panels lie on one another"
    assert all(panel["description"] for panel in panels if panel["type"] != "row")
    assert all('instance=~"$instance"' in query for query in queries())
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "instance"}


def test_every_alert_says_what_to_do() -> None:
    blocks = ALERTS.read_text().split("- alert: ")[1:]
    for block in blocks:
        for key in ("expr:", "severity:", "summary:", "description:", "runbook:"):
            assert key in block, (block.split("\n")[0], key)
    assert len(ALERT_NAMES) == len(blocks) == len(set(ALERT_NAMES))


def test_the_table_in_the_docs_is_what_the_code_says() -> None:
    """Put the output of `python -m snapd.metrics.definitions` between the two marks."""
    shown = PAGE.read_text().split("<!-- metrics: begin -->\n")[1].split("<!-- metrics: end -->")[0]
    assert shown == table()


# --- with promtool


def promtool(*arguments: str, stdin: str = "") -> str:
    assert PROMTOOL is not None
    ended = subprocess.run([PROMTOOL, *arguments], input=stdin, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@needs_promtool
def test_promtool_finds_no_fault_with_a_scrape(daemon: DaemonProcess) -> None:
    assert promtool("check", "metrics", stdin=scrape_text(daemon)).strip() == ""


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    assert f"{len(ALERT_NAMES)} rules found" in promtool("check", "rules", str(ALERTS))


@needs_promtool
def test_promtool_takes_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    def plain(query: str) -> str:
        return query.replace("$__rate_interval", "5m").replace("$__range", "1h").replace("$instance", ".*")

    rules = [{"record": f"panel:{number}", "expr": plain(query)} for number, query in enumerate(queries())]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(path))


HEALTHY = {
    'up{job="kv-snapd"}': "1x60",
    "snapd_build_info": "1x60",
    'snapd_outcomes_total{outcome="ok", reason="ok"}': "0+600x60",
    'snapd_outcomes_total{outcome="refused", reason="snapshot-buf-full"}': "0+6x60",
    'snapd_arena_quarantined_bytes{rank="0"}': "10x60",
    'snapd_arena_capacity_bytes{rank="0"}': "100x60",
    'snapd_transport_errors_total{kind="transfer-failed"}': "0x60",
    'snapd_transport_errors_total{kind="checksum-mismatch"}': "0x60",
    "snapd_log_records_dropped_total": "0x60",
    'snapd_event_loop_lag_seconds_bucket{le="0.025"}': "0+1200x60",
    'snapd_event_loop_lag_seconds_bucket{le="0.25"}': "0+1200x60",
    'snapd_event_loop_lag_seconds_bucket{le="+Inf"}': "0+1200x60",
    "snapd_event_loop_lag_max_seconds": "0.02x60",
    "snapd_connections": "8x60",
    "snapd_connections_limit": "1024x60",
    'snapd_attempts_open{state="READY"}': "100x60",
    'snapd_attempts_open{state="RESERVED"}': "1x60",
    "snapd_quarantined_shards": "1x60",
    "snapd_attempts_open_limit": "1000x60",
    "snapd_draining": "0x60",
}
ILL: dict[str, tuple[dict[str, str | None], set[str]]] = {
    "nothing is wrong": ({}, set()),
    "no scrape is answered": ({'up{job="kv-snapd"}': "0x60"}, {"SnapdNoHeartbeat"}),
    "nobody is scraped": (
        {'up{job="kv-snapd"}': None, "snapd_build_info": None}, {"SnapdNoHeartbeat"}
    ),
    "P ingests nothing": (
        {
            'snapd_outcomes_total{outcome="ok", reason="ok"}': "0+60x60",
            'snapd_outcomes_total{outcome="aborted", reason="ready-expired"}': "0+540x60",
        },
        {"SnapdOkRateLow"},
    ),
    "one of two attempts a day fails": (
        {
            'snapd_outcomes_total{outcome="ok", reason="ok"}': "0x30 1x30",
            'snapd_outcomes_total{outcome="refused", reason="snapshot-buf-full"}': "0x60",
            'snapd_outcomes_total{outcome="aborted", reason="ready-expired"}': "0x40 2x20",
        },
        set(),
    ),
    "the buffer is full": (
        {'snapd_outcomes_total{outcome="refused", reason="snapshot-buf-full"}': "0+60x60"},
        {"SnapdBufferFull"},
    ),
    "quarantine grows": (
        {'snapd_arena_quarantined_bytes{rank="0"}': "30x60"}, {"SnapdQuarantineHigh"}
    ),
    "transfers fail": (
        {'snapd_transport_errors_total{kind="transfer-failed"}': "0+1x60"}, {"SnapdTransportErrors"}
    ),
    "one checksum is wrong": (
        {'snapd_transport_errors_total{kind="checksum-mismatch"}': "0x55 1x5"}, {"SnapdTransportErrors"}
    ),
    "the disk is full": ({"snapd_log_records_dropped_total": "0x55 7x5"}, {"SnapdLogDropping"}),
    "the loop is late": (
        {'snapd_event_loop_lag_seconds_bucket{le="0.025"}': "0+1000x60"}, {"SnapdEventLoopLag"}
    ),
    "the loop stood still": ({"snapd_event_loop_lag_max_seconds": "0x58 4x2"}, {"SnapdEventLoopStalled"}),
    "connections leak": ({"snapd_connections": "1000x60"}, {"SnapdConnectionsNearLimit"}),
    "attempts pile up": ({'snapd_attempts_open{state="READY"}': "950x60"}, {"SnapdAttemptsNearLimit"}),
    "a drain was forgotten": ({"snapd_draining": "1x60"}, {"SnapdDrainingForLong"}),
}  # fmt: skip


@needs_promtool
def test_each_alert_fires_when_its_fault_is_there_and_no_other_does(tmp_path: Path) -> None:
    assert set().union(*(alerts for _, alerts in ILL.values())) == set(ALERT_NAMES)
    tests = []
    for name, (changes, alerts) in ILL.items():
        series: dict[str, str | None] = HEALTHY | changes
        expected = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)]
        tests.append(
            {
                "name": name,
                "interval": "1m",
                "input_series": [{"series": key, "values": value} for key, value in series.items() if value],
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": "59m",
                        "exp_samples": expected,
                    }
                ],
            }
        )
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", str(path))


# --- the parts


def test_a_value_at_a_bound_is_in_the_bucket_of_that_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert buckets_of(histogram) == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert (histogram.total, histogram.count) == (7.0, 5)


def test_a_full_arena_is_not_fragmented() -> None:
    full = ArenaView(0, 1024, 0, 1024, 0, 0, 0, 0)
    assert fragmentation(full) == 0
    halves = ArenaView(0, 1024, 512, 512, 0, 0, 256, 2)
    assert fragmentation(halves) == 0.5


class FakeClock:
    """A clock and the one timer of a loop."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.armed: list[tuple[float, Any]] = []

    def call_later(self, delay: float, callback: Any) -> "FakeClock":
        self.armed.append((self.now_s + delay, callback))
        return self

    def cancel(self) -> None:
        self.armed.clear()

    def fire(self, late_s: float) -> None:
        ((due_s, callback),) = self.armed
        self.armed.clear()
        self.now_s = due_s + late_s
        callback()


def test_lag_is_how_late_a_timer_is_and_the_maximum_is_of_the_last_minutes() -> None:
    clock = FakeClock()
    lag = LoopLag(clock, lambda: clock.now_s)
    # A timer that comes early is not late.
    for late_s in (0.0, -0.001, 0.5):
        clock.fire(late_s)
    assert lag.times.count == 3 and lag.times.total == pytest.approx(0.5)
    assert lag.max_s == pytest.approx(0.5)
    for _ in range(int(WINDOW_S / PERIOD_S)):
        clock.fire(0.001)
    assert lag.max_s == pytest.approx(0.5)
    for _ in range(int(2 * WINDOW_S / PERIOD_S)):
        clock.fire(0.002)
    assert lag.max_s == pytest.approx(0.002)
    lag.close()
    assert clock.armed == []


def test_everything_is_looked_at_once_a_second_however_often_it_is_scraped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("snapd.metrics.exposition.METRICS", ())
    now_s, looks = [10.0], []
    exposition = Exposition(lambda: looks.append(now_s[0]), lambda: now_s[0])  # type: ignore[arg-type]
    for now_s[0] in (10.0, 10.5, 10.9, 11.0, 11.5, 12.0):
        assert b"process_open_fds" in exposition.text()
    assert looks == [10.0, 11.0, 12.0]

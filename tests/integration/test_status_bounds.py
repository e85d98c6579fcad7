"""What ``snapd status`` says of bounds: how much is in use, what is near, and where each value comes from."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from daemon_process import DaemonProcess
from test_cli import Workers, good

from snapd.bounds import SETTINGS
from snapd.cli.statusbounds import is_near, show_limits, show_usage, usage_text
from snapd.config import Config
from snapd.fixedbounds import DAEMON
from snapd.wire import BoundView

ANYWHERE = "127.0.0.1:0"
# What can be counted, in a daemon that has everything switched on that this machine has.
COUNTED = {
    "sessions_max", "ended_history_max", "session_history_max", "layouts_max", "page_keys_total_max",
    "connections_max", "tcp_connections_max", "watchers_max", "watch_queue_max", "reply_buffer_bytes_max",
    "requests_in_flight_max", "log_queue_bytes_max", "log_queue_lines_max", "kv_events_pages_max",
    "kv_events_queue_bytes_max", "kv_events_buffer_batches", "kv_events_buffer_bytes_max",
    "tls_handshakes_max", "limits.tcp_addresses_max", "limits.metrics_connections_max",
}  # fmt: skip


def bound(used: int | None, value: int, name: str = "sessions_max", **fields: Any) -> BoundView:
    return BoundView(
        name=name, value=value, unit=fields.pop("unit", ""), origin="default", used=used,
        at_bound="a prepare is refused with `limit-reached`", **fields,
    )  # fmt: skip


def test_what_is_counted_is_shown_with_its_bound(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(
        metrics_address=ANYWHERE, kv_events_address=f"tcp://{ANYWHERE}", kv_events_replay_address=f"tcp://{ANYWHERE}",
        sessions_max=3, page_keys_total_max=50,
    )  # fmt: skip
    at = ("--socket", str(daemon.socket_path))
    workers = Workers(daemon.socket_path)
    workers.reserve("a")
    workers.ingest("b")
    found = {one["name"]: one for one in json.loads(good("status", *at, "--json"))["bounds"]}
    counted = {name for name, one in found.items() if one["used"] is not None}
    assert counted == {name for name in COUNTED if not name.startswith(("tls", "limits.tcp"))}
    assert (found["sessions_max"]["used"], found["sessions_max"]["value"]) == (1, 3)
    assert (found["ended_history_max"]["used"], found["session_history_max"]["used"]) == (1, 1)
    assert found["connections_max"]["used"] == 2 and found["requests_in_flight_max"]["used"] == 1
    text = good("status", *at)
    assert "in use: sessions_max 1/3, " in text and "\n! " not in text
    workers.reserve("c")
    workers.reserve("d")
    text = good("status", *at)
    assert "in use: ! sessions_max 3/3, " in text
    assert "\n! sessions_max: 3 of 3 in use (100%)\n  at it: a prepare is refused with limit-reached" in text
    workers.client.close()


def test_what_comes_over_tcp_is_counted(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon()
    daemon.config_path.write_text(
        f'tcp_address = "{ANYWHERE}"\n[[access]]\nloopback = true\nroles = ["operator"]\n'
    )
    daemon.restart()
    status = json.loads(good("status", "--socket", str(daemon.socket_path), "--json"))
    used = {one["name"]: one["used"] for one in status["bounds"]}
    assert (used["tls_handshakes_max"], used["limits.tcp_addresses_max"], used["tcp_connections_max"]) == (
        0,
        0,
        0,
    )
    origins = {one["name"]: one["origin"] for one in status["bounds"]}
    assert origins["drain_timeout_ms"] == "command line" and origins["lease_ms"] == "default"


def test_limits_shows_where_each_value_comes_from(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(**{"limits.log_close_ms": 4_000})
    daemon.config_path.write_text("lease_ms = 7000\n[limits]\naccept_backlog = 33\n")
    daemon.restart()
    at = ("--socket", str(daemon.socket_path))
    text = good("status", *at, "--limits")
    path = re.escape(str(daemon.config_path))
    for row in (
        rf"lease_ms +7000 +7 s +{path}",
        rf"limits\.accept_backlog +33 +{path}",
        r"limits\.log_close_ms +4000 +4 s +command line",
        r"quarantine_ms +60000 +60 s +default",
        r"attempts in one reply to a list +1000",
        r"a plane's bytes a token +16777216 +16 MiB",
    ):
        assert re.search(rf"^{row}$", text, re.MULTILINE), row
    told = json.loads(good("status", *at, "--json"))
    assert [one["name"] for one in told["bounds"]] == [*SETTINGS, *(one.name for one in DAEMON)]
    assert {one["name"]: one["value"] for one in told["bounds"] if one["name"] in SETTINGS} == told["limits"]
    assert {one["origin"] for one in told["bounds"] if one["name"] not in SETTINGS} == {"fixed"}


def test_near_is_nine_tenths_of_what_is_not_made_to_be_full() -> None:
    assert [is_near(bound(used, 100)) for used in (None, 0, 89, 90, 100)] == [False, False, False, True, True]
    assert not is_near(bound(100, 100, is_rolling=True))


def test_a_size_is_shown_in_its_unit_and_a_near_one_with_a_mark() -> None:
    assert usage_text(bound(5, 1_024, "log_queue_bytes_max", unit="bytes")) == "log_queue_bytes_max 5B/1KiB"
    assert usage_text(bound(99_000, 100_000)) == "! sessions_max 99,000/100,000"


def test_lines_of_what_is_in_use_keep_their_parts_whole(capsys: pytest.CaptureFixture[str]) -> None:
    bounds = [bound(number, 1_000, f"bound_number_{number}_max") for number in range(12)]
    show_usage([*bounds, bound(None, 5, "never_counted")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3 and all(len(line) <= 80 for line in lines)
    parts = [part for line in lines for part in line.removeprefix("in use:").strip().rstrip(",").split(", ")]
    assert parts == [usage_text(one) for one in bounds]


def test_a_daemon_that_says_nothing_of_bounds_has_its_limits_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Older:
        bounds = ()
        limits = {"lease_ms": Config().lease_ms}

    show_usage(())
    show_limits(Older())  # type: ignore[arg-type]
    assert re.search(r"^lease_ms +10000 +10 s$", capsys.readouterr().out, re.MULTILINE)

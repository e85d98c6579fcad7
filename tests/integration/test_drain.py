"""``snapd drain --wait``, the warm shutdown, against a real daemon process."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import click
import pytest
from daemon_process import DaemonProcess, clean_environment
from test_cli import CLI, LAYOUT, NUM_TOKENS, RUN_S, Workers, bad, call, good, in_terminal

from snapd import peers
from snapd.cli import drain as drain_module
from snapd.cli.drain import Lines, NotDrained, Report, report_of, seconds
from snapd.client import Client
from snapd.errors import Draining

StartDaemon = Callable[..., DaemonProcess]


@contextlib.contextmanager
def when_draining(daemon: DaemonProcess, act: Callable[[], object]) -> Iterator[None]:
    """Do something in a thread as soon as the daemon drains; its failure is the test's."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with Client(str(daemon.socket_path)) as client:
                until(lambda: client.stats().core.is_draining)
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(RUN_S)
    assert not thread.is_alive() and not failures, failures


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + RUN_S
    while not is_so():
        assert time.monotonic() < deadline_s


def outcomes(daemon: DaemonProcess) -> dict[str, str]:
    """Return how each session's attempt ended, as the log says."""
    lines = [json.loads(line) for line in daemon.log_path.read_text().splitlines()]
    return {line["session_id"]: line["reason"] for line in lines if line["event"] == "sync.outcome"}


@pytest.fixture
def at(daemon: DaemonProcess) -> tuple[str, str]:
    return ("--socket", str(daemon.socket_path))


@pytest.fixture
def workers(daemon: DaemonProcess) -> Iterator[Workers]:
    made = Workers(daemon.socket_path)
    yield made
    made.client.close()


# --- the drain that succeeds -------------------------------------------------------------------


def test_what_is_open_goes_on_to_its_end_and_then_the_daemon_exits(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(reserve_timeout_ms=5_000)
    workers = Workers(daemon.socket_path)
    ready, aborted = workers.commit("ready"), workers.commit("aborted")
    workers.reserve("expired")

    def act() -> None:
        with pytest.raises(Draining):
            workers.reserve("refused")
        workers.client.vote(ready, 0, workers.lease(ready), True)
        workers.client.abort(aborted)

    with when_draining(daemon, act):
        text = good("drain", "--wait", "--json", "--socket", str(daemon.socket_path))
    result = json.loads(text)
    pid, waited_ms = daemon.process.pid, result.pop("waited_ms")
    assert result.pop("epoch") == workers.client.epoch and waited_ms >= 0
    assert result == {
        "drained": True, "ingested": 1, "expired": 1, "aborted": 1, "left": 0, "left_by_state": {},
        "refused": 1, "stopped": True, "pid": pid,
    }  # fmt: skip
    assert daemon.process.wait(RUN_S) == 0 and not daemon.socket_path.exists()
    assert outcomes(daemon) == {
        "ready": "ok", "aborted": "client-abort", "expired": "reserve-timeout", "refused": "draining",
    }  # fmt: skip
    workers.client.close()


def test_nothing_open_is_drained_at_once_and_the_exit_has_been_waited_for(
    daemon: DaemonProcess, at: tuple[str, str]
) -> None:
    text = good("drain", "--wait", *at)
    assert text.startswith("drained after") and text.endswith("0 left\nthe daemon has stopped\n")
    assert daemon.process.wait(0) == 0


def test_a_transfer_that_is_under_way_may_commit_and_be_ingested(
    daemon: DaemonProcess, workers: Workers, at: tuple[str, str]
) -> None:
    handle = workers.reserve("a")
    workers.client.transfer_started(handle)

    def act() -> None:
        num_bytes = LAYOUT.token_bytes * NUM_TOKENS
        workers.client.commit(handle, 0, num_bytes, NUM_TOKENS, ((1, 2),) * LAYOUT.num_planes)
        workers.client.vote(handle, 0, workers.lease(handle), True)

    with when_draining(daemon, act):
        text = good("drain", "--wait", *at)
    assert "1 ingested, 0 expired, 0 aborted, 0 left" in text
    assert outcomes(daemon) == {"a": "ok"}


def test_keep_running_leaves_a_daemon_that_drains(
    daemon: DaemonProcess, workers: Workers, at: tuple[str, str]
) -> None:
    assert "keeps running and refuses" in good("drain", "--wait", "--keep-running", *at)
    with pytest.raises(Draining):
        workers.reserve("a")
    good("drain", "--off", *at)
    workers.reserve("a")
    assert daemon.process.poll() is None


# --- the drain that does not -------------------------------------------------------------------


def test_when_the_time_is_over_it_says_what_is_left_and_stops_all_the_same(
    daemon: DaemonProcess, workers: Workers, at: tuple[str, str]
) -> None:
    handle = workers.commit("unwanted")
    status, out, err = call("drain", "--wait", "--timeout", "100ms", *at)
    assert status == 1
    assert f"{handle}" in out and "unwanted" in out and "0 aborted, 1 left\nthe daemon has stopped" in out
    assert "1 attempt still open after 100 ms, 1 READY" in err and len(err.splitlines()) == 1
    assert daemon.process.wait(0) == 0
    assert outcomes(daemon) == {"unwanted": "daemon-stopped"}


def test_json_says_what_is_left_too_and_keep_running_lets_it_live(
    workers: Workers, at: tuple[str, str]
) -> None:
    workers.reserve("a")
    workers.commit("b")
    status, out, err = call("drain", "--wait", "--keep-running", "--timeout", "0.05", "--json", *at)
    assert status == 1 and "the daemon still drains" in err
    result = json.loads(out)
    assert (result["drained"], result["left"], result["stopped"]) == (False, 2, False)
    assert result["left_by_state"] == {"RESERVED": 1, "READY": 1}
    assert workers.client.stats().core.open_sessions == 2


def test_of_many_that_are_left_some_are_shown_and_the_rest_counted(
    workers: Workers, at: tuple[str, str]
) -> None:
    for number in range(13):
        workers.reserve(f"s{number}")
    _, out, _ = call("drain", "--wait", "--keep-running", "--timeout", "50ms", *at)
    assert "s9 " in out and "s10" not in out and "and 3 more" in out


def test_somebody_who_ends_the_drain_ends_the_wait(
    daemon: DaemonProcess, workers: Workers, at: tuple[str, str]
) -> None:
    workers.reserve("a")
    with when_draining(daemon, lambda: workers.client.drain(False)):
        status, _, err = call("drain", "--wait", *at)
    assert status == 1 and "somebody has ended the drain" in err
    workers.reserve("b")
    assert daemon.process.poll() is None, "nobody wants it to stop any more"


def test_a_daemon_that_goes_away_meanwhile_is_told_with_what_was_open(
    daemon: DaemonProcess, workers: Workers, at: tuple[str, str]
) -> None:
    workers.reserve("a")
    with when_draining(daemon, daemon.kill):
        status, _, err = call("drain", "--wait", *at)
    assert status == 1 and "went away with 1 attempt open, 1 RESERVED" in err


def statistics(open_sessions: int, attempts_ok: int = 0, epoch: str = "e1", **outcomes: int) -> Any:
    """Return what a daemon says that drains, with so many attempts open of five; reasons with underscores."""
    core = SimpleNamespace(
        open_sessions=open_sessions,
        attempts=5,
        attempts_ok=attempts_ok,
        outcomes_by_reason={reason.replace("_", "-"): count for reason, count in outcomes.items()},
        sessions_by_state={"RESERVED": 0, "READY": open_sessions},
        is_draining=True,
    )
    return SimpleNamespace(epoch=epoch, pid=7, uptime_ms=0, core=core)


def test_a_daemon_that_was_restarted_meanwhile_is_not_taken_for_drained() -> None:
    client: Any = SimpleNamespace(stats=lambda: statistics(0, epoch="e2"))
    with pytest.raises(NotDrained, match="was restarted meanwhile"):
        drain_module._wait(client, statistics(1), 60.0, lambda *_: None)


def test_an_attempt_that_came_just_before_the_drain_is_waited_for() -> None:
    looks = [statistics(1), statistics(1), statistics(0, 1, ok=1)]
    client: Any = SimpleNamespace(stats=lambda: looks.pop(0))
    first = statistics(0)
    first.core.attempts -= 1
    report = drain_module._wait(client, first, 60.0, lambda *_: None)
    assert (report.ingested, report.aborted, report.left, looks) == (1, 0, 0, [])


def test_a_refusal_is_no_end_of_an_attempt() -> None:
    """Some reasons, such as invalid-request, stand for both."""
    first = statistics(5, invalid_request=1)
    last = statistics(0, 3, ok=3, invalid_request=2, draining=4, ready_expired=1, client_abort=1)
    report = report_of(first, last)
    assert (report.ingested, report.expired, report.aborted, report.refused) == (3, 1, 1, 5)
    assert report.left == 0 and report.left_by_state == {}


# --- who may stop it ---------------------------------------------------------------------------


def test_a_daemon_that_cannot_be_seen_is_not_drained_before_that_is_known(
    workers: Workers, at: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "open_pidfd", lambda *_: None)
    assert "run this where the daemon runs" in bad(1, "drain", "--wait", *at)
    assert not workers.client.stats().core.is_draining
    good("drain", "--wait", "--keep-running", *at)


def test_a_daemon_of_another_user_is_not_drained_before_that_is_known(
    workers: Workers, at: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    assert f"only user {os.geteuid()} and root may stop" in bad(1, "drain", "--wait", *at)
    assert not workers.client.stats().core.is_draining


def test_a_daemon_that_does_not_exit_is_no_success(
    daemon: DaemonProcess, at: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_module, "_stop", lambda *_: False)
    status, out, err = call("drain", "--wait", "--json", *at)
    assert status == 1 and json.loads(out)["stopped"] is False
    assert f"still runs: look at process {daemon.process.pid}" in err


def test_ctrl_c_leaves_the_daemon_running_and_draining_and_says_so(
    daemon: DaemonProcess, workers: Workers, at: tuple[str, str]
) -> None:
    workers.reserve("a")
    process = subprocess.Popen(
        [*CLI, "drain", "--wait", *at],
        env=clean_environment() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("draining: 0 of 1 ended; 1 RESERVED; ")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=RUN_S)
    assert process.returncode == 130 and "the daemon goes on draining" in err
    assert workers.client.stats().core.is_draining and daemon.process.poll() is None


# --- how it looks ------------------------------------------------------------------------------


def test_a_terminal_sees_a_bar_that_goes_away(workers: Workers, at: tuple[str, str]) -> None:
    workers.commit("a")
    status, shown = in_terminal("drain", "--wait", "--keep-running", "--timeout", "400ms", *at)
    assert status == 1
    assert "draining" in shown and "0 of 1 ended; 1 READY" in shown and "\x1b[2K" in shown


def test_lines_come_when_the_figures_change_and_at_most_once_a_second(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 0.0
    lines = Lines(lambda: now_s)

    def said(left: int) -> str:
        lines(Report("e", 1, ingested=9 - left, left_by_state={"READY": left} if left else {}), 5.0)
        return capsys.readouterr().out

    assert said(9) == "draining: 0 of 9 ended; 9 READY; 5 s left\n"
    now_s = 0.9
    assert said(8) == ""
    now_s = 1.0
    assert said(7) == "draining: 2 of 9 ended; 7 READY; 5 s left\n"
    now_s = 9.0
    assert said(7) == "" and said(0) == "", "nothing new, and the end has a line of its own"


@pytest.mark.parametrize(
    ("text", "wanted_s"),
    [("60s", 60.0), ("500ms", 0.5), ("2min", 120.0), ("2m", 120.0), ("1.5h", 5400.0), ("7", 7.0)],
)
def test_a_time_has_a_unit_or_is_seconds(text: str, wanted_s: float) -> None:
    assert seconds(None, None, text) == wanted_s  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "s", "-1s", "0", "1d", "25h", "9" * 400, "nan", "1e3"])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter):
        seconds(None, None, text)  # type: ignore[arg-type]
    assert "--timeout" in bad(2, "drain", "--wait", f"--timeout={text}")


def test_options_that_do_not_go_together_are_refused() -> None:
    assert "exclude each other" in bad(2, "drain", "--wait", "--off")
    assert "goes with --wait" in bad(2, "drain", "--keep-running")

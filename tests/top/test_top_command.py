"""``snapd top`` for scripts: ``--once``, ``--json``, and what users get wrong."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, clean_environment
from elsewhere import MAIN_ELSEWHERE
from terminal import CLI, PATIENCE_S
from top_cases import Workers, answer

from snapd import calls
from snapd.cli import topfeed
from snapd.cli.topfeed import Feed, no_overview, problem_of
from snapd.client import Client
from snapd.core.overview import PEERS_MAX
from snapd.errors import DaemonUnreachable, InvalidRequest, LayoutMismatch, LimitReached, RequestTimeout
from snapd.wire import StatsRep, StatsReq, WatchLost


def top(daemon: DaemonProcess | None, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it as a process, without a terminal; it must not show a traceback."""
    where = ["--socket", str(daemon.socket_path)] if daemon else []
    done = subprocess.run(
        [*CLI, "top", *where, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=clean_environment() | {"LANG": "C.UTF-8"} | env,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def document(daemon: DaemonProcess, *arguments: str) -> dict[str, Any]:
    done = top(daemon, "--once", "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_once_prints_a_screen_of_plain_text(shared: DaemonProcess) -> None:
    for view, wanted in (
        (
            "sessions",
            ("4 open", "one-reserved", "one-transferring", "one-ready", "READY leased", "too-large 1"),
        ),
        ("ranks", ("RANK USED", "d-7", "client-abort", "LAST PROBLEM")),
        ("events", ("events, newest first",)),
    ):
        done = top(shared, "--once", "--view", view)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert len(lines) <= 24 and max(map(len, lines)) <= 80
        assert all(line.isprintable() and line == line.rstrip() for line in lines)
        for part in wanted:
            assert part in done.stdout


def test_once_is_as_large_as_asked_and_ascii_without_utf8(shared: DaemonProcess) -> None:
    wide = top(shared, "--once", COLUMNS="200", LINES="50").stdout
    assert max(map(len, wide.splitlines())) > 150 and "HANDLE" in wide and "─" in wide
    plain = top(shared, "--once", LC_ALL="C").stdout
    assert plain.isascii() and "one-reserved" in plain


def test_once_as_json_has_an_attempt_in_every_state(shared: DaemonProcess) -> None:
    found = document(shared)
    assert found["connected"] and found["daemon"]["pid"] == shared.process.pid
    by_name = {row["session_id"]: row for row in found["attempts"]}
    states = {name: (row["state"], row["is_leased"], row["num_committed"]) for name, row in by_name.items()}
    assert states == {
        "one-reserved": ("RESERVED", False, 0),
        "one-transferring": ("TRANSFERRING", False, 0),
        "one-ready": ("READY", False, 2),
        "one-leased": ("READY", True, 2),
    }
    assert [(g["state"], g["is_leased"], g["count"]) for g in found["groups"]] == [
        ("RESERVED", False, 1), ("TRANSFERRING", False, 1), ("READY", False, 1), ("READY", True, 1),
    ]  # fmt: skip
    assert {o["reason"]: o["count"] for o in found["outcomes"]} == {
        "ok": 1,
        "client-abort": 1,
        "too-large": 1,
    }
    (peer,) = found["peers"]
    assert (peer["peer"], peer["open_attempts"], peer["ended"]) == ("d-7", 4, 2)
    assert (peer["ok"], peer["refused"], peer["last_problem"]) == (1, 1, "too-large")
    assert found["rates"]["is_since_start"] and found["rates"]["ok"] > 0
    assert all(row["left_ms"] > 0 and row["age_ms"] > 0 for row in found["attempts"])


def test_the_map_of_a_real_daemon_adds_up_to_its_books(shared: DaemonProcess) -> None:
    for row in document(shared)["ranks"]:
        books, cells = row["books"], row["map"]
        live = row["writing_bytes"] + row["ready_bytes"] + row["leased_bytes"]
        assert live == books["live_bytes"] > 0
        assert sum(cells["quarantined_bytes"]) == books["quarantined_bytes"] > 0
        assert books["free_bytes"] + live + books["quarantined_bytes"] == books["capacity_bytes"]
        # Only rank 0 reads the leased one.
        assert cells["num_shards"] == ([2, 1, 1, 1] if books["rank"] == 0 else [2, 2, 0, 1])


def test_attempts_come_in_the_order_asked_for(shared: DaemonProcess) -> None:
    workers = Workers(str(shared.socket_path), peer="d-8")
    workers.reserved("aa-largest", 2_000)
    try:
        assert document(shared, "--sort", "bytes")["attempts"][0]["session_id"] == "aa-largest"
        ages = [row["age_ms"] for row in document(shared, "--sort", "age")["attempts"]]
        assert ages == sorted(ages, reverse=True)
        lefts = [row["left_ms"] for row in document(shared)["attempts"]]
        assert lefts == sorted(lefts)
    finally:
        handle = workers.d.list_sessions(session_id="aa-largest").sessions[0].slab_handle
        workers.d.abort(handle, drained=True)
        workers.close()


def test_a_flood_of_workers_makes_a_bounded_answer(shared: DaemonProcess) -> None:
    for number in range(PEERS_MAX + 5):
        client = Client(str(shared.socket_path), name=f"flood-{number}", timeout_s=PATIENCE_S)
        with client, pytest.raises(LayoutMismatch):
            client.prepare_receive("s", 1, "no such layout")
    peers = document(shared)["peers"]
    assert len(peers) == PEERS_MAX + 1 and peers[-1]["peer"] == ""
    assert sum(peer["refused"] for peer in peers) >= PEERS_MAX + 5


# --- a line every interval ---------------------------------------------------------------------


class Lines:
    """``snapd top --json`` as a process, line by line."""

    def __init__(self, daemon: DaemonProcess, interval_s: str = "0.1", cli: Sequence[str] = CLI) -> None:
        self.process = subprocess.Popen(
            [*cli, "top", "--json", "--interval", interval_s, "--socket", str(daemon.socket_path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        self._timer = threading.Timer(PATIENCE_S, self.process.kill)
        self._timer.start()

    def until(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Return the first line from here on of which *condition* holds."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found: dict[str, Any] = json.loads(line)
            if condition(found):
                return found
        raise AssertionError(f"it has ended: {self.process.stderr.read()}")

    def close(self) -> None:
        self._timer.cancel()
        self.process.kill()
        self.process.communicate()


def test_lines_go_on_over_a_crash_and_a_restart(daemon: DaemonProcess, workers: Workers) -> None:
    lines = Lines(daemon)
    try:
        first = lines.until(lambda line: line["connected"] and line["daemon"]["watchers"])
        workers.ready("chat-1")
        seen: list[dict[str, Any]] = []

        def is_ready(line: dict[str, Any]) -> bool:
            seen.extend(line["events"])
            return any(event["to_state"] == "READY" for event in seen)

        lines.until(is_ready)
        # Each event comes once, oldest first.
        assert [event["to_state"] for event in seen] == ["RESERVED", "TRANSFERRING", "READY"]
        lines.until(lambda line: line["attempts"] and line["rates"] and not line["rates"]["is_since_start"])
        daemon.kill()
        away = lines.until(lambda line: not line["connected"])
        assert away["problem"] == "no daemon" and away["waiting_since"] and away["attempts"] == []
        daemon.restart()
        back = lines.until(lambda line: line["connected"])
        assert back["daemon"]["epoch"] != first["daemon"]["epoch"] and back["waiting_since"] is None
        assert [event["event"] for event in back["events"]] == ["daemon.seen"]
        lines.process.send_signal(signal.SIGINT)
        assert lines.process.wait(PATIENCE_S) == 0
        assert lines.process.stderr.read() == ""
    finally:
        lines.close()


def test_lines_end_though_the_wait_for_the_next_is_not_interrupted(shared: DaemonProcess) -> None:
    lines = Lines(shared, "3600", (sys.executable, "-c", MAIN_ELSEWHERE))
    try:
        lines.until(lambda line: line["connected"])
        time.sleep(0.2)  # Until it waits, most likely; otherwise it is easier.
        lines.process.send_signal(signal.SIGINT)
        assert lines.process.wait(PATIENCE_S) == 0
    finally:
        lines.close()


def test_nobody_reading_ends_the_lines(shared: DaemonProcess) -> None:
    lines = Lines(shared)
    try:
        lines.until(lambda line: line["connected"])
        lines.process.stdout.close()
        assert lines.process.wait(PATIENCE_S) == 141
        assert lines.process.stderr.read() == ""
        lines.process.stdout = None
    finally:
        lines.close()


# --- what users get wrong ----------------------------------------------------------------------


def test_without_a_terminal_it_says_what_there_is_instead(shared: DaemonProcess) -> None:
    done = top(shared)
    assert done.returncode == 2 and done.stdout == ""
    assert "no terminal to draw on: use --once, or --json" in done.stderr


@pytest.mark.parametrize("arguments", [["--interval", "0"], ["--view", "x"], ["--sort", "name"], ["more"]])
def test_wrong_options_are_refused(arguments: list[str]) -> None:
    done = top(None, *arguments, "--once")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_once_without_a_daemon_fails_and_says_so(tmp_path: Path) -> None:
    for flags in (["--once"], ["--once", "--json"]):
        done = top(None, "--socket", str(tmp_path / "none.sock"), *flags)
        assert (done.returncode, done.stdout) == (1, "")
        assert "no daemon at" in done.stderr and len(done.stderr.splitlines()) == 1


def test_it_imports_neither_torch_nor_asyncio(shared: DaemonProcess) -> None:
    code = (
        "import sys; from snapd.cli.main import run; "
        f"status = run(['top', '--once', '--socket', {str(shared.socket_path)!r}]); "
        "import snapd.cli.topscreen; "
        "print(status, sorted({'torch', 'asyncio', 'numpy', 'structlog'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 []"


# --- the feed ----------------------------------------------------------------------------------


class Endless:
    """A watch that always has a push, up to some number."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __iter__(self) -> "Endless":
        return self

    def __next__(self) -> WatchLost:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return WatchLost(count=self._left)


def feed_of(path: Path) -> Feed:
    return Feed(str(path / "none"), timeout_s=1.0, interval_s=1.0, order="age", on_news=lambda: None)


def test_a_flood_of_events_is_read_with_pauses_and_only_the_latest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = feed_of(tmp_path)
    now_s = [0.0]
    pauses: list[float] = []

    def wait(timeout_s: float) -> bool:
        pauses.append(timeout_s)
        now_s[0] += timeout_s
        return False

    monkeypatch.setattr(topfeed.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(feed._closed, "wait", wait)
    feed._read_pushes(Endless(1_000))
    assert len(pauses) == 10 and now_s[0] == pytest.approx(1.0)
    _, pushes, _ = feed.take()
    assert len(pushes) == topfeed.EVENTS_MAX
    assert pushes[-1][1] == WatchLost(count=0)
    assert feed.take() == ([], [], "")
    feed.close()


def test_a_feed_that_is_closed_reads_no_more(tmp_path: Path) -> None:
    feed = feed_of(tmp_path)
    feed.close()
    flood = Endless(1_000)
    feed._read_pushes(flood)
    assert flood._left == 900


def test_answers_that_nobody_takes_do_not_pile_up(tmp_path: Path) -> None:
    feed = feed_of(tmp_path)
    waited: list[float] = []

    def wait(timeout_s: float) -> bool:
        waited.append(timeout_s)
        if len(waited) == 50:
            feed._closed.set()
        return False

    feed._poked.wait = wait  # type: ignore[method-assign]
    feed._ask_on()
    answers, _, _ = feed.take()
    assert len(waited) == 50 and len(answers) == topfeed._ANSWERS_MAX
    assert {entry.problem for entry in answers} == {"no daemon"}


def test_a_daemon_without_overviews_is_a_problem_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = feed_of(tmp_path)
    monkeypatch.setattr(feed._client, "stats", lambda overview: answer(overview=None))
    told = feed._ask()
    assert told.stats is None and told.problem == "the daemon gives no overview"
    assert "snapd 9.9.9" in told.detail == str(no_overview(answer()))
    feed.close()


def test_problems_are_told_apart() -> None:
    assert problem_of(RequestTimeout("x")) == "no answer from the daemon"
    assert problem_of(DaemonUnreachable("x")) == "no daemon"
    assert problem_of(LimitReached("x")) == "the daemon refuses"


def test_plain_statistics_have_no_overview_and_a_wrong_order_is_refused(shared: DaemonProcess) -> None:
    with Client(str(shared.socket_path), timeout_s=PATIENCE_S) as client:
        assert client.stats().overview is None
        assert client.stats(overview="age").overview is not None
        wrong = calls.Call(StatsReq(id=0, overview="name"), StatsRep, lambda reply, hello: reply, None)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            client.call(wrong)

"""The command line against a real daemon process: text, JSON, and what users get wrong."""

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from daemon_process import DaemonProcess, clean_environment
from elsewhere import MAIN_ELSEWHERE

from snapd import __version__
from snapd.cli.main import COMMANDS, run
from snapd.cli.show import newest, timeline
from snapd.cli.status import UNPUBLISHED_HELP, _show_kv_events, bar_cells
from snapd.cli.watch import json_line, text_line
from snapd.client import Client
from snapd.config import Config, load
from snapd.core.events import State
from snapd.core.session import ArenaView
from snapd.errors import REASON_HELP, Draining, Reason
from snapd.kvevents.observer import WHYS
from snapd.layout import Layout
from snapd.limits import Limits
from snapd.wire import KVEventStatistics, WatchLost

LAYOUT = Layout(k_stride_bytes=(256,) * 2, v_stride_bytes=(256,) * 2)
NUM_TOKENS = 64
RUN_S = 30.0
CLI = (sys.executable, "-m", "snapd.cli.main")


def snapd(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command line as a process; whatever happens, it must not show a traceback."""
    done = subprocess.run(
        [*CLI, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=clean_environment() | env,
        timeout=RUN_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def call(*arguments: str, stdin: str = "", **env: str) -> tuple[int, str, str]:
    """Run a command line in this process; return its exit status, stdout and stderr."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        mock.patch.dict(os.environ, clean_environment() | env, clear=True),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = run(arguments)
    return status, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()


def good(*arguments: str, **env: str) -> str:
    """Run a command line that must succeed without a word on stderr; return its stdout."""
    status, out, err = call(*arguments, **env)
    assert (status, err) == (0, "")
    return out


def bad(wanted: int, *arguments: str, stdin: str = "", **env: str) -> str:
    """Run a command line that must fail with one line on stderr and nothing on stdout; return the line."""
    status, out, err = call(*arguments, stdin=stdin, **env)
    assert (status, out) == (wanted, ""), err
    (line,) = err.splitlines()
    assert line.startswith("snapd: ")
    return line


class Workers:
    """D and P in one: drives attempts through the client."""

    def __init__(self, socket_path: Path) -> None:
        self.client = Client(str(socket_path))
        self.fingerprint = self.client.declare_layout(0, LAYOUT)

    def reserve(self, session_id: str, num_tokens: int = NUM_TOKENS) -> int:
        grant = self.client.prepare_receive(session_id, num_tokens, self.fingerprint)
        return grant.slab_handle

    def commit(self, session_id: str) -> int:
        handle = self.reserve(session_id)
        self.client.transfer_started(handle)
        num_bytes = LAYOUT.token_bytes * NUM_TOKENS
        self.client.commit(handle, 0, num_bytes, NUM_TOKENS, ((1, 2),) * LAYOUT.num_planes)
        return handle

    def lease(self, handle: int) -> int:
        return self.client.begin_ingest(handle, 0, self.fingerprint).lease_id

    def ingest(self, session_id: str) -> int:
        handle = self.commit(session_id)
        assert self.client.vote(handle, 0, self.lease(handle), True).commit
        return handle

    def fail(self, session_id: str) -> int:
        handle = self.reserve(session_id)
        self.client.transfer_failed(handle, drained=True)
        return handle


@pytest.fixture
def workers(daemon: DaemonProcess) -> Iterator[Workers]:
    made = Workers(daemon.socket_path)
    yield made
    made.client.close()


@pytest.fixture
def at(daemon: DaemonProcess) -> tuple[str, str]:
    """The option that names the daemon."""
    return ("--socket", str(daemon.socket_path))


# --- help, and what is imported ----------------------------------------------------------------


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "demo"])
def test_every_command_has_help_with_examples(command: str) -> None:
    text = good(command, "--help")
    assert "Examples:" in text and f"snapd {command}" in text
    assert max(map(len, text.splitlines())) <= 100


def test_help_lists_the_commands_and_version_is_the_packages() -> None:
    text = good("--help")
    assert all(f"  {name} " in text for name in COMMANDS)
    assert good() == text
    assert good("--version") == f"snapd {__version__}\n"


def imported_by(*arguments: str) -> set[str]:
    """Return the modules that are loaded when the command line has run."""
    script = (
        "import sys\nfrom snapd.cli.main import run\n"
        "status = run(sys.argv[1:])\n"
        "print(*sys.modules, file=sys.stderr)\nsys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=RUN_S,
        check=True,
    )
    return set(done.stderr.split())


def test_help_imports_no_command() -> None:
    loaded = imported_by("--help")
    assert loaded.isdisjoint({"torch", "asyncio", "structlog", "uvloop", "snapd.wire", "snapd.config"})
    assert not {f"snapd.cli.{name}" for name in COMMANDS} & loaded


def test_status_is_quick_because_it_imports_nothing_heavy(at: tuple[str, str]) -> None:
    for arguments in (("status", *at), ("status", *at, "--json")):
        loaded = imported_by(*arguments)
        heavy = {"torch", "numpy", "asyncio", "structlog", "uvloop", "snapd.config"}
        # Tables are rich's; a script does not wait for it.
        assert loaded.isdisjoint(heavy | {"rich"} if "--json" in arguments else heavy)
        walls_ms = []
        for _ in range(3):
            began_s = time.perf_counter()
            assert snapd(*arguments).returncode == 0
            walls_ms.append((time.perf_counter() - began_s) * 1_000)
        print(f"snapd {arguments[0]} {' '.join(arguments[3:])}: {min(walls_ms):.0f} ms at best")


def test_serve_does_not_import_torch() -> None:
    assert {"snapd.daemon", "structlog"} <= (loaded := imported_by("serve", "--help"))
    assert "torch" not in loaded


# --- status ------------------------------------------------------------------------------------


def test_status_shows_arenas_attempts_outcomes_and_log(workers: Workers, at: tuple[str, str]) -> None:
    assert "No attempt has ended yet." in good("status", *at)
    workers.ingest("a")
    workers.fail("b")
    workers.commit("c")
    text = good("status", *at, "--limits")
    assert "2 outcomes, 50.0% ok" in text
    assert "16 MiB" in text and "% used" in text
    assert re.search(r"transfer-failed +1 +50\.0%", text)
    assert REASON_HELP[Reason.TRANSFER_FAILED][:40] in text
    assert "sessions_max" in text and "5 min" in text
    assert "\x1b" not in text
    assert not [
        line for line in text.splitlines() if line != line.rstrip() or (len(line) > 80 and "log" not in line)
    ]


def test_status_json_is_one_object_with_every_key(
    daemon: DaemonProcess, workers: Workers, at: tuple[str, str]
) -> None:
    empty = json.loads(good("status", *at, "--json"))
    assert empty["ok_rate"] is None
    workers.ingest("a")
    workers.fail("b")
    status = json.loads(good("status", *at, "--json"))
    assert status.keys() == empty.keys()
    assert status["ok_rate"] == 0.5
    assert status["pid"] == daemon.process.pid
    assert status["core"]["outcomes_by_reason"] == {"ok": 1, "transfer-failed": 1}
    (arena,) = status["core"]["arenas"]
    assert arena["capacity_bytes"] == 16 << 20
    assert status["log"]["path"] == str(daemon.log_path)
    assert status["log"]["dropped"] == 0
    assert status["limits"]["lease_ms"] == 10_000
    assert "type" not in status and "id" not in status


def test_status_limits_shows_every_bound_timeout_and_buffer_of_the_configuration(at: tuple[str, str]) -> None:
    numbers = {
        field.name
        for field in msgspec.structs.fields(Config)
        if type(field.default) is int
        # How memory is cut up, and a number for routers: they bound nothing.
        and field.name not in ("alignment_bytes", "register_piece_bytes", "kv_events_data_parallel_rank")
    } | {f"limits.{field.name}" for field in msgspec.structs.fields(Limits)}
    assert len(numbers) > 45
    assert json.loads(good("status", *at, "--json"))["limits"].keys() == numbers
    shown = good("status", *at, "--limits")
    assert [
        name for name in sorted(numbers) if not re.search(rf"^{re.escape(name)} +\d", shown, re.MULTILINE)
    ] == []


def test_status_shows_what_routers_are_told_and_why_not(start_daemon: Callable[..., DaemonProcess]) -> None:
    address = "tcp://127.0.0.1:0"
    daemon = start_daemon(kv_events_address=address, kv_events_replay_address=address)
    at = ("--socket", str(daemon.socket_path))
    assert not re.search("not told|not kept|not take", good("status", *at))
    workers = Workers(daemon.socket_path)
    workers.commit("a")
    workers.client.close()
    text = good("status", *at)
    assert re.search(
        r"^kv events at tcp://127\.0\.0\.1:\d+, replays at tcp://127\.0\.0\.1:\d+$", text, re.MULTILINE
    )
    assert "kv events: 0 snapshots with 0 pages told, " in text
    assert "kv events: 1 READY snapshot not told, no-hashes\n  D sends neither" in text
    assert json.loads(good("status", *at, "--json"))["kv_events"]["unpublished"]["no-hashes"] == 1


def test_every_reason_not_to_tell_routers_has_its_help() -> None:
    assert tuple(UNPUBLISHED_HELP) == WHYS


def test_status_shows_what_of_kv_events_was_lost(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = dict.fromkeys(
        ("batches", "stored_pages", "removed_pages", "snapshots", "pages", "queued_bytes", "buffered_batches",
         "replays", "bad_requests"), 0,
    )  # fmt: skip
    events = KVEventStatistics(
        address="tcp://127.0.0.1:5557", replay_address="", topic="", medium="CPU", facts_dropped=2,
        send_errors=3, unpublished={"later-reason": 1}, **numbers,
    )  # fmt: skip
    _show_kv_events(events)
    text = capsys.readouterr().out
    assert "kv events at tcp://127.0.0.1:5557\n" in text
    assert "of 2 attempts token ids or block hashes were not kept" in text
    assert "3 messages that ZeroMQ did not take" in text
    assert "later-reason\n  A reason that this version does not know" in text


def test_no_kv_events_no_word_of_them(at: tuple[str, str]) -> None:
    assert "kv events" not in good("status", *at)


def test_status_has_ascii_bars_where_the_encoding_has_no_blocks(at: tuple[str, str]) -> None:
    text = snapd("status", *at, PYTHONIOENCODING="ascii").stdout
    assert text.isascii() and "." * 50 in text


@pytest.mark.parametrize(
    ("live", "evictable", "quarantined", "expected"),
    [(0, 0, 0, (0, 0, 0, 10)), (100, 0, 0, (10, 0, 0, 0)), (1, 1, 0, (0, 1, 0, 9)), (98, 1, 1, (8, 1, 1, 0))],
)
def test_a_bar_shows_whatever_is_there(
    live: int, evictable: int, quarantined: int, expected: tuple[int, ...]
) -> None:
    free = 100 - live - quarantined
    view = ArenaView(0, 100, free, live, quarantined, evictable, free, 1)
    assert bar_cells(view, 10) == expected


# --- sessions and show -------------------------------------------------------------------------


def test_sessions_lists_open_attempts_and_with_all_the_ended_ones(
    workers: Workers, at: tuple[str, str]
) -> None:
    assert good("sessions", *at) == "No attempt is open.\n"
    reserved, ready, failed = workers.reserve("a"), workers.commit("b"), workers.fail("c")
    workers.lease(ready)
    text = good("sessions", *at)
    assert str(reserved) in text and "READY, leased" in text and str(failed) not in text
    assert "transfer-failed" in good("sessions", *at, "--all")
    only = good("sessions", *at, "--state", "ready")
    assert str(ready) in only and str(reserved) not in only
    assert good("sessions", *at, "--session", "nobody") == "No attempt matches.\n"
    assert "1 of 3 attempts" in good("sessions", *at, "--all", "--limit", "1")


def test_sessions_json_pages_through_more_than_one_reply(workers: Workers, at: tuple[str, str]) -> None:
    handles = {workers.fail(f"s{i}") for i in range(260)}
    listed = json.loads(good("sessions", *at, "--state", "ABORTED", "--limit", "0", "--json"))
    assert {view["slab_handle"] for view in listed["sessions"]} == handles
    assert listed["total"] == 260
    some = json.loads(good("sessions", *at, "--all", "--limit", "255", "--json"))
    assert len(some["sessions"]) == 255 and some["total"] == 260


def test_a_page_that_fits_no_frame_is_asked_for_in_smaller_parts(
    start_daemon: Callable[..., DaemonProcess],
) -> None:
    started = start_daemon(frame_bytes_max="64KiB", page_keys_max=64)
    workers = Workers(started.socket_path)
    for index in range(200):
        workers.fail(f"{index}" + "x" * 500)
    with pytest.raises(Exception, match="limit-reached"):
        workers.client.list_sessions(states=(State.ABORTED,), limit=200)
    listed = json.loads(
        good("sessions", "--socket", str(started.socket_path), "--all", "--limit", "0", "--json")
    )
    assert len(listed["sessions"]) == 200
    workers.client.close()


def test_a_session_id_can_neither_steer_the_terminal_nor_be_cut_off(
    workers: Workers, at: tuple[str, str]
) -> None:
    name = "[red]\x1b[31m\n\u202e" + "x" * 200
    workers.reserve(name)
    (line,) = [line for line in good("sessions", *at).splitlines() if "RESERVED" in line]
    assert line.endswith(r"[red]\x1b[31m\n\u202e" + "x" * 200)
    listed = json.loads(good("sessions", *at, "--session", name, "--json"))
    assert listed["sessions"][0]["session_id"] == name


def test_show_tells_the_life_of_an_attempt(workers: Workers, at: tuple[str, str]) -> None:
    handle = workers.commit("a")
    workers.lease(handle)
    text = good("show", str(handle), *at)
    assert [text.index(word) for word in ("RESERVED", "TRANSFERRING", "READY")] == sorted(
        text.index(word) for word in ("RESERVED", "TRANSFERRING", "READY")
    )
    assert "so far" in text and "deadline: ready-expired in " in text
    assert "s left" in text and f"0+{4 * 256 * NUM_TOKENS}" in text and workers.fingerprint in text
    ended = good("show", str(workers.fail("b")), *at)
    assert "ended: transfer-failed" in ended and REASON_HELP[Reason.TRANSFER_FAILED] in ended
    assert "given up" in ended and " ago" in ended


def test_show_takes_a_session_id_even_one_that_is_a_number(workers: Workers, at: tuple[str, str]) -> None:
    workers.fail("17")
    second = workers.fail("17")
    shown = json.loads(good("show", "17", *at, "--json"))
    assert [view["slab_handle"] for view in shown["sessions"]] == [second]
    assert "1 older attempt" in good("show", "17", *at)
    assert len(json.loads(good("show", "17", *at, "--all", "--json"))["sessions"]) == 2
    third = workers.reserve("17")
    shown = json.loads(good("show", "17", *at, "--json"))
    assert [view["slab_handle"] for view in shown["sessions"]] == [third]


def test_the_timeline_has_no_gaps(workers: Workers) -> None:
    reply = workers.client.get(workers.ingest("a"))
    steps = timeline(reply.session, reply.now_ns)
    assert [state for state, _, _ in steps] == ["RESERVED", "TRANSFERRING", "READY", "INGESTED"]
    for (_, begin_ns, spent_ns), (_, next_ns, _) in pairwise(steps):
        assert abs(begin_ns + spent_ns - next_ns) <= len(steps)
    assert newest([reply.session]) == [reply.session]


@pytest.mark.parametrize("name", ["nobody", "12345", "", "9" * 400, "9" * 5_000, "\udcff"])
def test_an_unknown_id_is_one_line_that_says_what_to_do(name: str, at: tuple[str, str]) -> None:
    for command in (("show",), ("abort", "--yes"), ("show", "--json")):
        bad(1, *command, *at, "--", name)


# --- abort and drain ---------------------------------------------------------------------------


def test_abort_ends_one_attempt_or_all_open_ones_of_a_session(workers: Workers, at: tuple[str, str]) -> None:
    first = workers.commit("a")
    second = workers.reserve("a")
    text = good("abort", "a", *at, "--yes")
    assert text.count("aborted") == 2 and str(first) in text and str(second) in text
    third = workers.reserve("b")
    aborted = json.loads(good("abort", str(third), *at, "-y", "--json"))["aborted"]
    assert aborted == [
        {"slab_handle": third, "session_id": "b", "state": "ABORTED", "pending": False, "ended_before": False}
    ]
    assert workers.client.get(third).session.reason is Reason.CLIENT_ABORT
    assert "is ABORTED (client-abort)" in bad(1, "abort", "a", *at, "--yes")


def test_abort_says_that_it_waits_for_a_reader(workers: Workers, at: tuple[str, str]) -> None:
    handle = workers.commit("a")
    lease_id = workers.lease(handle)
    assert "pending: a rank is reading it" in good("abort", str(handle), *at, "--yes")
    assert "READY, leased, then client-abort" in good("sessions", *at)
    assert "ends as soon as no rank reads it: client-abort" in good("show", str(handle), *at)
    workers.client.vote(handle, 0, lease_id, False, reason=Reason.INGEST_FAILED, keep=True)
    assert workers.client.get(handle).session.state is State.ABORTED


def test_abort_asks_first_and_asks_nobody_who_is_no_terminal(workers: Workers, at: tuple[str, str]) -> None:
    handle = workers.reserve("a")
    assert "use --yes" in bad(2, "abort", "a", *at, stdin="y\n")
    for answer, state in (("n", State.RESERVED), ("y", State.ABORTED)):
        status, said = in_terminal("abort", "a", *at, keys=answer + "\n")
        assert status == (130 if answer == "n" else 0)
        assert f"{handle} RESERVED" in said and "Abort 1 attempt?" in said
        assert workers.client.get(handle).session.state is state


def test_drain_refuses_new_attempts_until_it_is_off(workers: Workers, at: tuple[str, str]) -> None:
    workers.reserve("a")
    assert "1 attempt still open" in good("drain", *at)
    with pytest.raises(Draining):
        workers.reserve("b")
    assert "DRAINING" in good("status", *at)
    assert json.loads(good("drain", *at, "--off", "--json")) == {"draining": False, "open_sessions": 1}
    workers.reserve("b")


# --- watch -------------------------------------------------------------------------------------


class Watching:
    """A ``snapd watch`` that has begun to watch."""

    def __init__(self, client: Client, *arguments: str, cli: Sequence[str] = CLI) -> None:
        before = client.stats().watchers
        self.process = subprocess.Popen(
            [*cli, "watch", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        deadline_s = time.monotonic() + RUN_S
        while client.stats().watchers == before:
            assert time.monotonic() < deadline_s and self.process.poll() is None

    def end(self) -> tuple[int, str, str]:
        """Wait for its end; return exit status, stdout and stderr."""
        out, err = self.process.communicate(timeout=RUN_S)
        return self.process.returncode, out, err


def test_watch_prints_a_line_for_each_transition_and_refusal(workers: Workers, at: tuple[str, str]) -> None:
    text = Watching(workers.client, *at, "--count", "4")
    lines = Watching(workers.client, *at, "--count", "4", "--json")
    only = Watching(workers.client, *at, "--session", "b", "--count", "1")
    handle = workers.commit("a")
    with pytest.raises(Exception, match="too-large"):
        workers.reserve("b", 1_000_000)
    status, out, err = text.end()
    assert (status, err) == (0, "")
    assert [line.split("  ")[2] for line in out.splitlines()][:3] == [
        "new -> RESERVED", "RESERVED -> TRANSFERRING", "TRANSFERRING -> READY",
    ]  # fmt: skip
    assert str(handle) in out and "refused  too-large" in out and "\x1b" not in out
    status, out, err = lines.end()
    assert (status, err) == (0, "")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["event"] for record in records] == ["session.transition"] * 3 + ["sync.refused"]
    assert records[2]["to_state"] == "READY" and records[3]["reason"] == "too-large"
    assert abs(records[0]["ts"] - time.time()) < RUN_S
    status, out, err = only.end()
    assert (status, err, out.count("\n")) == (0, "", 1) and "too-large" in out


def test_watch_says_how_many_were_lost() -> None:
    lost = WatchLost(count=3)
    assert "3 lines lost" in text_line(lost, 0)
    assert json.loads(json_line(lost)).items() >= {"event": "watch.lost", "count": 3}.items()


def test_watch_ends_quietly_on_ctrl_c_and_when_the_daemon_stops(
    daemon: DaemonProcess, workers: Workers, at: tuple[str, str]
) -> None:
    first, second = Watching(workers.client, *at), Watching(workers.client, *at, "--json")
    first.process.send_signal(signal.SIGINT)
    assert first.end() == (0, "", "")
    daemon.stop()
    assert second.end() == (0, "", "")


def test_watch_ends_though_its_wait_is_not_interrupted(workers: Workers, at: tuple[str, str]) -> None:
    watching = Watching(workers.client, *at, cli=(sys.executable, "-c", MAIN_ELSEWHERE))
    time.sleep(0.2)  # Until it waits, most likely; otherwise it is easier.
    watching.process.send_signal(signal.SIGINT)
    assert watching.end() == (0, "", "")


def test_watch_ends_quietly_when_nobody_reads_it(workers: Workers, at: tuple[str, str]) -> None:
    watching = Watching(workers.client, *at)
    assert watching.process.stdout is not None and watching.process.stderr is not None
    watching.process.stdout.close()
    workers.fail("a")
    assert watching.process.wait(RUN_S) == 141
    assert watching.process.stderr.read() == ""
    watching.process.stderr.close()


# --- which daemon, and what users get wrong ----------------------------------------------------


def test_the_socket_comes_from_flag_environment_or_file(daemon: DaemonProcess, tmp_path: Path) -> None:
    path = str(daemon.socket_path)
    assert good("sessions", SNAPD_SOCKET_PATH=path) == "No attempt is open.\n"
    file = tmp_path / "snapd.toml"
    file.write_text(f'socket_path = "{path}"\n')
    assert good("sessions", "--config", str(file)) == "No attempt is open.\n"
    assert good("sessions", SNAPD_CONFIG=str(file)) == "No attempt is open.\n"
    file.write_text("lease_msec = 5\n")
    assert "did you mean 'lease_ms'?" in bad(2, "sessions", "--config", str(file))
    assert good("sessions", "--socket", path, SNAPD_CONFIG=str(file)) == "No attempt is open.\n"


def test_no_daemon_is_one_line_that_says_where_and_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (tmp_path / "none.sock", file, tmp_path, Path("/" + "x" * 300)):
        for command in (("status",), ("status", "--json"), ("watch",), ("drain",), ("show", "1")):
            assert str(path)[:50] in bad(1, *command, "--socket", str(path))


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Be another user than the daemon's. What is imported later may be out of reach, so import first."""
    call("status", "--socket", "/nowhere")
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_who_may_not_connect_is_told_so_in_one_line(
    start_daemon: Callable[..., DaemonProcess],
) -> None:
    for settings in ({}, {"allowed_uids": "12345"}):
        started = start_daemon(**settings)
        started.directory.chmod(0o755)
        with nobody():
            for output in ((), ("--json",)):
                assert "ermission" in bad(1, "status", *output, "--socket", str(started.socket_path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("statsu",), "did you mean 'status'?"),
        (("xyzzy",), "there are serve"),
        (("status", "--jsn"), "--json"),
        (("show",), "ID"),
        (("sessions", "--state", "done"), "transferring"),
        (("sessions", "--limit", "-1"), "--limit"),
        (("sessions", "--all", "--state", "READY"), "exclude"),
        (("watch", "--count", "0"), "--count"),
        (("status", "--timeout", "soon"), "--timeout"),
        (("serve", "--set", "lease_ms"), "KEY=VALUE"),
        (("serve", "--set", "leese_ms=5"), "did you mean 'lease_ms'?"),
        (("serve", "--protocol", "udp"), "mooncake.protocol = 'udp' is wrong"),
        (("serve", "--protocol", "tcp", "--set", "mooncake.protocol=rdma"), "is given twice"),
        (("serve", "--size", "huge"), "8GiB"),
        (("serve", "--size", "1GiB", "--set", "size=2GiB"), "given twice"),
        (("serve", "--transport", "pigeon"), '"shm"'),
        (("serve", "--device", "gpu"), '"cuda:0"'),
        (("config", "--check", "/no/such.toml"), "/no/such.toml"),
        (("config", "--check", "a", "--config", "b"), "exclude"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments: tuple[str, ...], said: str) -> None:
    assert said.lower() in bad(2, *arguments).lower()


def in_terminal(*arguments: str, keys: str = "", **env: str) -> tuple[int, str]:
    """Run a command line in a terminal of its own; return its exit status and what the terminal showed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*CLI, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=clean_environment() | {"TERM": "xterm"} | env,
        start_new_session=True,
    )
    os.close(theirs)
    os.write(ours, keys.encode())
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(ours)
    return process.wait(RUN_S), shown.decode()


def test_a_terminal_gets_colours_unless_no_color_is_set(workers: Workers, at: tuple[str, str]) -> None:
    workers.reserve("a")
    assert "\x1b[36mRESERVED\x1b[0m" in in_terminal("sessions", *at)[1]
    assert "\x1b" not in in_terminal("sessions", *at, NO_COLOR="1")[1]
    assert '\n  "sessions": [' in in_terminal("sessions", *at, "--json")[1].replace("\r", "")


# --- config ------------------------------------------------------------------------------------


def test_config_prints_a_file_that_loads_to_the_same_settings(tmp_path: Path) -> None:
    file, copy = tmp_path / "a.toml", tmp_path / "b.toml"
    file.write_text('lease_ms = 5000\nlog_path = "/tmp/\\u0022q\\u0022.jsonl"\nranks = 2\nsize = "64MiB"\n')
    text = good("config", "--config", str(file), SNAPD_PREFAULT="false")
    assert f"lease_ms = 5000  # {file}" in text
    assert "prefault = false  # environment SNAPD_PREFAULT" in text
    assert "quarantine_ms = 60000  # default" in text
    assert text.count('size_bytes = "64MiB"') == 2
    copy.write_text(text)
    assert load(copy, {}, {}).config == load(file, {}, {"prefault": False}).config
    assert good("config", "--check", str(copy), SNAPD_LEASE_MS="wrong") == f"{copy}: valid\n"
    settings = json.loads(good("config", "--config", str(file), "--json"))["settings"]
    assert settings["lease_ms"] == {"value": 5000, "origin": str(file)}
    assert settings["arena"]["value"][1] == {"rank": 1, "device": "cpu", "size_bytes": 64 << 20}


def test_config_prints_the_mooncake_table_with_the_origin_of_each_key(tmp_path: Path) -> None:
    file, copy = tmp_path / "a.toml", tmp_path / "b.toml"
    file.write_text('[mooncake]\nprotocol = "rdma"\n[mooncake.settings]\nMC_GID_INDEX = "3"\n')
    text = good("config", "--config", str(file), SNAPD_MOONCAKE_HOST="10.0.0.7")
    assert f'protocol = "rdma"  # {file}' in text
    assert 'host = "10.0.0.7"  # environment SNAPD_MOONCAKE_HOST' in text
    assert f'settings.MC_GID_INDEX = "3"  # {file}' in text
    copy.write_text(text)
    assert load(copy, {}, {}).config == load(file, {}, {"mooncake.host": "10.0.0.7"}).config
    settings = json.loads(good("config", "--config", str(file), "--json"))["settings"]
    assert settings["mooncake.protocol"] == {"value": "rdma", "origin": str(file)}
    assert settings["mooncake.settings.MC_GID_INDEX"] == {"value": "3", "origin": str(file)}
    assert settings["mooncake.notify"] == {"value": "off", "origin": "default"}
    assert "mooncake" not in settings


def test_a_path_that_is_no_utf8_is_refused() -> None:
    """The daemon could not tell its clients where such a log is."""
    assert "is not UTF-8" in bad(2, "config", SNAPD_LOG_PATH="/tmp/\udcff")


def test_config_check_says_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("lease_ms = 400000\n")
    assert "must be below" in bad(2, "config", "--check", str(file), "--json")
    file.write_text("lease_ms = 4000\n")
    checked = json.loads(good("config", "--check", str(file), "--json"))
    assert checked == {"path": str(file), "valid": True}


# --- serve -------------------------------------------------------------------------------------


def messages(daemon: DaemonProcess) -> dict[str, dict[str, Any]]:
    """Return the daemon's messages by name."""
    lines = [json.loads(line) for line in daemon.stderr.splitlines()]
    return {line["event"]: line for line in lines}


def test_serve_says_where_socket_and_log_are_and_stops_on_sigterm(daemon: DaemonProcess) -> None:
    daemon.stop()
    said = messages(daemon)
    for moment in ("starting", "ready"):
        assert said[moment]["socket"] == str(daemon.socket_path)
        assert said[moment]["log"] == str(daemon.log_path)
    assert daemon.process.returncode == 0 and not daemon.socket_path.exists()
    last = json.loads(daemon.log_path.read_text().splitlines()[-1])
    assert (last["event"], last["reason"]) == ("daemon.stopped", "SIGTERM")


def test_ctrl_c_drains_like_sigterm(daemon: DaemonProcess) -> None:
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(RUN_S) == 0


def test_a_second_sigterm_stops_at_once(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(drain_timeout_ms=60_000)
    workers = Workers(daemon.socket_path)
    workers.lease(workers.commit("a"))
    daemon.process.terminate()
    deadline_s = time.monotonic() + RUN_S
    while not workers.client.stats().core.is_draining:
        assert time.monotonic() < deadline_s
    daemon.process.terminate()
    daemon.expected_status = 143
    daemon.restart()
    assert good("sessions", "--socket", str(daemon.socket_path)) == "No attempt is open.\n"
    workers.client.close()


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "snapd.toml"
    file.write_text('lease_ms = 1\nquarantine_ms = 1\nready_ttl_ms = 77000\nsize = "2MiB"\n')
    socket, log = str(tmp_path / "s"), str(tmp_path / "l")
    process = subprocess.Popen(
        [*CLI, "serve", "--config", str(file), "--socket", socket, "--log", log, "--ranks", "2",
         "--set", "lease_ms=3000", "--set", "prefault=no", "--log-format", "console"],
        env=clean_environment() | {"SNAPD_LEASE_MS": "2000", "SNAPD_QUARANTINE_MS": "2000"},
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    with Client(socket) as client:
        client.connect(RUN_S)
        stats = client.stats()
    assert [stats.limits[name] for name in ("lease_ms", "quarantine_ms", "ready_ttl_ms")] == [
        3000,
        2000,
        77000,
    ]
    assert [arena.capacity_bytes for arena in stats.core.arenas] == [2 << 20] * 2
    process.terminate()
    _, err = process.communicate(timeout=RUN_S)
    assert process.returncode == 0
    assert "ready" in err and not err.startswith("{") and "\x1b" not in err


def test_a_start_that_fails_is_one_line_and_status_1(daemon: DaemonProcess, tmp_path: Path) -> None:
    small = ("--size", "1MiB", "--log", str(tmp_path / "log"), "--log-format", "json")
    for socket in (str(daemon.socket_path), str(tmp_path)):
        done = snapd("serve", "--socket", socket, *small)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith("snapd: ")
    done = snapd("serve", "--socket", str(tmp_path / "s"), *small, "--device", "cuda:77")
    assert done.returncode == 1 and "cuda:77" in done.stderr.splitlines()[-1]

"""One life of the daemon: start, what stops it from starting, signals, crashes, and processes that write."""

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from daemon_process import clean_environment
from raw_client import (
    LAYOUT,
    RawClient,
    check_sums,
    is_all_free,
    log_events,
    messages,
    outcomes,
    wait_for,
)

from snapd import daemon as daemon_module
from snapd import wire as w
from snapd.client import Client
from snapd.config import load_config
from snapd.core import events as e
from snapd.core import records as r
from snapd.daemon import run
from snapd.errors import Reason, RequestError, StartupError
from snapd.eventlog import EventLog
from snapd.executor import Executor
from snapd.logrecovery import read_open_attempts

StartDaemon = Callable[..., Any]
END_S = 15.0


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("d")


def serve(directory: Path, *arguments: str) -> tuple[int, str]:
    """Run ``snapd serve``, which must end by itself; return its status and its last line."""
    command = [sys.executable, "-m", "snapd.cli.main", "serve", "--socket", str(directory / "s")]
    command += ["--log", str(directory / "log"), "--size", "1MiB", *arguments]
    environment = clean_environment()
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=END_S)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stderr.splitlines()[-1]


def start_error(directory: Path, **settings: object) -> str:
    """Try to run a daemon in this process, which must not start; return the error. Nothing is left open."""
    defaults = {"socket_path": str(directory / "s"), "log_path": str(directory / "log"), "size": "1MiB"}
    given = defaults | {key: str(value) for key, value in settings.items()}
    config = load_config(Path(os.devnull), {}, given)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))  # The first loop of a process opens what stays open.
    fds_before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StartupError) as caught:
        run(config)
    assert len(list(Path("/proc/self/fd").iterdir())) == fds_before
    return str(caught.value)


@contextlib.contextmanager
def clients_of(daemon: Any, number: int) -> Iterator[list[RawClient]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RawClient(daemon.socket_path)) for _ in range(number)]


def assert_ends(daemon: Any, status: int) -> None:
    assert daemon.process.wait(END_S) == status, daemon.stderr


def stopped_reason(log_path: Path) -> str:
    last = log_events(log_path)[-1].record
    assert isinstance(last, r.DaemonStopped)
    return last.reason


# --- start


def test_the_directory_is_0700_the_socket_0600_and_both_are_made(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    parent = daemon.directory / "run" / "kv-snapd"
    start_error(parent, log_path=daemon.directory / "log", device="cuda:0")
    assert stat.S_IMODE(parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(daemon.socket_path.stat().st_mode) == 0o600
    assert stat.S_IMODE((daemon.directory / "snapd.sock.lock").stat().st_mode) == 0o600
    assert stat.S_IMODE(daemon.log_path.stat().st_mode) == 0o600


def test_with_allowed_uids_others_get_to_the_socket_and_see_nothing_else(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon()
    parent = daemon.directory / "open" / "kv-snapd"
    start_error(parent, log_path=daemon.directory / "log", device="cuda:0", allowed_uids="1")
    assert stat.S_IMODE(parent.stat().st_mode) == 0o711


def test_the_log_begins_with_what_was_started(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(ranks=2, eviction_policy="gdsf")
    wait_for(lambda: log_events(daemon.log_path), "the first line is written")
    (started,) = [line.record for line in log_events(daemon.log_path)]
    assert isinstance(started, r.DaemonStarted)
    assert started.pid == daemon.process.pid
    assert [(arena.rank, arena.size_bytes) for arena in started.arenas] == [(0, 16 << 20), (1, 16 << 20)]
    assert started.former_epoch == ""
    assert started.eviction_policy == "gdsf"
    (ready,) = wait_for(lambda: messages(daemon.stderr, "ready"), "it says that it is ready")
    assert '"size":"32 MiB"' in ready


def test_the_log_says_which_d_asked_by_its_name_or_by_its_process(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    for name in ("decode-3", "", "x" * 70):
        with Client(str(daemon.socket_path), name=name) as client, pytest.raises(RequestError):
            client.prepare_receive("chat", 0, "nobody's layout")

    def peers() -> list[str]:
        records = (line.record for line in log_events(daemon.log_path))
        return [record.peer for record in records if isinstance(record, r.SyncOutcome)]

    wait_for(lambda: len(peers()) == 3, "all outcomes are written")
    assert peers() == ["decode-3", f"pid {os.getpid()}", "x" * 64]


def test_a_stale_socket_file_is_replaced(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    inode = daemon.socket_path.stat().st_ino
    daemon.kill()
    assert daemon.socket_path.stat().st_ino == inode, "a crash leaves it"
    other = socket.socket(socket.AF_UNIX)
    daemon.socket_path.rename(daemon.directory / "old")
    other.bind(str(daemon.socket_path))
    other.close()
    daemon.restart()
    with clients_of(daemon, 1) as (client,):
        assert client.ask(w.PingReq)
    daemon.stop()
    assert not daemon.socket_path.exists(), "an end in order removes it"


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_left_alone(directory: Path, kind: str) -> None:
    path = directory / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(directory / "elsewhere")
    before = path.lstat()
    error = start_error(directory)
    assert error == f"socket_path {path} is there and is no socket; remove it or choose another"
    assert path.lstat().st_ino == before.st_ino
    assert kind != "file" or path.read_text() == "precious"


def test_a_second_instance_is_refused_and_the_first_goes_on(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    status, line = serve(daemon.directory, "--socket", str(daemon.socket_path))
    assert status == 1
    assert f"another snapd (pid {daemon.process.pid}) serves {daemon.socket_path}" in line
    with clients_of(daemon, 1) as (client,):
        assert client.stats().pid == daemon.process.pid
    daemon.stop()
    # As if a pid of more digits had been there before.
    (daemon.directory / "snapd.sock.lock").write_text("1234567890123\n")
    daemon.restart()
    error = start_error(daemon.directory, socket_path=daemon.socket_path)
    assert f"another snapd (pid {daemon.process.pid}) serves" in error


def test_two_daemons_do_not_share_a_log(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    error = start_error(daemon.directory, log_path=daemon.log_path)
    assert f"the event log {daemon.log_path} is being written by another daemon" in error
    assert not (daemon.directory / "s").exists()
    with clients_of(daemon, 1) as (client,):
        assert client.ask(w.PingReq)


def test_a_lock_file_that_is_a_link_or_another_user_s_is_refused(directory: Path) -> None:
    lock = directory / "s.lock"
    (directory / "victim").write_text("precious")
    lock.symlink_to(directory / "victim")
    assert "cannot be used" in start_error(directory)
    assert (directory / "victim").read_text() == "precious"
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    lock.unlink()
    lock.touch()
    os.chown(lock, 65_534, 65_534)
    assert f"{lock} belongs to another user; choose another socket_path" in start_error(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused_as_that_user_could_put_another_socket_there(
    directory: Path,
) -> None:
    theirs = directory / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65_534, 65_534)
    error = start_error(directory, socket_path=theirs / "s")
    assert f"{theirs} belongs to another user; choose another directory" in error
    assert list(theirs.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_a_clear_error(directory: Path) -> None:
    (directory / "file").touch()
    error = start_error(directory, socket_path=directory / "file" / "s")
    assert "cannot be used (" in error and "choose a directory" in error


def test_a_socket_path_that_is_too_long_is_a_clear_error(directory: Path) -> None:
    status, line = serve(directory, "--socket", "/tmp/" + "x" * 103)
    assert status == 2
    assert "is 108 bytes long, and a unix socket's path has at most 107" in line


def test_a_socket_that_cannot_be_bound_is_a_clear_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bind(sock: socket.socket, path: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(socket.socket, "bind", bind)
    error = start_error(directory)
    assert error == f"socket_path {directory / 's'} cannot be bound: Read-only file system"
    mask = os.umask(0o022)
    os.umask(mask)
    assert mask != 0o177, "the process has its own mask again"


def test_a_log_that_cannot_be_written_is_a_clear_error(directory: Path) -> None:
    (directory / "file").touch()
    for path in (directory / "file" / "log", directory):
        error = start_error(directory, log_path=path)
        assert f"cannot open the event log {path}" in error
        assert "Give the daemon's user write access" in error
        assert not (directory / "s").exists()


def test_a_log_that_cannot_be_read_back_is_a_clear_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, keep: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("snapd.daemon.read_open_attempts", fail)
    assert start_error(directory) == f"log_path {directory / 'log'} cannot be read: Input/output error"


def test_a_device_that_cannot_be_had_is_a_clear_error(directory: Path) -> None:
    status, line = serve(directory, "--device", "cuda:0")
    assert status == 1
    assert "arena 0: device cuda:0 cannot be had" in line


@pytest.mark.parametrize("prefault", [True, False])
def test_more_memory_than_there_is_is_a_clear_error(directory: Path, prefault: bool) -> None:
    """A limit on file size counts for an arena; the machine's own memory is not put at risk here."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, old[1]))
    try:
        error = start_error(directory, prefault=prefault, ranks=2, size="64MiB")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "arena 0: 64 MiB of memory cannot be had" in error
    assert "lower size, or free memory" in error
    assert not (directory / "s").exists()
    assert log_events(directory / "log") == []


def test_hugepages_that_are_not_there_are_a_clear_error(directory: Path) -> None:
    error = start_error(directory, hugepages="on", size="1TiB")
    assert "arena 0: hugepages = on, and" in error and "raise vm.nr_hugepages" in error


def test_a_start_that_failed_can_be_tried_again(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    daemon.stop()
    daemon.socket_path.write_text("in the way")
    start_error(daemon.directory, socket_path=daemon.socket_path, log_path=daemon.log_path)
    daemon.socket_path.unlink()
    daemon.restart()
    with clients_of(daemon, 1) as (client,):
        assert client.ask(w.PingReq)


# --- stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_is_open_and_everybody_hears_of_it(
    start_daemon: StartDaemon, number: signal.Signals
) -> None:
    daemon = start_daemon()
    with clients_of(daemon, 1) as (client,):
        handles = {
            "RESERVED": client.granted("a"),
            "TRANSFERRING": client.granted("b"),
            "READY": client.ready("c"),
        }
        client.start(handles["TRANSFERRING"])
        daemon.process.send_signal(number)
        assert_ends(daemon, 0)
        told = {push.slab_handle: push for push in client.until_closed()}
    assert {handle: push.reason for handle, push in told.items()} == dict.fromkeys(
        handles.values(), Reason.DAEMON_STOPPED
    )
    assert outcomes(daemon.log_path) == {handle: ["daemon-stopped"] for handle in handles.values()}
    assert stopped_reason(daemon.log_path) == number.name
    assert not daemon.socket_path.exists()


def test_sigterm_waits_for_a_reader_and_refuses_new_attempts(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(drain_timeout_ms=60_000, lease_ms=60_000)
    with clients_of(daemon, 2) as (client, late):
        leased, idle = client.ready("leased"), client.ready("idle")
        lease = client.lease(leased)
        daemon.process.terminate()
        wait_for(lambda: late.stats().core.is_draining, "it drains")
        assert late.prepare("late").reason is Reason.DRAINING
        assert daemon.process.poll() is None
        assert client.vote(leased, lease.lease_id).commit
        assert_ends(daemon, 0)
    found = outcomes(daemon.log_path)
    assert found == {leased: ["ok"], idle: ["daemon-stopped"], 0: ["draining"]}


def test_sigterm_does_not_wait_for_a_reader_longer_than_drain_timeout_ms(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(drain_timeout_ms=200, lease_ms=60_000)
    with clients_of(daemon, 1) as (client,):
        handle = client.ready()
        client.lease(handle)
        daemon.process.terminate()
        assert_ends(daemon, 0)
        assert client.until_closed()[-1].reason is Reason.DAEMON_STOPPED
    assert outcomes(daemon.log_path) == {handle: ["daemon-stopped"]}


def test_a_second_sigterm_ends_it_at_once_and_the_next_start_closes_what_was_open(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(drain_timeout_ms=60_000, lease_ms=60_000)
    with clients_of(daemon, 2) as (client, other):
        handle = client.ready()
        client.lease(handle)
        # What is not on the disk when it ends at once is in nobody's log.
        wait_for(lambda: b"lease.granted" in daemon.log_path.read_bytes(), "the lease is in the log")
        daemon.process.terminate()
        wait_for(lambda: other.stats().core.is_draining, "it drains")
        daemon.process.terminate()
        assert_ends(daemon, 128 + signal.SIGTERM)
    assert outcomes(daemon.log_path) == {}
    daemon.process = daemon._start()
    wait_for(lambda: outcomes(daemon.log_path) == {handle: ["daemon-restarted"]}, "it is closed")


def test_a_socket_that_somebody_else_has_put_there_is_not_removed(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    daemon.socket_path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(daemon.socket_path))
        daemon.stop()
        assert daemon.socket_path.exists()
    daemon.socket_path.unlink()


def test_a_socket_that_somebody_has_removed_does_not_disturb_the_end(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    daemon.socket_path.unlink()
    daemon.stop()


def test_a_client_that_does_not_read_does_not_hold_up_the_end(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    with clients_of(daemon, 1) as (client,):
        client.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                client.sock.send(w.encode_frame(w.StatsReq(id=1)) * 100)
        daemon.process.terminate()
        assert_ends(daemon, 0)


def test_sighup_goes_on_in_a_new_log(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    with clients_of(daemon, 1) as (client,):
        client.ingest(client.ready("before"))
        wait_for(lambda: client.stats().log.queued_lines == 0, "all is written")
        old = daemon.log_path.rename(daemon.directory / "old.jsonl")
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(daemon.log_path.exists, "there is a new log")
        client.ingest(client.ready("after"))
        wait_for(lambda: client.stats().log.queued_lines == 0, "all is written")
    names = [
        {getattr(line.record, "session_id", None) for line in log_events(path)} - {None}
        for path in (old, daemon.log_path)
    ]
    assert names == [{"before"}, {"after"}]


# --- crash


def test_after_a_crash_the_open_attempts_are_closed_once_and_their_handles_are_stale(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon()
    with clients_of(daemon, 1) as (client,):
        epoch = client.ask(w.PingReq).epoch
        done = client.ready("done")
        client.ingest(done)
        open_handles = [client.granted("a"), client.granted("b"), client.ready("c"), client.ready("d")]
        client.start(open_handles[1])
        client.lease(open_handles[3])
        wait_for(lambda: client.stats().log.queued_lines == 0, "all is written")
        daemon.kill()
        client.until_closed()
    for _ in range(2):
        daemon.restart()
        wait_for(lambda: len(outcomes(daemon.log_path)) == 5, "all have an outcome")
        found = outcomes(daemon.log_path)
        assert found == {done: ["ok"]} | {handle: ["daemon-restarted"] for handle in open_handles}

    def starts() -> list[r.DaemonStarted]:
        records = [line.record for line in log_events(daemon.log_path)]
        return [record for record in records if isinstance(record, r.DaemonStarted)]

    wait_for(lambda: len(starts()) == 3, "the third start is in the log")
    assert [(x.former_epoch, x.closed_attempts) for x in starts()] == [("", 0), (epoch, 4), ("", 0)]
    closing = [x.record for x in log_events(daemon.log_path) if isinstance(x.record, r.SessionTransition)]
    assert {x.slab_handle for x in closing if x.former_epoch == epoch} == set(open_handles)
    with clients_of(daemon, 1) as (client,):
        assert client.ask(w.PingReq).epoch != epoch
        for handle in (done, *open_handles):
            for named in ("", epoch):
                assert client.commit(handle, epoch=named).reason is Reason.STALE_HANDLE
                fields = {"slab_handle": handle, "epoch": named, "drained": True}
                assert client.ask(w.AbortReq, **fields).reason is Reason.STALE_HANDLE
        assert is_all_free(client.stats().core)
        client.ingest(client.ready("c"))


FAULTS = {
    "in a request": "Service._ping = broken",
    "in an answer": "Service._reply = broken",
    "in a timer": "Machine._take = broken",
    "in a new connection": "Connection._refuse_connection = broken; server.peer_of = broken",
    "in a lost connection": "Connection.connection_lost = broken",
    "in the drain": "daemon._drain = broken",
    "after an answer": "ping = Service._ping; Service._ping = lambda *a: (ping(*a), broken())",
}
TOLD = {"in a request", "in an answer"}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_exception_that_nobody_caught_ends_the_daemon_with_70(directory: Path, fault: str) -> None:
    """Its books can no longer be trusted, and a snapshot can be computed again."""
    script = f"""
        import sys
        from snapd import daemon, server
        from snapd.cli.serve import configure_messages
        from snapd.config import Config, ArenaConfig
        from snapd.core.machine import Machine
        from snapd.executor import Executor
        from snapd.server import Connection
        from snapd.service import Service

        def broken(*arguments, **options):
            raise RuntimeError("a fault was injected")

        def halted(executor, halt=Executor.halt):
            halt(executor)
            print("the core is halted", file=sys.stderr)

        Executor.halt = halted
        {FAULTS[fault]}
        configure_messages(is_json=True)
        arenas = (ArenaConfig(size_bytes=1 << 20),)
        sys.exit(daemon.run(Config(
            socket_path=sys.argv[1], log_path=sys.argv[2], arenas=arenas, reserve_timeout_ms=50,
        )))
    """
    path, log_path = directory / "s", directory / "log"
    command = [sys.executable, "-c", textwrap.dedent(script), str(path), str(log_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: socket.socket(socket.AF_UNIX).connect_ex(str(path)) == 0, "it listens")
        # Whoever looked whether it listens was a connection too: it may have ended already.
        with contextlib.suppress(ConnectionError, FileNotFoundError), RawClient(path) as client:
            client.send(w.DeclareLayoutReq(id=1, rank=0, layout=LAYOUT))
            if fault == "in a timer":
                client.receive()
                client.granted()
            else:
                client.send(w.PingReq(id=2))
            if fault in TOLD:
                told = [client.receive() for _ in range(1 + (fault == "in a request"))][-1]
                assert isinstance(told, w.ErrorRep) and told.reason is Reason.INTERNAL_ERROR
                assert told.id == 1 + (fault == "in a request") and "what the request has done" in told.detail
            if fault == "in the drain":
                process.terminate()
            if fault != "in a lost connection":
                answers = client.until_closed()
                if fault == "after an answer":
                    assert [type(answer) for answer in answers] == [w.DeclareLayoutRep, w.PingRep]
        _, stderr = process.communicate(timeout=END_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 70, stderr
    assert len(messages(stderr, "internal error")) >= 1
    assert "RuntimeError: a fault was injected" in stderr
    assert stopped_reason(log_path) == "internal-error"
    assert "the core is halted" in stderr
    assert not path.exists()
    former = read_open_attempts(str(log_path), 1)
    assert former is not None and len(former.attempts) == (fault == "in a timer"), "the next start closes it"


def test_nothing_is_logged_after_the_last_line(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on for a while, and timers and notifications with it."""
    write_stopped = daemon_module._write_stopped

    def write_stopped_and_ask(log: EventLog, executor: Executor, stop: Any) -> None:
        write_stopped(log, executor, stop)
        executor.ask(
            lambda at_ns, cause_id: e.PrepareAsked(
                at_ns=at_ns,
                cause_id=cause_id,
                slab_handle=1,
                session_id="s",
                layout_fingerprint="",
                num_tokens=1,
            ),
            lambda _: None,
        )

    monkeypatch.setattr(daemon_module, "_write_stopped", write_stopped_and_ask)
    monkeypatch.setattr(daemon_module.Notifier, "ready", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    paths = {"socket_path": str(directory / "s"), "log_path": str(directory / "log"), "size": "1MiB"}
    assert run(load_config(Path(os.devnull), {}, paths)) == 0
    assert type(log_events(directory / "log")[-1].record) is r.DaemonStopped


# --- processes that write

WRITER = """
    import sys
    sys.path.insert(0, sys.argv[2])
    from raw_client import RawClient
    client = RawClient(sys.argv[1])
    handle = client.granted("written", is_only_writer=True)
    client.start(handle)
    print(handle, flush=True)
    for line in sys.stdin:
        if line == "disconnect\\n":
            client.close()
        elif line == "commit\\n":
            client = RawClient(sys.argv[1])
            print(client.commit(handle).state, flush=True)
"""


def writer_command(script: str, daemon: Any) -> list[str]:
    return [
        sys.executable,
        "-c",
        textwrap.dedent(script),
        str(daemon.socket_path),
        str(Path(__file__).parent),
    ]


class Writer:
    """Another process that has prepared an attempt, and says that it makes every write."""

    def __init__(self, daemon: Any) -> None:
        command = writer_command(WRITER, daemon)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.handle = int(self.process.stdout.readline())

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def writer(daemon: Any) -> Iterator[Writer]:
    started = Writer(daemon)
    yield started
    started.kill()


def test_a_writer_that_exits_ends_its_attempt_and_frees_its_bytes_at_once(
    daemon: Any, writer: Writer
) -> None:
    """quarantine_ms is a minute here: the exit is drain proof, and nothing waits."""
    with clients_of(daemon, 1) as (client,):
        other = client.granted("other")
        writer.kill()
        view = wait_for(lambda: (v := client.view(writer.handle)).state == "ABORTED" and v, "it ends")
        assert view.reason is Reason.WRITER_GONE
        core = client.stats().core
        check_sums(core)
        assert (core.quarantined_shards, core.open_sessions) == (0, 1)
        assert client.ask(w.AbortReq, slab_handle=other, drained=True)
        assert is_all_free(client.stats().core)
    wait_for(lambda: outcomes(daemon.log_path).get(writer.handle) == ["writer-gone"], "the log says so")
    (released,) = [
        line.record
        for line in log_events(daemon.log_path)
        if isinstance(line.record, r.SlabReleased) and line.record.slab_handle == writer.handle
    ]
    assert released.was == "live"


def test_a_writer_s_exit_frees_what_is_in_quarantine_already(daemon: Any, writer: Writer) -> None:
    with clients_of(daemon, 1) as (client,):
        assert client.ask(w.AbortReq, slab_handle=writer.handle).state == "ABORTED"
        assert client.stats().core.quarantined_shards == 1
        writer.kill()
        wait_for(lambda: is_all_free(client.stats().core), "all is free")
        assert client.view(writer.handle).reason is Reason.CLIENT_ABORT


def test_a_writer_that_only_disconnects_goes_on_and_may_commit_on_a_new_connection(
    daemon: Any, writer: Writer
) -> None:
    with clients_of(daemon, 1) as (client,):
        writer.tell("disconnect")
        wait_for(lambda: client.stats().connections == 1, "it is gone")
        assert client.view(writer.handle).state == "TRANSFERRING"
        writer.tell("commit")
        assert writer.process.stdout is not None
        assert writer.process.stdout.readline() == "READY\n"
        writer.kill()
        wait_for(lambda: client.stats().connections == 1, "it is gone for good")
        assert client.view(writer.handle).state == "READY", "what is committed outlives its writer"
        client.ingest(writer.handle)


def test_the_exit_of_a_process_that_did_not_say_so_proves_nothing(daemon: Any) -> None:
    """Others may be writing for it."""
    script = WRITER.replace("is_only_writer=True", "is_only_writer=False")
    command = writer_command(script, daemon)
    ended = subprocess.run(command, input="", capture_output=True, text=True, timeout=END_S)
    with clients_of(daemon, 1) as (client,):
        wait_for(lambda: client.stats().connections == 1, "it is gone")
        assert client.view(int(ended.stdout)).state == "TRANSFERRING"


def test_both_ends_hear_how_an_attempt_ends_and_a_drain_proof_frees_the_bytes_at_once(daemon: Any) -> None:
    with clients_of(daemon, 3) as (writer, reader, operator):
        handle = writer.granted()
        assert operator.ask(w.AbortReq, slab_handle=handle).state == "ABORTED"
        told = writer.push()
        assert told == w.SessionEnded(
            slab_handle=handle, session_id="s", state="ABORTED", reason=Reason.CLIENT_ABORT, drain_wanted=True
        )
        assert operator.stats().core.quarantined_shards == 1
        assert writer.ask(w.DrainedReq, slab_handle=handle).state == "ABORTED"
        assert is_all_free(operator.stats().core)
        assert isinstance(writer.ask(w.DrainedReq, slab_handle=handle), w.AckRep), "a repeat does no harm"
        handle = writer.ready()
        decision = reader.vote(handle, reader.lease(handle).lease_id)
        assert decision.commit
        for client in (writer, reader):
            told = client.push()
            assert (told.slab_handle, told.state, told.reason) == (handle, "INGESTED", Reason.OK)
            assert not told.drain_wanted
        assert not operator.pushes


def test_the_end_is_told_to_a_connection_that_is_gone_without_harm(daemon: Any) -> None:
    with clients_of(daemon, 2) as (writer, operator):
        handle = writer.granted()
        writer.close()
        wait_for(lambda: operator.stats().connections == 1, "it is gone")
        assert operator.ask(w.AbortReq, slab_handle=handle, drained=True).state == "ABORTED"
        assert is_all_free(operator.stats().core)


# --- signals while it starts


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_while_it_takes_its_memory_does_not_kill(directory: Path, number: signal.Signals) -> None:
    """Of a logrotate or an operator: it starts, and after SIGTERM it ends in order."""
    script = f"""
        import os, sys
        from snapd import daemon
        from snapd.config import Config, ArenaConfig

        take = os.posix_fallocate

        def take_slowly(*arguments):
            os.kill(os.getpid(), {int(number)})
            take(*arguments)

        os.posix_fallocate = take_slowly
        sys.exit(daemon.run(Config(
            socket_path=sys.argv[1], log_path=sys.argv[2], arenas=(ArenaConfig(size_bytes=1 << 20),)
        )))
    """
    path, log_path = directory / "s", directory / "log"
    command = [sys.executable, "-c", textwrap.dedent(script), str(path), str(log_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        if number == signal.SIGHUP:
            wait_for(lambda: socket.socket(socket.AF_UNIX).connect_ex(str(path)) == 0, "it listens")
            process.terminate()
        _, stderr = process.communicate(timeout=END_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, stderr
    assert isinstance(log_events(log_path)[-1].record, r.DaemonStopped)

"""What the service manager hears: from the parts in this process, and from a real daemon."""

import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import daemon_process
import pytest
from daemon_process import DaemonProcess, clean_environment

from snapd.client import Client
from snapd.sdnotify import STATUS_EVERY_S, Heartbeat, Notifier

WAIT_S = 20.0


class Manager:
    """A service manager's socket."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(address.replace("@", "\0"))
        self.sock.settimeout(WAIT_S)
        self.env = {"NOTIFY_SOCKET": address}

    def hear(self) -> list[str]:
        """Return the next message's lines, waiting for it."""
        return self.sock.recv(4096).decode().split("\n")

    def hear_all(self) -> list[list[str]]:
        """Return the lines of every message that is there."""
        heard = []
        self.sock.setblocking(False)
        try:
            while True:
                heard.append(self.hear())
        except BlockingIOError:
            self.sock.settimeout(WAIT_S)
            return heard


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    name = f"@snapd-test-{secrets.token_hex(8)}"
    made = Manager(str(tmp_path / "notify") if request.param == "path" else name)
    yield made
    made.sock.close()


class FakeLoop:
    """Timers that are fired by hand."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.cancelled = 0

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        self.timers.append((delay_s, callback))
        return self

    def cancel(self) -> None:
        self.cancelled += 1


# --- messages ----------------------------------------------------------------------------------


def test_each_message_is_what_systemd_documents(manager: Manager) -> None:
    notifier = Notifier(manager.env)
    notifier.ready()
    notifier.status("fine")
    notifier.alive()
    before_us = time.monotonic_ns() // 1_000
    notifier.reloading()
    notifier.stopping(1_500)
    heard = manager.hear_all()
    reloading = heard.pop(3)
    assert heard == [
        ["READY=1"],
        ["STATUS=fine"],
        ["WATCHDOG=1"],
        ["STOPPING=1", "EXTEND_TIMEOUT_USEC=1500000"],
    ]
    assert reloading[0] == "RELOADING=1" and reloading[1].startswith("MONOTONIC_USEC=")
    assert before_us <= int(reloading[1].removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1_000


def test_the_same_status_is_told_once(manager: Manager) -> None:
    notifier = Notifier(manager.env)
    for status in ("a", "a", "b", "b", "a"):
        notifier.status(status)
    assert manager.hear_all() == [["STATUS=a"], ["STATUS=b"], ["STATUS=a"]]


def test_after_close_nothing_is_sent(manager: Manager) -> None:
    notifier = Notifier(manager.env)
    notifier.alive()
    notifier.close()
    notifier.alive()
    notifier.close()
    assert manager.hear_all() == [["WATCHDOG=1"]]


def test_a_full_queue_holds_nothing_up_and_what_must_arrive_comes_with_the_next_message(
    manager: Manager,
) -> None:
    notifier = Notifier(manager.env)
    notifier.status("told")
    flood = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    flood.setblocking(False)
    with flood, pytest.raises(BlockingIOError):
        while True:
            flood.sendto(b"X=1", manager.env["NOTIFY_SOCKET"].replace("@", "\0"))
    begin_s = time.monotonic()
    notifier.ready()
    assert time.monotonic() - begin_s < 1.0
    assert [lines for lines in manager.hear_all() if lines != ["X=1"]] == [["STATUS=told"]]
    notifier.status("told")
    notifier.status("told")
    assert manager.hear_all() == [["READY=1", "STATUS=told"]]


def test_a_status_that_was_not_taken_is_told_again(manager: Manager) -> None:
    notifier = Notifier(manager.env)
    address = manager.env["NOTIFY_SOCKET"].replace("@", "\0")
    manager.sock.close()
    if address.startswith("/"):
        Path(address).unlink()
    notifier.status("a")
    manager.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.sock.bind(address)
    notifier.status("a")
    assert manager.hear_all() == [["STATUS=a"]]


@pytest.mark.parametrize("address", ["", "/nowhere/notify", "vsock:2:1234", "relative", "@" + "x" * 200])
def test_without_a_manager_that_can_be_reached_nothing_happens(address: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"})
    notifier.ready()
    notifier.stopping(1)
    notifier.close()
    assert notifier.is_wanted is False


def test_a_process_that_is_not_meant_has_no_watchdog() -> None:
    def watchdog_us(**env: str) -> int:
        return Notifier({"NOTIFY_SOCKET": "/n"} | env).watchdog_us

    assert watchdog_us(WATCHDOG_USEC="30000000") == 30_000_000
    assert watchdog_us(WATCHDOG_USEC="30000000", WATCHDOG_PID=str(os.getpid())) == 30_000_000
    assert watchdog_us(WATCHDOG_USEC="30000000", WATCHDOG_PID=str(os.getppid())) == 0
    for text in ("", "0", "-1", "1s", "9" * 30, "999"):
        assert watchdog_us(WATCHDOG_USEC=text) == 0, text
    assert Notifier({"WATCHDOG_USEC": "30000000"}).watchdog_us == 0


# --- the heartbeat -----------------------------------------------------------------------------


def test_the_watchdog_hears_from_the_loop_at_half_of_its_time(manager: Manager) -> None:
    loop: Any = FakeLoop()
    heartbeat = Heartbeat(Notifier(manager.env | {"WATCHDOG_USEC": "3000000"}), loop, lambda: "fine")
    assert manager.hear_all() == [["WATCHDOG=1"], ["STATUS=fine"]]
    assert [delay_s for delay_s, _ in loop.timers] == [1.5, STATUS_EVERY_S]
    loop.timers[0][1]()
    assert manager.hear_all() == [["WATCHDOG=1"]] and loop.timers[2][0] == 1.5
    heartbeat.close()
    assert loop.cancelled == 2


def test_the_status_is_told_again_when_it_has_changed(manager: Manager) -> None:
    loop: Any = FakeLoop()
    said = ["a", "b", "b"]
    Heartbeat(Notifier(manager.env), loop, lambda: said.pop(0))
    for _ in range(2):
        loop.timers[-1][1]()
    assert manager.hear_all() == [["STATUS=a"], ["STATUS=b"]] and len(loop.timers) == 3


def test_without_a_manager_no_timer_is_armed() -> None:
    loop: Any = FakeLoop()
    Heartbeat(Notifier({"WATCHDOG_USEC": "3000000"}), loop, lambda: "fine")
    assert loop.timers == []


# --- the daemon --------------------------------------------------------------------------------


@pytest.fixture
def supervise(
    manager: Manager, start_daemon: Callable[..., DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., DaemonProcess]:
    """Start a daemon as a service manager does."""
    env = clean_environment() | manager.env | {"WATCHDOG_USEC": "200000"}
    monkeypatch.setattr(daemon_process, "clean_environment", lambda: env)
    return start_daemon


def hear_until(manager: Manager, line: str) -> list[list[str]]:
    """Return the messages up to the first that has *line*, without the watchdog's."""
    heard: list[list[str]] = []
    deadline_s = time.monotonic() + WAIT_S
    while not heard or line not in heard[-1]:
        assert time.monotonic() < deadline_s, f"{line} does not come; {heard} did"
        if (lines := manager.hear()) != ["WATCHDOG=1"]:
            heard.append(lines)
    return heard


def test_a_daemon_tells_its_life_in_order(manager: Manager, supervise: Callable[..., DaemonProcess]) -> None:
    daemon = supervise()
    assert hear_until(manager, "READY=1") == [["STATUS=taking 16 MiB of memory"], ["READY=1"]]
    while manager.hear() != ["WATCHDOG=1"]:
        pass
    log = daemon.log_path
    log.rename(log.with_suffix(".old"))
    daemon.process.send_signal(signal.SIGHUP)
    reload = hear_until(manager, "READY=1")
    assert [lines[0] for lines in reload if not lines[0].startswith("STATUS")] == ["RELOADING=1", "READY=1"]
    deadline_s = time.monotonic() + WAIT_S
    while not log.exists():
        assert time.monotonic() < deadline_s
    daemon.process.terminate()
    (*_, stopping) = hear_until(manager, "STOPPING=1")
    # What drain_timeout_ms is in these tests, and half a minute for the log and the memory.
    assert stopping == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=30500000"]
    assert daemon.process.wait(WAIT_S) == 0


def test_the_status_line_says_what_is_open_and_what_is_free(
    manager: Manager, supervise: Callable[..., DaemonProcess]
) -> None:
    daemon = supervise()
    hear_until(manager, "READY=1")
    assert hear_until(manager, "STATUS=serving: 0 attempts open, 16 MiB of 16 MiB free")
    with Client(str(daemon.socket_path)) as client:
        assert client.ping()


def test_a_daemon_that_fails_to_start_never_says_that_it_is_ready(
    manager: Manager, supervise: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=re.escape("cuda:77")):
        supervise(device="cuda:77")
    assert ["READY=1"] not in manager.hear_all()


def test_a_loop_that_is_stuck_is_not_alive(manager: Manager, supervise: Callable[..., DaemonProcess]) -> None:
    """The whole process stands here; the watchdog's messages come from nowhere but its loop."""
    daemon = supervise()
    hear_until(manager, "READY=1")
    daemon.process.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass
    manager.hear_all()
    manager.sock.settimeout(0.5)
    with pytest.raises(TimeoutError):
        manager.hear()
    manager.sock.settimeout(WAIT_S)
    daemon.process.send_signal(signal.SIGCONT)
    assert manager.hear()

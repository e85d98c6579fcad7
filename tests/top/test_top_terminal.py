"""How ``snapd top`` takes a terminal and gives it back: by a key, by signals, when the terminal is gone."""

import contextlib
import os
import pty
import signal
from collections.abc import Iterator

import pytest
from daemon_process import DaemonProcess
from terminal import Pty, interrupt, wait_for
from top_cases import Workers

from snapd.cli.topscreen import BACK_TAB, keys_of

ALTERNATE_ON, ALTERNATE_OFF = "\x1b[?1049h", "\x1b[?1049l"
SHOW_CURSOR, WRAP_OFF, WRAP_ON = "\x1b[?25h", "\x1b[?7l", "\x1b[?7h"


@pytest.fixture
def terminals() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def start(terminals: contextlib.ExitStack, daemon: DaemonProcess, *arguments: str, **env: str) -> Pty:
    terminal = Pty("top", "--socket", str(daemon.socket_path), "--interval", "0.2", *arguments, **env)
    terminals.callback(terminal.close)
    terminal.until(ALTERNATE_ON)
    # A line that a terminal takes for wider than it is counted for must not wrap.
    terminal.until(WRAP_OFF)
    terminal.until("shards quarantined")
    return terminal


def is_restored(terminal: Pty) -> bool:
    text = terminal.output.decode()
    assert terminal.settings() == terminal.before
    return all(text.rfind(code) >= 0 for code in (ALTERNATE_OFF, SHOW_CURSOR, WRAP_ON))


def test_a_key_ends_it_and_the_terminal_is_as_before(
    terminals: contextlib.ExitStack, shared: DaemonProcess
) -> None:
    terminal = start(terminals, shared)
    assert terminal.settings() != terminal.before
    terminal.press("\x1b[A\x1bOP\x1bx")  # Arrows, function keys and Alt do nothing.
    terminal.press("q")
    assert terminal.end() == (0, "")
    assert is_restored(terminal)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_it_and_the_terminal_is_as_before(
    terminals: contextlib.ExitStack, shared: DaemonProcess, number: int, status: int
) -> None:
    terminal = start(terminals, shared)
    terminal.process.send_signal(number)
    assert terminal.end() == (status, "")
    assert is_restored(terminal)


def test_a_terminal_that_goes_away_ends_it(terminals: contextlib.ExitStack, shared: DaemonProcess) -> None:
    terminal = start(terminals, shared)
    os.close(terminal.master)
    os.close(terminal.slave)
    assert terminal.process.wait(60) != 0
    assert terminal.process.stderr is not None
    assert b"Traceback" not in terminal.process.stderr.read()


def test_keys_that_can_no_longer_come_end_it(terminals: contextlib.ExitStack, shared: DaemonProcess) -> None:
    master, slave = pty.openpty()
    terminal = Pty("top", "--socket", str(shared.socket_path), stdin=slave)
    terminals.callback(terminal.close)
    os.close(slave)
    terminal.until("shards quarantined")
    os.close(master)
    assert terminal.end() == (-signal.SIGHUP, "")


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(
    terminals: contextlib.ExitStack, shared: DaemonProcess
) -> None:
    terminal = start(terminals, shared)
    terminal.process.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    terminal.read()
    assert is_restored(terminal)
    workers = Workers(str(shared.socket_path))
    workers.reserved("meanwhile", 16)
    workers.close()
    terminal.process.send_signal(signal.SIGCONT)
    terminal.until(ALTERNATE_ON)
    terminal.until("new → RESERVED")
    assert terminal.settings() != terminal.before
    terminal.press("q")
    assert terminal.end() == (0, "")
    assert is_restored(terminal)


@pytest.mark.parametrize(("env", "has_colour"), [({"NO_COLOR": "1"}, False), ({}, True)])
def test_no_colour_means_none(
    terminals: contextlib.ExitStack, shared: DaemonProcess, env: dict[str, str], has_colour: bool
) -> None:
    terminal = start(terminals, shared, **env)
    wait_for(lambda: (terminal.read(), b"one-ready" in terminal.output)[1], "it is drawn")
    codes = (b"\x1b[32m", b"\x1b[31m", b"\x1b[36m", b"38;5", b"38;2")
    assert any(code in terminal.output for code in codes) is has_colour
    # Letters stand where colours do not.
    assert ("█".encode() in terminal.output) is has_colour
    assert (b"W writing" in terminal.output) is not has_colour
    terminal.press("q")
    assert terminal.end() == (0, "")


@pytest.mark.parametrize("env", [{"LC_ALL": "C"}, {"LANG": ""}])
def test_a_locale_without_utf8_gets_ascii(
    terminals: contextlib.ExitStack, shared: DaemonProcess, env: dict[str, str]
) -> None:
    workers = Workers(str(shared.socket_path), peer="会話")
    workers.reserved("会話", 16)
    workers.close()
    terminal = start(terminals, shared, "--sort", "deadline", **env)
    terminal.press("2")
    terminal.until("\\u4f1a\\u8a71")
    assert terminal.output.isascii()
    terminal.press("q")
    assert terminal.end() == (0, "")


def test_without_a_terminal_for_keys_a_signal_ends_it(
    terminals: contextlib.ExitStack, shared: DaemonProcess
) -> None:
    with open(os.devnull) as nothing:  # noqa: PTH123
        terminal = Pty("top", "--socket", str(shared.socket_path), stdin=nothing.fileno())
    terminals.callback(terminal.close)
    terminal.until("shards quarantined")
    interrupt(terminal.process)
    assert terminal.end() == (0, "")
    assert is_restored(terminal)


def test_it_waits_for_a_daemon_that_is_not_there_yet(
    terminals: contextlib.ExitStack, daemon: DaemonProcess
) -> None:
    daemon.stop()
    terminal = Pty("top", "--socket", str(daemon.socket_path), "--interval", "0.2")
    terminals.callback(terminal.close)
    terminal.until("no daemon, waiting since")
    daemon.restart()
    terminal.until("0 open")
    terminal.press("q")
    assert terminal.end() == (0, "")


def test_a_daemon_that_stands_still_is_said_to_and_keys_work(
    terminals: contextlib.ExitStack, daemon: DaemonProcess
) -> None:
    terminal = start(terminals, daemon, "--timeout", "0.5")
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        terminal.until("no answer from the daemon, waiting since")
        terminal.press("q")
        assert terminal.end() == (0, "")
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def test_keys_are_told_from_what_arrows_send() -> None:
    assert keys_of(b"q") == ["q"]
    assert keys_of(b"\x1b[As\x1bOP\x1b[15~\x1bxp\x1b") == ["s", "p"]
    assert keys_of(b"\t\x1b[Z1") == ["\t", BACK_TAB, "1"]
    assert keys_of(b"\xff\xfe2") == ["\ufffd", "\ufffd", "2"]

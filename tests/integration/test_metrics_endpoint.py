"""Whatever is sent to the metrics' address concerns that connection only; and what stops a start."""

import asyncio
import contextlib
import os
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import uvloop
from daemon_process import DaemonProcess
from raw_client import RawClient, running, wait_for
from test_metrics import url_of

from snapd import wire as w
from snapd.config import load_config
from snapd.daemon import run
from snapd.errors import ConfigError, StartupError
from snapd.limits import Limits
from snapd.metrics.endpoint import HEAD_BYTES_MAX, Endpoint, Scraper
from snapd.metrics.looplag import LoopLag
from snapd.metrics.requests import TimedService
from snapd.metrics.serving import opened
from snapd.metricsaddress import is_loopback, listen_address
from snapd.server import Server

LIMITS = Limits()
TIMEOUT_S = LIMITS.metrics_timeout_ms / 1_000
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running(metrics_address=":0") as started:
        yield started


def connect(daemon: DaemonProcess) -> socket.socket:
    parts = urlsplit(url_of(daemon))
    assert parts.hostname and parts.port
    return socket.create_connection((parts.hostname, parts.port), timeout=15)


def read_all(sock: socket.socket) -> bytes:
    """Return what comes until the other side closes; a reset is an end as well."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            got += data
    return got


def answer_to(daemon: DaemonProcess, data: bytes) -> bytes:
    with connect(daemon) as sock:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(data)
        return read_all(sock)


def check_served(daemon: DaemonProcess) -> None:
    """Both sockets answer, and nothing was thought worth a traceback."""
    with RawClient(daemon.socket_path) as client:
        assert client.ask(w.PingReq).epoch
    with urllib.request.urlopen(url_of(daemon), timeout=10) as response:
        assert b"snapd_build_info" in response.read()
    assert "Traceback" not in daemon.stderr


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (GET, b"200"),
        (b"GET /metrics?name=x HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\n\n", b"200"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metricsx HTTP/1.1\r\n\r\n", b"404"),
        (b"GET //metrics HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", b"405"),
        (b"DELETE /x HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"\xff\x00\xfe" * 50 + b"\r\n\r\n", b"400"),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (HEAD_BYTES_MAX * 2), b"431"),
    ],
)
def test_one_request_gets_one_answer_and_the_connection_ends(
    daemon: DaemonProcess, request_bytes: bytes, status: bytes
) -> None:
    answer = answer_to(daemon, request_bytes)
    # Whoever sends more than is read may get a reset in place of the answer.
    assert answer.startswith(b"HTTP/1.1 " + status) or (status == b"431" and not answer)
    check_served(daemon)


def test_a_second_request_on_a_connection_is_not_answered(daemon: DaemonProcess) -> None:
    assert answer_to(daemon, GET + GET).count(b"HTTP/1.1 ") == 1


def test_a_request_may_come_byte_by_byte(daemon: DaemonProcess) -> None:
    with connect(daemon) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(len(GET)):
            sock.send(GET[number : number + 1])
        assert read_all(sock).startswith(b"HTTP/1.1 200")


def test_a_flood_of_bytes_without_an_end_is_cut_off(daemon: DaemonProcess) -> None:
    with connect(daemon) as sock, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        for _ in range(2_000):
            sock.sendall(b"x" * 65_536)
        pytest.fail("128 MiB were taken")
    check_served(daemon)


def test_whoever_leaves_in_the_middle_leaves_nothing_behind(daemon: DaemonProcess) -> None:
    fds = Path(f"/proc/{daemon.process.pid}/fd")
    before = len(list(fds.iterdir()))
    for part in (b"", b"GET", GET):
        with connect(daemon) as sock:
            sock.sendall(part)
    wait_for(lambda: len(list(fds.iterdir())) <= before, "their file descriptors are closed")
    check_served(daemon)


def test_idle_connections_do_not_lock_the_scraper_out(daemon: DaemonProcess) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(daemon)) for _ in range(LIMITS.metrics_connections_max + 8)]
        for sock in idle:
            sock.sendall(b"GET")
        check_served(daemon)
        # The oldest have made room, at once and not when their time was over.
        for sock in idle:
            sock.settimeout(TIMEOUT_S / 2)
        assert [read_all(sock) for sock in idle[:8]] == [b""] * 8
        idle[-1].sendall(GET[3:])
        assert read_all(idle[-1]).startswith(b"HTTP/1.1 200")


# --- one connection, with a clock of its own


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        self.written = b""
        self.is_closed = self.is_aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True


class FakeTimer:
    def __init__(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.delay_s, self.fire, self.is_cancelled = delay_s, callback, False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeLoop:
    def __init__(self) -> None:
        self.timers: list[FakeTimer] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(delay_s, callback))
        return self.timers[-1]


def connected(
    text: Callable[[], bytes] = lambda: b"x 1\n",
) -> tuple[Scraper, FakeTransport, FakeLoop, Endpoint]:
    loop, transport = FakeLoop(), FakeTransport()
    endpoint = Endpoint(loop, text, LIMITS)  # type: ignore[arg-type]
    scraper = endpoint.new_connection()
    scraper.connection_made(transport)
    return scraper, transport, loop, endpoint


def test_whoever_does_not_finish_in_time_is_cut_off() -> None:
    scraper, transport, loop, endpoint = connected()
    scraper.data_received(b"GET /metr")
    (timer,) = loop.timers
    assert timer.delay_s == TIMEOUT_S and not transport.is_closing()
    timer.fire()
    assert transport.is_aborted and not endpoint.connections


def test_whoever_does_not_read_the_answer_in_time_is_cut_off() -> None:
    scraper, transport, loop, _ = connected()
    scraper.data_received(GET)
    assert transport.is_closed and not transport.is_aborted and not loop.timers[0].is_cancelled
    loop.timers[0].fire()
    assert transport.is_aborted


def test_a_connection_that_has_ended_has_no_timer_left() -> None:
    scraper, _, loop, endpoint = connected()
    scraper.connection_lost(None)
    assert loop.timers[0].is_cancelled and not endpoint.connections


def test_no_more_of_a_head_is_kept_than_is_allowed() -> None:
    scraper, transport, _, _ = connected()
    scraper.data_received(b"x" * (HEAD_BYTES_MAX - 1))
    scraper.data_received(b"y")
    assert not transport.written
    scraper.data_received(b"z" * 1_000_000)
    assert transport.written.startswith(b"HTTP/1.1 431") and transport.is_closed
    assert len(scraper._head) == HEAD_BYTES_MAX + 1


def test_what_comes_after_the_answer_is_not_looked_at() -> None:
    scraper, transport, _, _ = connected()
    scraper.data_received(GET)
    answer = transport.written
    scraper.data_received(GET)
    assert transport.written == answer


def test_metrics_that_cannot_be_told_disturb_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    def text() -> bytes:
        raise ZeroDivisionError

    scraper, transport, _, _ = connected(text)
    scraper.data_received(GET)
    assert transport.written.startswith(b"HTTP/1.1 500") and transport.is_closed
    said = capsys.readouterr()
    assert "metrics cannot be told" in said.out + said.err


def test_at_the_end_every_connection_is_cut_off() -> None:
    _, transport, _, endpoint = connected()
    endpoint.close()
    assert transport.is_aborted and not endpoint.connections


async def test_after_the_end_nobody_is_answered_and_nothing_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lags: list[Any] = []

    class Lag(LoopLag):
        is_closed = False

        def __init__(self, loop: Any) -> None:
            super().__init__(loop)
            lags.append(self)

        def close(self) -> None:
            self.is_closed = True
            super().close()

    monkeypatch.setattr("snapd.metrics.serving.LoopLag", Lag)
    config = load_config(Path(os.devnull), {}, {"metrics_address": ":0"})
    executor: Any = SimpleNamespace(now_ns=lambda: 0)
    service = TimedService(config, "epoch", executor, {}, "", lambda: None, lambda: (0, 0))
    with opened(config) as metrics:
        address = metrics._sock.getsockname()
        async with metrics.serving(service, cast("Server", None), executor):
            reader, writer = await asyncio.open_connection(*address)
            other, _ = await asyncio.open_connection(*address)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 404")
            assert not lags[0].is_closed
        async with asyncio.timeout(TIMEOUT_S / 2):
            with contextlib.suppress(ConnectionResetError):
                assert await other.read() == b""
        assert lags[0].is_closed
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)


# --- start


def start_error(directory: Path, metrics_address: str) -> str:
    """Try to run a daemon, which must not start; return the error. Nothing is left open."""
    given = {"socket_path": str(directory / "s"), "log_path": str(directory / "log"), "size": "1MiB"}
    config = load_config(Path(os.devnull), {}, given | {"metrics_address": metrics_address})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))  # The first loop of a process opens what stays open.
    fds_before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StartupError) as caught:
        run(config)
    assert len(list(Path("/proc/self/fd").iterdir())) == fds_before
    return str(caught.value)


def test_a_port_that_is_taken_stops_the_start_and_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = start_error(tmp_path, f":{port}")
    assert f"metrics_address ':{port}' cannot be listened at: Address already in use" in error
    assert "choose another port" in error


def test_an_address_of_another_host_stops_the_start_and_says_so(tmp_path: Path) -> None:
    assert "cannot be listened at: Cannot assign" in start_error(tmp_path, "192.0.2.1:0")


def test_two_daemons_at_one_address_are_told_apart_at_once(daemon: DaemonProcess, tmp_path: Path) -> None:
    assert "Address already in use" in start_error(tmp_path, f"127.0.0.1:{urlsplit(url_of(daemon)).port}")
    check_served(daemon)


def test_an_address_is_taken_before_the_daemon_serves_there() -> None:
    """Else two that start at one time would both get through, and one would fail much later."""
    first = load_config(Path(os.devnull), {}, {"metrics_address": ":0"})
    with opened(first) as metrics:
        port = metrics._sock.getsockname()[1]
        second = load_config(Path(os.devnull), {}, {"metrics_address": f":{port}"})
        with pytest.raises(StartupError), opened(second):
            pass


def test_a_daemon_can_be_started_again_at_its_address(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(metrics_address=":0")
    port = urlsplit(url_of(daemon)).port
    daemon.stop()
    daemon.stderr_path.write_text("")
    daemon.overrides["metrics_address"] = f":{port}"
    daemon.restart()
    # Its connections are in TIME_WAIT, and it is started once more.
    check_served(daemon)
    daemon.stop()
    daemon.stderr_path.write_text("")
    daemon.restart()
    check_served(daemon)


def test_a_missing_package_stops_the_start_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    error = start_error(tmp_path, ":0")
    assert "pip install 'kv-snapd[metrics]'" in error


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":9464", ("127.0.0.1", 9464)),
        ("localhost:1", ("127.0.0.1", 1)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("10.0.0.7:65535", ("10.0.0.7", 65_535)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert listen_address(text) == address
    assert is_loopback(address[0]) == (address[0] in ("127.0.0.1", "::1"))


@pytest.mark.parametrize(
    "text",
    [
        "9464",
        "127.0.0.1",
        "::1:80",
        "[::1]",
        "[127.0.0.1]:80",
        "host:80",
        ":",
        ":65536",
        ":-1",
        ":8٢",
        ":1 ",
        ":000080",
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Path(os.devnull), {}, {"metrics_address": text})
    assert "metrics_address" in str(caught.value) and '"127.0.0.1:9464"' in str(caught.value)

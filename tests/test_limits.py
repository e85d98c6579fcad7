"""Every setting of the table ``[limits]`` has its effect in the daemon."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_gathering import FakeTransport

from snapd import daemon, tcplistener
from snapd.config import Config
from snapd.core.session import Settings
from snapd.limits import Limits
from snapd.metrics.endpoint import Endpoint
from snapd.server import Server
from snapd.units import KIB

# What each is looked for in; a new one needs a test.
TRIED = {
    "accept_backlog", "congested_bytes", "warning_interval_ms", "tcp_addresses_max", "retry_after_ms_max",
    "log_back_off_ms_max", "log_close_ms", "stop_grace_ms", "metrics_connections_max", "metrics_timeout_ms",
    "kv_events_linger_ms",
    # In tests/test_notifications.py.
    "notifications_max", "notifications_chars_max", "notification_chars_max",
}  # fmt: skip


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def with_limits(**limits: int) -> Config:
    return Config(limits=Limits(**limits))


def server_of(config: Config, loop: asyncio.AbstractEventLoop) -> Server:
    return Server(config, loop, lambda _: None, lambda _: False)


def test_every_one_is_tried() -> None:
    assert {field.name for field in msgspec.structs.fields(Limits)} == TRIED


def test_a_client_is_congested_when_so_much_is_unread(loop: asyncio.AbstractEventLoop) -> None:
    high_bytes = []
    for size in (64 * KIB, 4 * KIB):
        transport = FakeTransport()
        connection = server_of(with_limits(congested_bytes=size), loop).new_connection()
        connection.connection_made(transport)  # type: ignore[arg-type]
        high_bytes.append(transport.high_bytes + connection._gathered_bytes_max)
    assert high_bytes == [64 * KIB, 4 * KIB]


def test_a_warning_comes_once_in_so_long(
    loop: asyncio.AbstractEventLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    warnings = server_of(with_limits(warning_interval_ms=50), loop).warnings
    now_s = [0.0]
    warnings._now_s = lambda: now_s[0]
    for now_s[0] in (0.0, 0.04, 0.06):
        warnings.warn("a")
    assert capsys.readouterr().out.count("left_out=") == 2


def test_the_longest_retry_is_one_of_the_cores_settings() -> None:
    settings = daemon.settings_of(with_limits(retry_after_ms_max=70))
    assert settings.retry_after_ms_max == 70
    assert daemon.settings_of(Config()) == Settings()


def test_so_many_wait_to_be_accepted(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    async def create_unix_server(protocol: object, **options: Any) -> SimpleNamespace:
        asked.update(options)
        return SimpleNamespace(close=options["sock"].close)

    config = Config(socket_path=str(tmp_path / "s"), limits=Limits(accept_backlog=7))
    fake = SimpleNamespace(create_unix_server=create_unix_server)

    async def listen() -> None:
        async with daemon._listening(config, server_of(config, loop), fake):  # type: ignore[arg-type]
            pass

    loop.run_until_complete(listen())
    assert asked["backlog"] == 7


def test_over_tcp_so_many_wait_and_so_many_addresses_are_counted(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Listening(socket.socket):
        def listen(self, backlog: int = 0) -> None:
            asked.append(backlog)
            super().listen(backlog)

    monkeypatch.setattr(tcplistener.socket, "socket", Listening)
    limits = Limits(accept_backlog=9, tcp_addresses_max=3)
    config = Config(tcp_address="127.0.0.1:0", tls_handshakes_per_s=1_000, limits=limits)

    async def listen() -> int:
        listener = tcplistener.TcpListener(config, server_of(config, loop), asyncio.get_running_loop())
        for number in range(10):
            listener._limiter.admit(f"10.0.0.{number}", 0.0)
        await listener.close()
        return listener.usage()["limits.tcp_addresses_max"]

    assert (loop.run_until_complete(listen()), asked) == (3, [9])


def test_the_log_has_its_pauses_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[float] = []

    class Log:
        def __init__(self, settings: Any, epoch: str) -> None:
            self.settings = settings

        def close(self, timeout_s: float) -> int:
            closed.append(timeout_s)
            return 0

    monkeypatch.setattr(daemon, "EventLog", Log)
    with daemon._event_log(with_limits(log_back_off_ms_max=70, log_close_ms=1_500), "e") as log:
        assert log.settings.back_off_ms_max == 70  # type: ignore[attr-defined]
    assert closed == [1.5]


def test_the_service_manager_is_told_of_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[int] = []
    monkeypatch.setattr(daemon.Notifier, "stopping", lambda self, timeout_ms: told.append(timeout_ms))
    monkeypatch.setattr(daemon.Notifier, "ready", lambda self: stop.on_signal(daemon.signal.SIGTERM))
    made: list[Any] = []
    make = daemon._Stop

    def remember() -> Any:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(daemon, "_Stop", remember)

    class Stop:
        def on_signal(self, number: Any) -> None:
            made[-1].on_signal(number)

    stop = Stop()
    config = Config(
        socket_path=str(tmp_path / "s"), log_path=str(tmp_path / "log"), prefault=False,
        drain_timeout_ms=100, limits=Limits(stop_grace_ms=7_000),
    )  # fmt: skip
    assert daemon.run(config) == 0
    assert told == [7_100]


def test_connections_for_metrics_have_a_number_and_a_time(loop: asyncio.AbstractEventLoop) -> None:
    limits = Limits(metrics_connections_max=2, metrics_timeout_ms=1_500)
    endpoint = Endpoint(loop, bytes, limits)
    timers = []
    endpoint.loop = SimpleNamespace(  # type: ignore[assignment]
        call_later=lambda delay_s, callback: timers.append(delay_s) or SimpleNamespace(cancel=lambda: None)
    )
    for _ in range(3):
        endpoint.new_connection().connection_made(FakeTransport())  # type: ignore[arg-type]
    assert endpoint.usage() == {"limits.metrics_connections_max": 2}
    assert timers == [1.5] * 3


def test_kv_events_have_so_long_at_the_end() -> None:
    pytest.importorskip("zmq")
    from snapd.kvevents.serving import opened

    config = Config(kv_events_address="tcp://127.0.0.1:0", limits=Limits(kv_events_linger_ms=70))
    with opened(config) as stream:
        assert stream._publisher._linger_ms == 70

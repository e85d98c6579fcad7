"""The daemon's side of Mooncake with an engine that is not there: pieces, failures, and who can connect."""

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from snapd.arena import HostArena
from snapd.errors import ExtraMissing, StartupError, TransportError
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport import loopback, mooncake_offerer
from snapd.transport.loopback import is_loopback, listening_inside_only
from snapd.transport.mooncake_offerer import MooncakeOfferer
from snapd.units import MIB

SIZE_BYTES = 8 * MIB


class FakeEngine:
    """What the offerer uses of an engine."""

    package = "fake 1"
    settings = {"MC_A": "1"}

    def __init__(self, config: MooncakeConfig) -> None:
        self.segment_name = f"{config.host}:17000"
        self.registered: dict[int, int] = {}
        self.register_calls = 0
        self.failing_call = 0
        self.can_unregister = True
        self.answers_probe = True
        self.probed: list[str] = []
        self.is_closed = False
        self.listener = socket.create_server(("", 0))

    def register(self, address: int, size_bytes: int) -> None:
        self.register_calls += 1
        if self.register_calls == self.failing_call:
            raise TransportError("register_memory: -9")
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        if not self.can_unregister:
            raise TransportError("unregister_memory: -3")
        del self.registered[address]

    def probe(self, segment_name: str) -> bool:
        self.probed.append(segment_name)
        return self.answers_probe

    def take_notifications(self) -> list[str]:
        return ["text"]

    def close(self) -> None:
        self.is_closed = True
        self.listener.close()


@pytest.fixture
def arena() -> Iterator[HostArena]:
    with HostArena(3, SIZE_BYTES, hugepages="off", prefault=False) as opened:
        yield opened


@pytest.fixture
def offering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[MooncakeOfferer, FakeEngine]]]:
    monkeypatch.setattr(mooncake_offerer, "MooncakeEngine", FakeEngine)
    with contextlib.ExitStack() as stack:

        def offer(piece_bytes: int = 0, **settings: str) -> tuple[MooncakeOfferer, FakeEngine]:
            offerer = MooncakeOfferer(MooncakeConfig(**settings), piece_bytes)  # type: ignore[arg-type]
            engine = offerer._engine
            assert isinstance(engine, FakeEngine)
            stack.callback(engine.close)
            return offerer, engine

        yield offer


def test_an_arena_is_registered_in_one_piece_where_it_is_mapped(arena: HostArena, offering) -> None:
    offerer, engine = offering()
    base = offerer.register(arena)
    assert base == arena.map()
    assert engine.registered == {base: SIZE_BYTES}
    assert (offerer.registered_pieces, offerer.address()) == (1, "127.0.0.1:17000")
    assert (offerer.package, offerer.settings, offerer.take_notifications()) == (
        "fake 1",
        {"MC_A": "1"},
        ["text"],
    )


def test_an_arena_is_registered_in_pieces_of_which_the_last_may_be_smaller(
    arena: HostArena, offering
) -> None:
    offerer, engine = offering(piece_bytes=3 * MIB)
    base = offerer.register(arena)
    assert engine.registered == {base: 3 * MIB, base + 3 * MIB: 3 * MIB, base + 6 * MIB: 2 * MIB}
    assert offerer.registered_pieces == 3


@pytest.mark.parametrize(
    ("protocol", "help_text"),
    [("tcp", "register_piece_bytes"), ("rdma", "ulimit -l"), ("rdma", "LimitMEMLOCK")],
)
def test_a_piece_that_is_refused_unregisters_those_before_it(
    arena: HostArena, offering, protocol: str, help_text: str
) -> None:
    offerer, engine = offering(piece_bytes=3 * MIB, protocol=protocol)
    engine.failing_call = 3
    with pytest.raises(StartupError) as caught:
        offerer.register(arena)
    assert engine.registered == {} and offerer.registered_pieces == 0
    message = str(caught.value)
    assert message.startswith("arena 3: the piece of 2 MiB at 6 MiB of 8 MiB cannot be registered")
    assert "register_memory: -9" in message and help_text in message and "snapd doctor" in message


def test_its_own_name_is_probed_once_after_the_first_registration(arena: HostArena, offering) -> None:
    offerer, engine = offering()
    assert engine.probed == []
    offerer.register(arena)
    with HostArena(4, SIZE_BYTES, hugepages="off", prefault=False) as other:
        offerer.register(other)
        assert engine.probed == ["127.0.0.1:17000"]
        offerer.close()


def test_a_host_at_which_nobody_answers_is_a_clear_error(arena: HostArena, offering) -> None:
    offerer, engine = offering(host="127.0.0.2")
    engine.answers_probe = False
    with pytest.raises(StartupError, match=r"mooncake.host = '127.0.0.2': .* set mooncake.host to"):
        offerer.register(arena)
    assert engine.registered == {}


def test_close_takes_the_registrations_back_and_may_be_called_twice(arena: HostArena, offering) -> None:
    offerer, engine = offering(piece_bytes=4 * MIB)
    offerer.register(arena)
    offerer.close()
    offerer.close()
    assert engine.registered == {} and engine.is_closed and offerer.registered_pieces == 0


def test_a_registration_that_cannot_be_taken_back_does_not_stop_the_end(arena: HostArena, offering) -> None:
    offerer, engine = offering()
    offerer.register(arena)
    engine.can_unregister = False
    offerer.close()
    assert engine.is_closed


@pytest.mark.parametrize("protocol", ["tcp", "rdma", "nvlink_intra"])
def test_the_exit_of_a_writer_proves_nothing_as_its_bytes_may_be_under_way(offering, protocol: str) -> None:
    assert not offering(protocol=protocol)[0].is_exit_drain_proof


@pytest.mark.parametrize("error", [TransportError("no engine"), ExtraMissing("no engine")])
def test_an_engine_that_cannot_be_made_is_a_start_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(config: MooncakeConfig) -> None:
        raise error

    monkeypatch.setattr(mooncake_offerer, "MooncakeEngine", fail)
    with pytest.raises(StartupError, match=r"^transport = mooncake: no engine$"):
        MooncakeOfferer(MooncakeConfig(), 0)


@pytest.mark.parametrize(
    ("metadata_server", "set_before", "told"),
    [("P2PHANDSHAKE", None, None), ("http://m", None, "127.0.0.1"), ("http://m", "10.0.0.1", "10.0.0.1")],
)
def test_a_metadata_server_is_told_the_host_unless_the_user_says_otherwise(
    offering, monkeypatch: pytest.MonkeyPatch, metadata_server: str, set_before: str | None, told: str | None
) -> None:
    environment = {"MC_TCP_BIND_ADDRESS": set_before} if set_before else {}
    monkeypatch.setattr(os, "environ", environment)
    offering(metadata_server=metadata_server)
    assert environment.get("MC_TCP_BIND_ADDRESS") == told


# --- who can connect


def device_of(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")


@pytest.mark.parametrize(
    ("host", "device"), [("127.0.0.1", b"lo"), ("localhost", b"lo"), ("192.0.2.99", b"")]
)
def test_with_a_loopback_host_the_engine_listens_for_this_host_only(
    offering, host: str, device: bytes
) -> None:
    offerer, engine = offering(host=host)
    assert device_of(engine.listener) == device
    assert offerer.is_loopback_only is bool(device)


def test_sockets_from_before_are_left_alone_and_this_host_still_gets_through() -> None:
    with socket.create_server(("", 0)) as before, contextlib.ExitStack() as stack:
        with listening_inside_only():
            opened = [stack.enter_context(socket.create_server(("", 0)))]
            opened.append(stack.enter_context(socket.create_server(("::", 0), family=socket.AF_INET6)))
            bound_only = stack.enter_context(socket.socket())
            bound_only.bind(("", 0))
        assert device_of(before) == device_of(bound_only) == b""
        for listener in opened:
            assert device_of(listener) == b"lo"
            port = listener.getsockname()[1]
            with socket.create_connection(
                ("::1" if listener.family == socket.AF_INET6 else "127.0.0.1", port)
            ):
                listener.accept()[0].close()


def test_other_threads_sockets_are_left_alone_when_the_ports_are_named() -> None:
    with contextlib.ExitStack() as stack, socket.socket() as client:
        client.settimeout(5)
        client.bind(("127.0.0.3", 0))
        with socket.create_server(("", 0)) as trial:
            port = trial.getsockname()[1]
        with listening_inside_only({port}):
            wanted = stack.enter_context(socket.create_server(("", port)))
            other = stack.enter_context(socket.create_server(("", 0)))
            client.connect(("127.0.0.1", other.getsockname()[1]))
            accepted = stack.enter_context(other.accept()[0])
        assert device_of(wanted) == b"lo"
        assert device_of(other) == b""
        accepted.send(b"x")
        assert client.recv(1) == b"x"


def test_a_socket_that_another_thread_closes_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        found = loopback._internet_sockets

        def find_and_close() -> list[tuple[int, int]]:
            sockets = found()
            for sock in passing:
                sock.close()
            return sockets

        passing: list[socket.socket] = []
        monkeypatch.setattr(loopback, "_internet_sockets", find_and_close)
        with listening_inside_only():
            passing.append(socket.create_server(("", 0)))
            listener = stack.enter_context(socket.create_server(("", 0)))
        assert device_of(listener) == b"lo"


def test_a_socket_that_cannot_be_looked_at_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may listen for everybody."""

    def no_more_files(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with (
        contextlib.ExitStack() as stack,
        monkeypatch.context() as patch,
        pytest.raises(OSError, match="Too many open files"),
        listening_inside_only(),
    ):
        listener = stack.enter_context(socket.create_server(("", 0)))
        patch.setattr(loopback, "_internet_sockets", lambda: [(0, listener.fileno())])
        patch.setattr(os, "dup", no_more_files)


@pytest.mark.parametrize("is_foreign", [False, True])
def test_who_has_connected_from_elsewhere_meanwhile_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, is_foreign: bool
) -> None:
    """There is a moment between listening and being bound to the device."""
    asked: list[str] = []

    def is_here(host: str) -> bool:
        asked.append(host)
        return not is_foreign

    monkeypatch.setattr(loopback, "is_loopback", is_here)
    with contextlib.ExitStack() as stack, socket.socket() as client:
        client.settimeout(5)
        client.bind(("127.0.0.3", 0))
        with listening_inside_only():
            listener = stack.enter_context(socket.create_server(("", 0)))
            client.connect(("127.0.0.1", listener.getsockname()[1]))
            accepted = stack.enter_context(listener.accept()[0])
        with contextlib.suppress(BrokenPipeError):
            accepted.send(b"x")
        assert client.recv(1) == (b"" if is_foreign else b"x")
        assert "127.0.0.3" in asked


def test_who_has_connected_from_this_host_meanwhile_stays() -> None:
    with contextlib.ExitStack() as stack, socket.socket() as client:
        client.settimeout(5)
        with listening_inside_only():
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
            stack.enter_context(listener)
            client.connect(("127.0.0.1", listener.getsockname()[1]))
            accepted = stack.enter_context(listener.accept()[0])
        accepted.send(b"x")
        assert client.recv(1) == b"x"


def test_a_kernel_that_does_not_allow_it_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listening for everybody all the same would be worse than not starting."""
    monkeypatch.setattr(loopback, "_DEVICE", b"no-such-device")
    with contextlib.ExitStack() as stack:
        message = r"kept to this host .*CAP_NET_RAW.*mooncake.host"
        with pytest.raises(TransportError, match=message), listening_inside_only():
            stack.enter_context(socket.create_server(("", 0)))


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("LOCALHOST", True),
     ("::1", True), ("10.0.0.1", False), ("::", False), ("no.such.host.invalid", False), ("0.0.0.0", False)],
)  # fmt: skip
def test_what_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected

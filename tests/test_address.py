"""What a client writes for a daemon, and how often an address may come."""

import json
import socket
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from snapd.address import Resolver, TcpAddress, TlsFiles, parse_address
from snapd.certs import make_certificates
from snapd.cli.main import cli
from snapd.errors import ConfigError
from snapd.ratelimit import BURST_S, AddressLimiter, network_of

FILES = "ca=/a&cert=/b&key=/c"
ADDRESSES_MAX = 4_096


@pytest.mark.parametrize("path", ["/run/kv-snapd/snapd.sock", "x.sock", "tls:/x", "tcp:x", "", "http://x:1"])
def test_everything_else_is_a_path(path: str) -> None:
    assert parse_address(path) == path


def test_addresses_are_taken_apart() -> None:
    assert parse_address(f"tls://host:7?{FILES}&name=other") == TcpAddress(
        "tls://host:7", "host", 7, TlsFiles("/a", "/b", "/c", "other")
    )
    assert parse_address(f"tls://[::1]:7?{FILES}") == TcpAddress(
        "tls://[::1]:7", "::1", 7, TlsFiles("/a", "/b", "/c", "::1")
    )
    assert parse_address("tcp://127.0.0.1:7") == TcpAddress("tcp://127.0.0.1:7", "127.0.0.1", 7, None)
    home = parse_address("tls://h:1?ca=~/a&cert=/b&key=/c")
    assert isinstance(home, TcpAddress) and home.tls is not None
    assert home.tls.ca_path == str(Path.home() / "a")


@pytest.mark.parametrize(
    "text",
    [
        "tls://host", "tls://:7", f"tls://host:7/path?{FILES}", "tls://host:7", "tls://host:7?ca=/a&cert=/b",
        f"tls://host:7?{FILES}&key=/d", f"tls://host:7?{FILES}&kee=/d", "tcp://host:7?ca=/a", "tcp://host:99999",
        f"tls://me@host:7?{FILES}", "tls://[::1:7", "tls://host:7?ca", f"tls://host:7?{FILES}#x",
        "tls://host:7?ca=&cert=/b&key=/c", "tls://host:7?ca=~no-such-user/a&cert=/b&key=/c",
        "tls://host:7?ca=~%00/a&cert=/b&key=/c",
    ],
)  # fmt: skip
def test_what_begins_as_an_address_and_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tls://snapd"):
        parse_address(text)


def test_names_are_looked_up_without_anybody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer, asked = threading.Event(), threading.Semaphore(0)
    answers = iter(["10.0.0.1", OSError("no such host"), "10.0.0.2"])

    def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        asked.release()
        may_answer.wait(20)
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return [(socket.AF_INET, 1, 6, "", (answer, port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    def finish() -> None:
        assert asked.acquire(timeout=20)
        may_answer.set()
        for thread in threading.enumerate():
            if thread.name == "snapd-resolver":
                thread.join(20)
        may_answer.clear()

    resolver = Resolver("host", 7)
    assert resolver.take() is resolver.take() is None
    finish()
    assert resolver.take() == (socket.AF_INET, ("10.0.0.1", 7))
    # Once more, and it fails: the old answer stands, and the failure is told once.
    resolver.doubt()
    assert resolver.take() == (socket.AF_INET, ("10.0.0.1", 7))
    finish()
    with pytest.raises(OSError, match="no such host"):
        resolver.take()
    assert resolver.take() == (socket.AF_INET, ("10.0.0.1", 7))
    resolver.doubt()
    finish()
    assert resolver.take() == (socket.AF_INET, ("10.0.0.2", 7))
    assert not asked.acquire(blocking=False), "asked once each time"


def test_a_name_with_several_addresses_gives_another_after_each_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A daemon may listen on one of them only."""
    infos = [
        (socket.AF_INET6, 1, 6, "", ("::1", 7, 0, 0)),
        (socket.AF_INET, 1, 6, "", ("127.0.0.1", 7)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
    resolver = Resolver("localhost", 7)
    resolver.take()
    given = []
    for _ in range(3):
        for thread in threading.enumerate():
            if thread.name == "snapd-resolver":
                thread.join(20)
        given.append(resolver.take())
        resolver.doubt()
    assert given == [
        (socket.AF_INET6, ("::1", 7, 0, 0)),
        (socket.AF_INET, ("127.0.0.1", 7)),
        (socket.AF_INET6, ("::1", 7, 0, 0)),
    ]


def test_numbers_are_not_looked_up() -> None:
    assert Resolver("127.0.0.1", 7).take() == (socket.AF_INET, ("127.0.0.1", 7))
    assert Resolver("::1", 7).take() == (socket.AF_INET6, ("::1", 7))


# --- how often


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.floats(0, 3, allow_nan=False)), max_size=300),
)
def test_nobody_comes_more_often_than_its_rate_and_the_burst(
    per_s: int, arrivals: list[tuple[str, float]]
) -> None:
    limiter, now_s, came = AddressLimiter(per_s, ADDRESSES_MAX), 0.0, {"a": 0, "b": 0}
    for address, pause_s in arrivals:
        now_s += pause_s
        came[address] += limiter.admit(address, now_s)
        assert came[address] <= per_s * BURST_S + now_s * per_s + 1e-6


def test_whoever_keeps_to_the_rate_is_always_let_in() -> None:
    limiter = AddressLimiter(10, ADDRESSES_MAX)
    assert all(limiter.admit("a", number * 0.1) for number in range(1_000))


def test_one_address_costs_another_nothing_and_memory_is_bounded() -> None:
    limiter = AddressLimiter(1, ADDRESSES_MAX)
    assert [limiter.admit("a", 0.0) for _ in range(BURST_S + 1)].count(False) == 1
    assert limiter.admit("b", 0.0)
    for number in range(2 * ADDRESSES_MAX):
        limiter.admit(f"x{number}", 0.0)
    assert len(limiter) == ADDRESSES_MAX


def test_a_clock_that_goes_back_gives_nothing() -> None:
    limiter = AddressLimiter(1, ADDRESSES_MAX)
    assert [limiter.admit("a", 100.0) for _ in range(BURST_S + 1)].count(True) == BURST_S
    assert not limiter.admit("a", 0.0)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::9", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("?", "?"),
    ],
)
def test_an_ipv6_address_counts_by_its_first_half(address: str, network: str) -> None:
    assert network_of(address) == network


# --- certificates


def test_certificates_are_made_once_and_their_keys_are_private(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "new", ["localhost", "::1"], ["d-0"], 3)
    paths = [*made.certificates["server"], *made.certificates["d-0"], made.ca]
    modes = {path.name: path.stat().st_mode & 0o777 for path in paths}
    assert modes == {
        "server.pem": 0o644,
        "server.key": 0o600,
        "d-0.pem": 0o644,
        "d-0.key": 0o600,
        "ca.pem": 0o644,
    }
    before = made.ca.read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        make_certificates(tmp_path / "new", ["localhost"], ["d-0"], 3)
    assert made.ca.read_bytes() == before


def test_addresses_that_are_printed_can_be_used_whatever_the_directory_is_called(tmp_path: Path) -> None:
    directory = tmp_path / "a+b c&d?e#f%41"
    command = ["certs", "init", str(directory), "--server", "localhost", "--client", "d-0", "--json"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    address = parse_address(json.loads(result.output)["clients"]["d-0"])
    assert isinstance(address, TcpAddress) and address.tls is not None
    for path in (address.tls.ca_path, address.tls.certificate_path, address.tls.key_path):
        assert Path(path).parent == directory.resolve() and Path(path).is_file()


@pytest.mark.parametrize(
    "name", ["", "a/b", "..", "ä", "x" * 65, "server", "ca", "*", "d-?", "[d]", 'd"', "d 0", "-d", "d\n"]
)
def test_a_name_that_makes_no_file_or_means_more_than_itself_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        make_certificates(tmp_path, ["localhost"], [name], 3)
    assert list(tmp_path.iterdir()) == []

"""The control protocol over TCP: who is let in, what they may do, and what becomes of everybody else."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID
from daemon_process import DaemonProcess
from raw_client import LAYOUT, WAIT_S, LogFollower, RawClient, Stage, wait_for

from snapd import wire as w
from snapd.certs import Made, make_certificates
from snapd.client import AsyncClient, Client
from snapd.core.records import SyncOutcome
from snapd.errors import (
    ConnectionProblem,
    DaemonUnreachable,
    InvalidRequest,
    PermissionDenied,
    Reason,
)
from snapd.exchange import Exchange
from snapd.layout import Namespace, fingerprint
from snapd.links import Channel
from snapd.mapping import map_arena
from snapd.streams import TlsStream

PREPARE = {"session_id": "s", "num_tokens": 4, "layout_fingerprint": "x"}
CLIENTS = ("d-0", "d-1", "d-2", "p-0", "p-a", "d-a", "d-b", "op", "nobody")
RULES = (
    ("d-[012]", ["pusher"], []),
    ("p-0", ["ingester"], []),
    ("p-a", ["ingester"], ["a"]),
    ("d-a", ["pusher"], ["a"]),
    ("d-b", ["pusher"], ["b"]),
    ("op", ["operator"], []),
)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_certificates(tmp_path_factory.mktemp("certs"), ["127.0.0.1", "localhost"], CLIENTS, 2)


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Certificates with the same names, of another CA."""
    return make_certificates(tmp_path_factory.mktemp("strangers"), ["127.0.0.1"], CLIENTS, 2)


class TlsDaemon(DaemonProcess):
    """A daemon that listens over TCP as well, at a port that stays the same."""

    def __init__(self, directory: Path, made: Made | None, overrides: dict[str, Any]) -> None:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        rules = overrides.pop("rules", None)
        lines = [f'tcp_address = "127.0.0.1:{self.port}"']
        if made is not None:
            certificate, key = made.certificates["server"]
            lines += [f'tls_certificate_path = "{certificate}"', f'tls_key_path = "{key}"',
                      f'tls_client_ca_path = "{made.ca}"']  # fmt: skip
            for name, roles, tenants in RULES:
                lines += ["[[access]]", f'certificate = "{name}"', f"roles = {roles}", f"tenants = {tenants}"]
        (directory / "snapd.toml").write_text("\n".join([*lines, *(rules or ())]))
        super().__init__(directory, overrides)


@pytest.fixture
def start(made: Made) -> Iterator[Callable[..., TlsDaemon]]:
    with contextlib.ExitStack() as stack:

        def starter(certs: Made | None = made, **overrides: Any) -> TlsDaemon:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="snapd-")))
            daemon = TlsDaemon(directory, certs, overrides)
            stack.callback(lambda: no_traceback(daemon))
            return daemon

        yield starter


def no_traceback(daemon: TlsDaemon) -> None:
    daemon.stop()
    assert "Traceback" not in daemon.stderr, daemon.stderr


@pytest.fixture(scope="module")
def shared(made: Made) -> Iterator[TlsDaemon]:
    """For tests that leave nothing behind."""
    with tempfile.TemporaryDirectory(prefix="snapd-") as directory:
        daemon = TlsDaemon(Path(directory), made, {"tls_handshakes_per_s": 100_000})
        yield daemon
        no_traceback(daemon)


def context_of(made: Made, name: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(made.ca)
    if name is not None:
        certificate, key = made.certificates[name]
        context.load_cert_chain(certificate, key)
    return context


class TlsClient(RawClient):
    """A raw client over a TLS socket of Python's own."""

    def __init__(self, daemon: TlsDaemon, made: Made, name: str) -> None:
        self.pushes: list[w.AnyPush] = []
        self._splitter = w.FrameSplitter(1 << 30)
        self._answers: list[Any] = []
        self._ids = itertools.count(1)
        raw = socket.create_connection(("127.0.0.1", daemon.port), WAIT_S)
        self.sock = context_of(made, name).wrap_socket(raw, server_hostname="127.0.0.1")


def address(daemon: TlsDaemon, made: Made, client: str, **changes: str) -> str:
    certificate, key = made.certificates[client]
    files = {"ca": str(made.ca), "cert": str(certificate), "key": str(key)} | changes
    host = files.pop("host", "127.0.0.1")
    return f"tls://{host}:{daemon.port}?" + "&".join(f"{k}={v}" for k, v in files.items())


# --- one life of an attempt


def test_a_whole_life_over_tls_is_told_as_any_other(shared: TlsDaemon, made: Made) -> None:
    with TlsClient(shared, made, "d-0") as d, TlsClient(shared, made, "p-0") as p:
        assert d.ask(w.HelloReq, client="decoder").epoch == p.ask(w.HelloReq).epoch
        declared = p.declare()
        handle = d.granted("tls-life", layout_fingerprint=declared)
        d.start(handle)
        assert d.commit(handle).state == "READY"
        lease = p.ask(w.BeginIngestReq, slab_handle=handle, rank=0, layout_fingerprint=declared)
        assert p.vote(handle, lease.lease_id).commit
    follower = LogFollower(shared.log_path)

    def outcome() -> SyncOutcome | None:
        follower.follow()
        records = (line.record for line in follower.lines)
        return next((r for r in records if isinstance(r, SyncOutcome) and r.session_id == "tls-life"), None)

    ended = wait_for(outcome)
    assert ended.ok
    assert ended.peer == "certificate d-0: decoder", "nobody passes for another by what it calls itself"


def test_the_client_speaks_it_with_threads_and_in_an_event_loop(shared: TlsDaemon, made: Made) -> None:
    with Client(address(shared, made, "p-0"), timeout_s=WAIT_S) as p:
        declared = p.declare_layout(0, LAYOUT)
        results: list[int] = []

        def work() -> None:
            results.extend(p.lookup(declared, session_id="absent").slab_handle for _ in range(50))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [0] * 200

    async def many() -> list[int]:
        client = AsyncClient(address(shared, made, "d-0"), timeout_s=WAIT_S)
        grants = [
            await client.prepare_receive(f"async-{i}", 8, declared, page_keys=("k" * 32,) * 2)
            for i in range(3)
        ]
        await asyncio.gather(*(client.abort(grant.slab_handle, drained=True) for grant in grants))
        await client.close()
        return [grant.num_tokens for grant in grants]

    assert asyncio.run(many()) == [8, 8, 8]


def test_frames_of_megabytes_go_through_both_ways(shared: TlsDaemon, made: Made) -> None:
    """Each takes many TLS records, and more than a socket's buffers hold."""
    with Client(address(shared, made, "p-0"), timeout_s=WAIT_S) as p:
        declared = p.declare_layout(0, LAYOUT)
        keys = tuple(f"{i:032x}" for i in range(16_384))
        pending = [p.submit(lookup(declared, keys)) for _ in range(20)]
        assert [one.wait().slab_handle for one in pending] == [0] * 20


def lookup(declared: str, keys: tuple[str, ...]) -> Any:
    from snapd import calls

    return calls.lookup(declared, page_keys=keys)


def test_an_operator_watches_and_the_command_line_works(shared: TlsDaemon, made: Made) -> None:
    from click.testing import CliRunner

    from snapd.cli.main import cli

    where = address(shared, made, "op")
    with RawClient(shared.socket_path) as witness, Client(where, timeout_s=WAIT_S) as op:
        with op.watch("watched", timeout_s=WAIT_S) as watch:
            handle = witness.granted("watched")
            assert watch.next(WAIT_S).slab_handle == handle
        result = CliRunner().invoke(cli, ["status", "--socket", where, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.output)["core"]["open_sessions"] >= 1
        op.abort(handle)


# --- roles


@pytest.mark.parametrize(
    ("name", "kind", "fields"),
    [
        ("d-0", w.StatsReq, {}),
        ("d-0", w.ListReq, {}),
        ("d-0", w.WatchReq, {}),
        ("d-0", w.DrainReq, {"draining": True}),
        ("d-0", w.LookupReq, {"layout_fingerprint": "x"}),
        ("d-0", w.DeclareLayoutReq, {"rank": 0, "layout": LAYOUT}),
        ("d-0", w.BeginIngestReq, {"slab_handle": 1, "rank": 0, "layout_fingerprint": "x"}),
        ("d-0", w.VoteReq, {"slab_handle": 1, "rank": 0, "lease_id": 1, "ok": True}),
        ("p-0", w.SnapshotPrepareReceiveReqInput, PREPARE),
        ("p-0", w.CommitReq, {"slab_handle": 1, "rank": 0, "num_bytes": 1, "num_tokens": 1, "checksums": ()}),
        ("p-0", w.AbortReq, {"slab_handle": 1}),
        ("p-0", w.StatsReq, {}),
        ("op", w.SnapshotPrepareReceiveReqInput, PREPARE),
        ("op", w.VoteReq, {"slab_handle": 1, "rank": 0, "lease_id": 1, "ok": True}),
        ("op", w.DrainedReq, {"slab_handle": 1, "rank": 0}),
    ],
)  # fmt: skip
def test_a_role_does_what_it_is_for_and_nothing_else(
    shared: TlsDaemon, made: Made, name: str, kind: type[w.Request], fields: dict[str, Any]
) -> None:
    with TlsClient(shared, made, name) as client:
        assert client.refusal(kind, **fields) is Reason.PERMISSION_DENIED
        assert client.ask(w.PingReq).epoch


def test_every_request_has_its_roles() -> None:
    from typing import get_args

    from snapd.permissions import _NEEDED

    assert set(_NEEDED) == set(get_args(w.AnyRequest))


def test_an_attempt_belongs_to_the_pusher_that_prepared_it(shared: TlsDaemon, made: Made) -> None:
    with RawClient(shared.socket_path) as witness, TlsClient(shared, made, "d-0") as mine:
        declared = witness.declare()
        handle = mine.granted("owned", layout_fingerprint=declared)
        for kind, fields in (
            (w.TransferStartedReq, {}),
            (w.CommitReq, {"rank": 0, "num_bytes": 1, "num_tokens": 1, "checksums": ()}),
            (w.TransferFailedReq, {"reason": "transfer-failed"}),
            (w.DrainedReq, {"rank": 0}),
            (w.AbortReq, {}),
            (w.GetReq, {}),
        ):
            with TlsClient(shared, made, "d-1") as other:
                theirs = other.ask(kind, slab_handle=handle, **fields)
                unknown = other.ask(kind, slab_handle=handle ^ 1, **fields)
            assert theirs.reason is Reason.STALE_HANDLE
            assert theirs.detail.replace(str(handle), "N") == unknown.detail.replace(str(handle ^ 1), "N")
            assert witness.view(handle).state == "RESERVED"
        # Another connection of the same client is the same pusher.
        with TlsClient(shared, made, "d-0") as again:
            again.start(handle)
            assert again.commit(handle).state == "READY"
            # Also for the attempts that have ended.
            again.ask(w.AbortReq, slab_handle=handle, drained=True)
            assert again.ask(w.GetReq, slab_handle=handle).session.state == "ABORTED"
        with TlsClient(shared, made, "d-1") as other:
            assert other.refusal(w.GetReq, slab_handle=handle) is Reason.STALE_HANDLE


def test_an_operator_may_end_what_others_began(shared: TlsDaemon, made: Made) -> None:
    with RawClient(shared.socket_path) as witness, TlsClient(shared, made, "op") as op:
        handle = witness.granted("for-the-operator")
        assert op.ask(w.AbortReq, slab_handle=handle).state == "ABORTED"


# --- tenants


def test_tenants_neither_see_nor_touch_each_others_snapshots(shared: TlsDaemon, made: Made) -> None:
    layout_a, layout_b = (
        type(LAYOUT)(LAYOUT.k_stride_bytes, LAYOUT.v_stride_bytes, page_size_tokens=4,
                     namespace=Namespace(tenant=tenant))
        for tenant in "ab"
    )  # fmt: skip
    with RawClient(shared.socket_path) as witness, TlsClient(shared, made, "p-a") as p_a:
        b = witness.declare(layout_b)
        a = p_a.declare(layout_a)
        assert p_a.refusal(w.DeclareLayoutReq, rank=0, layout=layout_b) is Reason.PERMISSION_DENIED
        with TlsClient(shared, made, "d-a") as d_a, TlsClient(shared, made, "d-b") as d_b:
            of_a = d_a.granted("same-name", layout_fingerprint=a)
            of_b = d_b.granted("same-name", layout_fingerprint=b)
            prepare: dict[str, Any] = {"session_id": "same-name", "num_tokens": 4, "layout_fingerprint": b}
            assert d_a.refusal(w.SnapshotPrepareReceiveReqInput, **prepare) is Reason.PERMISSION_DENIED
            unknown = d_a.ask(w.SnapshotPrepareReceiveReqInput, **prepare | {"layout_fingerprint": "x"})
            assert unknown.reason is Reason.LAYOUT_MISMATCH
            assert b not in unknown.detail and a not in unknown.detail, "others' layouts are not told"
            for client, handle in ((d_a, of_a), (d_b, of_b)):
                client.start(handle)
                assert client.commit(handle).state == "READY"
        assert witness.view(of_a).state == witness.view(of_b).state == "READY"
        found = p_a.ask(w.LookupReq, layout_fingerprint=a, session_id="same-name")
        assert found.slab_handle == of_a
        denied = p_a.refusal(w.LookupReq, layout_fingerprint=b, session_id="same-name")
        assert denied is Reason.PERMISSION_DENIED
        ingest: dict[str, Any] = {"slab_handle": of_b, "rank": 0, "layout_fingerprint": b}
        assert p_a.refusal(w.BeginIngestReq, **ingest) is Reason.STALE_HANDLE
        assert p_a.refusal(w.GetReq, slab_handle=of_b) is Reason.STALE_HANDLE
        lease = witness.ask(w.BeginIngestReq, **ingest)
        vote: dict[str, Any] = {"slab_handle": of_b, "rank": 0, "lease_id": lease.lease_id, "ok": False,
                                "reason": "ingest-failed"}  # fmt: skip
        assert p_a.refusal(w.VoteReq, **vote) is Reason.STALE_HANDLE
        assert witness.view(of_b).state == "READY"
        for handle in (of_a, of_b):
            witness.ask(w.AbortReq, slab_handle=handle)


def test_a_snapshot_whose_layout_was_forgotten_is_not_found_by_another_tenant(
    start: Callable[..., TlsDaemon], made: Made
) -> None:
    daemon = start(layouts_max=1)
    layout = type(LAYOUT)(
        LAYOUT.k_stride_bytes, LAYOUT.v_stride_bytes, page_size_tokens=4, namespace=Namespace(tenant="b")
    )
    with RawClient(daemon.socket_path) as witness, TlsClient(daemon, made, "p-a") as p_a:
        b = witness.declare(layout)
        handle = witness.granted("of-b", layout_fingerprint=b, page_keys=("k" * 32,))
        witness.start(handle)
        assert witness.commit(handle).state == "READY"
        witness.declare()
        for by in ({"session_id": "of-b"}, {"page_keys": ("k" * 32,)}):
            assert witness.ask(w.LookupReq, layout_fingerprint=b, **by).slab_handle == handle
            assert p_a.refusal(w.LookupReq, layout_fingerprint=b, **by) is Reason.LAYOUT_MISMATCH


# --- who is not let in


def test_nobody_is_let_in_without_the_right_certificate(
    shared: TlsDaemon, made: Made, strangers: Made
) -> None:
    mixed = {"ca": str(made.ca)}
    for where, what in (
        (address(shared, strangers, "d-0"), "CERTIFICATE_VERIFY_FAILED"),  # It does not believe the daemon.
        (
            address(shared, strangers, "d-0", **mixed),
            r"no daemon at tls://127\.0\.0\.1:\d+: .*Are ca, cert and key right",
        ),  # The daemon does not believe it.
        (address(shared, made, "d-0", name="elsewhere"), "elsewhere"),
    ):
        with Client(where, timeout_s=WAIT_S) as client, pytest.raises(DaemonUnreachable, match=what):
            client.connect()
    with Client(address(shared, made, "nobody"), timeout_s=WAIT_S) as client:
        with pytest.raises(PermissionDenied, match="certificate nobody has no rule in access"):
            client.connect()
    # A server's certificate does not make a client.
    with Client(address(shared, made, "server"), timeout_s=WAIT_S) as client:
        with pytest.raises(ConnectionProblem):
            client.connect()
    with socket.create_connection(("127.0.0.1", shared.port), WAIT_S) as raw:
        with context_of(made, None).wrap_socket(raw, server_hostname="127.0.0.1") as tls:
            with contextlib.suppress(OSError):
                assert tls.recv(100) == b"", "whoever shows no certificate is told nothing"
    with RawClient(shared.socket_path) as witness:
        assert witness.ask(w.PingReq).epoch


def test_a_certificate_that_cannot_be_read_ends_its_connection_only(
    shared: TlsDaemon, made: Made, tmp_path: Path
) -> None:
    """A CA may have signed a name that is no UTF-8."""
    key = ec.generate_private_key(ec.SECP256R1())
    ca = x509.load_pem_x509_certificate(made.ca.read_bytes())
    ca_key = serialization.load_pem_private_key(made.ca.with_suffix(".key").read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    dns_name = b"\x30\x04\x82\x02\xff\xfe"
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ca.not_valid_before_utc)
        .not_valid_after(ca.not_valid_after_utc)
        .add_extension(x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, dns_name), False)
        .sign(ca_key, hashes.SHA256())
    )
    paths = tmp_path / "odd.pem", tmp_path / "odd.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    odd = Made(made.ca, {"odd": paths})
    with contextlib.suppress(OSError), TlsClient(shared, odd, "odd") as client:
        assert client.until_closed() == []
    with TlsClient(shared, made, "d-0") as client:
        assert client.ask(w.PingReq).epoch


def test_an_older_tls_and_plain_text_are_refused(shared: TlsDaemon, made: Made) -> None:
    context = context_of(made, "d-0")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", shared.port), WAIT_S) as raw:
        with pytest.raises(ssl.SSLError, match=r"version|EOF"):
            context.wrap_socket(raw, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", shared.port), WAIT_S) as raw:
        raw.sendall(w.encode_frame(w.PingReq(id=1)))
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := raw.recv(4096):
                answer += part
        # At most a TLS alert: record type 21.
        assert answer == b"" or answer[0] == 21


@pytest.mark.parametrize("length", [0, 1, 5, 100, 300, 900])
def test_bytes_that_end_or_turn_bad_anywhere_end_their_connection_only(
    shared: TlsDaemon, made: Made, length: int
) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context_of(made, "d-0").wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    hello = outgoing.read()[:length]
    for rest in (b"", os.urandom(2000), b"\x00" * 2000):
        with socket.create_connection(("127.0.0.1", shared.port), WAIT_S) as raw:
            raw.sendall(hello + rest)
    with TlsClient(shared, made, "d-0") as client:
        assert client.ask(w.PingReq).epoch
        client.sock.sendall(b"\xff\xff\xff\xff")
        assert client.until_closed()[0].reason is Reason.INVALID_REQUEST
    # Below TLS, after the handshake: records that do not decrypt.
    with TlsClient(shared, made, "d-0") as client:
        assert client.ask(w.PingReq).epoch
        fd = os.dup(client.sock.fileno())
        with socket.socket(fileno=fd) as below:
            below.sendall(b"\x17\x03\x03\x00\x20" + os.urandom(32))
        with pytest.raises((ssl.SSLError, OSError)):
            while client.sock.recv(4096):
                pass
            raise ConnectionResetError
    with RawClient(shared.socket_path) as witness:
        assert witness.ask(w.PingReq).epoch


def test_an_arena_is_not_mapped_over_tcp(shared: TlsDaemon, made: Made) -> None:
    with TlsClient(shared, made, "d-0") as client:
        assert client.refusal(w.MapBufferReq, rank=0, writable=True) is Reason.INVALID_REQUEST
    with Client(address(shared, made, "d-0"), timeout_s=WAIT_S) as client:
        with pytest.raises(InvalidRequest, match="unix socket"):
            client.map_buffer(0)


# --- bounds


def test_whoever_comes_too_often_is_sent_away_and_the_others_are_served(
    start: Callable[..., TlsDaemon], made: Made
) -> None:
    daemon = start(tls_handshakes_per_s=1)
    outcomes = []
    for _ in range(15):
        with Client(address(daemon, made, "d-0"), timeout_s=WAIT_S) as client:
            try:
                client.connect()
                outcomes.append("served")
            except DaemonUnreachable:
                outcomes.append("sent away")
    # Ten at once, and then one a second; the machine may be slow.
    assert outcomes[:10] == ["served"] * 10
    assert "sent away" in outcomes[10:]
    with RawClient(daemon.socket_path) as witness:
        assert witness.ask(w.PingReq).epoch
    assert daemon.stderr.count("too many TCP connections a second") == 1


def test_half_a_handshake_holds_its_place_for_a_while_only(
    start: Callable[..., TlsDaemon], made: Made
) -> None:
    daemon = start(tls_handshake_timeout_ms=300, tls_handshakes_max=4, tls_handshakes_per_s=1_000)
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port), WAIT_S))
            for _ in range(8)
        ]
        # One address has a quarter of the places: the others are closed at once, this one in time.
        for sock in silent:
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""

        def is_served() -> bool:
            with contextlib.suppress(OSError), TlsClient(daemon, made, "d-0") as client:
                return bool(client.ask(w.PingReq).epoch)
            return False

        wait_for(is_served)


def test_connections_over_tcp_are_bounded_for_themselves(start: Callable[..., TlsDaemon], made: Made) -> None:
    daemon = start(tcp_connections_max=2)
    with TlsClient(daemon, made, "d-0") as one, TlsClient(daemon, made, "d-1") as two:
        assert one.ask(w.PingReq).epoch == two.ask(w.PingReq).epoch
        with Client(address(daemon, made, "d-2"), timeout_s=WAIT_S) as third:
            with pytest.raises(Exception, match="tcp_connections_max"):
                third.connect()
        with RawClient(daemon.socket_path) as local:
            assert local.ask(w.PingReq).epoch
            assert local.stats().connections == 3

    def has_room() -> bool:
        with contextlib.suppress(Exception), TlsClient(daemon, made, "d-2") as client:
            return bool(client.ask(w.PingReq).epoch)
        return False

    wait_for(has_room)


def test_one_client_has_half_of_the_connections_over_tcp_and_none_of_the_local_ones(
    start: Callable[..., TlsDaemon], made: Made
) -> None:
    daemon = start(tcp_connections_max=4, connections_max=2)
    with contextlib.ExitStack() as stack:

        def connected(name: str) -> TlsClient:
            client = stack.enter_context(TlsClient(daemon, made, name))
            assert client.ask(w.PingReq).epoch
            return client

        first = connected("d-0")
        connected("d-0")
        with TlsClient(daemon, made, "d-0") as third:
            assert "half of tcp_connections_max" in third.until_closed()[0].detail
        connected("d-1")
        connected("p-0")
        # Four over TCP, and two local ones have their places all the same.
        with RawClient(daemon.socket_path) as one, RawClient(daemon.socket_path) as two:
            assert one.ask(w.PingReq).epoch == two.ask(w.PingReq).epoch
            with RawClient(daemon.socket_path) as three:
                assert "connections_max" in three.until_closed()[0].detail
        first.close()

        def has_room() -> bool:
            with contextlib.suppress(Exception), TlsClient(daemon, made, "d-0") as client:
                return bool(client.ask(w.PingReq).epoch)
            return False

        wait_for(has_room)


def test_whoever_says_nothing_after_the_handshake_is_cut_off(
    start: Callable[..., TlsDaemon], made: Made
) -> None:
    daemon = start(frame_timeout_ms=300)
    with TlsClient(daemon, made, "d-0") as quiet, TlsClient(daemon, made, "d-1") as silent:
        assert quiet.ask(w.PingReq).epoch
        assert silent.until_closed()[0].reason is Reason.INVALID_REQUEST
        with TlsClient(daemon, made, "d-1") as slow:
            slow.sock.sendall(b"\x01")
            assert slow.until_closed()[0].reason is Reason.INVALID_REQUEST
        assert quiet.ask(w.PingReq).epoch, "it has spoken, and may be quiet for as long as it likes"


def test_a_client_that_does_not_read_is_cut_off(start: Callable[..., TlsDaemon], made: Made) -> None:
    daemon = start(frame_bytes_max=2 << 20, reply_buffer_bytes_max=2 << 20)
    with TlsClient(daemon, made, "op") as slow, RawClient(daemon.socket_path) as witness:
        assert isinstance(slow.ask(w.WatchReq), w.AckRep)
        slow.sock.settimeout(0.5)
        pings = w.encode_frame(w.PingReq(id=7)) * 1_000
        with contextlib.suppress(OSError):
            for _ in range(3_000):
                slow.sock.sendall(pings)
        # It is not read from any more; and what waits for it is bounded.
        assert witness.ask(w.PingReq).epoch
        status = Path(f"/proc/{daemon.process.pid}/status").read_text()
        rss_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
        assert rss_kib < 300 << 10


# --- the client's stream


def test_an_end_that_came_with_the_last_bytes_is_seen_while_the_socket_stays_open(made: Made) -> None:
    """No event would tell of it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*made.certificates["server"])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = context.wrap_bio(incoming, outgoing, server_side=True)
        stream = TlsStream(ours, context_of(made, "d-0"), "127.0.0.1")
        for _ in range(4):
            with contextlib.suppress(BlockingIOError):
                incoming.write(theirs.recv(65_536))
            with contextlib.suppress(ssl.SSLWantReadError):
                server.do_handshake()
            theirs.sendall(outgoing.read())
            with contextlib.suppress(BlockingIOError):
                stream.recv(65_536)
        assert stream.takes_output and not stream.has_ended
        server.write(w.encode_frame(w.WatchLost(count=1)))
        with contextlib.suppress(ssl.SSLWantReadError):
            server.unwrap()
        theirs.sendall(outgoing.read())
        channel = Channel("unused", Exchange())
        channel.sock = stream
        channel.read()
        assert channel.sock is None and ours.fileno() == -1


# --- certificates are renewed, and daemons restarted


def test_sighup_takes_the_new_certificates_and_keeps_who_is_connected(
    start: Callable[..., TlsDaemon], made: Made, strangers: Made, tmp_path: Path
) -> None:
    files = {path.name: path for path in (*made.certificates["server"], made.ca)}
    for name, path in files.items():
        (tmp_path / name).write_bytes(path.read_bytes())
    copy = Made(tmp_path / "ca.pem", {"server": (tmp_path / "server.pem", tmp_path / "server.key")})
    daemon = start(copy)
    with TlsClient(daemon, made, "d-0") as before:
        assert before.ask(w.PingReq).epoch
        for path in (*strangers.certificates["server"], strangers.ca):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "certificates were loaded anew" in daemon.stderr)
        assert before.ask(w.PingReq).epoch
        with TlsClient(daemon, strangers, "d-0") as new:
            assert new.ask(w.PingReq).epoch
        with Client(address(daemon, made, "d-0"), timeout_s=WAIT_S) as old:
            with pytest.raises(DaemonUnreachable):
                old.connect()
        (tmp_path / "server.key").write_text("this is no key")
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "the old ones go on" in daemon.stderr)
        with TlsClient(daemon, strangers, "d-0") as still:
            assert still.ask(w.PingReq).epoch


def test_a_client_comes_back_to_a_daemon_that_was_restarted(
    start: Callable[..., TlsDaemon], made: Made
) -> None:
    daemon = start()
    epochs: list[str] = []
    with Client(
        address(daemon, made, "p-0", host="localhost"),
        timeout_s=WAIT_S,
        on_new_epoch=lambda hello: epochs.append(hello.epoch),
    ) as client:
        declared = client.declare_layout(0, LAYOUT)
        daemon.kill()
        with pytest.raises(ConnectionProblem):
            client.ping()
        daemon.restart()
        assert client.lookup(declared, session_id="s").slab_handle == 0
        assert epochs == [client.epoch]


def test_the_end_of_a_process_behind_tcp_proves_nothing(start: Callable[..., TlsDaemon], made: Made) -> None:
    daemon = start(quarantine_ms=60_000)
    with RawClient(daemon.socket_path) as witness:
        declared = witness.declare()
        with TlsClient(daemon, made, "d-0") as d:
            handle = d.granted(layout_fingerprint=declared, is_only_writer=True)
            d.start(handle)
        witness.ask(w.AbortReq, slab_handle=handle)
        assert witness.stats().core.arenas[0].quarantined_bytes > 0


# --- without TLS, and rules on the unix socket


def test_without_tls_loopback_has_the_rights_of_its_rule(start: Callable[..., TlsDaemon]) -> None:
    daemon = start(None, rules=["[[access]]", "loopback = true", 'roles = ["operator"]'])
    with Client(f"tcp://127.0.0.1:{daemon.port}", timeout_s=WAIT_S) as client:
        assert client.stats().connections == 1
        with pytest.raises(PermissionDenied, match="loopback is no pusher"):
            client.prepare_receive("s", 4, fingerprint(LAYOUT))


def test_a_port_where_nobody_listens_is_said() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
        with (
            Client(where, timeout_s=WAIT_S) as client,
            pytest.raises(DaemonUnreachable, match="nobody listens"),
        ):
            client.connect()


def test_a_host_that_nobody_knows_is_said() -> None:
    with Client("tcp://no-such-host.invalid:1", timeout_s=WAIT_S) as client:
        with pytest.raises(DaemonUnreachable, match=r"no-such-host\.invalid"):
            client.connect()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_local_user_has_the_rights_of_its_rule(start: Callable[..., TlsDaemon], made: Made) -> None:
    uid = 65_534
    daemon = start(rules=["[[access]]", f"uid = {uid}", 'roles = ["ingester"]'])
    daemon.directory.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setuid(uid)
            client = RawClient(daemon.socket_path)
            declared = client.declare()
            denied = client.refusal(w.StatsReq)
            found = client.ask(w.LookupReq, layout_fingerprint=declared, session_id="s")
            writable = client.refusal(w.MapBufferReq, rank=0, writable=True)
            arena = map_arena(str(daemon.socket_path), 0, populate=False)
            got = (denied, found.slab_handle, writable, arena.size_bytes)
            os._exit(0 if got == (Reason.PERMISSION_DENIED, 0, Reason.PERMISSION_DENIED, 16 << 20) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_settle(start: Callable[..., TlsDaemon], made: Made) -> None:
    """After all kinds of ends over TLS the log and the counters agree, and nothing is left."""
    daemon = start(quarantine_ms=100, tls_handshakes_per_s=1_000)
    stage = Stage(daemon, LogFollower(daemon.log_path))
    for number in range(12):
        with TlsClient(daemon, made, f"d-{number % 3}") as d:
            handle = d.granted(f"s-{number}", layout_fingerprint=stage.declared)
            if number % 4 > 0:
                d.start(handle)
            if number % 4 > 1:
                d.commit(handle)
            if number % 4 > 2:
                stage.witness.ingest(handle)
            else:
                d.ask(w.AbortReq, slab_handle=handle)
    stage.settle()

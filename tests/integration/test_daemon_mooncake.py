"""Daemons that offer their arenas over Mooncake (TCP on loopback), and engines of this process that write."""

import ctypes
import http.server
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, clean_environment
from raw_client import LAYOUT, NUM_PLANES, RawClient, messages, wait_for

from snapd import wire as w
from snapd.client import Client
from snapd.units import MIB

engine_module = pytest.importorskip("mooncake.engine", exc_type=ImportError)

StartDaemon = Callable[..., DaemonProcess]
END_S = 30.0
SOURCE_BYTES = 64 * 1024
TOKENS = 8
CHECKSUMS = tuple((2**64 - 1 - plane, plane) for plane in range(NUM_PLANES))


class Writer:
    """D with nothing but a TransferEngine."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, SOURCE_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.engine = engine_module.TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert self.engine.register_memory(self.address, SOURCE_BYTES) == 0

    def write(
        self, hello: w.HelloRep, target_ptr: int, data: bytes, *notes: str, name: str = "snapd"
    ) -> None:
        """Write *data*, and the same once more for each note that goes with it."""
        self.memory[: len(data)] = data
        target = hello.transport_address, [self.address], [target_ptr], [len(data)]
        opcode = engine_module.TransferOpcode.Write
        if not notes:
            assert self.engine.batch_transfer_sync(*target, opcode) == 0
        for note in notes:
            notify = engine_module.TransferNotify(name, note)
            assert self.engine.batch_transfer_sync(*target, opcode, notify) == 0


@pytest.fixture(scope="module")
def writer() -> Writer:
    """Deleting an engine takes a second: one for all."""
    return Writer()


@pytest.fixture
def mooncake(start_daemon: StartDaemon) -> StartDaemon:
    """A function that starts a daemon with Mooncake."""

    def start(**settings: object) -> DaemonProcess:
        dotted = {key.replace("__", "."): value for key, value in settings.items()}
        return start_daemon(**{"transport": "mooncake", **dotted})

    return start


def stats_of(client: RawClient) -> w.MooncakeStatistics:
    stats = client.stats()
    assert stats.transport == "mooncake" and stats.mooncake is not None
    return stats.mooncake


def counts_of(client: RawClient) -> tuple[int, int, int]:
    stats = stats_of(client)
    return stats.notifications_taken, stats.notifications_refused, stats.notifications_ignored


def note(handle: int, epoch: str, **fields: Any) -> str:
    """A notification of a whole shard."""
    usual = {
        "num_bytes": TOKENS * LAYOUT.token_bytes,
        "num_tokens": TOKENS,
        "checksums": CHECKSUMS,
        "rank": 0,
    }
    return w.encode_notification(w.TransferNotification(slab_handle=handle, epoch=epoch, **(usual | fields)))


# --- arenas


def test_hello_says_where_and_what_a_writer_puts_there_is_in_the_arena(
    mooncake: StartDaemon, writer: Writer
) -> None:
    daemon = mooncake()
    with RawClient(daemon.socket_path) as client, Client(str(daemon.socket_path)) as reader:
        hello = client.ask(w.HelloReq)
        assert hello.transport == "mooncake"
        assert hello.mooncake == w.MooncakeAddress(
            segment_name=hello.transport_address, protocol="tcp", metadata_server="P2PHANDSHAKE"
        )
        assert hello.transport_address.startswith("127.0.0.1:")
        (arena,) = hello.arenas
        (grant,) = client.prepare(num_tokens=TOKENS).ranks
        assert grant.snapshot_buf_base_ptr == arena.base_ptr != 0
        data = os.urandom(TOKENS * 64)
        for offset_bytes in (*grant.k_layer_offsets, *grant.v_layer_offsets):
            writer.write(hello, arena.base_ptr + offset_bytes, data)
        with reader.map_buffer(0) as mapped:
            for offset_bytes in (*grant.k_layer_offsets, *grant.v_layer_offsets):
                assert mapped.buffer[offset_bytes : offset_bytes + len(data)] == data


def test_an_arena_in_pieces_takes_writes_in_each_of_them(mooncake: StartDaemon, writer: Writer) -> None:
    daemon = mooncake(register_piece_bytes="6MiB", ranks=2)
    with RawClient(daemon.socket_path) as client, Client(str(daemon.socket_path)) as reader:
        hello = client.ask(w.HelloReq)
        assert stats_of(client).registered_pieces == 6
        first, second = hello.arenas
        with reader.map_buffer(1) as mapped:
            for offset_bytes in (0, 6 * MIB, 16 * MIB - 4096):
                data = os.urandom(4096)
                writer.write(hello, second.base_ptr + offset_bytes, data)
                assert mapped.buffer[offset_bytes : offset_bytes + 4096] == data
        assert first.base_ptr != second.base_ptr


class MetadataServer(http.server.BaseHTTPRequestHandler):
    """Mooncake's, as far as an engine needs it."""

    values: dict[str, bytes] = {}

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        value = self.values.get(self.path)
        self.answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        self.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200)

    def do_DELETE(self) -> None:
        self.answer(200 if self.values.pop(self.path, None) else 404)

    def log_message(self, *_: object) -> None:
        pass


def test_through_a_metadata_server_peers_are_told_the_loopback_address(mooncake: StartDaemon) -> None:
    """Mooncake would tell them the address of the network device, at which nobody may connect."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), MetadataServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://user:secret@127.0.0.1:{server.server_port}/metadata"
        daemon = mooncake(mooncake__metadata_server=url)
        with RawClient(daemon.socket_path) as client:
            hello = client.ask(w.HelloReq)
            assert hello.mooncake.metadata_server == url
            assert stats_of(client).metadata_server == url.replace("user:secret@", "...@")
        told = [json.loads(value) for key, value in MetadataServer.values.items() if "rpc_meta" in key]
        assert [value["ip_or_host_name"] for value in told] == ["127.0.0.1"]
        assert hello.transport_address.replace(":", "%3A") in "".join(MetadataServer.values)
        daemon.stop()
        server.shutdown()


def test_mooncake_is_loaded_and_the_arena_mapped_only_when_it_is_the_transport(
    mooncake: StartDaemon,
) -> None:
    for transport, is_used in (("shm", False), ("mooncake", True)):
        maps = Path(f"/proc/{mooncake(transport=transport).process.pid}/maps").read_text()
        assert ("/mooncake/engine" in maps) is ("kv-snapd-arena-0" in maps) is is_used


@pytest.mark.skipif(shutil.which("ss") is None, reason="iproute2 is not installed")
def test_no_socket_of_the_daemon_takes_connections_from_another_host(
    mooncake: StartDaemon, writer: Writer
) -> None:
    daemon = mooncake()
    with RawClient(daemon.socket_path) as client:
        assert stats_of(client).is_loopback_only
        hello = client.ask(w.HelloReq)
        # The engine may not open others later either.
        writer.write(hello, hello.arenas[0].base_ptr, b"x")
    shown = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    ours = [line.split()[3] for line in shown.splitlines() if f"pid={daemon.process.pid}," in line]
    assert len(ours) >= 2
    assert all("%lo:" in address for address in ours), ours


def test_stats_and_status_show_how_it_is_used(mooncake: StartDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_REDIS_PASSWORD", "hunter2")
    monkeypatch.setenv("MC_NO_UTF8", "\udcff")
    daemon = mooncake(mooncake__notify="hint", mooncake__settings__MC_TCP_SLICE_SIZE="65536")
    with RawClient(daemon.socket_path) as client:
        stats = stats_of(client)
    assert stats.settings["MC_TCP_SLICE_SIZE"] == "65536"
    assert stats.package.startswith("mooncake-transfer-engine")
    assert (stats.protocol, stats.devices, stats.notify) == ("tcp", "", "hint")

    def status(*arguments: str) -> str:
        command = [sys.executable, "-m", "snapd.cli.main", "status", "--socket", str(daemon.socket_path)]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout

    text = status()
    assert f"mooncake {stats.segment_name}, tcp, open to this host only, 1 registered piece" in text
    assert "notifications hint: 0 taken, 0 refused, 0 ignored" in text
    assert "MC_TCP_SLICE_SIZE" not in text
    assert "MC_TCP_SLICE_SIZE  65536" in status("--limits")
    shown = json.loads(status("--json"))
    assert shown["mooncake"]["segment_name"] == stats.segment_name
    assert shown["transport"] == "mooncake"
    for output in (text, status("--limits"), status("--json")):
        assert "hunter2" not in output


# --- what stops it from starting


def start_error(directory: Path, *assignments: str, **variables: str) -> str:
    """Run a daemon that must not start; return its one line of error."""
    command = [sys.executable, "-m", "snapd.cli.main", "serve", "--socket", str(directory / "s")]
    command += ["--log", str(directory / "log"), "--size", "1MiB", "--transport", "mooncake"]
    for assignment in assignments:
        command += ["--set", assignment]
    environment = clean_environment() | variables
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=END_S)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    # Mooncake has something to say after it.
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("snapd: ")]
    return line


@pytest.mark.parametrize(
    ("assignment", "wanted"),
    [
        ("mooncake.host=no.such.host.invalid", "no.such.host.invalid"),
        # It resolves, and nobody can connect to it.
        ("mooncake.host=255.255.255.255", "mooncake.host = '255.255.255.255': this daemon's engine does not"),
        ("mooncake.metadata_server=http://127.0.0.1:1/metadata", "http://127.0.0.1:1/metadata"),
        ("mooncake.settings.MC_MIN_RPC_PORT=x", "MC_MIN_RPC_PORT"),
    ],
)
def test_what_cannot_work_stops_the_daemon_at_start_with_one_clear_line(
    tmp_path: Path, assignment: str, wanted: str
) -> None:
    assert wanted in start_error(tmp_path, assignment)


HIDING = """
import importlib.metadata, sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mooncake":
            raise ModuleNotFoundError(name)

def version(name, real=importlib.metadata.version):
    if name.startswith("mooncake"):
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

sys.meta_path.insert(0, Hide())
importlib.metadata.version = version
"""


def test_without_the_package_it_says_how_to_install_it_and_shm_goes_on(
    tmp_path: Path, mooncake: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    line = start_error(tmp_path, PYTHONPATH=str(tmp_path))
    assert line.startswith("snapd: transport = mooncake: Mooncake is not installed")
    for extra in ("kv-snapd[mooncake]", "kv-snapd[mooncake-cuda13]", "kv-snapd[mooncake-cpu]"):
        assert extra in line
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with RawClient(mooncake(transport="shm").socket_path) as client:
        assert client.ask(w.HelloReq).mooncake is None
        assert client.stats().mooncake is None


# --- notifications


def test_a_hint_goes_to_whoever_prepared_and_to_nobody_else(mooncake: StartDaemon, writer: Writer) -> None:
    daemon = mooncake(mooncake__notify="hint", mooncake__notify_poll_ms=1)
    with (
        RawClient(daemon.socket_path) as client,
        RawClient(daemon.socket_path) as other,
        Client(str(daemon.socket_path)) as preparer,
    ):
        hello = client.ask(w.HelloReq)
        base_ptr = hello.arenas[0].base_ptr
        grant = preparer.prepare_receive("chat", TOKENS, client.declare(), ranks=(0,))
        mine, others = client.granted("mine"), other.granted("other")
        other.start(mine)
        writer.write(hello, base_ptr, b"x", note(grant.slab_handle, hello.epoch), note(mine, hello.epoch))
        told = wait_for(preparer.take_notified)
        assert told == [w.TransferNotified(slab_handle=grant.slab_handle, session_id="chat", rank=0)]
        assert preparer.take_notified() == []
        assert client.push() == w.TransferNotified(slab_handle=mine, session_id="mine", rank=0)
        assert client.view(mine).state == "TRANSFERRING" and client.view(others).state == "RESERVED"
        wait_for(lambda: counts_of(client) == (2, 0, 0))
        assert (other.stats(), other.pushes)[1] == []


def test_a_client_keeps_the_newest_hints_and_counts_the_others(mooncake: StartDaemon, writer: Writer) -> None:
    daemon = mooncake(mooncake__notify="hint", mooncake__notify_poll_ms=1, ranks=2)
    with RawClient(daemon.socket_path) as client, Client(str(daemon.socket_path), ended_max=2) as preparer:
        hello = client.ask(w.HelloReq)
        client.declare(rank=1)
        handle = preparer.prepare_receive("chat", TOKENS, client.declare()).slab_handle
        notes = [note(handle, hello.epoch, rank=rank) for rank in (0, 1, 1)]
        writer.write(hello, hello.arenas[0].base_ptr, b"x", *notes)
        wait_for(lambda: counts_of(client)[0] == 3)
        preparer.ping()
        assert [push.rank for push in preparer.take_notified()] == [1, 1]
        assert preparer.notified_dropped == 1


@pytest.mark.parametrize("notify", ["hint", "commit"])
def test_garbage_is_counted_and_changes_nothing(mooncake: StartDaemon, writer: Writer, notify: str) -> None:
    daemon = mooncake(mooncake__notify=notify, mooncake__notify_poll_ms=1)
    with RawClient(daemon.socket_path) as client:
        hello = client.ask(w.HelloReq)
        handle = client.granted()
        bad = [
            "", "{", "[]", "[" * 10_000, '"\\ud800"', "x" * 300_000,
            note(handle, "another-epoch"),
            note(handle, ""),
            note(handle, hello.epoch).replace('"rank":0', '"rank":"0"'),
            note(handle, hello.epoch).replace(str(handle), str(2**80)),
            note(handle, hello.epoch).replace(str(2**64 - 1), str(2**64)),
        ]  # fmt: skip
        writer.write(hello, hello.arenas[0].base_ptr, b"x", *bad)
        wait_for(lambda: counts_of(client) == (0, 0, len(bad)))
        # Of another name: not for snapd, and not counted.
        writer.write(hello, hello.arenas[0].base_ptr, b"x", note(handle, hello.epoch), name="other")
        unknown = note(handle ^ 1, hello.epoch), note(handle, hello.epoch, rank=7)
        writer.write(hello, hello.arenas[0].base_ptr, b"x", *unknown)
        expected = (0, 0, len(bad) + 2) if notify == "hint" else (0, 2, len(bad))
        wait_for(lambda: counts_of(client) == expected)
        assert client.view(handle).state == "RESERVED"
        assert client.pushes == []
    assert len(messages(daemon.stderr, "bad notification")) == 1
    assert len(messages(daemon.stderr, "notification of another epoch")) == 1


def test_a_commit_by_notification_makes_it_ready_and_its_checksums_reach_the_reader(
    mooncake: StartDaemon, writer: Writer
) -> None:
    daemon = mooncake(mooncake__notify="commit", mooncake__notify_poll_ms=1)
    with RawClient(daemon.socket_path) as client:
        hello = client.ask(w.HelloReq)
        handle = client.granted()
        base_ptr = hello.arenas[0].base_ptr
        writer.write(hello, base_ptr, b"x", note(handle, hello.epoch, checksums=()))
        wait_for(lambda: counts_of(client) == (0, 1, 0))
        assert client.view(handle).state == "RESERVED"
        writer.write(hello, base_ptr, b"x", note(handle, hello.epoch), note(handle, hello.epoch))
        wait_for(lambda: counts_of(client) == (2, 1, 0))
        assert client.view(handle).state == "READY"
        assert client.lease(handle).checksums == CHECKSUMS
        assert client.pushes == []


def test_a_commit_by_notification_of_other_figures_ends_the_attempt(
    mooncake: StartDaemon, writer: Writer
) -> None:
    daemon = mooncake(mooncake__notify="commit", mooncake__notify_poll_ms=1)
    with RawClient(daemon.socket_path) as client:
        hello = client.ask(w.HelloReq)
        handle = client.granted()
        writer.write(hello, hello.arenas[0].base_ptr, b"x", note(handle, hello.epoch, num_bytes=1))
        ended = client.push()
        assert (ended.slab_handle, ended.reason) == (handle, "partial-transfer")
        assert counts_of(client) == (0, 1, 0)


def test_a_commit_that_is_not_drained_is_taken_as_such(mooncake: StartDaemon, writer: Writer) -> None:
    """As over the control socket: it is READY, and not evicted for others while a write may land."""
    daemon = mooncake(mooncake__notify="commit", mooncake__notify_poll_ms=1, size="1MiB")
    with RawClient(daemon.socket_path) as client:
        hello = client.ask(w.HelloReq)
        handle = client.granted(num_tokens=TOKENS)
        text = note(handle, hello.epoch, drained=False)
        writer.write(hello, hello.arenas[0].base_ptr, b"x", text)
        wait_for(lambda: client.view(handle).state == "READY")
        (arena,) = client.stats().core.arenas
        assert arena.live_bytes > 0 == arena.evictable_bytes


def test_with_notify_off_notifications_are_thrown_away_not_kept(
    mooncake: StartDaemon, writer: Writer
) -> None:
    daemon = mooncake()
    with RawClient(daemon.socket_path) as client:
        hello = client.ask(w.HelloReq)
        handle = client.granted()
        writer.write(hello, hello.arenas[0].base_ptr, b"x", note(handle, hello.epoch))
        wait_for(lambda: counts_of(client) == (0, 0, 1))
        assert client.view(handle).state == "RESERVED" and client.pushes == []

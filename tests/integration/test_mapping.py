"""An arena mapped by file descriptor: what is shared, what is refused, and what is left behind."""

import asyncio
import ctypes
import errno
import mmap
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from client_cases import PATIENCE_S, FakeDaemon, num_fds
from raw_client import wait_for

from snapd import mapping
from snapd.client import AsyncClient, Client
from snapd.errors import (
    ConnectionLost,
    DaemonUnreachable,
    PermissionDenied,
    ProtocolError,
    Reason,
    RequestTimeout,
    WrongRank,
)
from snapd.mapping import MapFailed, map_arena
from snapd.wire import AckRep, ErrorRep, MapBufferRep, MapBufferReq, encode_frame

SIZE_BYTES = 1 << 20
SHORT_S = 0.05


@pytest.fixture
def daemon(tmp_path):
    fake = FakeDaemon(tmp_path / "snapd.sock")
    yield fake
    fake.stop()


@pytest.fixture
def arena():
    """The file descriptor of an arena that holds a pattern."""
    fd = os.memfd_create("arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE_BYTES)
    os.pwrite(fd, b"first", 0)
    os.pwrite(fd, b"last", SIZE_BYTES - 4)
    yield fd
    os.close(fd)


def read_only(fd):
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)


def handing_over(daemon, *fds, rank=0, size_bytes=SIZE_BYTES, split_at=0, is_kept=False):
    """Return a script that hands *fds* over, in two pieces if *split_at* says so, and is hung up on."""

    def script():
        peer = daemon.accept()
        request = peer.read()
        assert isinstance(request, MapBufferReq)
        given = [fd if request.writable else read_only(fd) for fd in fds]
        frame = encode_frame(MapBufferRep(id=request.id, rank=rank, size_bytes=size_bytes, epoch="epoch-1"))
        cut = split_at or len(frame)
        if given:
            socket.send_fds(peer.sock, [frame[:cut]], given)
        else:
            peer.sock.sendall(frame[:cut])
        if split_at:
            peer.sock.sendall(frame[cut:])
        for fd in given:
            if fd not in fds:
                os.close(fd)
        assert is_kept or peer.read() is None

    return script


def answering(daemon, data):
    """Return a script that answers with *data* and hangs up."""

    def script():
        peer = daemon.accept()
        peer.read()
        peer.sock.sendall(data)
        peer.close()

    return script


def run_python(script):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=False)


def permissions_at(address, pid="self"):
    """Return the permissions of the mapping that starts at *address*, such as ``r--s``, or None."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        start, permissions = line.split("-", 1)[0], line.split()[1]
        if int(start, 16) == address:
            return permissions
    return None


def test_a_mapping_for_reading_shows_the_arena_and_cannot_be_written(daemon, arena):
    with daemon.playing(handing_over(daemon, arena)):
        mapped = map_arena(daemon.path, 0, False, PATIENCE_S)
    assert (mapped.rank, mapped.size_bytes, mapped.writable, mapped.epoch) == (
        0,
        SIZE_BYTES,
        False,
        "epoch-1",
    )
    assert bytes(mapped.buffer[:5]) == b"first"
    assert bytes(mapped.buffer[-4:]) == b"last"
    os.pwrite(arena, b"later", 0)
    assert bytes(mapped.buffer[:5]) == b"later"
    assert mapped.buffer.readonly
    with pytest.raises(TypeError):
        mapped.buffer[0] = 1
    assert permissions_at(mapped.address) == "r--s"
    assert ctypes.string_at(mapped.address, 5) == b"later"
    mapped.close()


def test_a_mapping_for_writing_changes_the_arena(daemon, arena):
    with daemon.playing(handing_over(daemon, arena)):
        mapped = map_arena(daemon.path, 0, True, PATIENCE_S)
    mapped.buffer[10:14] = b"here"
    ctypes.memmove(mapped.address + 20, b"there", 5)
    assert (os.pread(arena, 4, 10), os.pread(arena, 5, 20)) == (b"here", b"there")
    assert permissions_at(mapped.address) == "rw-s"
    mapped.close()


def test_a_copy_into_a_mapping_stays_inside_and_is_refused_when_it_is_closed(daemon, arena):
    with daemon.playing(handing_over(daemon, arena)):
        mapped = map_arena(daemon.path, 0, True, PATIENCE_S)
    source = ctypes.create_string_buffer(b"copied", 6)
    mapped.copy_in(SIZE_BYTES - 6, ctypes.addressof(source), 6)
    assert os.pread(arena, 6, SIZE_BYTES - 6) == b"copied"
    for offset, size_bytes in ((-1, 6), (SIZE_BYTES - 5, 6), (0, -1)):
        with pytest.raises(ValueError, match="leave an arena"):
            mapped.copy_in(offset, ctypes.addressof(source), size_bytes)
    mapped.close()
    with pytest.raises(ValueError, match="closed"):
        mapped.copy_in(0, ctypes.addressof(source), 6)


def test_an_arena_is_unmapped_when_its_daemon_ends_and_nobody_looks(daemon, arena, no_pidfd):
    with daemon.playing(handing_over(daemon, arena, is_kept=True)):
        mapped = map_arena(daemon.path, 0, True, PATIENCE_S)
    assert not mapped.is_abandoned and mapped.buffer[0]
    daemon.peers.pop().close()
    wait_for(lambda: permissions_at(mapped.address) is None, "it is unmapped", PATIENCE_S)
    assert mapped.is_abandoned
    for use in (lambda: mapped.buffer, mapped.hold, lambda: mapped.copy_in(0, mapped.address, 1)):
        with pytest.raises(ConnectionLost, match="the daemon is gone, and arena 0 was let go of"):
            use()
    before = num_fds()
    mapped.close()
    assert num_fds() == before - 1
    with pytest.raises(ValueError, match="closed"):
        mapped.hold()


def test_what_has_views_outlives_the_daemon(daemon, arena, no_pidfd):
    """What is being read or written may be to its end."""
    with daemon.playing(handing_over(daemon, arena, is_kept=True)):
        mapped = map_arena(daemon.path, 0, True, PATIENCE_S)
    view = mapped.buffer[:5]
    daemon.peers.pop().close()
    wait_for(lambda: mapped._buffer is None, "it is let go of", PATIENCE_S)
    mapped.check_alive()
    assert bytes(view) == b"first"
    mapped.copy_in(0, mapped.address + 1, 4)
    assert bytes(view) == b"irstt"
    del view
    with pytest.raises(ConnectionLost):
        mapped.copy_in(0, mapped.address, 1)
    assert permissions_at(mapped.address) is None
    mapped.close()


def test_a_daemon_that_cannot_be_watched_hands_over_nothing(daemon, arena, monkeypatch):
    def without(sock):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(mapping, "DaemonLife", without)
    before = num_fds()
    with daemon.playing(handing_over(daemon, arena)), pytest.raises(MapFailed, match="Too many open files"):
        map_arena(daemon.path, 0, False, PATIENCE_S)
    daemon.peers.pop().close()
    assert num_fds() == before


def test_a_write_past_pythons_checks_into_a_mapping_for_reading_faults(daemon, arena):
    script = f"""
        import ctypes
        from snapd.mapping import map_arena
        mapped = map_arena({daemon.path!r}, 0, False, {PATIENCE_S})
        print("mapped", flush=True)
        ctypes.memset(mapped.address, 0, 1)
    """
    with daemon.playing(handing_over(daemon, arena)):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=False
        )
    assert done.stdout == b"mapped\n"
    assert done.returncode == -signal.SIGSEGV


def test_a_forked_child_does_not_have_the_mapping(daemon, arena):
    with daemon.playing(handing_over(daemon, arena)):
        mapped = map_arena(daemon.path, 0, True, PATIENCE_S)
    before, after = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(after)
        os.read(before, 1)
        os._exit(0)
    try:
        assert permissions_at(mapped.address) == "rw-s"
        assert permissions_at(mapped.address, child) is None
    finally:
        os.close(after)
        os.close(before)
        os.waitpid(child, 0)
    mapped.close()


def test_what_a_forked_child_has_in_its_place_stays_when_the_child_closes_it(daemon, arena):
    with daemon.playing(handing_over(daemon, arena)):
        mapped = map_arena(daemon.path, 0, True, PATIENCE_S)
    child = os.fork()
    if child == 0:
        is_right = False
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            own = mapping._libc.mmap(mapped.address, mapped.size_bytes, mmap.PROT_READ, flags, -1, 0)
            mapped.close()
            is_right = own == mapped.address and permissions_at(own) == "r--p"
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert permissions_at(mapped.address) == "rw-s"
    mapped.close()


def test_no_descriptor_is_left_and_the_memory_goes_with_the_mapping(daemon, arena):
    before = num_fds()
    with daemon.playing(handing_over(daemon, arena)):
        mapped = map_arena(daemon.path, 0, False, PATIENCE_S)
    daemon.peers.pop().close()
    assert num_fds() == before + 1, "what tells of the daemon's end"
    mapped.close()
    mapped.close()
    assert num_fds() == before
    assert permissions_at(mapped.address) is None
    with pytest.raises(ValueError, match="closed"):
        _ = mapped.buffer


def test_a_view_outlives_close(daemon, arena):
    with (
        daemon.playing(handing_over(daemon, arena)),
        map_arena(daemon.path, 0, False, PATIENCE_S) as mapped,
    ):
        view = mapped.buffer[:5]
    assert bytes(view) == b"first"
    assert permissions_at(mapped.address) == "r--s"
    del view
    assert permissions_at(mapped.address) is None


def resident_pages(address):
    """Return how many pages of the mapping at *address* this process has brought in."""
    size_kib = 0
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            is_inside = int(head.split("-")[0], 16) == address
        elif is_inside and head == "Rss:":
            size_kib = int(line.split()[1])
    return size_kib * 1024 // mmap.PAGESIZE


ALL_PAGES = SIZE_BYTES // mmap.PAGESIZE


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("is_old_kernel", [False, True])
def test_the_pages_are_brought_in(daemon, arena, monkeypatch, writable, is_old_kernel):
    monkeypatch.setattr(mapping, "_POPULATE_PIECE_BYTES", SIZE_BYTES // 4)
    monkeypatch.setattr(mapping, "_MAP_POPULATE_PIECE_BYTES", SIZE_BYTES // 4)
    if is_old_kernel:
        monkeypatch.setattr(mapping, "_MADV_POPULATE_READ", 9999)
        monkeypatch.setattr(mapping, "_MADV_POPULATE_WRITE", 9999)
    with daemon.playing(handing_over(daemon, arena)):
        mapped = map_arena(daemon.path, 0, writable, PATIENCE_S)
    assert mapped.populated_bytes == SIZE_BYTES
    assert resident_pages(mapped.address) == ALL_PAGES
    assert bytes(mapped.buffer[:5]) + bytes(mapped.buffer[-4:]) == b"firstlast"
    assert permissions_at(mapped.address) == ("rw-s" if writable else "r--s")
    mapped.close()


def test_the_pages_come_later_when_they_are_not_wanted_now(daemon, arena):
    with daemon.playing(handing_over(daemon, arena)):
        mapped = map_arena(daemon.path, 0, False, PATIENCE_S, populate=False)
    assert mapped.populated_bytes == 0
    assert resident_pages(mapped.address) < ALL_PAGES
    mapped.close()


def test_bringing_pages_in_stops_when_the_time_is_over(daemon, arena, monkeypatch):
    monkeypatch.setattr(mapping, "_POPULATE_PIECE_BYTES", SIZE_BYTES // 4)
    real_populate = mapping._populate

    def populate(*args):
        # So much time: two looks at the clock.
        times = iter([0.0, 0.0, 2.0])
        monkeypatch.setattr(mapping, "monotonic", lambda: next(times))
        return real_populate(*args[:-1], 1.0)

    monkeypatch.setattr(mapping, "_populate", populate)
    with daemon.playing(handing_over(daemon, arena)):
        mapped = map_arena(daemon.path, 0, False, PATIENCE_S)
    assert mapped.populated_bytes == SIZE_BYTES // 2
    assert bytes(mapped.buffer[-4:]) == b"last"
    mapped.close()


def test_a_descriptor_that_comes_with_half_a_frame_is_kept_for_the_rest(daemon, arena):
    with daemon.playing(handing_over(daemon, arena, split_at=7)):
        mapped = map_arena(daemon.path, 0, False, PATIENCE_S)
    assert bytes(mapped.buffer[:5]) == b"first"
    mapped.close()


@pytest.mark.parametrize(
    ("num_given", "options", "message"),
    [
        (0, {}, "0 file descriptors"),
        (2, {}, "2 file descriptors"),
        (9, {}, "more file descriptors"),
        (1, {"rank": 1}, "arena 1"),
        (1, {"size_bytes": SIZE_BYTES + 1}, "in a file of"),
        (1, {"size_bytes": 0}, "in a file of"),
        (1, {"size_bytes": -1}, "in a file of"),
    ],
)
def test_a_hand_over_that_does_not_fit_is_a_protocol_error_and_leaves_nothing(
    daemon, arena, num_given, options, message
):
    before = num_fds()
    script = handing_over(daemon, *[arena] * num_given, **options)
    with daemon.playing(script), pytest.raises(ProtocolError, match=message):
        map_arena(daemon.path, 0, False, PATIENCE_S)
    daemon.peers.pop().close()
    assert num_fds() == before


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (
            encode_frame(ErrorRep(id=1, reason=Reason.WRONG_RANK, detail="no arena 0")),
            WrongRank,
            "no arena 0",
        ),
        (encode_frame(ErrorRep(id=0, reason=Reason.PERMISSION_DENIED)), PermissionDenied, "user"),
        (encode_frame(AckRep(id=1)), ProtocolError, "AckRep answers"),
        (
            encode_frame(MapBufferRep(id=2, rank=0, size_bytes=1, epoch="")),
            ProtocolError,
            "MapBufferRep answers",
        ),
        (b"\xff\xff\xff\x7f", ProtocolError, "a frame of"),
        (b"HTTP/1.1 400 Bad Request", ProtocolError, "a frame of"),
        (b"", ConnectionLost, "hung up"),
        (encode_frame(AckRep(id=1))[:-1], ConnectionLost, "hung up"),
    ],
)
def test_another_answer_is_a_typed_error(daemon, data, error, message):
    with daemon.playing(answering(daemon, data)), pytest.raises(error, match=message):
        map_arena(daemon.path, 0, False, PATIENCE_S)


def test_a_daemon_that_hangs_up_without_reading_is_a_lost_connection(daemon):
    def script():
        peer = daemon.accept()
        peer.sock.recv(1, socket.MSG_PEEK)
        peer.close()

    with daemon.playing(script), pytest.raises(ConnectionLost, match="hung up"):
        map_arena(daemon.path, 0, False, PATIENCE_S)


def test_a_refusal_that_comes_before_the_request_is_read_all_the_same(daemon, monkeypatch):
    def refuse(request):
        peer = daemon.accept()
        peer.send(ErrorRep(id=0, reason=Reason.PERMISSION_DENIED))
        peer.close()
        return encode_frame(request)

    monkeypatch.setattr(mapping, "encode_frame", refuse)
    with pytest.raises(PermissionDenied):
        map_arena(daemon.path, 0, False, PATIENCE_S)


def test_a_descriptor_that_cannot_be_mapped_is_said(daemon, tmp_path):
    directory = os.open(tmp_path, os.O_RDONLY)
    script = handing_over(daemon, directory, size_bytes=1)
    with daemon.playing(script), pytest.raises(MapFailed, match="cannot be mapped"):
        map_arena(daemon.path, 0, True, PATIENCE_S)
    os.close(directory)


def num_mappings():
    return Path("/proc/self/maps").read_text().count("memfd:arena")


def test_what_cannot_be_kept_from_children_is_not_kept_at_all(daemon, arena, monkeypatch):
    monkeypatch.setattr(mapping.mmap, "MADV_DONTFORK", 9999)
    with daemon.playing(handing_over(daemon, arena)), pytest.raises(MapFailed, match="children"):
        map_arena(daemon.path, 0, True, PATIENCE_S)
    assert num_mappings() == 0


def test_memory_that_cannot_be_brought_in_is_said(daemon, arena, monkeypatch):
    class NoMemory:
        mmap, munmap = mapping._libc.mmap, mapping._libc.munmap

        @staticmethod
        def madvise(address, size_bytes, advice):
            ctypes.set_errno(errno.ENOMEM)
            return -1

    monkeypatch.setattr(mapping, "_libc", NoMemory)
    with daemon.playing(handing_over(daemon, arena)), pytest.raises(MapFailed, match="brought in"):
        map_arena(daemon.path, 0, True, PATIENCE_S)
    assert num_mappings() == 0


def test_the_descriptor_does_not_pass_to_programs_that_are_started_meanwhile(daemon, arena, monkeypatch):
    seen = []
    real_map = mapping._map

    def look(fd, *args):
        seen.append(os.get_inheritable(fd))
        return real_map(fd, *args)

    monkeypatch.setattr(mapping, "_map", look)
    with daemon.playing(handing_over(daemon, arena)):
        map_arena(daemon.path, 0, True, PATIENCE_S).close()
    assert seen == [False]


def test_the_memory_is_there_until_the_process_is_gone(daemon, arena):
    script = f"""
        import atexit
        # What is registered first runs last.
        atexit.register(lambda: print(bytes(mapped.buffer[:5]).decode()))
        from snapd.mapping import map_arena
        mapped = map_arena({daemon.path!r}, 0, False, {PATIENCE_S})
    """
    with daemon.playing(handing_over(daemon, arena)):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=False
        )
    assert (done.returncode, done.stdout) == (0, b"first\n")


def test_no_answer_is_a_timeout(daemon):
    with pytest.raises(RequestTimeout):
        map_arena(daemon.path, 0, False, SHORT_S)
    with pytest.raises(RequestTimeout):
        map_arena(daemon.path, 0, False, 0)


def test_a_full_accept_queue_is_a_timeout(tmp_path):
    daemon = FakeDaemon(tmp_path / "busy.sock")
    daemon.listener.listen(0)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(daemon.path)
        with pytest.raises(RequestTimeout):
            map_arena(daemon.path, 0, False, SHORT_S)
    daemon.stop()


def test_without_a_daemon_it_is_unreachable(daemon, tmp_path):
    daemon.stop()
    with pytest.raises(DaemonUnreachable, match="nobody listens"):
        map_arena(daemon.path, 0, False, PATIENCE_S)
    with pytest.raises(DaemonUnreachable, match="socket_path"):
        map_arena(str(tmp_path / "none.sock"), 0, False, PATIENCE_S)


def test_both_clients_map(daemon, arena):
    async def in_async():
        async with AsyncClient(daemon.path) as client:
            return await client.map_buffer(0, True)

    with Client(daemon.path) as client, daemon.playing(handing_over(daemon, arena)):
        first = client.map_buffer(0)
    with daemon.playing(handing_over(daemon, arena)):
        second = asyncio.run(in_async())
    second.buffer[0:1] = b"F"
    assert bytes(first.buffer[:5]) == b"First"
    first.close()
    second.close()

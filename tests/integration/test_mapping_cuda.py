"""An arena on a GPU, mapped by handle: what is shared, what is refused, and when it is closed.

The driver is a fake over host memory that lets a process open its own handles.
"""

import ctypes
import gc
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from client_cases import PATIENCE_S, FakeDaemon, num_fds
from own_life import own_life
from structlog.testing import capture_logs

sys.path.append(str(Path(__file__).parents[1]))

from cuda_fake import BROKEN, MIB, FakeDriver, install

from snapd import cuda, cudamapping, daemonlife, lifewatch
from snapd.core.slab import Extent
from snapd.cuda import CudaError
from snapd.cudaarena import CudaArena
from snapd.cudamapping import MappedCudaArena
from snapd.errors import ConnectionLost, ProtocolError, StaleHandle, TransportError
from snapd.kv.slabs import Slabs
from snapd.mapping import MapFailed, map_arena
from snapd.transport.base import TicketState, Write
from snapd.transport.shm import ShmWriter
from snapd.wire import CudaMemory, MapBufferRep, MapBufferReq, RankGrant, encode_frame

SIZE_BYTES = 4 * MIB
OTHER_UUID = "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff"


@pytest.fixture
def fake(monkeypatch):
    """Two GPUs; at the end nothing may be left on them."""
    monkeypatch.setattr(cuda, "load_library", None)
    monkeypatch.setattr(cuda, "_driver", None)
    driver = install(FakeDriver(opens_own=True))
    yield driver
    gc.collect()
    driver.check_clean()
    assert not cudamapping._openings


@pytest.fixture
def arena(fake):
    with CudaArena(0, "cuda:1", SIZE_BYTES) as made:
        ctypes.memmove(made.address, b"first", 5)
        yield made


@pytest.fixture
def daemon(tmp_path):
    fake_daemon = FakeDaemon(tmp_path / "snapd.sock")
    yield fake_daemon
    fake_daemon.stop()


def memory_of(arena, **changes):
    facts = {"ipc_handle": arena.ipc_handle(), "gpu_uuid": arena.gpu_uuid, "device": arena.device}
    return CudaMemory(**facts | changes)


def handing_over(daemon, memory, *fds, rank=0, size_bytes=SIZE_BYTES, epoch="epoch-1"):
    def script():
        peer = daemon.accept()
        request = peer.read()
        assert isinstance(request, MapBufferReq)
        reply = MapBufferRep(id=request.id, rank=rank, size_bytes=size_bytes, epoch=epoch, cuda=memory)
        socket.send_fds(peer.sock, [encode_frame(reply)], fds)

    return script


@pytest.fixture
def mapped_from(daemon):
    """Maps what a daemon hands over."""

    def map_it(memory, *fds, writable=False, device=None, **changes):
        with daemon.playing(handing_over(daemon, memory, *fds, **changes)):
            return map_arena(daemon.path, 0, writable, PATIENCE_S, device=device)

    return map_it


def read(address, size_bytes):
    return ctypes.string_at(address, size_bytes)


@pytest.mark.parametrize("writable", [False, True])
def test_the_arena_is_opened_on_its_own_gpu_and_can_be_written_in_any_case(
    fake, arena, mapped_from, writable
):
    with mapped_from(memory_of(arena, device="cuda:7"), writable=writable) as mapped:
        assert isinstance(mapped, MappedCudaArena)
        assert (mapped.rank, mapped.size_bytes, mapped.epoch) == (0, SIZE_BYTES, "epoch-1")
        assert (mapped.device, mapped.writable, mapped.is_abandoned) == ("cuda:1", True, False)
        assert mapped.address != arena.address
        assert read(mapped.address, 5) == b"first"
        mapped.check_alive()
        assert fake.retained == [0, 2]
    cudamapping.wait_closed()
    assert fake.retained == [0, 1] and not fake.opened


def test_another_gpu_uses_the_arena_if_it_reaches_it(fake, arena, mapped_from):
    with mapped_from(memory_of(arena)) as own, mapped_from(memory_of(arena), device="cuda:0") as mapped:
        assert (own.device, own.home_device) == ("cuda:1", "cuda:1")
        assert (mapped.device, mapped.home_device) == ("cuda:0", "cuda:1")
        assert mapped.address != own.address and read(mapped.address, 5) == b"first"
        assert fake.retained == [1, 2], "each GPU that uses it has opened it in its own context"
        mapped.close()
        cudamapping.wait_closed()
        assert fake.retained == [0, 2] and read(own.address, 5) == b"first"


@pytest.mark.parametrize("device", ["cuda:1", "cuda:7", None])
def test_a_gpu_that_is_the_arenas_own_or_unknown_leaves_it_with_its_own(fake, arena, mapped_from, device):
    with mapped_from(memory_of(arena), device=device) as mapped:
        assert mapped.device == mapped.home_device == "cuda:1"
    assert "cuDeviceCanAccessPeer" not in fake.calls


def test_a_gpu_that_does_not_reach_the_arena_leaves_it_with_its_own(fake, arena, mapped_from):
    fake.has_peers = False
    with mapped_from(memory_of(arena), device="cuda:0") as mapped:
        assert mapped.device == mapped.home_device == "cuda:1"


def test_where_another_gpu_cannot_open_the_arena_its_own_does(fake, arena, mapped_from, monkeypatch):
    """A GPU has few peers at a time."""
    opened = cudamapping.Opening

    def refuse(context, key, home_device):
        if context.gpu.device != home_device:
            context.release()
            raise cuda.CudaError("CUDA_ERROR_TOO_MANY_PEERS", 711)
        return opened(context, key, home_device)

    monkeypatch.setattr(cudamapping, "Opening", refuse)
    with capture_logs() as logs, mapped_from(memory_of(arena), device="cuda:0") as mapped:
        assert mapped.device == mapped.home_device == "cuda:1"
        mapped.check_alive()
    assert [log["device"] for log in logs] == ["cuda:0"]


def test_the_gpu_is_found_by_uuid_where_it_is_counted_otherwise(fake, arena, mapped_from):
    """``CUDA_VISIBLE_DEVICES=1`` in the client: what is cuda:1 of the daemon is cuda:0 here."""
    client_fake = install(FakeDriver(uuids=fake.uuids[1:], opens_own=True))
    with mapped_from(memory_of(arena)) as mapped:
        assert mapped.device == "cuda:0"
        assert read(mapped.address, 5) == b"first"
    client_fake.check_clean()
    install(fake)


def test_a_gpu_that_is_not_visible_here_is_told_with_those_that_are(fake, arena, mapped_from):
    with pytest.raises(
        MapFailed, match=rf"arena 0 lies on {OTHER_UUID} \(cuda:1 of the daemon\).*GPU-00010203.*VISIBLE"
    ):
        mapped_from(memory_of(arena, gpu_uuid=OTHER_UUID))


def test_a_client_without_a_driver_is_told_so(fake, arena, mapped_from, monkeypatch):
    def missing():
        raise OSError

    monkeypatch.setattr(cuda, "load_library", missing)
    monkeypatch.setattr(cuda, "_driver", None)
    before = num_fds()
    with pytest.raises(MapFailed, match="no NVIDIA driver in this process") as caught:
        mapped_from(memory_of(arena))
    # The daemon's end of the connection, and nothing of this one's, also while the error is kept.
    assert num_fds() == before + 1 and caught.value is not None


@pytest.mark.parametrize(
    ("changes", "answer", "message"),
    [
        ({"ipc_handle": b"x" * 63}, {}, "handle of 63 bytes"),
        ({"ipc_handle": b"x" * 65}, {}, "handle of 65 bytes"),
        ({}, {"rank": 1}, "arena 1 came"),
        ({}, {"size_bytes": SIZE_BYTES + 1}, "in an allocation of 4 MiB"),
        ({}, {"size_bytes": 0}, "an arena of 0 bytes"),
        ({}, {"size_bytes": -1}, "an arena of -1 bytes"),
    ],
)
def test_a_hand_over_that_does_not_fit_is_a_protocol_error_and_leaves_nothing(
    daemon, fake, arena, mapped_from, changes, answer, message
):
    before = num_fds()
    with pytest.raises(ProtocolError, match=message) as caught:
        mapped_from(memory_of(arena, **changes), **answer)
    daemon.peers.pop().close()
    fds_of_memory = 2 * len(fake.opened)
    assert num_fds() == before + fds_of_memory and caught.value is not None
    del caught
    gc.collect()
    cudamapping.wait_closed()
    assert num_fds() == before and not fake.opened


def test_a_file_descriptor_with_it_is_a_protocol_error(arena, mapped_from):
    before = num_fds()
    with Path(os.devnull).open() as extra, pytest.raises(ProtocolError, match=r"1 file desc.* came.*not 0"):
        mapped_from(memory_of(arena), extra.fileno())
    assert num_fds() == before + 1


@pytest.mark.parametrize("name", ["cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2"])
def test_a_handle_that_cannot_be_opened_says_what_containers_need_and_leaves_nothing(
    fake, arena, mapped_from, name
):
    fake.fails[name] = BROKEN
    with pytest.raises(MapFailed, match=rf"^{name}: CUDA_ERROR_UNKNOWN 999.*IPC and PID namespaces"):
        mapped_from(memory_of(arena))
    cudamapping.wait_closed()
    assert fake.retained == [0, 1] and not fake.opened


# --- one opening a process


def test_a_handle_is_opened_once_and_closed_after_the_last_mapping(fake, arena, mapped_from):
    first, second = mapped_from(memory_of(arena)), mapped_from(memory_of(arena))
    assert first.address == second.address
    assert fake.calls.count("cuIpcOpenMemHandle_v2") == 1
    first.close()
    first.close()
    assert read(second.address, 5) == b"first" and len(fake.opened) == 1
    second.close()
    cudamapping.wait_closed()
    assert fake.calls.count("cuIpcCloseMemHandle") == 1 and not fake.opened
    with mapped_from(memory_of(arena)):
        assert fake.calls.count("cuIpcOpenMemHandle_v2") == 2


def test_threads_that_map_at_once_share_one_opening(fake, arena):
    life = own_life()
    start, made = threading.Barrier(4), []

    def open_it():
        start.wait()
        made.append(cudamapping.open_cuda_arena(0, SIZE_BYTES, "epoch-1", memory_of(arena), life))

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4 and fake.calls.count("cuIpcOpenMemHandle_v2") == 1
    for mapped in made:
        mapped.close()


def test_another_life_of_the_daemon_is_another_opening(fake, arena, mapped_from):
    """What is open of a dead daemon must not pass for the memory of the next one."""
    with mapped_from(memory_of(arena)) as first, mapped_from(memory_of(arena), epoch="epoch-2") as second:
        assert fake.calls.count("cuIpcOpenMemHandle_v2") == 2
        assert first.address != second.address


def test_a_view_outlives_close_and_the_gpu_is_waited_for_before_it_is_unmapped(fake, arena, mapped_from):
    mapped = mapped_from(memory_of(arena))
    view = mapped.view(1, 4)
    interface = view.__cuda_array_interface__
    assert interface["data"] == (mapped.address + 1, False)
    assert (interface["shape"], interface["typestr"], interface["version"]) == ((4,), "|u1", 3)
    mapped.close()
    assert read(interface["data"][0], 4) == b"irst" and fake.opened
    before = len(fake.calls)
    del view
    cudamapping.wait_closed()
    assert not fake.opened
    closing = fake.calls[before:]
    assert closing.index("cuCtxSynchronize") < closing.index("cuIpcCloseMemHandle")


def test_letting_go_of_an_arena_and_opening_the_next_do_not_wait_for_the_gpu(
    fake, arena, mapped_from, monkeypatch
):
    """As after a restart of the daemon, in the middle of a forward pass."""
    functions = cuda.driver()._functions
    synchronize = functions["cuCtxSynchronize"]
    asked, may_go = threading.Event(), threading.Event()

    def wait_first():
        asked.set()
        assert may_go.wait(PATIENCE_S)
        return synchronize()

    first = mapped_from(memory_of(arena))
    monkeypatch.setitem(functions, "cuCtxSynchronize", wait_first)
    first.close()
    assert asked.wait(PATIENCE_S)
    second = mapped_from(memory_of(arena), epoch="epoch-2")
    assert len(fake.opened) == 2 and read(second.address, 5) == b"first"
    may_go.set()
    cudamapping.wait_closed()
    assert len(fake.opened) == 1
    second.close()


def test_what_is_being_closed_is_not_opened_again_before(arena, mapped_from, monkeypatch):
    """The driver knows a handle once a process."""
    functions = cuda.driver()._functions
    close, open_it = functions["cuIpcCloseMemHandle"], functions["cuIpcOpenMemHandle_v2"]
    order = []
    asked, may_go = threading.Event(), threading.Event()

    def close_late(address):
        asked.set()
        assert may_go.wait(PATIENCE_S)
        order.append("closed")
        return close(address)

    first = mapped_from(memory_of(arena))
    monkeypatch.setitem(functions, "cuIpcCloseMemHandle", close_late)
    monkeypatch.setitem(
        functions,
        "cuIpcOpenMemHandle_v2",
        lambda *arguments: (order.append("opened"), open_it(*arguments))[1],
    )
    first.close()
    assert asked.wait(PATIENCE_S)
    # Long before anybody who does not wait is through.
    wait = cudamapping._wait_closed
    monkeypatch.setattr(cudamapping, "_wait_closed", lambda key: (may_go.set(), wait(key)))
    mapped_from(memory_of(arena)).close()
    may_go.set()
    cudamapping.wait_closed()
    assert order[:2] == ["closed", "opened"]


def test_what_was_let_go_of_this_moment_is_not_opened_again_before_it_is_closed(
    fake, arena, mapped_from, monkeypatch
):
    """Its last reference went in another thread, which has not come so far as to close it."""
    close_later = cudamapping._close_later
    is_gone, may_go = threading.Event(), threading.Event()

    def late(*arguments):
        is_gone.set()
        assert may_go.wait(PATIENCE_S)
        close_later(*arguments)

    class Closed(threading.Event):
        def wait(self, timeout=None):
            may_go.set()
            return super().wait(timeout)

    monkeypatch.setattr(cudamapping, "_close_later", late)
    first = mapped_from(memory_of(arena))
    (key,) = cudamapping._open
    cudamapping._open[key] = Closed()
    thread = threading.Thread(target=first.abandon)
    thread.start()
    assert is_gone.wait(PATIENCE_S)
    with mapped_from(memory_of(arena)) as again:
        assert may_go.is_set() and list(fake.opened) == [again.address]
    thread.join()
    first.close()


def test_what_is_closed_cannot_be_used(arena, mapped_from):
    mapped = mapped_from(memory_of(arena))
    mapped.close()
    with pytest.raises(ValueError, match="mapping of arena 0 is closed"):
        mapped.view(0, 1)
    with pytest.raises(ValueError, match="closed"):
        mapped.copy_in(0, arena.address, 1)
    with pytest.raises(ConnectionLost):
        mapped.check_alive()


def test_the_host_has_no_view_of_it(arena, mapped_from):
    with mapped_from(memory_of(arena)) as mapped, pytest.raises(ValueError, match="lies on cuda:1"):
        _ = mapped.buffer


@pytest.mark.parametrize(("offset", "size_bytes"), [(-1, 1), (0, SIZE_BYTES + 1), (SIZE_BYTES, 1), (0, -1)])
def test_a_view_or_a_copy_that_leaves_the_arena_is_refused(fake, arena, mapped_from, offset, size_bytes):
    with mapped_from(memory_of(arena)) as mapped:
        for use in (mapped.view, lambda at, size: mapped.copy_in(at, arena.address, size)):
            with pytest.raises(ValueError, match="leave an arena"):
                use(offset, size_bytes)
    assert not fake.copied


@pytest.mark.parametrize("name", ["cuCtxSynchronize", "cuIpcCloseMemHandle", "cuDevicePrimaryCtxRelease_v2"])
def test_what_cannot_be_closed_cleanly_is_told_and_the_rest_is_closed(fake, arena, mapped_from, name, capsys):
    mapped = mapped_from(memory_of(arena))
    address = mapped.address
    fake.fails[name] = BROKEN
    mapped.close()
    cudamapping.wait_closed()
    del fake.fails[name]
    assert "not closed cleanly" in capsys.readouterr().out
    assert (not fake.opened) is (name != "cuIpcCloseMemHandle")
    assert (fake.retained == [0, 1]) is (name != "cuDevicePrimaryCtxRelease_v2")
    if fake.opened:
        with cuda.Context(cuda.driver(), arena.gpu).current():
            cuda.driver().call("cuIpcCloseMemHandle", address)
    fake.retained[1] = 1


def test_a_forked_child_cannot_use_it_and_closes_nothing(fake, arena, mapped_from):
    mapped = mapped_from(memory_of(arena))
    num_calls = len(fake.calls)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            mapped.view(0, 1)
        except CudaError:
            status = 2
        mapped.close()
        gc.collect()
        os._exit(0 if status == 2 and not cudamapping._openings and len(fake.calls) == num_calls else status)
    assert os.waitpid(child, 0)[1] == 0
    assert mapped.view(0, 5) is not None
    mapped.close()


# --- the daemon's life


class Stranger:
    """A process that listens on a socket, as a daemon would, and lives until it is told otherwise."""

    def __init__(self, path):
        self.listener = socket.socket(socket.AF_UNIX)
        gate_read, self.gate = os.pipe()
        ready_read, ready = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.listener.bind(str(path))
            self.listener.listen()
            os.close(self.gate)
            os.write(ready, b".")
            os.read(gate_read, 1)
            os._exit(0)
        self.listener.close()
        os.close(gate_read)
        os.read(ready_read, 1)
        os.close(ready_read)
        os.close(ready)

    def end(self):
        os.close(self.gate)
        os.waitpid(self.pid, 0)


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_end_of_the_other_process_is_seen_at_once_with_and_without_a_pidfd(
    tmp_path, monkeypatch, has_pidfd
):
    if not has_pidfd:
        monkeypatch.setattr(daemonlife, "open_pidfd", lambda sock, peer: None)
    before = num_fds()
    stranger = Stranger(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(tmp_path / "s"))
        life = daemonlife.DaemonLife(sock)
    assert not life.is_over
    stranger.end()
    assert life.is_over
    life.close()
    life.close()
    assert life.is_over
    assert num_fds() == before


def test_a_life_that_is_not_looked_at_any_more_holds_no_file_descriptor():
    before = num_fds()
    life = own_life()
    assert num_fds() == before + 1 and not life.is_over
    del life
    assert num_fds() == before


def test_a_life_that_was_closed_is_over_also_when_its_file_descriptor_is_used_again():
    life = own_life()
    life.close()
    pipe = os.pipe()
    os.dup2(pipe[0], life._fd)
    try:
        assert life.is_over
    finally:
        for fd in {*pipe, life._fd}:
            os.close(fd)


def test_an_end_that_one_thread_saw_is_not_taken_back_by_another_that_looked_before(monkeypatch):
    looks, may_answer = threading.Event(), threading.Event()

    def slow(fd):
        looks.set()
        assert may_answer.wait(PATIENCE_S)
        return False

    life = own_life()
    monkeypatch.setattr(daemonlife, "has_exited", slow)
    thread = threading.Thread(target=lambda: life.is_over)
    thread.start()
    assert looks.wait(PATIENCE_S)
    monkeypatch.setattr(daemonlife, "has_exited", lambda fd: True)
    assert life.is_over
    may_answer.set()
    thread.join()
    monkeypatch.setattr(daemonlife, "has_exited", lambda fd: False)
    assert life.is_over
    life.close()


@pytest.fixture
def often(monkeypatch):
    """What is closed is seen soon."""
    monkeypatch.setattr(lifewatch, "_LOOK_MS", 10)


def watching():
    return [thread for thread in threading.enumerate() if thread.name == "snapd-lives"]


def wait_until(condition):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


class Theirs:
    """Something of another process."""

    def __init__(self, life):
        self.life = life
        self.is_abandoned = threading.Event()

    def abandon(self):
        self.is_abandoned.set()


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_what_is_a_daemons_is_let_go_of_when_it_ends_and_nobody_looks(tmp_path, monkeypatch, has_pidfd):
    if not has_pidfd:
        monkeypatch.setattr(daemonlife, "open_pidfd", lambda sock, peer: None)
    watch = lifewatch.LifeWatch()
    strangers = [Stranger(tmp_path / name) for name in "ab"]
    theirs = []
    for name in "ab":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(tmp_path / name))
            theirs.append(Theirs(daemonlife.DaemonLife(sock)))
            watch.add(theirs[-1])
    strangers[1].end()
    assert theirs[1].is_abandoned.wait(PATIENCE_S)
    assert not theirs[0].is_abandoned.is_set()
    strangers[0].end()
    assert theirs[0].is_abandoned.wait(PATIENCE_S)
    wait_until(lambda: watch._thread is None)
    for each in theirs:
        each.life.close()


def test_an_arena_without_views_is_unmapped_when_its_daemon_ends(fake, arena, daemon, mapped_from, no_pidfd):
    mapped = mapped_from(memory_of(arena))
    assert fake.opened
    daemon.peers.pop().close()
    wait_until(lambda: not fake.opened)
    assert mapped.is_abandoned
    for use in (lambda: mapped.view(0, 1), mapped.hold, lambda: mapped.copy_in(0, arena.address, 1)):
        with pytest.raises(ConnectionLost, match="the daemon is gone"):
            use()
    mapped.close()
    with pytest.raises(ValueError, match="is closed"):
        mapped.hold()


def test_what_has_views_is_unmapped_after_the_last_of_them(fake, arena, daemon, mapped_from, no_pidfd):
    mapped = mapped_from(memory_of(arena))
    view = mapped.view(0, 5)
    daemon.peers.pop().close()
    wait_until(lambda: mapped._opening is None)
    cudamapping.wait_closed()
    assert fake.opened and view.__cuda_array_interface__["data"][0] == mapped.address
    del view
    wait_until(lambda: not fake.opened)
    mapped.close()


def test_nothing_is_kept_by_the_thread_that_waits_for_its_daemon(fake, arena, mapped_from, often):
    mapped = mapped_from(memory_of(arena))
    assert watching()
    del mapped
    gc.collect()
    cudamapping.wait_closed()
    assert not fake.opened
    wait_until(lambda: not watching())
    again = mapped_from(memory_of(arena))
    assert watching()
    again.close()
    wait_until(lambda: not watching())


def test_a_thread_that_was_interrupted_before_it_began_is_replaced(tmp_path, monkeypatch):
    def start(thread):
        raise KeyboardInterrupt

    watch = lifewatch.LifeWatch()
    stranger = Stranger(tmp_path / "a")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(tmp_path / "a"))
        theirs = Theirs(daemonlife.DaemonLife(sock))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", start)
        watch.add(theirs)
    watch.add(theirs)
    stranger.end()
    assert theirs.is_abandoned.wait(PATIENCE_S)
    theirs.life.close()


def test_an_arena_can_be_used_where_there_is_no_thread_to_wait_in(arena, mapped_from, monkeypatch, often):
    wait_until(lambda: not watching())

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        watch = lifewatch.LifeWatch()
        watch.add(Theirs(own_life()))
        assert watch._thread is None
    with mapped_from(memory_of(arena)) as mapped:
        assert mapped.hold() and watching()


def grant(base=0):
    return RankGrant(
        rank=0,
        snapshot_buf_base_ptr=base,
        k_layer_offsets=(4096,),
        v_layer_offsets=(8192,),
        stride_k_bytes=(16,),
        stride_v_bytes=(8,),
        extents=(Extent(4096, 8192),),
    )


class MappingClient:
    """Hands over arenas, as the daemon would."""

    def __init__(self, daemon, arena):
        self.daemon = daemon
        self.arena = arena
        self.epoch = "epoch-1"
        self.mapped = []

    def map_buffer(self, rank, writable=False, device=None):
        script = handing_over(self.daemon, memory_of(self.arena), epoch=self.epoch)
        with self.daemon.playing(script):
            self.mapped.append(map_arena(self.daemon.path, rank, writable, PATIENCE_S, device=device))
        return self.mapped[-1]


def as_tensor(view, device):
    """What torch does on a GPU, with the fake's memory."""
    interface = view.__cuda_array_interface__
    assert device == "cuda:1"
    memory = (ctypes.c_uint8 * interface["shape"][0]).from_address(interface["data"][0])
    memory.view = view
    return torch.frombuffer(memory, dtype=torch.uint8)


def test_planes_on_a_gpu_share_the_arenas_memory_and_keep_it(daemon, fake, arena, monkeypatch):
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    client = MappingClient(daemon, arena)
    slabs = Slabs(client, writable=True)
    planes = slabs.planes(grant(), 10, "epoch-1")
    assert [plane.numel() for plane in planes] == [160, 80]
    planes[0][:] = 7
    assert read(arena.address + 4095, 162) == b"\0" + b"\7" * 160 + b"\0"
    slabs.planes(grant(), 10, "epoch-1")
    assert len(client.mapped) == 1
    slabs.check_alive()
    slabs.close()
    client.mapped.clear()
    assert fake.opened
    del planes
    cudamapping.wait_closed()
    assert not fake.opened


def test_planes_that_torch_would_copy_are_refused(daemon, arena, monkeypatch):
    monkeypatch.setattr(torch, "as_tensor", lambda view, device: as_tensor(view, device).clone())
    slabs = Slabs(MappingClient(daemon, arena), writable=True)
    with pytest.raises(Exception, match="torch copied a plane"):
        slabs.planes(grant(), 10, "epoch-1")
    slabs.close()


def test_when_the_daemon_is_gone_nothing_of_it_is_touched_again(daemon, arena, monkeypatch, no_pidfd):
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    client = MappingClient(daemon, arena)
    slabs = Slabs(client, writable=True)
    planes = slabs.planes(grant(), 10, "epoch-1")
    assert planes
    writer = ShmWriter(client.mapped[0])
    daemon.peers.pop().close()
    with pytest.raises(ConnectionLost, match="the daemon is gone, and arena 0 on cuda:1 with it"):
        slabs.check_alive()
    with pytest.raises(TransportError, match="the daemon is gone"):
        writer.submit([Write(arena.address, 0, 1)])
    client.epoch = "epoch-2"
    with pytest.raises(StaleHandle):
        slabs.planes(grant(), 10, "epoch-1")
    del planes
    slabs.close()


def test_a_dead_daemons_arena_is_mapped_anew_in_the_same_epoch(daemon, arena, monkeypatch, no_pidfd):
    """The connection alone was lost, as it can be where there is no pidfd."""
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    client = MappingClient(daemon, arena)
    slabs = Slabs(client, writable=True)
    slabs.planes(grant(), 10, "epoch-1")
    daemon.peers.pop().close()
    slabs.planes(grant(), 10, "epoch-1")
    assert len(client.mapped) == 2
    slabs.check_alive()
    slabs.close()


# --- writing over shm


def test_a_local_writer_copies_on_the_gpu_and_waits_for_it(fake, arena, mapped_from):
    writer = ShmWriter(mapped_from(memory_of(arena), writable=True), base_ptr=1000)
    source = (ctypes.c_char * 6).from_buffer(bytearray(b"abcdef"))
    at = ctypes.addressof(source)
    ticket = writer.submit([Write(at, 1000, 3), Write(at + 3, 1000 + SIZE_BYTES - 3, 3)])
    progress = writer.poll(ticket)
    assert (progress.state, progress.is_drained) == (TicketState.DONE, True)
    assert read(arena.address, 5) == b"abcst" and read(arena.address + SIZE_BYTES - 3, 3) == b"def"
    assert fake.calls.count("cuStreamSynchronize") == 2
    with pytest.raises(TransportError, match="outside"):
        writer.submit([Write(at, 1000 + SIZE_BYTES, 1)])
    writer.close()


def test_a_copy_that_fails_is_a_transport_error(fake, arena, mapped_from):
    writer = ShmWriter(mapped_from(memory_of(arena), writable=True))
    fake.fails["cuMemcpy"] = BROKEN
    with pytest.raises(TransportError, match="a copy failed: cuMemcpy: CUDA_ERROR_UNKNOWN"):
        writer.submit([Write(arena.address, 0, 3)])
    writer.close()

"""Arenas on real GPUs: a daemon, clients that use torch, and what is left when one of them dies."""

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "integration"))

from daemon_process import DaemonProcess, clean_environment

from snapd import cuda
from snapd.client import Client
from snapd.core.slab import Extent
from snapd.cuda import CudaError
from snapd.cudaarena import CudaArena
from snapd.errors import ConnectionLost
from snapd.kv.slabs import Slabs
from snapd.mapping import map_arena
from snapd.transport.base import Write
from snapd.transport.shm import ShmWriter
from snapd.wire import RankGrant

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="torch sees no GPU on this machine")
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="this machine has not two GPUs")

MIB = 1 << 20
SIZE_BYTES = 512 * MIB
# What the driver keeps for itself may change by this much from one process to the next.
SLACK_BYTES = 64 * MIB
# A context takes some hundreds of MiB of a GPU; a daemon that takes more than this has a fault.
DAEMON_BYTES_MAX = 1536 * MIB
PATIENCE_S = 30.0
HAS_MOONCAKE = importlib.util.find_spec("mooncake") is not None


@pytest.fixture
def start():
    """A function that starts a daemon: its arenas' devices, and settings."""
    started = []
    with tempfile.TemporaryDirectory(prefix="snapd-") as name:

        def start_daemon(*devices, size_bytes=SIZE_BYTES, **settings):
            directory = Path(name) / str(len(started))
            directory.mkdir()
            if len(set(devices)) == 1:
                settings |= {"device": devices[0], "ranks": len(devices), "size": size_bytes}
            else:
                # ``size`` from a higher level would set every listed arena.
                config = "".join(
                    f'[[arena]]\nrank = {rank}\ndevice = "{device}"\nsize_bytes = {size_bytes}\n'
                    for rank, device in enumerate(devices)
                )
                settings |= {"_config": config}
            started.append(GpuDaemon(directory, settings))
            return started[-1]

        yield start_daemon
        for daemon in started:
            daemon.stop()
            assert "Traceback" not in daemon.stderr, daemon.stderr


class GpuDaemon(DaemonProcess):
    """A daemon whose arenas may be listed in its file."""

    def _start(self):
        config = self.overrides.pop("_config", "")
        if config:
            self.overrides.pop("size", None)
            self.config_path.write_text(config)
        return super()._start()


def run_client(script, check=True, **environment):
    """Run *script* in a process of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


def tensor_of(mapped, offset_bytes=0, size_bytes=None):
    size_bytes = mapped.size_bytes - offset_bytes if size_bytes is None else size_bytes
    return torch.as_tensor(mapped.view(offset_bytes, size_bytes), device=mapped.device)


def free_bytes(gpu=0):
    torch.cuda.synchronize(gpu)
    return torch.cuda.mem_get_info(gpu)[0]


def wait_until(condition, what):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


@pytest.fixture
def free_at_first():
    """Free memory of GPU 0 with this process's own context there; afterwards as much must be free again."""
    torch.zeros(1, device="cuda:0")
    torch.cuda.empty_cache()
    free_at_start = free_bytes()
    yield free_at_start
    gc.collect()
    torch.cuda.empty_cache()
    wait_until(
        lambda: free_bytes() > free_at_start - SLACK_BYTES, f"{free_at_start - free_bytes()} bytes are lost"
    )


# --- what is shared


def test_the_driver_and_torch_count_alike():
    gpus = cuda.driver().gpus
    assert [gpu.index for gpu in gpus] == list(range(NUM_GPUS))
    for gpu in gpus:
        properties = torch.cuda.get_device_properties(gpu.index)
        assert gpu.name == properties.name
        assert gpu.uuid == f"GPU-{properties.uuid}"


def test_one_client_writes_with_torch_and_another_reads(free_at_first, start):
    daemon = start("cuda:0")
    with Client(str(daemon.socket_path)) as client, client.map_buffer(0, writable=True) as mapped:
        assert mapped.size_bytes == SIZE_BYTES and mapped.device == "cuda:0"
        whole = tensor_of(mapped)
        assert whole.device == torch.device("cuda:0") and whole.data_ptr() == mapped.address
        assert int(whole.count_nonzero()) == 0
        words = whole.view(torch.int64)
        words.copy_(torch.arange(words.numel(), device="cuda:0"))
        torch.cuda.synchronize()
        said = run_client(
            f"""
            import torch
            from snapd.mapping import map_arena
            with map_arena({str(daemon.socket_path)!r}, 0, timeout_s=30) as mapped:
                words = torch.as_tensor(mapped.view(0, mapped.size_bytes), device=mapped.device)
                words = words.view(torch.int64)
                print(torch.equal(words, torch.arange(words.numel(), device="cuda")))
                words[5] = -1
                torch.cuda.synchronize()
            """
        )
        assert said == "True\n"
        assert int(words[5]) == -1
        del whole, words


def test_what_a_former_process_wrote_is_not_to_be_read(free_at_first, start):
    for _ in range(2):
        daemon = start("cuda:0")
        with map_arena(str(daemon.socket_path), 0, timeout_s=PATIENCE_S) as mapped:
            whole = tensor_of(mapped)
            assert int(whole.count_nonzero()) == 0
            whole.fill_(0xAA)
            torch.cuda.synchronize()
            del whole
        daemon.stop()


def test_ranks_on_one_gpu_have_memory_of_their_own(free_at_first, start):
    daemon = start("cuda:0", "cuda:0")
    path = str(daemon.socket_path)
    with (
        map_arena(path, 0, timeout_s=PATIENCE_S) as first,
        map_arena(path, 1, timeout_s=PATIENCE_S) as second,
    ):
        tensor_of(first).fill_(1)
        tensor_of(second).fill_(2)
        assert int(tensor_of(first).min()) == int(tensor_of(first).max()) == 1
        assert int(tensor_of(second).min()) == int(tensor_of(second).max()) == 2


def test_planes_of_a_grant_are_tensors_on_the_gpu_that_keep_the_mapping(free_at_first, start):
    daemon = start("cuda:0")
    grant = RankGrant(
        rank=0,
        snapshot_buf_base_ptr=0,
        k_layer_offsets=(4096,),
        v_layer_offsets=(SIZE_BYTES - 4096,),
        stride_k_bytes=(64,),
        stride_v_bytes=(128,),
        extents=(Extent(4096, 4096), Extent(SIZE_BYTES - 4096, 4096)),
    )
    with Client(str(daemon.socket_path)) as client:
        epoch = client.connect().epoch
        slabs = Slabs(client, writable=True)
        k, v = slabs.planes(grant, 32, epoch)
        assert (k.numel(), v.numel(), k.device.type) == (32 * 64, 32 * 128, "cuda")
        k.fill_(3)
        v.fill_(4)
        slabs.close()
        assert int(k.sum()) == 3 * k.numel()
        with client.map_buffer(0) as mapped:
            whole = tensor_of(mapped)
            assert int(whole.count_nonzero()) == k.numel() + v.numel()
            assert int(whole[4096 : 4096 + k.numel()].min()) == 3
            del whole
    del k, v


def test_a_mapping_for_reading_is_the_same_as_one_for_writing(start):
    """CUDA IPC knows no other; checksums are what protects the bytes."""
    daemon = start("cuda:0")
    with map_arena(str(daemon.socket_path), 0, writable=False, timeout_s=PATIENCE_S) as mapped:
        assert mapped.writable
        tensor_of(mapped, 0, 16).fill_(9)
        assert tensor_of(mapped, 0, 17).tolist() == [9] * 16 + [0]


def test_a_handle_is_opened_once_a_process_and_closed_after_the_last_use(free_at_first, start):
    daemon = start("cuda:0")
    path = str(daemon.socket_path)
    first, second = map_arena(path, 0, timeout_s=PATIENCE_S), map_arena(path, 0, timeout_s=PATIENCE_S)
    assert first.address == second.address
    first.close()
    plane = tensor_of(second, 100, 100)
    second.close()
    plane.fill_(1)
    assert int(plane.sum()) == 100
    del plane
    gc.collect()
    with map_arena(path, 0, timeout_s=PATIENCE_S) as again:
        assert int(tensor_of(again).count_nonzero()) == 100


def test_a_local_writer_copies_from_the_host_and_from_the_gpu(start):
    daemon = start("cuda:0")
    mapped = map_arena(str(daemon.socket_path), 0, writable=True, timeout_s=PATIENCE_S)
    writer = ShmWriter(mapped)
    on_host = torch.full((1000,), 5, dtype=torch.uint8)
    on_gpu = torch.full((64 * MIB,), 6, dtype=torch.uint8, device="cuda:0")
    writes = [Write(on_host.data_ptr(), 0, 1000), Write(on_gpu.data_ptr(), SIZE_BYTES - 64 * MIB, 64 * MIB)]
    ticket = writer.submit(writes)
    assert writer.poll(ticket).is_drained
    whole = tensor_of(mapped)
    assert int(whole[:1000].min()) == 5 and int(whole[-64 * MIB :].min()) == 6
    assert int(whole.count_nonzero()) == 1000 + 64 * MIB
    del whole
    writer.close()


def test_work_that_was_launched_is_done_before_the_memory_is_unmapped(start):
    daemon = start("cuda:0")
    mapped = map_arena(str(daemon.socket_path), 0, timeout_s=PATIENCE_S)
    out = torch.empty(mapped.size_bytes, dtype=torch.uint8, device="cuda:0")
    stream = torch.cuda.Stream()
    whole = tensor_of(mapped).fill_(7)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(200):
            out.copy_(whole)
    del whole
    mapped.close()
    stream.synchronize()
    assert int(out.min()) == 7


# --- what is refused


def test_the_process_that_has_the_memory_cannot_open_its_own_handle():
    with CudaArena(0, "cuda:0", 2 * MIB) as arena:
        context = cuda.Context(cuda.driver(), arena.gpu)
        with pytest.raises(CudaError) as caught:
            context.open_ipc(arena.ipc_handle())
        print(f"own handle: {caught.value}")
        context.release()


def test_a_forked_child_is_told_that_it_cannot_use_cuda(start):
    daemon = start("cuda:0")
    with map_arena(str(daemon.socket_path), 0, timeout_s=PATIENCE_S) as mapped:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                mapped.view(0, 1)
            except CudaError as error:
                status = 0 if "spawn" in str(error) else 2
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        tensor_of(mapped, 0, 16).fill_(1)
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ("--device", "cuda:99", "--size", "1MiB"),
            "arena 0: device cuda:99 cannot be had: the GPUs of this",
        ),
        (("--device", "cuda:0", "--size", "9TiB"), "arena 0: 9 TiB of memory on cuda:0"),
    ],
)
def test_what_the_machine_has_not_got_ends_the_daemon_with_one_clear_line(tmp_path, settings, words):
    command = [sys.executable, "-m", "snapd.cli.main", "serve", *settings]
    command += ["--socket", str(tmp_path / "s"), "--log", str(tmp_path / "log")]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]


# --- who dies


def test_a_client_that_is_killed_leaves_nothing_and_the_daemon_goes_on(free_at_first, start):
    daemon = start("cuda:0")
    with_daemon = free_bytes()
    script = f"""
        import sys
        import torch
        from snapd.mapping import map_arena
        mapped = map_arena({str(daemon.socket_path)!r}, 0, writable=True, timeout_s=30)
        whole = torch.as_tensor(mapped.view(0, mapped.size_bytes), device=mapped.device).fill_(1)
        torch.cuda.synchronize()
        print("written", flush=True)
        while True:
            whole.add_(2)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, env=clean_environment()
    ) as process:
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: free_bytes() > with_daemon - SLACK_BYTES, "the client left something behind")
    assert daemon.process.poll() is None
    with map_arena(str(daemon.socket_path), 0, timeout_s=PATIENCE_S) as mapped:
        whole = tensor_of(mapped)
        assert int(whole.min()) % 2 == 1
        # Nothing of the dead process writes any more.
        whole.fill_(4)
        assert int(whole.min()) == int(whole.max()) == 4
        del whole


def test_a_daemon_that_is_killed_is_noticed_before_its_memory_is_read(free_at_first, start):
    daemon = start("cuda:0", size_bytes=4 * SIZE_BYTES)
    mapped = map_arena(str(daemon.socket_path), 0, timeout_s=PATIENCE_S)
    tensor_of(mapped).fill_(1)
    torch.cuda.synchronize()
    mapped.check_alive()
    before = free_bytes()
    daemon.kill()
    with pytest.raises(ConnectionLost, match="the daemon is gone"):
        mapped.check_alive()
    # It would stay taken as long as somebody has it open. Its context is free in any case.
    wait_until(lambda: free_bytes() > before + 4 * SIZE_BYTES, "the arena's memory is not free")
    mapped.close()
    gc.collect()
    torch.zeros(1000, device="cuda:0").add_(1)
    torch.cuda.synchronize()


def test_an_arena_of_the_next_daemon_is_another(free_at_first, start):
    daemon = start("cuda:0")
    mapped = map_arena(str(daemon.socket_path), 0, timeout_s=PATIENCE_S)
    tensor_of(mapped).fill_(1)
    daemon.kill()
    daemon.restart()
    assert mapped.is_abandoned
    with map_arena(str(daemon.socket_path), 0, timeout_s=PATIENCE_S) as again:
        assert not again.is_abandoned
        assert int(tensor_of(again).count_nonzero()) == 0
    mapped.close()


def test_what_a_daemon_costs_beyond_its_arena(free_at_first, start):
    daemon = start("cuda:0")
    cost_bytes = free_at_first - free_bytes() - SIZE_BYTES
    print(f"daemon_gpu_bytes: {cost_bytes} ({cost_bytes / MIB:.0f} MiB beyond its arena)")
    assert -SLACK_BYTES < cost_bytes < DAEMON_BYTES_MAX
    daemon.stop()


# --- two GPUs


@two_gpus
def test_every_rank_may_have_a_gpu_of_its_own(start):
    daemon = start("cuda:0", "cuda:1", "cpu")
    path = str(daemon.socket_path)
    with Client(path) as client:
        assert [arena.device for arena in client.connect().arenas] == ["cuda:0", "cuda:1", "cpu"]
    with (
        map_arena(path, 0, timeout_s=PATIENCE_S) as first,
        map_arena(path, 1, timeout_s=PATIENCE_S) as second,
    ):
        assert (first.device, second.device) == ("cuda:0", "cuda:1")
        ones = tensor_of(first).fill_(1)
        tensor_of(second).copy_(ones)
        torch.cuda.synchronize(1)
        assert int(tensor_of(second).min()) == 1
        del ones
    with map_arena(path, 2, timeout_s=PATIENCE_S) as on_host:
        assert on_host.buffer[0] == 0


@two_gpus
def test_a_client_that_counts_otherwise_finds_its_gpu_by_uuid(start):
    daemon = start("cuda:0", "cuda:1")
    with map_arena(str(daemon.socket_path), 1, timeout_s=PATIENCE_S) as mapped:
        said = run_client(
            f"""
            import torch
            from snapd.mapping import MapFailed, map_arena
            with map_arena({str(daemon.socket_path)!r}, 1, timeout_s=30) as mapped:
                print(mapped.device)
                torch.as_tensor(mapped.view(0, 100), device=mapped.device).fill_(8)
                torch.cuda.synchronize()
            try:
                map_arena({str(daemon.socket_path)!r}, 0, timeout_s=30)
            except MapFailed as error:
                print(error)
            """,
            CUDA_VISIBLE_DEVICES="1",
        )
        device, error = said.splitlines()
        assert device == "cuda:0"
        assert error.startswith(f"arena 0 lies on {cuda.driver().gpus[0].uuid} (cuda:0 of the daemon)")
        assert "CUDA_VISIBLE_DEVICES" in error
        assert int(tensor_of(mapped).count_nonzero()) == 100


@two_gpus
def test_a_writer_on_another_gpu_writes_into_the_arena(start):
    daemon = start("cuda:0")
    mapped = map_arena(str(daemon.socket_path), 0, writable=True, timeout_s=PATIENCE_S)
    writer = ShmWriter(mapped)
    source = torch.full((64 * MIB,), 3, dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize(1)
    writer.poll(writer.submit([Write(source.data_ptr(), 4096, source.numel())]))
    assert int(tensor_of(mapped).count_nonzero()) == source.numel()
    writer.close()


@pytest.mark.skipif(not HAS_MOONCAKE, reason="Mooncake is not installed")
@pytest.mark.parametrize("protocol", ["nvlink_intra", "tcp"])
def test_mooncake_registers_every_gpus_arena(start, protocol):
    """In pieces over TCP, whole over NVLink; the GPU of each is current while it is registered."""
    devices = [f"cuda:{index}" for index in range(min(NUM_GPUS, 2))]
    daemon = start(
        *devices,
        transport="mooncake",
        register_piece_bytes=SIZE_BYTES // 2,
        **{"mooncake.protocol": protocol},
    )
    with Client(str(daemon.socket_path)) as client:
        pieces = len(devices) * (1 if protocol == "nvlink_intra" else 2)
        assert client.stats().mooncake.registered_pieces == pieces
        assert all(arena.base_ptr != 0 for arena in client.connect().arenas)
        with client.map_buffer(0) as mapped:
            assert int(tensor_of(mapped).count_nonzero()) == 0


def test_a_process_that_sees_no_gpu_is_told_so(start):
    daemon = start("cuda:0")
    said = run_client(
        f"""
        from snapd.mapping import MapFailed, map_arena
        try:
            map_arena({str(daemon.socket_path)!r}, 0, timeout_s=30)
        except MapFailed as error:
            print(error)
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert "CUDA_VISIBLE_DEVICES" in said

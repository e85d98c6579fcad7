"""A daemon process with arenas on GPUs, over a driver that is not there: hello, mappings, and deaths."""

import ctypes
import gc
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from daemon_process import DaemonProcess, clean_environment

sys.path.append(str(Path(__file__).parents[1]))

from cuda_fake import MIB, FakeDriver, install

from snapd import cuda
from snapd.client import Client
from snapd.errors import ConnectionLost
from snapd.mapping import map_arena

TESTS = Path(__file__).parents[1]
PATIENCE_S = 20.0


class FakeGpuDaemon(DaemonProcess):
    """``snapd serve`` on a machine that has two GPUs, as it were."""

    PROGRAM = (str(TESTS / "cuda_fake.py"),)


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="snapd-") as name:
        yield Path(name)


@pytest.fixture
def daemon(directory):
    started = FakeGpuDaemon(directory, {"device": "cuda:1", "ranks": 2, "size": "3MiB"})
    yield started
    started.stop()
    assert "Traceback" not in started.stderr, started.stderr


@pytest.fixture
def fake(monkeypatch):
    """This process's own driver."""
    monkeypatch.setattr(cuda, "load_library", None)
    monkeypatch.setattr(cuda, "_driver", None)
    driver = install(FakeDriver())
    yield driver
    gc.collect()
    driver.check_clean()


def read(address, size_bytes):
    return ctypes.string_at(address, size_bytes)


def test_every_rank_has_an_arena_on_its_gpu_of_whole_blocks(daemon):
    with Client(str(daemon.socket_path)) as client:
        arenas = client.connect().arenas
        assert [(arena.rank, arena.device, arena.size_bytes, arena.base_ptr) for arena in arenas] == [
            (0, "cuda:1", 4 * MIB, 0),
            (1, "cuda:1", 4 * MIB, 0),
        ]
        assert client.stats().core.arenas[0].capacity_bytes == 4 * MIB
    started = json.loads(daemon.log_path.read_text().splitlines()[0])
    assert [(arena["device"], arena["size_bytes"]) for arena in started["arenas"]] == [
        ("cuda:1", 4 * MIB),
        ("cuda:1", 4 * MIB),
    ]


def test_what_one_client_writes_another_reads_in_the_same_rank_only(daemon, fake):
    path = str(daemon.socket_path)
    with Client(path) as client, client.map_buffer(0, writable=True) as mapped:
        assert read(mapped.address, mapped.size_bytes) == bytes(4 * MIB)
        mapped.copy_in(100, ctypes.addressof(ctypes.create_string_buffer(b"here")), 4)
        script = f"""if True:
            import ctypes, sys
            sys.path.insert(0, {str(TESTS)!r})
            import cuda_fake
            fake = cuda_fake.install()
            from snapd.mapping import map_arena
            for rank in (0, 1):
                with map_arena({path!r}, rank) as mapped:
                    print(ctypes.string_at(mapped.address + 100, 4))
            fake.check_clean()
        """
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert (done.stderr, done.stdout) == ("", "b'here'\nb'\\x00\\x00\\x00\\x00'\n")


def test_the_asynchronous_client_maps_it_too(daemon, fake):
    import asyncio

    from snapd.client import AsyncClient

    async def map_it():
        async with AsyncClient(str(daemon.socket_path)) as client:
            return await client.map_buffer(1)

    with asyncio.run(map_it()) as mapped:
        assert (mapped.rank, mapped.device) == (1, "cuda:1")


def test_a_mapping_needs_no_connection_afterwards(daemon, fake):
    """With a pidfd, or an older way to one, the daemon's connections are free for others."""
    with Client(str(daemon.socket_path)) as client, client.map_buffer(0) as mapped:
        mapped.check_alive()
        assert client.stats().connections == 1


def test_a_daemon_that_is_killed_is_noticed_before_its_memory_is_used(daemon, fake):
    with map_arena(str(daemon.socket_path), 0, timeout_s=PATIENCE_S) as mapped:
        mapped.check_alive()
        daemon.kill()
        assert mapped.is_abandoned
        with pytest.raises(ConnectionLost, match="the daemon is gone, and arena 0 on cuda:1 with it"):
            mapped.check_alive()


def test_a_daemon_that_ends_orderly_is_noticed_too_also_when_another_takes_its_place(daemon, fake):
    with map_arena(str(daemon.socket_path), 0, timeout_s=PATIENCE_S) as mapped:
        view = mapped.view(0, 1)  # Else it would be unmapped by now.
        daemon.restart()
        assert mapped.is_abandoned
        with map_arena(str(daemon.socket_path), 0, timeout_s=PATIENCE_S) as again:
            assert again.epoch != mapped.epoch and not again.is_abandoned
            assert again.address != mapped.address
        del view


def test_a_client_that_is_killed_leaves_the_daemon_as_it_was(daemon, fake):
    script = f"""if True:
        import sys, time
        sys.path.insert(0, {str(TESTS)!r})
        import cuda_fake
        cuda_fake.install()
        from snapd.mapping import map_arena
        mapped = map_arena({str(daemon.socket_path)!r}, 0, writable=True)
        print("mapped", flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"mapped\n"
        before = num_fds_of(daemon)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with Client(str(daemon.socket_path)) as client:
        assert client.stats().connections == 1
        assert num_fds_of(daemon) <= before + 1
        client.map_buffer(0).close()


def num_fds_of(daemon):
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
def test_without_a_driver_the_daemon_ends_with_one_clear_line(directory):
    command = [sys.executable, "-m", "snapd.cli.main", "serve", "--device", "cuda:0", "--size", "1MiB"]
    command += ["--socket", str(directory / "s"), "--log", str(directory / "log")]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    *others, line = done.stderr.splitlines()
    assert line == (
        "snapd: arena 0: device cuda:0 cannot be had: no NVIDIA driver in this process: libcuda.so.1 cannot "
        "be loaded; use device = cpu or start the container with the GPU"
    )
    assert [json.loads(other)["event"] for other in others] == ["starting"]
    assert not (directory / "s").exists()


def test_more_than_the_gpu_has_ends_the_daemon_with_free_and_wanted(directory):
    command = [sys.executable, str(TESTS / "cuda_fake.py"), "serve", "--device", "cuda:0", "--size", "700MiB"]
    command += ["--socket", str(directory / "s"), "--log", str(directory / "log"), "--ranks", "2"]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "snapd: arena 1: 700 MiB of memory on cuda:0 (Fake GPU 0) are wanted, and 324 MiB of 1 GiB are free"
    )

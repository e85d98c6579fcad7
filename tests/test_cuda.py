"""The driver by ctypes and arenas on a GPU, over a driver that is not there: codes, messages, no leaks."""

import ctypes
import os
import threading

import pytest
from cuda_fake import BROKEN, GIB, MIB, FakeDriver, install

from snapd import cuda
from snapd.cuda import CudaError
from snapd.cudaarena import CudaArena
from snapd.errors import StartupError

UUID_0 = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
UUID_1 = "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"


@pytest.fixture
def fake(monkeypatch):
    """A machine with two GPUs of 1 GiB; at the end nothing may be left on them."""
    monkeypatch.setattr(cuda, "load_library", None)
    monkeypatch.setattr(cuda, "_driver", None)
    driver = install()
    yield driver
    driver.check_clean()


def read(address, size_bytes):
    return ctypes.string_at(address, size_bytes)


# --- the driver


def test_the_gpus_are_told_with_index_name_and_uuid(fake):
    first, second = cuda.driver().gpus
    assert (first.index, first.device, first.name, first.uuid) == (0, "cuda:0", "Fake GPU 0", UUID_0)
    assert (second.index, second.device, second.name, second.uuid) == (1, "cuda:1", "Fake GPU 1", UUID_1)


def test_the_driver_is_started_once_a_process(fake):
    assert cuda.driver() is cuda.driver()
    assert fake.calls.count("cuInit") == 1


def test_without_a_driver_the_error_says_so_and_the_next_call_looks_again(fake):
    load = cuda.load_library

    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")

    cuda.load_library = missing
    with pytest.raises(
        CudaError, match=r"^no NVIDIA driver in this process: libcuda\.so\.1 cannot be loaded$"
    ):
        cuda.driver()
    cuda.load_library = load
    assert len(cuda.driver().gpus) == 2


def test_the_real_library_is_the_drivers():
    """On a machine without the driver it cannot be loaded; on one with it, it has all the functions."""
    try:
        library = cuda.load_library()
    except OSError as error:
        assert "libcuda.so.1" in str(error)
    else:
        assert all(hasattr(library, name) for name in cuda.SIGNATURES)


def test_a_driver_that_lacks_a_function_is_too_old(fake):
    del fake.cuDeviceGetUuid_v2
    with pytest.raises(CudaError, match="too old: it has no cuDeviceGetUuid_v2"):
        cuda.driver()


def test_an_error_names_function_code_and_what_the_driver_says(fake):
    fake.fails["cuDeviceGetCount"] = 700
    with pytest.raises(CudaError) as caught:
        cuda.driver()
    assert caught.value.code == 700
    assert str(caught.value) == (
        "cuDeviceGetCount: CUDA_ERROR_ILLEGAL_ADDRESS 700: an illegal memory access was encountered"
    )


def test_a_code_that_the_driver_does_not_know_is_told_as_a_number(fake):
    fake.fails["cuDeviceGetCount"] = 12345
    with pytest.raises(CudaError, match=r"^cuDeviceGetCount: error 12345: unknown$"):
        cuda.driver()


def test_no_gpu_is_an_error_that_says_where_to_look(fake):
    cuda.load_library = lambda: FakeDriver(uuids=())
    with pytest.raises(CudaError, match=r"no CUDA-capable device is detected \(.*CUDA_VISIBLE_DEVICES"):
        cuda.driver()


@pytest.mark.parametrize("name", sorted(set(cuda.SIGNATURES) - {"cuGetErrorName", "cuGetErrorString"}))
def test_every_return_code_is_looked_at(monkeypatch, name):
    """Also what was taken before a failure is given back, as far as the driver lets it."""
    monkeypatch.setattr(cuda, "load_library", None)
    monkeypatch.setattr(cuda, "_driver", None)
    fake = install(FakeDriver(opens_own=True, fails={name: 700}))
    with pytest.raises(CudaError, match=f"^{name}: CUDA_ERROR_ILLEGAL_ADDRESS"):
        everything()
    assert (not fake.errors and not fake.stack) or name == "cuCtxPopCurrent_v2"
    if name not in ("cuMemFree_v2", "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"):
        assert not fake.allocated
    if name not in ("cuIpcCloseMemHandle", "cuCtxPopCurrent_v2"):
        assert not fake.opened


def everything():
    driver = cuda.driver()
    context = cuda.Context(driver, driver.gpus[1])
    context.memory_bytes()
    driver.can_access_peer(driver.gpus[0], driver.gpus[1])
    address = context.allocate(MIB)
    try:
        opened, size_bytes = context.open_ipc(context.export_ipc(address))
        assert size_bytes == MIB
        try:
            context.copy(opened, opened + 64, 64)
        finally:
            context.close_ipc(opened)
    finally:
        context.free(address)
        context.release()


@pytest.mark.parametrize("has_peers", [True, False])
def test_a_gpu_reaches_the_memory_of_others_where_the_driver_says_so(fake, has_peers):
    fake.has_peers = has_peers
    driver = cuda.driver()
    first, second = driver.gpus
    assert driver.can_access_peer(first, second) is has_peers
    assert driver.can_access_peer(second, first) is has_peers


def test_a_gpu_that_another_process_has_for_itself_is_told_with_what_helps(fake):
    fake.fails["cuDevicePrimaryCtxRetain"] = cuda.DEVICE_UNAVAILABLE
    with pytest.raises(CudaError, match=r"CUDA_ERROR_DEVICE_UNAVAILABLE 46: .*nvidia-smi -c DEFAULT"):
        cuda.Context(cuda.driver(), cuda.driver().gpus[0])


def test_a_context_is_current_only_inside_and_the_former_one_comes_back(fake):
    driver = cuda.driver()
    contexts = [cuda.Context(driver, gpu) for gpu in driver.gpus]
    with contexts[0].current():
        with pytest.raises(ZeroDivisionError), contexts[1].current():
            assert fake.stack == [0, 1]
            raise ZeroDivisionError
        assert fake.stack == [0]
    assert fake.stack == []
    for context in contexts:
        context.release()
        context.release()
    assert fake.calls.count("cuDevicePrimaryCtxRelease_v2") == 2


def test_a_forked_child_is_told_that_it_cannot_use_cuda(fake):
    driver = cuda.driver()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            cuda.driver()
        except CudaError as error:
            status = 0 if "forked child; start the process with spawn" in str(error) else 2
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert cuda.driver() is driver


# --- arenas


def test_an_arena_is_zeroed_memory_on_its_gpu_of_whole_blocks(fake):
    with CudaArena(3, "cuda:1", 3 * MIB) as arena:
        assert (arena.rank, arena.device, arena.gpu_uuid) == (3, "cuda:1", UUID_1)
        assert arena.size_bytes == 4 * MIB
        assert (fake.used_bytes(0), fake.used_bytes(1)) == (0, 4 * MIB)
        assert arena.map() == arena.address and arena.address in fake.allocated
        assert read(arena.address, arena.size_bytes) == bytes(arena.size_bytes)
        assert len(arena.ipc_handle()) == 64 and any(arena.ipc_handle())
    assert fake.used_bytes(1) == 0


def test_the_gpu_of_an_arena_is_current_where_it_is_wanted(fake):
    with CudaArena(0, "cuda:1", MIB) as arena:
        assert fake.stack == []
        with arena.current():
            assert fake.stack == [1]
        seen = []

        def look():
            with arena.current():
                seen.append(list(fake.stack))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert seen == [[1]]


def test_an_arena_may_be_closed_twice(fake):
    arena = CudaArena(0, "cuda:0", MIB)
    arena.close()
    arena.close()
    assert fake.calls.count("cuMemFree_v2") == 1


def test_ranks_may_share_a_gpu_or_have_their_own(fake):
    with CudaArena(0, "cuda:0", MIB), CudaArena(1, "cuda:0", MIB) as second, CudaArena(2, "cuda:1", MIB):
        assert (fake.used_bytes(0), fake.used_bytes(1)) == (4 * MIB, 2 * MIB)
        second.close()
        assert fake.used_bytes(0) == 2 * MIB


def test_without_a_driver_the_daemon_is_told_what_to_do(fake):
    def missing():
        raise OSError

    cuda.load_library = missing
    with pytest.raises(StartupError) as caught:
        CudaArena(0, "cuda:0", MIB)
    assert str(caught.value) == (
        "arena 0: device cuda:0 cannot be had: no NVIDIA driver in this process: libcuda.so.1 cannot be "
        "loaded; use device = cpu or start the container with the GPU"
    )


def test_a_gpu_that_is_not_there_is_told_with_those_that_are(fake):
    with pytest.raises(
        StartupError,
        match=r"arena 5: device cuda:2 cannot be had: .* cuda:0 Fake GPU 0, cuda:1 Fake GPU 1; .*VISIBLE",
    ):
        CudaArena(5, "cuda:2", MIB)


@pytest.mark.parametrize("is_asked", [True, False])
def test_too_little_memory_is_told_with_free_and_wanted(fake, is_asked):
    """Whether the driver's books say so before, or only the allocation itself."""
    with CudaArena(0, "cuda:0", GIB // 2):
        if not is_asked:
            fake.fails["cuMemAlloc_v2"] = cuda.OUT_OF_MEMORY
        with pytest.raises(StartupError) as caught:
            CudaArena(1, "cuda:0", GIB if is_asked else MIB)
        assert ("cuMemAlloc_v2" in fake.calls[-3:]) is not is_asked
        wanted = "1 GiB" if is_asked else "2 MiB"
        assert str(caught.value) == (
            f"arena 1: {wanted} of memory on cuda:0 (Fake GPU 0) are wanted, and 512 MiB of 1 GiB are free: "
            "lower size, or free memory of the GPU"
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuDevicePrimaryCtxRetain", r"device cuda:0 cannot be had: cuDevicePrimaryCtxRetain"),
        ("cuMemGetInfo_v2", r"2 MiB of memory on cuda:0 cannot be had: cuMemGetInfo_v2"),
        ("cuMemAlloc_v2", r"2 MiB of memory on cuda:0 cannot be had: cuMemAlloc_v2: CUDA_ERROR_UNKNOWN 999"),
        ("cuMemsetD8_v2", r"2 MiB of memory on cuda:0 cannot be had: cuMemsetD8_v2"),
        ("cuCtxSynchronize", r"2 MiB of memory on cuda:0 cannot be had: cuCtxSynchronize"),
        ("cuIpcGetMemHandle", r"cannot be shared with other processes: cuIpcGetMemHandle.*device = cpu"),
    ],
)
def test_a_start_that_fails_is_a_startup_error_and_leaves_nothing(fake, name, message):
    """What is left is looked at by the fixture."""
    fake.fails[name] = BROKEN
    with pytest.raises(StartupError, match=f"^arena 4: .*{message}"):
        CudaArena(4, "cuda:0", MIB)
    del fake.fails[name]


@pytest.mark.parametrize("name", ["cuMemFree_v2", "cuDevicePrimaryCtxRelease_v2"])
def test_an_arena_that_cannot_be_given_back_does_not_keep_the_daemon_from_ending(fake, name, capsys):
    arena = CudaArena(0, "cuda:0", MIB)
    address = arena.address
    fake.fails[name] = BROKEN
    arena.close()
    assert "the memory was not given back" in capsys.readouterr().out
    del fake.fails[name]
    if name == "cuMemFree_v2":
        with cuda.Context(cuda.driver(), arena.gpu).current():
            cuda.driver().call("cuMemFree_v2", address)
    fake.retained[0] = 0

"""``snapd doctor`` and arenas on real GPUs: self-tests of two processes, findings, and what is left.

Needs no torch and no network. A test prints what it measured; ``-rP`` or ``-s`` shows it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snapd import cuda
from snapd.cuda import CudaError
from snapd.doctor import selftest
from snapd.doctor.selftest import SelfTestFailed, load_mooncake, move_bytes, see_gpus
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.mooncake_package import find_package, missing_libraries
from snapd.units import GIB, MIB


def count_gpus():
    try:
        return len(cuda.driver().gpus)
    except CudaError:
        return 0


NUM_GPUS = count_gpus()
pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="this machine has no GPU, or no NVIDIA driver")
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="this machine has not two GPUs")

ROOT = Path(__file__).parents[2]
# No multiple of the pattern, of a piece, nor of a block of the driver.
SIZE_BYTES = 256 * MIB + 4096 + 17
SMALL = ("--size", "64MiB", "--bytes", "64MiB")
# What the driver keeps for itself may change by this much.
SLACK_BYTES = 64 * MIB
PATIENCE_S = 30.0
# A copy inside an H200 runs at 2,000 GB/s, the first ones slower; by way of the host it would be below this.
INSIDE_GB_PER_S_MIN = 30.0
WRITES_OTHER_BYTES = (
    "import snapd.doctor.pattern as p; fill = p.fill; "
    "p.fill = lambda view, seed: (fill(view, seed), view.__setitem__(-1, view[-1] ^ 1)); "
)
WRITES_NOTHING = "from snapd.cudamapping import MappedCudaArena as a; a.copy_in = lambda *_: None; "


def mooncake_supports():
    package = find_package()
    if package is None or missing_libraries(package):
        pytest.skip("no package of Mooncake works here")
    return load_mooncake()


def skip_unless_supported(protocol):
    wanted = "INTRA_NVLINK" if protocol == "nvlink_intra" else "CUDA"
    supports = mooncake_supports()
    if wanted not in supports:
        pytest.skip(f"this build of Mooncake has {', '.join(supports) or 'no CUDA'}, and not {wanted}")


def move(transport, device, source_device, protocol="tcp"):
    moved = move_bytes(
        transport,
        SIZE_BYTES,
        mooncake=MooncakeConfig(protocol=protocol),
        device=device,
        source_device=source_device,
    )
    kind = protocol if transport == "mooncake" else transport
    print(f"{kind} {source_device} -> {device}: {moved.gb_per_s:.1f} GB/s, {moved.latency_us:.1f} us")
    assert (moved.size_bytes, moved.difference) == (SIZE_BYTES, "")
    return moved


def doctor(tmp_path, *arguments, **environment):
    """Run the command and return its status and its report; it must not show a traceback."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SNAPD_")}
    path = os.pathsep.join(entry for entry in (str(ROOT), env.get("PYTHONPATH", "")) if entry)
    places = ("--socket", str(tmp_path / "s"), "--log", str(tmp_path / "log"))
    done = subprocess.run(
        [sys.executable, "-m", "snapd.cli.main", "doctor", "--json", *places, *arguments],
        env=env | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    report = json.loads(done.stdout)
    for finding in report["findings"]:
        if finding["group"] == "transports" or "cuda" in finding["name"].lower():
            print(f"{finding['status']:5} {finding['name']}: {finding['detail']}")
    return done.returncode, report


def found_in(report, name):
    (found,) = (finding for finding in report["findings"] if finding["name"] == name)
    return found


def results_of(report, transport, protocol=None):
    return [
        one
        for one in report["gpus"]
        if (one["transport"], one["protocol"]) == (transport, protocol)
    ]  # fmt: skip


# --- self-tests


def test_a_child_sees_every_gpu_with_its_memory():
    seen = see_gpus([0])
    assert seen.why_not == ""
    assert [gpu.index for gpu in seen.gpus] == list(range(NUM_GPUS))
    assert not [gpu.why_not for gpu in seen.gpus if gpu.why_not]
    assert 0 < seen.gpus[0].free_bytes <= seen.gpus[0].total_bytes
    assert all(gpu.index not in gpu.peers for gpu in seen.gpus)


def test_shm_moves_every_byte_inside_a_gpu():
    moved = move("shm", "cuda:0", "cuda:0")
    assert moved.gb_per_s > INSIDE_GB_PER_S_MIN
    assert 0 < moved.latency_us < 1_000


def test_shm_moves_every_byte_from_the_host_to_a_gpu():
    move("shm", "cuda:0", "cpu")


@pytest.mark.parametrize("protocol", ["nvlink_intra", "tcp"])
def test_mooncake_moves_every_byte_inside_a_gpu(protocol):
    skip_unless_supported(protocol)
    moved = move("mooncake", "cuda:0", "cuda:0", protocol)
    assert protocol == "tcp" or moved.gb_per_s > INSIDE_GB_PER_S_MIN


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        (WRITES_OTHER_BYTES, f"the first at {SIZE_BYTES - 1:,}"),
        (WRITES_NOTHING, "the first at 0, where nothing was written"),
    ],
)
def test_bytes_that_are_wrong_or_never_come_are_found(fault, wanted, monkeypatch):
    """What is compared is what the arena on the GPU holds."""
    monkeypatch.setattr(selftest, "_RUN", selftest._RUN.replace("from snapd", fault + "from snapd", 1))
    moved = move_bytes("shm", SIZE_BYTES, device="cuda:0", source_device="cuda:0")
    assert wanted in moved.difference


def test_a_gpu_that_is_not_there_is_told():
    with pytest.raises(SelfTestFailed, match="device cuda:99 cannot be had: the GPUs of this process are"):
        move_bytes("shm", MIB, device="cuda:99", source_device="cpu")
    with pytest.raises(SelfTestFailed, match="cuda:99 is none of them"):
        move_bytes("shm", MIB, device="cpu", source_device="cuda:99")


def free_bytes():
    context = cuda.Context(cuda.driver(), cuda.driver().gpus[0])
    try:
        return context.memory_bytes()[0]
    finally:
        context.release()


@pytest.mark.alone
def test_nothing_is_left_on_the_gpu():
    free_at_first = free_bytes()
    move_bytes("shm", 256 * MIB, device="cuda:0", source_device="cuda:0")
    deadline_s = time.monotonic() + PATIENCE_S
    while free_bytes() < free_at_first - SLACK_BYTES:
        assert time.monotonic() < deadline_s, f"{free_at_first - free_bytes()} bytes are left"
        time.sleep(0.05)


# --- the command


def test_doctor_tries_the_gpu_of_an_arena_over_shm(tmp_path):
    status, report = doctor(tmp_path, "--device", "cuda:0", *SMALL)
    assert (status, report["in_the_way"]) == (0, [])
    in_one, *between = results_of(report, "shm")
    assert (in_one["device"], in_one["source_device"]) == ("cuda:0", "cuda:0")
    assert len(between) == (NUM_GPUS > 1)
    result = in_one["result"]
    assert result["verified"] and result["bytes"] == 64 * MIB and result["latency_us"] > 0
    assert found_in(report, "arenas on cuda:0")["status"] == "ok"


def test_doctor_tries_the_gpu_of_an_arena_over_nvlink_and_what_else_mooncake_can(tmp_path):
    skip_unless_supported("nvlink_intra")
    arguments = ("--device", "cuda:0", "--transport", "mooncake", "--protocol", "nvlink_intra")
    status, report = doctor(tmp_path, *arguments, *SMALL)
    assert (status, report["in_the_way"]) == (0, [])
    for protocol in ("nvlink_intra", "tcp"):
        result = results_of(report, "mooncake", protocol)[0]["result"]
        assert result["verified"] and result["bytes"] == 64 * MIB
    assert report["mooncake"]["nvlink_intra"] == results_of(report, "mooncake", "nvlink_intra")[0]["result"]


def test_doctor_tries_the_first_gpu_where_no_arena_is_on_one(tmp_path):
    status, report = doctor(tmp_path, *SMALL)
    assert status == 0
    assert results_of(report, "shm")[0]["result"]["verified"]


@pytest.mark.parametrize(
    ("arguments", "environment", "in_the_way", "wanted"),
    [
        (("--device", "cuda:99"), {}, "arenas on cuda:99", "cuda:99 is not among the GPUs"),
        (("--device", "cuda:0", "--size", "9TiB"), {}, "arenas on cuda:0", "wants 9 TiB, and"),
        (("--device", "cuda:0"), {"CUDA_VISIBLE_DEVICES": ""}, "CUDA driver", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_doctor_says_why_a_gpu_cannot_have_the_arena(tmp_path, arguments, environment, in_the_way, wanted):
    status, report = doctor(tmp_path, "--no-self-test", *arguments, **environment)
    assert status == 1 and in_the_way in report["in_the_way"]
    found = found_in(report, in_the_way)
    assert wanted in found["detail"] and found["fix"]


@pytest.mark.alone
def test_doctor_says_that_too_little_is_free_for_a_self_test(tmp_path):
    """Another process has nearly all of the memory, as an engine would."""
    context = cuda.Context(cuda.driver(), cuda.driver().gpus[0])
    free_now, _ = context.memory_bytes()
    if free_now < 4 * GIB:
        context.release()
        pytest.skip("the GPU is in use")
    # What is left is less than two contexts and a self-test.
    address = context.allocate(free_now - GIB)
    try:
        status, report = doctor(tmp_path, "--device", "cuda:0", *SMALL)
    finally:
        context.free(address)
        context.release()
    assert status == 1
    found = found_in(report, "shm cuda:0")
    # Or not even a context could be had.
    assert found["fix"] and ("too little memory" in found["detail"] or "OUT_OF_MEMORY" in found["detail"])


# --- two GPUs


@two_gpus
@pytest.mark.parametrize(
    ("transport", "protocol"), [("shm", "tcp"), ("mooncake", "nvlink_intra"), ("mooncake", "tcp")]
)
def test_every_byte_comes_from_another_gpu(transport, protocol):
    if transport == "mooncake":
        skip_unless_supported(protocol)
    if protocol == "nvlink_intra" and 0 not in see_gpus([0]).gpus[1].peers:
        pytest.skip("GPU 1 does not reach the memory of GPU 0")
    move(transport, "cuda:0", "cuda:1", protocol)
    move(transport, "cuda:1", "cuda:0", protocol)


@two_gpus
def test_doctor_tries_the_neighbour_of_an_arenas_gpu(tmp_path):
    status, report = doctor(tmp_path, "--device", "cuda:1", *SMALL)
    assert status == 0
    pairs = [(one["device"], one["source_device"]) for one in results_of(report, "shm")]
    assert pairs == [("cuda:1", "cuda:1"), ("cuda:1", f"cuda:{2 % NUM_GPUS}")]
    assert found_in(report, "peer access")["status"] in ("ok", "warn")

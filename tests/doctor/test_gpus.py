"""Doctor and GPUs: what is found where there are some, and where there is none.

The driver is a fake over host memory; the processes are real.
"""

import contextlib
import ctypes
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.append(str(Path(__file__).parents[1]))

from cuda_fake import FakeDriver, install

from snapd import cuda
from snapd.config import Config, load_config
from snapd.doctor import endpoint, selftest, transports
from snapd.doctor import gpus as checks
from snapd.doctor import messages as m
from snapd.doctor.buffers import arena_on, source_on
from snapd.doctor.finding import Finding, configured_concerns
from snapd.doctor.gpus import Gpus
from snapd.doctor.hardware import RdmaPort
from snapd.doctor.messages import Seen, SeenGpu
from snapd.doctor.mooncake import Installed
from snapd.doctor.selftest import SelfTestFailed, move_bytes, see_gpus
from snapd.doctor.transports import Obstacle, Route
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.mooncake_package import Package
from snapd.units import GIB, MIB
from tests.doctor.fake_gpus import VARIABLE, facts, make_directory

ROOT = Path(__file__).parents[2]
PACKAGE = Package("mooncake-transfer-engine", "0.3.14", "/engine.so")
CUDA_BUILD = Installed(package=PACKAGE, supports=("CUDA", "INTRA_NVLINK"))
PORT = RdmaPort("mlx5_0", "1", "ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand")
SIZE_BYTES = 3 * MIB + 17
RUN_S = 60.0
UseGpus = Callable[..., Path]
UseMooncake = Callable[[str], Path]


def config_of(**settings: object) -> Config:
    return load_config(Path(os.devnull), {}, {"size": "64MiB"} | settings)


def gpu(index: int = 0, *peers: int, free_bytes: int | None = 100 * GIB, why_not: str = "") -> SeenGpu:
    total_bytes = None if free_bytes is None else 140 * GIB
    return SeenGpu(
        index=index,
        name="NVIDIA H200",
        peers=peers,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        why_not=why_not,
    )


ONE = Gpus(seen=(gpu(),))
TWO = Gpus(seen=(gpu(0, 1), gpu(1, 0)))
APART = Gpus(seen=(gpu(0), gpu(1)))
NONE = Gpus(why_not="no NVIDIA driver in this process")


def by_name(findings: Sequence[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def check(config: Config, gpus: Gpus, *listed: str, is_daemon_running: bool = False) -> dict[str, Finding]:
    return by_name(checks.check_gpus(config, gpus, listed, is_daemon_running=is_daemon_running))


# --- whether the driver is asked, and what it says ---------------------------------------------


def never(_: Sequence[int], __: float) -> Seen:
    raise AssertionError("nobody must be asked")


def test_where_nothing_speaks_of_a_gpu_the_driver_is_not_asked() -> None:
    gpus = checks.look(config_of(), (), timeout_s=1.0, see=never)
    assert (gpus.seen, gpus.why_not) == ((), "no GPU")
    assert check(config_of(), gpus) == {}


@pytest.mark.parametrize(
    ("settings", "listed", "asked"),
    [
        ({}, ("0, NVIDIA H200",), [0]),
        ({"device": "cuda:2"}, (), [2]),
        ({"device": "cuda:2"}, ("0, NVIDIA H200",), [2]),
    ],
)
def test_the_driver_is_asked_for_the_gpus_of_arenas_or_for_the_first(
    settings: dict[str, object], listed: tuple[str, ...], asked: list[int]
) -> None:
    heard: list[Sequence[int]] = []

    def see(arena_gpus: Sequence[int], _: float) -> Seen:
        heard.append(arena_gpus)
        return Seen(gpus=(gpu(),))

    assert checks.look(config_of(**settings), listed, timeout_s=1.0, see=see) == ONE
    assert heard == [asked]


def test_a_driver_that_hangs_or_shows_nothing_is_a_reason() -> None:
    def hang(_: Sequence[int], __: float) -> Seen:
        raise SelfTestFailed("not done within 1 s")

    listed = ("0, NVIDIA H200",)
    assert checks.look(config_of(), listed, timeout_s=1.0, see=hang).why_not == "not done within 1 s"
    for seen, why in ((Seen(), "CUDA_VISIBLE_DEVICES"), (Seen(why_not="too old"), "too old")):
        assert why in checks.look(config_of(), listed, timeout_s=1.0, see=lambda *_, seen=seen: seen).why_not


@pytest.mark.parametrize(
    ("device", "listed", "status"), [("cuda:0", (), "fail"), ("cpu", ("0, NVIDIA H200",), "warn")]
)
def test_no_driver_fails_only_where_an_arena_wants_it(
    device: str, listed: tuple[str, ...], status: str
) -> None:
    (found,) = check(config_of(device=device), NONE, *listed).values()
    assert (found.name, found.status, found.detail) == ("CUDA driver", status, NONE.why_not)
    assert 'device = "cpu"' in found.fix and found.concerns == ""


def test_gpus_that_can_be_used_are_told_as_arenas_name_them() -> None:
    assert check(config_of(), TWO)["CUDA driver"].detail == (
        "this process sees cuda:0 NVIDIA H200, cuda:1 NVIDIA H200"
    )


def test_a_gpu_that_is_not_there_fails_with_those_that_are() -> None:
    found = check(config_of(device="cuda:1"), ONE)["arenas on cuda:1"]
    assert (found.status, found.concerns) == ("fail", "")
    assert found.detail == (
        "rank 0: cuda:1 is not among the GPUs of this process, which are cuda:0 NVIDIA H200"
    )
    assert "CUDA_VISIBLE_DEVICES" in found.fix
    assert check(config_of(device="cuda:0"), ONE)["arenas on cuda:0"].status == "ok"


def test_a_gpu_that_refuses_a_context_fails() -> None:
    gpus = Gpus(seen=(gpu(free_bytes=None, why_not="CUDA_ERROR_DEVICE_UNAVAILABLE 46"),))
    found = check(config_of(device="cuda:0"), gpus)["arenas on cuda:0"]
    assert found.status == "fail" and "DEVICE_UNAVAILABLE" in found.detail and found.fix


@pytest.mark.parametrize(
    ("free_bytes", "is_running", "status"),
    [
        (128 * MIB, False, "ok"),
        (128 * MIB - 1, False, "fail"),
        (128 * MIB - 1, True, "info"),
        (None, False, "info"),
    ],
)
def test_all_arenas_of_a_gpu_must_fit_in_what_is_free_unless_a_daemon_has_them(
    free_bytes: int | None, is_running: bool, status: str
) -> None:
    gpus = Gpus(seen=(gpu(free_bytes=free_bytes),))
    config = config_of(device="cuda:0", ranks="2")
    found = check(config, gpus, is_daemon_running=is_running)["arenas on cuda:0"]
    assert (found.status, found.fix.startswith("lower size")) == (status, status == "fail")
    assert found.detail.startswith("rank 0, 1 wants 128 MiB")


def test_gpus_that_do_not_reach_each_other_are_named() -> None:
    assert "peer access" not in check(config_of(), ONE)
    assert check(config_of(), TWO)["peer access"].status == "ok"
    found = check(config_of(), APART)["peer access"]
    assert (found.status, found.detail) == ("warn", "none between cuda:0 and cuda:1")
    assert "nvidia-smi topo -p2p" in found.fix
    # One direction is not enough.
    assert check(config_of(), Gpus(seen=(gpu(0, 1), gpu(1))))["peer access"].status == "warn"
    many = check(config_of(), Gpus(seen=tuple(gpu(index) for index in range(8))))["peer access"].detail
    assert many.endswith("cuda:0 and cuda:4 and 24 more pairs")


# --- what is tried -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "gpus", "is_wanted", "pairs"),
    [
        ({}, NONE, True, []),
        ({}, ONE, False, [("cuda:0", "cuda:0")]),
        ({}, TWO, False, [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")]),
        ({"device": "cuda:1"}, TWO, True, [("cuda:1", "cuda:1"), ("cuda:1", "cuda:0")]),
        ({"device": "cuda:7"}, TWO, True, [("cuda:7", "cuda:7")]),
        ({"device": "cuda:0"}, NONE, True, [("cuda:0", "cuda:0")]),
    ],
)
def test_an_arena_is_written_to_from_its_own_gpu_and_from_the_next(
    settings: dict[str, object], gpus: Gpus, is_wanted: bool, pairs: list[tuple[str, str]]
) -> None:
    assert checks.pairs_for(config_of(**settings), gpus, is_wanted=is_wanted) == pairs


def test_every_arenas_gpu_is_tried_over_the_configured_transport_and_one_over_others(tmp_path: Path) -> None:
    path = tmp_path / "snapd.toml"
    path.write_text(
        "".join(
            f'[[arena]]\nrank = {rank}\ndevice = "{device}"\nsize_bytes = 1048576\n'
            for rank, device in enumerate(("cuda:1", "cpu", "cuda:0", "cuda:1"))
        )
    )
    routes = transports.routes_of(load_config(path, {}, {}), TWO)
    assert [route.name for route in routes] == [
        "shm",
        "shm cuda:0",
        "shm cuda:0 from cuda:1",
        "shm cuda:1",
        "shm cuda:1 from cuda:0",
        "mooncake tcp",
        "mooncake tcp cuda:0",
        "mooncake tcp cuda:0 from cuda:1",
        "mooncake rdma",
        "mooncake rdma cuda:0",
        "mooncake rdma cuda:0 from cuda:1",
        "mooncake nvlink_intra cuda:0",
        "mooncake nvlink_intra cuda:0 from cuda:1",
    ]


def test_where_there_is_no_gpu_only_what_needs_one_speaks_of_it() -> None:
    routes = transports.routes_of(config_of(), NONE)
    assert [route.name for route in routes] == [
        "shm", "mooncake tcp", "mooncake rdma", "mooncake nvlink_intra cuda:0",
    ]  # fmt: skip


def route_of(kind: str, device: str = "cuda:0", source_device: str = "cuda:0") -> Route:
    if kind == "shm":
        return Route(transport="shm", device=device, source_device=source_device)
    config = config_of(**{"transport": "mooncake", "mooncake.protocol": kind, "device": "cuda:0"})
    return Route(transport="mooncake", mooncake=config.mooncake, device=device, source_device=source_device)


@pytest.mark.parametrize(
    ("route", "installed", "gpus", "why"),
    [
        (route_of("shm"), CUDA_BUILD, ONE, ""),
        (route_of("shm"), Installed(package=None, why_not="not installed"), ONE, ""),
        (route_of("shm"), CUDA_BUILD, NONE, "no NVIDIA driver"),
        (route_of("shm", "cuda:3", "cuda:3"), CUDA_BUILD, TWO, "cuda:3 is not among the GPUs"),
        (route_of("shm", "cuda:0", "cuda:1"), CUDA_BUILD, APART, ""),
        (route_of("shm"), CUDA_BUILD, Gpus(seen=(gpu(free_bytes=700 * MIB),)), "too little memory of cuda:0"),
        (
            route_of("shm", "cuda:0", "cuda:1"),
            CUDA_BUILD,
            Gpus(seen=(gpu(0), gpu(1, free_bytes=0))),
            "too little memory of cuda:1",
        ),
        (route_of("tcp"), CUDA_BUILD, ONE, ""),
        (route_of("tcp"), Installed(package=PACKAGE), ONE, "made without CUDA"),
        (route_of("tcp", "cpu", "cpu"), Installed(package=PACKAGE), ONE, ""),
        (route_of("rdma"), Installed(package=PACKAGE), ONE, "made without CUDA"),
        (route_of("rdma"), CUDA_BUILD, ONE, ""),
        (route_of("nvlink_intra"), CUDA_BUILD, ONE, ""),
        (route_of("nvlink_intra"), CUDA_BUILD, NONE, "no NVIDIA driver"),
        (route_of("nvlink_intra"), Installed(package=PACKAGE, supports=("CUDA",)), ONE, "has no NVLink"),
        (route_of("nvlink_intra", "cuda:0", "cuda:1"), CUDA_BUILD, TWO, ""),
        (
            route_of("nvlink_intra", "cuda:0", "cuda:1"),
            CUDA_BUILD,
            APART,
            "cuda:1 cannot reach the memory of cuda:0",
        ),
    ],
)
def test_what_stands_against_a_route_is_told_with_what_to_do(
    route: Route, installed: Installed, gpus: Gpus, why: str
) -> None:
    found = transports.obstacle_to(route, installed, [PORT], gpus)
    if found is None:
        assert why == ""
    else:
        assert why and why in found.why
        assert found.fix


def test_a_self_test_takes_its_share_of_the_fuller_gpu() -> None:
    full = Gpus(seen=(gpu(0), gpu(1, free_bytes=GIB), gpu(2, free_bytes=None)))
    assert checks.self_test_bytes(256 * MIB, "cuda:0", "cuda:0", full) == 256 * MIB
    assert checks.self_test_bytes(256 * MIB, "cuda:0", "cuda:1", full) == 64 * MIB
    assert checks.self_test_bytes(256 * MIB, "cuda:1", "cuda:0", full) == 64 * MIB
    assert checks.self_test_bytes(256 * MIB, "cuda:2", "cuda:2", full) == 256 * MIB


@pytest.mark.parametrize(("source", "status"), [("cuda:0", "fail"), ("cuda:1", "warn")])
def test_what_stands_between_two_gpus_is_in_nobodys_way(source: str, status: str) -> None:
    """Where D is, is not configured; its own GPU may be the arena's."""
    _, finding = transports.look_at(
        route_of("nvlink_intra", "cuda:0", source),
        obstacle=Obstacle("no peer access", "move D"),
        is_wanted=True,
        size_bytes=MIB,
        timeout_s=1.0,
    )
    assert (finding.status, finding.fix) == (status, "move D")


def test_only_the_configured_devices_count() -> None:
    wanted = configured_concerns(config_of(device="cuda:0"))
    assert route_of("shm").concern in wanted
    assert route_of("shm", "cpu", "cpu").concern not in wanted
    assert route_of("shm", "cuda:1", "cuda:1").concern not in wanted
    assert route_of("tcp").concern not in wanted


# --- self-tests over a fake driver -------------------------------------------------------------


@pytest.fixture
def fake_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UseGpus:
    """A function that gives children GPUs, with the driver's facts, and returns the entry of PYTHONPATH."""
    devices = tmp_path / "dev"
    directory = make_directory(tmp_path / "gpus", devices)

    def use(**driver: object) -> Path:
        monkeypatch.setenv(VARIABLE, facts(devices, **driver))
        monkeypatch.setenv("PYTHONPATH", str(directory))
        return directory

    return use


def test_a_child_sees_the_gpus_with_memory_and_peers(fake_gpus: UseGpus) -> None:
    fake_gpus(num_gpus=3)
    first, second, third = see_gpus([1]).gpus
    assert (first.index, first.name, first.peers) == (0, "Fake GPU 0", (1, 2))
    assert (second.free_bytes, second.total_bytes, third.free_bytes) == (16 * GIB, 16 * GIB, 16 * GIB)
    # It is neither an arena's nor its neighbour.
    assert first.free_bytes is None
    # One that is not there is no reason to fail.
    assert [found.free_bytes for found in see_gpus([9]).gpus] == [None] * 3


def test_nothing_is_held_once_the_gpus_were_seen(driver: FakeDriver) -> None:
    driver.has_peers = False
    said: list[m.FromChild] = []
    endpoint.see_gpus(m.Task(role="gpus", transport="shm", arena_gpus=(0,)), said.append)
    seen = said[-1]
    assert isinstance(seen, Seen)
    assert [(found.peers, found.total_bytes) for found in seen.gpus] == [((), GIB)] * 2


def test_a_child_tells_why_there_are_none(fake_gpus: UseGpus) -> None:
    fake_gpus(num_gpus=0)
    seen = see_gpus([0])
    assert seen.gpus == () and "CUDA_VISIBLE_DEVICES" in seen.why_not


def test_a_gpu_that_cannot_be_used_is_told_and_others_are_seen(fake_gpus: UseGpus) -> None:
    fake_gpus(fails={"cuMemGetInfo_v2": 46}, num_gpus=3)
    first, second, third = see_gpus([0]).gpus
    assert "cuMemGetInfo_v2" in first.why_not and "cuMemGetInfo_v2" in second.why_not
    assert third.why_not == ""


@pytest.mark.parametrize(
    ("device", "source_device"), [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:1", "cpu")]
)
def test_shm_moves_every_byte_between_gpus(fake_gpus: UseGpus, device: str, source_device: str) -> None:
    fake_gpus(num_gpus=2)
    moved = move_bytes("shm", SIZE_BYTES, device=device, source_device=source_device)
    assert (moved.size_bytes, moved.difference) == (SIZE_BYTES, "")
    assert moved.gb_per_s > 0 and moved.latency_us > 0


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [("lost", "the first at 0, where nothing was written"), ("corrupt", f"the first at {SIZE_BYTES - 1:,}")],
)
def test_bytes_that_do_not_arrive_in_the_arena_are_found(fake_gpus: UseGpus, fault: str, wanted: str) -> None:
    fake_gpus(fault=fault)
    assert wanted in move_bytes("shm", SIZE_BYTES, device="cuda:0", source_device="cuda:0").difference


@pytest.mark.parametrize(
    ("driver", "device", "source_device", "wanted"),
    [
        ({"fails": {"cuIpcOpenMemHandle_v2": 999}}, "cuda:0", "cuda:0", "cuIpcOpenMemHandle_v2.*namespaces"),
        ({"fails": {"cuIpcGetMemHandle": 999}}, "cuda:0", "cpu", "cannot be shared with other processes"),
        ({"fails": {"cuMemcpy": 700}}, "cuda:0", "cpu", "cuMemcpy: CUDA_ERROR_ILLEGAL_ADDRESS"),
        ({"total_bytes": MIB}, "cuda:0", "cpu", "are wanted, and 1 MiB of 1 MiB are free"),
        ({"total_bytes": MIB}, "cpu", "cuda:0", "on cuda:0 cannot be had to write from: .*OUT_OF_MEMORY"),
        ({}, "cuda:9", "cpu", "device cuda:9 cannot be had"),
        ({}, "cpu", "cuda:9", "sees 1 GPUs, and cuda:9 is none of them"),
        ({"num_gpus": 0}, "cuda:0", "cpu", "device cuda:0 cannot be had.*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_the_driver_refuses_is_passed_on(
    fake_gpus: UseGpus, driver: dict[str, object], device: str, source_device: str, wanted: str
) -> None:
    fake_gpus(**driver)
    with pytest.raises(SelfTestFailed, match=wanted) as caught:
        move_bytes("shm", SIZE_BYTES, device=device, source_device=source_device)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("protocol", ["nvlink_intra", "tcp"])
@pytest.mark.parametrize("source_device", ["cuda:0", "cuda:1"])
def test_mooncake_moves_every_byte_between_gpus(
    fake_gpus: UseGpus, fake_mooncake: UseMooncake, protocol: str, source_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each process has the GPU of its own memory current: the engine refuses it otherwise."""
    fake_gpus(num_gpus=2)
    fake_mooncake("")
    monkeypatch.setenv("FAKE_MOONCAKE_SUPPORTS", "CUDA,INTRA_NVLINK")
    how = MooncakeConfig(protocol=protocol)  # type: ignore[arg-type]
    moved = move_bytes("mooncake", SIZE_BYTES, mooncake=how, device="cuda:0", source_device=source_device)
    assert (moved.size_bytes, moved.difference) == (SIZE_BYTES, "")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """This process's own driver; at the end nothing may be left on its GPUs."""
    monkeypatch.setattr(cuda, "load_library", None)
    monkeypatch.setattr(cuda, "_driver", None)
    fake = install(FakeDriver())
    yield fake
    fake.check_clean()


def test_a_source_is_whole_blocks_of_its_gpu_and_is_given_back(driver: FakeDriver) -> None:
    with source_on("cuda:1", 5) as source:
        assert (driver.used_bytes(0), driver.used_bytes(1)) == (0, 2 * MIB)
        assert len(source.view) == 5
        with source.current():
            assert driver.stack == [1]
        source.view[:] = b"bytes"
        source.upload()
        assert ctypes.string_at(source.address, 5) == b"bytes"
        ctypes.memmove(source.address, b"other", 5)
        source.download()
        assert source.view.tobytes() == b"other"


def test_an_arena_is_made_on_its_gpu_and_is_given_back(driver: FakeDriver) -> None:
    with arena_on("cuda:1", 5) as (arena, buffer):
        assert (arena.device, buffer.address, len(buffer.view)) == ("cuda:1", arena.map(), 5)
        assert (driver.used_bytes(0), driver.used_bytes(1)) == (0, 2 * MIB)


@pytest.mark.parametrize(
    ("device", "piece_bytes"), [("cpu", endpoint.PIECE_BYTES), ("cuda:0", endpoint.GPU_PIECE_BYTES)]
)
def test_pieces_are_larger_on_a_gpu(
    driver: FakeDriver, device: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def move(*arguments: Any) -> m.Written:
        seen.append(arguments[-2])
        return m.Written(1.0, 1.0)

    monkeypatch.setattr(endpoint, "move", move)
    monkeypatch.setattr(endpoint, "_writer", lambda *_: contextlib.nullcontext())
    task = m.Task(role="writer", transport="shm", size_bytes=4096, device=device, source_device=device)
    offer = msgspec.json.encode(m.Offer("", 0, 4096))
    endpoint.send(task, lambda _: None, io.BytesIO(offer + b"\n"))
    assert seen == [piece_bytes]


@pytest.mark.parametrize(("goes_through_host", "status"), [(False, "ok"), (True, "warn")])
def test_a_self_test_is_told_with_places_speed_and_latency(goes_through_host: bool, status: str,
    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    moved = selftest.Result(size_bytes=256 * MIB, seconds=0.001, latency_us=12.3, difference="")
    monkeypatch.setattr(transports, "move_bytes", lambda *_, **__: moved)
    result, finding = transports.look_at(
        route_of("shm", "cuda:0", "cuda:1"),
        obstacle=None,
        is_wanted=True,
        size_bytes=256 * MIB,
        timeout_s=1.0,
        goes_through_host=goes_through_host,
    )
    assert (finding.name, finding.status) == ("shm cuda:0 from cuda:1", status)
    assert finding.detail.startswith(
        "256 MiB from one process on cuda:1 to another on cuda:0, 268.4 GB/s, 4 KiB in 12.3 us, every byte"
    )
    assert (result.ok, result.verified, result.latency_us) == (True, True, 12.3)
    assert ("no peer access" in finding.detail) is goes_through_host


def test_copies_between_gpus_apart_go_through_the_host_over_shm_only() -> None:
    between = ("cuda:0", "cuda:1")
    assert transports.goes_through_host(route_of("shm", *between), APART)
    assert not transports.goes_through_host(route_of("shm", *between), TWO)
    assert not transports.goes_through_host(route_of("shm"), APART)
    assert not transports.goes_through_host(route_of("shm", "cpu", "cpu"), NONE)
    # There they do so anyway.
    assert not transports.goes_through_host(route_of("tcp", *between), APART)


def test_a_self_test_on_a_gpu_that_fails_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SelfTestFailed("it died")

    monkeypatch.setattr(transports, "move_bytes", fail)
    for kind, wanted in (("shm", "PID namespace"), ("rdma", "nvidia_peermem"), ("nvlink_intra", "dmesg")):
        _, finding = transports.look_at(
            route_of(kind), obstacle=None, is_wanted=False, size_bytes=MIB, timeout_s=1.0
        )
        assert (finding.status, finding.detail) == ("fail", "it died")
        assert wanted in finding.fix


# --- the whole command -------------------------------------------------------------------------


def doctor(tmp_path: Path, *arguments: str, path: Path | None = None) -> tuple[int, Any]:
    """Run the command and return its status and its report; it must not show a traceback."""
    entries = [str(path)] if path else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SNAPD_")}
    done = subprocess.run(
        [
            sys.executable, "-m", "snapd.cli.main", "doctor", "--json", "--bytes", "4MiB",
            "--size", "64MiB", "--socket", f"{tmp_path}/s", "--log", f"{tmp_path}/log", *arguments,
        ],
        env=environment | {"PYTHONPATH": os.pathsep.join([*entries, str(ROOT)])},
        capture_output=True, text=True, check=False, timeout=RUN_S,
    )  # fmt: skip
    assert done.stderr == "" and "Traceback" not in done.stdout
    return done.returncode, json.loads(done.stdout)


def found_in(report: Any, name: str) -> Any:
    (found,) = (finding for finding in report["findings"] if finding["name"] == name)
    return found


def test_arenas_on_a_gpu_work_where_there_is_one(tmp_path: Path, fake_gpus: UseGpus) -> None:
    status, report = doctor(tmp_path, "--device", "cuda:0", path=fake_gpus(num_gpus=2))
    assert (status, report["ok"], report["in_the_way"]) == (0, True, [])
    in_one, between = (one for one in report["gpus"] if one["transport"] == "shm")
    assert (in_one["device"], in_one["source_device"], in_one["protocol"]) == ("cuda:0", "cuda:0", None)
    assert (between["device"], between["source_device"]) == ("cuda:0", "cuda:1")
    for one in (in_one, between):
        assert one["result"]["verified"] and one["result"]["bytes"] == 4 * MIB
        assert one["result"]["gb_per_s"] > 0 and one["result"]["latency_us"] > 0
    assert found_in(report, "shm cuda:0")["status"] == "ok"
    # What is on the host is told as before.
    assert report["shm"]["verified"] and report["shm"]["latency_us"] > 0


def test_gpus_that_are_full_and_apart_are_tried_with_less_and_warned_of(
    tmp_path: Path, fake_gpus: UseGpus
) -> None:
    path = fake_gpus(num_gpus=2, has_peers=False, total_bytes=776 * MIB)
    status, report = doctor(tmp_path, "--device", "cuda:1", path=path)
    assert (status, report["in_the_way"]) == (0, [])
    assert found_in(report, "peer access")["status"] == "warn"
    assert found_in(report, "shm cuda:1")["status"] == "ok"
    between = found_in(report, "shm cuda:1 from cuda:0")
    assert between["status"] == "warn" and "through host memory" in between["detail"]
    assert [one["result"]["bytes"] for one in report["gpus"] if one["transport"] == "shm"] == [2 * MIB] * 2


def test_one_wrong_byte_on_a_gpu_fails_the_command(tmp_path: Path, fake_gpus: UseGpus) -> None:
    path = fake_gpus(fault="corrupt")
    status, report = doctor(tmp_path, "--device", "cuda:0", path=path)
    assert (status, report["in_the_way"]) == (1, ["shm cuda:0"])
    assert report["gpus"][0]["result"]["why"].endswith(f"the first at {4 * MIB - 1:,}")


@pytest.mark.parametrize(
    ("arguments", "driver", "in_the_way", "wanted"),
    [
        (("--device", "cuda:4"), {}, "arenas on cuda:4", "cuda:4 is not among the GPUs"),
        (("--device", "cuda:0", "--size", "17GiB"), {}, "arenas on cuda:0", "wants 17 GiB, and 16 GiB of"),
    ],
)
def test_arenas_that_a_gpu_cannot_have_fail_the_command(
    tmp_path: Path, fake_gpus: UseGpus, arguments: tuple[str, ...], driver: dict[str, object],
    in_the_way: str, wanted: str,
) -> None:  # fmt: skip
    status, report = doctor(tmp_path, *arguments, path=fake_gpus(**driver))
    assert status == 1
    assert in_the_way in report["in_the_way"]
    found = found_in(report, in_the_way)
    assert wanted in found["detail"] and found["fix"]


def test_on_a_machine_without_a_gpu_such_an_arena_fails_with_what_is_missing(
    tmp_path: Path, fake_gpus: UseGpus
) -> None:
    status, report = doctor(tmp_path, "--device", "cuda:0", path=fake_gpus(num_gpus=0))
    assert (status, report["in_the_way"]) == (1, ["CUDA driver", "shm cuda:0"])
    for name in report["in_the_way"]:
        found = found_in(report, name)
        assert "no GPU is visible here" in found["detail"]
        assert 'device = "cpu"' in found["fix"]
    # What is on the host still works.
    assert report["shm"]["verified"]
    assert [one["result"]["ok"] for one in report["gpus"]] == [False]


def test_without_gpus_and_without_such_arenas_nothing_is_said_of_the_driver(tmp_path: Path) -> None:
    if list(Path("/proc/driver/nvidia/gpus").glob("*")):
        pytest.skip("this machine has a GPU")
    status, report = doctor(tmp_path, "--no-self-test")
    assert (status, report["gpus"]) == (0, [])
    assert "CUDA driver" not in {finding["name"] for finding in report["findings"]}
    nvlink = found_in(report, "mooncake nvlink_intra cuda:0")
    assert nvlink["status"] == "info"

"""The checks that look and change nothing, each with a machine as it should be and as it should not."""

import dataclasses
import os
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapd.arena import free_hugepages_bytes
from snapd.config import Config, load_config
from snapd.doctor import hardware, memory, mooncake, paths, software, transports
from snapd.doctor.finding import Finding, Obstacle, Places, configured_concerns
from snapd.doctor.gpus import Gpus
from snapd.doctor.hardware import RdmaPort
from snapd.doctor.mooncake import Installed
from snapd.doctor.selftest import SelfTestFailed
from snapd.doctor.transports import Route
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.mooncake_package import MissingLibrary, Package
from snapd.units import GIB, MIB

PORT = RdmaPort("mlx5_0", "1", "ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand")
PACKAGE = Package("mooncake-transfer-engine", "0.3.14", "/engine.so")


def config_of(**settings: object) -> Config:
    return load_config(Path(os.devnull), {}, {"size": "64MiB"} | settings)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A machine without anything."""
    made = Places(proc=tmp_path / "proc", sys=tmp_path / "sys", dev=tmp_path / "dev")
    for path in (made.proc, made.sys, made.dev):
        path.mkdir()
    return made


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def statuses(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.status for finding in findings}


# --- software ----------------------------------------------------------------------------------


def test_on_this_machine_nothing_of_the_software_fails() -> None:
    found = software.check_software()
    assert [finding.name for finding in found] == ["snapd", "python", "memfd", "pidfd", "SO_PEERPIDFD"]
    assert not [finding for finding in found if finding.status == "fail"]


@pytest.mark.parametrize(
    ("check", "call", "status"),
    [(software.check_memfd, "memfd_create", "fail"), (software.check_pidfd, "pidfd_open", "warn")],
)
def test_a_call_that_the_kernel_refuses_is_a_finding(
    check: Callable[[], Finding], call: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(software.os, call, refuse)
    found = check()
    assert (found.status, "Operation not permitted" in found.detail) == (status, True)
    assert found.fix


def test_an_older_kernel_without_peer_pidfd_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "SO_PEERPIDFD", 9_999)
    assert software.check_peer_pidfd().status == "info"


# --- hardware ----------------------------------------------------------------------------------


def add_port(places: Places, state: str = "4: ACTIVE") -> None:
    port = places.sys / "class/infiniband/mlx5_0/ports/1"
    write(port / "state", state + "\n")
    write(port / "rate", "400 Gb/sec (4X NDR)\n")
    write(port / "link_layer", "InfiniBand\n")


def test_a_machine_without_rdma_says_so(places: Places) -> None:
    ports = hardware.rdma_ports(places)
    assert statuses(hardware.check_rdma(ports, MooncakeConfig(), places)) == {"RDMA devices": "info"}


@pytest.mark.parametrize(
    ("state", "status"), [("4: ACTIVE", "ok"), ("1: DOWN", "warn"), ("2: INIT", "warn"), ("", "warn")]
)
def test_every_rdma_port_is_told_with_state_rate_and_link(state: str, status: str, places: Places) -> None:
    add_port(places, state)
    (found,) = hardware.check_rdma(hardware.rdma_ports(places), MooncakeConfig(), places)
    assert (found.name, found.status) == ("mlx5_0 port 1", status)
    assert "400 Gb/sec (4X NDR), InfiniBand" in found.detail
    assert bool(found.fix) is (status != "ok")


def test_a_configured_device_that_is_not_there_fails_rdma_only(places: Places) -> None:
    add_port(places)
    ports = hardware.rdma_ports(places)
    config = MooncakeConfig(protocol="rdma", devices="mlx5_0, mlx5_9")
    *_, found = hardware.check_rdma(ports, config, places)
    assert (found.status, found.concerns) == ("fail", "mooncake.rdma")
    assert found.detail.startswith("mlx5_9:")
    assert len(hardware.check_rdma(ports, MooncakeConfig(protocol="rdma", devices="mlx5_0"), places)) == 1
    assert len(hardware.check_rdma(ports, MooncakeConfig(devices="mlx5_9"), places)) == 1


def test_a_device_file_that_may_not_be_opened_fails_rdma(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_port(places)
    write(places.dev / "infiniband/uverbs0", "")
    ports = hardware.rdma_ports(places)
    assert len(hardware.check_rdma(ports, MooncakeConfig(), places)) == 1
    monkeypatch.setattr(hardware.os, "access", lambda *_: False)
    *_, found = hardware.check_rdma(ports, MooncakeConfig(), places)
    assert (found.name, found.status, found.concerns) == ("/dev/infiniband", "fail", "mooncake.rdma")


def nvidia_smi(directory: Path, script: str) -> str:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_gpus_are_those_of_nvidia_smi(places: Places, tmp_path: Path) -> None:
    command = nvidia_smi(tmp_path, "echo '0, NVIDIA H200, 143771 MiB, 570.1'")
    assert hardware.gpus(places, command) == ["0, NVIDIA H200, 143771 MiB, 570.1"]
    assert statuses(hardware.check_gpus(["0, NVIDIA H200"])) == {"GPU": "ok"}


@pytest.mark.parametrize("script", ["exit 9", "exec sleep 60"])
def test_without_a_working_nvidia_smi_the_driver_is_asked(
    script: str, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_NVIDIA_SMI_S", 0.2)
    write(
        places.proc / "driver/nvidia/gpus/0000:1b:00.0/information",
        "Model: \t\t NVIDIA H200\nIRQ:   \t 99\n",
    )
    command = nvidia_smi(tmp_path, script)
    assert hardware.gpus(places, command) == ["NVIDIA H200, 0000:1b:00.0"]
    assert hardware.gpus(places, "/nowhere/nvidia-smi") == ["NVIDIA H200, 0000:1b:00.0"]


def test_where_the_driver_says_nothing_the_device_files_do(places: Places) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        write(places.dev / name, "")
    assert hardware.gpus(places, "/nowhere/nvidia-smi") == [
        "unknown model, nvidia0",
        "unknown model, nvidia1",
    ]


def test_no_gpu_is_told() -> None:
    assert statuses(hardware.check_gpus([])) == {"GPUs": "info"}


# --- memory ------------------------------------------------------------------------------------


def meminfo(places: Places, free: int, reserved: int = 0) -> None:
    write(
        places.proc / "meminfo",
        f"MemAvailable: 1 kB\nHugePages_Free: {free}\nHugePages_Rsvd: {reserved}\nHugepagesize: 2048 kB\n",
    )


def test_hugepages_that_are_reserved_are_not_free(places: Places) -> None:
    assert free_hugepages_bytes(places.proc / "meminfo") == (0, 0)
    meminfo(places, 40, 8)
    assert free_hugepages_bytes(places.proc / "meminfo") == (64 * MIB, 2 * MIB)


@pytest.mark.parametrize(
    ("setting", "free_bytes", "page_bytes", "status"),
    [
        ("on", 64 * MIB, 2 * MIB, "ok"),
        ("on", 62 * MIB, 2 * MIB, "fail"),
        ("on", 0, 0, "fail"),
        ("auto", 64 * MIB, 2 * MIB, "ok"),
        ("auto", 62 * MIB, 2 * MIB, "info"),
        ("off", 64 * MIB, 2 * MIB, "info"),
    ],
)
def test_hugepages_that_are_needed_must_be_free(
    setting: str, free_bytes: int, page_bytes: int, status: str
) -> None:
    config = config_of(hugepages=setting)
    found = memory.check_hugepages(config, free_bytes, page_bytes, is_daemon_running=False)
    assert (found.status, bool(found.fix)) == (status, status == "fail")


def test_the_command_for_hugepages_is_for_all_arenas() -> None:
    config = config_of(hugepages="on", ranks="3", size="5MiB")
    found = memory.check_hugepages(config, 0, 2 * MIB, is_daemon_running=False)
    assert "vm.nr_hugepages=9" in found.fix
    assert memory.check_hugepages(config, 0, 2 * MIB, is_daemon_running=True).status == "info"


@pytest.mark.parametrize(
    ("available_bytes", "is_running", "prefault", "status"),
    [
        (64 * MIB, False, "true", "ok"),
        (64 * MIB - 1, False, "true", "fail"),
        (64 * MIB - 1, False, "false", "warn"),
        (64 * MIB - 1, True, "true", "info"),
        (None, False, "true", "info"),
    ],
)
def test_arenas_must_fit_in_memory_unless_a_daemon_has_them(
    available_bytes: int | None, is_running: bool, prefault: str, status: str
) -> None:
    found = memory.check_available(
        config_of(prefault=prefault), available_bytes, is_daemon_running=is_running
    )
    assert (found.status, found.concerns) == (status, "")
    assert bool(found.fix) is (status in ("fail", "warn"))


def test_hugepages_spare_the_other_memory(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 0)

    def look() -> dict[str, str]:
        return statuses(
            memory.check_memory(
                config_of(), places, is_daemon_running=False, wants_rdma=False, has_rdma=False
            )
        )

    meminfo(places, 32)
    assert "available" not in look()
    meminfo(places, 31)
    assert look()["available"] == "fail"


@pytest.mark.parametrize(
    ("limit_bytes", "may_exceed", "wants_rdma", "has_rdma", "status"),
    [
        (resource.RLIM_INFINITY, False, True, True, "ok"),
        (8 * MIB, True, True, True, "ok"),
        (64 * MIB, False, True, True, "ok"),
        (8 * MIB, False, True, True, "fail"),
        (8 * MIB, False, False, True, "warn"),
        (8 * MIB, False, False, False, "info"),
    ],
)
def test_rdma_must_be_able_to_lock_the_arenas(
    limit_bytes: int, may_exceed: bool, wants_rdma: bool, has_rdma: bool, status: str
) -> None:
    found = memory.check_locked(
        config_of(), limit_bytes, may_exceed=may_exceed, wants_rdma=wants_rdma, has_rdma=has_rdma
    )
    assert found.status == status
    if status in ("fail", "warn"):
        assert found.concerns == "mooncake.rdma"
        assert "LimitMEMLOCK=infinity" in found.fix


@pytest.mark.parametrize(("capabilities", "has"), [("0000000000004000", True), ("000001ffffffbfff", False)])
def test_the_capability_to_lock_is_read_from_the_status(capabilities: str, has: bool, places: Places) -> None:
    assert not memory.has_ipc_lock(places)
    write(places.proc / "self/status", f"Name:\tx\nCapEff:\t{capabilities}\n")
    assert memory.has_ipc_lock(places) is has


def test_arenas_are_told_with_their_devices() -> None:
    assert memory.check_arenas(config_of()).detail == "one of 64 MiB on cpu"
    assert memory.check_arenas(config_of(device="cuda:1")).detail == "one of 64 MiB on cuda:1"
    assert memory.check_arenas(config_of(ranks="2")).detail == "2 of 128 MiB together on cpu"


# --- paths -------------------------------------------------------------------------------------


@pytest.fixture
def in_directory(tmp_path: Path) -> Config:
    return config_of(socket_path=f"{tmp_path}/run/snapd.sock", log_path=f"{tmp_path}/log/sync.jsonl")


def look_at_paths(config: Config) -> dict[str, str]:
    is_running = paths.is_daemon_running(config)
    return statuses(paths.check_paths(config, is_daemon_running=is_running))


def test_paths_whose_directories_can_be_made_are_fine_and_nothing_is_made(
    in_directory: Config, tmp_path: Path
) -> None:
    found = look_at_paths(in_directory)
    assert (found["socket"], found["log"]) == ("ok", "ok")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_directory_fails(in_directory: Config, tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    (tmp_path / "log").touch()
    found = look_at_paths(in_directory)
    assert (found["socket"], found["log"]) == ("fail", "fail")


def test_something_else_in_the_place_of_socket_or_log_fails(in_directory: Config, tmp_path: Path) -> None:
    write(tmp_path / "run/snapd.sock", "")
    (tmp_path / "log/sync.jsonl").mkdir(parents=True)
    found = look_at_paths(in_directory)
    assert (found["socket"], found["log"]) == ("fail", "fail")


def test_directories_that_may_not_be_written_fail(
    in_directory: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths.os, "access", lambda *_: False)
    found = look_at_paths(in_directory)
    assert (found["socket"], found["log"]) == ("fail", "fail")


def test_a_log_that_may_not_be_written_fails(
    in_directory: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "log/sync.jsonl", "")
    monkeypatch.setattr(paths.os, "access", lambda path, _: not str(path).endswith("jsonl"))
    assert look_at_paths(in_directory)["log"] == "fail"


def test_a_directory_of_another_user_fails(
    in_directory: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 4_711, -1) if os.geteuid() == 0 else monkeypatch.setattr(
        paths.os, "geteuid", lambda: 4_711
    )
    assert look_at_paths(in_directory)["socket"] == "fail"


@pytest.fixture
def listening(in_directory: Config) -> Iterator[Config]:
    path = Path(in_directory.socket_path)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        yield in_directory


def test_a_running_daemon_is_seen(listening: Config) -> None:
    assert look_at_paths(listening)["socket"] == "info"


def test_a_socket_that_nobody_listens_on_is_no_obstacle(in_directory: Config) -> None:
    path = Path(in_directory.socket_path)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    assert look_at_paths(in_directory)["socket"] == "ok"


def test_too_little_room_for_the_log_warns(in_directory: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Full:
        f_bavail: int = 1
        f_frsize: int = 4096

    monkeypatch.setattr(paths.os, "statvfs", lambda _: Full())
    found = paths.check_log_room(in_directory)
    assert (found.status, bool(found.fix)) == ("warn", True)
    assert paths.check_log_room(config_of(log_rotate_bytes="0")).status == "info"


# --- mooncake ----------------------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that says what is installed."""

    def say(
        found: Package | None = PACKAGE,
        missing: tuple[MissingLibrary, ...] = (),
        names: tuple[str, ...] = (PACKAGE.name,),
    ) -> None:
        monkeypatch.setattr(mooncake, "find_package", lambda: found)
        monkeypatch.setattr(mooncake, "missing_libraries", lambda _: list(missing))
        monkeypatch.setattr(mooncake, "installed_names", lambda: list(names))

    return say


def look_at_mooncake(
    load: Callable[[float], tuple[str, ...]] = lambda _: (), *, is_wanted: bool = True
) -> Installed:
    return mooncake.look(is_wanted=is_wanted, timeout_s=1.0, load=load)


def never(_: float) -> tuple[str, ...]:
    raise AssertionError("it must not be loaded")


@pytest.mark.parametrize(("is_wanted", "status"), [(True, "fail"), (False, "info")])
def test_no_package_fails_only_where_it_is_configured(
    is_wanted: bool, status: str, package: Callable[..., None]
) -> None:
    package(None)
    found = look_at_mooncake(never, is_wanted=is_wanted)
    assert found.why_not == "Mooncake is not installed"
    assert statuses(list(found.findings)) == {"package": status}
    assert "kv-snapd[mooncake-cpu]" in found.install


def test_every_missing_library_is_a_finding_and_nothing_is_loaded(package: Callable[..., None]) -> None:
    package(
        missing=(
            MissingLibrary("libnuma.so.1", "engine.so", "libnuma1"),
            MissingLibrary("libibverbs.so.1", "libasio.so", "libibverbs1"),
        )
    )
    found = look_at_mooncake(never)
    assert found.install == "apt-get install -y libibverbs1 libnuma1"
    fixes = {finding.name: finding.fix for finding in found.findings if finding.status == "fail"}
    assert fixes == {
        "libnuma.so.1": "apt-get install -y libnuma1",
        "libibverbs.so.1": "apt-get install -y libibverbs1",
        "shared libraries": "apt-get install -y libibverbs1 libnuma1",
    }
    assert {finding.concerns for finding in found.findings if finding.status == "fail"} == {"mooncake"}


def test_two_packages_in_one_place_are_a_warning(package: Callable[..., None]) -> None:
    package(names=(PACKAGE.name, "mooncake-transfer-engine-cuda13"))
    assert statuses(list(look_at_mooncake().findings))["other packages"] == "warn"


def test_an_engine_that_does_not_load_fails(package: Callable[..., None]) -> None:
    def fail(_: float) -> tuple[str, ...]:
        raise SelfTestFailed("it died")

    package()
    found = look_at_mooncake(fail)
    assert (found.why_not, statuses(list(found.findings))["engine"]) == ("it died", "fail")


def test_what_the_build_supports_is_told(package: Callable[..., None]) -> None:
    package()
    found = look_at_mooncake(lambda _: ("CUDA", "INTRA_NVLINK"))
    assert (found.why_not, found.supports) == ("", ("CUDA", "INTRA_NVLINK"))


# --- what stands against a protocol ------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "installed", "ports", "why"),
    [
        ("tcp", Installed(package=PACKAGE), [], None),
        ("tcp", Installed(package=None, why_not="not there"), [PORT], "not there"),
        ("rdma", Installed(package=PACKAGE), [], "no RDMA device"),
        ("rdma", Installed(package=PACKAGE), [PORT], None),
        (
            "rdma",
            Installed(package=PACKAGE),
            [RdmaPort("mlx5_0", "1", "DOWN", "", "")],
            "no port of an RDMA device is active",
        ),
    ],
)
def test_each_protocol_says_what_it_lacks(
    protocol: transports.Protocol, installed: Installed, ports: list[RdmaPort], why: str | None
) -> None:
    route = Route(transport="mooncake", mooncake=MooncakeConfig(protocol=protocol))
    found = transports.obstacle_to(route, installed, ports, Gpus(why_not="no GPU"))
    assert (found.why if found else None) == why
    assert found is None or found.fix


def test_an_obstacle_fails_only_where_the_transport_is_configured() -> None:
    route = Route(transport="mooncake", mooncake=MooncakeConfig(protocol="rdma"))
    for is_wanted, status in ((True, "fail"), (False, "info")):
        result, finding = transports.look_at(
            route,
            obstacle=Obstacle("no RDMA device", "buy one"),
            is_wanted=is_wanted,
            size_bytes=MIB,
            timeout_s=1.0,
        )
        assert (result.ok, result.tested, result.why) == (False, False, "no RDMA device")
        assert (finding.status, finding.concerns) == (status, "mooncake.rdma on cpu")


def test_the_configured_protocol_is_tried_as_configured() -> None:
    config = MooncakeConfig(protocol="rdma", host="10.0.0.7", devices="mlx5_0", settings={"MC_MTU": "4096"})
    found = transports.protocol_configs(config)
    assert found["rdma"] is config
    assert found["tcp"].host == MooncakeConfig().host
    assert (found["tcp"].protocol, found["tcp"].settings) == ("tcp", {"MC_MTU": "4096"})


def test_a_self_test_takes_its_share_of_the_memory() -> None:
    assert transports.self_test_bytes(256 * MIB, None) == 256 * MIB
    assert transports.self_test_bytes(256 * MIB, 64 * GIB) == 256 * MIB
    assert transports.self_test_bytes(256 * MIB, 100 * MIB) == 25 * MIB
    assert transports.self_test_bytes(256 * MIB, 0) == MIB


@pytest.mark.parametrize(
    ("settings", "concerns"),
    [
        ({}, {"", "shm", "shm on cpu"}),
        ({"device": "cuda:3"}, {"", "shm", "shm on cuda:3"}),
        ({"transport": "mooncake"}, {"", "mooncake", "mooncake.tcp", "mooncake.tcp on cpu"}),
        (
            {"transport": "mooncake", "mooncake.protocol": "rdma"},
            {"", "mooncake", "mooncake.rdma", "mooncake.rdma on cpu"},
        ),
    ],
)
def test_only_findings_about_the_configured_transport_count(
    settings: dict[str, object], concerns: set[str]
) -> None:
    assert configured_concerns(config_of(**settings)) == concerns

"""The whole examination, in the order in which it is shown."""

import msgspec

from snapd.arena import available_memory_bytes
from snapd.config import Config
from snapd.doctor import hardware, memory, mooncake, paths, software, transports
from snapd.doctor.finding import MOONCAKE, SHM, Finding, Places, configured_concerns
from snapd.doctor.selftest import TIMEOUT_S_DEFAULT
from snapd.doctor.transports import SELF_TEST_BYTES_DEFAULT, TransferResult
from snapd.transport.mooncake_package import MissingLibrary


class MooncakeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Mooncake: what is installed, and which of its protocols work.

    Attributes:
        package: name of the package; None: there is none.
        version: of the package.
        missing_libraries: shared libraries that it lacks.
        install: the command that helps; empty if nothing is missing.
        tcp: whether it works.
        rdma: whether it works.
        nvlink_intra: whether it works.
    """

    package: str | None
    version: str | None
    missing_libraries: tuple[MissingLibrary, ...]
    install: str
    tcp: TransferResult
    rdma: TransferResult
    nvlink_intra: TransferResult


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What doctor found.

    Attributes:
        ok: the daemon can run as configured, and the configured transport works.
        transport: the configured one.
        protocol: of Mooncake, as configured, whether or not it is the transport.
        mooncake: Mooncake.
        shm: whether shared memory works.
        in_the_way: names of the findings that keep it from being ok.
        findings: everything, for a person.
    """

    ok: bool
    transport: str
    protocol: str
    mooncake: MooncakeReport
    shm: TransferResult
    in_the_way: tuple[str, ...]
    findings: tuple[Finding, ...]


def examine(
    config: Config,
    *,
    self_test_bytes: int = SELF_TEST_BYTES_DEFAULT,
    timeout_s: float = TIMEOUT_S_DEFAULT,
    places: Places | None = None,
) -> Report:
    """Look at everything. Takes as long as the self-tests: seconds, or *timeout_s* for each at most.

    Args:
        config: what the daemon would run with.
        self_test_bytes: what each self-test moves; 0: no self-tests.
        timeout_s: for each thing that a child process does.
        places: where the kernel tells about itself.
    """
    places = places or Places()
    is_running = paths.is_daemon_running(config)
    wanted = configured_concerns(config)
    wants_rdma = MOONCAKE in wanted and config.mooncake.protocol == "rdma"
    ports, gpus = hardware.rdma_ports(places), hardware.gpus(places)
    installed = mooncake.look(is_wanted=MOONCAKE in wanted, timeout_s=timeout_s)
    findings = [
        *software.check_software(),
        *installed.findings,
        *hardware.check_rdma(ports, config.mooncake, places),
        *hardware.check_gpus(gpus),
        *memory.check_memory(
            config, places, is_daemon_running=is_running, wants_rdma=wants_rdma, has_rdma=bool(ports)
        ),
        *paths.check_paths(config, is_daemon_running=is_running),
    ]
    size_bytes = transports.self_test_bytes(self_test_bytes, available_memory_bytes())
    shm, finding = transports.look_at(
        "shm",
        obstacle=None,
        mooncake=config.mooncake,
        is_wanted=SHM in wanted,
        size_bytes=size_bytes,
        timeout_s=timeout_s,
    )
    findings.append(finding)
    results: dict[str, TransferResult] = {}
    for protocol, how in transports.protocol_configs(config.mooncake).items():
        results[protocol], finding = transports.look_at(
            "mooncake",
            obstacle=transports.obstacle_to(protocol, config, installed, ports, gpus),
            mooncake=how,
            is_wanted=MOONCAKE in wanted and protocol == config.mooncake.protocol,
            size_bytes=size_bytes,
            timeout_s=timeout_s,
        )
        findings.append(finding)
    in_the_way = tuple(
        finding.name for finding in findings if finding.status == "fail" and finding.concerns in wanted
    )
    return Report(
        ok=not in_the_way,
        transport=config.transport,
        protocol=config.mooncake.protocol,
        mooncake=MooncakeReport(
            package=installed.package.name if installed.package else None,
            version=installed.package.version if installed.package else None,
            missing_libraries=installed.missing,
            install=installed.install,
            **results,
        ),
        shm=shm,
        in_the_way=in_the_way,
        findings=tuple(findings),
    )

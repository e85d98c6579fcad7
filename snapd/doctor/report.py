"""The whole examination, in the order in which it is shown."""

import msgspec

from snapd.arena import available_memory_bytes
from snapd.config import Config
from snapd.doctor import gpus as gpu_checks
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
        tcp: whether it works, in host memory.
        rdma: the same.
        nvlink_intra: whether it works, inside the first GPU that has an arena, or would have one.
    """

    package: str | None
    version: str | None
    missing_libraries: tuple[MissingLibrary, ...]
    install: str
    tcp: TransferResult
    rdma: TransferResult
    nvlink_intra: TransferResult


class GpuResult(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a transport works for an arena on a GPU.

    Attributes:
        transport: ``shm`` or ``mooncake``.
        protocol: of Mooncake; None for ``shm``.
        device: of the arena, ``cuda:N``.
        source_device: of what is written into it.
        result: whether it works.
    """

    transport: str
    protocol: str | None
    device: str
    source_device: str
    result: TransferResult


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What doctor found.

    Attributes:
        ok: the daemon can run as configured, and the configured transport works.
        transport: the configured one.
        protocol: of Mooncake, as configured, whether or not it is the transport.
        mooncake: Mooncake.
        shm: whether shared memory works, on the host.
        gpus: what works for arenas on GPUs; empty if there are neither GPUs nor such arenas.
        in_the_way: names of the findings that keep it from being ok.
        findings: everything, for a person.
    """

    ok: bool
    transport: str
    protocol: str
    mooncake: MooncakeReport
    shm: TransferResult
    gpus: tuple[GpuResult, ...]
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
    ports, listed = hardware.rdma_ports(places), hardware.gpus(places)
    installed = mooncake.look(is_wanted=MOONCAKE in wanted, timeout_s=timeout_s)
    gpus = gpu_checks.look(config, listed, timeout_s=timeout_s)
    findings = [
        *software.check_software(),
        *installed.findings,
        *hardware.check_rdma(ports, config.mooncake, places),
        *hardware.check_gpus(listed),
        *gpu_checks.check_gpus(config, gpus, listed, is_daemon_running=is_running),
        *memory.check_memory(
            config, places, is_daemon_running=is_running, wants_rdma=wants_rdma, has_rdma=bool(ports)
        ),
        *paths.check_paths(config, is_daemon_running=is_running),
    ]
    host_bytes = transports.self_test_bytes(self_test_bytes, available_memory_bytes())
    # The first of each kind: in host memory where there is such, else inside one GPU.
    results: dict[str, TransferResult] = {}
    on_gpus: list[GpuResult] = []
    for route in transports.routes_of(config, gpus):
        size_bytes = host_bytes
        if route.is_on_gpu:
            size_bytes = gpu_checks.self_test_bytes(host_bytes, route.device, route.source_device, gpus)
        result, finding = transports.look_at(
            route,
            obstacle=transports.obstacle_to(route, installed, ports, gpus),
            is_wanted=route.concern in wanted,
            size_bytes=size_bytes,
            timeout_s=timeout_s,
            goes_through_host=transports.goes_through_host(route, gpus),
        )
        findings.append(finding)
        results.setdefault(route.kind, result)
        if route.is_on_gpu and (gpus.seen or route.concern in wanted):
            on_gpus.append(
                GpuResult(
                    transport=route.transport,
                    protocol=None if route.transport == SHM else route.mooncake.protocol,
                    device=route.device,
                    source_device=route.source_device,
                    result=result,
                )
            )
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
            tcp=results["tcp"],
            rdma=results["rdma"],
            nvlink_intra=results["nvlink_intra"],
        ),
        shm=results[SHM],
        gpus=tuple(on_gpus),
        in_the_way=in_the_way,
        findings=tuple(findings),
    )

"""Which copies a device gets, and that asking costs a CPU-only machine nothing."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from snapd.errors import ExtraMissing
from snapd.kv import copy, devicecopy, devicewarm, gpucopy, torchcopy
from snapd.kv.devicecopy import CopyJobs, choose_copy
from snapd.kv.devicejob import DeviceMemoryFull
from snapd.kv.devicewarm import warm_up


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    devicecopy._choose_for_gpu.cache_clear()
    yield
    devicecopy._choose_for_gpu.cache_clear()


def test_a_cpu_gets_the_cpus_copies() -> None:
    for device in ("cpu", torch.device("cpu")):
        jobs = choose_copy(device)
        assert (jobs.name, jobs.gather, jobs.scatter) == ("cpu", copy.GatherJob, copy.ScatterJob)
        assert not jobs.is_async


def test_a_gpu_that_passes_the_probe_gets_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[torch.device] = []
    monkeypatch.setattr(gpucopy, "probe", probed.append)
    with capture_logs() as logs:
        jobs = choose_copy("cuda:1")
        assert choose_copy(torch.device("cuda:1")) is jobs
    assert (jobs.name, jobs.gather, jobs.scatter) == ("triton", gpucopy.GpuGatherJob, gpucopy.GpuScatterJob)
    assert jobs.is_async
    assert probed == [torch.device("cuda:1")]
    assert logs == []


@pytest.mark.parametrize("error", [ExtraMissing("no Triton"), RuntimeError("no compiler")], ids=str)
def test_a_gpu_that_triton_refuses_gets_torchs_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(device: torch.device) -> None:
        raise error

    monkeypatch.setattr(gpucopy, "probe", refuse)
    with capture_logs() as logs:
        jobs = choose_copy("cuda:0")
        assert choose_copy("cuda:0") is jobs
    assert (jobs.name, jobs.gather) == ("torch", torchcopy.TorchGatherJob)
    assert jobs.scatter is torchcopy.TorchScatterJob
    assert jobs.is_async
    (warning,) = logs
    assert warning["log_level"] == "warning"
    assert warning["device"] == "cuda:0"
    assert str(error) in warning["error"]


class AcceleratorError(RuntimeError):
    """What torch raises when CUDA fails, since 2.8."""


# What is wrong for a moment, or with the GPU and not with Triton; and what is raised then.
NOT_TRITONS = [
    (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), DeviceMemoryFull),
    (RuntimeError("Triton Error [CUDA]: out of memory"), DeviceMemoryFull),
    (RuntimeError("CUDA error: unspecified launch failure"), RuntimeError),
    (AcceleratorError("no device"), AcceleratorError),
]


@pytest.mark.parametrize(("error", "raised"), NOT_TRITONS, ids=[str(error) for error, _ in NOT_TRITONS])
def test_what_is_not_tritons_fault_is_raised_and_the_next_question_tries_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    monkeypatch.setattr(torch, "AcceleratorError", AcceleratorError, raising=False)
    errors = [error]

    def probe(device: torch.device) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(gpucopy, "probe", probe)
    with capture_logs() as logs, pytest.raises(raised) as told:
        choose_copy("cuda:0")
    assert type(told.value) is raised
    assert logs == []
    assert choose_copy("cuda:0").name == "triton"


# --- warming up --------------------------------------------------------------------------------------


class GpuPool:
    """As much of a pool on a GPU as is looked at."""

    device = torch.device("cuda:0")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the jobs that were run to warm up."""
    names: list[str] = []
    monkeypatch.setattr(devicewarm, "run_small", lambda pool, jobs: names.append(jobs.name))
    monkeypatch.setattr(gpucopy, "warm_up", lambda pool: None)
    return names


def jobs_of(name: str) -> CopyJobs:
    return devicecopy._TRITON if name == "triton" else devicecopy.TORCH


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_what_can_be_warmed_up_is_used(ran: list[str], name: str) -> None:
    pool: Any = GpuPool()
    assert warm_up(pool, jobs_of(name)) is jobs_of(name)
    assert ran == [name]


@pytest.mark.parametrize("where", ["compiling", "running"])
def test_a_pool_that_triton_cannot_copy_gets_torchs_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, ran: list[str], where: str
) -> None:
    """The probe passed, but this pool's kernel is another."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("PassManager::run failed")

    def run(pool: object, jobs: CopyJobs) -> None:
        ran.append(jobs.name)
        if jobs.name == "triton":
            fail()

    monkeypatch.setattr(
        *(gpucopy, "warm_up", fail) if where == "compiling" else (devicewarm, "run_small", run)
    )
    pool: Any = GpuPool()
    with capture_logs() as logs:
        assert warm_up(pool, jobs_of("triton")).name == "torch"
    assert ran == (["torch"] if where == "compiling" else ["triton", "torch"])
    assert [(x["log_level"], x["error"]) for x in logs] == [("warning", "PassManager::run failed")]


@pytest.mark.parametrize(("error", "raised"), NOT_TRITONS, ids=[str(error) for error, _ in NOT_TRITONS])
@pytest.mark.parametrize("name", ["triton", "torch"])
def test_what_is_not_tritons_fault_ends_a_warm_up(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, raised: type[Exception]
) -> None:
    monkeypatch.setattr(torch, "AcceleratorError", AcceleratorError, raising=False)
    monkeypatch.setattr(gpucopy, "warm_up", lambda pool: None)

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(devicewarm, "run_small", fail)
    pool: Any = GpuPool()
    with capture_logs() as logs, pytest.raises(raised):
        warm_up(pool, jobs_of(name))
    assert logs == []


IMPORT_ALL = """
import importlib, pkgutil, sys
import snapd.kv
for module in pkgutil.iter_modules(snapd.kv.__path__):
    if module.name != "gpukernels":
        importlib.import_module("snapd.kv." + module.name)
from snapd.kv.devicecopy import choose_copy
assert choose_copy("cpu").name == "cpu"
assert "snapd.kv.gpucopy" in sys.modules
assert "triton" not in sys.modules, "triton"
import torch
assert not torch.cuda.is_initialized(), "CUDA"
"""


def test_importing_all_of_it_imports_no_triton_and_starts_no_cuda() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr

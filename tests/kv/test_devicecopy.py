"""Which copies a device gets, and that asking costs a CPU-only machine nothing."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from structlog.testing import capture_logs

from snapd.errors import ExtraMissing
from snapd.kv import copy, devicecopy, gpucopy, torchcopy
from snapd.kv.devicecopy import choose_copy


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

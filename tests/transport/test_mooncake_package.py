"""Which package of Mooncake is installed, what it lacks, and the command that helps."""

import importlib.metadata
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import pytest

from snapd.errors import ExtraMissing, TransportError
from snapd.transport import mooncake_package
from snapd.transport.mooncake_package import (
    CPU_PACKAGE,
    EXTRA_BY_PACKAGE,
    MissingLibrary,
    Package,
    find_package,
    install_command,
    installed_names,
    load_engine_module,
    missing_libraries,
)
from snapd.transport.sharedlibs import Finder
from tests.doctor.conftest import forget_mooncake
from tests.doctor.elf_builder import build_elf
from tests.doctor.fake_mooncake import PACKAGE, add_metadata, install

WITHOUT_GPU = f"without a GPU, in place of all this: pip install {CPU_PACKAGE}"
NOWHERE = {"env": {}, "cache": {}, "directories": (), "use_loaded": False}


@pytest.fixture(autouse=True)
def real_path() -> Iterator[list[str]]:
    """The real path. What is really installed is out of sight, and what a test imports is gone afterwards."""
    modules, path = forget_mooncake(), sys.path[:]
    sys.path[:] = [entry for entry in path if not has_mooncake(entry)]
    yield path
    sys.path[:] = path
    forget_mooncake()
    sys.modules.update(modules)  # type: ignore[arg-type]


def has_mooncake(entry: str) -> bool:
    return (Path(entry) / "mooncake").is_dir()


@pytest.fixture
def place(tmp_path: Path, real_path: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def library(soname: str) -> MissingLibrary:
    return MissingLibrary(soname, "engine.so", mooncake_package.DEBIAN_PACKAGES.get(soname, ""))


# --- which package -----------------------------------------------------------------------------


def test_nothing_installed_is_none() -> None:
    assert find_package() is None
    assert installed_names() == []


@pytest.mark.parametrize("name", EXTRA_BY_PACKAGE)
def test_each_package_is_found_by_its_own_name_and_not_imported(name: str, place: Path) -> None:
    install(place, name=name, version="0.3.99", is_python=False)
    assert find_package() == Package(name, "0.3.99", str(place / "mooncake" / "engine.so"))
    assert "mooncake" not in sys.modules


def test_of_two_packages_the_one_that_the_engine_is_from_is_named(place: Path) -> None:
    install(place, name="mooncake-transfer-engine", recorded_bytes=12_345, is_python=False)
    add_metadata(place, CPU_PACKAGE, "0.3.14", place / "mooncake" / "engine.so")
    found = find_package()
    assert found is not None
    assert (found.name, found.version) == (CPU_PACKAGE, "0.3.14")
    assert installed_names() == ["mooncake-transfer-engine", CPU_PACKAGE]


def test_another_projects_module_of_this_name_is_not_taken_for_it(place: Path) -> None:
    (place / "mooncake").mkdir()
    (place / "mooncake" / "__init__.py").touch()
    assert find_package() is None


def test_an_engine_that_no_distribution_has_installed_is_found(place: Path) -> None:
    build_elf(place / "mooncake" / "engine.so")
    (place / "mooncake" / "__init__.py").touch()
    assert find_package() == Package("mooncake", "", str(place / "mooncake" / "engine.so"))


def test_a_module_without_a_place_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("mooncake")
    monkeypatch.setitem(sys.modules, "mooncake", module)
    assert module.__spec__ is None
    assert find_package() is None


def test_metadata_that_were_cut_off_have_no_version(place: Path) -> None:
    install(place, is_python=False)
    (metadata,) = place.glob("*.dist-info/METADATA")
    metadata.write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\n")
    assert find_package() == Package(PACKAGE, "", str(place / "mooncake" / "engine.so"))


def test_a_distribution_without_its_module_has_no_engine(place: Path) -> None:
    add_metadata(place, PACKAGE, "1.0", build_elf(place / "elsewhere.so"))
    found = find_package()
    assert found == Package(PACKAGE, "1.0", "")
    with pytest.raises(TransportError, match=f"pip install --force-reinstall {PACKAGE}"):
        missing_libraries(found)


# --- what is missing ---------------------------------------------------------------------------


def test_every_missing_library_comes_with_its_debian_package(place: Path) -> None:
    path = build_elf(place / "engine.so", "libibverbs.so.1", "libnuma.so.1", "libcurl.so.4", "libcuda.so.1")
    found = missing_libraries(Package(PACKAGE, "1", str(path)), Finder(**NOWHERE))  # type: ignore[arg-type]
    assert found == [
        MissingLibrary("libibverbs.so.1", "engine.so", "libibverbs1"),
        MissingLibrary("libnuma.so.1", "engine.so", "libnuma1"),
        MissingLibrary("libcurl.so.4", "engine.so", "libcurl4"),
        MissingLibrary("libcuda.so.1", "engine.so", ""),
    ]


def test_a_cuda_runtime_from_pypi_counts_as_found(place: Path) -> None:
    path = build_elf(place / "engine.so", "libcudart.so.12")
    package = Package(PACKAGE, "1", str(path))
    finder = Finder(**NOWHERE)  # type: ignore[arg-type]
    assert [found.soname for found in missing_libraries(package, finder)] == ["libcudart.so.12"]
    build_elf(place / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.12")
    assert missing_libraries(package, finder) == []


def test_an_engine_that_is_no_library_says_how_to_get_a_whole_one(place: Path) -> None:
    path = place / "engine.so"
    path.write_bytes(b"half of it")
    with pytest.raises(TransportError, match=f"cannot be read .*force-reinstall {PACKAGE}"):
        missing_libraries(Package(PACKAGE, "1", str(path)))


def test_the_installed_package_is_looked_at_in_well_under_100_ms(real_path: list[str]) -> None:
    sys.path[:] = real_path
    package = find_package()
    if package is None:
        pytest.skip("no package of Mooncake is installed")
    times_s = []
    for _ in range(3):
        begun_s = perf_counter()
        missing_libraries(package)
        times_s.append(perf_counter() - begun_s)
    assert min(times_s) < 0.1


# --- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sonames", "command"),
    [
        ([], ""),
        (["librdmacm.so.1", "libibverbs.so.1"], "apt-get install -y libibverbs1 librdmacm1"),
        (["libssl.so.3", "libcrypto.so.3"], "apt-get install -y libssl3"),
        (
            ["libnuma.so.1", "libodd.so.5"],
            "apt-get install -y libnuma1  # find the package of libodd.so.5 with 'apt-file search NAME'",
        ),
        (
            ["libcuda.so.1"],
            f"# libcuda.so.1 comes with the NVIDIA driver; {WITHOUT_GPU}",
        ),
        (
            ["libnuma.so.1", "libcudart.so.12"],
            f"apt-get install -y libnuma1 && pip install nvidia-cuda-runtime-cu12  # {WITHOUT_GPU}",
        ),
        (
            ["libcudart.so.13"],
            f"pip install nvidia-cuda-runtime  # {WITHOUT_GPU}",
        ),
        (
            ["libglog-6ed04f2c.so.0.0.0"],
            f"pip install --force-reinstall {CPU_PACKAGE}  # libglog-6ed04f2c.so.0.0.0 should be inside it",
        ),
    ],
)
def test_the_command_can_be_pasted_into_a_shell(sonames: list[str], command: str) -> None:
    assert install_command([library(soname) for soname in sonames]) == command


def test_the_cpu_package_takes_the_place_of_the_installed_one(place: Path) -> None:
    install(place)
    command = install_command([library("libcuda.so.1")])
    assert command.endswith(f"pip uninstall -y {PACKAGE} && pip install {CPU_PACKAGE}")


# --- loading -----------------------------------------------------------------------------------


def test_without_a_package_the_extras_are_named() -> None:
    with pytest.raises(ExtraMissing) as caught:
        load_engine_module()
    for extra in EXTRA_BY_PACKAGE.values():
        assert f'"kv-snapd[{extra}]"' in str(caught.value)


def test_an_engine_without_its_libraries_names_all_of_them(place: Path) -> None:
    install(place, "libgone.so.1", "libgone.so.2", is_python=False)
    with pytest.raises(
        TransportError, match=r"2 shared libraries are missing \(libgone\.so\.1, libgone\.so\.2\): # find"
    ):
        load_engine_module()


def test_an_engine_that_has_all_it_needs_and_does_not_load_says_why(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(place)
    monkeypatch.setenv("FAKE_MOONCAKE", "import error")
    with pytest.raises(
        TransportError,
        match=rf"{PACKAGE} 9\.9 cannot be loaded \(undefined symbol: cuMemGone\): .*force-reinstall",
    ):
        load_engine_module()


def test_an_engine_that_was_cut_off_says_how_to_get_a_whole_one(place: Path) -> None:
    install(place, is_python=False)
    (place / "mooncake" / "engine.so").write_bytes(b"half of it")
    with pytest.raises(TransportError, match=f"cannot be read .*force-reinstall {PACKAGE}"):
        load_engine_module()


def test_what_the_loader_loads_is_loaded_whatever_seemed_missing(place: Path) -> None:
    install(place, "libgone.so.1", is_python=True)
    assert load_engine_module().__name__ == "mooncake.engine"


def test_the_versions_in_the_metadata_are_those_of_the_extras() -> None:
    """Every extra of this distribution installs the package that it is listed for."""
    try:
        requires = importlib.metadata.requires("kv-snapd") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("kv-snapd is not installed")
    found = {
        requirement.partition(">")[0]: requirement
        for requirement in requires
        if requirement.startswith("mooncake-")
    }
    if not found:
        pytest.skip("this installation is older than the extras")
    for package, extra in EXTRA_BY_PACKAGE.items():
        assert extra in found[package]

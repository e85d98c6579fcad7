"""Which package of Mooncake is installed, what it lacks, and the exact command that helps.

Its wheels link against libraries of the system that pip cannot install. The loader names the first one
only, in an ``ImportError`` that says nothing of packages.

Source: design, section 7.
"""

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

import msgspec

from snapd.errors import ExtraMissing, TransportError
from snapd.transport.sharedlibs import Finder, Missing, NotElf, find_in_packages

MODULE: Final = "mooncake"
ENGINE_MODULE: Final = "mooncake.engine"
CPU_PACKAGE: Final = "mooncake-transfer-engine-non-cuda"
# Each package with the extra of kv-snapd that installs it. All of them install the module ``mooncake``.
EXTRA_BY_PACKAGE: Final = {
    "mooncake-transfer-engine": "mooncake",
    "mooncake-transfer-engine-cuda13": "mooncake-cuda13",
    CPU_PACKAGE: "mooncake-cpu",
}
# Not among the extras, and they install the same module.
_OTHER_PACKAGES: Final = (
    "mooncake-transfer-engine-efa",
    "mooncake-transfer-engine-efa-cuda13",
    "mooncake-transfer-engine-efa-non-cuda",
    "mooncake-transfer-engine-musa",
    "mooncake-transfer-engine-npu",
)
INSTALL_HELP: Final = (
    'pip install "kv-snapd[mooncake]" (CUDA 12), "kv-snapd[mooncake-cuda13]" (CUDA 13) or '
    '"kv-snapd[mooncake-cpu]" (no GPU): one of them'
)

# Packages of Debian and Ubuntu.
DEBIAN_PACKAGES: Final = {
    "libc.so.6": "libc6",
    "libdl.so.2": "libc6",
    "libm.so.6": "libc6",
    "libpthread.so.0": "libc6",
    "libresolv.so.2": "libc6",
    "librt.so.1": "libc6",
    "libcurl.so.4": "libcurl4",
    "libefa.so.1": "ibverbs-providers",
    "libgcc_s.so.1": "libgcc-s1",
    "libgflags.so.2.2": "libgflags2.2",
    "libglog.so.0": "libglog0v5",
    "libgomp.so.1": "libgomp1",
    "libibverbs.so.1": "libibverbs1",
    "libjsoncpp.so.25": "libjsoncpp25",
    "libmlx5.so.1": "ibverbs-providers",
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
    "libnuma.so.1": "libnuma1",
    "librdmacm.so.1": "librdmacm1",
    "libssl.so.3": "libssl3",
    "libcrypto.so.3": "libssl3",
    "libstdc++.so.6": "libstdc++6",
    "libunwind.so.8": "libunwind8",
    "liburing.so.2": "liburing2",
    "libxxhash.so.0": "libxxhash0",
    "libz.so.1": "zlib1g",
    "libzstd.so.1": "libzstd1",
}
_DRIVER_LIBRARIES: Final = ("libcuda.so.", "libnvidia-ml.so.")
_CUDA_RUNTIME: Final = re.compile(r"libcudart\.so\.(\d+)")
# What auditwheel put beside the engine has a digest in its name; the others are Mooncake's own.
_BUNDLED: Final = re.compile(r".+-[0-9a-f]{8}\.so.*|libasio\.so|libetcd_wrapper\.so|libtransfer_engine\.so")


class Package(msgspec.Struct, frozen=True):
    """The installed package that the module ``mooncake`` comes from.

    Attributes:
        name: of the distribution; ``mooncake`` if no distribution says that it installed the module.
        version: of the distribution; empty if unknown.
        engine_path: the extension module ``mooncake.engine``; empty if the package has none.
    """

    name: str
    version: str
    engine_path: str


class MissingLibrary(msgspec.Struct, frozen=True):
    """A shared library that the engine needs and that the loader would not find.

    Attributes:
        soname: its name, such as ``libibverbs.so.1``.
        needed_by: file name of the first library that needs it.
        install: the package of Debian or Ubuntu that has it; empty: it does not come from there, or is not
            known, and ``install_command`` says what to do.
    """

    soname: str
    needed_by: str
    install: str


def find_package() -> Package | None:
    """Return the installed package of Mooncake; None: there is none. Imports nothing of it."""
    directory = _module_directory()
    names = installed_names()
    if directory is None:
        # Its metadata without its module: an installation that was cut off.
        return Package(names[0], _version(names[0]), "") if names else None
    engine_path = next(iter(sorted(directory.glob("engine.*so"))), None)
    if not names and engine_path is None:
        # Another project has a module of this name.
        return None
    name = next((name for name in names if _has_installed(name, engine_path)), names[0] if names else MODULE)
    return Package(name, _version(name) if names else "", str(engine_path or ""))


def _version(name: str) -> str:
    # Metadata that were cut off have none.
    return str(importlib.metadata.version(name) or "")


def installed_names() -> list[str]:
    """Return the distributions that install the module ``mooncake``; more than one overwrite each other."""
    found = []
    for name in (*EXTRA_BY_PACKAGE, *_OTHER_PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            found.append(name)
    return found


def _module_directory() -> Path | None:
    try:
        spec = importlib.util.find_spec(MODULE)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _has_installed(name: str, engine_path: Path | None) -> bool:
    """Return whether the engine is the file that this distribution has installed, by its size."""
    with contextlib.suppress(OSError, importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(name) or ():
            if engine_path is not None and file.name == engine_path.name and file.parent.name == MODULE:
                return file.size == engine_path.stat().st_size
    return False


def missing_libraries(package: Package, finder: Finder | None = None) -> list[MissingLibrary]:
    """Return every shared library that the engine would not find, in the order in which it would look.

    Loads nothing. What NVIDIA's packages on PyPI brought counts as found: ``load_engine_module`` loads it.

    Raises:
        TransportError: the engine is not there or is no library of this machine; says what to do.
    """
    return [
        MissingLibrary(soname, needed_by, DEBIAN_PACKAGES.get(soname, ""))
        for soname, needed_by in _not_found(package, finder or Finder())
        if _from_pypi(soname) is None
    ]


def _not_found(package: Package, finder: Finder) -> list[Missing]:
    if not package.engine_path:
        raise TransportError(f"{package.name} has no engine: {_reinstall(package)}")
    try:
        return finder.missing(Path(package.engine_path))
    except (OSError, NotElf) as error:
        raise TransportError(
            f"{package.name}: the engine cannot be read ({error}): {_reinstall(package)}"
        ) from None


def _from_pypi(soname: str) -> Path | None:
    """Return the CUDA runtime that a package on PyPI brought; the loader does not look there itself."""
    return find_in_packages(soname) if _CUDA_RUNTIME.fullmatch(soname) else None


def install_command(missing: Sequence[MissingLibrary]) -> str:
    """Return a shell command that installs what is missing; what no command can do follows as a comment.

    Empty if nothing is missing.
    """
    commands, notes = [], []
    if debian := sorted({library.install for library in missing if library.install}):
        commands.append("apt-get install -y " + " ".join(debian))
    others = [library.soname for library in missing if not library.install]
    if bundled := [soname for soname in others if _BUNDLED.fullmatch(soname)]:
        package = find_package()
        name = package.name if package else CPU_PACKAGE
        commands.append(f"pip install --force-reinstall {name}")
        notes.append(f"{', '.join(bundled)} should be inside it")
    unknown: list[str] = []
    needs_cuda = False
    for soname in others:
        if soname in bundled:
            continue
        if runtime := _CUDA_RUNTIME.fullmatch(soname):
            needs_cuda = True
            commands.append(f"pip install {_runtime_package(int(runtime[1]))}")
        elif soname.startswith(_DRIVER_LIBRARIES):
            needs_cuda = True
            notes.append(f"{soname} comes with the NVIDIA driver")
        else:
            unknown.append(soname)
    if unknown:
        notes.append(f"find the package of {', '.join(unknown)} with 'apt-file search NAME'")
    if needs_cuda:
        notes.append(f"without a GPU, in place of all this: {_use_cpu_package()}")
    comment = "# " + "; ".join(notes) if notes else ""
    return "  ".join(part for part in (" && ".join(commands), comment) if part)


def _use_cpu_package() -> str:
    package = find_package()
    remove = f"pip uninstall -y {package.name} && " if package and package.name in EXTRA_BY_PACKAGE else ""
    return f"{remove}pip install {CPU_PACKAGE}"


def _runtime_package(cuda_major: int) -> str:
    return f"nvidia-cuda-runtime-cu{cuda_major}" if cuda_major < 13 else "nvidia-cuda-runtime"


def _reinstall(package: Package) -> str:
    if package.name not in EXTRA_BY_PACKAGE:
        return INSTALL_HELP
    return f"pip install --force-reinstall {package.name}"


def load_engine_module() -> ModuleType:
    """Import ``mooncake.engine`` and return it.

    Raises:
        ExtraMissing: no package of Mooncake is installed; says how to install one.
        TransportError: it cannot be imported; names every missing library and the exact command.
    """
    package = find_package()
    if package is None:
        raise ExtraMissing(f"Mooncake is not installed: {INSTALL_HELP}")
    finder = Finder()
    try:
        for soname, _ in _not_found(package, finder):
            if (path := _from_pypi(soname)) is not None:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        return importlib.import_module(ENGINE_MODULE)
    except (ImportError, OSError) as error:
        # Only now: the loader's word counts, not what was found missing before it was asked.
        missing = missing_libraries(package, finder)
        if not missing:
            raise TransportError(
                f"{package.name} {package.version} cannot be loaded ({error}): {_reinstall(package)}"
            ) from error
        names = ", ".join(library.soname for library in missing)
        raise TransportError(
            f"{package.name} cannot be loaded, {len(missing)} shared "
            f"{'library is' if len(missing) == 1 else 'libraries are'} missing ({names}): "
            f"{install_command(missing)}"
        ) from error

"""Directories that stand for an installed Mooncake, or for none: put one first on the path."""

import shutil
from pathlib import Path

from tests.doctor.elf_builder import build_elf

PACKAGE = "mooncake-transfer-engine"
_ENGINE = Path(__file__).parent / "fake_engine.py"
_HIDES = '''"""Read at the start of Python: hides every package of Mooncake."""
import importlib.metadata
import sys


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mooncake":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def from_name(name, found=importlib.metadata.Distribution.from_name):
    if name.startswith("mooncake"):
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)


sys.meta_path.insert(0, Hidden())
importlib.metadata.Distribution.from_name = from_name
'''


def install(
    directory: Path,
    *needed: str,
    name: str = PACKAGE,
    version: str = "9.9",
    is_python: bool = True,
    recorded_bytes: int | None = None,
) -> Path:
    """Install a package in *directory*, and return it.

    Args:
        directory: for the path.
        needed: what the engine's library needs.
        name: of the distribution.
        version: of the distribution.
        is_python: the engine that is imported is the fake one; else it is a library without code.
        recorded_bytes: how large the distribution says that its engine is.
    """
    package = directory / "mooncake"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    library = build_elf(package / ("engine.fake.so" if is_python else "engine.so"), *needed)
    if is_python:
        shutil.copy(_ENGINE, package / "engine.py")
    add_metadata(directory, name, version, library, recorded_bytes)
    return directory


def add_metadata(
    directory: Path, name: str, version: str, library: Path, recorded_bytes: int | None = None
) -> None:
    """Say that a distribution has installed *library*."""
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    size_bytes = library.stat().st_size if recorded_bytes is None else recorded_bytes
    (info / "RECORD").write_text(f"mooncake/{library.name},,{size_bytes}\n")


def hide(directory: Path) -> Path:
    """Make a directory that hides Mooncake from every Python which has it on PYTHONPATH."""
    (directory / "sitecustomize.py").write_text(_HIDES)
    return directory

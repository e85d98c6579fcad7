"""Build the package with its hot modules compiled, and try it.

    python tools/compiled.py DIRECTORY            # build into DIRECTORY/site
    python tools/compiled.py DIRECTORY --test     # and run the core's tests with what was built

Everything happens in a copy of the sources: nothing that was compiled ever lies beside them, where it would
hide what is changed later. It needs a C compiler, Python's headers and mypy. Afterwards
``PYTHONPATH=DIRECTORY/site`` has the compiled modules used.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Final

import click

ROOT: Final = Path(__file__).parent.parent
_BUILT_FROM: Final = ("snapd", "deploy", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
# What the tests below look at, beside themselves.
_TESTS_NEED: Final = ("tests", "tools", "docs", "schemas", "pyproject.toml")
TESTS: Final = ("tests/core", "tests/model", "tests/test_executor.py", "tests/test_timers.py",
                "tests/test_gathering.py", "tests/test_slabs.py")  # fmt: skip
# Runs of the simulation: the whole daemon, with clients, faults and time of its own.
_SEEDS: Final = 20
_LEFT_OUT: Final = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
_BUILD: Final = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


def why_not() -> str:
    """Return why nothing can be compiled here, or nothing."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if shutil.which(os.environ.get("CC", "cc")) is None:
        return "there is no C compiler"
    if not headers.exists():
        return f"Python's headers are missing ({headers})"
    try:
        import mypyc.build  # noqa: F401
    except ImportError:
        return "mypy is not installed"
    return ""


def _copy(names: tuple[str, ...], directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name in names:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, directory / name, ignore=_LEFT_OUT)
        else:
            shutil.copy(source, directory)


def build(directory: Path) -> Path:
    """Build the wheel and unpack it.

    Returns:
        What to put on the path: it holds snapd, compiled.

    Raises:
        subprocess.CalledProcessError: it cannot be built; the output says why.
    """
    _copy(_BUILT_FROM, directory / "source")
    dist, site = directory / "dist", directory / "site"
    for made in (dist, site):
        shutil.rmtree(made, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-c", _BUILD, str(dist)],
        cwd=directory / "source",
        env=os.environ | {"SNAPD_COMPILE": "1"},
        check=True,
        capture_output=True,
    )
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    return site


def run_tests(directory: Path, *arguments: str) -> int:
    """Run the core's tests and the simulation with what was built there, and return the status."""
    _copy(_TESTS_NEED, directory / "run")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(arguments or TESTS)]
    path = os.pathsep.join((str(directory / "site"), str(directory / "run")))
    environment = os.environ | {"PYTHONPATH": path}
    status = subprocess.run(command, cwd=directory / "run", env=environment).returncode
    if status or arguments:
        return status
    simulate = [sys.executable, "tools/simulate.py", "--seeds", str(_SEEDS)]
    return subprocess.run(simulate, cwd=directory / "run", env=environment).returncode


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--test", is_flag=True, help="Run the core's tests with it.")
def main(directory: Path, test: bool) -> None:
    """Build the package with its hot modules compiled, into DIRECTORY/site."""
    reason = why_not()
    if reason:
        raise click.ClickException(f"nothing can be compiled here: {reason}")
    directory = directory.resolve()
    try:
        click.echo(build(directory))
    except subprocess.CalledProcessError as error:
        raise click.ClickException(f"it was not built:\n{(error.stderr + error.stdout).decode()}") from None
    if test:
        sys.exit(run_tests(directory))


if __name__ == "__main__":
    main()

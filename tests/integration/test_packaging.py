"""The sdist and the wheel hold everything, run without the source tree, and deploy/ fits the daemon."""

import configparser
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import clean_environment
from packaging.specifiers import SpecifierSet

from snapd import __version__
from snapd.cli.main import EXIT_USAGE
from snapd.config import Config, default_log_path, default_socket_path, load
from snapd.daemon import EXIT_SECOND_SIGNAL

ROOT = Path(__file__).parents[2]
SOURCES = (
    "CHANGELOG.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "README.zh.md",
    "constraints-dev.txt", "deploy",
    "docs", "examples", "pyproject.toml", "schemas", "setup.py", "snapd", "tests", "tools",
)  # fmt: skip
BUILD = "from setuptools import build_meta as b; b.build_{kind}({directory!r})"
RUN_S = 60.0


def files_under(directory: Path) -> dict[str, bytes]:
    """Return the digest of every file by its path from *directory*, without what Python caches."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).digest()
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.endswith(".pyc")
    }


def build(source: Path, kind: str, directory: Path) -> Path:
    """Build an sdist or a wheel as pip would, with the setuptools that is here."""
    code = BUILD.format(kind=kind, directory=str(directory))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = directory.iterdir()
    return made


# Where the wheel has what is installed beside the package.
SHARED = f"kv_snapd-{__version__}.data/data/share/kv-snapd/"


def wheel_files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {
            info.filename: hashlib.sha256(archive.read(info)).digest()
            for info in archive.infolist()
            # It lists the others with their digests.
            if not info.filename.endswith("/RECORD")
        }


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, so that building leaves nothing in it."""
    copy = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignore)
        elif source.exists():
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def unpacked_sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = build(tree, "sdist", tmp_path_factory.mktemp("sdist"))
    directory = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as file:
        # Debian 12's Python has no filters yet.
        file.extraction_filter = getattr(tarfile, "data_filter", None)
        file.extractall(directory)
    assert archive.name == f"kv_snapd-{__version__}.tar.gz"
    return directory / f"kv_snapd-{__version__}"


@pytest.fixture(scope="module")
def wheel(unpacked_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as it is where there is nothing else."""
    source = tmp_path_factory.mktemp("from-sdist") / "source"
    shutil.copytree(unpacked_sdist, source)
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"))


# --- what is inside ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_sdist_has_every_file_of_the_tree(tree: Path, unpacked_sdist: Path) -> None:
    wanted = {name: digest for name, digest in files_under(tree).items() if ".egg-info" not in name}
    found = files_under(unpacked_sdist)
    assert {name for name in wanted if found.get(name) != wanted[name]} == set()


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(tree: Path, wheel: Path) -> None:
    wanted = {f"snapd/{name}": digest for name, digest in files_under(tree / "snapd").items()}
    wanted |= {f"{SHARED}{name}": digest for name, digest in files_under(tree / "deploy").items()}
    found = {name: digest for name, digest in wheel_files(wheel).items() if ".dist-info/" not in name}
    assert found == wanted
    for name in ("snapd/py.typed", "snapd/demo/agent_trace.jsonl", "snapd/forensics/page/assets/page.html"):
        assert name in found


@pytest.mark.slow
def test_the_container_is_built_from_what_its_file_copies(
    tree: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = tmp_path_factory.mktemp("container")
    for line in instructions("COPY"):
        if not line.startswith("--from"):
            *names, target = line.split()
            for name in names:
                if (tree / name).is_dir():
                    shutil.copytree(tree / name, source / target)
                else:
                    shutil.copy(tree / name, source / target)
    made = build(source, "wheel", tmp_path_factory.mktemp("container-wheel"))
    # In a container nobody needs what deploys it.
    needed = {name: digest for name, digest in wheel_files(wheel).items() if not name.startswith(SHARED)}
    assert wheel_files(made) == needed


# --- it runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of a venv with the wheel and what it declares to need; neither torch nor tests."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=RUN_S)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install", "--quiet",
         "--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile", str(wheel)],
        check=True, timeout=RUN_S,
    )  # fmt: skip
    (own,) = site_packages.glob("kv_snapd-*.dist-info")
    link_requirements(importlib.metadata.Distribution.at(own), site_packages, set())
    return venv / "bin"


def link_requirements(
    distribution: importlib.metadata.Distribution, site_packages: Path, seen: set[str]
) -> None:
    """Put links to what a distribution needs beside it, and to what that needs."""
    for requirement in distribution.requires or ():
        match = re.match(r"[A-Za-z0-9_.-]+", requirement)
        if match is None or "extra ==" in requirement or match[0].lower() in seen:
            continue
        seen.add(match[0].lower())
        try:
            needed = importlib.metadata.distribution(match[0])
        except importlib.metadata.PackageNotFoundError:
            # Its marker says that this Python does without.
            assert ";" in requirement, requirement
            continue
        for top in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
            link = site_packages / top
            if not link.exists():
                link.symlink_to(Path(str(needed.locate_file(top))))
        link_requirements(needed, site_packages, seen)


def installed(programs: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(programs / "snapd"), *arguments],
        cwd=cwd, env=clean_environment(), capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip


@pytest.fixture
def serving(programs: Path, tmp_path: Path) -> Iterator[Path]:
    """The socket of a daemon that was started from the wheel, in a directory without sources."""
    socket_path = tmp_path / "s"
    arguments = ["serve", "--size", "1MiB", "--socket", str(socket_path), "--log", str(tmp_path / "l")]
    with (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [str(programs / "snapd"), *arguments], cwd=tmp_path, env=clean_environment(), stderr=stderr
        )
    deadline_s = time.monotonic() + RUN_S
    while not socket_path.exists():
        assert process.poll() is None and time.monotonic() < deadline_s, (tmp_path / "stderr").read_text()
    yield socket_path
    process.send_signal(signal.SIGTERM)
    assert process.wait(RUN_S) == 0


def test_what_is_pinned_for_development_can_be_installed_with_debians_python() -> None:
    """Debian 12 has Python 3.11.2, and some packages ask for a later 3.11 than others."""
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints-dev.txt").read_text(), re.MULTILINE)
    wanted = {}
    for name in pinned:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # Of another platform.
            wanted[name] = importlib.metadata.metadata(name).get("Requires-Python") or ""
    assert len(wanted) > len(pinned) // 2
    assert [name for name, python in wanted.items() if not SpecifierSet(python).contains("3.11.2")] == []


@pytest.mark.slow
def test_the_wheel_serves_without_the_source_tree(programs: Path, serving: Path, tmp_path: Path) -> None:
    assert installed(programs, tmp_path, "--version").stdout == f"snapd {__version__}\n"
    where = "import snapd, sys; print(snapd.__file__); sys.exit('torch' in sys.modules)"
    found = subprocess.run(
        [str(programs / "python"), "-c", where], cwd=tmp_path, env=clean_environment(),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(found.stdout.strip()).is_relative_to(programs.parent)
    shown = installed(programs, tmp_path, "status", "--socket", str(serving), "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["version"] == __version__
    for command in ("serve", "drain", "doctor", "config", "watch", "completion"):
        assert installed(programs, tmp_path, command, "--help").returncode == 0, command
    assert installed(programs, tmp_path, "config").returncode == 0


@pytest.mark.slow
def test_what_an_extra_brings_is_asked_for_in_one_line(programs: Path, tmp_path: Path) -> None:
    done = installed(programs, tmp_path, "demo", "--out", str(tmp_path / "out"))
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert "kv-snapd[" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_container_s_health_check_tells_a_daemon_from_none(
    programs: Path, serving: Path, tmp_path: Path
) -> None:
    (check,) = instructions("HEALTHCHECK")
    program, *arguments = json.loads(check[check.index("CMD") + 3 :])
    assert program == "snapd"
    assert installed(programs, tmp_path, *arguments, "--socket", str(serving)).returncode == 0
    assert installed(programs, tmp_path, *arguments, "--socket", str(tmp_path / "none")).returncode == 1


# --- deploy ------------------------------------------------------------------------------------


def instructions(name: str) -> list[str]:
    """Return what stands after an instruction of the container file, each on one line."""
    text = (ROOT / "deploy" / "Containerfile").read_text().replace("\\\n", " ")
    return [line.removeprefix(f"{name} ") for line in text.splitlines() if line.startswith(f"{name} ")]


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(ROOT / "deploy" / "kv-snapd.service")
    return parser


def test_the_container_runs_as_nobody_s_user_with_settings_that_are_valid() -> None:
    settings = dict(re.findall(r"(SNAPD_\w+)=(\S+)", " ".join(instructions("ENV"))))
    config = load(None, settings | {"SNAPD_CONFIG": os.devnull}, {}).config
    assert config.socket_path == "/run/kv-snapd/snapd.sock"
    assert config.log_path == "/var/log/kv-snapd/d-to-p-sync.jsonl"
    assert instructions("USER") == ["kv-snapd"]
    assert json.loads(*instructions("VOLUME")) == ["/run/kv-snapd", "/var/log/kv-snapd"]


def test_the_unit_is_valid_for_systemd(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze")
    copy = tmp_path / "kv-snapd.service"
    text = (ROOT / "deploy" / "kv-snapd.service").read_text()
    # It must be there for systemd to be content.
    copy.write_text(text.replace("/opt/kv-snapd/bin/snapd", sys.executable))
    done = subprocess.run(
        [program, "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    # It also looks at the units that this one is wanted by, whatever they are.
    ours = [line for line in done.stderr.splitlines() if "kv-snapd" in line]
    assert ours == [] and done.returncode == 0, done.stderr


def test_the_unit_s_figures_are_the_daemon_s() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify" and int(service["WatchdogSec"]) >= 10
    assert int(service["RestartPreventExitStatus"]) == EXIT_USAGE
    assert int(service["SuccessExitStatus"]) == EXIT_SECOND_SIGNAL
    config = Config()
    assert int(service["TimeoutStopSec"]) * 1_000 > config.drain_timeout_ms + config.limits.stop_grace_ms
    directories = {
        "RUNTIME_DIRECTORY": f"/run/{service['RuntimeDirectory']}",
        "LOGS_DIRECTORY": f"/var/log/{service['LogsDirectory']}",
    }
    # Where root's commands look for the daemon, although it runs as another user.
    assert default_socket_path(directories, 7070) == default_socket_path({}, 0)
    assert default_log_path(directories, 7070) == default_log_path({}, 0)


def test_the_unit_lets_memory_be_locked_and_devices_be_used() -> None:
    service = unit()["Service"]
    assert service["LimitMEMLOCK"] == "infinity"
    harmful = {
        "PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute",
        "ProcSubset", "PrivateUsers", "PrivateIPC", "PrivateNetwork",
    }  # fmt: skip
    assert not harmful & set(service)
    assert {"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"} == set(service["RestrictAddressFamilies"].split())


def test_logrotate_moves_the_log_of_the_unit_and_tells_the_daemon(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "kv-snapd.logrotate").read_text()
    assert f"\n{default_log_path({}, 0)} {{" in text
    assert "copytruncate" not in text and "nocreate" in text and "delaycompress" in text
    assert f"su {unit()['Service']['User']} {unit()['Service']['Group']}" in text
    assert "--signal=HUP kv-snapd.service" in text
    # The setting that its comment names.
    (setting,) = re.findall(r"^#   (log_\w+ = \d+)$", text, re.MULTILINE)
    file = tmp_path / "snapd.toml"
    file.write_text(setting)
    assert load(file, {}, {}).config.log_rotate_bytes == 0

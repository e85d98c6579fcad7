"""``snapd doctor``: the real command, on this machine and on machines that lack something."""

import json
import os
import pty
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon_process import clean_environment

from snapd.cli.main import run
from snapd.transport.mooncake_package import find_package, missing_libraries
from tests.doctor.fake_mooncake import PACKAGE, hide, install

RUN_S = 60.0
UNTESTED = "--no-self-test"
MIB_1 = ("--bytes", "1MiB")
MOONCAKE = ("--transport", "mooncake")
CLI = (sys.executable, "-m", "snapd.cli.main", "doctor")
ROOT = Path(__file__).parents[2]


def doctor(
    tmp_path: Path, *arguments: str, path: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the command with small arenas; it must not show a traceback."""
    entries = [str(path)] if path else []
    environment = (
        clean_environment()
        | {"SNAPD_SIZE": "16MiB"}
        | env
        | {"PYTHONPATH": os.pathsep.join([*entries, str(ROOT)])}
    )
    places = ("--socket", f"{tmp_path}/snapd.sock", "--log", f"{tmp_path}/sync.jsonl")
    done = subprocess.run(
        [*CLI, *places, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        timeout=RUN_S,
        check=False,
    )
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done


def report(tmp_path: Path, wanted: int, *arguments: str, path: Path | None = None, **env: str) -> Any:
    """Run it with --json; nothing else may be on stdout, and nothing on stderr."""
    done = doctor(tmp_path, "--json", *arguments, path=path, **env)
    assert (done.returncode, done.stderr) == (wanted, ""), done
    found = json.loads(done.stdout)
    assert found["ok"] is (wanted == 0)
    assert bool(found["in_the_way"]) is (wanted != 0)
    unfixed = [finding for finding in found["findings"] if finding["status"] == "fail" and not finding["fix"]]
    assert not unfixed
    return found


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    """A path on which Mooncake is not installed."""
    directory = tmp_path / "hidden"
    directory.mkdir()
    return hide(directory)


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A path on which Mooncake is a fake, with the fault in FAKE_MOONCAKE."""
    return install(tmp_path / "fake")


def skip_without_mooncake() -> None:
    package = find_package()
    if package is None or missing_libraries(package):
        pytest.skip("no package of Mooncake works here")


def test_the_real_mooncake_moves_every_byte_over_tcp(tmp_path: Path) -> None:
    skip_without_mooncake()
    found = report(tmp_path, 0, *MOONCAKE, "--bytes", "32MiB")
    assert found["transport"] == "mooncake"
    tcp = found["mooncake"]["tcp"]
    assert (tcp["ok"], tcp["tested"], tcp["verified"], tcp["bytes"]) == (True, True, True, 32 << 20)
    assert tcp["gb_per_s"] > 0
    assert (found["mooncake"]["missing_libraries"], found["mooncake"]["install"]) == ([], "")
    assert found["mooncake"]["package"].startswith("mooncake-transfer-engine")


def test_the_text_is_grouped_and_aligned_and_has_no_native_noise(tmp_path: Path, fake: Path) -> None:
    done = doctor(tmp_path, *MIB_1, path=fake, FAKE_MOONCAKE="noise")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    groups = [line for line in lines if line and not line.startswith(" ")]
    assert groups == [
        "software", "mooncake", "hardware", "memory", "paths", "transports", "ok: transport shm works",
    ]  # fmt: skip
    rows = [line for line in lines if line[2:6].strip() in ("ok", "warn", "fail", "info")]
    assert len(rows) > 15
    # Every name begins in the same column, and every detail.
    detail_at = rows[0].index("0.")
    assert all(row[8] != " " and row[detail_at - 2 : detail_at] == "  " for row in rows)
    assert "native line" not in done.stdout


def test_colours_are_for_terminals(tmp_path: Path, hidden: Path) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        process = subprocess.Popen(
            [*CLI, UNTESTED, "--socket", f"{tmp_path}/snapd.sock", "--log", f"{tmp_path}/log.jsonl"],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            env=clean_environment() | {"PYTHONPATH": f"{hidden}{os.pathsep}{ROOT}"},
        )
        os.close(theirs)
        said = b""
        # At the end of the process a read from the terminal fails.
        while True:
            try:
                piece = terminal.read(65_536)
            except OSError:
                break
            if not piece:
                break
            said += piece
        process.wait(RUN_S)
    assert b"\x1b[32mok" in said


def test_without_a_package_the_default_transport_still_works(tmp_path: Path, hidden: Path) -> None:
    found = report(tmp_path, 0, *MIB_1, path=hidden)
    assert found["shm"]["verified"] is True
    assert found["mooncake"]["package"] is None
    assert found["mooncake"]["tcp"] == {
        "ok": False, "tested": False, "why": "Mooncake is not installed", "bytes": 0, "gb_per_s": None,
        "verified": False,
    }  # fmt: skip


def test_without_a_package_a_configured_mooncake_fails_with_the_command(tmp_path: Path, hidden: Path) -> None:
    done = doctor(tmp_path, *MOONCAKE, UNTESTED, path=hidden)
    assert (done.returncode, done.stderr) == (1, "")
    assert 'pip install "kv-snapd[mooncake]"' in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not ok: in the way of transport mooncake tcp: ")


@pytest.mark.parametrize(("transport", "status"), [("mooncake", 1), ("shm", 0)])
def test_missing_libraries_are_all_named_and_fail_only_mooncake(
    transport: str, status: int, tmp_path: Path
) -> None:
    path = install(tmp_path / "fake", "libgone.so.1", "libgone.so.2", is_python=False)
    found = report(tmp_path, status, UNTESTED, "--transport", transport, path=path)
    mooncake = found["mooncake"]
    assert (mooncake["package"], mooncake["version"]) == (PACKAGE, "9.9")
    assert [library["soname"] for library in mooncake["missing_libraries"]] == [
        "libgone.so.1",
        "libgone.so.2",
    ]
    assert "libgone.so.1, libgone.so.2" in mooncake["install"]
    assert mooncake["tcp"]["ok"] is False
    assert found["shm"]["ok"] is True


def test_an_engine_that_was_cut_off_is_a_finding(tmp_path: Path) -> None:
    path = install(tmp_path / "fake", is_python=False)
    (path / "mooncake" / "engine.so").write_bytes(b"half of it")
    found = report(tmp_path, 1, UNTESTED, *MOONCAKE, path=path)
    assert "cannot be read" in found["mooncake"]["tcp"]["why"]


def test_a_library_that_crashes_the_process_which_loads_it_is_a_finding(tmp_path: Path) -> None:
    """It has no symbol table: the dynamic loader itself dies of it."""
    path = install(tmp_path / "fake", is_python=False)
    found = report(tmp_path, 1, UNTESTED, *MOONCAKE, path=path)
    assert "while loading Mooncake" in found["mooncake"]["tcp"]["why"]


@pytest.mark.parametrize(
    ("fault", "timeout_s", "why"),
    [
        ("corrupt", "60", "wrong bytes in 1 of 1 parts"),
        ("target dies", "60", "the receiving process was killed by SIGSEGV while waiting for the writes"),
        ("never ends", "1.5", "not done within 1.5 s"),
    ],
)
def test_a_transport_that_corrupts_dies_or_hangs_fails_the_command(
    fault: str, timeout_s: str, why: str, tmp_path: Path, fake: Path
) -> None:
    arguments = (*MOONCAKE, "--bytes", "64KiB", "--timeout", timeout_s)
    tcp = report(tmp_path, 1, *arguments, path=fake, FAKE_MOONCAKE=fault)["mooncake"]["tcp"]
    assert (tcp["ok"], tcp["tested"], tcp["verified"]) == (False, True, False)
    assert why in tcp["why"]


def test_without_self_tests_nothing_moves(tmp_path: Path, fake: Path) -> None:
    found = report(tmp_path, 0, UNTESTED, path=fake, FAKE_MOONCAKE="corrupt")
    assert (found["shm"]["ok"], found["shm"]["tested"], found["shm"]["bytes"]) == (True, False, 0)
    assert found["mooncake"]["tcp"]["tested"] is False


def test_arenas_that_do_not_fit_fail(tmp_path: Path, hidden: Path) -> None:
    found = report(tmp_path, 1, UNTESTED, "--size", "15TiB", path=hidden)
    assert found["in_the_way"] == ["available"]


def test_a_module_in_the_current_directory_is_not_run(
    tmp_path: Path, hidden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doctor's children are started in a directory that may be anybody's."""
    (tmp_path / "json.py").write_text("raise SystemExit('taken from the current directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "CLI", (sys.executable, "-P", *CLI[1:]))
    assert report(tmp_path, 0, *MIB_1, path=hidden)["shm"]["verified"] is True


def test_children_end_with_a_doctor_that_is_killed(tmp_path: Path, fake: Path) -> None:
    """They would hang for ever. They have no settings of a daemon, and would leave no core of an arena."""
    mark = tmp_path / "hanging"
    environment = {
        "PYTHONPATH": f"{fake}{os.pathsep}{ROOT}",
        "FAKE_MOONCAKE": "hang at import",
        "FAKE_MOONCAKE_MARK": str(mark),
    }
    process = subprocess.Popen(
        [*CLI, *MIB_1],
        env=clean_environment() | environment | {"SNAPD_SIZE": "16MiB"},
        stdout=subprocess.DEVNULL,
        preexec_fn=allow_cores,
    )
    try:
        wait_for(mark.exists)
        (child,) = children_of(process.pid)
        environ = (child / "environ").read_bytes().split(b"\0")
        assert b"FAKE_MOONCAKE=hang at import" in environ
        assert not [variable for variable in environ if variable.startswith(b"SNAPD_")]
        assert leaves_no_core(child)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not child.exists() or "State:\tZ" in (child / "status").read_text())


def children_of(pid: int) -> list[Path]:
    return [Path("/proc") / child for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def allow_cores() -> None:
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))


def leaves_no_core(process: Path) -> bool:
    lines = (process / "limits").read_text().splitlines()
    return any(line.split()[:5] == ["Max", "core", "file", "size", "0"] for line in lines)


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return what the condition yields, once that is true."""
    deadline_s = time.monotonic() + RUN_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s
    return found


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--bytes", "much"), "--bytes: 'much' is no size"),
        (("--bytes", "1KiB"), "write a size from 4 KiB to 64 GiB"),
        (("--bytes", "65GiB"), "write a size from 4 KiB to 64 GiB"),
        (("--timeout", "0"), "--timeout"),
        (("--set", "nonsense"), "is no KEY=VALUE"),
        (("--transport", "pigeon"), "transport = 'pigeon' is wrong"),
        (("--config", "/nowhere.toml"), "cannot be read"),
        (("--set", "lease_ms=1", "--set", "lease_ms=2"), "given twice"),
    ],
)
def test_wrong_usage_and_configuration_are_status_2(
    arguments: tuple[str, ...], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert wanted in err

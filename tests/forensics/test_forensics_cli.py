"""The command: what it prints, and how it ends."""

import bz2
import contextlib
import gc
import gzip
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from elsewhere import MAIN_ELSEWHERE
from forensics_logs import TS, Writer, loaded, write_old

from snapd.cli import forensics as forensics_module
from snapd.cli.forensics import parse_when
from snapd.cli.main import run
from snapd.forensics import loading
from snapd.forensics import scratch as scratch_module
from snapd.forensics import tables as tables_module
from snapd.forensics.scratch import ScratchDirectory

LOG = "d-to-p-sync.jsonl"
MAIN = "from snapd.cli.main import main; main()"


@pytest.fixture
def small_log(tmp_path: Path) -> Path:
    """Three attempts of two sessions, one of which is evicted, and a refusal."""
    writer = Writer()
    writer.start()
    writer.life(1, peer="d0:7")
    writer.life(2, "evicted")
    writer.life(3)
    writer.refuse("s3")
    writer.stop()
    path = tmp_path / LOG
    path.write_bytes(writer.text())
    return path


def old_log(path: Path) -> Path:
    return write_old(path, [{"ok": False, "reason": "alloc-failed", "session": f"s{n}"} for n in range(40)])


def output_of(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    assert run(["forensics", *map(str, arguments)]) == status
    return capsys.readouterr().out


def json_of(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> Any:
    return json.loads(output_of(capsys, *arguments, "--json", status=status))


def test_a_report_has_every_part(made_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, made_log)
    assert "12,0" in text.splitlines()[0]
    for part in ("Outcomes", "Bytes", "Time in each state", "Slowest attempts", "By hour", "By session",
                 "By D", "Pressure"):  # fmt: skip
        assert f"\n{part}" in text
    assert re.search(r"^  ok +[\d,]+ +\d+\.\d% ", text, re.MULTILINE)
    assert re.search(r"^  TRANSFERRING +[\d,]+ +[\d.]+ ms", text, re.MULTILINE)
    assert re.search(r"^  rank 0  \|.{72}\|$", text, re.MULTILINE)
    assert "The log does not say who D was." in text
    assert "died, or its end is missing" in text
    assert "GB/s over" in text


def test_json_is_one_object_with_the_same_figures(made_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(capsys, made_log)
    assert found["schema"] == "snapd-forensics-1"
    assert found["attempts"] == sum(reason["count"] for reason in found["reasons"])
    assert f"{found['attempts']:,} attempts: {found['ok']:,} OK" in output_of(capsys, made_log)


def test_the_recorded_run_reads_as_everybody_knows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """167 attempts, 88.6% alloc-failed, 11.4% session-not-resident, 0 OK."""
    reasons = ["alloc-failed"] * 148 + ["session-not-resident"] * 19
    path = write_old(tmp_path / "log", [{"status": "failed", "reason": r, "sid": "x"} for r in reasons])
    text = output_of(capsys, path)
    assert "167 attempts (older log): 0 OK, 0.0%" in text
    assert re.search(r"alloc-failed +148 +88\.6%", text)
    assert re.search(r"session-not-resident +19 +11\.4%", text)
    assert re.search(r"^  ok +0 +0\.0%$", text, re.MULTILINE)
    assert "kv_pool had no slots" in text


@pytest.mark.parametrize(("by", "shown"), [("session", "By session"), ("d", "By D"), ("hour", "By hour")])
def test_by_shows_that_grouping_only(
    small_log: Path, capsys: pytest.CaptureFixture[str], by: str, shown: str
) -> None:
    text = output_of(capsys, small_log, "--by", by)
    assert [line for line in text.splitlines() if line.startswith("By ")] == [shown]


def test_top_limits_what_is_listed(small_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(capsys, small_log, "--top", 1)
    assert (len(found["slowest"]), len(found["by_session"]["shown"]), found["by_session"]["total"]) == (
        1,
        1,
        3,
    )
    assert "By session, the first 1 of 3" in output_of(capsys, small_log, "--top", 1)


def test_since_until_and_epoch_narrow_the_figures(made_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By ISO time or so long before the end; an epoch by its first letters."""
    whole = json_of(capsys, made_log)
    epoch = whole["epochs"][1]
    part = json_of(capsys, made_log, "--epoch", epoch["epoch"][:5])
    assert part["selection"]["epoch"] == epoch["epoch"]
    assert 0 < part["attempts"] < whole["attempts"]
    last = json_of(capsys, made_log, "--since", "20s")
    assert last["begin_ts"] == pytest.approx(whole["end_ts"] - 20)
    none = json_of(capsys, made_log, "--until", "2026-01-01T00:00:00Z")
    assert none["attempts"] == 0
    assert "No attempt has ended in what is looked at." in output_of(
        capsys, made_log, "--until", "2026-01-01"
    )


@pytest.mark.parametrize(
    ("text", "ts"),
    [
        ("90m", TS - 5_400), ("8 h", TS - 28_800), ("1.5d", TS - 129_600), ("2026-01-01T01:00", TS + 3_600),
        ("2026-01-01T01:00+01:00", TS), ("2026-01-02", TS + 86_400), ("2026-01-01 00:00:01.5Z", TS + 1.5),
    ],
)  # fmt: skip
def test_a_time_is_iso_or_before_the_logs_end(text: str, ts: float) -> None:
    assert parse_when(text, TS, "--since") == ts


def test_a_time_that_is_none_says_what_to_write() -> None:
    with pytest.raises(click.UsageError, match="2026-01-31T22:00, or 8h"):
        parse_when("soon", TS, "--since")
    with pytest.raises(click.UsageError, match="the log has no times"):
        parse_when("8h", None, "--since")


def test_a_session_is_told_with_its_lines(small_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, small_log, "--session", "s1")
    lines = text.splitlines()
    assert lines[:2] == ["session s1", "1 attempt, 1 OK, P got 976.6 KiB: ok 1"]
    assert "2026-01-01 00:00:00.002" in lines[5]
    assert "prepared by d0:7" in text
    assert f"[{small_log}:7]" in text
    assert "s2" not in text


def test_a_story_as_json_is_one_object(small_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(capsys, small_log, "--session", "s3")
    assert found["summary"]["reasons"] == {"ok": 1, "snapshot-buf-full": 1}
    assert [step["line_no"] for step in found["steps"] if step["is_end"]] == [22, 24]


def test_logs_are_compared_with_a_verdict(
    small_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = old_log(tmp_path / "old.jsonl")
    text = output_of(capsys, small_log, "--compare", old)
    assert text.splitlines()[-1].startswith("Better: 50.0% of 4 attempts are OK here, 0.0% of 40 there.")
    assert re.search(r"alloc-failed +40 +100\.0% +0 +0\.0% +-100\.0 points", text)
    found = json_of(capsys, old, "--compare", small_log)
    assert (found["verdict"], found["attempts"], found["other_attempts"]) == ("worse", 40, 4)


def test_a_good_log_is_proved_with_status_0(made_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "PROVED: no rule is broken." in output_of(capsys, made_log, "--prove")
    found = json_of(capsys, made_log, "--prove")
    assert (found["is_good"], found["is_whole"], found["num_violations"], found["copies"]) == (
        True,
        True,
        0,
        0,
    )


def test_a_violation_ends_with_status_1_and_names_its_lines(
    made_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An extent that one attempt holds is handed to the next one."""
    lines = max(made_log.iterdir(), key=lambda path: int(path.suffix[1:]) if path.suffix[1:].isdigit() else 0)
    log = [json.loads(line) for line in lines.read_bytes().splitlines()]
    places = [n for n, line in enumerate(log) if line["event"] == "slab.allocated" and line["rank"] == 0]
    log[places[1]]["extents"] = log[places[0]]["extents"]
    path = write_old(tmp_path / LOG, log)
    out = output_of(capsys, path, "--prove", status=1)
    assert re.search(r"^  (overlapping-extents|reuse-before-release) +1 ", out, re.MULTILINE)
    assert f"\n  {path}:{places[1] + 1}\n" in out
    found = json_of(capsys, path, "--prove", status=1)
    assert found["num_violations"] == sum(found["counts"].values()) > 0
    assert all(violation["lines"] for violation in found["violations"])


def test_pages_and_pictures_are_written_beside_the_report_or_the_proof(
    small_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their names are said on stderr; a proof keeps its status."""
    page, picture = tmp_path / "r.html", tmp_path / "r.png"
    assert run(["forensics", str(small_log), "--html", str(page), "--png", str(picture)]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"written: {page}", f"written: {picture}"]
    assert "Outcomes" in captured.out
    assert page.read_bytes().startswith(b"<!")
    assert picture.read_bytes().startswith(b"\x89PNG")
    page.unlink()
    # The hand-made log's times do not add up.
    assert json_of(capsys, small_log, "--prove", "--html", page, status=1)["num_violations"] > 0
    assert page.exists()
    assert run(["forensics", str(small_log), "--html", str(tmp_path / "gone" / "r.html")]) == 2


def test_a_proof_of_an_older_log_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is proved, and that is not success."""
    assert run(["forensics", str(old_log(tmp_path / "log")), "--prove"]) == 2
    assert "nothing can be proved" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{log}", "--session", "s1", "--prove"], "exclude each other"),
        (["{log}", "--session", "nobody"], "no attempt of the session 'nobody'"),
        (["{log}", "--epoch", "zz"], "no epoch of the log begins like that"),
        (["{log}", "--since", "soon"], "is no time"),
        (["{log}", "--prove", "--since", "8h"], "--prove looks at the whole log"),
        (["{log}", "--compare", "x", "--html", "y"], "leave --session and --compare out"),
        (["{log}.gone"], "No such file"),
        (["{dir}/empty"], "holds no log"),
        (["{log}", "--html", "-"], "--html -: standard output has the report"),
        (["{log}", "--png", "-"], "--png -: standard output has the report"),
        (["{log}", "--png", "{dir}/x.svg"], "x.svg: pictures are PNG"),
        (["{log}", "--html", "{dir}/gone/x.html"], "snapd: {dir}/gone/x.html: No such file or directory\n"),
        (["{log}", "--html", "/dev/full"], "snapd: /dev/full: No space left on device\n"),
        (["{log}", "--png", "{dir}/gone/x.png"], "snapd: {dir}/gone/x.png: No such file or directory\n"),
        ([], "LOG..."),
    ],
)
def test_wrong_usage_and_missing_logs_end_with_status_2(
    small_log: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """One line on stderr, nothing on stdout, and no traceback."""
    (small_log.parent / "empty").mkdir()
    filled = [text.format(log=small_log, dir=small_log.parent) for text in [*arguments, message]]
    assert run(["forensics", *filled[:-1]]) == 2
    captured = capsys.readouterr()
    assert filled[-1] in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert sorted(path.name for path in small_log.parent.iterdir()) == [LOG, "empty"]


def test_pictures_go_into_a_directory_with_a_dot_if_it_is_there(small_log: Path, tmp_path: Path) -> None:
    (tmp_path / "plots.d").mkdir()
    assert run(["forensics", str(small_log), "--png", str(tmp_path / "plots.d")]) == 0
    assert len(list((tmp_path / "plots.d").glob("*.png"))) == 4


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_a_log_is_never_written_over(
    small_log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """By whatever name the page or the picture is asked for, and however the log is read."""
    before = small_log.read_bytes()
    alias, picture = small_log.parent / "x.png", small_log.parent / "y.png"
    alias.symlink_to(small_log)
    picture.hardlink_to(small_log)
    targets = [alias, picture] if option == "--png" else [alias, picture, small_log]
    for logs in ([small_log], [small_log.parent], ["-"]):
        for target in targets:
            with small_log.open() as file:
                monkeypatch.setattr(sys, "stdin", file)
                assert run(["forensics", *map(str, logs), "--prove", option, str(target)]) == 2
            assert f"{option} {target}: that is the log itself" in capsys.readouterr().err
    assert small_log.read_bytes() == before
    assert alias.is_symlink()
    assert picture.samefile(small_log)


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (bz2.compress, "Try: bzip2 -dc {log} | snapd forensics -"),
        (lzma.compress, "Try: xz -dc {log} | snapd forensics -"),
        (lambda text: text.decode().encode("utf-16"), "Try: iconv -f UTF-16 -t UTF-8 {log} | snapd"),
        (lambda text: gzip.compress(text)[:14], "{log}: the gzip file is damaged or cut short"),
        (lambda _: b"no log\nat all\n", "no line of 2 can be read, so this is no log"),
    ],
)
def test_a_log_of_which_nothing_can_be_read_is_status_2(
    small_log: Path, capsys: pytest.CaptureFixture[str], pack: Callable[[bytes], bytes], message: str
) -> None:
    """Nothing was found out, and that is not success; nor has an empty log anything wrong with it."""
    text = small_log.read_bytes()
    small_log.write_bytes(pack(text))
    assert run(["forensics", str(small_log)]) == 2
    captured = capsys.readouterr()
    assert message.format(log=small_log) in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    good, empty = small_log.parent / "good", small_log.parent / "empty"
    good.write_bytes(text)
    empty.write_bytes(b"")
    assert run(["forensics", str(good), "--compare", str(small_log)]) == 2
    assert run(["forensics", str(good), str(small_log)]) == 0
    assert run(["forensics", str(empty)]) == 0


def test_a_full_disk_behind_standard_output_is_status_2(small_log: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, "forensics", str(small_log)],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "snapd: No space left on device\n")


def test_a_long_name_does_not_widen_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is cut in its middle, after what could steer a terminal was made longer; --json has all of it."""
    session = "a" + "\x1b" * 5_000 + "z"
    lines = [
        {"ok": False, "reason": "r" * 5_000, "session": session, "peer": "d" * 5_000, "duration_ms": 1},
        {"ok": True, "session": "s" * 60},
    ]
    path = write_old(tmp_path / "log", lines)
    text = output_of(capsys, path)
    assert max(map(len, text.splitlines())) < 300 + len(str(path))
    assert re.search(r"^  a(\\x1b)+\S+z +1 ", text, re.MULTILINE)
    assert f"\n  {'s' * 60} " in text
    assert json_of(capsys, path)["slowest"][0]["session_id"] == session
    assert max(map(len, output_of(capsys, path, "--compare", path).splitlines())) < 300


def test_a_package_that_does_not_load_is_not_called_none(
    small_log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tables_module.importlib.import_module

    def broken(name: str) -> object:
        if name == "duckdb":
            raise ImportError("libstdc++.so.6: version not found")
        return real(name)

    monkeypatch.setattr(tables_module.importlib, "import_module", broken)
    assert run(["forensics", str(small_log)]) == 2
    said = capsys.readouterr().err
    assert "libstdc++.so.6: version not found" in said
    assert "None" not in said


def test_a_missing_package_is_status_2(
    small_log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tables_module.importlib.import_module

    def without(name: str) -> object:
        if name == "pyarrow":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name)

    monkeypatch.setattr(tables_module.importlib, "import_module", without)
    assert run(["forensics", str(small_log)]) == 2
    assert "pip install 'kv-snapd[forensics]'" in capsys.readouterr().err


def test_standard_input_is_a_log(
    small_log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_log.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert json_of(capsys, "-")["attempts"] == 4


def test_standard_input_that_cannot_be_read_is_status_2(tmp_path: Path) -> None:
    """Not what would be waited for without end."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with (tmp_path / "pipe").open("wb") as written:
            done = subprocess.run(
                [sys.executable, "-c", MAIN, "forensics", "-"],
                stdin=written, capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
    finally:
        os.close(reader)
    assert (done.returncode, done.stderr) == (2, "snapd: -: Bad file descriptor\n")


def test_standard_input_that_is_closed_is_an_empty_log(small_log: Path) -> None:
    command = f'exec "$0" -c "{MAIN}" forensics - --json <&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, check=True)
    assert json.loads(done.stdout)["attempts"] == 0


@pytest.mark.parametrize("what", ["connection", "directory"])
def test_a_signal_while_the_database_is_deleted_leaves_no_directory(
    small_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    real = shutil.rmtree
    came: list[str] = []

    def interrupted(*arguments: Any, **options: Any) -> None:
        if not came:
            came.append(what)
            raise SystemExit(143)
        real(*arguments, **options)

    if what == "directory":
        monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(SystemExit), loaded(small_log) as (tables, _):
        assert list(directory.iterdir())
        if what == "connection":
            monkeypatch.setattr(tables, "connection", SimpleNamespace(close=interrupted))
    assert came == [what]
    assert not list(directory.iterdir())


def test_a_signal_before_the_directory_is_in_anyones_hand_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    real = Path.mkdir

    def interrupted(path: Path, *arguments: Any, **options: Any) -> None:
        real(path, *arguments, **options)
        assert list(tmp_path.iterdir()) == [path]
        raise SystemExit(143)

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(SystemExit):
        ScratchDirectory()
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_directory_is_made_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setenv("TMP", str(tmp_path))
    scratch = ScratchDirectory()
    assert scratch.path.parent == tmp_path and scratch.path.stat().st_mode & 0o777 == 0o700
    (scratch.path / "file").write_bytes(b"x")
    scratch.delete()
    scratch.delete()
    assert not list(tmp_path.iterdir())


def test_without_a_place_for_temporary_files_the_status_is_2(
    small_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setattr(scratch_module, "_PLACES", ())
    assert run(["forensics", str(small_log)]) == 2
    assert re.search(r"none/snapd-forensics-\w+: No such file or directory", capsys.readouterr().err)


def test_a_second_signal_comes_too_late_to_leave_anything(
    small_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first one has passed is deleted before a second one can end the process."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    real = forensics_module._progress
    left: list[list[Path]] = []

    @contextlib.contextmanager
    def interrupted(what: str) -> Iterator[Any]:
        with real(what) as progress:
            yield progress
            assert list(directory.iterdir())
            signal.raise_signal(signal.SIGTERM)

    def restored(number: int, handler: Any) -> Any:
        if handler is signal.SIG_DFL:
            left.append(list(directory.iterdir()))
        return set_handler(number, handler)

    set_handler = signal.signal
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        monkeypatch.setattr(forensics_module, "_progress", interrupted)
        monkeypatch.setattr(signal, "signal", restored)
        with pytest.raises(SystemExit) as ended:
            run(["forensics", str(small_log)])
        assert ended.value.code == 143
    finally:
        set_handler(signal.SIGTERM, former)
    assert left and not any(left)


def is_asleep(pid: int) -> bool:
    """Whether the main thread waits for something."""
    return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("script", [MAIN, MAIN_ELSEWHERE], ids=["here", "elsewhere"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("kind", ["stdin", "pipe", "pipe without a writer"])
def test_a_signal_leaves_no_file_behind(
    tmp_path: Path, number: signal.Signals, kind: str, script: str
) -> None:
    """While standard input, or a pipe, is copied, there is a copy of it."""
    directory, pipe = tmp_path / "tmp", tmp_path / "pipe"
    directory.mkdir()
    os.mkfifo(pipe)
    with contextlib.ExitStack() as stack:
        if kind == "pipe":
            stack.callback(os.close, os.open(pipe, os.O_RDWR))
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", script, "forensics", "-" if kind == "stdin" else str(pipe)],
                stdin=subprocess.PIPE,
                env={"TMPDIR": str(directory)},
            )
        )
        stack.callback(process.kill)
        while not (list(directory.glob("snapd-forensics-*/0.jsonl")) and is_asleep(process.pid)):
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert not list(directory.iterdir())


@pytest.mark.parametrize("made_of_it", [RuntimeError("Query interrupted"), None])
def test_a_signal_inside_the_database_ends_the_command_all_the_same(
    made_of_it: Exception | None,
) -> None:
    """The database makes another exception of it; one in a destructor would be lost."""

    def interrupted() -> None:
        with contextlib.suppress(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        # One more has no effect: what is being cleaned up is cleaned up.
        signal.raise_signal(signal.SIGTERM)
        if made_of_it is not None:
            raise made_of_it

    before = [signal.getsignal(number) for number in forensics_module._ENDING_SIGNALS]
    with pytest.raises(SystemExit) as ended, forensics_module._cleaning_up():
        interrupted()
    assert ended.value.code == 143
    assert [signal.getsignal(number) for number in forensics_module._ENDING_SIGNALS] == before
    with pytest.raises(RuntimeError, match="a bug"), forensics_module._cleaning_up():
        raise RuntimeError("a bug")


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As under nohup."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with forensics_module._cleaning_up():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_signal_while_the_database_is_opened_leaves_no_directory(
    small_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise SystemExit(143)

    empty = tmp_path / "tmp"
    empty.mkdir()
    monkeypatch.setenv("TMPDIR", str(empty))
    monkeypatch.setattr("duckdb.connect", interrupted)
    with pytest.raises(SystemExit):
        run(["forensics", str(small_log)])
    assert not list(empty.iterdir())


def test_what_is_wrong_with_the_input_is_said_first(
    small_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = small_log.read_bytes().splitlines(keepends=True)
    small_log.write_bytes(
        b"".join([*lines[:9], b"garbage \x1b[2J\n", *lines[9:12], *lines[9:10], *lines[14:]])[:-9]
    )
    text = output_of(capsys, small_log, small_log)
    for said in (
        "Named more than once, and read once", "ends in the middle of a line", "2 lines could not be read",
        "1 line came more than once", "2 lines are missing",
    ):  # fmt: skip
        assert said in text
    assert f"{small_log}:10: JSON is malformed" in text
    assert "garbage \\x1b[2J" in text


def test_the_command_loads_nothing_heavy_before_it_is_needed() -> None:
    """``--help`` needs no database, no numbers and no drawing."""
    code = (
        "import sys; from snapd.cli.main import run; run(['forensics', '--help']); "
        "sys.exit(', '.join({'duckdb', 'pyarrow', 'numpy', 'matplotlib', 'torch'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Examples:" in done.stdout


def test_a_bounded_number_of_unreadable_lines_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"garbage\n" * (loading.UNREADABLE_KEPT_MAX + 500) + b'{"ok":true}\n')
    reading = json_of(capsys, path)["reading"]
    assert reading["unreadable"] == loading.UNREADABLE_KEPT_MAX + 500
    assert len(reading["unreadable_lines"]) == 20
    with loaded(path) as (tables, _):
        assert len(tables.unreadable) == loading.UNREADABLE_KEPT_MAX
        assert tables.value("SELECT count(*) FROM unreadable") == loading.UNREADABLE_KEPT_MAX

"""``snapd forensics``: what a log says the morning after."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from snapd.cli.common import json_option, print_json
from snapd.errors import SnapdError

if TYPE_CHECKING:
    from snapd.forensics.facts import Selection
    from snapd.forensics.lines import LogInput, Progress
    from snapd.forensics.proving import Proved
    from snapd.forensics.report import Report
    from snapd.forensics.tables import LogTables
    from snapd.forensics.violations import ProofReport

EXIT_VIOLATION: Final = 1
EXIT_UNREADABLE: Final = 2
_RELATIVE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d|w)")
_SECONDS: Final = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}
BYS: Final = ("session", "d", "hour")
_ENDING_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# How a file begins that is packed or encoded otherwise, and what makes lines of it.
_UNPACKERS: Final = {
    b"BZh": "bzip2 -dc",
    b"\xfd7zXZ": "xz -dc",
    b"PK\x03\x04": "unzip -p",
    b"\xff\xfe": "iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "iconv -f UTF-16 -t UTF-8",
}


class _Unreadable(click.ClickException):
    """The input, or what reads it, is not there; status 1 is for violations alone."""

    exit_code = EXIT_UNREADABLE


@click.command(
    epilog="""\b
Examples:
  snapd forensics /var/log/kv-snapd
  snapd forensics d-to-p-sync.jsonl* --since 8h --by hour
  snapd forensics d-to-p-sync.jsonl --session agent-17
  snapd forensics d-to-p-sync.jsonl* --prove
  snapd forensics new.jsonl --compare old.jsonl
  snapd forensics d-to-p-sync.jsonl* --html report.html --png report.png
  zstdcat logs.zst | snapd forensics - --json | jq .reasons

\b
Exit status: 0 done; 1 --prove found a violation; 2 wrong usage, or a log that cannot be read."""
)
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option("--session", "session_id", metavar="ID", help="Tell the story of one session instead.")
@click.option("--prove", is_flag=True, help="Check every line against the rules instead.")
@click.option(
    "--compare", "other", metavar="OTHER", help="Compare with another log, or a directory, instead."
)
@click.option("--html", "html_path", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Write the report as one page.")  # fmt: skip
@click.option("--png", "png_path", metavar="FILE", type=click.Path(path_type=Path),
              help="Write its plots: one picture FILE.png, or a directory of them.")  # fmt: skip
@click.option(
    "--since", metavar="WHEN", help="Only attempts that ended then or later: 2026-01-31T22:00, or 8h."
)
@click.option("--until", metavar="WHEN", help="Only attempts that ended before.")
@click.option(
    "--epoch", metavar="ID", default="", help="Only this life of the daemon; its first letters will do."
)
@click.option(
    "--by", "bys", multiple=True, type=click.Choice(BYS), help="Group by this only; may be repeated."
)
@click.option("--top", metavar="N", type=click.IntRange(min=0), default=10, show_default=True,
              help="How many sessions, Ds and slowest attempts; 0: all.")  # fmt: skip
@json_option
def forensics(
    logs: tuple[str, ...],
    session_id: str | None,
    prove: bool,
    other: str | None,
    html_path: Path | None,
    png_path: Path | None,
    since: str | None,
    until: str | None,
    epoch: str,
    bys: tuple[str, ...],
    top: int,
    as_json: bool,
) -> int:
    """Say what the event log tells: outcomes, times, pressure, one session's story, and proofs.

    LOG is a file, a directory with all of its logs, or - for standard input; rotated files in any order,
    gzip or zstd too. Logs of the design before snapd are read as well. A time without a zone is UTC; one
    such as 90m or 8h is so long before the log's last line.
    """
    if sum((session_id is not None, prove, other is not None)) > 1:
        raise click.UsageError("--session, --prove and --compare exclude each other: choose one")
    if (session_id is not None or other is not None) and (html_path or png_path):
        raise click.UsageError(
            "--html and --png show the report or a proof: leave --session and --compare out"
        )
    if prove and (since or until or epoch) and not (html_path or png_path):
        raise click.UsageError("--prove looks at the whole log: leave --since, --until and --epoch out")
    _check_names(html_path, png_path)
    with _typed_errors(), _cleaning_up(), _open(logs) as log:
        _check_targets(log, html_path, png_path)
        proved = _prove(log) if prove else None
        if proved is not None and not (html_path or png_path):
            return _show_proof(proved, as_json)
        with _load(log) as tables:
            tables.select(_selection(tables, since, until, epoch))
            if session_id is not None:
                _tell(tables, session_id, as_json)
                return 0
            report = _report(tables, log, top)
            if other is not None:
                _compare(report, log, other, top, as_json)
                return 0
            written = _draw(tables, report, proved.report if proved else None, html_path, png_path)
        status = 0
        if proved is not None:
            status = _show_proof(proved, as_json)
        elif as_json:
            print_json(report)
        else:
            from snapd.cli.forensicstext import show_report

            show_report(report, frozenset(bys or BYS))
        for path in written:
            click.echo(f"written: {path}", err=True)
    return status


@contextlib.contextmanager
def _typed_errors() -> Iterator[None]:
    """Let what is wrong with the input end with status 2."""
    try:
        yield
    except BrokenPipeError:
        raise
    except SnapdError as error:
        raise _Unreadable(str(error)) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise _Unreadable(f"{where}{error.strerror or error}") from None


@contextlib.contextmanager
def _cleaning_up() -> Iterator[None]:
    """Let a signal end the command as an exception does, so that no temporary file is left."""
    came: list[int] = []

    def end(number: int, _: object) -> None:
        # A second one, as a closed terminal may send, must not end the cleaning up.
        if not came:
            came.append(number)
            raise SystemExit(128 + number)

    # What is ignored, as under nohup, stays so.
    former = {number: handler for number in _ENDING_SIGNALS
              if (handler := signal.getsignal(number)) is not signal.SIG_IGN}  # fmt: skip
    for number in former:
        signal.signal(number, end)
    try:
        yield
    except Exception:
        if not came:
            raise
    finally:
        if came:
            from snapd.forensics.scratch import delete_all

            # While another one has no effect yet.
            delete_all()
        for number, handler in former.items():
            signal.signal(number, handler)
    if came:
        # It came inside the database, which makes another exception of it, or none.
        raise SystemExit(128 + came[0])


def _open(names: tuple[str, ...]) -> "LogInput":
    from snapd.forensics.lines import LogInput

    return LogInput(names)


def _load(log: "LogInput") -> "LogTables":
    from snapd.forensics.tables import LogTables

    with _progress("reading") as progress:
        tables = LogTables(log, progress)
    try:
        _check_readable(tables, log)
    except BaseException:
        tables.close()
        raise
    return tables


def _check_readable(tables: "LogTables", log: "LogInput") -> None:
    """Refuse what has lines, or is damaged, and says nothing at all.

    Raises:
        LogUnreadable: nothing can be read; it says what to do.
    """
    from snapd.forensics.lines import LogUnreadable

    damaged = [file for file in tables.files if file.damage]
    if any(file.lines > file.unreadable for file in tables.files) or not (tables.lines or damaged):
        return
    if damaged:
        raise LogUnreadable(f"{damaged[0].path}: {damaged[0].damage}; no line can be read")
    hint = ""
    for source in log.sources:
        with Path(source.real_path).open("rb") as file:
            begin = file.read(8)
        command = next((command for magic, command in _UNPACKERS.items() if begin.startswith(magic)), None)
        if command is not None:
            hint = f". Try: {command} {source.path} | snapd forensics -"
            break
    line = tables.unreadable[0]
    raise LogUnreadable(
        f"{line.path}:{line.line_no}: {line.why}; no line of {tables.lines:,} can be read, so this is no "
        f"log{hint}"
    )


def _report(tables: "LogTables", log: "LogInput", top: int) -> "Report":
    from snapd.forensics.report import build_report

    return build_report(tables, log, top=top)


# --- what is written ---------------------------------------------------------------------------


def _check_names(html_path: Path | None, png_path: Path | None) -> None:
    """Refuse names under which nobody would look for a page or a picture.

    Raises:
        click.UsageError: it is one.
    """
    for option, path in (("--html", html_path), ("--png", png_path)):
        if str(path) == "-":
            raise click.UsageError(f"{option} -: standard output has the report; name a file")
    if png_path is not None and png_path.suffix.lower() not in ("", ".png") and not png_path.is_dir():
        raise click.UsageError(
            f"--png {png_path}: pictures are PNG; name a file that ends in .png, or a directory "
            "(make it first if there is a dot in its name)"
        )


def _check_targets(log: "LogInput", html_path: Path | None, png_path: Path | None) -> None:
    """Refuse to write over the log.

    Raises:
        click.UsageError: what is to be written is one of the log's files, under any name.
    """
    inputs = [(source.path, Path(source.real_path).stat()) for source in log.sources]
    if any(name == "-" for name, _ in inputs):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            # It may be a file, and what is read is a copy of it.
            inputs.append(("-", os.fstat(sys.stdin.fileno())))
    for option, path in (("--html", html_path), ("--png", png_path)):
        if path is None or not path.is_file():
            continue
        found = path.stat()
        for name, status in inputs:
            if os.path.samestat(found, status):
                raise click.UsageError(f"{option} {path}: that is the log itself ({name}); name another file")


# --- what is looked at -------------------------------------------------------------------------


def _selection(tables: "LogTables", since: str | None, until: str | None, epoch: str) -> "Selection":
    from snapd.forensics.facts import Selection

    found = [facts.epoch for facts in tables.epochs if facts.epoch.startswith(epoch)] if epoch else [""]
    if len(found) != 1:
        known = ", ".join(facts.epoch for facts in tables.epochs[-5:]) or "none"
        what = "several epochs begin" if found else "no epoch of the log begins"
        raise click.UsageError(f"--epoch {epoch!r}: {what} like that; the last ones are {known}")
    span = tables.span_ts()
    end_ts = span[1] if span else None
    return Selection(
        since_ts=None if since is None else parse_when(since, end_ts, "--since"),
        until_ts=None if until is None else parse_when(until, end_ts, "--until"),
        epoch=found[0],
    )


def parse_when(text: str, end_ts: float | None, option: str) -> float:
    """Return the unix time that *text* names.

    Args:
        text: ISO 8601 (UTC if it has no zone), or a time before *end_ts* such as ``90m`` or ``8h``.
        end_ts: the log's last time; None: it has none.
        option: for the message.

    Raises:
        click.UsageError: it names no time.
    """
    relative = _RELATIVE.fullmatch(text.strip().lower())
    if relative is not None:
        if end_ts is None:
            raise click.UsageError(f"{option} {text}: the log has no times, so nothing is before its end")
        return end_ts - float(relative.group(1)) * _SECONDS[relative.group(2)]
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise click.UsageError(
            f"{option} {text!r} is no time: write 2026-01-31T22:00, or 8h for so long before the log's end"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


# --- instead of the report ---------------------------------------------------------------------


def _prove(log: "LogInput") -> "Proved":
    from snapd.forensics.proving import prove_log

    with _progress("proving") as progress:
        return prove_log(log, progress)


def _show_proof(proved: "Proved", as_json: bool) -> int:
    from snapd.forensics.violations import KIND_HELP

    proof = proved.report
    if as_json:
        import msgspec

        print_json(
            msgspec.to_builtins(proof)
            | {
                "num_violations": proof.num_violations,
                "is_good": proof.is_good,
                "is_whole": proof.is_whole,
                "copies": proved.copies,
            }
        )
    else:
        from snapd.cli.prooftext import show_proof

        show_proof(proof, proved.copies, KIND_HELP)
    return 0 if proof.is_good else EXIT_VIOLATION


def _draw(
    tables: "LogTables",
    report: "Report",
    proof: "ProofReport | None",
    html_path: Path | None,
    png_path: Path | None,
) -> list[Path]:
    """Write what was asked for, and return the files."""
    written: list[Path] = []
    if html_path is not None:
        from snapd.forensics.page import write_html

        write_html(tables, report, html_path, proof=proof)
        written.append(html_path)
    if png_path is not None:
        from snapd.forensics.page import write_pngs

        written += write_pngs(tables, report, png_path, proof=proof)
    return written


def _tell(tables: "LogTables", session_id: str, as_json: bool) -> None:
    from snapd.forensics.story import steps, summarize

    summary = summarize(tables, session_id)
    if not as_json:
        from snapd.cli.forensicstext import show_story

        show_story(summary, steps(tables, session_id))
        return
    import msgspec

    # A session may have very many lines: they are written as they come.
    click.echo('{"summary":' + msgspec.json.encode(summary).decode() + ',"steps":[', nl=False)
    separator = ""
    for step in steps(tables, session_id):
        click.echo(separator + msgspec.json.encode(step).decode(), nl=False)
        separator = ","
    click.echo("]}")


def _compare(report: "Report", log: "LogInput", other: str, top: int, as_json: bool) -> None:
    from snapd.forensics.compare import compare

    with _open((other,)) as other_log, _load(other_log) as other_tables:
        comparison = compare(report, _report(other_tables, other_log, top))
        names = [_name(log), _name(other_log)]
    if as_json:
        print_json(comparison)
        return
    from snapd.cli.forensicstext import show_comparison

    show_comparison(comparison, *names)


def _name(log: "LogInput") -> str:
    more = f" and {len(log.sources) - 1} more" if len(log.sources) > 1 else ""
    return f"{log.sources[-1].path}{more}"


# --- progress ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress(what: str) -> "Iterator[Progress | None]":
    """Give a function that shows how far it is, on a terminal; None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task(what, total=None)
        yield lambda done_bytes, total_bytes: bar.update(task, completed=done_bytes, total=total_bytes)

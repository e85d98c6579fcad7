"""``snapd forensics``: what a log says the morning after."""

import contextlib
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
    with _typed_errors(), _cleaning_up(), _open(logs) as log:
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
    except (SnapdError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise _Unreadable(str(error)) from None


@contextlib.contextmanager
def _cleaning_up() -> Iterator[None]:
    """Let SIGTERM end the command as an exception does, so that no temporary file is left."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _open(names: tuple[str, ...]) -> "LogInput":
    from snapd.forensics.lines import LogInput

    return LogInput(names)


def _load(log: "LogInput") -> "LogTables":
    from snapd.forensics.tables import LogTables

    with _progress("reading") as progress:
        return LogTables(log, progress)


def _report(tables: "LogTables", log: "LogInput", top: int) -> "Report":
    from snapd.forensics.report import build_report

    return build_report(tables, log, top=top)


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
        from snapd.cli.forensicstext import show_proof

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

"""``snapd doctor``: what works on this machine, what does not, and what to do about it."""

from itertools import groupby
from typing import TYPE_CHECKING, Final

import click

from snapd.cli.common import Table, cell, json_option, print_json, say, say_note
from snapd.cli.settings import settings_options
from snapd.config import Loaded
from snapd.units import GIB, KIB, format_bytes, parse_size_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapd.doctor.finding import Finding
    from snapd.doctor.report import Report

_EXIT_BROKEN: Final = 1
_SELF_TEST_BYTES_MIN: Final = 4 * KIB
_SELF_TEST_BYTES_MAX: Final = 64 * GIB
_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red", "info": "dim"}
_STATUS_WIDTH: Final = max(map(len, _STYLES))
_FIX_INDENT: Final = 8


@click.command(
    epilog="""\b
Examples:
  snapd doctor
  snapd doctor --transport mooncake --protocol rdma
  snapd doctor --device cuda:0 --transport mooncake --protocol nvlink_intra
  snapd doctor --config /etc/kv-snapd/snapd.toml --no-self-test
  snapd doctor --json | jq .mooncake.tcp

\b
A self-test moves bytes from one process into the arena of another one, which compares every byte.
Exit status: 0 the configured transport works, 1 it does not, 2 wrong usage or configuration."""
)
@settings_options
@click.option("--no-self-test", is_flag=True, help="Move no bytes.")
@click.option(
    "--bytes",
    "self_test_size",
    metavar="SIZE",
    default="256MiB",
    show_default=True,
    help="How much each self-test moves.",
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0.1, max=3600),
    default=60.0,
    show_default=True,
    help="A self-test that is not done by then has failed.",
)
@json_option
def doctor(loaded: Loaded, no_self_test: bool, self_test_size: str, timeout_s: float, as_json: bool) -> int:
    """Look at the machine and the configuration, and try every transport that is possible here.

    A finding about a transport that is not the configured one never makes it fail.
    """
    from snapd.doctor.report import examine

    size_bytes = self_test_bytes(self_test_size)
    report = examine(loaded.config, self_test_bytes=0 if no_self_test else size_bytes, timeout_s=timeout_s)
    if as_json:
        print_json(report)
    else:
        _show(report)
    return 0 if report.ok else _EXIT_BROKEN


def self_test_bytes(size: str) -> int:
    """Return the bytes that ``--bytes`` names.

    Raises:
        click.UsageError: it is no size, or out of range.
    """
    try:
        size_bytes = parse_size_bytes(size)
    except ValueError as error:
        raise click.UsageError(f"--bytes: {error}") from None
    if not _SELF_TEST_BYTES_MIN <= size_bytes <= _SELF_TEST_BYTES_MAX:
        low, high = format_bytes(_SELF_TEST_BYTES_MIN), format_bytes(_SELF_TEST_BYTES_MAX)
        raise click.UsageError(f"--bytes {size}: write a size from {low} to {high}")
    return size_bytes


def _show(report: "Report") -> None:
    name_width = max(len(finding.name) for finding in report.findings)
    for group, findings in groupby(report.findings, key=lambda finding: finding.group):
        say(group, "bold")
        _show_group(findings, name_width)
        say()
    transport = f"mooncake {report.protocol}" if report.transport == "mooncake" else report.transport
    if report.ok:
        say(f"ok: transport {transport} works", "bold green")
    else:
        say(f"not ok: in the way of transport {transport}: {', '.join(report.in_the_way)}", "bold red")


def _show_group(findings: "Iterable[Finding]", name_width: int) -> None:
    """Write the rows of a group, then what to do."""
    table = Table("", "", "", indent=2)
    fixes: list[str] = []
    for finding in findings:
        status = cell(finding.status.ljust(_STATUS_WIDTH), _STYLES[finding.status])
        table.add(status, finding.name.ljust(name_width), finding.detail)
        if finding.fix:
            fixes.append(f"{finding.name}: {finding.fix}")
    table.show()
    for fix in fixes:
        say_note(fix, indent=_FIX_INDENT)

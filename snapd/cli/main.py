"""The entry point: which commands there are, and how every one of them ends.

A command's module is imported only when that command is used, so ``snapd --help`` and
``snapd status`` load nothing that they do not need.

Exit statuses: 0 done; 1 the daemon said no, or is not there, or cannot start; 2 wrong usage or
configuration; 70 a bug in snapd; 130 interrupted; 141 nobody reads the output.
"""

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import click

from snapd import __version__
from snapd.cli.common import NoReader, printable
from snapd.compiling import described, is_compiled
from snapd.errors import ConfigError, SnapdError

EXIT_REFUSED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERNAL_ERROR: Final = 70
# What a shell reports for a process that SIGINT or SIGPIPE has ended.
EXIT_INTERRUPTED: Final = 130
EXIT_NO_READER: Final = 141


class LazyCommand(NamedTuple):
    """A command that is not imported yet.

    Attributes:
        target: ``module:attribute`` of the click command.
        help: the line that ``snapd --help`` shows.
    """

    target: str
    help: str


COMMANDS: Final[dict[str, LazyCommand]] = {
    "serve": LazyCommand("snapd.cli.serve:serve", "Run the daemon."),
    "status": LazyCommand("snapd.cli.status:status", "Show arenas, attempts, outcomes and the log's health."),
    "sessions": LazyCommand("snapd.cli.sessions:sessions", "List attempts."),
    "show": LazyCommand("snapd.cli.show:show", "Show one attempt, or a session's latest."),
    "watch": LazyCommand("snapd.cli.watch:watch", "Print transitions as they happen."),
    "top": LazyCommand("snapd.cli.top:top", "Watch arenas, attempts, rates and events change."),
    "abort": LazyCommand("snapd.cli.abort:abort", "End an attempt, or all open ones of a session."),
    "drain": LazyCommand("snapd.cli.drain:drain", "Take no new attempts, or take them again."),
    "doctor": LazyCommand("snapd.cli.doctor:doctor", "Say what works on this machine, and what to do."),
    "config": LazyCommand("snapd.cli.config:config", "Print the configuration and where it comes from."),
    "forensics": LazyCommand("snapd.cli.forensics:forensics", "Say what an event log tells, and prove it."),
    "demo": LazyCommand("snapd.cli.demo:demo", "Play a trace: a daemon, D workers and P ranks, real bytes."),
    "replay": LazyCommand("snapd.cli.replay:replay", "Run a trace through models of P and D."),
    "certs": LazyCommand("snapd.cli.certs:certs", "Make certificates to try TLS with."),
    "completion": LazyCommand("snapd.cli.completion:completion", "Print what completes commands in a shell."),
}


class LazyGroup(click.Group):
    """A group that knows its commands by name and help line, and imports one when it is used."""

    def __init__(self, *args: object, lazy: Mapping[str, LazyCommand], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which help shows them."""
        del ctx
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        del ctx
        known = self._lazy.get(cmd_name)
        if known is None:
            return None
        module_name, _, attribute = known.target.partition(":")
        try:
            command = getattr(importlib.import_module(module_name), attribute)
        except ModuleNotFoundError as error:
            if error.name != module_name:
                raise
            raise click.UsageError(f"this installation has no {cmd_name!r}: install kv-snapd anew") from None
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown one say what was probably meant."""
        name = args[0] if args else ""
        if args and name not in self._lazy and not name.startswith("-"):
            close = difflib.get_close_matches(name, self._lazy, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(self._lazy)}"
            raise click.UsageError(f"there is no command {name!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the help lines, without importing any."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in self._lazy.items()])


@click.command(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done, 1 refused or no daemon, 2 wrong usage or configuration, 70 a bug in snapd.",
)
@click.version_option(
    described(__version__, is_compiled()),
    "-V",
    "--version",
    prog_name="snapd",
    message="%(prog)s %(version)s",
)
def cli() -> None:
    """A buffer beside the prefill worker, so that decoded KV cache comes back.

    Start the daemon with 'snapd serve'; look at it with 'snapd status'. Every command has examples in its
    own --help.
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status; errors go to stderr, one line each."""
    try:
        result = cli.main(list(arguments) or ["--help"], prog_name="snapd", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.UsageError as error:
        return fail(f"{error.format_message().rstrip('.')}{_help_hint(error)}", EXIT_USAGE)
    except click.ClickException as error:
        return fail(error.format_message(), error.exit_code)
    except ConfigError as error:
        return fail(str(error), EXIT_USAGE)
    except SnapdError as error:
        return fail(str(error), EXIT_REFUSED)
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except (NoReader, BrokenPipeError):
        return EXIT_NO_READER
    except Exception:
        import traceback

        traceback.print_exc()
        return fail(
            "internal error, a bug in snapd: please report it with the lines above", EXIT_INTERNAL_ERROR
        )
    return result if isinstance(result, int) else 0


def fail(message: str, status: int) -> int:
    """Write one line to stderr and return *status*."""
    # Nobody may read stderr either; the exit status remains.
    with contextlib.suppress(OSError):
        click.echo(f"snapd: {printable(message)}", err=True)
    return status


def _help_hint(error: click.UsageError) -> str:
    path = error.ctx.command_path if error.ctx is not None else "snapd"
    return f" (see '{path} --help')"


def main() -> None:
    """Run the command line of this process and exit."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character must not end the program.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    status = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        status = EXIT_NO_READER
    if status == EXIT_NO_READER:
        # The interpreter flushes stdout once more at exit, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


if __name__ == "__main__":
    main()

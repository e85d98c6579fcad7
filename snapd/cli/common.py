"""What the commands share: which daemon, how output looks, and paging through attempts."""

import functools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import click

from snapd.errors import DaemonUnreachable, LimitReached, RequestError, StaleHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from snapd.client import Client
    from snapd.core.events import State
    from snapd.core.session import SessionView

_P = ParamSpec("_P")
_R = TypeVar("_R")

TIMEOUT_S_DEFAULT: Final = 5.0
PAGE_ATTEMPTS: Final = 250
_HANDLE_DIGITS_MAX: Final = 19
_BLANKS_AT_END: Final = re.compile(r"(?: |\x1b\[[0-9;]*m)+$")
# Wider than any table: a session id has at most some thousand characters.
_TABLE_COLUMNS_MAX: Final = 1_000_000
SYSTEM_SOCKET_PATH: Final = "/run/kv-snapd/snapd.sock"
STATE_STYLES: Final = {
    "RESERVED": "cyan", "TRANSFERRING": "blue", "READY": "green", "INGESTED": "bold green", "ABORTED": "red",
}  # fmt: skip


# --- which daemon ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DaemonChoice:
    """Which daemon a command talks to, and how long it waits for each answer."""

    socket: str | None
    config_path: Path | None
    timeout_s: float

    def socket_path(self) -> str:
        """Return the socket: as given, else as configured.

        Raises:
            ConfigError: it was not given, and the configuration is wrong.
        """
        if self.socket is not None:
            return self.socket
        from snapd.config import load_config

        return load_config(self.config_path, os.environ, {}).socket_path

    def connect(self) -> "Client":
        """Return a client that is connected.

        Raises:
            SnapdError: there is no daemon, or it does not answer; the message says what to do.
        """
        from snapd.client import Client

        path = self.socket_path()
        client = Client(path, timeout_s=self.timeout_s, name="snapd command line")
        try:
            client.connect()
        except BaseException as error:
            client.close()
            if isinstance(error, DaemonUnreachable):
                raise _with_hint(error, path) from None
            raise
        return client


def _with_hint(error: DaemonUnreachable, path: str) -> DaemonUnreachable:
    hint = "start one with 'snapd serve', or say which with --socket"
    if path != SYSTEM_SOCKET_PATH and os.path.exists(SYSTEM_SOCKET_PATH):  # noqa: PTH110 - imports less
        hint = f"the system's daemon is at {SYSTEM_SOCKET_PATH}: use --socket for it"
    return DaemonUnreachable(f"{error}; {hint}")


socket_option: Final = click.option(
    "--socket", "socket_path", metavar="PATH", help="The daemon's socket; else as configured."
)
config_option: Final = click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="TOML file that names the socket.",
)


def daemon_options(
    command: Callable[Concatenate[DaemonChoice, _P], _R],
) -> Callable[..., _R]:
    """Give a command the options that choose the daemon; its first argument is the choice."""

    @socket_option
    @config_option
    @click.option(
        "--timeout",
        "timeout_s",
        metavar="SECONDS",
        type=click.FloatRange(min=0.001, max=3600),
        default=TIMEOUT_S_DEFAULT,
        show_default=True,
        help="Wait this long for an answer.",
    )
    @functools.wraps(command)
    def wrapper(
        socket_path: str | None,
        config_path: Path | None,
        timeout_s: float,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _R:
        return command(DaemonChoice(socket_path, config_path, timeout_s), *args, **kwargs)

    return wrapper


json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


# --- attempts ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attempts:
    """Attempts, how many more match, and the daemon's clock when it was asked."""

    sessions: "list[SessionView]"
    total: int
    now_ns: int


def list_attempts(
    client: "Client", *, states: "Sequence[State]" = (), session_id: str = "", limit: int = 0
) -> Attempts:
    """Return attempts in the daemon's order: open ones oldest first, then ended ones oldest first.

    Args:
        client: of the daemon.
        states: only these; empty: the open ones.
        session_id: only this session's.
        limit: at most so many; 0: all.
    """
    found: dict[int, SessionView] = {}
    offset, total, now_ns, page = 0, 1, 0, PAGE_ATTEMPTS
    while offset < total and (not limit or len(found) < limit):
        wanted = min(page, limit - len(found)) if limit else page
        try:
            reply = client.list_sessions(states=states, session_id=session_id, offset=offset, limit=wanted)
        except LimitReached:
            # The attempts of this page have so many extents that they fit no frame.
            if page == 1:
                raise
            page //= 2
            continue
        if not reply.sessions:
            break
        # Attempts come and go between two pages: the same one may be seen twice.
        found |= {view.slab_handle: view for view in reply.sessions}
        offset += len(reply.sessions)
        total, now_ns = reply.total, reply.now_ns
    total = max(total, len(found)) if found else 0
    return Attempts(list(found.values()), total, now_ns)


def all_states() -> "tuple[State, ...]":
    """Return every state, final ones too."""
    from snapd.core.events import State

    return tuple(State)


def find_attempts(client: "Client", name: str) -> Attempts:
    """Return the attempt that *name* is the slab_handle of, else every known one of session *name*.

    Raises:
        StaleHandle: the daemon knows neither.
    """
    # Python makes no number of some thousand digits.
    if name.isascii() and name.isdigit() and len(name) <= _HANDLE_DIGITS_MAX and int(name) < 1 << 63:
        try:
            reply = client.get(int(name))
            return Attempts([reply.session], 1, reply.now_ns)
        except StaleHandle:
            pass  # It may be a session that is named by a number.
    found = list_attempts(client, states=all_states(), session_id=name) if name else Attempts([], 0, 0)
    if not found.sessions:
        raise NotFound(name)
    return found


class NotFound(RequestError):
    """No attempt has this slab_handle or session id."""

    def __init__(self, name: str) -> None:
        Exception.__init__(
            self,
            f"{name!r} is no slab_handle and no session id that this daemon knows: "
            "list them with 'snapd sessions --all' (a restart forgets; the event log does not)",
        )


# --- output ------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Return *text* on one line, with what could steer a terminal written as an escape."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )


def print_json(value: Any) -> None:
    """Write one JSON document to stdout: indented for a person, on one line for a pipe."""
    import msgspec

    raw = msgspec.json.encode(value)
    if sys.stdout.isatty():
        raw = msgspec.json.format(raw, indent=2)
    echo(raw.decode())


def fields_of(struct: Any) -> dict[str, Any]:
    """Return every field of a message, default or not, without its type and request id."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__ if name != "id"}


def styled(text: str, style: str) -> str:
    """Return *text* with the escapes of a style such as ``bold green``; ``echo`` drops them for a pipe."""
    if not style or not text:
        return text
    words = style.split()
    colour = next((word for word in words if word not in ("bold", "dim")), None)
    return click.style(text, fg=colour, bold="bold" in words or None, dim="dim" in words or None)


class NoReader(Exception):
    """Nobody reads stdout any more. No ``OSError``: click would end the process with status 1."""


def echo(line: str) -> None:
    """Write a line to stdout, with its colours only if that is a terminal and ``NO_COLOR`` is not set.

    Raises:
        NoReader: the pipe is broken.
    """
    try:
        click.echo(line, color=False if os.environ.get("NO_COLOR") else None)
    except BrokenPipeError:
        raise NoReader from None


def say(text: str = "", style: str = "") -> None:
    """Write text as one line, made printable."""
    echo(styled(printable(text), style))


def say_note(text: str, indent: int = 0) -> None:
    """Write a paragraph, wrapped to the terminal's width, or to 80 columns for a pipe."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
    pad = " " * indent
    for line in textwrap.wrap(
        printable(text), max(columns, 20), initial_indent=pad, subsequent_indent=pad, break_long_words=False
    ):
        say(line)


def can_show(characters: str) -> bool:
    """Return whether stdout's encoding has these characters."""
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def cell(text: object, style: str = "") -> "Text":
    """Return what stands in a table: the text, made printable, in a style such as ``bold green``."""
    from rich.text import Text

    return Text(printable(str(text)), style=style)


class Table:
    """A table without lines, as wide as its contents: nothing is cut off, so that ids can be copied.

    Args:
        columns: the headings; one that begins with ``>`` is set to the right.
        indent: blanks before every line.
    """

    def __init__(self, *columns: str, indent: int = 0) -> None:
        from rich.table import Table as RichTable

        self._indent = " " * indent
        self._table = RichTable(
            box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns), header_style="bold"
        )
        for column in columns:
            self._table.add_column(
                column.removeprefix(">"),
                justify="right" if column.startswith(">") else "left",
                no_wrap=True,
            )

    def add(self, *cells: object) -> None:
        """Add a row; what is no ``cell`` becomes one."""
        from rich.text import Text

        self._table.add_row(*(item if isinstance(item, Text) else cell(item) for item in cells))

    def show(self) -> None:
        """Write the table to stdout."""
        from rich.console import Console

        # ``echo`` decides about colours, and a terminal about long lines.
        console = Console(width=_TABLE_COLUMNS_MAX, force_terminal=True, color_system="standard")
        with console.capture() as capture:
            console.print(self._table, crop=False)
        for line in capture.get().splitlines():
            # A heading's blanks are inside its colour.
            echo(self._indent + _BLANKS_AT_END.sub(lambda end: end[0].replace(" ", ""), line))


def state_cell(state: str) -> "Text":
    """Return a table cell for a state, in its colour."""
    return cell(state, STATE_STYLES.get(state, ""))


def shown_ns(duration_ns: int) -> str:
    """Return a duration for a person."""
    from snapd.units import NS_PER_MS, format_ms

    return format_ms(max(0, duration_ns) / NS_PER_MS)


def plural(count: int, noun: str) -> str:
    """Return ``1 attempt`` or ``2 attempts``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

"""What the commands share: which daemon, how output looks, and paging through attempts."""

import functools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import click

from snapd.errors import DaemonUnreachable, LimitReached, RequestError, StaleHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapd.client import Client
    from snapd.core.events import State
    from snapd.core.session import SessionView

_P = ParamSpec("_P")
_R = TypeVar("_R")

TIMEOUT_S_DEFAULT: Final = 5.0
PAGE_ATTEMPTS: Final = 250
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
        try:
            return Client(path, timeout_s=self.timeout_s)
        except DaemonUnreachable as error:
            raise _with_hint(error, path) from None


def _with_hint(error: DaemonUnreachable, path: str) -> DaemonUnreachable:
    if path != SYSTEM_SOCKET_PATH and os.path.exists(SYSTEM_SOCKET_PATH):  # noqa: PTH110 - imports less
        return DaemonUnreachable(f"{error}; there is a daemon at {SYSTEM_SOCKET_PATH}: use --socket for it")
    return error


def daemon_options(
    command: Callable[Concatenate[DaemonChoice, _P], _R],
) -> Callable[..., _R]:
    """Give a command the options that choose the daemon; its first argument is the choice."""

    @click.option("--socket", metavar="PATH", help="The daemon's socket; else as configured.")
    @click.option(
        "--config",
        "config_path",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="TOML file that names the socket.",
    )
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
        socket: str | None, config_path: Path | None, timeout_s: float, *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        return command(DaemonChoice(socket, config_path, timeout_s), *args, **kwargs)

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
    if name.isascii() and name.isdigit() and int(name) < 1 << 63:
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
    click.echo(raw.decode())


def fields_of(struct: Any) -> dict[str, Any]:
    """Return every field of a message, default or not, without its type and request id."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__ if name != "id"}


def styled(text: str, style: str) -> str:
    """Return *text* with the escapes for a style such as ``bold green``; ``echo`` takes them out for a pipe."""
    if not style:
        return text
    words = style.split()
    colour = next((word for word in words if word not in ("bold", "dim")), None)
    return click.style(text, fg=colour, bold="bold" in words or None, dim="dim" in words or None)


def echo(line: str) -> None:
    """Write a line to stdout, with its colours only if that is a terminal and ``NO_COLOR`` is not set."""
    click.echo(line, color=False if os.environ.get("NO_COLOR") else None)


def show(text: str = "", style: str = "") -> None:
    """Write text as one line, made printable."""
    echo(styled(printable(text), style))


def show_note(text: str, indent: int = 0) -> None:
    """Write a paragraph, wrapped to the terminal's width, or to 80 columns for a pipe."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
    pad = " " * indent
    for line in textwrap.wrap(
        printable(text), max(columns, 20), initial_indent=pad, subsequent_indent=pad, break_long_words=False
    ):
        show(line)


def can_show(characters: str) -> bool:
    """Return whether stdout's encoding has these characters."""
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


class Cell:
    """What stands in a table: the text, made printable, and the same with colours."""

    __slots__ = ("shown", "text")

    def __init__(self, text: object, style: str = "") -> None:
        self.text = printable(str(text))
        self.shown = styled(self.text, style)

    def __add__(self, other: "Cell") -> "Cell":
        both = Cell("")
        both.text, both.shown = self.text + other.text, self.shown + other.shown
        return both


class Table:
    """A table without lines, as wide as its contents: nothing is cut off, so that ids can be copied.

    Args:
        columns: the headings; one that begins with ``>`` is set to the right.
        indent: blanks before every line.
    """

    def __init__(self, *columns: str, indent: int = 0) -> None:
        self._is_right = [column.startswith(">") for column in columns]
        heads = [column.removeprefix(">") for column in columns]
        self._rows = [[Cell(head, "bold") for head in heads]] if any(heads) else []
        self._indent = " " * indent

    def add(self, *cells: object) -> None:
        """Add a row; what is no ``Cell`` becomes one."""
        row = [item if isinstance(item, Cell) else Cell(item) for item in cells]
        assert len(row) == len(self._is_right), "a cell for each column"
        self._rows.append(row)

    def lines(self) -> Iterator[str]:
        """Yield the table's lines, without blanks at their ends."""
        widths = [max(len(cell.text) for cell in column) for column in zip(*self._rows, strict=True)]
        for row in self._rows:
            padded = []
            for cell, width, is_right in zip(row, widths, self._is_right, strict=True):
                blanks = " " * (width - len(cell.text))
                padded.append(blanks + cell.shown if is_right else cell.shown + blanks)
            yield (self._indent + "  ".join(padded)).rstrip()

    def show(self) -> None:
        """Write the table to stdout."""
        for line in self.lines():
            echo(line)


def state_cell(state: str) -> Cell:
    """Return a table cell for a state, in its colour."""
    return Cell(state, STATE_STYLES.get(state, ""))


def shown_ns(duration_ns: int) -> str:
    """Return a duration for a person."""
    from snapd.units import NS_PER_MS, format_ms

    return format_ms(max(0, duration_ns) / NS_PER_MS)


def plural(count: int, noun: str) -> str:
    """Return ``1 attempt`` or ``2 attempts``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

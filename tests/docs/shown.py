"""What a Markdown page shows: commands, headings, tables, links and code."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from snapd.cli.main import cli

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"
READMES = (PROJECT / "README.md", PROJECT / "README.zh.md")

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
# What may stand before the command itself.
_PREFIX = re.compile(r"(\w+=\S*|sudo|watch|-n1|exec)")
_CUTS = frozenset({"|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "(", ")"})


class Block(NamedTuple):
    """A block of code."""

    language: str
    text: str


def blocks(markdown: str) -> list[Block]:
    """Return the blocks of code."""
    return [Block(language, text) for _, language, text in _FENCE.findall(markdown)]


def prose(markdown: str) -> str:
    """Return the page without its blocks of code."""
    return _FENCE.sub("", markdown)


def inline(markdown: str) -> list[str]:
    """Return the code between backticks, in the prose."""
    return _INLINE.findall(prose(markdown))


def headings(markdown: str) -> list[tuple[int, str]]:
    """Return level and text of each heading."""
    found = re.findall(r"^(#+) (.+)$", prose(markdown), re.MULTILINE)
    return [(len(marks), text) for marks, text in found]


def words_of(line: str) -> Iterator[list[str]]:
    """Yield the commands of a line of a shell, as words; comments are left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    command: list[str] = []
    for word in lexer:
        if word in _CUTS or set(word) <= set("();<>|&"):
            yield command
            command = []
        else:
            command.append(word)
    yield command


def lines_of(text: str) -> Iterator[str]:
    """Yield the lines of a shell's text; one that goes on in the next, by a backslash or a quote, is one."""
    begun = ""
    for line in text.replace("\\\n", " ").splitlines():
        begun += line
        try:
            list(words_of(begun))
        except ValueError:
            begun += " "
        else:
            yield begun
            begun = ""
    assert not begun, f"a quote is not closed: {begun}"


def shell_commands(markdown: str) -> Iterator[list[str]]:
    """Yield every command of the page's ``sh`` blocks."""
    for language, text in blocks(markdown):
        if language == "sh":
            for line in lines_of(text):
                yield from filter(None, words_of(line))


def inline_commands(markdown: str) -> Iterator[list[str]]:
    """Yield what stands between backticks and begins like a command of the project."""
    for text in inline(markdown):
        if re.match(r"(\S*/)?(snapd|make|python) [a-z-]", text):
            yield from filter(None, words_of(text))


def of_snapd(words: list[str]) -> list[str] | None:
    """Return what follows ``snapd`` where that is the command; None: it is another command."""
    rest = list(words)
    if rest[:2] == ["podman", "exec"]:
        rest = rest[3:]
    while rest and _PREFIX.fullmatch(rest[0]):
        rest.pop(0)
    return rest[1:] if rest and Path(rest[0]).name == "snapd" else None


def parsed(words: list[str]) -> None:
    """Parse a command line of ``snapd`` as the program would, up to the values.

    Raises:
        click.UsageError: a command or an option is unknown, or lacks its value.
    """
    command: click.Command = cli
    context = click.Context(command, info_name="snapd")
    rest = list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"there is no command {name!r}")
        command, context = (
            found,
            click.Context(found, parent=context, info_name=name, **found.context_settings),
        )
    command.make_parser(context).parse_args(rest)

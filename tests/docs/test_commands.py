"""Every command that a page shows exists, with the options that are shown."""

import re
import tomllib
from pathlib import Path

import click
import pytest
from shown import DOCS, PROJECT, READMES, inline_commands, of_snapd, parsed, shell_commands

PAGES = sorted([*DOCS.glob("*.md"), *READMES])
MAKEFILE = (PROJECT / "Makefile").read_text()
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())


def _commands(page: Path) -> list[list[str]]:
    text = page.read_text()
    return [*shell_commands(text), *inline_commands(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_snapd_and_every_option_exists(page: Path) -> None:
    wrong = []
    for words in _commands(page):
        arguments = of_snapd(words)
        if arguments is not None:
            try:
                parsed(arguments)
            except click.UsageError as error:
                wrong.append(f"{' '.join(words)}: {error.format_message()}")
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_target_of_make_and_every_script_exists(page: Path) -> None:
    for words in _commands(page):
        if words[0] == "make":
            for target in filter(re.compile(r"[a-z]+").fullmatch, words[1:]):
                assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), f"make {target}"
        for word in words:
            if re.fullmatch(r"(tools|deploy)/[\w.-]+", word):
                assert (PROJECT / word).exists(), word


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_extra_that_is_installed_exists(page: Path) -> None:
    extras = {
        extra
        for words in _commands(page)
        for word in words
        for names in re.findall(r"^(?:kv-snapd|\.)\[([\w,-]+)\]$", word)
        for extra in names.split(",")
    }
    assert extras <= set(PYPROJECT["project"]["optional-dependencies"])


@pytest.mark.parametrize(
    "line",
    [
        "snapd nothing", "snapd status --limit", "snapd abort --yess chat-17", "snapd drain --timeout",
        "sudo snapd serve --rank 1", "podman exec kv-snapd snapd drain --wiat",
        "X=1 .venv/bin/snapd demo --cha0s",
    ],
)  # fmt: skip
def test_what_does_not_exist_is_found(line: str) -> None:
    [words] = shell_commands(f"```sh\n{line}\n```\n")
    arguments = of_snapd(words)
    assert arguments is not None
    with pytest.raises(click.UsageError):
        parsed(arguments)


def test_commands_are_found_in_pipes_after_others_and_between_backticks() -> None:
    shown = "snapd show x | jq . && snapd watch \\\n    --json  # snapd no"
    text = f"Use `snapd drain --off`.\n\n```sh\n{shown}\n```\n"
    assert [of_snapd(words) for words in shell_commands(text)] == [["show", "x"], None, ["watch", "--json"]]
    assert list(inline_commands(text)) == [["snapd", "drain", "--off"]]


def test_a_quote_may_go_over_lines_and_must_end() -> None:
    text = "```sh\ncat 'a\nsnapd b' && snapd watch\n```\n"
    assert [of_snapd(words) for words in shell_commands(text)] == [None, ["watch"]]
    with pytest.raises(AssertionError, match="not closed"):
        list(shell_commands("```sh\ncat 'a\n```\n"))

"""What the page on troubleshooting says of messages, findings and warnings is what the code has."""

import ast
import re
from collections.abc import Iterator

import pytest
from shown import DOCS, PROJECT

from snapd.cli.status import UNPUBLISHED_HELP

PAGE = (DOCS / "troubleshooting.md").read_text()
# Where text that differs from case to case stands in a message.
HOLE = "\0"
# What stands for such text on the page.
ANY = re.compile(r"\.\.\.|\bPATH\b|\bcuda:N\b|\bN\b")


def _said(node: ast.AST) -> str | None:
    """Return a text of the source, with a hole for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _said(part) or HOLE if isinstance(part, ast.Constant) else HOLE for part in node.values
        )
    return None


def _texts(directory: str) -> Iterator[str]:
    for path in sorted((PROJECT / directory).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if text := _said(node):
                yield text


def _rows(heading: str) -> list[list[str]]:
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert section is not None, heading
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("heading", ["The daemon does not start", "A command does not reach the daemon"])
def test_every_message_that_is_shown_is_said_somewhere(heading: str) -> None:
    texts = list(_texts("snapd"))
    for row in _rows(heading):
        for message in _code(row[0]):
            parts = [re.escape(part.strip()) for part in ANY.split(message) if part.strip(" :")]
            pattern = re.compile("[\\s\\S]*?".join(parts))
            assert any(pattern.search(text) for text in texts), message


def test_every_finding_of_doctor_is_on_the_page_and_every_name_there_is_one() -> None:
    names = set()
    for path in sorted((PROJECT / "snapd/doctor").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                        names.add(keyword.value.value)
    shown = {name for row in _rows("What doctor looks at") for name in _code(row[0])}
    # These are put together of parts, or given to a function that makes the finding.
    made = {
        "DEVICE port N",
        "arenas on cuda:N",
        "log",
        "shm",
        "mooncake tcp",
        "mooncake rdma",
        "mooncake nvlink_intra",
    }
    assert "memfd" in names
    assert shown == names | made


def test_every_warning_is_on_the_page_and_every_kind_there_is_one() -> None:
    kinds = set()
    for path in sorted((PROJECT / "snapd").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                position = {"warn": 0, "_ignore": 1}.get(name, len(node.args))
                if position < len(node.args) and isinstance(node.args[position], ast.Constant):
                    kinds.add(node.args[position].value)
    assert "bad frame" in kinds
    assert {kind for row in _rows("Warnings on stderr") for kind in _code(row[0])} == kinds


def test_every_reason_not_to_tell_routers_is_on_the_page() -> None:
    shown = {name for row in _rows("A router does not find the snapshots") for name in _code(row[0])}
    assert shown == set(UNPUBLISHED_HELP)

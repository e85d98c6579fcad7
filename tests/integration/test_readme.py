"""The READMEs' programs run as they stand, against the daemon that their command starts.

README.zh.md is README.md in Chinese: the same commands, programs, parts, tables and links.
"""

import io
import re
import shlex
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapd.client import Client

PROJECT = Path(__file__).parents[2]
READMES = {name: (PROJECT / name).read_text() for name in ("README.md", "README.zh.md")}
ENGLISH, CHINESE = READMES.values()
TIMEOUT_S = 60

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _blocks(readme: str, language: str) -> list[str]:
    return [text for of, text in _FENCE.findall(readme) if of == language]


def _program(readme: str, name: str, directory: Path) -> str:
    text = next(block for block in _blocks(readme, "python") if block.startswith(f"# {name}\n"))
    return text.replace("/tmp/snapd", str(directory))


@pytest.fixture(params=READMES)
def readme(request: pytest.FixtureRequest) -> str:
    return READMES[request.param]


@pytest.fixture
def socket_path(readme: str, tmp_path: Path) -> Iterator[str]:
    lines = "\n".join(_blocks(readme, "sh")).splitlines()
    line = next(line for line in lines if line.startswith("snapd serve"))
    arguments = shlex.split(line.replace("/tmp/snapd", str(tmp_path)))[1:]
    daemon = subprocess.Popen([sys.executable, "-m", "snapd.cli.main", *arguments])
    socket = tmp_path / "snapd.sock"
    try:
        with Client(str(socket)) as client:
            client.connect(wait_s=TIMEOUT_S)
        yield str(socket)
    finally:
        daemon.terminate()
        assert daemon.wait(TIMEOUT_S) == 0


def test_the_minimal_p_and_d_bring_a_snapshot_over(readme: str, socket_path: str, tmp_path: Path) -> None:
    p = subprocess.Popen(
        [sys.executable, "-c", _program(readme, "p.py", tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        # D may push once P has declared its layout.
        with Client(socket_path) as client:
            while client.stats().core.layouts == 0:
                assert p.poll() is None, "P ended early"
        d = subprocess.run(
            [sys.executable, "-c", _program(readme, "d.py", tmp_path)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert d.returncode == 0, d.stderr
        assert "ok=True" in d.stdout
        said, _ = p.communicate(timeout=TIMEOUT_S)
    finally:
        p.kill()
        p.wait()
    assert p.returncode == 0
    assert "SnapshotFinalizeIngestReqOutput(ok=True" in said
    assert "in the tree: 300 tokens" in said
    with Client(socket_path) as client:
        assert client.stats().core.attempts_ok == 1


def test_the_two_commands_are_targets_of_the_makefile(readme: str) -> None:
    makefile = (PROJECT / "Makefile").read_text()
    named = re.findall(r"^make (\w+)", "\n".join(_blocks(readme, "sh")), flags=re.MULTILINE)
    assert named == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in named)


# --- two languages, one README -------------------------------------------------------------------


def _without_comments(language: str, text: str) -> list[object]:
    """Return what a block of code says, whatever its comments say."""
    if language == "python":
        left_out = (tokenize.COMMENT, tokenize.NL)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return [(token.type, token.string) for token in tokens if token.type not in left_out]
    if language == "sh":
        return [shlex.split(line, comments=True) for line in text.splitlines()]
    return [text]


def _code(readme: str) -> list[tuple[str, list[object]]]:
    return [(language, _without_comments(language, text)) for language, text in _FENCE.findall(readme)]


def _prose(readme: str) -> str:
    return _FENCE.sub("", readme)


def _parts(readme: str) -> list[str]:
    """Return the text of each part; a part begins with a heading."""
    return re.split(r"^(?=#+ )", _prose(readme), flags=re.MULTILINE)


def _levels(readme: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", _prose(readme), re.MULTILINE)]


def _tables(readme: str) -> list[tuple[int, int]]:
    """Return rows and columns of each table."""
    found = re.findall(r"(?:^\|.*\n)+", _prose(readme), re.MULTILINE)
    return [(text.count("\n"), text.splitlines()[0].count("|") - 1) for text in found]


def _items(text: str) -> int:
    return len(re.findall(r"^ *(?:\*|\d+\.) ", text, re.MULTILINE))


def _links(text: str) -> list[str]:
    """Return where links lead to, but for those between the two languages."""
    return sorted(set(re.findall(r"\]\(([^)]+)\)", text)) - set(READMES))


def _names(text: str) -> list[str]:
    """Return what stands between backticks: names and commands, which are the same in every language."""
    return sorted(set(re.findall(r"`([^`]+)`", text.replace("\n", " "))))


def test_both_have_the_same_commands_and_programs_but_for_comments() -> None:
    assert _code(CHINESE) == _code(ENGLISH)


def test_both_have_the_same_headings_tables_and_lists() -> None:
    assert _levels(CHINESE) == _levels(ENGLISH)
    assert _tables(CHINESE) == _tables(ENGLISH)
    assert [_items(part) for part in _parts(CHINESE)] == [_items(part) for part in _parts(ENGLISH)]


def test_both_have_the_same_links_names_and_inline_commands_in_each_part() -> None:
    for chinese, english in zip(_parts(CHINESE), _parts(ENGLISH), strict=True):
        heading = english.partition("\n")[0]
        assert _links(chinese) == _links(english), heading
        assert _names(chinese) == _names(english), heading


def test_each_leads_to_the_other() -> None:
    assert "](README.md)" in CHINESE
    assert "](README.zh.md)" in ENGLISH


def test_the_chinese_one_is_in_chinese() -> None:
    for part in filter(None, _parts(CHINESE)[1:]):
        assert re.search(r"[\u4e00-\u9fff]{2}", part), part.partition("\n")[0]
    # Sentences that were left as they are would stand in both.
    common = {line for line in _prose(ENGLISH).splitlines() if len(line) > 20} & set(
        _prose(CHINESE).splitlines()
    )
    assert not common


@pytest.mark.parametrize(
    ("pattern", "new"),
    [
        (r"snapd serve --socket", "snapd serve --sock"),
        (r"return None", "return 0"),
        (r"(?m)^## ", "### "),
        (r"(?m)^\* ", ""),
        (r"\]\(docs/", "](doc/"),
        (r"`snapd doctor`", "doctor"),
        (r"\Z", "\n| a | b |\n|---|---|\n"),
    ],
)
def test_what_differs_is_seen(pattern: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change of one README alone fails one of the comparisons above."""
    changed = re.sub(pattern, new, CHINESE, count=1)
    assert changed != CHINESE
    monkeypatch.setitem(globals(), "CHINESE", changed)
    with pytest.raises(AssertionError):
        test_both_have_the_same_commands_and_programs_but_for_comments()
        test_both_have_the_same_headings_tables_and_lists()
        test_both_have_the_same_links_names_and_inline_commands_in_each_part()

"""The page on the control plane's speed says what is wanted, what came out, and whether that is enough."""

import ast
import re

import pytest
from shown import DOCS, PROJECT

PAGE = (DOCS / "benchmarks-control.md").read_text()
BENCH = (PROJECT / "tools" / "bench_control.py").read_text()


def _wanted() -> dict[str, tuple[str, float]]:
    for node in ast.parse(BENCH).body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == "WANTED"
        ):
            assert node.value is not None
            return dict(ast.literal_eval(node.value))
    raise AssertionError("bench_control.py has no WANTED")


WANTED = _wanted()


def test_every_figure_that_is_wanted_is_measured() -> None:
    assert len(WANTED) == 5
    assert [name for name in WANTED if BENCH.count(f'"{name}"') < 2] == []


def test_the_figures_have_their_date_and_machine() -> None:
    assert re.search(r"^## Figures\n\n20\d\d-\d\d-\d\d, .+ cores? of .+, CPython 3", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", WANTED)
def test_the_page_says_what_is_wanted_and_whether_it_is_met(name: str) -> None:
    word, bound = WANTED[name]
    row = re.search(rf"^\| `{name}`.*\|$", PAGE, re.MULTILINE)
    assert row is not None
    _, wanted, _, after, compiled = (cell.strip() for cell in row.group().strip("|").split("|"))
    for measured in filter(None, (after, compiled)):
        number = re.search(r"\*\*([\d.,]+)\*\*", measured)
        assert number is not None
        value = float(number.group(1).replace(",", ""))
        is_met = value <= bound if word == "at most" else value >= bound
        assert ("not met" in measured) == (not is_met)
    assert float(wanted.split()[-1].replace(",", "")) == bound
    assert wanted.startswith("at least" if word == "at least" else ("at most", "below"))

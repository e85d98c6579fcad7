"""Delete each guard of the core once, and see whether a test misses it.

Every mutant is one small change to one module: a guard never taken, a comparison one off or turned round,
``and`` for ``or``, a call left out, an entry of a table dropped. The tests of the core run against each in
a copy of the tree. A mutant that no test fails for is a survivor: write a test, or list it in
``EQUIVALENT`` with the reason why it changes nothing that matters.

Exits with 1 when there is a survivor that is not listed.
"""

import ast
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import click

ROOT: Final = Path(__file__).parents[1]
MODULES: Final = (
    "lives.py", "course.py", "admission.py", "quarantine.py", "buffer.py", "directory.py", "books.py",
    "session.py", "machine.py", "fsm.py", "slab.py", "eviction.py",
)  # fmt: skip
# Quick ones first: most mutants fail there.
TESTS: Final = (
    "test_machine_ingest.py", "test_machine_endings.py", "test_machine_prepare.py",
    "test_machine_transfer.py", "test_machine_quarantine.py", "test_machine_lookup.py",
    "test_machine_limits.py", "test_machine_repeats.py", "test_machine_undrained.py",
    "test_fsm.py", "test_slab.py", "test_eviction.py",
)  # fmt: skip
MODEL_TEST: Final = "test_machine_model.py"
MODEL_EXAMPLES: Final = 25
TIMEOUT_S: Final = 90.0

_OTHER_OPERATOR: Final[dict[type[ast.cmpop], ast.cmpop]] = {
    ast.Lt: ast.LtE(), ast.LtE: ast.Lt(), ast.Gt: ast.GtE(), ast.GtE: ast.Gt(), ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(), ast.Is: ast.IsNot(), ast.IsNot: ast.Is(), ast.In: ast.NotIn(), ast.NotIn: ast.In(),
}  # fmt: skip

# (module, function, kind, what was there): why the mutant cannot be told from the original.
EQUIVALENT: Final[dict[tuple[str, str, str, str], str]] = {
    (
        "admission.py", "Admission._where_to_start", "compare",
        "event.token_start < usable_tokens < event.token_start + event.num_tokens [0]",
    ): "A hint that ends where the snapshot starts leaves nothing out.",
    (
        "eviction.py", "SieveOrder.rank_of", "compare",
        "next(reversed(self._places.values()), 0) <= self._hand[1]",
    ): "They are equal only when both are 0, and then nobody's order depends on the lap.",
    (
        "eviction.py", "SieveOrder._next_visit", "compare", "self._places[handle] > place",
    ): "The hand's place is that of a victim, which has none any more, or 0, which is nobody's.",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change to one module.

    Attributes:
        module: file name in snapd/core.
        function: qualified name of what it is in.
        line: where.
        kind: guard, compare, bool, not, call or entry.
        source: what was there.
        index: which change of the module it is.
        fate: killed, timeout, survived or equivalent.
    """

    module: str
    function: str
    line: int
    kind: str
    source: str
    index: int
    fate: str = ""


class _Mutator(ast.NodeTransformer):
    """Numbers all changes of a module, and makes the one that is wanted."""

    def __init__(self, module: str, text: str, wanted: int = -1) -> None:
        self.module = module
        self.text = text
        self.wanted = wanted
        self.found: list[Mutant] = []
        self._names: list[str] = []

    def _is_wanted(self, node: ast.AST, kind: str, source: str = "") -> bool:
        source = source or ast.get_source_segment(self.text, node) or ""
        index = len(self.found)
        line = getattr(node, "lineno", 0)
        source = " ".join(source.split())
        self.found.append(Mutant(self.module, ".".join(self._names), line, kind, source, index))
        return index == self.wanted

    def _named(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._named(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._named(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        test = ast.get_source_segment(self.text, node.test) or ""
        never = self._is_wanted(node, "guard", f"if {test}")
        self.generic_visit(node)
        if never:
            node.test = ast.Constant(False)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        for position, operator in enumerate(node.ops):
            source = ast.get_source_segment(self.text, node) or ""
            if len(node.ops) > 1:
                source = f"{source} [{position}]"
            if self._is_wanted(node, "compare", source):
                node.ops[position] = _OTHER_OPERATOR[type(operator)]
        self.generic_visit(node)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        if self._is_wanted(node, "bool"):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.generic_visit(node)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        wanted = isinstance(node.op, ast.Not) and self._is_wanted(node, "not")
        self.generic_visit(node)
        return node.operand if wanted else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Call) and self._is_wanted(node, "call"):
            return ast.Pass()
        self.generic_visit(node)
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        if not self._names:
            for position, key in reversed(list(enumerate(node.keys))):
                if key is not None and self._is_wanted(key, "entry"):
                    del node.keys[position], node.values[position]
        self.generic_visit(node)
        return node

    def visit_Set(self, node: ast.Set) -> ast.AST:
        if not self._names:
            for position, item in reversed(list(enumerate(node.elts))):
                if self._is_wanted(item, "entry"):
                    del node.elts[position]
        self.generic_visit(node)
        return node


def _mutants_of(module: str) -> list[Mutant]:
    text = (ROOT / "snapd" / "core" / module).read_text(encoding="utf-8")
    mutator = _Mutator(module, text)
    mutator.visit(ast.parse(text))
    return mutator.found


def _mutated(text: str, mutant: Mutant) -> str:
    tree = _Mutator(mutant.module, text, mutant.index).visit(ast.parse(text))
    return ast.unparse(ast.fix_missing_locations(tree))


def _copy_tree(tree: Path) -> None:
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "snapd", tree / "snapd", ignore=no_caches)
    for folder in ("tests/core", "tests/model", "tools", "docs"):
        (tree / folder).mkdir(parents=True)
    for name in ("conftest.py", "core_driver.py", "log_checker.py", *TESTS):
        shutil.copy(ROOT / "tests" / "core" / name, tree / "tests" / "core")
    for name in (MODEL_TEST, "naive_machine.py"):
        shutil.copy(ROOT / "tests" / "model" / name, tree / "tests" / "model")
    shutil.copy(ROOT / "tools" / "draw_fsm.py", tree / "tools")
    shutil.copy(ROOT / "docs" / "state-machine.md", tree / "docs")
    shutil.copy(ROOT / "pyproject.toml", tree)


def _run_tests(tree: Path) -> int:
    """Run the tests in this process, which is a fork of its own, and return pytest's exit code."""
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    # What the tests start in turn must see the copy as well.
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["SNAPD_MODEL_EXAMPLES"] = str(MODEL_EXAMPLES)
    sys.dont_write_bytecode = True
    import hypothesis
    import pytest

    generate_only = [hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", phases=generate_only, database=None, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    tests = [f"tests/core/{name}" for name in TESTS] + [f"tests/model/{MODEL_TEST}"]
    with Path(os.devnull).open("w", encoding="utf-8") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", *tests]))


def _fate_of_fork(tree: Path) -> str:
    pid = os.fork()
    if pid == 0:
        code = 3
        with contextlib.suppress(BaseException):
            code = _run_tests(tree)
        os._exit(code)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "timeout"


_tree: Path | None = None


def _begin_worker(base: str) -> None:
    """Make a copy of the tree for this worker, and load what every run needs."""
    global _tree
    import hypothesis.stateful
    import msgspec
    import pytest
    import sortedcontainers

    del hypothesis, msgspec, pytest, sortedcontainers
    _tree = Path(base) / str(os.getpid())
    _copy_tree(_tree)


def _try(mutant: Mutant | None) -> Mutant | str:
    """Run the tests against a mutant; None: against the unchanged tree."""
    assert _tree is not None
    if mutant is None:
        return _fate_of_fork(_tree)
    path = _tree / "snapd" / "core" / mutant.module
    original = path.read_text(encoding="utf-8")
    path.write_text(_mutated(original, mutant), encoding="utf-8")
    try:
        fate = _fate_of_fork(_tree)
    finally:
        path.write_text(original, encoding="utf-8")
    if fate == "survived" and _key(mutant) in EQUIVALENT:
        fate = "equivalent"
    return replace(mutant, fate=fate)


def _key(mutant: Mutant) -> tuple[str, str, str, str]:
    return (mutant.module, mutant.function, mutant.kind, mutant.source)


def _run(mutants: list[Mutant], workers: int) -> Iterator[Mutant]:
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as base,
        ProcessPoolExecutor(workers, initializer=_begin_worker, initargs=(base,)) as pool,
    ):
        if pool.submit(_try, None).result() != "survived":
            raise click.ClickException("the tests fail before anything was changed")
        for mutant in pool.map(_try, mutants):
            assert isinstance(mutant, Mutant)
            yield mutant


def _report(done: list[Mutant]) -> str:
    lines = [f"{'module':16} mutants  killed  equivalent  survived"]
    for module in dict.fromkeys(mutant.module for mutant in done):
        fates = Counter(mutant.fate for mutant in done if mutant.module == module)
        killed = fates["killed"] + fates["timeout"]
        lines.append(
            f"{module:16} {fates.total():7}  {killed:6}  {fates['equivalent']:10}  {fates['survived']:8}"
        )
    return "\n".join(lines)


@click.command()
@click.option("--only", multiple=True, metavar="FILE", help="Only this module; may be repeated.")
@click.option("--sample", type=int, help="Only so many mutants, picked at random.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the sample.")
@click.option("--workers", type=int, default=2, show_default=True, help="Processes.")
@click.option("--json", "as_json", is_flag=True, help="Write every mutant and its fate as JSON.")
def main(only: tuple[str, ...], sample: int | None, seed: int, workers: int, as_json: bool) -> None:
    """Run the tests of the core against every mutant of it."""
    mutants = [mutant for module in only or MODULES for mutant in _mutants_of(Path(module).name)]
    if sample is not None:
        mutants = random.Random(seed).sample(mutants, min(sample, len(mutants)))
    done: list[Mutant] = []
    for mutant in _run(mutants, workers):
        done.append(mutant)
        if mutant.fate == "survived":
            where = f"snapd/core/{mutant.module}:{mutant.line}"
            click.echo(f"{where}: {mutant.kind} in {mutant.function}: {mutant.source}", err=as_json)
    if as_json:
        click.echo(json.dumps([asdict(mutant) for mutant in done], indent=1))
    else:
        click.echo(_report(done))
    if any(mutant.fate == "survived" for mutant in done):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

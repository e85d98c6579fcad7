"""What may be compiled: nothing changes its meaning thereby, and nothing is compiled in the tree."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from snapd import __version__
from snapd.compiling import described, is_compiled

ROOT = Path(__file__).parents[1]
# What takes all that a generator yields, at once: there it makes no difference that it becomes a list.
EAGER = {
    "Counter", "all", "any", "dict", "frozenset", "join", "max", "min", "next", "set", "sorted", "sum",
    "tuple", "update",
}  # fmt: skip


def assigned(name: str) -> list[str]:
    """Return a list of texts of setup.py, which cannot be imported without building."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            assert node.value is not None
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"setup.py says nothing of {name}")


COMPILED = assigned("COMPILED")


@pytest.mark.parametrize("path", COMPILED)
def test_a_compiled_module_has_no_class_with_options(path: str) -> None:
    """The compiler leaves them out without a word: a struct would be another one."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ClassDef):
            assert not node.keywords, f"{node.name} belongs in a module that is not compiled"
            assert "Struct" not in ast.unparse(ast.Tuple(node.bases, ast.Load())), node.name


@pytest.mark.parametrize("path", COMPILED)
def test_a_compiled_module_keeps_no_generator_expression(path: str) -> None:
    """The compiler makes a list of it: what looks at the first of a hundred thousand would look at all."""
    tree = ast.parse((ROOT / path).read_text())
    eager = {
        id(call.args[0])
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and call.args and ast.unparse(call.func).rpartition(".")[2] in EAGER
    }
    lazy = [n for n in ast.walk(tree) if isinstance(n, ast.GeneratorExp) and id(n) not in eager]
    # Whatever is looped over at once is as eager.
    looped = {id(node.iter) for node in ast.walk(tree) if isinstance(node, ast.For)}
    assert [ast.unparse(node) for node in lazy if id(node) not in looped] == []


def test_what_runs_here_is_the_source() -> None:
    assert not is_compiled()
    assert not list((ROOT / "snapd").rglob("*.so"))


def test_a_version_says_that_it_is_compiled() -> None:
    assert described(__version__, False) == __version__
    assert described(__version__, True) == f"{__version__} (compiled)"


def run_setup(directory: Path, *arguments: str, compile_it: str) -> "subprocess.CompletedProcess[str]":
    shutil.copy(ROOT / "setup.py", directory)
    environment = os.environ | {"SNAPD_COMPILE": compile_it}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [("setup.py", "build_ext", "--inplace"), ("setup.py", "develop"), ("setup.py", "editable_wheel")],
)
def test_nothing_is_compiled_beside_the_sources(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run_setup(tmp_path, *arguments, compile_it="1")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith("an editable install runs the sources. Unset it.")
    assert [path.name for path in tmp_path.iterdir()] == ["setup.py"]


@pytest.mark.parametrize(("value", "is_asked"), [("1", True), ("0", False), ("", False)])
def test_the_compiler_is_asked_for_only_when_it_is_wanted(tmp_path: Path, value: str, is_asked: bool) -> None:
    code = "from setuptools.build_meta import get_requires_for_build_wheel as g; print('asked', g())"
    done = run_setup(tmp_path, "-c", code, compile_it=value)
    (asked,) = (line for line in done.stdout.splitlines() if line.startswith("asked"))
    assert ("mypy" in asked) is is_asked

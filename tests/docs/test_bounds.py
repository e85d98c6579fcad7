"""The page of bounds has every bound there is, with the value that it has in the code."""

import ast
import re
from collections.abc import Iterator

import msgspec
import pytest
from shown import DOCS, PROJECT

from snapd import units
from snapd.config import Config

PAGE = (DOCS / "bounds.md").read_text()
UNITS = {
    "": 1, "characters": 1, "bytes": 1, "times what was left": 1, "s": 1, "ms": 1,
    "KiB": units.KIB, "MiB": units.MIB, "GiB": units.GIB,
}  # fmt: skip
# Where what a daemon, a D or a P holds is bounded.
PACKAGES = ("", "core", "kvevents", "metrics", "transport", "kv")
# What bounds no memory and no time: ranges of settings and numbers, and how a kernel of a GPU is cut up.
NO_BOUNDS = {
    "snapd.access": {"UID_MAX"},
    "snapd.address": {"PORT_MAX"},
    "snapd.certs": {"NAME_CHARS_MAX"},
    "snapd.client": {"_CONNECT_POLL_S_MAX"},
    "snapd.config": {
        "SOCKET_PATH_BYTES_MAX", "CONFIG_FILE_BYTES_MAX", "RANKS_MAX", "RANK_MAX", "ARENA_BYTES_MAX",
        "ALIGNMENT_BYTES_MAX", "COUNT_MAX", "PIECES_MAX",
    },
    "snapd.eventlog": {"_HEADER_BYTES_MAX", "_REPORT_BYTES_MAX"},
    "snapd.kv.control": {"TRANSFER_TIMEOUT_MS"},
    "snapd.kv.devicejob": {"INT32_SLOTS_MAX"},
    "snapd.kv.devicestaged": {"_UNIT_BYTES_MAX", "_HOLES_MAX"},
    "snapd.kv.gpucopy": {"_UNIT_BYTES_MAX"},
    "snapd.kv.gpukernels": {"_WASTE_MAX", "_COLUMNS_MAX"},
    "snapd.kv.keeper": {"_POLL_S_MAX"},
    "snapd.kv.stagedjob": {"REST_WAIT_S_MAX", "BUSY_WAITS_MAX"},
    "snapd.kveventsconfig": {"TOPIC_BYTES_MAX", "_PORT_MAX"},
    "snapd.logrecovery": {"_HEADER_BYTES_MAX"},
    "snapd.mapping": {"_TIMEOUT_S_MIN"},
    "snapd.metricsaddress": {"PORT_MAX"},
    "snapd.transport.mooncake_engine": {"_PORT_MAX"},
}  # fmt: skip
_IS_BOUND = re.compile(r"(^|_)(MAX|BACKLOG|TIMEOUT|QUEUE)(_|$)")
_ROW = re.compile(r"^\| .+? \| ([\d,]+) ?([\w ]*?) \| `(snapd[\w.]*)\.(\w+)` \|", re.MULTILINE)


def _constants(module: str) -> dict[str, str]:
    """Return the module's constants, and what stands for their values."""
    tree = ast.parse((PROJECT / f"{module.replace('.', '/')}.py").read_text())
    return {
        node.target.id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
    }


def _modules() -> Iterator[str]:
    for package in PACKAGES:
        for path in sorted((PROJECT / "snapd" / package).glob("*.py")):
            yield ".".join(path.relative_to(PROJECT).with_suffix("").parts)


def _bounds() -> set[tuple[str, str]]:
    return {(module, name) for module in _modules() for name in _constants(module) if _IS_BOUND.search(name)}


def _rows() -> list[tuple[int, str, str, str]]:
    return [
        (int(number.replace(",", "")), unit, module, name)
        for number, unit, module, name in _ROW.findall(PAGE)
    ]


def test_every_fixed_bound_has_the_value_that_the_page_says() -> None:
    rows = _rows()
    assert len(rows) == PAGE.count("| `snapd.") > 60, "every row that names a constant is read"
    for number, unit, module, name in rows:
        value = eval(_constants(module)[name], dict(vars(units)))
        assert value == number * UNITS[unit], f"{module}.{name}"


def test_every_fixed_bound_is_on_the_page() -> None:
    """A new one gets a row, or is said to bound nothing in the table above."""
    there = {(module, name) for _, _, module, name in _rows()}
    others = {(module, name) for module, names in NO_BOUNDS.items() for name in names}
    assert not there & others
    assert _bounds() - there - others == set()
    assert others <= _bounds(), "what is excepted is there"


def test_every_bound_in_prose_has_its_value() -> None:
    found = re.findall(r"([\d,]+) \w+ \(`(snapd[\w.]*)\.(\w+)`\)", PAGE)
    assert found
    for number, module, name in found:
        assert int(number.replace(",", "")) == eval(_constants(module)[name], dict(vars(units))), name


def test_every_setting_that_is_a_bound_is_on_the_page() -> None:
    names = [
        field.name
        for field in msgspec.structs.fields(Config)
        if re.search(r"_(max|ms|keep|batches)$|_per_s$|^log_rotate_bytes$", field.name)
    ]
    assert len(names) > 30
    assert [name for name in names if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("name", ["X_MAX", "ANSWERS_MAX_PER_RANK", "_BACKLOG", "TIMEOUT_S", "QUEUE_LINES"])
def test_a_name_of_a_bound_is_known(name: str) -> None:
    assert _IS_BOUND.search(name)


@pytest.mark.parametrize("name", ["MAXIMAL_NAME", "LOG_NAME", "TIMEOUTS_SEEN"])
def test_a_name_of_something_else_is_not(name: str) -> None:
    assert not _IS_BOUND.search(name)

"""Every bound there is stands in the registry, with the value that it has in the code, and on the page."""

import ast
import re
from collections.abc import Iterator

import msgspec
import pytest
from shown import DOCS, PROJECT

from snapd import units
from snapd.bounds import FIXED, ROLLING, SETTINGS, unit_of, value_of, views
from snapd.config import Config
from snapd.fixedbounds import CLIENTS, DAEMON, Bound
from snapd.limits import Limits
from tools import doc_bounds

PAGE = (DOCS / "bounds.md").read_text()
REGISTRY = (*DAEMON, *CLIENTS)
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
    "snapd.kv.layerpages": {"DEVICE_GROUPS_MAX"},
    "snapd.kv.stagedjob": {"REST_WAIT_S_MAX", "BUSY_WAITS_MAX"},
    "snapd.kveventsconfig": {"TOPIC_BYTES_MAX", "_PORT_MAX"},
    "snapd.logrecovery": {"_HEADER_BYTES_MAX"},
    "snapd.mapping": {"_TIMEOUT_S_MIN"},
    "snapd.metricsaddress": {"PORT_MAX"},
    "snapd.transport.mooncake_engine": {"_PORT_MAX"},
}  # fmt: skip
_IS_BOUND = re.compile(r"(^|_)(MAX|BACKLOG|TIMEOUT|QUEUE|BURST|WINDOW|SHARE_OF)(_|$)")


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


def _value(bound: Bound) -> object:
    module, _, name = bound.name.rpartition(".")
    return eval(_constants(module)[name], dict(vars(units)))


def _named() -> set[tuple[str, str]]:
    return {(module, name) for module, _, name in (bound.name.rpartition(".") for bound in REGISTRY)}


def test_every_fixed_bound_has_the_value_that_its_module_has() -> None:
    assert len(REGISTRY) == len(_named()) > 60
    for bound in REGISTRY:
        assert _value(bound) == bound.value, bound.name


def test_every_constant_that_looks_like_a_bound_is_in_the_registry() -> None:
    """A new one gets an entry in snapd/fixedbounds.py, or is said to bound nothing in the table above."""
    others = {(module, name) for module, names in NO_BOUNDS.items() for name in names}
    assert not _named() & others
    assert _bounds() - _named() - others == set()
    assert others <= _bounds(), "what is excepted is there"


def test_the_daemons_bounds_are_not_taken_for_those_of_clients() -> None:
    """What an operator sees of a daemon is not what D and P have in their processes."""
    clients = (
        "snapd.client",
        "snapd.exchange",
        "snapd.links",
        "snapd.mapping",
        "snapd.kv.",
        "snapd.transport.",
    )
    assert [bound.name for bound in DAEMON if bound.name.startswith(clients)] == []
    assert [bound.name for bound in CLIENTS if not bound.name.startswith(clients)] == []


def test_every_bound_says_what_comes_at_it() -> None:
    assert all(bound.what and bound.at_bound for bound in REGISTRY)
    assert all(SETTINGS.values())


def test_the_page_has_every_bound() -> None:
    for bound in REGISTRY:
        assert f"| {doc_bounds.amount(bound)} | `{bound.name}` | {bound.at_bound} |" in PAGE, bound.name
    for setting in SETTINGS:
        assert f"\n| `{setting}` | " in PAGE, setting
    assert len(re.findall(r"written by tools/make_docs.py", PAGE)) == len(doc_bounds.PARTS)


def test_every_bound_in_prose_has_its_value() -> None:
    found = re.findall(r"([\d,]+) \w+ \(`(snapd[\w.]*)\.(\w+)`\)", PAGE)
    assert found
    for number, module, name in found:
        assert int(number.replace(",", "")) == eval(_constants(module)[name], dict(vars(units))), name


def test_every_setting_that_is_a_bound_is_in_the_registry() -> None:
    """A new setting whose name is that of a bound says in snapd/bounds.py what comes at it."""
    names = {
        field.name
        for field in msgspec.structs.fields(Config)
        if re.search(r"_(max|ms|keep|batches)$|_per_s$|^log_rotate_bytes$", field.name)
    } | {f"limits.{field.name}" for field in msgspec.structs.fields(Limits)}
    assert len(names) > 45
    assert names == set(SETTINGS)


def test_a_daemon_tells_every_bound_with_its_value_use_and_origin() -> None:
    config = Config(lease_ms=7, limits=Limits(accept_backlog=9))
    told = {
        view.name: view
        for view in views(
            config, {"lease_ms": "command line"}, {"sessions_max": 5, "ended_history_max": 10_000}
        )
    }
    assert list(told) == [*SETTINGS, *(bound.name for bound in DAEMON)]
    assert (told["lease_ms"].value, told["lease_ms"].unit, told["lease_ms"].origin) == (
        7,
        "ms",
        "command line",
    )
    assert (told["limits.accept_backlog"].value, told["limits.accept_backlog"].origin) == (9, "default")
    assert (told["sessions_max"].used, told["lease_ms"].used) == (5, None)
    assert {name for name, view in told.items() if view.is_rolling} == ROLLING <= set(SETTINGS)
    assert {view.origin for view in told.values() if view.what} == {FIXED}


def test_the_unit_of_a_setting_is_in_its_name() -> None:
    names = (
        "lease_ms",
        "limits.retry_after_ms_max",
        "frame_bytes_max",
        "transfer_min_mb_per_s",
        "layouts_max",
    )
    assert [unit_of(name) for name in names] == ["ms", "ms", "bytes", "MB/s", ""]
    assert value_of(Config(), "limits.congested_bytes") == Limits().congested_bytes


@pytest.mark.parametrize(
    "name", ["X_MAX", "ANSWERS_MAX_PER_RANK", "_BACKLOG", "TIMEOUT_S", "QUEUE_LINES", "BURST_S"]
)
def test_a_name_of_a_bound_is_known(name: str) -> None:
    assert _IS_BOUND.search(name)


@pytest.mark.parametrize("name", ["MAXIMAL_NAME", "LOG_NAME", "TIMEOUTS_SEEN"])
def test_a_name_of_something_else_is_not(name: str) -> None:
    assert not _IS_BOUND.search(name)

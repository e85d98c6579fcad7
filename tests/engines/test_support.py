"""What every adapter reads: settings, and the engine's version."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
import structlog

from snapd.engines.support import EngineSettings, check_version, read_settings
from snapd.errors import ConfigError


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_directory_of_tests_is_not_taken_for_an_engine(engine: str) -> None:
    """Why a test is skipped would be said wrongly otherwise."""
    spec = importlib.util.find_spec(engine)
    assert spec is None or spec.origin is not None


def test_settings_are_read_by_name() -> None:
    settings = read_settings({"socket_path": "/run/x.sock", "min_load_tokens": 64, "verify": False}, "there")
    assert settings == EngineSettings(socket_path="/run/x.sock", min_load_tokens=64, verify=False)


def test_an_unknown_setting_is_refused_with_the_nearest_known_name() -> None:
    with pytest.raises(ConfigError, match=r"there: 'socket_pth' is no setting; did you mean 'socket_path'\?"):
        read_settings({"socket_pth": "/run/x.sock"}, "there")


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_load_tokens", -1), ("timeout_s", 0.0), ("timeout_s", "fast"), ("tenant", "x" * 257)],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"there: .*{name}"):
        read_settings({name: value}, "there")


def versions(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(distribution: str) -> str:
        if distribution not in installed:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return installed[distribution]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("installed", ["1.2.3", "1.2.3+cpu"])
def test_a_version_that_was_tested_says_nothing(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    versions(monkeypatch, second=installed)
    with structlog.testing.capture_logs() as logs:
        assert check_version("engine", ("first", "second"), ("1.2.3",)) == installed
    assert logs == []


@pytest.mark.parametrize("installed", [{"first": "1.2.4"}, {}])
def test_any_other_version_warns(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    versions(monkeypatch, **installed)
    with structlog.testing.capture_logs() as logs:
        assert check_version("engine", ("first",), ("1.2.3",)) == installed.get("first", "")
    assert [(log["log_level"], log["engine"], log["tested"]) for log in logs] == [
        ("warning", "engine", ["1.2.3"])
    ]


def test_sglangs_page_has_every_setting() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines-sglang.md").read_text()
    table = page.partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    own = ("role", "layer_wise")  # Of the linker alone, which cannot be imported here.
    assert rows and sorted(rows) == sorted((*own, *EngineSettings.__struct_fields__))

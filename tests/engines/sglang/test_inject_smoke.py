"""The smoke test itself: it runs on a machine without a GPU, says what it saw, and notices what is wrong."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from snapd.engines.sglang_inject import Injector
from snapd.engines.sglang_inject_cache import SglangCache
from tools import smoke_snapshot_sglang_integration as smoke

ROOT = Path(__file__).parents[3]
ONE = ["--pool", "mha", "--page-size", "16", "--sessions", "2"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(smoke.main, [*ONE, *arguments])


@pytest.mark.usefixtures("sglang")
def test_every_push_succeeds_while_p_is_full_and_every_byte_arrives() -> None:
    """On all kinds of kv_pool, tree and page."""
    result = CliRunner().invoke(smoke.main, ["--sessions", "2", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    kinds = [(o["pool"], o["tree"], str(o["page_size_tokens"])) for o in facts["combinations"]]
    assert facts["ok"] and kinds == list(itertools.product(smoke.POOLS, smoke.TREES, smoke.PAGE_SIZES))
    for outcome in facts["combinations"]:
        assert outcome["failure"] == ""
        assert (outcome["pushed_while_full"], outcome["ingested"], outcome["syncs"]) == (2, 3, 3)
        assert outcome["reasons"] == {"ok": 3}
        # Of 150 tokens 144 fill pages of 16; the last session's second turn has 240.
        turn_tokens = 150 if outcome["page_size_tokens"] == 1 else 144
        # Four layers in two bytes a number: K and V of two heads of 64, or a latent of 192.
        token_bytes = 4 * 2 * (256 if outcome["pool"] == "mha" else 192)
        assert outcome["compared_bytes"] == (2 * turn_tokens + 240) * token_bytes
        assert outcome["evicted_tokens"] >= turn_tokens


@pytest.mark.usefixtures("sglang")
def test_the_report_is_for_a_person() -> None:
    result = run("--tree", "radix")
    assert result.exit_code == 0
    title, head, row, end = result.stdout.splitlines()
    assert title.startswith("SGLang ") and head.split()[:3] == ["kv_pool", "tree", "page"]
    assert row.split()[:6] == ["mha", "radix", "16", "2", "3", "0"] and row.endswith("ok")
    assert end == "1 of 1 combinations are well; 3 syncs, 3 ok"


@pytest.mark.usefixtures("sglang")
def test_bytes_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    finalize_ingest = Injector.finalize_ingest

    def finalize_and_spoil(self: Injector, request: Any, **fields: Any) -> Any:
        output = finalize_ingest(self, request, **fields)
        self.cache.pool.planes[-1].rows[16:, 0] ^= 1
        return output

    monkeypatch.setattr(Injector, "finalize_ingest", finalize_and_spoil)
    result = run("--tree", "radix")
    assert result.exit_code == 1 and "FAILED: P's bytes of session 0 differ" in result.stdout
    assert "0 of 1 combinations are well" in result.stdout


@pytest.mark.usefixtures("sglang")
def test_slots_that_leak_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = SglangCache.insert

    def insert_and_lose(self: SglangCache, token_ids: Any, pinned: Any, slots: Any) -> None:
        insert(self, token_ids, pinned, slots)
        self.allocate(1)

    monkeypatch.setattr(SglangCache, "insert", insert_and_lose)
    result = run("--tree", "radix", "--json")
    assert result.exit_code == 1
    assert "of 2048 slots P has" in json.loads(result.stdout)["combinations"][0]["failure"]


@pytest.mark.usefixtures("sglang")
def test_snapshots_that_p_never_gets_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's buffer has room for three of them."""
    monkeypatch.setattr(smoke, "BUFFER_SIZE", "1MiB")
    result = run("--tree", "radix", "--json", "--sessions", "5")
    assert result.exit_code == 1
    (outcome,) = json.loads(result.stdout)["combinations"]
    assert "stale-handle" in outcome["failure"] and outcome["reasons"]["evicted"] == 2


@pytest.mark.usefixtures("sglang")
def test_a_daemon_that_does_not_start_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "BUFFER_SIZE", "1KiB")
    result = run("--tree", "radix", "--json")
    assert result.exit_code == 1
    failure = json.loads(result.stdout)["combinations"][0]["failure"]
    assert failure.startswith("the daemon does not start: ") and "size = 1024 is wrong" in failure


def test_without_sglang_it_says_so_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "sglang.py").write_text("raise ImportError('there is none here')")
    result = subprocess.run(
        [sys.executable, "tools/smoke_snapshot_sglang_integration.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "SGLang cannot be imported: there is none here",
        "Make an environment with it: tools/setup_engine.sh sglang",
    ]


def test_an_unknown_option_is_wrong_usage() -> None:
    assert run("--tree", "oak").exit_code == 2

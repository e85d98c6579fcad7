"""What needs no SGLang: what an SGLang that is missing is called, and how ranks stay alike."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from inject_threads import Ranks, on_ranks

from snapd.engines.sglang_inject_ranks import Round
from snapd.engines.sglang_pools import attribute, sglang_module
from snapd.errors import ExtraMissing, UnsupportedEngine

ROOT = Path(__file__).parents[3]

# --- imports -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected", "why"),
    [
        (ModuleNotFoundError("no sglang", name="sglang"), ExtraMissing, "cannot be imported: no sglang"),
        (ModuleNotFoundError("no triton", name="triton"), ExtraMissing, "cannot be imported: no triton"),
        (ImportError("libcudart"), ExtraMissing, "cannot be imported: libcudart"),
        (
            ModuleNotFoundError("", name="sglang.srt.mem_cache.x"),
            UnsupportedEngine,
            "no module sglang.srt.mem_cache.x",
        ),
    ],
)
def test_a_missing_sglang_is_not_taken_for_an_unknown_release(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, expected: type[Exception], why: str
) -> None:
    def fail(name: str) -> None:
        assert name == "sglang.srt.mem_cache.x"
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(expected, match=why):
        sglang_module("mem_cache.x")


def test_an_attribute_that_a_release_lacks_is_named() -> None:
    with pytest.raises(UnsupportedEngine, match=r"SGLang's object has no 'page_size'.*0\.5\.23"):
        attribute(object(), "page_size")
    assert attribute(3, "real") == 3


# --- ranks -----------------------------------------------------------------------------------------------


def leased_and_told(agreement: Ranks, commit: bool) -> tuple[bool, bool]:
    ingest = Round(agreement)
    return ingest.all_leased(True), ingest.all_commit(commit)


def not_leased(agreement: Ranks) -> tuple[None, bool]:
    return None, Round(agreement).all_commit(False)


def test_ranks_that_all_heard_commit_insert() -> None:
    ranks = Ranks(3)
    assert on_ranks([lambda: leased_and_told(ranks, True)] * 3) == [(True, True)] * 3
    assert ranks.questions == 2


def test_one_rank_that_did_not_hear_commit_keeps_all_from_inserting() -> None:
    ranks = Ranks(2)
    acts = [lambda: leased_and_told(ranks, True), lambda: leased_and_told(ranks, False)]
    assert on_ranks(acts) == [(True, False), (True, False)]


def test_a_rank_without_a_lease_keeps_the_others_from_their_trees_and_all_ask_the_same_questions() -> None:
    ranks = Ranks(3)
    acts = [
        lambda: leased_and_told(ranks, False),
        lambda: not_leased(ranks),
        lambda: leased_and_told(ranks, True),
    ]
    assert on_ranks(acts) == [(False, False), (None, False), (False, False)]
    assert ranks.questions == 1


def test_one_rank_alone_decides_by_itself() -> None:
    ingest = Round(None)
    assert ingest.all_leased(True) and ingest.all_commit(True) and not ingest.all_commit(False)


RANK = """
import sys, torch.distributed as dist
from snapd.engines.sglang_inject_ranks import GroupAgreement
rank = int(sys.argv[2])
dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(sys.argv[1], 2))
agreement = GroupAgreement(dist.group.WORLD)
print(agreement.all_of(True), agreement.all_of(rank == 0), agreement.all_of(False))
"""


def test_a_process_groups_agreement_is_what_all_its_ranks_say(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for rank in (0, 1)
    ]
    assert [rank.communicate(timeout=100)[0].split() for rank in ranks] == [["True", "False", "False"]] * 2

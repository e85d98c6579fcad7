"""Runs of the simulation: no rule is broken, a seed repeats its run, and planted bugs are noticed."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from plants import PLANTS, Plant

from snapd.errors import Reason
from snapd.service import Service
from tools import simulate
from tools.simulation.bugs import SEAMS, Bugs
from tools.simulation.dice import Dice
from tools.simulation.plan import BUG, FAULTS, READS, WRITES, Fault, Plan, Setup, Turn, draw_plan
from tools.simulation.runner import Case, Totals, load_case, run_plan, run_seed, save_case
from tools.simulation.shrink import kind_of, shrink

ROOT = Path(__file__).parents[2]
CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))
# More for a long run by hand.
SEEDS = int(os.environ.get("SNAPD_SIMULATION_SEEDS", "240"))
# On a busy machine everything takes long.
pytestmark = pytest.mark.timeout(900)
# A plant that so many seeds do not notice would hardly be noticed in practice.
PLANT_SEEDS = 120
# The whole log, and everything that was counted, of some seeds.
DIGESTS = """
import sys
from tools.simulation.runner import run_seed
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    result = run_seed(seed)
    print(seed, result.digest, result.lines, result.events, sorted(result.reasons.items()))
"""


@pytest.fixture(scope="module")
def totals() -> Totals:
    """Some hundreds of seeds."""
    totals = Totals()
    totals.run(range(SEEDS))
    return totals


# --- many seeds ---------------------------------------------------------------------------------


def test_no_seed_breaks_a_rule(totals: Totals) -> None:
    assert [(result.seed, result.violation) for result in totals.failed] == []
    assert totals.sessions > 10 * SEEDS


@pytest.mark.skipif(SEEDS < 240, reason="few seeds do not come everywhere")
def test_every_reason_is_reached(totals: Totals) -> None:
    """That of the design before in what it has left in the log only; that of a bug by planted ones."""
    report = totals.report(str)
    assert report["reasons_missing"] == []
    assert set(report["reasons"]) == set(Reason) - {Reason.ALLOC_FAILED}
    assert set(report["older_reasons"]) == {Reason.ALLOC_FAILED, Reason.SESSION_NOT_RESIDENT, Reason.OK}
    assert report["facts"]["bugs"] > report["facts"]["bugs-told"] > 0


@pytest.mark.skipif(SEEDS < 240, reason="few seeds do not come everywhere")
def test_what_the_faults_are_for_happens(totals: Totals) -> None:
    """Late writes land in others' bytes, lines are torn and lost, corrupt bytes are seen, daemons die."""
    facts = totals.report(str)["facts"]
    wanted = ("late-landings", "corrupt-seen", "flips", "torn-lines", "lines-dropped", "disk-failures")
    assert all(facts[name] for name in wanted), facts
    assert facts["epochs"] > SEEDS


def test_every_kind_of_turn_and_fault_is_drawn() -> None:
    plans = [draw_plan(seed) for seed in range(SEEDS)]
    assert {turn.write for plan in plans for turn in plan.turns} == set(WRITES)
    assert {turn.read for plan in plans for turn in plan.turns} == set(READS)
    assert {fault.kind for plan in plans for fault in plan.faults} == {*FAULTS, BUG}
    assert 0 < sum(plan.setup.older_lines > 0 for plan in plans) < SEEDS // 4


# --- the same seed, the same run ----------------------------------------------------------------


def test_a_seed_gives_the_same_log_in_every_process() -> None:
    """To the byte, whatever the hash seed."""

    def digests(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", DIGESTS, "3", "11"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, cwd=ROOT)
        return done.stdout

    assert digests("1") == digests("2")
    assert len(set(digests("3").splitlines())) == 8


def test_a_plan_survives_its_case(tmp_path: Path) -> None:
    plan = draw_plan(5)
    save_case(tmp_path / "case.json", Case(found="x", plan=plan))
    assert load_case(tmp_path / "case.json") == Case(found="x", plan=plan)
    assert run_plan(load_case(tmp_path / "case.json").plan).digest == run_seed(5).digest


def test_a_trace_changes_nothing() -> None:
    lines: list[str] = []
    assert run_seed(9, lines.append) == run_seed(9)
    assert any("daemon" in line for line in lines)


def test_leaving_out_a_turn_changes_nothing_of_what_came_before() -> None:
    """Chance belongs to turns and faults, so that a smaller plan is the same story with less in it."""
    plan = draw_plan(2)
    last = plan.turns[-1].at_ms
    faults = tuple(fault for fault in plan.faults if fault.at_ms < last)
    plan = msgspec.structs.replace(plan, faults=faults)
    fewer = msgspec.structs.replace(plan, turns=plan.turns[:-1])
    with_it, without = [], []
    run_plan(plan, with_it.append)
    run_plan(fewer, without.append)
    until = next(number for number, line in enumerate(with_it) if f"at_ms={last}," in line)
    assert with_it[:until] == without[:until]


# --- bugs on purpose -----------------------------------------------------------------------------


@pytest.mark.parametrize("seam", SEAMS)
def test_a_bug_at_any_place_ends_the_daemon_and_nothing_else(
    seam: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked is told, if anybody did; the next life goes on, and the log of both is proved."""
    arm = Bugs.arm

    def arm_there(self: Bugs, dice: Dice) -> None:
        arm(self, dice)
        self._seam = seam

    monkeypatch.setattr(Bugs, "arm", arm_there)
    raised = 0
    for seed in range(12):
        plan = draw_plan(seed)
        at_ms = plan.turns[len(plan.turns) // 3].at_ms
        bug = Fault(at_ms=at_ms, seed=seed, kind=BUG, for_ms=30)
        cuts = tuple(Fault(at_ms=at_ms + later_ms, seed=1, kind="cut-all") for later_ms in (100, 200))
        result = run_plan(msgspec.structs.replace(plan, faults=(bug, *cuts)))
        assert result.violation == ""
        raised += result.facts["bugs"]
        assert (
            result.reasons.get(Reason.INTERNAL_ERROR, 0) >= result.facts["bugs"] == result.facts["epochs"] - 1
        )
    assert raised > 5


def test_a_bug_that_was_not_planted_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Service, caller: object, request: object) -> None:
        raise KeyError("nobody planted it")

    monkeypatch.setattr(Service, "_ping", broken)
    monkeypatch.setattr(Service, "_list", broken)
    monkeypatch.setattr(Service, "_get", broken)
    violations = {run_seed(seed).violation for seed in range(40)} - {""}
    assert violations and all("nobody planted it" in violation for violation in violations), violations


# --- bugs are noticed ---------------------------------------------------------------------------


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(run_seed(seed).violation for seed in range(PLANT_SEEDS)), plant.__doc__


def test_a_failure_shrinks_to_what_it_takes() -> None:
    """With a quarantine skipped, one turn that fails is enough."""
    with pytest.MonkeyPatch.context() as patch:
        PLANTS[0](patch)
        plan = next(plan for plan in map(draw_plan, range(PLANT_SEEDS)) if run_plan(plan).violation)
        kind = kind_of(run_plan(plan).violation)
        small = shrink(plan, lambda other: kind_of(run_plan(other).violation) == kind)
        assert len(small.turns) + len(small.faults) <= 2 < len(plan.turns)
        assert kind_of(run_plan(small).violation) == kind
    assert run_plan(small).violation == ""


def test_shrinking_goes_by_what_fails_and_by_its_bound() -> None:
    turns = tuple(Turn(at_ms=number, seed=number, write="late", read="slow") for number in range(20))
    faults = tuple(Fault(at_ms=number, seed=number, kind="stall", for_ms=4_000) for number in range(20))
    plan = Plan(seed=1, setup=Setup(), turns=turns, faults=faults)
    runs: Counter[str] = Counter()

    def fails(other: Plan) -> bool:
        runs["all"] += 1
        seeds = {turn.seed for turn in other.turns}
        return {3, 17} <= seeds and any(fault.seed == 11 and fault.for_ms > 100 for fault in other.faults)

    small = shrink(plan, fails)
    assert [turn.seed for turn in small.turns] == [3, 17]
    assert [(fault.seed, fault.for_ms) for fault in small.faults] == [(11, 300)]
    assert {(turn.write, turn.read) for turn in small.turns} == {("whole", "told")}
    runs.clear()
    shrink(plan, fails, runs_max=7)
    assert runs["all"] == 7


# --- cases --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_case_that_was_kept_goes_well(path: Path) -> None:
    assert run_plan(load_case(path).plan).violation == ""


# --- the command --------------------------------------------------------------------------------


def test_the_command_prints_one_json_object() -> None:
    done = CliRunner().invoke(simulate.main, ["--seeds", "3", "--first", "20", "--json"])
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert (report["seeds"], report["violations"]) == (3, 0)
    assert report["sessions"] > 0 and report["events"] > 0 and report["sessions_per_minute"] > 0
    assert report["reasons"]["ok"] > 0
    assert Reason.OK not in report["reasons_missing"]


def test_the_command_fails_when_many_seeds_do_not_come_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["--seeds", "2", "--first", "20"]
    assert CliRunner().invoke(simulate.main, few).exit_code == 0
    monkeypatch.setattr(simulate, "EVERYWHERE_SEEDS", 2)
    done = CliRunner().invoke(simulate.main, few)
    assert done.exit_code == 1 and "not reached: " in done.stderr


def test_the_command_names_what_repeats_a_failure_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTS[0](monkeypatch)
    path = tmp_path / "case.json"
    done = CliRunner().invoke(simulate.main, ["--seeds", "2", "--json", "--save-case", str(path)])
    assert done.exit_code == 1
    (failed, *_) = json.loads(done.stdout)["failed"]
    assert failed["command"] == f"python tools/simulate.py --seed {failed['seed']} --trace"
    assert failed["command"] in done.stderr
    kept = load_case(path)
    assert kept.found and len(kept.plan.turns) <= 2
    again = CliRunner().invoke(simulate.main, ["--case", str(path), "--trace"])
    assert again.exit_code == 1 and "VIOLATION" in again.stdout


def test_the_command_says_what_is_wrong_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text("{}")
    for arguments, said in (
        (["--case", str(tmp_path / "none.json")], "cannot be used as a case"),
        (["--case", str(tmp_path / "case.json")], "cannot be used as a case"),
        (["--seeds", "2", "--trace"], "--trace is for one run"),
    ):
        done = CliRunner().invoke(simulate.main, arguments)
        assert done.exit_code in (1, 2) and said in done.output and "Traceback" not in done.output

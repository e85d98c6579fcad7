"""Play snapd in simulated time, with faults, from seeds; find, repeat, shrink and keep what goes wrong.

The daemon's core, executor, service, server and log, and the clients' exchange and channel are the real ones;
time, network, processes, disk and memory are made up. The same seed gives the same run, to the line.

Exits with 1 when a rule was broken, or when 500 seeds and more have not reached every reason.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import click
import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.simulation.plan import Plan, draw_plan
from tools.simulation.runner import Case, Totals, load_case, run_plan, save_case
from tools.simulation.shrink import kind_of, shrink
from tools.simulation.world import Result

_PROGRESS_EVERY_S: Final = 2.0
# So many seeds come everywhere.
EVERYWHERE_SEEDS: Final = 500


def _command(seed: int) -> str:
    return f"python tools/simulate.py --seed {seed} --trace"


class _Progress:
    """Says on stderr how far it is, now and then."""

    def __init__(self, num_seeds: int) -> None:
        self._num_seeds = num_seeds
        self._next_s = time.monotonic() + _PROGRESS_EVERY_S
        self._num_failed = 0

    def __call__(self, number: int, totals: Totals) -> None:
        for result in totals.failed[self._num_failed :]:
            click.echo(f"seed {result.seed}: {result.violation}\n  {_command(result.seed)}", err=True)
        self._num_failed = len(totals.failed)
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _PROGRESS_EVERY_S
            click.echo(f"{number} of {self._num_seeds} seeds, {totals.sessions} sessions", err=True)


def _plan_of(seed: int | None, case: Path | None) -> Plan | None:
    if case is None:
        return None if seed is None else draw_plan(seed)
    try:
        return load_case(case).plan
    except (OSError, msgspec.DecodeError) as error:
        raise click.ClickException(f"{case} cannot be used as a case: {error}") from None


def _shrunk(plan: Plan, violation: str) -> Plan:
    click.echo("shrinking ...", err=True)
    small = shrink(plan, lambda other: kind_of(run_plan(other).violation) == kind_of(violation))
    before, after = len(plan.turns) + len(plan.faults), len(small.turns) + len(small.faults)
    click.echo(f"from {before} turns and faults to {after}", err=True)
    return small


def _keep(path: Path, plan: Plan, result: Result) -> None:
    """Shrink a plan that fails, and write it."""
    if result.violation:
        plan = _shrunk(plan, result.violation)
        result = run_plan(plan)
    save_case(path, Case(found=result.violation, plan=plan))
    click.echo(f"{path}: {result.violation or 'nothing was wrong'}", err=True)


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report))
        return
    for name, value in report.items():
        if isinstance(value, dict):
            click.echo(f"{name}: " + ", ".join(f"{key} {count}" for key, count in value.items()))
        elif name == "failed":
            for one in value:
                click.echo(f"seed {one['seed']}: {one['violation']}\n  {one['command']}")
        elif name == "reasons_missing":
            click.echo(f"{name}: {', '.join(value) or 'none'}")
        else:
            click.echo(f"{name}: {value}")


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=200, show_default=True, help="How many seeds.")
@click.option("--first", type=int, default=0, show_default=True, help="The first of them.")
@click.option("--seed", type=int, help="Run this one only.")
@click.option(
    "--case", type=click.Path(dir_okay=False, path_type=Path), help="Run a case that was saved, only."
)
@click.option("--trace", is_flag=True, help="Print what happens in that one.")
@click.option(
    "--save-case",
    "save_to",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Shrink that one, or the first that fails, and write it as a case.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    seeds: int,
    first: int,
    seed: int | None,
    case: Path | None,
    trace: bool,
    save_to: Path | None,
    as_json: bool,
) -> None:
    """Play snapd in simulated time, with faults, from seeds."""
    totals = Totals()
    plan = _plan_of(seed, case)
    if plan is not None:
        begin_ns = time.process_time_ns()
        result = run_plan(plan, click.echo if trace and not as_json else None)
        totals.cpu_ns = time.process_time_ns() - begin_ns
        totals.add(result)
        if save_to is not None:
            _keep(save_to, plan, result)
    else:
        if trace:
            raise click.UsageError("--trace is for one run: name it with --seed or --case")
        totals.run(range(first, first + seeds), _Progress(seeds))
        if save_to is not None and totals.failed:
            failed = totals.failed[0]
            _keep(save_to, draw_plan(failed.seed), failed)
    _show(totals.report(_command), as_json=as_json)
    is_incomplete = bool(plan is None and seeds >= EVERYWHERE_SEEDS and totals.reasons_missing)
    if is_incomplete:
        click.echo(f"not reached: {', '.join(totals.reasons_missing)}", err=True)
    if totals.failed or is_incomplete:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

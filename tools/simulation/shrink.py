"""Makes a failing plan small: leaves out turns and faults, then makes plain what is left.

Delta debugging over the plan. What remains fails in the same way, and nothing that is left can be left out.

Paper: Zeller, Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE TSE 28(2), 2002.
"""

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import msgspec

from tools.simulation.plan import Fault, Plan, Turn

RUNS_MAX: Final = 600
Item: TypeAlias = Turn | Fault
Fails: TypeAlias = Callable[[Plan], bool]

_PLAIN_TURN: Final[dict[str, object]] = {
    "write": "whole", "read": "told", "use_hint": False, "has_suffix": False, "has_keys": False,
    "is_fresh": False, "ranks": (), "decoder": 0, "session": 0, "layout": 0,
}  # fmt: skip


def kind_of(violation: str) -> str:
    """Return which rule a violation is of."""
    return violation.partition(":")[0]


class _Shrinker:
    def __init__(self, plan: Plan, fails: Fails, runs_max: int) -> None:
        self.plan = plan
        self._fails = fails
        self._runs_left = runs_max

    def accept(self, plan: Plan) -> bool:
        """Take a plan that still fails."""
        if self._runs_left <= 0:
            return False
        self._runs_left -= 1
        if not self._fails(plan):
            return False
        self.plan = plan
        return True

    def leave_out(self) -> bool:
        """Leave out as much as can be; return whether anything was."""
        items: list[Item] = [*self.plan.faults, *self.plan.turns]
        size = max(1, len(items) // 2)
        has_changed = False
        while items:
            start = 0
            while start < len(items):
                fewer = items[:start] + items[start + size :]
                if self.accept(_with_items(self.plan, fewer)):
                    items = fewer
                    has_changed = True
                else:
                    start += size
            if size == 1:
                break
            size = max(1, size // 2)
        return has_changed

    def make_plain(self) -> bool:
        """Make each turn and fault as plain as can be; return whether anything was made so."""
        has_changed = False
        for number in range(len(self.plan.turns)):
            for name, value in _PLAIN_TURN.items():
                turn = self.plan.turns[number]
                if getattr(turn, name) != value:
                    changed = msgspec.structs.replace(turn, **{name: value})
                    has_changed |= self.accept(_with_turn(self.plan, number, changed))
        for number in range(len(self.plan.faults)):
            for shorter in _shorter(self.plan.faults[number]):
                faults = (*self.plan.faults[:number], shorter, *self.plan.faults[number + 1 :])
                if self.accept(msgspec.structs.replace(self.plan, faults=faults)):
                    has_changed = True
                    break
        return has_changed


def shrink(plan: Plan, fails: Fails, runs_max: int = RUNS_MAX) -> Plan:
    """Return the smallest plan found that still fails.

    Args:
        plan: that fails.
        fails: runs a plan and says whether it fails in the same way.
        runs_max: of *fails*.
    """
    shrinker = _Shrinker(plan, fails, runs_max)
    while shrinker.leave_out() | shrinker.make_plain():
        pass
    return shrinker.plan


def _with_items(plan: Plan, items: list[Item]) -> Plan:
    return msgspec.structs.replace(
        plan,
        turns=tuple(item for item in items if isinstance(item, Turn)),
        faults=tuple(item for item in items if isinstance(item, Fault)),
    )


def _with_turn(plan: Plan, number: int, turn: Turn) -> Plan:
    return msgspec.structs.replace(plan, turns=(*plan.turns[:number], turn, *plan.turns[number + 1 :]))


def _shorter(fault: Fault) -> Iterator[Fault]:
    for for_ms in (30, 300):
        if for_ms < fault.for_ms:
            yield msgspec.structs.replace(fault, for_ms=for_ms)

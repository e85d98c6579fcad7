"""How the ranks of one engine stay alike: every rank does the same to its tree, or none does anything.

SGLang's ranks each keep a tree and slots of their own, and decide by them, without asking each other, what
runs next: a rank whose tree was touched when another's was not waits for a batch that never comes.

Source: design, section 3.
"""

from typing import Protocol

import torch
import torch.distributed


class Agreement(Protocol):
    """The engine's ranks, as one."""

    def all_of(self, mine: bool) -> bool:
        """Return whether *mine* is true on every rank. Every rank asks it, in the same order."""
        ...


class GroupAgreement:
    """An ``Agreement`` over a process group of the engine's, such as the scheduler's ``tp_cpu_group``.

    Args:
        group: of the engine's ranks, for tensors on the CPU.
    """

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self._group = group

    def all_of(self, mine: bool) -> bool:
        """Return whether *mine* is true on every rank."""
        votes = torch.tensor([int(mine)])
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return bool(votes.item())


class Round:
    """What the ranks agree on in one ingest: first that each has its lease, then the decision.

    Made anew for every ingest. A rank that got no lease says so when it comes to the decision, so that every
    rank asks the same questions whatever becomes of it.

    Args:
        agreement: None: there is one rank.
    """

    def __init__(self, agreement: Agreement | None) -> None:
        self._agreement = agreement
        self._is_leased: bool | None = None

    def all_leased(self, mine: bool) -> bool:
        """Return whether every rank has its lease, and may touch its tree."""
        self._is_leased = mine if self._agreement is None else self._agreement.all_of(mine)
        return self._is_leased

    def all_commit(self, mine: bool) -> bool:
        """Return whether every rank heard "commit", and may insert."""
        if self._is_leased is None:
            self.all_leased(False)
        if not self._is_leased:
            return False
        return mine if self._agreement is None else self._agreement.all_of(mine)

"""An engine's ranks as threads, which notice when one of them asks what the others do not."""

import threading
from collections.abc import Callable, Sequence
from typing import Any


class Ranks:
    """An ``Agreement`` of threads.

    Attributes:
        questions: how often they were asked.
    """

    def __init__(self, num_ranks: int) -> None:
        self._votes: list[bool] = []
        self._answer = True
        self.questions = 0
        self._barrier = threading.Barrier(num_ranks, action=self._decide, timeout=60)

    def _decide(self) -> None:
        self._answer, self._votes = all(self._votes), []
        self.questions += 1

    def all_of(self, mine: bool) -> bool:
        self._votes.append(mine)
        self._barrier.wait()
        return self._answer


def on_ranks(acts: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each in a thread of its own, and return what they returned; what one raises is raised."""
    results: list[Any] = [None] * len(acts)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = acts[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    if errors:
        raise errors[0]
    return results

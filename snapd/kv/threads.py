"""How many threads torch takes for a copy on the CPU.

torch's threads spin while they wait for each other. Beside a transport that has threads of its own, on as
many cores as there are threads, that costs more than it gives: on two cores a push over TCP ran at 0.05 to
0.5 of its speed with one thread.
"""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use *count* threads inside the block, in this thread; None: as it is set.

    A thread that uses torch for the first time meanwhile takes *count* over for itself.
    """
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""In place of SGLang's kernels, of which there is no build for the CPU: what a plain CPU engine calls.

Whatever else SGLang takes from here raises when it is called.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

# SGLang looks for submodules, and finds that there are none.
__path__: list[str] = []


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor, slots: torch.Tensor,
    *others: Any,
) -> None:  # fmt: skip
    """Write each request's new slots, one after the other in *slots*, into its row of *table*."""
    del others
    done = 0
    for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
        table[row, start:stop] = slots[done : done + stop - start].to(table.dtype)
        done += stop - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: there is no such kernel for the CPU here")

    return missing

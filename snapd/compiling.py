"""Whether the modules that every request goes through are compiled, and what compiling them needs.

They are Python, and are run and tested as such. A wheel that was built with ``SNAPD_COMPILE=1`` holds them as
machine code too, made by mypyc from the same files; Python then takes that. Which ones is said in setup.py.
"""

import importlib.util
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from typing import TYPE_CHECKING, TypeVar

_ONE_OF_THEM = "snapd.core.machine"

if TYPE_CHECKING:
    # What the compiler looks for. It is no dependency: at run time there is nothing to do.
    from mypy_extensions import mypyc_attr
else:
    T = TypeVar("T")

    def mypyc_attr(**_: object) -> Callable[[T], T]:
        """Return a decorator that changes nothing."""
        return lambda cls: cls


__all__ = ["described", "is_compiled", "mypyc_attr"]


def is_compiled() -> bool:
    """Return whether this installation has the compiled modules; imports none of them."""
    spec = importlib.util.find_spec(_ONE_OF_THEM)
    return spec is not None and spec.origin is not None and spec.origin.endswith(tuple(EXTENSION_SUFFIXES))


def described(version: str, is_so: bool) -> str:
    """Return a version for a person; it says when the modules are compiled."""
    return f"{version} (compiled)" if is_so else version

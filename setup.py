"""Builds the package; pyproject.toml says all but what is here.

With ``SNAPD_COMPILE=1`` in the environment the modules below are compiled as well, by mypyc, which needs a C
compiler and Python's headers:

    SNAPD_COMPILE=1 pip install .

Without it nothing is compiled, and the wheel is for every platform.
"""

import os
import sys
from typing import Any, Final

from setuptools import setup

# What a request goes through. Messages, events and records are not among it: they are msgspec's structs, in C
# already, and the compiler would lose their options.
COMPILED: Final = [
    "snapd/core/admission.py",
    "snapd/core/attempt.py",
    "snapd/core/books.py",
    "snapd/core/buffer.py",
    "snapd/core/course.py",
    "snapd/core/directory.py",
    "snapd/core/eviction.py",
    "snapd/core/fsm.py",
    "snapd/core/lives.py",
    "snapd/core/machine.py",
    "snapd/core/planes.py",
    "snapd/core/quarantine.py",
    "snapd/core/slab.py",
    "snapd/eventlog.py",
    "snapd/executor.py",
    "snapd/requestevents.py",
    "snapd/server.py",
    "snapd/service.py",
    "snapd/timers.py",
    "snapd/units.py",
]
# The compiler, and what it looks at for types.
COMPILER: Final = ["mypy>=1.13", "msgspec>=0.19", "structlog>=24.1"]
# Commands that leave what was compiled beside the sources, where it would hide what is changed later.
_IN_PLACE: Final = frozenset({"develop", "editable_wheel", "--inplace", "-i"})
_IS_WANTED: Final = os.environ.get("SNAPD_COMPILE", "0") not in ("", "0")


def extensions() -> list[Any]:
    """Return what is to be compiled.

    Raises:
        SystemExit: it would lie beside the sources.
    """
    if not _IS_WANTED or "egg_info" in sys.argv:
        return []
    if not _IN_PLACE.isdisjoint(sys.argv):
        sys.exit("SNAPD_COMPILE=1 is for wheels: an editable install runs the sources. Unset it.")
    from mypyc.build import mypycify

    return mypycify(
        ["--ignore-missing-imports", *COMPILED], opt_level="2", debug_level="0", group_name="snapd"
    )


setup(ext_modules=extensions(), setup_requires=COMPILER if _IS_WANTED else [])

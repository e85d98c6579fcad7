"""Keeps glibc's memory flat: large blocks go back to the system when they are freed.

A block above a threshold is a mapping of its own, and unmapped when it is freed. Left alone, glibc raises the
threshold to the size of whatever such block was freed, so that the next one comes out of its heap, and what
it keeps of the heap's end to twice that: with tables that are made anew now and then, memory grows in steps.

Source: design, section 12.
"""

import ctypes
import os
from collections.abc import Mapping
from typing import Final

from snapd.units import KIB

# What glibc begins with, for both.
THRESHOLD_BYTES: Final = 128 * KIB
# Whoever sets one of these has said what he wants.
VARIABLE: Final = "MALLOC_MMAP_THRESHOLD_"
_TUNABLES: Final = "GLIBC_TUNABLES"
_TUNABLE: Final = "glibc.malloc.mmap_threshold"
_TRIM_VARIABLE: Final = "MALLOC_TRIM_THRESHOLD_"
_TRIM_TUNABLE: Final = "glibc.malloc.trim_threshold"
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def keep_threshold(environ: Mapping[str, str] = os.environ) -> bool:
    """Have the C library leave the threshold where it was at first; once a process, before much is allocated.

    Returns:
        Whether it does; False where the environment says otherwise, or the C library is another one.
    """
    tunables = environ.get(_TUNABLES, "")
    if VARIABLE in environ or _TUNABLE in tunables:
        return False
    try:
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "gnu_get_libc_version"):
            return False
        if _TRIM_VARIABLE not in environ and _TRIM_TUNABLE not in tunables:
            # What was freed before, while modules were imported, has raised it.
            libc.mallopt(_M_TRIM_THRESHOLD, THRESHOLD_BYTES)
        return bool(libc.mallopt(_M_MMAP_THRESHOLD, THRESHOLD_BYTES))
    except OSError:
        # Nothing is lost but a little memory.
        return False

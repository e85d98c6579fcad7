"""Sizes and times: units, rounding, and the forms that people write."""

import re
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
TIB: Final = 1024 * GIB
MB: Final = 1_000_000

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
MS_PER_S: Final = 1_000

_UNIT_BYTES: Final = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": TIB, "tib": TIB, "tb": 1000**4,
}  # fmt: skip
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def ceil_div(numerator: int, denominator: int) -> int:
    """Return *numerator* / *denominator*, rounded up."""
    return -(-numerator // denominator)


def align_up(value: int, alignment: int) -> int:
    """Return the least multiple of *alignment* that is not below *value*."""
    return -(-value // alignment) * alignment


def align_down(value: int, alignment: int) -> int:
    """Return the greatest multiple of *alignment* that is not above *value*."""
    return value // alignment * alignment


def ms_to_ns(duration_ms: int) -> int:
    """Return milliseconds as nanoseconds."""
    return duration_ms * NS_PER_MS


def parse_size_bytes(text: str) -> int:
    """Return the bytes that a size such as ``8GiB``, ``512 MiB`` or ``1500MB`` names.

    ``K``, ``M``, ``G``, ``T`` alone and the ``iB`` forms are powers of 1024; the ``B`` forms of 1000.

    Raises:
        ValueError: *text* is no size, or is not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text)
    factor = _UNIT_BYTES.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no size: write a number and a unit, such as 8GiB or 512MiB")
    number = match.group(1)
    size_bytes = float(number) * factor if "." in number else int(number) * factor
    if size_bytes != int(size_bytes):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size_bytes)


def format_bytes(size_bytes: int) -> str:
    """Return *size_bytes* for a person: ``8 GiB``, ``512 MiB``, ``1.5 KiB``, ``17 B``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def format_ms(duration_ms: float) -> str:
    """Return a duration for a person: ``0.42 ms``, ``17 ms``, ``1.3 s``, ``5 min``."""
    if duration_ms < 1_000:
        return f"{duration_ms:.3g} ms"
    if duration_ms < 120_000:
        return f"{duration_ms / 1_000:.3g} s"
    return f"{duration_ms / 60_000:.3g} min"

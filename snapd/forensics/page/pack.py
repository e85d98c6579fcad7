"""The page's data as text: a JSON header and columns, compressed, in base64.

Nothing of the log is ever written as HTML: base64 has no character that a browser could take for markup.

Unpacked it is a little-endian u32 with the header's length, the header, and the columns, each on a multiple
of 8 bytes. The header's ``columns`` are ``[name, type, offset_bytes, length]``.
"""

import base64
import gzip
from typing import TYPE_CHECKING, Any, Final

import msgspec

from snapd import __version__
from snapd.errors import REASON_HELP
from snapd.forensics.page.data import PageData, strip_label
from snapd.forensics.page.palette import OPEN, colour
from snapd.units import align_up

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ALIGNMENT_BYTES: Final = 8
# Level 6 is 4 % larger than 9 and takes a fifth of its time.
_GZIP_LEVEL: Final = 6
_OPEN_HELP: Final = "It had not ended when the log did."
_TYPES: Final = {"uint8": "u8", "uint16": "u16", "uint32": "u32", "float32": "f32", "float64": "f64"}


def pack(page: PageData) -> str:
    """Return *page* as base64 of gzip."""
    columns = _columns(page)
    table: list[tuple[str, str, int, int]] = []
    header = _header(page)
    # Offsets are as long as they can be while the header's length is found out.
    for name, array in columns.items():
        table.append((name, _TYPES[array.dtype.name], 1 << 40, array.size))
    header["columns"] = table
    header_bytes = align_up(4 + len(msgspec.json.encode(header)), _ALIGNMENT_BYTES) - 4
    at = 4 + header_bytes
    for index, (name, array) in enumerate(columns.items()):
        table[index] = (name, table[index][1], at, array.size)
        at = align_up(at + array.nbytes, _ALIGNMENT_BYTES)
    parts = [header_bytes.to_bytes(4, "little"), msgspec.json.encode(header).ljust(header_bytes)]
    for array in columns.values():
        raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        parts.append(raw.ljust(align_up(len(raw), _ALIGNMENT_BYTES), b"\0"))
    # No time of its own: the same log makes the same page.
    return base64.b64encode(gzip.compress(b"".join(parts), _GZIP_LEVEL, mtime=0)).decode("ascii")


def _columns(page: PageData) -> "dict[str, NDArray[np.generic]]":
    columns: dict[str, Any] = {**msgspec.structs.asdict(page.rows), "bins": page.bins}
    for name, column in msgspec.structs.asdict(page.events).items():
        columns[f"event_{name}"] = column
    for index, arena in enumerate(page.arenas):
        for name in ("live", "quarantined", "at_s", "live_share", "quarantined_share", "hole_share"):
            columns[f"arena{index}_{name}"] = getattr(arena, name)
        if arena.boxes is not None:
            for name, column in msgspec.structs.asdict(arena.boxes).items():
                columns[f"arena{index}_{name}"] = column
    return columns


def _header(page: PageData) -> dict[str, Any]:
    help_texts: dict[str, str] = {reason.value: text for reason, text in REASON_HELP.items()}
    help_texts[OPEN] = _OPEN_HELP
    return {
        "version": __version__,
        "title": page.title,
        "about": page.about,
        "begin_unix_s": page.begin_unix_s,
        "end_s": page.end_s,
        "lines": page.lines,
        "epochs": page.epochs,
        "sessions": [_printable(session) for session in page.sessions],
        "reasons": page.reasons,
        "reason_counts": page.reason_counts,
        "colours": [colour(reason) for reason in page.reasons],
        "help": {reason: help_texts[reason] for reason in page.reasons if reason in help_texts},
        "attempts": page.attempts,
        "attempts_ok": page.attempts_ok,
        "attempts_open": page.attempts_open,
        "weight_ok": page.weight_ok,
        "weight_other": page.weight_other,
        "counters": page.counters,
        "notices": page.notices,
        "event_kinds": page.event_kinds,
        "event_whys": page.event_whys,
        "bin_count": int(page.bins.shape[1]),
        "strip": strip_label(page),
        "arenas": [
            {
                "index": index,
                "rank": arena.rank,
                "device": arena.device,
                "size_bytes": arena.size_bytes,
                "rows": int(arena.live.shape[0]),
                "columns": int(arena.live.shape[1]),
                "has_boxes": arena.boxes is not None,
            }
            for index, arena in enumerate(page.arenas)
        ],
    }


def _printable(text: str) -> str:
    """A lone surrogate, which JSON can name and UTF-8 cannot hold, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")

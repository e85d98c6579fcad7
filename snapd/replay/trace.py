"""Request traces: one JSON object a line, in UTF-8 with or without a byte order mark.

A line holds ``timestamp`` (ms from the start), ``input_length`` and ``output_length`` (tokens), and
``hash_ids``, one for each block of 512 input tokens; equal ids mean equal prefixes. A line may also name its
``session_id``; ``hash_ids`` may then be left out, and each prompt of a session is taken to begin with the
one before. Fields that are not known are ignored.
"""

import sys
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from snapd.errors import SnapdError
from snapd.units import NS_PER_MS, ceil_div

BLOCK_TOKENS: Final = 512
TRACE_BYTES_MAX: Final = 1 << 30
TOKENS_MAX: Final = 1 << 24
_SHOWN_BAD_LINES: Final = 5
_BOM: Final = b"\xef\xbb\xbf"
STDIN: Final = "-"


class TraceError(SnapdError):
    """The trace cannot be used; the message names it, and the line."""


class Request(msgspec.Struct, frozen=True):
    """One line of a trace; see the module."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]
    hash_ids: tuple[int, ...] | None = None
    session_id: str | int | None = None

    @property
    def at_ns(self) -> int:
        """When it arrives, from the start of the trace."""
        return round(self.timestamp * NS_PER_MS)

    @property
    def end_tokens(self) -> int:
        """Tokens of the conversation after this turn."""
        return self.input_length + self.output_length


class Trace(NamedTuple):
    """The requests in order of time, and the lines that were left out."""

    name: str
    requests: list[Request]
    bad_lines: tuple[str, ...]


_decoder: Final = msgspec.json.Decoder(Request)


def read_trace(path: str, *, limit: int = 0, speed_up: float = 1.0, skip_bad_lines: bool = False) -> Trace:
    """Return the requests of a trace. Blank lines are left out.

    Args:
        path: a file; ``-``: stdin.
        limit: only so many requests, from the first on; 0: all.
        speed_up: times at which the requests arrive are divided by it.
        skip_bad_lines: leave wrong lines out and say which; otherwise they are errors.

    Raises:
        TraceError: it cannot be read, holds no request, or a line is wrong.
    """
    name = "stdin" if path == STDIN else path
    requests: list[Request] = []
    bad_lines: list[str] = []
    for number, line in enumerate(_read(path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            requests.append(parse_line(line))
        except TraceError as error:
            bad_lines.append(f"line {number}: {error}")
            if not skip_bad_lines:
                raise TraceError(
                    f"trace {name}, {bad_lines[0]} (--skip-bad-lines leaves such lines out)"
                ) from None
    if not requests:
        said = f": {bad_lines[0]}" if bad_lines else ""
        raise TraceError(f"trace {name} holds no request{said}")
    requests.sort(key=lambda request: request.timestamp)
    requests = requests[:limit] if limit else requests
    if speed_up != 1.0:
        requests = [msgspec.structs.replace(r, timestamp=r.timestamp / speed_up) for r in requests]
    if len(bad_lines) > _SHOWN_BAD_LINES:
        bad_lines[_SHOWN_BAD_LINES:] = [f"and {len(bad_lines) - _SHOWN_BAD_LINES} more"]
    return Trace(name, requests, tuple(bad_lines))


def _read(path: str) -> bytes:
    if path == STDIN:
        raw = sys.stdin.buffer.read(TRACE_BYTES_MAX + 1)
    else:
        try:
            with Path(path).open("rb") as file:
                raw = file.read(TRACE_BYTES_MAX + 1)
        except OSError as error:
            raise TraceError(f"trace {path} cannot be read: {error.strerror}") from None
    if len(raw) > TRACE_BYTES_MAX:
        raise TraceError(f"trace {path} has more than {TRACE_BYTES_MAX} bytes: take a part of it")
    return raw.removeprefix(_BOM)


def parse_line(line: bytes) -> Request:
    """Return the request of one line.

    Raises:
        TraceError: it is none.
    """
    try:
        request = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(str(error)) from None
    except RecursionError:
        raise TraceError("its lists or objects lie too deep in each other") from None
    if request.hash_ids is None:
        if request.session_id is None:
            raise TraceError(
                "neither hash_ids nor session_id: one of them must say what the prompt begins with"
            )
        return request
    blocks = ceil_div(request.input_length, BLOCK_TOKENS)
    if len(request.hash_ids) != blocks:
        raise TraceError(
            f"{len(request.hash_ids)} hash_ids for {request.input_length} tokens; one for each of {blocks} "
            f"blocks of {BLOCK_TOKENS} is wanted"
        )
    return request

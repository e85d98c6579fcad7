"""Request traces: one JSON object a line, and the sessions that are in them.

A line holds ``timestamp`` (ms from the start), ``input_length`` and ``output_length`` (tokens)
and ``hash_ids``, one for each block of 512 input tokens; equal ids mean equal prefixes.

A trace does not say which requests are turns of one session. The rule here: request B is the next
turn of request A when B's blocks hold A's last whole block, no later one of another request
is among them, and B's input is at least A's input and output together, as the output of a turn
shows up in the next turn's input. A block from which more than two different blocks follow
anywhere in the trace is a shared prompt and links nothing.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec

from snapd.errors import SnapdError
from snapd.units import ceil_div

BLOCK_TOKENS: Final = 512
# More ways to go on than this, and a block is a shared prompt: a turn may be asked twice.
SHARED_FANOUT_MIN: Final = 3
TRACE_BYTES_MAX: Final = 1 << 30

_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class TraceError(SnapdError):
    """The trace cannot be read; the message names the file and the line."""


class Request(msgspec.Struct, frozen=True):
    """One line of a trace.

    Attributes:
        timestamp: ms from the start of the trace.
        input_length: tokens of the prompt.
        output_length: tokens of the answer.
        hash_ids: one a block of 512 input tokens; the last block may be partial.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    output_length: _Tokens
    hash_ids: tuple[int, ...]

    @property
    def end_tokens(self) -> int:
        """Tokens of the conversation after this turn."""
        return self.input_length + self.output_length


_decoder: Final = msgspec.json.Decoder(Request)


def default_trace_path() -> Path:
    """Return the trace that comes with the package."""
    return Path(__file__).parent / "agent_trace.jsonl"


def read_trace(path: Path) -> list[Request]:
    """Return the requests of a trace, in order of time. Blank lines are left out.

    Raises:
        TraceError: the file cannot be read, holds no request, or a line is wrong.
    """
    try:
        if path.stat().st_size > TRACE_BYTES_MAX:
            raise TraceError(f"trace {path} has more than {TRACE_BYTES_MAX} bytes: take a part of it")
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TraceError(f"trace {path} cannot be read: {error.strerror}") from None
    requests = [_request(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise TraceError(f"trace {path} holds no request")
    return sorted(requests, key=lambda request: request.timestamp)


def _request(path: Path, number: int, line: bytes) -> Request:
    try:
        request = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"trace {path}, line {number}: {error}") from None
    blocks = ceil_div(request.input_length, BLOCK_TOKENS)
    if len(request.hash_ids) != blocks:
        raise TraceError(
            f"trace {path}, line {number}: {len(request.hash_ids)} hash_ids for {request.input_length} "
            f"tokens; one for each of {blocks} blocks of {BLOCK_TOKENS} is wanted"
        )
    return request


def chain_sessions(requests: Iterable[Request]) -> list[list[Request]]:
    """Return the sessions of a trace by the rule above, each with its turns, in order of their first."""
    requests = list(requests)
    followers: defaultdict[int, set[int]] = defaultdict(set)
    for request in requests:
        for block, following in zip(request.hash_ids, request.hash_ids[1:], strict=False):
            followers[block].add(following)
    sessions: list[list[Request]] = []
    # By last whole block: the session that may go on from there.
    open_ends: dict[int, int] = {}
    for request in requests:
        session = _parent(request, sessions, open_ends)
        if session is None:
            session = len(sessions)
            sessions.append([])
        sessions[session].append(request)
        whole_blocks = request.input_length // BLOCK_TOKENS
        if whole_blocks:
            last = request.hash_ids[whole_blocks - 1]
            if len(followers[last]) < SHARED_FANOUT_MIN:
                open_ends[last] = session
    return sessions


def _parent(request: Request, sessions: list[list[Request]], open_ends: dict[int, int]) -> int | None:
    """Return the session that *request* goes on with, and take its end away; None: a new one begins."""
    for block in reversed(request.hash_ids):
        session = open_ends.get(block)
        if session is not None and request.input_length >= sessions[session][-1].end_tokens:
            del open_ends[block]
            return session
    return None

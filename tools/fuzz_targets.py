"""What the fuzzer calls with any bytes: whatever reads what others have written.

A target returns for every input, or raises what it says it raises; anything else is a finding.
"""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from snapd import wire as w
from snapd.address import parse_address
from snapd.calls import lookup
from snapd.config import load
from snapd.errors import ConfigError, ProtocolError, RequestError, SnapdError, StartupError
from snapd.eventlog import Line, decode_line
from snapd.exchange import Exchange
from snapd.forensics.decoding import read_slowly
from snapd.forensics.lines import LogInput, LogUnreadable
from snapd.forensics.proof import Proof, Where
from snapd.logrecovery import closing_records, read_open_attempts
from snapd.units import KIB

FRAME_BYTES_MAX: Final = 64 * KIB
ID: Final = 7


class Finding(AssertionError):
    """A target did what it must not do."""


def requests(data: bytes) -> None:
    """The daemon's side of a connection: framing and decoding, however the stream was cut.

    The first byte says how it is cut.
    """
    if not data:
        return
    size_bytes, stream = data[0] + 1, data[1:]
    whole, is_bad = _payloads(stream, len(stream) or 1)
    cut, is_bad_cut = _payloads(stream, size_bytes)
    if (whole, is_bad) != (cut, is_bad_cut):
        raise Finding(f"cut every {size_bytes} bytes the stream reads otherwise")
    for payload in whole:
        try:
            request = w.decode_request(payload)
        except ProtocolError:
            continue
        if isinstance(request, w.Request):
            again = w.decode_request(w.encode_frame(request)[w.LENGTH_BYTES :])
            if again != request:
                raise Finding(f"{request} became {again}")


def _payloads(stream: bytes, size_bytes: int) -> tuple[list[bytes], bool]:
    splitter = w.FrameSplitter(FRAME_BYTES_MAX)
    payloads: list[bytes] = []
    try:
        for start in range(0, len(stream), size_bytes):
            payloads += splitter.feed(stream[start : start + size_bytes])
            splitter.check()
    except ProtocolError:
        return payloads, True
    return payloads, False


def answers(data: bytes) -> None:
    """A client's side: what claims to be the daemon says anything at all, after a hello or before it."""
    if not data:
        return
    exchange = Exchange("fuzz")
    errand = exchange.add(lookup("f" * 32, session_id="s"), 1.0, 0.0)
    exchange.opened()
    while (output := exchange.next_output()) is not None:
        exchange.wrote(len(output))
    if data[0] % 2:
        hello = w.HelloRep(
            id=2, protocol=w.PROTOCOL_VERSION, epoch="e", version="0", arenas=(), transport="shm",
            transport_address="", alignment_bytes=256, frame_bytes_max=FRAME_BYTES_MAX,
            requests_in_flight_max=8, page_keys_max=8, lease_ms=1,
        )  # fmt: skip
        exchange.received(w.encode_frame(hello))
        while (output := exchange.next_output()) is not None:
            exchange.wrote(len(output))
    try:
        exchange.received(data[1:])
    except (ProtocolError, RequestError) as error:
        exchange.fail_all(error)
    if errand.is_done:
        with contextlib.suppress(SnapdError):
            errand.outcome()
    if len(exchange.ended) > 1_024 or exchange.in_flight > 1:
        raise Finding("what the daemon sends unasked is not bounded")


def log_lines(data: bytes) -> None:
    """Whoever reads a log: the proof, and what takes older forms too."""
    proof = Proof()
    for number, raw in enumerate(data.split(b"\n"), 1):
        line = decode_line(raw)
        if isinstance(line, Line):
            proof.feed(line, Where("fuzz", number))
        read_slowly(raw)
    proof.books()
    proof.finish()


def log_files(data: bytes) -> None:
    """A file that is called a log: the next start of the daemon, and ``snapd forensics``."""
    with tempfile.TemporaryDirectory(prefix="snapd-fuzz-") as directory:
        path = Path(directory) / "d-to-p-sync.jsonl"
        path.write_bytes(data)
        former = read_open_attempts(str(path), 1)
        if former is not None:
            for record in closing_records(former, 1):
                msgspec.json.encode(record)
        try:
            with LogInput([str(path)]) as log:
                lines = [line for block in log.blocks() for line in block.lines]
        except LogUnreadable:
            return
        if sum(map(len, lines)) > max(64 * len(data), 1) and data[:2] != b"\x1f\x8b":
            raise Finding("more came out of the file than was in it")


def configuration(data: bytes) -> None:
    """A TOML file, and an address: a clear error, or a configuration that is fit."""
    text = data.decode(errors="surrogateescape")
    with contextlib.suppress(ConfigError):
        parse_address("tls://" + text)
    with tempfile.TemporaryDirectory(prefix="snapd-fuzz-") as directory:
        path = Path(directory) / "snapd.toml"
        path.write_bytes(data)
        try:
            loaded = load(path, {}, {})
        except (ConfigError, StartupError):
            return
        loaded.config.check()


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "requests": requests,
    "answers": answers,
    "log-lines": log_lines,
    "log-files": log_files,
    "configuration": configuration,
}

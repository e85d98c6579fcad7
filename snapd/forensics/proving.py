"""From the files of a log to its proof: every line once, in order.

Source: design, sections 6 and 12.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from snapd.errors import SnapdError
from snapd.eventlog import Header, Line, UnknownLine, decode_line
from snapd.forensics.garbage import uncollected
from snapd.forensics.lines import LogInput, Progress, Source
from snapd.forensics.proof import Proof, ProofReport, Where

# Of lines that a later file may repeat a hash is kept, of 8 bytes.
HASHES_MAX: Final = 8_000_000


class NothingToProve(SnapdError):
    """No line of the log was written by snapd."""


class Proved(NamedTuple):
    """What was proved.

    Attributes:
        report: violations, and what was counted.
        copies: lines left out, as an earlier file has the same.
    """

    report: ProofReport
    copies: int


def prove_log(log: LogInput, progress: Progress | None = None) -> Proved:
    """Check all lines of a log against the rules.

    A file that begins with what the file before it ends with, such as a copy, is no fault of the daemon: such
    lines are left out and counted if they read alike, and are a violation if not. A line that comes twice in
    one file is a violation.

    Raises:
        NothingToProve: no line is snapd's.
        LogUnreadable: a file cannot be read.
    """
    proof = Proof()
    earlier = _EarlierFiles(log.sources)
    copies = 0
    is_ours = False
    with uncollected():
        for block in log.blocks(progress):
            index = block.source_index
            earlier.begin(index)
            path = log.sources[index].path
            for number, raw in enumerate(block.lines, block.first_line_no):
                if not raw:
                    continue
                line = decode_line(raw)
                where = Where(path, number)
                if isinstance(line, Line | UnknownLine):
                    is_ours = True
                    if earlier.go_beyond(line.header):
                        known = earlier.find(line.header)
                        is_same = known is not None and known[0] == hash(raw)
                        copies += is_same
                        proof.take_copy(line.header, known[1] if known else None, where, is_same=is_same)
                        continue
                    earlier.take(line.header, raw, where)
                proof.feed(line, where)
            if block.damage:
                proof.take_damage(path, block.damage)
    if not is_ours:
        raise NothingToProve(
            "nothing can be proved: no line of this log was written by snapd. An older log says how attempts "
            "ended, and nothing of extents, leases and times"
        )
    return Proved(proof.finish(), copies)


class _Span:
    """Lines of one epoch that follow each other in a file and in number, by their hashes."""

    __slots__ = ("first_seq", "hashes", "where")

    def __init__(self, first_seq: int, where: Where) -> None:
        self.first_seq = first_seq
        self.where = where
        self.hashes = array("q")

    def follows(self, seq: int, where: Where) -> bool:
        """Whether a line is the next one."""
        shift = len(self.hashes)
        return (seq, where) == (
            self.first_seq + shift, Where(self.where.file, self.where.line_no + shift),
        )  # fmt: skip


class _EarlierFiles:
    """How far earlier files go, and what stands in those lines that a later file may repeat.

    Args:
        sources: the files, in order.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._index = 0
        self._last_seq: dict[str, int] = {}  # of earlier files
        self._here: dict[str, int] = {}
        self._spans: dict[str, list[_Span]] = {}
        self._hashes = 0
        self._is_repeated = False
        self._starts = self._starts_after(0)

    def begin(self, index: int) -> None:
        """Go on with the lines of a file, which may be the same as before."""
        if index == self._index:
            return
        self._index = index
        self._last_seq.update(self._here)
        self._here.clear()
        self._is_repeated = False
        self._starts = self._starts_after(index)

    def _starts_after(self, index: int) -> dict[str, int] | None:
        """Return where later files begin, the least number by epoch; None: one may begin anywhere."""
        starts: dict[str, int] = {}
        for source in self._sources[index + 1 :]:
            if source.first is None:
                return None
            epoch, seq = source.first.epoch, source.first.seq
            starts[epoch] = min(seq, starts.get(epoch, seq))
        return starts

    def go_beyond(self, header: Header) -> bool:
        """Whether an earlier file has later lines of the epoch, or this one."""
        return header.seq <= self._last_seq.get(header.epoch, 0)

    def find(self, header: Header) -> tuple[int, Where] | None:
        """Return hash and place of the line that has the same number; None: not known."""
        spans = self._spans.get(header.epoch, [])
        place = bisect_right(spans, header.seq, key=lambda span: span.first_seq) - 1
        if place < 0:
            return None
        span = spans[place]
        shift = header.seq - span.first_seq
        if shift >= len(span.hashes):
            return None
        return span.hashes[shift], Where(span.where.file, span.where.line_no + shift)

    def take(self, header: Header, raw: bytes, where: Where) -> None:
        """Take a line that no earlier file goes beyond."""
        epoch, seq = header.epoch, header.seq
        former = self._here.get(epoch, 0)
        if seq <= former:
            return  # It comes twice in this file, and the first one counts.
        self._here[epoch] = seq
        if not self._is_repeated:
            # What a later file repeats lies from its first line on.
            self._is_repeated = self._starts is None or seq >= self._starts.get(epoch, seq + 1)
        if not self._is_repeated or self._hashes >= HASHES_MAX:
            return
        spans = self._spans.setdefault(epoch, [])
        if not spans or not spans[-1].follows(seq, where):
            spans.append(_Span(seq, where))
        spans[-1].hashes.append(hash(raw))
        self._hashes += 1

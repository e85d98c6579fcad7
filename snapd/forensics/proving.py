"""From the files of a log to its proof: every line once, in order.

Source: design, sections 6 and 12.
"""

from typing import NamedTuple

from snapd.errors import SnapdError
from snapd.eventlog import Line, UnknownLine, decode_line
from snapd.forensics.garbage import uncollected
from snapd.forensics.lines import LogInput, Progress
from snapd.forensics.proof import Proof, ProofReport, Where


class NothingToProve(SnapdError):
    """No line of the log was written by snapd."""


class Proved(NamedTuple):
    """What was proved.

    Attributes:
        report: violations, and what was counted.
        copies: lines left out, as an earlier file has them too.
    """

    report: ProofReport
    copies: int


def prove_log(log: LogInput, progress: Progress | None = None) -> Proved:
    """Check all lines of a log against the rules.

    A file that begins with what the file before it ends with, such as a copy, is no fault of the daemon: such
    lines are left out and counted. A line that comes twice in one file is a violation.

    Raises:
        NothingToProve: no line is snapd's.
        LogUnreadable: a file cannot be read.
    """
    proof = Proof()
    copies = 0
    is_ours = False
    last_seq: dict[str, int] = {}  # of earlier files
    here: dict[str, int] = {}
    index = 0
    with uncollected():
        for block in log.blocks(progress):
            if block.source_index != index:
                index = block.source_index
                for epoch, seq in here.items():
                    last_seq[epoch] = max(seq, last_seq.get(epoch, 0))
                here.clear()
            path = log.sources[index].path
            for number, raw in enumerate(block.lines, block.first_line_no):
                if not raw:
                    continue
                line = decode_line(raw)
                if isinstance(line, Line | UnknownLine):
                    is_ours = True
                    epoch, seq = line.header.epoch, line.header.seq
                    if seq <= last_seq.get(epoch, 0):
                        copies += 1
                        continue
                    here[epoch] = seq
                proof.feed(line, Where(path, number))
    if not is_ours:
        raise NothingToProve(
            "nothing can be proved: no line of this log was written by snapd. An older log says how attempts "
            "ended, and nothing of extents, leases and times"
        )
    return Proved(proof.finish(), copies)

"""What is left of a run: its log on file, which is proved whole, and a digest of it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from snapd.eventlog import decode_line
from snapd.forensics.proof import Proof, ProofReport, Where
from tools.simulation.failure import Broken


def prove_files(paths: Sequence[Path], grace_ms: int, attempts: int) -> ProofReport:
    """Prove the whole log, as it is on file, fed a line at a time.

    Args:
        paths: its files, oldest first.
        grace_ms: how late a deadline may be seen to.
        attempts: that truly were.

    Raises:
        Broken: it breaks a rule.
    """
    proof = Proof(overdue_grace_ms=grace_ms)
    for path in paths:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw != b"\n":
                    proof.feed(decode_line(raw), Where(path.name, number))
    report = proof.finish()
    if not report.is_good:
        violation = report.violations[0]
        lines = ", ".join(str(line) for line in violation.lines)
        raise Broken(f"file-proof/{violation.kind}", f"{violation.message} ({lines})")
    books = proof.books()
    if books.open or books.leases or any(books.extents.values()):
        raise Broken("file-proof/books", "by the log something is open or held at the end")
    has_lost = report.events_dropped or report.torn_lines or report.crashed_epochs
    if not (report.is_whole or has_lost):
        raise Broken("file-proof/whole", "the log is not whole, and nothing was lost")
    if not has_lost and report.attempts != attempts:
        raise Broken("file-proof/attempts", f"the log has {report.attempts} attempts, and {attempts} were")
    return report


def digest_files(paths: Sequence[Path], rest: object) -> tuple[str, int]:
    """Return a digest of the log to the byte, with *rest*, and how many lines it has."""
    digest = hashlib.blake2b(digest_size=16)
    lines = 0
    for path in paths:
        data = path.read_bytes()
        digest.update(data)
        lines += data.count(b"\n")
    digest.update(repr(rest).encode())
    return digest.hexdigest(), lines

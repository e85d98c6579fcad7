"""The page on reasons: what each means, who sees it, where, and what to do about it.

What it means is ``REASON_HELP``; in which states and records it stands is looked up in the rules by which
logs are proved. Who sees it and what to do, step by step, is written down in the file beside this one.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from snapd.core.fsm import NEVER_KEPT, VOTE_NO_REASONS
from snapd.errors import ERROR_BY_REASON, REASON_HELP, Reason
from snapd.forensics.rules import ABORTED, INGESTED, LEASE_ENDS, MAY_FOLLOW, REFUSALS
from tools.doc_structs import anchor, markdown, sentence, table

R = Reason

SOURCE: Final = Path(__file__).with_suffix(".toml")
_BOTH_ENDS: Final = (
    "whoever prepared, started or committed it and whoever holds a lease, by a `SessionEnded` push"
)
# Texts that the file names.
_TEXTS: Final = {
    "preparer": "D, in the reply to its prepare (`PushResult.reason`)",
    "both_ends": _BOTH_ENDS,
    "d": f"D (`PushResult.reason`), and {_BOTH_ENDS}",
    "p": f"P (`SnapshotFinalizeIngestReqOutput.reason`), and {_BOTH_ENDS}",
    "asker": "whoever asked, in the reply",
}


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is written down of a reason.

    Attributes:
        part: the heading under which it stands.
        seen: who is told, and how.
        steps: what to do, in order.
    """

    part: str
    seen: str
    steps: tuple[str, ...]


# With which a request may be answered by an `ErrorRep`; the refusal of a prepare has a reply of its own.
IN_ERROR_REPLIES: Final = frozenset({
    R.PARTIAL_TRANSFER, R.LAYOUT_MISMATCH, R.LIMIT_REACHED, R.LEASE_EXPIRED, R.STALE_HANDLE, R.WRONG_STATE,
    R.WRONG_RANK, R.INVALID_REQUEST, R.UNKNOWN_TYPE, R.PERMISSION_DENIED, R.INTERNAL_ERROR,
})  # fmt: skip

_HEAD: Final = """\
# Reasons

<!-- Written by tools/make_docs.py from snapd/errors.py and tools/doc_reasons.toml: change those, then run \
`make docs`. -->

Every attempt ends once, with a reason, and whatever is refused is refused with one.
The same words stand in replies, in `d-to-p-sync.jsonl`, in metrics, and in what the commands print.

```sh
snapd status                                                  # outcomes by reason, each with what to do
snapd show ID                                                 # why one attempt ended
snapd watch                                                   # as it happens
snapd forensics /var/log/kv-snapd                             # over a log, by hour, session and D
snapd forensics /var/log/kv-snapd --session chat-17           # one session's story
```
"""


def told() -> dict[str, Told]:
    """Return what is written down, by reason, in the order in which it stands on the page."""
    return msgspec.convert(tomllib.loads(SOURCE.read_text(encoding="utf-8")), dict[str, Told])


def states_of(reason: Reason) -> list[str]:
    """Return the states in which an attempt may end by a reason."""
    return [
        before
        for (before, after), reasons in MAY_FOLLOW.items()
        if after in (INGESTED, ABORTED) and reason in reasons
    ]


def records_of(reason: Reason) -> list[str]:
    """Return the kinds of lines in which a reason may stand."""
    kinds = ["sync.refused"] if reason in REFUSALS else []
    kinds += ["session.transition"] if states_of(reason) or reason is R.DAEMON_RESTARTED else []
    kinds += ["lease.ended"] if reason in LEASE_ENDS else []
    if reason in REFUSALS or states_of(reason) or reason is R.DAEMON_RESTARTED:
        kinds.append("sync.outcome")
    return kinds + (["daemon.stopped"] if reason is R.INTERNAL_ERROR else [])


def _where(reason: Reason) -> Iterator[tuple[str, str]]:
    """Yield what is looked up: a name, and what it is."""
    if reason in REFUSALS:
        yield "state", "none: no attempt begins"
    elif states := states_of(reason):
        last = INGESTED if reason is R.OK else ABORTED
        yield "state", f"{', '.join(states)}; it ends {last}"
    elif reason is R.DAEMON_RESTARTED:
        yield "state", f"whatever it was when the daemon died; the next start writes {ABORTED}"
    elif reason in LEASE_ENDS:
        yield "state", "READY, and it stays so unless something else ends it"
    elif reason is R.INTERNAL_ERROR:
        yield "state", "not known; what is open stays open in the log, and the next start closes it"
    elif reason is not R.ALLOC_FAILED:
        yield "state", "stays as it is"
    kinds = [f"[{kind}](reference-log.md#{anchor(kind)})" for kind in records_of(reason)]
    without = "those of older designs" if reason is R.ALLOC_FAILED else "none"
    yield "lines of the log", ", ".join(kinds) if kinds else without
    if reason in IN_ERROR_REPLIES:
        yield "reply", "[ErrorRep](reference-wire.md#errorrep)"
    if reason in VOTE_NO_REASONS:
        kept = "always ends the attempt" if reason in NEVER_KEPT else "with `keep` the attempt stays READY"
        yield "vote", f"a no; {kept}"
    if error := ERROR_BY_REASON.get(reason):
        again = "may succeed later" if error.retryable else "the same request will not succeed"
        yield "in Python", f"`snapd.errors.{error.__name__}`; {again}"


def _entry(reason: Reason, what: Told) -> str:
    rows = [("seen by", what.seen.format(**_TEXTS)), *_where(reason)]
    steps = "\n".join(f"{number}. {markdown(step)}" for number, step in enumerate(what.steps, 1))
    parts = (f"### {reason}", sentence(REASON_HELP[reason]), table(("", ""), rows), "What to do:", steps)
    return "\n\n".join(parts)


def page() -> str:
    """Return the whole page."""
    parts, title = [_HEAD], ""
    for name, what in told().items():
        if what.part != title:
            title = what.part
            parts.append(f"## {title}")
        parts.append(_entry(Reason(name), what))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"

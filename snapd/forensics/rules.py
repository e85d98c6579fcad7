"""What may be in a log, written down a second time from the design.

The core decides by tables of its own; these were not made from them, so that a mistake there is seen here.

Source: design, sections 3, 4 and 6.
"""

from typing import Final

RESERVED: Final = "RESERVED"
TRANSFERRING: Final = "TRANSFERRING"
READY: Final = "READY"
INGESTED: Final = "INGESTED"
ABORTED: Final = "ABORTED"
FINAL: Final = frozenset({INGESTED, ABORTED})

OK: Final = "ok"
RESTARTED: Final = "daemon-restarted"

# (from, to) and the reasons that lead there. An attempt begins from "".
MAY_FOLLOW: Final[dict[tuple[str, str], frozenset[str]]] = {
    ("", RESERVED): frozenset({OK}),
    (RESERVED, TRANSFERRING): frozenset({OK}),
    (TRANSFERRING, READY): frozenset({OK}),
    (READY, INGESTED): frozenset({OK}),
    (RESERVED, ABORTED): frozenset({
        "partial-transfer", "transfer-failed", "session-not-resident", "client-abort", "reserve-timeout",
        "superseded", "writer-gone", "daemon-stopped",
    }),
    (TRANSFERRING, ABORTED): frozenset({
        "partial-transfer", "transfer-failed", "session-not-resident", "client-abort", "transfer-timeout",
        "superseded", "writer-gone", "daemon-stopped",
    }),
    (READY, ABORTED): frozenset({
        "alloc-failed-on-finalize", "checksum-mismatch", "token-mismatch", "prefix-not-resident",
        "ingest-failed", "evicted", "ready-expired", "client-abort", "superseded", "daemon-stopped",
    }),
}  # fmt: skip
# These name the attempt that took over.
NAMES_NEWER: Final = frozenset({"superseded", "evicted"})

# Why a prepare may be refused.
REFUSALS: Final = frozenset({
    "snapshot-buf-full", "too-large", "layout-mismatch", "limit-reached", "draining", "invalid-request",
})  # fmt: skip

# Why a rank's lease may end. An eviction, an expiry, an abort and a newer attempt wait for the readers.
LEASE_ENDS: Final = frozenset({
    OK, "alloc-failed-on-finalize", "checksum-mismatch", "token-mismatch", "prefix-not-resident",
    "ingest-failed", "lease-expired", "round-aborted", "daemon-stopped",
})  # fmt: skip
# A lease that ends otherwise has ended by a vote, and a vote counts before the deadline only.
ENDS_WITHOUT_VOTE: Final = frozenset({"lease-expired", "round-aborted", "daemon-stopped"})

# An attempt that ended so may have come with drain proof.
SAYS_DRAINED: Final = frozenset({"client-abort", "transfer-failed", "session-not-resident"})
# What may end a quarantine before its time, by what it is for.
ENDS_EARLY: Final[dict[str, frozenset[str]]] = {
    "undrained": frozenset({"drained", "writer-gone"}),
    "leased": frozenset({"lease-ended"}),
    "corrupt": frozenset(),
}
# And what may end it once that has passed. A lease ends by itself then.
ENDS_IN_TIME: Final[dict[str, str]] = {"undrained": "time", "leased": "lease-ended", "corrupt": "time"}


def why_live_release_is_wrong(why: str, state: str, reason: str, *, was_started: bool) -> str:
    """Return what is wrong with giving live bytes back at once; empty if nothing is.

    Args:
        why: the proof in the record.
        state: of the attempt: how it ended.
        reason: why it ended.
        was_started: it has been TRANSFERRING, so that a rank may have committed.
    """
    if state not in FINAL:
        return f"the attempt is {state} and keeps its bytes"
    if why == "final":
        return "" if was_started else "nothing was ever committed"
    if why == "drained":
        return "" if reason in SAYS_DRAINED else f"an end by {reason} brings no drain proof"
    if why == "writer-gone":
        return "" if reason == "writer-gone" else f"an end by {reason} is not the end of the writer"
    return f"{why} is no reason to free live bytes"


def why_quarantine_is_wrong(why: str, state: str, reason: str) -> str:
    """Return what is wrong with quarantining live bytes; empty if nothing is."""
    if state not in FINAL:
        return f"the attempt is {state} and keeps its bytes"
    if state == INGESTED and why != "undrained":
        return f"the attempt is {INGESTED}: nobody reads it, and its bytes were right"
    if why == "corrupt" and reason != "checksum-mismatch":
        return f"the attempt ended by {reason}, and no checksum was wrong"
    return ""

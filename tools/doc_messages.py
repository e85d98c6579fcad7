"""The wire reference and the log reference, from the structs in snapd/wire.py and snapd/core/records.py."""

import typing
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from snapd import wire as w
from snapd.eventlog import LINE_TYPES, Header
from tools.doc_structs import attributes_of, field_rows, structs_in, summary_of, table, type_words

WRITTEN: Final = "<!-- Written by tools/make_docs.py from {source}: change that, then run `make docs`. -->"
REQUESTS: Final[tuple[type[w.Request], ...]] = typing.get_args(w.AnyRequest)
REPLIES: Final[tuple[type[w.Reply], ...]] = typing.get_args(w.AnyReply)
PUSHES: Final[tuple[type[w.Push], ...]] = typing.get_args(w.AnyPush)
FINALIZE: Final = (w.SnapshotFinalizeIngestReqInput, w.SnapshotFinalizeIngestReqOutput)

# What answers each request, beside `ErrorRep`.
ANSWERS: Final[dict[type[w.Request], type[w.Reply]]] = {
    w.HelloReq: w.HelloRep,
    w.PingReq: w.PingRep,
    w.DeclareLayoutReq: w.DeclareLayoutRep,
    w.SnapshotPrepareReceiveReqInput: w.SnapshotPrepareReceiveReqOutput,
    w.TransferStartedReq: w.AckRep,
    w.CommitReq: w.AckRep,
    w.TransferFailedReq: w.AckRep,
    w.AbortReq: w.AckRep,
    w.DrainedReq: w.AckRep,
    w.BeginIngestReq: w.BeginIngestRep,
    w.VoteReq: w.VoteRep,
    w.LookupReq: w.LookupRep,
    w.MapBufferReq: w.MapBufferRep,
    w.GetReq: w.GetRep,
    w.ListReq: w.ListRep,
    w.StatsReq: w.StatsRep,
    w.WatchReq: w.AckRep,
    w.DrainReq: w.AckRep,
}

# What fields mean of which the docstrings say nothing, by `Struct.field` or by `field`.
COMMON: Final[dict[str, str]] = {
    "abort_wanted": "why it ends as soon as nobody reads it; empty: nothing is wanted",
    "alignment_bytes": "every plane starts on a multiple of it",
    "arenas": "one a rank",
    "at_ns": "the daemon's monotonic clock; comparable inside an epoch only",
    "attempts": "attempts that got a slab, in this epoch",
    "attempts_ok": "those that ended INGESTED",
    "bytes": "payload bytes, without padding; of all ranks, where no rank is named",
    "bytes_committed": "payload bytes that D committed",
    "bytes_ingested": "payload bytes that P took into its tree",
    "bytes_written": "their bytes",
    "cache_salt": "of the cache, as the engine knows it",
    "capacity_bytes": "its size: free, live and quarantined bytes together",
    "cause_id": "the request behind it; one number runs through all lines that it caused; 0: nobody asked",
    "checksums": "a pair of 64-bit sums a plane, shape [num_planes]",
    "closed_attempts": "attempts of former epochs that this start closed with `daemon-restarted`",
    "commit": "insert; false: do not",
    "connections": "that are open",
    "core": "counters and books",
    "count": "how many",
    "created_ns": "when it was prepared, by the daemon's clock",
    "deadline_ns": "when the state's deadline passes; 0: it has none",
    "detail": "the same, for a person",
    "device": "`cpu` or `cuda:N`, as the daemon counts",
    "devices": "RDMA devices, as configured",
    "drained": "no write can still land",
    "draining": "take no new attempts; false: take them again",
    "dropped": "records that got no line",
    "duration_ms": "how long it lasted, in ms",
    "ended_history": "ended attempts that are remembered, for repeats and `snapd show`",
    "epoch": "this life of the daemon",
    "evictable_bytes": "live bytes that may make room for others",
    "extents": "what it holds, `[offset_bytes, size_bytes]` each",
    "former_epoch": "the epoch before, whose open attempts were closed",
    "frame_bytes_max": "a longer frame closes its connection",
    "free_bytes": "bytes in holes",
    "from_state": "the state that it left; empty: a new attempt",
    "id": "chosen by the client; the reply has the same",
    "is_committed": "every byte of it is there",
    "is_draining": "no new attempts are taken",
    "is_leased": "a rank reads it, or has voted and waits",
    "keep": "of a no: leave the snapshot READY for another round",
    "kv_events": "what is published for routers; null: nothing",
    "largest_hole_bytes": "bytes of the largest hole",
    "last_error": "what the last of them said; empty: there was none",
    "layout": "the planes of the rank's shard",
    "layout_fingerprint": "digest of layout and namespace",
    "layouts": "layouts that are declared",
    "lease_deadline_ns": "when the lease is over; 0: none is held",
    "lease_id": "names the lease; 0: none",
    "lease_ms": "how long a lease lasts",
    "limits": "configured bounds, by setting",
    "lines_written": "lines on file",
    "live_bytes": "bytes that attempts own",
    "log": "how the event log fares",
    "lora": "adapter, as the engine knows it",
    "matched_tokens": "tokens of the prompt, from 0 on, that it and what comes before it cover",
    "medium": "as configured",
    "messages_absorbed": "messages that came again or too late, and changed nothing",
    "metadata_server": "as configured",
    "model": "model, as the engine knows it",
    "mooncake": "how Mooncake is used; null: another transport",
    "notify": "as configured",
    "now_ns": "the daemon's clock",
    "num_holes": "number of holes",
    "num_ranks": "ranks that have a shard",
    "num_tokens": "tokens of the snapshot",
    "ok": "it went well",
    "open_sessions": "attempts that have not ended",
    "outcomes_by_reason": "ended attempts, by reason",
    "page_keys": "one a whole page from token 0 on",
    "page_keys_held": "page keys that open attempts hold",
    "page_keys_max": "page keys in one request",
    "path": "of the file",
    "pid": "the daemon's process",
    "protocol": "version of the control protocol",
    "quarantined_bytes": "bytes that nobody owns and that may not be reused yet",
    "quarantined_shards": "shards whose bytes are in quarantine",
    "queued_bytes": "their bytes",
    "queued_lines": "lines that wait for the disk",
    "rank": "whose arena",
    "ranks": "ranks that have a shard",
    "reason": "why",
    "requests_in_flight_max": "requests of one connection that may be under way",
    "requests_refused": "requests that were answered with an error",
    "requests_waiting": "votes that wait for other ranks",
    "resident_hint_tokens": "what P is believed to hold of the session",
    "retry_after_ms": "when to ask again; 0: not for this reason",
    "rotations": "files begun because the one before was full",
    "round": "number of the ingest round, from 1",
    "segment_name": "under which its engine is known",
    "session": "the attempt",
    "session_history": "sessions whose last ingested range is remembered",
    "session_id": "the caller's name for the conversation",
    "sessions": "the attempts of this page",
    "sessions_by_state": "open attempts, by state",
    "shards": "one a rank",
    "size_bytes": "size of the arena",
    "slab_handle": "the attempt",
    "spent_ms": "time in each state that was left",
    "state": "where the attempt stands now",
    "state_since_ns": "when the present state began",
    "tenant": "whose sessions they are",
    "timers": "deadlines that are armed",
    "to_state": "the state that it entered",
    "token_ids": "of the whole prompt, from the session's first token on",
    "token_start": "the first of these tokens in the session",
    "topic": "as configured",
    "total": "how many match, on all pages",
    "transport": "`shm` or `mooncake`",
    "until_ns": "when it is over, by the daemon's clock",
    "uptime_ms": "since the start",
    "version": "of the daemon",
    "watchers": "connections that watch",
    "weight_version": "version of the weights",
    "why": "what stood in the way",
    "write_errors": "system calls that failed, retries included",
    "BeginIngestReq.layout_fingerprint": "of the reader's kv_pool; another than the snapshot's is refused",
    "CommitReq.num_tokens": "tokens written",
    "DeclareLayoutReq.rank": "whose kv_pool it is",
    "DrainedReq.rank": "whose shard; null: every one",
    "LeaseEnded.duration_ms": "for how long it was held",
    "LeaseEnded.ok": "the decision was commit",
    "LookupRep.slab_handle": "the attempt; 0: nothing was found",
    "LookupReq.session_id": "ask for this session's; empty: by page keys",
    "MooncakeStatistics.protocol": "`tcp`, `rdma` or `nvlink_intra`",
    "Statistics.page_keys": "different page keys by which snapshots are found",
    "SyncOutcome.duration_ms": "from the prepare to the end",
    "SyncOutcome.former_epoch": "the attempt belongs to that epoch, which ended without closing it",
    "SyncOutcome.ok": "P has the snapshot in its tree",
    "SyncRefused.num_tokens": "tokens that were asked for",
    "VoteReq.ok": "copied, and the checksums are right",
    "VoteReq.reason": "of a no",
    "WatchReq.session_id": "only this session's; empty: all",
    "WatchTransition.duration_ms": "time spent in `from_state`",
}

_WIRE_HEAD: Final = """\
# Wire reference

{written}

Every message of control protocol v{version}, as the daemon and the clients speak it.
`snapd.client` speaks it for Python programs; this page is for others, and for reading a trace.

## Frames

* The socket is a unix stream socket.
* A frame is {length_bytes} bytes of length, little-endian, and then so many bytes of [msgpack](https://msgpack.org/).
* A message is a map; its key `type` names one of the messages below.
* Every request has an `id` of the client's choosing.
  Its reply has the same one, and replies may come out of order.
  What the daemon sends unasked has no `id`.
* Fields with a default may be left out, and are left out where they have it.
  Unknown fields are ignored, so either side may be newer.
* An unknown `type` is answered with [ErrorRep](#errorrep) and `unknown-type`.
  A frame that is longer than `frame_bytes_max`, or that is no message, is answered with an ErrorRep of `id` \
0, and the connection is closed.
* Any request may be answered with [ErrorRep](#errorrep) instead of its own reply.

In the tables, an empty default means that the field is always there.
As JSON Schema: [request](../schemas/request.schema.json), [reply](../schemas/reply.schema.json), \
[push](../schemas/push.schema.json), [finalize](../schemas/finalize.schema.json), \
[notification](../schemas/notification.schema.json).
"""

_FINALIZE_HEAD: Final = """\
## Between an orchestrator and P's worker

The daemon does not see these two; the adapter in P's worker answers with `Ingester.finalize_ingest`.
"""

_NOTIFICATION_HEAD: Final = """\
## Through the transport

JSON, as the text of Mooncake's notification; see \
[transports.md](transports.md#a-d-without-a-control-connection).
"""

_LOG_HEAD: Final = """\
# Log reference

{written}

Every kind of line in `d-to-p-sync.jsonl`, and every field.
A line is one JSON object; the file is append only, rotated by size, and opened anew on SIGHUP.
[forensics.md](forensics.md) reads it; the rules that a whole log keeps are in \
[forensics-proof.md](forensics-proof.md).

* Fields with a default are left out where they have it; an empty default means that the field is always \
there.
* A reader passes over fields and kinds that it does not know.
* Times in `_ns` are the daemon's monotonic clock; only `ts` is the wall clock.
* `bytes` is payload; extents hold the padding between planes, too.
* The last line may be torn when the daemon or the machine has died.

As JSON Schema: [log-line](../schemas/log-line.schema.json).

## What every line starts with
"""

_LOG_COURSE: Final = """\
Every line may have `cause_id`, too: the request behind it.
One number runs through all lines that a request caused; when it is not there, nobody asked.

## Which lines an attempt writes

| what happens | lines |
|---|---|
| a prepare is granted | `session.transition` to RESERVED, `slab.allocated` a rank |
| a prepare is refused | `sync.refused`, `sync.outcome` |
| D starts, and commits | `session.transition` to TRANSFERRING, then to READY |
| ranks read | `lease.granted` and later `lease.ended`, a rank each |
| the attempt ends | `session.transition` to INGESTED or ABORTED, `slab.released` or `slab.quarantined` a \
rank, `sync.outcome` |
| a quarantine ends | `slab.released` |
"""


def messages() -> tuple[type[msgspec.Struct], ...]:
    """Return every message."""
    return (*REQUESTS, *REPLIES, *PUSHES, *FINALIZE, w.TransferNotification)


def structures(roots: Iterable[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    """Return the structs that stand inside of others, each once, in the order in which they come up."""
    found: dict[type[msgspec.Struct], None] = {}
    queue = list(roots)
    while queue:
        for field in msgspec.structs.fields(queue.pop(0)):
            fresh = [struct for struct in structs_in(field.type) if struct not in found]
            found |= dict.fromkeys(fresh)
            queue += fresh
    return list(found)


def _fields(struct: type[msgspec.Struct], common: Mapping[str, str], leave_out: frozenset[str]) -> str:
    rows = field_rows(struct, common, leave_out)
    return table(("field", "type", "default", "meaning"), rows) if rows else "No fields of its own."


def _section(struct: type[msgspec.Struct], name: str, notes: Iterable[str] = (), **fields: Any) -> str:
    return "\n\n".join((f"### {name}", summary_of(struct), *notes, _fields(struct, COMMON, **fields)))


def _request(struct: type[w.Request]) -> str:
    answer = ANSWERS[struct].__name__
    notes = [f"Answered with [{answer}](#{answer.lower()})."]
    if not struct.IS_REPEATABLE:
        notes.append(
            "When no reply came, the client library does not send it again by itself: a second one begins "
            "another attempt, which supersedes the first."
        )
    return _section(struct, struct.__name__, notes, leave_out=frozenset({"id"}))


def wire_page() -> str:
    """Return the whole page on the control protocol."""
    head = _WIRE_HEAD.format(
        written=WRITTEN.format(source="snapd/wire.py"),
        version=w.PROTOCOL_VERSION,
        length_bytes=w.LENGTH_BYTES,
    )
    no_id = frozenset({"id"})
    nothing: frozenset[str] = frozenset()
    parts = [
        head,
        "## Requests\n\nEvery request has `id` beside these fields.",
        *map(_request, REQUESTS),
        "## Replies\n\nEvery reply has the request's `id` beside these fields.",
        *(_section(struct, struct.__name__, leave_out=no_id) for struct in REPLIES),
        "## What the daemon sends unasked",
        *(_section(struct, struct.__name__, leave_out=nothing) for struct in PUSHES),
        _FINALIZE_HEAD,
        *(_section(struct, struct.__name__, leave_out=nothing) for struct in FINALIZE),
        _NOTIFICATION_HEAD,
        _section(w.TransferNotification, "TransferNotification", leave_out=nothing),
        "## Structures",
        *(_section(struct, struct.__name__, leave_out=nothing) for struct in structures(messages())),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def log_page() -> str:
    """Return the whole page on the event log."""
    said = attributes_of(Header)
    header = [(f"`{field.name}`", type_words(field.type), said[field.name].capitalize() + ".")
              for field in msgspec.structs.fields(Header)]  # fmt: skip
    nothing: frozenset[str] = frozenset()
    parts = [
        _LOG_HEAD.format(written=WRITTEN.format(source="snapd/core/records.py")),
        table(("field", "type", "meaning"), header),
        _LOG_COURSE,
        "## Kinds of lines",
        *(
            _section(struct, event, leave_out=frozenset({"at_ns", "cause_id"}))
            for event, struct in LINE_TYPES.items()
        ),
        "## Structures",
        *(_section(struct, struct.__name__, leave_out=nothing) for struct in structures(LINE_TYPES.values())),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"

"""Bad input through the real socket: a clear answer, or only that connection is closed, and exact books.

Every test ends with the same checks (``raw_client.staged``): another connection is served, free + live +
quarantined = capacity, the log has one outcome for every attempt and refusal and shows the same map of the
arenas, and when the deadlines have passed, everything is free.
"""

import contextlib
import random
import select
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from raw_client import (
    LAYOUT,
    NUM_PLANES,
    LogFollower,
    RawClient,
    Stage,
    frame,
    frame_of,
    other_layout,
    outcomes,
    rss_bytes,
    running,
    staged,
    wait_for,
)

from snapd import wire as w
from snapd.core.events import State
from snapd.errors import Reason
from snapd.layout import Layout, Namespace
from snapd.units import MIB

FRAME_TIMEOUT_MS = 1_000
HASTY = {
    "ranks": 2, "reserve_timeout_ms": 2_000, "transfer_timeout_ms": 2_000, "lease_ms": 1_500,
    "ready_ttl_ms": 2_500, "quarantine_ms": 2_000, "frame_timeout_ms": FRAME_TIMEOUT_MS, "layouts_max": 8,
}  # fmt: skip
I64_MIN, I64_MAX, U64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
HANDLE_REQUESTS: dict[type[w.HandleRequest], dict[str, Any]] = {
    w.TransferStartedReq: {},
    w.CommitReq: {
        "rank": 0, "num_bytes": 8 * LAYOUT.token_bytes, "num_tokens": 8, "checksums": ((1, 2),) * NUM_PLANES,
    },
    w.TransferFailedReq: {"drained": True},
    w.AbortReq: {"drained": True},
    w.DrainedReq: {},
    w.BeginIngestReq: {"rank": 0, "layout_fingerprint": "f"},
    w.VoteReq: {"rank": 0, "lease_id": 1, "ok": True},
    w.GetReq: {},
}  # fmt: skip


@pytest.fixture(scope="module")
def hasty() -> Iterator[tuple[Any, LogFollower]]:
    """A daemon with short deadlines, for all tests of this file: none of them may do it any harm."""
    with running(**HASTY) as daemon:
        yield daemon, LogFollower(daemon.log_path)


@pytest.fixture
def stage(hasty: tuple[Any, LogFollower]) -> Iterator[Stage]:
    with staged(*hasty) as stage:
        yield stage


@pytest.fixture
def client(stage: Stage) -> RawClient:
    return stage.connect()


def assert_refused_and_closed(client: RawClient, detail: str) -> None:
    """The last thing that comes is the answer to no request in particular, and then the end."""
    *_, answer = client.until_closed()
    assert isinstance(answer, w.ErrorRep)
    assert (answer.id, answer.reason) == (0, Reason.INVALID_REQUEST)
    assert detail in answer.detail


# --- bytes that are no frames


@pytest.mark.parametrize("seed", range(5))
def test_garbage_bytes_close_that_connection(client: RawClient, seed: int) -> None:
    client.send(b"\xff\xff\xff\xff" + random.Random(seed).randbytes(4_000))
    assert_refused_and_closed(client, "a frame of 4294967295 bytes")


def test_a_request_of_another_protocol_closes_that_connection(client: RawClient) -> None:
    client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert_refused_and_closed(client, "a frame of 542393671 bytes")


def test_a_frame_announcing_4_gib_is_refused_from_its_length_alone(client: RawClient) -> None:
    client.send(b"\xff\xff\xff\xff")
    assert_refused_and_closed(client, "a frame of 4294967295 bytes")


def test_a_frame_announcing_one_byte_over_the_limit_is_refused(client: RawClient) -> None:
    client.send((4 * MIB + 1).to_bytes(4, "little"))
    assert_refused_and_closed(client, "a frame of 4194305 bytes; 1 to 4194304")


def test_a_frame_announcing_nothing_is_refused(client: RawClient) -> None:
    client.send(bytes(4))
    assert_refused_and_closed(client, "a frame of 0 bytes")


def test_requests_before_garbage_are_answered_however_the_stream_was_cut(client: RawClient) -> None:
    pings = b"".join(w.encode_frame(w.PingReq(id=number)) for number in range(1, 101))
    client.send(pings + bytes(4))
    *answers, last = client.until_closed()
    assert [answer.id for answer in answers if isinstance(answer, w.PingRep)] == list(range(1, 101))
    assert isinstance(last, w.ErrorRep) and "a frame of 0 bytes" in last.detail


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1", b"\x07", b"\x93\x01\x02\x03", b"\x91" * 200_000, b"\x81\xa4type", b"\xdf\xff\xff\xff\xff",
        b"\xa3abc",
    ],
    ids=["unused byte", "a number", "a list", "deep nesting", "cut short", "4 billion entries", "a string"],
)  # fmt: skip
def test_a_whole_frame_of_garbage_closes_that_connection(client: RawClient, payload: bytes) -> None:
    client.send(frame(payload))
    assert_refused_and_closed(client, "no message")


def test_deep_nesting_in_a_field_that_nobody_knows_closes_that_connection(client: RawClient) -> None:
    client.send(frame(b"\x83\xa4type\xa7PingReq\xa2id\x01\xa1x" + b"\x91" * 1_000_000 + b"\x00"))
    assert_refused_and_closed(client, "no message")


@pytest.mark.parametrize(
    "payload",
    [b"\x83\xa4type\xa8HelloReq\xa2id\x01\xa6client\xa2\xff\xfe", b"\x82\xa4type\xa2\xc3\x28\xa2id\x01"],
    ids=["in a value", "in the type"],
)
def test_invalid_utf_8_closes_that_connection(client: RawClient, payload: bytes) -> None:
    client.send(frame(payload))
    assert_refused_and_closed(client, "no message")


def test_whole_requests_before_garbage_are_answered_first(client: RawClient) -> None:
    client.send(w.PingReq(id=1))
    assert client.receive().id == 1
    client.send(w.encode_frame(w.PingReq(id=2)) + frame(b"\xc1") + w.encode_frame(w.PingReq(id=3)))
    first, last = client.until_closed()
    assert (first.id, last.id, last.reason) == (2, 0, Reason.INVALID_REQUEST)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 20], ids=lambda x: f"{x} bytes")
def test_half_a_frame_and_then_silence_closes_that_connection(client: RawClient, length: int) -> None:
    client.send(w.encode_frame(w.HelloReq(id=1, client="silent"))[:length])
    assert_refused_and_closed(client, f"a frame was not finished within {FRAME_TIMEOUT_MS} ms")


def test_a_byte_now_and_then_does_not_hold_a_frame_open(client: RawClient) -> None:
    client.send((1_000_000).to_bytes(4, "little"))
    while not select.select([client.sock], [], [], 0.02)[0]:
        with contextlib.suppress(BrokenPipeError):  # It was closed meanwhile: see below.
            client.send(b"\0")
    assert_refused_and_closed(client, "a frame was not finished")


def test_silence_between_frames_and_frames_that_end_in_time_are_no_offence(
    stage: Stage, client: RawClient
) -> None:
    unfinished = stage.connect()
    half = w.encode_frame(w.PingReq(id=1))
    client.send(half + half[:-1])
    assert client.receive().id == 1
    client.send(half[-1:])
    assert client.receive().id == 1
    unfinished.send(b"\x01")
    assert_refused_and_closed(unfinished, "not finished")
    assert client.ask(w.PingReq).epoch == stage.epoch


def test_a_client_that_vanishes_with_half_a_frame_sent_leaves_nothing(
    stage: Stage, client: RawClient
) -> None:
    client.send(w.encode_frame(w.PingReq(id=1))[:-1])
    client.close()
    wait_for(lambda: stage.witness.stats().connections == 1, "the connection is forgotten")


def test_a_client_that_closes_its_sending_side_still_gets_its_answers(client: RawClient) -> None:
    client.send(b"".join(w.encode_frame(w.PingReq(id=i)) for i in range(100)))
    client.sock.shutdown(1)
    assert [answer.id for answer in client.until_closed()] == list(range(100))


# --- frames in other portions than expected


def test_a_byte_at_a_time_is_served(stage: Stage, client: RawClient) -> None:
    for byte in w.encode_frame(w.PingReq(id=1)) + w.encode_frame(w.PingReq(id=2)):
        client.send(bytes([byte]))
    assert [client.receive().id, client.receive().id] == [1, 2]


def test_many_frames_in_one_write_are_answered_in_order(client: RawClient) -> None:
    client.send(b"".join(w.encode_frame(w.PingReq(id=i)) for i in range(1_000)))
    assert [client.receive().id for _ in range(1_000)] == list(range(1_000))


def test_an_attempt_s_whole_life_fits_one_write(stage: Stage, client: RawClient) -> None:
    handle = client.granted()
    commit = w.CommitReq(
        id=2, slab_handle=handle, rank=0, num_bytes=8 * LAYOUT.token_bytes, num_tokens=8,
        checksums=((1, 2),) * NUM_PLANES,
    )  # fmt: skip
    begin = w.BeginIngestReq(id=3, slab_handle=handle, rank=0, layout_fingerprint=stage.declared)
    start = w.TransferStartedReq(id=1, slab_handle=handle)
    client.send(b"".join(map(w.encode_frame, (start, commit, begin))))
    started, committed, lease = (client.receive() for _ in range(3))
    assert (started.state, committed.state) == ("TRANSFERRING", "READY")
    assert client.vote(handle, lease.lease_id).commit


# --- messages that are not understood


@pytest.mark.parametrize("kind", ["NoSuchReq", "", "AckRep", "SessionEnded", "pingreq", "x" * 1_000_000])
def test_an_unknown_type_is_an_error_reply_and_the_connection_goes_on(client: RawClient, kind: str) -> None:
    reply = client.ask_fields(kind)
    assert reply.reason is Reason.UNKNOWN_TYPE
    assert len(reply.detail) < 100
    assert client.ask(w.PingReq)


WRONG_VALUES: tuple[Any, ...] = ("no such reason", [[]], {"a": 1}, 1.5, None, b"\0")


@pytest.mark.parametrize("kind", w.AnyRequest.__args__, ids=lambda x: x.__name__)
def test_a_field_of_a_wrong_type_is_refused_by_name_and_changes_nothing(
    stage: Stage, client: RawClient, kind: type[w.Request]
) -> None:
    handle = client.granted()
    valid = {
        "slab_handle": handle, "rank": 0, "num_bytes": 1, "num_tokens": 8, "checksums": [], "session_id": "t",
        "layout_fingerprint": stage.declared, "lease_id": 1, "ok": True,
        "layout": msgspec.to_builtins(LAYOUT),
    }  # fmt: skip
    names = [field.name for field in msgspec.structs.fields(kind) if field.name != "id"]
    required = {field.name for field in msgspec.structs.fields(kind) if field.required} - {"id"}
    before = stage.core()
    for name in names:
        refused = 0
        for value in WRONG_VALUES:
            fields = {key: valid[key] for key in required} | {name: value}
            try:
                msgspec.convert({"type": kind.__name__, "id": 1} | fields, kind)
            except msgspec.ValidationError:
                reply = client.ask_fields(kind.__name__, **fields)
                assert reply.reason is Reason.INVALID_REQUEST, (name, value)
                assert kind.__name__ in reply.detail and name in reply.detail
                refused += 1
        assert refused >= len(WRONG_VALUES) // 2, name
    for name in required:
        reply = client.ask_fields(kind.__name__, **{k: valid[k] for k in required - {name}})
        assert reply.reason is Reason.INVALID_REQUEST and name in reply.detail
    after = stage.core()
    assert (after.attempts, after.open_sessions, after.arenas) == (
        before.attempts,
        before.open_sessions,
        before.arenas,
    )
    assert client.commit(handle).state == "READY"
    client.ingest(handle)


@pytest.mark.parametrize("request_id", [I64_MIN, -1, 0, 1, 2**53 + 1, I64_MAX, U64_MAX])
def test_an_id_of_any_64_bit_value_comes_back_as_it_was(client: RawClient, request_id: int) -> None:
    client.send(w.PingReq(id=request_id))
    assert client.receive().id == request_id
    client.send(w.GetReq(id=request_id, slab_handle=1))
    assert client.receive().id == request_id


def test_duplicate_ids_are_each_answered(client: RawClient) -> None:
    client.send(b"".join(w.encode_frame(w.PingReq(id=7)) for _ in range(10)))
    assert [client.receive().id for _ in range(10)] == [7] * 10


@pytest.mark.parametrize("bad_id", ["1", 1.5, [1], None, 2**64], ids=str)
def test_an_id_that_is_no_64_bit_number_closes_that_connection(client: RawClient, bad_id: Any) -> None:
    """Nobody could tell to what the answer belongs."""
    id_bytes = b"\xcf" + b"\xff" * 8 + b"\x00" if bad_id == 2**64 else msgspec.msgpack.encode(bad_id)
    client.send(frame(b"\x82\xa4type\xa7PingReq\xa2id" + id_bytes))
    assert_refused_and_closed(client, "no message")


def test_a_request_without_an_id_is_answered_with_id_0(client: RawClient) -> None:
    client.send(frame_of({"type": "PingReq"}))
    answer = client.receive()
    assert (answer.id, answer.reason) == (0, Reason.INVALID_REQUEST)
    assert client.ask(w.PingReq)


def test_a_client_of_another_protocol_version_is_told(client: RawClient) -> None:
    reply = client.ask(w.HelloReq, protocol=2)
    assert reply.reason is Reason.INVALID_REQUEST
    assert reply.detail == "the daemon speaks protocol 1, the client 2"


# --- handles


@pytest.mark.parametrize("handle", [I64_MIN, -1, 0, 1, 12345, I64_MAX, U64_MAX])
def test_an_unknown_handle_is_stale(client: RawClient, handle: int) -> None:
    for kind, fields in HANDLE_REQUESTS.items():
        assert client.refusal(kind, slab_handle=handle, **fields) is Reason.STALE_HANDLE, kind


@pytest.mark.parametrize("epoch", ["0123456789abcdef", "x" * 1_000_000], ids=["another", "very long"])
def test_a_handle_of_another_epoch_is_stale_and_changes_nothing(
    stage: Stage, client: RawClient, epoch: str
) -> None:
    handle = client.granted()
    before = client.view(handle)
    for kind, fields in HANDLE_REQUESTS.items():
        reply = client.ask(kind, slab_handle=handle, epoch=epoch, **fields)
        assert reply.reason is Reason.STALE_HANDLE and stage.epoch in reply.detail
        assert len(reply.detail) < 200
    assert client.view(handle) == before
    assert client.ask(w.TransferStartedReq, slab_handle=handle, epoch=stage.epoch).state == "TRANSFERRING"
    assert client.commit(handle, epoch=stage.epoch).state == "READY"
    client.ingest(handle)


def test_a_handle_of_an_attempt_that_has_ended_is_stale(client: RawClient) -> None:
    handle = client.granted()
    assert client.ask(w.AbortReq, slab_handle=handle, drained=True).state == "ABORTED"
    assert client.refusal(w.TransferStartedReq, slab_handle=handle) is Reason.STALE_HANDLE
    assert client.commit(handle).reason is Reason.STALE_HANDLE
    assert client.vote(handle, 1).reason is Reason.STALE_HANDLE
    reply = client.ask(w.BeginIngestReq, slab_handle=handle, rank=0, layout_fingerprint="f")
    assert reply.reason is Reason.STALE_HANDLE


# --- prepare


@pytest.mark.parametrize("num_tokens", [0, -1, I64_MIN, 16_777_217, I64_MAX, U64_MAX])
def test_a_token_count_that_no_snapshot_can_have_is_refused(client: RawClient, num_tokens: int) -> None:
    reply = client.prepare(num_tokens=num_tokens)
    assert (reply.ok, reply.reason, reply.slab_handle) == (False, Reason.INVALID_REQUEST, 0)
    assert str(num_tokens) in reply.detail


def test_a_token_count_that_no_arena_can_hold_is_too_large(client: RawClient) -> None:
    reply = client.prepare(num_tokens=16 * MIB // LAYOUT.token_bytes + 1)
    assert (reply.ok, reply.reason, reply.retry_after_ms) == (False, Reason.TOO_LARGE, 0)


@pytest.mark.parametrize(
    "token_start",
    [-1, -4, I64_MIN, 16_777_212, 16_777_216, I64_MAX, U64_MAX, 2, 7],
)
def test_a_token_start_past_the_end_or_negative_or_inside_a_page_is_refused(
    client: RawClient, token_start: int
) -> None:
    reply = client.prepare(token_start=token_start)
    assert (reply.ok, reply.reason) == (False, Reason.INVALID_REQUEST)


def test_a_layout_that_nobody_declared_is_a_mismatch(stage: Stage, client: RawClient) -> None:
    reply = client.prepare(layout_fingerprint="f" * 32)
    assert (reply.ok, reply.reason) == (False, Reason.LAYOUT_MISMATCH)
    assert stage.declared in reply.detail, "it says what was declared"


def test_a_layout_that_one_rank_has_not_declared_is_a_mismatch(client: RawClient) -> None:
    name = client.declare(Layout(k_stride_bytes=(128,)), rank=0)
    assert client.prepare(layout_fingerprint=name, ranks=(0, 1)).reason is Reason.LAYOUT_MISMATCH
    assert client.prepare(layout_fingerprint=name, ranks=()).reason is Reason.LAYOUT_MISMATCH


def test_a_reader_of_another_layout_is_refused_and_the_snapshot_stays(client: RawClient) -> None:
    handle = client.ready()
    other = client.declare(Layout(k_stride_bytes=(128,)))
    for name in (other, "f" * 32, ""):
        fields = {"slab_handle": handle, "rank": 0, "layout_fingerprint": name}
        assert client.refusal(w.BeginIngestReq, **fields) is Reason.LAYOUT_MISMATCH
    client.ingest(handle)


@pytest.mark.parametrize(
    "ranks", [(2,), (-1,), (0, 0), (0, 1, 2), (U64_MAX,), tuple(range(100_000))], ids=lambda x: str(x)[:20]
)
def test_ranks_that_are_not_there_or_named_twice_are_refused(
    client: RawClient, ranks: tuple[int, ...]
) -> None:
    assert client.prepare(ranks=ranks).reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize("session_id", ["", "x" * 513, "é" * 257, "x" * 4_000_000], ids=len)
def test_a_session_id_that_is_empty_or_too_long_is_refused(client: RawClient, session_id: str) -> None:
    assert client.prepare(session_id).reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize(
    "session_id", ["\0", "a\nb", "\u202e", "😀", "'\"\\", "x" * 512, "é" * 256], ids=lambda x: ascii(x)[:20]
)
def test_a_session_id_of_any_characters_is_served(client: RawClient, session_id: str) -> None:
    handle = client.ready(session_id)
    assert client.view(handle).session_id == session_id
    client.ingest(handle)


def test_more_page_keys_than_tokens_are_refused(client: RawClient) -> None:
    assert client.prepare(page_keys=("a", "b", "c")).reason is Reason.INVALID_REQUEST
    assert client.prepare(page_keys=("k",) * 1_000_000).reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize(
    "layout",
    [
        {"k_stride_bytes": []}, {"k_stride_bytes": [0]}, {"k_stride_bytes": [-1]},
        {"k_stride_bytes": [U64_MAX]},
        {"k_stride_bytes": [64] * 1_025}, {"k_stride_bytes": [64], "v_stride_bytes": [64, 64]},
        {"k_stride_bytes": [64], "page_size_tokens": 0},
        {"k_stride_bytes": [64], "page_size_tokens": U64_MAX},
        {"k_stride_bytes": [64], "dtype": "x" * 257},
        {"k_stride_bytes": [64], "namespace": {"model": "x" * 257}},
        {"k_stride_bytes": [1] * 1_000_000},
    ],
    ids=[
        "no layers", "zero stride", "negative", "huge", "many layers", "v unlike k", "no page", "huge page",
        "long dtype", "long model", "a million layers",
    ],
)  # fmt: skip
def test_a_layout_that_cannot_be_is_refused(client: RawClient, layout: dict[str, Any]) -> None:
    reply = client.ask_fields("DeclareLayoutReq", rank=0, layout=layout)
    assert reply.reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize("rank", [-1, 2, I64_MIN, U64_MAX])
def test_a_layout_of_a_rank_that_is_not_there_is_refused(client: RawClient, rank: int) -> None:
    assert client.refusal(w.DeclareLayoutReq, rank=rank, layout=LAYOUT) is Reason.WRONG_RANK


def test_layouts_without_end_push_out_the_oldest_and_take_no_memory(stage: Stage, client: RawClient) -> None:
    first = client.declare(Layout(k_stride_bytes=(96,)))
    for i in range(HASTY["layouts_max"]):
        client.declare(Layout(k_stride_bytes=(64,), namespace=Namespace(tenant=str(i))))
    assert stage.core().layouts == HASTY["layouts_max"]
    assert client.prepare(layout_fingerprint=first).reason is Reason.LAYOUT_MISMATCH


# --- commit


@pytest.mark.parametrize("from_state", ["RESERVED", "TRANSFERRING"])
@pytest.mark.parametrize(
    "figures",
    [
        {"num_bytes": 8 * 256 - 1}, {"num_bytes": 8 * 256 + 1}, {"num_bytes": 0}, {"num_bytes": -1},
        {"num_bytes": U64_MAX}, {"num_tokens": 7}, {"num_tokens": 9}, {"num_tokens": 0},
        {"num_tokens": I64_MIN}, {"num_tokens": 7, "num_bytes": 7 * 256},
    ],
    ids=str,
)  # fmt: skip
def test_a_commit_with_too_few_or_too_many_bytes_ends_the_attempt(
    client: RawClient, from_state: str, figures: dict[str, int]
) -> None:
    handle = client.granted()
    if from_state == "TRANSFERRING":
        client.start(handle)
    reply = client.commit(handle, **figures)
    assert reply.reason is Reason.PARTIAL_TRANSFER and "granted 8 tokens, 2048 bytes" in reply.detail
    assert client.view(handle).reason is Reason.PARTIAL_TRANSFER
    (told,) = client.pushes
    assert (told.slab_handle, told.reason, told.drain_wanted) == (handle, Reason.PARTIAL_TRANSFER, True)
    assert client.stats().core.quarantined_shards == 1, "nobody has proved that the writer has stopped"
    assert client.commit(handle, **figures).reason is Reason.PARTIAL_TRANSFER, "a repeat gets its answer"
    assert client.ask(w.DrainedReq, slab_handle=handle).state == "ABORTED"
    assert client.stats().core.quarantined_shards == 0


@pytest.mark.parametrize("num_sums", [0, 1, NUM_PLANES - 1, NUM_PLANES + 1, 100_000])
def test_a_commit_with_another_number_of_checksums_is_refused_and_can_be_made_good(
    client: RawClient, num_sums: int
) -> None:
    handle = client.granted()
    reply = client.commit(handle, checksums=((1, 2),) * num_sums)
    assert reply.reason is Reason.INVALID_REQUEST
    assert client.commit(handle).state == "READY"
    client.ingest(handle)


def test_a_double_commit_gets_the_first_answer_on_any_connection(stage: Stage, client: RawClient) -> None:
    handle = client.granted()
    assert client.commit(handle).state == "READY"
    for again in (client, stage.connect()):
        assert again.commit(handle) == w.AckRep(id=again.new_id() - 1, state=State.READY)
    assert stage.core().bytes_committed - 8 * LAYOUT.token_bytes >= 0
    client.ingest(handle)
    assert client.commit(handle).state == "READY", "the first answer, although it is INGESTED by now"


def test_a_second_commit_of_other_figures_is_refused_and_the_first_one_counts(client: RawClient) -> None:
    handle = client.ready()
    for other in ({"num_bytes": 1}, {"num_tokens": 7}, {"checksums": ((9, 9),) * NUM_PLANES}):
        assert client.commit(handle, **other).reason is Reason.WRONG_STATE
    lease = client.lease(handle)
    assert lease.checksums == ((1, 2),) * NUM_PLANES
    assert client.vote(handle, lease.lease_id).commit


@pytest.mark.parametrize("rank", [1, -1, 7, U64_MAX])
def test_a_commit_of_a_rank_without_a_shard_is_refused(client: RawClient, rank: int) -> None:
    handle = client.granted()
    assert client.commit(handle, rank=rank).reason is Reason.WRONG_RANK
    assert client.ask(w.TransferFailedReq, slab_handle=handle, rank=rank).reason is Reason.WRONG_RANK
    assert client.commit(handle).state == "READY"
    client.ingest(handle)


def test_a_transfer_does_not_fail_for_a_reason_of_another_kind(client: RawClient) -> None:
    handle = client.granted()
    for reason in sorted(set(Reason) - {Reason.TRANSFER_FAILED, Reason.SESSION_NOT_RESIDENT}):
        fields = {"slab_handle": handle, "reason": reason, "drained": True}
        assert client.refusal(w.TransferFailedReq, **fields) is Reason.INVALID_REQUEST
    fields = {"slab_handle": handle, "reason": Reason.SESSION_NOT_RESIDENT, "drained": True}
    assert client.ask(w.TransferFailedReq, **fields).state == "ABORTED"


# --- lease and vote


def test_messages_that_come_too_early_are_refused_and_change_nothing(client: RawClient) -> None:
    handle = client.granted()
    begin = {"slab_handle": handle, "rank": 0, "layout_fingerprint": client.declare()}
    for state in ("RESERVED", "TRANSFERRING"):
        assert client.refusal(w.BeginIngestReq, **begin) is Reason.WRONG_STATE
        assert client.vote(handle, 1).reason is Reason.WRONG_STATE
        assert client.ask(w.DrainedReq, slab_handle=handle).reason is Reason.WRONG_STATE
        assert client.view(handle).state == state
        if state == "RESERVED":
            client.start(handle)
    assert client.commit(handle).state == "READY"
    client.ingest(handle)


def two_ranks(client: RawClient, session_id: str = "s") -> tuple[int, list[int]]:
    """Return a READY attempt of two ranks, and the leases of both."""
    client.declare(rank=1)
    handle = client.granted(session_id, ranks=(0, 1))
    for rank, state in ((0, "TRANSFERRING"), (1, "READY")):
        assert client.commit(handle, rank=rank).state == state
    return handle, [client.lease(handle, rank).lease_id for rank in (0, 1)]


def test_votes_by_the_wrong_rank_are_refused_and_the_right_ones_count(
    stage: Stage, client: RawClient
) -> None:
    handle, (first, second) = two_ranks(client)
    for rank, lease_id in ((0, second), (1, first), (2, first), (-1, first), (U64_MAX, second)):
        assert client.vote(handle, lease_id, rank).reason is Reason.WRONG_RANK
        assert client.vote(handle, lease_id, rank, ok=False).reason is Reason.WRONG_RANK
    other = stage.connect()
    other.send(w.VoteReq(id=99, slab_handle=handle, rank=0, lease_id=first, ok=True))
    assert client.vote(handle, second, 1).commit
    assert other.reply_to(99).commit


@pytest.mark.parametrize("lease_id", [0, -1, I64_MAX, U64_MAX])
def test_a_vote_under_a_lease_that_is_not_held_is_refused(client: RawClient, lease_id: int) -> None:
    handle = client.ready()
    assert client.vote(handle, lease_id).reason is Reason.LEASE_EXPIRED
    held = client.lease(handle).lease_id
    assert client.vote(handle, lease_id).reason is Reason.LEASE_EXPIRED
    assert client.vote(handle, held).commit


def test_a_vote_of_no_for_a_reason_that_is_none_is_refused(client: RawClient) -> None:
    handle = client.ready()
    lease_id = client.lease(handle).lease_id
    for reason in (Reason.OK, Reason.EVICTED, Reason.INTERNAL_ERROR):
        assert client.vote(handle, lease_id, ok=False, reason=reason).reason is Reason.INVALID_REQUEST
    assert client.vote(handle, lease_id).commit


def test_two_votes_of_one_rank_wait_and_both_hear_the_decision(client: RawClient) -> None:
    handle, (first, second) = two_ranks(client)
    for request_id in (901, 902):
        client.send(w.VoteReq(id=request_id, slab_handle=handle, rank=0, lease_id=first, ok=True))
    no = {"ok": False, "reason": Reason.INGEST_FAILED}
    client.send(w.VoteReq(id=903, slab_handle=handle, rank=0, lease_id=first, **no))
    assert client.reply_to(903).reason is Reason.WRONG_STATE
    client.send(w.VoteReq(id=904, slab_handle=handle, rank=1, lease_id=second, ok=True))
    answers = []
    while len(answers) < 3:
        answer = client.receive()
        if not isinstance(answer, w.Push):
            answers.append(answer)
    assert sorted((x.id, x.commit) for x in answers) == [(901, True), (902, True), (904, True)]


# --- other requests


@pytest.mark.parametrize(
    "fields",
    [
        {"limit": 0}, {"limit": -1}, {"limit": 1_001}, {"limit": U64_MAX}, {"offset": -1},
        {"offset": I64_MIN},
    ],
    ids=str,
)  # fmt: skip
def test_a_page_that_cannot_be_is_refused(client: RawClient, fields: dict[str, int]) -> None:
    assert client.refusal(w.ListReq, **fields) is Reason.INVALID_REQUEST


@pytest.mark.parametrize("offset", [I64_MAX - 1, I64_MAX, 2**63, U64_MAX])
def test_a_page_beyond_the_last_is_empty(client: RawClient, offset: int) -> None:
    reply = client.ask(w.ListReq, offset=offset, limit=1_000)
    assert isinstance(reply, w.ListRep) and reply.sessions == ()


def test_a_lookup_of_anything_finds_nothing(stage: Stage, client: RawClient) -> None:
    for fields in ({}, {"session_id": "x" * 1_000_000}, {"page_keys": ("k",)}, {"resident_tokens": I64_MIN}):
        assert client.ask(w.LookupReq, layout_fingerprint=stage.declared, **fields).slab_handle == 0
    assert client.ask(w.LookupReq, layout_fingerprint="", session_id="s").slab_handle == 0
    many = {"layout_fingerprint": stage.declared, "page_keys": ("k",) * 16_385}
    assert client.refusal(w.LookupReq, **many) is Reason.INVALID_REQUEST


# --- edges and sizes


@pytest.mark.parametrize("number", [I64_MIN, -1, 0, I64_MAX, 2**63, U64_MAX])
def test_every_number_of_every_request_may_be_at_the_edge_of_64_bits(
    stage: Stage, client: RawClient, number: int
) -> None:
    """An answer comes to each, and the attempt that some of them name lives."""
    handle = client.granted()
    valid = {
        "slab_handle": handle, "rank": 0, "num_bytes": 1, "num_tokens": 8, "checksums": [], "session_id": "t",
        "layout_fingerprint": stage.declared, "lease_id": 1, "ok": True,
        "layout": msgspec.to_builtins(LAYOUT),
    }  # fmt: skip
    for kind in w.AnyRequest.__args__:
        fields = [field for field in msgspec.structs.fields(kind) if field.name != "id"]
        required = {field.name: valid[field.name] for field in fields if field.required}
        for field in fields:
            if field.type not in (int, int | None) or kind in (w.CommitReq, w.MapBufferReq):
                continue
            reply = client.ask_fields(kind.__name__, **required | {field.name: number})
            assert not isinstance(reply, w.HelloRep) or field.name != "protocol"
    for pair in ([number, number], [0, number]):
        reply = client.ask_fields(
            "CommitReq", slab_handle=handle, rank=number or 5, num_bytes=number, num_tokens=number,
            checksums=[pair] * NUM_PLANES,
        )  # fmt: skip
        assert reply.reason in (Reason.WRONG_RANK, Reason.INVALID_REQUEST, Reason.STALE_HANDLE)
    assert client.view(handle).state in ("RESERVED", "TRANSFERRING", "ABORTED")
    for view in client.ask(w.ListReq).sessions:
        client.ask(w.AbortReq, slab_handle=view.slab_handle, drained=True)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("layout_fingerprint", "\0" * 4_100_000, Reason.LAYOUT_MISMATCH),
        ("token_digest", "d" * 65, Reason.INVALID_REQUEST),
        ("token_digest", "\0" * 4_100_000, Reason.INVALID_REQUEST),
        ("page_keys", ("k" * 65,), Reason.INVALID_REQUEST),
        ("page_keys", ("\0" * 2_000_000,) * 2, Reason.INVALID_REQUEST),
        ("session_id", "\0" * 4_100_000, Reason.INVALID_REQUEST),
    ],
    ids=["fingerprint", "digest", "huge digest", "key", "huge keys", "session"],
)
def test_a_string_as_long_as_a_frame_is_refused_and_neither_kept_nor_logged(
    stage: Stage, client: RawClient, field: str, value: Any, reason: Reason
) -> None:
    fields = {"layout_fingerprint": stage.declared, "session_id": "s"} | {field: value}
    log_bytes = stage.witness.stats().log.bytes_written
    reply = client.ask(w.SnapshotPrepareReceiveReqInput, num_tokens=8, ranks=(0,), **fields)
    assert isinstance(reply, w.SnapshotPrepareReceiveReqOutput), reply
    assert (reply.ok, reply.reason) == (False, reason)
    assert len(reply.detail) < 1_000
    stage.check()
    assert stage.witness.stats().log.bytes_written - log_bytes < 10_000


def test_a_digest_and_page_keys_of_up_to_64_characters_are_taken(client: RawClient) -> None:
    handle = client.ready(token_digest="d" * 64, page_keys=("k" * 64, "l" * 64))
    assert client.lease(handle).token_digest == "d" * 64
    client.ingest(handle)


def test_lists_as_long_as_a_frame_get_an_answer(client: RawClient) -> None:
    million = 1_000_000
    assert client.ask_fields("ListReq", states=["READY"] * (million // 2)).total == 0
    assert client.ask_fields("ListReq", states=["NO"] * million).reason is Reason.INVALID_REQUEST
    assert client.prepare(page_keys=("",) * (4 * million)).reason is Reason.INVALID_REQUEST
    assert client.ask_fields("PingReq", unknown=[None] * (4 * million)).epoch
    handle = client.granted()
    assert client.commit(handle, checksums=((0, 0),) * million).reason is Reason.INVALID_REQUEST
    assert client.commit(handle).state == "READY"
    client.ingest(handle)


# --- a client that vanishes


def bring_to(client: RawClient, step: str) -> int:
    """Bring an attempt, named after the step, to where its client is to vanish."""
    if step in ("RESERVED", "TRANSFERRING", "one rank committed"):
        client.declare(rank=1)
        handle = client.granted(step, ranks=(0, 1))
        if step == "TRANSFERRING":
            client.start(handle)
        elif step == "one rank committed":
            assert client.commit(handle).state == "TRANSFERRING"
        return handle
    if step == "READY":
        return client.ready(step)
    handle, (first, _) = two_ranks(client, step)
    if step == "voted":
        client.send(w.VoteReq(id=99, slab_handle=handle, rank=0, lease_id=first, ok=True))
    elif step == "abort waits":
        assert client.ask(w.AbortReq, slab_handle=handle).pending
    return handle


def test_a_client_that_vanishes_in_any_state_leaves_nothing_behind(stage: Stage) -> None:
    """Each attempt ends at its deadline, once, for the reason that fits the state."""
    expected = {
        "RESERVED": Reason.RESERVE_TIMEOUT,
        "TRANSFERRING": Reason.TRANSFER_TIMEOUT,
        "one rank committed": Reason.TRANSFER_TIMEOUT,
        "READY": Reason.READY_EXPIRED,
        "leased": Reason.READY_EXPIRED,
        "voted": Reason.READY_EXPIRED,
        "abort waits": Reason.CLIENT_ABORT,
    }
    handles: dict[str, int] = {}
    for step in expected:
        client = stage.connect()
        handles[step] = bring_to(client, step)
        client.close()
    stage.settle()
    found = outcomes(stage.daemon.log_path)
    assert {step: found[handle] for step, handle in handles.items()} == {
        step: [reason] for step, reason in expected.items()
    }
    assert stage.witness.stats().requests_waiting == 0


@pytest.mark.parametrize("kind", w.AnyRequest.__args__, ids=lambda x: x.__name__)
def test_a_client_that_vanishes_before_its_answer_leaves_nothing_behind(
    stage: Stage, client: RawClient, kind: type[w.Request]
) -> None:
    handle = client.granted()
    valid = {
        "slab_handle": handle, "rank": 0, "num_bytes": 8 * LAYOUT.token_bytes, "num_tokens": 8, "ok": True,
        "checksums": ((1, 2),) * NUM_PLANES, "session_id": "t", "layout_fingerprint": stage.declared,
        "lease_id": 1, "layout": LAYOUT,
    }  # fmt: skip
    required = {field.name for field in msgspec.structs.fields(kind) if field.required} - {"id"}
    client.send(kind(id=1, **{name: valid[name] for name in required}))
    client.close()
    wait_for(lambda: stage.witness.stats().connections == 1, "the connection is forgotten")
    stage.witness.ask(w.AbortReq, slab_handle=handle, drained=True)
    stage.witness.ask(w.DrainReq, draining=False)
    for view in stage.witness.ask(w.ListReq).sessions:
        stage.witness.ask(w.AbortReq, slab_handle=view.slab_handle, drained=True)


def test_a_client_that_vanishes_may_come_back_and_commit(stage: Stage, client: RawClient) -> None:
    handle = client.granted()
    client.start(handle)
    client.close()
    wait_for(lambda: stage.witness.stats().connections == 1, "the connection is forgotten")
    back = stage.connect()
    assert back.commit(handle).state == "READY"
    back.ingest(handle)
    assert back.push().reason is Reason.OK, "the end is told to the connection that committed"


# --- at random


def mutated(rng: random.Random, payload: bytes) -> bytes:
    """Return a payload with some bytes changed, cut out, doubled or put in."""
    data = bytearray(payload)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        at = rng.randrange(len(data) or 1)
        match rng.randrange(4):
            case 0 if data:
                data[at] = rng.randrange(256)
            case 1:
                data[at:at] = rng.randbytes(rng.randrange(1, 5))
            case 2:
                del data[at : at + rng.randrange(1, 5)]
            case _:
                data[at:at] = data[at : at + rng.randrange(1, 9)]
    return bytes(data) or b"\0"


def random_fields(rng: random.Random, kind: type[w.Request], valid: dict[str, Any]) -> dict[str, Any]:
    edges = (I64_MIN, -1, 0, 1, 8, I64_MAX, U64_MAX, "", "s", None, True, [], [[1, 2]], {}, 1.5, "evicted")
    fields: dict[str, Any] = {"type": kind.__name__, "id": rng.choice((1, 2, -1, U64_MAX))}
    for field in msgspec.structs.fields(kind):
        if field.name != "id" and (field.required or rng.random() < 0.5):
            fields[field.name] = rng.choice(edges) if rng.random() < 0.25 else valid.get(field.name, 0)
    return fields


@pytest.mark.parametrize("seed", range(4))
def test_2000_random_messages_do_no_harm(stage: Stage, seed: int) -> None:
    """Requests with wrong values, and their bytes damaged: 500 a seed, against attempts in every state."""
    rng = random.Random(seed)
    client = stage.connect()
    closed = answered = 0
    for batch in range(25):
        if batch % 5 == 0:
            owner = stage.connect()
            handles = [owner.granted(f"a{seed}.{batch}"), owner.ready(f"b{seed}.{batch}")]
            lease = owner.lease(handles[1])
        messages = []
        for _ in range(20):
            valid = {
                "slab_handle": rng.choice(handles), "rank": 0, "num_bytes": 8 * 256, "num_tokens": 8,
                "checksums": [[1, 2]] * NUM_PLANES, "session_id": rng.choice("abc"), "ok": rng.random() < 0.7,
                "layout_fingerprint": stage.declared, "lease_id": lease.lease_id,
                "layout": msgspec.to_builtins(LAYOUT), "ranks": [0], "protocol": 1, "limit": 10,
                "draining": False, "token_digest": "d", "page_keys": ["k"], "states": ["READY"],
                "reason": rng.choice(list(Reason)), "epoch": stage.epoch, "client": "c",
            }  # fmt: skip
            payload = msgspec.msgpack.encode(random_fields(rng, rng.choice(w.AnyRequest.__args__), valid))
            messages.append(frame(mutated(rng, payload) if rng.random() < 0.3 else payload))
        last_id = 1_000_000 + batch
        client.send(b"".join(messages) + w.encode_frame(w.PingReq(id=last_id)))
        try:
            while getattr(client.receive(), "id", None) != last_id:
                answered += 1
        except Exception as error:
            assert type(error).__name__ == "Closed", error
            closed += 1
            client = stage.connect()
        stage.witness.ask(w.DrainReq, draining=False)
        stage.check()
    for view in stage.witness.ask(w.ListReq, limit=1_000).sessions:
        stage.witness.ask(w.AbortReq, slab_handle=view.slab_handle, drained=True)
    assert closed and answered, "both kinds of message were among them"


def test_random_bytes_do_no_harm(stage: Stage) -> None:
    rng = random.Random(99)
    for _ in range(200):
        client = stage.connect()
        data = rng.randbytes(rng.randrange(1, 400))
        client.send(frame(data) if rng.random() < 0.7 else data)
        client.close()
    wait_for(lambda: stage.witness.stats().connections == 1, "all are gone")


def test_none_of_it_took_memory_or_file_descriptors(stage: Stage) -> None:
    """Everything that this file sends costs the daemon nothing that stays."""
    pid = stage.daemon.process.pid
    before_bytes = rss_bytes(pid)
    for _ in range(30):
        client = stage.connect()
        client.send(frame_of({"type": "PingReq", "id": 1, "x": "y" * 4_000_000}))
        client.receive()
        client.send(frame(b"\xc1" * 100_000))
        client.until_closed()
        client.close()
    wait_for(lambda: stage.witness.stats().connections == 1, "all are gone")
    assert rss_bytes(pid) - before_bytes < 60 * MIB
    assert len(list(stage.daemon.stderr.splitlines())) < 200, "a flood of bad peers is no flood of lines"


def test_an_unused_layout_never_gets_a_slab(client: RawClient) -> None:
    from snapd.layout import fingerprint

    assert client.prepare(layout_fingerprint=fingerprint(other_layout())).reason is Reason.LAYOUT_MISMATCH

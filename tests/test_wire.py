"""Framing and messages: bytes to messages and back, and what is refused on the way."""

import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapd import wire as w
from snapd.core.events import State
from snapd.core.slab import Extent
from snapd.errors import ProtocolError, Reason
from snapd.layout import Layout

FRAME_BYTES_MAX = 1_000
ONE_REQUEST_OF_EACH: tuple[w.AnyRequest, ...] = (
    w.HelloReq(id=1, client="test"),
    w.PingReq(id=2),
    w.DeclareLayoutReq(id=3, rank=0, layout=Layout(k_stride_bytes=(64,), v_stride_bytes=(32,))),
    w.SnapshotPrepareReceiveReqInput(
        id=4, session_id="s", num_tokens=8, layout_fingerprint="f", page_keys=("a", "b"), ranks=(0, 1)
    ),
    w.TransferStartedReq(id=5, slab_handle=9, epoch="e"),
    w.CommitReq(id=6, slab_handle=9, rank=1, num_bytes=64, num_tokens=8, checksums=((1, 2**64 - 1),)),
    w.TransferFailedReq(id=7, slab_handle=9, reason=Reason.SESSION_NOT_RESIDENT, drained=True, rank=0),
    w.AbortReq(id=8, slab_handle=9, drained=True),
    w.DrainedReq(id=9, slab_handle=9, rank=3),
    w.BeginIngestReq(id=10, slab_handle=9, rank=0, layout_fingerprint="f"),
    w.VoteReq(id=11, slab_handle=9, rank=0, lease_id=4, ok=False, reason=Reason.TOKEN_MISMATCH, keep=True),
    w.LookupReq(id=12, layout_fingerprint="f", session_id="s", resident_tokens=3),
    w.MapBufferReq(id=13, rank=0, writable=True),
    w.GetReq(id=14, slab_handle=9),
    w.ListReq(id=15, states=(State.READY,), offset=1, limit=2),
    w.StatsReq(id=16),
    w.WatchReq(id=17, session_id="s"),
    w.DrainReq(id=18, draining=False),
)
GRANT = w.RankGrant(
    rank=0, snapshot_buf_base_ptr=1 << 40, k_layer_offsets=(0,), v_layer_offsets=(256,), stride_k_bytes=(64,),
    stride_v_bytes=(32,), extents=(Extent(0, 512),),
)  # fmt: skip


def split(data: bytes) -> list[bytes]:
    return w.FrameSplitter(FRAME_BYTES_MAX).feed(data)


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


def payload_of(message: Any) -> bytes:
    (payload,) = w.FrameSplitter(1 << 30).feed(w.encode_frame(message))
    return payload


# --- framing


def test_a_frame_is_a_little_endian_length_and_then_the_payload() -> None:
    encoded = w.encode_frame(w.PingReq(id=7))
    assert encoded[:4] == bytes([len(encoded) - 4, 0, 0, 0])
    assert msgspec.msgpack.decode(encoded[4:]) == {"type": "PingReq", "id": 7}


@given(
    payloads=st.lists(st.binary(min_size=1, max_size=50), max_size=20),
    cuts=st.lists(st.integers(0, 1_000), max_size=20),
)
@settings(max_examples=100, deadline=None)
def test_frames_come_out_whole_however_the_stream_was_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, payloads))
    edges = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    splitter = w.FrameSplitter(50)
    found = [x for start, end in itertools.pairwise(edges) for x in splitter.feed(stream[start:end])]
    assert found == payloads
    assert not splitter.is_inside_frame


def test_a_byte_at_a_time_is_as_good_as_all_at_once() -> None:
    splitter = w.FrameSplitter(FRAME_BYTES_MAX)
    stream = frame(b"one") + frame(b"two")
    found = []
    for i in range(len(stream)):
        found += splitter.feed(stream[i : i + 1])
        assert splitter.is_inside_frame is (i + 1 not in (7, 14))
    assert found == [b"one", b"two"]


def test_a_frame_at_the_limit_passes_and_one_byte_more_is_refused_from_its_length_alone() -> None:
    assert split(frame(b"x" * FRAME_BYTES_MAX)) == [b"x" * FRAME_BYTES_MAX]
    with pytest.raises(ProtocolError, match=r"a frame of 1001 bytes; 1 to 1000"):
        split((FRAME_BYTES_MAX + 1).to_bytes(4, "little"))


@pytest.mark.parametrize("length", [0, 0xFFFFFFFF, 1 << 31], ids=["nothing", "4 GiB", "2 GiB"])
def test_a_frame_that_announces_nothing_or_gigabytes_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"a frame of {length} bytes"):
        split(length.to_bytes(4, "little"))


def test_what_is_whole_before_a_bad_length_is_not_lost() -> None:
    """What is served does not depend on how the stream was cut."""
    splitter = w.FrameSplitter(FRAME_BYTES_MAX)
    assert splitter.feed(frame(b"one") + frame(b"two") + bytes(4)) == [b"one", b"two"]
    with pytest.raises(ProtocolError, match="a frame of 0 bytes"):
        splitter.check()
    with pytest.raises(ProtocolError, match="a frame of 0 bytes"):
        splitter.feed(frame(b"three"))


def test_a_frame_that_has_only_begun_is_checked_as_far_as_it_goes() -> None:
    splitter = w.FrameSplitter(FRAME_BYTES_MAX)
    assert splitter.feed(b"\xff\xff\xff") == []
    splitter.check()
    with pytest.raises(ProtocolError):
        splitter.feed(b"\xff")


def test_a_splitter_holds_no_more_than_the_frame_that_is_not_whole() -> None:
    splitter = w.FrameSplitter(FRAME_BYTES_MAX)
    for _ in range(100):
        splitter.feed(frame(b"x" * 900) * 10)
    splitter.feed(frame(b"x" * 900)[:-1])
    assert len(splitter._buffer) == 903


def test_a_frame_that_comes_byte_by_byte_is_copied_once() -> None:
    """Else whoever sends a long one so would keep the loop from everybody else."""
    copies: list[int] = []

    class Watched(bytearray):
        def __bytes__(self) -> bytes:
            copies.append(len(self))
            return bytes(memoryview(self))

    splitter = w.FrameSplitter(FRAME_BYTES_MAX)
    splitter._buffer = Watched()
    whole = frame(b"x" * 900)
    assert [splitter.feed(bytes([byte])) for byte in whole] == [[]] * 903 + [[b"x" * 900]]
    assert copies == [len(whole)]


# --- requests


def test_every_kind_of_request_has_an_example_here() -> None:
    assert {type(x) for x in ONE_REQUEST_OF_EACH} == set(w.AnyRequest.__args__)


@pytest.mark.parametrize("request_", ONE_REQUEST_OF_EACH, ids=lambda x: type(x).__name__)
def test_a_request_survives_the_wire(request_: w.AnyRequest) -> None:
    assert w.decode_request(payload_of(request_)) == request_


@pytest.mark.parametrize("request_", ONE_REQUEST_OF_EACH, ids=lambda x: type(x).__name__)
def test_unknown_fields_are_ignored(request_: w.AnyRequest) -> None:
    fields = msgspec.msgpack.decode(payload_of(request_)) | {"from_the_future": [{"deep": [1]}]}
    assert w.decode_request(msgspec.msgpack.encode(fields)) == request_


@pytest.mark.parametrize("request_", ONE_REQUEST_OF_EACH, ids=lambda x: type(x).__name__)
def test_a_field_of_the_wrong_type_or_a_missing_one_is_an_answer_with_the_request_s_id(
    request_: w.AnyRequest,
) -> None:
    fields = msgspec.msgpack.decode(payload_of(request_))
    for name in type(request_).__struct_fields__:
        if name == "id":
            continue
        answer = w.decode_request(msgspec.msgpack.encode(fields | {name: {"no": 1.5}}))
        assert isinstance(answer, w.ErrorRep)
        assert (answer.id, answer.reason) == (request_.id, Reason.INVALID_REQUEST)
        assert type(request_).__name__ in answer.detail and name in answer.detail
    required = [x.name for x in msgspec.structs.fields(type(request_)) if x.required and x.name != "id"]
    for name in required:
        answer = w.decode_request(msgspec.msgpack.encode({k: v for k, v in fields.items() if k != name}))
        assert isinstance(answer, w.ErrorRep) and answer.reason is Reason.INVALID_REQUEST
        assert name in answer.detail


@pytest.mark.parametrize("kind", ["NoSuchReq", "", "ErrorRep", "SessionEnded", "x" * 10_000])
def test_an_unknown_type_is_an_answer_and_a_long_name_is_cut(kind: str) -> None:
    answer = w.decode_request(msgspec.msgpack.encode({"type": kind, "id": 5}))
    assert isinstance(answer, w.ErrorRep)
    assert (answer.id, answer.reason) == (5, Reason.UNKNOWN_TYPE)
    assert len(answer.detail) < 100


def test_a_request_without_an_id_is_answered_with_id_0() -> None:
    answer = w.decode_request(msgspec.msgpack.encode({"type": "PingReq"}))
    assert isinstance(answer, w.ErrorRep)
    assert (answer.id, answer.reason) == (0, Reason.INVALID_REQUEST)


PING = b"\x83\xa4type\xa7PingReq\xa2id\x01\xa1x"
NO_MESSAGES = {
    "nothing": b"",
    "a number": msgspec.msgpack.encode(7),
    "a list": msgspec.msgpack.encode([1, 2]),
    "a string": msgspec.msgpack.encode("PingReq"),
    "cut short": msgspec.msgpack.encode({"type": "PingReq", "id": 1})[:-1],
    "with bytes after it": msgspec.msgpack.encode({"type": "PingReq", "id": 1}) + b"\x00",
    "an id that is no number": msgspec.msgpack.encode({"type": "PingReq", "id": "1"}),
    "a type that is no string": msgspec.msgpack.encode({"type": 3, "id": 1}),
    "keys that are no strings": msgspec.msgpack.encode({1: 2}),
    "invalid UTF-8 in a value": b"\x82\xa4type\xa8HelloReq\xa6client\xa2\xff\xfe",
    "invalid UTF-8 in the type": b"\x82\xa4type\xa2\xff\xfe\xa2id\x01",
    "an unused byte": b"\xc1",
    "nesting without end": b"\x91" * 100_000 + b"\x00",
    "nesting in an unknown field": PING + b"\x91" * 100_000 + b"\x00",
    "maps nested in an unknown field": PING + b"\x81\xa1a" * 100_000 + b"\x00",
    "a list that announces 4 billion": b"\xdd\xff\xff\xff\xff",
    "a map that announces 4 billion": b"\xdf\xff\xff\xff\xff",
    "a string that announces 4 GiB": b"\x82\xa4type\xdb\xff\xff\xff\xffPing",
    "an extension type": b"\xc7\x01\x05\x00",
}  # fmt: skip


@pytest.mark.parametrize("payload", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_message_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="no message"):
        w.decode_request(payload)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x00", b"\xc1", b"\x91" * 100_000, b"\x82\xa4type\xa5VoteR", b"\x81\xa4type\xa2\xff\xfe"],
    ids=["nothing", "a number", "unused byte", "deep nesting", "cut short", "invalid UTF-8"],
)
def test_a_daemon_that_sends_what_is_no_message_is_found_out(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="the daemon sent what is no message"):
        w.decode_answer(payload)


@pytest.mark.parametrize("number", [-(2**63), -1, 0, 2**63 - 1, 2**63, 2**64 - 1])
def test_64_bit_edges_pass_and_come_back(number: int) -> None:
    request = w.decode_request(payload_of(w.PingReq(id=number)))
    assert request.id == number
    reply = w.decode_answer(payload_of(w.PingRep(id=number, epoch="e")))
    assert isinstance(reply, w.PingRep) and reply.id == number


def test_random_damage_makes_a_request_an_answer_or_a_protocol_error_and_nothing_else() -> None:
    rng = random.Random(5)
    seen = {"request": 0, "answer": 0, "error": 0}
    for _ in range(5_000):
        damaged = bytearray(payload_of(rng.choice(ONE_REQUEST_OF_EACH)))
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            decoded = w.decode_request(bytes(damaged))
        except ProtocolError:
            seen["error"] += 1
        else:
            seen["answer" if isinstance(decoded, w.ErrorRep) else "request"] += 1
    assert all(seen.values()), seen


# --- replies and pushes


def test_replies_and_pushes_survive_the_wire() -> None:
    messages: tuple[Any, ...] = (
        w.SnapshotPrepareReceiveReqOutput(id=1, ok=True, slab_handle=9, num_tokens=8, ranks=(GRANT,)),
        w.BeginIngestRep(
            id=2, session_id="s", lease_id=1, lease_ms=2, num_tokens=8, token_start=0, token_digest="",
            checksums=((1, 2),), grant=GRANT,
        ),
        w.VoteRep(id=3, commit=True, reason=Reason.OK, state=State.INGESTED),
        w.AckRep(id=4, state=State.READY, pending=True),
        w.ErrorRep(id=5, reason=Reason.STALE_HANDLE, detail="d", retry_after_ms=3),
        w.SessionEnded(
            slab_handle=9, session_id="s", state=State.ABORTED, reason=Reason.EVICTED, drain_wanted=False
        ),
        w.WatchLost(count=3),
    )  # fmt: skip
    for message in messages:
        assert w.decode_answer(payload_of(message)) == message


def test_a_push_of_an_unknown_kind_is_left_out_and_an_unknown_reply_is_not() -> None:
    assert w.decode_answer(msgspec.msgpack.encode({"type": "NewPush", "count": 1})) is None
    with pytest.raises(ProtocolError, match="a bad NewRep"):
        w.decode_answer(msgspec.msgpack.encode({"type": "NewRep", "id": 4}))
    with pytest.raises(ProtocolError, match="a bad WatchLost"):
        w.decode_answer(msgspec.msgpack.encode({"type": "WatchLost", "count": "many"}))


def test_what_an_orchestrator_sends_to_p_s_worker_keeps_its_field_names() -> None:
    ask = w.SnapshotFinalizeIngestReqInput(session_id="s", token_ids=(1, 2), slab_handle=3)
    answer = w.SnapshotFinalizeIngestReqOutput(ok=False, reason=Reason.ALLOC_FAILED_ON_FINALIZE)
    assert msgspec.to_builtins(ask) == {
        "type": "SnapshotFinalizeIngestReqInput", "session_id": "s", "token_ids": (1, 2), "slab_handle": 3,
    }  # fmt: skip
    assert msgspec.to_builtins(answer)["reason"] == "alloc-failed-on-finalize"


@pytest.mark.parametrize("kind", [*w.AnyRequest.__args__, *w.AnyReply.__args__], ids=lambda x: x.__name__)
def test_every_message_has_a_schema(kind: type) -> None:
    definition = w.schema(kind)["$defs"][kind.__name__]
    assert definition["properties"]["type"]["enum"] == [kind.__name__]
    assert "id" in definition["required"]


def test_only_a_prepare_may_not_be_sent_twice() -> None:
    assert [x for x in w.AnyRequest.__args__ if not x.IS_REPEATABLE] == [w.SnapshotPrepareReceiveReqInput]

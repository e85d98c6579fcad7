"""KV events as the engines' own classes have them: they decode what snapd publishes, in equal frames."""

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "kvevents"))

import golden_events as golden

from snapd.kvevents.events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    encode_batch,
)
from tools.engines.torchvision_ops import declare_torchvision_ops

zmq = pytest.importorskip("zmq")
WAIT_MS = 20_000


PATHS = {"vllm": "vllm.distributed.kv_events", "sglang": "sglang.srt.disaggregation.kv_events"}


def _module(path: str) -> ModuleType:
    """Import a module of an engine, or skip the test."""
    name = path.partition(".")[0]
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    if name == "sglang":
        declare_torchvision_ops()
    with warnings.catch_warnings():
        # Engines name the kinds of GPU that they cannot use here.
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(path)
        except ImportError as error:
            pytest.skip(f"{path} cannot be imported: {error}")


@pytest.fixture(params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest) -> ModuleType:
    """An engine's module of KV events."""
    return _module(PATHS[request.param])


def ours(salt: str | None) -> bytes:
    batch = EventBatch(
        ts=golden.TS,
        events=[
            BlockStored(**golden.STORED),
            BlockStored(**golden.STORED_BELOW, cache_salt=salt),
            BlockRemoved(**golden.REMOVED),
            AllBlocksCleared(),
        ],
        data_parallel_rank=golden.DATA_PARALLEL_RANK,
    )
    return encode_batch(batch)


def theirs(engine: ModuleType, salt: dict[str, str]) -> Any:
    return engine.KVEventBatch(
        golden.TS,
        [
            engine.BlockStored(**golden.STORED),
            engine.BlockStored(**golden.STORED_BELOW, **salt),
            engine.BlockRemoved(**golden.REMOVED),
            engine.AllBlocksCleared(),
        ],
        golden.DATA_PARALLEL_RANK,
    )


def test_the_engines_class_decodes_what_snapd_publishes(engine):
    decoded = msgspec.msgpack.Decoder(engine.KVEventBatch).decode(ours(golden.SALT))
    salt = {"cache_salt": golden.SALT} if "sglang" in engine.__name__ else {}
    assert decoded == theirs(engine, salt)


def test_the_engines_encoder_still_makes_the_bytes_that_are_checked_in(engine):
    is_sglang = "sglang" in engine.__name__
    batch = theirs(engine, {"cache_salt": golden.SALT} if is_sglang else {})
    assert msgspec.msgpack.Encoder().encode(batch) == (golden.SGLANG if is_sglang else golden.VLLM)


def test_snapd_writes_no_field_that_neither_engine_knows_and_leaves_none_out_that_one_demands(engine):
    for mine, name in ((BlockStored, "BlockStored"), (BlockRemoved, "BlockRemoved")):
        known = msgspec.structs.fields(getattr(engine, name))
        demanded = {field.name for field in known if field.required}
        written = {field.name for field in msgspec.structs.fields(mine)}
        always = {field.name for field in msgspec.structs.fields(mine) if field.required}
        assert demanded <= always
        assert written - {field.name for field in known} <= {"cache_salt"}


def test_snapds_media_are_the_engines(engine):
    """Each engine has a word for host memory of its own; snapd's are among both."""
    if "sglang" in engine.__name__:
        assert {"CPU_PINNED", "EXTERNAL"} <= {medium.value for medium in engine.StorageMedium}
    else:
        assert engine.MEDIUM_CPU == "CPU"


def test_a_live_batch_and_a_replay_have_the_frames_of_the_engines_publisher(engine, tmp_path):
    """Both publishers are given the same events; frames differ in the time and nothing else."""
    assert engine.ZmqEventPublisher.END_SEQ == END_OF_REPLAY
    engines_own = _frames_of_engine(engine, tmp_path)
    snapds = _frames_of_snapd(tmp_path)
    assert [_without_time(frames) for frames in engines_own] == [_without_time(frames) for frames in snapds]


def _without_time(frames: list[bytes]) -> list[Any]:
    payload = msgspec.msgpack.decode(frames[-1])[1:] if frames[-1] else None
    for event in payload[0] if payload else ():
        event.pop("lora_name", None)
    return [*frames[:-1], payload]


def _frames_of_engine(engine: ModuleType, directory: Path) -> list[list[bytes]]:
    live, replay = f"ipc://{directory}/engine", f"ipc://{directory}/engine-replay"
    publisher = engine.ZmqEventPublisher(0, live, replay, topic="kv@a@b")

    def publish() -> None:
        for event in (engine.BlockStored(**golden.STORED), engine.BlockRemoved(**golden.REMOVED)):
            publisher.publish(engine.KVEventBatch(golden.TS, [event]))

    try:
        return _received(live, replay, publish)
    finally:
        publisher.shutdown()


def _frames_of_snapd(directory: Path) -> list[list[bytes]]:
    from snapd.kvevents.changes import Removed, Stored
    from snapd.kvevents.hashes import pack_token_ids
    from snapd.kvevents.publisher import Publisher, bound

    live, replay = f"ipc://{directory}/snapd", f"ipc://{directory}/snapd-replay"
    with zmq.Context() as context:
        bugs: list[BaseException] = []
        publisher = Publisher(
            bound(context, zmq.PUB, live, 10),
            bound(context, zmq.ROUTER, replay, 10),
            topic="kv@a@b",
            data_parallel_rank=0,
            buffer_batches=10,
            buffer_bytes_max=1 << 20,
            linger_ms=500,
            on_bug=bugs.append,
            settle_s=0.0,
        )
        publisher.start()

        def publish() -> None:
            stored = golden.STORED
            publisher.put(
                Stored(
                    hashes=stored["block_hashes"],
                    parent=None,
                    token_ids=pack_token_ids(stored["token_ids"]),
                    block_size=stored["block_size"],
                    medium=stored["medium"],
                    lora_name=None,
                    cache_salt=None,
                    session_id=stored["session_id"],
                )
            )
            publisher.put(Removed(hashes=golden.HASHES[::-1], medium="CPU_PINNED"))

        try:
            return _received(live, replay, publish)
        finally:
            publisher.close()
            assert not bugs


def _received(live: str, replay: str, publish: Any) -> list[list[bytes]]:
    """Return the frames of what is published, then those of a replay from the second batch on."""
    with zmq.Context() as context:
        monitored = context.socket(zmq.SUB)
        asker = context.socket(zmq.DEALER)
        for socket in (monitored, asker):
            socket.setsockopt(zmq.LINGER, 0)
        monitored.setsockopt(zmq.SUBSCRIBE, b"kv@")
        monitored.connect(live)
        asker.connect(replay)
        try:
            # A publisher hears of a subscriber some time after that has connected: publish until it does.
            rounds = 0
            while not monitored.poll(100):
                assert rounds < 200, "the subscriber heard nothing"
                publish()
                rounds += 1
            first = monitored.recv_multipart()
            skipped = int.from_bytes(first[1], "big")
            if skipped % 2:
                first = _next(monitored)
                skipped += 1
            frames = [first, _next(monitored)]
            asker.send_multipart((b"", (skipped + 1).to_bytes(8, "big")))
            answer = [_next(asker)]
            while answer[-1][-1]:
                answer.append(_next(asker))
            shown = [*frames, answer[0], answer[-1]]
            # How many rounds it took is the machine's business.
            return [
                [_relative(part, skipped) if len(part) == 8 and part != END_OF_REPLAY else part for part in f]
                for f in shown
            ]
        finally:
            monitored.close()
            asker.close()


def _relative(sequence: bytes, first: int) -> bytes:
    return (int.from_bytes(sequence, "big") - first).to_bytes(8, "big")


def _next(socket: Any) -> list[bytes]:
    assert socket.poll(WAIT_MS), "nothing came"
    frames: list[bytes] = socket.recv_multipart()
    return frames


def test_snapd_names_pages_as_sglang_does():
    """SGLang compiles its hash when it is first used; without a compiler there is nothing to compare with."""
    utils = _module("sglang.srt.mem_cache.utils")
    from snapd.kvevents.hashes import sglang_block_hashes

    token_ids = [*range(1, 40), 2**31, 151_643, 0, 7, 8]
    try:
        pages = utils.get_hash_str(token_ids, None, 4)
    except (RuntimeError, ImportError, OSError) as error:
        pytest.skip(f"SGLang's hash cannot be built here: {error}")
    whole = len(token_ids) // 4
    assert [utils.hash_str_to_int64(page) for page in pages][:whole] == sglang_block_hashes("s", token_ids, 4)


def test_vllm_calls_a_page_by_the_low_64_bits_of_its_hash():
    """What D's adapter hands over as it is becomes the number that vLLM publishes, as a signed one."""
    utils = _module("vllm.v1.core.kv_cache_utils")
    if not hasattr(utils, "maybe_convert_block_hash"):
        pytest.skip("this is not the whole of vllm")
    from snapd.kvevents.hashes import signed

    digest = bytes(range(200, 232))
    assert signed(int.from_bytes(digest, "big")) % 2**64 == utils.maybe_convert_block_hash(digest)

"""The wrapper of a TransferEngine, over a module that does what the test says, and D's engines."""

import gc
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine
from target import wait_for

from snapd.errors import ExtraMissing, TransportError
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport import mooncake_engine, mooncake_engines
from snapd.transport.base import Write
from snapd.transport.mooncake_calls import Calls
from snapd.transport.mooncake_engine import RETIRED_MAX, MooncakeEngine, WriteState
from snapd.transport.mooncake_engines import SEGMENTS_MAX, MooncakeEngines
from snapd.transport.mooncake_package import Package

WRITE = Write(1 << 40, 1 << 41, 64)


class Raw:
    """A TransferEngine whose answers the test sets."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []
        self.environment: dict[str, str] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            if name == "initialize":
                self.environment = dict(os.environ)
            answer = self.answers.get(name, 0)
            return answer.pop(0) if isinstance(answer, list) and name != "get_notifies" else answer

        return call


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What TransferEngines of this test answer; they see no setting from outside."""
    answers: dict[str, Any] = {"get_rpc_port": 15_001, "transfer_submit_write": 7, "transfer_check_status": 1}
    module = SimpleNamespace(
        TransferEngine=lambda: Raw(answers),
        TransferOpcode=SimpleNamespace(Write="write"),
        TransferNotify=lambda name, text: (name, text),
        SUPPORT_INTRA_NVLINK=True,
    )
    monkeypatch.setattr(mooncake_engine, "load_engine_module", lambda: module)
    monkeypatch.setattr(mooncake_engine, "find_package", lambda: Package("package-of-test", "1.2", ""))
    monkeypatch.setattr(mooncake_engine, "_retired", deque())
    monkeypatch.setattr(
        os, "environ", {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    )
    answers["module"] = module
    return answers


def engine_with(**settings: Any) -> MooncakeEngine:
    return MooncakeEngine(MooncakeConfig(**settings))


def raw_of(engine: MooncakeEngine) -> Raw:
    assert isinstance(engine._raw, Raw)
    return engine._raw


# --- making one --------------------------------------------------------------------------------


def test_an_engine_is_reached_under_its_host_and_port(answers: dict[str, Any]) -> None:
    engine = engine_with(host="127.0.0.2", devices="x")
    assert raw_of(engine).calls[0] == ("initialize", "127.0.0.2", "P2PHANDSHAKE", "tcp", "x")
    assert engine.segment_name == "127.0.0.2:15001"
    assert engine.package == "package-of-test 1.2"


def test_an_ipv6_host_is_put_in_brackets(answers: dict[str, Any]) -> None:
    assert engine_with(host="::1", settings={"MC_USE_IPV6": "1"}).segment_name == "[::1]:15001"


def test_behind_a_metadata_server_every_engine_of_a_host_has_a_name_of_its_own(
    answers: dict[str, Any],
) -> None:
    first, second = (engine_with(metadata_server="http://127.0.0.1:1/metadata") for _ in range(2))
    assert first.segment_name != second.segment_name
    assert raw_of(first).calls[0][1:3] == (first.segment_name, "http://127.0.0.1:1/metadata")
    first.close()
    second.close()


def test_settings_are_in_the_environment_before_the_engine_is_made_and_win(answers: dict[str, Any]) -> None:
    os.environ["MC_MTU"] = "1024"
    os.environ["MC_GID_INDEX"] = "3"
    engine = engine_with(settings={"MC_MTU": "4096", "GLOG_V": "1"})
    expected = {"MC_MTU": "4096", "MC_GID_INDEX": "3", "GLOG_V": "1", "MC_FORCE_TCP": "1"}
    assert {name: raw_of(engine).environment[name] for name in expected} == expected
    assert engine.settings == expected


def test_tcp_is_asked_for_by_name_unless_the_settings_say_otherwise(answers: dict[str, Any]) -> None:
    engine = engine_with(settings={"MC_FORCE_TCP": "true"})
    assert raw_of(engine).environment["MC_FORCE_TCP"] == os.environ["MC_FORCE_TCP"] == "true"


def test_tcp_is_forced_on_this_engine_only(answers: dict[str, Any]) -> None:
    """The host process may make engines of its own."""
    engine_with()
    answers["initialize"] = -1
    with pytest.raises(TransportError):
        engine_with()
    assert "MC_FORCE_TCP" not in os.environ


def test_nvlink_is_asked_for_in_the_environment(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(mooncake_engine, "_DEVICES", tmp_path)
    engine = engine_with(protocol="nvlink_intra")
    assert raw_of(engine).environment["MC_INTRANODE_NVLINK"] == "1"
    assert "MC_FORCE_TCP" not in raw_of(engine).environment


@pytest.mark.parametrize("answer", [-1, 1])
def test_an_engine_that_does_not_start_is_no_engine(answers: dict[str, Any], answer: int) -> None:
    answers["initialize"] = answer
    with pytest.raises(TransportError, match="no port for data"):
        engine_with()
    with pytest.raises(TransportError, match=r"http://127\.0\.0\.1:1 may not be reachable"):
        engine_with(metadata_server="http://127.0.0.1:1")
    assert len(mooncake_engine._retired) == 2, "deleting it would take a second"


def test_a_protocol_that_nobody_knows_is_refused(answers: dict[str, Any]) -> None:
    with pytest.raises(TransportError, match="'bogus': use one of tcp, rdma, nvlink_intra"):
        engine_with(protocol="bogus")


def test_rdma_is_refused_without_a_device(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        monkeypatch.setattr(mooncake_engine, "_INFINIBAND", place)
        with pytest.raises(TransportError, match="no RDMA device"):
            engine_with(protocol="rdma")


def test_rdma_is_refused_with_a_device_that_is_not_there(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mlx5_0").touch()
    monkeypatch.setattr(mooncake_engine, "_INFINIBAND", tmp_path)
    with pytest.raises(TransportError, match="mlx5_7 not found; this machine has mlx5_0"):
        engine_with(protocol="rdma", devices="mlx5_0, mlx5_7")
    engine_with(protocol="rdma", devices="mlx5_0")


def test_rdma_is_refused_where_the_process_is_told_to_use_tcp(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mlx5_0").touch()
    monkeypatch.setattr(mooncake_engine, "_INFINIBAND", tmp_path)
    os.environ["MC_FORCE_TCP"] = "1"
    with pytest.raises(TransportError, match="unset it"):
        engine_with(protocol="rdma")


def test_nvlink_is_refused_with_a_package_without_it(answers: dict[str, Any]) -> None:
    answers["module"].SUPPORT_INTRA_NVLINK = False
    with pytest.raises(TransportError, match=r"package-of-test 1\.2 was built without it"):
        engine_with(protocol="nvlink_intra")


def test_nvlink_is_refused_without_a_gpu(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mooncake_engine, "_DEVICES", tmp_path)
    with pytest.raises(TransportError, match="shows no GPU"):
        engine_with(protocol="nvlink_intra")


@pytest.mark.parametrize("host", ["no such host", "::1", "a" * 250])
def test_a_host_that_does_not_resolve_is_refused(answers: dict[str, Any], host: str) -> None:
    with pytest.raises(TransportError, match="does not resolve to an IPv4 address"):
        engine_with(host=host)


def range_of(first: int, last: int) -> dict[str, str]:
    return {"MC_MIN_RPC_PORT": str(first), "MC_MAX_RPC_PORT": str(last)}


def test_a_range_without_a_free_port_is_refused(answers: dict[str, Any]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=f"0 of the ports {port} to {port} are free"):
            engine_with(settings=range_of(port, port))
    engine_with(settings=range_of(port, port))


def test_a_range_in_which_a_free_port_is_hard_to_find_is_refused(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_engine, "_is_free", lambda port: port % 100 in (3, 4))
    with pytest.raises(
        TransportError, match="20 of the ports 20000 to 20999 are free, and Mooncake wants 30"
    ):
        engine_with(settings=range_of(20_000, 20_999))
    engine_with(settings=range_of(20_000, 20_004))


@pytest.mark.parametrize(("first", "last"), [("2", "1"), ("0", "5"), ("1", "65536"), ("x", "5"), ("-1", "5")])
def test_what_is_no_range_of_ports_is_refused(answers: dict[str, Any], first: str, last: str) -> None:
    with pytest.raises(TransportError, match="is no range of ports"):
        engine_with(settings={"MC_MIN_RPC_PORT": first, "MC_MAX_RPC_PORT": last})


# --- its calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "why"), [(-7, "overlaps"), (-1, "no bytes"), (-99, "current in the calling")]
)
def test_a_registration_that_is_refused_says_why(answers: dict[str, Any], code: int, why: str) -> None:
    engine = engine_with()
    answers["register_memory"] = code
    with pytest.raises(TransportError, match=rf"\(register_memory: {code}\).*{why}"):
        engine.register(4096, 64)
    answers["register_memory"] = 0
    engine.close()
    assert mooncake_engine._retired[-1].calls[-1][0] != "unregister_memory", "it was not registered"


def test_a_registration_that_cannot_be_taken_back_says_so(answers: dict[str, Any]) -> None:
    engine = engine_with()
    answers["unregister_memory"] = -3
    with pytest.raises(TransportError, match="unregister_memory: -3"):
        engine.unregister(4096)


@pytest.mark.parametrize(("code", "answered"), [(0, True), (-102, False)])
def test_a_probe_says_whether_the_peer_answers(answers: dict[str, Any], code: int, answered: bool) -> None:
    engine = engine_with()
    answers["send_probe"] = code
    assert engine.probe("p:1") is answered


def test_opening_asks_who_is_there_first_and_then_writes_nothing(answers: dict[str, Any]) -> None:
    engine = engine_with()
    answers["transfer_check_status"] = [0, 0, 1]
    assert not engine.is_open("p:1")
    engine.open("p:1", 4096)
    assert engine.is_open("p:1")
    assert raw_of(engine).calls[-5:] == [
        ("send_probe", "p:1"),
        ("transfer_submit_write", "p:1", 0, 4096, 0),
        *[("transfer_check_status", 7)] * 3,
    ]


@pytest.mark.parametrize("address", [4096, 0])
def test_over_nvlink_nothing_is_written_to_open(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: int
) -> None:
    """The GPU's copy engine refuses a write of no bytes."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(mooncake_engine, "_DEVICES", tmp_path)
    engine = engine_with(protocol="nvlink_intra")
    answers["get_first_buffer_address"] = address
    if address:
        engine.open("p:1", 4096)
    else:
        with pytest.raises(TransportError, match="no arena"):
            engine.open("p:1", 4096)
    assert engine.is_open("p:1") is bool(address)
    assert raw_of(engine).calls[-2:] == [("send_probe", "p:1"), ("get_first_buffer_address", "p:1")]


def test_a_peer_that_does_not_answer_the_probe_is_not_opened(answers: dict[str, Any]) -> None:
    """Opening would keep every other peer waiting."""
    engine = engine_with()
    answers["send_probe"] = -102
    with pytest.raises(TransportError, match="nobody answers at p:1"):
        engine.open("p:1", 4096)
    assert raw_of(engine).calls[-1][0] == "send_probe"


@pytest.mark.parametrize("answer", [{"transfer_submit_write": 0}, {"transfer_check_status": -1}])
def test_a_segment_that_cannot_be_opened_is_not_open(answers: dict[str, Any], answer: dict[str, int]) -> None:
    engine = engine_with()
    answers.update(answer)
    with pytest.raises(TransportError):
        engine.open("p:1", 4096)
    assert not engine.is_open("p:1")


@pytest.mark.parametrize("batch_id", [0, 2**64 - 1])
def test_a_write_that_did_not_begin_is_an_error(answers: dict[str, Any], batch_id: int) -> None:
    engine = engine_with()
    answers["transfer_submit_write"] = batch_id
    with pytest.raises(TransportError, match="could not begin"):
        engine.submit("p:1", WRITE)


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (0, WriteState.RUNNING),
        (1, WriteState.DONE),
        (-1, WriteState.FAILED),
        (-2, WriteState.FAILED),
        (2, WriteState.FAILED),
    ],
)
def test_a_status_is_a_state(answers: dict[str, Any], status: int, state: WriteState) -> None:
    engine = engine_with()
    answers["transfer_check_status"] = status
    assert engine.check(engine.submit("p:1", WRITE)) is state


def test_a_notification_goes_with_a_write_under_our_name(answers: dict[str, Any]) -> None:
    engine = engine_with()
    engine.notify("p:1", WRITE, "text")
    sent = ("batch_transfer_sync", "p:1", [1 << 40], [1 << 41], [64], "write", ("snapd", "text"))
    assert raw_of(engine).calls[-1] == sent
    answers["batch_transfer_sync"] = -1
    with pytest.raises(TransportError, match="batch_transfer_sync: -1"):
        engine.notify("p:1", WRITE, "text")


def test_notifications_of_others_and_garbage_are_left_out(answers: dict[str, Any]) -> None:
    class Garbage:
        @property
        def name(self) -> str:
            return b"\xff".decode()

    class GarbageText:
        name = "snapd"

        @property
        def msg(self) -> str:
            return b"\xff".decode()

    ours = [SimpleNamespace(name="snapd", msg=text) for text in ("a", "", "b")]
    answers["get_notifies"] = [
        ours[0],
        Garbage(),
        SimpleNamespace(name="x", msg="c"),
        GarbageText(),
        *ours[1:],
    ]
    assert engine_with().take_notifications() == ["a", "", "b"]


# --- closing one -------------------------------------------------------------------------------


def test_a_closed_engine_has_unregistered_everything_and_does_nothing(answers: dict[str, Any]) -> None:
    engine = engine_with()
    raw = raw_of(engine)
    engine.register(4096, 64)
    engine.register(8192, 64)
    engine.unregister(4096)
    engine.close()
    engine.close()
    assert [call for call in raw.calls if call[0] == "unregister_memory"] == [
        ("unregister_memory", 4096),
        ("unregister_memory", 8192),
    ]
    with pytest.raises(TransportError, match="the engine is closed"):
        engine.submit("p:1", WRITE)
    assert list(mooncake_engine._retired) == [raw]


def test_closing_tells_what_could_not_be_unregistered_and_closes_all_the_same(
    answers: dict[str, Any],
) -> None:
    engine = engine_with()
    engine.register(4096, 64)
    answers["unregister_memory"] = -3
    with pytest.raises(TransportError, match=r"0x1000 \(-3\)"):
        engine.close()
    assert len(mooncake_engine._retired) == 1
    engine.close()


def test_only_so_many_closed_engines_are_kept_and_the_oldest_is_deleted(answers: dict[str, Any]) -> None:
    kept = []
    for _ in range(RETIRED_MAX + 2):
        engine = engine_with()
        kept.append(weakref.ref(raw_of(engine)))
        engine.close()
    del engine
    gc.collect()
    assert [ref() is not None for ref in kept] == [False] * 2 + [True] * RETIRED_MAX


def test_an_engine_that_is_to_be_deleted_is_not_kept(answers: dict[str, Any]) -> None:
    engine = engine_with()
    raw = weakref.ref(raw_of(engine))
    engine.register(4096, 64)
    engine.close(is_deleted=True)
    gc.collect()
    assert raw() is None and not mooncake_engine._retired
    engine.close(is_deleted=True)


def test_a_forked_child_closes_the_engines_of_its_parent_and_deletes_none(answers: dict[str, Any]) -> None:
    live, closed = engine_with(), engine_with()
    kept = [weakref.ref(raw_of(live)), weakref.ref(raw_of(closed))]
    closed.close()
    child = os.fork()
    if child == 0:
        is_right = False
        try:
            with pytest.raises(TransportError, match="the engine is closed"):
                live.submit("p:1", WRITE)
            for _ in range(RETIRED_MAX + 1):
                engine_with().close()
            del live, closed
            gc.collect()
            is_right = all(ref() is not None for ref in kept)
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert live.submit("p:1", WRITE) == 7, "the parent's goes on"


# --- D's engines -------------------------------------------------------------------------------


class Maker:
    """Makes engines and knows them."""

    def __init__(self) -> None:
        self.made: list[FakeEngine] = []
        self.refuses: set[int] = set()

    def __call__(self, config: MooncakeConfig) -> FakeEngine:
        engine = FakeEngine(config)
        engine.refuses = self.refuses
        self.made.append(engine)
        return engine


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def engines(maker: Maker) -> MooncakeEngines:
    return MooncakeEngines(MooncakeConfig(), make=maker)


def test_no_engine_is_made_before_it_is_needed(maker: Maker, engines: MooncakeEngines) -> None:
    assert maker.made == []
    engines.acquire("p:1", "e1")
    assert len(maker.made) == 1


def test_all_peers_share_an_engine(maker: Maker, engines: MooncakeEngines) -> None:
    assert engines.acquire("p:1", "e1") is engines.acquire("q:1", "e2") is engines.acquire("p:1", "e1")
    assert len(maker.made) == 1


def test_another_epoch_at_the_same_address_gets_a_fresh_engine_with_the_same_sources(
    maker: Maker, engines: MooncakeEngines
) -> None:
    """The segment that the old engine has cached is stale, and stays so."""
    engines.register_source(4096, 64)
    engines.register_source(8192, 64)
    old = engines.acquire("p:1", "e1")
    fresh = engines.acquire("p:1", "e2")
    assert fresh is not old
    assert maker.made[1].registered == maker.made[0].registered == {4096: 64, 8192: 64}
    assert engines.acquire("p:1", "e2") is fresh
    assert engines.acquire("q:1", "e3") is fresh


def test_an_old_engine_is_closed_when_no_writer_uses_it_any_more(
    maker: Maker, engines: MooncakeEngines
) -> None:
    old, again = engines.acquire("p:1", "e1"), engines.acquire("p:1", "e1")
    engines.acquire("p:1", "e2")
    engines.release(old, "p:1")
    assert not maker.made[0].is_closed
    engines.release(again, "p:1")
    assert maker.made[0].is_closed
    assert not maker.made[1].is_closed


def test_an_engine_that_nobody_used_is_closed_when_a_fresh_one_comes(
    maker: Maker, engines: MooncakeEngines
) -> None:
    engines.release(engines.acquire("p:1", "e1"), "p:1")
    assert not maker.made[0].is_closed, "it is the current one"
    engines.acquire("p:1", "e2")
    assert maker.made[0].is_closed


@pytest.fixture
def mapping(maker: Maker) -> MooncakeEngines:
    """Engines that keep arenas mapped."""
    return MooncakeEngines(MooncakeConfig(protocol="nvlink_intra"), make=maker)


def test_an_engine_that_maps_arenas_is_deleted_with_the_last_writer_to_one(
    maker: Maker, mapping: MooncakeEngines
) -> None:
    """The next life of a daemon has another name, so nobody would ever ask for the old one again."""
    mapping.register_source(4096, 64)
    first, second = mapping.acquire("p:1", "e1"), mapping.acquire("p:1", "e1")
    mapping.release(first, "p:1")
    assert mapping.acquire("p:1", "e1") is first, "there is a writer to it"
    mapping.release(first, "p:1")
    mapping.release(second, "p:1")
    assert maker.made[0].is_deleted.wait(20)
    fresh = mapping.acquire("p:2", "e2")
    assert fresh is not first and maker.made[1].registered == {4096: 64}
    assert not maker.made[1].is_closed


def test_an_engine_that_maps_arenas_is_for_one_daemon_so_that_no_other_keeps_them_mapped(
    maker: Maker, mapping: MooncakeEngines
) -> None:
    mine, others = mapping.acquire("p:1", "e1"), mapping.acquire("q:1", "e")
    assert mine is not others
    assert mapping.acquire("p:1", "e1") is mine and mapping.acquire("q:1", "e") is others
    for _ in range(2):
        mapping.release(mine, "p:1")
    assert maker.made[0].is_deleted.wait(20) and not maker.made[1].is_closed
    mapping.register_source(4096, 64)
    assert maker.made[1].registered == {4096: 64} and len(maker.made) == 2


def test_a_writer_that_learns_of_the_next_daemon_early_does_not_keep_the_arena_of_the_one_before(
    maker: Maker, mapping: MooncakeEngines
) -> None:
    early, late = mapping.acquire("p:1", "e1"), mapping.acquire("p:1", "e1")
    mapping.release(early, "p:1")
    fresh = mapping.acquire("p:2", "e2")
    assert fresh is not late and not maker.made[0].is_closed
    mapping.release(late, "p:1")
    assert maker.made[0].is_deleted.wait(20)
    assert mapping.acquire("p:2", "e2") is fresh


def test_an_engine_that_is_still_used_is_enough_to_register_a_source_with(
    maker: Maker, mapping: MooncakeEngines
) -> None:
    old, again = mapping.acquire("p:1", "e1"), mapping.acquire("p:1", "e1")
    fresh = mapping.acquire("p:1", "e2")
    mapping.release(fresh, "p:1")
    mapping.register_source(4096, 64)
    assert maker.made[0].registered == {4096: 64} and len(maker.made) == 2
    assert old is again


def test_where_there_is_no_thread_to_delete_an_engine_in_it_is_kept_for_a_while(
    maker: Maker, mapping: MooncakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine = mapping.acquire("p:1", "e1")
    monkeypatch.setattr(threading.Thread, "start", start)
    mapping.release(engine, "p:1")
    assert maker.made[0].is_closed and not maker.made[0].is_deleted.is_set()


class NotingRaw(Raw):
    """It notes how many calls are under way when it is deleted."""

    def __init__(self, answers: dict[str, Any], counts: list[int]) -> None:
        super().__init__(answers)
        self.counts = counts

    def __del__(self) -> None:
        self.counts.append(mooncake_engines.CALLS.count)


@pytest.fixture
def counts(answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the calls that are under way whenever a TransferEngine is deleted."""
    counts: list[int] = []
    answers["module"].TransferEngine = lambda: NotingRaw(answers, counts)
    monkeypatch.setattr(MooncakeEngine, "_refuse_what_would_be_swallowed", lambda *_: None)
    # Threads of other tests that end later would be taken off this count.
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "snapd-delete"])
    monkeypatch.setattr(mooncake_engines, "CALLS", Calls())
    return counts


@pytest.mark.parametrize("code", [0, -1], ids=["clean", "refused"])
def test_an_engine_is_deleted_in_a_call_that_the_end_of_the_process_waits_for(
    answers: dict[str, Any], counts: list[int], code: int
) -> None:
    mapping = MooncakeEngines(MooncakeConfig(protocol="nvlink_intra"))
    mapping.register_source(4096, 64)
    answers["unregister_memory"] = code
    mapping.release(mapping.acquire("p:1", "e1"), "p:1")
    wait_for(lambda: bool(counts))
    assert counts == [1]
    assert mooncake_engines.CALLS.rest()


def test_no_engine_is_deleted_by_a_thread_while_the_process_ends(
    answers: dict[str, Any], counts: list[int]
) -> None:
    mapping = MooncakeEngines(MooncakeConfig(protocol="nvlink_intra"))
    engine = mapping.acquire("p:1", "e1")
    mooncake_engines.CALLS.rest()
    mapping.release(engine, "p:1")
    assert not [thread for thread in threading.enumerate() if thread.name == "snapd-delete"]
    del engine
    gc.collect()
    assert not counts and len(mooncake_engine._retired) == 1


def test_what_an_engine_remembers_of_peers_is_bounded(maker: Maker, engines: MooncakeEngines) -> None:
    for number in range(SEGMENTS_MAX):
        engines.release(engines.acquire(f"p:{number}", "e"), f"p:{number}")
    engines.release(engines.acquire("p:0", "e"), "p:0")
    assert len(maker.made) == 1
    engines.acquire("another:1", "e")
    assert len(maker.made) == 2


def test_a_source_is_registered_once_and_given_back_with_its_last_user(
    maker: Maker, engines: MooncakeEngines
) -> None:
    engines.register_source(4096, 64)
    engines.register_source(4096, 64)
    engines.unregister_source(4096, 64)
    assert maker.made[0].registered == {4096: 64}
    engines.unregister_source(4096, 64)
    assert maker.made[0].registered == {}
    with pytest.raises(TransportError, match="not registered"):
        engines.unregister_source(4096, 64)


def test_engines_that_are_still_used_learn_of_new_sources(maker: Maker, engines: MooncakeEngines) -> None:
    engines.acquire("p:1", "e1")
    engines.acquire("p:1", "e2")
    engines.register_source(4096, 64)
    assert [engine.registered for engine in maker.made] == [{4096: 64}] * 2
    engines.unregister_source(4096, 64)
    assert [engine.registered for engine in maker.made] == [{}] * 2


def test_a_source_that_one_engine_refuses_is_kept_by_none(maker: Maker, engines: MooncakeEngines) -> None:
    engines.acquire("p:1", "e1")
    engines.acquire("p:1", "e2")
    maker.made[1].refuses = {4096}
    with pytest.raises(TransportError, match="-7"):
        engines.register_source(4096, 64)
    assert [engine.registered for engine in maker.made] == [{}] * 2
    assert not engines.covers(4096, 64)


def test_a_fresh_engine_that_refuses_a_source_is_closed_and_the_old_one_stays(
    maker: Maker, engines: MooncakeEngines
) -> None:
    engines.register_source(4096, 64)
    old = engines.acquire("p:1", "e1")
    maker.refuses.add(4096)
    with pytest.raises(TransportError, match="-7"):
        engines.acquire("p:1", "e2")
    assert maker.made[1].is_closed
    assert engines.acquire("q:1", "e") is old


@pytest.mark.parametrize(
    ("address", "size_bytes", "covered"),
    [
        (4096, 64, True),
        (4100, 60, True),
        (4100, 61, False),
        (4095, 2, False),
        (4160, 1, False),
        (8192, 0, True),
    ],
)
def test_a_source_covers_what_lies_in_it(
    engines: MooncakeEngines, address: int, size_bytes: int, covered: bool
) -> None:
    engines.register_source(4096, 64)
    engines.register_source(8192, 64)
    assert engines.covers(address, size_bytes) is covered


def test_a_contact_that_ended_is_followed_by_a_new_one(maker: Maker, engines: MooncakeEngines) -> None:
    engine = engines.acquire("p:1", "e1")
    maker.made[0].open_error = TransportError("nobody")
    first = engines.open_soon(engine, "p:1", 0)
    wait_for(lambda: first.is_over)
    assert first.error == "nobody"
    second = engines.open_soon(engine, "p:1", 0)
    assert second is not first
    wait_for(lambda: second.is_over)


def test_closed_engines_serve_nobody(maker: Maker, engines: MooncakeEngines) -> None:
    engine = engines.acquire("p:1", "e1")
    engines.register_source(4096, 64)
    engines.close()
    assert maker.made[0].is_closed
    assert not engines.covers(4096, 64)
    with pytest.raises(TransportError, match="closed"):
        engines.release(engine, "p:1")


def test_a_process_has_one_set_of_engines_for_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MooncakeEngines, "_shared", {})
    first = MooncakeEngines.shared(MooncakeConfig(settings={"MC_A": "1", "MC_B": "2"}))
    assert MooncakeEngines.shared(MooncakeConfig(settings={"MC_B": "2", "MC_A": "1"})) is first
    assert MooncakeEngines.shared(MooncakeConfig()) is not first
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert MooncakeEngines.shared(MooncakeConfig(settings={"MC_A": "1", "MC_B": "2"})) is not first, "a fork"


def test_without_a_package_making_an_engine_says_how_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ExtraMissing("pip install 'kv-snapd[mooncake-cpu]'")

    monkeypatch.setattr(mooncake_engine, "load_engine_module", missing)
    with pytest.raises(ExtraMissing, match="mooncake-cpu"):
        MooncakeEngines(MooncakeConfig()).acquire("p:1", "e1")

"""D's side: what SGLang's tree holds goes over, and stays in the tree until it is there."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from inject_stage import P, Stage, serving, staged, tokens_of, wait_until
from sglang_cases import KINDS, SIZE_TOKENS, kind_id, write_truth

from snapd.core.events import State
from snapd.engines.sglang_inject_push import SessionPush, SessionPushes
from snapd.errors import ConfigError, InvalidRequest, Reason, UnsupportedEngine
from snapd.kv.integrity import KeyedIntegrity
from snapd.layout import Namespace
from tests.integration.daemon_process import DaemonProcess

pytestmark = pytest.mark.usefixtures("sglang")
every_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_id)
PAGED = ("mha", "unified-rust", 16)
KEY = bytes(range(7, 71))


@pytest.fixture(scope="module")
def daemon(sglang: None) -> Iterator[DaemonProcess]:
    with serving() as daemon:
        yield daemon


@dataclasses.dataclass
class D:
    """A decode worker with a tree of its own kind, beside a stage's P."""

    stage: Stage
    engine: P
    pushes: SessionPushes

    def finish(self, push: SessionPush) -> SessionPush:
        def poll() -> bool:
            self.pushes.poll()
            return push.done

        wait_until(poll, "the push ends")
        return push


@pytest.fixture
def d_of(daemon: DaemonProcess) -> Iterator[Callable[..., D]]:
    """A function that makes a D and a P of one kind. At the end nothing is pinned on either."""
    stages, ds = [], []

    def make(kind: Any, p: dict[str, Any] | None = None, **options: Any) -> D:
        context = staged(daemon, kind, **(p or {}))
        stage = context.__enter__()
        stages.append(context)
        engine = P(stage.d, kind, stage.namespace)
        pushes = SessionPushes(stage.d, engine.allocator, engine.tree, stage.namespace, **options)
        ds.append(D(stage, engine, pushes))
        return ds[-1]

    yield make
    for d in ds:
        d.pushes.close()
        d.engine.check()
        assert d.engine.pinned() == 0, "a prefix is still pinned on D"
        d.engine.injector.close()
    for context in stages:
        context.__exit__(None, None, None)


@every_kind
def test_what_ds_tree_holds_is_in_ps_tree_afterwards(d_of: Callable[..., D], kind: Any) -> None:
    """The last token has no KV, and what of it fills no page stays behind."""
    d, tokens = d_of(kind), tokens_of(72)
    d.engine.compute(tokens[:-1])
    push = d.finish(d.pushes.start("s", tokens))
    assert (push.result.ok, push.num_tokens) == (True, d.engine.whole(71))
    request = d.stage.request("s", tokens, push.result.slab_handle)
    assert d.stage.p.injector.finalize_ingest(request).ok
    assert d.stage.p.resident(tokens) == d.engine.whole(71)


@every_kind
def test_pages_are_pinned_until_the_push_is_final(d_of: Callable[..., D], kind: Any) -> None:
    d, tokens = d_of(kind), tokens_of(96)
    d.engine.compute(tokens)
    d.engine.compute(tokens_of(48, seed=1))
    push = d.pushes.start("s", tokens)
    assert (push.done, d.pushes.num_open, d.engine.pinned()) == (False, 1, 96)
    assert d.engine.evict() == 48, "of the session itself nothing goes"
    d.finish(push)
    assert push.result.ok and (d.pushes.num_open, d.engine.pinned()) == (0, 0)
    assert d.engine.evict() == 96


def test_the_second_turn_sends_what_p_lacks(d_of: Callable[..., D]) -> None:
    d, tokens = d_of(PAGED), tokens_of(160)
    for turn in (64, 160):
        d.engine.compute(tokens[:turn])
        push = d.finish(d.pushes.start("s", tokens[:turn]))
        assert d.stage.ingest("s", tokens[:turn], push.result.slab_handle).ok
    assert (push.result.token_start, push.result.num_tokens) == (64, 96)
    assert d.stage.p.resident(tokens) == 160
    again = d.finish(d.pushes.start("s", tokens, token_start=32, use_resident_hint=False))
    assert (again.result.token_start, again.result.num_tokens) == (32, 128)


@every_kind
@pytest.mark.parametrize("left", [0, 48])
def test_what_was_evicted_is_not_sent_and_the_daemon_is_not_asked(
    d_of: Callable[..., D], kind: Any, left: int
) -> None:
    d, tokens = d_of(kind), tokens_of(96)
    d.engine.compute(tokens[:left])
    push = d.pushes.start("s", tokens)
    assert push.done and (push.result.ok, push.result.reason) == (False, Reason.SESSION_NOT_RESIDENT)
    assert f"D holds {left} of 96 tokens" in push.result.detail
    assert (push.result.slab_handle, d.engine.pinned()) == (0, 0)


def test_of_less_than_a_page_there_is_nothing_to_send(d_of: Callable[..., D]) -> None:
    d = d_of(PAGED)
    for num_tokens in (0, 1, 15):
        assert d.pushes.start("s", tokens_of(num_tokens)).result.reason is Reason.SESSION_NOT_RESIDENT


def test_a_refused_push_pins_nothing(d_of: Callable[..., D]) -> None:
    """As when the buffer is full; here the suffix starts behind the end."""
    d, tokens = d_of(PAGED), tokens_of(64)
    d.engine.compute(tokens)
    push = d.pushes.start("s", tokens, token_start=64)
    assert push.done and (push.result.ok, push.result.reason) == (False, Reason.INVALID_REQUEST)
    assert (d.engine.pinned(), d.pushes.num_open) == (0, 0)


def test_a_push_that_raises_at_once_pins_nothing(d_of: Callable[..., D]) -> None:
    d, tokens = d_of(PAGED), tokens_of(64)
    d.engine.compute(tokens)
    with pytest.raises(InvalidRequest, match="event"):
        d.pushes.start("s", tokens, after=[None])  # type: ignore[list-item]
    assert d.engine.pinned() == 0


def test_there_is_a_most_of_pushes_at_a_time(d_of: Callable[..., D]) -> None:
    d, tokens = d_of(PAGED, pushes_max=2), tokens_of(64)
    d.engine.compute(tokens)
    first, second = (d.pushes.start(name, tokens) for name in "ab")
    third = d.pushes.start("c", tokens)
    assert third.done and third.result.reason is Reason.LIMIT_REACHED
    assert d.engine.pinned() == 64
    d.finish(first)
    d.finish(second)
    assert d.finish(d.pushes.start("c", tokens)).result.ok


def test_the_oldest_goes_first_and_a_poll_moves_no_more_than_it_may(d_of: Callable[..., D]) -> None:
    d, tokens = d_of(PAGED), tokens_of(64)
    d.engine.compute(tokens)
    first, second = (d.pushes.start(name, tokens) for name in "ab")
    assert d.pushes.poll(0) == [] and (bytes_done(first), bytes_done(second)) == (0, 0)
    assert d.pushes.poll(1) == [] and bytes_done(first) > 0 and bytes_done(second) == 0
    ended: list[SessionPush] = []
    wait_until(lambda: ended.extend(d.pushes.poll()) or len(ended) == 2, "both end")
    assert ended == [first, second] and d.pushes.poll() == []


def bytes_done(push: SessionPush) -> int:
    return push._job.bytes_done


def test_a_push_that_is_given_up_lets_go_of_its_pages(d_of: Callable[..., D]) -> None:
    d, tokens = d_of(PAGED), tokens_of(64)
    d.engine.compute(tokens)
    push = d.pushes.start("s", tokens)
    result = push.cancel(Reason.SESSION_NOT_RESIDENT)
    assert push.done and (result.ok, result.reason) == (False, Reason.SESSION_NOT_RESIDENT)
    assert d.engine.pinned() == 0
    assert d.stage.state(result.slab_handle) is State.ABORTED
    assert d.pushes.poll() == [push] and d.pushes.num_open == 0


@every_kind
@pytest.mark.parametrize("moved", [0, 1])
def test_after_a_flush_nothing_is_committed(d_of: Callable[..., D], kind: Any, moved: int) -> None:
    """Other tokens' KV in the same slots would have a fitting checksum."""
    d, tokens = d_of(kind), tokens_of(192)
    d.engine.compute(tokens)
    push = d.pushes.start("s", tokens)
    d.pushes.poll(moved)
    d.engine.flush()
    d.engine.compute(tokens_of(SIZE_TOKENS, seed=1))
    d.pushes.poll()
    assert push.done and push.result.reason is Reason.SESSION_NOT_RESIDENT
    assert d.stage.state(push.result.slab_handle) is State.ABORTED
    assert d.engine.evict() == SIZE_TOKENS, "nothing was unpinned that is another's"


def test_a_push_that_fails_in_a_poll_ends_and_the_others_go_on(
    d_of: Callable[..., D], monkeypatch: pytest.MonkeyPatch
) -> None:
    d, tokens = d_of(PAGED), tokens_of(64)
    d.engine.compute(tokens)
    first, second = (d.pushes.start(name, tokens) for name in "ab")

    def fail(max_bytes: int) -> None:
        raise RuntimeError("a copy failed")

    monkeypatch.setattr(first._job, "_advance", fail)
    d.finish(second)
    assert first.done and (first.result.ok, first.result.reason) == (False, Reason.TRANSFER_FAILED)
    assert second.result.ok and d.engine.pinned() == 0


def test_a_closed_d_holds_nothing(d_of: Callable[..., D]) -> None:
    d, tokens = d_of(PAGED), tokens_of(64)
    d.engine.compute(tokens)
    pushes = [d.pushes.start(name, tokens) for name in "ab"]
    d.pushes.close()
    assert all(push.done for push in pushes) and (d.engine.pinned(), d.pushes.num_open) == (0, 0)


@pytest.mark.parametrize("is_same", [True, False])
def test_with_a_key_on_both_sides_macs_are_compared(d_of: Callable[..., D], is_same: bool) -> None:
    ds = KeyedIntegrity(KEY, algorithm="blake2b")
    ps = KeyedIntegrity(KEY if is_same else KEY[::-1], algorithm="blake2b")
    d, tokens = d_of(PAGED, p={"integrity": ps}, integrity=ds), tokens_of(64)
    d.engine.compute(tokens)
    push = d.finish(d.pushes.start("s", tokens))
    assert push.result.ok
    assert d.stage.ingest("s", tokens, push.result.slab_handle).ok == is_same
    assert d.stage.p.resident(tokens) == (64 if is_same else 0)


def test_slots_may_change_once_the_push_is_final(d_of: Callable[..., D]) -> None:
    """What P gets is what was in the tree when the push began."""
    d, tokens = d_of(PAGED), tokens_of(64)
    d.engine.compute(tokens)
    push = d.finish(d.pushes.start("s", tokens))
    d.engine.evict()
    slots = d.engine.allocator.alloc(SIZE_TOKENS)
    write_truth(d.engine.pool, tokens_of(SIZE_TOKENS, seed=5), slots)
    d.engine.allocator.free(slots)
    assert d.stage.ingest("s", tokens, push.result.slab_handle).ok
    assert d.stage.p.resident(tokens) == 64


def test_parts_that_are_not_known_are_refused(d_of: Callable[..., D]) -> None:
    d = d_of(PAGED)
    with pytest.raises(UnsupportedEngine, match="radix tree"):
        SessionPushes(d.stage.d, d.engine.allocator, object(), d.stage.namespace)
    with pytest.raises(ConfigError, match="extra_key"):
        SessionPushes(d.stage.d, d.engine.allocator, d.engine.tree, Namespace(lora="x"))

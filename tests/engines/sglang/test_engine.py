"""Real SGLang engines, a D and a P, with a real daemon between them; every answer against an engine without.

D and P do what they do when prefill and decode are disaggregated: P computes the prompt, D has the same KV
and decodes the answer, and at the next turn P gets the answer's KV back. Here D computes the prompt's KV
itself; SGLang's own disaggregation is in test_disaggregation.py.
"""

import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_process import PAGE_SIZE_TOKENS, VOCABULARY, EngineProcess, engine_config, make_model

from snapd.client import Client
from snapd.core.events import State
from snapd.mapping import map_arena
from snapd.units import align_down
from tests.integration.daemon_process import DaemonProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

PATIENCE_S = 120.0
PROMPT_TOKENS = 200
ANSWER_TOKENS = 60
# Holds everything that is pushed here, so that nothing is evicted.
ARENA_BYTES = 8 << 20
SHOWN_TOKENS = 8
# Nothing may end because the machine is busy.
PATIENT = {
    "lease_ms": 60_000,
    "reserve_timeout_ms": 600_000,
    "transfer_timeout_ms": 600_000,
    "ready_ttl_ms": 3_600_000,
}
# K and V of three layers, two heads of 32 numbers of 4 bytes.
TOKEN_BYTES = 2 * 3 * 2 * 32 * 4


class Shown:
    """What the run has shown, for its last line."""

    def __init__(self) -> None:
        self.turns = 0
        self.prompt_tokens = 0
        self.reused_tokens = 0
        self.unequal = 0
        self.corrupt_reached_tree = 0
        self.control_differs = False

    def line(self) -> str:
        return json.dumps({
            "engine": "sglang", "turns": self.turns, "equal": self.unequal == 0,
            "prompt_tokens": self.prompt_tokens, "reused_tokens": self.reused_tokens,
            "corrupt_reached_tree": self.corrupt_reached_tree, "control_differs": self.control_differs,
        })  # fmt: skip


class Conversation:
    """One agent's session: every turn's prompt is the last one, its answer, and what the user says then."""

    def __init__(self, trio: "Trio", seed: int) -> None:
        self.trio = trio
        self.seed = seed
        self.prompt = self._said(PROMPT_TOKENS)
        self.answer: list[int] = []

    def _said(self, num_tokens: int) -> list[int]:
        start = len(getattr(self, "prompt", ()))
        return [
            3 + (7_919 * self.seed + 31 * (start + at) ** 2 + at) % (VOCABULARY - 3)
            for at in range(num_tokens)
        ]

    @property
    def own_tokens(self) -> int:
        """What P holds of the prompt when it has computed it: whole pages."""
        return align_down(len(self.prompt), PAGE_SIZE_TOKENS)

    @property
    def answered_tokens(self) -> int:
        """What D holds after its answer: the last token that it sampled has no KV."""
        return align_down(len(self.prompt) + len(self.answer) - 1, PAGE_SIZE_TOKENS)

    def decode(self) -> None:
        """Have D answer."""
        self.answer, _ = self.trio.d.generate(self.prompt, ANSWER_TOKENS)

    def ask(self, num_tokens: int = 50) -> None:
        """Have the user say something."""
        said = self._said(num_tokens)
        self.prompt = [*self.prompt, *self.answer, *said]
        self.answer = []

    def first_turn(self, p: EngineProcess) -> int:
        """Have P compute the prompt and D decode the answer; return what can be reused then."""
        before = self.trio.ready_tokens()
        p.generate(self.prompt, 1)
        self.decode()
        tokens = self.answered_tokens - self.own_tokens
        self.trio.wait_for(lambda: self.trio.ready_tokens() >= before + self.answered_tokens, "D has pushed")
        assert tokens > 0
        return self.answered_tokens


class Trio:
    """A daemon; D, P, and a P that does not verify; an engine without snapd, which computes every token."""

    def __init__(self, daemon: DaemonProcess, directory: Path, shown: Shown) -> None:
        self.daemon = daemon
        self.shown = shown
        model = directory / "model"
        make_model(model)
        common = {"socket_path": str(daemon.socket_path), "timeout_s": 30.0, "retry_s": 0.2, "model": "tiny"}
        roles: dict[str, dict[str, Any]] = {
            "d": {"role": "decode"}, "p": {"role": "prefill"}, "blind": {"role": "prefill", "verify": False},
        }  # fmt: skip
        self.hold = directory / "hold"
        # Loads that were accepted are held while this file is there.
        self.hold_loads = self.hold.with_suffix(".loads")
        self.engines = {
            name: EngineProcess(
                directory, name, engine_config(model, common | role), SNAPD_TEST_HOLD=str(self.hold)
            )
            for name, role in roles.items()
        }
        self.d, self.p, self.blind = self.engines.values()
        plain = engine_config(model, None) | {"disable_radix_cache": True}
        self.plain = self.engines["plain"] = EngineProcess(directory, "plain", plain)

    def client(self) -> Client:
        return Client(str(self.daemon.socket_path), timeout_s=PATIENCE_S)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until_s, f"not within {PATIENCE_S} s: {what}"
            time.sleep(0.02)

    def ready_tokens(self) -> int:
        """Return the tokens of all READY snapshots."""
        with self.client() as client:
            return sum(session.num_tokens for session in client.list_sessions(states=(State.READY,)).sessions)

    def reasons(self) -> list[str]:
        """Return how attempts ended, as the daemon's log says."""
        lines = [
            json.loads(line)
            for line in self.daemon.log_path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        return [line["reason"] for line in lines if line["event"] == "sync.outcome"]

    def restart_daemon(self) -> None:
        """Start it again, and wait until the Ps have declared their layout."""
        self.daemon.restart()
        with self.client() as client:
            self.wait_for(lambda: client.stats().core.layouts > 0, "P has declared its layout")

    def expected(self, token_ids: Sequence[int], max_tokens: int = SHOWN_TOKENS) -> list[int]:
        """Return what SGLang answers without snapd."""
        answer, cached = self.plain.generate(token_ids, max_tokens)
        assert cached == 0
        return answer

    def corrupt(self) -> None:
        """Turn the sign of every number in the arena."""
        import torch

        arena = map_arena(str(self.daemon.socket_path), 0, True, PATIENCE_S)
        torch.frombuffer(arena.buffer, dtype=torch.int32).bitwise_xor_(-(1 << 31))
        arena.close()

    def assert_equal(self, p: EngineProcess, conversation: Conversation, cached_tokens: int) -> None:
        """P's answer is that of the engine without snapd, and P computed no more than it had to."""
        answer, cached = p.generate(conversation.prompt, SHOWN_TOKENS)
        expected = self.expected(conversation.prompt)
        self.shown.unequal += answer != expected
        self.shown.prompt_tokens += len(conversation.prompt)
        assert answer == expected
        assert cached == cached_tokens
        self.shown.turns += 1


@pytest.fixture(scope="module")
def trio(sglang: None, request: pytest.FixtureRequest) -> Iterator[Trio]:
    shown = Shown()
    with tempfile.TemporaryDirectory(prefix="snapd-") as directory, contextlib.ExitStack() as stack:
        daemon = DaemonProcess(Path(directory), {"size": ARENA_BYTES, **PATIENT})
        stack.callback(daemon.stop)
        made = Trio(daemon, Path(directory), shown)
        for engine in made.engines.values():
            stack.callback(engine.stop)
        # All at once.
        for engine in made.engines.values():
            stack.callback(engine.hang_up)
        for engine in made.engines.values():
            engine.ready()
        yield made
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{shown.line()}")


def test_ps_answers_with_ds_kv_are_those_without(trio: Trio) -> None:
    """Turns 2 and 3: P computes only what D did not, and P and D answer as an engine without snapd does."""
    conversation = Conversation(trio, seed=1)
    assert conversation.own_tokens > 0
    reusable = conversation.first_turn(trio.p)
    for _ in range(2):
        assert conversation.answer == trio.expected(conversation.prompt, ANSWER_TOKENS)
        held = conversation.own_tokens
        conversation.ask()
        trio.assert_equal(trio.p, conversation, cached_tokens=reusable)
        trio.shown.reused_tokens += reusable - held
        before = trio.ready_tokens()
        conversation.decode()
        reusable = conversation.answered_tokens
        trio.wait_for(lambda before=before: trio.ready_tokens() > before, "D has pushed")


def test_a_prompt_that_p_has_forgotten_comes_back_too(trio: Trio) -> None:
    conversation = Conversation(trio, seed=2)
    reusable = conversation.first_turn(trio.p)
    trio.p.flush()
    conversation.ask()
    trio.assert_equal(trio.p, conversation, cached_tokens=reusable)
    trio.shown.reused_tokens += reusable


def test_with_the_daemon_stopped_p_computes(trio: Trio) -> None:
    conversation = Conversation(trio, seed=3)
    conversation.first_turn(trio.p)
    own_tokens = conversation.own_tokens
    trio.daemon.stop()
    try:
        conversation.ask()
        trio.assert_equal(trio.p, conversation, cached_tokens=own_tokens)
    finally:
        trio.restart_daemon()


def test_with_the_daemon_full_p_computes(trio: Trio) -> None:
    Conversation(trio, seed=9).first_turn(trio.p)
    conversation = Conversation(trio, seed=4)
    with trio.client() as client:
        ready = client.list_sessions(states=(State.READY,)).sessions
        for session in ready:
            client.abort(session.slab_handle, drained=True)
        num_tokens = ARENA_BYTES // TOKEN_BYTES - 8
        filler = client.prepare_receive("filler", num_tokens, ready[0].layout_fingerprint)
        trio.p.generate(conversation.prompt, 1)
        own_tokens = conversation.own_tokens
        conversation.decode()
        trio.wait_for(lambda: "snapshot-buf-full" in trio.reasons(), "D was refused")
        conversation.ask()
        trio.assert_equal(trio.p, conversation, cached_tokens=own_tokens)
        client.transfer_failed(filler.slab_handle, drained=True)


@pytest.mark.parametrize(("seed", "is_moving"), [(5, False), (10, True)])
def test_with_the_daemon_killed_while_d_pushes_p_computes(trio: Trio, seed: int, is_moving: bool) -> None:
    """While D waits for its answer, and with some of the bytes written."""
    conversation = Conversation(trio, seed)
    trio.p.generate(conversation.prompt, 1)
    own_tokens = conversation.own_tokens
    if is_moving:
        trio.hold.touch()
        conversation.decode()
        trio.wait_for(trio.hold.with_suffix(".held").exists, "D has written some bytes")
        with trio.client() as client:
            assert client.list_sessions(states=(State.TRANSFERRING,)).sessions
    else:
        trio.daemon.process.send_signal(signal.SIGSTOP)
        conversation.decode()
    trio.daemon.kill()
    trio.hold.unlink(missing_ok=True)
    try:
        conversation.ask()
        trio.assert_equal(trio.p, conversation, cached_tokens=own_tokens)
    finally:
        trio.restart_daemon()


def test_corrupt_bytes_never_reach_p(trio: Trio) -> None:
    conversation = Conversation(trio, seed=6)
    reusable = conversation.first_turn(trio.p)
    own_tokens = conversation.own_tokens
    trio.corrupt()
    before = trio.reasons().count("checksum-mismatch")
    conversation.ask()
    answer, cached = trio.p.generate(conversation.prompt, SHOWN_TOKENS)
    trio.shown.corrupt_reached_tree += cached > own_tokens
    is_equal = answer == trio.expected(conversation.prompt)
    trio.shown.unequal += not is_equal
    assert is_equal
    assert cached == own_tokens < reusable
    trio.wait_for(lambda: trio.reasons().count("checksum-mismatch") > before, "the log says why")


def load_held(trio: Trio, seed: int, act: Callable[[], object]) -> tuple[Conversation, dict[str, Any], int]:
    """Have P accept a load, do something, and have it go on; return P's answer, and what it could reuse."""
    conversation = Conversation(trio, seed)
    reusable = conversation.first_turn(trio.p)
    conversation.ask()
    trio.hold_loads.touch()
    request = {"do": "generate", "token_ids": conversation.prompt, "max_tokens": SHOWN_TOKENS}
    try:
        trio.p.begin(request)
        trio.wait_for(trio.hold_loads.with_suffix(".loading").exists, "P has accepted the load")
        act()
    finally:
        trio.hold_loads.unlink()
        trio.hold_loads.with_suffix(".loading").unlink(missing_ok=True)
    return conversation, trio.p.end(), reusable


def test_bytes_that_change_after_p_compared_them_end_the_request_without_a_token(trio: Trio) -> None:
    """And P goes on: it computes what it could not have."""
    mismatches = trio.reasons().count("checksum-mismatch")
    conversation, reply, reusable = load_held(trio, 11, trio.corrupt)
    assert "External KV cache load failed" in str(reply), reply
    assert not reply.get("token_ids"), reply
    trio.wait_for(lambda: trio.reasons().count("checksum-mismatch") > mismatches, "the log says why")
    assert "checksum-mismatch" in trio.p.stderr
    answer, cached = trio.p.generate(conversation.prompt, SHOWN_TOKENS)
    trio.shown.corrupt_reached_tree += cached >= reusable
    assert answer == trio.expected(conversation.prompt)
    assert cached < reusable


def test_a_load_outlives_the_daemon(trio: Trio) -> None:
    """What P has compared is still mapped, and is compared again."""
    try:
        conversation, reply, reusable = load_held(trio, 12, trio.daemon.kill)
        assert reply["token_ids"] == trio.expected(conversation.prompt)
        assert reply["meta"]["cached_tokens"] == reusable
    finally:
        trio.restart_daemon()


def test_without_verification_corrupt_bytes_change_the_answer(trio: Trio) -> None:
    """The control: what the test above corrupts is what the answer is made of."""
    sound = Conversation(trio, seed=7)
    reusable = sound.first_turn(trio.blind)
    sound.ask()
    trio.assert_equal(trio.blind, sound, cached_tokens=reusable)
    corrupt = Conversation(trio, seed=8)
    reusable = corrupt.first_turn(trio.blind)
    trio.corrupt()
    corrupt.ask()
    answer, cached = trio.blind.generate(corrupt.prompt, SHOWN_TOKENS)
    assert cached == reusable
    trio.shown.control_differs = answer != trio.expected(corrupt.prompt)
    assert trio.shown.control_differs

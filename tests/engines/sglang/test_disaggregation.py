"""SGLang's own disaggregation, and a daemon: P prefills, Mooncake brings the KV to D, D decodes and pushes.

Every answer is compared with that of an engine that has neither snapd nor a cache, and computes every token.
"""

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_process import PAGE_SIZE_TOKENS, VOCABULARY, EngineProcess, engine_config, make_model
from pair_process import D_POOL_TOKENS, answer, start_d, start_p

from snapd.client import Client
from snapd.mapping import map_arena
from snapd.units import align_down
from tests.integration.daemon_process import DaemonProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

PATIENCE_S = 120.0
PROMPT_TOKENS = 200
ANSWER_TOKENS = 60
SAID_TOKENS = 50
# Holds everything that is pushed here, so that nothing is evicted.
ARENA_BYTES = 32 << 20
# Nothing may end because the machine is busy.
PATIENT = {
    "lease_ms": 60_000,
    "reserve_timeout_ms": 600_000,
    "transfer_timeout_ms": 600_000,
    "ready_ttl_ms": 3_600_000,
}


class Shown:
    """What the run has shown, for its last line."""

    def __init__(self) -> None:
        self.turns = 0
        self.prompt_tokens = 0
        self.reused_tokens = 0
        self.pushed_tokens = 0
        self.unequal = 0
        self.corrupt_reached_tree = 0
        self.control_differs = False

    def line(self) -> str:
        return json.dumps({
            "engine": "sglang-pd", "turns": self.turns, "equal": self.unequal == 0,
            "prompt_tokens": self.prompt_tokens, "reused_tokens": self.reused_tokens,
            "pushed_tokens": self.pushed_tokens, "corrupt_reached_tree": self.corrupt_reached_tree,
            "control_differs": self.control_differs,
        })  # fmt: skip


class Conversation:
    """One agent's session: every turn's prompt is the last one, its answer, and what the user says then."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.prompt: list[int] = []
        self.answer: list[int] = []
        self.say(PROMPT_TOKENS)

    def say(self, num_tokens: int = SAID_TOKENS) -> None:
        """Have the user say something."""
        self.prompt = [*self.prompt, *self.answer]
        self.answer = []
        for at in range(len(self.prompt), len(self.prompt) + num_tokens):
            self.prompt.append(3 + (7_919 * self.seed + 31 * at**2 + at) % (VOCABULARY - 3))

    @property
    def prompt_pages_tokens(self) -> int:
        """What P holds when it has computed the prompt: whole pages."""
        return align_down(len(self.prompt), PAGE_SIZE_TOKENS)

    @property
    def answered_tokens(self) -> int:
        """What D holds after its answer: the last token that it sampled has no KV."""
        return align_down(len(self.prompt) + len(self.answer) - 1, PAGE_SIZE_TOKENS)


class Deployment:
    """A daemon; D, and two Ps, one of which does not verify; an engine without snapd."""

    def __init__(self, daemon: DaemonProcess, directory: Path, shown: Shown) -> None:
        self.daemon = daemon
        self.shown = shown
        model = directory / "model"
        make_model(model)
        # Nobody says what they are: SGLang's mode does.
        linker = {"socket_path": str(daemon.socket_path), "timeout_s": 30.0, "retry_s": 0.2, "model": "tiny"}
        self.p, p_port = start_p(directory, "p", model, linker)
        self.blind, blind_port = start_p(directory, "blind", model, linker | {"verify": False})
        self.d = start_d(directory, "d", model, linker)
        self._ports = {self.p: p_port, self.blind: blind_port}
        plain = engine_config(model, None) | {"disable_radix_cache": True}
        self.plain = EngineProcess(directory, "plain", plain)
        self.engines = (self.p, self.blind, self.d, self.plain)

    def client(self) -> Client:
        return Client(str(self.daemon.socket_path), timeout_s=PATIENCE_S)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until_s, (
                f"not within {PATIENCE_S} s: {what}; D: {self.d.stderr[-2000:]}"
            )
            time.sleep(0.02)

    def log(self, event: str) -> list[dict[str, Any]]:
        """Return what the daemon's log has of a kind, of all its lives."""
        whole = [
            line for line in self.daemon.log_path.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
        return [line for line in map(json.loads, whole) if line["event"] == event]

    def pushed_tokens(self) -> int:
        """Return how many tokens D has pushed: those of all snapshots that ever were READY."""
        return sum(
            line["num_tokens"] for line in self.log("session.transition") if line["to_state"] == "READY"
        )

    def mismatches(self) -> int:
        """Return how often bytes were not what D committed."""
        return sum(line["reason"] == "checksum-mismatch" for line in self.log("sync.outcome"))

    def corrupt(self) -> None:
        """Turn the sign of every number in the arena."""
        import torch

        arena = map_arena(str(self.daemon.socket_path), 0, True, PATIENCE_S)
        torch.frombuffer(arena.buffer, dtype=torch.int32).bitwise_xor_(-(1 << 31))
        arena.close()

    def answer(self, conversations: Sequence[Conversation], p: EngineProcess | None = None) -> list[int]:
        """Have a P and D answer what was said; return how many tokens of each prompt P did not compute."""
        prompts = [conversation.prompt for conversation in conversations]
        p = p or self.p
        answers, cached = answer(p, self._ports[p], self.d, prompts, ANSWER_TOKENS)
        for conversation, tokens in zip(conversations, answers, strict=True):
            conversation.answer = tokens
        return cached

    def is_equal(self, conversation: Conversation) -> bool:
        """Return whether D's answer is that of the engine without snapd."""
        expected, cached = self.plain.generate(conversation.prompt, ANSWER_TOKENS)
        assert cached == 0
        return conversation.answer == expected

    def turns(
        self,
        conversations: Sequence[Conversation],
        cached_tokens: Sequence[int | None],
        p: EngineProcess | None = None,
    ) -> None:
        """Turns at once: the answers are right, and P computed no more than it had to; None: or more."""
        cached = self.answer(conversations, p)
        for conversation in conversations:
            is_equal = self.is_equal(conversation)
            self.shown.turns += 1
            self.shown.unequal += not is_equal
            self.shown.prompt_tokens += len(conversation.prompt)
            assert is_equal
        assert all(wanted in (None, got) for got, wanted in zip(cached, cached_tokens, strict=True)), cached

    def turn(
        self, conversation: Conversation, cached_tokens: int | None, p: EngineProcess | None = None
    ) -> None:
        """The same of one."""
        self.turns([conversation], [cached_tokens], p)

    @contextlib.contextmanager
    def pushing(self, num_tokens: int) -> Iterator[None]:
        """D pushes so many tokens meanwhile, and no more."""
        wanted = self.pushed_tokens() + num_tokens
        yield
        self.wait_for(lambda: self.pushed_tokens() >= wanted, f"{num_tokens} tokens are pushed")
        assert self.pushed_tokens() == wanted
        self.shown.pushed_tokens += num_tokens

    def first_turn(self, conversation: Conversation, p: EngineProcess | None = None) -> int:
        """Have it answered and pushed, and the user go on; return what can be reused then."""
        with self.pushing(align_down(PROMPT_TOKENS + ANSWER_TOKENS - 1, PAGE_SIZE_TOKENS)):
            self.turn(conversation, cached_tokens=0, p=p)
        held = conversation.answered_tokens
        conversation.say()
        return held

    def restart_daemon(self) -> None:
        """Start it again, and wait until both Ps have declared their layout, which is the same."""
        self.daemon.restart()
        with self.client() as client:
            self.wait_for(lambda: client.stats().core.layouts > 0, "P has declared its layout")


@pytest.fixture(scope="module")
def deployment(sglang: None, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    pytest.importorskip("mooncake.engine", reason="there is no transfer engine", exc_type=ImportError)
    shown = Shown()
    with tempfile.TemporaryDirectory(prefix="snapd-") as directory, contextlib.ExitStack() as stack:
        daemon = DaemonProcess(Path(directory), {"size": ARENA_BYTES, **PATIENT})
        stack.callback(daemon.stop)
        made = Deployment(daemon, Path(directory), shown)
        for engine in made.engines:
            stack.callback(engine.stop)
        # All at once.
        for engine in made.engines:
            stack.callback(engine.hang_up)
        for engine in made.engines:
            engine.ready()
        yield made
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{shown.line()}")


def test_p_reuses_what_d_decoded(deployment: Deployment) -> None:
    """Turns 2 to 4: P computes only what D did not, and no page is pushed twice."""
    conversation = Conversation(seed=1)
    held = computed = 0
    for turn in range(4):
        if turn == 3:
            # Now D has nothing: P sends it all of the prompt, and half of that came from D before.
            deployment.d.flush()
        reachable = align_down(len(conversation.prompt) + ANSWER_TOKENS - 1, PAGE_SIZE_TOKENS)
        with deployment.pushing(reachable - held):
            deployment.turn(conversation, cached_tokens=held)
        if turn:
            deployment.shown.reused_tokens += held - computed
        computed, held = conversation.prompt_pages_tokens, conversation.answered_tokens
        assert held == reachable > computed
        conversation.say()


def test_several_conversations_at_once(deployment: Deployment) -> None:
    """In one batch of P and of D, each with its own KV."""
    conversations = [Conversation(seed) for seed in (2, 3, 4)]
    held = [0, 0, 0]
    for _ in range(2):
        reachable = [
            align_down(len(conversation.prompt) + ANSWER_TOKENS - 1, PAGE_SIZE_TOKENS)
            for conversation in conversations
        ]
        with deployment.pushing(sum(reachable) - sum(held)):
            deployment.turns(conversations, held)
        held = [conversation.answered_tokens for conversation in conversations]
        for conversation in conversations:
            conversation.say()


def test_what_both_have_forgotten_comes_back(deployment: Deployment) -> None:
    """P has the whole prompt from the daemon, and D has it from P."""
    conversation = Conversation(seed=5)
    held = deployment.first_turn(conversation)
    deployment.p.flush()
    deployment.d.flush()
    deployment.turn(conversation, cached_tokens=held)
    deployment.shown.reused_tokens += held


def test_d_lets_go_of_what_it_has_pushed(deployment: Deployment) -> None:
    """D answers more than it has room for: nothing stays locked once it is pushed."""
    first, last, at_once = 100, 116, 4
    assert (last - first) * PROMPT_TOKENS > 1.5 * D_POOL_TOKENS
    for seed in range(first, last, at_once):
        deployment.turns([Conversation(seed + at) for at in range(at_once)], [0] * at_once)


def test_with_the_daemon_stopped_p_computes(deployment: Deployment) -> None:
    """And once it is back, D pushes and P reuses as before."""
    conversation = Conversation(seed=6)
    held = deployment.first_turn(conversation)
    # What D cannot push it offers again with what comes next: all that follows the first turn.
    after_two_more = held + 2 * (SAID_TOKENS + ANSWER_TOKENS)
    with deployment.pushing(align_down(after_two_more, PAGE_SIZE_TOKENS) - held):
        deployment.daemon.stop()
        try:
            deployment.turn(conversation, cached_tokens=align_down(PROMPT_TOKENS, PAGE_SIZE_TOKENS))
        finally:
            deployment.restart_daemon()
        conversation.say()
        # D may have tried again by now, or not.
        deployment.turn(conversation, cached_tokens=None)
    computed, held = conversation.prompt_pages_tokens, conversation.answered_tokens
    conversation.say()
    deployment.turn(conversation, cached_tokens=held)
    deployment.shown.reused_tokens += held - computed


def test_corrupt_bytes_never_reach_p_nor_d(deployment: Deployment) -> None:
    conversation = Conversation(seed=7)
    held = deployment.first_turn(conversation)
    computed = align_down(PROMPT_TOKENS, PAGE_SIZE_TOKENS)
    deployment.corrupt()
    # Whatever P has, D has it from P.
    deployment.d.flush()
    before = deployment.mismatches()
    (cached,) = deployment.answer([conversation])
    deployment.shown.corrupt_reached_tree += cached > computed
    is_equal = deployment.is_equal(conversation)
    deployment.shown.unequal += not is_equal
    assert is_equal
    assert cached == computed < held
    deployment.wait_for(lambda: deployment.mismatches() > before, "the log says why")


def test_without_verification_corrupt_bytes_change_ds_answer(deployment: Deployment) -> None:
    """The control: D's answer is made of what P has from the daemon, by way of the transfer engine."""
    sound = Conversation(seed=8)
    held = deployment.first_turn(sound, deployment.blind)
    deployment.d.flush()
    deployment.turn(sound, cached_tokens=held, p=deployment.blind)
    corrupt = Conversation(seed=9)
    held = deployment.first_turn(corrupt, deployment.blind)
    deployment.corrupt()
    deployment.d.flush()
    assert deployment.answer([corrupt], deployment.blind) == [held]
    deployment.shown.control_differs = not deployment.is_equal(corrupt)
    assert deployment.shown.control_differs

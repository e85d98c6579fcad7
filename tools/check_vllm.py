"""Turns of real vLLM engines through a real daemon: ``python -m tools.check_vllm``; prints one line of JSON.

A D engine, two P engines and one without snapd, all with the same tiny model. Whatever the daemon does or the
bytes in it become, the answers of P must be those of the engine without snapd; and P must compute no more of
a prompt than it has to. One P does not verify, to show that wrong bytes would be seen in the answers.

Runs in the environment that ``tools/setup_engine.sh vllm`` makes. Exit status 1: something is not so.
"""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from snapd.client import Client
from tools.vllm_engines import BLOCK, VOCABULARY, Answer, Daemon, Server, make_model, say, wait_for

PROMPT: Final = 200
ANSWER: Final = 60
SESSIONS: Final = 5


def words(seed: int, count: int) -> list[int]:
    """Return *count* token ids, of a seed always the same."""
    return [(at * 37 + seed * 131 + at * at * (seed + 3)) % (VOCABULARY - 10) + 10 for at in range(count)]


def whole(num_tokens: int) -> int:
    """Return *num_tokens* without those of a block that is not full."""
    return num_tokens // BLOCK * BLOCK


@dataclass
class Totals:
    """What the last line says.

    Attributes:
        reused_tokens: those that were loaded and verified, so that P did not compute them.
        unverified_tokens: those that only the control loaded.
    """

    turns: int = 0
    is_equal: bool = True
    prompt_tokens: int = 0
    reused_tokens: int = 0
    corrupt_reached_tree: int = 0
    control_differs: bool = False
    unverified_tokens: int = 0


class Check:
    """The engines, and each thing that must be true of them."""

    def __init__(self, directory: Path) -> None:
        self.daemon = Daemon(directory)
        self.totals = Totals()
        model = directory / "model"
        make_model(model)
        say(f"made a model in {model}")
        self.d = self._server("D", model, directory, "kv_producer", mp=True)
        # Few blocks, so that concurrent requests are preempted.
        self.p = self._server("P", model, directory, "kv_consumer")
        self.q = self._server(
            "Q",
            model,
            directory,
            "kv_consumer",
            "--no-enable-prefix-caching",
            verify=False,
            min_load_tokens=1,
        )
        self.r = Server("R", model, directory, "--num-gpu-blocks-override", "200", mp=False)
        self.servers = [self.d, self.p, self.q, self.r]
        self._counted = threading.Lock()

    def _server(
        self,
        name: str,
        model: Path,
        directory: Path,
        role: str,
        *more: str,
        mp: bool = False,
        **settings: Any,
    ) -> Server:
        transfer: dict[str, Any] = {
            "kv_connector": "SnapdConnector",
            "kv_connector_module_path": "snapd.engines.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket_path": str(self.daemon.socket_path), **settings},
        }
        if name == "Q":
            # As beside a connector that takes KV from P to D.
            connectors = {"connectors": [transfer]}
            transfer = {
                "kv_connector": "MultiConnector",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": connectors,
            }
        blocks = ("--num-gpu-blocks-override", "48")
        return Server(name, model, directory, *blocks, *more, transfer=transfer, mp=mp)

    # --- a turn ------------------------------------------------------------------------------------

    def answer_of(self, prompt: Sequence[int], num_tokens: int = ANSWER) -> list[int]:
        """Return what an engine without snapd says."""
        return self.r.ask(prompt, num_tokens).token_ids

    def begin(self, session: str, prompt: Sequence[int], num_tokens: int = ANSWER, **more: Any) -> list[int]:
        """Do a turn on D; return prompt and answer."""
        answer = self.d.ask(prompt, num_tokens, session, **more)
        assert answer.token_ids == self.answer_of(prompt, num_tokens), f"{session}: D's answer differs"
        return [*prompt, *answer.token_ids]

    def resume(
        self, engine: Server, session: str, prompt: Sequence[int], *, least: int, most: int, **more: Any
    ) -> Answer:
        """Do a turn on P, whose answer must be right, with *least* to *most* tokens of the prompt reused."""
        answer = engine.ask(prompt, ANSWER, session, **more)
        with self._counted:
            self.totals.turns += 1
            self.totals.prompt_tokens += len(prompt)
            is_equal = answer.token_ids == self.answer_of(prompt)
            self.totals.is_equal &= is_equal
        assert is_equal, f"{session}: P's answer is another than that of an engine without snapd"
        assert least <= answer.cached_tokens <= most, (
            f"{session}: {answer.cached_tokens} of {len(prompt)} tokens were reused, not {least} to {most}"
        )
        return answer

    @contextlib.contextmanager
    def counts(self, engine: Server, expected: dict[str, float]) -> Iterator[None]:
        """Expect that metrics grow by so much; a metric's name may be followed by one label: ``a:b=c``."""

        def read() -> dict[str, float]:
            found = {}
            for key in expected:
                name, _, label = key.partition("|")
                labels = dict([label.split("=")]) if label else {}
                found[key] = engine.metric(name, **labels)
            return found

        before = read()
        yield

        def is_so() -> bool:
            now = read()
            return all(now[key] - before[key] == more for key, more in expected.items())

        with contextlib.suppress(SystemExit):
            wait_for(is_so, "metrics", 10.0)
            return
        now = read()
        raise AssertionError(f"{ {key: now[key] - before[key] for key in expected} } and not {expected}")

    # --- what must be true ---------------------------------------------------------------------------

    def several_turns(self) -> None:
        """Turn 2 and 3 on P start from what D computed, and D sends turn 2 without what P holds."""
        prompt = words(1, PROMPT)
        history = self.begin("chat", prompt, 100)
        self.daemon.ready("chat")
        second = [*history, *words(2, 40)]
        had = whole(len(history) - 1)
        computed = len(second) - had
        expected = {
            "vllm:prompt_tokens_by_source_total|source=external_kv_transfer": float(had),
            "vllm:request_prefill_kv_computed_tokens_sum": float(computed),
            "vllm:snapd_loads_total|reason=ok": 1.0,
            "vllm:snapd_loaded_tokens_total": float(had),
        }
        with self.counts(self.p, expected):
            self.resume(self.p, "chat", second, least=had, most=had)
        # P has decoded what it answered; D answers more, so that turn 3 needs it.
        history = self.begin("chat", second, 130)
        view = self.daemon.ready("chat")
        assert view.token_start == had, f"D sent tokens from {view.token_start} on, and P held {had}"
        third = [*history, *words(3, 20)]
        resident, had = whole(len(second) + ANSWER - 1), whole(len(history) - 1)
        expected = {
            "vllm:prompt_tokens_by_source_total|source=local_cache_hit": float(resident),
            "vllm:prompt_tokens_by_source_total|source=external_kv_transfer": float(had - resident),
            "vllm:request_prefill_kv_computed_tokens_sum": float(len(third) - had),
        }
        with self.counts(self.p, expected):
            self.resume(self.p, "chat", third, least=had, most=had)

    def streamed(self) -> None:
        """Streams are answered alike, and the session's name need not be given."""
        history = self.begin("", words(4, PROMPT), stream=True)
        wait_for(lambda: self._is_ready_by_tokens(history), "the snapshot is READY", 60.0)
        had = whole(len(history) - 1)
        self.resume(self.p, "", [*history, *words(5, 30)], least=had, most=had, stream=True)

    def _is_ready_by_tokens(self, history: Sequence[int]) -> bool:
        with self.daemon.client() as client:
            views = client.list_sessions().sessions
            return any(x.num_tokens == whole(len(history) - 1) and x.state == "READY" for x in views)

    def answered_with_names(self) -> None:
        """A response says which session and attempt its KV went to."""
        answer = self.d.ask(words(6, PROMPT), 20, "named")
        view = self.daemon.ready("named")
        said = {key: answer.params.get(key) for key in ("session_id", "tokens")}
        assert said == {"session_id": "named", "tokens": whole(PROMPT + 19)}, answer.params
        # 0: the daemon's answer came later than the response.
        assert answer.params["slab_handle"] in (0, view.slab_handle), answer.params

    def stopped_by_a_word(self) -> None:
        """An answer that ends with a word that was not wanted is pushed as well."""
        prompt = words(70, PROMPT)
        answer = self.answer_of(prompt)
        # The first few are no words; with the spaces around it, so that no longer word begins alike.
        word = next(token for token in answer[40:] if token >= 10)
        said = self.d.ask(prompt, ANSWER, "stopped", is_whole=False, stop=[f" w{word} "]).token_ids
        assert said == answer[: len(said)] and len(said) < ANSWER, f"w{word} did not end {answer}"
        self.daemon.ready("stopped")
        history = [*prompt, *said]
        least, most = whole(len(history) - 1), whole(len(history))
        self.resume(self.p, "stopped", [*history, *words(71, 40)], least=least, most=most)

    def given_up(self) -> None:
        """What D had computed for a client that went away is pushed, and is right for who goes on from it."""
        prompt = words(72, PROMPT)
        self.d.leave(prompt, 600, "left")
        view = self.daemon.ready("left")
        assert whole(PROMPT) <= view.num_tokens < PROMPT + 600, f"{view.num_tokens} tokens were pushed"
        # The same session, and another answer: a part of the snapshot is used.
        had = whole(PROMPT)
        self.resume(self.p, "left", [*prompt, *words(73, 40)], least=had, most=had)
        # P's own client goes away while P waits for the daemon, loads or computes.
        history = self.begin("left again", prompt)
        self.daemon.ready("left again")
        second = [*history, *words(74, 40)]
        self.p.leave(second, 300, "left again")
        self.resume(self.p, "left again", second, least=0, most=whole(len(second) - 1))

    def concurrent(self) -> None:
        """Sessions side by side, more than there are blocks for, so that requests are preempted."""
        before = self.d.metric("vllm:num_preemptions_total")
        histories: dict[int, list[int]] = {}

        def first(at: int) -> None:
            histories[at] = self.begin(f"many {at}", words(20 + at, 260), 90)

        together(first, SESSIONS)
        assert self.d.metric("vllm:num_preemptions_total") > before, "D preempted nothing"

        def second(at: int) -> None:
            prompt = [*histories[at], *words(40 + at, 25)]
            self.resume(self.p, f"many {at}", prompt, least=0, most=whole(len(histories[at]) - 1))

        loads = self.p.metric("vllm:snapd_loads_total", reason="ok")
        together(second, SESSIONS)
        loads = self.p.metric("vllm:snapd_loads_total", reason="ok") - loads
        assert loads > 0, "no session was loaded"
        say(f"  {loads:.0f} of {SESSIONS} sessions were loaded")

    def without_prefix_caching(self) -> None:
        """A P that caches no prefixes loads all of it."""
        history = self.begin("uncached", words(7, PROMPT))
        self.daemon.ready("uncached")
        had = whole(len(history) - 1)
        self.resume(self.q, "uncached", [*history, *words(8, 20)], least=had, most=had)

    def corrupt(self) -> None:
        """Of a snapshot whose bytes were changed nothing is used, and the log says why."""
        history = self.begin("corrupt", words(9, PROMPT))
        view = self.daemon.ready("corrupt")
        self.daemon.corrupt(view)
        # vLLM counts what it was going to load.
        self.resume(self.p, "corrupt", [*history, *words(10, 20)], least=0, most=whole(len(history) - 1))

        def outcome() -> dict[str, Any] | None:
            return next((x for x in self.daemon.outcomes() if x["slab_handle"] == view.slab_handle), None)

        said = wait_for(outcome, "the attempt's outcome", 30.0)
        self.totals.corrupt_reached_tree += bool(said["ok"])
        assert said["reason"] == "checksum-mismatch", said
        assert self.p.metric("vllm:snapd_loads_total", reason="checksum-mismatch") == 1

    def control(self) -> None:
        """Without verification the same change of bytes is in the answer, so the checks above can fail."""
        history = self.begin("control", words(9, PROMPT))
        self.daemon.corrupt(self.daemon.ready("control"))
        prompt = [*history, *words(10, 20)]
        answer = self.q.ask(prompt, ANSWER, "control")
        self.totals.unverified_tokens = answer.cached_tokens
        assert answer.cached_tokens == whole(len(history) - 1), "the control did not load"
        self.totals.control_differs = answer.token_ids != self.answer_of(prompt)
        assert self.totals.control_differs, "corrupt bytes did not change the answer"

    def other_salts(self) -> None:
        """A salted request shares with nobody; those of its salt share with each other."""
        prompt = words(11, PROMPT)
        salt: dict[str, Any] = {"cache_salt": "pepper"}
        # P declares the namespace when it meets it.
        self.resume(self.p, "salted", prompt, least=0, most=0, **salt)
        wait_for(lambda: self._is_held("salted", prompt, salt), "D's push is granted", 60.0)
        history = self.begin("salted", prompt, **salt)
        self.daemon.ready("salted")
        had = whole(len(history) - 1)
        self.resume(self.q, "salted", [*history, *words(12, 20)], least=0, most=0)
        self.resume(self.p, "salted", [*history, *words(12, 20)], least=had, most=had, **salt)

    def _is_held(self, session: str, prompt: Sequence[int], more: dict[str, Any]) -> bool:
        return "reason" not in self.d.ask(prompt, 8, session, **more).params

    def daemon_is_full(self) -> None:
        """A daemon without room refuses; the next turn is computed."""
        history = self.begin("before", words(13, PROMPT))
        view = self.daemon.ready("before")
        with self.daemon.client() as client:
            # What is READY could be evicted.
            self._abort_all(client)
            token_bytes = view.bytes // view.num_tokens
            for part in range(400):
                hole_bytes = client.stats().core.arenas[0].largest_hole_bytes
                if hole_bytes < 4 * BLOCK * token_bytes:
                    break
                num_tokens = whole((hole_bytes - 4_096) // token_bytes)
                client.prepare_receive(f"filler {part}", num_tokens, view.layout_fingerprint)
        with self.counts(self.d, {"vllm:snapd_pushes_total|reason=snapshot-buf-full": 1.0}):
            history = self.begin("full", words(14, PROMPT))
        self.resume(self.p, "full", [*history, *words(15, 20)], least=0, most=0)
        with self.daemon.client() as client:
            self._abort_all(client)

    def _abort_all(self, client: Client) -> None:
        for session in client.list_sessions(limit=1_000).sessions:
            client.abort(session.slab_handle, drained=True)

    def daemon_is_stopped(self) -> None:
        """Without a daemon both engines go on."""
        history = self.begin("kept", words(16, PROMPT))
        self.daemon.ready("kept")
        self.daemon.stop()
        self.resume(self.p, "kept", [*history, *words(17, 20)], least=0, most=0)
        self.begin("down", words(18, PROMPT))

    def daemon_comes_back(self) -> None:
        """A daemon that was started again is used again, without a word to the engines."""
        self.daemon.start(reserve_timeout_ms=600_000)
        prompt = words(19, PROMPT)
        wait_for(lambda: self._is_held("back", prompt, {}), "D's push is granted", 60.0)
        history = self.begin("back", prompt)
        self.daemon.ready("back")
        had = whole(len(history) - 1)
        self.resume(self.p, "back", [*history, *words(51, 20)], least=had, most=had)

    def daemon_hangs(self) -> None:
        """A daemon that does not answer is waited for no longer than its time, and then not asked."""
        history = self.begin("hangs", words(52, PROMPT))
        self.daemon.ready("hangs")
        assert self.daemon.process is not None
        self.daemon.process.send_signal(signal.SIGSTOP)
        try:
            self.resume(self.p, "hangs", [*history, *words(53, 20)], least=0, most=0)
            self.begin("hangs too", words(54, PROMPT))
        finally:
            self.daemon.process.send_signal(signal.SIGCONT)

    def daemon_dies_while_it_is_read(self) -> None:
        """Killed when P has its lease, or shortly after: loaded or computed, the answer is right."""
        for at in range(2):
            self._revive()
            history = self.begin(f"read {at}", words(60 + at, PROMPT))
            self.daemon.ready(f"read {at}")
            killer = self.daemon.kill_at("lease.granted", f"read {at}")
            prompt = [*history, *words(62 + at, 20)]
            self.resume(self.p, f"read {at}", prompt, least=0, most=whole(len(history) - 1))
            killer.join()

    def daemon_dies_while_it_is_written(self) -> None:
        """Killed when D writes: the next turn is computed, and nothing of it is found afterwards."""
        self._revive()
        killer = self.daemon.kill_at("session.transition", "written", to_state="TRANSFERRING")
        history = self.begin("written", words(66, PROMPT))
        killer.join()
        self.daemon.start()
        self.resume(self.p, "written", [*history, *words(67, 20)], least=0, most=0)

    def log_proves_it(self) -> None:
        """The daemon's log shows that no two slabs overlapped and nothing was used again too early."""
        self.daemon.stop()
        command = [sys.executable, "-m", "snapd.cli.main", "forensics", "--prove", str(self.daemon.log_path)]
        proof = subprocess.run(command, capture_output=True, text=True, check=False)
        assert proof.returncode == 0, proof.stdout + proof.stderr

    def _revive(self) -> None:
        """Start the daemon again, if it was killed, and wait until P has declared its layout."""
        if self.daemon.process is None:
            self.daemon.start()
            wait_for(lambda: self._is_held("again", words(68, PROMPT), {}), "D's push is granted", 60.0)


def together(act: Callable[[int], None], count: int) -> None:
    """Do something *count* times at once; what is wrong with the first of them is raised."""
    errors: list[BaseException] = []

    def guarded(at: int) -> None:
        try:
            act(at)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# In an order in which each finds the daemon as it needs it.
ACTS: Final = (
    Check.several_turns,
    Check.streamed,
    Check.answered_with_names,
    Check.stopped_by_a_word,
    Check.given_up,
    Check.concurrent,
    Check.without_prefix_caching,
    Check.corrupt,
    Check.control,
    Check.other_salts,
    Check.daemon_is_full,
    Check.daemon_is_stopped,
    Check.daemon_comes_back,
    Check.daemon_hangs,
    Check.daemon_dies_while_it_is_read,
    Check.daemon_dies_while_it_is_written,
    Check.log_proves_it,
)


def run(check: Check, names: Sequence[str]) -> None:
    """Do all of it, or what is named."""
    for act in ACTS:
        if names and act.__name__ not in names:
            continue
        begun_s = time.monotonic()
        assert act.__doc__ is not None
        say(f"{act.__name__.replace('_', ' ')}: {act.__doc__.strip()}")
        act(check)
        loaded = [x.metric("vllm:snapd_loaded_tokens_total") for x in (check.p, check.q)]
        check.totals.reused_tokens = int(sum(loaded)) - check.totals.unverified_tokens
        say(f"  yes ({time.monotonic() - begun_s:.1f} s)")


def main() -> int:
    """Start everything, check everything, and say what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="keep the engines' and the daemon's logs")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"only these: {', '.join(act.__name__ for act in ACTS)}"
    )
    options = parser.parse_args()
    keep = options.keep
    directory = Path(tempfile.mkdtemp(prefix="snapd-vllm-"))
    begun_s = time.monotonic()
    check = Check(directory)
    try:
        check.daemon.start(reserve_timeout_ms=600_000)
        for server in check.servers:
            server.wait_up()
        say(f"{len(check.servers)} engines and a daemon are up after {time.monotonic() - begun_s:.0f} s")
        run(check, options.names)
    except (AssertionError, SystemExit) as error:
        say(f"  no: {error}\nlogs are in {directory}")
        keep = True
        return 1
    except BaseException:
        say(f"logs are in {directory}")
        keep = True
        raise
    finally:
        check.totals.is_equal &= check.totals.turns > 0
        for server in check.servers:
            server.stop()
        check.daemon.stop()
        if not keep:
            import shutil

            shutil.rmtree(directory)
    totals = check.totals
    say(f"all of it took {time.monotonic() - begun_s:.0f} s")
    print(json.dumps({
        "engine": "vllm", "turns": totals.turns, "equal": totals.is_equal,
        "prompt_tokens": totals.prompt_tokens, "reused_tokens": totals.reused_tokens,
        "corrupt_reached_tree": totals.corrupt_reached_tree, "control_differs": totals.control_differs,
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

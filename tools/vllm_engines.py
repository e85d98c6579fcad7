# mypy: disable-error-code="import-not-found, import-untyped"
"""Real vLLM servers and a daemon for ``check_vllm``: a tiny model, their processes, and what to ask them.

Runs in the environment that ``tools/setup_engine.sh vllm`` makes.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from snapd.client import Client
from snapd.core.events import State
from snapd.core.session import SessionView
from snapd.errors import SnapdError

T = TypeVar("T")

BLOCK: Final = 32
VOCABULARY: Final = 1024
PATIENCE_S: Final = 300.0
# How far ``corrupt`` moves bytes: some tokens.
_MOVED_BYTES: Final = 4_096
ENVIRONMENT: Final = {
    # Scheduler and worker in one process, where the engine does not say otherwise.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Else the first request waits for a compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # Several engines share few cores.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def say(text: str) -> None:
    """Tell whoever looks on."""
    print(text, file=sys.stderr, flush=True)


def make_model(directory: Path) -> None:
    """Write a model of random weights whose answers depend on every token before them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(directory)
    special = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words = special | {f"w{number}": number for number in range(len(special), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(directory)


def wait_for(condition: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S) -> T:
    """Return what *condition* returns once it is true."""
    until_s = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > until_s:
            raise SystemExit(f"{what}: not within {timeout_s} s")
        time.sleep(0.02)
    return found


@dataclass
class Answer:
    """What an engine said to one request.

    Attributes:
        token_ids: of the answer.
        cached_tokens: of the prompt, those that were not computed.
        params: ``kv_transfer_params["snapd"]`` of the response; empty when it was streamed.
    """

    token_ids: list[int]
    cached_tokens: int = 0
    params: dict[str, Any] = field(default_factory=dict)


class Server:
    """One ``vllm`` server with the OpenAI-compatible API."""

    def __init__(
        self,
        name: str,
        model: Path,
        logs: Path,
        *arguments: str,
        transfer: dict[str, Any] | None = None,
        mp: bool,
    ) -> None:
        self.name = name
        self.log_path = logs / f"{name}.log"
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])
        command = [
            sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
            "--block-size", str(BLOCK), "--host", "127.0.0.1", "--port", str(self.port),
            "--distributed-executor-backend", "mp" if mp else "uni", "--enable-prompt-tokens-details",
            "--max-num-batched-tokens", "160", "--max-num-seqs", "8",
            "--kv-cache-memory-bytes", str(64 << 20), *arguments,
        ]  # fmt: skip
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
            )

    def wait_up(self) -> None:
        """Return when it serves; end the program with the end of its log if it has ended."""

        def is_up() -> bool:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended:\n{self.log_path.read_text()[-4_000:]}")
            with contextlib.suppress(OSError):
                return bool(self._get("/health").status == 200)
            return False

        wait_for(is_up, f"{self.name} is up")

    def _get(self, path: str) -> Any:
        return urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_S)

    def ask(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        session: str = "",
        *,
        stream: bool = False,
        is_whole: bool = True,
        **more: Any,
    ) -> Answer:
        """Return the greedy answer of *num_tokens* tokens; not *is_whole*: or fewer."""
        try:
            with self._post(prompt, num_tokens, session, stream, more) as response:
                answer = _streamed(response) if stream else _whole(json.load(response))
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{self.name}: {error}: {error.read().decode()}") from None
        assert len(answer.token_ids) == num_tokens or not is_whole, (
            f"{self.name} gave {len(answer.token_ids)} tokens"
        )
        return answer

    def _post(
        self, prompt: Sequence[int], num_tokens: int, session: str, stream: bool, more: dict[str, Any]
    ) -> Any:
        body: dict[str, Any] = {
            "model": "tiny", "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "stream": stream,
        }  # fmt: skip
        if stream:
            body["stream_options"] = {"include_usage": True}
        if session:
            body["kv_transfer_params"] = {"snapd": {"session_id": session}}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body | more).encode(),
            {"content-type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=PATIENCE_S)

    def leave(self, prompt: Sequence[int], num_tokens: int, session: str) -> None:
        """Ask for a stream, and hang up when the first of it comes."""
        with self._post(prompt, num_tokens, session, True, {}) as response:
            assert response.readline(), f"{self.name} said nothing"

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self._get("/metrics").read().decode().splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(f'{k}="{v}"' in sample for k, v in labels.items()):
                total += float(value)
        return total

    def stop(self) -> None:
        """End it and its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 15)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait()


def _cached(usage: dict[str, Any] | None) -> int:
    details = (usage or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def _whole(body: dict[str, Any]) -> Answer:
    params = (body.get("kv_transfer_params") or {}).get("snapd", {})
    return Answer(list(body["choices"][0]["token_ids"]), _cached(body.get("usage")), params)


def _streamed(response: Any) -> Answer:
    answer = Answer([])
    for line in response:
        text = line.decode().strip().removeprefix("data: ")
        if not text or text == "[DONE]":
            continue
        part = json.loads(text)
        for choice in part.get("choices", ()):
            answer.token_ids += choice.get("token_ids") or []
        answer.cached_tokens = _cached(part.get("usage")) or answer.cached_tokens
    return answer


class Daemon:
    """``snapd serve``, which can be stopped, killed and started again with other settings."""

    def __init__(self, directory: Path) -> None:
        self.socket_path = directory / "snapd.sock"
        self.log_path = directory / "d-to-p-sync.jsonl"
        self._stderr = directory / "daemon.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **settings: object) -> None:
        """Start it with settings of its configuration, and return when it answers."""
        chosen = {"size": "32MiB", "prefault": "false", "quarantine_ms": 1_000} | settings
        command = [sys.executable, "-m", "snapd.cli.main", "serve"]
        command += ["--socket", str(self.socket_path), "--log", str(self.log_path)]
        for key, value in chosen.items():
            command += ["--set", f"{key}={value}"]
        with self._stderr.open("a") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)

        def is_up() -> bool:
            assert self.process is not None and self.process.poll() is None, self._stderr.read_text()
            with contextlib.suppress(SnapdError), Client(str(self.socket_path)) as client:
                return bool(client.connect().epoch)
            return False

        wait_for(is_up, "the daemon is up")

    def stop(self, signal_number: int = 15) -> None:
        """End it, if it runs, by a signal."""
        if self.process is not None:
            self.process.send_signal(signal_number)
            self.process.wait(30)
            self.process = None

    def client(self) -> Client:
        """Return a client for operators' questions."""
        return Client(str(self.socket_path), timeout_s=30.0)

    def ready(self, session: str) -> SessionView:
        """Return the session's snapshot when it is READY."""
        with self.client() as client:

            def found() -> SessionView | None:
                views = client.list_sessions(states=(State.READY,), session_id=session).sessions
                return views[0] if views else None

            return wait_for(found, f"{session} is READY", 60.0)

    def outcomes(self) -> list[dict[str, Any]]:
        """Return how attempts ended, in order."""
        return [x for x in self.events() if x["event"] == "sync.outcome"]

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of its log; the last may be half written."""
        lines = self.log_path.read_bytes().splitlines() if self.log_path.exists() else []
        parsed = []
        for line in lines:
            with contextlib.suppress(ValueError):
                parsed.append(json.loads(line))
        return parsed

    def kill_at(self, event: str, session: str, **fields: str) -> threading.Thread:
        """Have the daemon killed when the log tells of an event of *session*; join the thread."""

        def is_there() -> bool:
            return any(
                x["event"] == event
                and x.get("session_id") == session
                and all(x.get(name) == value for name, value in fields.items())
                for x in self.events()
            )

        def wait_and_kill() -> None:
            wait_for(is_there, f"{event} of {session}", 120.0)
            self.stop(9)

        thread = threading.Thread(target=wait_and_kill)
        thread.start()
        return thread

    def corrupt(self, view: SessionView, rank: int = 0) -> None:
        """Put other floats of a shard into the middle of it, as a late writer would."""
        shard = next(shard for shard in view.shards if shard.rank == rank)
        with self.client() as client, client.map_buffer(rank, True) as arena:
            extent = shard.extents[0]
            quarter_bytes = (extent.end_bytes - extent.offset_bytes) // 4
            start = extent.offset_bytes + quarter_bytes
            middle = bytes(arena.buffer[start : start + 2 * quarter_bytes])
            arena.buffer[start : start + 2 * quarter_bytes] = middle[_MOVED_BYTES:] + middle[:_MOVED_BYTES]

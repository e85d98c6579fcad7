"""SGLang engines in processes of their own, and a model of random weights for them."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
START_S = 600.0
ANSWER_S = 120.0
STOP_S = 5.0
PAGE_SIZE_TOKENS = 16
VOCABULARY = 2048
LINKER = "snapd.engines.sglang_linker"
# Compiling takes longer than all that is asked here.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}


def make_model(directory: Path) -> None:
    """Save a small Llama of random weights, large enough to make every token depend on its KV."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)


def engine_config(model: Path, linker: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of an engine, with SnapdLinker and its settings or without."""
    config: dict[str, Any] = {
        "model_path": str(model), "device": "cpu", "attention_backend": "torch_native",
        "load_format": "safetensors", "skip_tokenizer_init": True, "dtype": "float32",
        "max_total_tokens": 4096, "disable_overlap_schedule": True, "log_level": "warning",
        "mem_fraction_static": 0.3, "sampling_backend": "pytorch", "grammar_backend": "none",
        "page_size": PAGE_SIZE_TOKENS,
    }  # fmt: skip
    if linker is not None:
        config |= {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": "SnapdLinker", "linker_module_path": LINKER, "linker_extra_config": linker,
            },
        }  # fmt: skip
    return config


class EngineProcess:
    """An engine that starts at once; ``ready`` waits for it."""

    def __init__(self, directory: Path, name: str, config: dict[str, Any], **environment: str) -> None:
        self.name = name
        self.stderr_path = directory / f"{name}.txt"
        config_path = directory / f"{name}.json"
        config_path.write_text(json.dumps(config))
        path = os.pathsep.join((str(REPOSITORY), str(HERE / "standin"), os.environ.get("PYTHONPATH", "")))
        programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        self._stderr = self.stderr_path.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_child.py"), str(config_path)],
            # SGLang compiles a part of itself with what is beside the interpreter.
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": path, "PATH": programs} | environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
            start_new_session=True,
        )  # fmt: skip
        self._read = b""

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until_s - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            assert data, f"{self.name} does not answer: {self.stderr[-4000:]}"
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def begin(self, request: dict[str, Any]) -> None:
        """Ask it something; ``end`` has the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """Wait for the answer to what was asked first."""
        return self._answer(ANSWER_S)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.begin(request)
        return self.end()

    def ready(self) -> None:
        """Wait until it can be asked."""
        assert self._answer(START_S) == {"ready": True}

    def generate(self, token_ids: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
        """Return the tokens of a greedy answer, and how many of the prompt were not computed."""
        reply = self._ask({"do": "generate", "token_ids": list(token_ids), "max_tokens": max_tokens})
        assert "error" not in reply, reply
        assert reply["meta"]["finish_reason"]["type"] == "length", reply["meta"]
        return reply["token_ids"], reply["meta"]["cached_tokens"]

    def flush(self) -> None:
        """Empty its cache."""
        assert self._ask({"do": "flush"}) == {"flushed": True}

    def hang_up(self) -> None:
        """Have it end, without waiting for it."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    def stop(self) -> None:
        """End it, and the children that SGLang has made."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        # They are of its own process group, and none of them is needed any more.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._stderr.close()

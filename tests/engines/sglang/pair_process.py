"""SGLang's own disaggregation on a CPU: a P and a D, Mooncake over TCP between them, and a router's part."""

import itertools
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_process import EngineProcess, engine_config

HOST = "127.0.0.1"
# Room for a few conversations.
D_POOL_TOKENS = 2_048
# Mooncake's sender has its page indices come through pinned memory and a CUDA event, unless all ranks of
# context parallelism send. Here there is one, and it sends everything either way.
ENVIRONMENT = {
    "SGLANG_HOST_IP": HOST, "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1", "SNAPD_TEST_INSIDE": "1",
    "MC_MIN_RPC_PORT": "15000", "MC_MAX_RPC_PORT": "17000",
    # Slots are counted in every step, not only when there is nothing to do.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}  # fmt: skip
_rooms = itertools.count(1)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


def _start(directory: Path, name: str, model: Path, linker: dict[str, Any], **fields: Any) -> EngineProcess:
    config = engine_config(model, linker) | {
        "host": HOST, "disaggregation_transfer_backend": "mooncake_tcp", **fields,
    }  # fmt: skip
    return EngineProcess(directory, name, config, **ENVIRONMENT)


def start_p(directory: Path, name: str, model: Path, linker: dict[str, Any]) -> tuple[EngineProcess, int]:
    """Start a P; return it and the port by which D finds it."""
    port = _free_port()
    fields = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port}
    return _start(directory, name, model, linker, **fields), port


def start_d(directory: Path, name: str, model: Path, linker: dict[str, Any]) -> EngineProcess:
    """Start a D that keeps a tree."""
    fields = {
        "disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True,
        "max_total_tokens": D_POOL_TOKENS, "num_reserved_decode_tokens": 64,
    }  # fmt: skip
    return _start(directory, name, model, linker, **fields)


def answer(
    p: EngineProcess, port: int, d: EngineProcess, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[list[list[int]], list[int]]:
    """Have a P and a D answer prompts together, all at once, as a router does.

    Returns:
        D's answers, and how many tokens of each prompt P did not compute.
    """
    request = {
        "do": "generate", "token_ids": [list(prompt) for prompt in prompts], "max_tokens": max_tokens,
        "bootstrap": {
            "bootstrap_host": [HOST] * len(prompts), "bootstrap_port": [port] * len(prompts),
            "bootstrap_room": [next(_rooms) for _ in prompts],
        },
    }  # fmt: skip
    p.begin(request)
    d.begin(request)
    replies = p.end(), d.end()
    assert all("answers" in reply for reply in replies), replies
    of_p, of_d = (reply["answers"] for reply in replies)
    for first, whole in zip(of_p, of_d, strict=True):
        assert first["meta"]["finish_reason"]["type"] == "length", first["meta"]
        assert whole["meta"]["finish_reason"]["type"] == "length", whole["meta"]
        # P samples the first token, and D goes on from there.
        assert first["token_ids"] == whole["token_ids"][:1]
        assert len(whole["token_ids"]) == max_tokens
    return [one["token_ids"] for one in of_d], [one["meta"]["cached_tokens"] for one in of_p]

"""What the scheduler's side keeps of requests: of one that waits, of one that has finished, and of a daemon.

Source: design, section 9.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from snapd.calls import Grant
from snapd.client import Client, Pending
from snapd.engines.vllm.gate import Gate
from snapd.engines.vllm.matching import Choice
from snapd.engines.vllm.naming import Asked
from snapd.layout import Layout
from snapd.wire import LookupRep


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as the engine has it.

    Attributes:
        request_id: the engine's name for it.
        tokens: returns its token ids, prompt and answer; a call, as it may copy.
        num_tokens: how many there are.
        num_computed_tokens: as the engine counts.
        num_output_tokens: of the answer.
        params: its kv_transfer_params.
        lora: its adapter's name, or empty.
        cache_salt: its salt, or empty.
        is_plain: its KV depends on its token ids and nothing else, and is right: it has no images and no
            embeddings, and has not failed.
    """

    request_id: str
    tokens: Callable[[], list[int]]
    num_tokens: int
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    params: Mapping[str, Any] | None = None
    lora: str = ""
    cache_salt: str = ""
    is_plain: bool = True


@dataclass(slots=True)
class Waiting:
    """A request that has not started yet, or is being loaded for."""

    asked: Asked
    layout: Layout
    layout_fingerprint: str
    lookup: Pending[LookupRep] | None = None
    is_by_session: bool = False
    is_decided: bool = False
    choice: Choice | None = None
    is_loading: bool = False


@dataclass(slots=True)
class Preparing:
    """A request that has finished, whose slab was asked for."""

    request_id: str
    address: str
    pending: Pending[Grant]
    block_ids: list[int]
    num_tokens: int


@dataclass(slots=True)
class Daemon:
    """A daemon that is asked."""

    client: Client
    gate: Gate

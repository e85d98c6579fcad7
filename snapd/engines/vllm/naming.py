"""What a request says of itself: its session and daemon, and the namespace that its KV belongs to.

Source: design, section 2.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from snapd.layout import NAME_CHARS_MAX, Namespace

# The key in kv_transfer_params, in a request and in a response.
PARAMS_KEY: Final = "snapd"
# The daemon's default for session_id_bytes_max.
SESSION_ID_BYTES_MAX: Final = 512


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """``kv_transfer_params["snapd"]`` of a request. Unknown keys are left alone: an answer may be sent back.

    Attributes:
        session_id: the conversation; empty: it is not named.
        socket_path: the daemon of the P that the next turn goes to; empty: the configured one.
        push: D sends this request's KV.
        load: P looks for a snapshot.
    """

    session_id: str = ""
    socket_path: str = ""
    push: bool = True
    load: bool = True


def read_asked(params: Mapping[str, Any] | None) -> tuple[Asked, str]:
    """Return what a request asks for, and what is wrong with it; what is wrong is as if it were not there."""
    given = None if params is None else params.get(PARAMS_KEY)
    if given is None:
        return Asked(), ""
    try:
        asked = msgspec.convert(given, Asked)
    except msgspec.ValidationError as error:
        return Asked(), f'kv_transfer_params["{PARAMS_KEY}"]: {error}'
    try:
        (asked.session_id + asked.socket_path).encode()
    except UnicodeEncodeError as error:
        return Asked(), f'kv_transfer_params["{PARAMS_KEY}"]: {error.reason}'
    if len(asked.session_id.encode()) > SESSION_ID_BYTES_MAX:
        problem = f"session_id is longer than {SESSION_ID_BYTES_MAX} bytes"
        return msgspec.structs.replace(asked, session_id=""), problem
    return asked, ""


def default_session_id(request_id: str) -> str:
    """Return the session of a request that names none: one of its own.

    Its snapshot is found by its tokens, replaces nobody's, and the response says the name for the next turn.
    A name made from the first tokens would be shared by all that begin with the same system prompt.
    """
    name = f"vllm-{request_id}"
    if len(name.encode(errors="surrogatepass")) <= SESSION_ID_BYTES_MAX:
        return name
    # Cut off, it could be another request's.
    return f"vllm-{_digest(request_id, b'snapd-request')}"


def _digest(text: str, person: bytes) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16, person=person).hexdigest()


def namespace_of(base: Namespace, *, lora: str, cache_salt: str, resets: int) -> Namespace:
    """Return the namespace of a request's KV.

    Args:
        base: model, weight version and tenant, as configured.
        lora: the adapter's name.
        cache_salt: the request's; only its digest leaves the engine, as it may be a secret.
        resets: how often the engine was told to forget all KV, as for other weights; P and D must agree.
    """
    salt = _digest(cache_salt, b"snapd-salt")
    name = lora if len(lora) <= NAME_CHARS_MAX else _digest(lora, b"snapd-lora")
    version = f"{base.weight_version}+{resets}" if resets else base.weight_version
    return msgspec.structs.replace(
        base, lora=name, cache_salt=salt if cache_salt else "", weight_version=version
    )

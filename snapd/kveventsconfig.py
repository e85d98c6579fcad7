"""Where KV events are published, and how many: the types of the ``kv_events_*`` settings.

Addresses are as ZeroMQ writes them, and loopback unless another one is written out.

Source: design, section 10.
"""

import re
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from snapd.metricsaddress import listen_address

SCHEME: Final = "tcp://"
WANTED: Final = (
    'write an address and a port, such as "tcp://127.0.0.1:5557" or "tcp://[::1]:5557", or "" for none'
)
CONNECT_WANTED: Final = 'write "tcp://HOST:PORT", such as "tcp://10.0.0.9:5557", or "" for none'
TOPIC_BYTES_MAX: Final = 255
_PORT_MAX: Final = 65_535
_PEER: Final = re.compile(r"tcp://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
# What a token id and a block hash take in a request, packed.
TOKEN_ID_BYTES: Final = 4
BLOCK_HASH_BYTES: Final = 8

Address: TypeAlias = Annotated[
    str,
    Meta(
        max_length=255,
        description="Where KV events are published (ZeroMQ PUB), such as `tcp://127.0.0.1:5557`. Empty: "
        "nowhere. Needs the extra `kv-events`. There is no password: an address that other hosts reach must "
        "be written out.",
        extra={"wanted": WANTED},
    ),
]
ReplayAddress: TypeAlias = Annotated[
    str,
    Meta(
        max_length=255,
        description="Where the latest batches of KV events can be asked for again (ZeroMQ ROUTER). Empty: "
        "nowhere.",
        extra={"wanted": WANTED},
    ),
]
ConnectAddress: TypeAlias = Annotated[
    str,
    Meta(
        max_length=255,
        description="A subscriber that listens itself, such as llm-d's, and is sent the events too: "
        "`tcp://HOST:PORT`, where the host may be a name. Empty: none.",
        extra={"wanted": CONNECT_WANTED},
    ),
]
Topic: TypeAlias = Annotated[
    str,
    Meta(
        max_length=TOPIC_BYTES_MAX,
        description="The first frame of every message; routers subscribe by how it begins. llm-d wants "
        "`kv@ENDPOINT@MODEL`.",
    ),
]
Medium: TypeAlias = Annotated[
    Literal["CPU_PINNED", "CPU", "EXTERNAL"],
    Meta(
        description="What KV events call the buffer. None of the routers looked at takes it for P's GPU "
        "cache, and all of them know `CPU_PINNED`."
    ),
]
DataParallelRank: TypeAlias = Annotated[
    int, Meta(ge=0, le=65_535, description="The data parallel rank of P that KV events name.")
]
ClearAll: TypeAlias = Annotated[
    bool,
    Meta(
        description="Publish AllBlocksCleared at start and stop. A router forgets all that it knows of the "
        "worker then: switch it off where this stream and the engine's own stand for one worker."
    ),
]
TokenIdsMax: TypeAlias = Annotated[
    int,
    Meta(
        ge=0,
        le=100_000_000,
        description="Token ids that one request may bring for KV events; they must fit a frame. Pages beyond "
        "are published without. 0: none are wanted.",
    ),
]
PagesMax: TypeAlias = Annotated[
    int,
    Meta(
        ge=1,
        le=100_000_000,
        description="Pages that READY snapshots may have published together; beyond it a snapshot is not "
        "published.",
    ),
]
QueueBytesMax: TypeAlias = Annotated[
    int,
    Meta(
        ge=64 * 1024,
        le=1 << 30,
        description="What waits to be published, and what attempts bring for it, in bytes; snapshots beyond "
        "it are published without token ids, or not at all.",
        extra={"size": True},
    ),
]
BufferBatches: TypeAlias = Annotated[
    int,
    Meta(
        ge=1,
        le=1_000_000,
        description="Batches that are kept for `kv_events_replay_address`, and that a slow subscriber may "
        "lag behind before it loses some.",
    ),
]
BufferBytesMax: TypeAlias = Annotated[
    int,
    Meta(
        ge=64 * 1024,
        le=1 << 32,
        description="Batches that are kept, in bytes; the oldest go first.",
        extra={"size": True},
    ),
]


def event_address(text: str) -> tuple[str, int]:
    """Return host and port of an address such as ``tcp://127.0.0.1:5557`` or ``tcp://[::1]:5557``.

    Port 0 takes any free port.

    Raises:
        ValueError: *text* is no such address.
    """
    if not text.startswith(SCHEME):
        raise ValueError(f"it does not begin with {SCHEME}")
    bare = text.removeprefix(SCHEME)
    if bare.startswith("*"):
        raise ValueError('to be open to other hosts write "tcp://0.0.0.0:PORT" or "tcp://[::]:PORT"')
    return listen_address(bare)


def check_peer(text: str) -> None:
    """Check an address to connect to, such as ``tcp://router.example:5557``.

    Raises:
        ValueError: *text* is no such address.
    """
    found = _PEER.fullmatch(text)
    if found is None or not 0 < int(found.group(1)) <= _PORT_MAX:
        raise ValueError("it is not tcp://, a host, and a port from 1 to 65535")


def endpoint(host: str, port: int) -> str:
    """Return how ZeroMQ writes an address that ``event_address`` gave."""
    return f"{SCHEME}[{host}]:{port}" if ":" in host else f"{SCHEME}{host}:{port}"

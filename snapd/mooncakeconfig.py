"""How a process uses Mooncake: one frozen struct, for the daemon and for D.

Source: design, section 7.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

PEER_HANDSHAKE: Final = "P2PHANDSHAKE"
LOOPBACK: Final = "127.0.0.1"
Protocol = Literal["tcp", "rdma", "nvlink_intra"]
VariableName = Annotated[
    str,
    Meta(
        # "$" alone would let a final newline through.
        pattern=r"^(MC|GLOG)_[A-Z0-9_]{1,100}(?!\n)$",
        extra={"wanted": "write the name of one of Mooncake's variables, such as MC_GID_INDEX"},
    ),
]
Variable = Annotated[
    str,
    Meta(
        # Neither an environment nor UTF-8 can hold the others.
        max_length=4096,
        pattern=r"^[^\x00\ud800-\udfff]*$",
        extra={"wanted": 'write text, such as "3"'},
    ),
]


class MooncakeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Mooncake's settings: a ``[mooncake]`` table of the daemon's file, an argument of D's ``Pusher``."""

    protocol: Annotated[
        Protocol,
        Meta(
            description="`tcp` between any hosts, `rdma` (InfiniBand, RoCE), `nvlink_intra` between GPUs of "
            "one host. The same on both sides."
        ),
    ] = "tcp"
    host: Annotated[
        str,
        Meta(
            # No label may be empty or too long: resolving it would fail in another way than other names.
            pattern=r"^(?!\.)(?!.*\.\.)(?!.*[^.]{64})[!-~]+(?!\n)$",
            min_length=1,
            max_length=255,
            description="Host name or address under which peers reach this process. Loopback unless set: "
            "whoever reaches it can write to the registered memory.",
            extra={"wanted": 'write a host name or address, such as "10.0.0.7"'},
        ),
    ] = LOOPBACK
    devices: Annotated[
        str,
        Meta(
            max_length=1024,
            pattern=r"^[ -~]*(?!\n)$",
            description="RDMA devices to use, such as `mlx5_0,mlx5_1`; empty: Mooncake chooses.",
            extra={"wanted": 'write names with commas between them, such as "mlx5_0,mlx5_1"'},
        ),
    ] = ""
    metadata_server: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=1024,
            pattern=r"^[!-~]+(?!\n)$",
            description="`P2PHANDSHAKE`: peers ask each other. Else Mooncake's metadata server, such as "
            "`http://10.0.0.1:8080/metadata` or `etcd://10.0.0.1:2379`. The same on both sides.",
            extra={"wanted": f'write "{PEER_HANDSHAKE}", or the address of Mooncake\'s metadata server'},
        ),
    ] = PEER_HANDSHAKE
    notify: Annotated[
        Literal["off", "hint", "commit"],
        Meta(
            description="What a transport notification is taken for. `hint`: whoever prepared the attempt is "
            "told to look. `commit`: for a D without a control connection; only with checksums."
        ),
    ] = "off"
    notify_poll_ms: Annotated[
        int,
        Meta(ge=1, le=60_000, description="How often the daemon looks whether notifications have come."),
    ] = 20
    settings: Annotated[
        dict[VariableName, Variable],
        Meta(
            max_length=256,
            description="Mooncake's own settings, passed on as its environment variables (`MC_...`).",
            extra={"wanted": 'write a [mooncake.settings] table of text, such as MC_GID_INDEX = "3"'},
        ),
    ] = msgspec.field(default_factory=dict)

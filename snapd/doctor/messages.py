"""What the self-test's processes and doctor tell each other: JSON lines over pipes."""

from typing import Literal

import msgspec

from snapd.mooncakeconfig import MooncakeConfig

Role = Literal["probe", "target", "writer"]
CHECK: bytes = b"check\n"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is to do: its argument.

    Attributes:
        role: ``probe`` only loads Mooncake; ``target`` has the arena; ``writer`` writes into it.
        transport: ``shm`` or ``mooncake``.
        mooncake: how to use Mooncake.
        size_bytes: of the arena, all of which is written.
        seed: of the bytes.
        socket_path: where a shm target hands its arena over.
    """

    role: Role
    transport: Literal["shm", "mooncake"]
    mooncake: MooncakeConfig = MooncakeConfig()
    size_bytes: int = 0
    seed: int = 0
    socket_path: str = ""


class Stage(msgspec.Struct, frozen=True, tag=True):
    """What the process does next, for the message if it hangs or dies there."""

    doing: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A probe's answer.

    Attributes:
        supports: what this build of Mooncake can do, such as ``CUDA``.
    """

    supports: tuple[str, ...]


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The target's arena is ready. Doctor passes it on to the writer.

    Attributes:
        address: what the writer must know to reach it.
        base_ptr: where its first byte is.
        size_bytes: of the arena.
    """

    address: str
    base_ptr: int
    size_bytes: int


class Written(msgspec.Struct, frozen=True, tag=True):
    """Every write is done.

    Attributes:
        seconds: from the first submit to the last final state.
    """

    seconds: float


class Checked(msgspec.Struct, frozen=True, tag=True):
    """The target compared every byte.

    Attributes:
        difference: where and how much is wrong; empty: nothing.
    """

    difference: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process cannot go on.

    Attributes:
        detail: why, for a person.
    """

    detail: str


FromChild = Stage | Loaded | Offer | Written | Checked | Failed

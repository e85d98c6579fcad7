"""What the self-test's processes and doctor tell each other: JSON lines over pipes."""

from typing import Final, Literal

import msgspec

from snapd.mooncakeconfig import MooncakeConfig

Role = Literal["probe", "gpus", "target", "writer"]
CHECK: bytes = b"check\n"
HOST_DEVICE: Final = "cpu"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is to do: its argument.

    Attributes:
        role: ``probe`` only loads Mooncake; ``gpus`` asks the driver; ``target`` has the arena; ``writer``
            writes into it.
        transport: ``shm`` or ``mooncake``.
        mooncake: how to use Mooncake.
        size_bytes: of the arena, all of which is written.
        seed: of the bytes.
        socket_path: where a shm target hands its arena over.
        device: of the arena: ``cpu`` or ``cuda:N``.
        source_device: of the bytes that are written.
        arena_gpus: indices of the GPUs whose memory ``gpus`` asks for, and that of their neighbours.
    """

    role: Role
    transport: Literal["shm", "mooncake"]
    mooncake: MooncakeConfig = MooncakeConfig()
    size_bytes: int = 0
    seed: int = 0
    socket_path: str = ""
    device: str = HOST_DEVICE
    source_device: str = HOST_DEVICE
    arena_gpus: tuple[int, ...] = ()


class Stage(msgspec.Struct, frozen=True, tag=True):
    """What the process does next, for the message if it hangs or dies there."""

    doing: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A probe's answer.

    Attributes:
        supports: what this build of Mooncake can do, such as ``CUDA``.
    """

    supports: tuple[str, ...]


class SeenGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, as a child process sees it.

    Attributes:
        index: N of ``cuda:N``.
        name: such as ``NVIDIA H200``.
        peers: indices of the GPUs whose memory it reaches by itself.
        free_bytes: of its memory, beside a context; None: nobody asked, or see ``why_not``.
        total_bytes: of its memory.
        why_not: why a process cannot use it; empty: nothing is known against it.
    """

    index: int
    name: str
    peers: tuple[int, ...] = ()
    free_bytes: int | None = None
    total_bytes: int | None = None
    why_not: str = ""


class Seen(msgspec.Struct, frozen=True, tag=True):
    """The GPUs.

    Attributes:
        gpus: by index.
        why_not: why there are none; empty if there are.
    """

    gpus: tuple[SeenGpu, ...] = ()
    why_not: str = ""


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
        latency_s: of one small write, from its submit to its final state.
    """

    seconds: float
    latency_s: float


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


FromChild = Stage | Loaded | Seen | Offer | Written | Checked | Failed

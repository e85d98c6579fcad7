"""Keyed integrity: instead of the sums, a MAC that only D and P can compute.

The usual checksum finds accidents. Whoever can write to the registered memory can compute other bytes with
the same sums; without the key nobody can compute bytes with the same MAC. The daemon never has the key: it
hands on 128 bits a plane as it hands on the two sums.

    key      = blake2b-256(algorithm, key file)
    plane key = MAC-256(key, context), once for every plane
    MAC      = MAC-128(plane key, the plane's bytes in token order)

The context names the attempt, the place and the tokens, so a MAC fits no other snapshot, place or time.
MAC is BLAKE3's or BLAKE2b's keyed mode, by choice and never by what happens to be installed.

Source: design, sections 8 and 12.
"""

import ctypes
import hashlib
import hmac
import os
import stat
import struct
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec
import torch

from snapd.calls import Grant
from snapd.errors import ConfigError, ExtraMissing, InvariantBroken
from snapd.kv.checksum import WORD_BYTES, PlaneChecksum, check_plane

KEY_BYTES_MIN: Final = 32
KEY_BYTES_MAX: Final = 4_096
ALGORITHMS: Final = ("blake3", "blake2b")

_PLANE_KEY_BYTES: Final = 32
_MAC: Final = struct.Struct("<QQ")
_KEY_ID_BYTES: Final = 4
_DOMAIN: Final = "snapd-kv-integrity-1"
# Of 32 random bytes about 30 differ from each other; less than this is a file of zeros, or of the like.
_DISTINCT_BYTES_MIN: Final = 8
# Of a key file of this process's own user, and of root's, which a group may be given to read.
_MODE_OWN: Final = 0o077
_MODE_ROOT: Final = 0o037
assert _MAC.size == 16, "a MAC goes over the wire as a plane's two sums do"

# A view of memory by its address, as bytes: torch's tensors have none without numpy.
_memory_view: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_READ_ONLY: Final = 0x100


class Hasher(Protocol):
    """A keyed hash under way."""

    def update(self, data: memoryview, /) -> object:
        """Add bytes."""
        ...

    def digest(self) -> bytes:
        """Return the hash of what was added; its first bytes are a MAC as well."""
        ...


class AttemptContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's MACs are bound to.

    Attributes:
        epoch, slab_handle: of the attempt; together they never come again.
        rank: whose shard.
        layout_fingerprint: model, planes and namespace.
        token_start, num_tokens: which tokens.
        token_digest: of all tokens from 0 to the end of the snapshot.
    """

    epoch: str
    slab_handle: int
    rank: int
    layout_fingerprint: str
    token_start: int
    num_tokens: int
    token_digest: str


def context_of(grant: Grant, rank: int, layout_fingerprint: str) -> AttemptContext:
    """Return what D's MACs of a rank's shard are bound to.

    Args:
        grant: of the attempt.
        rank: one of its ranks.
        layout_fingerprint: of the planes, where the grant does not say.
    """
    return AttemptContext(
        epoch=grant.epoch,
        slab_handle=grant.slab_handle,
        rank=rank,
        layout_fingerprint=grant.layout_fingerprint or layout_fingerprint,
        token_start=grant.token_start,
        num_tokens=grant.num_tokens,
        token_digest=grant.token_digest,
    )


class PlaneMac:
    """The MAC of a plane whose bytes are added in token order; takes the place of a ``ChecksumAccumulator``.

    Attributes:
        size_bytes: how much was added.
    """

    __slots__ = ("_hashers", "_part_start_bytes", "size_bytes")

    def __init__(self, hashers: Sequence[Hasher]) -> None:
        self._hashers = tuple(hashers)
        self._part_start_bytes = 0
        self.size_bytes = 0

    def begin_part(self) -> None:
        """Count word offsets from here on: what is added next is moved by a job of its own."""
        self._part_start_bytes = self.size_bytes

    def add(self, chunk: torch.Tensor, word_offset: int | None = None) -> None:
        """Add the next bytes of the plane.

        Args:
            chunk: uint8, 1-D, contiguous, on the CPU; memory that nobody else writes.
            word_offset: where it lies, in words of the part; None: behind what was added before.

        Raises:
            InvariantBroken: something before it was left out, or came later.
            InvalidRequest: the tensor is of another kind. Nothing was added.
        """
        check_plane(chunk, "chunk")
        if word_offset is not None and word_offset * WORD_BYTES != self.size_bytes - self._part_start_bytes:
            raise InvariantBroken(
                f"a piece at word {word_offset} came after {self.size_bytes - self._part_start_bytes} bytes: "
                "a MAC is made in token order"
            )
        if chunk.numel() == 0:
            return
        view = _memory_view(chunk.data_ptr(), chunk.numel(), _READ_ONLY)
        for hasher in self._hashers:
            hasher.update(view)
        self.size_bytes += chunk.numel()

    @property
    def values(self) -> tuple[PlaneChecksum, ...]:
        """The MAC under each key, as pairs of 64-bit numbers."""
        return tuple(
            (low, high)
            for low, high in (_MAC.unpack(hasher.digest()[: _MAC.size]) for hasher in self._hashers)
        )

    @property
    def value(self) -> PlaneChecksum:
        """The MAC under the first key."""
        return self.values[0]


class KeyedIntegrity:
    """Makes and compares MACs, for a ``Pusher`` or an ``Ingester``; on both sides with the same algorithm.

    Args:
        key: what D makes MACs with, 32 to 4,096 random bytes.
        accepted: other keys that P accepts while keys are changed; each makes P hash everything once more.
        algorithm: ``blake3``, or ``blake2b``, which needs no package and takes about ten times as long.

    Raises:
        ConfigError: a key is too short, too long or not random, or the algorithm is unknown.
        ExtraMissing: the package ``blake3`` is not installed.
    """

    __slots__ = ("_keys", "_make", "algorithm", "key_ids")

    def __init__(self, key: bytes, *, accepted: Sequence[bytes] = (), algorithm: str = "blake3") -> None:
        self.algorithm = algorithm
        self._make = _hasher_of(algorithm)
        self._keys = tuple(_stretched(each, algorithm, "the integrity key") for each in (key, *accepted))
        ids = [self._derived(each, (_DOMAIN, "id")) for each in self._keys]
        self.key_ids = tuple(each[:_KEY_ID_BYTES].hex() for each in ids)

    @classmethod
    def from_files(
        cls,
        key_path: str | os.PathLike[str],
        *,
        accepted_paths: Sequence[str | os.PathLike[str]] = (),
        algorithm: str = "blake3",
    ) -> "KeyedIntegrity":
        """Return it with keys out of files, each of 32 to 4,096 random bytes; see ``read_key``.

        Raises:
            ConfigError: a file cannot be read, others can read it, or what it holds is no key.
            ExtraMissing: the package ``blake3`` is not installed.
        """
        keys = [read_key(path) for path in (key_path, *accepted_paths)]
        return cls(keys[0], accepted=keys[1:], algorithm=algorithm)

    def __repr__(self) -> str:
        """Say which keys, by their ids: the keys themselves are shown nowhere."""
        return f"KeyedIntegrity({self.algorithm}, key_ids={list(self.key_ids)})"

    def __reduce__(self) -> tuple[object, ...]:
        """Refuse to be pickled: a key would end up where pickles do.

        Raises:
            TypeError: always.
        """
        raise TypeError("a KeyedIntegrity is not pickled: read the key file in each process")

    def macs(self, context: AttemptContext, num_planes: int) -> tuple[PlaneMac, ...]:
        """Return D's MACs of a shard, one a plane, with nothing added yet."""
        return self._macs(self._keys[:1], context, num_planes)

    def accepted_macs(self, context: AttemptContext, num_planes: int) -> tuple[PlaneMac, ...]:
        """Return P's MACs of a shard, one a plane, under every key that it accepts."""
        return self._macs(self._keys, context, num_planes)

    def _macs(self, keys: Sequence[bytes], context: AttemptContext, num_planes: int) -> tuple[PlaneMac, ...]:
        facts = (_DOMAIN, self.algorithm, *msgspec.structs.astuple(context))
        return tuple(
            PlaneMac([self._make(self._derived(key, (*facts, plane_index))) for key in keys])
            for plane_index in range(num_planes)
        )

    def _derived(self, key: bytes, facts: tuple[object, ...]) -> bytes:
        hasher = self._make(key)
        # No two tuples have the same bytes.
        hasher.update(memoryview(msgspec.msgpack.encode(facts)))
        return hasher.digest()[:_PLANE_KEY_BYTES]


def check_on_host(*devices: torch.device) -> None:
    """Check that pools are where MACs can be made.

    Raises:
        ConfigError: one is on a GPU.
    """
    for device in devices:
        if device.type != "cpu":
            raise ConfigError(
                f"the kv_pool is on {device}, and keyed integrity is for pools on the host: leave the key "
                "out on both sides, and keep the data plane among hosts that trust each other"
            )


def check_verified(verify: bool) -> None:
    """Check that what the key is for is not turned off.

    Raises:
        ConfigError: it is.
    """
    if not verify:
        raise ConfigError("verify is off, and there is an integrity key: leave one of the two out")


def differing_planes(expected: Sequence[PlaneChecksum], macs: Sequence[PlaneMac]) -> list[int]:
    """Return the indexes of the planes that differ, under the key that fits best; none means equal.

    How long it takes says nothing of how alike they are. A plane that only one side has differs.
    """
    shared = min(len(expected), len(macs))
    rest = list(range(shared, max(len(expected), len(macs))))
    packed = [_packed(pair) for pair in expected[:shared]]
    by_plane = [mac.values for mac in macs[:shared]]
    by_key = [
        [
            index
            for index, (wanted, values) in enumerate(zip(packed, by_plane, strict=True))
            if not hmac.compare_digest(wanted, _packed(values[key_index]))
        ]
        for key_index in range(len(by_plane[0]) if by_plane else 1)
    ]
    return min(by_key, key=len) + rest


def mismatch_facts(integrity: KeyedIntegrity | None, differing: int, num_planes: int) -> dict[str, object]:
    """Return what P's log says of a mismatch: how many planes differ, and whether the keys may.

    Args:
        integrity: P's key, if it has one.
        differing: how many planes differ.
        num_planes: of how many.
    """
    facts: dict[str, object] = {"differing_planes": differing, "num_planes": num_planes}
    if integrity is not None:
        facts["integrity_key_ids"] = list(integrity.key_ids)
        facts["integrity_algorithm"] = integrity.algorithm
    if differing == num_planes:
        facts["hint"] = (
            "every plane differs: D may have no integrity key, or another one (compare key_ids)"
            if integrity is not None
            else "every plane differs: D may have an integrity key, and P has none"
        )
    return facts


def _packed(pair: PlaneChecksum) -> bytes:
    try:
        return _MAC.pack(*pair)
    except struct.error:
        return b""  # No pair of 64-bit numbers: equal to none.


def read_key(path: str | os.PathLike[str]) -> bytes:
    """Return what a key file holds.

    The file must be this user's and closed to everybody else (0600 or less), or root's, which a group may be
    let read (0640 or less).

    Raises:
        ConfigError: it cannot be read, others can read or change it, or it holds no key; says what to do.
    """
    what = f"the integrity key file {os.fspath(path)}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{what} cannot be read: {getattr(error, 'strerror', error)}. To make one: "
            f"(umask 077 && head -c {KEY_BYTES_MIN} /dev/urandom > integrity.key)"
        ) from None
    try:
        # Of the file that was opened: the path may name another by now.
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"{what} is no regular file")
        _check_owner(what, facts)
        key = os.read(descriptor, KEY_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    _check_key(key, what)
    return key


def _check_owner(what: str, facts: os.stat_result) -> None:
    mode = stat.S_IMODE(facts.st_mode)
    if facts.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{what} belongs to user {facts.st_uid}: make it this user's, {os.geteuid()}, or root's"
        )
    if mode & (_MODE_OWN if facts.st_uid == os.geteuid() else _MODE_ROOT):
        raise ConfigError(f"{what} has mode {mode:04o}, so others can read or change it: chmod 600")


def _check_key(key: bytes, what: str) -> None:
    if len(key) < KEY_BYTES_MIN:
        raise ConfigError(f"{what} has {len(key)} bytes; {KEY_BYTES_MIN} random ones are wanted at least")
    if len(key) > KEY_BYTES_MAX:
        raise ConfigError(f"{what} has more than {KEY_BYTES_MAX} bytes: it is no key")
    if len(set(key)) < _DISTINCT_BYTES_MIN:
        raise ConfigError(f"{what} repeats a few bytes: take random ones")


def _stretched(key: bytes, algorithm: str, what: str) -> bytes:
    """Return a key of the length that the algorithm takes, for this algorithm alone."""
    _check_key(key, what)
    given = msgspec.msgpack.encode((algorithm, key))
    return hashlib.blake2b(given, digest_size=_PLANE_KEY_BYTES, person=b"snapd-integrity").digest()


def _hasher_of(algorithm: str) -> Callable[[bytes], Hasher]:
    if algorithm == "blake2b":
        return lambda key: hashlib.blake2b(key=key, digest_size=_PLANE_KEY_BYTES)
    if algorithm != "blake3":
        raise ConfigError(f"integrity algorithm {algorithm!r} is unknown; there are {', '.join(ALGORITHMS)}")
    try:
        from blake3 import blake3
    except ImportError:
        raise ExtraMissing(
            "keyed integrity with BLAKE3 needs the package blake3: pip install 'kv-snapd[integrity]'; "
            "or choose the algorithm blake2b on both sides"
        ) from None
    # Its own threads are not used: they would compete with those of the engine and of the transport.
    return lambda key: blake3(key=key)

"""What a snapshot's bytes are: planes, their widths, and the fingerprint that names them.

A plane is one layer's K, one layer's V, or one layer's fused latent (MLA):
``num_tokens * stride_bytes`` contiguous bytes. A slab holds K of all layers, then V of all
layers. Every plane starts on an ``alignment_bytes`` boundary.

Source: design, sections 2 and 4.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from snapd.errors import InvalidRequest, LayoutMismatch
from snapd.units import align_up

LAYERS_MAX: Final = 1024
STRIDE_BYTES_MAX: Final = 1 << 24
PAGE_SIZE_TOKENS_MAX: Final = 1 << 16
NAME_CHARS_MAX: Final = 256


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be equal on P and D, beyond shapes, for KV bytes to mean the same."""

    model: str = ""
    lora: str = ""
    cache_salt: str = ""
    weight_version: str = ""
    tenant: str = ""


class Layout(msgspec.Struct, frozen=True):
    """The ordered planes of one rank's shard.

    Attributes:
        k_stride_bytes: bytes a token takes in each layer's K (or fused latent) plane, shape [layers].
        v_stride_bytes: the same for V, shape [layers]; empty when K and V are fused (MLA).
        dtype: element type, as the engine names it; compared, never interpreted.
        page_size_tokens: tokens in one page of the kv_pool.
        namespace: model, LoRA, cache salt, weight version, tenant.
    """

    k_stride_bytes: tuple[int, ...]
    v_stride_bytes: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    page_size_tokens: int = 1
    namespace: Namespace = Namespace()

    @property
    def num_layers(self) -> int:
        """Number of layers, each with one K (or fused) plane."""
        return len(self.k_stride_bytes)

    @property
    def plane_stride_bytes(self) -> tuple[int, ...]:
        """Bytes a token takes in each plane: K of all layers, then V of all layers."""
        return self.k_stride_bytes + self.v_stride_bytes

    @property
    def num_planes(self) -> int:
        """Number of planes."""
        return len(self.k_stride_bytes) + len(self.v_stride_bytes)

    @property
    def token_bytes(self) -> int:
        """Payload bytes of one token over all planes."""
        return sum(self.k_stride_bytes) + sum(self.v_stride_bytes)

    def check(self) -> None:
        """Check ranges.

        Raises:
            InvalidRequest: a field is out of range; the message names it.
        """
        if not 1 <= self.num_layers <= LAYERS_MAX:
            raise InvalidRequest(f"k_stride_bytes has {self.num_layers} layers; 1 to {LAYERS_MAX} can be had")
        if self.v_stride_bytes and len(self.v_stride_bytes) != self.num_layers:
            raise InvalidRequest(
                f"v_stride_bytes has {len(self.v_stride_bytes)} layers and k_stride_bytes {self.num_layers}"
            )
        if not all(1 <= stride_bytes <= STRIDE_BYTES_MAX for stride_bytes in self.plane_stride_bytes):
            raise InvalidRequest(f"a plane's stride is outside 1 to {STRIDE_BYTES_MAX} bytes a token")
        if not 1 <= self.page_size_tokens <= PAGE_SIZE_TOKENS_MAX:
            raise InvalidRequest(
                f"page_size_tokens {self.page_size_tokens} is outside 1 to {PAGE_SIZE_TOKENS_MAX}"
            )
        names = (self.dtype, *msgspec.structs.astuple(self.namespace))
        if any(len(name) > NAME_CHARS_MAX for name in names):
            raise InvalidRequest(f"a name in the layout is longer than {NAME_CHARS_MAX} characters")


def fingerprint(layout: Layout) -> str:
    """Return the digest that names *layout* and its namespace, as 32 hex digits."""
    return hashlib.blake2b(msgspec.msgpack.encode(layout), digest_size=16, person=b"snapd-layout").hexdigest()


def snapshot_bytes(layout: Layout, num_tokens: int) -> int:
    """Return the payload bytes of *num_tokens* tokens, without padding between planes."""
    return layout.token_bytes * num_tokens


def plane_sizes_bytes(layout: Layout, num_tokens: int) -> tuple[int, ...]:
    """Return the payload bytes of each plane, shape [num_planes]."""
    return tuple(stride_bytes * num_tokens for stride_bytes in layout.plane_stride_bytes)


def plane_offsets_bytes(layout: Layout, num_tokens: int, alignment_bytes: int) -> tuple[int, ...]:
    """Return where each plane starts in a contiguous slab, in bytes from its first byte.

    The result has ``num_planes + 1`` entries; the last is the whole slab's size.

    Source: design, section 4.
    """
    offsets = [0]
    for size_bytes in plane_sizes_bytes(layout, num_tokens):
        offsets.append(offsets[-1] + align_up(size_bytes, alignment_bytes))
    return tuple(offsets)


def plane_offset_bytes(layout: Layout, plane_index: int, num_tokens: int, alignment_bytes: int) -> int:
    """Return where a plane starts, in bytes from the slab's first byte.

    Args:
        layout: planes of shape [num_planes]; each holds ``num_tokens * stride_bytes`` bytes.
        plane_index: 0-based, below ``layout.num_planes``.
        num_tokens: tokens in the snapshot.
        alignment_bytes: every plane starts on a multiple of it.

    Raises:
        LayoutMismatch: *plane_index* is outside the layout.

    Source: design, section 4.
    """
    if not 0 <= plane_index < layout.num_planes:
        raise LayoutMismatch(f"plane {plane_index} is outside a layout of {layout.num_planes} planes")
    return plane_offsets_bytes(layout, num_tokens, alignment_bytes)[plane_index]


def token_digest(token_ids: Iterable[int]) -> str:
    """Return the digest of a token sequence from the session's first token on, as 32 hex digits.

    KV of a token depends on every token before it, so a suffix snapshot is digested from token 0 too.
    An ``array("q")`` is taken as it is; anything else takes longer to convert than to digest.
    """
    if not isinstance(token_ids, array) or token_ids.typecode != "q":
        token_ids = array("q", token_ids)
    tokens: array[int] = token_ids
    return hashlib.blake2b(tokens.tobytes(), digest_size=16, person=b"snapd-tokens").hexdigest()


def page_keys(token_ids: Sequence[int], page_size_tokens: int) -> tuple[str, ...]:
    """Return one key a whole page, each chained to the one before; equal keys mean equal prefixes."""
    tokens = array("q", token_ids)
    keys: list[str] = []
    parent = b""
    for start in range(0, len(tokens) - page_size_tokens + 1, page_size_tokens):
        page = tokens[start : start + page_size_tokens].tobytes()
        parent = hashlib.blake2b(parent + page, digest_size=16, person=b"snapd-page").digest()
        keys.append(parent.hex())
    return tuple(keys)

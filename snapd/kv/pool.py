"""A kv_pool as rows of bytes: one row a slot and plane, and the widest words that may index them.

Nothing is copied: every view shares the engine's storage.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from snapd.errors import InvalidRequest, LayoutMismatch
from snapd.kv.threads import torch_threads
from snapd.layout import PAGE_SIZE_TOKENS_MAX, Layout, Namespace

# Index ops of torch move an element at a time, so the element should be wide. complex128 is moved as 16
# plain bytes: nothing looks at its value, so any bit pattern survives.
_WORD_DTYPES: Final = {
    16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8,
}  # fmt: skip
_FP8_NAMES: Final = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_DTYPES: Final = frozenset(
    {torch.bfloat16, torch.float16, torch.float32, torch.uint8}
    | {getattr(torch, name) for name in _FP8_NAMES if hasattr(torch, name)}
)


def bytes_as_words(
    storage: torch.UntypedStorage,
    offset_bytes: int,
    shape: tuple[int, int],
    pitch_bytes: int,
    word_bytes: int,
) -> torch.Tensor:
    """Return a 2-D view of *storage*.

    Args:
        storage: what the view shares.
        offset_bytes: where the first row starts in it, a multiple of *word_bytes*.
        shape: rows, and words a row.
        pitch_bytes: distance from row to row, a multiple of *word_bytes*.
        word_bytes: 16, 8, 4, 2 or 1.
    """
    view = torch.empty(0, dtype=_WORD_DTYPES[word_bytes], device=storage.device)
    return view.set_(storage, offset_bytes // word_bytes, shape, (pitch_bytes // word_bytes, 1))


def widest_word_bytes(*multiples_bytes: int) -> int:
    """Return the widest word, in bytes, that divides all of *multiples_bytes*."""
    return next(word for word in _WORD_DTYPES if all(value % word == 0 for value in multiples_bytes))


@dataclasses.dataclass(frozen=True, eq=False)
class PlaneRows:
    """One plane's place in a kv_pool.

    Attributes:
        stride_bytes: bytes a token takes.
        pitch_bytes: distance from slot to slot, at least ``stride_bytes``.
        rows: uint8, shape [slots, stride_bytes].
        words: the same bytes in the widest words that divide row, pitch and address.
        word_bytes: width of a word in ``words``.
        flat: uint8, shape [slots * stride_bytes], or None if rows are padded.
        pages: shape [pages, words a page] in words of their own width, or None if rows are padded or a
            page is one token.
        page_word_bytes: width of a word in ``pages``.
    """

    stride_bytes: int
    pitch_bytes: int
    rows: torch.Tensor
    words: torch.Tensor
    word_bytes: int
    flat: torch.Tensor | None
    pages: torch.Tensor | None
    page_word_bytes: int


def _plane_rows(buffer: torch.Tensor, what: str, page_size_tokens: int) -> PlaneRows:
    """Return the rows of one layer's buffer, shape [slots, ...]."""
    if buffer.dim() not in (2, 3) or buffer.numel() == 0:
        raise LayoutMismatch(
            f"{what} has shape {tuple(buffer.shape)}; [slots, heads, dim] or [slots, dim] is wanted"
        )
    if buffer.dtype not in _DTYPES:
        raise LayoutMismatch(f"{what} has dtype {buffer.dtype}, which is not supported")
    if not buffer[0].is_contiguous():
        raise LayoutMismatch(f"{what} has rows with gaps: strides {buffer.stride()} in elements")
    slots = buffer.shape[0]
    stride_bytes = buffer[0].numel() * buffer.element_size()
    pitch_bytes = buffer.stride(0) * buffer.element_size() if slots > 1 else stride_bytes
    if pitch_bytes < stride_bytes:
        raise LayoutMismatch(
            f"{what} has slots {pitch_bytes} bytes apart that hold {stride_bytes} bytes each"
        )
    storage = buffer.untyped_storage()
    offset_bytes = int(buffer.storage_offset()) * buffer.element_size()

    def view(rows: int, row_bytes: int, row_pitch_bytes: int, word_bytes: int) -> torch.Tensor:
        shape = (rows, row_bytes // word_bytes)
        return bytes_as_words(storage, offset_bytes, shape, row_pitch_bytes, word_bytes)

    place = (offset_bytes, buffer.data_ptr())
    word_bytes = widest_word_bytes(stride_bytes, pitch_bytes, *place)
    dense = pitch_bytes == stride_bytes
    page_bytes = page_size_tokens * stride_bytes
    page_word_bytes = widest_word_bytes(page_bytes, *place)
    num_pages = slots // page_size_tokens
    return PlaneRows(
        stride_bytes=stride_bytes,
        pitch_bytes=pitch_bytes,
        rows=view(slots, stride_bytes, pitch_bytes, 1),
        words=view(slots, stride_bytes, pitch_bytes, word_bytes),
        word_bytes=word_bytes,
        flat=view(1, slots * stride_bytes, slots * stride_bytes, 1)[0] if dense else None,
        pages=view(num_pages, page_bytes, page_bytes, page_word_bytes)
        if dense and page_size_tokens > 1
        else None,
        page_word_bytes=page_word_bytes,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class CheckedSlots:
    """Slots that were found right. Made by ``check_slots_of``.

    Attributes:
        slots: int64 on the CPU, shape [num_tokens]; they must stay as they were.
        num_slots: of the smallest pool that they are right for.
        page_size_tokens: of such pools.
    """

    slots: torch.Tensor
    num_slots: int
    page_size_tokens: int

    def from_token(self, token: int) -> "CheckedSlots":
        """Return those from *token* on, a multiple of the page size."""
        return dataclasses.replace(self, slots=self.slots[token:])

    def fit(self, pool: "KVPool") -> bool:
        """Return whether they are right for *pool*."""
        return pool.num_slots >= self.num_slots and pool.page_size_tokens == self.page_size_tokens


class KVPool:
    """An engine's kv_pool, as rows of bytes.

    Attributes:
        num_slots: slots in every plane.
        page_size_tokens: slots in a page; a page starts at a multiple of it.
        planes: K (or fused latent) of all layers, then V of all layers.
        device: where all buffers are.
        dtype: element type, as in the layout.
    """

    def __init__(
        self, k_buffers: Sequence[torch.Tensor], v_buffers: Sequence[torch.Tensor], page_size_tokens: int
    ) -> None:
        if not k_buffers or (v_buffers and len(k_buffers) != len(v_buffers)):
            raise LayoutMismatch(f"{len(k_buffers)} K buffers and {len(v_buffers)} V buffers make no pool")
        if not 1 <= page_size_tokens <= PAGE_SIZE_TOKENS_MAX:
            raise InvalidRequest(
                f"page_size_tokens {page_size_tokens} is outside 1 to {PAGE_SIZE_TOKENS_MAX}"
            )
        names = [f"K buffer {index}" for index in range(len(k_buffers))]
        names += [f"V buffer {index}" for index in range(len(v_buffers))]
        buffers = [*k_buffers, *v_buffers]
        first = buffers[0]
        self.planes = tuple(
            _plane_rows(buffer, name, page_size_tokens) for buffer, name in zip(buffers, names, strict=True)
        )
        for buffer, name in zip(buffers, names, strict=True):
            if (buffer.shape[0], buffer.dtype, buffer.device) != (first.shape[0], first.dtype, first.device):
                raise LayoutMismatch(
                    f"{name} has {buffer.shape[0]} slots of {buffer.dtype} on {buffer.device}; {names[0]} "
                    f"has {first.shape[0]} of {first.dtype} on {first.device}"
                )
        self.num_slots = first.shape[0]
        self.page_size_tokens = page_size_tokens
        self.device = first.device
        self.dtype = str(first.dtype).removeprefix("torch.")
        self._num_layers = len(k_buffers)
        self._streams: set[torch.cuda.Stream] = set()

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Which of ``planes`` each layer is made of, by index: its K and its V, or its fused latent."""
        return tuple(
            tuple(range(layer, len(self.planes), self._num_layers)) for layer in range(self._num_layers)
        )

    @classmethod
    def mha(
        cls, k_buffers: Sequence[torch.Tensor], v_buffers: Sequence[torch.Tensor], page_size_tokens: int = 1
    ) -> "KVPool":
        """Return a view of a pool with K and V.

        Args:
            k_buffers: one a layer, shape [slots, heads, dim]; widths may differ by layer. A row is dense;
                slots may be further apart than a row.
            v_buffers: the same for V, of widths of their own.
            page_size_tokens: slots in a page.

        Raises:
            LayoutMismatch: the buffers do not make a pool; the message names the first that is wrong.
            InvalidRequest: *page_size_tokens* is out of range.
        """
        if not v_buffers:
            raise LayoutMismatch("a pool with K and V needs V buffers")
        return cls(k_buffers, v_buffers, page_size_tokens)

    @classmethod
    def mla(cls, buffers: Sequence[torch.Tensor], page_size_tokens: int = 1) -> "KVPool":
        """Return a view of a pool with one fused latent a layer, shape [slots, 1, dim] or [slots, dim].

        Raises:
            LayoutMismatch: the buffers do not make a pool; the message names the first that is wrong.
            InvalidRequest: *page_size_tokens* is out of range.
        """
        return cls(buffers, (), page_size_tokens)

    def layout(self, namespace: Namespace) -> Layout:
        """Return the layout of this pool's planes under *namespace*."""
        stride_bytes = tuple(plane.stride_bytes for plane in self.planes)
        layout = Layout(
            k_stride_bytes=stride_bytes[: self._num_layers],
            v_stride_bytes=stride_bytes[self._num_layers :],
            dtype=self.dtype,
            page_size_tokens=self.page_size_tokens,
            namespace=namespace,
        )
        layout.check()
        return layout

    def keep_for(self, stream: torch.cuda.Stream) -> None:
        """Tell torch's allocator that *stream* uses the buffers, should all be dropped while it does."""
        # It remembers as long as they are there, and there are about a hundred.
        if self.device.type != "cuda" or stream in self._streams:
            return
        storages = {place.rows.untyped_storage().data_ptr(): place.rows for place in self.planes}
        for rows in storages.values():
            rows.record_stream(stream)
        self._streams.add(stream)

    def check_slots(self, slots: torch.Tensor, num_tokens: int) -> None:
        """Check that *slots* names one slot of this pool for each token.

        Args:
            slots: int64 on the CPU, shape [num_tokens], in token order, each slot once. With pages, token 0
                starts a page and every page's slots are consecutive; the last page may be partial.
            num_tokens: at least 1.

        Raises:
            InvalidRequest: they do not; the message says which.
        """
        if slots.dtype is not torch.int64 or slots.device.type != "cpu":
            raise InvalidRequest(f"slots are {slots.dtype} on {slots.device}; int64 on the CPU is wanted")
        if num_tokens < 1 or slots.shape != (num_tokens,):
            raise InvalidRequest(f"slots have shape {tuple(slots.shape)} for {num_tokens} tokens")
        # Less work than waking torch's threads.
        with torch_threads(1):
            self._check_values(slots, num_tokens)

    def _check_values(self, slots: torch.Tensor, num_tokens: int) -> None:
        low, high = (int(bound) for bound in torch.aminmax(slots))
        if low < 0 or high >= self.num_slots:
            raise InvalidRequest(f"slots span {low} to {high}, and the pool has {self.num_slots}")
        heads = slots
        if self.page_size_tokens > 1:
            heads = slots[:: self.page_size_tokens]
            if bool((heads % self.page_size_tokens).any()):
                raise InvalidRequest(f"a page starts at no multiple of {self.page_size_tokens}")
            token_in_page = torch.arange(num_tokens) % self.page_size_tokens
            page_starts = heads.repeat_interleave(self.page_size_tokens)[:num_tokens]
            if not torch.equal(slots, page_starts + token_in_page):
                raise InvalidRequest("the slots of a page are not consecutive")
        taken = torch.zeros(self.num_slots, dtype=torch.bool)
        taken[heads] = True
        if int(taken.count_nonzero()) != heads.numel():
            raise InvalidRequest("a slot is named twice")


def check_slots_of(pools: Iterable[KVPool], slots: torch.Tensor, num_tokens: int) -> CheckedSlots:
    """Check *slots* for pools of one page size; args and errors as of ``KVPool.check_slots``."""
    smallest = min(pools, key=lambda pool: pool.num_slots)
    smallest.check_slots(slots, num_tokens)
    return CheckedSlots(slots, smallest.num_slots, smallest.page_size_tokens)

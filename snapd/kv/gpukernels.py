# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-redef"
# ruff: noqa: N803 - Triton's way: what is fixed when a kernel is compiled is in capitals
"""The Triton kernels: one moves pool rows to planes and back, and sums every plane on the way; one only sums.

One launch moves a range of tokens of all planes that share a unit. Addresses come from a table, so that
planes may lie anywhere, and each row may narrow the range down. A program moves tiles of ``[tokens,
columns]`` units of one plane; what it loads into registers is both what it stores and what it sums, so a slab
that changes meanwhile cannot pass.

A unit is 8 bytes, or the widest of 4, 2 and 1 that divides every width, distance and address. A unit at
byte b of its plane is ``value << 8 * (b % 8)`` of word ``b // 8``. Sums are linear, so no word is ever put
together, and a word may span two tokens.

Source: design, section 8; the checksum is defined in ``checksum``.
"""

import contextlib
import dataclasses
from typing import Any, Final

import torch
import triton
import triton.language as tl

from snapd.kv.checksum import WORD_BYTES
from snapd.units import ceil_div

# Columns of the table, which has one row a plane. Pitch and width are in units.
# pool address, plane address, pool pitch, width, index of the plane's sums, first token, one past the last
# token; the rest keeps every row aligned, so that no slice of a table needs a kernel of its own.
TABLE_COLUMNS: Final = 8
PLANE_ADDRESS_COLUMN: Final = 1
TOKEN_START_COLUMN: Final = 5
TOKEN_STOP_COLUMN: Final = 6
_TABLE_COLUMNS = tl.constexpr(TABLE_COLUMNS)

# A tile's columns are a power of two, and a row is rarely one: the widest that wastes at most this much.
_WASTE_MAX: Final = 1.25
_COLUMNS_MAX: Final = 256


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of a launch; any values give the same bytes and sums.

    Attributes:
        tile_units: units that a program moves at once, a power of two.
        steps: tiles along the tokens that a program moves one after the other.
        num_warps: warps a program.
        load_cache: cache modifier of loads.
        load_evict: eviction policy of loads.
        store_cache: cache modifier of stores.
        store_evict: eviction policy of stores.
    """

    # Measured on an H200; see docs/gpu.md.
    tile_units: int = 512
    steps: int = 4
    num_warps: int = 4
    load_cache: str = ".cg"
    load_evict: str = ""
    store_cache: str = ""
    store_evict: str = ""


DEFAULT_TUNING: Final = Tuning()


@triton.jit
def _move_tile(
    pool_address,
    plane_address,
    slots,
    tokens,
    token_stop,
    pitch_units,
    width_units,
    column,
    sum0,
    sum1,
    UNIT_BYTES: tl.constexpr,
    IS_EXACT: tl.constexpr,
    IS_WIDE: tl.constexpr,
    IS_SCATTER: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    STORE_CACHE: tl.constexpr,
    STORE_EVICT: tl.constexpr,
):
    """Move ``[tokens, column]`` units of one plane and add what was moved to the sums of the tile's lanes."""
    if UNIT_BYTES == 8:
        pointer: tl.constexpr = tl.pointer_type(tl.int64)
    elif UNIT_BYTES == 4:
        pointer: tl.constexpr = tl.pointer_type(tl.uint32)
    elif UNIT_BYTES == 2:
        pointer: tl.constexpr = tl.pointer_type(tl.uint16)
    else:
        pointer: tl.constexpr = tl.pointer_type(tl.uint8)
    is_moved = (tokens < token_stop)[:, None]
    if not IS_EXACT:
        is_moved = is_moved & (column < width_units)[None, :]
        if IS_WIDE:
            is_moved = tl.max_constancy(is_moved, (1, 2))
    # Rows first and columns last, so that what is contiguous is seen to be.
    unit = (tokens * width_units)[:, None] + column[None, :]
    in_pool = pool_address.to(pointer) + (slots * pitch_units)[:, None] + column[None, :]
    in_plane = plane_address.to(pointer) + unit
    if IS_WIDE:
        in_pool = tl.multiple_of(in_pool, (16, 16))
        in_plane = tl.multiple_of(in_plane, (16, 16))
    if IS_SCATTER:
        value = tl.load(
            in_plane, mask=is_moved, other=0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT
        )
        tl.store(in_pool, value, mask=is_moved, cache_modifier=STORE_CACHE, eviction_policy=STORE_EVICT)
    else:
        value = tl.load(
            in_pool, mask=is_moved, other=0, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT
        )
        tl.store(in_plane, value, mask=is_moved, cache_modifier=STORE_CACHE, eviction_policy=STORE_EVICT)
    if HAS_SUMS:
        if UNIT_BYTES == 8:
            word = value
            position = unit + 1
        else:
            at_byte = unit * UNIT_BYTES
            word = value.to(tl.int64) << ((at_byte & 7) * 8)
            position = (at_byte >> 3) + 1
        sum0 += word
        sum1 += word * position
    return sum0, sum1


# The base's type is said, as an address and 0 would otherwise be two kernels.
@triton.jit(do_not_specialize=["token_start", "token_stop", "steps", "plane_base"])
def _move(
    table,
    slots,
    sums,
    token_start,
    token_stop,
    steps,
    plane_base: tl.int64,
    UNIT_BYTES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_EXACT: tl.constexpr,
    IS_WIDE: tl.constexpr,
    IS_SCATTER: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    LOAD_CACHE: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    STORE_CACHE: tl.constexpr,
    STORE_EVICT: tl.constexpr,
):
    """Move tokens ``[token_start, token_stop)`` of all planes of a table; the shapes are those of ``launch``.

    Program ``(i, p)`` moves ``steps`` tiles of row ``p``, from its first token ``+ i * steps * TOKENS`` on.
    """
    row = table + tl.program_id(1) * _TABLE_COLUMNS
    pool_address = tl.load(row)
    plane_address = tl.load(row + 1) + plane_base
    pitch_units = tl.load(row + 2)
    width_units = tl.load(row + 3)
    first_token = tl.maximum(tl.load(row + 5), token_start)
    first_token += tl.program_id(0).to(tl.int64) * (TOKENS * steps)
    token_stop = tl.minimum(tl.load(row + 6), token_stop)
    sum0 = tl.zeros([TOKENS, COLUMNS], tl.int64)
    sum1 = tl.zeros([TOKENS, COLUMNS], tl.int64)
    for step in range(steps):
        tokens = first_token + step * TOKENS + tl.arange(0, TOKENS)
        slots_of = tl.load(slots + tokens, mask=tokens < token_stop, other=0).to(tl.int64)
        if IS_EXACT:
            sum0, sum1 = _move_tile(
                pool_address, plane_address, slots_of, tokens, token_stop, pitch_units, COLUMNS,
                tl.arange(0, COLUMNS), sum0, sum1, UNIT_BYTES, IS_EXACT, IS_WIDE,
                IS_SCATTER, HAS_SUMS, LOAD_CACHE, LOAD_EVICT, STORE_CACHE, STORE_EVICT,
            )  # fmt: skip
        else:
            for first_column in range(0, width_units, COLUMNS):
                sum0, sum1 = _move_tile(
                    pool_address, plane_address, slots_of, tokens, token_stop, pitch_units, width_units,
                    first_column + tl.arange(0, COLUMNS), sum0, sum1, UNIT_BYTES, IS_EXACT, IS_WIDE,
                    IS_SCATTER, HAS_SUMS, LOAD_CACHE, LOAD_EVICT, STORE_CACHE, STORE_EVICT,
                )  # fmt: skip
    if HAS_SUMS:
        # Integers: the order in which programs add does not matter.
        to = sums + tl.load(row + 4) * 2
        tl.atomic_add(to, tl.sum(sum0), sem="relaxed")
        tl.atomic_add(to + 1, tl.sum(sum1), sem="relaxed")


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the kernel is compiled for: planes that share a unit.

    Attributes:
        unit_bytes: 8, 4, 2 or 1.
        columns: units of a row that a tile holds, a power of two.
        is_exact: every row is one tile wide, so no column is masked.
        is_wide: rows, distances and addresses are multiples of 16 bytes.
    """

    unit_bytes: int
    columns: int
    is_exact: bool
    is_wide: bool


def table_row(
    pool_address: int,
    plane_address: int,
    pitch_units: int,
    width_units: int,
    sums_index: int,
    token_start: int,
    token_stop: int,
) -> list[int]:
    """Return a row of the table: what of a plane is moved, if the launch's range holds it."""
    row = [pool_address, plane_address, pitch_units, width_units, sums_index, token_start, token_stop]
    return row + [0] * (TABLE_COLUMNS - len(row))


def plan_launch(unit_bytes: int, widths_units: list[int], *, is_wide: bool) -> Launch:
    """Return how planes whose rows have *widths_units* units, of *unit_bytes* each, are moved."""
    wanted_units = sum(widths_units)
    columns = _COLUMNS_MAX
    while columns > 1:
        moved_units = sum(ceil_div(width, columns) * columns for width in widths_units)
        if moved_units <= _WASTE_MAX * wanted_units:
            break
        columns //= 2
    is_exact = all(width == columns for width in widths_units)
    return Launch(unit_bytes, columns, is_exact, is_wide)


def launch(
    table: torch.Tensor,
    slots: torch.Tensor,
    sums: torch.Tensor | None,
    token_start: int,
    token_stop: int,
    how: Launch,
    *,
    is_scatter: bool,
    span_tokens: int | None = None,
    plane_base: int = 0,
    tuning: Tuning | None = None,
) -> Any:
    """Move tokens ``[token_start, token_stop)`` of all rows of *table* on the current stream.

    Everything was checked by the caller: a wrong address or slot is a wild access.

    Args:
        table: int64, shape [planes, TABLE_COLUMNS], on the device.
        slots: int32 or int64, shape [num_tokens], on the device.
        sums: int64, shape [planes of the pool, 2], on the device; it is added to. None: no sums.
        token_start: first token.
        token_stop: one past the last token.
        how: from ``plan_launch``.
        is_scatter: from planes to pool, instead of the other way.
        span_tokens: the most tokens of one row, when the rows narrow the range down; None: all.
        plane_base: is added to the plane addresses of the table.
        tuning: constants; the result does not depend on them. None: ``DEFAULT_TUNING``.

    Returns:
        Triton's compiled kernel; None in its interpreter.
    """
    tuning = tuning or DEFAULT_TUNING
    if span_tokens is None:
        span_tokens = token_stop - token_start
    grid, steps = _shape(how, table.shape[0], span_tokens, tuning)
    return _move.run(
        table,
        slots,
        table if sums is None else sums,
        token_start,
        token_stop,
        steps,
        plane_base,
        **_constants(how, tuning, is_scatter=is_scatter, has_sums=sums is not None),
        num_warps=tuning.num_warps,
        grid=grid,
        warmup=False,
    )


def _tile_tokens(how: Launch, tuning: Tuning) -> int:
    return max(1, tuning.tile_units // how.columns)


def _shape(how: Launch, rows: int, span_tokens: int, tuning: Tuning) -> tuple[tuple[int, int, int], int]:
    """Return the grid, and how many tiles a program moves one after the other."""
    programs_wanted = ceil_div(span_tokens, _tile_tokens(how, tuning))
    # A short range is spread over many programs instead of a few with many steps.
    steps = max(1, min(tuning.steps, programs_wanted * rows // _PROGRAMS_MIN))
    return (max(1, ceil_div(programs_wanted, steps)), rows, 1), steps


def _constants(how: Launch, tuning: Tuning, *, is_scatter: bool, has_sums: bool) -> dict[str, Any]:
    """Return what the kernel is compiled for, in the order of its signature."""
    return {
        "UNIT_BYTES": how.unit_bytes,
        "TOKENS": _tile_tokens(how, tuning),
        "COLUMNS": how.columns,
        "IS_EXACT": how.is_exact,
        "IS_WIDE": how.is_wide,
        "IS_SCATTER": is_scatter,
        "HAS_SUMS": has_sums,
        "LOAD_CACHE": tuning.load_cache,
        "LOAD_EVICT": tuning.load_evict,
        "STORE_CACHE": tuning.store_cache,
        "STORE_EVICT": tuning.store_evict,
    }


class Gathers:
    """Launches gathers, one after the other, of parts of one table, with the same slots and sums.

    To bind every argument and to look for the kernel takes Triton longer than all else that a launch is. Here
    that is done once for each ``Launch``: nothing that it depends on, which is types and alignment, differs
    from part to part.

    Args:
        table: int64, shape [rows, TABLE_COLUMNS], on the device.
        slots: int32 or int64, shape [num_tokens], on the device.
        sums: int64, shape [planes of the pool, 2], on the device; it is added to.
        stream: what they run on; None: Triton's interpreter.
    """

    def __init__(
        self,
        table: torch.Tensor,
        slots: torch.Tensor,
        sums: torch.Tensor,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._table = table
        self._slots = slots
        self._sums = sums
        self._stream = stream
        # What a launch takes first; addresses, as tensors would be asked for theirs every time.
        self._table_address = table.data_ptr()
        self._row_bytes = TABLE_COLUMNS * table.element_size()
        self._others = (slots.data_ptr(), sums.data_ptr(), 0, slots.numel())
        self._known: dict[Launch, tuple[Any, tuple[Any, ...]]] = {}

    def launch(self, row_start: int, row_stop: int, span_tokens: int, plane_base: int, how: Launch) -> None:
        """Gather the planes of rows ``[row_start, row_stop)``; see ``launch``."""
        known = self._known.get(how)
        if known is None or self._stream is None:
            self._launch_first(row_start, row_stop, span_tokens, plane_base, how)
            return
        kernel, constants = known
        grid, steps = _shape(how, row_stop - row_start, span_tokens, DEFAULT_TUNING)
        first_row = self._table_address + row_start * self._row_bytes
        with torch.cuda.device(self._stream.device):
            kernel[grid](
                first_row, *self._others, steps, plane_base, *constants, stream=self._stream.cuda_stream
            )

    def _launch_first(
        self, row_start: int, row_stop: int, span_tokens: int, plane_base: int, how: Launch
    ) -> None:
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            kernel = launch(
                self._table[row_start:row_stop], self._slots, self._sums, 0, self._slots.numel(), how,
                is_scatter=False, span_tokens=span_tokens, plane_base=plane_base,
            )  # fmt: skip
        constants = _constants(how, DEFAULT_TUNING, is_scatter=False, has_sums=True)
        # Before Triton 3.3 a compiled kernel takes none of them.
        taken = () if kernel is None else kernel.src.signature
        self._known[how] = (kernel, tuple(value for name, value in constants.items() if name in taken))


# Columns of the table of what is only summed: address, size in bytes, and of its plane the word it starts at.
SUMS_COLUMNS: Final = 4
_SUMS_COLUMNS = tl.constexpr(SUMS_COLUMNS)
# Measured on an H200; see docs/gpu.md.
_SUMS_WORDS: Final = 512
_SUMS_STEPS: Final = 16
# What is behind the last whole ones is summed byte by byte, so that loads may be as wide.
_WIDEST_BYTES = tl.constexpr(16)


@triton.jit(do_not_specialize=["steps"])
def _sum(table, sums, steps, WORDS: tl.constexpr, IS_WIDE: tl.constexpr, LOAD_CACHE: tl.constexpr):
    """Sum all parts of a table. Program ``(i, p)`` sums ``steps`` tiles of *WORDS* words of part ``p``."""
    row = table + tl.program_id(1) * _SUMS_COLUMNS
    address = tl.load(row)
    size_bytes = tl.load(row + 1)
    first_word = tl.load(row + 2)
    num_words = size_bytes // _WIDEST_BYTES * (_WIDEST_BYTES // 8)
    words = address.to(tl.pointer_type(tl.int64))
    start = tl.program_id(0).to(tl.int64) * (WORDS * steps)
    sum0 = tl.zeros([WORDS], tl.int64)
    sum1 = tl.zeros([WORDS], tl.int64)
    for step in range(steps):
        word = start + step * WORDS + tl.arange(0, WORDS)
        is_summed = word < num_words
        pointers = words + word
        if IS_WIDE:
            is_summed = tl.max_constancy(is_summed, 2)
            pointers = tl.multiple_of(pointers, 16)
        value = tl.load(pointers, mask=is_summed, other=0, cache_modifier=LOAD_CACHE)
        sum0 += value
        sum1 += value * (word + first_word + 1)
    to = sums + tl.program_id(1) * 2
    tl.atomic_add(to, tl.sum(sum0), sem="relaxed")
    tl.atomic_add(to + 1, tl.sum(sum1), sem="relaxed")
    if tl.program_id(0) == 0:
        at_byte = num_words * 8 + tl.arange(0, _WIDEST_BYTES)
        rest = tl.load(address.to(tl.pointer_type(tl.uint8)) + at_byte, mask=at_byte < size_bytes, other=0)
        part = rest.to(tl.int64) << ((at_byte & 7) * 8)
        tl.atomic_add(to, tl.sum(part), sem="relaxed")
        tl.atomic_add(to + 1, tl.sum(part * ((at_byte >> 3) + first_word + 1)), sem="relaxed")


def launch_sums(table: torch.Tensor, sums: torch.Tensor, size_bytes_max: int, *, is_wide: bool) -> None:
    """Add the sums of all parts of *table* to *sums*, on the current stream.

    Args:
        table: int64, shape [num_parts, SUMS_COLUMNS], on the device; addresses are multiples of 8.
        sums: int64, shape [num_parts, 2], on the device.
        size_bytes_max: of the longest part.
        is_wide: every address is a multiple of 16.
    """
    num_parts = table.shape[0]
    tiles = max(1, ceil_div(size_bytes_max, _SUMS_WORDS * WORD_BYTES))
    steps = max(1, min(_SUMS_STEPS, tiles * num_parts // _PROGRAMS_MIN))
    _sum[ceil_div(tiles, steps), num_parts](
        table, sums, steps, WORDS=_SUMS_WORDS, IS_WIDE=is_wide, LOAD_CACHE=DEFAULT_TUNING.load_cache
    )


# Enough programs to fill a large GPU several times over.
_PROGRAMS_MIN: Final = 4096


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which takes CPU tensors."""
    return bool(triton.knobs.runtime.interpret)

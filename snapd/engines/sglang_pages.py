"""Snapshots of pages that are known by SGLang's keys only: their names, and which of them cover a prompt.

SGLang's linker names a page by a SHA-256 that chains over every token before it, and its salt and LoRA. It
says neither which tokens these are nor where in the prompt the page lies. So a snapshot here is a run of
pages that follow each other in one prompt, counted from 0 wherever they lie, and its name says the first and
the last key. Either of them, found among the keys of another prompt, tells where the run lies there: equal
keys mean equal tokens, from the first one on.

Source: design, section 9.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

# Of a key's hexadecimal digits, in a name: 128 bits.
_SHORT_CHARS: Final = 32
_LABEL_BYTES_MAX: Final = 256
# One prompt may be covered by several snapshots, and each must be asked for.
LOOKUPS_MAX: Final = 16


class FoundRun(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon says of the snapshot that has the farthest of the keys it was asked for.

    Attributes:
        slab_handle: the attempt.
        name: of the snapshot.
        num_pages: pages in it.
        matched_pages: up to which of the keys, counted, it reaches.
    """

    slab_handle: int
    name: str
    num_pages: int
    matched_pages: int


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one snapshot that a prompt uses.

    Attributes:
        slab_handle: the attempt.
        name: of the snapshot.
        digest: the key of its last page, or as much of it as the name says.
        first_page, num_pages: which of its pages.
        is_rest_wanted: there are pages behind them, which are another prompt's.
    """

    slab_handle: int
    name: str
    digest: str
    first_page: int
    num_pages: int
    is_rest_wanted: bool


def run_name(session_id: str | None, keys: Sequence[str]) -> str:
    """Return the name of a snapshot of pages that follow each other.

    Args:
        session_id: SGLang's, for people who look at the daemon; None: it has none.
        keys: of the pages, at least one.
    """
    label = (session_id or "sglang").encode()[:_LABEL_BYTES_MAX].decode(errors="ignore")
    return f"{label}/{keys[0][:_SHORT_CHARS]}-{keys[-1][:_SHORT_CHARS]}"


def _place(found: FoundRun, index: dict[str, int], matched: int) -> int | None:
    """Return which of the keys the run's first page is, negative if it lies before them; None: not known."""
    first, _, last = found.name.rpartition("/")[2].partition("-")
    places = set()
    # Of a name of another kind neither is a key's beginning.
    if first in index:
        places.add(index[first])
    if last in index:
        places.add(index[last] - found.num_pages + 1)
    if len(places) != 1:
        return None
    place = places.pop()
    return place if place <= matched < place + found.num_pages else None


def cover(keys: Sequence[str], find: Callable[[Sequence[str]], FoundRun | None]) -> tuple[Segment, ...]:
    """Return the pages of snapshots that cover *keys* from the first one on, as far as there are any.

    Args:
        keys: of pages that follow each other in a prompt.
        find: returns the snapshot that has the farthest of the keys it is given, or None. It is asked at most
            ``LOOKUPS_MAX`` times; what it raises passes.
    """
    index = {key[:_SHORT_CHARS]: at for at, key in enumerate(keys)}
    segments: list[Segment] = []
    covered, end = 0, len(keys)
    for _ in range(LOOKUPS_MAX):
        if covered == len(keys):
            break
        found = find(keys[covered:end])
        if found is None:
            break
        matched = covered + found.matched_pages - 1
        place = _place(found, index, matched)
        if place is None or place > covered:
            # What cannot be placed cannot be used; a gap before it may be filled by another.
            end = matched if place is None else place
            if end <= covered:
                break
            continue
        last = place + found.num_pages - 1
        segments.append(
            Segment(
                slab_handle=found.slab_handle,
                name=found.name,
                # Past the match the run's keys are not the prompt's.
                digest=keys[last] if last == matched else found.name[-_SHORT_CHARS:],
                first_page=covered - place,
                num_pages=matched + 1 - covered,
                is_rest_wanted=matched < last,
            )
        )
        covered, end = matched + 1, len(keys)
    return tuple(segments)


def cut(segments: Sequence[Segment], num_pages: int) -> tuple[Segment, ...]:
    """Return the first *num_pages* pages of *segments*."""
    result: list[Segment] = []
    for segment in segments:
        wanted_pages = min(segment.num_pages, num_pages)
        if wanted_pages == 0:
            break
        is_cut = wanted_pages < segment.num_pages
        result.append(
            msgspec.structs.replace(
                segment, num_pages=wanted_pages, is_rest_wanted=segment.is_rest_wanted or is_cut
            )
        )
        num_pages -= wanted_pages
    return tuple(result)

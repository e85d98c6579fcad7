"""Page data out of nothing, for pages of any size: as large as they can be, without a log of that size."""

import numpy as np

from snapd.forensics.page.arenas import BOXES_MAX
from snapd.forensics.page.data import (
    READY,
    REFUSED,
    TRANSFERRING,
    Arena,
    AttemptColumns,
    BoxColumns,
    Counter,
    Epoch,
    EventColumns,
    Notice,
    PageData,
)

REASONS = ["ok", "transfer-timeout", "snapshot-buf-full", "session-not-resident"]
SPAN_S = 28_800.0


def made_page(attempts: int, *, sessions: list[str] | None = None, seed: int = 1) -> PageData:
    """Return a page of *attempts*: 90 % OK; the session of attempt i is number i modulo their count."""
    rng = np.random.default_rng(seed)
    names = sessions or [f"agent-{number:05d}" for number in range(max(attempts // 20, 1))]
    start = np.sort(rng.uniform(0, SPAN_S * 0.98, attempts))
    luck = rng.uniform(0, 1, attempts)
    reason = np.select([luck < 0.9, luck < 0.94, luck < 0.98], [0, 1, 2], 3).astype(np.uint8)
    last_state = np.select([reason == 0, reason == 2], [READY, REFUSED], TRANSFERRING).astype(np.uint8)
    times = [rng.lognormal(mean, 0.8, attempts) * (last_state != REFUSED) for mean in (1.5, 3.5, 8.0)]
    times[2] *= last_state == READY
    tokens = rng.integers(100, 60_000, attempts).astype(np.uint32)
    events = np.where(last_state == REFUSED, 0, 4).astype(np.uint16)
    rows = AttemptColumns(
        start_s=np.round(start, 6), reserved_ms=times[0].astype(np.float32),
        transferring_ms=times[1].astype(np.float32), ready_ms=times[2].astype(np.float32),
        session=(np.arange(attempts) % len(names)).astype(np.uint32),
        handle=np.where(last_state == REFUSED, 0, rng.integers(1, 1 << 53, attempts)).astype(np.float64),
        bytes=tokens.astype(np.float64) * 12_288, tokens=tokens, token_start=np.zeros(attempts, np.uint32),
        reason=reason, epoch=np.zeros(attempts, np.uint16), ranks=np.ones(attempts, np.uint16),
        last_state=last_state, event_count=events,
    )  # fmt: skip
    bins = np.zeros((len(REASONS), 600), np.uint32)
    np.add.at(bins, (reason, (start / SPAN_S * 600).astype(int)), 1)
    return PageData(
        title="made.jsonl", about=["snapd 0"], begin_unix_s=1_767_200_000.0, end_s=SPAN_S,
        lines=attempts * 10, epochs=[Epoch("e1", 0.0), Epoch("e2", SPAN_S / 2)], sessions=names,
        reasons=REASONS, reason_counts=np.bincount(reason, minlength=len(REASONS)).tolist(),
        attempts=attempts, attempts_ok=int((reason == 0).sum()), attempts_open=0,
        counters=[Counter("Refused", 1)], notices=[Notice("something to know")], rows=rows,
        events=_events(rng, int(events.sum())), event_whys=["", "final"],
        event_kinds=["slab.allocated", "lease.granted", "lease.ended", "slab.released"],
        bins=bins, arenas=[_arena(rng, rows)],
    )  # fmt: skip


def _events(rng: np.random.Generator, count: int) -> EventColumns:
    """A slab, a lease, its end, and the same slab again, for each attempt."""
    lives = count // 4
    is_slab = np.tile(np.array([1, 0, 0, 1]), lives)
    return EventColumns(
        kind=np.tile(np.arange(4, dtype=np.uint8), lives), rank=np.zeros(count, np.uint16),
        at_ms=np.cumsum(rng.uniform(0, 1e3, (lives, 4)), axis=1).ravel().astype(np.float32),
        why=np.tile(np.array([0, 0, 0, 1], np.uint8), lives),
        bytes=np.repeat(rng.integers(1, 1 << 22, lives), 4) * 256.0 * is_slab,
        offset=np.repeat(rng.integers(0, 1 << 24, lives), 4) * 256.0 * is_slab,
        extents=is_slab.astype(np.uint16),
    )  # fmt: skip


def _arena(rng: np.random.Generator, rows: AttemptColumns) -> Arena:
    count = rows.start_s.size
    end = rows.start_s + (rows.reserved_ms + rows.transferring_ms + rows.ready_ms) / 1e3
    low = rng.uniform(0, 0.97, count)
    live = rng.uniform(0.2, 0.6, 500).astype(np.float32)
    cells = rng.integers(0, 200, (160, 2_400)).astype(np.uint8)
    boxes = BoxColumns(
        t0=rows.start_s, t1=end, low=low.astype(np.float32), high=(low + 0.02).astype(np.float32),
        kind=(rows.reason != 0).astype(np.uint8), row=np.arange(count, dtype=np.uint32),
    )  # fmt: skip
    return Arena(
        rank=0, device="cpu", size_bytes=8 << 30, live=cells, quarantined=np.zeros_like(cells),
        at_s=np.linspace(0, SPAN_S, 500), live_share=live, quarantined_share=live / 5,
        hole_share=1 - live * 1.2, boxes=boxes if count <= BOXES_MAX else None,
    )  # fmt: skip

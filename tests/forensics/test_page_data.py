"""What gets onto the page, and that nothing of the log is taken for anything but data."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("duckdb", reason="logs are read with DuckDB: pip install 'kv-snapd[forensics]'")
pytest.importorskip(
    "pyarrow", reason="logs are read with DuckDB and pyarrow: pip install 'kv-snapd[forensics]'"
)
np = pytest.importorskip("numpy")

from page_log import Night, opened  # noqa: E402

from snapd.forensics.arenamap import POINTS_MAX  # noqa: E402
from snapd.forensics.lines import LogInput  # noqa: E402
from snapd.forensics.page import arenas, attempts, write_html  # noqa: E402
from snapd.forensics.page.data import NO_EPOCH, OLDER, READY, REFUSED, RESERVED, PageData  # noqa: E402
from snapd.forensics.page.extract import Limits, page_data  # noqa: E402
from snapd.forensics.page.palette import OPEN  # noqa: E402
from snapd.forensics.page.raster import Coverage  # noqa: E402
from snapd.forensics.report import build_report  # noqa: E402
from snapd.forensics.tables import LogTables, Selection  # noqa: E402
from snapd.forensics.violations import ProofReport, Violation, ViolationKind, Where  # noqa: E402

TYPES = {"u8": "u1", "u16": "<u2", "u32": "<u4", "f32": "<f4", "f64": "<f8"}


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> tuple[Night, Path]:
    path = tmp_path_factory.mktemp("night") / "d-to-p-sync.jsonl"
    return Night(path, 1_200), path


@pytest.fixture(scope="module")
def page(night: tuple[Night, Path]) -> PageData:
    with opened(night[1]) as (tables, report):
        data = page_data(tables, report)
        assert tables.rows("SELECT * FROM duckdb_tables() WHERE table_name LIKE 'page_%'") == []
        return data


@pytest.fixture
def limited(night: tuple[Night, Path]) -> Callable[..., PageData]:
    def make(**limits: int) -> PageData:
        with opened(night[1]) as (tables, report):
            return page_data(tables, report, limits=Limits(**limits))

    return make


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# --- rows --------------------------------------------------------------------------------------


def test_every_attempt_is_a_row_with_its_reason(night: tuple[Night, Path], page: PageData) -> None:
    outcomes = night[0].outcomes
    assert {
        name: n for name, n in zip(page.reasons, page.reason_counts, strict=True) if name != OPEN
    } == outcomes
    assert np.bincount(page.rows.reason, minlength=len(page.reasons)).tolist() == page.reason_counts
    assert page.attempts == len(page.rows.start_s)
    assert set(page.rows.epoch.tolist()) == {0, 1}
    assert page.attempts_ok == outcomes["ok"]
    ended = sorted(night[0].ended)
    rows = [
        (page.sessions[s], int(handle), page.reasons[r])
        for s, handle, r in zip(page.rows.session, page.rows.handle, page.rows.reason, strict=True)
    ]
    assert sorted(row for row in rows if row[2] != OPEN) == ended
    assert (np.diff(page.rows.start_s) >= 0).all()


def test_the_slices_of_time_hold_every_outcome(page: PageData) -> None:
    closed = [n if name != OPEN else 0 for name, n in zip(page.reasons, page.reason_counts, strict=True)]
    assert page.bins.sum(axis=1).tolist() == closed


def test_a_refusal_has_no_state_and_an_open_attempt_lasts_until_now(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    Night(path, 900, hours=0.05)
    with opened(path) as (tables, report):
        page = page_data(tables, report)
    rows = page.rows
    refused = rows.last_state == REFUSED
    assert refused.sum() == report.refused > 0
    assert (rows.handle[refused] == 0).all()
    is_open = rows.reason == page.reasons.index(OPEN)
    assert is_open.sum() == report.unfinished > 0
    last_ms = rows.reserved_ms + rows.transferring_ms + rows.ready_ms
    assert rows.start_s[is_open] + last_ms[is_open] / 1e3 == pytest.approx(page.end_s, abs=0.05)
    assert set(rows.last_state[is_open]) <= {RESERVED, RESERVED + 1, READY}


def test_events_belong_to_their_attempts(night: tuple[Night, Path], page: PageData) -> None:
    ends = np.cumsum(page.rows.event_count)
    row = int(np.flatnonzero(page.rows.reason == page.reasons.index("reserve-timeout"))[0])
    own = slice(ends[row] - page.rows.event_count[row], ends[row])
    kinds = [page.event_kinds[kind] for kind in page.events.kind[own]]
    assert kinds == ["slab.allocated"] * 2 + ["slab.quarantined"] * 2 + ["slab.released"] * 2
    assert page.events.rank[own].tolist() == [0, 1] * 3
    assert page.events.at_ms[own].tolist() == pytest.approx([0, 0, 10_000, 10_000, 70_000, 70_000], abs=1)
    assert [page.event_whys[why] for why in page.events.why[own]] == [""] * 2 + ["undrained"] * 2 + [
        "time"
    ] * 2
    assert (2 * page.events.bytes[own] >= page.rows.bytes[row]).all()
    assert int(ends[-1]) == len(page.events.kind)
    assert page.rows.ranks[row] == 2


# --- bounds ------------------------------------------------------------------------------------


def test_all_failures_are_kept_and_the_rest_is_spread_and_the_page_says_so(
    page: PageData, limited: Callable[..., PageData]
) -> None:
    small = limited(attempts=400)
    others = page.attempts - page.attempts_ok
    ok = small.rows.reason == small.reasons.index("ok")
    assert (~ok).sum() == others
    assert ok.sum() == 400 - others
    assert small.weight_other == 1
    assert small.weight_ok == pytest.approx(page.attempts_ok / ok.sum())
    assert small.reason_counts == page.reason_counts, "these count every attempt"
    assert small.bins.sum() == page.bins.sum()
    (notice,) = [n for n in small.notices if "spread evenly" in n.text]
    assert f"all {others:,} that did not end OK" in notice.text and notice.level == "note"
    hours = np.histogram(small.rows.start_s[ok], 4, (0, small.end_s))[0]
    everything = np.histogram(page.rows.start_s[page.rows.reason == 0], 4, (0, page.end_s))[0]
    assert hours / hours.sum() == pytest.approx(everything / everything.sum(), abs=0.02)


def test_more_failures_than_fit_are_a_loud_notice(limited: Callable[..., PageData]) -> None:
    small = limited(attempts=50)
    ok = int((small.rows.reason == small.reasons.index("ok")).sum())
    assert (len(small.rows.start_s), ok) == (50, 5)
    (notice,) = [n for n in small.notices if "spread evenly" in n.text]
    assert "45 of " in notice.text and notice.level == "bad"
    assert small.weight_other > 1


def test_events_beyond_their_bound_are_left_out_whole_and_those_of_failures_last(
    limited: Callable[..., PageData],
) -> None:
    small = limited(events=500)
    assert 490 < len(small.events.kind) == small.rows.event_count.sum() <= 500
    failed = (small.rows.reason != 0) & (small.rows.handle > 0)
    assert (small.rows.event_count[failed] > 0).mean() > (small.rows.event_count[~failed] > 0).mean()
    assert any("Slabs and leases of" in notice.text for notice in small.notices)


def test_boxes_beyond_their_bound_leave_the_raster(page: PageData, limited: Callable[..., PageData]) -> None:
    small = limited(boxes=10)
    assert all(arena.boxes is None for arena in small.arenas)
    assert all((a.live == b.live).all() for a, b in zip(small.arenas, page.arenas, strict=True))
    assert any("pictures of fixed size" in notice.text for notice in small.notices)


def test_an_attempt_with_events_without_end_has_none(
    monkeypatch: pytest.MonkeyPatch, limited: Callable[..., PageData]
) -> None:
    monkeypatch.setattr(attempts, "_EVENTS_PER_ATTEMPT_MAX", 7)
    small = limited()
    assert set(small.rows.event_count.tolist()) <= {0, 2, 4, 6}
    assert small.rows.event_count.sum() == len(small.events.kind) > 0


def test_names_without_end_become_one(
    monkeypatch: pytest.MonkeyPatch, limited: Callable[..., PageData]
) -> None:
    monkeypatch.setattr(attempts, "_NAMES_MAX", 2)
    small = limited()
    assert len(small.event_whys) == 3 and small.event_whys[2] == "(more)"
    assert small.events.why.max() == 2


def test_the_raster_does_not_depend_on_how_many_boxes_are_read_at_once(
    page: PageData, monkeypatch: pytest.MonkeyPatch, limited: Callable[..., PageData]
) -> None:
    monkeypatch.setattr(arenas, "_BOXES_AT_ONCE", 50)
    small = limited(boxes=10)
    for a, b in zip(small.arenas, page.arenas, strict=True):
        assert np.abs(a.live.astype(int) - b.live).max() <= 1
        assert np.abs(a.quarantined.astype(int) - b.quarantined).max() <= 1
    for a, b in zip(limited().arenas, page.arenas, strict=True):
        assert a.boxes is not None and b.boxes is not None
        assert len(a.boxes.t0) == len(b.boxes.t0) > 50


def test_numbers_and_names_of_any_size_fit(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "ts": 1e9,
            "session": "s" * 5_000,
            "ok": True,
            "num_tokens": 1 << 62,
            "bytes": 1 << 62,
            "duration_ms": -5,
        },
        {"ts": 1e9 + 1, "ok": False, "num_tokens": -3, "bytes": -7},
    )
    with opened(path) as (tables, report):
        page = page_data(tables, report)
    assert page.rows.tokens.tolist() == [(1 << 32) - 1, 0]
    assert page.rows.bytes.tolist() == [float(1 << 62), 0.0]
    assert page.rows.transferring_ms.tolist() == [0.0, 0.0]
    assert [len(session) for session in page.sessions] == [1_024, 0]


def test_a_token_number_that_no_page_can_hold_is_the_largest_that_it_can(
    night: tuple[Night, Path], tmp_path: Path
) -> None:
    raw = next(line for line in night[1].read_bytes().splitlines() if b'"sync.outcome"' in line)
    line = json.loads(raw) | {"token_start": 1 << 40}
    with opened(written(tmp_path, line)) as (tables, report):
        page = page_data(tables, report)
    assert page.rows.token_start.tolist() == [(1 << 32) - 1]


# --- arenas ------------------------------------------------------------------------------------


def test_boxes_of_one_arena_never_overlap_and_belong_to_their_attempts(page: PageData) -> None:
    for arena in page.arenas:
        boxes = arena.boxes
        assert boxes is not None and (boxes.t1 >= boxes.t0).all()
        for t in random.Random(1).sample(range(int(page.end_s)), 50):
            now = (boxes.t0 <= t) & (boxes.t1 > t)
            order = np.argsort(boxes.low[now])
            low, high = boxes.low[now][order], boxes.high[now][order]
            assert (low[1:] >= high[:-1] - 1e-6).all()
        known = boxes.row < len(page.rows.start_s)
        assert known.all()
        assert (page.rows.start_s[boxes.row] <= boxes.t0 + 1e-3).all()
        quarantined = page.rows.reason[boxes.row[boxes.kind == 1]]
        assert page.reasons.index("ok") not in quarantined


def test_what_is_covered_at_all_can_be_seen() -> None:
    coverage = Coverage(4, 4)
    coverage.add(*(np.array([edge]) for edge in (0.5, 0.5001, 0.5, 0.5001)))
    shades = coverage.shades()
    assert shades[2, 2] == 1 and shades.sum() == 1


def test_the_raster_holds_as_much_as_the_boxes(page: PageData) -> None:
    for arena in page.arenas:
        boxes = arena.boxes
        assert boxes is not None
        live = boxes.kind == 0
        share = ((boxes.t1 - boxes.t0) * (boxes.high - boxes.low))[live].sum() / page.end_s
        assert arena.live.mean() / 255 == pytest.approx(share, rel=0.25)
        assert arena.live.shape == arena.quarantined.shape


def test_coverage_is_that_of_adding_up_every_cell() -> None:
    rng = np.random.default_rng(3)
    x0, y0 = rng.uniform(-0.1, 1, 40), rng.uniform(0, 1, 40)
    x1, y1 = x0 + rng.uniform(0, 0.5, 40), y0 + rng.uniform(0, 0.3, 40)
    coverage = Coverage(7, 11)
    coverage.add(x0[:25], x1[:25], y0[:25], y1[:25])
    coverage.add(x0[25:], x1[25:], y0[25:], y1[25:])
    want = np.zeros((7, 11))
    for a, b, c, d in zip(x0, x1, y0, y1, strict=True):
        for row in range(7):
            for column in range(11):
                wide = max(0.0, min(b, (column + 1) / 11) - max(a, column / 11)) * 11
                high = max(0.0, min(d, (row + 1) / 7) - max(c, row / 7)) * 7
                want[row, column] += wide * high
    assert coverage.shares() == pytest.approx(want, abs=1e-9)
    assert (coverage.shades() > 0).tolist() == (want > 0).tolist()


def test_slabs_without_a_begin_or_an_end_last_as_long_as_their_epoch(
    night: tuple[Night, Path], tmp_path: Path
) -> None:
    lines = night[1].read_bytes().splitlines(keepends=True)
    first = next(k for k in range(len(lines) // 3, len(lines)) if b'"slab.quarantined"' in lines[k])
    last = next(k for k in range(len(lines) // 2, len(lines)) if b'"slab.allocated"' in lines[k])
    # From the line after a quarantine began, to one with a slab.
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(lines[first + 1 : last + 1]))
    with opened(path) as (tables, report):
        page = page_data(tables, report)
    boxes = page.arenas[json.loads(lines[first])["rank"]].boxes
    assert boxes is not None
    assert ((boxes.t0 == 0) & (boxes.kind == 1)).any(), "a quarantine had begun before"
    assert ((boxes.t0 == 0) & (boxes.kind == 0)).any(), "something was live before"
    assert ((boxes.t1 > boxes.t0) | (boxes.t1 == boxes.t1.max())).all(), "none was live for no time"
    assert boxes.t0.min() == 0
    ends = page.arenas[json.loads(lines[last])["rank"]].boxes
    assert ends is not None and ends.t1.max() == pytest.approx(page.end_s, abs=1e-5)
    assert ends.t0.max() == pytest.approx(page.end_s, abs=1e-5), "the last slab is there"
    assert np.isnan(page.arenas[0].hole_share).all(), "the log does not tell how large the arena is"
    assert any("lower bound" in notice.text for notice in page.notices)


def test_events_of_an_attempt_whose_begin_is_missing_are_timed_by_the_clock(
    night: tuple[Night, Path], tmp_path: Path
) -> None:
    lines = night[1].read_bytes().splitlines(keepends=True)
    first = next(k for k in range(len(lines) // 3, len(lines)) if b'"to_state":"READY"' in lines[k])
    handle = json.loads(lines[first])["slab_handle"]
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(lines[first:]))
    with opened(path) as (tables, report):
        page = page_data(tables, report)
    (row,) = np.flatnonzero(page.rows.handle == handle)
    end = int(page.rows.event_count[: row + 1].sum())
    own = page.events.at_ms[end - page.rows.event_count[row] : end]
    total = page.rows.reserved_ms[row] + page.rows.transferring_ms[row] + page.rows.ready_ms[row]
    assert own[-1] == pytest.approx(total, abs=1)


def test_an_attempt_that_is_still_reserved_has_been_so_until_now(
    night: tuple[Night, Path], tmp_path: Path
) -> None:
    lines = night[1].read_bytes().splitlines(keepends=True)
    handle = next(handle for _, handle, reason in night[0].ended if reason == "reserve-timeout")
    own = [k for k, line in enumerate(lines) if b'"slab_handle":%d,' % handle in line]
    ended = next(k for k in own if b'"to_state":"ABORTED"' in lines[k])
    path = tmp_path / "log.jsonl"
    # Without the abort the next line is some seconds later.
    path.write_bytes(b"".join([*lines[:ended], lines[own[-1] + 1]]))
    with opened(path) as (tables, report):
        page = page_data(tables, report)
    (row,) = np.flatnonzero(page.rows.handle == handle)
    assert page.reasons[page.rows.reason[row]] == OPEN
    assert page.rows.reserved_ms[row] == pytest.approx((page.end_s - page.rows.start_s[row]) * 1e3, rel=1e-4)
    assert page.rows.reserved_ms[row] > 9_000
    assert page.rows.ready_ms[row] == page.rows.transferring_ms[row] == 0


def test_a_new_epoch_begins_with_an_empty_arena(page: PageData) -> None:
    restart = page.epochs[1].start_s
    arena = page.arenas[0]
    slice_s = page.end_s / POINTS_MAX
    near = (arena.at_s >= restart) & (arena.at_s <= restart + slice_s)
    assert ((arena.live_share + arena.quarantined_share)[near] == 0).any()
    assert (arena.hole_share[near] == 1).any()
    assert np.isnan(arena.hole_share).sum() == 1, "between the two there was no arena"
    assert (np.diff(arena.at_s) >= 0).all()


def test_of_two_daemons_at_the_same_time_one_can_be_drawn(tmp_path: Path) -> None:
    for seed in (1, 2):
        Night(tmp_path / f"{seed}.jsonl", 60, seed=seed, hours=0.1, crash_at=None)
    with LogInput([str(tmp_path)]) as log, LogTables(log) as tables:
        tables.select(Selection(epoch=tables.epochs[0].epoch))
        page = page_data(tables, build_report(tables, log))
    rows = len(page.rows.start_s)
    assert rows > 10 and set(page.rows.epoch.tolist()) == {0}
    for arena in page.arenas:
        assert arena.boxes is not None and (arena.boxes.row < rows).all()


def test_one_epoch_alone_can_be_drawn(night: tuple[Night, Path]) -> None:
    with opened(night[1]) as (tables, _):
        whole = build_report(tables, LogInput([str(night[1])]))
        tables.select(Selection(epoch=tables.epochs[1].epoch))
        report = build_report(tables, LogInput([str(night[1])]))
        page = page_data(tables, report)
    assert 0 < page.attempts < whole.attempts
    assert "a part of the log, as was asked for" in page.about
    assert page.end_s == pytest.approx(report.end_ts - report.begin_ts)
    for arena in page.arenas:
        assert arena.boxes is not None and arena.boxes.t0.min() >= 0
        assert (arena.boxes.row < len(page.rows.start_s)).all()


def test_a_part_of_the_time_has_only_the_boxes_of_that_time(
    night: tuple[Night, Path], page: PageData
) -> None:
    begin, end = page.begin_unix_s + 9_000, page.begin_unix_s + 12_000
    with opened(night[1]) as (tables, _):
        tables.select(Selection(since_ts=begin, until_ts=end))
        part = page_data(tables, build_report(tables, LogInput([str(night[1])])))
    assert part.begin_unix_s == begin and part.end_s == 3_000
    for own, whole in zip(part.arenas, page.arenas, strict=True):
        assert own.boxes is not None and whole.boxes is not None
        there = (whole.boxes.t1 >= 9_000) & (whole.boxes.t0 <= 12_000)
        assert len(own.boxes.t0) == there.sum() > 0


# --- other logs --------------------------------------------------------------------------------


def test_an_older_log_without_times_is_drawn_in_its_order(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        *({"session": f"s{k}", "status": "failed", "reason": "alloc-failed"} for k in range(148)),
        *({"session": f"s{k}", "status": "failed", "reason": "session-not-resident"} for k in range(19)),
    )
    with opened(path) as (tables, report):
        page = page_data(tables, report)
    assert dict(zip(page.reasons, page.reason_counts, strict=True)) == {
        "ok": 0, "alloc-failed": 148, "session-not-resident": 19,
    }  # fmt: skip
    assert page.rows.start_s.tolist() == list(range(167))
    assert set(page.rows.last_state) == {OLDER}
    assert page.bins.sum() == 167
    assert any("no times" in notice.text for notice in page.notices)
    assert page.arenas == []


def test_words_of_an_older_log_are_not_taken_for_words_of_the_page(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"ts": 1e9, "session": "a", "ok": False, "reason": "open"},
        {"ts": 1e9 + 1, "session": "a", "ok": False, "reason": "ok"},
        {"ts": 1e9 + 2, "session": "a", "ok": True, "reason": "well done"},
    )
    with opened(path) as (tables, report):
        page = page_data(tables, report)
    assert dict(zip(page.reasons, page.reason_counts, strict=True)) == {
        "ok": 1, "not ok: ok": 1, "not ok: open": 1,
    }  # fmt: skip


def test_reasons_without_end_are_put_together(tmp_path: Path) -> None:
    lines = [{"ts": 1e9 + k, "session": "a", "ok": False, "reason": f"why-{k:03d}"} for k in range(300)]
    with opened(written(tmp_path, *lines)) as (tables, report):
        page = page_data(tables, report)
    assert len(page.reasons) == 62
    assert page.reason_counts[page.reasons.index("other reasons")] == 240
    assert np.bincount(page.rows.reason).tolist() == page.reason_counts


def test_a_log_of_one_moment_is_a_page(tmp_path: Path) -> None:
    with opened(written(tmp_path, {"ts": 1e9, "session": "a", "ok": True})) as (tables, report):
        page = page_data(tables, report)
    assert page.bins[:, 0].sum() == page.bins.sum() == 1 and page.end_s == 0
    assert page.rows.epoch.tolist() == [NO_EPOCH]


def test_an_empty_log_is_a_page(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("")
    with opened(path) as (tables, report):
        write_html(tables, report, tmp_path / "page.html")
    assert "</html>" in (tmp_path / "page.html").read_text()


def test_what_a_proof_found_comes_first(night: tuple[Night, Path]) -> None:
    violation = Violation(
        kind=ViolationKind.OVERLAPPING_EXTENTS, message="two own them", lines=(Where("a.jsonl", 7),)
    )
    own = {"violations", "counts", "outcomes", "arenas"}
    fields = {name: 0 for name in ProofReport.__struct_fields__ if name not in own}
    counts = {ViolationKind.OVERLAPPING_EXTENTS: 1}
    proof = ProofReport(violations=(violation,), counts=counts, outcomes={}, arenas=(), **fields)
    with opened(night[1]) as (tables, report):
        first = page_data(tables, report, proof).notices[0]
    assert first.level == "bad" and "overlapping-extents 1" in first.text
    assert first.details == ["overlapping-extents: two own them (a.jsonl:7)"]

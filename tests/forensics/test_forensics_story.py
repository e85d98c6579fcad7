"""The story of one session."""

from pathlib import Path

import pytest
from forensics_logs import Writer, loaded

from snapd.core import records as r
from snapd.errors import REASON_HELP
from snapd.forensics import story
from snapd.forensics.facts import Selection
from snapd.forensics.lines import LogInput
from snapd.forensics.story import NoSuchSession, Step, steps, summarize
from snapd.forensics.tables import LogTables


def story_of(path: Path, session_id: str) -> list[Step]:
    with loaded(path) as (tables, _):
        return list(steps(tables, session_id))


def a_rich_session() -> Writer:
    writer = Writer()
    writer.start()
    same = {"session_id": "s", "slab_handle": 7, "rank": 0, "lease_id": 3}
    writer.refuse("s")
    writer.move(7, "", "RESERVED", duration_ms=0.0, session_id="s", peer="d0")
    writer.slab(7, "allocated", (256, 512), (1_024, 256))
    writer.lines[-1] = writer.lines[-1].replace(b'"s7"', b'"s"')
    writer.move(7, "RESERVED", "TRANSFERRING", session_id="s")
    writer.move(7, "TRANSFERRING", "READY", session_id="s", duration_ms=4.0)
    writer.add(r.LeaseGranted(at_ns=0, round=1, until_ns=(writer.seq + 11) * 1_000_000, **same))
    writer.add(r.LeaseEnded(at_ns=0, ok=False, reason=r.Reason.LEASE_EXPIRED, duration_ms=10.0, **same))
    writer.move(7, "READY", "ABORTED", "evicted", session_id="s", newer_handle=8)
    writer.outcome(7, "evicted", session_id="s")
    writer.life(9)
    return writer


def test_a_story_tells_each_step_and_its_line(tmp_path: Path) -> None:
    """Who, what, how long and how fast; other sessions are left out."""
    writer = a_rich_session()
    path = tmp_path / "log"
    path.write_bytes(writer.text())
    told = story_of(path, "s")
    assert [(step.line_no, step.state or step.event, step.text) for step in told] == [
        (3, "sync.outcome", "refused 10 tokens, 976.6 KiB: arena 0: 0 bytes free; try again after 50 ms"),
        (4, "RESERVED", "prepared by d0: 10 tokens, 976.6 KiB"),
        (5, "slab.allocated", "rank 0: 768 B in 2 pieces at 256 live"),
        (6, "TRANSFERRING", "D writes, after 2 ms"),
        (7, "READY", "all ranks committed, after 4 ms: 0.25 GB/s"),
        (8, "lease.granted", "rank 0 may read for 10 ms (lease 3, round 1)"),
        (9, "lease.ended", "rank 0 is over: lease-expired, after 10 ms"),
        (10, "ABORTED", "evicted, for attempt 8, after 2 ms READY"),
        (
            11,
            "sync.outcome",
            "10 ms in all (1 ms RESERVED, 4 ms TRANSFERRING, 5 ms READY). " + REASON_HELP[r.Reason.EVICTED],
        ),
    ]
    assert [step.since_start_ms for step in told] == [None, 0, 1, 2, 3, 4, 5, 6, 7]
    assert [(step.is_end, step.ok, step.reason) for step in told if step.is_end] == [
        (True, False, "snapshot-buf-full"), (True, False, "evicted"),
    ]  # fmt: skip


def test_a_summary_counts_the_sessions_outcomes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(a_rich_session().text())
    with loaded(path) as (tables, _):
        summary = summarize(tables, "s")
    assert (summary.attempts, summary.ok, summary.refused, summary.unfinished) == (2, 0, 1, 0)
    assert summary.reasons == {"evicted": 1, "snapshot-buf-full": 1}


def test_quarantine_is_told_with_why_and_until_when(tmp_path: Path) -> None:
    writer = Writer()
    writer.start()
    writer.move(1, "", "RESERVED", duration_ms=0.0)
    writer.slab(1, "quarantined", (0, 256), until_ns=(writer.seq + 1) * 1_000_000 + 60_000_000_000)
    writer.slab(1, "released", (0, 256), was="quarantined", why="time", duration_ms=60_000.0)
    path = tmp_path / "log"
    path.write_bytes(writer.text())
    assert [step.text for step in story_of(path, "s1")[1:]] == [
        "rank 0: 256 B at 0 into quarantine for 60 s at most: a write may still land",
        "rank 0: 256 B at 0 out of quarantine (time), after 60 s",
    ]


def test_an_attempt_whose_beginning_is_missing_has_no_time_since_it(tmp_path: Path) -> None:
    writer = a_rich_session()
    path = tmp_path / "log"
    path.write_bytes(b"".join(line + b"\n" for line in writer.lines[5:]))
    assert all(step.since_start_ms is None for step in story_of(path, "s"))


def test_beginnings_that_are_remembered_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten: its later lines have no time since it."""
    monkeypatch.setattr(story, "_BEGUN_MAX", 1)
    writer = Writer()
    writer.start()
    for handle in (1, 2):
        writer.move(handle, "", "RESERVED", duration_ms=0.0, session_id="s")
    for handle in (1, 2):
        writer.move(handle, "RESERVED", "TRANSFERRING", session_id="s")
    path = tmp_path / "log"
    path.write_bytes(writer.text())
    assert [step.since_start_ms for step in story_of(path, "s")] == [0, 0, None, 2]


def test_an_unknown_session_is_an_error_that_names_some_like_it(
    made_tables: tuple[LogTables, LogInput],
) -> None:
    with pytest.raises(NoSuchSession, match="'agent-00000' in what is looked at; there are 'agent-000001', "):
        summarize(made_tables[0], "agent-00000")


def test_a_selection_narrows_a_story(made_tables: tuple[LogTables, LogInput]) -> None:
    """To an epoch, or to a time."""
    tables, _ = made_tables
    session_id = tables.value(
        "SELECT session_id FROM attempts GROUP BY 1 ORDER BY count(DISTINCT epoch) DESC, 1"
    )
    whole = list(steps(tables, session_id))
    tables.select(Selection(epoch=tables.epochs[0].epoch))
    early = list(steps(tables, session_id))
    tables.select(Selection(since_ts=tables.epochs[1].begin_ts))
    late = list(steps(tables, session_id))
    assert early
    assert early + late == whole


def test_every_line_of_every_session_is_told(made_tables: tuple[LogTables, LogInput]) -> None:
    """All but the refusals, which their outcomes tell."""
    tables, _ = made_tables
    for (session_id,) in tables.rows(
        "SELECT session_id FROM attempts GROUP BY 1 ORDER BY count(*) DESC, 1 LIMIT 3"
    ):
        told = list(steps(tables, session_id))
        lines = tables.value(
            "SELECT count(*) FROM records WHERE session_id = ? AND event <> 'sync.refused'", session_id
        )
        assert len(told) == lines
        assert sum(step.is_end for step in told) == summarize(tables, session_id).attempts
        assert [(step.ts or 0) for step in told] == sorted((step.ts or 0) for step in told)

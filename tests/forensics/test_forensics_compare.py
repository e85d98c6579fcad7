"""Two logs side by side."""

from pathlib import Path
from typing import Any

import pytest
from forensics_logs import Writer, report_of, write_old

from snapd.cli.forensicstext import show_comparison
from snapd.forensics.compare import CHANCE_MAX, chance_of, compare
from snapd.forensics.report import Report


def old_report(path: Path, **counts: int) -> Report:
    """A report of so many attempts a reason; ``_`` stands for ``-``."""
    lines: list[dict[str, Any]] = []
    for name, count in counts.items():
        reason = name.replace("_", "-")
        lines += [{"ok": reason == "ok", "reason": reason, "session": "s"}] * count
    return report_of(write_old(path, lines))


def test_a_log_that_is_better_is_called_better(tmp_path: Path) -> None:
    before = old_report(tmp_path / "a", alloc_failed=148, session_not_resident=19)
    after = old_report(tmp_path / "b", ok=160, evicted=7)
    found = compare(after, before)
    assert found.verdict == "better"
    assert found.text == (
        "Better: 95.8% of 167 attempts are OK here, 0.0% of 167 there. What changed most: "
        "alloc-failed 88.6% to 0.0%; session-not-resident 11.4% to 0.0%; evicted 0.0% to 4.2%."
    )
    assert [(r.reason, r.other_count, r.count) for r in found.reasons] == [
        ("ok", 0, 160), ("alloc-failed", 148, 0), ("session-not-resident", 19, 0), ("evicted", 0, 7),
    ]  # fmt: skip
    assert compare(before, after).verdict == "worse"
    assert compare(before, after).text.startswith("Worse: 0.0% of 167 attempts are OK here")


def test_a_difference_that_chance_makes_is_none(tmp_path: Path) -> None:
    """One more OK out of twenty is no verdict; the same shares of many are."""
    few = compare(old_report(tmp_path / "a", ok=11, evicted=9), old_report(tmp_path / "b", ok=10, evicted=10))
    many = compare(
        old_report(tmp_path / "c", ok=2_750, evicted=2_250),
        old_report(tmp_path / "d", ok=2_500, evicted=2_500),
    )
    assert (few.verdict, many.verdict) == ("same", "better")
    assert few.text == (
        "No difference that chance would not make: 55.0% of 20 attempts are OK here, 50.0% of 20 there."
    )
    assert all(reason.is_by_chance for reason in few.reasons)
    assert not any(reason.is_by_chance for reason in many.reasons)


def test_an_empty_log_gives_no_verdict(tmp_path: Path) -> None:
    full, empty = old_report(tmp_path / "a", ok=3), old_report(tmp_path / "b")
    assert compare(full, empty).verdict == compare(empty, full).verdict == "unknown"
    assert "the other log has no attempts" in compare(full, empty).text
    assert "this log has no attempts" in compare(empty, full).text
    assert [reason.is_by_chance for reason in compare(full, empty).reasons] == [None]


def test_nothing_is_called_chance_without_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, empty = old_report(tmp_path / "a", ok=3), old_report(tmp_path / "b")
    show_comparison(compare(full, empty), "here", "there")
    assert "as chance makes" not in capsys.readouterr().out
    few = old_report(tmp_path / "c", ok=2, evicted=1)
    show_comparison(compare(full, few), "here", "there")
    assert capsys.readouterr().out.count("as chance makes") == 2


def test_payload_is_compared_only_where_a_log_says_bytes(tmp_path: Path) -> None:
    """An older log without sizes has no payload of 0; one of snapd may have."""
    writer = Writer()
    writer.start()
    writer.life(1, "evicted")
    path = tmp_path / "log"
    path.write_bytes(writer.text())
    comparison = compare(old_report(tmp_path / "a", ok=3), report_of(path))
    figure = next(figure for figure in comparison.figures if figure.name == "payload GB that P has")
    assert (figure.value, figure.other_value) == (None, 0.0)


def test_equal_logs_are_the_same(tmp_path: Path) -> None:
    report = old_report(tmp_path / "a", ok=5)
    assert (compare(report, report).verdict, compare(report, report).chance) == ("same", 1.0)


@pytest.mark.parametrize(
    ("counts", "chance"),
    [((50, 100, 50, 100), 1.0), ((60, 100, 40, 100), 0.004678), ((0, 10, 0, 10), 1.0), ((1, 1, 0, 0), None)],
)
def test_chance_is_that_of_the_test_of_two_proportions(
    counts: tuple[int, int, int, int], chance: float | None
) -> None:
    """60 against 40 of 100: z is 2.83."""
    found = chance_of(*counts)
    assert found == (None if chance is None else pytest.approx(chance, abs=1e-6))
    assert CHANCE_MAX == 0.01


def test_times_and_speed_are_compared_where_both_logs_say(tmp_path: Path) -> None:
    writer = Writer()
    writer.start()
    writer.life(1)
    path = tmp_path / "log"
    path.write_bytes(writer.text())
    figures = {figure.name: figure for figure in compare(report_of(path), report_of(path)).figures}
    assert (figures["transfer GB/s"].value, figures["transfer GB/s"].ratio) == (0.25, 1.0)
    assert figures["READY p50 ms"].value == 5.0
    figures = {
        figure.name: figure for figure in compare(report_of(path), old_report(tmp_path / "o", ok=1)).figures
    }
    assert (figures["READY p99 ms"].other_value, figures["READY p99 ms"].ratio) == (None, None)

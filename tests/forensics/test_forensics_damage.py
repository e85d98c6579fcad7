"""Whatever a log says, there is an answer: no line can break the report, a story or a comparison."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forensics_logs import Writer, compact, loaded

from snapd.cli.forensicstext import show_comparison, show_report, show_story
from snapd.cli.main import run
from snapd.eventlog import TornLine, decode_line
from snapd.forensics.compare import compare
from snapd.forensics.decoding import KINDS, bad_column
from snapd.forensics.loading import are_all
from snapd.forensics.report import build_report
from snapd.forensics.story import steps, summarize

ODD: list[Any] = [
    0, -1, 1, (1 << 63) - 1, -(1 << 63), 1 << 63, 1e300, -1e300, 1e-320, 0.5, "", "x'y", "\x00\x1b[2J", "s1",
    True, None, [], [[0, 1]], [[-1, 1 << 62]], [[1 << 62, 1 << 62]], {}, "INGESTED", "ok", "evicted",
    "daemon.started",
]  # fmt: skip


def a_writer() -> Writer:
    writer = Writer()
    writer.start()
    writer.life(1)
    writer.life(2, "evicted")
    writer.move(3, "", "RESERVED", duration_ms=0.0)
    writer.slab(3, "allocated", (0, 256), (4096, 512))
    writer.move(3, "RESERVED", "ABORTED", "client-abort")
    writer.slab(3, "quarantined", (0, 256), (4096, 512))
    writer.outcome(3, "client-abort")
    writer.slab(3, "released", (0, 256), (4096, 512), was="quarantined", why="time")
    writer.refuse("s4")
    writer.stop()
    return writer


def look_at_everything(path: Path) -> int:
    """Do all that the command does, and return the attempts."""
    with loaded(path) as (tables, log):
        report = build_report(tables, log)
        show_report(report, frozenset({"session", "d", "hour"}))
        show_comparison(compare(report, report), "here", "there")
        for group in report.by_session.shown[:3]:
            if group.key:
                show_story(summarize(tables, group.key), steps(tables, group.key))
        return report.attempts


@pytest.mark.parametrize("seed", range(4))
def test_no_value_of_any_field_breaks_anything(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line gets odd values in some of its fields; terminals see no control characters."""
    rng = random.Random(seed)
    path = tmp_path / "log"
    with path.open("wb") as file:
        for _ in range(40):
            for line in a_writer().lines:
                fields = json.loads(line)
                for name in rng.sample(sorted(fields), rng.randrange(3)):
                    fields[name] = rng.choice(ODD)
                file.write(compact(fields) + b"\n")
    look_at_everything(path)
    shown = capsys.readouterr().out
    assert "\x00" not in shown
    assert "\x1b[2J" not in shown


@pytest.mark.parametrize("depth", [900, 1_000, 3_000])
def test_no_depth_of_brackets_breaks_anything(tmp_path: Path, depth: int) -> None:
    """Wherever they stand: in a field that is not known, in one that is, or in an older line."""
    deep = b"[" * depth + b"]" * depth
    writer = a_writer()
    lines = list(writer.lines)
    lines[0] = lines[0].replace(b'"alignment_bytes":', b'"later":' + deep + b',"alignment_bytes":')
    lines[2] = lines[2].replace(b'"extents":', b'"extents":' + deep + b',"later":')
    lines[4] = lines[4][:-1] + b',"later":' + deep + b"}"
    lines += [
        b'{"ok":false,"session":"old","x":' + deep + b"}",
        b'{"ok":false,"session":"old","reason":' + deep + b"}",
        b'{"ok":false,"x":NaN,"reason":' + deep + b"}",
    ]
    path = tmp_path / "log"
    path.write_bytes(b"\n".join(lines))
    assert look_at_everything(path) >= 4
    assert run(["forensics", str(path), "--prove"]) == 1


def test_a_column_that_is_nested_too_deep_is_bad() -> None:
    """How deep is too deep depends on who asks, so each one is asked."""
    kind = KINDS[b"daemon.started"]
    value = kind.decode(a_writer().lines[0])
    assert bad_column(kind, value) == ""
    arena = bytes(value.arenas)[1:-1]
    value.arenas = msgspec.Raw(b"[" + arena[:-1] + b',"later":' + b"[" * 3_000 + b"]" * 3_000 + b"}]")
    assert "recursion" in bad_column(kind, value)
    assert not are_all(kind.checks["arenas"], [value.arenas])


def test_a_deep_line_is_torn_for_every_reader() -> None:
    line = decode_line(a_writer().lines[0][:-1] + b',"x":' + b"[" * 3_000 + b"}")
    assert isinstance(line, TornLine)
    assert "recursion" in line.why


def test_sums_that_no_column_holds_are_cut(tmp_path: Path) -> None:
    """Damaged byte counts make figures useless, not the report."""
    writer = a_writer()
    path = tmp_path / "log"
    path.write_bytes(writer.text().replace(b'"bytes":1000000', b'"bytes":9223372036854775807'))
    assert look_at_everything(path) == 4


def test_bytes_that_were_overwritten_break_nothing(tmp_path: Path) -> None:
    """As after a bad disk."""
    rng = random.Random(7)
    text = bytearray(a_writer().text() * 6)
    for _ in range(60):
        text[rng.randrange(len(text))] = rng.randrange(256)
    path = tmp_path / "log"
    path.write_bytes(bytes(text))
    look_at_everything(path)

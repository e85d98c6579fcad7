"""The proof of a log in several files, or of one that cannot be read to its end."""

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from proof_cases import Log, one_life, two_lives

from snapd.cli.main import run
from snapd.forensics import proving
from snapd.forensics.lines import LogInput
from snapd.forensics.proof import ViolationKind as K
from snapd.forensics.proving import Proved, prove_log

Write = Callable[[str, Iterable[bytes]], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, lines: Iterable[bytes]) -> str:
        path = tmp_path / name
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return str(path)

    return write_file


def proved(*names: str) -> Proved:
    with LogInput(names) as log:
        return prove_log(log)


def shown(capsys: pytest.CaptureFixture[str], *names: str, status: int = 0) -> str:
    assert run(["forensics", *names, "--prove"]) == status
    return " ".join(capsys.readouterr().out.split())


def changed(line: bytes) -> bytes:
    assert b'"ts":1.5' in line
    return line.replace(b'"ts":1.5', b'"ts":1.6')


# --- copies ------------------------------------------------------------------------------------


def test_copy_that_reads_alike_is_left_out_and_said(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    raw = two_lives().raw()
    names = write("a", raw), write("b", raw[5:12])
    found = proved(*names)
    assert found.report.is_good and found.report.is_whole
    assert found.copies == 7 and found.report.lines == len(raw)
    out = shown(capsys, *names)
    assert "7 lines left out: an earlier file has the same." in out and "PROVED: no rule is broken." in out


def test_copy_that_reads_otherwise_is_a_violation_at_both_lines(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal epochs and numbers alone do not make a copy."""
    raw = two_lives().raw()
    part = raw[4:9]
    part[2] = changed(part[2])
    names = write("a", raw), write("b", part)
    found = proved(*names)
    assert found.report.counts == {K.COPIES_DIFFER: 1} and found.copies == 4
    violation = found.report.violations[0]
    assert [str(line) for line in violation.lines] == [f"{names[0]}:7", f"{names[1]}:3"]
    assert "seq 7" in violation.message and violation.epoch == "e1"
    out = shown(capsys, *names, status=1)
    assert "copies-differ" in out and "PROVED" not in out


def test_whole_log_of_other_contents_is_no_copy(write: Write) -> None:
    raw = one_life().raw()
    found = proved(write("a", raw), write("b", map(changed, raw)))
    assert found.report.counts == {K.COPIES_DIFFER: len(raw)} and found.copies == 0


def test_copies_are_compared_with_whichever_earlier_file_has_the_line(write: Write) -> None:
    """The second file repeats the end of the first, and the third that of both."""
    raw = two_lives().raw()
    a, b, c = raw[:16], raw[8:22], raw[12:]
    found = proved(write("a", a), write("b", b), write("c", c))
    assert found.report.is_good and found.report.is_whole and found.copies == 8 + 10
    for place, earlier in ((1, "a:14"), (7, "b:12")):
        other = [*c[:place], changed(c[place]), *c[place + 1 :]]
        found = proved(write("a", a), write("b", b), write("c", other))
        assert found.report.counts == {K.COPIES_DIFFER: 1} and found.copies == 17
        assert str(found.report.violations[0].lines[0]).endswith(earlier)


def test_copies_of_several_epochs_are_compared(write: Write) -> None:
    raw = (two_lives() + Log(*(entry.record for entry in two_lives().entries), epoch="e2")).raw()
    copy = raw[len(raw) // 2 - 4 :]
    found = proved(write("a", raw), write("b", copy))
    assert found.report.is_good and found.report.is_whole and found.copies == len(copy)
    found = proved(write("a", raw), write("b", [*copy[:-1], changed(copy[-1])]))
    assert found.report.counts == {K.COPIES_DIFFER: 1} and found.report.violations[0].epoch == "e2"


def test_number_that_the_earlier_file_does_not_have_is_left_out_and_nothing_claimed_of_it(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = two_lives().raw()
    names = write("a", [*raw[:6], b"", b"torn", *raw[7:]]), write("b", raw[4:9])
    report = proved(*names).report
    assert report.uncompared_lines == 1 and not report.is_whole
    assert proved(*names).copies == 4
    assert "1 line left out, not compared" in shown(capsys, *names, status=1)
    assert [str(line) for line in report.violations[0].lines] == [f"{names[0]}:6", f"{names[0]}:9"]


def test_lines_that_were_named_by_their_place_are_so_after_empty_ones(write: Write) -> None:
    raw = two_lives().raw()
    names = write("a", [*raw[:6], b"", b"", *raw[6:]]), write("b", map(changed, raw[8:9]))
    assert [str(line) for line in proved(*names).report.violations[0].lines] == [
        f"{names[0]}:11", f"{names[1]}:1",
    ]  # fmt: skip


def test_hashes_are_kept_up_to_a_bound_and_for_what_may_be_repeated_only(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [0]
    take = proving._EarlierFiles.take

    def counted(self: proving._EarlierFiles, *words: object) -> None:
        take(self, *words)  # type: ignore[arg-type]
        kept.append(self._hashes)

    monkeypatch.setattr(proving._EarlierFiles, "take", counted)
    raw = two_lives().raw()
    rotated = write("a", raw[:10]), write("b", raw[10:])
    assert proved(*rotated).report.is_whole and max(kept) == 0
    copied = write("a", raw), write("b", raw[10:])
    assert proved(*copied).copies == len(raw) - 10 and max(kept) == len(raw) - 10
    monkeypatch.setattr(proving, "HASHES_MAX", 5)
    kept.clear()
    found = proved(*copied)
    assert (found.copies, found.report.uncompared_lines) == (5, len(raw) - 15) and max(kept) == 5
    assert found.report.is_good and not found.report.is_whole


def test_file_without_any_header_at_its_beginning_may_repeat_all(write: Write) -> None:
    raw = one_life().raw()
    long = [b"x" * 600_000] * 2
    found = proved(write("a", [*long, *raw]), write("b", [*long, *raw]))
    assert (found.copies, found.report.uncompared_lines) == (len(raw), 0)


def test_line_before_all_that_may_be_repeated_is_not_compared(write: Write) -> None:
    raw = two_lives().raw()
    found = proved(write("a", raw), write("b", [raw[8], raw[3]]))
    assert found.report.is_good and (found.copies, found.report.uncompared_lines) == (1, 1)


def test_line_that_comes_twice_in_a_file_does_not_stand_for_the_first_one(write: Write) -> None:
    raw = one_life().raw()
    names = write("a", [*raw[:6], changed(raw[3]), *raw[6:]]), write("b", raw[2:6])
    found = proved(*names)
    assert found.report.counts == {K.SEQUENCE_GAP: 1} and found.copies == 4


# --- damage ------------------------------------------------------------------------------------


def test_log_that_ends_in_garbage_is_proved_as_far_as_it_could_be_read(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = one_life().raw()[:-2]
    name = write("a", [*raw, *[b"no line"] * 500])
    out = shown(capsys, name)
    assert "PROVED, as far as it could be read" in out and "PROVED: " not in out
    assert f"unreadable: {name}:{len(raw) + 1}: " in out and out.count("unreadable: ") == 5
    assert run(["forensics", name, "--prove", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_good"] and not found["is_whole"] and found["unread_lines"] == 500
    assert found["unreadable"][0]["where"] == {"file": name, "line_no": len(raw) + 1}


def test_last_line_that_is_cut_off_is_no_damage(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    raw = one_life().raw()
    assert "PROVED: no rule is broken." in shown(capsys, write("a", [*raw[:-1], raw[-1][:40]]))


@pytest.mark.parametrize("how", ["cut short", "flipped"])
def test_damaged_gzip_file_is_proved_as_far_as_it_could_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    # Nearly without compression, so that lines come before the damage.
    packed = bytearray(gzip.compress(b"\n".join([*two_lives().raw(), b""]), compresslevel=0))
    if how == "flipped":
        packed[-5] ^= 255  # of the length and checksum at the end
    else:
        del packed[-1_000:]
    path = tmp_path / "a.gz"
    path.write_bytes(packed)
    report = proved(str(path)).report
    assert report.is_good and not report.is_whole and not report.is_read
    assert len(report.damage) == 1 and report.damage[0].startswith(f"{path}: the gzip file is damaged")
    out = shown(capsys, str(path))
    assert "is damaged or cut short" in out and "PROVED, as far as it could be read" in out


def test_log_without_its_beginning_is_no_damage(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, write("a", one_life().raw()[4:]))
    assert "No rule is seen to be broken." in out and "PROVED" not in out

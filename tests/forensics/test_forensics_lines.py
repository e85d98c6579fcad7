"""Which files come first, and what is a line."""

import gzip
import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from forensics_logs import TS, Writer

from snapd.forensics import lines as lines_module
from snapd.forensics.lines import LINE_BYTES_MAX, LogInput, LogUnreadable


def numbers(log: LogInput) -> list[tuple[str, int]]:
    return [(Path(path).name, number) for path, number, _ in log.numbered()]


def all_lines(log: LogInput) -> list[bytes]:
    return [raw for _, _, raw in log.numbered()]


def three_files(directory: Path) -> tuple[list[Path], list[bytes]]:
    """An epoch that goes over two files, and one that begins in the second file and ends in the third."""
    first, second = Writer(epoch="zz"), Writer(epoch="aa", ts=TS + 1)
    first.start()
    second.start(former_epoch="zz")
    for handle in range(1, 4):
        first.life(handle)
        second.life(handle)
    files = [directory / name for name in ("d-to-p-sync.jsonl.2", "d-to-p-sync.jsonl.1", "d-to-p-sync.jsonl")]
    everything = first.lines + second.lines
    cuts = [0, 10, 30, len(everything)]
    for path, (begin, end) in zip(files, itertools.pairwise(cuts), strict=True):
        path.write_bytes(b"".join(line + b"\n" for line in everything[begin:end]))
    return files, everything


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_files_come_in_the_order_of_what_is_in_them(tmp_path: Path, order: tuple[int, ...]) -> None:
    """Rotated files may be named in any order."""
    files, everything = three_files(tmp_path)
    with LogInput([str(files[index]) for index in order]) as log:
        assert all_lines(log) == everything


def test_numbers_decide_inside_an_epoch_although_the_clock_was_set_back(tmp_path: Path) -> None:
    """A file whose wall clock is earlier comes later when its numbers are higher."""
    early, late = Writer(), Writer(ts=TS - 3_600, seq=100)
    early.start()
    late.refuse("s")
    (tmp_path / "a.jsonl").write_bytes(late.text())
    (tmp_path / "b.jsonl").write_bytes(early.text())
    with LogInput([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) as log:
        assert all_lines(log) == early.lines + late.lines


def test_a_new_epoch_after_a_clock_that_was_set_back_stays_behind_the_file_it_goes_on_from(
    tmp_path: Path,
) -> None:
    """The file in which an epoch begins comes before the one in which it goes on."""
    former, epoch = Writer(epoch="former"), Writer(epoch="later", ts=TS - 9_000)
    former.start()
    epoch.start()
    for handle in range(1, 4):
        epoch.life(handle)
    (tmp_path / "x").write_bytes(former.text() + b"".join(line + b"\n" for line in epoch.lines[:5]))
    (tmp_path / "y").write_bytes(b"".join(line + b"\n" for line in epoch.lines[5:]))
    with LogInput([str(tmp_path / "y"), str(tmp_path / "x")]) as log:
        assert all_lines(log) == former.lines + epoch.lines


def test_copies_in_a_circle_are_read_all_the_same(tmp_path: Path) -> None:
    """Files that each seem to come before the other end up in some order, none lost."""
    one, two = Writer(epoch="one"), Writer(epoch="two")
    one.start()
    two.start()
    one.refuse("s")
    two.refuse("s")
    (tmp_path / "x").write_bytes(one.lines[0] + b"\n" + two.lines[2] + b"\n")
    (tmp_path / "y").write_bytes(two.lines[0] + b"\n" + one.lines[2] + b"\n")
    with LogInput([str(tmp_path / "x"), str(tmp_path / "y")]) as log:
        assert sorted(all_lines(log)) == sorted([one.lines[0], two.lines[2], two.lines[0], one.lines[2]])


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_files_are_told_by_their_bytes_not_their_names(tmp_path: Path, suffix: str) -> None:
    """A packed file is unpacked whatever it is called; several frames or members too."""
    files, everything = three_files(tmp_path)
    whole = files[0].read_bytes()
    packed = [whole[:500], whole[500:]]
    pack = gzip.compress if suffix == "gz" else zstandard.ZstdCompressor().compress
    files[0].write_bytes(b"".join(pack(part) for part in packed))
    with LogInput([str(path) for path in files]) as log:
        assert all_lines(log) == everything
        assert [source.compression for source in log.sources] == [
            {"gz": "gzip", "zst": "zstd"}[suffix],
            "",
            "",
        ]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_that_is_cut_short_gives_what_is_there(tmp_path: Path, suffix: str) -> None:
    """The lines before the damage are read; it is reported or the last line is not whole."""
    writer = Writer()
    writer.start()
    for handle in range(1, 400):
        writer.life(handle)
    pack = gzip.compress if suffix == "gz" else zstandard.ZstdCompressor().compress
    packed = pack(writer.text())
    path = tmp_path / f"log.jsonl.{suffix}"
    path.write_bytes(packed[: len(packed) // 2])
    with LogInput([str(path)]) as log:
        blocks = list(log.blocks())
    read = [line for block in blocks for line in block.lines]
    assert read[:-1] == writer.lines[: len(read) - 1]
    if suffix == "gz":
        assert len(read) > 100
        assert "cut short" in blocks[-1].damage


def test_a_directory_means_its_logs_and_nothing_else(tmp_path: Path) -> None:
    """Rotated and packed logs of the known name are read; other files and other jsonl are not."""
    files, everything = three_files(tmp_path)
    files[0].with_suffix(".2.gz").write_bytes(gzip.compress(files[0].read_bytes()))
    files[0].unlink()
    (tmp_path / "trace.jsonl").write_bytes(b'{"ok":true}\n')
    (tmp_path / "snapd.toml").write_bytes(b"x\n")
    with LogInput([str(tmp_path)]) as log:
        assert all_lines(log) == everything


def test_a_directory_without_the_known_name_means_every_jsonl(tmp_path: Path) -> None:
    """An older log may be called otherwise."""
    (tmp_path / "sync-log.jsonl-20260131.gz").write_bytes(gzip.compress(b'{"ok":true}\n'))
    with LogInput([str(tmp_path)]) as log:
        assert all_lines(log) == [b'{"ok":true}']


def test_a_directory_without_logs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LogUnreadable, match="holds no log"):
        LogInput([str(tmp_path)])


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LogUnreadable, match=r"gone\.jsonl: No such file"):
        LogInput([str(tmp_path / "gone.jsonl")])


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    """Also by another name: a link, or its directory."""
    files, everything = three_files(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(files[0])
    with LogInput([str(tmp_path), str(files[0]), str(link)]) as log:
        assert all_lines(log) == everything
        assert log.repeated == [str(files[0]), str(link)]


def test_standard_input_is_read_and_its_copy_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``-`` may be compressed, and is ordered with the other files."""
    files, everything = three_files(tmp_path)
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(files[1].read_bytes()))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with packed.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        log = LogInput(["-", str(files[2]), str(files[0])])
    with log:
        assert [source.path for source in log.sources] == [str(files[0]), "-", str(files[2])]
        assert all_lines(log) == everything
        assert len(list(tmp_path.glob("snapd-forensics-*"))) == 1
    assert not list(tmp_path.glob("snapd-forensics-*"))


def test_a_pipe_is_read_as_standard_input_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell's process substitution names one."""
    files, everything = three_files(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    writer = threading.Thread(target=lambda: pipe.write_bytes(files[0].read_bytes()))
    writer.start()
    with LogInput([str(files[2]), str(pipe), str(files[1])]) as log:
        writer.join()
        assert all_lines(log) == everything
    assert not list(tmp_path.glob("snapd-forensics-*"))


def test_a_pipe_that_others_read_too_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came was taken by somebody else."""
    files, everything = three_files(tmp_path)
    real, taken = os.read, []

    def read(descriptor: int, size_bytes: int) -> bytes:
        if size_bytes and not taken:
            taken.append(descriptor)
            raise BlockingIOError
        return real(descriptor, size_bytes)

    monkeypatch.setattr(lines_module.os, "read", read)
    with files[0].open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        log = LogInput(["-", str(files[1]), str(files[2])])
    with log:
        assert taken and all_lines(log) == everything


def test_an_empty_name_is_not_this_directory() -> None:
    with pytest.raises(LogUnreadable, match="No such file"):
        LogInput([""])


def test_standard_input_is_deleted_when_another_file_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x\n")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with log.open() as stdin, pytest.raises(LogUnreadable):
        monkeypatch.setattr(sys, "stdin", stdin)
        LogInput(["-", str(tmp_path / "gone")])
    assert list(tmp_path.iterdir()) == [log]


def test_lines_are_numbered_as_an_editor_does(tmp_path: Path) -> None:
    """Empty lines count, and are left out; the last one may have no newline."""
    path = tmp_path / "log"
    path.write_bytes(b"a\n\nb\n\n\nc")
    with LogInput([str(path)]) as log:
        assert numbers(log) == [("log", 1), ("log", 3), ("log", 6)]
        assert [block.is_cut_off for block in log.blocks()] == [False, True]


def test_lines_keep_their_numbers_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the pieces are in which a file is read."""
    monkeypatch.setattr(lines_module, "_CHUNK_BYTES", 7)
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(1, 200)))
    with LogInput([str(path)]) as log:
        assert [(number, int(raw)) for _, number, raw in log.numbered()] == [(n, n) for n in range(1, 200)]


def test_a_line_without_an_end_takes_no_memory(tmp_path: Path) -> None:
    """It is cut where it is too long, counts as one line, and the next one is read."""
    path = tmp_path / "log"
    path.write_bytes(b"a\n" + b"x" * (5 * LINE_BYTES_MAX) + b"\nb\n")
    with LogInput([str(path)]) as log:
        read = [(number, len(raw)) for _, number, raw in log.numbered()]
    assert [number for number, _ in read] == [1, 2, 3]
    assert LINE_BYTES_MAX <= read[1][1] <= 2 * LINE_BYTES_MAX
    assert read[2] == (3, 1)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_byte_order_mark_is_no_part_of_the_first_line(
    tmp_path: Path, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands at a file's beginning only: elsewhere such bytes are somebody's text."""
    mark = b"\xef\xbb\xbf"
    writer = Writer()
    writer.start()
    # The second one begins a piece, too.
    monkeypatch.setattr(lines_module, "_CHUNK_BYTES", len(mark + writer.text()))
    path = tmp_path / "log"
    path.write_bytes(pack(mark + writer.text() + mark + b"x\n"))
    with LogInput([str(path)]) as log:
        assert all_lines(log) == [*writer.lines, mark + b"x"]
        assert log.sources[0].first is not None


def test_a_line_that_is_nested_too_deep_does_not_hide_the_header_of_the_next(tmp_path: Path) -> None:
    writer = Writer()
    writer.start()
    path = tmp_path / "log"
    path.write_bytes(b'{"x":' + b"[" * 3_000 + b"\n" + writer.text() + b'{"x":' + b"[" * 3_000 + b"\n")
    with LogInput([str(path)]) as log:
        assert log.sources[0].first == log.sources[0].last is not None


def test_progress_ends_at_the_size_of_all_files(tmp_path: Path) -> None:
    files, _ = three_files(tmp_path)
    seen: list[tuple[int, int]] = []
    with LogInput([str(path) for path in files]) as log:
        for _ in log.blocks(lambda done, total: seen.append((done, total))):
            pass
    size_bytes = sum(path.stat().st_size for path in files)
    assert seen == sorted(seen)
    assert seen[-1] == (size_bytes, size_bytes)

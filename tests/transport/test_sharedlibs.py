"""Which shared libraries the loader would not find, without asking it."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapd.transport.sharedlibs import (
    Finder,
    Missing,
    NotElf,
    find_in_packages,
    is_loaded,
    read_cache,
    read_elf,
)
from tests.doctor.elf_builder import AARCH64, HERE, X86_64, build_cache, build_elf

OTHER_MACHINE = AARCH64 if HERE == X86_64 else X86_64


def finder(**places: object) -> Finder:
    """A finder that knows no place but those given."""
    known: dict[str, object] = {"env": {}, "cache": {}, "directories": (), "use_loaded": False}
    return Finder(**(known | places))  # type: ignore[arg-type]


def missing(path: Path, **places: object) -> list[str]:
    return [library.soname for library in finder(**places).missing(path)]


def test_what_a_library_needs_is_read_in_order(tmp_path: Path) -> None:
    path = build_elf(tmp_path / "a.so", "libone.so.1", "libtwo.so.2", soname="a.so")
    assert read_elf(path).needed == ("libone.so.1", "libtwo.so.2")
    assert read_elf(path).machine == HERE


def test_origin_is_the_directory_of_the_file_itself(tmp_path: Path) -> None:
    path = build_elf(tmp_path / "real" / "a.so", rpath="$ORIGIN:${ORIGIN}/libs")
    link = tmp_path / "link.so"
    link.symlink_to(path)
    assert read_elf(link).rpath == (str(path.parent), f"{path.parent}/libs")


def test_a_runpath_takes_the_place_of_the_rpath_beside_it(tmp_path: Path) -> None:
    facts = read_elf(build_elf(tmp_path / "a.so", rpath="/r", runpath="/s"))
    assert (facts.rpath, facts.runpath, facts.has_runpath) == ((), ("/s",), True)


def test_this_python_is_read_as_it_is() -> None:
    assert any(name.startswith("libc.") for name in read_elf(Path(sys.executable)).needed)
    assert Finder().missing(Path(sys.executable)) == []


def test_all_that_is_missing_is_named_at_once_with_who_needs_it(tmp_path: Path) -> None:
    engine = build_elf(
        tmp_path / "engine.so", "libgone.so.1", "libhere.so.1", "libgone.so.2", rpath="$ORIGIN"
    )
    build_elf(tmp_path / "libhere.so.1", "libgone.so.3", "libgone.so.1")
    assert finder().missing(engine) == [
        Missing("libgone.so.1", "engine.so"),
        Missing("libgone.so.2", "engine.so"),
        Missing("libgone.so.3", "libhere.so.1"),
    ]


def test_libraries_that_need_each_other_come_to_an_end(tmp_path: Path) -> None:
    build_elf(tmp_path / "liba.so", "libb.so", rpath="$ORIGIN")
    build_elf(tmp_path / "libb.so", "liba.so")
    assert missing(tmp_path / "liba.so") == []


def test_the_loader_itself_is_never_missing(tmp_path: Path) -> None:
    assert missing(build_elf(tmp_path / "a.so", "ld-linux-x86-64.so.2")) == []


def test_an_rpath_holds_for_what_is_loaded_and_a_runpath_does_not(tmp_path: Path) -> None:
    for directory in ("one", "two"):
        build_elf(tmp_path / directory / "liba.so", "libb.so")
        build_elf(tmp_path / directory / "libb.so")
    assert missing(build_elf(tmp_path / "r.so", "liba.so", rpath="$ORIGIN/one")) == []
    assert missing(build_elf(tmp_path / "s.so", "liba.so", runpath="$ORIGIN/two")) == ["libb.so"]


def test_a_library_with_a_runpath_ignores_the_rpath_of_its_loader(tmp_path: Path) -> None:
    build_elf(tmp_path / "liba.so", "libb.so", runpath="/nowhere")
    build_elf(tmp_path / "libb.so")
    assert missing(build_elf(tmp_path / "r.so", "liba.so", rpath="$ORIGIN")) == ["libb.so"]


@pytest.mark.parametrize("place", ["env", "cache", "directories"])
def test_every_place_of_the_loader_is_looked_at(place: str, tmp_path: Path) -> None:
    engine = build_elf(tmp_path / "engine.so", "liba.so")
    library = build_elf(tmp_path / "libs" / "liba.so")
    assert missing(engine) == ["liba.so"]
    places = {
        "env": {"LD_LIBRARY_PATH": f"/nowhere:{library.parent}"},
        "cache": {"liba.so": [str(library)]},
        "directories": (str(library.parent),),
    }
    assert missing(engine, **{place: places[place]}) == []


def test_the_rpath_of_the_executable_counts_for_what_it_loads(tmp_path: Path) -> None:
    engine = build_elf(tmp_path / "engine.so", "liba.so")
    build_elf(tmp_path / "libs" / "liba.so")
    python = build_elf(tmp_path / "python", rpath="$ORIGIN/libs")
    assert missing(engine, executable=str(python)) == []


def test_a_name_with_a_slash_is_a_path(tmp_path: Path) -> None:
    library = build_elf(tmp_path / "liba.so")
    engine = build_elf(tmp_path / "engine.so", str(library), f"{tmp_path}/gone.so", rpath="/")
    assert missing(engine) == [f"{tmp_path}/gone.so"]


def test_a_cached_path_that_is_gone_does_not_count(tmp_path: Path) -> None:
    engine = build_elf(tmp_path / "engine.so", "liba.so")
    assert missing(engine, cache={"liba.so": [str(tmp_path / "liba.so")]}) == ["liba.so"]


def test_a_file_for_another_processor_is_passed_over(tmp_path: Path) -> None:
    engine = build_elf(tmp_path / "engine.so", "liba.so", rpath="$ORIGIN/foreign")
    build_elf(tmp_path / "foreign" / "liba.so", machine=OTHER_MACHINE)
    assert missing(engine) == ["liba.so"]
    build_elf(tmp_path / "right" / "liba.so")
    assert missing(engine, directories=(str(tmp_path / "right"),)) == []


def test_what_this_process_has_loaded_counts_as_found_and_nothing_is_loaded(tmp_path: Path) -> None:
    engine = build_elf(tmp_path / "engine.so", "libc.so.6", "libgone.so.1")
    assert missing(engine, use_loaded=True) == ["libgone.so.1"]
    assert is_loaded("libc.so.6")
    assert not is_loaded("libgone.so.1")


def test_the_cache_is_read_behind_that_of_older_systems(tmp_path: Path) -> None:
    path = build_cache(tmp_path / "cache", {"liba.so": "/lib/liba.so", "libb.so.1": "/usr/lib/libb.so.1"})
    assert read_cache(path) == {"liba.so": ["/lib/liba.so"], "libb.so.1": ["/usr/lib/libb.so.1"]}


def test_a_cache_that_is_no_cache_is_empty(tmp_path: Path) -> None:
    assert read_cache(tmp_path / "none") == {}
    (tmp_path / "cache").write_bytes(b"glibc-ld.so.cache1.1" + b"\xff" * 40)
    assert read_cache(tmp_path / "cache") == {}
    (tmp_path / "cache").write_bytes(b"something else")
    assert read_cache(tmp_path / "cache") == {}


@pytest.mark.parametrize(
    "raw", [b"", b"\x7fELF", b"GNU ld script\n" * 20, b"\x7fELF\x01\x01\x01" + b"\0" * 90]
)
def test_what_is_no_elf_file_of_this_kind_is_refused(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(raw)
    with pytest.raises(NotElf):
        read_elf(path)


def test_a_string_without_an_end_is_refused(tmp_path: Path) -> None:
    path = build_elf(tmp_path / "a.so", "libabc.so")
    path.write_bytes(path.read_bytes().rstrip(b"\0"))
    with pytest.raises(NotElf, match="string table is cut off"):
        read_elf(path)


@given(st.data())
def test_a_damaged_file_is_refused_or_read_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.getbasetemp()
    whole = build_elf(directory / "whole.so", "liba.so", rpath="$ORIGIN").read_bytes()
    raw = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for index in data.draw(st.lists(st.integers(0, max(len(raw) - 1, 0)), max_size=4)):
        if raw:
            raw[index] = data.draw(st.integers(0, 255))
    path = directory / "damaged.so"
    path.write_bytes(raw)
    try:
        read_elf(path)
    except NotElf as error:
        assert str(path) in str(error)


def test_libraries_of_nvidias_packages_are_found_beside_other_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_elf(tmp_path / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.77")
    assert find_in_packages("libcudart.so.77") is None
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_in_packages("libcudart.so.77") == path

"""Text of a known width: numbers, names that mean harm, and maps."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from top_cases import HOSTILE, arena_map

from snapd.cli import toptext
from snapd.cli.toptext import (
    Charset,
    charset_of,
    cut,
    first_environment,
    is_utf8_locale,
    map_line,
    resample,
    safe,
    short_bytes,
    short_count,
    short_ms,
    short_rate,
)
from snapd.units import GIB, MIB

UTF8 = Charset(is_utf8=True, has_colours=True)
ASCII = Charset(is_utf8=False, has_colours=False)
LETTERS = Charset(is_utf8=True, has_colours=False)


def is_drawn_as_counted(text: str) -> bool:
    """Whether each character takes the cells that it is counted for, alone and from left to right."""
    return all(
        char.isprintable()
        and not unicodedata.combining(char)
        and unicodedata.category(char) not in ("Mn", "Me", "Mc", "Cf")
        and unicodedata.bidirectional(char) not in ("R", "AL", "AN")
        and cell_len(char) == (2 if unicodedata.east_asian_width(char) in "WF" else 1)
        for char in text
    )


@given(st.text() | st.sampled_from(HOSTILE))
def test_whatever_something_is_called_takes_the_cells_that_it_is_counted_for(text: str) -> None:
    shown = safe(text, UTF8)
    assert is_drawn_as_counted(shown)
    assert cell_len(shown) == sum(map(cell_len, shown))
    in_ascii = safe(text, ASCII)
    assert in_ascii.isascii() and in_ascii.isprintable()


def test_plain_names_are_shown_as_they_are() -> None:
    for name in ("chat-17", "Überprüfung", "сессия", "会話", "한국어"):
        assert safe(name, UTF8) == name
    assert safe("会話", ASCII) == "\\u4f1a\\u8a71"


def test_what_could_steer_a_terminal_is_written_as_an_escape() -> None:
    assert safe("\x1b[2J", UTF8) == "\\x1b[2J"
    assert safe("a\u202eb", UTF8) == "a\\u202eb"
    assert safe("e\u0301", UTF8) == "e\\u0301"
    assert "👩" not in safe("👩\u200d👧", UTF8)


@given(st.text(max_size=80) | st.sampled_from(HOSTILE), st.integers(0, 60))
def test_what_is_cut_is_no_wider_than_asked_and_says_so(text: str, width: int) -> None:
    for charset in (UTF8, ASCII):
        whole = safe(text, charset)
        shown = cut(whole, width, charset)
        assert cell_len(shown) <= width
        assert shown == whole if cell_len(whole) <= width else shown[-1:] in (charset.more, "")
        # A wide character may not fit into the last cell.
        assert cell_len(shown) >= min(width, cell_len(whole)) - 1


@given(st.floats(0, 1e30))
def test_numbers_have_a_bounded_width(value: float) -> None:
    assert len(short_bytes(value)) <= 5
    assert len(short_rate(value)) <= 6
    assert len(short_count(int(value))) <= 6
    assert len(short_ms(value)) <= 6 and len(short_ms(-value)) <= 6


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (short_bytes(0), "0"), (short_bytes(512), "512B"), (short_bytes(1_000), "1.0K"),
        (short_bytes(98.5 * MIB), "98.5M"), (short_bytes(8 * GIB), "8.0G"), (short_bytes(999 * GIB), "999G"),
        (short_bytes(1_000 * GIB), "1.0T"),
        (short_count(9_999), "9999"), (short_count(12_345), "12.3k"), (short_count(4_500_000), "4.5M"),
        (short_rate(0), "0"), (short_rate(0.001), "<.01"), (short_rate(0.25), "0.25"),
        (short_rate(12.34), "12.3"), (short_rate(1_234.4), "1234"),
        (short_ms(0), "0ms"), (short_ms(0.42), "0.4ms"), (short_ms(420), "420ms"), (short_ms(1_300), "1.3s"),
        (short_ms(725_000), "12m05s"), (short_ms(12_000_000), "3h20m"), (short_ms(356_400_000), "99h00m"),
        (short_ms(360_000_000), "4d04h"), (short_ms(-1_300), "-1.3s"), (short_ms(-725_000), "-12m"),
    ],
)  # fmt: skip
def test_numbers_are_short(shown: str, wanted: str) -> None:
    assert shown == wanted


# --- maps --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300), st.integers(1, 300))
def test_a_map_of_another_width_holds_the_same_bytes(cells: list[int], width: int) -> None:
    wide = resample(cells, width)
    assert len(wide) == width
    assert sum(wide) == pytest.approx(sum(cells))
    assert min(wide) >= 0


@given(st.integers(0, 300), st.sampled_from([UTF8, ASCII, LETTERS]))
def test_a_map_is_as_wide_as_asked(width: int, charset: Charset) -> None:
    assert map_line(arena_map(), 64 * MIB, width, charset).cell_len == width


def test_a_map_tells_kinds_by_letter_where_there_are_no_colours() -> None:
    # A quarter of a cell leased is a small letter, half of one quarantined a large one.
    wanted = "W" * 8 + "R" * 16 + "l" * 8 + "Q" * 8 + "." * 24
    assert map_line(arena_map(), 64 * MIB, 64, ASCII).plain == wanted
    assert map_line(arena_map(), 64 * MIB, 64, LETTERS).plain == wanted.replace(".", "·")


def test_a_map_tells_kinds_by_colour_and_fill_by_height() -> None:
    line = map_line(arena_map(), 64 * MIB, 64, UTF8)
    assert line.plain == "█" * 24 + "▃" * 8 + "▅" * 8 + "·" * 24
    assert {span.style for span in line.spans} == {"blue", "green", "cyan", "yellow", "dim"}


def test_the_least_thing_in_a_wide_cell_is_not_shown_as_free() -> None:
    one = arena_map()
    tiny = type(one)(
        rank=0, cell_bytes=MIB, writing_bytes=(0,) * 64, ready_bytes=(0,) * 63 + (1,),
        leased_bytes=(0,) * 64, quarantined_bytes=(0,) * 64, num_shards=(0, 1, 0, 0),
    )  # fmt: skip
    assert map_line(tiny, 64 * MIB, 10, ASCII).plain == "." * 9 + "r"
    assert map_line(tiny, 64 * MIB, 10, UTF8).plain == "·" * 9 + "▁"


# --- the locale --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"LANG": "en_US.UTF-8"}, True),
        ({"LANG": "C.utf8"}, True),
        ({"LC_CTYPE": "UTF-8"}, True),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, False),
        ({"LANG": "en_US.UTF-8", "LC_CTYPE": "de_DE.ISO-8859-1"}, False),
        ({"LANG": "C", "LC_ALL": ""}, False),
        ({}, False),
    ],
)
def test_the_locale_decides_about_characters(environ: dict[str, str], wanted: bool) -> None:
    assert is_utf8_locale(environ) is wanted


def test_no_colour_and_an_encoding_without_the_characters_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    utf8 = {"LANG": "C.UTF-8"}
    monkeypatch.setattr(toptext, "can_show", lambda characters: True)
    assert charset_of(utf8, has_colours=True) == Charset(True, True)
    assert charset_of(utf8 | {"NO_COLOR": "1"}, has_colours=True) == Charset(True, False)
    assert charset_of({}, has_colours=True) == Charset(False, True)
    monkeypatch.setattr(toptext, "can_show", lambda characters: False)
    assert charset_of(utf8, has_colours=True) == Charset(False, True)


def test_the_first_environment_is_that_of_the_process() -> None:
    assert "PATH" in first_environment()

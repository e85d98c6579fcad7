"""Sizes and times: rounding, parsing, and the forms for people."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapd.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    align_down,
    align_up,
    ceil_div,
    format_bytes,
    format_ms,
    ms_to_ns,
    parse_size_bytes,
)

NATURALS = st.integers(0, 1 << 50)
ALIGNMENTS = st.integers(1, 1 << 30)


@given(NATURALS, ALIGNMENTS)
def test_ceil_div_is_the_least_number_of_parts_that_hold_all(numerator, denominator):
    parts = ceil_div(numerator, denominator)
    assert parts * denominator >= numerator
    assert (parts - 1) * denominator < numerator


@given(NATURALS, ALIGNMENTS)
def test_aligning_moves_to_the_nearest_multiple_on_its_side(value, alignment):
    up, down = align_up(value, alignment), align_down(value, alignment)
    assert up % alignment == 0
    assert down % alignment == 0
    assert value <= up < value + alignment
    assert value - alignment < down <= value


def test_milliseconds_become_nanoseconds():
    assert ms_to_ns(3) == 3_000_000


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("2k", 2 * KIB),
        ("2KiB", 2 * KIB),
        ("2kb", 2_000),
        ("512 MiB", 512 * MIB),
        ("512m", 512 * MIB),
        ("1500MB", 1_500_000_000),
        (" 8GiB ", 8 * GIB),
        ("8G", 8 * GIB),
        ("8gb", 8_000_000_000),
        ("1T", TIB),
        ("1TiB", TIB),
        ("1TB", 10**12),
        ("1.5KiB", 1536),
        ("0.5 GiB", GIB // 2),
    ],
)
def test_a_size_is_a_number_and_a_unit(text, size_bytes):
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 Gi", "8QiB", "-1", "+1", "1e9", "0x10", "1,5KiB", "8GiB 1", ".5k", "1."]
)
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="such as 8GiB"):
        parse_size_bytes(text)


def test_a_part_of_a_byte_is_refused():
    with pytest.raises(ValueError, match="whole number of bytes"):
        parse_size_bytes("1.3KiB")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (512 * MIB, "512 MiB"),
        (8 * GIB, "8 GiB"),
        (3 * TIB, "3 TiB"),
        (-2 * KIB, "-2 KiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_fitting_unit(size_bytes, text):
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 1023), st.sampled_from([1, KIB, MIB, GIB, TIB]))
def test_a_shown_whole_number_of_units_is_read_back_equal(count, unit_bytes):
    assert parse_size_bytes(format_bytes(count * unit_bytes)) == count * unit_bytes


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (0.4213, "0.421 ms"),
        (17, "17 ms"),
        (999, "999 ms"),
        (1_300, "1.3 s"),
        (119_000, "119 s"),
        (300_000, "5 min"),
    ],
)
def test_durations_are_shown_with_three_digits(duration_ms, text):
    assert format_ms(duration_ms) == text

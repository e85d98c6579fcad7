"""Reading traces: what a line may look like, and what is said of one that is wrong."""

import io
import sys

import pytest
from replay_cases import generate, request, write_trace

from snapd.replay.trace import TraceError, read_trace

GOOD = b'{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}\n'


def test_lines_come_back_in_order_of_time_and_blank_ones_are_left_out(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\n" + GOOD + b"  \n" + GOOD.replace(b"5", b"1"))
    assert [r.timestamp for r in read_trace(str(path)).requests] == [1, 5]


def test_equal_times_keep_the_order_of_the_file(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD.replace(b"3", b"7") + GOOD)
    assert [r.output_length for r in read_trace(str(path)).requests] == [7, 3]


def test_a_byte_order_mark_at_the_beginning_is_no_part_of_the_first_line(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert len(read_trace(str(path)).requests) == 1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert len(read_trace("-").requests) == 1


def test_unknown_fields_are_ignored(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD.replace(b"{", b'{"user": "me", '))
    assert len(read_trace(str(path)).requests) == 1


def test_a_generated_trace_survives_the_file(tmp_path):
    requests = generate()
    assert read_trace(str(write_trace(tmp_path / "t.jsonl", requests))).requests == requests


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 2"),
        (b"\xff\xfe", "line 2"),
        (GOOD.replace(b"600", b"0"), "input_length"),
        (GOOD.replace(b"600", b"-3"), "input_length"),
        (GOOD.replace(b"3,", b"-3,"), "output_length"),
        (GOOD.replace(b"5", b"-1"), "timestamp"),
        (GOOD.replace(b"600", b"6000"), "2 hash_ids for 6000 tokens"),
        (GOOD.replace(b"[0, 1]", b"[0, 1, 2]"), "3 hash_ids"),
        (GOOD.replace(b'"hash_ids": [0, 1]', b'"x": 1'), "neither hash_ids nor session_id"),
        (GOOD.replace(b"600", b"99999999999"), "input_length"),
        (GOOD.replace(b"{", b'{"x": ' + b"[" * 3_000 + b"]" * 3_000 + b", "), "too deep"),
    ],
)
def test_a_wrong_line_is_an_error_that_names_it(tmp_path, line, said):
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(TraceError, match="line 2") as caught:
        read_trace(str(path))
    assert said in str(caught.value)
    assert "--skip-bad-lines" in str(caught.value)


def test_wrong_lines_can_be_left_out_and_are_listed_up_to_a_bound(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD + b"nonsense\n" * 20 + GOOD)
    trace = read_trace(str(path), skip_bad_lines=True)
    assert len(trace.requests) == 2
    assert trace.bad_lines[0].startswith("line 2: ")
    assert len(trace.bad_lines) == 6
    assert trace.bad_lines[-1] == "and 15 more"


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_a_trace_without_requests_is_an_error(tmp_path, content):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(str(path))


def test_a_trace_of_wrong_lines_only_says_what_was_wrong(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"nonsense\n")
    with pytest.raises(TraceError, match="holds no request: line 1"):
        read_trace(str(path), skip_bad_lines=True)


def test_a_file_that_is_not_there_or_no_file_is_an_error(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(str(path))


def test_a_huge_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("snapd.replay.trace.TRACE_BYTES_MAX", 10)
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD)
    with pytest.raises(TraceError, match="more than 10 bytes"):
        read_trace(str(path))


def test_a_dash_is_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(GOOD)))
    trace = read_trace("-")
    assert (trace.name, len(trace.requests)) == ("stdin", 1)


def test_limit_takes_the_first_and_speed_up_divides_their_times(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", [request(30, 600, 1, ()), request(10, 600, 2, ())])
    trace = read_trace(str(path), limit=1, speed_up=4)
    assert [(r.timestamp, r.output_length) for r in trace.requests] == [(2.5, 2)]


def test_a_session_id_may_stand_for_hash_ids(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"timestamp": 0, "input_length": 9, "output_length": 1, "session_id": "a"}\n')
    assert read_trace(str(path)).requests[0].session_id == "a"

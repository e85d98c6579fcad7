"""``snapd replay`` from the command line."""

import json
import subprocess
import sys

import pytest
from replay_cases import SMALL, generate, write_trace

from snapd.cli.main import run
from snapd.errors import ConfigError
from snapd.replay.model import Model
from snapd.replay.replay import parse_sweep
from snapd.units import GIB, MIB

SETTINGS = [
    word
    for name in Model.__struct_fields__
    if getattr(SMALL, name) != getattr(Model(), name)
    for word in ("--set", f"{name}={getattr(SMALL, name)}")
]


def settings_without(left_out: str) -> list[str]:
    return [
        word
        for pair in zip(SETTINGS[::2], SETTINGS[1::2], strict=True)
        if not pair[1].startswith(left_out)
        for word in pair
    ]


def shown(tokens: int) -> str:
    return f"{tokens / 1e6:.3f} M" if tokens >= 100_000 else f"{tokens:,}"


@pytest.fixture
def trace(tmp_path):
    return str(write_trace(tmp_path / "trace.jsonl", generate(1)))


def replay_json(capsys, *words: str):
    status = run(["replay", *words, "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert err == ""
    return json.loads(out)


def test_json_has_what_callers_read(trace, capsys):
    found = replay_json(capsys, trace, *SETTINGS)
    for name in ("direct", "snapshot"):
        assert found[name].keys() >= {
            "attempts",
            "ok",
            "ok_rate",
            "reasons",
            "reused_tokens",
            "recomputed_tokens",
        }
    assert found["direct"]["reasons"]["alloc-failed"] > found["direct"]["attempts"] / 2
    assert found["snapshot"]["ok_rate"] > 0.9
    assert found["optimal_reused_tokens"] >= found["snapshot"]["reused_tokens"] > 0
    brought = found["snapshot"]["reused_from_sync_tokens"]
    missed = found["optimal_reused_tokens"] - found["snapshot"]["reused_tokens"]
    assert found["of_optimal_from_sync"] == round(brought / (brought + missed), 4)
    assert found["model"]["kv_pool_tokens"] == SMALL.kv_pool_tokens
    assert found["trace"]["requests"] == len(generate(1))


def test_options_reach_the_model(trace, capsys):
    words = (
        "--policy", "gdsf", "--ingest", "on-demand", "--send", "session", "--direct-send", "suffix",
        "--direct-alloc", "evict", "--kv-pool", "50000", "--buffer", "6MiB", "--buffer-in", "host",
        "--seed", "9",
    )  # fmt: skip
    settings = [
        word
        for pair in zip(SETTINGS[::2], SETTINGS[1::2], strict=True)
        if not pair[1].startswith(("kv_pool_tokens", "buffer_bytes"))
        for word in pair
    ]
    model = replay_json(capsys, trace, *settings, *words)["model"]
    assert (model["policy"], model["ingest"], model["send"]) == ("gdsf", "on-demand", "session")
    assert (model["direct_send"], model["direct_alloc"]) == ("suffix", "evict")
    assert (model["kv_pool_tokens"], model["buffer_bytes"], model["buffer_in"]) == (50_000, 6 * MIB, "host")
    assert model["seed"] == 9


def test_the_text_says_what_is_held_against_what(trace, capsys):
    assert run(["replay", trace, *SETTINGS]) == 0
    out = capsys.readouterr().out
    for words in (
        "tokens reused at next turns",
        "alloc-failed",
        "any eviction policy",
        "snapshot reaches",
        "P: ",
    ):
        assert words in out


def test_the_text_says_why_snapshot_reuses_more_or_less_than_none(trace, capsys):
    for words, said in (
        ((), "tokens less than none: syncs bring"),
        (("--buffer", "36MiB"), "tokens less than none: syncs bring"),
        (("--buffer-in", "host"), "tokens more than none: syncs bring"),
    ):
        settings = settings_without("buffer_bytes") if words and words[0] == "--buffer" else SETTINGS
        found = replay_json(capsys, trace, *settings, *words)
        none, run_ = found["none"], found["snapshot"]
        more = run_["reused_tokens"] - none["reused_tokens"]
        assert run(["replay", trace, *settings, *words]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert f"snapshot reuses {shown(abs(more))} {said} {shown(run_['reused_from_sync_tokens'])}" in out
        taken = none["kv_pool_tokens"] - run_["kv_pool_tokens"]
        assert (f"the buffer takes {shown(taken)} of P's 40,000 slots" in out) is (taken > 0)
        evicted = run_["evicted_tokens"] - none["evicted_tokens"]
        assert (f"P evicts {shown(evicted)} tokens more" in out) is (evicted > 0)
        assert ("less than none" in out) is (more < 0)


def test_the_text_says_whether_a_policy_decided_anything(trace, capsys):
    assert run(["replay", trace, *SETTINGS]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Nothing was evicted from the buffer (at most" in out and "any policy gives this run" in out
    found = replay_json(capsys, trace, *SETTINGS, "--ingest", "on-demand", "--send", "session")
    evicted = found["snapshot"]["reasons"]["evicted"]
    assert run(["replay", trace, *SETTINGS, "--ingest", "on-demand", "--send", "session"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"The policy evicted {evicted} snapshots" in out and "any policy" not in out


def test_a_sweep_says_which_sizes_give_the_same(trace, capsys):
    def said(*words: str) -> str:
        assert run(["replay", trace, *SETTINGS, *words, "--processes", "1"]) == 0
        return " ".join(capsys.readouterr().out.split())

    host = said("--sweep", "8MiB..16MiB", "--buffer-in", "host")
    assert "These sizes give the same: 8 MiB to 16 MiB. At most" in host
    assert host.endswith("of the buffer are in use.")
    device = said("--sweep", "16MiB,24MiB")
    assert "Each size gives another result. At most" in device
    assert device.endswith("what differs is P's pool, which it is taken from.")
    assert "These sizes" not in said("--sweep", "8MiB") and "Each size" not in said("--sweep", "8MiB")
    small = said("--sweep", "256KiB,8MiB", "--buffer-in", "host")
    assert small.endswith("Each size gives another result.")


@pytest.mark.parametrize("more", [[], ["--json"], ["--sweep", "1MiB", "--processes", "1"]])
def test_a_full_disk_behind_stdout_is_status_2_and_a_sentence(trace, more):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "snapd.cli.main", "replay", trace, *SETTINGS, *more],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        2, "snapd: standard output cannot be written: No space left on device\n",
    )  # fmt: skip


def test_limit_and_stdin(trace, capsys, monkeypatch):
    with open(trace, "rb") as file:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdin", type("In", (), {"buffer": file}))
        assert replay_json(capsys, "-", *SETTINGS, "--limit", "7")["trace"]["requests"] == 7


def test_a_sweep_gives_a_point_for_each_size(trace, capsys):
    found = replay_json(capsys, trace, *SETTINGS, "--sweep", "1MiB..4MiB", "--processes", "1")
    assert [point["buffer_bytes"] for point in found["points"]] == [MIB, 2 * MIB, 4 * MIB]
    for point in found["points"]:
        assert 0 < point["snapshot"]["ok_rate"] <= 1
        assert point["snapshot"]["reused_tokens"] <= point["optimal_reused_tokens"]
    assert found["direct"]["attempts"] > 0
    assert run(["replay", trace, *SETTINGS, "--sweep", "1MiB,4MiB", "--processes", "1"]) == 0
    assert "ok rate" in capsys.readouterr().out


def test_a_sweep_over_processes_gives_the_same(trace, capsys):
    words = (trace, *SETTINGS, "--sweep", "1MiB,4MiB")
    alone = replay_json(capsys, *words, "--processes", "1")
    assert replay_json(capsys, *words, "--processes", "2") == alone


def test_a_sweep_can_be_drawn(trace, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "curve.png"
    replay_json(capsys, trace, *SETTINGS, "--sweep", "1MiB,4MiB", "--processes", "1", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    status = run(["replay", trace, *SETTINGS, "--sweep", "1MiB", "--plot", str(tmp_path / "curve.nope")])
    assert status == 2
    assert "--plot" in capsys.readouterr().err


def test_without_matplotlib_a_plot_says_what_to_install_before_anything_runs(trace, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["replay", trace, "--sweep", "1MiB", "--plot", "x.png"]) == 1
    assert "pip install 'kv-snapd[forensics]'" in capsys.readouterr().err


def test_a_log_is_written(trace, capsys, tmp_path):
    path = tmp_path / "log.jsonl"
    found = replay_json(capsys, trace, *SETTINGS, "--log", str(path))
    assert path.read_bytes().count(b'"event":"sync.outcome"') == found["snapshot"]["attempts"]
    assert run(["replay", trace, *SETTINGS, "--log", str(path)]) == 1
    assert "holds something already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--plot", "x.png"], 2, "--sweep"),
        (["--sweep", "1GiB", "--log", "x"], 2, "--log is of one run"),
        (["--live", "--sweep", "1GiB"], 2, "--live takes"),
        (["--live", "--policy", "lru"], 2, "--live takes"),
        (["--live", "--ingest", "hybrid", "--socket", "/nowhere"], 2, "live replay"),
        (["--live", "--set", "max_token=9", "--socket", "/nowhere"], 2, "did you mean max_tokens"),
        (["--live", "--socket", "/nowhere"], 1, "/nowhere"),
        (["--socket", "/nowhere"], 2, "--live"),
        (["--sweep", "lots"], 2, "--sweep lots"),
        (["--sweep", "8GiB..2GiB"], 2, "--sweep"),
        (["--sweep", "0GiB..2GiB"], 2, "--sweep"),
        (["--buffer", "lots"], 2, "--buffer lots"),
        (["--buffer", "1000GiB"], 2, "leaves nothing"),
        (["--sweep", "1GiB,1000GiB"], 2, "leaves nothing"),
        (["--buffer", "0B"], 2, "--buffer 0B: a buffer has 256 B to 1 TiB"),
        (["--buffer", "255B"], 2, "not 255 bytes"),
        (["--set", "buffer_bytes=255"], 2, "buffer_bytes=255: Expected `int` >= 256"),
        (["--sweep", "1B..64GiB"], 2, "--sweep 1B..64GiB: a buffer has 256 B to 1 TiB"),
        (["--sweep", "1GiB..1000TiB"], 2, "a buffer has 256 B to 1 TiB"),
        (["--kv-pool", str(1 << 50)], 2, "kv_pool_tokens must be at most 1,099,511,627,776"),
        (["--set", "tpot=3"], 2, "did you mean tpot_ms"),
        (["--policy", "fifo"], 2, "fifo"),
        (["--limit", "0"], 2, "limit"),
    ],
)
def test_a_wrong_command_line_says_why_in_one_line(trace, capsys, words, status, said):
    assert run(["replay", trace, *words]) == status
    out, err = capsys.readouterr()
    assert said in err
    assert out == ""
    assert "Traceback" not in err


def test_a_wrong_trace_is_refused_with_its_line(tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text("{}\n")
    assert run(["replay", str(path)]) == 1
    assert f"snapd: trace {path}, line 1" in capsys.readouterr().err
    assert run(["replay", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_wrong_lines_that_are_left_out_are_shown(tmp_path, capsys):
    path = write_trace(tmp_path / "t.jsonl", generate(1, sessions=3))
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    assert run(["replay", str(path), *SETTINGS, "--skip-bad-lines"]) == 0
    assert "left out: line 1" in capsys.readouterr().out


def test_sweeps_double_and_end_where_they_are_to():
    assert parse_sweep("2GiB..16GiB") == (2 * GIB, 4 * GIB, 8 * GIB, 16 * GIB)
    assert parse_sweep("2GiB..12GiB") == (2 * GIB, 4 * GIB, 8 * GIB, 12 * GIB)
    assert parse_sweep("8GiB,2GiB,8GiB") == (2 * GIB, 8 * GIB)
    assert len(parse_sweep("256B..1TiB")) == 33
    with pytest.raises(ConfigError, match="at most"):
        parse_sweep(",".join(f"{size}KiB" for size in range(1, 67)))

"""The fuzzer's targets: the corpus and what is made of it go through, and a planted fault is found."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snapd import wire as w
from tools.fuzz import CORPUS, NAMES
from tools.fuzz_targets import TARGETS

ROOT = Path(__file__).parents[1]


def inputs(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def mutated(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[at : at + 1] = rng.randbytes(1)
            case 1:
                changed[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del changed[at : at + rng.randrange(1, 9)]
            case _:
                changed[at:at] = changed[: rng.randrange(len(changed) + 1)]
    return bytes(changed[:8_192])


def test_every_target_has_a_corpus_and_a_name() -> None:
    assert tuple(TARGETS) == NAMES
    assert all(inputs(name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_corpus_and_what_is_made_of_it_go_through(name: str) -> None:
    rng = random.Random(5)
    corpus = inputs(name)
    for data in corpus:
        TARGETS[name](data)
    for _ in range(300):
        TARGETS[name](mutated(rng, rng.choice(corpus)))


def test_a_stream_that_reads_otherwise_when_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = w.FrameSplitter.feed

    def forgetful(self: w.FrameSplitter, data: bytes) -> list[bytes]:
        payloads = feed(self, data)
        if len(data) < 4:
            self._buffer.clear()
        return payloads

    monkeypatch.setattr(w.FrameSplitter, "feed", forgetful)
    with pytest.raises(AssertionError, match="reads otherwise"):
        TARGETS["requests"](b"\x02" + w.encode_frame(w.PingReq(id=1)))


def test_an_exception_that_nobody_expects_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(payload: bytes) -> Any:
        raise KeyError(payload)

    monkeypatch.setattr(w, "decode_request", decode)
    with pytest.raises(KeyError):
        TARGETS["requests"](b"\x02" + w.encode_frame(w.PingReq(id=1)))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_the_fuzzer_runs_and_says_what_it_did(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.fuzz", "requests", "--runs", "500", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results == {"requests": {"runs": results["requests"]["runs"], "found": ""}}
    assert results["requests"]["runs"] >= 500


def test_an_input_that_was_found_can_be_run_once_more(tmp_path: Path) -> None:
    found = tmp_path / "found"
    found.write_bytes(b"\x02" + w.encode_frame(w.PingReq(id=1)))
    command = [sys.executable, "-m", "tools.fuzz", "requests", str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, "")

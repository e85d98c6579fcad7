"""The demo, as real processes: what it says when all is well, and that it does not say so otherwise."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from snapd.config import load_config
from snapd.demo import messages as m
from snapd.demo.cache import PagedCache
from snapd.demo.chaos import STRUCK_PUSHES
from snapd.demo.logfacts import LogFacts
from snapd.demo.orchestrator import _config
from snapd.demo.plan import PAGE_SIZE_TOKENS, RANKS, TOKEN_BYTES, NotEnoughMemory, check_memory, make_plan
from snapd.demo.result import cross_check, make_result
from snapd.demo.stage import Seat, Tally
from snapd.demo.trace import TraceError, chain_sessions, default_trace_path, read_trace
from snapd.units import MIB

ROOT = Path(__file__).parents[2]
RUN_S = 100
WANTED_KEYS = {
    "sessions", "ingested", "aborted", "refused", "corrupt", "bytes", "ok_rate", "reasons", "log",
    "transport", "retried_pieces", "undrained_commits", "quarantined_bytes",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def own_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the demo leaves in the system's temporary directory goes with the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        yield


def demo(*arguments: str, fault: str = "", **variables: str) -> tuple[int, dict[str, Any], str]:
    """Run the demo, and return its status, the object on the last line of stdout, and stderr."""
    environment = os.environ | {"SNAPD_DEMO_FAULT": fault} | variables
    command = [sys.executable, "-m", "snapd.cli.main", "demo", "--json", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S, cwd=ROOT, env=environment, check=False
    )
    lines = done.stdout.splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


def write_trace(path: Path, sessions: int, turns: int) -> Path:
    lines = [
        {
            "timestamp": 1000 * turn + 50 * session,
            "input_length": 1024 * (turn + 1),
            "output_length": 512,
            "hash_ids": [100 * session + block for block in range(2 * (turn + 1))],
        }
        for turn in range(turns)
        for session in range(sessions)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def small_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of six sessions of three turns."""
    return write_trace(tmp_path_factory.mktemp("trace") / "small.jsonl", 6, 3)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, dict[str, Any], str]]:
    """What a run without chaos came to."""
    out = tmp_path_factory.mktemp("plain") / "out"
    yield demo("--total", "128MiB", "--out", str(out))


# --- whole runs --------------------------------------------------------------------------------


@pytest.mark.slow
def test_plain_run_ingests_everything_and_no_byte_differs(
    plain_run: tuple[int, dict[str, Any], str],
) -> None:
    status, result, messages = plain_run
    assert status == 0, messages
    assert result.keys() >= WANTED_KEYS
    assert result["transport"] == "shm"
    assert result["corrupt"] == 0 and result["faults"] == []
    assert result["ok_rate"] >= 0.95
    assert result["bytes"] >= 128 * MIB
    assert result["compared_bytes"] >= result["bytes"]
    assert result["ingested"] == result["reasons"]["ok"] == result["turns"]
    assert result["alloc_failed"] > 0, "P was never short of slots"
    assert result["reasons"].get("prefix-not-resident", 0) > 0, "no prefix was ever thrown out"


@pytest.mark.slow
def test_plain_run_leaves_only_its_log_and_configuration(plain_run: tuple[int, dict[str, Any], str]) -> None:
    log = Path(plain_run[1]["log"])
    assert {path.name for path in log.parent.iterdir()} - {"daemon.txt"} == {log.name, "snapd.toml"}


@pytest.mark.slow
def test_directory_with_a_log_is_not_used_again(plain_run: tuple[int, dict[str, Any], str]) -> None:
    status, _, messages = demo("--out", str(Path(plain_run[1]["log"]).parent))
    assert status == 2
    assert "choose another directory" in messages


@pytest.mark.slow
def test_chaos_kills_d_mid_push_and_everything_still_holds() -> None:
    status, result, messages = demo("--total", "96MiB", "--chaos", "--seed", "5")
    assert status == 0, messages
    assert result["corrupt"] == 0 and result["faults"] == []
    assert result["kills"] == 3
    killed = [incident for incident in result["incidents"] if incident["what"] == "killed"]
    assert len(killed) == 3
    assert all(0 < incident["at_bytes"] < incident["total_bytes"] for incident in killed)
    assert result["reasons"]["writer-gone"] == 3
    assert result["reasons"]["client-abort"] == 1
    assert result["leases_expired"] > 0
    facts = LogFacts(Path(result["log"]))
    for incident in killed:
        attempt = facts.attempts[incident["slab_handle"]]
        assert attempt.last_state == "TRANSFERRING"
        assert attempt.outcome is not None and attempt.outcome.reason == "writer-gone"
        later = [other for other in facts.ingested if other.session_id == incident["session_id"]]
        assert later, "the killed D's session never came home"
    assert "writer-gone" in messages, "the summary shows what became of them"


@pytest.mark.slow
def test_byte_that_changes_in_the_arena_never_reaches_the_tree(small_trace: Path) -> None:
    status, result, messages = demo("--total", "16MiB", "--trace", str(small_trace), fault="flip")
    assert status == 0, messages
    assert result["reasons"]["checksum-mismatch"] == 1
    assert result["corrupt"] == 0


ABORTS_AT_ITS_END = """
import atexit, os, sys

if "snapd.demo.worker" in sys.orig_argv and '"role":"D","index":0' in sys.orig_argv[-1]:
    atexit.register(os.abort)
    atexit.register(os.write, 2, b"a library says why\\n")
"""


@pytest.mark.slow
def test_worker_that_aborts_at_its_end_is_a_fault_with_what_it_said(
    small_trace: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABORTS_AT_ITS_END)
    arguments = ("--total", "16MiB", "--trace", str(small_trace))
    status, result, messages = demo(*arguments, PYTHONPATH=str(tmp_path))
    assert status == 1
    (fault,) = result["faults"]
    assert fault.startswith("D 0 ended with status -6 (SIGABRT); it said last:\na library says why\n")
    assert "Fatal Python error: Aborted" in fault, "it says where"
    assert "a library says why" in messages


@pytest.mark.slow
def test_comparison_finds_the_byte_when_nobody_verifies(small_trace: Path) -> None:
    """The control: corrupt can be other than 0."""
    status, result, messages = demo("--total", "16MiB", "--trace", str(small_trace), fault="flip,no-verify")
    assert status == 1, messages
    assert result["corrupt"] >= 1


@pytest.mark.slow
def test_finalize_without_retries_gives_up_and_says_so() -> None:
    arguments = ("--total", "64MiB", "--finalize-retries", "0", "--speed", "1000")
    status, result, messages = demo(*arguments)
    assert status == 0, messages
    assert 0 < result["reasons"]["alloc-failed-on-finalize"] <= result["alloc_failed"]
    assert result["given_up"] > 0


# --- over Mooncake -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two sessions of three turns."""
    return write_trace(tmp_path_factory.mktemp("trace") / "tiny.jsonl", 2, 3)


@pytest.fixture(scope="module")
def mooncake_chaos(tiny_trace: Path) -> tuple[int, dict[str, Any], str]:
    """What a run with chaos over Mooncake came to. No turn is left for a lease that runs out."""
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    arguments = ("--transport", "mooncake", "--total", "16MiB", "--trace", str(tiny_trace))
    return demo(*arguments, "--chaos", "--seed", "2")


@pytest.mark.slow
def test_run_over_mooncake_ingests_everything_and_keeps_its_noise_in_files(
    small_trace: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    arguments = ("--transport", "mooncake", "--total", "32MiB", "--trace", str(small_trace))
    status, result, messages = demo(*arguments, "--out", str(tmp_path / "out"))
    assert status == 0, messages
    assert result.keys() >= WANTED_KEYS
    assert result["transport"] == "mooncake"
    assert result["corrupt"] == 0 and result["faults"] == []
    assert result["ingested"] == result["turns"]
    assert result["reasons"].keys() <= {"ok", "prefix-not-resident"}
    assert result["compared_bytes"] >= result["bytes"] >= 32 * MIB
    assert result["retried_pieces"] == result["undrained_commits"] == 0
    assert "over mooncake: 0 pieces were written again" in messages
    assert "transfer_engine" in (tmp_path / "out" / "decoder-0.txt").read_text()
    assert "transfer_engine" not in messages and "InitGoogleLogging" not in messages


@pytest.mark.slow
def test_bytes_of_a_d_that_was_killed_over_mooncake_wait_for_their_time(
    mooncake_chaos: tuple[int, dict[str, Any], str],
) -> None:
    """There its exit proves nothing: what it wrote may be under way still."""
    status, result, messages = mooncake_chaos
    assert status == 0, messages
    assert result["corrupt"] == 0 and result["faults"] == []
    assert result["reasons"]["writer-gone"] == result["kills"] == 3
    assert result["reasons"]["client-abort"] == 1
    facts = LogFacts(Path(result["log"]))
    killed = [incident for incident in result["incidents"] if incident["what"] == "killed"]
    held_bytes = 0
    for incident in killed:
        attempt = facts.attempts[incident["slab_handle"]]
        assert 0 < incident["at_bytes"] < incident["total_bytes"]
        assert attempt.last_state == "TRANSFERRING" and attempt.released_why == {"time"}
        assert attempt.quarantined_bytes >= incident["total_bytes"]
        held_bytes += attempt.quarantined_bytes
        assert any(other.session_id == incident["session_id"] for other in facts.ingested)
    assert result["quarantined_bytes"] >= held_bytes
    assert "quarantine, time" in messages


@pytest.mark.slow
def test_arenas_of_chaos_over_mooncake_have_room_for_what_is_in_quarantine(
    tiny_trace: Path, mooncake_chaos: tuple[int, dict[str, Any], str]
) -> None:
    config = load_config(Path(mooncake_chaos[1]["log"]).with_name("snapd.toml"), {}, {})
    plan = make_plan(
        read_trace(tiny_trace), total_bytes=16 * MIB, decoders=2, quarantined_snapshots=STRUCK_PUSHES
    )
    assert [arena.size_bytes for arena in config.arenas] == [plan.arena_bytes] * RANKS


@pytest.mark.slow
def test_log_in_which_a_quarantine_is_too_short_is_a_fault(
    mooncake_chaos: tuple[int, dict[str, Any], str], tmp_path: Path
) -> None:
    lines = Path(mooncake_chaos[1]["log"]).read_bytes().splitlines()
    until_ns: dict[tuple[int, int], int] = {}
    for number, line in enumerate(lines):
        fields = json.loads(line)
        key = (fields.get("slab_handle", 0), fields.get("rank", -1))
        if fields["event"] == "slab.quarantined":
            until_ns[key] = fields["until_ns"]
        elif fields.get("why") == "time":
            assert fields["at_ns"] >= until_ns[key]
            lines[number] = json.dumps(fields | {"at_ns": until_ns[key] - 1}).encode()
            break
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert [fault for fault in LogFacts(path).faults if "left the quarantine before its time" in fault]


def test_mooncake_that_cannot_be_loaded_is_one_line_with_the_command(tmp_path: Path) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.so").write_bytes(b"no library")
    arguments = ("--transport", "mooncake", "--total", "16MiB")
    status, _, messages = demo(*arguments, PYTHONPATH=str(tmp_path))
    assert status == 1
    line = messages.splitlines()[-1]
    assert line.startswith("snapd: the daemon did not start: transport = mooncake: ")
    assert "pip install" in line and "Traceback" not in messages


# --- processes that end before they should ------------------------------------------------------


def children(pid: int) -> dict[int, str]:
    """Return the command lines of a process's children, by pid."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # It has ended meanwhile.
    return found


def start_long_demo() -> tuple[subprocess.Popen[str], dict[int, str]]:
    """Start a demo that would take minutes, wait until it plays, and return it with its children."""
    command = [sys.executable, "-m", "snapd.cli.main", "demo", "--total", "4GiB", "--speed", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    for line in process.stdout:
        if "turns; " in line:
            break
    return process, children(process.pid)


def assert_all_gone(pids: dict[int, str]) -> None:
    deadline_s = time.monotonic() + 10
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline_s, f"still there: {left}"


@pytest.mark.slow
def test_ctrl_c_ends_every_process() -> None:
    process, pids = start_long_demo()
    assert len(pids) == 5, "a daemon, two D and two P"
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in messages
    assert_all_gone(pids)


@pytest.mark.slow
def test_worker_that_dies_by_itself_ends_the_demo_with_one_line() -> None:
    process, pids = start_long_demo()
    os.kill(next(pid for pid, line in pids.items() if '"role":"P"' in line), signal.SIGKILL)
    _, messages = process.communicate(timeout=30)
    assert process.returncode == 1
    assert messages.startswith("snapd: P ") and "has ended" in messages and messages.count("\n") == 1
    assert_all_gone(pids)


# --- wrong usage -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("--total", "banana"), 2, "banana"),
        (("--total", "5"), 2, "at least"),
        (("--decoders", "1"), 2, "--decoders"),
        (("--transport", "rdma"), 2, "mooncake"),
        (("--trace", "/nowhere/trace.jsonl"), 1, "/nowhere/trace.jsonl"),
        (("--out", "/proc/demo"), 2, "/proc/demo"),
    ],
)
def test_wrong_usage_is_one_line_that_names_it(arguments: tuple[str, ...], status: int, text: str) -> None:
    got, _, messages = demo(*arguments)
    assert got == status
    assert text in messages and messages.count("\n") == 1


# --- the trace ---------------------------------------------------------------------------------


def test_shipped_trace_is_what_the_generator_writes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    subprocess.run([sys.executable, ROOT / "tools" / "make_trace.py", path], check=True, timeout=60)
    assert path.read_bytes() == default_trace_path().read_bytes()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"{", "line 2"),
        (b"\xff\xfe", "line 2"),
        (b'{"timestamp":0,"input_length":0,"output_length":1,"hash_ids":[]}', "input_length"),
        (b'{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1]}', "1 hash_ids for 600 tokens"),
    ],
)
def test_bad_line_of_a_trace_is_named(tmp_path: Path, line: bytes, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}\n' + line + b"\n")
    with pytest.raises(TraceError, match=r"line 2") as caught:
        read_trace(path)
    assert text in str(caught.value)


def test_turns_of_a_session_are_found_by_their_blocks(small_trace: Path) -> None:
    chains = chain_sessions(read_trace(small_trace))
    assert [len(chain) for chain in chains] == [3] * 6
    for number, chain in enumerate(chains):
        assert {turn.hash_ids[0] for turn in chain} == {100 * number}


def test_shared_prompt_makes_no_session(tmp_path: Path) -> None:
    """Requests that share their first block only, and end in it, are sessions of their own."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at, "input_length": len(ids) * 512 - 100, "output_length": 1, "hash_ids": ids}
        for at, ids in enumerate(([0, 1], [0, 2, 3], [0, 4, 5, 6], [0, 7, 8, 9, 10, 11]))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [len(chain) for chain in chain_sessions(read_trace(path))] == [1, 1, 1, 1]


@pytest.mark.parametrize("total_bytes", [MIB, 128 * MIB, 2048 * MIB, 20_000 * MIB])
def test_plan_moves_what_is_wanted_and_fits_its_pools(total_bytes: int) -> None:
    plan = make_plan(read_trace(default_trace_path()), total_bytes=total_bytes, decoders=2)
    assert plan.payload_bytes >= total_bytes
    assert all(session.end_tokens + PAGE_SIZE_TOKENS <= plan.decoder_slots for session in plan.sessions)
    assert plan.arena_bytes >= 2 * plan.decoder_slots * TOKEN_BYTES
    assert plan.memory_bytes(2) < 8192 * MIB
    assert 64 * 1024 <= plan.piece_bytes <= 4 * MIB
    for session in plan.sessions:
        ends = [turn.end_tokens for turn in session.turns]
        assert all(later - earlier >= 1 for earlier, later in itertools.pairwise(ends))


def test_arenas_have_room_for_snapshots_in_quarantine() -> None:
    requests = read_trace(default_trace_path())
    plain, roomy = (
        make_plan(requests, total_bytes=2048 * MIB, decoders=2, quarantined_snapshots=count)
        for count in (0, STRUCK_PUSHES)
    )
    longest_bytes = max(session.end_tokens for session in plain.sessions) * TOKEN_BYTES
    assert roomy.arena_bytes >= plain.arena_bytes - MIB + STRUCK_PUSHES * longest_bytes


def test_plan_that_does_not_fit_into_memory_is_refused() -> None:
    plan = make_plan(read_trace(default_trace_path()), total_bytes=2048 * MIB, decoders=2)
    with pytest.raises(NotEnoughMemory, match="lower --total or --decoders"):
        check_memory(msgspec.structs.replace(plan, arena_bytes=1 << 50), 2)


# --- P's bookkeeping ---------------------------------------------------------------------------


def test_cache_throws_out_sessions_that_are_over_and_no_others() -> None:
    cache = PagedCache(8 * PAGE_SIZE_TOKENS, 8 * PAGE_SIZE_TOKENS)
    for name in ("first", "second"):
        slots = cache.allocate(3 * PAGE_SIZE_TOKENS)
        assert slots is not None
        cache.insert(name, range(3 * PAGE_SIZE_TOKENS), 0, slots)
    assert cache.allocate(3 * PAGE_SIZE_TOKENS) is None
    cache.mark_over("first")
    assert cache.allocate(3 * PAGE_SIZE_TOKENS) is not None
    assert cache.resident() == {"second": 3 * PAGE_SIZE_TOKENS}


def test_cache_replaces_a_partial_page_and_loses_none() -> None:
    cache = PagedCache(8 * PAGE_SIZE_TOKENS, 8 * PAGE_SIZE_TOKENS)
    tokens = range(2 * PAGE_SIZE_TOKENS)
    slots = cache.allocate(PAGE_SIZE_TOKENS + 1)
    assert slots is not None
    cache.insert("session", tokens[: PAGE_SIZE_TOKENS + 1], 0, slots)
    assert cache.lock_prefix("session", tokens) == PAGE_SIZE_TOKENS + 1
    more = cache.allocate(PAGE_SIZE_TOKENS)
    assert more is not None
    cache.insert("session", tokens, PAGE_SIZE_TOKENS, more)
    cache.unlock_prefix("session")
    assert len(cache.slots_of("session")) == len(tokens)
    assert cache.free_slots + cache.cached_slots == cache.total_slots
    cache.drop_all()
    assert cache.free_slots == cache.total_slots


def test_pinned_prefix_is_not_thrown_out() -> None:
    cache = PagedCache(4 * PAGE_SIZE_TOKENS, 4 * PAGE_SIZE_TOKENS)
    slots = cache.allocate(2 * PAGE_SIZE_TOKENS)
    assert slots is not None
    cache.insert("session", range(2 * PAGE_SIZE_TOKENS), 0, slots)
    cache.lock_prefix("session", range(2 * PAGE_SIZE_TOKENS))
    cache.take_for_prefill(4 * PAGE_SIZE_TOKENS, idle_victims=1)
    assert "session" in cache.resident()


# --- the cross-checks can fail -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "text"),
    [("sync.outcome", "has no outcome"), ("slab.released", "still holds"), ("lease.granted", "has seq")],
)
def test_log_that_lacks_a_line_is_a_fault(
    plain_run: tuple[int, dict[str, Any], str], tmp_path: Path, event: str, text: str
) -> None:
    lines = Path(plain_run[1]["log"]).read_bytes().splitlines(keepends=True)
    assert not LogFacts(Path(plain_run[1]["log"])).faults
    lines.remove(next(line for line in lines if b'"event":"%s"' % event.encode() in line))
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(lines))
    assert any(text in fault for fault in LogFacts(path).faults)


@pytest.mark.slow
def test_tally_and_trees_that_differ_from_the_log_are_faults(
    plain_run: tuple[int, dict[str, Any], str],
) -> None:
    facts = LogFacts(Path(plain_run[1]["log"]))
    good = m.TreeReport(
        inserted=(), resident={}, evicted=0, alloc_failures=0, total_slots=32, free_slots=32, cached_slots=0,
        free_slots_after=32,
    )  # fmt: skip
    leaky = msgspec.structs.replace(good, free_slots_after=16, resident={"ghost": 5}, free_slots=16)
    faults = cross_check(facts, Tally(handles={1}), _books(facts), [good, leaky], list[Seat]())
    for text in (
        "ingested other attempts",
        "knows nothing of",
        "slots leaked",
        "was not inserted",
        "free and",
    ):
        assert any(text in fault for fault in faults), text
    assert not any("bytes leaked" in fault for fault in faults)
    faults = cross_check(facts, Tally(), _books(facts, leaked_bytes=256), [good], list[Seat]())
    assert any("256 bytes leaked" in fault for fault in faults)
    faults = cross_check(facts, Tally(), _books(facts, quarantined_bytes=256), [good], list[Seat]())
    assert any("1 shards are in quarantine at the end" in fault for fault in faults)
    assert not any("bytes leaked" in fault for fault in faults)


@pytest.mark.slow
def test_summary_tells_what_was_counted(plain_run: tuple[int, dict[str, Any], str]) -> None:
    facts = LogFacts(Path(plain_run[1]["log"]))
    plan = make_plan(read_trace(default_trace_path()), total_bytes=128 * MIB, decoders=2)
    tally = Tally(retried_pieces=3, undrained_commits=2)
    result = make_result(plan, facts, tally, [], [], [], play_s=1.0, wall_s=2.0, seed=1, log="")
    assert (result.retried_pieces, result.undrained_commits) == (3, 2)
    assert result.quarantined_bytes == facts.quarantined_bytes


class _Books:
    """A stand-in for the daemon's statistics: what the checks look at, and no more."""

    def __init__(self, **facts: object) -> None:
        self.__dict__.update(facts)


def _books(facts: LogFacts, leaked_bytes: int = 0, quarantined_bytes: int = 0) -> Any:
    arena = _Books(
        rank=0,
        capacity_bytes=MIB,
        free_bytes=MIB - leaked_bytes - quarantined_bytes,
        live_bytes=leaked_bytes,
        quarantined_bytes=quarantined_bytes,
    )
    core = _Books(
        outcomes_by_reason=facts.reasons,
        open_sessions=0,
        quarantined_shards=int(quarantined_bytes > 0),
        arenas=(arena,),
        bytes_ingested=sum(outcome.bytes for outcome in facts.ingested),
    )
    return _Books(core=core, log=_Books(dropped=0))


@pytest.mark.parametrize("transport", ["shm", "mooncake"])
def test_daemon_of_the_demo_gets_a_configuration_that_it_takes(
    tmp_path: Path, transport: Literal["shm", "mooncake"]
) -> None:
    plan = make_plan(read_trace(default_trace_path()), total_bytes=128 * MIB, decoders=2)
    path = tmp_path / "snapd.toml"
    path.write_text(_config(plan, "/tmp/a.sock", tmp_path / 'odd "name"\\.jsonl', transport))
    config = load_config(path, {}, {})
    assert [arena.size_bytes for arena in config.arenas] == [plan.arena_bytes] * RANKS
    assert config.log_path == str(tmp_path / 'odd "name"\\.jsonl')
    assert config.transport == transport
    assert (config.mooncake.protocol, config.mooncake.host) == ("tcp", "127.0.0.1")

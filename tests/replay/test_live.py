"""A live replay: a real daemon process, real bytes, and the daemon's own books to compare with."""

import contextlib
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from daemon_process import DaemonProcess
from rich.console import Console

from snapd.cli.replaylive import replay_live
from snapd.client import Client
from snapd.core.session import Statistics
from snapd.demo.plan import PAGE_SIZE_TOKENS, NotEnoughMemory
from snapd.errors import (
    ConfigError,
    ConnectionProblem,
    DaemonUnreachable,
    InvalidRequest,
    RequestTimeout,
    TransportError,
)
from snapd.kv.ingest import Ingester, IngestJob
from snapd.kv.mappedjob import MappedJob
from snapd.kv.push import Pusher
from snapd.kv.pushjob import RefusedJob
from snapd.replay import live, livekv
from snapd.replay.chains import Turn, chain_turns
from snapd.replay.live import LiveOptions, LiveProgress, LiveResult, check_daemon, run_live
from snapd.replay.liveplan import make_plan
from snapd.replay.livereport import progress_line, show_live
from snapd.replay.trace import Request
from snapd.units import MIB

TOKEN_BYTES = 512
Daemons = Callable[..., DaemonProcess]


@pytest.fixture(scope="module")
def daemons() -> Iterator[Daemons]:
    """Daemons by their settings; those without are shared by all tests. Each must stop cleanly."""
    running: dict[str, DaemonProcess] = {}
    with contextlib.ExitStack() as stack:

        def start(*, own: bool = False, **overrides: object) -> DaemonProcess:
            name = repr(sorted(overrides.items()))
            if own or name not in running:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="snapd-")))
                daemon = DaemonProcess(directory, overrides)
                stack.callback(finish, daemon)
                if own:
                    return daemon
                running[name] = daemon
            return running[name]

        yield start


def finish(daemon: DaemonProcess) -> None:
    daemon.stop()
    assert "Traceback" not in daemon.stderr, daemon.stderr


def turns_of(*lines: tuple[str, int, int, int]) -> list[Turn]:
    """Return linked turns: session, ms, input and output tokens."""
    return chain_turns([Request(float(ms), i, o, session_id=name) for name, ms, i, o in lines])


def trace(sessions: int = 6, turns: int = 3, tokens: int = 300) -> list[Turn]:
    """Return sessions whose turns take turns, one a ms, each with *tokens* more."""
    return turns_of(
        *(
            (f"s{s}", turn * sessions + s, tokens * (turn + 1) - 20, 20)
            for turn in range(turns)
            for s in range(sessions)
        )
    )


def replay(daemon: DaemonProcess, turns: list[Turn], progress: Any = None, **options: Any) -> LiveResult:
    return run_live(turns, LiveOptions(socket_path=str(daemon.socket_path), **options), progress)


def statistics(daemon: DaemonProcess) -> Statistics:
    with Client(str(daemon.socket_path)) as client:
        return client.stats().core


def check_nothing_is_left(daemon: DaemonProcess, quarantined_bytes: int = 0) -> None:
    core = statistics(daemon)
    assert core.open_sessions == 0
    for arena in core.arenas:
        assert arena.quarantined_bytes == quarantined_bytes
        assert arena.free_bytes + quarantined_bytes == arena.capacity_bytes


def new_outcomes(before: Statistics, after: Statistics) -> dict[str, int]:
    counts = {
        reason: count - before.outcomes_by_reason.get(reason, 0)
        for reason, count in after.outcomes_by_reason.items()
    }
    return {reason: count for reason, count in counts.items() if count}


# --- the plan


def test_a_long_trace_is_shortened_by_one_factor_and_a_short_one_is_not() -> None:
    turns = turns_of(("a", 0, 900, 101), ("b", 500, 3_000, 1_001), ("a", 2_000, 1_500, 501))
    plan = make_plan(turns, 4_000, PAGE_SIZE_TOKENS, "x")
    assert plan.token_scale == 1.0 and (plan.longest_tokens, plan.num_turns) == (4_000, 3)
    a, b = plan.sessions
    assert [(step.due_s, step.prompt_tokens, step.end_tokens) for step in a.steps] == [
        (0.0, 900, 1_000), (2.0, 1_500, 2_000),
    ]  # fmt: skip
    assert (a.session_id, b.session_id, b.steps[0].due_s) == ("replay-x-0", "replay-x-1", 0.5)
    short = make_plan(turns, 400, PAGE_SIZE_TOKENS, "x")
    assert short.token_scale == 0.1 and short.longest_tokens == 400
    assert [(step.prompt_tokens, step.end_tokens) for step in short.sessions[0].steps] == [
        (90, 100), (150, 200),
    ]  # fmt: skip


def test_every_turn_has_a_page_to_send_and_no_prompt_is_shorter_than_what_was_before() -> None:
    turns = turns_of(("a", 0, 2_000, 1), ("a", 1, 2_002, 3), ("b", 2, 200_000, 1))
    plan = make_plan(turns, 1_000, PAGE_SIZE_TOKENS, "x")
    assert [(step.prompt_tokens, step.end_tokens) for step in plan.sessions[0].steps] == [(10, 16), (16, 32)]


def test_sessions_have_no_token_in_common_and_a_trace_without_turns_is_refused() -> None:
    first, second = make_plan(turns_of(("a", 0, 9, 1), ("b", 0, 9, 1)), 100, 16, "x").sessions
    assert not set(first.token_ids(9)) & set(second.token_ids(9))
    with pytest.raises(InvalidRequest, match="no turn"):
        make_plan([], 100, 16, "x")


BAD: dict[str, Any] = {
    "max_tokens": 10, "turns_at_once": 0, "layers": 0, "kv_heads": 0, "head_dim": 2, "pool_bytes": 1,
    "timeout_s": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_an_option_out_of_range_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = "):
        run_live(trace(), LiveOptions(socket_path="/nowhere", **{name: BAD[name]}))


def test_rows_that_are_no_whole_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 4"):
        LiveOptions(socket_path="/nowhere", kv_heads=1, head_dim=6).check()


# --- the bytes


def test_the_content_depends_on_session_rank_token_plane_and_place_and_on_nothing_else() -> None:
    content = livekv.KvContent(1, num_planes=4, row_words=8)
    tokens = torch.arange(200)
    words = [content.words(session, rank, tokens) for session in (0, 1) for rank in (0, 1)]
    assert len(torch.stack(words).unique()) == 4 * 4 * 200 * 8
    again = livekv.KvContent(1, 4, 8)
    out = torch.empty(4, 50, 8, dtype=torch.int64)
    again.words(1, 0, tokens[100:150], out)
    assert out.equal(words[2][:, 100:150])
    assert not livekv.KvContent(2, 4, 8).words(0, 0, tokens).eq(words[0]).any()


# --- against a daemon


@pytest.mark.parametrize("ingest", ["eager", "on-demand"])
def test_every_byte_of_a_trace_comes_home_on_every_rank(daemons: Daemons, ingest: str) -> None:
    daemon = daemons(ranks=2)
    before, before_threads = statistics(daemon), torch.get_num_threads()
    seen: list[LiveProgress] = []
    threads: list[int] = []
    torch.set_num_threads(3)

    def show(progress: LiveProgress) -> None:
        seen.append(progress)
        threads.append(torch.get_num_threads())

    result = replay(daemon, trace(), show, ingest=ingest)
    assert (set(threads), torch.get_num_threads()) == ({1}, 3), "the daemon wants a core as well"
    torch.set_num_threads(before_threads)
    # A turn's KV ends before its last sampled token; a push begins at a whole page of what P has.
    ends = [299, 599, 899]
    starts = [0, 288, 592] if ingest == "eager" else [0, 288]
    sent = sum(end - start for start, end in zip(starts, ends, strict=False)) * 6
    home = 18 if ingest == "eager" else 12
    assert (result.sessions, result.turns, result.attempts, result.ok) == (6, 18, home, home)
    assert (result.ok_rate, result.reasons, result.unused) == (1.0, {"ok": home}, 18 - home)
    assert result.bytes == result.compared_bytes == sent * TOKEN_BYTES * 2
    assert result.pushed_bytes - result.bytes == (0 if home == 18 else (899 - 592) * 6 * TOKEN_BYTES * 2)
    assert (result.corrupt, result.is_good) == (0, True)
    assert result.reused_tokens == (299 + 599) * 6
    assert result.prompt_tokens == (280 + 580 + 880) * 6
    assert result.push_gb_per_s > 0 and result.ingest_gb_per_s > 0 and result.play_s > 0.017
    assert (result.token_scale, result.token_bytes, result.arena_tokens) == (1.0, 512, 32_768)
    assert [progress.turns_done for progress in seen] == list(range(1, 19))
    assert (seen[-1].turns, seen[-1].ok, seen[-1].bytes) == (18, home, result.bytes)
    after = statistics(daemon)
    assert after.bytes_ingested - before.bytes_ingested == result.bytes
    unused = {"client-abort": 18 - home} if home < 18 else {}
    assert new_outcomes(before, after) == {"ok": home} | unused
    check_nothing_is_left(daemon)


def test_what_the_daemon_evicts_or_refuses_is_counted_as_the_daemon_counts_it(daemons: Daemons) -> None:
    """1 MiB of arena holds 2,048 tokens, less than half of what the sessions have READY at a time."""
    daemon = daemons(size="1MiB", eviction_policy="sieve")
    before = statistics(daemon)
    result = replay(daemon, trace(8, 4, 400), ingest="on-demand")
    assert result.reasons["evicted"] > 0 and result.corrupt == 0
    unused = {"client-abort": result.unused} if result.unused else {}
    assert new_outcomes(before, statistics(daemon)) == result.reasons | unused
    assert result.attempts + result.unused == result.turns == 32
    assert result.attempts == sum(result.reasons.values())
    assert result.ok_rate == result.ok / result.attempts
    check_nothing_is_left(daemon)


def test_a_refused_push_is_an_attempt_and_the_next_turn_brings_its_tokens(daemons: Daemons) -> None:
    daemon = daemons(own=True)
    with Client(str(daemon.socket_path)) as client:

        def drain(progress: LiveProgress) -> None:
            client.drain(progress.turns_done == 1)

        result = replay(daemon, trace(1, 3), drain)
    assert result.reasons == {"draining": 1, "ok": 2}
    assert (result.attempts, result.ok, result.corrupt) == (3, 2, 0)
    assert result.bytes == (299 + 899 - 288) * TOKEN_BYTES


def test_a_prefix_that_p_has_evicted_is_pushed_again(daemons: Daemons) -> None:
    """P has slots for little more than one session of eight: most suffixes find nothing to build on."""
    daemon = daemons(ranks=2)
    before = statistics(daemon)
    result = replay(daemon, trace(8, 4, 700), pool_bytes=4 * MIB, layers=4, turns_at_once=1)
    assert result.resent == result.reasons["prefix-not-resident"] > 0
    assert (result.reasons["ok"], result.attempts) == (32, 32 + result.resent), "the whole of it always fits"
    assert new_outcomes(before, statistics(daemon)) == result.reasons
    assert result.corrupt == 0 and result.reused_tokens < result.prompt_tokens
    check_nothing_is_left(daemon)


def test_a_byte_that_is_not_what_d_should_have_is_found(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(self: livekv.Worker, session: int, lane: int, first: int, num: int) -> Iterator[None]:
        yield from right(self, session, lane, first, num)
        if session == 1:
            words = self._d[1].words
            words[3, lane * self._lane_slots + num - 1, 15] ^= 1 << 62

    right = livekv.Worker.make
    monkeypatch.setattr(livekv.Worker, "make", make)
    result = replay(daemons(ranks=2), trace(3, 2))
    assert (result.ok, result.corrupt, result.is_good) == (6, 2, False)


def test_turns_wait_for_their_time_and_tell_how_late_they_were(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = daemons()
    slept_s: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda duration_s: (slept_s.append(duration_s), sleep(duration_s)))
    early = replay(daemon, turns_of(("a", 0, 50, 10), ("b", 400, 50, 10)))
    assert early.play_s >= 0.4
    assert max(slept_s) > 0.01, "it does not spin"
    late = replay(daemon, trace(20, 1, 1_000), turns_at_once=1)
    assert late.late_ms_max >= late.late_ms_mean > 0


def test_a_push_that_cannot_begin_is_an_attempt_and_leaves_nothing_open(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = TransportError("the arena cannot be mapped")
    monkeypatch.setattr(Pusher, "start_granted", lambda *args: RefusedJob(error))
    daemon = daemons(ranks=2)
    result = replay(daemon, trace(2, 2))
    assert (result.reasons, result.ok_rate, result.pushed_bytes) == ({"transfer-failed": 4}, 0.0, 0)
    check_nothing_is_left(daemon)


@pytest.mark.parametrize(
    ("kind", "reason"), [(TransportError, "ingest-failed"), (RequestTimeout, "lease-expired")]
)
def test_an_ingest_that_fails_on_p_leaves_nothing_open(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], reason: str
) -> None:
    """After a timeout P keeps the snapshot for another try; a replay makes none."""

    def fail(self: IngestJob, max_bytes: int) -> None:
        raise kind("it cannot be read")

    monkeypatch.setattr(IngestJob, "_step_scatter", fail)
    daemon = daemons(ranks=2)
    result = replay(daemon, trace(2, 2))
    assert (result.reasons, result.bytes, result.unused) == ({reason: 4}, 0, 0)
    check_nothing_is_left(daemon)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_replay_closes_what_it_opened(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    closed: list[Any] = []
    for kind in (Pusher, Ingester, Client):
        original = kind.close
        monkeypatch.setattr(kind, "close", lambda self, close=original: (closed.append(self), close(self)))

    def show(progress: LiveProgress) -> None:
        if is_interrupted:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext():
        replay(daemons(ranks=2), trace(1, 2), show)
    kinds = [type(one).__name__ for one in closed]
    assert kinds.index("Pusher") > kinds.index("Ingester"), "P first, as its clients are its own"
    assert (kinds.count("Pusher"), kinds.count("Ingester"), kinds.count("Client")) == (1, 2, 3)


# --- interruptions


@pytest.mark.parametrize("where", ["make", "push", "start", "ingest", "compare", "between"])
def test_an_interrupt_leaves_nothing_open_and_nothing_in_quarantine(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*args: object) -> Any:
        calls.append(args)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return original(*args)

    calls: list[Any] = []
    original: Any = lambda *args: None  # noqa: E731
    places = {
        "make": (livekv.KvContent, "words"),
        "push": (MappedJob, "_advance"),
        "start": (Ingester, "start"),
        "ingest": (IngestJob, "_step_scatter"),
        "compare": (livekv.Worker, "compare"),
    }
    if where in places:
        owner, name = places[where]
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, interrupt)
    # Every turn takes many steps, so that others are in the middle of theirs.
    monkeypatch.setattr(live, "STEP_BYTES", 1)
    daemon = daemons(ranks=2)
    with pytest.raises(KeyboardInterrupt):
        progress = interrupt if where == "between" else None
        replay(daemon, trace(), progress, ingest="eager" if where == "ingest" else "on-demand")
    check_nothing_is_left(daemon)


def test_a_daemon_that_dies_ends_the_replay(daemons: Daemons) -> None:
    daemon = daemons(own=True)

    def kill(progress: LiveProgress) -> None:
        if progress.turns_done == 3:
            daemon.kill()

    with pytest.raises(ConnectionProblem):
        replay(daemon, trace(), kill)


# --- what cannot be replayed


def test_arenas_on_a_gpu_and_other_transports_are_refused_politely(daemons: Daemons) -> None:
    with Client(str(daemons(ranks=2).socket_path)) as client:
        hello = client.connect()
    check_daemon(hello)
    on_gpu = msgspec.structs.replace(hello.arenas[1], device="cuda:0")
    with pytest.raises(ConfigError, match=r"arena 1 .* is on cuda:0.*start a daemon of its own"):
        check_daemon(msgspec.structs.replace(hello, arenas=(hello.arenas[0], on_gpu)))
    with pytest.raises(ConfigError, match=r"transport is mooncake.*shared memory"):
        check_daemon(msgspec.structs.replace(hello, transport="mooncake"))


def test_a_replay_asks_where_the_arenas_are(daemons: Daemons, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Client.connect

    def on_gpu(self: Client, wait_s: float = 0.0) -> Any:
        hello = connect(self, wait_s)
        arenas = tuple(msgspec.structs.replace(arena, device="cuda:3") for arena in hello.arenas)
        return msgspec.structs.replace(hello, arenas=arenas)

    daemon = daemons()
    before = statistics(daemon)
    monkeypatch.setattr(Client, "connect", on_gpu)
    with pytest.raises(ConfigError, match="is on cuda:3, and a live replay"):
        replay(daemon, trace())
    monkeypatch.undo()
    assert statistics(daemon) == before


def test_a_session_that_fits_no_arena_or_no_pool_is_refused(daemons: Daemons) -> None:
    daemon = daemons(size="1MiB", eviction_policy="sieve")
    with pytest.raises(ConfigError, match=r"smallest arena has 1 MiB.*--max-tokens"):
        replay(daemon, trace(1, 1, 5_000))
    with pytest.raises(ConfigError, match="slots for 512: use a smaller --max-tokens"):
        replay(daemons(), trace(1, 1, 5_000), layers=8, pool_bytes=MIB)


def test_pools_that_do_not_fit_memory_are_refused(daemons: Daemons, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livekv, "available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(NotEnoughMemory, match="1 MiB can be had"):
        replay(daemons(), trace())


def test_no_daemon_is_said_as_by_any_client(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable):
        run_live(trace(), LiveOptions(socket_path=str(tmp_path / "none")))


def test_without_torch_it_says_what_to_install_and_importing_it_needs_none() -> None:
    program = """
import sys
from snapd.replay.live import LiveOptions, run_live
assert "torch" not in sys.modules
sys.modules["torch"] = None
from snapd.errors import ExtraMissing
try:
    run_live([], LiveOptions(socket_path="/nowhere"))
except ExtraMissing as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'kv-snapd[kv]'" in ran.stdout


# --- what people see


def shown(result: LiveResult) -> str:
    stream = io.StringIO()
    show_live(Console(file=stream, width=110), result)
    return stream.getvalue()


def test_a_person_reads_whether_every_byte_was_right(daemons: Daemons) -> None:
    result = replay(daemons(), trace(2, 2), max_tokens=300)
    text = shown(result)
    assert "4 turns of 2 sessions" in text and "tokens scaled by 0.5" in text and "100.0%" in text
    assert "attempts: 4 ok\n" in text and "Every ingested byte is what D made." in text
    assert "2 ingests had a byte that D did not make" in shown(msgspec.structs.replace(result, corrupt=2))
    empty = msgspec.structs.replace(result, attempts=0, reasons={}, token_scale=1.0, bytes=0)
    assert "Nothing was ingested" in shown(empty) and "Every ingested byte" not in shown(empty)
    assert "100.0%" not in shown(empty) and "attempts:" not in shown(empty) and "scaled" not in shown(empty)
    line = progress_line(LiveProgress(3, 12, 2, 3 * MIB, 17.0))
    assert line == "3 of 12 turns, 2 ok, 3 MiB ingested, at most 17 ms late"


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_says_it_and_its_status_is_one_when_a_byte_was_wrong(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    options = LiveOptions(socket_path=str(daemons().socket_path))
    assert replay_live(trace(1, 2), options, as_json=as_json) == 0
    out = capsys.readouterr().out
    assert msgspec.json.decode(out)["corrupt"] == 0 if as_json else "Every ingested byte" in out
    right = livekv.KvContent.words

    def words(self: livekv.KvContent, session: int, rank: int, tokens: Any, out: Any = None) -> Any:
        made = right(self, session, rank, tokens, out)
        return made if out is None else made.add_(1)

    monkeypatch.setattr(livekv.KvContent, "words", words)
    assert replay_live(trace(1, 2), options, as_json=as_json) == 1
    out = capsys.readouterr().out
    assert msgspec.json.decode(out)["corrupt"] == 2 if as_json else "2 ingests had a byte" in out

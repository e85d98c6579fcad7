"""Check that D's KV gets into SGLang's tree on P however full P's kv_pool is.

A real daemon, and SGLang's real pools, allocators and trees on the CPU; no model and no server. For every
combination of pool, tree and page size:

1. P's kv_pool is full of P's own work.
2. D pushes sessions out of its tree. None may be refused: that P is full is nothing to the snapshot buffer.
3. P tries to finalize one all the same. It is refused, and the snapshot stays READY.
4. Half of P's work ends, and P finalizes the first half of the sessions.
5. Prompts that P has cached take all the rest; to finalize the other half P evicts.
6. After each, every byte in P's tree is compared with D's.
7. A second turn of the last session goes over as a suffix.
8. On both sides every slot is free or in the tree, and the daemon's log has one outcome an attempt, all ok.

Run it with the interpreter of an environment that has SGLang: ``tools/setup_engine.sh sglang`` makes one.
Exit status: 0 all is well, 1 a check failed, 2 wrong usage, or SGLang cannot be imported here.
"""

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import msgspec
import structlog
import torch

from snapd import __version__
from snapd.client import Client
from snapd.core.events import State
from snapd.engines.sglang_inject import Injector
from snapd.engines.sglang_inject_push import SessionPushes
from snapd.engines.sglang_pools import DISTRIBUTIONS, TESTED_VERSIONS, sglang_module
from snapd.engines.support import check_version
from snapd.errors import Reason, SnapdError
from snapd.layout import Namespace
from snapd.units import MS_PER_S, align_down, format_bytes, format_ms
from snapd.wire import SnapshotFinalizeIngestReqInput
from tools.engines.torchvision_ops import declare_torchvision_ops

POOLS: Final = ("mha", "mla")
TREES: Final = ("radix", "unified-python", "unified-rust")
PAGE_SIZES: Final = ("1", "16")
SIZE_TOKENS: Final = 2_048
TURN_TOKENS: Final = 150
NEXT_TURN_TOKENS: Final = 90
PATIENCE_S: Final = 60.0
BUFFER_SIZE = "64MiB"
LOG_NAME: Final = "d-to-p-sync.jsonl"


class CheckFailed(Exception):
    """What was expected did not hold; the message says what."""


class Outcome(msgspec.Struct, kw_only=True):
    """What came of one combination.

    Attributes:
        pushed_while_full: pushes that succeeded while P had no free slot.
        syncs: attempts, and refusals, in the daemon's log.
        reasons: how they ended.
        ingested: snapshots that P inserted.
        evicted_tokens: what P's tree gave up for them.
        compared_bytes: bytes of P's tree that were D's.
        failure: what did not hold; empty: nothing.
    """

    pool: str
    tree: str
    page_size_tokens: int
    pushed_while_full: int = 0
    syncs: int = 0
    reasons: dict[str, int] = msgspec.field(default_factory=dict)
    ingested: int = 0
    evicted_tokens: int = 0
    compared_bytes: int = 0
    duration_ms: float = 0.0
    failure: str = ""


class Engine:
    """Slots and tree of one worker, without a scheduler.

    Attributes:
        allocator, tree: SGLang's.
    """

    def __init__(self, pool: str, tree: str, page_size_tokens: int) -> None:
        memory_pool = sglang_module("mem_cache.memory_pool")
        common = {
            "size": SIZE_TOKENS, "page_size": page_size_tokens, "dtype": torch.bfloat16, "layer_num": 4,
            "device": "cpu", "enable_memory_saver": False,
        }  # fmt: skip
        if pool == "mha":
            kv = memory_pool.MHATokenToKVPool(**common, head_num=2, head_dim=64)
        else:
            kv = memory_pool.MLATokenToKVPool(**common, kv_lora_rank=128, qk_rope_head_dim=64)
        allocators = sglang_module("mem_cache.allocator")
        if page_size_tokens == 1:
            self.allocator = allocators.TokenToKVPoolAllocator(SIZE_TOKENS, kv.dtype, "cpu", kv, False)
        else:
            self.allocator = allocators.PagedTokenToKVPoolAllocator(
                SIZE_TOKENS, page_size_tokens, kv.dtype, "cpu", kv, False
            )
        self.tree = self._make_tree(tree, memory_pool, page_size_tokens)
        self._page_size_tokens = page_size_tokens

    def _make_tree(self, kind: str, memory_pool: Any, page_size_tokens: int) -> Any:
        params = sglang_module("mem_cache.cache_init_params").CacheInitParams(
            disable=False,
            req_to_token_pool=memory_pool.ReqToTokenPool(
                size=8, max_context_len=SIZE_TOKENS, device="cpu", enable_memory_saver=False
            ),
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size_tokens,
        )
        if kind == "radix":
            return sglang_module("mem_cache.radix_cache").RadixCache(params)
        components = sglang_module("mem_cache.unified_cache.components")
        params.tree_components = (components.ComponentType.FULL,)
        params.tree_core_backend = kind.removeprefix("unified-")
        return sglang_module("mem_cache.unified_radix_cache").UnifiedRadixCache(params)

    @property
    def free_tokens(self) -> int:
        """Slots that nobody holds."""
        return int(self.allocator.available_size())

    def take(self, num_tokens: int) -> torch.Tensor:
        """Return slots for work of the engine's own; whole pages.

        Raises:
            CheckFailed: there are not as many.
        """
        slots: torch.Tensor | None = self.allocator.alloc(num_tokens)
        if slots is None:
            raise CheckFailed(f"the engine has no {num_tokens} slots for its own work")
        return slots

    def slots_of(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return where the tree holds *token_ids*, as far as it does."""
        params = sglang_module("mem_cache.base_prefix_cache")
        found = self.tree.match_prefix(params.MatchPrefixParams(key=self._key(token_ids)))
        slots: torch.Tensor = self.tree.path_device_indices(found.last_device_node)
        return slots[: found.device_prefix_len]

    def cache(self, token_ids: Sequence[int]) -> None:
        """Have *token_ids* computed by a request that has finished: they are in the tree, in whole pages."""
        params = sglang_module("mem_cache.base_prefix_cache")
        held = self.slots_of(token_ids)
        value = torch.cat((held, self.take(self._whole(len(token_ids)) - held.numel())))
        self.tree.insert(
            params.InsertParams(key=self._key(token_ids), value=value, prev_prefix_len=held.numel())
        )

    def check_books(self, who: str) -> None:
        """Check that every slot is free or in the tree.

        Raises:
            CheckFailed: some are not, or are both.
        """
        pinned = self.tree.protected_size()
        in_tree = self.tree.evictable_size() + pinned
        if pinned or self.free_tokens + in_tree != SIZE_TOKENS:
            raise CheckFailed(
                f"of {SIZE_TOKENS} slots {who} has {self.free_tokens} free and {in_tree} in its tree, "
                f"{pinned} of them pinned"
            )

    def _whole(self, num_tokens: int) -> int:
        return align_down(num_tokens, self._page_size_tokens)

    def _key(self, token_ids: Sequence[int]) -> Any:
        keys = sglang_module("mem_cache.radix_cache")
        return keys.RadixKey(array("q", token_ids[: self._whole(len(token_ids))]))


def tokens_of(session: int, num_tokens: int) -> tuple[int, ...]:
    """Return the tokens of a session; fewer are a prefix."""
    return tuple(10_000 * session + index for index in range(num_tokens))


class Check:
    """One combination: D, P and a daemon."""

    def __init__(self, outcome: Outcome, sessions: int, socket: Path) -> None:
        kind = (outcome.pool, outcome.tree, outcome.page_size_tokens)
        self._outcome = outcome
        self._sessions = sessions
        self._client = Client(str(socket), timeout_s=PATIENCE_S, name="smoke")
        namespace = Namespace(tenant="-".join(map(str, kind)))
        self._d, self._p = Engine(*kind), Engine(*kind)
        self._injector = Injector(self._client, 0, self._p.allocator, self._p.tree, namespace)
        self._pushes = SessionPushes(self._client, self._d.allocator, self._d.tree, namespace)
        for plane in self._pushes.pusher.pools[0].planes:
            plane.rows.random_(0, 256)
        self._handles: list[int] = []

    def run(self) -> None:
        """Do it all.

        Raises:
            CheckFailed: something did not hold.
        """
        work = [self._p.take(SIZE_TOKENS // 2) for _ in range(2)]
        self._expect(self._p.free_tokens == 0, "P's kv_pool was to be full")
        for session in range(self._sessions):
            self._push(session, TURN_TOKENS)
            self._outcome.pushed_while_full += 1
        self._finalize_in_vain()
        self._p.allocator.free(work.pop())
        half = self._sessions // 2
        for session in range(half):
            self._finalize(session, TURN_TOKENS)
        self._crowd()
        for session in range(half, self._sessions):
            self._finalize(session, TURN_TOKENS)
        self._next_turn(self._sessions - 1)
        self._p.allocator.free(work.pop())
        self._d.check_books("D")
        self._p.check_books("P")

    def close(self) -> None:
        """Let go of everything."""
        self._pushes.close()
        self._injector.close()
        self._client.close()

    def _push(self, session: int, num_tokens: int) -> None:
        self._d.cache(tokens_of(session, num_tokens))
        # The last token that was sampled has no KV.
        push = self._pushes.start(f"session-{session}", tokens_of(session, num_tokens + 1))
        until_s = time.monotonic() + PATIENCE_S
        while not push.done:
            self._expect(time.monotonic() < until_s, f"the push did not end within {PATIENCE_S} s")
            self._pushes.poll()
        result = push.result
        self._expect(result.ok, f"a push was refused: {result.reason} {result.detail}")
        del self._handles[session:]
        self._handles.append(result.slab_handle)

    def _finalize(self, session: int, num_tokens: int) -> None:
        token_ids = tokens_of(session, num_tokens)
        before_tokens = self._p.tree.evictable_size()
        output = self._answer(session, num_tokens)
        self._expect(output.ok, f"P did not ingest session {session}: {output.reason}")
        p_slots, d_slots = self._p.slots_of(token_ids), self._d.slots_of(token_ids)
        self._expect(len(p_slots) == len(d_slots) > 0, f"P holds {len(p_slots)} tokens and D {len(d_slots)}")
        planes = zip(self._injector.cache.pool.planes, self._pushes.pusher.pools[0].planes, strict=True)
        for p_plane, d_plane in planes:
            p_rows = p_plane.rows[p_slots]
            self._expect(torch.equal(p_rows, d_plane.rows[d_slots]), f"P's bytes of session {session} differ")
            self._outcome.compared_bytes += p_rows.numel()
        self._outcome.ingested += 1
        evicted_tokens = before_tokens + output.num_tokens - self._p.tree.evictable_size()
        self._outcome.evicted_tokens += max(0, evicted_tokens)

    def _finalize_in_vain(self) -> None:
        output = self._answer(0, TURN_TOKENS)
        self._expect(
            output.reason is Reason.ALLOC_FAILED_ON_FINALIZE,
            f"a full P answered {output.reason} to a finalize",
        )
        state = self._client.get(self._handles[0]).session.state
        self._expect(state is State.READY, f"the snapshot is {state} after P had no room for it")

    def _crowd(self) -> None:
        """Fill what is free with prompts that P has cached."""
        for number in itertools.count(self._sessions):
            num_tokens = min(self._p.free_tokens, TURN_TOKENS // 16 * 16)
            if num_tokens == 0:
                break
            self._p.cache(tokens_of(number, num_tokens))

    def _next_turn(self, session: int) -> None:
        num_tokens = TURN_TOKENS + NEXT_TURN_TOKENS
        self._push(session, num_tokens)
        view = self._client.get(self._handles[session]).session
        self._expect(view.token_start > 0, "the second turn was sent as a whole")
        self._finalize(session, num_tokens)

    def _answer(self, session: int, num_tokens: int) -> Any:
        return self._injector.finalize_ingest(
            SnapshotFinalizeIngestReqInput(
                session_id=f"session-{session}",
                token_ids=tokens_of(session, num_tokens),
                slab_handle=self._handles[session],
            )
        )

    def _expect(self, is_so: bool, what: str) -> None:
        if not is_so:
            raise CheckFailed(what)


@contextlib.contextmanager
def daemon(directory: Path) -> Iterator[Path]:
    """Run a daemon of its own and yield its socket.

    Raises:
        CheckFailed: it does not start.
    """
    socket = directory / "snapd.sock"
    command = [sys.executable, "-m", "snapd.cli.main", "serve", "--socket", str(socket)]
    command += ["--log", str(directory / LOG_NAME), "--set", f"size={BUFFER_SIZE}", "--set", "prefault=false"]
    stderr_path = directory / "stderr.txt"
    with stderr_path.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=Path(__file__).parent.parent, stderr=stderr)
    try:
        with Client(str(socket)) as client:
            until_s = time.monotonic() + PATIENCE_S
            while True:
                try:
                    client.connect()
                    break
                except SnapdError as error:
                    if process.poll() is not None or time.monotonic() > until_s:
                        said = stderr_path.read_text().splitlines() or [str(error)]
                        raise CheckFailed(f"the daemon does not start: {said[-1]}") from None
                    time.sleep(0.02)
        yield socket
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def outcomes(log_path: Path) -> Counter[str]:
    """Return how attempts ended, and what was refused, by reason."""
    events = [json.loads(line) for line in log_path.read_text().splitlines()]
    return Counter(event["reason"] for event in events if event["event"] in ("sync.outcome", "sync.refused"))


def examine(outcome: Outcome, sessions: int) -> None:
    """Run one combination against a daemon of its own, and fill in what came of it."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="snapd-smoke-") as directory:
        log_path = Path(directory) / LOG_NAME
        try:
            with (
                daemon(Path(directory)) as socket,
                contextlib.closing(Check(outcome, sessions, socket)) as check,
            ):
                check.run()
        except (CheckFailed, SnapdError) as error:
            outcome.failure = str(error)
        if log_path.exists():
            reasons = outcomes(log_path)
            outcome.reasons, outcome.syncs = dict(reasons), reasons.total()
            if not outcome.failure and reasons != {"ok": sessions + 1}:
                outcome.failure = f"{sessions + 1} attempts were to end ok, and the log has {dict(reasons)}"
    outcome.duration_ms = (time.monotonic() - started_s) * MS_PER_S


COLUMNS: Final[tuple[tuple[str, Callable[[Outcome], str]], ...]] = (
    ("kv_pool", lambda x: x.pool),
    ("tree", lambda x: x.tree),
    ("page", lambda x: str(x.page_size_tokens)),
    ("pushed with P full", lambda x: str(x.pushed_while_full)),
    ("ingested", lambda x: str(x.ingested)),
    ("alloc-failed", lambda x: str(x.reasons.get("alloc-failed", 0))),
    ("evicted tokens", lambda x: str(x.evicted_tokens)),
    ("bytes compared", lambda x: format_bytes(x.compared_bytes)),
    ("time", lambda x: format_ms(x.duration_ms)),
    ("", lambda x: f"FAILED: {x.failure}" if x.failure else "ok"),
)


def report(rows: Sequence[Outcome], version: str) -> str:
    """Return the report for a person."""
    table = [[name for name, _ in COLUMNS], *([cell(row) for _, cell in COLUMNS] for row in rows)]
    widths = [max(len(line[index]) for line in table) for index in range(len(COLUMNS))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in table]
    syncs, ok = sum(row.syncs for row in rows), sum(row.reasons.get("ok", 0) for row in rows)
    failed = sum(bool(row.failure) for row in rows)
    return "\n".join([
        f"SGLang {version}, snapd {__version__}, torch {torch.__version__}",
        *("  ".join(line).rstrip() for line in padded),
        f"{len(rows) - failed} of {len(rows)} combinations are well; {syncs} syncs, {ok} ok",
    ])  # fmt: skip


@click.command(help=(__doc__ or "").replace("\n\n", "\n\n\b\n"))
@click.option("--pool", "pools", type=click.Choice(POOLS), multiple=True, help="Only this kind of kv_pool.")
@click.option("--tree", "trees", type=click.Choice(TREES), multiple=True, help="Only this kind of tree.")
@click.option("--page-size", "pages", type=click.Choice(PAGE_SIZES), multiple=True, help="Only this one.")
@click.option("--sessions", type=click.IntRange(2, 8), default=6, show_default=True, help="How many.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    pools: tuple[str, ...], trees: tuple[str, ...], pages: tuple[str, ...], sessions: int, as_json: bool
) -> None:
    """Run it."""
    # stdout is for the report.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    declare_torchvision_ops()
    try:
        with warnings.catch_warnings():
            # SGLang names the kinds of GPU that it cannot use here.
            warnings.simplefilter("ignore")
            sglang_module("mem_cache.unified_radix_cache")
    except SnapdError as error:
        click.echo(f"{error}\nMake an environment with it: tools/setup_engine.sh sglang", err=True)
        sys.exit(2)
    version = check_version("SGLang", DISTRIBUTIONS, TESTED_VERSIONS)
    kinds = itertools.product(pools or POOLS, trees or TREES, pages or PAGE_SIZES)
    rows = [Outcome(pool=pool, tree=tree, page_size_tokens=int(page)) for pool, tree, page in kinds]
    for row in rows:
        examine(row, sessions)
    is_well = not any(row.failure for row in rows)
    if as_json:
        facts = {"sglang": version, "snapd": __version__, "torch": torch.__version__, "ok": is_well}
        click.echo(json.dumps({**facts, "combinations": msgspec.to_builtins(rows)}, indent=2))
    else:
        click.echo(report(rows, version))
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()

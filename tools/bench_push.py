"""Measure a push into the arena and an ingest out of it, against the floor of the same bytes.

Starts a daemon of its own with one host arena, for each transport. Over shm every round does, one
after another: a memcpy of the snapshot's bytes; a push of planes that were gathered before (prepare,
writes, commit); a push out of a kv_pool with random slots (gather and checksums on the way); an ingest
into another kv_pool with random slots (scatter and verify). Over Mooncake (TCP on loopback): one raw
write of the snapshot's bytes, one descriptor, into the arena; then a whole push out of a kv_pool with
random slots, from prepare to commit. Figures are medians over the rounds; ratios are the floor's time
over the other's, so 1.0 is the speed of a memcpy, or of a raw write.
"""

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec
import torch

from snapd.client import Client
from snapd.kv.checksum import plane_checksum
from snapd.kv.copy import gather
from snapd.kv.ingest import Ingester
from snapd.kv.pool import KVPool
from snapd.kv.push import Pusher
from snapd.layout import Namespace, plane_offsets_bytes
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import Write
from snapd.transport.mooncake_engine import MooncakeEngine, WriteState
from snapd.units import MIB, MS_PER_S, align_up, ceil_div

PAGE_SIZE_TOKENS = 16
# The daemon's default.
ALIGNMENT_BYTES = 256


class Owner:
    """Slots of a pool that holds nothing else; the tree is left out, as it costs no bytes."""

    def __init__(self, slots: torch.Tensor) -> None:
        self._slots = slots

    def lock_prefix(self, session_id: str, token_ids: Sequence[int]) -> int:
        """Nothing is resident."""
        del session_id, token_ids
        return 0

    def unlock_prefix(self, session_id: str) -> None:
        """Nothing is pinned."""

    def allocate(self, num_tokens: int) -> torch.Tensor | None:
        """Return the first slots."""
        return self._slots[:num_tokens]

    def free(self, slots: torch.Tensor) -> None:
        """Nothing to do."""

    def insert(
        self, session_id: str, token_ids: Sequence[int], resident_tokens: int, slots: torch.Tensor
    ) -> None:
        """Nothing to do."""


def make_pool(layers: int, heads: int, dim: int, num_slots: int) -> KVPool:
    """Return a pool of random bytes."""

    def buffers() -> list[torch.Tensor]:
        shape = (num_slots, heads, dim)
        return [
            torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
            for _ in range(layers)
        ]

    return KVPool.mha(buffers(), buffers(), PAGE_SIZE_TOKENS)


def random_slots(num_tokens: int, seed: int) -> torch.Tensor:
    """Return whole pages in random order."""
    pages = torch.randperm(num_tokens // PAGE_SIZE_TOKENS, generator=torch.Generator().manual_seed(seed))
    return (pages[:, None] * PAGE_SIZE_TOKENS + torch.arange(PAGE_SIZE_TOKENS)).flatten()


def timed_s(started_s: float) -> float:
    """Return the seconds since *started_s*."""
    return time.perf_counter() - started_s


def measure(socket: Path, mib: int, rounds: int, layers: int, heads: int, dim: int) -> dict[str, float]:
    """Run the rounds and return the figures."""
    token_bytes = 2 * layers * heads * dim * 2
    num_tokens = align_up(ceil_div(mib * MIB, token_bytes), PAGE_SIZE_TOKENS)
    num_bytes = num_tokens * token_bytes
    d_pool, p_pool = (make_pool(layers, heads, dim, num_tokens) for _ in range(2))
    d_slots, p_slots = random_slots(num_tokens, 1), random_slots(num_tokens, 2)
    token_ids = tuple(range(num_tokens))
    # D's staging buffer: planes as a contiguous slab has them.
    *offsets, staging_bytes = plane_offsets_bytes(d_pool.layout(Namespace()), num_tokens, ALIGNMENT_BYTES)
    staging = torch.empty(staging_bytes, dtype=torch.uint8)
    planes = [
        staging[offset : offset + plane.stride_bytes * num_tokens]
        for offset, plane in zip(offsets, d_pool.planes, strict=True)
    ]
    gather(d_pool, d_slots, planes)
    sums = [plane_checksum(plane) for plane in planes]
    source = torch.cat(planes)
    target = torch.zeros_like(source)
    seconds: dict[str, list[float]] = {
        name: [] for name in ("memcpy", "push_gathered", "push", "gather", "ingest", "scatter")
    }
    with Client(str(socket), timeout_s=60) as d, Client(str(socket), timeout_s=60) as p:
        ingester = Ingester(p, 0, p_pool, Owner(p_slots))
        pusher = Pusher(d, {0: d_pool}, send_page_keys=False)
        for number in range(rounds + 1):
            started_s = time.perf_counter()
            ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)
            memcpy_s = timed_s(started_s)

            started_s = time.perf_counter()
            gathered = pusher.push_planes(f"gathered-{number}", token_ids, {0: planes}, {0: sums})
            gathered_s = timed_s(started_s)
            assert gathered.ok, gathered
            d.abort(gathered.slab_handle)

            started_s = time.perf_counter()
            pushed = pusher.push(f"pushed-{number}", token_ids, d_slots)
            pushed_s = timed_s(started_s)
            assert pushed.ok, pushed

            started_s = time.perf_counter()
            job = ingester.start(f"pushed-{number}", token_ids, pushed.slab_handle)
            while not job.step(64 * MIB):
                job.wait()
            ingested_s = timed_s(started_s)
            assert job.result.ok, job.result
            if number == 0:
                continue  # The first round maps and warms.
            seconds["memcpy"].append(memcpy_s)
            seconds["push_gathered"].append(gathered_s)
            seconds["push"].append(pushed_s)
            seconds["gather"].append(pushed.gather_ms / MS_PER_S)
            seconds["ingest"].append(ingested_s)
            seconds["scatter"].append(job.times.scatter_ms / MS_PER_S)
    check = [torch.empty_like(plane) for plane in planes]
    assert gather(p_pool, p_slots, check) == tuple(sums), "P holds other bytes than D"
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    memcpy_s = medians["memcpy"]
    return {
        "bytes": num_bytes,
        "num_tokens": num_tokens,
        "rounds": rounds,
        "memcpy_gb_per_s": num_bytes / memcpy_s / 1e9,
        "shm_over_memcpy": statistics.median(
            floor / value for floor, value in zip(seconds["memcpy"], seconds["push_gathered"], strict=True)
        ),
        "push_over_memcpy": memcpy_s / medians["push"],
        "gather_over_memcpy": memcpy_s / medians["gather"],
        "gather_share_of_push": medians["gather"] / medians["push"],
        "ingest_over_memcpy": memcpy_s / medians["ingest"],
        "scatter_over_memcpy": memcpy_s / medians["scatter"],
        "scatter_share_of_ingest": medians["scatter"] / medians["ingest"],
        **{f"{name}_ms": value * 1e3 for name, value in medians.items()},
    }


def raw_write_s(engine: MooncakeEngine, segment_name: str, write: Write) -> float:
    """Return how long one write takes, with nothing around it."""
    started_s = time.perf_counter()
    batch_id = engine.submit(segment_name, write)
    while (state := engine.check(batch_id)) is WriteState.RUNNING:
        time.sleep(0.0001)
    assert state is WriteState.DONE, state
    return timed_s(started_s)


def measure_mooncake(
    socket: Path, mib: int, rounds: int, layers: int, heads: int, dim: int
) -> dict[str, float]:
    """Run the rounds over Mooncake and return the figures."""
    token_bytes = 2 * layers * heads * dim * 2
    num_tokens = align_up(ceil_div(mib * MIB, token_bytes), PAGE_SIZE_TOKENS)
    num_bytes = num_tokens * token_bytes
    d_pool = make_pool(layers, heads, dim, num_tokens)
    d_slots = random_slots(num_tokens, 1)
    token_ids = tuple(range(num_tokens))
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    engine = MooncakeEngine(MooncakeConfig())
    engine.register(source.data_ptr(), num_bytes)
    raw_s: list[float] = []
    pushed_s: list[float] = []
    with Client(str(socket), timeout_s=60) as client:
        pusher = Pusher(client, {0: d_pool}, send_page_keys=False)
        client.declare_layout(0, pusher.layout)
        segment_name = client.connect().transport_address
        for number in range(rounds + 1):
            grant = client.prepare_receive(f"raw-{number}", num_tokens, pusher.layout_fingerprint)
            rank = grant.for_rank(0)
            target_ptr = rank.snapshot_buf_base_ptr + rank.extents[0].offset_bytes
            raw = raw_write_s(engine, segment_name, Write(source.data_ptr(), target_ptr, num_bytes))
            client.abort(grant.slab_handle, drained=True)

            started_s = time.perf_counter()
            result = pusher.push(f"pushed-{number}", token_ids, d_slots)
            pushed = timed_s(started_s)
            assert result.ok, result
            client.abort(result.slab_handle)
            if number:  # The first round connects and warms.
                raw_s.append(raw)
                pushed_s.append(pushed)
        pusher.close()
    return {
        "mooncake_over_raw": statistics.median(
            floor / value for floor, value in zip(raw_s, pushed_s, strict=True)
        ),
        "mooncake_raw_gb_per_s": num_bytes / statistics.median(raw_s) / 1e9,
        "mooncake_push_gb_per_s": num_bytes / statistics.median(pushed_s) / 1e9,
    }


def run_daemon(
    transport: str,
    mib: int,
    measure_it: Callable[[Path], dict[str, float]],
) -> dict[str, float]:
    """Start a daemon, measure, and end it."""
    with tempfile.TemporaryDirectory() as directory:
        socket = Path(directory) / "snapd.sock"
        # Twice the snapshot and some padding: the one that was aborted is gone when the next comes.
        command = [
            sys.executable, "-m", "snapd.cli.main", "serve", "--socket", str(socket),
            "--size", f"{mib * 2 + 64}MiB", "--set", "lease_ms=60000", "--transport", transport,
            "--log", str(Path(directory) / "d-to-p-sync.jsonl"),
        ]  # fmt: skip
        daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            with Client(str(socket), timeout_s=60) as client:
                client.connect(wait_s=60)
            return measure_it(socket)
        finally:
            daemon.terminate()
            daemon.wait(30)


@click.command(help=__doc__)
@click.option("--mib", default=1024, show_default=True, help="Payload of the snapshot, MiB.")
@click.option("--rounds", default=7, show_default=True, help="Rounds that count; one more warms up.")
@click.option("--layers", default=48, show_default=True)
@click.option("--heads", default=4, show_default=True, help="KV heads.")
@click.option("--dim", default=128, show_default=True, help="Head dimension; elements have 2 bytes.")
@click.option(
    "--transport", type=click.Choice(["shm", "mooncake", "both"]), default="both", show_default=True
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(mib: int, rounds: int, layers: int, heads: int, dim: int, transport: str, as_json: bool) -> None:
    """Start a daemon for each transport, measure, print."""
    figures: dict[str, float] = {}
    if transport in ("shm", "both"):
        figures |= run_daemon("shm", mib, lambda at: measure(at, mib, rounds, layers, heads, dim))
    if transport in ("mooncake", "both"):
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        figures |= run_daemon(
            "mooncake", mib, lambda at: measure_mooncake(at, mib, rounds, layers, heads, dim)
        )
    if as_json:
        click.echo(msgspec.json.encode(figures).decode())
        return
    for name, value in figures.items():
        click.echo(f"{name:26} {value:14.3f}" if isinstance(value, float) else f"{name:26} {value:14,}")


if __name__ == "__main__":
    main()

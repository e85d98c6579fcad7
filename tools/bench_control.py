"""Measure the control plane: a real daemon in a process of its own, over its real socket.

Every figure that is wanted is a ratio within one run, or the daemon's own core-seconds. Cases take turns in
rounds, so that a slow moment of the machine hits them all alike, and medians over the rounds are shown.

* roundtrip: prepare_receive by one client that waits for each reply, against a bare uvloop + msgspec server
  that decodes the same request and encodes the same grant, and against pyzmq REQ/REP with pickle. Client and
  server have a core each; ``_one_core``: they share one.
* lives: prepare, start, commit, begin, vote, every record logged, over several pipelined connections.
* live: prepare_receive with 100,000 live sessions against 100.
* stalls: how late the daemon's loop comes to a tick of 1 ms: idle, while 1 GiB is pushed, while it logs and
  rotates.
* micro: allocator and eviction at 100 to 100,000 live slabs, in this process.
"""

import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import click
import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))
from snapd import wire as w
from snapd.core.events import State
from snapd.units import MIB, NS_PER_MS
from tools import control_load as load
from tools.control_floors import BARE, ZMQ, ZmqClient
from tools.control_micro import eviction_us

WANTED: Final[dict[str, tuple[str, float]]] = {
    "roundtrip_p50_over_echo": ("at most", 1.5),
    "roundtrip_p50_over_zmq_pickle": ("at most", 1.0),
    "lives_per_s": ("at least", 5_000),
    "p50_100k_over_100": ("at most", 1.2),
    "log_cost": ("at least", 0.85),
}
# What a figure has behind its name when it is of the compiled daemon, or of client and server on one core.
_COMPILED: Final = "_compiled"
_ONE_CORE: Final = "_one_core"
_READY_TTL_MS: Final = 7_200_000


def p50(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def timed(samples: int, ask: Callable[[], object], after: Callable[[], object]) -> list[float]:
    """Return what each of so many asks took, in us; what comes *after* each is not timed."""
    taken_us = []
    for _ in range(samples):
        started_ns = time.perf_counter_ns()
        ask()
        taken_us.append((time.perf_counter_ns() - started_ns) / 1_000)
        after()
    return taken_us


class Asker:
    """One client that waits for each reply: prepares, and ends what was prepared."""

    def __init__(self, socket_path: str, lives: load.Lives) -> None:
        self._lives = lives
        self._wire = load.Wire(socket_path)
        self._wire.ask(w.HelloReq(id=1, client="bench"))
        self._handle = 0

    def prepare(self) -> None:
        """One prepare_receive, encoding and decoding included."""
        self._handle = self._wire.one(self._lives.prepare(1), w.SnapshotPrepareReceiveReqOutput).slab_handle

    def abort(self) -> None:
        """End it, with drain proof, so that nothing piles up."""
        self._wire.ask(w.AbortReq(id=2, slab_handle=self._handle, drained=True))


def roundtrips(scratch: Path, rounds: int, samples: int, site: Path | None) -> dict[str, Any]:
    """Measure prepare_receive against the two floors, with client and server on two cores, and on one."""
    with ExitStack() as stack:
        daemons = {"daemon": stack.enter_context(load.Daemon(scratch / "roundtrip"))}
        if site is not None:
            daemons["compiled"] = stack.enter_context(load.Daemon(scratch / "compiled", site=site))
        cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
        pids = {name: daemon.pid for name, daemon in daemons.items()}
        for name, daemon in daemons.items():
            lives = stack.enter_context(load.loaded(daemon, connections=1))
            asker = Asker(daemon.socket_path, lives)
            cases[name] = (asker.prepare, asker.abort)
        grant = load.Wire(daemons["daemon"].socket_path).one(
            lives.prepare(1), w.SnapshotPrepareReceiveReqOutput
        )
        (scratch / "grant").write_bytes(msgspec.msgpack.encode(grant))
        bare_path = str(scratch / "bare.sock")
        bare_process = load.start_process(BARE, bare_path, str(scratch / "grant"))
        stack.callback(load.end_process, bare_process)
        load.wait_until(lambda: Path(bare_path).exists(), bare_process)
        bare = load.Wire(bare_path)
        endpoint = f"ipc://{scratch / 'zmq.sock'}"
        zmq_process = load.start_process(ZMQ, endpoint, str(scratch / "grant"))
        stack.callback(load.end_process, zmq_process)
        zmq = ZmqClient(endpoint)
        stack.callback(zmq.close)
        cases["bare"] = (
            lambda: bare.one(lives.prepare(1), w.SnapshotPrepareReceiveReqOutput),
            lambda: bare.ask(w.PingReq(id=2)),
        )
        cases["zmq_pickle"] = (lambda: zmq.ask(lives.prepare(1)), lambda: zmq.ask(w.PingReq(id=2)))
        pids |= {"bare": bare_process.pid, "zmq_pickle": zmq_process.pid}
        report: dict[str, Any] = {}
        cores = sorted(os.sched_getaffinity(0))
        stack.callback(os.sched_setaffinity, 0, cores)
        # Left alone, the scheduler puts client and server on one core or on two, as it happens, for as long
        # as they live: two cases of one run would not be alike. Two cores are what D and the daemon have.
        for suffix, server_core in (("", cores[-1]), (_ONE_CORE, cores[0])):
            load.pin(os.getpid(), cores[0])
            for pid in pids.values():
                load.pin(pid, server_core)
            report |= _in_turns(cases, rounds, samples, suffix)
    return report


def _in_turns(
    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]],
    rounds: int,
    samples: int,
    suffix: str,
) -> dict[str, Any]:
    """Return the figures of cases that take turns; *suffix* goes behind their names."""
    p50_us: dict[str, list[float]] = {name: [] for name in cases}
    p99_us: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, (ask, after) in cases.items():
            taken_us = timed(samples, ask, after)
            if number:
                p50_us[name].append(p50(taken_us))
                p99_us[name].append(statistics.quantiles(taken_us, n=100)[98])
    report: dict[str, Any] = {}
    floors = (("bare", "roundtrip_p50_over_echo"), ("zmq_pickle", "roundtrip_p50_over_zmq_pickle"))
    for name, of in (("daemon", ""), ("compiled", _COMPILED)):
        if name in cases:
            for floor, figure in floors:
                ratios = [a / b for a, b in zip(p50_us[name], p50_us[floor], strict=True)]
                key = f"{figure}{of}{suffix}"
                report |= {key: p50(ratios), f"{key}_range": f"{min(ratios):.2f} to {max(ratios):.2f}"}
    report |= {f"roundtrip_p50_us_{name}{suffix}": p50(taken) for name, taken in p50_us.items()}
    report |= {f"roundtrip_p99_us_{name}{suffix}": p50(taken) for name, taken in p99_us.items()}
    return report


def lives(scratch: Path, rounds: int, count: int, site: Path | None) -> dict[str, Any]:
    """Measure whole lives, with the log and without."""
    with ExitStack() as stack:
        daemons: dict[str, load.Daemon] = {}
        for of, path in (("", None), (_COMPILED, site)) if site else (("", None),):
            for name, program in ((f"log{of}", load.PLAIN), (f"no_log{of}", load.NO_LOG)):
                daemons[name] = stack.enter_context(load.Daemon(scratch / name, program, site=path))
        loads = {name: stack.enter_context(load.loaded(daemon)) for name, daemon in daemons.items()}
        # Until the history of ended attempts is full, every life takes more memory than the one before.
        for warming in loads.values():
            warming.run(12_000)
        costs: dict[str, list[load.Cost]] = {name: [] for name in daemons}
        for _ in range(rounds):
            for name, daemon in daemons.items():
                costs[name].append(load.time_lives(daemon, loads[name], count))
        single = stack.enter_context(load.loaded(daemons["log"], connections=1, batch=1))
        one_by_one = load.time_lives(daemons["log"], single, count // 4)
    report: dict[str, Any] = {}
    for of in ("", _COMPILED) if site else ("",):
        logged, silent = costs[f"log{of}"], costs[f"no_log{of}"]
        per_s = [cost.per_cpu_s for cost in logged]
        pairs = list(zip(logged, silent, strict=True))
        ratios = [a.per_cpu_s / b.per_cpu_s for a, b in pairs]
        figures: dict[str, float | str] = {
            "lives_per_s": p50(per_s),
            "lives_per_s_range": f"{min(per_s):,.0f} to {max(per_s):,.0f}",
            "lives_per_wall_s": p50([cost.per_wall_s for cost in logged]),
            "lives_per_s_no_log": p50([cost.per_cpu_s for cost in silent]),
            "lives_per_wall_s_no_log": p50([cost.per_wall_s for cost in silent]),
            "log_cost": p50(ratios),
            "log_cost_range": f"{min(ratios):.2f} to {max(ratios):.2f}",
            "log_cost_wall": p50([a.per_wall_s / b.per_wall_s for a, b in pairs]),
            "log_us_per_life": p50([1e6 / a.per_cpu_s - 1e6 / b.per_cpu_s for a, b in pairs]),
        }
        report |= {f"{name}{of}": figure for name, figure in figures.items()}
    return report | {
        "lives_per_s_one_by_one": one_by_one.per_cpu_s,
        "lives_per_wall_s_one_by_one": one_by_one.per_wall_s,
    }


def many_live(scratch: Path, rounds: int, samples: int, most: int) -> dict[str, Any]:
    """Measure prepare_receive with few and with many READY sessions, and the calls that look at all."""
    settings = {
        "sessions_max": most + 1_000, "session_history_max": most + 1_000, "ready_ttl_ms": _READY_TTL_MS,
    }  # fmt: skip
    with ExitStack() as stack:
        askers: dict[int, Asker] = {}
        pids: list[int] = []
        looks_ms: dict[str, float] = {}
        for count in (100, most):
            daemon = stack.enter_context(load.Daemon(scratch / f"live{count}", load.PLAIN, settings))
            pids.append(daemon.pid)
            filler = stack.enter_context(load.loaded(daemon, load.THIN_LAYOUT, num_tokens=1, connections=1))
            filler.fill(count)
            askers[count] = Asker(daemon.socket_path, filler)
            looker = load.Wire(daemon.socket_path)
            looks: dict[str, w.Request] = {
                "stats": w.StatsReq(id=1),
                "list_last_page": w.ListReq(id=1, offset=count - 50, limit=50),
                "list_ready_last_page": w.ListReq(id=1, states=(State.READY,), offset=count - 50, limit=50),
                "list_session": w.ListReq(id=1, session_id="none"),
            }
            for name, request in looks.items():
                ask = functools.partial(looker.ask, request)
                taken_us = timed(20, ask, lambda: None)
                looks_ms[f"{name}_ms_at_{count}"] = p50(taken_us) / 1_000
        cores = sorted(os.sched_getaffinity(0))
        stack.callback(os.sched_setaffinity, 0, cores)
        load.pin(os.getpid(), cores[0])
        for pid in pids:
            load.pin(pid, cores[-1])
        p50_us: dict[int, list[float]] = {count: [] for count in askers}
        for number in range(rounds + 1):
            for count, asker in askers.items():
                taken_us = timed(samples, asker.prepare, asker.abort)
                if number:
                    p50_us[count].append(p50(taken_us))
    few, many = p50_us.values()
    return {
        "p50_100k_over_100": p50([a / b for a, b in zip(many, few, strict=True)]),
        **{f"prepare_p50_us_at_{count}": p50(taken) for count, taken in p50_us.items()},
        **looks_ms,
    }


def stalls(scratch: Path, seconds: float, push_mib: int) -> dict[str, Any]:
    """Measure how late the loop comes to its ticks."""

    def summary(late_ns: list[int]) -> dict[str, float]:
        late_ms = sorted(late / NS_PER_MS for late in late_ns)
        return {
            "ticks": len(late_ms),
            "p50_ms": p50(late_ms),
            "p99.9_ms": late_ms[min(len(late_ms) - 1, int(len(late_ms) * 0.999))],
            "max_ms": late_ms[-1],
        }

    def busy(daemon: load.Daemon) -> dict[str, float]:
        """Look at the loop while lives go on and the log rotates."""
        with load.loaded(daemon) as lives:
            lives.run(12_000)
            before = lives.rotations()
            daemon.probe()
            deadline_s = time.monotonic() + seconds
            done = 0
            while time.monotonic() < deadline_s:
                done += lives.run(200)
            late = summary(daemon.late_ns())
            return late | {"lives": done, "rotations": lives.rotations() - before}

    report: dict[str, Any] = {}
    rotated = {"log_rotate_bytes": MIB, "log_rotate_keep": 4}
    with load.Daemon(scratch / "stalls", load.PROBED, rotated) as daemon:
        daemon.probe()
        time.sleep(seconds)
        report["idle"] = summary(daemon.late_ns())
        pusher = load.start_process(load.PUSHER, daemon.socket_path, str(push_mib), stdout=subprocess.PIPE)
        assert pusher.stdout is not None
        pusher.stdout.readline()  # It is connected, and its memory is there.
        daemon.probe()
        assert pusher.stdin is not None
        pusher.stdin.write(b"go\n")
        pusher.stdin.flush()
        pushed = json.loads(pusher.stdout.readline())
        report["push"] = summary(daemon.late_ns()) | pushed
        load.end_process(pusher)
        report["rotate"] = busy(daemon)
    return report


def machine_facts() -> dict[str, Any]:
    """Return where and when this ran."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    return {
        "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


@click.command()
@click.option("--rounds", default=9, show_default=True, help="Rounds; every case once in each.")
@click.option("--samples", default=300, show_default=True, help="Round trips of each case in a round.")
@click.option("--lives", "num_lives", default=2_000, show_default=True, help="Lives of each case in a round.")
@click.option("--most", default=100_000, show_default=True, help="Live sessions of the large case.")
@click.option("--seconds", default=3.0, show_default=True, help="Of each look at the loop's stalls.")
@click.option("--only", multiple=True, type=click.Choice(["roundtrip", "lives", "live", "stalls", "micro"]),
              help="Only these; may be repeated.")  # fmt: skip
@click.option("--compiled", "site", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Measure the daemon there too: DIRECTORY/site of tools/compiled.py.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    rounds: int,
    samples: int,
    num_lives: int,
    most: int,
    seconds: float,
    only: tuple[str, ...],
    site: Path | None,
    as_json: bool,
) -> None:
    """Measure the control plane of the daemon."""
    figures: dict[str, Any] = machine_facts()
    with tempfile.TemporaryDirectory(prefix="snapd-bench-") as directory:
        scratch = Path(directory)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "roundtrip": lambda: roundtrips(scratch, rounds, samples, site and site.resolve()),
            "lives": lambda: lives(scratch, rounds, num_lives, site and site.resolve()),
            "live": lambda: many_live(scratch, rounds, samples, most),
            "stalls": lambda: {"stalls": stalls(scratch, seconds, 1024)},
            "micro": lambda: {"eviction_us": eviction_us(most)},
        }
        for name, part in parts.items():
            if not only or name in only:
                figures |= part()
    figures["load_average_after"] = os.getloadavg()[0]
    if as_json:
        click.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        if isinstance(value, dict):
            click.echo(name)
            for inner, found in value.items():
                click.echo(f"  {inner:30} {found}")
        elif (wanted := WANTED.get(name.replace(_COMPILED, "").replace(_ONE_CORE, ""))) is not None:
            word, bound = wanted
            is_met = value <= bound if word == "at most" else value >= bound
            click.echo(f"{name:40} {value:>12,.3f}   wanted {word} {bound:g}: {'yes' if is_met else 'NO'}")
        else:
            click.echo(f"{name:40} {value:>12,.3f}" if isinstance(value, float) else f"{name:40} {value}")


if __name__ == "__main__":
    main()

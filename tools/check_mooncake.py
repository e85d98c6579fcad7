"""Check Mooncake between two processes of this machine, and measure what a write costs.

One process offers memory, on a GPU or not, as the daemon does; this one writes into it with the writer
that D uses. With two GPUs everything is done twice: inside GPU 0, and from GPU 0 to GPU 1. Facts that
the daemon relies on are checked; any that does not hold is printed and ends with status 1:

* a write that is done has landed, at once and whole, and nothing else has changed;
* writes outside the arena, and outside what was registered, are refused or fail;
* a cancelled ticket ends, and what it had not begun does not land;
* the exit of the writing process is drain proof (nvlink_intra): nothing lands after it;
* a target that is killed fails the writes soon, and its successor is reached from this same process.

Speeds are bytes over wall time, from the first submit to the last final state, beside a plain device copy
of the same bytes. Run it where Mooncake and torch are installed; it needs no network.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import click
import msgspec
import torch

from snapd.errors import SnapdError, TransportError
from snapd.mooncakeconfig import MooncakeConfig
from snapd.transport.base import Progress, TicketState, Write
from snapd.transport.mooncake_engine import MooncakeEngine
from snapd.transport.mooncake_engines import MooncakeEngines
from snapd.transport.mooncake_writer import MooncakeWriter
from snapd.units import MIB, MS_PER_S, format_bytes, parse_size_bytes

PATIENCE_S: Final = 60.0
FILL: Final = 0x5A
_WORD_BYTES: Final = 8


def config_of(protocol: str) -> MooncakeConfig:
    """Return the settings for a protocol."""
    return msgspec.convert({"protocol": protocol}, MooncakeConfig)


# --- the process that offers memory ------------------------------------------------------------


def serve_target(protocol: str, device: str, size_bytes: int) -> None:
    """Offer memory, say where it is, and answer questions about it until stdin ends."""
    if device != "cpu":
        # Mooncake asks the current device for the range.
        torch.cuda.set_device(device)
    memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    engine = MooncakeEngine(config_of(protocol))
    engine.register(memory.data_ptr(), size_bytes)
    words = memory.view(torch.int64)

    def say(answer: object) -> None:
        sys.stdout.write(f"= {msgspec.json.encode(answer).decode()}\n")
        sys.stdout.flush()

    say([engine.segment_name, memory.data_ptr()])
    for line in sys.stdin:
        match line.split():
            case ["sum", start, stop]:
                say(summed(words[int(start) // _WORD_BYTES : int(stop) // _WORD_BYTES]))
            case ["fill", value]:
                memory.fill_(int(value))
                if device != "cpu":
                    torch.cuda.synchronize()
                say(True)


def summed(words: torch.Tensor) -> tuple[int, int]:
    """Return the sum of int64 words and the position-weighted one, mod 2^64."""
    sum0 = sum1 = 0
    for at, part in enumerate(torch.split(words, 32 * MIB)):
        positions = torch.arange(1, part.numel() + 1, device=part.device) + at * 32 * MIB
        sum0 += int(part.sum())
        sum1 += int((part * positions).sum())
    return sum0 % 2**64, sum1 % 2**64


def myself(role: str, protocol: str, device: str, size_bytes: int) -> list[str]:
    """Return the command of another process of this script."""
    options = ("--protocol", protocol, "--device", device, "--bytes", str(size_bytes))
    return [sys.executable, __file__, role, *options]


class Target:
    """The offering process, seen from here."""

    def __init__(self, protocol: str, device: str, size_bytes: int) -> None:
        self.process = subprocess.Popen(
            myself("--target", protocol, device, size_bytes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.size_bytes = size_bytes
        self.segment_name, self.base_ptr = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("= "):
                return msgspec.json.decode(line[2:])
        raise SnapdError(f"the offering process ended with {self.process.wait()}")

    def ask(self, question: str) -> Any:
        """Ask, and wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{question}\n")
        self.process.stdin.flush()
        return self._answer()

    def sums(self, start: int, stop: int) -> tuple[int, int]:
        """Return both sums of bytes [start, stop)."""
        sum0, sum1 = self.ask(f"sum {start} {stop}")
        return sum0, sum1

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it."""
        self.process.send_signal(number)
        self.process.wait()


@contextlib.contextmanager
def target_of(protocol: str, device: str, size_bytes: int) -> Iterator[Target]:
    """Offer memory for a while."""
    target = Target(protocol, device, size_bytes)
    try:
        yield target
    finally:
        if target.process.poll() is None:
            target.end()


# --- writing -----------------------------------------------------------------------------------


def finish(writer: MooncakeWriter, ticket: int) -> Progress:
    """Poll a ticket until it is final."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (progress := writer.poll(ticket)).is_final:
        if time.monotonic() > deadline_s:
            raise SnapdError(f"a ticket was not final after {PATIENCE_S:g} s")
    return progress


def pieces(source: torch.Tensor, base_ptr: int, size_bytes: int, piece_bytes: int) -> list[Write]:
    """Return writes of *size_bytes*, cut into pieces."""
    return [
        Write(source.data_ptr() + at, base_ptr + at, min(piece_bytes, size_bytes - at))
        for at in range(0, size_bytes, piece_bytes)
    ]


class Check:
    """One pair of devices: what holds, and how fast it is."""

    def __init__(self, engines: MooncakeEngines, protocol: str, source: torch.Tensor, target_device: str):
        self.engines = engines
        self.protocol = protocol
        self.source = source
        self.target_device = target_device
        self.facts: dict[str, bool] = {}
        self.figures: dict[str, float] = {}

    def writer(self, target: Target, **options: Any) -> MooncakeWriter:
        """Return a writer into a target."""
        writer = MooncakeWriter(
            self.engines, target.segment_name, str(target.process.pid), target.base_ptr, target.size_bytes,
            **options,
        )  # fmt: skip
        writer.register_source(self.source.data_ptr(), self.source.numel())
        return writer

    def run(self, rounds: int) -> None:
        """Check every fact, then measure."""
        size_bytes = self.source.numel()
        with target_of(self.protocol, self.target_device, size_bytes) as target:
            writer = self.writer(target)
            self._check_landing(target, writer)
            self._check_refusals(target, writer)
            self._check_cancel(target)
            self._measure(target, rounds)
            writer.close()
            if self.protocol == "nvlink_intra":
                self._check_exit(target)
        self._check_peer_gone()

    def _check_landing(self, target: Target, writer: MooncakeWriter) -> None:
        words = self.source.view(torch.int64)
        start, stop = 4096, 4096 + self.source.numel() // 2
        target.ask("fill 0")
        writes = [Write(self.source.data_ptr() + start, target.base_ptr + start, stop - start)]
        progress = finish(writer, writer.submit(writes))
        self.facts["done_is_drained"] = progress == Progress(TicketState.DONE, is_drained=True)
        wanted = summed(words[start // _WORD_BYTES : stop // _WORD_BYTES])
        self.facts["done_has_landed"] = target.sums(start, stop) == wanted
        self.facts["nothing_else_changed"] = (
            target.sums(0, start) == target.sums(stop, target.size_bytes) == (0, 0)
        )
        writes = pieces(self.source, target.base_ptr, self.source.numel(), 3 * MIB + 256)
        progress = finish(writer, writer.submit(writes))
        same = target.sums(0, target.size_bytes) == summed(words)
        self.facts["pieces_land"] = progress.state is TicketState.DONE and same

    def _check_refusals(self, target: Target, writer: MooncakeWriter) -> None:
        beyond = Write(self.source.data_ptr(), target.base_ptr + target.size_bytes - 8, 16)
        try:
            writer.submit([beyond])
            self.facts["outside_the_arena_is_refused"] = False
        except TransportError:
            self.facts["outside_the_arena_is_refused"] = True
        # The target's own check: this writer believes that the arena is larger than what was registered.
        liar = MooncakeWriter(
            self.engines,
            target.segment_name,
            str(target.process.pid),
            target.base_ptr,
            target.size_bytes + 4096,
        )
        liar.register_source(self.source.data_ptr(), self.source.numel())
        progress = finish(liar, liar.submit([beyond]))
        self.facts["outside_the_registered_fails"] = progress.state is TicketState.FAILED
        liar.close()

    def _check_cancel(self, target: Target) -> None:
        target.ask(f"fill {FILL}")
        before = target.sums(target.size_bytes // 2, target.size_bytes)
        writer = self.writer(target, in_flight_bytes_max=1)
        ticket = writer.submit(
            pieces(self.source, target.base_ptr, target.size_bytes, target.size_bytes // 64)
        )
        writer.poll(ticket)
        writer.cancel(ticket)
        progress = finish(writer, ticket)
        untouched = target.sums(target.size_bytes // 2, target.size_bytes) == before
        self.facts["cancel_ends_it"] = (
            progress == Progress(TicketState.CANCELLED, is_drained=True) and untouched
        )
        writer.close()

    def _check_exit(self, target: Target) -> None:
        """Kill a process in the middle of writing, again and again: once it is gone, nothing changes."""
        holds = True
        for _ in range(5):
            target.ask("fill 0")
            child = subprocess.Popen(
                [
                    *myself("--scribbler", self.protocol, str(self.source.device), target.size_bytes),
                    "--into",
                    f"{target.segment_name},{target.base_ptr},{target.process.pid}",
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert child.stdout is not None
            while (line := child.stdout.readline()) and not line.startswith("= "):
                pass
            child.kill()
            child.wait()
            first = target.sums(0, target.size_bytes)
            holds = holds and line != "" and first != (0, 0)
            holds = holds and all(target.sums(0, target.size_bytes) == first for _ in range(5))
        self.facts["exit_is_drain_proof"] = holds

    def _check_peer_gone(self) -> None:
        size_bytes = self.source.numel()
        with target_of(self.protocol, self.target_device, size_bytes) as target:
            writer = self.writer(target, in_flight_bytes_max=size_bytes // 16)
            ticket = writer.submit(pieces(self.source, target.base_ptr, size_bytes, size_bytes // 64) * 50)
            writer.poll(ticket)
            target.end(signal.SIGKILL)
            started_s = time.perf_counter()
            progress = finish(writer, ticket)
            self.figures["peer_gone_seen_after_ms"] = (time.perf_counter() - started_s) * MS_PER_S
            # Memory of a process that is gone may take writes for as long as this one has it open.
            self.figures["peer_gone_failed"] = float(progress.state is TicketState.FAILED)
            writer.close()
        with target_of(self.protocol, self.target_device, size_bytes) as target:
            writer = self.writer(target)
            progress = finish(
                writer, writer.submit(pieces(self.source, target.base_ptr, size_bytes, size_bytes))
            )
            wanted = summed(self.source.view(torch.int64))
            is_same = target.sums(0, size_bytes) == wanted
            self.facts["successor_is_reached"] = progress.state is TicketState.DONE and is_same
            writer.close()

    # --- speed ---------------------------------------------------------------------------------

    def _measure(self, target: Target, rounds: int) -> None:
        size_bytes = self.source.numel()
        writer = self.writer(target)

        def write(piece_bytes: int, in_flight: int) -> Callable[[], None]:
            def once() -> None:
                waiting = pieces(self.source, target.base_ptr, size_bytes, piece_bytes)[::-1]
                flying: list[int] = []
                while waiting or flying:
                    while waiting and len(flying) < in_flight:
                        flying.append(writer.submit([waiting.pop()]))
                    flying = [ticket for ticket in flying if not self._is_done(writer, ticket)]

            return once

        one = Write(self.source.data_ptr(), target.base_ptr, size_bytes)
        self._time("one_descriptor", lambda: self._done(writer, writer.submit([one])), rounds)
        for piece_mib in (4, 16, 64, 256):
            if piece_mib * MIB < size_bytes:
                self._time(f"pieces_{piece_mib}_mib_4_in_flight", write(piece_mib * MIB, 4), rounds)
        for count in (96, 4_800):
            many = pieces(self.source, target.base_ptr, size_bytes, -(-size_bytes // count // 256) * 256)

            def batch(many: list[Write] = many) -> None:
                self._done(writer, writer.submit(many))

            self._time(f"descriptors_{count}", batch, rounds)
        started_s = time.perf_counter()
        ticket = writer.submit([one])
        self.figures["submit_blocks_ms"] = (time.perf_counter() - started_s) * MS_PER_S
        self._done(writer, ticket)
        small = Write(self.source.data_ptr(), target.base_ptr, 64)
        latencies = []
        for _ in range(200):
            started_s = time.perf_counter()
            self._done(writer, writer.submit([small]))
            latencies.append(time.perf_counter() - started_s)
        self.figures["write_64_bytes_us"] = statistics.median(latencies) * 1e6
        writer.close()
        copy = torch.empty_like(self.source, device=self.target_device)

        def plain() -> None:
            copy.copy_(self.source)
            if self.source.is_cuda:
                torch.cuda.synchronize(self.source.device)
                torch.cuda.synchronize(copy.device)

        self._time("plain_copy", plain, rounds)

    def _done(self, writer: MooncakeWriter, ticket: int) -> None:
        progress = finish(writer, ticket)
        if progress.state is not TicketState.DONE:
            raise SnapdError(f"a write failed: {progress.detail}")

    def _is_done(self, writer: MooncakeWriter, ticket: int) -> bool:
        progress = writer.poll(ticket)
        if progress.is_final and progress.state is not TicketState.DONE:
            raise SnapdError(f"a write failed: {progress.detail}")
        return progress.is_final

    def _time(self, name: str, act: Callable[[], None], rounds: int) -> None:
        act()
        seconds = []
        for _ in range(rounds):
            started_s = time.perf_counter()
            act()
            seconds.append(time.perf_counter() - started_s)
        self.figures[f"{name}_gb_per_s"] = self.source.numel() / statistics.median(seconds) / 1e9


def scribble(protocol: str, device: str, size_bytes: int, into: str) -> None:
    """Write for ever; say when it has begun."""
    segment_name, base_ptr, epoch = into.split(",")
    source = random_bytes(size_bytes, device, 7)
    writer = MooncakeWriter(
        MooncakeEngines(config_of(protocol)),
        segment_name,
        epoch,
        int(base_ptr),
        size_bytes,
    )
    writer.register_source(source.data_ptr(), size_bytes)
    number = 0
    while True:
        source[: size_bytes // 2].add_(1)
        if source.is_cuda:
            torch.cuda.synchronize()
        writes = pieces(source, int(base_ptr), size_bytes, size_bytes // 8)
        ticket = writer.submit(writes)
        while not writer.poll(ticket).is_final:
            pass
        number += 1
        if number == 3:
            print("= writing", flush=True)


def random_bytes(size_bytes: int, device: str, seed: int) -> torch.Tensor:
    """Return random bytes on a device."""
    if device != "cpu":
        torch.cuda.set_device(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    words = torch.randint(
        -(2**62), 2**62, (size_bytes // _WORD_BYTES,), device=device, generator=generator, dtype=torch.int64
    )
    return words.view(torch.uint8)


def hardware() -> str:
    """Return what this was run on."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return f"{count} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    return f"{os.cpu_count()} CPU cores, torch {torch.__version__}"


@click.command(help=__doc__)
@click.option("--protocol", default="nvlink_intra", show_default=True, help="tcp, rdma or nvlink_intra.")
@click.option("--device", default="cuda:0", show_default=True, help="Where D's bytes are: cuda:N or cpu.")
@click.option("--bytes", "size", default="2GiB", show_default=True, help="How much a round writes.")
@click.option("--rounds", default=7, show_default=True, help="Rounds of each measurement.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--target", is_flag=True, hidden=True)
@click.option("--scribbler", is_flag=True, hidden=True)
@click.option("--into", default="", hidden=True)
def main(
    protocol: str,
    device: str,
    size: str,
    rounds: int,
    as_json: bool,
    target: bool,
    scribbler: bool,
    into: str,
) -> None:
    """Check, measure, print."""
    size_bytes = parse_size_bytes(size)
    if target:
        serve_target(protocol, device, size_bytes)
        return
    if scribbler:
        scribble(protocol, device, size_bytes, into)
        return
    report: dict[str, Any] = {"hardware": hardware(), "protocol": protocol, "bytes": size_bytes, "pairs": {}}
    source = random_bytes(size_bytes, device, 1)
    if source.is_cuda:
        torch.cuda.synchronize()
    engines = MooncakeEngines(config_of(protocol))
    devices = [device]
    if device != "cpu":
        devices += [f"cuda:{n}" for n in range(torch.cuda.device_count()) if f"cuda:{n}" != device][:1]
    is_ok = True
    for other in devices:
        check = Check(engines, protocol, source, other)
        try:
            check.run(rounds)
        except SnapdError as error:
            check.facts[f"stopped: {error}"] = False
        report["pairs"][f"{device} to {other}"] = {"facts": check.facts, "figures": check.figures}
        is_ok = is_ok and all(check.facts.values())
    report["ok"] = is_ok
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        click.echo(f"{report['hardware']}, {protocol}, {format_bytes(size_bytes)}")
        for pair, found in report["pairs"].items():
            click.echo(f"\n{pair}")
            for name, holds in found["facts"].items():
                click.echo(f"  {name:36} {'yes' if holds else 'NO'}")
            for name, figure in found["figures"].items():
                click.echo(f"  {name:36} {figure:10.2f}")
    # Not by way of the engines' destructors, which take a second each.
    sys.stdout.flush()
    os._exit(0 if is_ok else 1)


if __name__ == "__main__":
    main()

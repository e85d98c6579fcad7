"""What people see of the demo: progress while it runs, and the summary."""

import time
from typing import Final, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from snapd.demo.logfacts import LogFacts
from snapd.demo.plan import RANKS, TOKEN_BYTES, Plan
from snapd.demo.result import Result
from snapd.demo.stage import Options, Stage
from snapd.errors import REASON_HELP, Reason
from snapd.units import format_bytes, format_ms

PLAIN_EVERY_S: Final = 2.0
FAULTS_SHOWN: Final = 10
_BAR_CELLS: Final = 24


def show_plan(console: Console, options: Options, plan: Plan) -> None:
    """Say what will be played, and what was done to the trace to make it fit."""
    head = f"snapd demo: 1 daemon, {options.decoders} D processes, {RANKS} P ranks, over "
    head += f"{options.transport}, seed {options.seed}"
    _say(console, head + (", chaos" if options.chaos else ""), style="bold")
    times = f" (some of them {plan.rounds} times over)" if plan.rounds > 1 else ""
    _say(
        console,
        f"trace {options.trace_path.name}: {plan.requests_in_trace:,} requests, {plan.sessions_in_trace:,} "
        f"sessions; {len(plan.sessions)} sessions of {plan.num_turns} turns are played{times}, "
        f"tokens scaled by {plan.token_scale:.3g}, {plan.speed:.3g} times as fast",
    )
    token, total, arena, decoder, prefill = map(
        format_bytes,
        (
            TOKEN_BYTES,
            plan.payload_bytes,
            plan.arena_bytes,
            plan.decoder_slots * TOKEN_BYTES,
            plan.prefill_slots * TOKEN_BYTES,
        ),
    )
    _say(
        console,
        f"{total} of KV to move, {token} a token and rank; {RANKS} arenas of {arena}, "
        f"{options.decoders * RANKS} D pools of {decoder}, {RANKS} P pools of {prefill}",
    )
    _say(console, f"files in {options.out_dir}", soft_wrap=True)


def _say(console: Console, text: str, style: str = "", *, soft_wrap: bool = False) -> None:
    console.print(Text(text, style=style), soft_wrap=soft_wrap)


class Progress:
    """Live lines on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage: Stage | None = None
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )
        self._said_s = 0.0

    def begin(self, stage: Stage) -> None:
        """Everything has started."""
        self._stage = stage
        if self._live is not None:
            self._live.start()

    def tick(self) -> None:
        """Show how far it is."""
        if self._stage is None:
            return
        if self._live is not None:
            self._live.update(self._panel(self._stage), refresh=True)
        elif time.monotonic() - self._said_s >= PLAIN_EVERY_S:
            self._said_s = time.monotonic()
            self._console.print(self._line(self._stage), highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        """Clear the live lines."""
        if self._live is not None:
            self._live.stop()

    @staticmethod
    def _line(stage: Stage) -> str:
        tally = stage.tally
        parts = [
            f"{stage.elapsed_s:5.1f} s  {tally.turns_done}/{stage.plan.num_turns} turns",
            _ingested(stage),
            f"{len(tally.alloc_failed)} had no slots, {tally.corrupt} corrupt",
        ]
        if tally.kills:
            parts.append(f"{tally.kills} D killed")
        return "; ".join(parts)

    @staticmethod
    def _panel(stage: Stage) -> Table:
        tally, plan = stage.tally, stage.plan
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        done = round(tally.turns_done / plan.num_turns * _BAR_CELLS)
        grid.add_row(
            f"{stage.elapsed_s:.1f} s",
            f"[green]{'#' * done}[/][dim]{'.' * (_BAR_CELLS - done)}[/] "
            f"{tally.turns_done}/{plan.num_turns} turns, {tally.sessions_done}/{len(plan.sessions)} sessions",
        )
        grid.add_row("bytes", f"{format_bytes(tally.pushed_bytes)} pushed, {_ingested(stage)}")
        corrupt = f"[{'red' if tally.corrupt else 'green'}]{tally.corrupt} corrupt[/]"
        grid.add_row("compared", f"{format_bytes(tally.compared_bytes)}, {corrupt}")
        grid.add_row("P", f"{len(tally.alloc_failed)} had no slots at first, {tally.given_up} given up")
        lives = ", ".join(
            f"{seat.worker.name} {'up' if seat.is_up.is_set() else '[red]down[/]'}"
            f" ({format_bytes(seat.used_slots * TOKEN_BYTES)} a rank)"
            for seat in stage.seats
        )
        grid.add_row("D", f"{lives}{f', {tally.kills} killed' if tally.kills else ''}")
        return grid


def _ingested(stage: Stage) -> str:
    num_bytes = sum(stage.tally.ingested.values())
    return f"{format_bytes(num_bytes)} ingested, {num_bytes / max(stage.elapsed_s, 0.1) / 1e9:.2f} GB/s"


def show_result(console: Console, result: Result, facts: LogFacts) -> None:
    """Write the closing summary."""
    console.print()
    console.print(
        f"[bold]{result.sessions} sessions[/], {result.turns} turns, {result.attempts} attempts: "
        f"[green]{result.ingested} ingested[/], {result.aborted} aborted, {result.refused} refused",
        highlight=False,
    )
    table = _table("outcome", ">count", "what it means")
    for reason, count in result.reasons.items():
        style = "green" if reason == Reason.OK else "yellow"
        table.add_row(Text(reason, style=style), f"{count:,}", REASON_HELP[Reason(reason)])
    console.print(table)
    console.print(
        f"ok_rate [bold]{result.ok_rate:.4f}[/]; {format_bytes(result.bytes)} ingested in "
        f"{result.play_s:.1f} s, [bold]{result.gb_per_s:.2f} GB/s[/]; while pushing "
        f"{result.push_gb_per_s:.2f} GB/s",
        highlight=False,
    )
    table = _table("state", ">attempts", ">p50", ">p99")
    for state, spent in result.states_ms.items():
        table.add_row(state, f"{spent.count:,}", format_ms(spent.p50_ms), format_ms(spent.p99_ms))
    console.print(table)
    _say(
        console,
        f"P had no slots for {result.alloc_failed} attempts when it finalized ({result.alloc_failures} "
        f"tries), and evicted {result.tree_evicted} sessions from its trees; {result.given_up} turns were "
        f"given up, {result.pushes_again} pushed again, {result.leases_expired} leases ran out",
    )
    _say(
        console,
        f"over {result.transport}: {result.retried_pieces} pieces were written again, "
        f"{result.undrained_commits} commits came without drain proof, "
        f"{format_bytes(result.quarantined_bytes)} went through quarantine",
    )
    _show_incidents(console, result, facts)
    compared = f"{format_bytes(result.compared_bytes)} compared with D byte for byte: "
    verdict = (
        f"[bold red]{result.corrupt} ingests differ[/]" if result.corrupt else "[green]no byte differs[/]"
    )
    console.print(compared + verdict, highlight=False)
    if result.faults:
        console.print(f"[bold red]{len(result.faults)} faults:[/]", highlight=False)
        for fault in result.faults[:FAULTS_SHOWN]:
            _say(console, f"  {fault}", style="red")
    else:
        console.print("every attempt has one outcome, all ranks inserted the same, [green]nothing leaked[/]")
    _say(console, f"{result.wall_s:.1f} s with start and end; log {result.log}", soft_wrap=True)


def _table(*columns: str) -> Table:
    """Return a table without lines; a heading that begins with ``>`` is set to the right."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def _show_incidents(console: Console, result: Result, facts: LogFacts) -> None:
    """Write what was done on purpose, and what became of the attempts and their sessions."""
    if not result.incidents:
        return
    console.print("done on purpose, and what became of it:")
    table = _table("session", "what", ">moved", "was", "ended", "its bytes", ">then ok")
    for incident in result.incidents:
        attempt = facts.attempts.get(incident.slab_handle)
        outcome = attempt.outcome if attempt else None
        if attempt is None or outcome is None:
            continue  # A fault, and listed as one.
        later = sum(
            1
            for other in facts.ingested
            if other.session_id == incident.session_id and other.at_ns > outcome.at_ns
        )
        freed = "quarantine, " if attempt.quarantined_bytes else ""
        table.add_row(
            incident.session_id,
            f"{incident.worker} {incident.what}",
            f"{incident.at_bytes / incident.total_bytes:.0%}" if incident.total_bytes else "",
            attempt.last_state,
            outcome.reason,
            f"{freed}{', '.join(sorted(attempt.released_why))}",
            f"{later}",
        )
    console.print(table)


def console_for(stream: TextIO) -> Console:
    """Return a console that writes to *stream*, 80 columns wide unless it is a terminal."""
    is_terminal = stream.isatty()
    return Console(file=stream, width=None if is_terminal else 80)

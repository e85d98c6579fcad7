"""What people see of a live replay."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from snapd.replay.liveplan import LiveProgress, LiveResult
from snapd.units import MS_PER_S, format_bytes, format_ms


def progress_line(progress: LiveProgress) -> str:
    """Return how far a replay is, for a line that is written over."""
    return (
        f"{progress.turns_done:,} of {progress.turns:,} turns, {progress.ok:,} ok, "
        f"{format_bytes(progress.bytes)} ingested, at most {format_ms(progress.late_ms)} late"
    )


def show_live(console: Console, result: LiveResult) -> None:
    """Write a live replay's table."""
    scale = f", tokens scaled by {result.token_scale:.3g}" if result.token_scale < 1 else ""
    played = (
        f"{result.turns:,} turns of {result.sessions:,} sessions in {format_ms(result.play_s * MS_PER_S)}"
    )
    sizes = f"a token takes {result.token_bytes:,} bytes a rank, and an arena has {result.arena_tokens:,}"
    console.print(Text(f"{played}{scale}; {sizes}", style="bold"), soft_wrap=True)
    table = Table("", "", box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.columns[1].justify = "right"
    for label, cell in (
        ("attempts", f"{result.attempts:,}"),
        ("ok", f"{result.ok:,}"),
        ("ok rate", f"{result.ok_rate:.1%}" if result.attempts else "-"),
        ("READY at the end, never wanted", f"{result.unused:,}"),
        ("pushed again, whole", f"{result.resent:,}"),
        ("tokens of prompts", f"{result.prompt_tokens:,}"),
        ("  that snapshots had brought to P", f"{result.reused_tokens:,}"),
        ("pushed", format_bytes(result.pushed_bytes)),
        ("  while copying", f"{result.push_gb_per_s:.2f} GB/s"),
        ("ingested", format_bytes(result.bytes)),
        ("  while copying", f"{result.ingest_gb_per_s:.2f} GB/s"),
        ("compared, byte by byte", format_bytes(result.compared_bytes)),
        ("turns late, mean", format_ms(result.late_ms_mean)),
        ("  at most", format_ms(result.late_ms_max)),
    ):
        table.add_row(label, cell)
    console.print(table)
    if result.reasons:
        said = ", ".join(f"{count:,} {reason}" for reason, count in result.reasons.items())
        console.print(Text(f"attempts: {said}"))
    if result.corrupt:
        console.print(
            Text(
                f"{result.corrupt:,} ingests had a byte that D did not make. This must not happen.",
                "bold red",
            )
        )
    elif result.bytes:
        console.print(Text("Every ingested byte is what D made.", "green"))
    else:
        console.print(Text("Nothing was ingested, so nothing was compared.", "yellow"))

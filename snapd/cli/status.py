"""``snapd status``: what the daemon holds, and how its attempts fared."""

from typing import TYPE_CHECKING, Final

import click

from snapd.cli.common import (
    DaemonChoice,
    Table,
    can_show,
    cell,
    daemon_options,
    fields_of,
    json_option,
    plural,
    print_json,
    printable,
    say,
    say_note,
)
from snapd.cli.statusbounds import show_limits, show_usage
from snapd.compiling import described
from snapd.errors import REASON_HELP, Reason
from snapd.units import format_bytes, format_ms

if TYPE_CHECKING:
    from rich.text import Text

    from snapd.core.session import ArenaView
    from snapd.wire import KVEventStatistics, MooncakeStatistics, StatsRep

_BAR_CELLS: Final = 50
# Live and in use, evictable, quarantined, free.
_BLOCKS: Final = ("█", "▒", "▚", "·")
_ASCII: Final = ("#", "=", "x", ".")
_STYLES: Final = ("green", "cyan", "yellow", "dim")
# Why a READY snapshot was not told to routers, and what to do about it.
UNPUBLISHED_HELP: Final = {
    "no-hashes": "D sends neither page keys nor block hashes; see send_page_keys and block_hashes of Pusher.",
    "pages-max": "More pages are told than fit. Raise kv_events_pages_max.",
    "queue-full": "More waits to be sent than fits. Raise kv_events_queue_bytes_max.",
}


@click.command(
    epilog="""\b
Examples:
  snapd status
  snapd status --limits
  snapd status --json | jq .ok_rate
  watch -n1 snapd status"""
)
@daemon_options
@click.option(
    "--limits", is_flag=True, help="Show every bound too, where it comes from, and Mooncake's settings."
)
@json_option
def status(daemon: DaemonChoice, limits: bool, as_json: bool) -> None:
    """Show arenas, open attempts, how attempts ended, the log's health, and how much of its bounds is in use.

    What KV events tell routers is shown too, where they are published. A bound of which nine tenths are in
    use is marked with '!'.

    With --json everything is one object; ok_rate is the share of attempts and refusals that ended with P
    having the snapshot, or null before the first has ended.
    """
    with daemon.connect() as client:
        stats = client.stats(bounds=True)
    if as_json:
        mooncake = fields_of(stats.mooncake) if stats.mooncake else None
        print_json(
            fields_of(stats) | {"log": fields_of(stats.log), "mooncake": mooncake, "ok_rate": ok_rate(stats)}
        )
        return
    _show_daemon(stats)
    if stats.mooncake:
        _show_mooncake(stats.mooncake)
    say()
    _show_arenas(stats.core.arenas)
    _show_attempts(stats)
    _show_outcomes(stats)
    _show_log(stats)
    if stats.kv_events:
        _show_kv_events(stats.kv_events)
    say()
    show_usage(stats.bounds)
    if limits:
        show_limits(stats)
        _show_mooncake_settings(stats.mooncake)


def ok_rate(stats: "StatsRep") -> float | None:
    """Return the share of ended attempts and refusals that are ok; None: there are none."""
    ended = sum(stats.core.outcomes_by_reason.values())
    return stats.core.attempts_ok / ended if ended else None


def _show_daemon(stats: "StatsRep") -> None:
    version = described(stats.version, stats.is_compiled)
    say(
        f"snapd {version}, up {format_ms(stats.uptime_ms)}, pid {stats.pid}, epoch {stats.epoch}, "
        f"transport {stats.transport}",
        "bold",
    )
    say(
        f"{plural(stats.connections, 'connection')}, {plural(stats.watchers, 'watcher')}, "
        f"{plural(stats.requests_waiting, 'request')} waiting for votes"
    )
    if stats.core.is_draining:
        say("DRAINING: no new attempts are taken ('snapd drain --off' takes them again)", "bold yellow")


def _show_mooncake(mooncake: "MooncakeStatistics") -> None:
    reach = "this host only" if mooncake.is_loopback_only else "every address of this host"
    devices = f" over {printable(mooncake.devices)}" if mooncake.devices else ""
    say(
        f"mooncake {printable(mooncake.segment_name)}, {mooncake.protocol}{devices}, open to {reach}, "
        f"{plural(mooncake.registered_pieces, 'registered piece')}, metadata "
        f"{printable(mooncake.metadata_server)} ({printable(mooncake.package)})"
    )
    say(
        f"notifications {mooncake.notify}: {mooncake.notifications_taken:,} taken, "
        f"{mooncake.notifications_refused:,} refused, {mooncake.notifications_ignored:,} ignored"
    )


def _show_arenas(arenas: "tuple[ArenaView, ...]") -> None:
    table = Table(">RANK", ">SIZE", ">FREE", ">LIVE", ">EVICTABLE", ">QUARANTINED", ">LARGEST HOLE")
    bars = Table("", "", "")
    blocks = _BLOCKS if can_show("".join(_BLOCKS)) else _ASCII
    for arena in arenas:
        sizes_bytes = (
            arena.capacity_bytes,
            arena.free_bytes,
            arena.live_bytes,
            arena.evictable_bytes,
            arena.quarantined_bytes,
            arena.largest_hole_bytes,
        )
        table.add(str(arena.rank), *map(format_bytes, sizes_bytes))
        used = 1 - arena.free_bytes / arena.capacity_bytes
        bars.add(f"rank {arena.rank}", _bar(arena, blocks), f"{used:.0%} used")
    table.show()
    say()
    bars.show()
    in_use, evictable, quarantined, free = blocks
    say(f"{in_use} live  {evictable} live and evictable  {quarantined} quarantined  {free} free", "dim")
    say()


def bar_cells(arena: "ArenaView", cells: int) -> tuple[int, int, int, int]:
    """Return how many of *cells* show bytes in use, evictable, quarantined and free.

    What is there shows in at least one cell; free space gives way.
    """
    parts = (arena.live_bytes - arena.evictable_bytes, arena.evictable_bytes, arena.quarantined_bytes)
    counts = [max(part > 0, round(part * cells / arena.capacity_bytes)) for part in parts]
    while sum(counts) > cells:
        counts[counts.index(max(counts))] -= 1
    return counts[0], counts[1], counts[2], cells - sum(counts)


def _bar(arena: "ArenaView", blocks: tuple[str, ...]) -> "Text":
    bar = cell("")
    for count, block, style in zip(bar_cells(arena, _BAR_CELLS), blocks, _STYLES, strict=True):
        bar += cell(block * count, style)
    return bar


def _show_attempts(stats: "StatsRep") -> None:
    core = stats.core
    table = Table(*(f">{state}" for state in core.sessions_by_state), ">OPEN", ">QUARANTINED SHARDS")
    table.add(
        *(f"{count:,}" for count in core.sessions_by_state.values()),
        f"{core.open_sessions:,}",
        f"{core.quarantined_shards:,}",
    )
    table.show()
    say()


def _show_outcomes(stats: "StatsRep") -> None:
    core = stats.core
    rate = ok_rate(stats)
    if rate is None:
        say("No attempt has ended yet.")
        say()
        return
    ended = sum(core.outcomes_by_reason.values())
    say(
        f"{plural(ended, 'outcome')}, {rate:.1%} ok; {format_bytes(core.bytes_committed)} committed, "
        f"{format_bytes(core.bytes_ingested)} ingested"
    )
    table = Table("OUTCOME", ">COUNT", ">SHARE")
    counts = sorted(core.outcomes_by_reason.items(), key=lambda item: (item[0] != Reason.OK, -item[1]))
    for reason, count in counts:
        style = "green" if reason == Reason.OK else "red"
        table.add(cell(reason, style), f"{count:,}", f"{count / ended:.1%}")
    table.show()
    for reason, _ in counts:
        if reason != Reason.OK:
            say_note(f"{reason}: {reason_help(reason)}", indent=2)
    say()


def reason_help(reason: str) -> str:
    """Return what a reason means and what to do; a newer daemon may have other reasons."""
    try:
        return REASON_HELP[Reason(reason)]
    except ValueError:
        return "A reason that this version does not know; compare versions."


def _show_log(stats: "StatsRep") -> None:
    log = stats.log
    say(
        f"log {log.path}: {plural(log.lines_written, 'line')}, {format_bytes(log.bytes_written)}, "
        f"{log.queued_lines:,} queued, {plural(log.rotations, 'rotation')}"
    )
    if log.dropped:
        say(f"log: {plural(log.dropped, 'line')} dropped: the disk is too slow or full", "bold red")
    if log.write_errors:
        last = printable(log.last_error) or "unknown"
        say(f"log: {plural(log.write_errors, 'write error')}, the last: {last}", "bold red")


def _show_kv_events(events: "KVEventStatistics") -> None:
    replays = f", replays at {events.replay_address}" if events.replay_address else ""
    say(f"kv events at {events.address}{replays}")
    say(
        f"kv events: {plural(events.snapshots, 'snapshot')} with {plural(events.pages, 'page')} told, "
        f"{plural(events.batches, 'message')} sent, {format_bytes(events.queued_bytes)} queued"
    )
    for why, count in events.unpublished.items():
        if count:
            say(f"kv events: {plural(count, 'READY snapshot')} not told, {printable(why)}", "bold yellow")
            say_note(UNPUBLISHED_HELP.get(why, reason_help(why)), indent=2)
    if events.facts_dropped:
        dropped = plural(events.facts_dropped, "attempt")
        say(f"kv events: of {dropped} token ids or block hashes were not kept", "bold yellow")
        say_note(UNPUBLISHED_HELP["queue-full"], indent=2)
    if events.send_errors:
        say(f"kv events: {plural(events.send_errors, 'message')} that ZeroMQ did not take", "bold red")


def _show_mooncake_settings(mooncake: "MooncakeStatistics | None") -> None:
    if mooncake and mooncake.settings:
        say()
        table = Table("MOONCAKE SETTING", "VALUE")
        for variable, text in sorted(mooncake.settings.items()):
            table.add(printable(variable), printable(text))
        table.show()

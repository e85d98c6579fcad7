"""What ``snapd forensics --prove`` shows."""

from typing import TYPE_CHECKING, Final

from snapd.cli.common import Table, cell, plural, say, say_note

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snapd.forensics.violations import ProofReport, ViolationKind

_VIOLATIONS_MAX: Final = 50


def show_proof(proof: "ProofReport", copies: int, helps: "Mapping[ViolationKind, str]") -> None:
    """Show what was proved, or what contradicts it, with the lines."""
    say(
        f"{plural(proof.lines, 'line')}, {plural(proof.epochs, 'epoch')}, "
        f"{plural(proof.attempts, 'attempt')}, {sum(proof.outcomes.values()):,} outcomes, "
        f"{plural(proof.slabs_allocated, 'slab')}, {plural(proof.leases, 'lease')}"
    )
    _show_limits(proof, copies)
    say()
    if proof.is_good:
        if proof.is_whole:
            say("PROVED: no rule is broken.", "bold green")
        elif not proof.is_read:
            say("PROVED, as far as it could be read: no rule is seen to be broken.", "bold yellow")
        else:
            say("No rule is seen to be broken.", "bold green")
        return
    say(f"{plural(proof.num_violations, 'violation')}", "bold red")
    table = Table("RULE", ">COUNT", "MEANING", indent=2)
    for kind, count in proof.counts.items():
        table.add(cell(str(kind), "red"), f"{count:,}", helps[kind])
    table.show()
    for violation in proof.violations[:_VIOLATIONS_MAX]:
        say()
        who = f" attempt {violation.slab_handle}" if violation.slab_handle else ""
        who += f" of session {violation.session_id}" if violation.session_id else ""
        say(f"{violation.kind}:{who}", "red")
        say_note(violation.message, indent=2)
        for where in violation.lines:
            say(f"  {where}")
    left = proof.num_violations - min(len(proof.violations), _VIOLATIONS_MAX)
    if left:
        say()
        say(f"{plural(left, 'more violation')}; --json shows more of them")


def _show_limits(proof: "ProofReport", copies: int) -> None:
    """Show what nothing is claimed of."""
    if not proof.is_beginning_known:
        say_note("The log's beginning is missing: nothing is claimed of older attempts, extents and leases.")
    if proof.unproved_attempts or proof.unproved_lines:
        say_note(
            f"Not proved, as lines are missing: {plural(proof.unproved_attempts, 'attempt')} and "
            f"{plural(proof.unproved_lines, 'line')}."
        )
    if proof.torn_lines or proof.unknown_lines or proof.events_dropped:
        say_note(
            f"{plural(proof.torn_lines, 'line')} torn or damaged, {proof.unknown_lines:,} of an unknown "
            f"kind, {plural(proof.events_dropped, 'record')} dropped by the daemon."
        )
    if proof.older:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in proof.older.items())
        say_note(
            f"{plural(sum(proof.older.values()), 'line')} of the design before snapd, which count as no "
            f"attempt, and of which nothing is proved: {reasons}."
        )
    for damage in proof.damage:
        say(damage)
    for line in proof.unreadable:
        say(f"  unreadable: {line.where}: {line.why}")
    if copies:
        say_note(f"{plural(copies, 'line')} left out: an earlier file has the same.")
    if proof.uncompared_lines:
        say_note(
            f"{plural(proof.uncompared_lines, 'line')} left out, not compared: an earlier file goes on "
            "beyond their numbers, and these are not known to be in it."
        )
    if proof.handles_forgotten:
        say_note(
            f"{plural(proof.handles_forgotten, 'handle')} of long ago forgotten: a reuse would not be seen."
        )
    if proof.open_attempts or proof.open_leases:
        say_note(
            f"Open at the end: {plural(proof.open_attempts, 'attempt')} and "
            f"{plural(proof.open_leases, 'lease')}."
        )

"""Write the pages of docs/ that come out of the code: references, reasons, and the drawing of the states.

With ``--check`` nothing is written, and the exit status is 1 when a file is not what it would be.
"""

import sys
from pathlib import Path
from typing import Final

import click

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools import doc_bounds, doc_config, doc_diagram, doc_messages, doc_reasons

DIRECTORY: Final = Path(__file__).parent.parent / "docs"


def pages() -> dict[str, str]:
    """Return the text of every file by its name."""
    return {
        "bounds.md": doc_bounds.page(),
        "reference-config.md": doc_config.page(),
        "reference-wire.md": doc_messages.wire_page(),
        "reference-log.md": doc_messages.log_page(),
        "reasons.md": doc_reasons.page(),
        "state-machine.svg": doc_diagram.page(),
    }


def stale() -> dict[str, str]:
    """Return the files that are not what they would be: what they would be, by name."""
    return {
        name: text
        for name, text in pages().items()
        if not (path := DIRECTORY / name).exists() or path.read_text(encoding="utf-8") != text
    }


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Only say whether the files are current.")
def main(check: bool) -> None:
    """Write or check."""
    found = stale()
    if check and found:
        click.echo(f"stale: {', '.join(found)}; run `make docs`", err=True)
        sys.exit(1)
    for name, text in found.items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")
        click.echo(f"{name} is written")


if __name__ == "__main__":
    main()

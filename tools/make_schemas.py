"""Write the JSON Schemas of log lines, wire messages and configuration into schemas/.

With ``--check`` nothing is written, and the exit status is 1 when a file is not what it would be.
"""

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from snapd import wire
from snapd.config import config_schema
from snapd.eventlog import log_line_schema

DIRECTORY = Path(__file__).parent.parent / "schemas"


def schemas() -> dict[str, dict[str, Any]]:
    """Return every schema by file name."""
    return {
        "log-line.schema.json": titled(log_line_schema(), "A line of d-to-p-sync.jsonl"),
        "request.schema.json": titled(wire.schema(wire.AnyRequest), "A request of control protocol v1"),
        "reply.schema.json": titled(wire.schema(wire.AnyReply), "A reply of control protocol v1"),
        "push.schema.json": titled(wire.schema(wire.AnyPush), "What the daemon sends unasked"),
        "finalize.schema.json": titled(
            wire.schema(wire.SnapshotFinalizeIngestReqInput | wire.SnapshotFinalizeIngestReqOutput),
            "Between an orchestrator and P's worker",
        ),
        "notification.schema.json": titled(
            wire.schema(wire.TransferNotification), "What a writer sends through the transport"
        ),
        "config.schema.json": titled(config_schema(), "The daemon's configuration file"),
    }


def titled(schema: dict[str, Any], title: str) -> dict[str, Any]:
    """Return *schema* with its dialect and a title in front."""
    rest = {key: value for key, value in schema.items() if key not in ("$schema", "title")}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **rest}


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Only say whether the files are current.")
def main(check: bool) -> None:
    """Write or check."""
    DIRECTORY.mkdir(exist_ok=True)
    stale = []
    for name, schema in schemas().items():
        path = DIRECTORY / name
        # Sorted, so that the files do not change when a field moves.
        raw = msgspec.json.encode(schema, order="sorted")
        text = msgspec.json.format(raw, indent=2).decode() + "\n"
        if check:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.write_text(text)
            click.echo(path)
    if stale:
        click.echo(f"stale: {', '.join(stale)}; run `make schemas`", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

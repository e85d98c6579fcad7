"""``snapd serve``: run the daemon."""

import os
import sys
from typing import Any, Final

import click
import msgspec
import structlog

from snapd import __version__
from snapd.cli.settings import settings_options
from snapd.config import Loaded
from snapd.daemon import run

_log: Final = structlog.get_logger("snapd.serve")
_encoder: Final = msgspec.json.Encoder(enc_hook=str)


@click.command(
    epilog="""\b
Examples:
  snapd serve
  snapd serve --ranks 4 --size 8GiB
  snapd serve --config /etc/kv-snapd/snapd.toml --set lease_ms=5000
  snapd serve --socket /tmp/p0.sock --log /tmp/p0.jsonl --size 512MiB
  snapd serve --transport mooncake --protocol rdma --set mooncake.host=10.0.0.7

\b
A flag wins over the environment (SNAPD_LEASE_MS=5000), which wins over the file.
SIGTERM or Ctrl-C drains and stops; a second one stops at once. SIGHUP reopens the log.
Exit status: 0 stopped as asked, 1 it cannot start, 2 wrong usage or configuration, 70 a bug,
143 a second SIGTERM."""
)
@settings_options
@click.option(
    "--log-format",
    type=click.Choice(["auto", "console", "json"]),
    default="auto",
    show_default=True,
    help="Messages on stderr: for a person or as JSON lines; auto looks whether it is a terminal.",
)
def serve(loaded: Loaded, log_format: str) -> int:
    """Run the daemon until SIGTERM or Ctrl-C.

    It makes one arena for each rank, listens on a unix socket and writes the event log. 'snapd config' shows
    every setting with its value.
    """
    is_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    configure_messages(is_json=is_json)
    _write_starting(loaded)
    return run(loaded.config, loaded.origin)


def _write_starting(loaded: Loaded) -> None:
    _log.info(
        "starting",
        version=__version__,
        pid=os.getpid(),
        config=str(loaded.path or "none"),
        socket=loaded.config.socket_path,
        log=loaded.config.log_path,
    )


def configure_messages(*, is_json: bool) -> None:
    """Send structlog's messages to stderr, as JSON lines or for a person."""
    renderer: Any
    if is_json:
        renderer = _render_json
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=12)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=is_json),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        logger_factory=_StderrLogger,
        cache_logger_on_first_use=True,
    )


def _render_json(logger: object, method: str, event: structlog.typing.EventDict) -> str:
    """Render through msgspec, whose encoder takes no ``default=`` as JSONRenderer would pass."""
    del logger, method
    return _encoder.encode(event).decode()


class _StderrLogger:
    """Writes lines to stderr; a stderr that is gone does not stop the daemon."""

    def __init__(self, *names: object) -> None:
        del names

    def msg(self, message: str) -> None:
        """Write one line."""
        try:
            sys.stderr.write(message + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            return

    log = debug = info = warning = error = critical = exception = msg

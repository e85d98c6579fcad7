"""The options that choose a daemon's settings, for the commands that build a configuration."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import click

from snapd.config import Loaded, load

_P = ParamSpec("_P")
_R = TypeVar("_R")


def settings_options(command: Callable[Concatenate[Loaded, _P], _R]) -> Callable[..., _R]:
    """Give a command the options that make up a configuration; its first argument is what they yield."""

    @click.option(
        "--config", "config_path", metavar="FILE", type=click.Path(path_type=Path), help="TOML file."
    )
    @click.option("--socket", metavar="PATH", help="Unix socket of the control protocol.")
    @click.option("--log", metavar="PATH", help="Event log, JSON lines.")
    @click.option("--ranks", metavar="N", help="Equal arenas for this many P ranks.")
    @click.option("--size", metavar="SIZE", help="Size of each arena, such as 8GiB.")
    @click.option("--device", metavar="DEVICE", help="Where arenas are: cpu, or cuda:N.")
    @click.option("--transport", metavar="NAME", help="How bytes travel: shm, or mooncake.")
    @click.option("--protocol", metavar="NAME", help="Mooncake's protocol: tcp, rdma, or nvlink_intra.")
    @click.option(
        "--set",
        "assignments",
        metavar="KEY=VALUE",
        multiple=True,
        help="Any other setting; may be repeated.",
    )
    @functools.wraps(command)
    def wrapper(
        config_path: Path | None,
        assignments: tuple[str, ...],
        socket: str | None,
        log: str | None,
        ranks: str | None,
        size: str | None,
        device: str | None,
        transport: str | None,
        protocol: str | None,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _R:
        flags = {
            "socket_path": socket,
            "log_path": log,
            "ranks": ranks,
            "size": size,
            "device": device,
            "transport": transport,
            "mooncake.protocol": protocol,
        }
        loaded = load(config_path, os.environ, overrides_of(flags, assignments))
        return command(loaded, *args, **kwargs)

    return wrapper


def overrides_of(flags: dict[str, str | None], assignments: tuple[str, ...]) -> dict[str, object]:
    """Return the settings that a command line gives, by key.

    Args:
        flags: settings with an option of their own; None: not given.
        assignments: ``KEY=VALUE`` each.

    Raises:
        click.UsageError: one is no assignment, or a key is given twice.
    """
    overrides: dict[str, object] = {key: value for key, value in flags.items() if value is not None}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            raise click.UsageError(f"--set {assignment!r} is no KEY=VALUE: write for instance lease_ms=5000")
        if key in overrides:
            raise click.UsageError(f"{key} is given twice on the command line: remove one of them")
        overrides[key] = value
    return overrides

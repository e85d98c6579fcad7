"""``snapd config``: the effective configuration, and where each value comes from."""

import os
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from snapd.cli.common import echo, json_option, print_json, printable
from snapd.config import ENVIRONMENT_PREFIX, Config, Loaded, load
from snapd.units import KIB, format_bytes, parse_size_bytes

_KEYS: Final = {field.name: field.encode_name for field in msgspec.structs.fields(Config)}
_TABLES: Final = ("limits", "mooncake")


@click.command(
    epilog="""\b
Examples:
  snapd config
  snapd config --config ./snapd.toml --json
  snapd config --check /etc/kv-snapd/snapd.toml
  snapd config > snapd.toml

\b
The output is a valid configuration file.
Exit status: 0 valid, 2 not valid."""
)
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="TOML file to start from.",
)
@click.option(
    "--check",
    "checked_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Only say whether this file is valid, whatever the environment sets.",
)
@json_option
def config(config_path: Path | None, checked_path: Path | None, as_json: bool) -> None:
    """Print every setting as the daemon would take it, and its origin: default, file or environment."""
    if checked_path is not None:
        if config_path is not None:
            raise click.UsageError("--check and --config exclude each other: remove one of them")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        loaded = load(checked_path, env, {})
        if as_json:
            print_json({"path": _utf8(str(loaded.path)), "valid": True})
        else:
            echo(f"{printable(str(checked_path))}: valid")
        return
    loaded = load(config_path, os.environ, {})
    if as_json:
        settings = {
            key: {"value": _utf8(getattr(loaded.config, name)), "origin": _utf8(loaded.origin[name])}
            for name, key in _KEYS.items()
            if name not in _TABLES
        }
        for table in _TABLES:
            for name, value in _table_values(loaded, table).items():
                settings[name] = {"value": _utf8(value), "origin": _utf8(loaded.origin[name])}
        print_json({"path": _utf8(str(loaded.path)) if loaded.path else None, "settings": settings})
    else:
        for line in toml_lines(loaded):
            echo(line)


def toml_lines(loaded: Loaded) -> list[str]:
    """Return the configuration as a TOML file, each setting with its origin in a comment."""
    lines = [_comment(f"file: {loaded.path or 'none'}")]
    for name, key in _KEYS.items():
        if name not in ("arenas", *_TABLES):
            value = toml_value(key, getattr(loaded.config, name))
            lines.append(f"{key} = {value}  {_comment(loaded.origin[name])}")
    for table in _TABLES:
        lines += ["", f"[{table}]"]
        for name, value in _table_values(loaded, table).items():
            # In a table a dotted key makes a table inside it.
            key = name.removeprefix(f"{table}.")
            lines.append(f"{key} = {toml_value(key, value)}  {_comment(loaded.origin[name])}")
    for arena in loaded.config.arenas:
        lines += ["", f"[[arena]]  {_comment(loaded.origin['arenas'])}"]
        lines += [f"{key} = {toml_value(key, value)}" for key, value in msgspec.structs.asdict(arena).items()]
    return lines


def _table_values(loaded: Loaded, table: str) -> dict[str, Any]:
    """Return a table's settings under the keys of their origins, one for each of Mooncake's variables."""
    values = msgspec.structs.asdict(getattr(loaded.config, table))
    variables = values.pop("settings", {})
    values |= {f"settings.{name}": value for name, value in variables.items()}
    return {f"{table}.{name}": value for name, value in values.items()}


def toml_value(key: str, value: Any) -> str:
    """Return a value as TOML writes it: sizes as text with a unit where that is exact."""
    if isinstance(value, int) and not isinstance(value, bool) and "_bytes" in key and value >= KIB:
        size = format_bytes(value).replace(" ", "")
        if parse_size_bytes(size) == value:
            return f'"{size}"'
        return str(value)
    # A TOML basic string has JSON's escapes, except that DEL must be escaped too; JSON's lists of numbers
    # and booleans are TOML's.
    return msgspec.json.encode(_utf8(value)).decode().replace("\x7f", "\\u007f")


def _utf8(value: Any) -> Any:
    """Return *value*; in a path that is no UTF-8, which neither JSON nor TOML can hold, with escapes."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _comment(text: str) -> str:
    return click.style(f"# {printable(text)}", dim=True)

"""A file is replaced as a whole, or stays what it was."""

import contextlib
import secrets
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write *content* beside *path* and move it there.

    Anything that is no ordinary file, such as /dev/stdout, is written to instead.

    Raises:
        OSError: it cannot be written; its ``filename`` is *path*.
    """
    try:
        _replace(path, content)
    except OSError as error:
        if error.errno is None:
            raise
        # Not the name of what was to become the file: nobody has asked for that one.
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(path: Path, content: bytes) -> None:
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    # Through a link: what it points to is replaced, the link stays.
    path = path.resolve()
    # Its name is known before it is there: the handler of a signal may raise at any instruction.
    beside = path.with_name(f".{path.name[:64]}.{secrets.token_hex(8)}")
    try:
        with beside.open("xb") as file:
            file.write(content)
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        raise

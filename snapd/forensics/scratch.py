"""Temporary files that nothing leaves behind: a signal that ends the command least of all."""

import os
import secrets
import shutil
import weakref
from pathlib import Path
from typing import Final

# As ``tempfile`` looks for them, which makes a file to try each, and may be interrupted before it is deleted.
_VARIABLES: Final = ("TMPDIR", "TEMP", "TMP")
_PLACES: Final = ("/tmp", "/var/tmp")  # noqa: S108 - the names in them cannot be guessed


class ScratchDirectory:
    """A new directory for this process alone.

    ``delete`` deletes it, and so does losing it: a handler of a signal may raise at any instruction, also
    before anyone has this in hand.

    Attributes:
        path: of the directory.

    Raises:
        OSError: there is no place for temporary files.
    """

    def __init__(self) -> None:
        refusals = []
        for place in (*filter(None, map(os.environ.get, _VARIABLES)), *_PLACES):
            self.path = Path(place).absolute() / f"snapd-forensics-{secrets.token_hex(8)}"
            # It comes before the directory: to block signals between them would not keep them from other
            # threads, and a handler runs in this one whoever gets the signal.
            self._delete = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
            _live.add(self)
            try:
                self.path.mkdir(mode=0o700)
            except OSError as error:
                self._delete.detach()
                refusals.append(error)
            else:
                return
        raise refusals[0]

    def delete(self) -> None:
        """Delete it with all that is in it; what cannot be deleted stays."""
        try:
            self._delete()
        except BaseException:
            # A signal came meanwhile: what is begun is done first.
            shutil.rmtree(self.path, ignore_errors=True)
            raise


_live: Final = weakref.WeakSet[ScratchDirectory]()


def delete_all() -> None:
    """Delete all that there are: what an exception has passed keeps its own until the interpreter ends."""
    for scratch in list(_live):
        scratch.delete()

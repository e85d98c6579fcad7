"""Temporary files that nothing leaves behind: a signal that ends the command least of all."""

import secrets
import shutil
import tempfile
import weakref
from pathlib import Path


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
        self.path = Path(tempfile.gettempdir()) / f"snapd-forensics-{secrets.token_hex(8)}"
        # It comes before the directory: to block signals between them would not keep them from other
        # threads, and a handler runs in this one whoever gets the signal.
        self._delete = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700)

    def delete(self) -> None:
        """Delete it with all that is in it; what cannot be deleted stays."""
        try:
            self._delete()
        except BaseException:
            # A signal came meanwhile: what is begun is done first.
            shutil.rmtree(self.path, ignore_errors=True)
            raise

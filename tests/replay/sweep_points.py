"""What processes of a sweep do in tests, importable there."""

import os
import signal
import threading
from typing import Any

from snapd.replay.model import Model
from snapd.replay.trace import Trace
from snapd.units import MIB

WAIT_S = 60.0


def mask(trace: Trace, model: Model) -> Any:
    """Return the signals that this process does not see."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])


def only_the_first_ends(trace: Trace, model: Model) -> Any:
    if model.buffer_bytes > MIB:
        threading.Event().wait(WAIT_S)
    return None


def killed(trace: Trace, model: Model) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)

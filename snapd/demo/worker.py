"""The entry point of a worker process: ``python -m snapd.demo.worker SETUP``."""

import contextlib
import faulthandler
import sys

import msgspec
import torch

from snapd.demo import messages as m
from snapd.demo.decoder import Decoder
from snapd.demo.prefill import PrefillRank
from snapd.errors import SnapdError


def main(argument: str) -> int:
    """Run one worker, and return its exit status.

    Args:
        argument: a ``messages.Setup`` as JSON.
    """
    # What a library aborts with says nothing of where; the file of messages then does.
    faulthandler.enable()
    setup = msgspec.json.decode(argument, type=m.Setup)
    # The workers share the machine; one thread each is a core for each of two at a time.
    torch.set_num_threads(1)
    channel = m.WorkerChannel(setup.channel_fd)
    try:
        worker = Decoder(setup, channel) if setup.role == m.ROLE_DECODER else PrefillRank(setup, channel)
        worker.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # The orchestrator has ended, or does not want to hear more.
    except SnapdError as error:
        with contextlib.suppress(OSError):
            channel.send(m.Failed(detail=str(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

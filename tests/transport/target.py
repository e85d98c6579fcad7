"""A peer for Mooncake's tests: a process with an engine and an arena that the test sees as well.

As a script (``target.py FD SIZE_BYTES``) it registers the memory of a file descriptor, prints one JSON
line with its segment name and the address of the memory, and answers each line of its input with a JSON
list of the notifications that came. It ends with its input, or with the tests.
"""

import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SIZE_BYTES = 8 * 1024 * 1024
START_S = 30.0
_ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1


def wait_for(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait until *condition* holds."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.0005)


def address_of(memory: mmap.mmap | bytearray) -> int:
    """Return where a buffer starts."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Target:
    """The process, and its arena as this process sees it.

    Attributes:
        segment_name: of its engine.
        base_ptr: where its arena starts, there.
        memory: the arena, here.
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        fd = os.memfd_create("target")
        os.ftruncate(fd, SIZE_BYTES)
        self.memory = mmap.mmap(fd, SIZE_BYTES)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(fd), str(SIZE_BYTES)],
            env={**os.environ, "MC_LOG_LEVEL": "ERROR", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[fd],
            text=True,
        )
        os.close(fd)
        said = json.loads(self._line())
        self.segment_name = said["segment_name"]
        self.base_ptr = said["address"]

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the target ended with {self.process.wait()}"
        return line

    def notifications(self) -> list[str]:
        """Return the notifications that came since the last call."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        texts: list[str] = json.loads(self._line())
        return texts

    def clear(self) -> None:
        """Make every byte 0."""
        ctypes.memset(address_of(self.memory), 0, SIZE_BYTES)

    def stop(self) -> None:
        """Let it stand still, as SIGSTOP does, and wait until it does."""
        self.process.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{self.process.pid}/stat")
        wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path.insert(0, str(_ROOT))
    from snapd.mooncakeconfig import MooncakeConfig
    from snapd.transport.mooncake_engine import MooncakeEngine

    fd, size_bytes = int(sys.argv[1]), int(sys.argv[2])
    memory = mmap.mmap(fd, size_bytes)
    engine = MooncakeEngine(MooncakeConfig())
    engine.register(address_of(memory), size_bytes)
    print(json.dumps({"segment_name": engine.segment_name, "address": address_of(memory)}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(engine.take_notifications()), flush=True)
    os._exit(0)  # Deleting the engine would take a second.


if __name__ == "__main__":
    main()

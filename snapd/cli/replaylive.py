"""``snapd replay --live``: the trace against a running daemon, with real bytes."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from snapd.cli.common import print_json

if TYPE_CHECKING:
    from snapd.replay.chains import Turn
    from snapd.replay.liveplan import LiveOptions, LiveProgress

EXIT_CORRUPT: Final = 1


def replay_live(turns: "Sequence[Turn]", options: "LiveOptions", *, as_json: bool) -> int:
    """Replay, say what it came to, and return the exit status: 1 when a byte was not what D had made.

    Raises:
        SnapdError: see ``snapd.replay.live.run_live``.
    """
    from rich.console import Console

    from snapd.replay.live import run_live
    from snapd.replay.livereport import progress_line, show_live

    is_watched = sys.stderr.isatty()
    status = Console(stderr=True).status("replaying") if is_watched else nullcontext(None)
    with status as line:

        def show(progress: "LiveProgress") -> None:
            if line is not None:
                line.update(progress_line(progress))

        result = run_live(turns, options, show)
    if as_json:
        print_json(result)
    else:
        show_live(Console(highlight=False, width=None if sys.stdout.isatty() else 110), result)
    return 0 if result.is_good else EXIT_CORRUPT

"""Without a GPU, Triton's kernels run in its interpreter; that has to be said before it is imported."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

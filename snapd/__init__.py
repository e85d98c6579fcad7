"""snapd: a buffer beside the prefill worker, so that decoded KV cache comes back."""

from typing import Final

__version__: Final = "0.1.0"

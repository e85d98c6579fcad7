"""Moving KV bytes between an engine's kv_pool and a snapshot's planes; only the modules import torch."""

import importlib.util

from snapd.errors import ExtraMissing

if importlib.util.find_spec("torch") is None:
    raise ExtraMissing("snapd.kv needs torch: pip install 'kv-snapd[kv]'")

"""Moving KV bytes between an engine's kv_pool and a snapshot's planes; only the modules import torch."""

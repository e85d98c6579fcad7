"""``snapd demo``: a daemon, decode workers and prefill ranks on this machine, and a proof of what they did.

Every part is a process of its own. ``orchestrator`` plays a request trace; ``decoder`` is a D
worker, ``prefill`` a P rank, ``worker`` their entry point. The kv_pools are shared memory that the
orchestrator owns, so that P can be compared with D byte for byte, also when D was killed.

What is simulated: there is no model. A token's KV is random bytes, drawn from the seed, the
session, the turn and the rank, so that a D that lost them can draw the same ones again. P's own
prefill work only takes slots away for a while.
"""

"""``snapd doctor``: what of this machine and this configuration works, what does not, and what to do.

Each check is a small function that returns findings and changes nothing. What can hang or crash, which is
everything that touches Mooncake, runs in child processes with a deadline (``selftest``, ``endpoint``).

Source: design, section 10.
"""

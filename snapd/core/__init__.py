"""The pure core: events in, instructions out; no clock, no I/O, no randomness."""

"""Runs a request trace through models of P and D, with and without snapd, under simulated time.

The models are pure: no asyncio, no torch, no clock of this machine, no randomness but the seed's. The core,
its executor and its timers are the daemon's own.
"""

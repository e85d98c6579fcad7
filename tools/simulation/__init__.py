"""The deterministic simulation: snapd's own core, protocol and clients in made-up time, with faults.

``plan`` draws what happens from a seed, ``world`` runs it, ``checks`` watches, ``shrink`` makes a failure
small.
"""

"""Prometheus metrics, on request.

What happens is counted in plain numbers (``tally``, ``requests``, ``looplag``); which metrics there are is
one table (``definitions``); ``exposition`` turns it into text, ``endpoint`` serves that over HTTP on the
daemon's own loop, and ``serving`` puts them together. Nothing of this is imported while metrics are off.

Source: design, section 10.
"""

"""KV events, on request: which prefixes the buffer holds, published as vLLM and SGLang publish theirs.

A router that follows the events of engines can follow these too, and send a session's next turn to the P
whose buffer holds its snapshot. ``events`` is the wire form, ``hashes`` says what a page is called,
``ledger`` which pages were told, ``observer`` follows the records of the core, ``publisher`` has the sockets
and a thread of its own, and ``serving`` puts them together. The daemon imports nothing of this while it is
off.

Source: design, sections 3, 5 and 10.
"""

"""What the scheduler's side tells the workers in a step. Sent to other processes as it is."""

import msgspec

from snapd.calls import Grant
from snapd.layout import Layout


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Bring tokens ``[resident_tokens, wanted_tokens)`` of a snapshot into blocks.

    Attributes:
        request_id: who waits for it; empty: nobody, as the snapshot is of no use and is only to be ended.
        session_id, slab_handle: of the attempt.
        layout_fingerprint: of the request's namespace.
        token_ids: the request's, as far as they are compared.
        resident_tokens: what P holds; whole blocks.
        wanted_tokens: what it is to hold; whole blocks.
        block_ids: where to, shape [(wanted_tokens - resident_tokens) / block size].
    """

    request_id: str
    session_id: str
    slab_handle: int
    layout_fingerprint: str
    token_ids: list[int]
    resident_tokens: int
    wanted_tokens: int
    block_ids: list[int]


class PushOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Send the KV of a request that has finished.

    Attributes:
        request_id: whose blocks are held for it.
        socket_path: of the daemon that granted.
        grant: where to; None: it was not granted, so the blocks are only to be given back.
        block_ids: of the request's tokens from 0 on; whole blocks.
    """

    request_id: str
    socket_path: str
    grant: Grant | None
    block_ids: list[int]


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one step.

    Attributes:
        loads, pushes: in order.
        layouts: that P is to declare, as requests of new namespaces have come.
    """

    loads: list[LoadOrder] = []
    pushes: list[PushOrder] = []
    layouts: list[Layout] = []

    @property
    def is_empty(self) -> bool:
        """There is nothing to do."""
        return not (self.loads or self.pushes or self.layouts)

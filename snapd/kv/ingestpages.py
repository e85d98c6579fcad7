"""P's copy of some pages of a snapshot into slots that the engine has chosen.

For an engine that finds pages by keys of its own, and whose tokens are not known here. It keeps slots and
tree, and hears whether the bytes may be used. A snapshot of which all pages up to its end are used is
INGESTED; one with a rest that is not stays READY.

Source: design, sections 3 and 8.
"""

import contextlib
from collections.abc import Sequence

import msgspec
import torch

from snapd import calls
from snapd.errors import InvalidRequest, Reason, SnapdError
from snapd.kv.ingest import Ingester
from snapd.kv.ingestjob import IngestJob
from snapd.layout import token_digest
from snapd.wire import BeginIngestRep


class LentSlots:
    """The ``KVOwner`` of an ``Ingester`` for ``PagesJob``: what it lends are the slots of the present job."""

    def __init__(self) -> None:
        self._skip_tokens = 0
        self._slots: torch.Tensor | None = None

    def lend(self, skip_tokens: int, slots: torch.Tensor) -> None:
        """Have the next job fill *slots* with the tokens from *skip_tokens* on."""
        self._skip_tokens = skip_tokens
        self._slots = slots

    def lock_prefix(self, session_id: str, token_ids: Sequence[int]) -> int:
        """Return how many of the snapshot's tokens are not wanted because P has them."""
        del session_id, token_ids
        return self._skip_tokens

    def unlock_prefix(self, session_id: str) -> None:
        """Do nothing: the engine keeps what it has."""

    def allocate(self, num_tokens: int) -> torch.Tensor | None:
        """Return the slots."""
        slots, self._slots = self._slots, None
        if slots is None or slots.numel() != num_tokens:
            return None
        return slots

    def free(self, slots: torch.Tensor) -> None:
        """Do nothing: the engine gives them back when it hears that the load failed."""

    def insert(
        self, session_id: str, token_ids: Sequence[int], resident_tokens: int, slots: torch.Tensor
    ) -> None:
        """Do nothing: the engine inserts them when its forward pass is done."""


class PagesJob(IngestJob):
    """An ingest of tokens ``[skip_tokens, skip_tokens + len(slots))`` of a snapshot that counts from token 0.

    Args:
        ingester: made with a ``LentSlots`` as its owner.
        session_id: the snapshot's name.
        slab_handle: of the attempt.
        slots: whole pages, int64, on the CPU or the pool's device.
        skip_tokens: whole pages.
        digest: what D must have given as the digest of all tokens, or how it begins.
        keep_rest: the snapshot has tokens behind them: leave it READY.
        vote_timeout_s: how long to wait for the daemon's decision, twice.
        after: see ``Ingester.start``.

    Raises:
        InvalidRequest: *ingester* has another owner.
    """

    def __init__(
        self,
        ingester: Ingester,
        session_id: str,
        slab_handle: int,
        slots: torch.Tensor,
        *,
        skip_tokens: int,
        digest: str,
        keep_rest: bool,
        vote_timeout_s: float,
        after: Sequence[torch.cuda.Event] | None = None,
    ) -> None:
        if not isinstance(ingester.owner, LentSlots):
            raise InvalidRequest("the ingester keeps slots and a tree of its own")
        ingester.reap()
        ingester.owner.lend(skip_tokens, slots)
        self._expected_digest = digest
        self._keep_rest = keep_rest
        self._vote_timeout_s = vote_timeout_s
        stop_tokens = skip_tokens + slots.numel()
        # Which tokens they are is not known; how many there are is all that is asked of these.
        super().__init__(ingester, session_id, range(stop_tokens), slab_handle, after, stop_tokens)

    def _begin(self, lease: BeginIngestRep, token_ids: Sequence[int]) -> None:
        stop_tokens = len(token_ids)
        is_cut = stop_tokens < lease.num_tokens
        if (
            lease.token_start != 0
            or stop_tokens > lease.num_tokens
            or is_cut is not self._keep_rest
            or not lease.token_digest.startswith(self._expected_digest)
        ):
            self._vote_no(Reason.TOKEN_MISMATCH, keep=True)
            return
        # The digest is compared; what the engine's tokens would give is not known on either side.
        super()._begin(msgspec.structs.replace(lease, token_digest=token_digest(token_ids)), token_ids)

    def _cast_vote(self) -> None:
        if not self._keep_rest:
            self._votes_cast += 1
            self._vote = self._in.client.submit(
                calls.vote(
                    self._handle,
                    self._in.rank,
                    self._lease.lease_id,
                    ok=True,
                    epoch=self._epoch,
                    timeout_s=self._vote_timeout_s,
                )
            )
            return
        # Only the lease is given back; without this it ends by its time.
        with contextlib.suppress(SnapdError):
            self.decision = self._in.client.vote(
                self._handle,
                self._in.rank,
                self._lease.lease_id,
                ok=False,
                reason=Reason.INGEST_FAILED,
                keep=True,
                epoch=self._epoch,
                timeout_s=self._vote_timeout_s,
            )
        self._finish(Reason.OK)

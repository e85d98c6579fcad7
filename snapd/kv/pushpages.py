"""D's push of pages that the engine has keys of its own for, and whose tokens it keeps to itself.

Source: design, section 8.
"""

import time
from collections.abc import Sequence

import torch

from snapd.kv.control import PrepareRequest
from snapd.kv.push import REFUSALS, Pusher
from snapd.kv.pushjob import PushJob, RefusedJob


class PagesPusher(Pusher):
    """A ``Pusher`` that pushes pages by their keys too."""

    def start_pages(
        self,
        session_id: str,
        keys: Sequence[str],
        slots: torch.Tensor,
        *,
        digest: str,
        after: Sequence[torch.cuda.Event] | None = None,
    ) -> PushJob:
        """Begin a push of whole pages that is done in steps, as ``start`` begins one of tokens.

        Where the pages are in a prompt is not said: the snapshot counts its tokens from 0, and P finds it by
        the same keys.

        Args:
            session_id: the snapshot's name.
            keys: one a page, as P computes them too; equal keys mean equal tokens up to that page's end.
            slots: where the pages are, int64 on the CPU, shape [len(keys) * page size], on every rank.
            digest: stands for all tokens up to the end; P compares it.
            after: see ``push``.

        Raises:
            InvalidRequest: *slots* do not fit, or there are events and the pools are on the host.
        """
        num_tokens = len(keys) * self.layout.page_size_tokens
        checked = self._check_slots(slots, num_tokens)
        events = self._gpus.events(after)
        started_s = time.monotonic()
        request = PrepareRequest(
            session_id=session_id,
            num_tokens=num_tokens,
            layout_fingerprint=self.layout_fingerprint,
            token_start=0,
            token_digest=digest,
            page_keys=tuple(keys),
            ranks=tuple(self.pools),
            use_resident_hint=False,
            is_only_writer=True,
        )
        try:
            hello, grant = self._ask(lambda: self.control.prepare(request))
        except REFUSALS as error:
            return RefusedJob(error)
        return self._job(hello, grant, checked, started_s, events)

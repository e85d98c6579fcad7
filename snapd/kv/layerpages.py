"""Pages of a snapshot brought in layer by layer, for engines whose forward pass begins while it goes on.

Two passes. The first only reads the slab and compares all of it with what D committed, so that a snapshot
that is not right is refused before anything depends on it. The second moves it a group of layers after the
other, sums again what it moves, and counts a layer as done when its bytes are in the slots and equal once
more: a slab is shared memory, and somebody may write there between the passes. The vote follows the last
layer.

Source: design, sections 3 and 8.
"""

import time
from collections.abc import Sequence
from typing import Final, NoReturn

import torch

from snapd.errors import ConnectionProblem, Reason, RequestTimeout, SnapdError
from snapd.kv.devicescatter import DeviceScatter
from snapd.kv.hostscatter import HostScatter
from snapd.kv.ingestjob import AnyScatter
from snapd.kv.ingestpages import PagesJob
from snapd.kv.integrity import KeyedIntegrity
from snapd.kv.keyedscatter import KeyedScatter
from snapd.units import MS_PER_S, ceil_div

# A launch for every layer would take longer than the copy itself.
DEVICE_GROUPS_MAX: Final = 8


def layer_groups(layers: Sequence[Sequence[int]], groups_max: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return layers that are done with together, in order: of each its planes, by index.

    Args:
        layers: planes of every layer, by index.
        groups_max: so many groups at most.
    """
    size = ceil_div(len(layers), groups_max)
    cut = [layers[start : start + size] for start in range(0, len(layers), size)]
    return tuple(tuple(tuple(layer) for layer in group) for group in cut)


class LayerPagesJob(PagesJob):
    """A ``PagesJob`` in two passes; ``step`` until ``is_verified``, and from then on for the layers.

    Args, attributes and errors as of ``PagesJob``. One thread at a time steps it; it may be another one for
    the second pass. Slots are on the CPU. Given up in its second pass, it is to be stepped until it is done.
    """

    # The first pass is set up while the base is made.
    _is_verified = False
    _has_moved = False
    _is_unanswered = False
    _groups_compared = 0
    _layers: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @property
    def slab_handle(self) -> int:
        """Of the attempt."""
        return self._handle

    @property
    def is_verified(self) -> bool:
        """What the slab holds was compared, and is what D committed; the next step writes the first slots."""
        return self._is_verified

    @property
    def layers_done(self) -> int:
        """So many layers, from the first on, are in their slots and compared."""
        return sum(len(group) for group in self._layers[: self._groups_compared])

    @property
    def has_moved(self) -> bool:
        """All layers are; the next step votes."""
        return self._has_moved

    @property
    def has_landed(self) -> bool:
        """It is done, every layer is there, and the daemon has not said no.

        A daemon that is gone, or does not answer in time, says nothing of bytes that were compared twice.
        """
        return self.done and (self.result.ok or self.is_unanswered)

    @property
    def is_unanswered(self) -> bool:
        """The daemon has not answered the vote."""
        return self._is_unanswered and self.decision is None

    @property
    def is_late(self) -> bool:
        """Less than half of the lease's time is left: a second pass may not end within it."""
        return time.monotonic() >= self._lease_end_s - self._lease.lease_ms / MS_PER_S / 2

    @property
    def is_waiting_for_device(self) -> bool:
        """All is launched: only the GPU has to go on."""
        return self._scatter is not None and self._scatter.is_launched

    def _new_scatter(
        self, planes: Sequence[torch.Tensor], skip_tokens: int, stop_tokens: int, num_tokens: int
    ) -> AnyScatter:
        pool = self._in.pool
        is_async = self._in.copies.is_async
        self._layers = layer_groups(pool.layers, DEVICE_GROUPS_MAX if is_async else len(pool.layers))
        self._groups = [tuple(index for layer in group for index in layer) for group in self._layers]
        self._parts = (planes, skip_tokens, stop_tokens, num_tokens)
        if not self._in.verify:
            return self._begin_layers()
        if self._in.integrity is not None:
            return self._reading_keyed(self._in.integrity, planes, num_tokens)
        if not is_async:
            return HostScatter(_no_job, pool, planes, None, num_tokens, num_tokens, verify=True)
        return DeviceScatter(
            _no_job,
            pool,
            planes,
            None,
            num_tokens,
            num_tokens,
            verify=True,
            stream_of=self._in.reading.stream_of,
            after=(),
            private=self._in.reading.private,
            summing=self._in.copies.summing,
        )

    def _reading_keyed(
        self, integrity: KeyedIntegrity, planes: Sequence[torch.Tensor], num_tokens: int
    ) -> KeyedScatter:
        macs = integrity.accepted_macs(self._context(), len(planes))
        pool = self._in.pool
        return KeyedScatter(pool, planes, None, num_tokens, num_tokens, stop_tokens=num_tokens, macs=macs)

    def _begin_layers(self) -> AnyScatter:
        planes, skip_tokens, stop_tokens, num_tokens = self._parts
        self._is_verified = True
        return self._make_scatter(planes, skip_tokens, stop_tokens, num_tokens, self._groups)

    # --- steps ---------------------------------------------------------------------------------

    def _step_scatter(self, max_bytes: int) -> None:
        if self._has_moved:
            self._go_to_vote()
            return
        is_over = time.monotonic() >= self._lease_end_s
        if self._is_verified and is_over and not self.is_waiting_for_device:
            # Others may write there by now.
            self._vote_no(Reason.LEASE_EXPIRED, keep=True)
            return
        super()._step_scatter(max_bytes)

    def _compare(self, is_done: bool) -> None:
        if not self._is_verified:
            if not is_done:
                return
            differing = self._differing_planes()
            if differing:
                self._refuse_bytes(len(differing))
            else:
                self._scatter = self._begin_layers()
            return
        assert self._scatter is not None
        for group in self._groups[self._groups_compared : self._scatter.groups_done]:
            differing = self._differing_in(group)
            if differing:
                self._refuse_bytes(len(differing))
                return
            self._groups_compared += 1
        self._has_moved = is_done

    def _differing_in(self, group: Sequence[int]) -> list[int]:
        """Return those of a group's planes of which P read other bytes than D committed."""
        expected = self._lease.checksums
        if not self._in.verify:
            return []
        if isinstance(self._scatter, KeyedScatter):
            return self._scatter.differing_in(group, expected)
        assert self._scatter is not None
        return [index for index in group if self._scatter.checksum_of(index) != tuple(expected[index])]

    def _leave_to_reap(self) -> None:
        """Do nothing: whoever steps it goes on, and is another thread than the one that reaps."""

    def _fail(self, error: SnapdError) -> None:
        if self.is_waiting:
            # After a restart the daemon knows nothing of a lease of before.
            is_gone = self._in.client.epoch != self._epoch
            self._is_unanswered = is_gone or isinstance(error, ConnectionProblem)
            if isinstance(error, RequestTimeout):
                # A forward pass waits, for one load after the other: whoever hangs is not asked twice.
                self._settle(Reason.LEASE_EXPIRED, commit=False)
                return
        super()._fail(error)


def _no_job(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a pass that only reads moves nothing")

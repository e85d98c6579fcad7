"""The arena of a daemon that is gone is unmapped at once: until then its memory is nobody else's."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_cases import serve
from kv_cases import PATIENCE_S, TOKENS, begun, finish, paired
from raw_client import wait_for

from snapd.errors import Reason
from snapd.mapping import MappedArena


@pytest.fixture
def without_collections() -> Iterator[None]:
    """Garbage that refers to itself stays inside."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("kv-snapd-arena")


@pytest.mark.slow
@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("is_back", [True, False], ids=["restarted", "away"])
def test_a_push_that_the_daemon_did_not_survive_keeps_no_arena(
    start_daemon: Callable[..., Any], is_back: bool
) -> None:
    daemon = start_daemon()
    with paired(daemon) as pair:
        serve(pair)
        before = num_arenas()
        job, _ = begun(pair)
        daemon.kill()
        if is_back:
            daemon.restart()
        reason = finish(job).result.reason
        assert reason == (Reason.STALE_HANDLE if is_back else Reason.TRANSFER_FAILED)
        del job
        if not is_back:
            daemon.restart()
        pair.ps[0].ping()  # P meets the new epoch.
        serve(pair)
        assert num_arenas() == before


@pytest.mark.slow
@pytest.mark.usefixtures("without_collections")
def test_a_push_whose_commit_nobody_hears_keeps_no_arena(
    start_daemon: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error that tells of it has passed frames that hold the arena's planes."""
    daemon = start_daemon()
    with paired(daemon) as pair:
        serve(pair)
        before = num_arenas()
        slabs = pair.pusher._slabs
        planes_of = slabs.planes

        def planes_and_kill(*arguments: Any) -> Any:
            planes = planes_of(*arguments)
            daemon.kill()
            return planes

        with monkeypatch.context() as patch:
            patch.setattr(slabs, "planes", planes_and_kill)
            assert pair.push("s", TOKENS).reason == Reason.TRANSFER_FAILED
        daemon.restart()
        pair.ps[0].ping()
        serve(pair)
        assert num_arenas() == before


@pytest.mark.parametrize("is_clean", [False, True], ids=["killed", "stopped"])
def test_a_daemon_that_ends_frees_its_arenas_though_p_and_d_do_nothing(
    start_daemon: Callable[..., Any], is_clean: bool
) -> None:
    daemon = start_daemon()
    gc.collect()
    before = num_arenas()  # Of other tests.
    with paired(daemon) as pair:
        serve(pair)
        assert num_arenas() > before
        end = daemon.stop if is_clean else daemon.kill
        end()
        wait_for(lambda: num_arenas() <= before, "they are unmapped", PATIENCE_S)
        daemon.restart()
        pair.ps[0].ping()
        serve(pair)


@pytest.mark.slow
def test_writes_that_were_begun_go_on_to_their_end_and_the_commit_tells_of_the_restart(
    start_daemon: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller makes them again, as after every stale handle."""
    daemon = start_daemon()
    with paired(daemon) as pair:
        widths = (*pair.pusher.layout.k_stride_bytes, *pair.pusher.layout.v_stride_bytes)
        planes = {
            rank: [torch.zeros(len(TOKENS) * width, dtype=torch.uint8) for width in widths]
            for rank in pair.pusher.pools
        }
        real, came = MappedArena.copy_in, []

        def copy_in(arena: MappedArena, *arguments: int) -> None:
            if not came:
                came.append(arena)
                daemon.kill()
                daemon.restart()
                wait_for(lambda: arena._buffer is None, "it is let go of", PATIENCE_S)
            real(arena, *arguments)

        monkeypatch.setattr(MappedArena, "copy_in", copy_in)
        assert pair.pusher.push_planes("s", TOKENS, planes).reason == Reason.STALE_HANDLE
        assert came

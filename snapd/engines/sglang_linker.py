"""SGLang's UnifiedCacheLinker over snapd: D offloads what it computed, P looks it up and loads it.

Switched on with::

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "SnapdLinker",
        "linker_module_path": "snapd.engines.sglang_linker", "linker_extra_config": {...}}'

SGLang imports this module, and nothing else does: importing it imports SGLang.

Source: design, section 9.
"""

import enum
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import structlog
import torch

from snapd.engines.sglang_decode import hear_of_offloads
from snapd.engines.sglang_inject_ranks import GroupAgreement
from snapd.engines.sglang_layers import LoadBatch
from snapd.engines.sglang_load import Loader
from snapd.engines.sglang_offload import Offloader
from snapd.engines.sglang_pools import DISTRIBUTIONS, TESTED_VERSIONS, attribute, kv_pool_of, sglang_module
from snapd.engines.support import EngineSettings, check_version, read_settings
from snapd.errors import ConfigError, UnsupportedEngine
from snapd.layout import Namespace

_SOURCE: Final = "unified_cache_external_linker_config.linker_extra_config"

_log: Final = structlog.get_logger("snapd.engines")
_api: Final = sglang_module("mem_cache.unified_cache.unified_cache_linker")
_Base: Final[Any] = attribute(_api, "UnifiedCacheLinker")
_KV: Final = sglang_module("mem_cache.hicache_storage").PoolName.KV


class Role(enum.StrEnum):
    """What the engine does with the linker: as SGLang's disaggregation mode says, or as it is told."""

    PREFILL = "prefill"
    DECODE = "decode"


class LinkerSettings(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of this adapter.

    Attributes:
        role: ``prefill`` or ``decode``; empty: as SGLang's disaggregation mode says.
        layer_wise: P moves a verified load layer by layer, under the forward pass; False: before it, whole.
    """

    role: str = ""
    layer_wise: bool = True


def read_role(given: Mapping[str, Any], disaggregation_mode: str) -> tuple[Role, LinkerSettings]:
    """Return what the engine is, and its settings.

    Raises:
        ConfigError: neither the settings nor SGLang's mode say what it is; or a setting is wrong.
    """
    settings = read_settings(given, _SOURCE, LinkerSettings)
    wanted = settings.role or disaggregation_mode
    if wanted not in tuple(Role):
        raise ConfigError(
            f"{_SOURCE}: role is {wanted!r}: set it to 'prefill' or 'decode', or give --disaggregation-mode"
        )
    return Role(wanted), settings


def check_supported(params: Any, components: Collection[Any], *, is_dp_attention: bool) -> None:
    """Check that what the pages hold is all that a token needs, and that ranks can be told apart.

    Raises:
        UnsupportedEngine: it is not; the message says what to do without.
    """
    names = sorted(getattr(component, "name", str(component)) for component in components)
    if names != ["FULL"]:
        raise UnsupportedEngine(
            f"the model's cache has the components {', '.join(names)}; snapd moves full attention only"
        )
    if attribute(params, "mtp_draft_device_pools") or attribute(params, "sidecar_draft_device_pools"):
        raise UnsupportedEngine(
            "a draft model has a KV cache of its own, which snapd does not move: "
            "serve without --speculative-algorithm, or with one that has no draft model"
        )
    for name, what in (("pp_size", "pipeline parallelism"), ("attn_cp_size", "context parallelism")):
        if attribute(params, name) > 1:
            raise UnsupportedEngine(f"{what} is not supported: {name} is {getattr(params, name)}")
    if is_dp_attention:
        raise UnsupportedEngine("attention that is data parallel is not supported: its ranks share no prefix")


class SnapdLinker(_Base):  # type: ignore[misc]
    """SGLang's link to the daemon: on D it pushes, on P it loads.

    SGLang makes one a rank, and calls it on the scheduler's thread.

    Args:
        server_args: SGLang's.
        params: how SGLang makes its cache.
        components: of which it consists.
        extra_config: the settings of ``LinkerSettings``.
        forward_stream: what the forward pass runs on; None: the current stream.

    Raises:
        ConfigError: a setting is wrong, or P's pool and the daemon's arena do not fit.
        UnsupportedEngine: snapd does not know how to serve this model or this setting.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Collection[Any],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        check_version("sglang", DISTRIBUTIONS, TESTED_VERSIONS)
        role, settings = read_role(extra_config or {}, str(server_args.disaggregation_mode))
        parallel = sglang_module("runtime_context").get_parallel()
        check_supported(params, components, is_dp_attention=bool(attribute(parallel, "attn_dp_enabled")))
        hear_of_offloads(
            str(server_args.disaggregation_mode),
            can_switch=bool(attribute(server_args, "enable_pd_role_switch")),
        )
        self.forward_stream = forward_stream
        kv_cache = params.token_to_kv_pool_allocator.get_kvcache()
        self.pools = {_KV: kv_cache}
        self.layer_done_counter = attribute(_api, "LayerWiseLoadCounter")(int(kv_cache.layer_num))
        self._batches: dict[int, LoadBatch] = {}
        # What P is offered is told to be done at once.
        self._told = 0
        pool = kv_pool_of(kv_cache)
        self._is_on_gpu = pool.device.type == "cuda"
        groups = _groups_of(params)
        rank, size = _rank_of(groups)
        model = settings.model or str(server_args.served_model_name or server_args.model_path)
        current_version = _weight_version(settings)

        def namespace() -> Namespace:
            # Ranks hold different heads in equal shapes.
            return Namespace(
                model=model, cache_salt=f"sglang {rank}/{size}", weight_version=current_version(),
                tenant=settings.tenant,
            )  # fmt: skip

        self._loader: Loader | None = None
        self._offloader: Offloader | None = None
        if role is Role.PREFILL:
            agree = GroupAgreement(groups[0]).all_of if size > 1 else None
            self._loader = Loader(
                settings, rank, pool, namespace, agree=agree, layer_wise=settings.layer_wise
            )
        else:
            self._offloader = Offloader(settings, rank, pool, namespace)
        _log.info("snapd is linked", role=role.value, rank=rank, ranks=size, model=model)

    # --- P -------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Return every number of pages, from the first on, that can be loaded."""
        if self._loader is None:
            return []
        return list(range(1, self._loader.lookup(rid, _of_kv(transfers).keys) + 1))

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Verify pages, and return whether they come with the next batch; False: SGLang computes them."""
        if self._loader is None:
            return False
        transfer = _of_kv(transfers)
        after = self.record_offload_ready() if self._is_on_gpu else None
        return self._loader.load(rid, transfer.keys, transfer.device_indices, after)

    def start_layer_wise_loading(self) -> int:
        """Have what was loaded for the batch come; return the counter's index of it, or -1: there is none."""
        if self._loader is None or not self._loader.has_queued:
            return -1
        counter = self.layer_done_counter
        index = int(counter.update_producer())
        self._batches[index] = self._loader.start(
            functools.partial(counter.complete, index), functools.partial(counter.fail, index)
        )
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until no slot is written for a batch; False: its requests are to end with an error."""
        batch = self._batches.pop(counter_index, None)
        # Of the counter first: SGLang's layers are forgotten with it.
        has_landed = bool(self.layer_done_counter.finish(counter_index))
        if self._loader is not None and batch is not None:
            has_landed = self._loader.finish(batch) and has_landed
        return has_landed

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load whose batch has not begun; its slots are not written any more."""
        return self._loader is not None and self._loader.forget(rid)

    # --- D -------------------------------------------------------------------------------------

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        """Take a node's pages to push; False: not now.

        P has what it is asked to offload, or has just loaded it: that is done at once.
        """
        if self._offloader is None:
            self._told += 1
            return True
        transfer = _of_kv(transfers)
        events = self.record_offload_ready() if self._is_on_gpu else ()
        return self._offloader.offer(transfer.keys, transfer.device_indices, session_id, events)

    def num_completed_offloads(self) -> int:
        """Return how many offloads are done with."""
        return self._told if self._offloader is None else self._offloader.completed()

    def pop_completed_offload(self) -> bool:
        """Take the oldest of them, and return whether it went well."""
        if self._offloader is not None:
            return self._offloader.take()
        self._told -= 1
        return True

    # --- both ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """SGLang empties its cache. The daemon keeps what it has: it is of the same weights."""
        self._told = 0
        if self._loader is not None:
            self._loader.forget_all()
        if self._offloader is not None:
            self._offloader.reset()
        self._batches.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """SGLang ends."""
        self.reset()
        if self._loader is not None:
            self._loader.close()
        if self._offloader is not None:
            self._offloader.close()


def _of_kv(transfers: Sequence[Any]) -> Any:
    return next(transfer for transfer in transfers if transfer.name == _KV)


def _groups_of(params: Any) -> list[Any]:
    """Return the process groups of the ranks that share a prefix, as SGLang's tree chooses them."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    candidates = (attribute(params, "attn_tp_cache_group"), attribute(params, "tp_cache_group"))
    group = next((group for group in candidates if group is not None), None)
    return [] if group is None else [group]


def _rank_of(groups: Sequence[Any]) -> tuple[int, int]:
    if not groups:
        return 0, 1
    return torch.distributed.get_rank(group=groups[0]), torch.distributed.get_world_size(group=groups[0])


def _weight_version(settings: EngineSettings) -> Callable[[], str]:
    """Return what says which weights SGLang has now: as the operator set it, else as SGLang knows it."""
    if settings.weight_version:
        return lambda: settings.weight_version
    context = sglang_module("runtime_context")
    return lambda: str(context.get_serving().weight_version)

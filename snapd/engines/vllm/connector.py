# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""``SnapdConnector``: the two sides of snapd, as vLLM 0.32 wants a KV connector to be.

The scheduler's object has a ``SchedulerSide`` and each worker's a ``WorkerSide``. vLLM makes each where it is
needed, perhaps in processes of their own; all that goes from one to the other is the layout, in the first
step, and the orders of each step. (vLLM's handshake at start would do for the layout, but is not each
connector's own inside a MultiConnector.)

Source: design, section 9.
"""

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import structlog
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.request import RequestStatus

from snapd.engines.support import check_version, read_settings
from snapd.engines.vllm.kvcache import pool_of
from snapd.engines.vllm.metrics import SnapdMetrics, SnapdStats
from snapd.engines.vllm.orders import Orders
from snapd.engines.vllm.requests import RequestView
from snapd.engines.vllm.scheduling import SchedulerSide
from snapd.engines.vllm.settings import DISTRIBUTIONS, SOURCE, TESTED_VERSIONS, VllmSettings
from snapd.engines.vllm.support import block_tokens_of, check_config
from snapd.engines.vllm.working import WorkerSide
from snapd.errors import UnsupportedEngine
from snapd.layout import Layout, Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log: Final = structlog.get_logger("snapd.engines")


class StepOrders(KVConnectorMetadata):
    """A step's orders on their way to the workers."""

    def __init__(self, orders: Orders, *, wants_layout: bool) -> None:
        self.orders = orders
        self.wants_layout = wants_layout


class WorkerLayouts(KVConnectorWorkerMetadata):
    """The workers' layouts on their way to the scheduler."""

    def __init__(self, layouts: frozenset[Layout]) -> None:
        self.layouts = layouts

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return both workers' layouts."""
        assert isinstance(other, WorkerLayouts)
        return WorkerLayouts(self.layouts | other.layouts)


def _view(request: "Request") -> RequestView:
    lora = request.lora_request
    token_ids = request.all_token_ids
    return RequestView(
        request_id=request.request_id,
        tokens=lambda: token_ids[:],
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_output_tokens,
        params=request.kv_transfer_params,
        lora="" if lora is None else lora.lora_name,
        cache_salt=request.cache_salt or "",
        is_plain=not request.mm_features
        and request.prompt_embeds is None
        and request.pooling_params is None
        and request.status not in (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED),
    )


class SnapdConnector(KVConnectorBase_V1):
    """Pushes the KV of finished requests into snapd (D), and starts requests from snapshots (P).

    Settings are ``VllmSettings``, in ``kv_connector_extra_config``.

    Raises:
        UnsupportedEngine: the model, or how it is run, is not supported.
        ConfigError: a setting is unknown or wrong.
    """

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = read_settings(transfer.kv_connector_extra_config, SOURCE, VllmSettings)
        check_config(vllm_config, kv_cache_config)
        self._is_producer = bool(transfer.is_kv_producer)
        self._is_consumer = bool(transfer.is_kv_consumer)
        letters = "D" * self._is_producer + "P" * self._is_consumer
        self._name = f"vllm {letters}"
        self._block_tokens = block_tokens_of(kv_cache_config)
        self._num_ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        self._base = Namespace(
            model=self._settings.model or vllm_config.model_config.model,
            weight_version=self._settings.weight_version,
            tenant=self._settings.tenant,
        )
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._layout: Layout | None = None
        if role is KVConnectorRole.SCHEDULER:
            check_version("vllm", DISTRIBUTIONS, TESTED_VERSIONS)
            self._scheduler = SchedulerSide(
                self._settings,
                block_tokens=self._block_tokens,
                ranks=range(self._num_ranks),
                is_producer=self._is_producer,
                is_consumer=self._is_consumer,
                name=self._name,
                is_one_process=vllm_config.parallel_config.distributed_executor_backend == "uni",
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A push that does not happen costs time later, and nothing else."""
        return False

    # --- the scheduler's side ------------------------------------------------------------------------

    @property
    def _sched(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def _take_layouts(self, layouts: frozenset[Layout]) -> None:
        """Take the workers' layouts, which must be alike."""
        if len(layouts) != 1:
            raise UnsupportedEngine(f"the workers have {len(layouts)} layouts; one is wanted")
        (layout,) = layouts
        self._sched.set_layout(layout)
        _log.info(
            "snapd is on", role=self._name, socket_path=self._settings.socket_path, kv_cache=layout.dtype,
            token_bytes=layout.token_bytes, block_tokens=layout.page_size_tokens,
        )  # fmt: skip

    def on_new_request(self, request: "Request") -> None:
        """Take note of a request."""
        self._sched.arrived(request.request_id)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and that they are while the engine steps."""
        num_tokens = self._sched.match(_view(request), num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Take note of the blocks to load into."""
        if num_external_tokens:
            self._sched.allocated(_view(request), blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Return the orders of this step."""
        del scheduler_output
        return StepOrders(self._sched.orders(), wants_layout=not self._sched.has_layout)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take note of pushes and loads that have ended on every worker; and of their layout, at first."""
        workers = connector_output.kv_connector_worker_meta
        if isinstance(workers, WorkerLayouts) and not self._sched.has_layout:
            self._take_layouts(workers.layouts)
        self._sched.sent(connector_output.finished_sending or ())
        self._sched.loaded(connector_output.finished_recving or ())

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Have the KV of a request pushed; its blocks are held until ``get_finished`` names it."""
        return self._sched.finished(_view(request), block_ids)

    def reset_cache(self) -> bool | None:
        """Use nothing that was computed until now."""
        self._sched.forget_all()
        return True

    # --- a worker's side -----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Recognise the KV cache, and start the thread that moves it."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        backends = get_current_attn_backends(self._vllm_config, list(kv_caches))
        pool = pool_of(
            kv_caches,
            num_blocks=self._kv_cache_config.num_blocks,
            block_tokens=self._block_tokens,
            backends=[backend.full_cls_name()[-1] for backend in backends],
            num_ranks=self._num_ranks,
        )
        self._layout = pool.layout(self._base)
        self._worker = WorkerSide(
            pool,
            self._base,
            self._settings,
            rank=get_tensor_model_parallel_rank(),
            num_ranks=self._num_ranks,
            is_producer=self._is_producer,
            is_consumer=self._is_consumer,
            name=self._name,
        )
        self._worker.start()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this worker's layout when the scheduler has none yet."""
        metadata = self._connector_metadata
        if self._layout is None or not isinstance(metadata, StepOrders) or not metadata.wants_layout:
            return None
        return WorkerLayouts(frozenset({self._layout}))

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Hand this step's orders to the thread."""
        del forward_context, kwargs
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepOrders)
        if self._worker is None or metadata.orders.is_empty:
            return
        # Behind every forward pass so far: those of finished requests, and of whom these blocks were before.
        after = [torch.cuda.current_stream().record_event()] if torch.cuda.is_available() else None
        self._worker.take(metadata.orders, after)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is not scheduled before its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: KV is pushed when its request has finished."""

    def wait_for_save(self) -> None:
        """Do nothing: blocks are held until their push has ended."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return whose push, and whose load, has ended."""
        del finished_req_ids
        if self._worker is None:
            return None, None
        sent, loaded = self._worker.finished()
        return sent or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that have to be computed after all."""
        return set() if self._worker is None else self._worker.failed_blocks()

    def shutdown(self) -> None:
        """End what is under way."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # --- what both count -----------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """Return what was counted since the last call."""
        side = self._scheduler or self._worker
        counts = {} if side is None else side.tally.take()
        return SnapdStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "KVConnectorStats | None":
        """Return counts that come from another process."""
        return SnapdStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SnapdMetrics:
        """Return the metrics that vLLM serves beside its own."""
        return SnapdMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def take_events(self) -> Iterable[Any]:
        """Return nothing: the daemon tells of its own KV events."""
        return ()


# A MultiConnector looks its connectors' statistics up by name.
with contextlib.suppress(ValueError):
    KVConnectorFactory.register_connector("SnapdConnector", __name__, "SnapdConnector")

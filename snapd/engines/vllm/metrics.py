# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""The connector's counts as vLLM's statistics: in its log every few seconds, and among its metrics."""

from typing import Any, Final

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from snapd.engines.vllm.tally import BY_REASON, COUNTERS, add_counts, summary

_PREFIX: Final = "vllm:snapd_"


class SnapdStats(KVConnectorStats):
    """Counts of one or more workers and of the scheduler; ``data`` is ``tally.Counts``."""

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add *other*'s counts, and return this."""
        add_counts(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what is logged of an interval."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Nothing was counted."""
        return not self.data


class SnapdMetrics(KVConnectorPromMetrics):
    """One counter for each of ``COUNTERS``; those by reason have a label for it.

    With several workers an attempt counts once on each.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        assert Counter in metric_types
        self._counters = {
            name: self._counter_cls(
                name=_PREFIX + name,
                documentation=f"{documentation}.",
                labelnames=[*labelnames, "reason"] if name in BY_REASON else labelnames,
            )
            for name, documentation in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, by_reason in transfer_stats_data.items():
            for reason, amount in by_reason.items():
                values = [*labels, reason] if name in BY_REASON else labels
                self._counters[name].labels(*values).inc(amount)

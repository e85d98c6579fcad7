"""The metrics as text, as Prometheus scrapes it."""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from snapd.metrics.definitions import METRICS, Metric, Seen
from snapd.metrics.tally import Histogram

# Looking at 100,000 attempts holds everybody else up for some milliseconds: not for every scrape anew.
FRESH_S: Final = 1.0


class Exposition(Collector):
    """Makes the text, at most once in ``FRESH_S``.

    Args:
        look: returns everything as it is now.
        now_s: monotonic seconds.
    """

    def __init__(self, look: Callable[[], Seen], now_s: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._now_s = now_s
        self._text = b""
        self._made_s = 0.0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        # Memory, CPU time and file descriptors of the process, under the names that all programs use.
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return what a scrape gets; no older than ``FRESH_S``."""
        now_s = self._now_s()
        if not self._text or now_s - self._made_s >= FRESH_S:
            self._text = generate_latest(self._registry)
            self._made_s = now_s
        return self._text

    def describe(self) -> Iterable[Family]:
        """Return the metrics without samples; a registry asks for their names."""
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterator[Family]:
        """Yield every metric with its samples."""
        seen = self._look()
        for metric in METRICS:
            family = _family(metric)
            for labels, value in metric.samples(seen):
                if isinstance(family, HistogramMetricFamily):
                    assert isinstance(value, Histogram)
                    family.add_metric(labels, buckets_of(value), value.total)
                else:
                    assert not isinstance(value, Histogram)
                    family.add_metric(labels, value)
            yield family


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    kinds: dict[str, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    return kinds[metric.kind](metric.name, metric.help, labels=metric.labels)


def buckets_of(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the buckets as they are scraped: each with all that is below its bound."""
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))

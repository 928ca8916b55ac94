"""Metrics that are made from a process's own values when they are scraped."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

GAPS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Upper bounds of buckets in seconds, for stalls at swaps."""
TRANSFERS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""The same for the phases of a transfer."""


class Durations:
    """A histogram of seconds with one label. The library's own would add a line for the creation of each series."""

    def __init__(self, name: str, text: str, label: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._bounds = bounds
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        self._lock = threading.Lock()

    def observe(self, value: str, seconds: float) -> None:
        """Counts a duration under a value of the label."""
        with self._lock:
            counts = self._counts.setdefault(value, [0] * (len(self._bounds) + 1))
            counts[bisect.bisect_left(self._bounds, seconds)] += 1
            self._sums[value] = self._sums.get(value, 0.0) + seconds

    def family(self) -> HistogramMetricFamily:
        """As it is now."""
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        names = [*map(str, self._bounds), "+Inf"]
        with self._lock:
            for value, counts in sorted(self._counts.items()):
                buckets = list(zip(names, itertools.accumulate(counts), strict=True))
                family.add_metric([value], buckets=buckets, sum_value=self._sums[value])
        return family


class Scraped(Collector):
    """A collector whose metrics a function makes; without a description of its own, so that it is not called when it is
    registered."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def describe(self) -> list[Metric]:
        """Nothing: names are checked when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        yield from self._families()


def gauge(name: str, text: str, value: float | int | None) -> Iterator[Metric]:
    """One value; nothing while it is not known."""
    if value is not None:
        yield GaugeMetricFamily(name, text, value=float(value))


def counter(name: str, text: str, value: float) -> Iterator[Metric]:
    """One count; `_total` is added to the name."""
    yield CounterMetricFamily(name, text, value=value)


def gauges(name: str, text: str, label: str, values: Mapping[str, float | int]) -> Iterator[Metric]:
    """A value for each value of the label."""
    yield _filled(GaugeMetricFamily(name, text, labels=[label]), values)


def counters(name: str, text: str, label: str, values: Mapping[str, float | int]) -> Iterator[Metric]:
    """A count for each value of the label."""
    yield _filled(CounterMetricFamily(name, text, labels=[label]), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float | int]) -> Metric:
    for key, value in sorted(values.items()):
        family.add_metric([key], float(value))
    return family


def histogram(name: str, text: str, counts: Mapping[int, int], bounds: tuple[int, ...]) -> Iterator[Metric]:
    """Of whole numbers: `counts` has how often each one occurred."""
    buckets = [(str(float(bound)), sum(count for value, count in counts.items() if value <= bound)) for bound in bounds]
    total = sum(counts.values())
    weighed = sum(value * count for value, count in counts.items())
    yield HistogramMetricFamily(name, text, buckets=[*buckets, ("+Inf", total)], sum_value=float(weighed))

"""The evaluator's metrics for Prometheus (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from inflight.prometheus.families import Scraped, counter, gauge
from inflight.types import Value


def registry_of(values: Callable[[], Mapping[str, Value]]) -> CollectorRegistry:
    """A registry that asks for the evaluator's `values` (Evaluator.status) at each scrape."""

    def families() -> Iterator[Metric]:
        found = {name: float(value) for name, value in values().items() if not isinstance(value, str)}
        own = "inflight_evaluator"
        yield from counter(f"{own}_evaluations", "Evaluations that were completed.", found["evaluations"])
        text = "Evaluations that were not completed within eval.timeout_s."
        yield from counter(f"{own}_evaluations_late", text, found["late"])
        yield from gauge(f"{own}_answers", "Answers of the current evaluation so far; 0 between two.", found["answers"])
        yield from gauge(f"{own}_answers_wanted", "Answers that an evaluation consists of.", found["wanted"])

    registry = CollectorRegistry()
    registry.register(Scraped(families))
    return registry

"""An actor's metrics for Prometheus (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from inflight.prometheus.families import Scraped, counter, counters, gauge
from inflight.types import Value

_COUNTS = {
    "started": ("groups_started", "Groups that were begun."),
    "done": ("groups_done", "Groups that were finished."),
    "failed": ("groups_failed", "Groups that could not be finished."),
    "tokens": ("tokens", "Sampled tokens that were received."),
    "aborted": ("requests_aborted", "Requests that an engine gave up."),
    "retries": ("requests_retried", "Requests that were sent again."),
    "continued": ("requests_continued", "Sequences that another generator continued."),
    "scores": ("scores", "Rollouts that were scored, or could not be."),
    "score_s": ("score_seconds", "Time that rewards took, failed attempts and pauses included."),
}
"""Figure of the status → name and description of the counter."""


def registry_of(values: Callable[[], Mapping[str, Value]]) -> CollectorRegistry:
    """A registry that asks for the actor's `values` at each scrape."""

    def families() -> Iterator[Metric]:
        found = {name: value for name, value in values().items() if not isinstance(value, str)}
        own = "inflight_actor"
        yield from gauge(f"{own}_groups_in_flight", "Groups that it works on.", found.get("in_flight"))
        yield from gauge(
            f"{own}_unacknowledged_groups",
            "Finished groups without an answer of the buffer.",
            found.get("unacknowledged"),
        )
        yield from gauge(f"{own}_reward", "Mean reward of its last groups.", found.get("reward"))
        for name, (suffix, text) in _COUNTS.items():
            if name in found:
                yield from counter(f"{own}_{suffix}", text, found[name])
        accepted = {
            name.removeprefix("accepted."): value for name, value in found.items() if name.startswith("accepted.")
        }
        text = "Tokens that the buffer accepted, by the generator that sampled them."
        yield from counters(f"{own}_tokens_accepted", text, "generator", accepted)

    registry = CollectorRegistry()
    registry.register(Scraped(families))
    return registry

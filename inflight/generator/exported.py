"""A generator's metrics beside vLLM's own, at its server's `/metrics` (docs/metrics.md)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric

from inflight.generator.agent import Commits
from inflight.prometheus.families import GAPS, Durations, Scraped, counter, gauge


def export(commits: Commits, way: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Adds what `commits` knows to the registry that vLLM serves; `way` is the configured way to swap."""
    text = "Longest stall of a rank's step loop at a swap."
    gaps = Durations("inflight_generator_swap_gap_seconds", text, "way", GAPS)
    commits.told = functools.partial(gaps.observe, way)

    def families() -> Iterator[Metric]:
        yield from gauge("inflight_generator_version", "The version that this engine stamps.", commits.version)
        yield from counter("inflight_generator_swaps", "Versions that became live here.", commits.swaps)
        yield gaps.family()
        yield from gauge("inflight_generator_last_swap_gap_seconds", "Gap of the last swap.", commits.gap_s)

    registry.register(Scraped(families))

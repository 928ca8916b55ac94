"""The launcher's metrics for Prometheus (docs/metrics.md)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from inflight.prometheus.families import Scraped, counters, gauge, gauges


class LauncherMetrics:
    """What the launcher knows of the run's processes; scraped in another thread than it is set."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: all processes that are configured; others count only while they run."""
        self.running: Sequence[str] = ()
        """Those that run now."""
        self.failures = Counter(dict.fromkeys(names, 0))
        """How often each has failed."""
        self._names = names
        self._began = time.monotonic()
        self.registry = CollectorRegistry()
        self.registry.register(Scraped(self._families))

    def _families(self) -> Iterator[Metric]:
        states = dict.fromkeys(self._names, 0) | dict.fromkeys(self.running, 1)
        yield from gauges("inflight_launcher_process_running", "1 while the process runs.", "name", states)
        text = "How often a process has failed."
        yield from counters("inflight_launcher_process_failures", text, "name", dict(self.failures))
        elapsed = time.monotonic() - self._began
        yield from gauge("inflight_launcher_uptime_seconds", "Time since the launcher began.", elapsed)

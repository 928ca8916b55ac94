"""A generator's status, which it reports to the launcher about once per second and the live view shows."""

from __future__ import annotations

import asyncio
import contextlib
import time

from inflight.bus import BusError, Link
from inflight.generator.agent import EngineAgent, running
from inflight.messages import Status
from inflight.types import Value

STATUS_EVERY_S = 1.0


async def report(status: Link, name: str, agent: EngineAgent, served: dict[str, str]) -> None:
    """Sends a Status about once per second, with where metrics are `served`. A launcher that does not listen is no
    reason to stop.

    Not at once: the launcher restarts processes that have reported, and a generator that the trainer refuses at its
    hello would be refused again.
    """
    tokens = _figure("vllm:generation_tokens_total")
    at = time.monotonic()
    while True:
        await asyncio.sleep(STATUS_EVERY_S)
        tokens_now = _figure("vllm:generation_tokens_total")
        now = time.monotonic()
        commits = agent.commits
        values: dict[str, Value] = {
            **({"version": commits.version} if commits.version is not None else {}),
            **served,
            "swaps": commits.swaps,
            "running": running(agent.engine),
            "waiting": int(_figure("vllm:num_requests_waiting")),
            "gap_ms": round(commits.gap_s * 1e3, 3),
            "max_gap_ms": round(commits.max_gap_s * 1e3, 3),
            "tokens_per_s": round((tokens_now - tokens) / (now - at), 1),
        }
        tokens = tokens_now
        at = now
        with contextlib.suppress(BusError):
            status.send(Status(source=name, values=values))


def _figure(name: str) -> float:
    """A figure of this server's engine, from vLLM's own metrics; 0 when they are off."""
    from prometheus_client import REGISTRY

    found = REGISTRY.restricted_registry([name]).collect()
    return sum(sample.value for metric in found for sample in metric.samples)

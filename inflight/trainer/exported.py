"""The trainer's metrics for Prometheus (docs/metrics.md)."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from inflight.config import RunConfig
from inflight.prometheus.families import (
    GAPS,
    TRANSFERS,
    Durations,
    Scraped,
    counter,
    counters,
    gauge,
    gauges,
    histogram,
)
from inflight.rollout.buffer import Buffer
from inflight.weights.publish.events import Event, Failure, Left, Superseded, Swap
from inflight.weights.publish.publisher import Publisher

LAGS = (0, 1, 2, 4, 8, 16, 32, 63)
_LAST = {
    "reward": ("reward", "Mean reward of the rollouts of the last step."),
    "reward_all": ("reward_judged", "Mean reward of all groups that the gate judged for the last step."),
    "loss": ("loss", "Loss of the last step."),
    "grad_norm": ("gradient_norm", "Norm of the gradient of the last step."),
    "learning_rate": ("learning_rate", "Learning rate of the last step."),
    "entropy": ("entropy_nats", "Mean entropy of the last step's tokens."),
    "kl": ("kl_nats", "KL divergence of the recorded distribution from the current one, last step."),
    "ess": ("effective_sample_ratio", "Effective sample size of the last step as a share of its tokens."),
    "tokens_per_s": ("step_tokens_per_second", "Sampled tokens of the last step by its duration."),
}
"""Figure of a step's line → name and description of the gauge."""
_PHASES = {"wait_s": "wait", "train_s": "train", "publish_wait_s": "publish_wait", "pack_s": "pack", "guard_s": "guard"}


class TrainerMetrics:
    """Sums what the trainer reports. The reporter tells it of lines and events; the rest is asked for at a scrape."""

    def __init__(self, config: RunConfig) -> None:
        self.registry = CollectorRegistry()
        self._capacity = config.capacity
        self._publisher: Publisher | None = None
        self._buffer: Buffer | None = None
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._steps = 0
        self._lags = Counter[int]()
        self._tokens = Counter[str]()
        self._masked = Counter[str]()
        self._seconds: dict[str, float] = dict.fromkeys(_PHASES.values(), 0.0)
        self._swaps = Counter[str]()
        self._missed = Counter[str]()
        text = "Longest stall of a rank's step loop at a swap."
        self._gaps = Durations("inflight_trainer_swap_gap_seconds", text, "generator", GAPS)
        text = "Phases of a version's way to a generator."
        self._phases = Durations("inflight_trainer_publish_seconds", text, "phase", TRANSFERS)
        self.registry.register(Scraped(self._families))

    def follow(self, publisher: Publisher, buffer: Buffer) -> None:
        """Asks these at each scrape from now on."""
        self._publisher = publisher
        self._buffer = buffer

    def step(self, line: Mapping[str, object]) -> None:
        """Adds a line of metrics.jsonl."""
        with self._lock:
            self._steps += 1
            self._last |= {name: value for name, value in line.items() if isinstance(value, int | float)}
            self._lags.update({int(lag): count for lag, count in _counts(line, "lag_counts").items()})
            self._masked.update(_counts(line, "tokens_masked_by_rule"))
            self._masked.update(_counts(line, "tokens_masked_by_ratio"))
            for use in ("trained", "masked"):
                self._tokens[use] += int(self._last.get(f"tokens_{use}", 0))
            for name, phase in _PHASES.items():
                self._seconds[phase] += self._last.get(name, 0.0)

    def evaluation(self, line: Mapping[str, object]) -> None:
        """Takes a line of eval.jsonl."""
        with self._lock:
            for name in ("eval/reward", "version"):
                if isinstance(value := line.get(name), int | float):
                    self._last["eval/version" if name == "version" else name] = value

    def event(self, event: Event) -> None:
        """Takes the outcome of a version at a generator."""
        match event:
            case Swap():
                self._gaps.observe(event.generator, event.gap_s)
                for phase in ("transfer", "build", "ready", "commit"):
                    self._phases.observe(phase, getattr(event, f"{phase}_s"))
                with self._lock:
                    self._swaps[event.generator] += 1
            case Failure() | Superseded() | Left():
                with self._lock:
                    self._missed[type(event).__name__.lower()] += 1

    def _families(self) -> Iterator[Metric]:
        with self._lock:
            last = dict(self._last)
            seconds = dict(self._seconds)
            tokens = dict(self._tokens)
            masked = dict(self._masked)
            lags = dict(self._lags)
            steps = self._steps
            swaps = dict(self._swaps)
            missed = dict(self._missed)
        own = "inflight_trainer"
        yield from gauge(f"{own}_step", "The last step.", last.get("step"))
        yield from counter(f"{own}_steps", "Steps since this process began.", steps)
        for name, (suffix, text) in _LAST.items():
            yield from gauge(f"{own}_{suffix}", text, last.get(name))
        yield from gauge(f"{own}_held_out_reward", "Mean reward of the last evaluation.", last.get("eval/reward"))
        yield from gauge(f"{own}_held_out_version", "Version of the last evaluation.", last.get("eval/version"))
        yield from counters(f"{own}_step_seconds", "Time of steps by what it was spent on.", "phase", seconds)
        yield from counters(f"{own}_tokens", "Sampled tokens of all batches, by use.", "use", tokens)
        yield from counters(f"{own}_tokens_masked", "Tokens that the gate masked, by rule.", "rule", masked)
        yield from histogram(f"{own}_token_lag_versions", "Lag of tokens when they were trained on.", lags, LAGS)
        yield from counters(f"{own}_swaps", "Versions that became live.", "generator", swaps)
        yield from counters(f"{own}_versions_missed", "Versions that a generator did not get.", "outcome", missed)
        yield self._gaps.family()
        yield self._phases.family()
        yield from self._of_publisher(own)
        yield from self._of_buffer(own)

    def _of_publisher(self, own: str) -> Iterator[Metric]:
        if (publisher := self._publisher) is None:
            return
        yield from gauge(f"{own}_version", "The newest version that was published.", publisher.version)
        text = "The version that a generator stamps, as its engine reported."
        yield from gauges(f"{own}_generator_version", text, "generator", publisher.committed)
        text = "Published versions that a generator is behind."
        yield from gauges(f"{own}_generator_behind_versions", text, "generator", publisher.behind)

    def _of_buffer(self, own: str) -> Iterator[Metric]:
        if (publisher := self._publisher) is None or (buffer := self._buffer) is None:
            return
        counts = buffer.counts()
        ages = {str(age): groups for age, groups in buffer.ages(publisher.version).items()}
        yield from gauge(f"{own}_buffer_groups", "Groups that wait for the trainer.", counts.buffered)
        yield from gauge(f"{own}_buffer_capacity_groups", "Most groups in flight or buffered.", self._capacity)
        text = "Groups that wait for the trainer, by the age of their oldest token in versions."
        yield from gauges(f"{own}_buffer_groups_by_age", text, "age", ages)
        yield from gauge(f"{own}_groups_in_flight", "Groups that actors work on.", counts.in_flight)
        yield from counter(f"{own}_groups_granted", "Groups that were granted to actors.", counts.granted)
        yield from counter(f"{own}_groups_trained", "Groups that were trained on.", counts.trained)
        yield from counters(f"{own}_groups_dropped", "Groups that the gate dropped.", "reason", counts.dropped)
        text = "Groups that were not delivered."
        yield from counters(f"{own}_groups_failed", text, "reason", counts.failed)
        text = "Rollouts that were left out of groups."
        yield from counters(f"{own}_rollouts_dropped", text, "reason", counts.rollouts_dropped)


class RankMetrics:
    """What a further rank of the trainer has done for rank 0; scraped in another thread than it is counted in."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._orders = Counter[str]()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.registry.register(Scraped(self._families))

    def obeyed(self, order: str, seconds: float) -> None:
        """Counts an order that was carried out, and the time from its arrival to the answer."""
        with self._lock:
            self._orders[order] += 1
            self._seconds[order] += seconds

    def _families(self) -> Iterator[Metric]:
        with self._lock:
            orders = dict(self._orders)
            seconds = dict(self._seconds)
        own = "inflight_trainer_rank"
        yield from counters(f"{own}_orders", "Orders of rank 0 that were carried out.", "order", orders)
        text = "Time that they took, the wait for other ranks in collective operations included."
        yield from counters(f"{own}_order_seconds", text, "order", seconds)


def _counts(line: Mapping[str, object], name: str) -> dict[str, int]:
    found = line.get(name)
    return {str(each): int(count) for each, count in found.items()} if isinstance(found, dict) else {}

"""Compares each generator's log-probabilities with the trainer's when it joins (weights/publish/comparison.py judges).

Each start of a generator is compared twice: at the first version that it holds, and at the next one that it receives,
because a fault may be in the swap, and swaps may alternate between two sets of weights.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from inflight.config import RunConfig, Sampling
from inflight.trainer.batch import Batch, to_score
from inflight.trainer.learner import Learner
from inflight.trainer.logprob_mismatch import coarser
from inflight.types import Route
from inflight.weights.publish.asking import ANSWER_S, TOKENS
from inflight.weights.publish.comparison import REQUESTS, Comparison, NumbersDiffer, Sampled, compare
from inflight.weights.publish.publisher import Publisher, PublishError

VERSIONS = 2
"""Number of versions at which a start of a generator is compared."""
TRIES = 3
"""Failed attempts after which a start of a generator counts as impossible to compare."""
RETRY_S = 30.0
"""Seconds before the second attempt, doubled before each further one."""
SHORT = (4, 24)
"""Lengths of short prompts, in tokens."""
LONG = 1024
LONGEST = 16384
"""Most tokens of a long prompt, and of one that exceeds an attention window: bounds the cost of a comparison."""
TOKENS_AT_ONCE = 8192
"""Most tokens of all prompts in one forward pass, unless a single prompt has more."""
_POLL_S = 0.2
log = logging.getLogger(__name__)


@dataclass
class _Start:
    """The state of the comparison with one start of a generator."""

    compared: set[int] = field(default_factory=set)
    """Versions at which the numbers agreed, or a warning was logged."""
    awaited: bool = False
    """It was already given time to get the newest version."""
    failures: int = 0
    retry_at: float = 0.0


class StartComparison:
    """Decides which generators to compare, and refuses them or warns according to `trainer.compare_start`."""

    def __init__(
        self,
        config: RunConfig,
        publisher: Publisher,
        learner: Learner,
        stop: Callable[[], bool],
        device: torch.device,
    ) -> None:
        """A comparison ends early when `stop()` returns True; `device` is the trainer's."""
        self._mode = config.trainer.compare_start
        self._dtype = coarser(config, device)
        self._publisher = publisher
        self._learner = learner
        self._stop = stop
        self._patience_s = config.publish.supersede_after_s
        self._join_s = config.publish.join_timeout_s
        self._api_key = config.api_key
        self._sampling = replace(Sampling.of(config.rollout), top_p=1.0, top_k=0, min_p=0.0)
        model = learner.policy.master.config.get_text_config()
        self._adapter = config.trainer.adapter
        self._prompts = prompts_for(model, config.generator.max_model_len, config.seed)
        self._starts: dict[tuple[str, str], _Start] = {}
        self._told: dict[str, dict[str, Any]] = {}
        self._names = set(config.generator_names())
        self._refused: dict[str, str] = {}
        """Generators whose newest start was refused: name → reason."""

    def begin(self, version: int) -> None:
        """Returns when one generator agrees with the trainer, whose weights are those of `version`; others are compared
        when they join. With `warn` it tries once.

        Raises NumbersDiffer when a compared one disagrees and none agrees, or when none can be compared within
        `publish.join_timeout_s`.
        """
        deadline = time.monotonic() + self._join_s
        found = self.before_step(version)
        while self._mode == "refuse" and not self._stop() and not any(each.compared for each in self._starts.values()):
            if wrong := [each for each in found if each.problem]:
                raise NumbersDiffer("; ".join(map(str, wrong)))
            if time.monotonic() > deadline:
                why = "; ".join(map(str, found)) or "none holds the trainer's version"
                raise NumbersDiffer(f"no generator was compared with the trainer within {self._join_s:g} s: {why}")
            time.sleep(_POLL_S)
            found = self.before_step(version) or found

    def before_step(self, version: int) -> list[Comparison]:
        """Compares those that are due and hold `version`, the trainer's current weights.

        The first time, one that is due gets as much time as a publication would wait for it. Raises NumbersDiffer when
        all generators of the run were refused.
        """
        if self._mode == "off":
            return []
        served = self._due(version)
        late = [
            start
            for name, route in served.items()
            if route.version != version and not (start := self._of(name, route)).awaited
        ]
        if late:
            with contextlib.suppress(PublishError):  # the next publication raises it again
                self._publisher.flush(self._patience_s)
            for start in late:
                start.awaited = True
            served = self._due(version)
        served = {name: route for name, route in served.items() if route.version == version}
        found = self._ask(served) if served else []
        if not self._stop():
            for each in found:
                self._settle(each, self._of(each.generator, served[each.generator]))
        if self._refused.keys() >= self._names | self._publisher.served.keys():
            raise NumbersDiffer("; ".join(self._refused.values()))
        return found

    def _ask(self, served: Mapping[str, Route]) -> list[Comparison]:
        return compare(
            served,
            self._score,
            self._prompts,
            dtype=self._dtype,
            sampling=self._sampling,
            timeout_s=ANSWER_S,
            api_key=self._api_key(),
            stop=self._stop,
            model=self._adapter,
        )

    def told(self) -> dict[str, object]:
        """The part of a step's line about comparisons since the last one; empty when there were none."""
        told, self._told = self._told, {}
        return {"compared": told} if told else {}

    def _of(self, name: str, route: Route) -> _Start:
        return self._starts.setdefault((name, route.incarnation), _Start())

    def _due(self, version: int) -> dict[str, Route]:
        now = time.monotonic()
        due = {}
        for name, route in self._publisher.served.items():
            start = self._of(name, route)
            known = version in start.compared or len(start.compared) >= VERSIONS
            if not known and start.failures < TRIES and now >= start.retry_at:
                due[name] = route
        return due

    def _settle(self, found: Comparison, start: _Start) -> None:
        self._told[found.generator] = found.values()
        refuse = self._mode == "refuse"
        if found.shown:
            log.info("%s", found)
            start.failures = 0
            start.awaited = False
        elif found.problem:
            log.log(logging.ERROR if refuse else logging.WARNING, "%s", found)
        else:
            start.failures += 1
            start.retry_at = time.monotonic() + RETRY_S * 2.0 ** (start.failures - 1)
            log.warning("%s (%d of %d tries)", found, start.failures, TRIES)
        if refuse and (found.problem or start.failures == TRIES):
            self._refused[found.generator] = str(found)
            self._publisher.refuse(found.generator, found.incarnation, str(found))
        elif not found.unanswered:
            self._refused.pop(found.generator, None)
            start.compared.add(found.version)

    def _score(self, asked: Sequence[Sampled]) -> list[list[float]]:
        scored: list[list[float]] = [[] for _ in asked]
        for part in _parts(asked):
            batch = batch_of([asked[index] for index in part])
            logprobs = self._learner.logprobs(batch, self._sampling)
            for row, index in enumerate(part):
                scored[index] = logprobs[row][batch.completion_mask[row]].tolist()
        return scored


def prompts_for(model: PretrainedConfig, max_model_len: int, seed: int) -> list[list[int]]:
    """Token ids for the comparison, the same for the same model and seed: short ones, long ones, and some that exceed
    the limits in the model's configuration (see `edges`), at least three of each length."""
    limit = max(min(max_model_len - TOKENS, LONGEST), 1)
    wanted = {*SHORT, min(limit, LONG), *(2 * edge for edge in edges(model) if edge < limit)}
    lengths = sorted({min(length, limit) for length in wanted})
    lengths = lengths[: len(SHORT)] + lengths[len(SHORT) :][-(REQUESTS // 3 - len(SHORT)) :]
    source = random.Random(seed)
    return [
        [source.randrange(model.vocab_size) for _ in range(lengths[each % len(lengths)])] for each in range(REQUESTS)
    ]


def edges(model: PretrainedConfig) -> list[int]:
    """Positions at which attention or positions change: a sliding window, chunks, the original length of rope."""
    rope = getattr(model, "rope_parameters", None) or getattr(model, "rope_scaling", None) or {}
    scaled = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    found = [
        getattr(model, name, None) for name in ("sliding_window", "attention_chunk_size", "max_position_embeddings")
    ]
    found += [each.get("original_max_position_embeddings") for each in scaled]
    return sorted({edge for edge in found if isinstance(edge, int) and edge > 0})


def batch_of(asked: Sequence[Sampled]) -> Batch:
    """The sequences as a batch to be scored; it is not trained on."""
    width = max(len(each.prompt_ids) + len(each.token_ids) for each in asked)
    ids = torch.zeros(len(asked), width, dtype=torch.int64)
    drawn = torch.zeros(len(asked), width, dtype=torch.bool)
    for row, each in enumerate(asked):
        start = len(each.prompt_ids)
        end = len(each.prompt_ids) + len(each.token_ids)
        ids[row, :end] = torch.tensor([*each.prompt_ids, *each.token_ids])
        drawn[row, start:end] = True
    return to_score(ids, drawn)


def _parts(asked: Sequence[Sampled]) -> Iterator[list[int]]:
    """Indices of sequences to score together: of similar lengths, and no more than TOKENS_AT_ONCE with padding."""
    part: list[int] = []
    lengths = [len(each.prompt_ids) + len(each.token_ids) for each in asked]
    for index in sorted(range(len(asked)), key=lengths.__getitem__):
        if part and (len(part) + 1) * lengths[index] > TOKENS_AT_ONCE:
            yield part
            part = []
        part.append(index)
    yield part

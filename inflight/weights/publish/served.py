"""The generators that serve a publisher's versions: which they are, their comparison with the trainer, the refusal of
one that disagrees, and the pin of one that is to keep its version."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.config import Sampling
from inflight.messages import Manifest
from inflight.types import Route, Routes
from inflight.weights.publish.asking import ANSWER_S
from inflight.weights.publish.comparison import Comparison, Score, compare, require
from inflight.weights.publish.loop import PublisherLoop
from inflight.weights.publish.pin import Pin

_COARSER = ("float32", "float16", "bfloat16")
"""Dtypes, from the finest to the coarsest rounding."""


class Served:
    """The part of a Publisher that sends requests to generators, not weights."""

    manifest: Manifest
    _loop: PublisherLoop

    @property
    def served(self) -> dict[str, Route]:
        """The generators that are present: their addresses, and which version they stamp; without those for which that
        is uncertain."""
        with self._loop.changed:
            routes = {each.generator: each.route for each in self._loop.protocol.replicas}
        return {name: route for name, route in routes.items() if route is not None}

    def routes(self) -> Routes:
        """The generators that get requests."""
        with self._loop.changed:
            return self._loop.routes()

    def compare(
        self,
        score: Score,
        prompts: Sequence[Sequence[int]],
        *,
        dtype: str = "",
        sampling: Sampling | None = None,
        timeout_s: float = ANSWER_S,
        api_key: str = "",
    ) -> list[Comparison]:
        """Lets each generator that holds the newest version continue `prompts` by 8 tokens, and compares the
        log-probabilities that it records with those of `score`, which uses the module's current weights.

        To be called when `wait_joined` has returned, after the first swap (`publish` and `flush`) and when a generator
        has joined. `prompts` are token ids, at most 16 of them: short ones, long ones, and some beyond a sliding
        window. `score` gets (prompt_ids, token_ids) pairs and returns for each a list of len(token_ids)
        log-probabilities, in nats. `dtype` is the coarser one of both computations (default: the wire dtype).

        Raises NumbersDiffer, in one line with the figure and the usual suspects, when one differs by more than
        rounding (inflight/agreement.py) or did not answer all within `timeout_s`; ValueError for bad input.

        Example:
            def score(asked):
                return [logprobs_of(model, prompt_ids, token_ids) for prompt_ids, token_ids in asked]

            publisher.wait_joined(300)
            publisher.compare(score, [[5, 3, 8], list(range(100))])
        """
        newest = self._loop.protocol.version
        found = compare(
            {name: route for name, route in self.served.items() if route.version == newest},
            score,
            prompts,
            dtype=dtype or max((slot.meta.dtype for slot in self.manifest.slots), key=_COARSER.index),
            sampling=sampling or Sampling(),
            timeout_s=timeout_s,
            api_key=api_key,
        )
        require(found)
        return found

    def refuse(self, generator: str, incarnation: str, reason: str) -> None:
        """Stops using the current start of a generator and makes it end; no effect if it was restarted meanwhile."""
        with self._loop.changed:
            self._loop.protocol.membership.dismiss(generator, incarnation, reason)
            self._loop.changed.notify_all()

    def pin(self, version: int, timeout_s: float, *, routed: bool) -> Pin:
        """Lets the first generator that stamps `version` keep it until `unpin`, at most `timeout_s` from now. Later
        versions are still sent to it, and the newest one is committed afterwards; `publish` does not wait for that.

        To be called between the publication of `version` and the next one. `routed` tells whether the routes file lists
        the generator meanwhile. Raises ValueError while another pin has not ended.
        """
        with self._loop.changed:
            pin = self._loop.protocol.pin(version, timeout_s, routed=routed)
            self._loop.changed.notify_all()
            return pin

    def unpin(self, pin: Pin, reason: str) -> None:
        """Ends a pin; one that has ended already keeps its reason."""
        with self._loop.changed:
            self._loop.protocol.unpin(pin, reason)
            self._loop.changed.notify_all()

"""A trainer that only publishes, as a process: `python publishing.py RUN VERSION TRANSPORT` (not a test file).

Even versions are the model that the run started from, odd ones are the same moved by noise: what an engine should say
under each is known from the versions before. Orders come as JSON lines, answers go as JSON lines:

    {"do": "publish", "version": 2, "halt": {"g0": 3}}   stops in g0's transfer when 3 buckets are through, and says so
    {"do": "go"}                                        lets go of what was stopped
    {"do": "state"}                                     what the publisher knows
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM

from inflight import config as configuration
from inflight.bus import Listener
from inflight.models import prepare
from inflight.weights.publish.channel import ChannelSource
from inflight.weights.publish.publisher import Publisher
from inflight.weights.source import WeightSource
from inflight.weights.transport.base import Sender

HALT_S = 60.0
NOISE = 0.02
printing = threading.Lock()


def say(**answer: Any) -> None:
    with printing:
        print(json.dumps(answer), flush=True)


class Halting:
    """A sender that stops between two buckets, as often as it was asked to."""

    wanted: ClassVar[dict[str, int]] = {}
    go = threading.Event()
    spans: ClassVar[list[list[Any]]] = []
    """[generator, `send` or `close`, when it began and ended (time.monotonic)] of all senders."""

    def __init__(self, inner: Sender, generator: str) -> None:
        self._inner, self._generator = inner, generator
        self.rendezvous, self.follows = inner.rendezvous, inner.follows

    def send(self, buffer: torch.Tensor, buckets: list[Any], packed: Iterable[int] = ()) -> None:
        with self._span("send"):
            self._send(buffer, buckets, packed)

    @contextlib.contextmanager
    def _span(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.spans.append([self._generator, what, began, time.monotonic()])

    def _send(self, buffer: torch.Tensor, buckets: list[Any], packed: Iterable[int]) -> None:
        after = self.wanted.pop(self._generator, None)
        if after is None:
            self._inner.send(buffer, buckets, packed)
            return
        assert after < len(buckets), f"{after} of {len(buckets)} buckets"
        self._inner.send(buffer, buckets[:after], packed)
        say(halted=self._generator, after=after, of=len(buckets))
        self.go.wait(HALT_S)
        self._inner.send(buffer, buckets[after:])

    def close(self) -> None:
        with self._span("close"):
            self._inner.close()


class Trainer:
    """Holds both sets of weights, and the publisher."""

    def __init__(self, run: str, version: int, transport: str) -> None:
        config = configuration.load(run)
        dtype = getattr(torch, config.model.dtype)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = AutoModelForCausalLM.from_pretrained(prepare(config.model.name), dtype=dtype).to(device)
        self._moved = False
        noise = {"dtype": dtype, "device": device, "generator": torch.Generator(device).manual_seed(1)}
        self._other = [p + NOISE * torch.randn(p.shape, **noise) for p in self._model.parameters()]
        self._hold(version)
        listener = Listener(config.endpoint("weights"), config.bus)
        self._publisher = Publisher(
            WeightSource(self._model, config.model.dtype),
            listener,
            dataclasses.replace(config.publish, transport=transport),
            version=version,
            ranks=dict.fromkeys(config.generator_names(), config.generator.tensor_parallel_size),
            routes_file=config.routes_file,
        )

    @torch.no_grad()
    def _hold(self, version: int) -> None:
        """Exchanges both sets in place unless the right one is held."""
        if self._moved == bool(version % 2):
            return
        self._moved = not self._moved
        for parameter, other in zip(self._model.parameters(), self._other, strict=True):
            kept = parameter.clone()
            parameter.copy_(other)
            other.copy_(kept)

    def publish(self, version: int, halt: dict[str, int] | None = None) -> dict[str, Any]:
        Halting.go.clear()
        Halting.wanted.update(halt or {})
        self._hold(version)
        report = self._publisher.publish(version)
        return {"version": version, "wait_s": report.wait_s, "pack_s": report.pack_s}

    def go(self) -> dict[str, Any]:
        Halting.go.set()
        return {}

    def state(self) -> dict[str, Any]:
        events = [[type(event).__name__, dataclasses.asdict(event)] for event in self._publisher.events]
        states = {name: [state.name, why] for name, (state, why) in self._publisher.states.items()}
        return {
            "committed": self._publisher.committed,
            "events": events,
            "states": states,
            "spans": Halting.spans,
        }


def main(run: str, version: str, transport: str) -> None:
    make = ChannelSource.make_sender
    ChannelSource.make_sender = lambda self, name, size, kind: Halting(make(self, name, size, kind), name)
    trainer = Trainer(run, int(version), transport)
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        say(did=order["do"], **getattr(trainer, order.pop("do"))(**order))


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    main(*sys.argv[1:])

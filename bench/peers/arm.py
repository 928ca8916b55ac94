"""One arm: inflight's own trainer, buffer and actor, with the weights updated in one of the ways, for some seconds."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from bench.peers.control import Caller
from bench.peers.processes import Actor
from bench.peers.ways import ArmPublisher, Transfer, Way, snapshot
from inflight.bus import Link
from inflight.config import RunConfig
from inflight.rollout.books import NO_BOOKS
from inflight.rollout.buffer import Buffer
from inflight.trainer.checkpoint.index import SCHEMA, Saved
from inflight.trainer.learner import Learner
from inflight.trainer.loop import Trainer
from inflight.trainer.policy import Policy
from inflight.trainer.report import Reporter
from inflight.trainer.stop import StopFlag
from inflight.weights.publish.publisher import Publisher, PublishReport
from inflight.weights.publish.read_fence import ReadFence
from inflight.weights.source import WeightSource

IDLE_S = 20.0
QUIET = "the time of this arm is over"


@dataclass
class Shared:
    """What all arms have in common; the weights are put back before each."""

    policy: Policy
    source: WeightSource
    fence: ReadFence
    publisher: Publisher
    accelerator: Accelerator
    caller: Caller
    transfer: Transfer
    start: dict[str, torch.Tensor]
    """The weights that every arm starts with, float32."""
    version: int = 0
    """The newest version of any arm: versions only grow."""

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Puts these weights into the trainer."""
        self.fence.wait_read()
        for name, parameter in self.policy.master.named_parameters():
            parameter.copy_(weights[name])
        self.policy.refresh()

    def publish(self, weights: dict[str, torch.Tensor]) -> int:
        """Makes these weights live by inflight's publication; returns their version. Raises RuntimeError."""
        self.load(weights)
        self.version += 1
        self.publisher.publish(self.version)
        if missed := self.publisher.flush(IDLE_S):
            raise RuntimeError(f"version {self.version} is not live: {missed}")
        return self.version

    def wait_idle(self) -> None:
        """Returns when the engine has no request. Raises RuntimeError."""
        deadline = time.monotonic() + IDLE_S
        while self.caller.call("running"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the engine is not idle {IDLE_S:g} s after the end of an arm")
            time.sleep(0.02)


@dataclass
class Outcome:
    """What an arm leaves to be evaluated and reported."""

    folder: Path
    seconds: float
    activity: dict[str, float]
    blocked_s: list[float]
    calls_s: dict[str, list[float]]
    """Call of the engine's → seconds of each, of all its publications."""
    snapshots: list[tuple[float, dict[str, torch.Tensor]]] = field(default_factory=list)
    """Seconds since the arm's begin, and the weights that were published then."""
    live: int = 0
    """The version that is live at the end, as the arm's way has delivered it."""


class ArmTrainer(Trainer):
    """inflight's trainer, which writes no checkpoints and keeps copies of some versions for the evaluation."""

    def __init__(self, *parts: Any, every_s: float) -> None:
        super().__init__(*parts)
        self._every_s = every_s
        self._next_s = every_s
        self.snapshots: list[tuple[float, dict[str, torch.Tensor]]] = []

    def checkpoint(self) -> None:
        """None is written."""

    def publish(self, version: int) -> PublishReport:
        report = super().publish(version)
        if self._clock.elapsed >= self._next_s:
            self._next_s = self._clock.elapsed + self._every_s
            self.keep_snapshot()
        return report

    def keep_snapshot(self) -> None:
        """Copies the current weights; on CUDA the copies are only queued."""
        self.snapshots.append((self._clock.elapsed, snapshot(self._source)))


def run_arm(shared: Shared, way: Way, actor: Actor, *, seconds: float, every_s: float) -> Outcome:
    """Trains from the start weights for `seconds`; the engine is idle afterwards. Raises what a trainer raises."""
    begun = shared.publish(shared.start)
    config = replace(actor.config, trainer=replace(actor.config.trainer, steps=begun + actor.config.trainer.steps))
    set_seed(config.seed)
    stop = StopFlag()
    saved = Saved(schema=SCHEMA, step=begun, elapsed_s=0.0, books=NO_BOOKS)
    publisher = ArmPublisher(shared.publisher, way, shared.caller, shared.transfer if way.pause else None)
    learner = Learner(shared.policy, config, shared.accelerator, step=begun)
    shared.fence.hold(learner.optimizer.optimizer)
    actor.wait_ready(shared.publisher.routes(), IDLE_S * 3)
    shared.wait_idle()
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(Link(config.endpoint("status"), "trainer", config.bus))
        reporter = stack.enter_context(Reporter(config, link))
        trainer, buffer = _trainer(shared, config, learner, publisher, reporter, stop, saved, actor, every_s, stack)
        ending = threading.Timer(seconds, _end, (stop, buffer))
        ending.daemon = True
        stack.callback(ending.cancel)
        shared.caller.call("activity")
        shared.caller.seconds.clear()
        started = time.monotonic()
        ending.start()
        trainer.run()
        calls_s = dict(shared.caller.seconds)
        activity = shared.caller.call("activity")
        lasted = time.monotonic() - started
        trainer.keep_snapshot()
    actor.end()
    shared.publisher.flush(IDLE_S)
    shared.wait_idle()
    shared.version = publisher.version
    learner.policy.drop_gradients()
    shared.accelerator.free_memory()  # it keeps the optimizers that it has prepared
    return Outcome(config.path, lasted, activity, publisher.blocked_s, calls_s, trainer.snapshots, publisher.version)


def _end(stop: StopFlag, buffer: Buffer) -> None:
    stop.set()
    buffer.finish(QUIET, 0.0)


def _trainer(
    shared: Shared,
    config: RunConfig,
    learner: Learner,
    publisher: ArmPublisher,
    reporter: Reporter,
    stop: StopFlag,
    saved: Saved,
    actor: Actor,
    every_s: float,
    stack: contextlib.ExitStack,
) -> tuple[ArmTrainer, Buffer]:
    as_publisher = cast(Publisher, publisher)
    vocabulary = shared.policy.master.config.get_text_config().vocab_size
    shown = {"vocabulary": vocabulary, "routes": shared.publisher.routes, "warn": reporter.warn}
    buffer = stack.enter_context(Buffer(actor.rollouts, config, **shown))
    reporter.follow(as_publisher, buffer)
    trainer = ArmTrainer(
        config, Path(), learner, shared.source, buffer, as_publisher, reporter, stop, saved, every_s=every_s
    )
    stack.callback(trainer.writer.close)
    return trainer, buffer

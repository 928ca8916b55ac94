"""`python -m inflight.trainer --run-dir RUN`: the trainer of a run."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from inflight.bus import BusError, Link, Listener
from inflight.config import ConfigError, RunConfig, load, require
from inflight.config.pairings import require_sound
from inflight.exits import BAD_INPUT, DATA_ENDED, DONE, GIVEN_UP, STOPPED, say_why
from inflight.listening import nccl_settings
from inflight.models import ModelError, prepare
from inflight.processes import leave
from inflight.prometheus.endpoint import MetricsEndpoint
from inflight.rollout.gate import rules_of
from inflight.trainer.stop import StopFlag

if TYPE_CHECKING:
    from accelerate import Accelerator

    from inflight.trainer.evaluations import Evaluations
    from inflight.trainer.loop import Trainer
    from inflight.trainer.report import Reporter
    from inflight.weights.publish.publisher import Publisher
    from inflight.weights.publish.read_fence import ReadFence
    from inflight.weights.source import WeightSource


def main(argv: Sequence[str] | None = None) -> int:
    """Returns an exit code: one of exits.py."""
    parser = argparse.ArgumentParser(prog="python -m inflight.trainer", description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--rank", type=int, default=0, help="one of trainer.processes ranks; 0 coordinates the others")
    parser.add_argument("--check", action="store_true", help="only check that all named functions exist")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = load(arguments.run_dir)
        require_sound(config)
        rules_of(config.gate)
        if arguments.check:
            _require_named(config)
            return DONE
        allowed = f"0 to {config.trainer.processes - 1} (trainer.processes)"
        require(0 <= arguments.rank < config.trainer.processes, "--rank", arguments.rank, allowed)
        signal.signal(signal.SIGTERM, _stop_start)
        if arguments.rank:
            from inflight.trainer.follower import follow

            follow(config, arguments.rank)
            return DONE
        return _run(config)
    except (ConfigError, ModelError) as error:
        return say_why("trainer", error, BAD_INPUT)
    except (BusError, OSError, RuntimeError, ValueError) as error:  # TimeoutError is an OSError
        return say_why("trainer", error, GIVEN_UP)


def _run(config: RunConfig) -> int:
    os.environ.update(nccl_settings(config.network, os.environ))
    import torch  # before anything else of torch, so that the pools have the configured size

    torch.set_num_threads(config.trainer.threads)
    from accelerate.utils import set_seed

    from inflight.rollout.buffer import Buffer
    from inflight.trainer.batch_watch import BatchWatch
    from inflight.trainer.checkpoint.io import load_optimizer, load_random
    from inflight.trainer.checkpoint.rewind import begin
    from inflight.trainer.learner import Learner
    from inflight.trainer.loop import Trainer
    from inflight.trainer.policy import reference
    from inflight.trainer.report import Reporter
    from inflight.trainer.run_policy import policy_of
    from inflight.trainer.sharding import assembled, source_of
    from inflight.weights.publish.read_fence import ReadFence

    stop = StopFlag()
    begun, waiting = begin(config)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(Link(config.endpoint("status"), "trainer", config.bus))
        reporter = stack.enter_context(Reporter(config, link))
        stack.enter_context(MetricsEndpoint(config, "trainer", reporter.exported.registry))
        reporter.phase("loading")
        accelerator = _accelerator(config, reporter, stack)
        coordinator = stack.enter_context(assembled(config, accelerator.device))
        set_seed(config.seed)
        model_dir = prepare(config.model.name, revision=config.model.revision)
        start_model = prepare(config.start_model, revision=config.model.revision)
        policy = policy_of(config, start_model, accelerator.device)
        source = source_of(config, policy.master, coordinator)
        weights = stack.enter_context(Listener(config.listening("weights"), config.bus))
        fence = ReadFence(source.device)
        publisher = _publisher(config, source, weights, fence, begun.step)
        stack.callback(publisher.close)
        rollouts = stack.enter_context(Listener(config.listening("rollouts"), config.bus))
        vocabulary = policy.master.config.get_text_config().vocab_size
        shown = {"vocabulary": vocabulary, "routes": publisher.routes, "warn": reporter.warn}
        buffer = stack.enter_context(Buffer(rollouts, config, begun.books, waiting, **shown))
        start = reference(config, model_dir, accelerator.device)
        learner = Learner(policy, config, accelerator, start, coordinator, step=begun.step)
        if config.checkpoint:
            load_optimizer(Path(config.checkpoint), policy.master, learner.optimizer)
            load_random(Path(config.checkpoint))
        fence.hold(learner.optimizer.optimizer)
        evaluations = _evaluations(config, publisher, reporter, stack)
        trainer = Trainer(config, model_dir, learner, source, buffer, publisher, reporter, stop, begun, evaluations)
        stack.callback(trainer.writer.close)
        trainer.keep(begun.step)
        reporter.follow(publisher, buffer)
        reporter.phase("waiting for generators")
        publisher.wait_joined(config.publish.join_timeout_s, at_least=1)  # further generators may join later
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        stack.enter_context(BatchWatch(stop, buffer, publisher))
        trainer.run()
    return _say_how(trainer, config.trainer.steps)


def _say_how(trainer: Trainer, steps: int) -> int:
    """Returns the run's exit code, and prints a line unless all steps are done."""
    progress = f"after step {trainer.steps_done} of {steps}"
    if trainer.data_ended and not trainer.steps_done:
        return say_why("trainer", f"no step was taken of {steps}: {trainer.data_ended}", DATA_ENDED)
    if trainer.data_ended:
        return say_why("trainer", f"the data ended {progress}: {trainer.data_ended}", DATA_ENDED)
    if trainer.steps_done < steps:
        return say_why("trainer", f"stopped by SIGTERM {progress}", STOPPED)
    return DONE


def _publisher(
    config: RunConfig, source: WeightSource, listener: Listener, fence: ReadFence, version: int
) -> Publisher:
    from inflight.weights.publish.publisher import Publisher

    guests = config.most_of("generator") > config.generator.count
    return Publisher(
        source,
        listener,
        config.publish,
        version=version,
        ranks=_ranks(config),
        fence=fence,
        routes_file=config.routes_file,
        network=config.network,
        elastic=config.hosts.starter == "join",
        guest_ranks=config.generator.tensor_parallel_size if guests else 0,
    )


def _accelerator(config: RunConfig, reporter: Reporter, stack: contextlib.ExitStack) -> Accelerator:
    """With the trackers of the run, which get what the reporter writes."""
    import torch
    from accelerate import Accelerator

    from inflight.trainer.trackers import TRACKERS_FOLDER, Trackers

    folder = config.path / TRACKERS_FOLDER
    cpu = not torch.cuda.is_available()
    accelerator = Accelerator(cpu=cpu, log_with=list(config.trackers) or None, project_dir=folder)
    if config.trackers:
        trackers = Trackers(config, accelerator, reporter.warn)
        stack.callback(trackers.close)
        reporter.track(trackers)
    return accelerator


def _evaluations(
    config: RunConfig, publisher: Publisher, reporter: Reporter, stack: contextlib.ExitStack
) -> Evaluations | None:
    from inflight.metrics import EVAL_FILE, read_lines
    from inflight.trainer.checkpoint.best import Best
    from inflight.trainer.evaluations import Evaluations

    if not config.eval.every:
        return None
    listener = stack.enter_context(Listener(config.listening("eval"), config.bus))
    best = Best(config.path, config.eval.best_by) if config.eval.keep_best else None
    evaluations = Evaluations(
        config.eval,
        listener,
        publisher,
        best,
        written_s=config.trainer.checkpoint_timeout_s,
        done={int(line.get("step", -1)) for line in read_lines(config.path / EVAL_FILE)},
        tell=reporter.evaluation,
        warn=reporter.warn,
    )
    stack.callback(evaluations.close)
    return evaluations


def _ranks(config: RunConfig) -> dict[str, int]:
    return dict.fromkeys(config.generator_names(), config.generator.tensor_parallel_size)


def _require_named(config: RunConfig) -> None:
    """Raises ConfigError for a wrong objective, advantage, ratio rule or schedule, or wrong options of one."""
    from inflight.trainer.advantage import advantage_of
    from inflight.trainer.loss import make_loss
    from inflight.trainer.schedule import rate_factor

    advantage_of(config.trainer.advantage)
    make_loss(config)
    rate_factor(config.trainer)


def _stop_start(signum: int, frame: FrameType | None) -> None:
    """Signal handler during the start, when there is no state to save: unwinds the main thread from anywhere."""
    raise SystemExit(STOPPED)


if __name__ == "__main__":
    leave(main())

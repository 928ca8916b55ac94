"""`inflight eval CHECKPOINT|RUN`: answers a run's held-out questions with one checkpoint, without training.

Starts one generator in a temporary run folder, sends it the checkpoint's weights as a version, by which its answers are
tagged, and scores the answers as an evaluation during training does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from yaml import YAMLError

from inflight import config as configuration
from inflight.actor.called import ForeignError
from inflight.actor.foreign import foreign
from inflight.bus import BusError, Listener
from inflight.completions import Unpatched, session_of
from inflight.config import CONFIG_FILE, BusConfig, ConfigError, HostsConfig, NetworkConfig, RunConfig, run_of, schema
from inflight.error_line import one_line
from inflight.evaluation.answer import Answered
from inflight.evaluation.asking import Asking
from inflight.evaluation.figures import figures, reasons
from inflight.exits import BAD_INPUT, DONE, GIVEN_UP, say_why
from inflight.file_path import file_path
from inflight.launcher.last_words import last_words
from inflight.launcher.log_files import BoundedLogs
from inflight.launcher.run_folder import LaunchError, RunFolder
from inflight.metrics import EVAL_GIVEN_UP
from inflight.models.weight_files import ADAPTER
from inflight.processes import Processes
from inflight.starters.base import Command
from inflight.surroundings import computing
from inflight.tasks.check import require_held_out, usable_task
from inflight.trainer.checkpoint import index
from inflight.trainer.checkpoint.best import best_of
from inflight.trainer.checkpoint.index import CheckpointError
from inflight.trainer.checkpoint.whole import require_whole
from inflight.view.stage import stage
from inflight.weights.publish.publisher import Publisher, PublishError

GENERATOR = "g0"
LOG_LINES = 10
ADAPTERS = "a checkpoint of adapters (trainer.lora) can't be evaluated alone: its run can (eval.every)"
_POLL_S = 0.5


class EvaluationError(RuntimeError):
    """The checkpoint can't be evaluated; one line."""


FAILURES = (EvaluationError, LaunchError, PublishError, BusError, ForeignError, Unpatched, ValueError, OSError)
"""What may end an evaluation that was begun."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 when all questions were answered, 1 when not, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="inflight eval", description=__doc__.split("\n")[0])
    parser.add_argument(
        "target", type=file_path, metavar="CHECKPOINT|RUN", help="of a run: its best checkpoint, or its last"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as eval.sampling.samples=8")
    parser.add_argument("--run", type=file_path, help="the run whose configuration applies, for a checkpoint elsewhere")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_intermixed_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        run_dir, checkpoint = find(arguments.target, arguments.run)
        exported = newest(arguments.target, checkpoint)
        with tempfile.TemporaryDirectory(prefix="inflight-eval-") as folder:
            config = alone(overridden(configuration.load(run_dir), arguments.overrides), checkpoint, folder)
            with _phase("checking the task and the checkpoint"):
                require_held_out(usable_task(config), config)
                if not any(checkpoint.glob("*.bin")):  # of a model from elsewhere
                    require_whole(checkpoint)
            result = evaluate(config)
    except (ConfigError, CheckpointError) as error:
        return say_why("eval", error, BAD_INPUT)
    except FAILURES as error:
        return say_why("eval", error, GIVEN_UP)
    result = {"checkpoint": str(checkpoint), **exported, **result}
    print(json.dumps(result) if arguments.json else table(result), flush=True)
    return GIVEN_UP if EVAL_GIVEN_UP in result else DONE


def find(target: Path, run: Path | None) -> tuple[Path, Path]:
    """The run whose configuration applies, and the checkpoint's folder. Raises ConfigError when either is not there."""
    if (target / CONFIG_FILE).is_file():
        found = best_of(target) or index.newest(target)
        if found is None:
            raise ConfigError(f"{target} has no checkpoint")
        return target, found.resolve()
    if (target / ADAPTER).is_file():
        raise ConfigError(ADAPTERS)
    if not (target / "config.json").is_file():
        raise ConfigError(f"{target} is neither a run folder ({CONFIG_FILE}) nor a checkpoint (config.json)")
    run_dir = run or run_of(target)
    if run_dir is None:
        raise ConfigError(f"{target} belongs to no run: name one whose task and settings apply by --run")
    return run_dir, target.resolve()


def newest(target: Path, evaluated: Path) -> dict[str, str]:
    """The checkpoint that `inflight export` takes of the same run, named where it is another one than the evaluated."""
    found = index.newest(target) if (target / CONFIG_FILE).is_file() else None
    return {} if found is None or found.name == evaluated.name else {"newest": str(found.resolve())}


def overridden(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The configuration with values set anew. Raises ConfigError for one that does not exist or is not allowed."""
    if wrong := next((each for each in overrides if "=" not in each), None):
        raise ConfigError(f"{wrong} is not allowed: KEY=VALUE, such as eval.sampling.samples=8")
    try:
        merged = OmegaConf.merge(schema(), OmegaConf.to_container(OmegaConf.structured(config)))
        return cast(RunConfig, OmegaConf.to_object(OmegaConf.merge(merged, OmegaConf.from_dotlist(list(overrides)))))
    except (OmegaConfBaseException, YAMLError) as error:
        why = one_line(str(error).split("full_key:")[0])
        raise ConfigError(f"{' '.join(map(ascii, overrides))} can't be set: {why}") from None


def alone(config: RunConfig, checkpoint: Path, folder: str) -> RunConfig:
    """The configuration of one generator, without a trainer, that serves the checkpoint in a folder of its own.

    Raises ConfigError for a run of adapters, whose checkpoints are no whole model.
    """
    if config.trainer.adapter:
        raise ConfigError(ADAPTERS)
    model = config.model
    served = config.model.served_name or config.model.name
    return replace(
        config,
        run_dir=folder,
        resume=False,
        checkpoint=str(checkpoint) if _is_of_step(checkpoint) else "",
        model=replace(model, name=str(checkpoint), revision="", served_name=served),
        generator=replace(config.generator, count=1),
        eval=replace(config.eval, every=0),
        trainer=replace(config.trainer, processes=1),
        publish=replace(config.publish, transport="gloo", checksum="auto"),
        network=NetworkConfig(),
        hosts=HostsConfig(),
        bus=BusConfig(heartbeat_s=config.bus.heartbeat_s, dead_after_s=config.bus.dead_after_s),
    )


def _is_of_step(checkpoint: Path) -> bool:
    """Whether its name tells the version of its weights; others are taken for version 0."""
    try:
        return index.step_of(checkpoint) >= 0
    except CheckpointError:
        return False


def evaluate(config: RunConfig) -> dict[str, Any]:
    """The figures of the checkpoint, as eval.jsonl has them.

    Raises EvaluationError when the generator does not start, ForeignError when no process for the task's code does.
    """
    with (
        RunFolder(config) as folder,
        Listener(config.listening("status"), config.bus),
        Listener(config.listening("weights"), config.bus) as weights,
        BoundedLogs(config.logs, config.launch.log_mib),
        Processes(config.launch.stop_grace_s, keep_open=[folder.lock]) as processes,
    ):
        configuration.save(config)
        processes.start(_generator(config))
        with _phase("loading the checkpoint"):
            publisher = _publisher(config, weights)
        try:
            with _phase("starting the generator"):
                _await(publisher, processes, config)
            route = publisher.served[GENERATOR]
            return asyncio.run(_ask(config, route.url, route.version))
        finally:
            publisher.finish("the evaluation is done")
            publisher.close()


def _phase(what: str | Callable[[], str]) -> AbstractContextManager[None]:
    """Says on stderr what takes long: stdout is for the figures."""
    return stage(what, Console(stderr=True))


def _generator(config: RunConfig) -> Command:
    arguments = ["--run-dir", config.run_dir, "--name", GENERATOR]
    return Command(
        name=GENERATOR,
        kind="generator",
        argv=[sys.executable, "-m", "inflight.generator", *arguments],
        log=config.logs / f"{GENERATOR}.log",
        environment=computing(config.generator.threads),
    )


def _publisher(config: RunConfig, listener: Listener) -> Publisher:
    """Of the checkpoint's weights, from the host's memory: GPUs are the generator's."""
    import torch

    from inflight.trainer.policy import load_policy
    from inflight.weights.source import WeightSource

    policy = load_policy(
        Path(config.model.name),
        bfloat16=False,
        device=torch.device("cpu"),
        trust_remote_code=config.model.trust_remote_code,
    )
    source = WeightSource(policy.master, config.model.dtype)
    ranks = {GENERATOR: config.generator.tensor_parallel_size}
    return Publisher(source, listener, config.publish, version=config.start_version, ranks=ranks)


def _await(publisher: Publisher, processes: Processes, config: RunConfig) -> None:
    """Returns when the generator has the version. Raises EvaluationError with its last words when it ends before."""
    deadline = time.monotonic() + config.generator.start_timeout_s + config.publish.join_timeout_s
    while publisher.committed.get(GENERATOR) != publisher.version:
        if ended := processes.ended():
            words = last_words(ended[0].command.log, LOG_LINES)
            raise EvaluationError(f"{ended[0]}: {words[-1] if words else 'it said nothing'}")
        if publisher.incompatible or time.monotonic() > deadline:
            state, why = publisher.states[GENERATOR]
            raise EvaluationError(f"the generator does not take the checkpoint: {state.name}, {why}")
        time.sleep(_POLL_S)


async def _ask(config: RunConfig, url: str, version: int) -> dict[str, Any]:
    """The figures of all answers within eval.timeout_s."""
    api_key = config.api_key()
    began = time.monotonic()
    came: list[Answered] = []
    given_up = {}
    async with AsyncExitStack() as stack:
        with _phase("starting the processes of the task and its rewards"):
            code = await stack.enter_async_context(foreign(config))
        session = await stack.enter_async_context(session_of(api_key))
        asking = Asking(config, code, session)

        def far() -> str:
            return (
                f"answering the questions: {asking.received} answers received, {len(came)} of {asking.answers} scored"
            )

        try:
            with _phase(far):
                async with asyncio.timeout(config.eval.timeout_s):
                    await asking.ask(url, version, settled=came.append)
        except TimeoutError:
            limit = f"{config.eval.timeout_s:g} s (eval.timeout_s)"
            given_up = {EVAL_GIVEN_UP: f"{len(came)} of {asking.answers} answers came within {limit}"}
    found = figures(came, config.eval.pass_k, config.eval.correct_at)
    named = {f"eval/{name}": value for name, value in found.items()}
    told = {"eval/failed_by": reasons(came), "eval/seconds": round(time.monotonic() - began, 3)}
    return {"version": version, **given_up, **named, **told}


def table(result: Mapping[str, Any]) -> str:
    """The result, a line each."""
    rows = {name.removeprefix("eval/"): value for name, value in result.items()}
    rows["failed_by"] = ", ".join(f"{reason}: {count}" for reason, count in rows["failed_by"].items()) or "-"
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {_shown(value)}" for name, value in rows.items())


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

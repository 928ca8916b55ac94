"""What is looked at before a run begins, so that bad input costs a line and not a start."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace

from inflight import config as configuration
from inflight.config import ConfigError, RunConfig
from inflight.config.effect import require_effect
from inflight.config.pairings import require_sound, teachers, warnings
from inflight.generator.engine_args import require_extra
from inflight.launcher import devices
from inflight.launcher.run_folder import LaunchError
from inflight.surroundings import computing, inherited
from inflight.trainer.advantage import ADVANTAGES
from inflight.trainer.objectives import OBJECTIVES

CHECK_S = 120.0


def ready_to_start(config: RunConfig) -> RunConfig:
    """Checks GPUs, what is named and the patch, and prepares the model; the result names the model by its directory.

    Raises ConfigError for what does not exist, LaunchError when the patch or the model is not there.
    """
    from inflight import models, patching

    devices.require_gpu(config)
    require_sound(config)
    require_effect(config)
    _require_named(config)
    _require_task(config)
    for line in warnings(config):
        print(f"inflight launch: {line}", file=sys.stderr, flush=True)
    try:
        state = patching.check()
        directory = models.prepare(config.model.name)
    except (patching.PatchError, models.ModelError) as error:
        raise LaunchError(str(error)) from None
    if state is not patching.PatchState.PATCHED:
        raise LaunchError(f"the installed vLLM is {state.value}, not patched; run `inflight patch apply`")
    require_extra(config.generator.extra)
    return replace(config, model=replace(config.model, name=str(directory)))


def _require_task(config: RunConfig) -> None:
    """Raises ConfigError for a task that does not exist, lacks an option, or gives less than is learnt from."""
    from inflight import tasks

    if ":" in config.task.name:  # one of the user's own may be importable in the actor's process alone
        return
    task, learnt_from = tasks.make(config.task, config.seed), list(teachers(config))
    if config.trainer.advantage.name == "process":
        learnt_from.append("trainer.advantage.name=process")
    if learnt_from and not isinstance(task, tasks.TurnScorer):
        raise ConfigError(
            f"{learnt_from[0]} is not allowed with task.name={config.task.name}: the task scores whole answers, and"
            " gives neither step rewards nor a teacher's word (docs/tasks.md, score_turn)"
        )


def _require_named(config: RunConfig) -> None:
    """Raises ConfigError for an objective, advantage or rule that does not exist or does not take its options.

    The trainer looks, in a process of its own: it takes torch to know options, and the user's modules to know theirs.
    """
    trainer, gate = config.trainer, config.gate
    chosen = (gate.rules, gate.ratio_rules, trainer.objective.options, trainer.advantage.options)
    if not any(chosen) and trainer.objective.name in OBJECTIVES and trainer.advantage.name in ADVANTAGES:
        return  # the usual case: nothing that could be wrong is worth some seconds
    with tempfile.TemporaryDirectory(prefix="inflight-") as folder:
        configuration.save(replace(config, run_dir=folder))
        command = [sys.executable, "-m", "inflight.trainer", "--run-dir", folder, "--check"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=CHECK_S, check=False,
                env=inherited(os.environ, "trainer") | computing(1),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise LaunchError(f"the check of objective, advantage and rules did not end within {CHECK_S:g} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"the check ended with code {done.returncode}"]
        raise ConfigError(said[-1].removeprefix("inflight trainer: "))

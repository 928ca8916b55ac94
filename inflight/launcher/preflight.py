"""The checks before a run begins, so that bad input is refused in one line before anything is started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from inflight import config as configuration
from inflight.config import ConfigError, ModelConfig, RewardConfig, RunConfig
from inflight.config.effect import require_effect
from inflight.config.pairings import require_sound, warnings, warnings_of_data
from inflight.config.trackers import require_installed
from inflight.exits import BAD_INPUT, in_words
from inflight.generator.engine_args import require_extra
from inflight.generator.server_args import require_server
from inflight.launcher import devices
from inflight.launcher.last_words import last_words
from inflight.launcher.reachable import require_reachable
from inflight.launcher.run_folder import LaunchError
from inflight.report.visible import visible
from inflight.surroundings import computing, inherited
from inflight.tasks import examine
from inflight.tasks.__main__ import FINE, SAYS
from inflight.tasks.examine import Examined
from inflight.trainer.advantage import ADVANTAGES
from inflight.trainer.objectives import OBJECTIVES
from inflight.view.stage import stage

CHECK_S = 120.0


def ready_to_start(config: RunConfig) -> RunConfig:
    """Checks GPUs, options, names and vLLM's patch, and prepares the model. Returns the configuration with the model
    named by its directory or, for a model of the hub, with its commit.

    Raises ConfigError for a name that does not exist, LaunchError when the patch or the model is missing.
    """
    from inflight import models, patching

    devices.require_gpu(config)
    require_sound(config)
    require_effect(config)
    require_reachable(config)
    require_installed(config.trackers)
    with stage("checking objective, task and rewards"):
        _require_named(config)
        _require_task(config)
    for line in warnings(config):
        print(f"inflight launch: {line}", file=sys.stderr, flush=True)
    try:
        with stage("checking vLLM and preparing the model"):
            state = patching.check()
            model = _placed(config.model)
    except (patching.PatchError, models.ModelError) as error:
        raise LaunchError(str(error)) from None
    _require_tokens(config, model)
    if state is not patching.PatchState.PATCHED:
        raise LaunchError(f"the installed vLLM is {state.value}, not patched; run `inflight patch apply`")
    require_extra(config.generator.extra)
    require_server(config.generator.server, config.generator.extra)
    return replace(config, model=model, rewards=[_reward(each) for each in config.rewards])


def _require_tokens(config: RunConfig, model: ModelConfig) -> None:
    """Raises ConfigError for a token that is to end completions and that the model does not have."""
    from inflight import models

    values = json.loads((models.prepare(model.name, revision=model.revision) / "config.json").read_bytes())
    number = (values.get("text_config") or values).get("vocab_size")
    if wrong := [each for each in config.rollout.stop_token_ids if isinstance(number, int) and each >= number]:
        raise ConfigError(f"rollout.stop_token_ids={wrong} is not allowed: {model.name} has tokens 0 to {number - 1}")


def _placed(model: ModelConfig) -> ModelConfig:
    """Adds the commit to a model of the hub, and names any other one by its directory; requests still use the name that
    the user gave. Raises ModelError."""
    from inflight import models

    commit = models.fetch(model.name, model.revision, trust_remote_code=model.trust_remote_code)
    if commit:
        print(f"model {model.name}, commit {commit}", flush=True)
        return replace(model, revision=commit)
    return replace(model, name=str(models.prepare(model.name)), served_name=model.served_name or model.name)


def _reward(reward: RewardConfig) -> RewardConfig:
    """A reward whose file, if it has one, is found from any folder."""
    file, _, function = reward.name.rpartition(":")
    return replace(reward, name=f"{Path(file).resolve()}:{function}") if file.endswith(".py") else reward


def _require_own_code(config: RunConfig) -> None:
    """Raises ConfigError for a task or a reward of the user's own that does not exist, rejects its options or
    can't be constructed.

    It is constructed in a child process: its module may raise, hang or end its process.
    """
    own = [f"task.name={config.task.name!r}", *(f"{each.name!r}" for each in config.rewards if ":" in each.name)]
    what = " or ".join(each for each in own if ":" in each)
    looked = _look(config, "inflight.tasks", [], "actor")
    if looked.code is None:
        raise ConfigError(f"{what} can't be imported: it takes longer than {CHECK_S:g} s")
    if looked.code != -signal.SIGALRM:  # construction takes long, which is allowed
        _require_made(looked, what)


def _require_made(looked: _Looked, what: str) -> None:
    """Raises ConfigError with what the process said that constructed `what`, where it failed."""
    assert looked.code is not None
    own = [line.removeprefix(SAYS) for line in looked.words if line.startswith(SAYS)]
    if own[-1:] == [FINE]:
        return
    if own and looked.code == BAD_INPUT:
        raise ConfigError(own[-1])
    said = (looked.words[-1:] or ["nothing"])[0]
    raise ConfigError(f"{what} can't be made: its process ended with {in_words(looked.code)} and said {said}")


def _require_task(config: RunConfig) -> None:
    """Raises ConfigError for a task or a reward that does not exist, misses an option, or gives less than the trainer
    needs."""
    from inflight.tasks.check import usable_task

    if any(":" in name for name in (config.task.name, *(each.name for each in config.rewards))):
        _require_own_code(config)
    else:
        usable_task(config)


def with_data(config: RunConfig) -> RunConfig:
    """The configuration of a task of files with what these hold, and with options that stay; any other one as it is.
    Raises ConfigError when the data can't be read, or hold no question that can be asked."""
    if config.task.name != "dataset" and ":" not in config.task.name:
        return config
    limit_s = config.rollout.task_start_timeout_s
    with stage("reading the data"):
        looked = _look(config, "inflight.tasks", ["--examine"], "actor", within_s=limit_s, downloads=True)
    what = f"task.name={config.task.name!r}"
    if looked.code is None:
        last = f"; the last question looked at: {visible(looked.asked)}" if looked.asked else ""
        raise ConfigError(f"{what}: its data were not read within rollout.task_start_timeout_s={limit_s:g}{last}")
    if looked.code != -signal.SIGALRM:  # a task of the user's own that takes long to be made, which is no fault
        _require_made(looked, what)
    if looked.examined is None:
        return config
    of_data = warnings_of_data(config, looked.examined.questions, looked.examined.held_out)
    for line in filter(None, [looked.examined.left_out, *of_data]):
        print(f"inflight launch: {line}", file=sys.stderr, flush=True)
    task = replace(config.task, options=looked.examined.options, contents=looked.examined.contents)
    return replace(config, task=task)


def _require_named(config: RunConfig) -> None:
    """Raises ConfigError for an objective, advantage, rule or schedule that does not exist or take its options.

    The trainer checks them, in a child process: its own options are known only after importing torch, the user's only
    after importing their modules.
    """
    trainer = config.trainer
    gate = config.gate
    chosen = (gate.rules, gate.ratio_rules, trainer.objective.options, trainer.advantage.options)
    usual = trainer.schedule.constant and not trainer.schedule.options
    usual = usual and trainer.objective.name in OBJECTIVES and trainer.advantage.name in ADVANTAGES
    if usual and not any(chosen):
        return  # the usual case: nothing that could be wrong is worth some seconds
    looked = _look(config, "inflight.trainer", ["--check"], "trainer")
    if looked.code is None:
        raise LaunchError(f"the check of objective, advantage, rules and schedule did not end within {CHECK_S:g} s")
    if looked.code:
        said = looked.words or [f"the check ended with code {looked.code}"]
        raise ConfigError(said[-1].removeprefix("inflight trainer: "))


@dataclass(frozen=True)
class _Looked:
    """Result of a check in a child process: its exit code, None if it timed out, and the last lines of its output."""

    code: int | None
    words: Sequence[str]
    examined: Examined | None
    """What a task of files holds."""
    asked: str = ""
    """The question of such a task that was looked at last; empty for none."""


def _look(
    config: RunConfig,
    module: str,
    arguments: Sequence[str],
    kind: str,
    *,
    within_s: float | None = None,
    downloads: bool = False,
) -> _Looked:
    """Runs a module's check of the configuration in a child process, within CHECK_S or `within_s`; that process and all
    its descendants have ended afterwards. With `downloads` it may use a hub as far as the caller's environment allows.
    """
    environment = inherited(os.environ, kind)
    own = {name: value for name, value in computing(1).items() if not (downloads and name.startswith("HF_"))}
    with tempfile.TemporaryDirectory(prefix="inflight-") as folder:
        configuration.save(replace(config, run_dir=folder))
        log = Path(folder) / "look.log"
        with log.open("wb") as output:  # not a pipe: a descendant could keep it open after the process has ended
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--run-dir", folder, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment | own,
            )
        code = None
        try:
            code = process.wait(CHECK_S if within_s is None else within_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _Looked(code, last_words(log, 20), examine.read(Path(folder)), examine.last_asked(Path(folder)))

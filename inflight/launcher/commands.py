"""The processes of a run as commands, and what starts those that are not on this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from inflight.config import ConfigError, RunConfig
from inflight.error_line import one_line
from inflight.launcher import devices
from inflight.starters.base import Command, Starter
from inflight.starters.joining import JoinStarter
from inflight.starters.ssh import SshStarter
from inflight.surroundings import computing


def usual_commands(config: RunConfig) -> list[Command]:
    """The trainer's ranks, the generators, the actors and, where versions are evaluated, an evaluator: with their logs,
    threads, cores and GPUs.

    Raises ConfigError when the machine has too few GPUs (but some), or not the configured cores.
    """
    devices.require_cores(config)
    there = devices.available()
    devices.require_exportable(config, there, os.environ)
    seen = devices.assign(config, there)

    def command(name: str, kind: str, arguments: Sequence[str], threads: int, number: int = 0) -> Command:
        return _command(config, name, kind, arguments, threads, number, seen.get(name))

    trainer = config.trainer.threads
    generator = config.generator.threads
    further = list(enumerate(config.rank_names()))[1:]
    return [
        command("trainer", "trainer", ["trainer"], trainer),
        *(command(name, "rank", ["trainer", "--rank", str(rank)], trainer) for rank, name in further),
        *(
            command(name, "generator", ["generator", "--name", name], generator, number)
            for number, name in enumerate(config.generator_names())
        ),
        *(
            command(name, "actor", ["actor", "--name", name], 1, number)
            for number, name in enumerate(config.rollout.actor_names())
        ),
        *([command("evaluator", "evaluator", ["evaluation"], 1)] if config.eval.every else []),
    ]


def joining_command(config: RunConfig, kind: str, number: int) -> Command:
    """A generator or an actor that is not configured, for a host that joins."""
    name = f"{kind[0]}{number}"
    threads = config.generator.threads if kind == "generator" else 1
    return replace(_command(config, name, kind, [kind, "--name", name], threads, number, None), configured=False)


def _command(
    config: RunConfig, name: str, kind: str, arguments: Sequence[str], threads: int, number: int, gpus: str | None
) -> Command:
    """`arguments`: the module of inflight that it runs, and the module's arguments but the run folder."""
    cores = config.launch.affinity.get(name) or config.launch.affinity.get(kind) or ()
    return Command(
        name=name,
        kind=kind,
        argv=[sys.executable, "-m", f"inflight.{arguments[0]}", "--run-dir", config.run_dir, *arguments[1:]],
        log=config.logs / f"{name}.log",
        environment=computing(threads) | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}),
        cores=tuple(cores),
        host=config.hosts.of(kind, number),
        slot=config.hosts.slot(number) if kind == "generator" else 0,
    )


def starter_of(config: RunConfig) -> Starter | None:
    """What starts processes on other hosts; None: nothing is started there. Raises what making it raises."""
    if config.hosts.starter == "ray":
        return _ray_starter(config)
    made = {"ssh": SshStarter, "join": JoinStarter}
    return made[config.hosts.starter](config) if config.hosts.elsewhere else None


def _ray_starter(config: RunConfig) -> Starter:
    try:
        from inflight.starters.ray import RayStarter  # not installed everywhere, and slow to import
    except ImportError as error:
        raise ConfigError(f"hosts.starter=ray needs Ray (pip install 'inflight[ray]'): {one_line(error)}") from None
    there = devices.assign(config, devices.available())
    return RayStarter(config, [there[name] for name in config.rank_names() if name in there])

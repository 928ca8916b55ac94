"""`inflight doctor`: whether this machine can do a run, one line per check."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from inflight.config import ConfigError, RunConfig
from inflight.doctor import environment, gpus, machine, memory, software
from inflight.doctor.finding import Finding, Severity
from inflight.exits import BAD_INPUT, DONE, GIVEN_UP, say_why
from inflight.file_path import file_path
from inflight.launcher.compose import compose

EPILOG = """examples:
  inflight doctor                                        the machine and what is installed
  inflight doctor --config-name demo                     and whether this run fits
  inflight doctor --config-name demo_gpu generator.count=2

Data, chat template and rewards are not looked at: inflight launch checks them before it starts anything.
Exit code: 0 when nothing would make a run fail (warnings aside), 1 when something would, 2 for bad input."""
STYLES = {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "bold red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints each finding as soon as it is known."""
    parser = argparse.ArgumentParser(
        prog="inflight doctor",
        description="Check whether this machine can do a run, and say what to do if not.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config-name", metavar="NAME", help="also check for this configuration")
    parser.add_argument("--config-dir", type=file_path, help="your own configuration folder (default: the one shipped)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as generator.count=2")
    given = parser.parse_args(argv)
    if given.overrides and not given.config_name:
        parser.error("KEY=VALUE needs --config-name")
    try:
        config = compose(given.config_name, given.overrides, given.config_dir) if given.config_name else None
    except ConfigError as error:
        return say_why("doctor", error, BAD_INPUT)
    console = Console(highlight=False, markup=False, emoji=False)
    found = list[Finding]()
    for finding in findings(config):
        found.append(finding)
        _show(console, finding)
    return _conclude(console, found, config)


def findings(config: RunConfig | None) -> Iterator[Finding]:
    """All checks, the quick ones first."""
    yield from software.python()
    yield from machine.cores(config)
    yield from machine.limits(config)
    yield from machine.shared_memory()
    yield from machine.ports(config)
    there, line = gpus.listed()
    yield line
    if config is not None:
        yield from gpus.required(config)
    yield from environment.variables(os.environ, config, there)
    yield from software.torch()
    yield from software.vllm(len(there))
    if there:
        yield from software.compiler()
        yield from gpus.checked()
    if config is not None:
        yield from _of_run(config, there)


def _of_run(config: RunConfig, there: Sequence[str]) -> Iterator[Finding]:
    parameters, line = memory.model(config)
    yield line
    if parameters is None:
        return
    yield from memory.on_gpus(parameters, config, there) if there else memory.on_cpu(parameters, config)
    yield from memory.on_disk(parameters, config)


def _show(console: Console, finding: Finding) -> None:
    line = Text.assemble((f"{finding.state.value:<5}", STYLES[finding.state]), f"{finding.name:<18}{finding.text}")
    console.print(line, soft_wrap=True)
    if finding.todo:
        console.print(Text.assemble(" " * 23, ("→ " + finding.todo, STYLES[finding.state])), soft_wrap=True)


def _conclude(console: Console, found: Sequence[Finding], config: RunConfig | None) -> int:
    failed = [finding.name for finding in found if finding.state is Severity.FAIL]
    if failed:
        console.print(f"\na run would fail: {', '.join(dict.fromkeys(failed))}", soft_wrap=True)
        return GIVEN_UP
    fits = "whether a model fits: inflight doctor --config-name NAME"
    hint = fits if config is None else "data, chat template and rewards are checked by inflight launch"
    console.print(f"\nnothing on this machine stands against a run; {hint}", soft_wrap=True)
    return DONE

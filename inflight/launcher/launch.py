"""Starts a run and supervises it: `inflight launch --config-name demo trainer.steps=10`.

The run ends with the trainer, when any process fails permanently (its exit code and the end of its log are shown), or
on Ctrl-C or SIGTERM; the exit code tells which (exits.py). In every case all processes and their descendants have ended
when this one returns.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from inflight import config as configuration
from inflight.bus import BusError, Listener, Received
from inflight.clocks import ClockLog
from inflight.config import ConfigError, RunConfig, as_text
from inflight.error_line import one_line
from inflight.exits import BAD_INPUT, DATA_ENDED, DONE, GIVEN_UP, STOPPED
from inflight.file_path import file_path
from inflight.launcher import environment
from inflight.launcher.commands import starter_of, usual_commands
from inflight.launcher.compose import compose, configurations
from inflight.launcher.exported import LauncherMetrics
from inflight.launcher.guests import Guests
from inflight.launcher.interrupt import Interrupt
from inflight.launcher.log_files import BoundedLogs
from inflight.launcher.outcome import RunOutcome, report
from inflight.launcher.preflight import ready_to_start, with_data
from inflight.launcher.restarts import Restarts
from inflight.launcher.resume import forget_end, resumed_config, set_anew
from inflight.launcher.run_folder import LaunchError, RunFolder
from inflight.launcher.targets import Targets
from inflight.messages import Status
from inflight.processes import Ended, Processes
from inflight.prometheus.endpoint import MetricsEndpoint
from inflight.resources import folder as shipped
from inflight.starters.base import Command
from inflight.starters.joining import JoinStarter
from inflight.surroundings import allow_open_files, foreign
from inflight.trainer.checkpoint.index import CheckpointError
from inflight.view.progress import Progress
from inflight.view.resumption import command_to_resume
from inflight.view.stage import stage
from inflight.view.view import View

POLL_S = 0.2
ENDS_A_RUN = (DONE, DATA_ENDED, STOPPED)
"""Exit codes with which a trainer has ended the run by itself; any other code is a failure."""
READ_AT_ONCE = 4096
"""Most status messages that are read before the processes are looked at again: a few from each of a thousand."""
ASKS = ("actor", "evaluator")
"""Kinds of processes that end by themselves when the trainer reports the end of the run."""
FAREWELL_S = 30.0
"""Seconds for which the trainer may outlive processes that exited after its Finish message."""
EXAMPLES = """examples:
  inflight launch --config-name tiny                                     a random model: all of a run in a minute or two
  inflight launch --config-name demo run_dir=runs/mine trainer.checkpoint_every=10
  inflight launch --config-name demo run_dir=runs/mine resume=true       from its newest checkpoint
  inflight launch --config-name demo --print                             all options, with their values
  inflight launch --config-dir . --config-name dataset                   your own dataset.yaml: docs/own_model.md

Without run_dir the folder is runs/TIME-NAME. Exit codes: 0 all steps are done, 1 a failure, 2 bad input (the last line
names it), 3 the data ended before the steps; docs/operations.md has all, and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns one of exits.py, or 128 + signal when interrupted."""
    arguments = _arguments(argv)
    try:
        config = compose(arguments.config_name, arguments.overrides, arguments.config_dir)
        if arguments.print:
            print(as_text(config), end="")
            return DONE
        given = sys.argv[1:] if argv is None else argv
        return launch(config, resume=command_to_resume(given, config.run_dir))
    except (ConfigError, LaunchError, CheckpointError, BusError) as error:
        print(f"inflight launch: {one_line(error, 2000)}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:  # for example a full disk
        print(f"inflight launch: the run can't be started or watched: {one_line(error)}", file=sys.stderr)
        return GIVEN_UP
    except KeyboardInterrupt:  # before anything was started; afterwards Interrupt handles it
        print("inflight launch: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="inflight launch",
        usage="inflight launch --config-name NAME [--config-dir FOLDER] [--print] [KEY=VALUE ...]",
        description="Start a run, show it and supervise it to its end.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(configurations([shipped("configs")]))
    parser.add_argument("--config-name", metavar="NAME", help=f"{names}, or a file of --config-dir")
    parser.add_argument("--config-dir", type=file_path, metavar="FOLDER", help="with configurations of your own")
    parser.add_argument("--print", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as trainer.steps=10 or machine=gpu")
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}; options of a run are given as trainer.steps=10")
    if arguments.config_name is None:
        parser.error(f"--config-name is missing; the configurations are: {names}")
    return arguments


def launch(config: RunConfig, commands: Sequence[Command] | None = None, *, resume: str = "") -> int:
    """Runs a configuration to its end and returns the exit code. `commands` replaces the usual processes; `resume` is
    the command that resumes the run, which is shown where the run ends before its last step.

    Raises LaunchError, ConfigError, CheckpointError or BusError when the run can't be started.
    """
    began = time.monotonic()
    config = resumed_config(config)
    if commands is None:
        config = ready_to_start(config)
    config = with_data(config)
    with RunFolder(config) as folder:
        config = folder.config
        if config.start_version >= config.trainer.steps:
            print(f"{config.run_dir}: all {config.trainer.steps} steps are done; more: trainer.steps=…", flush=True)
            return DONE
        commands = usual_commands(config) if commands is None else commands  # may refuse, before the run begins
        with Listener(config.listening("status"), config.bus) as listener:  # may refuse, before the run begins
            anew = set_anew(config)
            configuration.save(config)
            environment.write(config.path, os.environ)
            print(f"run folder  {config.run_dir}", flush=True)
            allow_open_files()
            if dropped := foreign(os.environ, ""):
                print(f"the processes of the run do not inherit {', '.join(dropped)}", flush=True)
            if config.resume:
                print(", ".join([f"resuming from step {config.start_version}", *anew]), flush=True)
                forget_end(config)
            progress = Progress(config)
            progress.began(time.monotonic() - began)
            outcome, late = _run(progress, commands, folder, listener)
    report(progress, outcome, late, resume)
    return outcome.code


def _run(
    progress: Progress, commands: Sequence[Command], folder: RunFolder, listener: Listener
) -> tuple[RunOutcome, list[str]]:
    """Starts the processes and waits for the end. Returns how the run ended, and the names that had to be killed."""
    config = progress.config
    interrupt = Interrupt()
    starter = starter_of(config)
    joins = starter if isinstance(starter, JoinStarter) else None
    guests = Guests(config, joins)
    with (
        View(progress, line_every_s=config.launch.line_every_s, kept=config.snapshot_file) as view,
        BoundedLogs(config.logs, config.launch.log_mib),
        Processes(config.launch.stop_grace_s, keep_open=[folder.lock], elsewhere=starter) as processes,
        interrupt,
    ):
        exported = LauncherMetrics([command.name for command in commands])
        clocks = ClockLog(config.path)
        parts = _Parts(processes, listener, view, Restarts(config), exported, clocks, Targets(config), guests, joins)
        for command in commands:
            processes.start(command)
        with MetricsEndpoint(config, "launcher", exported.registry):
            outcome = _watch(parts, interrupt)
        if outcome.failed is None and outcome.interrupted is None:
            asking = [command.name for command in commands if command.kind in ASKS]
            processes.wait([*asking, *guests.of(ASKS)], timeout_s=10)
        view.close()
        with stage("ending the run's processes"):
            return outcome, processes.stop()


@dataclass
class _Parts:
    """What the launcher has for a run."""

    processes: Processes
    listener: Listener
    view: View
    restarts: Restarts
    exported: LauncherMetrics
    clocks: ClockLog
    targets: Targets
    guests: Guests
    joins: JoinStarter | None
    """None: no hosts join."""


def _watch(run: _Parts, interrupt: Interrupt) -> RunOutcome:
    """Returns when the trainer is done, a process has failed permanently, or a signal came.

    Others may end before the trainer, with code 0, after its Finish message; then it must follow within FAREWELL_S.
    """
    processes = run.processes
    view = run.view
    restarts = run.restarts
    exported = run.exported
    gone: tuple[Ended, float] | None = None
    while True:
        if interrupt.received is not None:
            return RunOutcome(interrupted=interrupt.received)
        lately = processes.ended()
        exported.running = processes.running()
        # Status messages sent before a process ended still count when a busy launcher reads them afterwards.
        known = [*exported.running, *(ended.command.name for ended in lately)]
        _read_status(run.listener, view, restarts, run.targets, known)
        run.clocks.note(run.listener.offsets(), processes.hosts())
        for ended in lately:
            run.targets.ended(ended.command.name)
            restarts.ended(ended.command.name)
            if ended.command.kind == "trainer" and ended.code in ENDS_A_RUN:
                return RunOutcome(trainer=ended)
            if (left := run.guests.left(ended)) is not None:
                view.tell(f"inflight launch: {left}")
                view.progress.forget(ended.command.name)
            elif ended.code != DONE:
                exported.failures[ended.command.name] += 1
                planned = restarts.failed(ended)
                if planned is None:
                    return RunOutcome(failed=ended, note=restarts.given_up(ended.command.name))
                view.tell(f"inflight launch: {planned}")
                view.progress.forget(ended.command.name)
                processes.kill_orphans()  # for example a generator's engine, which would keep memory and ports
            else:
                gone = gone or (ended, time.monotonic())
        if gone is not None and time.monotonic() - gone[1] > FAREWELL_S:
            return RunOutcome(failed=gone[0])
        if run.joins is not None:
            run.joins.refuse(restarts.blamed())
        for command in (*restarts.due(), *run.guests.due()):
            processes.start(command)
        view.refresh()


def _read_status(listener: Listener, view: View, restarts: Restarts, targets: Targets, known: Sequence[str]) -> None:
    """Waits up to the poll interval for status messages, then handles those that are queued from `known` processes, so
    many at once that a process which floods this one does not keep it from watching the others."""
    for number in range(READ_AT_ONCE):
        event = listener.receive(0 if number else POLL_S)
        if event is None:
            return
        if isinstance(event, Received) and isinstance(event.message, Status) and event.peer in known:
            view.heard(event.peer, event.message.values)
            restarts.heard(event.peer, event.message.values)
            targets.heard(event.peer, event.message.values)

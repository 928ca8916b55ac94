"""`python -m inflight.tasks --run-dir RUN`: constructs the task of a run and its rewards, or prints in one line why it
can't."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from inflight.config import ConfigError, RunConfig, load
from inflight.tasks.base import Task
from inflight.tasks.check import usable_task
from inflight.tasks.examine import asked_in, examine, write

MAKE_S = 10
"""Seconds after which this process ends by SIGALRM once the module is imported: a task that reads much data may take
longer, which is allowed. What --examine reads afterwards is within the caller's timeout."""
SAYS = "inflight tasks: "
FINE = "all can be made"
"""Said at the end: exit code 0 alone may be that of a module that has ended the process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 for a task and rewards that can be constructed, 2 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m inflight.tasks", description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--examine", action="store_true", help="read the data, and write down what they hold")
    arguments = parser.parse_args(argv)
    config = load(arguments.run_dir)
    names = [config.task.name, *(each.name for each in config.rewards)]
    for module in (name.rpartition(":")[0] for name in names):
        with contextlib.suppress(Exception, SystemExit):  # `usable_task` raises the same error again and reports it
            if module and not module.endswith(".py"):
                importlib.import_module(module)
    signal.alarm(MAKE_S)
    try:
        task = usable_task(config)
        signal.alarm(0)
        if arguments.examine:
            _examine(config, task)
    except ConfigError as error:
        print(f"{SAYS}{error}", file=sys.stderr)
        return 2
    print(f"{SAYS}{FINE}", file=sys.stderr)
    return 0


def _examine(config: RunConfig, task: Task) -> None:
    """Writes what is found into the run folder. Raises ConfigError."""
    with asked_in(config.path) as asked:
        if (examined := examine(config, task, asked)) is not None:
            write(examined, config.path)


if __name__ == "__main__":
    exit_code = main()
    with contextlib.suppress(Exception):  # foreign code may have closed or replaced them
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)  # threads and exit handlers of foreign code are not waited for

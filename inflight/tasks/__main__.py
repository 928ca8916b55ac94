"""`python -m inflight.tasks --run-dir RUN`: makes the task of a run, and says in one line why it can't be made."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
from collections.abc import Sequence

from inflight.config import ConfigError, load
from inflight.tasks import make

MAKE_S = 10
"""Seconds after which this process ends by SIGALRM once the module is imported: a task that reads much data may take
longer, and is no worse for that."""
SAYS = "inflight tasks: "


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 for a task that can be made, 2 for one that can't."""
    parser = argparse.ArgumentParser(prog="python -m inflight.tasks", description=__doc__)
    parser.add_argument("--run-dir", required=True)
    config = load(parser.parse_args(argv).run_dir)
    with contextlib.suppress(Exception):  # whatever it is, `make` meets it again, and tells
        importlib.import_module(config.task.name.partition(":")[0])
    signal.alarm(MAKE_S)
    try:
        make(config.task, config.seed)
    except ConfigError as error:
        print(f"{SAYS}{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

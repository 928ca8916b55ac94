"""`python -m inflight.generator --run-dir RUN --name g0`: one generator of a run."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Sequence
from types import FrameType

from inflight.config import ConfigError, RunConfig, load
from inflight.exits import BAD_INPUT, DONE, GIVEN_UP, STOPPED, say_why
from inflight.generator.agent import GeneratorEnded
from inflight.generator.engine_args import environment
from inflight.models import ModelError
from inflight.processes import guard_group, leave
from inflight.surroundings import allow_open_files, forget_foreign


def main(argv: Sequence[str] | None = None) -> int:
    """Returns an exit code: one of exits.py."""
    parser = argparse.ArgumentParser(prog="python -m inflight.generator", description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--name", required=True, help="g0, g1, …")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _stop_start)
    guard_group()
    try:
        config = load(arguments.run_dir)
        _check_name(config, arguments.name)
        forget_foreign(os.environ, "generator")  # the launcher removes them for its children, a script may not
        os.environ.update(environment(config, os.environ))
        allow_open_files()
        return _run(config, arguments.name)
    except (ConfigError, ModelError) as error:
        return say_why(f"generator {arguments.name}", error, BAD_INPUT)
    except SystemExit as stop:  # SIGTERM before the engine was started
        return int(stop.code or 0)


def _run(config: RunConfig, name: str) -> int:
    from inflight.bus import BusError
    from inflight.generator import server
    from inflight.generator.patched import require_patched

    require_patched()
    try:
        over = asyncio.run(server.serve(config, name))
    except (SystemExit, KeyboardInterrupt):
        server.end_children()
        return STOPPED
    except ConfigError:
        raise
    except (GeneratorEnded, BusError, ValueError, OSError) as error:
        return say_why(f"generator {name}", error, GIVEN_UP)
    except RuntimeError as error:  # vLLM raises it when the engine core did not start; its log has the cause
        return say_why(f"generator {name}", error, GIVEN_UP)
    return DONE if over else STOPPED


def _stop_start(signum: int, frame: FrameType | None) -> None:
    """Signal handler until the event loop installs its own, when serving begins: aborts the start."""
    raise SystemExit(STOPPED)


def _check_name(config: RunConfig, name: str) -> None:
    if not config.is_generator(name):
        raise ConfigError(f"--name {name} is not one of {', '.join(config.generator_names())}")


if __name__ == "__main__":
    leave(main())

"""`python -m inflight.evaluation --run-dir RUN`: the evaluator of a run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence

from inflight import config as configuration
from inflight.actor.foreign import foreign
from inflight.bus import BusError, Link
from inflight.completions import session_of
from inflight.config import ConfigError, RunConfig
from inflight.descendants import adopt
from inflight.evaluation.asking import Asking
from inflight.evaluation.evaluator import Evaluator, EvaluatorError
from inflight.evaluation.exported import registry_of
from inflight.exits import BAD_INPUT, DONE, GIVEN_UP, STOPPED, say_why
from inflight.messages import Status
from inflight.messages.reasons import ACTOR_STOPPED
from inflight.prometheus.endpoint import MetricsEndpoint

NAME = "evaluator"
STATUS_EVERY_S = 1.0


async def work(config: RunConfig) -> bool:
    """Runs the evaluator until the run is over (True) or SIGTERM comes.

    Raises ConfigError for a task or a tokenizer that can't be made, or a task that holds no question out,
    EvaluatorError or BusError."""
    api_key = config.api_key()
    async with foreign(config) as code, session_of(api_key) as session:
        if code.held_out == 0:
            raise ConfigError(f"task.name={config.task.name!r} holds no question out, and there is none to evaluate by")
        with (
            Link(config.endpoint("eval"), NAME, config.bus) as link,
            Link(config.endpoint("status"), NAME, config.bus) as status,
        ):
            evaluator = Evaluator(config.eval, link, Asking(config, code, session))
            reporting = asyncio.create_task(_report(status, evaluator), name="status")
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, evaluator.stop)
            try:
                with MetricsEndpoint(config, NAME, registry_of(evaluator.status)):
                    reason = await evaluator.run()
                logging.info("ended: %s", reason)
                return reason != ACTOR_STOPPED
            finally:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)


async def _report(link: Link, evaluator: Evaluator) -> None:
    """Sends a Status at once, by which the launcher knows that this process works, and then once a second; ends by
    cancellation."""
    while True:
        with contextlib.suppress(BusError):  # the launcher is gone, and ends this process
            link.send(Status(source=NAME, values=evaluator.status()))
        await asyncio.sleep(STATUS_EVERY_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: one of exits.py."""
    parser = argparse.ArgumentParser(prog="python -m inflight.evaluation", description=__doc__)
    parser.add_argument("--run-dir", required=True)
    arguments = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"{NAME} %(asctime)s %(levelname)s %(message)s")
    try:
        config = configuration.load(arguments.run_dir)
        adopt()
        over = asyncio.run(work(config))
    except ConfigError as error:
        return say_why(NAME, error, BAD_INPUT)
    except (EvaluatorError, BusError, ValueError, OSError) as error:  # OSError: no process, no disk
        return say_why(NAME, error, GIVEN_UP)
    return DONE if over else STOPPED


if __name__ == "__main__":
    sys.exit(main())

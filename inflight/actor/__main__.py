"""`python -m inflight.actor --run-dir RUN --name a0`: one actor of a run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence

from inflight import config as configuration
from inflight.actor.exported import registry_of
from inflight.actor.foreign import foreign
from inflight.actor.loop import Actor, ActorError
from inflight.actor.pool import NoGenerator, Pool
from inflight.actor.routing import Routing
from inflight.actor.sampler import Sampler
from inflight.bus import BusError, Link
from inflight.completions import session_of
from inflight.config import ConfigError, RunConfig
from inflight.descendants import adopt
from inflight.error_line import one_line
from inflight.exits import BAD_INPUT, DONE, GIVEN_UP, STOPPED
from inflight.messages import Status
from inflight.messages.reasons import ACTOR_STOPPED
from inflight.prometheus.endpoint import ADDRESS, MetricsEndpoint
from inflight.types import Value

STATUS_EVERY_S = 1.0
MOST_CONNECTIONS = 1 << 16


async def work(config: RunConfig, name: str) -> bool:
    """Runs the actor until the run is over (True) or SIGTERM comes.

    Raises ConfigError when the task or the tokenizer can't be made, ActorError, NoGenerator or BusError."""
    routing = Routing()
    api_key = config.api_key()
    async with foreign(config) as code, session_of(api_key) as session:
        with (
            Link(config.endpoint("rollouts"), name, config.bus) as link,
            Link(config.endpoint("status"), name, config.bus) as status,
        ):
            async with Pool(
                session, config.generator_names(), routing.url_of, most=connections(), listed=routing.names
            ) as pool:
                sampler = Sampler(
                    config.rollout,
                    config.request_seed,
                    code,
                    session,
                    pool,
                    longest_prompt=config.longest_prompt,
                    together_from=config.together_from,
                    model=config.trainer.adapter,
                    actor=name,
                )
                actor = Actor(
                    name,
                    link,
                    sampler,
                    concurrency=config.rollout.concurrency,
                    give_up_after_s=config.rollout.give_up_after_s,
                    routing=routing,
                )
                return await _run(config, actor, pool, status)


def connections() -> int:
    """How many requests may be open at a time: half of the process's limit on open files.

    The other half is for files that a generator with the same limit has open beside its connections.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(8, min(soft // 2, MOST_CONNECTIONS))


async def _run(config: RunConfig, actor: Actor, pool: Pool, status: Link) -> bool:
    """Waits for the generators, then runs the actor; reports all the time. SIGTERM ends either (False)."""
    phase = "waiting for generators"

    def values() -> dict[str, Value]:
        versions = {f"version.{each.name}": each.version for each in pool.generators.values()}
        return {"phase": phase, **actor.status(), **versions}

    async def wait_and_run() -> bool:
        nonlocal phase
        running = asyncio.create_task(actor.run(), name="actor loop")
        waiting = asyncio.create_task(pool.wait_any(config.generator.start_timeout_s), name="generators")
        try:
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                waiting.result()
                phase = "sampling"
                actor.join()
            reason = await running
        finally:
            for task in (running, waiting):
                task.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)
        logging.info("ended: %s", reason)
        return reason != ACTOR_STOPPED

    metrics = MetricsEndpoint(config, actor.name, registry_of(values))
    working = asyncio.create_task(wait_and_run(), name="actor")
    where = {ADDRESS: metrics.address} if metrics.address else {}
    reporting = asyncio.create_task(report(status, actor.name, lambda: {**values(), **where}), name="status")

    def stop() -> None:
        if phase == "sampling":
            actor.stop()
        else:
            working.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    try:
        return await working
    except asyncio.CancelledError:
        logging.info("stopped before a generator was ready")
        return False
    finally:
        metrics.close()
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)


async def report(link: Link, source: str, values: Callable[[], dict[str, Value]]) -> None:
    """Sends a Status at once, so that the launcher knows that this process works, and then once per second, with the
    tokens per second over the last one; ends by cancellation."""
    before = 0.0
    then = time.monotonic() - STATUS_EVERY_S
    while True:
        now = time.monotonic()
        snapshot = values()
        tokens = float(snapshot.get("tokens", 0))
        snapshot["tokens_per_s"] = round((tokens - before) / (now - then), 1)
        before = tokens
        then = now
        with contextlib.suppress(BusError):  # no launcher listens
            link.send(Status(source=source, values=snapshot))
        await asyncio.sleep(STATUS_EVERY_S)


def _check_name(name: str) -> None:
    if re.fullmatch(r"a\d{1,4}", name) is None:
        raise ConfigError(f"--name {name} is not allowed: a and a number, such as a0")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns an exit code: one of exits.py."""
    parser = argparse.ArgumentParser(prog="python -m inflight.actor", description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--name", required=True, help="a0, a1, …")
    arguments = parser.parse_args(argv)
    name = arguments.name
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"{name} %(asctime)s %(levelname)s %(message)s")
    try:
        config = configuration.load(arguments.run_dir)
        _check_name(name)
        adopt()
        over = asyncio.run(work(config, name))
    except ConfigError as error:
        return _end(name, error, BAD_INPUT)
    except (ActorError, NoGenerator, BusError, ValueError, OSError) as error:  # OSError: no process or no disk space
        return _end(name, error, GIVEN_UP)
    except KeyboardInterrupt:
        return _end(name, "interrupted", 130)
    return DONE if over else STOPPED


def _end(name: str, error: object, code: int) -> int:
    print(f"inflight actor {name}: {one_line(error, 1000)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

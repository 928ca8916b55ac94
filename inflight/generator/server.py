"""vLLM's OpenAI-compatible server that commits new weights between the steps of running requests.

AsyncLLM lives in this process; the engine core and the workers are its children. The EngineAgent (see agent.py) and the
status reports (status.py) run beside the HTTP server. Whichever of them ends first ends the generator.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import secrets
import signal
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Generator
from typing import Any

import psutil

from inflight.bus import Link
from inflight.config import ConfigError, RunConfig
from inflight.config.network import joined
from inflight.generator import hooks
from inflight.generator.accepting import AcceptErrors
from inflight.generator.agent import EngineAgent, GeneratorEnded
from inflight.generator.api_key import OPEN, OPEN_TO_HOSTS, ApiKey
from inflight.generator.engine_args import engine_values, server_arguments, worker_of
from inflight.generator.exported import export
from inflight.generator.first_version import FirstVersion
from inflight.generator.plugin import INCARNATION, hand_over_often
from inflight.generator.served_adapters import add_adapters
from inflight.generator.server_args import check_parsers
from inflight.generator.settings import Settings
from inflight.generator.shadow.limits import refuse
from inflight.generator.status import report
from inflight.generator.warmup import warm_up
from inflight.generator.worker.adapters import require_patch
from inflight.listening import listen
from inflight.messages import EngineHello
from inflight.processes import is_tracker
from inflight.prometheus.endpoint import ADDRESS, announce
from inflight.vocabulary import decode_every_id

HEALTH_TIMEOUT_S = 60.0
STOP_HTTP_S = 1
STOP_ENGINE_S = 1.5
STOP_CHILDREN_S = 1.0
"""Timeouts of the three phases of a stop, in seconds; their sum is below the launcher's grace period. A worker needs
several CPU seconds to finalise its interpreter, for no benefit: children that remain after the timeout are killed."""


async def serve(config: RunConfig, name: str) -> bool:
    """Serves until the trainer has finished (returns True) or a signal arrives (False). Raises GeneratorEnded when it
    has to stop earlier."""
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    worker = worker_of(config, cpu=current_platform.is_cpu())
    # The workers check this too, but their error is buried in vLLM's tracebacks.
    hooks.require("cpu" if current_platform.is_cpu() else "cuda")
    if config.trainer.adapter:
        hooks.require("adapters")
        require_patch()
    if not current_platform.is_cpu():
        hand_over_often()
    os.environ[INCARNATION] = secrets.token_hex(8)
    asyncio.get_running_loop().set_exception_handler(AcceptErrors())
    vllm = _entrypoints()
    parser = vllm["make_arg_parser"](FlexibleArgumentParser())
    arguments = server_arguments(parser, engine_values(config, name, worker), config.generator.server)
    check_parsers(arguments, hooks.locate("make_arg_parser"))
    require_key(config)
    with listen(config.network) as listening:
        port = listening.getsockname()[1]
        url, own = (f"http://{joined(host, port)}" for host in (config.network.reached, config.network.address))
        async with _engine(arguments) as engine:
            if (tokenizer := engine.output_processor.tokenizer) is not None:
                decode_every_id(tokenizer)  # an id that it cannot decode would kill the engine
            tasks = await engine.get_supported_tasks()
            app = vllm["build_app"](arguments, tasks, engine.model_config)
            await vllm["init_app_state"](engine, app.state, arguments, tasks)
            add_adapters(app.state.openai_serving_models, config)
            opening = FirstVersion(app)
            async with _http(app, _asked(config, opening), listening) as http:
                await _until_healthy(own, http)
                with opening.warming_up():
                    await warm_up(config, own, engine.model_config.get_vocab_size())
                return await _work(config, name, engine, url, http, opening)


def _asked(config: RunConfig, opening: FirstVersion) -> ApiKey | FirstVersion:
    """`opening`, behind the run's key if there is one."""
    key = config.api_key()
    return ApiKey(opening, key, OPEN_TO_HOSTS if config.network.bind else OPEN) if key else opening


def require_key(config: RunConfig) -> None:
    """Raises ConfigError when other hosts could send requests without a key."""
    if config.network.bind and not config.api_key():
        raise ConfigError(f"network.bind={config.network.bind} is not allowed: {config.api_key_file} holds no key")


def _entrypoints() -> dict[str, Any]:
    """vLLM's functions that build the server, from the modules of the installed version."""
    names = ("build_app", "init_app_state", "make_arg_parser")
    return {name: getattr(importlib.import_module(hooks.locate(name)), name) for name in names}


@contextlib.asynccontextmanager
async def _engine(arguments: argparse.Namespace) -> AsyncIterator[Any]:
    """The running engine. On exit it is stopped, gracefully first, with all processes that it has started."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    usage = UsageContext.OPENAI_API_SERVER
    vllm_config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(usage)
    # The workers check this too, but their error is buried in vLLM's tracebacks.
    refuse(vllm_config, "CPU" if current_platform.is_cpu() else "CUDA")
    try:
        engine = AsyncLLM.from_vllm_config(vllm_config, usage_context=usage)
        try:
            yield engine
        finally:
            # Gives the engine core time to stop its workers; vLLM's server would kill it at once.
            await asyncio.to_thread(engine.shutdown, timeout=STOP_ENGINE_S)
    finally:
        await asyncio.to_thread(end_children)


@contextlib.asynccontextmanager
async def _http(app: Any, asked: ApiKey | FirstVersion, listening: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """The HTTP server of `app`, behind `asked`, as a task. On exit, connections are closed within STOP_HTTP_S."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            yield  # SIGTERM is handled by the generator, not by its HTTP server

    server = Server(uvicorn.Config(asked, log_level="warning", access_log=False, timeout_graceful_shutdown=STOP_HTTP_S))
    app.state.server = server  # vLLM's handlers use this to stop the server when the engine dies
    task = asyncio.create_task(server.serve(sockets=[listening]), name="http")
    try:
        yield task
    finally:
        server.should_exit = True
        await asyncio.wait([task], timeout=STOP_HTTP_S + 1)
        task.cancel()


async def _until_healthy(url: str, http: asyncio.Task[None]) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would not reach this host

    def ask() -> bool:
        with contextlib.suppress(OSError), direct.open(f"{url}/health", timeout=5) as reply:
            return reply.status == 200
        return False

    deadline = time.monotonic() + HEALTH_TIMEOUT_S
    while not await asyncio.to_thread(ask):
        if http.done() or time.monotonic() > deadline:
            raise GeneratorEnded(f"the server at {url} did not become healthy within {HEALTH_TIMEOUT_S:.0f} s")
        await asyncio.sleep(0.05)


async def _work(
    config: RunConfig, name: str, engine: Any, url: str, http: asyncio.Task[None], opening: FirstVersion
) -> bool:
    """Runs agent and status reports beside the HTTP server until one of them ends (True when the run has finished) or a
    signal arrives (False)."""
    hello = EngineHello(
        generator=name,
        world_size=engine.vllm_config.parallel_config.world_size,
        url=url,
        incarnation=os.environ[INCARNATION],
    )
    weights = Link(config.endpoint("weights"), f"{name}.engine", config.bus)
    status = Link(config.endpoint("status"), name, config.bus)
    lineage = Settings.of(engine.vllm_config).lineage
    agent = EngineAgent(weights, engine, hello, config.publish.commit_timeout_s, config.publish.join_timeout_s, lineage)
    opening.commits = agent.commits
    served = _export(config, name, url, agent)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks = {
        asyncio.create_task(agent.run(), name="agent"),
        asyncio.create_task(report(status, name, agent, served), name="status"),
        asyncio.create_task(_watch(engine), name="engine"),
        asyncio.create_task(stop.wait(), name="signal"),
    }
    try:
        done, _ = await asyncio.wait({*tasks, http}, return_when=asyncio.FIRST_COMPLETED)
        if done == {http}:
            raise GeneratorEnded("the HTTP server ended by itself")
        for task in done:
            task.result()
        return not stop.is_set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        weights.close(asked=stop.is_set())
        status.close()


async def _watch(engine: Any) -> None:
    """Raises GeneratorEnded when the engine core has died."""
    while not engine.errored:  # noqa: ASYNC110 - vLLM sets a flag, there is no event to await
        await asyncio.sleep(0.5)
    raise GeneratorEnded(f"the engine died: {engine.dead_error}")


def _export(config: RunConfig, name: str, url: str, agent: EngineAgent) -> dict[str, str]:
    """Adds inflight's metrics to vLLM's, and announces where they are served, as the status does by what this gives."""
    if not config.launch.metrics:
        return {}
    export(agent.commits, config.generator.swap)
    address = url.removeprefix("http://")
    with contextlib.suppress(OSError):  # a full disk, or a run folder without bus: Prometheus does not find it then
        announce(config, name, address)
    return {ADDRESS: address}


def end_children() -> None:
    """Ends child processes that are still running: SIGTERM, then SIGKILL after STOP_CHILDREN_S."""
    children = [child for child in psutil.Process().children(recursive=True) if not is_tracker(child)]
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    _, left = psutil.wait_procs(children, timeout=STOP_CHILDREN_S)
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, timeout=STOP_CHILDREN_S)

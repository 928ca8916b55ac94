"""A generator without vLLM as a process: real bus, real transport and a small HTTP server; `python stand_in.py RUN g0`.

It answers each request after a while of its own, under the version that it holds then (not a test file).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

import torch
from aiohttp import web
from fake_generator import FakeGenerator
from packed_samples import packed

from inflight import config as configuration
from inflight.bus import Link
from inflight.config.network import joined
from inflight.listening import listen
from inflight.messages import Finish, Status
from inflight.weights.transport import make_receiver
from inflight.weights.transport.place import place_of

SLOWEST_S = float(os.environ.get("STAND_IN_SLOWEST_S", "0.6"))
STOPPED = 128 + signal.SIGTERM


def answer(seed: int, version: int) -> dict[str, object]:
    """A completion that depends on the seed alone."""
    source = random.Random(seed)
    tokens = [source.randrange(3, 13) for _ in range(4)]
    return {
        "index": 0,
        "text": "",
        "finish_reason": "stop",
        "packed_logprobs": packed(tokens, [-2.5] * 4),
        "token_versions": [[0, version]],
        "prefill_versions": [[0, 0, version]],
    }


async def serve(run_dir: str, name: str) -> int:
    """Until SIGTERM, or until the trainer says that the run is over; the exit code."""
    at_once, most = 0, 0
    config = configuration.load(run_dir)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            asked = await request.json()
            seed = asked["seed"]
            await asyncio.sleep(random.Random(seed).random() * SLOWEST_S)
        finally:
            at_once -= 1
        whole = {"choices": [answer(seed, generator.version)]}
        if not asked["stream"]:
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps(whole)}\n\ndata: [DONE]\n\n".encode())
        return response

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/health", health)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listening = listen(config.network)
    await web.SockSite(runner, listening).start()
    generator = FakeGenerator(
        config.endpoint("weights"),
        name,
        bus=config.bus,
        place=place_of(torch.device("cpu")),
        url=f"http://{joined(config.network.reached, listening.getsockname()[1])}",
        connect=lambda welcome: make_receiver(welcome, config.network),
    ).start()
    with Link(config.endpoint("status"), name, config.bus) as status:
        while not ended.is_set() and not any(isinstance(message, Finish) for message in generator.heard):
            status.send(Status(source=name, values={} if generator.version is None else {"version": generator.version}))
            await asyncio.sleep(0.2)
    await runner.cleanup()
    generator.close()
    print(f"at most {most} requests at once", flush=True)
    return STOPPED if ended.is_set() else 0


if __name__ == "__main__":
    os._exit(asyncio.run(serve(*sys.argv[1:])))

"""A real HTTP server that answers as a patched vLLM does, with the log-probabilities of a real model (not a test file).

Its weights are those that a played generator holds; `change` makes it compute something else, as another implementation
may.
"""

import asyncio
import random
import threading

import torch
from aiohttp import web
from packed_samples import packed
from transformers import AutoModelForCausalLM


class ModelServer:
    """Serves on loopback in a thread of its own: `url`. `requests` are the bodies that came."""

    def __init__(self, directory, generator=None, *, change=lambda ids, logits: logits, dtype=torch.float32):
        """`generator`: a FakeGenerator to be assigned later, whose version and weights count; None: version 0.

        `change(ids [L], logits [L, V])` gives the logits that count.
        """
        self.generator, self.change = generator, change
        self.requests = []
        self.hold = None
        """A list: requests wait, and are noted there."""
        self.broken = None
        """Tokens: prompts of so many have no log-probabilities."""
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        ready = threading.Event()
        self._ready = ready
        self._thread.start()
        assert ready.wait(30)

    def _run(self):
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()

    async def _start(self):
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._ready.set()

    async def _complete(self, request):
        body = await request.json()
        self.requests.append(body)
        if self.hold is not None:
            self.hold.append(body)
            await asyncio.sleep(3600)
        if len(body["prompt"]) == self.broken:
            said = {"message": "Out of range float values are not JSON compliant", "type": "BadRequestError"}
            return web.json_response({"error": said}, status=400)
        return web.json_response({"choices": [self.answer(body)]})

    @torch.no_grad()
    def answer(self, body):
        """Random tokens, and what the model says of them."""
        version = 0
        if self.generator is not None:
            version = self.generator.version
            self._model.load_state_dict(self.generator.shadows[0].live, strict=False)
        prompt, source = body["prompt"], random.Random(body["seed"])
        tokens = [source.randrange(3, 13) for _ in range(body["max_tokens"])]
        ids = torch.tensor([*prompt, *tokens])
        logits = self.change(ids, self._model(ids[None]).logits[0].float()) / body["temperature"]
        logprobs = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1]
        values = [float(logprobs[index, token]) for index, token in enumerate(tokens)]
        return {
            "index": 0,
            "text": "",
            "finish_reason": "length",
            "packed_logprobs": packed(tokens, values),
            "token_versions": [[0, version]],
            "prefill_versions": [[0, 0, version]],
        }

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

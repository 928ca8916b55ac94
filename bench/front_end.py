"""How fast vLLM's front end turns its engine's messages into the events of streams: tokens per second, one core.

The patched vLLM's own message decoder, output processor and serving layer, for streams as an actor requests them: with
log-probabilities as JSON, as vLLM has them, and as the patch's packed field, one after the other in this process.
Sequences grow by one token per step, as in decoding. The HTTP server is not in it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import numpy as np

SEQUENCES = 32
TOKENS = 512
PROMPT = 200
STEPS_TIMED = ("front end: decode", "front end: output processor", "front end: serve")


class FrontEnd:
    """One tokenizer's output processor and serving layer, with the messages of an engine that decodes SEQUENCES."""

    def __init__(self, tokenizer: Any, asked: int, *, packed: bool) -> None:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder

        self._tokenizer = tokenizer
        self._request = CompletionRequest(
            model="m",
            seed=None,
            prompt=list(range(PROMPT)),
            max_tokens=TOKENS,
            stream=True,
            logprobs=asked,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
            return_packed_logprobs=packed,
        )
        self._serving = cast(Any, object.__new__(OpenAIServingCompletion))  # without an engine: of it only this is used
        self._serving.system_fingerprint = None
        self._serving.return_tokens_as_token_ids = False
        self._serving.enable_force_include_usage = False
        self._serving.enable_prompt_tokens_details = False
        self._serving.enable_per_request_metrics = False
        self._serving.enable_log_outputs = False
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._messages = list(_messages(len(tokenizer), asked))

    def run(self) -> tuple[dict[str, float], int]:
        """CPU seconds of each step, and the number of bytes that the streams have."""
        from vllm.v1.engine.output_processor import OutputProcessor

        from inflight.generator.engine_args import STREAM_INTERVAL

        processor = OutputProcessor(self._tokenizer, log_stats=True, stream_interval=STREAM_INTERVAL)
        for request in self._requests():
            processor.add_request(request, None)
        spent = dict.fromkeys(STEPS_TIMED, 0.0)
        answers: dict[str, list[Any]] = {}
        for message in self._messages:
            at = time.process_time()
            outputs = self._decoder.decode(message)
            decoded = time.process_time()
            answered = self._processed(processor, outputs)
            spent["front end: decode"] += decoded - at
            spent["front end: output processor"] += time.process_time() - decoded
            for each in answered:
                answers.setdefault(each.request_id, []).append(each)
        at = time.process_time()
        size = asyncio.run(self._served(answers))
        spent["front end: serve"] = time.process_time() - at
        return spent, size

    def _requests(self) -> Iterator[Any]:
        from vllm.v1.engine import EngineCoreRequest

        for number in range(SEQUENCES):
            yield EngineCoreRequest(
                request_id=str(number),
                external_req_id=str(number),
                prompt_token_ids=list(range(PROMPT)),
                mm_features=None,
                sampling_params=self._request.to_sampling_params(TOKENS),
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )

    @staticmethod
    def _processed(processor: Any, outputs: Any) -> list[Any]:
        from vllm.v1.metrics.stats import IterationStats

        found = processor.process_outputs(outputs.outputs, outputs.timestamp, IterationStats())
        answered: list[Any] = found.request_outputs
        return answered

    async def _served(self, answers: dict[str, list[Any]]) -> int:
        size = 0
        for name, outputs in answers.items():
            stream = self._serving.completion_stream_generator(
                self._request, [None], _numbered(outputs), name, 0, "m", 1, self._tokenizer, _Metadata()
            )
            async for event in stream:
                size += len(event.encode())
        return size


class _Metadata:
    """Takes what the serving layer tells its middleware."""

    final_usage_info: Any = None


async def _numbered(outputs: list[Any]) -> AsyncIterator[tuple[int, Any]]:
    for output in outputs:
        output.prompt = ""
        yield 0, output


def _messages(vocabulary: int, asked: int) -> Iterator[list[Any]]:
    """An engine's message of each step, encoded. All but one of the `asked` most probable tokens are possible."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackEncoder

    encoder = MsgpackEncoder()
    source = random.Random(0)
    for step in range(TOKENS):
        outputs = []
        for number in range(SEQUENCES):
            top = np.array(source.sample(range(1000, vocabulary), max(asked, 1)), np.int32)
            values = np.sort(np.array([-5 * source.random() for _ in top], np.float32))[::-1]
            values[-1] = -np.inf if asked else values[-1]
            drawn = source.randrange(max(1, asked - 1))
            logprobs = LogprobsLists(
                np.concatenate([top[drawn : drawn + 1], top[:asked]])[None],
                np.concatenate([values[drawn : drawn + 1], values[:asked]])[None],
                np.array([drawn + 1], np.int32),
            )
            outputs.append(
                EngineCoreOutput(
                    request_id=str(number),
                    new_token_ids=[int(top[drawn])],
                    new_logprobs=logprobs,
                    weight_version=3,
                    finish_reason=FinishReason.LENGTH if step == TOKENS - 1 else None,
                    prefill_versions=[(0, 0, 3)] if step == 0 else None,
                )
            )
        frames = encoder.encode(EngineCoreOutputs(outputs=outputs, timestamp=float(step)))
        yield [bytes(frame) for frame in frames]


def measured(tokenizer: Any, asked: int, *, packed: bool, rounds: int) -> dict[str, float]:
    """Tokens per second of each step and of all, of the fastest of `rounds` rounds, and bytes per token."""
    front_end = FrontEnd(tokenizer, asked, packed=packed)
    found = [front_end.run() for _ in range(rounds + 1)][1:]
    best, size = min(found, key=lambda each: sum(each[0].values()))
    tokens = SEQUENCES * TOKENS
    rates = {name: tokens / seconds for name, seconds in best.items()}
    return {**rates, "front end, whole": tokens / sum(best.values()), "http_bytes": size / tokens}

"""Packed log-probabilities of the patched vLLM, against the ones that it has without a patch, number by number.

No engine runs: steps with made-up numbers go through vLLM's own output processor and serving layer, so that the same
tests run on every version (test_patches_wheels.py).
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
from base64 import b64decode
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inflight.packed_logprobs import unpack

patch = pytest.importorskip("vllm.inflight_patch", reason="needs a patched vLLM: inflight patch apply")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(patch.PATCH_VERSION < 3, reason="needs a newer patch of vLLM: inflight patch apply"),
]

ASKED = 3
VOCABULARY = 50
IMPOSSIBLE = -9999.0


def steps(*sizes: int, wider: int = 0, seed: int = 0) -> list[Any]:
    """Log-probabilities of steps that sample so many tokens each; in some, fewer than ASKED tokens are possible. Rows
    are `wider` than asked for."""
    from vllm.v1.outputs import LogprobsLists

    source = np.random.default_rng(seed)
    made = []
    for size in sizes:
        ids, values, ranks = [], [], []
        for _ in range(size):
            row = source.permutation(VOCABULARY)[: ASKED + wider].astype(np.int32)
            logprobs = np.sort(source.uniform(-5, 0, len(row)).astype(np.float32))[::-1].copy()
            logprobs[source.integers(1, len(row) + 1) :] = -np.inf
            rank = int(source.integers(0, np.isfinite(logprobs).sum()))
            outside = np.isfinite(logprobs).all() and bool(source.integers(0, 2))
            own, value = (VOCABULARY + 1, np.float32(-7.25)) if outside else (row[rank], logprobs[rank])
            ids.append([own, *row])
            values.append([value, *logprobs])
            ranks.append(rank + 1)
        made.append(LogprobsLists(np.array(ids, np.int32), np.array(values, np.float32), np.array(ranks, np.int32)))
    return made


def request(*, packed: bool, **changes: Any) -> Any:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    fields = {"model": "m", "prompt": [1, 2], "max_tokens": 500, "stream": True, "logprobs": ASKED}
    return CompletionRequest(
        **fields
        | {"return_token_ids": True, "return_tokens_as_token_ids": True, "return_packed_logprobs": packed}
        | changes
    )


def processed(asked: Any, rows: list[Any], *, interval: int = 1, collected: bool = False) -> list[Any]:
    """The outputs of a request to which the engine answers with these steps. `collected`: as one that reads its stream
    only afterwards gets them."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    params = asked.to_sampling_params(500)
    queue = RequestOutputCollector(params.output_kind, "r") if collected else None
    processor = OutputProcessor(None, log_stats=False, stream_interval=interval)
    core = EngineCoreRequest(
        request_id="r",
        external_req_id="r",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    processor.add_request(core, None, queue=queue)
    found = []
    for at, row in enumerate(rows):
        output = EngineCoreOutput(
            request_id="r",
            new_token_ids=row.logprob_token_ids[:, 0].tolist(),
            new_logprobs=row,
            finish_reason=FinishReason.LENGTH if at == len(rows) - 1 else None,
        )
        found += processor.process_outputs([output]).request_outputs
    return [queue.get_nowait()] if queue is not None else found


def entries(field: str) -> list[list[tuple[int, float]]]:
    """The (id, log-probability) pairs of each token."""
    data = b64decode(field)
    (length,) = struct.unpack_from("<i", data)
    counts = struct.unpack_from(f"<{length}i", data, 4)
    total = sum(counts)
    ids = struct.unpack_from(f"<{total}i", data, 4 + 4 * length)
    values = struct.unpack_from(f"<{total}f", data, 4 + 4 * length + 4 * total)
    assert len(data) == 4 * (1 + length + 2 * total)
    pairs = iter(zip(ids, values, strict=True))
    return [[next(pairs) for _ in range(count)] for count in counts]


def possible(token: int, given: dict[int, float]) -> list[tuple[int, float]]:
    """What the field has of a token whose log-probabilities are `given`: itself, then the others in their order."""
    others = [(other, value) for other, value in given.items() if other != token and value > IMPOSSIBLE]
    return [(token, given[token]), *others]


def unpatched(completion: Any) -> list[list[tuple[int, float]]]:
    """The same from vLLM's own objects."""
    return [
        possible(token, {other: max(each.logprob, IMPOSSIBLE) for other, each in position.items()})
        for token, position in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


@pytest.mark.parametrize("wider", [0, 4])
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("sizes", [[1] * 75, [3, 1, 2] * 7], ids=["decoding", "speculating"])
@pytest.mark.parametrize("stream", [True, False])
def test_every_output_has_the_numbers_that_it_has_without_packing(
    stream: bool, sizes: list[int], interval: int, wider: int
) -> None:
    rows = steps(*sizes, wider=wider)
    plain = processed(request(packed=False, stream=stream), rows, interval=interval)
    packed = processed(request(packed=True, stream=stream), rows, interval=interval)
    for one, other in zip(plain, packed, strict=True):
        (expected,), (got,) = one.outputs, other.outputs
        assert entries(got.packed_logprobs.encode()) == unpatched(expected)
        assert list(got.token_ids) == list(expected.token_ids)
        assert not got.logprobs, "no object per token was made"
        assert expected.packed_logprobs is None
        assert got.cumulative_logprob == pytest.approx(expected.cumulative_logprob)
    assert sum(len(entries(each.outputs[0].packed_logprobs.encode())) for each in packed) == sum(sizes)


def test_outputs_that_were_not_read_are_joined() -> None:
    rows = steps(*[1] * 40)
    (output,) = processed(request(packed=True), rows, collected=True)
    (whole,) = processed(request(packed=True, stream=False), rows)
    assert entries(output.outputs[0].packed_logprobs.encode()) == entries(whole.outputs[0].packed_logprobs.encode())


def test_rows_do_not_keep_the_engines_messages_in_memory() -> None:
    """In vLLM an array of a message is a view of all of it."""
    messages = steps(*[1] * 64)
    (output,) = processed(request(packed=True, stream=False), messages)
    for ids, values in output.outputs[0].packed_logprobs._rows:
        assert not any(np.may_share_memory(ids, each.logprob_token_ids) for each in messages)
        assert not any(np.may_share_memory(values, each.logprobs) for each in messages)


def test_what_is_no_number_stays_so() -> None:
    (row,) = steps(1)
    row.logprobs[0, 0] = math.nan
    row.logprobs[0, 1:] = -math.inf
    (output,) = processed(request(packed=True), [row])
    ((own,),) = entries(output.outputs[0].packed_logprobs.encode())
    assert own[0] == row.logprob_token_ids[0, 0]
    assert math.isnan(own[1])


def test_what_json_takes_for_impossible_is_left_out() -> None:
    (row,) = steps(1)
    row.logprob_token_ids[0] = [9, 3, 4, 5]
    row.logprobs[0] = [-1.0, -1.5, -9998.5, -20_000.0]
    (output,) = processed(request(packed=True), [row])
    assert entries(output.outputs[0].packed_logprobs.encode()) == [[(9, -1.0), (3, -1.5), (4, -9998.5)]]


def test_without_others_there_is_the_tokens_own() -> None:
    rows = steps(*[1] * 5)
    outputs = processed(request(packed=True, logprobs=0, stream=False), rows)
    found = entries(outputs[0].outputs[0].packed_logprobs.encode())
    assert found == [[(row.logprob_token_ids[0, 0], row.logprobs[0, 0])] for row in rows]


def choices(asked: Any, outputs: list[Any]) -> list[dict[str, Any]]:
    """The choices in vLLM's answer over HTTP: of each event, or of the one body."""
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    serving: Any = object.__new__(OpenAIServingCompletion)
    vars(serving).update(
        system_fingerprint=None,
        return_tokens_as_token_ids=False,
        enable_force_include_usage=False,
        enable_prompt_tokens_details=False,
        enable_per_request_metrics=False,
        enable_log_outputs=False,
    )

    async def numbered() -> AsyncIterator[tuple[int, Any]]:
        for output in outputs:
            output.prompt = ""
            yield 0, output

    async def streamed() -> list[str]:
        events = serving.completion_stream_generator(
            asked, [None], numbered(), "r", 0, "m", 1, tokenizer=None, request_metadata=SimpleNamespace()
        )
        return [event async for event in events]

    if asked.stream:
        bodies = [event.removeprefix("data: ") for event in asyncio.run(streamed()) if "[DONE]" not in event]
    else:
        outputs[0].prompt = ""
        answer = serving.request_output_to_completion_response(outputs, asked, "r", 0, "m", None, SimpleNamespace())
        bodies = [answer.model_dump_json()]
    return [choice for body in bodies for choice in json.loads(body)["choices"]]


@pytest.mark.parametrize("stream", [True, False])
def test_the_answer_has_the_numbers_of_top_logprobs(stream: bool) -> None:
    rows = steps(*[1] * 10)
    asked = {packed: request(packed=packed, stream=stream) for packed in (False, True)}
    plain, packed = (choices(each, processed(each, rows, interval=4)) for each in asked.values())
    for one, other in zip(plain, packed, strict=True):
        tops = [
            {int(key.removeprefix("token_id:")): value for key, value in position.items()}
            for position in one["logprobs"]["top_logprobs"]
        ]
        assert entries(other["packed_logprobs"]) == [
            possible(token, given) for token, given in zip(one["token_ids"], tops, strict=True)
        ]
        drawn = unpack([b64decode(other["packed_logprobs"])], ASKED)
        assert drawn.token_ids.tolist() == one["token_ids"] == other["token_ids"]
        assert drawn.logprobs.tolist() == one["logprobs"]["token_logprobs"]
        assert other["logprobs"] is None
        assert one["packed_logprobs"] is None
    assert sum(len(choice["token_ids"]) for choice in packed) == len(rows)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": None}, "`logprobs` must be set"),
        ({"echo": True}, "not supported with `echo`"),
        ({"use_beam_search": True, "stream": False}, "not supported with `use_beam_search`"),
        ({"logprob_token_ids": [3]}, "not supported with `logprob_token_ids`"),
    ],
)
def test_what_can_not_be_packed_is_refused(changes: dict[str, Any], reason: str) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises((ValueError, VLLMValidationError), match=reason):
        request(packed=True, **changes)

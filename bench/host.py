"""How fast the host handles tokens: tokens per second of each stage between a generator's answer and a batch, one core.

    python -m bench.host [--rounds 3] [--front-end]

A group of 8 rollouts of 4,096 tokens, once plain and once with a recorded support of 19 tokens a position (top-k,
top-p). Prints one JSON line a stage, and for the actor and the trainer the whole path of the one thread that holds the
GIL. `tokens_per_s` is by the CPU time of this process (`time.process_time`), `tokens_per_s_wall` by the clock: on a
machine that does something else too only the first is a figure of the code. Each is the best of the rounds.
Generators send STREAM_INTERVAL tokens per event; the actor is also given events of other sizes. Sockets are not in it.
`--front-end` adds the stages of a generator's front end before that (front_end.py; it imports vLLM).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inflight.actor.sequence import Sequence
from inflight.actor.streaming import choices_of
from inflight.config import GateConfig
from inflight.generator.engine_args import STREAM_INTERVAL
from inflight.groups import defect
from inflight.messages import decode, encode
from inflight.messages.rollouts import GroupDone
from inflight.models import prepare
from inflight.rollout.gate import gate_group
from inflight.rollout.stream import Writer
from inflight.trainer.advantage import group_mean
from inflight.trainer.batch import Batch, collate
from inflight.types import Rollout, RolloutGroup, Turn

GROUP = 8
TOKENS = 4096
PROMPT = 200
VOCABULARY = 151_936
SUPPORT = 20
"""Log-probabilities asked for beside the drawn token's, where the support is recorded; 19 of them are possible."""
VERSION = 6
EVENTS = (1, 8, STREAM_INTERVAL, 128)
"""Tokens of an event."""


def answer(source: np.random.Generator, asked: int, interval: int = STREAM_INTERVAL) -> bytes:
    """The events of a completion's stream as the patched server writes them, `interval` tokens in each."""
    events = []
    for start in range(0, TOKENS, interval):
        end = start + interval
        choice = {
            "index": 0,
            "text": "abcd" * interval,
            "logprobs": None,
            "stop_reason": None,
            "finish_reason": "length" if end == TOKENS else None,
            "prompt_token_ids": None,
            "token_ids": None,
            "token_versions": [[start, 3 + start // 1500]],
            "prefill_versions": [[0, 0, 3]] if end == TOKENS else [],
            "packed_logprobs": base64.b64encode(field(source, interval, max(1, asked - 1))).decode(),
        }
        whole = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
        events.append(b"data: " + json.dumps(whole).encode() + b"\n\n")
    return b"".join(events) + b"data: [DONE]\n\n"


def field(source: np.random.Generator, tokens: int, each: int) -> bytes:
    """Packed log-probabilities of `tokens` tokens, `each` of them possible at every position."""
    ids = source.integers(0, VOCABULARY, (tokens, each), dtype=np.int32)
    logprobs = source.uniform(-5, 0, (tokens, each)).astype(np.float32)
    counts = np.full(tokens, each, np.int32)
    return b"".join((np.int32(tokens).tobytes(), counts.tobytes(), ids.tobytes(), logprobs.tobytes()))


class Socket:
    """What aiohttp gives of an answer, in pieces of its own size."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Pieces of up to 64 KiB."""
        for start in range(0, len(self._body), 1 << 16):
            yield self._body[start : start + (1 << 16)]


async def turn_of(body: bytes, asked: int) -> Turn:
    """The turn of a stream, as the actor reads it."""
    socket: Any = Socket(body)
    sequence = Sequence(PROMPT, TOKENS, asked)
    sequence.begin("g0")
    async for choice in choices_of(socket, "g0"):
        sequence.add(choice)
    return sequence.turn()


def turns_of(bodies: list[bytes], asked: int) -> list[Turn]:
    """The turns of a group."""
    turns: list[Turn] = []

    async def read() -> None:  # returns nothing: asyncio.run formats what it returns when it restores SIGINT
        turns.extend([await turn_of(body, asked) for body in bodies])

    asyncio.run(read())
    return turns


def group_of(turns: list[Turn]) -> RolloutGroup:
    """The turns as one scored group."""
    prompt: Any = list(range(PROMPT))
    rollouts = [
        Rollout(
            rollout_id=f"q7/{number}",
            group_id="q7",
            prompt_ids=prompt,
            turn=turn,
            reward=float(number % 2),
            generator="g0",
            started=1.0,
            finished=2.0,
            first_token_s=0.0,
        )
        for number, turn in enumerate(turns)
    ]
    return RolloutGroup(group_id="q7", prompt_key="k:7", rollouts=rollouts)


def batch_of(group: RolloutGroup) -> Batch:
    """The gated group as tensors."""
    gated = gate_group(group, VERSION, GateConfig())
    return collate([gated], advantage=group_mean, normalise="token", max_tokens=TOKENS)


def stages(asked: int, writer: Writer) -> dict[str, Callable[[], object]]:
    """What is timed, by name; each handles one group."""
    source = np.random.default_rng(0)
    bodies = [answer(source, asked) for _ in range(GROUP)]
    by_event = {size: [answer(source, asked, size) for _ in range(GROUP)] for size in EVENTS}
    group = group_of(turns_of(bodies, asked))
    frame = encode(GroupDone(group=group))
    received: Any = decode(frame)
    gated = gate_group(received.group, VERSION, GateConfig())
    sizes = {"http_bytes": len(bodies[0]) / TOKENS, "wire_bytes": len(frame) / GROUP / TOKENS}
    print(json.dumps({"asked": asked, **sizes}))

    def trainer() -> Batch:
        arrived: Any = decode(frame)
        assert defect(arrived.group, GROUP, VOCABULARY) is None
        writer.append(arrived.group)
        return batch_of(arrived.group)

    def reading(size: int) -> Callable[[], object]:
        return lambda: turns_of(by_event[size], asked)

    return {
        **{f"actor: read, events of {size}": reading(size) for size in EVENTS},
        "actor: encode": lambda: encode(GroupDone(group=group)),
        "trainer: decode": lambda: decode(frame),
        "trainer: check": lambda: defect(received.group, GROUP, VOCABULARY),
        "trainer: write": lambda: writer.append(received.group),
        "trainer: gate": lambda: gate_group(received.group, VERSION, GateConfig()),
        "trainer: collate": lambda: collate([gated], advantage=group_mean, normalise="token", max_tokens=TOKENS),
        "actor, whole": lambda: encode(GroupDone(group=group_of(turns_of(bodies, asked)))),
        "trainer, whole": trainer,
    }


def rates(work: Callable[[], object], rounds: int) -> dict[str, int]:
    """Tokens per second of CPU time and of the clock: the best of `rounds` calls after a first one."""
    work()
    cpu = []
    wall = []
    for _ in range(rounds):
        gc.collect()
        clock = time.perf_counter()
        started = time.process_time()
        work()
        cpu.append(time.process_time() - started)
        wall.append(time.perf_counter() - clock)
    tokens = GROUP * TOKENS
    return {"tokens_per_s": round(tokens / min(cpu)), "tokens_per_s_wall": round(tokens / min(wall))}


def front_end(rounds: int) -> None:
    """Log-probabilities as vLLM's JSON and as the packed field, with the tokenizer of SmolLM2."""
    from vllm.tokenizers import get_tokenizer

    from bench.front_end import measured

    tokenizer = get_tokenizer(str(prepare("smollm2")))
    for asked in (0, SUPPORT):
        for packed in (False, True):
            found = measured(tokenizer, asked, packed=packed, rounds=rounds)
            size = found.pop("http_bytes")
            print(json.dumps({"asked": asked, "packed": packed, "http_bytes": round(size, 1)}))
            for stage, rate in found.items():
                print(json.dumps({"asked": asked, "packed": packed, "stage": stage, "tokens_per_s": round(rate)}))


def main() -> None:
    """Both kinds of groups, stage by stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--front-end", action="store_true")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    torch.set_num_threads(1)
    if arguments.front_end:
        front_end(rounds)
    with tempfile.TemporaryDirectory() as folder:
        for asked in (0, SUPPORT):
            with Writer(Path(folder) / f"rollouts-{asked}.msgpack") as writer:
                for name, work in stages(asked, writer).items():
                    print(json.dumps({"asked": asked, "stage": name, **rates(work, rounds)}))


if __name__ == "__main__":
    main()

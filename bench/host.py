"""How fast the host handles tokens: tokens per second of each stage between a generator's answer and a batch, one core.

    python -m bench.host [--rounds 3]

A group of 8 rollouts of 4,096 tokens, once plain and once with a recorded support of 19 tokens a position (top-k,
top-p). CPU seconds of this process (`time.process_time`), the best of several rounds, so that other load matters less.
Prints one JSON line a stage, and for the actor and the trainer the whole path of the one thread that holds the GIL.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from inflight.completions import parse_turn
from inflight.config import GateConfig
from inflight.groups import defect
from inflight.messages import decode, encode
from inflight.messages.rollouts import GroupDone
from inflight.rollout.gate import gate_group
from inflight.rollout.stream import Writer
from inflight.trainer.advantage import group_mean
from inflight.trainer.batch import Batch, collate
from inflight.types import Rollout, RolloutGroup, Turn

GROUP, TOKENS, PROMPT, VOCABULARY = 8, 4096, 200, 151_936
SUPPORT = 20
"""Log-probabilities asked for beside the drawn token's, where the support is recorded; 19 of them are possible."""
VERSION = 6


def answer(source: random.Random, asked: int) -> bytes:
    """The JSON body of a completion as the patched server writes it."""
    ids = [source.randrange(VOCABULARY) for _ in range(TOKENS)]
    logprobs = [-3 * source.random() for _ in ids]
    top = []
    for token, logprob in zip(ids, logprobs, strict=True):
        given = {f"token_id:{token}": logprob}
        others = source.sample(range(VOCABULARY), asked)
        for number, other in enumerate(others):
            given[f"token_id:{other}"] = -5 * source.random() if number < asked - 2 else -9999.0
        top.append(given)
    return json.dumps(
        {
            "id": "cmpl-0",
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "text": "abcd" * TOKENS,
                    "finish_reason": "length",
                    "stop_reason": None,
                    "token_ids": ids,
                    "prompt_logprobs": None,
                    "prompt_token_ids": list(range(PROMPT)),
                    "token_versions": [[0, 3], [1500, 4], [3000, 5]],
                    "prefill_versions": [[0, 0, 3]],
                    "logprobs": {
                        "text_offset": [4 * at for at in range(TOKENS)],
                        "token_logprobs": logprobs,
                        "tokens": [f"token_id:{token}" for token in ids],
                        "top_logprobs": top,
                    },
                }
            ],
            "usage": {"prompt_tokens": PROMPT, "completion_tokens": TOKENS, "total_tokens": PROMPT + TOKENS},
        }
    ).encode()


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
    source = random.Random(0)
    bodies = [answer(source, asked) for _ in range(GROUP)]
    group = group_of([parse_turn(body, "g0", asked) for body in bodies])
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

    return {
        "actor: parse": lambda: [parse_turn(body, "g0", asked) for body in bodies],
        "actor: encode": lambda: encode(GroupDone(group=group)),
        "trainer: decode": lambda: decode(frame),
        "trainer: check": lambda: defect(received.group, GROUP, VOCABULARY),
        "trainer: write": lambda: writer.append(received.group),
        "trainer: gate": lambda: gate_group(received.group, VERSION, GateConfig()),
        "trainer: collate": lambda: collate([gated], advantage=group_mean, normalise="token", max_tokens=TOKENS),
        "actor, whole": lambda: encode(GroupDone(group=group_of([parse_turn(body, "g0", asked) for body in bodies]))),
        "trainer, whole": trainer,
    }


def best_s(work: Callable[[], object], rounds: int) -> float:
    """CPU seconds of the fastest of `rounds` calls after a first one."""
    work()
    found = []
    for _ in range(rounds):
        gc.collect()
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def main() -> None:
    """Both kinds of groups, stage by stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for asked in (0, SUPPORT):
            with Writer(Path(folder) / f"rollouts-{asked}.msgpack") as writer:
                for name, work in stages(asked, writer).items():
                    seconds = best_s(work, rounds)
                    print(json.dumps({"asked": asked, "stage": name, "tokens_per_s": round(GROUP * TOKENS / seconds)}))


if __name__ == "__main__":
    main()

"""What laying sequences end to end saves: forward and backward of SmolLM2 over ragged batches, padded and packed.

    python -m bench.packing [THREADS]

Prints a line for each kind of lengths and size of micro-batch: tokens of the sequences, tokens computed (padding
included), and seconds of a batch, the median of ROUNDS, padded and packed in turn.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from inflight.config import Sampling
from inflight.models import prepare
from inflight.trainer.batch import NO_VERSION, Batch
from inflight.trainer.packing import packed
from inflight.trainer.policy import Policy, load_policy
from inflight.trainer.split import rounds

SEQUENCES = 16
PROMPT = 24
LONGEST = 96
"""Tokens of the longest answer."""
ROUNDS = 3
VOCABULARY = 49152


def answers(kind: str, noise: torch.Generator) -> torch.Tensor:
    """[SEQUENCES] int64, tokens of each answer; one is the longest that may be."""
    share = {
        "alike": torch.ones(SEQUENCES),
        "even": torch.rand(SEQUENCES, generator=noise),
        "mostly short": torch.rand(SEQUENCES, generator=noise) ** 3,
    }[kind]
    share[0] = 1
    return (share * LONGEST).long().clamp(min=1)


def batch_of(lengths: torch.Tensor, noise: torch.Generator) -> Batch:
    """Random tokens; only what a score needs is filled in."""
    shape = (SEQUENCES, PROMPT + LONGEST)
    at = torch.arange(shape[1])
    drawn = (at >= PROMPT) & (at < PROMPT + lengths[:, None])
    nothing = torch.zeros(shape)
    return Batch(
        input_ids=torch.randint(0, VOCABULARY, shape, generator=noise),
        completion_mask=drawn,
        trained_mask=drawn,
        behaviour_logprobs=nothing,
        versions=torch.full(shape, NO_VERSION),
        lags=torch.full(shape, NO_VERSION),
        advantages=nothing,
        scales=torch.ones(SEQUENCES),
    )


def seconds(policy: Policy, batch: Batch, micro_batch: int, packing: bool, device: torch.device) -> float:
    """Of one forward and backward over all micro-batches."""
    began = time.perf_counter()
    for (part,) in rounds(batch, micro_batch, 1, mixed=packing):
        policy.score(part.to(device), Sampling(), packing=packing).logprobs.sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    policy.drop_gradients()
    return time.perf_counter() - began


def computed(batch: Batch, micro_batch: int, packing: bool) -> int:
    """Tokens that the model is given, padding included."""
    parts = [part for (part,) in rounds(batch, micro_batch, 1, mixed=packing)]
    return sum((packed(each.input_ids, each.lengths()) if packing else each).input_ids.numel() for each in parts)


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = load_policy(prepare("smollm2"), bfloat16=True, device=device, packing=True)
    noise = torch.Generator().manual_seed(0)
    for kind in ("alike", "even", "mostly short"):
        batch = batch_of(answers(kind, noise), noise)
        for micro_batch in (SEQUENCES, SEQUENCES // 4):
            ways = (False, True)
            for packing in ways if device.type == "cuda" else ():  # kernels are chosen when they are first used
                seconds(policy, batch, micro_batch, packing, device)
            took = [[seconds(policy, batch, micro_batch, packing, device) for packing in ways] for _ in range(ROUNDS)]
            padded_s, packed_s = (round(statistics.median(each), 3) for each in zip(*took, strict=True))
            given = [computed(batch, micro_batch, packing) for packing in ways]
            line = {"lengths": kind, "micro_batch": micro_batch, "tokens": int(batch.lengths().sum())}
            found = {"padded": given[0], "packed": given[1], "padded_s": padded_s, "packed_s": packed_s}
            print(json.dumps(line | found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)

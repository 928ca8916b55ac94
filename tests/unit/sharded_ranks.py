"""Two ranks in one process group, each a process of its own, that load a model and compute (not a test file).

    python sharded_ranks.py RANK STORE OUT DIRECTORY…

Writes OUT/RANK.pt: for each directory and way what `measured` finds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rollout_samples import make_config
from test_trainer_packing import sequences

from inflight.config import ObjectiveConfig, TrainerConfig
from inflight.sampling import Sampling
from inflight.trainer.checkpoint.snapshot import model_tensors
from inflight.trainer.policy import Policy, load_policy, reference
from inflight.trainer.sharding import form_group

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"bfloat16": True, "packing": True, "gradient_checkpointing": True},
}


def measured(policy: Policy, at_once: int, packing: bool, size: int, rank: int) -> dict[str, Any]:
    """Weights, buffers, scores of this rank's own batch and the gradients of the mean over ranks, all whole."""
    batch = sequences((9, 2, 6, 1), kept=False) if rank == 0 else sequences((3, 8, 1), kept=False)
    scores = policy.score(batch, Sampling(temperature=0.7), packing=packing, logits_at_once=at_once)
    scores.logprobs.square().sum().backward()
    policy.collect_gradients()
    gradients = {
        name: (each.grad.full_tensor() if size > 1 else each.grad) for name, each in policy.master.named_parameters()
    }
    return {
        "weights": dict(model_tensors(policy.master)),
        "buffers": {name: each.clone() for name, each in policy.master.named_buffers()},
        "logprobs": scores.logprobs.detach(),
        "gradients": gradients,
        "local": sum(each.to_local().numel() if size > 1 else each.numel() for each in policy.master.parameters()),
    }


def main(rank: int, store: str, out: Path, directories: list[Path]) -> None:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    form_group(dist.FileStore(store, 2), rank, 2, cpu, 150.0)
    found = {}
    for directory in directories:
        for way, settings in WAYS.items():
            policy = load_policy(directory, device=cpu, sharded=True, **({"bfloat16": False} | settings))
            found[directory.name, way] = measured(policy, 3 * 17, settings.get("packing", False), 2, rank)
    config = make_config(out)
    settings = TrainerConfig(processes=2, autocast=False, objective=ObjectiveConfig(kl=0.1))
    object.__setattr__(config, "trainer", settings)
    start = reference(config, directories[0], cpu)
    assert start is not None
    with torch.no_grad():
        found["reference"] = start.score(sequences((9, 2, 6, 1), kept=False), Sampling()).logprobs
    start.reshard()
    found["reference local"] = sum(each.to_local().numel() for each in start.master.parameters())
    torch.save(found, out / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), [Path(each) for each in sys.argv[4:]])

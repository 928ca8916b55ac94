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

from inflight.config import ObjectiveConfig, Sampling, TrainerConfig
from inflight.config.lora import LoraConfig
from inflight.peft_layers import matrices_of
from inflight.trainer.adapter import adapter_policy
from inflight.trainer.checkpoint.snapshot import model_tensors
from inflight.trainer.policy import Policy, load_policy, reference
from inflight.trainer.sharding import form_group
from inflight.weights.adapter import AdapterSource

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"bfloat16": True, "packing": True, "gradient_checkpointing": True},
}


ADAPTED: dict[str, dict[str, Any]] = {"plain": {}, "packed bfloat16": {"autocast": True, "packing": True}}


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


def adapted(directory: Path, out: Path, ranks: list[int], size: int, **settings: Any) -> dict[str, Any]:
    """Two steps of an adapter on the batches of `ranks`, one of `size` processes: what is published after each, the
    reference's scores, and how much of the base lies here."""
    lora = LoraConfig(rank=4, alpha=20.0)
    config = make_config(out)
    object.__setattr__(config, "trainer", TrainerConfig(processes=size, lora=lora, **({"autocast": False} | settings)))
    policy = adapter_policy(config, directory, torch.device("cpu"))
    optimizer = torch.optim.AdamW(policy.master.parameters(), lr=1e-2)
    found: dict[str, Any] = {"sent": []}
    for _ in range(2):
        for rank in ranks:
            batch = sequences((9, 2, 6, 1), kept=False) if rank == 0 else sequences((3, 8, 1), kept=False)
            scores = policy.score(batch, Sampling(temperature=0.7), packing=config.trainer.packing)
            with torch.no_grad():  # between forward and backward, as the KL reference
                start = policy.score_base(batch, Sampling(temperature=0.7), packing=config.trainer.packing)
            (size * (scores.logprobs - start.logprobs - 0.1).square().sum()).backward()
            policy.collect_gradients()
            found["base"] = start.logprobs
        optimizer.step()
        policy.drop_gradients()
        policy.refresh()
        sent = AdapterSource(policy.master, "float32", lora.scaling)
        found["sent"].append({name: tensor.clone() for name, tensor in sent})
    trained = {id(twin) for _, twin in matrices_of(policy.compute)}
    base = [each for each in policy.compute.parameters() if id(each) not in trained]
    found["held"] = sum(each.to_local().numel() if size > 1 else each.numel() for each in base)
    return found


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
    for way, trainer in ADAPTED.items():
        found["adapter", way] = adapted(directories[0], out, [rank], 2, **trainer)
    torch.save(found, out / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), [Path(each) for each in sys.argv[4:]])

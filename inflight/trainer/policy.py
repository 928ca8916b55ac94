"""The trained weights in float32, and the modules that compute with them.

Forward and backward run on a bfloat16 copy, the twin, whose values are exactly those that the generators get. Gradients
are accumulated and the optimizer steps in float32 on the master weights; afterwards the twin is updated. Measured on
one core of a Xeon with AMX, SmolLM2, 32 sequences of 90 tokens, forward and backward: twin 7.4 s, autocast 9.3 s,
float32 28 s.

Sharded over several ranks there is no twin: FSDP2 gathers each block in bfloat16 while it computes, and reduces
gradients in float32, which is equivalent.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from inflight.config import RunConfig
from inflight.trainer.apart import require_apart
from inflight.trainer.loading import attention_for, load_model
from inflight.trainer.logprobs import Scores, score_tokens
from inflight.trainer.recompute import recompute_layers
from inflight.trainer.shards import to_shard


class Scorer(nn.Module):
    """`score_tokens` as a module, because FSDP2 gathers a module's parameters when its forward is called."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the fields of Scores as a tuple: FSDP2 looks for tensors in tuples, not in dataclasses."""
        scores = score_tokens(self.model, *inputs, **settings)
        return scores.logprobs, scores.entropy


class Policy:
    """Master weights and, for bfloat16, their twin. `compute` is the model that computes; without a twin, the
    master."""

    def __init__(self, master: PreTrainedModel, twin: PreTrainedModel | None = None) -> None:
        """Raises ValueError when the twin has other parameters than the master."""
        self.master = master
        self.compute = master if twin is None else twin
        self.scorer = Scorer(self.compute)
        ours = dict(master.named_parameters())
        theirs = dict(self.compute.named_parameters())
        if ours.keys() != theirs.keys():
            raise ValueError(f"the twin differs in {sorted(ours.keys() ^ theirs.keys())[:5]}")
        self._pairs = [] if twin is None else [(ours[name], theirs[name]) for name in ours]
        self.refresh()

    def score(self, *inputs: Any, **settings: Any) -> Scores:
        """`score_tokens` with the policy's model: takes all its other arguments."""
        return Scores(*self.scorer(*inputs, **settings))

    def reshard(self) -> None:
        """Must follow a forward pass without a backward pass: frees parameters that FSDP2 has gathered. Does nothing
        without sharding."""
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def collect_gradients(self) -> None:
        """Adds the twin's gradients after a backward pass to the master's, in float32, and frees them."""
        for master, twin in self._pairs:
            if twin.grad is None:
                continue
            if master.grad is None:
                master.grad = twin.grad.to(master.dtype)
            else:
                master.grad.add_(twin.grad)
            twin.grad = None

    def drop_gradients(self) -> None:
        """Clears all gradients."""
        self.master.zero_grad(set_to_none=True)
        self.compute.zero_grad(set_to_none=True)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the master's values to the twin; must follow every optimizer step."""
        for master, twin in self._pairs:
            twin.copy_(master)


def load_policy(
    directory: Path,
    *,
    bfloat16: bool,
    device: torch.device,
    sharded: bool = False,
    packing: bool = False,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
) -> Policy:
    """The model of a directory, whole or `sharded` over the ranks of the process group, checked for `packing` if set.

    Raises OSError or ValueError when it can't be loaded, changes its logits, can't recompute its layers for
    `gradient_checkpointing`, or does not support packed rows.
    """
    attention = attention_for(device, torch.bfloat16 if bfloat16 else torch.float32, packing=packing)
    if sharded:
        policy = _sharded(
            directory,
            torch.float32,
            device,
            bfloat16=bfloat16,
            trained=True,
            attention=attention,
            trust_remote_code=trust_remote_code,
        )
    else:
        load = functools.partial(load_model, directory, attention=attention, trust_remote_code=trust_remote_code)
        policy = Policy(load(torch.float32, device), load(torch.bfloat16, device) if bfloat16 else None)
    if gradient_checkpointing:
        recompute_layers(policy.compute)
    if packing:
        require_apart(policy.score, device, type(policy.compute).__name__)
        policy.reshard()
    return policy


def frozen_options(config: RunConfig, device: torch.device) -> tuple[torch.dtype, dict[str, Any]]:
    """The dtype of weights that are computed with and not trained, and the other arguments that load them."""
    dtype = torch.bfloat16 if config.trainer.autocast else torch.float32
    attention = attention_for(device, dtype, packing=config.trainer.packing)
    return dtype, {"attention": attention, "trust_remote_code": config.model.trust_remote_code}


def reference(config: RunConfig, directory: Path, device: torch.device) -> Policy | None:
    """The model that the run started from, if the objective measures a KL divergence from it; it is not trained, and
    sharded as the policy is."""
    objective = config.trainer.objective
    if not objective.kl or objective.kl_reference != "start" or config.trainer.adapter:  # an adapter's is its own base
        return None
    dtype, place = frozen_options(config, device)
    if config.trainer.processes > 1:
        return _sharded(directory, dtype, device, bfloat16=False, trained=False, **place)
    return Policy(load_model(directory, dtype, device, **place).requires_grad_(False))


def _sharded(
    directory: Path, dtype: torch.dtype, device: torch.device, *, bfloat16: bool, trained: bool, **place: Any
) -> Policy:
    """A model of which each rank holds a shard in `dtype`; with `bfloat16` it is gathered in that for computing."""
    from inflight.trainer.sharding import shard

    model, fill = to_shard(directory, dtype, **place)
    policy = Policy(model.requires_grad_(trained))
    shard(policy.scorer, model, fill, bfloat16=bfloat16, device=device)
    return policy

"""The policy that a run trains: all weights of the model, or an adapter."""

from __future__ import annotations

from pathlib import Path

import torch

from inflight.config import RunConfig
from inflight.trainer.adapter import adapter_policy
from inflight.trainer.checkpoint.io import load_master
from inflight.trainer.policy import Policy, load_policy


def policy_of(config: RunConfig, directory: Path, device: torch.device) -> Policy:
    """The policy of a run on this rank, from the model or the checkpoint in a directory. For an adapter's run it holds
    the base, and the adapter comes from the checkpoint.

    Raises OSError or ValueError as `load_policy` does, CheckpointError for a checkpoint without float32 weights.
    """
    settings = config.trainer
    if settings.adapter:
        return adapter_policy(config, directory, device)
    policy = load_policy(
        directory,
        bfloat16=settings.autocast,
        device=device,
        sharded=settings.processes > 1,
        packing=settings.packing,
        trust_remote_code=config.model.trust_remote_code,
        gradient_checkpointing=settings.gradient_checkpointing,
    )
    if config.checkpoint:
        load_master(directory, policy.master)
        policy.refresh()
    return policy

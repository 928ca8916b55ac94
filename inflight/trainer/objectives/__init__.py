"""Objectives by name: `trainer.objective.name` is one of these or `package.module:function` (docs/objectives.md)."""

from __future__ import annotations

_HERE = "inflight.trainer.objectives"

OBJECTIVES = {
    "reinforce": f"{_HERE}.reinforce:reinforce",
    "ppo": f"{_HERE}.ppo:ppo",
    "grpo": f"{_HERE}.ppo:grpo",
    "dr_grpo": f"{_HERE}.ppo:dr_grpo",
    "dapo": f"{_HERE}.ppo:dapo",
    "decoupled_ppo": f"{_HERE}.decoupled:decoupled_ppo",
    "tis": f"{_HERE}.truncated:tis",
    "tis_sequence": f"{_HERE}.truncated:tis_sequence",
    "masked_is": f"{_HERE}.masked:masked_is",
    "icepop": f"{_HERE}.masked:icepop",
    "sequence_mask": f"{_HERE}.masked:sequence_mask",
    "geometric_mask": f"{_HERE}.masked:geometric_mask",
    "cispo": f"{_HERE}.cispo:cispo",
    "topr": f"{_HERE}.topr:topr",
    "gspo": f"{_HERE}.gspo:gspo",
    "sapo": f"{_HERE}.sapo:sapo",
}

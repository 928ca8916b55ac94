"""Whether sequences that share a row are kept apart: tried once, where a run packs them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from inflight.config import Sampling
from inflight.trainer.batch import to_score
from inflight.trainer.logprobs import Scores


@torch.no_grad()
def require_apart(score: Callable[..., Scores], device: torch.device, model: str) -> None:
    """Raises ValueError for a model in which tokens of one sequence attend to another one in the same row.

    `score` is `score_tokens` of the model, where it computes. Of a sharded one all ranks call this.
    """
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 0, 0, 0], [4, 5, 6, 0, 0, 0]])
    others = ids.clone()
    others[:2, :3] = torch.tensor([[2, 4, 3], [3, 1, 5]])
    drawn = (ids > 0) & (torch.arange(6) > 0)
    ours, theirs = (
        score(to_score(each, drawn).to(device), Sampling(), packing=True).logprobs for each in (ids, others)
    )
    if torch.equal(ours[1], theirs[1]) or not torch.equal(ours[2], theirs[2]):
        raise ValueError(f"trainer.packing=true: {model} does not separate sequences in a row")

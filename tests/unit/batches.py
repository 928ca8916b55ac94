"""Made-up batches for the tests of the loss (not a test file)."""

from __future__ import annotations

import torch

from inflight.trainer.batch import Batch, scales


def make_batch(behaviour, advantages, *, trained=None, lags=None, normalise="token", max_tokens=8, **more) -> Batch:
    """Sequences of one prompt token and the given completions; what is no list of floats has their shape.

    `behaviour` [B, L]; `advantages` [B] or [B, L]; the first column is the prompt.
    """
    behaviour = torch.as_tensor(behaviour)
    completion = torch.ones_like(behaviour, dtype=torch.bool)
    completion[:, 0] = False
    mask = completion if trained is None else torch.as_tensor(trained)
    worth = torch.as_tensor(advantages, dtype=behaviour.dtype)
    worth = worth[:, None].expand_as(behaviour) if worth.ndim == 1 else worth
    return Batch(
        input_ids=torch.ones_like(behaviour, dtype=torch.int64),
        completion_mask=completion | mask,
        trained_mask=mask,
        behaviour_logprobs=behaviour,
        versions=torch.zeros_like(behaviour, dtype=torch.int64),
        lags=torch.zeros_like(behaviour, dtype=torch.int64) if lags is None else torch.as_tensor(lags),
        advantages=worth.masked_fill(~(completion | mask), 0),
        scales=scales(mask.sum(dim=1).tolist(), normalise, max_tokens).to(behaviour.dtype),
        **more,
    )

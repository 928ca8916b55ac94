"""Log-probabilities of sampled tokens under the trainer's weights, of the distribution that they were sampled from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from inflight.sampling import Evidence, Sampling, processed_logprobs
from inflight.trainer.batch import Batch

# Fields of a model's config by which its forward changes logits after the output layer, which is called directly here.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
_ENTROPY_ROWS = 256
"""Tokens whose entropy is computed at once: what bounds the memory it takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What a model says of sampled tokens: [B, L] float32 each, 0 where none was sampled."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    """Nats, of the distribution that the token was drawn from; without gradient unless it was asked for."""


def require_plain_logits(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose logits are more than its output layer over the last hidden state."""
    for name in _LOGIT_CHANGES:
        value = getattr(model.config, name, None)
        if value not in (None, 1, 1.0):
            raise ValueError(f"{type(model).__name__} changes its logits by {name}={value}, which is not supported yet")


def score_tokens(model: PreTrainedModel, batch: Batch, sampling: Sampling, *, entropy_gradient: bool = False) -> Scores:
    """At each token of the completion its log-probability given all before it, and the entropy of what it was drawn
    from: of the distribution that the generator drew from, with the model's weights in place of the generator's.

    `batch.completion_mask` [B, L] must be False in the first column. Logits are computed for the completion only: with
    a vocabulary of 49,152 the output layer is a fifth of SmolLM2's work.
    """
    drawn = batch.completion_mask
    hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state  # [B, L, H]
    predicts = drawn[:, 1:]  # position t predicts token t + 1
    logits = model.get_output_embeddings()(hidden[:, :-1][predicts])  # [N, V]
    evidence = _evidence(batch, sampling, logits.shape[-1])
    logprobs = processed_logprobs(logits, sampling, evidence)
    chosen = logprobs.gather(1, evidence.chosen[:, None])[:, 0]  # [N]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = torch.cat([_entropy(rows) for rows in logprobs.split(_ENTROPY_ROWS)])

    def spread(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(drawn.shape, device=values.device).masked_scatter(drawn, values)

    return Scores(spread(chosen), spread(entropy))


def _evidence(batch: Batch, sampling: Sampling, vocabulary: int) -> Evidence:
    drawn, ids = batch.completion_mask, batch.input_ids
    kept = None if batch.kept is None else batch.kept[drawn]
    if not sampling.penalises:
        return Evidence(ids[drawn], kept)
    once = torch.nn.functional.one_hot(ids, vocabulary)  # [B, L, V]
    prompt = ~drawn & (drawn.long().flip(1).cumsum(1).flip(1) > 0)  # before the last drawn token, and not drawn
    seen = (once * prompt[..., None]).any(dim=1)
    before = (once * drawn[..., None]).cumsum(dim=1) - once * drawn[..., None]
    return Evidence(ids[drawn], kept, seen[:, None].expand_as(once)[drawn], before[drawn])


def _entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """[N] of [N, V]; what is impossible adds nothing."""
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(dim=-1)

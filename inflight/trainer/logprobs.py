"""Log-probabilities of sampled tokens under the trainer's weights, at the temperature they were sampled with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

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


def score_tokens(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> Scores:
    """At each token of the completion its log-probability given all before it, and the entropy of what it was drawn
    from.

    `input_ids` [B, L] is padded on the right; `completion_mask` [B, L] must be False in the first column. Logits are
    divided by `temperature`, as in sampling, and are computed for the completion only: with a vocabulary of 49,152 the
    output layer is a fifth of SmolLM2's work.
    """
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state  # [B, L, H]
    predicts = completion_mask[:, 1:]  # position t predicts token t + 1
    logits = model.get_output_embeddings()(hidden[:, :-1][predicts]).float()  # [N, V]
    if temperature != 1:
        logits = logits / temperature  # two more passes over N x V, forward and back
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, input_ids[:, 1:][predicts][:, None])[:, 0]  # [N]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = torch.cat([_entropy(rows) for rows in logprobs.split(_ENTROPY_ROWS)])

    def spread(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(input_ids.shape, device=values.device).masked_scatter(completion_mask, values)

    return Scores(spread(chosen), spread(entropy))


def _entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """[N] of [N, V]; what is impossible adds nothing."""
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(dim=-1)

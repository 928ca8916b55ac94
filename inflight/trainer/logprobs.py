"""Log-probabilities of sampled tokens under the trainer's weights, at the temperature they were sampled with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

# Fields of a model's config by which its forward changes logits after the output layer, which is called directly here.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def require_plain_logits(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose logits are more than its output layer over the last hidden state."""
    for name in _LOGIT_CHANGES:
        value = getattr(model.config, name, None)
        if value not in (None, 1, 1.0):
            raise ValueError(f"{type(model).__name__} changes its logits by {name}={value}, which is not supported yet")


def token_logprobs(
    model: PreTrainedModel, input_ids: torch.Tensor, completion_mask: torch.Tensor, temperature: float
) -> torch.Tensor:
    """[B, L] float32: at a token of the completion its log-probability given all before it, 0 elsewhere.

    `input_ids` [B, L] is padded on the right; `completion_mask` [B, L] must be False in the first column. Logits are
    divided by `temperature`, as in sampling, and are computed for the completion only: with a vocabulary of 49,152 the
    output layer is a fifth of SmolLM2's work.
    """
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state  # [B, L, H]
    predicts = completion_mask[:, 1:]  # position t predicts token t + 1
    logits = model.get_output_embeddings()(hidden[:, :-1][predicts]).float()  # [N, V]
    if temperature != 1:
        logits = logits / temperature  # two more passes over N x V, forward and back
    chosen = -F.cross_entropy(logits, input_ids[:, 1:][predicts], reduction="none")  # [N]
    return torch.zeros(input_ids.shape, device=chosen.device).masked_scatter(completion_mask, chosen)

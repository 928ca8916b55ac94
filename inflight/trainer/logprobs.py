"""Log-probabilities of sampled tokens under the trainer's weights, for the distribution that they were sampled from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from inflight.config import Sampling
from inflight.trainer.batch import Batch
from inflight.trainer.draws import Draws
from inflight.trainer.head import LOGITS_AT_ONCE, Head
from inflight.trainer.packing import PackedRows, end_to_end, packed, padded
from inflight.trainer.varlen import VARLEN

# Fields of a model's config by which its forward changes logits after the output layer, which is called directly here.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A model's scores of sampled tokens: [B, L] float32 each, 0 elsewhere."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    """Nats, of the distribution that the token was sampled from; without a gradient unless requested."""


def require_plain_logits(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose logits are not simply its output layer over the last hidden state."""
    for name in _LOGIT_CHANGES:
        value = getattr(model.config, name, None)
        if value not in (None, 1, 1.0):
            raise ValueError(f"{type(model).__name__} changes its logits by {name}={value}, which is not supported yet")


def score_tokens(
    model: PreTrainedModel,
    batch: Batch,
    sampling: Sampling,
    *,
    entropy_gradient: bool = False,
    packing: bool = False,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Scores:
    """For each token of the completion, its log-probability given all tokens before and the entropy, both of the
    distribution that the generator sampled from, with the model's weights instead of the generator's.

    `batch.completion_mask` [B, L] must be False in the first column. With `packing` short sequences share a row.
    Logits are computed for the completion only: with a vocabulary of 49,152 the output layer is a fifth of SmolLM2's
    work. No more than `logits_at_once` of them exist at any time, forward and backward (trainer/head.py).
    """
    drawn = batch.completion_mask
    rows = _rows(model, batch) if packing else padded(batch.input_ids)
    hidden = model.base_model(
        input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False, **rows.attention
    ).last_hidden_state  # [R, W, H]
    draws = Draws(batch, sampling)
    predicting = rows.row[draws.sequence], rows.start[draws.sequence] + draws.at - 1  # at the token before
    chunk = max(1, logits_at_once // model.config.get_text_config().vocab_size)
    head = Head(model.get_output_embeddings(), draws, sampling, entropy_gradient, chunk)
    logprobs, entropy = head(hidden[predicting])

    def spread(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(drawn.shape, device=values.device, dtype=values.dtype).masked_scatter(drawn, values)

    return Scores(spread(logprobs), spread(entropy))


def _rows(model: PreTrainedModel, batch: Batch) -> PackedRows:
    """The batch's sequences packed, as the model's attention takes them."""
    lay = end_to_end if model.config._attn_implementation == VARLEN else packed
    return lay(batch.input_ids, batch.lengths())

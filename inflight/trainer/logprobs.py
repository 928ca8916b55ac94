"""Log-probabilities of sampled tokens under the trainer's weights, of the distribution that they were sampled from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from inflight.sampling import Recorded, Sampling, processed_logprobs
from inflight.trainer.batch import Batch
from inflight.trainer.packing import packed, padded

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
    model: PreTrainedModel, batch: Batch, sampling: Sampling, *, entropy_gradient: bool = False, packing: bool = False
) -> Scores:
    """At each token of the completion its log-probability given all before it, and the entropy of what it was drawn
    from: of the distribution that the generator drew from, with the model's weights in place of the generator's.

    `batch.completion_mask` [B, L] must be False in the first column. With `packing` short sequences share a row.
    Logits are computed for the completion only: with a vocabulary of 49,152 the output layer is a fifth of SmolLM2's
    work.
    """
    drawn = batch.completion_mask
    rows = packed(batch.input_ids, batch.lengths()) if packing else padded(batch.input_ids)
    hidden = model.base_model(
        input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False
    ).last_hidden_state  # [R, W, H]
    sequence, at = drawn.nonzero(as_tuple=True)
    predicting = rows.row[sequence], rows.start[sequence] + at - 1  # a token is predicted at the one before it
    logits = model.get_output_embeddings()(hidden[predicting])  # [N, V]
    evidence = _recorded(batch, sampling)
    logprobs = processed_logprobs(logits, sampling, evidence)
    chosen = logprobs.gather(1, evidence.chosen[:, None])[:, 0]  # [N]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = torch.cat([_entropy(rows) for rows in logprobs.split(_ENTROPY_ROWS)])

    def spread(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(drawn.shape, device=values.device).masked_scatter(drawn, values)

    return Scores(spread(chosen), spread(entropy))


def _recorded(batch: Batch, sampling: Sampling) -> Recorded:
    drawn, ids = batch.completion_mask, batch.input_ids
    kept = None if batch.kept is None else batch.kept[drawn]
    if not sampling.penalises:
        return Recorded(ids[drawn], kept)
    different, number = _different(ids)
    is_it = number[..., None] == torch.arange(different.shape[1], device=ids.device)  # [B, L, U]
    positions = torch.arange(ids.shape[1], device=ids.device)
    prompt = ~drawn & (positions < batch.lengths()[:, None])
    draws = is_it & drawn[..., None]
    before = draws.cumsum(dim=1, dtype=torch.int32) - draws.int()
    sequence = drawn.nonzero(as_tuple=True)[0]
    seen = (is_it & prompt[..., None]).any(dim=1)
    return Recorded(ids[drawn], kept, different[sequence], seen[sequence], before[drawn])


def _different(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The different tokens of each row of [B, L], [B, U] ascending and 0 beyond, and which of them each token is."""
    ascending, order = ids.sort(dim=1)
    another = ascending.diff(dim=1, prepend=ascending[:, :1]) != 0
    number = torch.zeros_like(ids).scatter(1, order, another.cumsum(dim=1))
    return ids.new_zeros(ids.shape[0], int(number.max()) + 1).scatter(1, number, ids), number


def _entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """[N] of [N, V]; what is impossible adds nothing."""
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(dim=-1)

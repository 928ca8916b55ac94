"""The output layer over many draws, without holding all their logits at once.

Logits and everything computed from them exist for one chunk of draws at a time, forward and backward: the backward pass
computes each chunk's logits again. Memory is bounded by the chunk, whatever the number of draws; the cost is a second
forward pass of the output layer (recomputation as in Chen et al. 2016, arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from inflight.config import Sampling
from inflight.sampling import processed_logprobs
from inflight.trainer.draws import Draws

LOGITS_AT_ONCE = 1 << 27
"""Logits of a chunk: 883 draws with a vocabulary of 151,936. In bfloat16, forward and backward take about 3 GiB for
them, and 4 GiB if sampling truncates the distribution (12 to 27 bytes per logit, and the gradient)."""
_ENTROPY_ROWS = 256
"""Number of draws whose entropy is computed at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Computes log-probabilities and entropies of draws from the hidden states that predict them."""

    layer: nn.Module
    """[n, H] to logits [n, V]."""
    draws: Draws
    sampling: Sampling
    entropy_gradient: bool
    chunk: int
    """Number of draws per chunk."""

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, H] to [N] log-probabilities and [N] entropies, float32 (float64 for hidden states in float64)."""
        parameters: dict[str, torch.Tensor] = dict(self.layer.named_parameters())
        if len(hidden) <= self.chunk:
            return self.score(hidden, parameters, slice(0, len(hidden)))
        return _Chunked.apply(self, hidden, *parameters.values())  # type: ignore[no-any-return, no-untyped-call]

    def chunks(self) -> Iterator[slice]:
        """The chunks of draws, in order."""
        for start in range(0, len(self.draws), self.chunk):
            yield slice(start, min(start + self.chunk, len(self.draws)))

    def score(
        self, hidden: torch.Tensor, parameters: dict[str, torch.Tensor], rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for some draws, with these `parameters` of the output layer; `hidden` [n, H] is theirs."""
        recorded = self.draws.recorded(rows)
        logits = functional_call(self.layer, parameters, (hidden,))
        logprobs = processed_logprobs(logits, self.sampling, recorded)
        chosen = logprobs.gather(1, recorded.chosen[:, None])[:, 0]
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            entropy = torch.cat([_entropy(part) for part in logprobs.split(_ENTROPY_ROWS)])
        return chosen, entropy


class _Chunked(torch.autograd.Function):
    """Processes chunk by chunk. Gradients of the output layer's parameters are summed in float32 or higher: in bfloat16
    a sum over many chunks would lose the small ones."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, head: Head, hidden: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.head = head
        ctx.save_for_backward(hidden, *parameters)
        named = dict(zip(dict(head.layer.named_parameters()), parameters, strict=True))
        found = [head.score(hidden[rows], named, rows) for rows in head.chunks()]
        chosen, entropy = (torch.cat(each) for each in zip(*found, strict=True))
        if not head.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(  # type: ignore[override]
        ctx: Any, by_chosen: torch.Tensor, by_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        head = ctx.head
        hidden, *parameters = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        leaves = [each.detach().requires_grad_(want) for each, want in zip(parameters, wanted, strict=True)]
        named = dict(zip(dict(head.layer.named_parameters()), leaves, strict=True))
        trained = [each for each in leaves if each.requires_grad]
        sums = [torch.zeros_like(each, dtype=_summed_in(each.dtype)) for each in trained]
        by_hidden = torch.empty_like(hidden)
        for rows in head.chunks():
            part = hidden[rows].detach().requires_grad_()
            with torch.enable_grad():
                chosen, entropy = head.score(part, named, rows)
            outputs = [chosen]
            weights = [by_chosen[rows]]
            if head.entropy_gradient:
                outputs = [chosen, entropy]
                weights = [by_chosen[rows], by_entropy[rows]]
            by_hidden[rows], *by_parameters = torch.autograd.grad(outputs, [part, *trained], weights)
            _add(sums, by_parameters)
        found = iter(sums)
        return None, by_hidden, *(next(found).to(each.dtype) if each.requires_grad else None for each in leaves)


def _add(sums: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    for total, part in zip(sums, parts, strict=True):
        total.add_(part)


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """[N] entropies of [N, V]; impossible tokens add nothing."""
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(dim=-1)

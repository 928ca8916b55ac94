"""Torch's variable-length attention by the interface of the kernel that TRL loads from the hub."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

_GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
BOUND = 2e-2
"""Of the largest difference, in bfloat16, of values of about 1."""


def flash_attn_varlen_func(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """`query` [tokens, heads, D], `key` and `value` [tokens of all paths, KV heads, D], to [tokens, heads, D].

    Causal: the last query of a segment sees its whole path. Raises ValueError for a window, which no model here has.
    """
    if not causal or window_size != (-1, -1):
        raise ValueError("only causal attention without a window is supported here")
    if query.device.type == "cpu":  # where the kernel does not exist
        return by_sdpa(query, key, value, cu_seqlens_q, cu_seqlens_k, softmax_scale).to(query.dtype)
    settings: dict[str, Any] = {"scale": softmax_scale, "window_size": (-1, 0)}
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and _GROUPS_HEADS:
        settings["enable_gqa"] = True
    elif groups > 1:
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
    lengths = (cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k))
    attend: Any = varlen_attn
    return attend(query.contiguous(), key.contiguous(), value.contiguous(), *lengths, **settings)


def by_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """The same by scaled-dot-product attention, a segment at a time, in float32."""
    groups = query.shape[1] // key.shape[1]
    found = []
    for place in range(len(cu_seqlens_q) - 1):
        own = query[cu_seqlens_q[place] : cu_seqlens_q[place + 1]].float().transpose(0, 1)
        path = slice(int(cu_seqlens_k[place]), int(cu_seqlens_k[place + 1]))
        keys, values = (each[path].float().repeat_interleave(groups, 1).transpose(0, 1) for each in (key, value))
        asked = own.shape[1]
        seen = keys.shape[1]
        mask = torch.ones(asked, seen, dtype=torch.bool, device=query.device).tril(seen - asked)
        seen_by = scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=softmax_scale)
        found.append(seen_by.transpose(0, 1))
    return torch.cat(found)


def check(device: str = "cuda") -> dict[str, float]:
    """The largest differences of values and gradients between both, on segments with longer paths than their own.

    Raises RuntimeError when one is above BOUND.
    """
    torch.manual_seed(0)
    own = [40, 7, 33, 128]
    paths = [40, 47, 73, 201]
    queries = torch.tensor([0, *torch.tensor(own).cumsum(0)], dtype=torch.int32, device=device)
    keys = torch.tensor([0, *torch.tensor(paths).cumsum(0)], dtype=torch.int32, device=device)
    shapes = ((sum(own), 9, 64), (sum(paths), 3, 64), (sum(paths), 3, 64))
    parts = [torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    weight = torch.randn(shapes[0], device=device)
    found = []
    query, key, value = parts
    for attend in (
        lambda: flash_attn_varlen_func(query, key, value, queries, keys, max(own), max(paths), causal=True),
        lambda: by_sdpa(query, key, value, queries, keys),
    ):
        output = attend()
        gradients = torch.autograd.grad((output.float() * weight).sum(), parts)
        found.append([output.detach().float(), *(each.float() for each in gradients)])
    names = ("output", "query", "key", "value")
    errors = {}
    for name, ours, theirs in zip(names, *found, strict=True):
        errors[name] = float((ours - theirs).abs().max() / theirs.abs().max())
    if max(errors.values()) > BOUND:
        raise RuntimeError(f"torch's variable-length attention differs from scaled-dot-product attention: {errors}")
    return errors

"""Attention over sequences that lie end to end in one row, by torch's variable-length kernel: no mask, no padding.

A mask for packed rows is rows x width x width, and keeps torch's fused kernels from being used. The kernel takes the
places where sequences begin instead. It exists for CUDA in bfloat16 and float16; elsewhere packed rows have a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv

VARLEN = "inflight_varlen"
"""transformers' name for it (`attn_implementation`)."""
MAX_HEAD = 256
"""The largest head that the kernel takes."""
_LAYERS = {"full_attention", "sliding_attention"}
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""What a model may ask of attention that the kernel does not do."""
_GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def fits(config: PretrainedConfig) -> bool:
    """Whether a model's attention is the kernel's: causal, over all tokens or a sliding window, with plain logits."""
    config = config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = not getattr(config, "attn_logit_softcapping", None) and not getattr(config, "attention_chunk_size", None)
    return plain and head <= MAX_HEAD and set(getattr(config, "layer_types", None) or ()) <= _LAYERS


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: `query` [R, heads, W, D], `key` and `value` [R, KV heads, W, D], to [R, W, heads, D].

    `cu_seq_lens_q` [B + 1] int32 says where the sequences begin in the R * W tokens, and the longest has
    `max_length_q`; without, each row is a sequence. Raises ValueError for attention that the kernel can't compute.
    """
    for name in _UNSUPPORTED:
        if more.get(name) is not None:
            raise ValueError(f"{type(module).__name__} needs {name}, which variable-length attention does not have")
    rows, heads, width, _ = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, (rows + 1) * width, width, device=query.device, dtype=torch.int32)
        max_length_q = width
    groups = heads // key.shape[1]
    if not _GROUPS_HEADS:
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)
    tokens = (each.transpose(1, 2).flatten(0, 1).contiguous() for each in (query, key, value))
    settings: dict[str, Any] = {"scale": scaling, "window_size": (sliding_window - 1 if sliding_window else -1, 0)}
    if _GROUPS_HEADS and groups > 1:
        settings["enable_gqa"] = True
    kernel: Callable[..., Any] = varlen_attn
    output = kernel(*tokens, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **settings)
    return output.unflatten(0, (rows, width)), None


AttentionInterface.register(VARLEN, attend)  # and no mask for it, so that transformers makes none

"""The chat template of a user's own: its file, and the arguments that any template may be given."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from inflight.config import ConfigError

NOT_OF_A_TEMPLATE = frozenset(
    {
        "add_generation_prompt",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""What transformers' `apply_chat_template` takes for itself: set for each chat, or of its tokenizer, which would cut a
prompt or fill it up."""


def text_of(path: str | Path) -> str:
    """The template in a file, without a byte order mark. Raises OSError, or ValueError for one without a text."""
    text = Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig")
    if not text.strip():
        raise ValueError("it is empty")
    return text


def require_arguments(names: Iterable[str]) -> None:
    """Raises ConfigError for what is no argument of a chat template."""
    for name in names:
        if name == "chat_template":
            instead = "name a file by task.options.chat_template"
            raise ConfigError(f"task.options.template.{name} is not allowed: {instead}")
        if name in NOT_OF_A_TEMPLATE:
            raise ConfigError(f"task.options.template.{name} is not allowed: it is no argument of a chat template")
